//! Inputs: finds them, reads them and splits them into documents.
//!
//! [`expand`] turns names of the command line (files, folders, patterns, pipes) into [`Input`]s,
//! which it checks before any work begins; [`share_out`] retains the part of one shard. An
//! [`InputChunker`] reads them one after another, whole documents at a time.
//!
//! Below it, in reading order: `discover` and `glob` find files, and `left_out` those that are not
//! read; `input_identity` distinguishes a file from another of its name, `codec` detects their
//! compression, `stream` reads their bytes, which `decompress` inflates on other threads in the
//! units that `frames` finds; `lines` finds the ends of lines; `records` finds the ends of
//! documents in lines and texts, `json_array` in a JSON list, `parquet` in Parquet.

mod chunker;
mod codec;
mod decompress;
mod discover;
mod frames;
mod glob;
mod input_identity;
mod json_array;
mod left_out;
mod lines;
#[cfg(test)]
mod object_tests;
#[cfg(feature = "parquet")]
mod parquet;
#[cfg(all(test, feature = "parquet"))]
mod parquet_tests;
mod records;
mod shard;
mod stream;
#[cfg(test)]
mod tests;
mod text;

use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use storage::{Key, Object, Storage};

pub(crate) use chunker::{InputChunker, Position};
pub(crate) use discover::expand;
pub use discover::{Format, InputOptions};
pub(crate) use input_identity::InputIdentity;
pub(crate) use lines::{is_blank, split_line};
pub(crate) use records::{ByteSpan, Record, RecordFormat, Records};
pub(crate) use shard::{Share, share_out};
pub use text::{Separator, TextRules};

use crate::checksum::Checksum;
use crate::{Error, Result};
use codec::Codec;

/// The name of standard input on the command line.
const STDIN: &str = "-";

/// One input, checked.
#[derive(Clone, Debug)]
pub(crate) struct Input {
    /// As it was given, or as it was found.
    pub(crate) name: String,
    /// Its length as stored, unless it is a stream.
    pub(crate) stored_bytes: Option<u64>,
    /// Unless it is a stream.
    pub(crate) identity: Option<InputIdentity>,
    /// The checksum of the bytes before the position at which reading starts, if an earlier process
    /// has read them. A stream, which must read them again, compares it.
    pub(crate) skipped_crc64: Option<Checksum>,
    place: InputLocation,
    /// Its compression. That of a stream is known when it is opened.
    codec: Codec,
    shape: RecordFormat,
    /// Documents that begin in here are wanted, by bytes as stored.
    part: Range<u64>,
    /// Decompressed length from which on `expand_ratio_max` limits its ratio to the stored length.
    expand_free_bytes: u64,
    expand_ratio_max: Option<u64>,
}

/// All of an input, however long.
const WHOLE: Range<u64> = 0..u64::MAX;

/// Where an input is.
#[derive(Clone, Debug)]
enum InputLocation {
    Object {
        store: Arc<dyn Storage>,
        key: Key,
    },
    /// A named pipe or a device: read once, from front to back.
    Pipe(PathBuf),
    Stdin,
}

impl Input {
    /// Checks that an input exists, can be read, and has a known format; JSON lines unless its name
    /// or content says otherwise.
    ///
    /// # Errors
    /// [`Error::BadInput`] for a folder or an unknown form, [`Error::Storage`].
    #[cfg(test)]
    pub(crate) fn check(name: &str) -> Result<Input> {
        let mut found = expand(&[name.to_owned()], &InputOptions::default(), "text")?;
        Ok(found.remove(0))
    }

    /// The same file as another store has it.
    #[cfg(test)]
    pub(crate) fn on(self, other: &Arc<dyn Storage>) -> Input {
        let InputLocation::Object { key, .. } = self.place else { unreachable!("a file") };
        Input { place: InputLocation::Object { store: Arc::clone(other), key }, ..self }
    }

    /// Bytes as stored that are to be read of it, unless it is a stream.
    pub(crate) fn part_bytes(&self) -> Option<u64> {
        let stored = self.stored_bytes?;
        Some(self.part.end.min(stored).saturating_sub(self.part.start))
    }

    /// Whether its documents have keys, as objects of JSON have.
    pub(crate) fn is_json(&self) -> bool {
        self.shape.is_json()
    }

    /// Whether its documents are lines of JSON.
    pub(crate) fn is_json_lines(&self) -> bool {
        matches!(self.shape, RecordFormat::JsonLines)
    }

    /// Whether it is plain text whose documents end at line ends.
    pub(crate) fn is_text_lines(&self) -> bool {
        let RecordFormat::Text(rules) = &self.shape else { return false };
        matches!(rules.separator, Separator::Line | Separator::BlankLine)
    }

    /// The object of an input that is not a stream.
    fn object(&self) -> Result<Arc<dyn Object>> {
        match &self.place {
            InputLocation::Object { store, key } => open(store.as_ref(), key, &self.name),
            InputLocation::Pipe(_) | InputLocation::Stdin => {
                unreachable!("streams are not opened as objects")
            }
        }
    }
}

fn open(store: &dyn Storage, key: &Key, name: &str) -> Result<Arc<dyn Object>> {
    store.open(key).map_err(|error| not_a_file(name, error))
}

/// The error of an input that exists, but is no file.
fn not_a_file(name: &str, error: storage::Error) -> Error {
    let storage::Error::Io { source, .. } = &error else { return error.into() };
    let found = match source.kind() {
        io::ErrorKind::IsADirectory => "a folder",
        io::ErrorKind::InvalidInput => "a socket, a device, or a pipe matched by a pattern",
        _ => return error.into(),
    };
    bad_input(name, found, "a file, a folder of files, a pipe, or - for standard input")
}

/// Parquet has its index at the end, so that a stream cannot be read.
const PARQUET_FILE: &str = "a file, because Parquet is read from its end";

fn bad_input(name: &str, found: impl Into<String>, expected: impl Into<String>) -> Error {
    Error::BadInput {
        input: name.to_owned(),
        found: found.into(),
        expected: expected.into(),
        hint: None,
    }
}
