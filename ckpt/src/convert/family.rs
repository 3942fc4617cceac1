//! Architectures with known tensor names: GPT-2, T5 and BERT of `transformers`.
//!
//! Their checkpoints differ by program and year: with and without a prefix, with buffers, with a
//! second copy of a tied matrix. A step has each parameter once, under its name in the model with
//! its head, and an export adds a `config.json` derived from the shapes.

use serde_json::{Value, json};

use super::fill::{NewRows, RowFill};
use super::hf::config_of;
use super::import::Import;
use super::made::{DerivedTensor, unfit};
use super::rules::matched;
use crate::{Dtype, Group, Result};

/// An architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Family {
    /// `GPT2LMHeadModel`.
    Gpt2,
    /// `T5ForConditionalGeneration`, 1.0 and 1.1.
    T5,
    /// `BertForPreTraining`, or a part of it.
    Bert,
}

impl Family {
    /// Its name on command lines and in `model_type`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Family::Gpt2 => "gpt2",
            Family::T5 => "t5",
            Family::Bert => "bert",
        }
    }

    /// The architecture with these tensor names; `None` for any other.
    #[must_use]
    pub fn of(made: &[DerivedTensor]) -> Option<Self> {
        let has = |pattern: &str| made.iter().any(|made| matched(pattern, &made.name).is_some());
        if has("*h.*.attn.c_attn.weight") {
            Some(Family::Gpt2)
        } else if has("encoder.block.*.SelfAttention.q.weight") {
            Some(Family::T5)
        } else if has("*encoder.layer.*.attention.self.query.weight") {
            Some(Family::Bert)
        } else {
            None
        }
    }

    /// The prefix of names, and a name that shows whether it is present.
    pub(crate) fn prefix(self) -> Option<(&'static str, &'static [&'static str])> {
        match self {
            Family::Gpt2 => Some(("transformer.", &["wte.", "wpe.", "h.", "ln_f."])),
            Family::T5 => None,
            Family::Bert => Some(("bert.", &["embeddings.", "encoder.", "pooler."])),
        }
    }

    /// Buffers, which are not trained.
    fn buffers(self) -> &'static [&'static str] {
        match self {
            Family::Gpt2 => &["*.attn.bias", "*.attn.masked_bias"],
            Family::T5 => &[],
            Family::Bert => &["*embeddings.position_ids", "*embeddings.token_type_ids"],
        }
    }

    /// Copies of other parameters: the name of the copy and of the original, and whether it is a
    /// copy even if the configuration unties the head.
    fn copies(self) -> &'static [(&'static str, &'static str, bool)] {
        match self {
            Family::Gpt2 => &[("lm_head.weight", "transformer.wte.weight", false)],
            Family::T5 => &[
                ("encoder.embed_tokens.weight", "shared.weight", true),
                ("decoder.embed_tokens.weight", "shared.weight", true),
                ("lm_head.weight", "shared.weight", false),
            ],
            Family::Bert => &[
                ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight", false),
                ("cls.predictions.decoder.bias", "cls.predictions.bias", true),
            ],
        }
    }

    /// Keys of `config.json` that cannot be derived from shapes. [`Import::config_json`] sets them
    /// to the values of the published model if the source has no configuration.
    #[must_use]
    pub fn assumed_keys(self) -> &'static [&'static str] {
        match self {
            Family::Gpt2 => &[
                "activation_function",
                "layer_norm_epsilon",
                "embd_pdrop",
                "resid_pdrop",
                "attn_pdrop",
                "bos_token_id",
                "eos_token_id",
            ],
            Family::T5 => &[
                "feed_forward_proj",
                "layer_norm_epsilon",
                "relative_attention_max_distance",
                "dropout_rate",
                "decoder_start_token_id",
                "pad_token_id",
                "eos_token_id",
            ],
            Family::Bert => &[
                "hidden_act",
                "layer_norm_eps",
                "hidden_dropout_prob",
                "attention_probs_dropout_prob",
                "pad_token_id",
            ],
        }
    }

    /// Tensors with a row, or an element, per token of the vocabulary.
    fn words(self) -> &'static [&'static str] {
        match self {
            Family::Gpt2 => &["transformer.wte.weight", "lm_head.weight"],
            Family::T5 => &["shared.weight", "lm_head.weight"],
            Family::Bert => &[
                "bert.embeddings.word_embeddings.weight",
                "cls.predictions.bias",
                "cls.predictions.decoder.weight",
            ],
        }
    }
}

impl Import {
    /// The architecture with these tensor names, unless the configuration has another `model_type`.
    fn family(&self) -> Option<Family> {
        let family = Family::of(&self.made)?;
        let config = config_of(&self.source).unwrap_or_default();
        let is_other = config["model_type"].as_str().is_some_and(|name| name != family.name());
        (!is_other).then_some(family)
    }

    /// Renames the tensors of a known architecture to their names in a step: each parameter once,
    /// with its prefix, without buffers. Returns the architecture, or `None` with nothing changed.
    ///
    /// Whether a head is a copy of the embedding is read from the configuration; without one, their
    /// bytes are compared.
    ///
    /// # Errors
    /// Errors of reading the source.
    pub fn normalize(&mut self) -> Result<Option<Family>> {
        let Some(family) = self.family() else { return Ok(None) };
        for made in &mut self.made {
            if let Some((prefix, firsts)) = family.prefix()
                && firsts.iter().any(|first| made.name.starts_with(first))
            {
                made.name.insert_str(0, prefix);
            }
            if family == Family::Bert {
                // Names of TensorFlow.
                made.name = made
                    .name
                    .replace("LayerNorm.gamma", "LayerNorm.weight")
                    .replace("LayerNorm.beta", "LayerNorm.bias");
            }
        }
        self.keep(|made| !family.buffers().iter().any(|name| matched(name, &made.name).is_some()));
        let config = config_of(&self.source).unwrap_or_default();
        for &(copy, of, always) in family.copies() {
            let is_tied = config["tie_word_embeddings"].as_bool();
            self.drop_copy(copy, of, if always { Some(true) } else { is_tied })?;
        }
        Ok(Some(family))
    }

    /// Drops a copy, or renames it to the original if that is absent. If `is_copy` is `None`, the
    /// weights are compared; the result holds for their moments as well.
    fn drop_copy(&mut self, copy: &str, of: &str, is_copy: Option<bool>) -> Result<()> {
        let find = |made: &[DerivedTensor], group: Group, name: &str| {
            made.iter().position(|made| made.group == group && made.name == name)
        };
        let weights = [copy, of].map(|name| find(&self.made, Group::Model, name));
        let is_copy = match (is_copy, weights) {
            (Some(known), _) => known,
            (None, [Some(a), Some(b)]) => self.made[a].is_equal(&self.made[b], &self.source)?,
            _ => true,
        };
        for group in Group::ALL.into_iter().filter(|_| is_copy) {
            let Some(place) = find(&self.made, group, copy) else { continue };
            if find(&self.made, group, of).is_some() {
                self.dropped.push(self.made.remove(place).name);
            } else {
                of.clone_into(&mut self.made[place].name);
            }
        }
        Ok(())
    }

    /// Resizes the tensors with a row per token to `words` rows: removes rows at the end, or adds
    /// new ones. Moments of new rows are zero.
    ///
    /// # Errors
    /// [`Error::Unfit`](crate::Error::Unfit) if the architecture is not known; errors of reading
    /// the source.
    pub fn set_vocab(&mut self, words: u64, new: &NewRows) -> Result<()> {
        let Some(family) = self.family() else {
            let (found, expected) = ("other names", "tensor names of GPT-2, T5 or BERT");
            return Err(unfit(self.source.display(), found.to_owned(), expected));
        };
        for made in &mut self.made {
            if family.words().contains(&made.name.as_str()) && !made.shape.is_empty() {
                let grows = words > made.shape[0];
                let fill =
                    if grows { RowFill::new(new, &self.source, made)? } else { RowFill::Zeros };
                *made = made.with_rows(words, &fill);
            }
        }
        Ok(())
    }

    /// Casts every floating-point tensor of the weights.
    ///
    /// # Errors
    /// [`Error::Unfit`](crate::Error::Unfit) for a type that weights cannot have.
    pub fn set_dtype(&mut self, dtype: Dtype) -> Result<()> {
        if !crate::can_cast(Dtype::F32, dtype) {
            let expected = "F32, BF16, F16 or F64";
            return Err(unfit(self.source.display(), dtype.to_string(), expected));
        }
        for made in &mut self.made {
            if made.group == Group::Model && crate::can_cast(made.dtype, dtype) {
                made.dtype = dtype;
            }
        }
        Ok(())
    }

    /// A `config.json` for `transformers`: that of the source, with the current sizes, or one
    /// derived from the shapes. `heads` is for GPT-2 and BERT, whose shapes do not determine it.
    ///
    /// # Errors
    /// [`Error::Unfit`](crate::Error::Unfit) if a tensor or the number of heads is missing.
    pub fn config_json(&self, family: Family, heads: Option<u64>) -> Result<Value> {
        let heads = heads.or(self.heads);
        let facts = ShapeFacts { import: self, heads };
        let mut config = match (config_of(&self.source), family) {
            (Some(config), _) if config["model_type"] == family.name() => config,
            (_, Family::Gpt2) => facts.gpt2()?,
            (_, Family::T5) => facts.t5()?,
            (_, Family::Bert) => facts.bert()?,
        };
        let words = family.words()[0];
        let (words, dtype) = (facts.shape(words)?[0], facts.dtype(words));
        config["vocab_size"] = words.into();
        config["torch_dtype"] = dtype.into();
        Ok(config)
    }
}

/// Sizes derived from the shapes.
struct ShapeFacts<'a> {
    import: &'a Import,
    heads: Option<u64>,
}

impl ShapeFacts<'_> {
    fn find(&self, name: &str) -> Option<&DerivedTensor> {
        self.import.made.iter().find(|made| made.group == Group::Model && made.name == name)
    }

    fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// The shape of a tensor, of one axis at least.
    fn shape(&self, name: &str) -> Result<&[u64]> {
        let found = self.find(name).map(|made| made.shape.as_slice());
        found.filter(|shape| !shape.is_empty()).ok_or_else(|| {
            let expected = format!("'{name}' with at least one axis");
            unfit(self.import.source.display(), "none".to_owned(), &expected)
        })
    }

    fn columns(&self, name: &str) -> Result<u64> {
        let shape = self.shape(name)?;
        shape.get(1).copied().ok_or_else(|| unfit(name, format!("shape {shape:?}"), "a matrix"))
    }

    fn dtype(&self, name: &str) -> &'static str {
        match self.find(name).map(|made| made.dtype) {
            Some(Dtype::BF16) => "bfloat16",
            Some(Dtype::F16) => "float16",
            Some(Dtype::F64) => "float64",
            _ => "float32",
        }
    }

    /// The number of layers: how many names exist, with numbers from 0.
    fn layers(&self, name: impl Fn(u64) -> String) -> u64 {
        (0..).take_while(|&layer| self.has(&name(layer))).count() as u64
    }

    fn heads(&self, hidden: u64) -> Result<u64> {
        let heads = self.heads.filter(|&heads| heads > 0 && hidden.is_multiple_of(heads));
        heads.ok_or_else(|| {
            let found = self.heads.map_or("none".to_owned(), |heads| heads.to_string());
            let found = format!("{found} (hint: set --heads)");
            let expected = format!("a number of heads that divides the width {hidden}");
            unfit(self.import.source.display(), found, &expected)
        })
    }

    fn gpt2(&self) -> Result<Value> {
        let positions = self.shape("transformer.wpe.weight")?[0];
        let hidden = self.columns("transformer.wpe.weight")?;
        // GPT-2's own vocabulary has one special token, its last. In others, this id is no special
        // token.
        let is_own = self.shape("transformer.wte.weight")?[0] == 50_257;
        let end = is_own.then_some(50_256);
        Ok(json!({
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "activation_function": "gelu_new",
            "n_embd": hidden,
            "n_head": self.heads(hidden)?,
            "n_inner": self.columns("transformer.h.0.mlp.c_fc.weight")?,
            "n_layer": self.layers(|layer| format!("transformer.h.{layer}.ln_1.weight")),
            "n_positions": positions,
            "layer_norm_epsilon": 1e-5,
            "embd_pdrop": 0.1,
            "resid_pdrop": 0.1,
            "attn_pdrop": 0.1,
            "tie_word_embeddings": !self.has("lm_head.weight"),
            "bos_token_id": end,
            "eos_token_id": end,
        }))
    }

    fn t5(&self) -> Result<Value> {
        let attention = |name: &str| format!("encoder.block.0.layer.0.SelfAttention.{name}.weight");
        let bias = attention("relative_attention_bias");
        let (buckets, heads) = (self.shape(&bias)?[0], self.columns(&bias)?.max(1));
        let inner = self.shape(&attention("q"))?[0];
        let dense = |name: &str| format!("encoder.block.0.layer.1.DenseReluDense.{name}.weight");
        let is_gated = self.has(&dense("wi_0"));
        let layers = |stack: &str| {
            self.layers(|layer| format!("{stack}.block.{layer}.layer.0.SelfAttention.q.weight"))
        };
        Ok(json!({
            "architectures": ["T5ForConditionalGeneration"],
            "model_type": "t5",
            "d_model": self.columns("shared.weight")?,
            "d_kv": inner / heads,
            "d_ff": self.shape(&dense(if is_gated { "wi_0" } else { "wi" }))?[0],
            "num_heads": heads,
            "num_layers": layers("encoder"),
            "num_decoder_layers": layers("decoder"),
            "relative_attention_num_buckets": buckets,
            "relative_attention_max_distance": 128,
            "feed_forward_proj": if is_gated { "gated-gelu" } else { "relu" },
            "layer_norm_epsilon": 1e-6,
            "dropout_rate": 0.1,
            "tie_word_embeddings": !self.has("lm_head.weight"),
            "is_encoder_decoder": true,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 1,
        }))
    }

    fn bert(&self) -> Result<Value> {
        let words = "bert.embeddings.word_embeddings.weight";
        let hidden = self.columns(words)?;
        let architecture =
            match (self.has("cls.predictions.bias"), self.has("cls.seq_relationship.weight")) {
                (true, true) => "BertForPreTraining",
                (true, false) => "BertForMaskedLM",
                _ => "BertModel",
            };
        let layer = |layer| format!("bert.encoder.layer.{layer}.attention.self.query.weight");
        Ok(json!({
            "architectures": [architecture],
            "model_type": "bert",
            "hidden_size": hidden,
            "num_attention_heads": self.heads(hidden)?,
            "num_hidden_layers": self.layers(layer),
            "intermediate_size": self.shape("bert.encoder.layer.0.intermediate.dense.weight")?[0],
            "max_position_embeddings": self.shape("bert.embeddings.position_embeddings.weight")?[0],
            "type_vocab_size": self.shape("bert.embeddings.token_type_embeddings.weight")?[0],
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-12,
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
            "pad_token_id": 0,
            "tie_word_embeddings": !self.has("cls.predictions.decoder.weight"),
        }))
    }
}
