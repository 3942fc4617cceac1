//! The result of encoding the lines of a batch: tokens as they are written, and counts.

use serde::{Deserialize, Serialize};

use crate::batch::document_batch::BUFFER_BYTES_KEPT_MAX;
use crate::json::scanner::LineFault;

/// The documents of a batch, encoded as they are written.
#[derive(Debug, Default)]
pub(crate) struct EncodedDocuments {
    /// One per dataset of the run.
    pub(crate) outputs: Vec<Encoded>,
    /// Lines processed so far, blank ones included.
    pub(crate) lines: u64,
    /// CRC-64/NVME of the bytes of the batch, once all of them are encoded.
    pub(crate) source_crc64: u64,
    pub(crate) tally: LineCounts,
    /// Bad lines that were skipped.
    pub(crate) bad: Vec<SkippedLine>,
    /// Nanoseconds of work by stage, estimated from a sample of the lines.
    pub(crate) parse_ns: u64,
    pub(crate) tokenize_ns: u64,
}

/// A bad line that was skipped.
#[derive(Debug)]
pub(crate) struct SkippedLine {
    /// Its number in the batch, from 0.
    pub(crate) line: u64,
    /// Its offset in the batch.
    pub(crate) offset: usize,
    pub(crate) fault: LineFault,
}

/// Sequences of one dataset.
#[derive(Debug, Default)]
pub(crate) struct Encoded {
    /// All tokens, little-endian, in the type of the dataset.
    pub(crate) bytes: Vec<u8>,
    /// Tokens of each sequence.
    pub(crate) lens: Vec<u32>,
    /// Sequences of each document.
    pub(crate) sequences: Vec<u32>,
}

/// Counts of lines by result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LineCounts {
    /// Lines that became documents. With several keys each is a document of every dataset.
    pub(crate) documents: u64,
    /// Documents without tokens, over all keys.
    pub(crate) empty: u64,
    pub(crate) blank_lines: u64,
    /// Bytes of the texts in UTF-8, over all keys.
    pub(crate) text_bytes: u64,
    pub(crate) skipped: Skipped,
}

/// Skipped documents, by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Skipped {
    /// Invalid lines.
    pub bad_lines: u64,
    /// Documents without tokens.
    pub empty: u64,
    /// Documents with too few tokens for hidden spans.
    pub few_tokens: u64,
    /// Lines with too many characters for hidden spans.
    pub long_lines: u64,
}

impl Skipped {
    pub(crate) fn add(&mut self, other: Skipped) {
        self.bad_lines += other.bad_lines;
        self.empty += other.empty;
        self.few_tokens += other.few_tokens;
        self.long_lines += other.long_lines;
    }

    /// Each cause that occurred, in words.
    #[must_use]
    pub fn causes(&self) -> Vec<(&'static str, u64)> {
        let Skipped { bad_lines, empty, few_tokens, long_lines } = *self;
        let all = [
            ("invalid lines", bad_lines),
            ("empty documents", empty),
            ("documents with fewer than 10 tokens", few_tokens),
            ("lines with more than 5,000,000 characters", long_lines),
        ];
        all.into_iter().filter(|(_, count)| *count > 0).collect()
    }
}

impl LineCounts {
    pub(crate) fn add(&mut self, other: LineCounts) {
        self.documents += other.documents;
        self.empty += other.empty;
        self.blank_lines += other.blank_lines;
        self.text_bytes += other.text_bytes;
        self.skipped.add(other.skipped);
    }
}

impl EncodedDocuments {
    /// Clears it for reuse, and retains the memory that an ordinary batch needs.
    pub(crate) fn reset(&mut self) {
        let mut outputs = std::mem::take(&mut self.outputs);
        outputs.iter_mut().for_each(Encoded::reset);
        *self = EncodedDocuments { outputs, ..EncodedDocuments::default() };
    }

    /// The current ends of all datasets, for [`EncodedDocuments::rewind`].
    pub(crate) fn place(&self, places: &mut Vec<[usize; 3]>) {
        places.clear();
        let ends =
            |output: &Encoded| [output.bytes.len(), output.lens.len(), output.sequences.len()];
        places.extend(self.outputs.iter().map(ends));
    }

    pub(crate) fn rewind(&mut self, places: &[[usize; 3]]) {
        for (output, &[bytes, lens, sequences]) in self.outputs.iter_mut().zip(places) {
            output.bytes.truncate(bytes);
            output.lens.truncate(lens);
            output.sequences.truncate(sequences);
        }
    }
}

impl Encoded {
    fn reset(&mut self) {
        self.bytes.clear();
        self.bytes.shrink_to(BUFFER_BYTES_KEPT_MAX);
        self.lens.clear();
        self.lens.shrink_to(BUFFER_BYTES_KEPT_MAX / size_of::<u32>());
        self.sequences.clear();
        self.sequences.shrink_to(BUFFER_BYTES_KEPT_MAX / size_of::<u32>());
    }
}
