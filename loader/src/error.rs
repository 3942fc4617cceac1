use std::fmt;

/// What went wrong on the way from a token file to a batch.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The store failed.
    Storage(storage::Error),
    /// More samples are asked for than the index orders.
    TooFewSamples {
        /// The token file.
        dataset: String,
        /// One past the last sample asked for.
        due: u64,
        /// Samples in the index.
        got: u64,
    },
    /// A sample is shorter or longer than the sequence length says.
    SampleLength {
        /// The token file.
        dataset: String,
        /// Its number in the shuffled order.
        sample: u64,
        /// Tokens that the index gives it.
        got: u64,
        /// Tokens that a sample has at most.
        due: u64,
    },
    /// An option is out of its range.
    Option {
        /// Its name.
        name: &'static str,
        /// What came.
        got: u64,
        /// What was due.
        due: &'static str,
    },
    /// The reading thread ended without a word.
    Gone,
}

/// `std`'s, with our [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Storage(error) => write!(f, "load a batch: {error}"),
            Error::TooFewSamples { dataset, due, got } => write!(
                f,
                "load samples up to {due} of {dataset}: its index orders {got}; \
                 hint: build the index for as many samples as the run will consume"
            ),
            Error::SampleLength { dataset, sample, got, due } => write!(
                f,
                "load sample {sample} of {dataset}: its index gives it {got} tokens, due at most \
                 {due}; hint: the index was built for another sequence length"
            ),
            Error::Option { name, got, due } => {
                write!(f, "loader option {name} is {got}, due {due}")
            }
            Error::Gone => write!(f, "load a batch: the reading thread has ended"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Storage(error) => Some(error),
            _ => None,
        }
    }
}

impl From<storage::Error> for Error {
    fn from(error: storage::Error) -> Self {
        Error::Storage(error)
    }
}
