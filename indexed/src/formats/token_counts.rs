//! Counts the content of token files.

use storage::Crc64;

use super::source::{Sink, TokenSource};
use crate::{Dtype, Error, Result};

/// A sink that counts in constant memory.
#[derive(Debug)]
pub struct Census {
    dtype: Dtype,
    eod: Option<i64>,
    sum: Crc64,
    report: CensusReport,
    /// Tokens of the current sequence.
    sequence_tokens: u64,
    /// Tokens of the current document, and the last of them.
    document_tokens: u64,
    document_last: Option<i64>,
    scratch: Vec<i64>,
}

/// What a [`Census`] counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CensusReport {
    /// Documents.
    pub documents: u64,
    /// Documents without a token.
    pub documents_empty: u64,
    /// Sequences.
    pub sequences: u64,
    /// Sequences without a token.
    pub sequences_empty: u64,
    /// Tokens of the shortest and the longest sequence.
    pub sequence_tokens_range: Option<(u64, u64)>,
    /// Tokens.
    pub tokens: u64,
    /// The smallest and the largest id, if there are tokens and they are integers.
    pub token_range: Option<(i64, i64)>,
    /// Tokens with the id that ends documents, at any position, if the id is known.
    pub eod_tokens: u64,
    /// Documents whose last token is that one.
    pub documents_ended: u64,
    /// CRC-64/NVME of the tokens in the type of the source.
    pub tokens_crc64: u64,
    /// The first ids.
    pub first_ids: Vec<i64>,
}

/// Number of first ids that are recorded: about a line of text.
const FIRST_IDS: usize = 24;

impl Census {
    /// An empty census. `eod` is the token that ends a document, if it is known.
    #[must_use]
    pub fn new(dtype: Dtype, eod: Option<u32>) -> Self {
        Census {
            dtype,
            eod: eod.map(i64::from),
            sum: Crc64::new(),
            report: CensusReport::default(),
            sequence_tokens: 0,
            document_tokens: 0,
            document_last: None,
            scratch: Vec::new(),
        }
    }

    /// Reads all of a source.
    ///
    /// # Errors
    /// As [`TokenSource::read_into`].
    pub fn take(source: &TokenSource, eod: Option<u32>) -> Result<CensusReport> {
        let mut census = Census::new(source.dtype(), eod);
        source.read_into(&mut census)?;
        Ok(census.report())
    }

    /// The counts.
    #[must_use]
    pub fn report(self) -> CensusReport {
        CensusReport { tokens_crc64: self.sum.value(), ..self.report }
    }
}

impl Sink for Census {
    fn tokens(&mut self, bytes: &[u8]) -> Result<()> {
        self.sum.update(bytes);
        let count = bytes.len() / self.dtype.item_bytes() as usize; // fits: at most 8
        self.sequence_tokens += count as u64;
        self.report.tokens += count as u64;
        self.document_tokens += count as u64;
        if !self.dtype.is_integer() || count == 0 {
            return Ok(());
        }
        self.scratch.resize(count, 0);
        self.dtype.decode_i64(bytes, &mut self.scratch);
        let (mut low, mut high) = self.report.token_range.unwrap_or((i64::MAX, i64::MIN));
        for &id in &self.scratch {
            (low, high) = (low.min(id), high.max(id));
        }
        self.report.token_range = Some((low, high));
        if let Some(eod) = self.eod {
            self.report.eod_tokens += self.scratch.iter().filter(|&&id| id == eod).count() as u64;
        }
        self.document_last = self.scratch.last().copied();
        let first = &mut self.report.first_ids;
        let room = FIRST_IDS - first.len();
        first.extend(self.scratch.iter().take(room));
        Ok(())
    }

    fn end_sequence(&mut self, _mode: i8) -> Result<()> {
        let len = std::mem::take(&mut self.sequence_tokens);
        self.report.sequences += 1;
        self.report.sequences_empty += u64::from(len == 0);
        let (low, high) = self.report.sequence_tokens_range.unwrap_or((len, len));
        self.report.sequence_tokens_range = Some((low.min(len), high.max(len)));
        Ok(())
    }

    fn end_document(&mut self) -> Result<()> {
        let last = self.document_last.take();
        self.report.documents += 1;
        self.report.documents_empty += u64::from(std::mem::take(&mut self.document_tokens) == 0);
        self.report.documents_ended += u64::from(last.is_some() && last == self.eod);
        Ok(())
    }
}

impl CensusReport {
    /// Checks that the ids are below the size of a vocabulary.
    ///
    /// # Errors
    /// [`Error::BadSetting`] that names the range.
    pub fn check_vocab(&self, vocab_size: u64) -> Result<()> {
        match self.token_range {
            Some((low, high)) if low < 0 || high.unsigned_abs() >= vocab_size => {
                let expected = format!("0 to {}", vocab_size.saturating_sub(1));
                Err(Error::BadSetting {
                    name: "token ids",
                    found: format!("{low} to {high}"),
                    expected,
                })
            }
            _ => Ok(()),
        }
    }
}
