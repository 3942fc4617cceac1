//! Values that a config may have and no code honours yet. Each is refused before a run begins, and
//! `plan` says so; a line goes when its code has come.

use super::{Config, Dtype, Family, Norm, Objective, Offload, Positions, ReduceDtype, Timers};

/// The key, and whether a config asks for what is not there.
type Pending = (&'static str, fn(&Config) -> bool);

const NOT_YET: [Pending; 16] = [
    ("model.family other than \"gpt\"", |c| c.model.family != Family::Gpt),
    ("model.head_dim other than hidden / heads", |c| c.model.attention_width() != c.model.hidden),
    ("model.activation other than \"gelu-tanh\"", |c| c.model.activation() != Default::default()),
    ("model.norm = \"rmsnorm\"", |c| c.model.norm() != Norm::Layernorm),
    ("model.norm_eps other than 1e-5", |c| c.model.norm_eps() != 1e-5),
    ("model.positions other than \"learned\"", |c| c.model.positions() != Positions::Learned),
    ("model.bias = false", |c| !c.model.bias()),
    ("model.tie_embeddings = false", |c| !c.model.tie_embeddings()),
    ("model.dropout above 0", |c| c.model.dropout > 0.0),
    ("data.objective other than \"lm\"", |c| c.objective() != Objective::Lm),
    ("parallel.tp, pp or zero", |c| c.parallel.tp > 1 || c.parallel.pp > 1 || c.parallel.zero > 0),
    ("parallel.recompute", |c| c.parallel.recompute.mode != Default::default()),
    ("precision.dtype = \"fp16\"", |c| c.precision.dtype == Dtype::Fp16),
    ("precision.reduce_dtype = \"bf16\"", |c| c.precision.reduce_dtype != ReduceDtype::Fp32),
    ("optim.offload", |c| c.optim.offload != Offload::None),
    ("log.timers = \"trace\"", |c| c.log.timers == Timers::Trace),
];

impl Config {
    /// What the config asks for and this version cannot do.
    #[must_use]
    pub fn not_yet(&self) -> Vec<String> {
        let asked = NOT_YET.iter().filter(|(_, asks)| asks(self));
        asked.map(|(what, _)| format!("{what} is not there yet")).collect()
    }
}
