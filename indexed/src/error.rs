use std::fmt;

use crate::mmididx::similar::BIN_ALONE;
use crate::{Dtype, Split};

/// An error of this crate: the operation, its object, what was found and what was expected.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The store failed.
    Storage(storage::Error),
    /// There is no dataset of that prefix: one of its files is absent, or both are.
    NoDataset {
        /// The prefix.
        prefix: String,
        /// Which of the two files is there.
        found: String,
        /// Similar prefixes that have a dataset.
        similar: Vec<String>,
    },
    /// A file breaks its format.
    Malformed {
        /// The file.
        file: String,
        /// The byte at which it was detected.
        offset: u64,
        /// Which rule it breaks.
        fault: FormatRule,
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// A cached sample order in use has changed since it was sealed.
    BadCache {
        /// Its description.
        file: String,
        /// What is wrong with it.
        found: String,
    },
    /// A sample order was built and cannot be saved.
    NotKept {
        /// The folder of its files.
        folder: String,
        /// Why.
        reason: String,
    },
    /// There is no cached sample order with a matching seal.
    NoCache {
        /// The description that it would have.
        file: String,
    },
    /// A `.bin` without its `.idx` exists where a pair is to be written.
    Orphan {
        /// The `.bin`.
        file: String,
    },
    /// The second file of a pair failed, and the first could not be rolled back.
    LeftBehind {
        /// The file that now exists without its partner.
        file: String,
        /// Why the second file failed.
        source: Box<storage::Error>,
        /// Why the first could not be deleted.
        cleanup: Box<storage::Error>,
    },
    /// An id does not fit the file's element type.
    TokenTooBig {
        /// The file that was being written.
        file: String,
        /// The id.
        token: u32,
        /// The element type.
        dtype: Dtype,
    },
    /// The element type of the output cannot hold an id of a source.
    IdOutside {
        /// The files that were being written.
        file: String,
        /// The id.
        id: i64,
        /// The element type.
        dtype: Dtype,
    },
    /// A sequence is longer than the format can express.
    SequenceTooLong {
        /// The file that was being written.
        file: String,
        /// Its length.
        tokens: u64,
    },
    /// Sequences were written that belong to no document.
    UnendedDocument {
        /// The file that was being written.
        file: String,
        /// Sequences since the last end of a document.
        sequences: u64,
    },
    /// A dataset cannot be appended to another.
    CannotMerge {
        /// The dataset to append.
        file: String,
        /// The file that was being written.
        into: String,
        /// What differs.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// The elements are floating-point numbers where token ids are expected.
    NotTokens {
        /// The dataset.
        file: String,
        /// Its element type.
        dtype: Dtype,
    },
    /// A file is not of the kind that its name promises, or its kind cannot be known.
    OtherKind {
        /// The file.
        file: String,
        /// What was expected.
        expected: String,
        /// What it is, or looks like.
        found: String,
        /// How to read it.
        hint: &'static str,
    },
    /// A setting cannot be used.
    BadSetting {
        /// Its name.
        name: &'static str,
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// The split string gives no share to the requested part.
    EmptySplit {
        /// The split string.
        split: String,
        /// The part.
        which: Split,
    },
    /// Samples are requested of a part without tokens: no number of epochs suffices.
    NoTokens {
        /// The dataset.
        file: String,
        /// The part.
        which: Split,
        /// Sequences in the part.
        sequences: u64,
        /// Sequences in the dataset.
        sequences_all: u64,
        /// Samples that were asked for.
        samples: u64,
    },
    /// A part yields no sample in any number of epochs.
    NoSamples {
        /// The dataset.
        file: String,
        /// The part.
        which: Split,
        /// Documents in the part.
        documents: u64,
        /// Documents in the dataset.
        documents_all: u64,
        /// Samples that were asked for.
        samples: u64,
    },
    /// A blend asks for more samples of a dataset than it has.
    TooFewSamples {
        /// Which dataset of the blend, from 0.
        dataset: usize,
        /// The part.
        which: Split,
        /// The samples it has.
        found: u64,
        /// The samples the blend asks for.
        expected: u64,
    },
    /// An entry of a table of an index is out of range.
    BadPlace {
        /// The dataset.
        file: String,
        /// The table.
        table: &'static str,
        /// The index of the entry.
        place: u64,
        /// The number.
        found: i64,
    },
    /// A count is beyond what the index format can hold.
    TooBig {
        /// What is counted.
        object: &'static str,
        /// The count.
        found: u128,
        /// The most there may be.
        most: u128,
    },
    /// Memory for a table could not be allocated.
    OutOfMemory {
        /// The table.
        object: &'static str,
        /// Its size.
        bytes: u128,
    },
}

/// A rule of the `.bin`/`.idx` or `.npy` format that a file may break.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FormatRule {
    /// The `.idx` starts with its magic.
    Magic,
    /// It is of version 1.
    Version,
    /// Its dtype code is known.
    Dtype,
    /// The file is not shorter than its counts require.
    TooShort,
    /// The file is not longer than its counts require.
    TooLong,
    /// No sequence length is negative.
    SequenceLength,
    /// The pointers are the running sum of the lengths in bytes.
    Pointer,
    /// The document index starts with 0.
    DocumentStart,
    /// The document index never decreases.
    DocumentOrder,
    /// The document index ends with the number of sequences.
    DocumentEnd,
    /// The document index has at least one document end.
    NoDocumentEnds,
    /// The `.bin` is not shorter than the `.idx` requires.
    BinTooShort,
    /// The `.bin` is not longer than the `.idx` requires.
    BinTooLong,
    /// An `.npy` is as numpy writes it, and as long as its header says.
    Npy,
    /// An `.npz` is a ZIP file of uncompressed members with correct checksums.
    Zip,
    /// The three files of CPM-2 agree, document by document.
    Triple,
    /// The table of a Dolma part lists the documents in order, without gaps.
    Spans,
    /// The header of a file of tokens agrees with its length.
    Header,
    /// A TFRecord file has complete records with correct checksums, each a BERT example.
    Record,
}

/// The `Result` of `std` with [`Error`] of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl FormatRule {
    /// The likely cause, if there is one.
    #[must_use]
    pub fn hint(self) -> Option<&'static str> {
        match self {
            FormatRule::Magic => Some(
                "`feedline convert` reads the older TNTIDX format; any other file is not an index",
            ),
            FormatRule::Triple => {
                Some("use three files of the same run; 16-bit offsets overflow in long documents")
            }
            FormatRule::Record => {
                Some("a damaged or truncated copy, or not the output of create_pretraining_data.py")
            }
            FormatRule::Dtype => {
                Some("only PaddleNLP writes codes 9 and 10; Megatron refuses them")
            }
            FormatRule::Header => {
                Some("a truncated copy, or its writer was killed; copy or create it again")
            }
            FormatRule::TooShort => Some("the .idx is truncated; run preprocess again"),
            FormatRule::NoDocumentEnds => Some(
                "the writer never ended a document, as in CPM-2; `feedline repair` writes a copy \
                 in which each sequence is a document",
            ),
            FormatRule::BinTooShort => {
                Some("the .bin is truncated, or the .idx is of another run; run preprocess again")
            }
            FormatRule::BinTooLong => Some("the .idx is of another run; run preprocess again"),
            _ => None,
        }
    }
}

impl From<storage::Error> for Error {
    fn from(error: storage::Error) -> Self {
        Error::Storage(error)
    }
}

impl Error {
    /// Formats the errors of sample orders.
    fn fmt_of_order(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::EmptySplit { split, which } => write!(
                f,
                "cannot index the {which} part: expected a share above 0 in split '{split}', \
                 found 0"
            ),
            Error::NoTokens { file, which, sequences, sequences_all, samples } => write!(
                f,
                "cannot index the {which} part of {file}: expected tokens for {samples} samples, \
                 found none in its {sequences} of {sequences_all} sequences (hint: {})",
                match which {
                    Split::Train => "give train a larger share of the split",
                    _ =>
                        "give it a larger share of the split, or ask for none of it: \
                          eval.every = 0 in a config, 0 in --samples",
                }
            ),
            Error::NoSamples { file, which, documents, documents_all, samples } => write!(
                f,
                "cannot index the {which} part of {file}: expected {samples} samples, found none \
                 in its {documents} of {documents_all} documents (hint: documents with a sentence \
                 of more than 512 tokens or with too few sentences are skipped)"
            ),
            Error::TooFewSamples { dataset, which, found, expected } => write!(
                f,
                "cannot blend the {which} parts: expected {expected} samples in dataset {dataset}, \
                 found {found} (hint: build its index for more samples; each index is built for \
                 0.5 % more than its share)"
            ),
            Error::BadPlace { file, table, place, found } => write!(
                f,
                "cannot read the sample order of {file}: entry {place} of the {table} is out of \
                 range: {found} (hint: the cache or the .idx changed during the run)"
            ),
            Error::BadCache { file, found } => write!(
                f,
                "cannot use the cached sample order {file}: {found} (hint: delete it to build it \
                 again; the disk or the memory may have corrupted it after it was checked)"
            ),
            Error::NotKept { folder, reason } => write!(
                f,
                "cannot save the sample order in {folder}: {reason} (hint: choose a writable \
                 folder)"
            ),
            Error::NoCache { file } => write!(f, "cannot find a sealed sample order {file}"),
            Error::TooBig { object, found, most } => {
                write!(f, "cannot build index: expected at most {most} {object}, found {found}")
            }
            Error::OutOfMemory { object, bytes } => {
                write!(f, "cannot allocate {bytes} bytes for the {object}")
            }
            _ => Ok(()),
        }
    }
}

/// What may be meant by the prefix of a dataset that does not exist.
fn fmt_similar(f: &mut fmt::Formatter<'_>, found: &str, similar: &[String]) -> fmt::Result {
    match similar.is_empty() {
        false => write!(f, " (hint: there is {})", similar.join(", ")),
        true if found == BIN_ALONE => f.write_str(
            " (hint: `feedline convert` makes a dataset of a .bin of nanoGPT, llm.c, NeMo \
             Automodel or lit-gpt)",
        ),
        true => Ok(()),
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Storage(error) => error.fmt(f),
            Error::NoDataset { prefix, found, similar } => {
                write!(f, "cannot open {prefix}: expected {prefix}.idx and .bin, found {found}")?;
                fmt_similar(f, found, similar)
            }
            Error::Malformed { file, offset, fault, found, expected } => {
                write!(f, "cannot read {file}: expected {expected}, found {found}")?;
                // A table of spans is compressed and read by lines, so a byte offset says nothing.
                if *fault != FormatRule::Spans {
                    write!(f, " at byte {offset}")?;
                }
                fault.hint().map_or(Ok(()), |hint| write!(f, " (hint: {hint})"))
            }
            Error::Orphan { file } => write!(
                f,
                "cannot create {file}: it exists without its .idx (hint: a run was killed between \
                 the two files; delete the .bin and its .crc, if any, and run again)"
            ),
            Error::LeftBehind { file, source, cleanup } => {
                write!(f, "{source}; cannot roll back {file} of the same dataset: {cleanup} ")?;
                write!(f, "(hint: delete it)")
            }
            Error::TokenTooBig { file, token, dtype } => write!(
                f,
                "cannot write {file}: expected at most token {} for {dtype}, found token {token}",
                dtype.token_max()
            ),
            Error::IdOutside { file, id, dtype } => write!(
                f,
                "cannot write {file}: expected tokens 0 to {} for {dtype}, found token {id} \
                 (hint: choose a wider type)",
                dtype.token_max()
            ),
            Error::SequenceTooLong { file, tokens } => write!(
                f,
                "cannot write {file}: expected a sequence of at most {} tokens, found {tokens}",
                i32::MAX
            ),
            Error::UnendedDocument { file, sequences } => write!(
                f,
                "cannot finish {file}: expected a document end after the last sequence, found \
                 {sequences} sequences without one"
            ),
            Error::CannotMerge { file, into, found, expected } => {
                write!(f, "cannot append {file} to {into}: expected {expected}, found {found}")
            }
            Error::NotTokens { file, dtype } => {
                write!(f, "cannot read tokens of {file}: expected integers, found {dtype}")
            }
            Error::OtherKind { file, expected, found, hint } => {
                write!(f, "cannot read {file}: expected {expected}, found {found} (hint: {hint})")
            }
            Error::BadSetting { name, found, expected } => {
                write!(f, "cannot use {name}: expected {expected}, found {found}")
            }
            Error::EmptySplit { .. }
            | Error::NoTokens { .. }
            | Error::NoSamples { .. }
            | Error::TooFewSamples { .. }
            | Error::BadPlace { .. }
            | Error::BadCache { .. }
            | Error::NotKept { .. }
            | Error::NoCache { .. }
            | Error::TooBig { .. }
            | Error::OutOfMemory { .. } => self.fmt_of_order(f),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Storage(error) => std::error::Error::source(error),
            Error::LeftBehind { source, .. } => Some(source.as_ref()),
            _ => None,
        }
    }
}
