//! Assembles config keys from several input keys.

use toml::{Table, Value};

use super::keys::KeyRule;
use super::read::Input;
use super::{Build, ConfigFormat, Imported, KeyReport, KeyStatus, float, get, is_same, set, shown};
use crate::config::{Config, ConfigError};

/// `torch.amp.GradScaler`. It has no smallest scale; the smallest here is 2^-24.
const TORCH: &[(&str, f64)] =
    &[("init", 65_536.0), ("window", 2000.0), ("hysteresis", 1.0), ("min", 1.0 / 16_777_216.0)];

/// Facts of programs that name keys without using them.
const BENIGN: [&str; 12] = [
    "vocab_file",
    "merge_file",
    "tokenizer_model",
    "token_types",
    "sharding_stage",
    "gpus",
    "nodes",
    "amp_dtype",
    "no_optim",
    "accumulation",
    "local_micro_batches",
    "fused_gelu",
];

/// Config keys without a default.
const REQUIRED: [&str; 10] = [
    "run.budget",
    "model.layers",
    "model.hidden",
    "model.heads",
    "model.vocab",
    "model.seq_len",
    "data.train",
    "batch.global",
    "batch.micro",
    "optim.lr.peak",
];

impl Build {
    pub(super) fn assemble(&mut self, source: ConfigFormat, input: &Input) {
        let program = input.program.as_deref();
        self.model(source, program.unwrap_or(""));
        if input.sections.contains(&"megatron") && source != ConfigFormat::Cpm {
            self.width_of_swiglu();
        }
        self.precision();
        self.loss_scale(source, &input.sections);
        self.optimizer(source);
        self.layout();
        self.batch();
        self.refuse_conflicting_keys();
        self.evaluation();
        self.schedule(source, program.is_some());
        self.saves(source, &input.sections);
        self.state();
        self.corpus(source);
        self.conditional_keys();
        self.unused();
        for name in ["file", "model_file"].iter().filter_map(|name| self.facts.get(name)) {
            let text = shown(name);
            let last = text.rsplit('/').next().unwrap_or(&text).to_owned();
            if !input.names.contains(&last) {
                self.notes.push(format!(
                    "{text} is not among the files (hint: add it to the command line)"
                ));
            }
        }
    }

    pub(super) fn fact(&self, name: &str) -> Option<&Value> {
        self.used.borrow_mut().insert(name.to_owned());
        self.facts.get(name)
    }

    pub(super) fn number(&self, name: &str) -> Option<f64> {
        self.fact(name).and_then(float)
    }

    /// A count; `None` for other values.
    pub(super) fn count(&self, name: &str) -> Option<i64> {
        self.number(name).filter(|n| n.fract() == 0.0 && n.abs() < 1e15).map(|n| n as i64)
    }

    pub(super) fn on(&self, name: &str) -> bool {
        self.fact(name).and_then(Value::as_bool) == Some(true)
    }

    pub(super) fn config_integer(&self, key: &str) -> Option<i64> {
        get(&self.config, key).and_then(Value::as_integer)
    }

    pub(super) fn set(&mut self, key: &str, value: impl Into<Value>) {
        set(&mut self.config, key, value.into());
    }

    pub(super) fn set_if_absent(&mut self, key: &str, value: impl Into<Value>) {
        if get(&self.config, key).is_none() {
            self.set(key, value);
        }
    }

    pub(super) fn one(&mut self, key: &str, unit: &str, value: impl Into<Value>) {
        self.set(key, Table::from_iter([(unit.to_owned(), value.into())]));
    }

    /// Adds a refusal that belongs to no single key.
    pub(super) fn refuse(&mut self, target: &str, text: String) {
        let (file, value) = ("combined".to_owned(), String::new());
        self.fates.push(KeyReport {
            file,
            key: target.to_owned(),
            value,
            fate: KeyStatus::Refused,
            text,
        });
    }

    fn model(&mut self, source: ConfigFormat, program: &str) {
        let family = [("gpt", "gpt"), ("t5", "t5"), ("enc_dec", "t5"), ("bert", "bert")];
        if let Some((_, family)) = family.iter().find(|(part, _)| program.contains(part)) {
            self.set_if_absent("model.family", *family);
        }
        if source == ConfigFormat::Hf && self.config_integer("model.dec_len").is_some() {
            self.set_if_absent("model.family", "t5");
        }
        let family = get(&self.config, "model.family").map_or("gpt".to_owned(), shown);
        let is_cpm2 = source == ConfigFormat::Cpm && program.contains("enc_dec");
        let of_megatron = !program.is_empty() && source != ConfigFormat::Hf && !is_cpm2;
        if source == ConfigFormat::Cpm && of_megatron {
            self.cpm1(&family);
        }
        if self.on("exact_gelu") {
            self.set_if_absent("model.activation", "gelu");
        }
        if of_megatron {
            self.encoders_of_megatron(source, &family);
        }
        if family == "llama" || self.facts.contains_key("kv_heads") {
            let (heads, shared) = (self.config_integer("model.heads"), self.count("kv_heads"));
            if shared.is_some_and(|shared| Some(shared) != heads) {
                self.refuse("model.heads", "grouped-query attention is not supported".to_owned());
            }
        }
        if get(&self.config, "model.activation").map(shown).as_deref() == Some("swiglu")
            && get(&self.config, "model.family").map(shown).as_deref() == Some("gpt")
            && source == ConfigFormat::Hf
        {
            self.set("model.norm", "rmsnorm");
            self.set("model.positions", "rope");
        }
        if let Some(len) = self.count("seq_len").or_else(|| self.count("positions_max")) {
            self.set("model.seq_len", len);
            if self.count("positions_max").is_some_and(|known| known < len) {
                self.refuse(
                    "model.seq_len",
                    format!("{len} tokens exceed the number of positions"),
                );
            }
        }
        if let Some(embedding) = self.number("dropout_embedding") {
            self.set_if_absent("model.dropout", embedding);
            let blocks = get(&self.config, "model.dropout").and_then(float);
            if blocks != Some(embedding) {
                let text =
                    format!("expected one value for embedding and blocks, found {embedding}");
                self.refuse("model.dropout", text);
            }
        }
        if let (Some(ratio), Some(hidden)) =
            (self.number("mlp_ratio"), self.config_integer("model.hidden"))
        {
            self.set_if_absent("model.ffn", (ratio * hidden as f64) as i64);
        }
        self.builder();
        if let ("bert", Some(types)) = (family.as_str(), self.count("token_types")) {
            self.set("model.token_types", types);
        }
        if source == ConfigFormat::Cpm && family == "t5" {
            self.set("data.objective", "encdec");
        }
        // The default tokenizer of its GPT programs.
        if of_megatron && source != ConfigFormat::Cpm && program.contains("pretrain_gpt") {
            self.tokenizer_of_gpt();
        }
        self.tokenizer();
    }

    /// The effect of the flags in its two programs.
    fn cpm1(&mut self, family: &str) {
        if !self.on("fused_gelu") {
            self.set_if_absent("model.activation", "gelu");
        }
        if family != "gpt" {
            // Without a flag it has no biases.
            self.set_if_absent("model.bias", false);
            return;
        }
        let Some(hidden) = self.config_integer("model.hidden") else { return };
        let width = self
            .config_integer("model.heads")
            .filter(|heads| *heads > 0)
            .map(|heads| hidden / heads);
        let made = [("ffn", "ff", Some(4 * hidden)), ("head_dim", "kv", width)];
        for (key, flag, value) in made {
            let (key, Some(value)) = (format!("model.{key}"), value) else { continue };
            if self.config_integer(&key).is_some_and(|given| given != value) {
                self.set(&key, value);
                self.notes.push(format!(
                    "the GPT-2 of CPM-1 ignores --{flag}-hidden-size: {key} is {value}"
                ));
            }
        }
        self.set("model.bias", true);
    }

    /// The T5 of Megatron is its GPT with an encoder. Its BERT has the norms of that GPT, except in
    /// the release of 2019, which has those of the original BERT.
    fn encoders_of_megatron(&mut self, source: ConfigFormat, family: &str) {
        if family == "bert" && !self.is_of_2019() {
            let text = "Megatron's BERT since 2020 has norms before its blocks; here they come \
                        after the blocks, as in the original BERT and in Megatron of 2019";
            self.refuse("model.family", text.to_owned());
        }
        if family != "t5" {
            return;
        }
        self.set_if_absent("model.positions", "learned");
        self.set_if_absent("model.norm", "layernorm");
        self.set_if_absent("model.activation", "gelu-tanh");
        self.set_if_absent("model.tie_embeddings", true);
        self.set_if_absent("model.bias", true);
        if get(&self.config, "model.positions").map(shown).as_deref() == Some("relative-bias") {
            self.notes.push(
                "with relative positions attention logits are not scaled here, and logits of a \
                 tied head are, as in the original T5; Megatron does the opposite"
                    .to_owned(),
            );
        }
        if source == ConfigFormat::Cpm {
            self.notes.push(
                "the decoder of CPM-1 has one norm for cross-attention and feed-forward; here each \
                 has its own norm"
                    .to_owned(),
            );
        }
    }

    /// The width of SwiGLU in Megatron makes its three matrices as large as the two of other
    /// activations.
    fn width_of_swiglu(&mut self) {
        let activation = get(&self.config, "model.activation").map(shown);
        if activation.as_deref() != Some("swiglu") || self.config_integer("model.ffn").is_some() {
            return;
        }
        if let Some(hidden) = self.config_integer("model.hidden") {
            let width = (4.0 * hidden as f64 * 2.0 / 3.0 / 64.0) as i64 * 64;
            self.set("model.ffn", width);
            self.default_of("ffn-hidden-size", &width.to_string(), "model.ffn");
        }
    }

    /// The defaults of the loss scalers of other systems.
    fn loss_scale(&mut self, source: ConfigFormat, sections: &[&str]) {
        if get(&self.config, "precision.dtype").map(shown).as_deref() != Some("fp16") {
            return;
        }
        let by_deepspeed = self.fates.iter().any(|key| key.key.starts_with("fp16."));
        let (source_key, defaults): (_, &[(&str, f64)]) = match source {
            ConfigFormat::Colossal if self.is_scaled_by_torch() => ("GradScaler", TORCH),
            ConfigFormat::Paddle | ConfigFormat::Colossal => ("", &[]),
            _ if by_deepspeed => ("DynamicLossScaler", &[("window_delay", 1.0)]),
            _ if self.training => ("GradScaler", TORCH),
            _ if sections.contains(&"megatron") => {
                ("initial-loss-scale", &[("init", 4_294_967_296.0)])
            }
            _ => ("", &[]),
        };
        let is_fixed = self.config_integer("precision.loss_scale.window") == Some(0);
        for (key, value) in defaults.iter().filter(|_| !is_fixed) {
            let target = format!("precision.loss_scale.{key}");
            if get(&self.config, &target).is_some() {
                continue;
            }
            let whole = value.fract() == 0.0;
            let value = if whole { Value::Integer(*value as i64) } else { Value::Float(*value) };
            self.default_of(source_key, &value.to_string(), &target);
            self.set(&target, value);
        }
        if source == ConfigFormat::Paddle {
            let text = "Paddle halves the loss scale after decr_every_n_nan_or_inf consecutive \
                        overflows and doubles it after incr_every_n_steps; both depend on its \
                        version (hint: check precision.loss_scale)";
            self.notes.push(text.to_owned());
        }
    }

    fn is_scaled_by_torch(&self) -> bool {
        let mut modes = self.fates.iter().filter(|key| key.key == "fp16.mode");
        modes.any(|key| key.value.ends_with("TORCH") || key.value.ends_with("APEX"))
    }

    /// The defaults of the optimizers of other systems.
    fn optimizer(&mut self, source: ConfigFormat) {
        if source == ConfigFormat::Paddle && get(&self.config, "optim.clip").is_none() {
            self.set("optim.clip", 0.0);
            self.default_of("Optimizer.grad_clip", "none", "optim.clip");
        }
        let is_torch = self.fates.iter().any(|key| {
            key.key == "optimizer.type"
                && ["Adam", "torch.optim.Adam"].contains(&key.value.as_str())
        });
        let decays = get(&self.config, "optim.weight_decay").and_then(float) > Some(0.0);
        if source == ConfigFormat::Colossal && is_torch && decays {
            let text = "torch.optim.Adam adds the weight decay to the gradient; AdamW decays the \
                        weights (hint: compare the loss, or set optim.weight_decay = 0)";
            self.notes.push(text.to_owned());
        }
    }

    fn precision(&mut self) {
        if self.on("amp") {
            let name = self.fact("amp_dtype").map_or("float16".to_owned(), shown);
            let dtype = if name == "bfloat16" { "bf16" } else { "fp16" };
            self.set_if_absent("precision.dtype", dtype);
        }
        let power = self.count("scale_power").filter(|power| (0..63).contains(power));
        match self.number("loss_scale") {
            Some(scale) if scale > 0.0 => {
                self.set("precision.loss_scale.init", scale);
                self.set("precision.loss_scale.window", 0);
            }
            _ => {
                if let Some(power) = power {
                    self.set("precision.loss_scale.init", 1_i64 << power);
                }
            }
        }
        let fp16 = get(&self.config, "precision.dtype").map(shown).as_deref() == Some("fp16");
        if let Some(Value::Table(precision)) = self.config.get_mut("precision")
            && !fp16
        {
            precision.remove("loss_scale");
        }
        if let (Some(a), Some(b)) = (self.number("beta1"), self.number("beta2")) {
            let other = get(&self.config, "optim.betas").and_then(Value::as_array).cloned();
            let betas = [a, b];
            let differs = other.is_some_and(|other| {
                other.iter().zip(betas).any(|(other, own)| float(other) != Some(own))
            });
            if differs && self.training {
                let text = format!("expected [{a}, {b}] as in the training arguments");
                self.refuse("optimizer.params.betas", text);
            }
            self.set("optim.betas", vec![a, b]);
        }
    }

    fn layout(&mut self) {
        let pp = self.count("pp").unwrap_or(1).max(1);
        self.set("parallel.pp", pp);
        let by_layers =
            self.count("layers_per_virtual").filter(|layers| *layers > 0).and_then(|n| {
                let stages = self.config_integer("model.layers")? / pp / n;
                Some(stages)
            });
        let stages = self.count("virtual_stages").or(by_layers).filter(|stages| *stages > 1);
        if let Some(stages) = stages {
            self.set("parallel.virtual_stages", stages);
            self.set("parallel.schedule", "interleaved");
        }
        if self.count("sharding").is_some_and(|degree| degree > 1) {
            self.set("parallel.zero", self.count("sharding_stage").unwrap_or(1));
        }
        let by_width = self.fact("bucket_elements").and_then(Value::as_str) == Some("auto");
        let width =
            self.config_integer("model.hidden").filter(|_| by_width).map(|n| (n * n) as f64);
        if let Some(elements) =
            width.or_else(|| self.number("bucket_elements")).filter(|elements| *elements > 0.0)
        {
            self.set("parallel.bucket_mib", (elements * 4.0 / 1048576.0).clamp(1.0, 4096.0) as i64);
        }
        let place = self.fact("offload").map(shown).unwrap_or_default();
        let folder = self.fact("nvme_path").map(shown);
        match (place.as_str(), folder) {
            ("nvme", Some(folder)) => self.set("optim.offload", format!("nvme:{folder}")),
            ("cpu", _) => self.set("optim.offload", "cpu"),
            ("nvme", None) => {
                self.refuse("optim.offload", "expected a folder with nvme".to_owned());
            }
            _ => {}
        }
        match self.fact("granularity").map(shown).as_deref() {
            Some("core_attn") => self.set("parallel.recompute.mode", "none"),
            None | Some("full" | "full_attn") => {}
            Some(other) => {
                self.refuse("parallel.recompute", format!("unknown granularity '{other}'"));
            }
        }
        if self.config_integer("parallel.tp").unwrap_or(1) == 1
            && get(&self.config, "parallel.sequence_parallel").is_some()
        {
            self.remove("parallel.sequence_parallel");
            let text = "off, because no matrix is divided (parallel.tp = 1)";
            self.correct_target("parallel.sequence_parallel", KeyStatus::Implied, text);
        }
        let seconds = self.count("timeout_minutes").map(|minutes| 60 * minutes);
        if let Some(seconds) = seconds.or_else(|| self.count("timeout_seconds")) {
            self.set("parallel.timeout", format!("{seconds}s"));
        }
    }

    /// Settings that two programs of a run give separately, and that two flags give together.
    fn refuse_conflicting_keys(&mut self) {
        if let Some(steps) = self.count("print_steps") {
            self.set_if_absent("log.every", steps);
            if self.config_integer("log.every") != Some(steps) {
                let reports = self.fates.iter_mut().filter(|key| key.key == "steps_per_print");
                for key in reports {
                    key.fate = KeyStatus::Implied;
                    "the log interval of the program is used".clone_into(&mut key.text);
                }
            }
        }
        match (self.on("reset_positions"), self.on("reset_mask")) {
            (true, true) => self.set("data.reset_at_document", true),
            (false, false) => {}
            _ => self.refuse(
                "data.reset_at_document",
                "expected both or neither of --reset-position-ids and --reset-attention-mask"
                    .to_owned(),
            ),
        }
    }

    /// Refuses keys that the complete config does not imply.
    fn conditional_keys(&mut self) {
        for (at, rule, value) in std::mem::take(&mut self.conditional) {
            let own = |target: &str| match get(&self.config, target) {
                // Its default.
                None if target == "parallel.tp" => Some(Value::Integer(1)),
                own => own.cloned(),
            };
            let text = match rule {
                KeyRule::Same { target, reason } => own(target)
                    .filter(|own| !is_same(own, &value))
                    .map(|own| format!("expected {}: {reason}", shown(&own))),
                KeyRule::When { target, value: None, reason } => {
                    own(target).is_none().then(|| format!("expected {target}: {reason}"))
                }
                KeyRule::When { target, value: Some(only), reason } => {
                    let is_it = own(target).is_some_and(|own| shown(&own) == only);
                    (!is_it).then(|| format!("expected {target} = {only}: {reason}"))
                }
                KeyRule::Unless { target, value: other, reason } => {
                    let is_it = own(target).is_some_and(|own| shown(&own) == other);
                    is_it.then(|| format!("with {target} = {other}: {reason}"))
                }
                _ => None,
            };
            if let Some(text) = text {
                (self.fates[at].fate, self.fates[at].text) = (KeyStatus::Refused, text);
            }
        }
    }

    /// A key that nothing uses is not reported as mapped.
    fn unused(&mut self) {
        let used = self.used.borrow().clone();
        let idle: Vec<_> = self.keys.keys().copied().filter(|name| !used.contains(*name)).collect();
        for name in idle {
            for at in self.keys.get(name).into_iter().flatten() {
                let key = &mut self.fates[*at];
                match key.fate {
                    KeyStatus::Mapped if !BENIGN.contains(&name) => key.fate = KeyStatus::Refused,
                    KeyStatus::Mapped | KeyStatus::Default => key.fate = KeyStatus::Implied,
                    _ => continue,
                }
                key.text = format!("{}: no effect with the other keys", key.text);
            }
        }
    }

    /// Corrects keys that were mapped to a config key that a later key removed.
    fn absent(&mut self) {
        for key in &mut self.fates {
            let is_key = key.text.contains('.') && !key.text.contains(' ');
            let is_mapped = matches!(key.fate, KeyStatus::Mapped | KeyStatus::Default);
            if is_mapped && is_key && get(&self.config, &key.text).is_none() {
                key.fate = KeyStatus::Implied;
                key.text = format!("{}: no effect with the other keys", key.text);
            }
        }
    }

    pub(super) fn finish(mut self) -> Imported {
        self.config.retain(|_, value| value.as_table().is_none_or(|table| !table.is_empty()));
        self.absent();
        let missing: Vec<_> =
            REQUIRED.into_iter().filter(|key| get(&self.config, key).is_none()).collect();
        self.check(&missing);
        self.hints(&missing);
        self.fates.sort_by_key(|key| key.fate);
        Imported { config: self.config, fates: self.fates, missing, notes: self.notes }
    }
}

impl Build {
    /// Reports what the checks of the config would refuse. A missing key gets a value that fits
    /// most configs; without such a value, and for the missing key itself, nothing is reported.
    fn check(&mut self, missing: &[&str]) {
        let of_model =
            |key: &&&str| ["layers", "hidden", "heads"].iter().any(|it| key.ends_with(it));
        if ![0, 3].contains(&missing.iter().filter(of_model).count()) {
            return;
        }
        let mut whole = self.config.clone();
        for key in missing {
            let value = match *key {
                "run.budget" => {
                    Value::Table(Table::from_iter([("steps".into(), 1_000_000.into())]))
                }
                "data.train" => "corpus".into(),
                "model.layers" | "model.heads" => 1024.into(),
                "model.hidden" => (1 << 17).into(),
                "optim.lr.peak" => 1000.0.into(),
                "batch.global" | "batch.micro" => 1.into(),
                _ => (1 << 16).into(),
            };
            set(&mut whole, key, value);
        }
        let text = toml::to_string(&whole).unwrap_or_default();
        let given = Config::from_toml("imported", &text);
        match given.and_then(|config| config.refuse_foreign().map(|()| config)) {
            Err(ConfigError::Key { key, .. }) if missing.iter().any(|it| key.starts_with(it)) => {}
            Err(error) => self.refuse("config", error.to_string()),
            Ok(config) => self.notes.extend(config.idle()),
        }
    }

    /// How to find the value of a missing key.
    fn hints(&mut self, missing: &[&str]) {
        let tokenizer = get(&self.config, "data.tokenizer").map(shown);
        if missing.contains(&"model.vocab") {
            let of = tokenizer.map_or_else(String::new, |name| format!(" ({name})"));
            let data = get(&self.config, "data.train").filter(|data| data.is_str()).map(shown);
            let data = data.unwrap_or_else(|| "DATASET".to_owned());
            self.notes.push(format!(
                "model.vocab is the number of tokens of the tokenizer{of}: `feedline inspect \
                 {data}` prints it"
            ));
        }
    }
}
