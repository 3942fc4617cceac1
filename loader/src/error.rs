use std::fmt;
use std::time::Duration;

use crate::PieceRef;

/// An error between a token file and a batch.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The store failed.
    Storage(storage::Error),
    /// An index is invalid.
    Indexed(indexed::Error),
    /// More samples are requested than the index has.
    TooFewSamples {
        /// The token file.
        dataset: String,
        /// One past the last requested sample.
        expected: u64,
        /// Samples in the index.
        found: u64,
    },
    /// A sample is shorter or longer than the sequence length.
    SampleLength {
        /// The token file.
        dataset: String,
        /// Its number in the shuffled order.
        sample: u64,
        /// Its tokens according to the index.
        found: u64,
        /// The most tokens of a sample.
        expected: u64,
    },
    /// A blend refers to a sample that its dataset does not have.
    BlendSample {
        /// The blend.
        blend: String,
        /// The dataset, by its place in the blend.
        dataset: usize,
        /// The sample of it.
        sample: u64,
        /// Samples that it has.
        found: u64,
    },
    /// A piece of a sample is outside its file.
    PieceOutside {
        /// The order.
        order: String,
        /// The sample's number in it.
        sample: u64,
        /// The piece.
        piece: PieceRef,
        /// The length of the file.
        file_bytes: u64,
    },
    /// The length of a file differs from that in its index.
    FileLength {
        /// The file.
        object: String,
        /// Its length.
        found: u64,
        /// Its length in the index.
        expected: u64,
    },
    /// A batch was not ready in time.
    Late {
        /// The first sample of the batch.
        sample: u64,
        /// How long the consumer waited.
        waited: Duration,
        /// What the loader was waiting for, as far as is known.
        reason: String,
    },
    /// The loader has failed before.
    Ended {
        /// The first error.
        first: String,
    },
    /// An option is out of its range.
    Option {
        /// Its name.
        name: &'static str,
        /// The value found.
        found: u64,
        /// The values allowed.
        expected: &'static str,
    },
    /// Datasets that belong together do not have the same documents.
    Triple {
        /// One of them.
        dataset: String,
        /// Its role among them.
        part: &'static str,
        /// Its sequences.
        found: u64,
        /// Those of the first.
        expected: u64,
    },
    /// A sample cannot be made into a row of a batch.
    Sample {
        /// What kind of batch.
        objective: &'static str,
        /// The sample, as its number in the order.
        sample: u64,
        /// What is wrong with it, and a hint if there is one.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// A thread of the loader panicked; the reason is on stderr.
    ThreadPanicked,
    /// The node reader, or the connection to it, failed.
    Node(crate::NodeError),
}

/// [`std::result::Result`] with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Storage(error) => write!(f, "cannot load batch: {error}"),
            Error::Indexed(error) => write!(f, "cannot load batch: {error}"),
            Error::TooFewSamples { dataset, expected, found } => write!(
                f,
                "cannot load samples of {dataset}: expected {expected} samples in its index, \
                 found {found} (hint: build the index for as many samples as the run consumes)"
            ),
            Error::SampleLength { dataset, sample, found, expected } => write!(
                f,
                "cannot load sample {sample} of {dataset}: expected the {expected} tokens of the \
                 sequence length, found {found} (hint: build the index for this sequence length)"
            ),
            Error::BlendSample { blend, dataset, sample, found } => write!(
                f,
                "cannot load sample {sample} of dataset {dataset} of {blend}: the dataset has \
                 {found} samples (hint: build the index of the blend for these datasets)"
            ),
            Error::PieceOutside { order, sample, piece, file_bytes } => {
                let PieceRef { file, offset_bytes, len_bytes } = piece;
                write!(
                    f,
                    "cannot load sample {sample} of {order}: expected a range within the \
                     {file_bytes} bytes of file {file}, found {len_bytes} bytes at byte \
                     {offset_bytes} (hint: build the index for this file)"
                )
            }
            Error::FileLength { object, found, expected } => write!(
                f,
                "cannot open {object}: expected {expected} bytes as in its index, found {found} \
                 bytes (hint: the file was replaced or truncated)"
            ),
            Error::Late { sample, waited, reason } => write!(
                f,
                "cannot load batch at sample {sample}: no data for {:.0} s; {reason}",
                waited.as_secs_f64()
            ),
            Error::Ended { first } => {
                write!(f, "cannot load batch: the loader failed earlier: {first}")
            }
            Error::Option { name, found, expected } => {
                write!(f, "cannot use loader option {name}: expected {expected}, found {found}")
            }
            Error::Triple { dataset, part, found, expected } => write!(
                f,
                "cannot join {dataset} ({part}) with its context: expected {expected} sequences, \
                 found {found} (hint: use the three datasets of one preprocess run)"
            ),
            Error::Sample { objective, sample, found, expected } => {
                write!(
                    f,
                    "cannot assemble {objective} sample {sample}: expected {expected}, found \
                     {found}"
                )
            }
            Error::ThreadPanicked => write!(f, "cannot load batch: a loader thread panicked"),
            Error::Node(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Storage(error) => Some(error),
            Error::Indexed(error) => Some(error),
            _ => None,
        }
    }
}

impl From<storage::Error> for Error {
    fn from(error: storage::Error) -> Self {
        Error::Storage(error)
    }
}

impl From<indexed::Error> for Error {
    fn from(error: indexed::Error) -> Self {
        Error::Indexed(error)
    }
}
