//! Checks that an import has all parameters of its architecture.
//!
//! A shard of a model, or a file with missing layers, has the names of an architecture too. The
//! program that loads the step would initialize missing parameters at random.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use serde_json::Value;

use super::family::Family;
use super::hf::config_of;
use super::import::Import;
use crate::{Error, Group, Result};

/// Missing names that are reported; the check stops at this number.
const MISSING_MAX: usize = 6;

/// Layers that all have the same parameters.
struct LayerStack {
    /// The prefix of a layer's number.
    prefix: &'static str,
    /// Keys of `config.json` for the number of layers; the first that exists is used.
    count_keys: &'static [&'static str],
    /// Parameters that every layer has.
    required: &'static [&'static str],
    /// A parameter that only the first layer has.
    first_only: Option<&'static str>,
}

const GPT2: LayerStack = LayerStack {
    prefix: "transformer.h.",
    count_keys: &["n_layer", "num_hidden_layers"],
    required: &[
        "ln_1.weight",
        "attn.c_attn.weight",
        "attn.c_proj.weight",
        "ln_2.weight",
        "mlp.c_fc.weight",
        "mlp.c_proj.weight",
    ],
    first_only: None,
};

const T5_ENCODER: LayerStack = LayerStack {
    prefix: "encoder.block.",
    count_keys: &["num_layers"],
    required: &[
        "layer.0.SelfAttention.q.weight",
        "layer.0.SelfAttention.k.weight",
        "layer.0.SelfAttention.v.weight",
        "layer.0.SelfAttention.o.weight",
        "layer.0.layer_norm.weight",
        "layer.1.DenseReluDense.wo.weight",
        "layer.1.layer_norm.weight",
    ],
    first_only: Some("layer.0.SelfAttention.relative_attention_bias.weight"),
};

const T5_DECODER: LayerStack = LayerStack {
    prefix: "decoder.block.",
    count_keys: &["num_decoder_layers", "num_layers"],
    required: &[
        "layer.0.SelfAttention.q.weight",
        "layer.0.SelfAttention.k.weight",
        "layer.0.SelfAttention.v.weight",
        "layer.0.SelfAttention.o.weight",
        "layer.0.layer_norm.weight",
        "layer.1.EncDecAttention.q.weight",
        "layer.1.EncDecAttention.k.weight",
        "layer.1.EncDecAttention.v.weight",
        "layer.1.EncDecAttention.o.weight",
        "layer.1.layer_norm.weight",
        "layer.2.DenseReluDense.wo.weight",
        "layer.2.layer_norm.weight",
    ],
    first_only: T5_ENCODER.first_only,
};

const BERT: LayerStack = LayerStack {
    prefix: "bert.encoder.layer.",
    count_keys: &["num_hidden_layers"],
    required: &[
        "attention.self.query.weight",
        "attention.self.key.weight",
        "attention.self.value.weight",
        "attention.output.dense.weight",
        "attention.output.LayerNorm.weight",
        "intermediate.dense.weight",
        "output.dense.weight",
        "output.LayerNorm.weight",
    ],
    first_only: None,
};

impl Import {
    /// Rejects an import of a known architecture with missing parameters: of a layer, of a whole
    /// layer according to `config.json`, or outside the layers. Parameters that rules dropped do
    /// not count as missing. Names are those after [`Import::normalize`].
    ///
    /// # Errors
    /// [`Error::Unfit`] with the first missing names.
    pub fn check_complete(&self, family: Family) -> Result<()> {
        let missing = MissingNames::of(self, family);
        if missing.is_empty() {
            return Ok(());
        }
        let more = if missing.len() < MISSING_MAX { "" } else { ", ..." };
        let shown = missing.iter().take(MISSING_MAX - 1);
        let shown: Vec<String> = shown.map(|name| format!("'{name:.80}'")).collect();
        Err(Error::Unfit {
            object: self.source.display().to_owned(),
            found: format!(
                "none named {}{more} (hint: --keep-names imports tensors unchanged)",
                shown.join(", ")
            ),
            expected: format!("all parameters of a {} model", family.name()),
        })
    }
}

/// The names in an import, and those that are missing.
struct MissingNames<'a> {
    there: HashSet<&'a str>,
    dropped: HashSet<&'a str>,
    prefix: &'static str,
    config: Value,
    missing: Vec<String>,
}

impl<'a> MissingNames<'a> {
    fn of(import: &'a Import, family: Family) -> Vec<String> {
        let weights = import.made.iter().filter(|made| made.group == Group::Model);
        let mut names = MissingNames {
            there: weights.map(|made| made.name.as_str()).collect(),
            dropped: import.dropped.iter().map(String::as_str).collect(),
            prefix: family.prefix().map_or("", |(prefix, _)| prefix),
            config: config_of(&import.source).unwrap_or_default(),
            missing: Vec::new(),
        };
        match family {
            Family::Gpt2 => names.gpt2(),
            Family::T5 => names.t5(),
            Family::Bert => names.bert(),
        }
        names.missing
    }

    fn gpt2(&mut self) {
        self.require("transformer.wte.weight");
        // Without a configuration, the model may have other position embeddings.
        if self.config["model_type"] == "gpt2" {
            self.require("transformer.wpe.weight");
        }
        self.stack(&GPT2);
        self.require("transformer.ln_f.weight");
        if self.there.contains("transformer.h.0.ln_1.bias") {
            self.require("transformer.ln_f.bias");
        }
        self.require_untied("lm_head.weight");
    }

    fn t5(&mut self) {
        self.require("shared.weight");
        self.stack(&T5_ENCODER);
        self.require("encoder.final_layer_norm.weight");
        let architecture = self.config["architectures"][0].as_str();
        if architecture.is_none_or(|name| !name.contains("EncoderModel")) {
            self.stack(&T5_DECODER);
            self.require("decoder.final_layer_norm.weight");
            self.require_untied("lm_head.weight");
        }
    }

    fn bert(&mut self) {
        for name in ["word_embeddings", "position_embeddings", "token_type_embeddings"] {
            self.require(&format!("bert.embeddings.{name}.weight"));
        }
        self.require("bert.embeddings.LayerNorm.weight");
        self.stack(&BERT);
        if self.there.iter().any(|name| name.starts_with("cls.predictions.")) {
            for name in ["bias", "transform.dense.weight", "transform.LayerNorm.weight"] {
                self.require(&format!("cls.predictions.{name}"));
            }
        }
    }

    fn is_missing(&self, name: &str) -> bool {
        let short = name.strip_prefix(self.prefix).unwrap_or(name);
        !self.there.contains(name) && !self.dropped.contains(name) && !self.dropped.contains(short)
    }

    fn require(&mut self, name: &str) {
        if self.missing.len() < MISSING_MAX && self.is_missing(name) {
            self.missing.push(name.to_owned());
        }
    }

    /// Requires a separate head, if the configuration unties it.
    fn require_untied(&mut self, name: &str) {
        if self.config["tie_word_embeddings"] == false {
            self.require(name);
        }
    }

    /// Requires in each layer the parameters of any layer.
    fn stack(&mut self, stack: &LayerStack) {
        let LayerStack { prefix, count_keys, required, first_only } = stack;
        let mut layers: BTreeMap<u64, BTreeSet<&str>> = BTreeMap::new();
        for name in &self.there {
            let Some((number, rest)) =
                name.strip_prefix(prefix).and_then(|rest| rest.split_once('.'))
            else {
                continue;
            };
            if let Ok(number) = number.parse() {
                layers.entry(number).or_default().insert(rest);
            }
        }
        let all: BTreeSet<&str> = layers.values().flatten().copied().collect();
        let all: BTreeSet<&str> = all.iter().chain(*required).copied().collect();
        let counted = count_keys.iter().find_map(|key| self.config[*key].as_u64());
        let last = layers.keys().next_back().map_or(0, |last| last.saturating_add(1));
        for number in 0..counted.unwrap_or(1).max(last) {
            for &rest in all.iter().filter(|&&rest| number == 0 || Some(rest) != *first_only) {
                self.require(&format!("{prefix}{number}.{rest}"));
            }
            if self.missing.len() >= MISSING_MAX {
                return;
            }
        }
    }
}
