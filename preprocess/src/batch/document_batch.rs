//! What travels round the pipeline: whole documents of an input on the way out, their tokens on the
//! way back. A parcel is filled again when it returns, so that after the first round nothing is
//! allocated.

use std::mem;

use crate::batch::encoded::EncodedDocuments;
use crate::input::{ByteSpan, Position, RecordFormat};
use crate::json::scanner::LineFault;
use crate::{BadLine, Error};

/// Whole documents of one input, and what became of them.
#[derive(Debug, Default)]
pub(crate) struct DocumentBatch {
    /// Its place in the order of the run.
    pub(crate) seq: u64,
    /// Which input.
    pub(crate) input_idx: usize,
    /// Where its bytes begin in the input, decompressed.
    pub(crate) offset: u64,
    pub(crate) decompressed: bool,
    /// Bytes taken from the input when these were cut, as it is stored.
    pub(crate) stored_bytes: u64,
    /// How the bytes are made of documents; [`crate::input::Records`] takes them apart.
    pub(crate) shape: RecordFormat,
    /// Whole documents as they stand in the input, with what separates them.
    pub(crate) bytes: Vec<u8>,
    /// Where the documents stand in `bytes`, for shapes that do not tell otherwise.
    pub(crate) spans: Vec<ByteSpan>,
    /// Where the run goes on after this parcel.
    pub(crate) next: Position,
    /// All lines before it have been counted: the input was read from its begin.
    pub(crate) numbered: bool,
    pub(crate) documents: EncodedDocuments,
    /// Why the run must end after these documents.
    pub(crate) stop: Option<BatchEnd>,
}

#[derive(Debug)]
pub(crate) enum BatchEnd {
    /// A bad line; it begins `offset` bytes into the parcel, after [`EncodedDocuments::lines`] good
    /// ones.
    Line { offset: usize, fault: LineFault },
    /// The input could not be read on.
    Input(Error),
}

/// Buffers keep up to this between parcels, twice what a block gives at worst; more was for an
/// uncommonly long line.
pub(crate) const BUFFER_BYTES_KEPT_MAX: usize = 8 << 20;

impl DocumentBatch {
    /// What is wrong with a line that begins so many bytes into the parcel.
    pub(crate) fn bad_line(
        &self,
        input: &str,
        line: Option<u64>,
        offset: usize,
        fault: LineFault,
    ) -> BadLine {
        BadLine {
            input: input.to_owned(),
            line,
            offset: self.offset + offset as u64,
            column: fault.column as u64,
            decompressed: self.decompressed,
            found: fault.found,
            expected: fault.expected,
            hint: fault.hint,
        }
    }

    /// Empties it for its next round.
    pub(crate) fn reset(&mut self) {
        self.bytes.clear();
        self.bytes.shrink_to(BUFFER_BYTES_KEPT_MAX);
        self.spans.clear();
        self.spans.shrink_to(BUFFER_BYTES_KEPT_MAX / size_of::<ByteSpan>());
        self.documents.reset();
        *self = DocumentBatch {
            bytes: mem::take(&mut self.bytes),
            spans: mem::take(&mut self.spans),
            documents: mem::take(&mut self.documents),
            ..DocumentBatch::default()
        };
    }
}

/// What is wrong with a line that is longer than it may be.
pub(crate) fn too_long(line_bytes_max: usize) -> LineFault {
    LineFault {
        column: line_bytes_max,
        found: "no end of the line yet".to_owned(),
        expected: format!("lines of at most {}", storage::ByteSize(line_bytes_max as u64)),
        hint: Some("lines end with \\n; or raise --line-max, at the cost of memory"),
    }
}
