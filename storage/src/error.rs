use std::{fmt, io};

/// What went wrong: what we were doing, to what, what came, what was due.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// There is no such object or folder.
    NotFound {
        /// Its full name.
        what: String,
    },
    /// The name is taken, and nothing is ever overwritten.
    Exists {
        /// Its full name.
        what: String,
    },
    /// The store is full, or the quota is.
    NoSpace {
        /// The object that was being written.
        what: String,
        /// Bytes that were to be written.
        need_bytes: u64,
        /// Bytes that were free, if the store told.
        free_bytes: Option<u64>,
    },
    /// An operating system call failed.
    Io {
        /// What we were doing, such as `read 4096 bytes at 8192 of`.
        doing: String,
        /// The object.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// The object ended before the read did.
    ShortRead {
        /// The object.
        what: String,
        /// Where the read began.
        offset: u64,
        /// Bytes that came.
        got: u64,
        /// Bytes that were due.
        due: u64,
        /// The length of the object.
        len_bytes: u64,
    },
    /// The bytes are not what they should be.
    Corrupt {
        /// The object.
        what: String,
        /// Where in it.
        offset: u64,
        /// What came.
        got: String,
        /// What was due.
        due: String,
    },
    /// A name that no store may have.
    BadKey {
        /// The name.
        key: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A URL that cannot be used.
    BadUrl {
        /// As it was given.
        url: String,
        /// What is wrong with it.
        why: String,
    },
    /// The store has no such thing.
    Unsupported {
        /// What we were doing, such as `begin a draft of`.
        doing: &'static str,
        /// The object.
        what: String,
    },
    /// Another process is writing it.
    Locked {
        /// The object.
        what: String,
    },
    /// The handle has failed before; what it would write now could not be trusted.
    Poisoned {
        /// The object.
        what: String,
        /// The first failure, as text.
        first: String,
    },
}

/// `std`'s, with our [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An operating system error, sorted into the variant that says most: absent, taken, full, or
    /// [`Error::Io`].
    #[must_use]
    pub fn from_io(doing: impl Into<String>, what: impl Into<String>, source: io::Error) -> Self {
        let what = what.into();
        match source.kind() {
            io::ErrorKind::NotFound => Error::NotFound { what },
            io::ErrorKind::AlreadyExists => Error::Exists { what },
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Error::NoSpace { what, need_bytes: 0, free_bytes: None }
            }
            _ => Error::Io { doing: doing.into(), what, source },
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::NotFound { what } => write!(f, "{what}: no such file or folder"),
            Error::Exists { what } => write!(f, "{what}: exists already, and is not overwritten"),
            Error::NoSpace { what, need_bytes, free_bytes } => {
                write!(f, "write {what}: no space left on the device")?;
                match (need_bytes, free_bytes) {
                    (0, _) => Ok(()),
                    (need, Some(free)) => write!(f, " ({need} bytes due, {free} free)"),
                    (need, None) => write!(f, " ({need} bytes due)"),
                }
            }
            Error::Io { doing, what, source } => write!(f, "{doing} {what}: {source}"),
            Error::ShortRead { what, offset, got, due, len_bytes } => write!(
                f,
                "read {due} bytes at {offset} of {what}: got {got}, then end of file \
                 (object is {len_bytes} bytes)"
            ),
            Error::Corrupt { what, offset, got, due } => {
                write!(f, "{what}, at byte {offset}: got {got}, due {due}")
            }
            Error::BadKey { key, why } => write!(f, "name {key:?} {why}"),
            Error::BadUrl { url, why } => write!(f, "cannot use '{url}': {why}"),
            Error::Unsupported { doing, what } => {
                write!(f, "{doing} {what}: this kind of store cannot")
            }
            Error::Locked { what } => write!(f, "{what}: another process is writing it"),
            Error::Poisoned { what, first } => {
                write!(f, "write {what}: an earlier write failed ({first})")
            }
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}
