//! The network of a run in the terms of `transformers`. A network that its architectures cannot
//! express is refused. Settings that tensor shapes do not determine are written into `config.json`.

use anyhow::{Context as _, Result, bail};
use ckpt::convert::{Family, Import};
use recipe::config::{Activation, Config, ModelConfig, Norm, Positions};
use serde_json::{Map, Value, json};

/// The config of the run that saved the step, if it was a run.
pub(super) fn run_config(import: &Import) -> Result<Option<Config>> {
    let blob = import.source.blobs().iter().find(|(name, _)| name == "config.toml");
    let Some((name, bytes)) = blob else { return Ok(None) };
    let name = format!("{}/{name}", import.source.display());
    let config = Config::from_toml(&name, &String::from_utf8_lossy(bytes))
        .with_context(|| format!("cannot export {}", import.source.display()))?;
    Ok(Some(config))
}

/// Refuses a network that the architecture cannot express, and names the first key that differs.
/// `dropout` replaces the two probabilities of a T5.
pub(super) fn check_expressible(
    model: &ModelConfig,
    family: Family,
    dropout: Option<f64>,
) -> Result<()> {
    let (norm, positions, bias) = match family {
        Family::T5 => (Norm::Rmsnorm, Positions::RelativeBias, false),
        _ => (Norm::Layernorm, Positions::Learned, true),
    };
    let refuse = |key: &str, expected: &str, found: String| -> Result<()> {
        bail!(
            "cannot export model.{key}: expected {expected}, which is all that '{}' of \
             transformers has, found {found}",
            family.name()
        )
    };
    if model.norm() != norm {
        return refuse("norm", &word(&norm), word(&model.norm()));
    }
    if model.positions() != positions {
        return refuse("positions", &word(&positions), word(&model.positions()));
    }
    if model.bias() != bias {
        return refuse("bias", &bias.to_string(), model.bias().to_string());
    }
    if activation(model.activation(), family).is_none() {
        let expected = "\"gelu\", \"gelu-tanh\" or \"relu\"";
        return refuse("activation", expected, word(&model.activation()));
    }
    if family != Family::T5 && model.attention_width() != model.hidden {
        let expected = format!("hidden / heads = {} / {}", model.hidden, model.heads);
        return refuse("head_dim", &expected, model.head_dim().to_string());
    }
    // In transformers, an untied output layer has its own bias, which the bias of the run cannot
    // become.
    if family == Family::Bert && !model.tie_embeddings() {
        return refuse("tie_embeddings", "true", "false".to_owned());
    }
    if family == Family::T5 && dropout.is_none() && model.attention_dropout() != model.dropout {
        let expected = format!("model.dropout = {}", model.dropout);
        let found = format!("{} (hint: set both with --dropout)", model.attention_dropout());
        return refuse("attention_dropout", &expected, found);
    }
    if family != Family::T5 && dropout.is_some() {
        bail!(
            "cannot use --dropout with '{}': expected a T5, which has one probability, found a \
             family with a key for each",
            family.name()
        );
    }
    Ok(())
}

/// A value of the config as text.
fn word(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

/// The name of an activation in `config.json`; `None` if the architecture lacks it.
fn activation(activation: Activation, family: Family) -> Option<&'static str> {
    Some(match (activation, family) {
        (Activation::Gelu, _) => "gelu",
        (Activation::GeluTanh, _) => "gelu_new",
        (Activation::Relu, _) => "relu",
        // `transformers` computes this gate with the tanh formula, despite its name.
        (Activation::GegluTanh, Family::T5) => "gated-gelu",
        (Activation::Swiglu, Family::T5) => "gated-silu",
        _ => return None,
    })
}

/// The keys of `config.json` that tensor shapes do not determine. `eod` is the id that ends a
/// document, and `dropout` replaces that of a T5. A missing value is written as `null`: for a
/// missing key, `transformers` takes the value of the published model.
pub(super) fn keys_of(
    config: &Config,
    family: Family,
    eod: Option<u64>,
    dropout: Option<f64>,
) -> Map<String, Value> {
    let (model, special) = (&config.model, &config.data.special);
    let activation = activation(model.activation(), family);
    let (eps, std) = (model.norm_eps(), model.init.std);
    let keys = match family {
        Family::T5 => json!({
            "feed_forward_proj": activation,
            "layer_norm_epsilon": eps,
            "dropout_rate": dropout.unwrap_or(model.dropout),
            "relative_attention_num_buckets": model.relative_buckets,
            "relative_attention_max_distance": model.relative_max,
            "decoder_start_token_id": special.bos,
            "pad_token_id": special.pad,
            "eos_token_id": special.eos.or(eod),
        }),
        Family::Bert => json!({
            "hidden_act": activation,
            "layer_norm_eps": eps,
            "hidden_dropout_prob": model.dropout,
            "attention_probs_dropout_prob": model.attention_dropout(),
            "initializer_range": std,
            "pad_token_id": special.pad,
        }),
        _ => json!({
            "activation_function": activation,
            "layer_norm_epsilon": eps,
            "embd_pdrop": model.dropout,
            "resid_pdrop": model.dropout,
            "attn_pdrop": model.attention_dropout(),
            "initializer_range": std,
            "bos_token_id": eod,
            "eos_token_id": eod,
            "pad_token_id": special.pad,
        }),
    };
    match keys {
        Value::Object(keys) => keys,
        _ => Map::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(model: &str) -> Config {
        let text = format!(
            "[run]\ndir = 'r'\nbudget = {{ steps = 1 }}\n[model]\nlayers = 1\nhidden = 8\n\
             heads = 2\nvocab = 10\nseq_len = 8\n{model}\n[data]\ntrain = 'c'\n\
             tokenizer = 'null:10'\n[batch]\nglobal = 1\nmicro = 1\n[optim.lr]\npeak = 1e-3\n"
        );
        Config::from_toml("config.toml", &text).unwrap_or_else(|error| panic!("{model}: {error}"))
    }

    /// A relu + RMSNorm network was exported as a GPT-2 with gelu and layer norm.
    #[test]
    fn inexpressible_networks_are_refused() {
        let check = |model: &str, family: Family, refusal: Option<&str>| {
            let found = check_expressible(&config(model).model, family, None);
            let found = found.map_err(|error| error.to_string());
            match (refusal, &found) {
                (None, Ok(())) => {}
                (Some(text), Err(found)) if found.contains(text) => {}
                _ => panic!("{model}: {found:?}"),
            }
        };
        check("", Family::Gpt2, None);
        check("activation = 'relu'\nnorm_eps = 1e-2\ndropout = 0.5", Family::Gpt2, None);
        check("norm = 'rmsnorm'\nactivation = 'relu'", Family::Gpt2, Some("model.norm"));
        check("positions = 'rope'", Family::Gpt2, Some("model.positions"));
        check("positions = 'none'", Family::Gpt2, Some("model.positions"));
        check("bias = false", Family::Gpt2, Some("model.bias"));
        check("activation = 'swiglu'", Family::Gpt2, Some("model.activation"));
        check("activation = 'geglu-tanh'", Family::Gpt2, Some("found \"geglu-tanh\""));
        check("head_dim = 2", Family::Gpt2, Some("model.head_dim"));
        let t5 = "family = 't5'\ndec_len = 4\n";
        check(t5, Family::T5, None);
        check(&format!("{t5}activation = 'swiglu'\nhead_dim = 2"), Family::T5, None);
        check(&format!("{t5}norm = 'layernorm'"), Family::T5, Some("model.norm"));
        check(&format!("{t5}positions = 'learned'"), Family::T5, Some("model.positions"));
        check(&format!("{t5}bias = true"), Family::T5, Some("model.bias"));
        let apart = format!("{t5}dropout = 0.1\nattention_dropout = 0.0");
        check(&apart, Family::T5, Some("model.attention_dropout"));
        assert!(check_expressible(&config(&apart).model, Family::T5, Some(0.1)).is_ok());
        assert!(check_expressible(&config("").model, Family::Gpt2, Some(0.1)).is_err());
        let bert = "family = 'bert'\n";
        check(bert, Family::Bert, None);
        check(&format!("{bert}norm = 'rmsnorm'"), Family::Bert, Some("model.norm"));
        check(&format!("{bert}bias = false"), Family::Bert, Some("model.bias"));
        check(&format!("{bert}head_dim = 2"), Family::Bert, Some("model.head_dim"));
        let untied = format!("{bert}tie_embeddings = false");
        check(&untied, Family::Bert, Some("model.tie_embeddings"));
    }

    #[test]
    fn keys_are_those_of_the_run() {
        let mut run = config("activation = 'relu'\nnorm_eps = 1e-2\nattention_dropout = 0.25");
        let keys = keys_of(&run, Family::Gpt2, Some(0), None);
        assert_eq!(keys["activation_function"], "relu");
        assert_eq!(keys["layer_norm_epsilon"], 1e-2);
        assert_eq!([&keys["attn_pdrop"], &keys["resid_pdrop"]], [&json!(0.25), &json!(0.0)]);
        assert_eq!([&keys["eos_token_id"], &keys["bos_token_id"]], [&json!(0), &json!(0)]);
        assert_eq!(keys_of(&run, Family::Gpt2, None, None)["eos_token_id"], Value::Null);

        run = config("family = 't5'\ndec_len = 4\nnorm_eps = 1e-3\nrelative_max = 64");
        run.data.special.bos = Some(7);
        run.data.special.eos = Some(6);
        run.data.special.pad = Some(5);
        let keys = keys_of(&run, Family::T5, None, None);
        assert_eq!(keys["feed_forward_proj"], "gated-gelu");
        assert_eq!(keys["layer_norm_epsilon"], 1e-3);
        assert_eq!(keys["relative_attention_max_distance"], 64);
        let ids = ["decoder_start_token_id", "eos_token_id", "pad_token_id"].map(|key| &keys[key]);
        assert_eq!(ids, [7, 6, 5].map(Value::from).each_ref());

        let keys = keys_of(&config("family = 'bert'\ndropout = 0.5"), Family::Bert, None, None);
        assert_eq!(
            (&keys["hidden_act"], &keys["hidden_dropout_prob"]),
            (&json!("gelu"), &json!(0.5))
        );
    }
}
