//! The arguments in a checkpoint, and whether it can be converted to a GPT-2.

use super::super::made::DerivedTensor;
use super::super::pickle::{Id, PickleNode};
use super::super::source::TensorSource;
use super::super::torch::TorchFile;
use super::unfit;
use crate::{Group, Result};

/// The model and the ranks as described by `args`; `None` where it has no entry.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MegatronArgs {
    pub(crate) heads: Option<u64>,
    /// Groups of query heads that share keys and values.
    groups: Option<u64>,
    layers: Option<u64>,
    pub(super) tensor_ranks: Option<u64>,
    pub(super) pipeline_ranks: Option<u64>,
    /// `checkpoint_version`, which defines the order of the rows of the fused matrix; 0 if absent.
    pub(super) version: u64,
    /// A switch that is not of GPT-2.
    other: Option<&'static str>,
}

/// Switches that change the meaning of the same tensors.
const OTHERS: [&str; 3] = ["swiglu", "apply_layernorm_1p", "squared_relu"];

/// A count, for messages.
pub(super) fn count_text(count: Option<u64>) -> String {
    count.map_or("an unknown number of".to_owned(), |count| count.to_string())
}

/// The parameters of each layer of a GPT-2.
const LAYER: [&str; 12] = [
    "ln_1.weight",
    "ln_1.bias",
    "attn.c_attn.weight",
    "attn.c_attn.bias",
    "attn.c_proj.weight",
    "attn.c_proj.bias",
    "ln_2.weight",
    "ln_2.bias",
    "mlp.c_fc.weight",
    "mlp.c_fc.bias",
    "mlp.c_proj.weight",
    "mlp.c_proj.bias",
];

impl MegatronArgs {
    /// From a file's `args` and `checkpoint_version`.
    pub(crate) fn of(file: &TorchFile) -> Self {
        let pickle = &file.pickle;
        let arg = |key: &str| pickle.path(pickle.root, &["args", key]);
        let size = |key: &str| arg(key).and_then(|id: Id| pickle.size(id));
        let is_on = |key: &str| arg(key).and_then(|id: Id| pickle.bool(id));
        // Without its switch, the number of groups is a default without effect.
        let groups = size("num_query_groups")
            .filter(|_| is_on("group_query_attention") != Some(false))
            .or_else(|| size("num_key_value_heads"));
        let version = pickle.get(pickle.root, "checkpoint_version");
        let version = match version.map(|id| pickle.node(id)) {
            Some(PickleNode::Float(value)) => *value as u64, // fits: 0.0 to 3.0, else saturates
            Some(PickleNode::Int(value)) => u64::try_from(*value).unwrap_or(0),
            _ => 0,
        };
        MegatronArgs {
            heads: size("num_attention_heads"),
            groups,
            layers: size("num_layers"),
            tensor_ranks: size("tensor_model_parallel_size")
                .or_else(|| size("model_parallel_size")),
            pipeline_ranks: size("pipeline_model_parallel_size"),
            version,
            other: OTHERS.into_iter().find(|key| is_on(key) == Some(true)),
        }
    }

    /// Rejects models whose tensors have the names of a GPT-2 with another meaning.
    pub(super) fn check(&self, source: &TensorSource) -> Result<()> {
        if let Some(other) = self.other {
            return Err(unfit(source, other.to_owned(), "the layers of GPT-2"));
        }
        if self.groups.is_some_and(|groups| Some(groups) != self.heads) {
            let [groups, heads] = [self.groups, self.heads].map(count_text);
            let found = format!("{groups} query groups for {heads} heads");
            return Err(unfit(source, found, "as many query groups as heads, as in GPT-2"));
        }
        Ok(())
    }

    /// Rejects a model with missing parameters, or with matrices whose shapes do not match, such as
    /// those of a gated MLP.
    pub(super) fn check_complete(
        &self,
        source: &TensorSource,
        made: &[DerivedTensor],
        layers: u64,
    ) -> Result<()> {
        let weights: std::collections::HashMap<&str, &[u64]> = made
            .iter()
            .filter(|made| made.group == Group::Model)
            .map(|made| (made.name.as_str(), made.shape.as_slice()))
            .collect();
        let shape = |name: &str| {
            let missing = || unfit(source, format!("no '{name}'"), "all parameters of GPT-2");
            weights.get(name).copied().ok_or_else(missing)
        };
        if layers == 0 || self.layers.is_some_and(|count| count != layers) {
            let expected = self.layers.map_or("at least 1".to_owned(), |layers| layers.to_string());
            return Err(unfit(source, layers.to_string(), &format!("{expected} layers")));
        }
        for name in ["wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias"] {
            shape(&format!("transformer.{name}"))?;
        }
        for layer in 0..layers {
            let shape = |name: &str| shape(&format!("transformer.h.{layer}.{name}"));
            for name in LAYER {
                shape(name)?;
            }
            let (up, down) = (shape("mlp.c_fc.weight")?, shape("mlp.c_proj.weight")?);
            let qkv = shape("attn.c_attn.weight")?;
            if up.last() != down.first()
                || qkv.first().map(|width| 3 * width) != qkv.last().copied()
            {
                let found = format!("layer {layer} with matrices {qkv:?}, {up:?} and {down:?}");
                let expected = "attention of three times the width and an MLP that is not gated";
                return Err(unfit(source, found, expected));
            }
        }
        Ok(())
    }
}
