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
    /// A blend asks for a sample that its dataset does not have.
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
        story: String,
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
        /// What is wrong with it.
        found: String,
        /// What was expected, and why it may differ.
        expected: String,
    },
    /// A thread of the loader panicked; the reason is on stderr.
    Gone,
    /// The node reader, or the connection to it, failed.
    Node(crate::NodeError),
}

/// [`std::result::Result`] with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Storage(error) => write!(f, "load a batch: {error}"),
            Error::Indexed(error) => write!(f, "load a batch: {error}"),
            Error::TooFewSamples { dataset, expected, found } => write!(
                f,
                "load samples up to {expected} of {dataset}: its index orders {found}; \
                 hint: build the index for as many samples as the run will consume"
            ),
            Error::SampleLength { dataset, sample, found, expected } => write!(
                f,
                "load sample {sample} of {dataset}: its index gives it {found} tokens, due at most \
                 {expected}; hint: the index was built for another sequence length"
            ),
            Error::BlendSample { blend, dataset, sample, found } => write!(
                f,
                "load sample {sample} of dataset {dataset} of {blend}: it has {found} samples; \
                 hint: the blend's index was built for other datasets"
            ),
            Error::PieceOutside { order, sample, piece, file_bytes } => {
                let PieceRef { file, offset_bytes, len_bytes } = piece;
                write!(
                    f,
                    "load sample {sample} of {order}: got a piece of {len_bytes} bytes at \
                     {offset_bytes} of file {file}, which has {file_bytes}; hint: the index was \
                     built for another file"
                )
            }
            Error::FileLength { object, found, expected } => write!(
                f,
                "open {object}: got {found} bytes, due {expected} as its index says; \
                 hint: the file was replaced, or is not whole"
            ),
            Error::Late { sample, waited, story } => write!(
                f,
                "load the batch of sample {sample}: nothing came in {:.0} s; {story}",
                waited.as_secs_f64()
            ),
            Error::Ended { first } => {
                write!(f, "load a batch: the loader has failed before ({first})")
            }
            Error::Option { name, found, expected } => {
                write!(f, "loader option {name} is {found}, due {expected}")
            }
            Error::Triple { dataset, part, found, expected } => write!(
                f,
                "order the samples of three datasets: {dataset}, the {part}, has {found} \
                 sequences, due {expected}, as the context has; hint: they are not of one run of \
                 preprocess"
            ),
            Error::Sample { objective, sample, found, expected } => {
                write!(
                    f,
                    "make sample {sample} a row of a batch of {objective}: got {found}, \
                     due {expected}"
                )
            }
            Error::Gone => write!(f, "load a batch: a thread of the loader has ended"),
            Error::Node(error) => write!(f, "share one reader a node: {error}"),
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
