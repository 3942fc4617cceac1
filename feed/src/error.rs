use std::fmt;

use recipe::Incompatible;

/// Why samples cannot be read.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be read.
    Storage(Box<storage::Error>),
    /// The corpus or its index is not usable.
    Indexed(Box<indexed::Error>),
    /// A batch could not be read.
    Loader(Box<loader::Error>),
    /// The tokenizer could not be opened, or refused its input.
    Tokenizer(Box<preprocess::Error>),
    /// The config does not match the data.
    Mismatch(Incompatible),
}

/// [`std::result::Result`] with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Storage(e) => write!(f, "{e}"),
            Error::Indexed(e) => write!(f, "{e}"),
            Error::Loader(e) => write!(f, "{e}"),
            Error::Tokenizer(e) => write!(f, "{e}"),
            Error::Mismatch(e) => write!(f, "{e}"),
        }
    }
}

impl std::error::Error for Error {}

/// Errors of other crates are boxed: a result is as large as its largest error.
macro_rules! from {
    ($($variant:ident: $source:ty),*) => {
        $(impl From<$source> for Error {
            fn from(error: $source) -> Self {
                Error::$variant(error.into())
            }
        })*
    };
}

from!(
    Storage: storage::Error,
    Indexed: indexed::Error,
    Loader: loader::Error,
    Tokenizer: preprocess::Error,
    Mismatch: Incompatible
);
