use std::time::Duration;
use std::{fmt, io};

/// An error of a store: the operation, the object, what was found and what was expected.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// No such object or folder.
    NotFound {
        /// Its full name.
        object: String,
    },
    /// The name is taken; nothing is ever overwritten.
    Exists {
        /// Its full name.
        object: String,
    },
    /// The store or the quota is full.
    NoSpace {
        /// The object being written.
        object: String,
        /// Bytes needed.
        need_bytes: u64,
        /// Bytes free, if the store reports them.
        free_bytes: Option<u64>,
    },
    /// An operating system call failed.
    Io {
        /// The operation after `cannot`, such as `read 4096 bytes at byte 8192 of`.
        operation: String,
        /// The object.
        object: String,
        /// The error of the system.
        source: io::Error,
    },
    /// The object ended before the read did.
    ShortRead {
        /// The object.
        object: String,
        /// Where the read started.
        offset: u64,
        /// Bytes read.
        found: u64,
        /// Bytes expected.
        expected: u64,
        /// The length of the object.
        len_bytes: u64,
    },
    /// The object changed while open: it was truncated, or its name now belongs to another file.
    Changed {
        /// The object.
        object: String,
        /// Offset of the read.
        offset: u64,
        /// Its length when it was opened.
        len_then: u64,
        /// Its length now, if known.
        len_now: Option<u64>,
    },
    /// The server does not know the file handle (`ESTALE`), also after a reopen.
    Stale {
        /// The operation.
        operation: String,
        /// The object.
        object: String,
    },
    /// Permission denied.
    Denied {
        /// The operation.
        operation: String,
        /// The object.
        object: String,
        /// The error of the system.
        source: io::Error,
    },
    /// A requested I/O method does not work on this machine.
    Refused {
        /// The method, such as `engine ring`.
        way: String,
        /// What refuses it, and why.
        reason: String,
    },
    /// A request does not complete.
    Stuck {
        /// The object.
        object: String,
        /// Offset in the object.
        offset: u64,
        /// How long it has been in flight.
        age: Duration,
        /// How it is read, such as `lustre, ring`.
        backend: String,
        /// The server that has these bytes, such as `OST0007`; empty if unknown.
        placement: String,
    },
    /// A startup step exceeded its time limit.
    StageTimeout {
        /// The step after `cannot`, such as `open corpus.bin`.
        stage: String,
        /// The time limit.
        limit: Duration,
    },
    /// The object is corrupt.
    Corrupt {
        /// The object.
        object: String,
        /// Offset in the object.
        offset: u64,
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// A remote store refused a request, or gave an invalid response.
    Remote(Box<crate::RemoteError>),
    /// An invalid key.
    BadKey {
        /// The name.
        key: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A URL that cannot be used.
    BadUrl {
        /// The URL as given.
        url: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The store does not support the operation.
    Unsupported {
        /// The operation after `cannot`, such as `resume an upload of`.
        operation: &'static str,
        /// The object.
        object: String,
    },
    /// Another process is writing it.
    Locked {
        /// The object.
        object: String,
    },
    /// The caller cancelled the operation, through a store that wraps this one.
    Interrupted,
    /// An earlier call on this handle failed, so its data cannot be trusted.
    Poisoned {
        /// The object.
        object: String,
        /// The first failure, as text.
        first: String,
    },
}

/// [`std::result::Result`] with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Converts an operating system error into the most specific variant: absent, taken, full, not
    /// allowed, stale, or [`Error::Io`].
    #[must_use]
    pub fn from_io(
        operation: impl Into<String>,
        object: impl Into<String>,
        source: io::Error,
    ) -> Self {
        let object = object.into();
        match source.kind() {
            io::ErrorKind::NotFound => Error::NotFound { object },
            io::ErrorKind::AlreadyExists => Error::Exists { object },
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Error::NoSpace { object, need_bytes: 0, free_bytes: None }
            }
            io::ErrorKind::PermissionDenied => {
                Error::Denied { operation: operation.into(), object, source }
            }
            io::ErrorKind::StaleNetworkFileHandle => {
                Error::Stale { operation: operation.into(), object }
            }
            _ => Error::Io { operation: operation.into(), object, source },
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::NotFound { object } => {
                write!(f, "cannot access {object}: no such file or folder")
            }
            Error::Exists { object } => {
                write!(f, "cannot create {object}: already exists (hint: choose another name)")
            }
            Error::NoSpace { object, need_bytes, free_bytes } => {
                write!(f, "cannot write {object}: no space left on device")?;
                match (need_bytes, free_bytes) {
                    (0, _) => Ok(()),
                    (need, Some(free)) => write!(f, " (need {need} bytes, {free} free)"),
                    (need, None) => write!(f, " (need {need} bytes)"),
                }
            }
            Error::Io { operation, object, source }
            | Error::Denied { operation, object, source } => {
                write!(f, "cannot {operation} {object}: {source}")
            }
            Error::ShortRead { object, offset, found, expected, len_bytes } => {
                write!(
                    f,
                    "cannot read {object}: expected {expected} bytes at byte {offset}, found end \
                     of file after {found} bytes (object has {len_bytes} bytes)"
                )
            }
            Error::Changed { object, offset, len_then, len_now } => {
                write!(f, "cannot read {object} at byte {offset}: ")?;
                fmt_change(f, *len_then, *len_now)?;
                f.write_str(" (hint: do not modify a file that a run reads)")
            }
            Error::Stale { operation, object } => write!(
                f,
                "cannot {operation} {object}: stale file handle (hint: the file was replaced on \
                 the server, or the server lost its state in a restart)"
            ),
            Error::Refused { way, reason } => write!(f, "cannot use {way}: {reason}"),
            Error::Stuck { object, offset, age, backend, placement } => {
                write!(f, "cannot read {object} at byte {offset}: ")?;
                write!(f, "no completion for {} s ({backend}", age.as_secs())?;
                if !placement.is_empty() {
                    write!(f, ", from {placement}")?;
                }
                f.write_str(") (hint: this process may not exit until the server responds)")
            }
            Error::StageTimeout { stage, limit } => {
                write!(f, "cannot {stage}: not done after {} s", limit.as_secs_f32())?;
                f.write_str(" (hint: the file system does not respond)")
            }
            Error::Corrupt { object, offset, found, expected } => {
                write!(
                    f,
                    "cannot read {object}: expected {expected}, found {found} at byte {offset}"
                )
            }
            Error::Remote(remote) => write!(f, "{remote}"),
            Error::BadKey { key, reason } => write!(f, "cannot use key {key:?}: {reason}"),
            Error::BadUrl { url, reason } => write!(f, "cannot use '{url}': {reason}"),
            Error::Unsupported { operation, object } => {
                write!(f, "cannot {operation} {object}: not supported by this store")
            }
            Error::Locked { object } => {
                write!(f, "cannot write {object}: another process is writing it")
            }
            Error::Interrupted => f.write_str("interrupted"),
            Error::Poisoned { object, first } => {
                write!(f, "cannot write {object}: an earlier write failed: {first}")
            }
        }
    }
}

/// How an open file changed.
fn fmt_change(f: &mut fmt::Formatter<'_>, len_then: u64, len_now: Option<u64>) -> fmt::Result {
    match len_now {
        Some(now) if now == len_then => f.write_str("file was replaced while open"),
        Some(now) => {
            write!(f, "file changed while open: expected {len_then} bytes, found {now} bytes")
        }
        None => write!(f, "file changed while open: its length was {len_then} bytes"),
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Io { source, .. } | Error::Denied { source, .. } => Some(source),
            _ => None,
        }
    }
}

/// Formats an error and its causes in one line. A cause that an outer error already includes in its
/// text, as most of this crate's do, is not repeated. The result is printable: see
/// [`crate::printable_message`].
#[must_use]
pub fn one_line(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    super::printable::printable_message(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Outer(Error);

    impl fmt::Display for Outer {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("cannot write the report")
        }
    }

    impl std::error::Error for Outer {
        fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
            Some(&self.0)
        }
    }

    #[test]
    fn one_line_repeats_no_cause() {
        let error = Error::from_io("open", "a.txt", io::Error::other("bad luck"));
        assert_eq!(one_line(&error), "cannot open a.txt: bad luck");
        let outer = Outer(error);
        assert_eq!(one_line(&outer), "cannot write the report: cannot open a.txt: bad luck");
        let error = Error::from_io("open", "\u{1b}[2J", io::Error::other("bad luck"));
        assert_eq!(one_line(&error), "cannot open \\u{1b}[2J: bad luck");
    }
}
