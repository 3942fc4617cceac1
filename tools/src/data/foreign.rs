//! The output of `feedline inspect` for token files of other programs. They do not record their
//! counts, so the files are read completely.

use std::sync::Arc;

use anyhow::Result;
use indexed::{Census, Format, ReadOptions, TokenSource};
use serde::Serialize;
use storage::{ByteSize, Key, Storage};

use crate::ui::job::{CancellableJob, CountedBytes};
use crate::ui::output::FormatHints;
use crate::ui::terminal::{FactTable, thousands};

/// Token files of another program.
#[derive(Debug, Serialize)]
pub struct Foreign {
    /// Their prefix.
    pub prefix: String,
    /// Their format, as `feedline convert --from` names it.
    pub format: &'static str,
    /// The type of a token on disk, as numpy names it.
    pub dtype: String,
    /// Documents.
    pub documents: u64,
    /// Documents without a token.
    pub documents_empty: u64,
    /// Sequences: as many as documents, or more if they were split into sentences.
    pub sequences: u64,
    /// Tokens.
    pub tokens: u64,
    /// Tokens of the shortest and the longest sequence.
    pub sequence_tokens_min_max: Option<[u64; 2]>,
    /// The smallest and the largest id.
    pub ids_min_max: Option<[i64; 2]>,
    /// Bytes of tokens.
    pub token_bytes: u64,
    /// The size of the vocabulary that CPM-2's files were made with, by their markers.
    pub cpm2_vocab_size: Option<i64>,
    /// Documents that end with the token of `--eod`.
    pub documents_ended: Option<u64>,
    /// The first ids.
    pub first_ids: Vec<i64>,
}

/// Reads the files completely.
///
/// # Errors
/// If the files are damaged; the error names the place.
pub fn inspect(
    (store, prefix): (&Arc<dyn Storage>, &Key),
    format: Format,
    hints: &FormatHints,
    work: &CancellableJob,
) -> Result<Foreign> {
    let options = ReadOptions { dtype: hints.dtype, eod: hints.eod, ..ReadOptions::default() };
    let source = TokenSource::open(store, prefix, format, &options)?;
    work.begin("inspect", CountedBytes::Read, Some(source.token_bytes()));
    let report = Census::take(&source, hints.eod)?;
    Ok(Foreign {
        prefix: source.display().to_owned(),
        format: format.name(),
        dtype: source.dtype().to_string(),
        documents: report.documents,
        documents_empty: report.documents_empty,
        sequences: report.sequences,
        tokens: report.tokens,
        sequence_tokens_min_max: report.sequence_tokens_range.map(Into::into),
        ids_min_max: report.token_range.map(Into::into),
        token_bytes: source.token_bytes(),
        cpm2_vocab_size: source.cpm2_vocab_size()?,
        documents_ended: hints.eod.map(|_| report.documents_ended),
        first_ids: report.first_ids,
    })
}

impl Foreign {
    /// Text for the terminal.
    #[must_use]
    pub fn text(&self) -> String {
        let mut facts = FactTable::default();
        facts.add("format", self.format);
        facts.add("documents", thousands(self.documents));
        if self.documents_empty > 0 {
            facts.add("empty documents", thousands(self.documents_empty));
        }
        facts.add("sequences", thousands(self.sequences));
        facts.add("tokens", thousands(self.tokens));
        if let Some(range) = self.sequence_tokens_min_max {
            let [least, most] = range.map(thousands);
            facts.add("tokens per sequence", format!("{least} to {most}"));
        }
        if let Some([least, most]) = self.ids_min_max {
            facts.add("ids", format!("{least} to {most}"));
        }
        if let Some(vocab_size) = self.cpm2_vocab_size {
            facts.add("vocabulary", format!("{vocab_size}, from the markers"));
        }
        if let Some(ended) = self.documents_ended {
            facts.add("documents with --eod", thousands(ended));
        }
        facts.add("type on disk", &self.dtype);
        facts.add("size of tokens", ByteSize(self.token_bytes));
        if !self.first_ids.is_empty() {
            facts.add("first ids", format!("{:?}", self.first_ids));
        }
        format!("token files {}\n{}", self.prefix, facts.text())
    }
}
