//! Reads, writes and converts the token files of other programs in bounded memory.
//!
//! A [`Format`] is found by [`Format::detect`], a [`TokenSource`] reads it from front to back into
//! a [`Sink`]: a [`Writer`] of some format, or a [`Census`] that counts. `pair` is Megatron's
//! format, `legacy` the TNTIDX format before it; `paddle` (with `zip`), `raw`, `datatrove` and
//! `dolma` are formats of other programs; `cpm2` has three files, for an encoder and a decoder;
//! `header` and `kind` recognize files without an index, or refuse them by name.
//! `bert` has examples of BERT in TFRecord files (`tfrecord`, `example`). `column` (tables of
//! integers) and `boundaries` (sequence and document ends) are shared by them; `members` reads
//! gzip.

mod bert;
mod boundaries;
mod column;
mod cpm2;
mod datatrove;
mod dolma;
mod example;
mod header;
mod kind;
mod legacy;
mod members;
mod paddle;
mod pair;
mod raw;
mod source;
mod tfrecord;
mod token_counts;
mod writer;
mod zip;

pub use bert::BertExample;
pub use example::Example;
pub use members::{GzipReader, MemberDecoder, MemberReader};
pub use source::{Sink, TokenSource};
pub use tfrecord::{
    RECORD_BYTES_MAX, RECORD_FOOTER_BYTES, RECORD_HEADER_BYTES, RecordFault, split_record,
    starts_record,
};
pub use token_counts::{Census, CensusReport};
pub use writer::{WriteOptions, WriteReport, Writer};

pub(crate) use column::{Column, ColumnType};
pub(crate) use pair::{Pair, start_of};
pub(crate) use writer::finish_all;

use std::fmt;
use std::sync::Arc;

use storage::{Key, Storage};

use crate::mmididx::idx::{END_OF_FILE, malformed};
use crate::{Dtype, Error, FormatRule, Result};

/// A format of token files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// `P.bin` and `P.idx` of Megatron and its descendants, including NeMo's and those of
    /// datatrove.
    Mmididx,
    /// The same names with the older index of fairseq and the first Megatron, lazy or cached. Read
    /// only.
    Tntidx,
    /// `P_ids.npy` and `P_idx.npz` of Paddle, or the older `P_ids.npz` with both in it.
    Paddle,
    /// `train.bin` of nanoGPT: 16-bit tokens without a header; or with a header of llm.c,
    /// modded-nanogpt, NeMo Automodel, lit-gpt or numpy, which gives their type.
    NanoGpt,
    /// One `.npy`, as in Yuan's corpus: a row for each document, or one row.
    Yuan,
    /// `X.ds`, `X.ds.index` and `X.ds.metadata` of datatrove, of which one of the last two may be
    /// absent.
    Datatrove,
    /// `X.npy`, which holds bare tokens in spite of its name, and `X.csv.gz` of Dolma; or a folder
    /// of such files; or OLMo-core's `X.npy` alone. Read only.
    Dolma,
    /// `P_context`, `P_target` and `P_target_offset` of CPM-2, which together make documents. Read
    /// only.
    Cpm2,
    /// TFRecord files of BERT's `create_pretraining_data.py`: a file, `NAME` of
    /// `NAME-00000-of-00010`, or a folder of `*.tfrecord*`. Read only.
    TfRecord,
}

const NAMES: [(&str, Format); 9] = [
    ("mmididx", Format::Mmididx),
    ("tntidx", Format::Tntidx),
    ("paddle", Format::Paddle),
    ("nanogpt", Format::NanoGpt),
    ("yuan", Format::Yuan),
    ("datatrove", Format::Datatrove),
    ("dolma", Format::Dolma),
    ("cpm2", Format::Cpm2),
    ("tfrecord", Format::TfRecord),
];

/// What to do with a pair whose documents were never ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MissingDocumentEnds {
    /// It is an error, as in Megatron.
    #[default]
    Refused,
    /// Each sequence is a document, as its writer meant.
    EachSequence,
}

/// Settings for files that do not contain all of their format.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReadOptions {
    /// The type of tokens if the files do not record it, as those of nanoGPT, or if programs
    /// disagree about it. Default: uint16 for a `.bin`; no other file has one.
    pub dtype: Option<Dtype>,
    /// The token that ends documents if no table does. Default: none, all is one document.
    pub eod: Option<u32>,
    /// What to do with a pair whose documents were never ended. Default: refuse it.
    pub unended: MissingDocumentEnds,
}

impl Format {
    /// All formats.
    pub const ALL: [Format; 9] = {
        let mut all = [Format::Mmididx; 9];
        let mut place = 0;
        while place < all.len() {
            all[place] = NAMES[place].1;
            place += 1;
        }
        all
    };

    /// Its name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        NAMES[self as usize].0
    }

    /// The format with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        NAMES.iter().find(|(of, _)| *of == name).map(|(_, format)| *format)
    }

    /// Whether a [`Writer`] writes it.
    #[must_use]
    pub fn is_written(self) -> bool {
        !matches!(self, Format::Tntidx | Format::Dolma | Format::Cpm2 | Format::TfRecord)
    }

    /// The suffixes of the files that a [`Writer`] of this format creates, `.crc` (checksums of
    /// blocks) among them where the format has it; none for a format that is only read.
    #[must_use]
    pub fn written_suffixes(self) -> &'static [&'static str] {
        match self {
            Format::Mmididx => &[".bin", ".idx", ".crc"],
            Format::Paddle => &["_ids.npy", "_idx.npz"],
            Format::NanoGpt => &[".bin"],
            Format::Yuan => &[".npy"],
            Format::Datatrove => &[".ds", ".ds.index", ".ds.metadata"],
            Format::Tntidx | Format::Dolma | Format::Cpm2 | Format::TfRecord => &[],
        }
    }

    /// The suffixes of the resumable uploads that a [`Writer`] of this format may create.
    #[must_use]
    pub fn draft_suffixes(self) -> &'static [&'static str] {
        match self {
            Format::Mmididx => &[".outline"],
            Format::Paddle => &["_idx.npz.outline"],
            _ => &[],
        }
    }

    /// Finds the format of a name and the common prefix of its files: by the files that exist, and
    /// by their first bytes. A suffix of a format may be given or omitted. `None` if there are no
    /// such files.
    ///
    /// # Errors
    /// [`Error::Storage`]; [`Error::Malformed`] for an `.idx` of neither kind.
    pub fn detect(store: &Arc<dyn Storage>, key: &Key) -> Result<Option<(Format, Key)>> {
        let names = store.list_names(&key.parent())?;
        for suffix in SUFFIXES {
            let Some(stem) = key.name().strip_suffix(suffix).filter(|stem| !stem.is_empty()) else {
                continue;
            };
            let beside = SiblingFiles { names: &names, stem };
            let stem = key.parent().join(stem)?;
            if let Some(format) = beside.format(store, &stem, suffix)? {
                return Ok(Some((format, stem)));
            }
        }
        if bert::is_here(store, key, &names)? {
            return Ok(Some((Format::TfRecord, key.clone())));
        }
        // A folder with Dolma parts.
        let inside = if names.iter().any(|name| name == key.name()) {
            store.list_names(key).unwrap_or_default()
        } else {
            Vec::new()
        };
        let dolma = inside.iter().any(|name| name.ends_with(".npy"))
            && inside.iter().any(|name| name.ends_with(".csv.gz"));
        Ok(dolma.then(|| (Format::Dolma, key.clone())))
    }
}

/// Longer suffixes first; the last is the prefix without a change.
const SUFFIXES: [&str; 10] =
    ["_ids.npy", "_idx.npz", "_ids.npz", ".ds.index", ".csv.gz", ".ds", ".npy", ".bin", ".idx", ""];

/// The names in the folder of a key.
struct SiblingFiles<'a> {
    names: &'a [String],
    stem: &'a str,
}

impl SiblingFiles<'_> {
    fn has(&self, suffix: &str) -> bool {
        let with = |name: &String| name.strip_prefix(self.stem) == Some(suffix);
        self.names.iter().any(with)
    }

    fn format(&self, store: &Arc<dyn Storage>, stem: &Key, given: &str) -> Result<Option<Format>> {
        if self.has(".idx") {
            return Format::of_idx(store, &stem.with_suffix(".idx")?).map(Some);
        }
        if (self.has("_ids.npy") && self.has("_idx.npz")) || self.has("_ids.npz") {
            return Ok(Some(Format::Paddle));
        }
        if cpm2::PARTS.iter().all(|part| self.has(&format!("_{part}.idx"))) {
            return Ok(Some(Format::Cpm2));
        }
        if self.has(".ds") {
            return Ok(Some(Format::Datatrove));
        }
        if self.has(".npy") {
            let start = start_of(&*store.open(&stem.with_suffix(".npy")?)?)?;
            let is_npy = start.starts_with(raw::NPY);
            return Ok(Some(if is_npy { Format::Yuan } else { Format::Dolma }));
        }
        // A .bin that lost its .idx must not be read as one that never had an .idx.
        let alone = given == ".bin" && self.has(".bin") && !self.has(".manifest.json");
        Ok(alone.then_some(Format::NanoGpt))
    }
}

impl Format {
    fn of_idx(store: &Arc<dyn Storage>, key: &Key) -> Result<Self> {
        let object = store.open(key)?;
        let start = start_of(object.as_ref())?;
        if start.starts_with(b"TNTIDX\0\0") {
            return Ok(Format::Tntidx);
        }
        if start.starts_with(b"MMIDIDX\0\0") {
            return Ok(Format::Mmididx);
        }
        let found = format!("\"{}\"", start[..start.len().min(9)].escape_ascii());
        let expected = "\"MMIDIDX\\x00\\x00\" or \"TNTIDX\\x00\\x00\"";
        Err(malformed(&object.display(), 0, FormatRule::Magic, found, expected))
    }
}

impl TokenSource {
    /// Opens token files by the prefix that [`Format::detect`] returns.
    ///
    /// # Errors
    /// [`Error::Malformed`] for faults in the headers and the lengths of the files;
    /// [`Error::Storage`].
    pub fn open(
        store: &Arc<dyn Storage>,
        prefix: &Key,
        format: Format,
        options: &ReadOptions,
    ) -> Result<Self> {
        match format {
            Format::Mmididx => Pair::open(store, prefix)?.into_source(options),
            Format::Tntidx => legacy::open(store, prefix, options),
            Format::Paddle => paddle::open(store, prefix),
            Format::NanoGpt => raw::open_nanogpt(store, prefix, options),
            Format::Yuan => raw::open_yuan(store, prefix, options),
            Format::Datatrove => datatrove::open(store, prefix, options),
            Format::Dolma => dolma::open(store, prefix, options),
            Format::Cpm2 => cpm2::open(store, prefix),
            Format::TfRecord => bert::open(store, prefix),
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A file of bare tokens must hold complete tokens.
fn whole_tokens(file: &str, bytes: u64, dtype: Dtype) -> Result<()> {
    let item_bytes = dtype.item_bytes();
    if bytes.is_multiple_of(item_bytes) {
        return Ok(());
    }
    let expected = format!("a multiple of {item_bytes} bytes for {dtype} tokens");
    Err(malformed(file, bytes as usize, FormatRule::BinTooShort, END_OF_FILE, expected))
}

/// The error for a setting that a format does not support.
fn unsupported(name: &'static str, found: impl Into<String>, expected: impl Into<String>) -> Error {
    Error::BadSetting { name, found: found.into(), expected: expected.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_a_table_in_order() {
        for (place, (name, format)) in NAMES.into_iter().enumerate() {
            assert_eq!(format as usize, place);
            assert_eq!((format.name(), Format::from_name(name)), (name, Some(format)));
        }
    }
}
