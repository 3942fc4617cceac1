//! Token files of any format, read from front to back as sequences and documents.

use std::ops::Range;
use std::sync::Arc;

use storage::{Object, RangeRead};

use super::Format;
use super::boundaries::{Boundaries, Boundary};
use crate::mmididx::idx::malformed;
use crate::{Dtype, FormatRule, Result};

/// Large enough for direct I/O, and a multiple of every token size.
const READ_BYTES: u64 = 4 << 20;

/// Consumes the documents of a [`TokenSource`], one after the other.
pub trait Sink {
    /// Takes more tokens of the current sequence: complete, little-endian, in the type of the
    /// source.
    ///
    /// # Errors
    /// An error of the sink; it stops the source.
    fn tokens(&mut self, bytes: &[u8]) -> Result<()>;

    /// Ends the current sequence. Its mode is 0 where the source has no modes.
    ///
    /// # Errors
    /// As [`Sink::tokens`].
    fn end_sequence(&mut self, mode: i8) -> Result<()>;

    /// Ends the current document, which may have no sequence.
    ///
    /// # Errors
    /// As [`Sink::tokens`].
    fn end_document(&mut self) -> Result<()>;
}

/// Token files of one of the [`Format`]s, opened and checked against the lengths of their files.
/// Their entries are checked as they are read.
#[derive(Debug)]
pub struct TokenSource {
    pub(super) format: Format,
    pub(super) display: String,
    pub(super) dtype: Dtype,
    /// All tokens, in order.
    pub(super) runs: Vec<TokenRun>,
    pub(super) marks: Boundaries,
    /// Whether each sequence has a mode.
    pub(super) has_modes: bool,
}

/// A range of tokens in a file.
#[derive(Clone, Debug)]
pub(super) struct TokenRun {
    pub object: Arc<dyn Object>,
    pub bytes: Range<u64>,
}

impl TokenSource {
    /// The format of its files.
    #[must_use]
    pub fn format(&self) -> Format {
        self.format
    }

    /// The type of its tokens.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Its name in messages.
    #[must_use]
    pub fn display(&self) -> &str {
        &self.display
    }

    /// Whether each sequence has a mode, as in multimodal sets.
    #[must_use]
    pub fn has_modes(&self) -> bool {
        self.has_modes
    }

    /// Bytes of the files that hold its tokens.
    #[must_use]
    pub fn token_bytes(&self) -> u64 {
        self.runs.iter().map(|run| run.bytes.end - run.bytes.start).sum()
    }

    /// How many tokens it has, if its files record that.
    #[must_use]
    pub fn token_count(&self) -> Option<u64> {
        match self.marks {
            Boundaries::Triple(_) | Boundaries::Bert(_) => None,
            _ => Some(self.token_bytes() / self.dtype.item_bytes()),
        }
    }

    /// The first marker of CPM-2's files, which is the size of the vocabulary that they were made
    /// with; `None` for all other formats.
    ///
    /// # Errors
    /// [`crate::Error::Storage`].
    pub fn cpm2_vocab_size(&self) -> Result<Option<i64>> {
        match &self.marks {
            Boundaries::Triple(triple) => triple.vocab_size(),
            _ => Ok(None),
        }
    }

    /// Writes all of it to a sink.
    ///
    /// # Errors
    /// [`crate::Error::Malformed`] where the files break their format or contradict each other; the
    /// sink then has everything before that point. [`crate::Error::Storage`]; errors of the sink.
    pub fn read_into(&self, sink: &mut dyn Sink) -> Result<()> {
        match &self.marks {
            Boundaries::Triple(triple) => triple.read_into(sink),
            Boundaries::Bert(records) => records.read_into(sink),
            Boundaries::After(id) => self.read_separated(*id, sink),
            _ => self.read_marked(sink),
        }
    }

    fn read_marked(&self, sink: &mut dyn Sink) -> Result<()> {
        let mut reader = Reader::new(&self.runs, self.dtype);
        let mut tokens = 0_u64;
        for mark in self.marks.iter()? {
            match mark? {
                Boundary::Document => sink.end_document()?,
                Boundary::Sequence { len, mode } => {
                    let mut remaining = len;
                    while remaining > 0 {
                        let Some(bytes) = reader.take(remaining)? else {
                            return Err(self.too_short(tokens + len));
                        };
                        sink.tokens(bytes)?;
                        remaining -= bytes.len() as u64 / self.dtype.item_bytes();
                    }
                    tokens = tokens.saturating_add(len);
                    sink.end_sequence(mode)?;
                }
            }
        }
        if reader.take(1)?.is_some() {
            return Err(self.too_long(tokens));
        }
        Ok(())
    }

    /// Every document ends after a token of this id; without one, all is one document.
    fn read_separated(&self, id: Option<u32>, sink: &mut dyn Sink) -> Result<()> {
        let item_bytes = self.dtype.item_bytes() as usize; // fits: at most 8
        let mut separator = Vec::new();
        if let Some(id) = id.filter(|&id| id <= self.dtype.token_max()) {
            self.dtype.encode(&[id], &mut separator);
        }
        let mut reader = Reader::new(&self.runs, self.dtype);
        let mut open = false;
        while let Some(mut rest) = reader.take(u64::MAX)? {
            while !rest.is_empty() {
                let mut items = rest.chunks_exact(item_bytes);
                let found = items.position(|item| item == separator);
                let end = found.map_or(rest.len(), |place| (place + 1) * item_bytes);
                sink.tokens(&rest[..end])?;
                rest = &rest[end..];
                open = found.is_none();
                if !open {
                    sink.end_sequence(0)?;
                    sink.end_document()?;
                }
            }
        }
        if open {
            sink.end_sequence(0)?;
            sink.end_document()?;
        }
        Ok(())
    }

    fn too_short(&self, tokens: u64) -> crate::Error {
        let (file, len) = self.token_file();
        let expected = format!("{} bytes for at least {tokens} tokens", tokens_bytes(self, tokens));
        malformed(&file, len as usize, FormatRule::BinTooShort, "end of tokens", expected)
    }

    fn too_long(&self, tokens: u64) -> crate::Error {
        let (file, len) = self.token_file();
        let expected = format!("{} bytes for {tokens} tokens", tokens_bytes(self, tokens));
        let found = format!("{len} bytes of tokens, which continue");
        malformed(
            &file,
            tokens_bytes(self, tokens) as usize,
            FormatRule::BinTooLong,
            found,
            expected,
        )
    }

    fn token_file(&self) -> (String, u64) {
        let name = self.runs.last().map_or(self.display.clone(), |run| run.object.display());
        (name, self.token_bytes())
    }
}

fn tokens_bytes(source: &TokenSource, tokens: u64) -> u64 {
    tokens.saturating_mul(source.dtype.item_bytes())
}

/// Tokens of several ranges, one after the other.
#[derive(Debug)]
pub(super) struct Reader<'a> {
    runs: std::slice::Iter<'a, TokenRun>,
    run: Option<TokenRun>,
    item_bytes: u64,
    buf: Vec<u8>,
    at: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(runs: &'a [TokenRun], dtype: Dtype) -> Self {
        let mut runs = runs.iter();
        let run = runs.next().cloned();
        Reader { runs, run, item_bytes: dtype.item_bytes(), buf: Vec::new(), at: 0 }
    }

    /// The next tokens, at most `tokens_max`; `None` at the end.
    pub(super) fn take(&mut self, tokens_max: u64) -> Result<Option<&[u8]>> {
        while self.at == self.buf.len() {
            let Some(run) = &mut self.run else { return Ok(None) };
            if run.bytes.is_empty() {
                self.run = self.runs.next().cloned();
                continue;
            }
            let len = (run.bytes.end - run.bytes.start).min(READ_BYTES);
            self.buf.resize(len as usize, 0); // fits: 4 MiB at most
            run.object
                .read_many(&mut [RangeRead { offset: run.bytes.start, buf: &mut self.buf }])?;
            run.bytes.start += len;
            self.at = 0;
        }
        let rest = (self.buf.len() - self.at) as u64;
        let len = rest.min(tokens_max.saturating_mul(self.item_bytes)) as usize; // fits: as `rest`
        let start = self.at;
        self.at += len;
        Ok(Some(&self.buf[start..start + len]))
    }

    /// Appends exactly this many tokens to a vector. The vector grows only by what was read.
    pub(super) fn take_all(&mut self, mut tokens: u64, out: &mut Vec<u8>) -> Result<bool> {
        while tokens > 0 {
            let item_bytes = self.item_bytes;
            let Some(bytes) = self.take(tokens)? else { return Ok(false) };
            out.extend_from_slice(bytes);
            tokens -= bytes.len() as u64 / item_bytes;
        }
        Ok(true)
    }
}
