use serde::{Deserialize, Serialize};
use storage::FileEntry;

use crate::Skipped;
use crate::checksum::Checksum;
use crate::input::{Input, InputIdentity};

/// Progress of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct PreprocessProgress {
    /// Bytes taken from the inputs, as they are stored.
    pub stored_bytes: u64,
    /// The bytes of all inputs, unless one is a stream.
    pub stored_bytes_all: Option<u64>,
    /// Bytes of JSON, decompressed.
    pub json_bytes: u64,
    /// Documents written.
    pub documents: u64,
    /// Tokens written, ends of documents included.
    pub tokens: u64,
}

/// What a run did. It serializes with units in the keys.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// The tokenizer's name.
    pub tokenizer: String,
    /// Its number of ids.
    pub vocab_size: u32,
    /// The element type of the `.bin`, as numpy names it.
    pub dtype: &'static str,
    /// Threads that tokenized.
    pub workers: usize,
    /// Documents written to each dataset, empty ones included.
    pub documents: u64,
    /// Documents without tokens.
    pub documents_empty: u64,
    /// Skipped documents, by cause.
    pub skipped: Skipped,
    /// The first hundred bad lines that this process skipped.
    pub bad_lines: Vec<String>,
    /// Sequences written: documents that have tokens.
    pub sequences: u64,
    /// Tokens written, ends of documents included.
    pub tokens: u64,
    /// Lines skipped because there was nothing on them.
    pub blank_lines: u64,
    /// Bytes read, as they are stored.
    pub stored_bytes: u64,
    /// Bytes of JSON, decompressed.
    pub json_bytes: u64,
    /// Bytes of the texts, in UTF-8.
    pub text_bytes: u64,
    /// Whether an earlier process had done a part of it.
    pub resumed: bool,
    /// Inputs of earlier processes that could not be verified to be unchanged: streams, and inputs
    /// whose identity is not in the journal.
    pub inputs_unverified: usize,
    /// Wall-clock time from the first check to the last file, of all processes.
    pub elapsed_s: f64,
    /// `json_bytes` in MB (10^6 bytes) per second.
    pub json_mb_per_s: f64,
    /// Tokens per second.
    pub tokens_per_s: f64,
    /// Tokens per document.
    pub tokens_per_document: f64,
    /// Bytes of text per token.
    pub text_bytes_per_token: f64,
    /// Time of this process by stage.
    pub stages: Stages,
    /// The inputs, in order.
    pub inputs: Vec<InputReport>,
    /// The outputs: `.bin`, `.idx` and manifest.
    pub outputs: Vec<Output>,
}

/// Nanoseconds of work by stage, over all threads. Parsing and tokenizing are estimated from one
/// line in sixteen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Stages {
    /// Reading and decompressing.
    pub read_ns: u64,
    /// Finding the texts in the JSON.
    pub parse_ns: u64,
    /// Text to ids.
    pub tokenize_ns: u64,
    /// Ids to files.
    pub write_ns: u64,
}

/// The contents of one input.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct InputReport {
    /// As it was given.
    pub name: String,
    /// Its bytes, as they are stored.
    pub stored_bytes: u64,
    /// Its bytes of JSON, decompressed.
    pub json_bytes: u64,
    /// Its lines, blank ones included.
    pub lines: u64,
    /// Its documents.
    pub documents: u64,
    /// The checksum of `json_bytes`. `None` after a resume from a journal that lacks it.
    #[serde(default)]
    pub(crate) json_crc64: Option<Checksum>,
    /// `None` for a stream, and for an input from a journal that lacks it.
    #[serde(default)]
    pub(crate) identity: Option<InputIdentity>,
}

impl InputReport {
    /// The report of an unread input.
    pub(crate) fn new(input: &Input) -> Self {
        InputReport {
            name: input.name.clone(),
            json_crc64: Some(Checksum::default()),
            identity: input.identity.clone(),
            ..InputReport::default()
        }
    }
}

/// One file that was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Output {
    /// Its full name.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// CRC-64/NVME of all its bytes, in 16 hexadecimal digits.
    pub crc64: String,
}

impl Output {
    pub(crate) fn new(name: String, entry: &FileEntry) -> Self {
        Output { name, bytes: entry.bytes, crc64: format!("{:016x}", entry.crc64) }
    }
}
