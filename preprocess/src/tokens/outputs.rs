//! The datasets that a run writes, and their names.

use std::sync::Arc;

use indexed::Dtype;
use serde_json::{Value, json};
use storage::{Key, Storage};

use crate::{Error, Objective, PreprocessOptions, Result, Tokenizer};

/// The datasets of a run, in one store.
#[derive(Debug)]
pub(crate) struct Outputs {
    pub(crate) store: Arc<dyn Storage>,
    pub(crate) plans: Vec<OutputPlan>,
}

/// One dataset of a run.
#[derive(Clone, Debug)]
pub(crate) struct OutputPlan {
    pub(crate) prefix: Key,
    /// The key of its texts.
    pub(crate) key: String,
    /// Its objective, as in the manifest.
    pub(crate) objective: &'static str,
    pub(crate) dtype: Dtype,
    /// Whether the document index is written; CPM-2's own writer leaves it empty.
    pub(crate) has_documents: bool,
}

impl Outputs {
    /// Names them as Megatron does, `PREFIX_KEY_document`, and CPM-2's as it does,
    /// `PREFIX_document_context`.
    pub(crate) fn plan(options: &PreprocessOptions, tokenizer: &dyn Tokenizer) -> Result<Outputs> {
        let (store, mut prefix) = storage::locate(&options.out_prefix)?;
        if let Some(shard) = options.shard {
            prefix = prefix.with_suffix(&shard.label())?;
        }
        let vocab_size = u64::from(tokenizer.vocab_size());
        let dtype = options.dtype.unwrap_or_else(|| Dtype::for_vocab(Some(vocab_size)));
        check_dtype(dtype, vocab_size)?;
        let mut plans = Vec::new();
        for key in &options.keys {
            let level = match &options.objective {
                Objective::Sentences(_) => "sentence",
                Objective::Documents | Objective::Spans(_) => "document",
            };
            // CPM-2 has one text, and so no key in the names.
            let cpm2 = matches!(options.objective, Objective::Spans(_)) && options.keys.len() == 1;
            let name = if cpm2 { format!("_{level}") } else { format!("_{key}_{level}") };
            let prefix = prefix.with_suffix(&name)?;
            let plan = |part: &str, objective, dtype, has_documents| {
                let prefix = prefix.with_suffix(part)?;
                Ok::<_, Error>(OutputPlan {
                    prefix,
                    key: key.clone(),
                    objective,
                    dtype,
                    has_documents,
                })
            };
            match &options.objective {
                Objective::Documents => plans.push(plan("", "document", dtype, true)?),
                Objective::Sentences(_) => plans.push(plan("", "sentence", dtype, true)?),
                Objective::Spans(spans) => {
                    let offsets = if spans.cpm_compat { Dtype::U16 } else { Dtype::I32 };
                    let ended = !spans.cpm_compat;
                    let ids = if spans.cpm_compat { Dtype::U16 } else { dtype };
                    plans.push(plan("_context", "context", ids, ended)?);
                    plans.push(plan("_target", "target", ids, ended)?);
                    plans.push(plan("_target_offset", "target_offset", offsets, ended)?);
                }
            }
        }
        Ok(Outputs { store, plans })
    }
}

impl OutputPlan {
    pub(crate) fn describe(&self) -> Value {
        json!({ "prefix": self.prefix.as_str(), "key": self.key, "dtype": self.dtype.code() })
    }
}

/// Refuses a type that cannot hold every id of the vocabulary.
fn check_dtype(dtype: Dtype, vocab_size: u64) -> Result<()> {
    match dtype {
        Dtype::U16 if vocab_size <= 1 << 16 => Ok(()),
        Dtype::I32 => Ok(()),
        _ => Err(Error::BadOption {
            name: "dtype",
            found: dtype.to_string(),
            expected: match dtype {
                Dtype::U16 => format!("int32 for a vocabulary of {vocab_size} tokens"),
                _ => "uint16 or int32".to_owned(),
            },
            hint: None,
        }),
    }
}
