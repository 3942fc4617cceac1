//! Document batches, the unit of the pipeline: whole documents of an input on the way to the
//! workers, their tokens on the way back. Batches are reused, so nothing is allocated after the
//! first round.

use std::mem;

use crate::batch::encoded::EncodedDocuments;
use crate::input::{ByteSpan, Position, RecordFormat};
use crate::json::scanner::LineFault;
use crate::{BadLine, Error};

/// Whole documents of one input, and their tokens once they are encoded.
#[derive(Debug, Default)]
pub(crate) struct DocumentBatch {
    /// Its place in the order of the run.
    pub(crate) seq: u64,
    /// Which input.
    pub(crate) input_idx: usize,
    /// Offset of its bytes in the input, decompressed.
    pub(crate) offset: u64,
    pub(crate) decompressed: bool,
    /// Stored bytes read from the input when this batch was cut.
    pub(crate) stored_bytes: u64,
    /// The format of the bytes; [`crate::input::Records`] splits them into documents.
    pub(crate) shape: RecordFormat,
    /// Whole documents as in the input, with their separators.
    pub(crate) bytes: Vec<u8>,
    /// The documents in `bytes`, for formats without separators.
    pub(crate) spans: Vec<ByteSpan>,
    /// Where the run continues after this batch.
    pub(crate) next: Position,
    /// All lines before it have been counted: the input was read from its start.
    pub(crate) numbered: bool,
    pub(crate) documents: EncodedDocuments,
    /// Why the run must end after these documents.
    pub(crate) stop: Option<BatchEnd>,
}

#[derive(Debug)]
pub(crate) enum BatchEnd {
    /// A bad line; it begins `offset` bytes into the batch, after [`EncodedDocuments::lines`] good
    /// ones.
    Line { offset: usize, fault: LineFault },
    /// Reading the input failed.
    Input(Error),
}

/// Buffer capacity retained between batches, twice the maximum of a block; more was for an
/// unusually long line.
pub(crate) const BUFFER_BYTES_KEPT_MAX: usize = 8 << 20;

impl DocumentBatch {
    /// The error of a line that begins `offset` bytes into the batch.
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

    /// Clears it for reuse.
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

/// The error of a line that is longer than allowed.
pub(crate) fn too_long(line_bytes_max: usize) -> LineFault {
    LineFault {
        column: line_bytes_max,
        found: "a longer line".to_owned(),
        expected: format!("a line of at most {}", storage::ByteSize(line_bytes_max as u64)),
        hint: Some("end lines with \\n or \\r, or raise --line-max, which uses more memory"),
    }
}
