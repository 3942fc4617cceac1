use std::fmt;

/// Why libtorch, or the bridge before it, refused.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// A C++ exception, as text.
    Torch {
        /// What we were doing.
        doing: &'static str,
        /// What libtorch said.
        text: String,
    },
    /// Lists that belong together have different lengths.
    Lengths {
        /// What we were doing.
        doing: &'static str,
        /// How long each was.
        got: Vec<usize>,
    },
    /// The memory of a tensor cannot be lent.
    NotLendable {
        /// What is in the way.
        why: &'static str,
    },
}

/// `std`'s, with our [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Torch { doing, text } => write!(f, "{doing}: {text}"),
            Error::Lengths { doing, got } => {
                write!(f, "{doing}: got lists of {got:?} tensors, due equal lengths")
            }
            Error::NotLendable { why } => write!(f, "lend the bytes of a tensor: {why}"),
        }
    }
}

impl std::error::Error for Error {}
