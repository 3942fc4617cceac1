//! The tokenizer of a run as files that `transformers` opens.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use ckpt::convert::Family;
use preprocess::{ExportedTokenizer, ModelTokens, Tokenizer};
use recipe::config::{Config, SpecialConfig};
use serde_json::Value;

/// The tokenizer of a run, if it can be opened.
#[derive(Debug)]
pub(super) struct RunTokenizer<'a> {
    run: Option<&'a Config>,
    /// Kind and files.
    name: Option<&'a str>,
    /// Whether the command line names the tokenizer, which must then be exported.
    is_required: bool,
    tokenizer: Option<Arc<dyn Tokenizer>>,
    /// Warnings for the user.
    warnings: Vec<String>,
}

/// Name and contents of each file, and warnings for the user.
#[derive(Debug)]
pub(super) struct ExportedFiles {
    pub(super) files: Vec<(String, Vec<u8>)>,
    pub(super) warnings: Vec<String>,
}

impl<'a> RunTokenizer<'a> {
    /// Opens the tokenizer of the command line, else that of the run.
    ///
    /// # Errors
    /// If the tokenizer of the command line cannot be opened.
    pub(super) fn open(requested: Option<&'a str>, run: Option<&'a Config>) -> Result<Self> {
        let name = requested.or(run.map(|run| run.data.tokenizer.as_str()));
        let (is_required, mut warnings) = (requested.is_some(), Vec::new());
        let tokenizer = match name.map(feed::open_tokenizer) {
            Some(Err(error)) if is_required => return Err(error).context("cannot use --tokenizer"),
            Some(Err(error)) => {
                warnings.push(none_text(&error));
                None
            }
            opened => opened.and_then(Result::ok),
        };
        Ok(RunTokenizer { run, name, is_required, tokenizer, warnings })
    }

    /// The id that ends a document, from the config or else from its tokenizer.
    pub(super) fn document_end(&self) -> Option<u64> {
        let given = self.run.and_then(|run| run.data.special.eod);
        let is_known = |id: &u64| self.run.is_none_or(|run| *id < run.model.vocab);
        let named = || self.tokenizer.as_ref()?.eod().map(u64::from).filter(is_known);
        given.or_else(named)
    }

    /// The files for a model with this `config.json`, and warnings. There are no files without a
    /// tokenizer, or if `transformers` has no form for it; a warning then gives the reason.
    ///
    /// # Errors
    /// If `transformers` has no form for the tokenizer of the command line.
    pub(super) fn files(self, family: Family, config: &Value) -> Result<ExportedFiles> {
        let mut warnings = self.warnings.clone();
        let (Some(name), Some(tokenizer)) = (self.name, &self.tokenizer) else {
            return Ok(ExportedFiles { files: Vec::new(), warnings });
        };
        let rows = config["vocab_size"].as_u64().unwrap_or(u64::MAX);
        let size = u64::from(tokenizer.vocab_size());
        if size > rows {
            warnings.push(format!("{name} has {size} tokens, and the model has {rows}"));
        }
        let model = ModelTokens {
            special: self.special(family),
            tokens_max: self.run.map(|run| run.model.seq_len),
            takes_types: family == Family::Bert,
        };
        let spec = feed::tokenizer_spec(name);
        let files =
            match ExportedTokenizer::new(&spec, &model) {
                Ok(exported) => {
                    let texts = exported.differences;
                    warnings.extend(texts.map(|texts| {
                        format!("{name}: the ids of transformers may differ in {texts}")
                    }));
                    exported.files
                }
                Err(error) if self.is_required => return Err(error.into()),
                Err(error) => {
                    warnings.push(none_text(&error));
                    Vec::new()
                }
            };
        Ok(ExportedFiles { files, warnings })
    }

    /// Special tokens by their keys in `tokenizer_config.json`.
    fn special(&self, family: Family) -> Vec<(&'static str, u32)> {
        let none = SpecialConfig::default();
        let special = self.run.map_or(&none, |run| &run.data.special);
        let end = self.document_end();
        let [bos, eos] = match family {
            Family::T5 => [special.bos.filter(|id| Some(*id) != special.pad), special.eos.or(end)],
            // BERT has neither token: it has [CLS] and [SEP].
            Family::Bert => [None, None],
            _ => [end, end],
        };
        let ids = [
            ("bos_token", bos),
            ("eos_token", eos),
            ("pad_token", special.pad),
            ("cls_token", special.cls.filter(|_| family == Family::Bert)),
            ("sep_token", special.sep.filter(|_| family == Family::Bert)),
            ("mask_token", special.mask.filter(|_| family == Family::Bert)),
        ];
        let small = |(key, id): (_, Option<u64>)| Some((key, u32::try_from(id?).ok()?));
        ids.into_iter().filter_map(small).collect()
    }
}

fn none_text(error: &(dyn std::error::Error + 'static)) -> String {
    format!(
        "no tokenizer files are written: {} (another is named with --tokenizer KIND:FILE)",
        storage::one_line(error)
    )
}
