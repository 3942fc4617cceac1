//! The kind of each value, and how each format writes it.
//!
//! The programs refuse a value that is not the number or the boolean that they expect, and so does
//! the import. The words for a boolean differ: `"no"` is false to the parser of transformers and to
//! PyYAML, a text to JSON, and true to Python.

use toml::Value;

use super::keys::KeyRule;
use super::{float, shown};

/// The notation of values in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Notation {
    /// Flags of argparse: a boolean flag has no value.
    Argparse,
    /// Flags of transformers' `HfArgumentParser`.
    Transformers,
    /// JSON that pydantic checks, as DeepSpeed's.
    Pydantic,
    /// JSON that Python uses unchecked.
    Json,
    /// YAML of version 1.1, as PyYAML reads it.
    Yaml,
    /// Literals of Python.
    Python,
}

/// The kind of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// An integer, written as one if the program requires it.
    Integer,
    /// A whole number, also as `1e3` in files.
    Count,
    Number,
    Flag,
    /// A number, a list, a text, or one of the words of a table.
    Any,
}

/// Facts that are neither texts nor lists.
const FACTS: [(Kind, &[&str]); 4] = [
    (Kind::Integer, &["ds_warmup", "ds_test_size"]),
    (
        Kind::Count,
        &[
            "seq_len",
            "positions_max",
            "micro",
            "micro_v1",
            "global",
            "local",
            "accumulation",
            "local_micro_batches",
            "steps",
            "samples",
            "tokens",
            "wall_minutes",
            "anneal_steps",
            "anneal_samples",
            "decay_steps",
            "decay_samples",
            "decay_tokens",
            "warmup_samples",
            "warmup_steps",
            "pp",
            "layers_per_virtual",
            "virtual_stages",
            "timeout_minutes",
            "timeout_seconds",
            "save_steps",
            "eval_steps",
            "scale_power",
            "print_steps",
            "ds_total",
            "token_types",
            "kv_heads",
            "dp",
            "sharding",
            "sharding_stage",
            "gpus",
            "nodes",
            "world",
        ],
    ),
    (
        Kind::Number,
        &[
            "peak",
            "peak_optimizer",
            "warmup_fraction",
            "hf_warmup",
            "beta1",
            "beta2",
            "loss_scale",
            "bucket_elements",
            "mlp_ratio",
            "dropout_embedding",
            "min_lr",
            "floor_fraction",
            "ds_min",
            "ds_max",
            "ds_min_ratio",
            "ds_cos_ratio",
            "ds_test_min",
            "ds_test_rate",
        ],
    ),
    (
        Kind::Flag,
        &[
            "amp",
            "exact_gelu",
            "fused_gelu",
            "in_samples",
            "only_weights",
            "no_optim",
            "reset_positions",
            "reset_mask",
            "swiglu",
        ],
    ),
];

/// Config keys that are numbers or booleans, by the end of their name.
const CONFIG_KEYS: [(Kind, &[&str]); 3] = [
    (
        Kind::Count,
        &[
            "layers",
            "decoder_layers",
            "hidden",
            "heads",
            "head_dim",
            "ffn",
            "vocab",
            "dec_len",
            "relative_buckets",
            "relative_max",
            "token_types",
            "seed",
            "tp",
            "zero",
            "iters",
            "steps",
            "every",
            "last",
            "bucket_mib",
            "hysteresis",
            "window",
            "pad",
            "bos",
            "eos",
            "mask_ngram_max",
        ],
    ),
    (
        Kind::Number,
        &[
            "norm_eps",
            "rope_theta",
            "dropout",
            "attention_dropout",
            "std",
            "floor",
            "start",
            "eps",
            "weight_decay",
            "clip",
            "init",
            "min",
            "mask_prob",
            "short_seq_prob",
            "peak",
        ],
    ),
    (Kind::Flag, &["tie_embeddings", "sentence_order", "bias", "scaled_output"]),
];

impl Kind {
    /// The kind of the value of a row.
    pub(super) fn of(rule: KeyRule) -> Kind {
        let find = |table: &[(Kind, &[&str])], name: &str| {
            table.iter().find(|(_, names)| names.contains(&name)).map_or(Kind::Any, |row| row.0)
        };
        match rule {
            KeyRule::As { name, .. } => find(&FACTS, name),
            KeyRule::To { target, words: "" } => {
                find(&CONFIG_KEYS, target.rsplit('.').next().unwrap_or(target))
            }
            KeyRule::On { .. } => Kind::Flag,
            _ => Kind::Any,
        }
    }

    /// The value as this kind, or what was expected.
    pub(super) fn read(self, value: &Value, notation: Notation) -> Result<Value, &'static str> {
        match self {
            Kind::Any => Ok(value.clone()),
            Kind::Flag => boolean(value, notation).map(Value::Boolean),
            Kind::Number => match number(value, notation) {
                Some(number) if float(&number).is_some_and(f64::is_finite) => Ok(number),
                _ => Err("a number"),
            },
            Kind::Integer | Kind::Count => match number(value, notation) {
                Some(Value::Integer(count)) => Ok(Value::Integer(count)),
                Some(Value::Float(count)) if self.takes_float(notation) && is_whole(count) => {
                    Ok(Value::Integer(count as i64)) // fits: below 2^53.
                }
                _ => Err("an integer"),
            },
        }
    }

    /// `int("1e3")` is an error in argparse; numbers in files are used unchanged.
    fn takes_float(self, notation: Notation) -> bool {
        let is_flag = matches!(notation, Notation::Argparse | Notation::Transformers);
        self == Kind::Count && !is_flag
    }
}

fn is_whole(number: f64) -> bool {
    number.fract() == 0.0 && number.abs() < 9_007_199_254_740_992.0
}

/// `int` and `float` of Python accept a leading sign.
fn number(value: &Value, notation: Notation) -> Option<Value> {
    let is_flag = matches!(notation, Notation::Argparse | Notation::Transformers);
    match value {
        Value::Integer(_) | Value::Float(_) => Some(value.clone()),
        Value::String(text) if is_flag => {
            let digits = text.strip_prefix('+').filter(|rest| !rest.starts_with(['+', '-']))?;
            let digits = digits.replace('_', "");
            let whole = digits.parse().map(Value::Integer).ok();
            whole.or_else(|| digits.parse().map(Value::Float).ok())
        }
        _ => None,
    }
}

/// The value as a boolean of its program.
pub(super) fn boolean(value: &Value, notation: Notation) -> Result<bool, &'static str> {
    let words = |on: &[&str], off: &[&str], expected| {
        let text = shown(value).to_lowercase();
        let is_on = on.contains(&text.as_str());
        if is_on || off.contains(&text.as_str()) { Ok(is_on) } else { Err(expected) }
    };
    match (value, notation) {
        (Value::Boolean(truth), _) => Ok(*truth),
        (_, Notation::Argparse) => Err("a flag without a value"),
        (_, Notation::Transformers) => words(
            &["yes", "true", "t", "y", "1"],
            &["no", "false", "f", "n", "0"],
            "yes, true, t, y, 1, no, false, f, n or 0",
        ),
        (_, Notation::Pydantic) => words(
            &["1", "on", "t", "true", "y", "yes"],
            &["0", "off", "f", "false", "n", "no"],
            "true or false",
        ),
        (Value::Integer(number), Notation::Python | Notation::Yaml) => Ok(*number != 0),
        (_, Notation::Json) => Err("true or false"),
        (_, Notation::Yaml) => Err("true, false, yes, no, on or off"),
        (_, Notation::Python) => Err("True or False"),
    }
}

/// Whether a value disables an unsupported feature.
pub(super) fn is_off(value: &Value, notation: Notation) -> bool {
    match value {
        Value::Boolean(truth) => !truth,
        Value::Array(items) => items.is_empty(),
        Value::String(text) if text.is_empty() || text == "null" => true,
        Value::String(text) if notation == Notation::Transformers => {
            boolean(value, notation) == Ok(false) || text == "None"
        }
        // DeepSpeed's value for no device.
        Value::String(text) => notation == Notation::Pydantic && text == "none",
        other => float(other) == Some(0.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A name in two tables would have two kinds, and a name without a row would be misspelt.
    #[test]
    fn every_name_is_of_one_kind() {
        let facts: Vec<&str> = FACTS.iter().flat_map(|(_, names)| names.iter().copied()).collect();
        let config_keys: Vec<&str> =
            CONFIG_KEYS.iter().flat_map(|(_, names)| names.iter().copied()).collect();
        for names in [facts, config_keys] {
            let alone = |name: &str| names.iter().filter(|other| **other == name).count() == 1;
            assert!(names.iter().all(|name| alone(name)), "{names:?}");
        }
    }

    #[test]
    fn booleans_are_those_of_their_format() {
        let text = |word: &str| Value::String(word.to_owned());
        for (word, transformers, yaml) in [
            ("False", Ok(false), "true, false, yes, no, on or off"),
            ("NO", Ok(false), "true, false, yes, no, on or off"),
            ("T", Ok(true), "true, false, yes, no, on or off"),
        ] {
            assert_eq!(boolean(&text(word), Notation::Transformers), transformers, "{word}");
            assert_eq!(boolean(&text(word), Notation::Yaml), Err(yaml), "{word}");
        }
        assert!(boolean(&text("off"), Notation::Transformers).is_err());
        assert_eq!(boolean(&text("off"), Notation::Pydantic), Ok(false));
        assert!(boolean(&text("false"), Notation::Json).is_err());
        assert!(boolean(&Value::Integer(1), Notation::Argparse).is_err());
        assert_eq!(boolean(&Value::Integer(0), Notation::Transformers), Ok(false));
    }

    #[test]
    fn counts_are_those_of_their_format() {
        let (whole, part) = (Value::Float(1e3), Value::Float(200.5));
        assert!(Kind::Count.read(&whole, Notation::Argparse).is_err());
        assert_eq!(Kind::Count.read(&whole, Notation::Pydantic), Ok(Value::Integer(1000)));
        assert!(Kind::Integer.read(&whole, Notation::Pydantic).is_err());
        for notation in [Notation::Argparse, Notation::Pydantic, Notation::Yaml] {
            assert!(Kind::Count.read(&part, notation).is_err());
            assert!(Kind::Count.read(&Value::String("2k".to_owned()), notation).is_err());
            assert!(Kind::Count.read(&Value::Boolean(true), notation).is_err());
        }
        let signed = Value::String("+5".to_owned());
        assert_eq!(Kind::Count.read(&signed, Notation::Argparse), Ok(Value::Integer(5)));
    }
}
