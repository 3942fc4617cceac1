//! The documents in the bytes of a batch.

use std::ops::Range;
use std::slice;
use std::sync::Arc;

use indexed::RECORD_HEADER_BYTES;

use super::lines::{count_line_ends, is_blank, split_line, without_line_end};
use super::text::{Separator, TextRules};

/// The range of a document in the bytes of its batch.
pub(crate) type ByteSpan = Range<usize>;

pub(super) const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The format of an input's records.
#[derive(Clone, Debug, Default)]
pub(crate) enum RecordFormat {
    /// One JSON object per line.
    #[default]
    JsonLines,
    /// The objects of one JSON list, in the spans of the batch.
    JsonArray,
    /// Examples of TFRecord, in the spans of the batch.
    TfRecord,
    /// Plain text.
    Text(Arc<TextRules>),
    /// Texts of the named column, in the spans of the batch.
    #[cfg(feature = "parquet")]
    Rows(Arc<str>),
}

impl RecordFormat {
    /// Whether each line is a document, so that reading may start after any line end.
    pub(super) fn is_lines(&self) -> bool {
        match self {
            RecordFormat::JsonLines => true,
            RecordFormat::Text(rules) => rules.separator == Separator::Line,
            RecordFormat::JsonArray | RecordFormat::TfRecord => false,
            #[cfg(feature = "parquet")]
            RecordFormat::Rows(_) => false,
        }
    }

    /// Whether a record is a JSON object that contains the text, or the text itself. An example of
    /// TFRecord is read as such an object.
    pub(crate) fn is_json(&self) -> bool {
        use RecordFormat::{JsonArray, JsonLines, TfRecord};
        matches!(self, JsonLines | JsonArray | TfRecord)
    }

    /// The text of a record that is not JSON. `scratch` is reused between calls.
    pub(crate) fn text<'a>(&self, record: &'a str, scratch: &'a mut String) -> &'a str {
        match self {
            RecordFormat::Text(rules) => rules.text(record, scratch),
            _ => record,
        }
    }
}

/// One document as in its input: a text, or a JSON object that contains one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record<'a> {
    /// Its start in the batch, in the unit of the batch's offset. The sum of both does not depend
    /// on how the input was cut.
    pub(crate) start: usize,
    pub(crate) bytes: &'a [u8],
    /// It is empty or white space.
    pub(crate) is_blank: bool,
}

/// A row whose text is null, not empty.
#[cfg(feature = "parquet")]
pub(super) const NO_TEXT: ByteSpan = usize::MAX..usize::MAX;

/// Iterates over the documents of a batch, and over empty or blank records between separators.
#[derive(Debug)]
pub(crate) struct Records<'a> {
    shape: &'a RecordFormat,
    bytes: &'a [u8],
    spans: slice::Iter<'a, ByteSpan>,
    at: usize,
    /// Lines before the last document returned, and the lines that it adds.
    lines: u64,
    lines_next: u64,
}

impl<'a> Records<'a> {
    /// `offset` is that of the bytes in their input.
    pub(crate) fn new(
        shape: &'a RecordFormat,
        bytes: &'a [u8],
        spans: &'a [ByteSpan],
        offset: u64,
    ) -> Self {
        // A byte order mark is not part of a text. Before JSON it is an error.
        let mark = matches!(shape, RecordFormat::Text(_)) && offset == 0;
        let at = if mark && bytes.starts_with(BYTE_ORDER_MARK) { BYTE_ORDER_MARK.len() } else { 0 };
        Records { shape, bytes, spans: spans.iter(), at, lines: 0, lines_next: 0 }
    }

    /// Lines before the last document returned; after the end, all lines of the batch.
    pub(crate) fn lines_before(&self) -> u64 {
        self.lines
    }

    fn next_line(&mut self) -> Option<Record<'a>> {
        let rest = self.rest()?;
        let (bytes, next) = split_line(rest);
        let record = Record { start: self.at, bytes, is_blank: is_blank(bytes) };
        self.at += next;
        self.lines_next = 1;
        Some(record)
    }

    fn next_text(&mut self, separator: &Separator) -> Option<Record<'a>> {
        if *separator == Separator::Line {
            let line = self.next_line()?;
            return Some(Record { bytes: without_line_end(line.bytes), ..line });
        }
        let rest = self.rest()?;
        let (end, next) = separator.split_first(rest).unwrap_or((rest.len(), rest.len()));
        let mut bytes = &rest[..end];
        if *separator == Separator::BlankLine {
            bytes = without_line_end(bytes);
        }
        let record = Record { start: self.at, bytes, is_blank: is_blank(bytes) };
        self.at += next;
        self.lines_next = count_line_ends(rest, next);
        Some(record)
    }

    fn next_span(&mut self) -> Option<Record<'a>> {
        let Some(span) = self.spans.next() else {
            let rest = &self.bytes[self.at..];
            self.lines_next += count_line_ends(rest, rest.len());
            self.at = self.bytes.len();
            return None;
        };
        // Lines before it are those before its first byte.
        self.lines += count_line_ends(&self.bytes[self.at..], span.start - self.at);
        self.at = span.start;
        Some(Record { start: span.start, bytes: &self.bytes[span.clone()], is_blank: false })
    }

    /// Records are counted as lines. One starts at its header.
    fn next_example(&mut self) -> Option<Record<'a>> {
        let span = self.spans.next()?.clone();
        self.lines_next = 1;
        let start = span.start - RECORD_HEADER_BYTES;
        Some(Record { start, bytes: &self.bytes[span], is_blank: false })
    }

    #[cfg(feature = "parquet")]
    fn next_row(&mut self) -> Option<Record<'a>> {
        let span = self.spans.next()?;
        let start = self.at;
        self.at += 1;
        self.lines_next = 1;
        let text = self.bytes.get(span.clone());
        Some(Record { start, bytes: text.unwrap_or_default(), is_blank: text.is_none() })
    }

    fn rest(&self) -> Option<&'a [u8]> {
        self.bytes.get(self.at..).filter(|rest| !rest.is_empty())
    }
}

impl<'a> Iterator for Records<'a> {
    type Item = Record<'a>;

    fn next(&mut self) -> Option<Record<'a>> {
        self.lines += std::mem::take(&mut self.lines_next);
        let shape = self.shape;
        let next = match shape {
            RecordFormat::JsonLines => self.next_line(),
            RecordFormat::JsonArray => self.next_span(),
            RecordFormat::TfRecord => self.next_example(),
            RecordFormat::Text(rules) => self.next_text(&rules.separator),
            #[cfg(feature = "parquet")]
            RecordFormat::Rows(_) => self.next_row(),
        };
        if next.is_none() {
            self.lines += std::mem::take(&mut self.lines_next);
        }
        next
    }
}
