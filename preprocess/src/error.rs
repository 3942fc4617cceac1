use std::{fmt, io};

/// The errors of this crate: the operation, its object, what was found and what was expected.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The store failed.
    Storage(storage::Error),
    /// The token files could not be written.
    Indexed(Box<indexed::Error>),
    /// A line of an input is invalid.
    BadLine(Box<BadLine>),
    /// An input cannot be used at all.
    BadInput {
        /// The input.
        input: String,
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// An option has an invalid value.
    BadOption {
        /// Its name, as on the command line without the dashes.
        name: &'static str,
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// A file of a vocabulary is invalid.
    BadVocab {
        /// The file.
        file: String,
        /// The line, counted from 1, where lines have a meaning.
        line: Option<u64>,
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// No token has this id.
    UnknownToken {
        /// The id.
        id: u32,
        /// The number of ids.
        vocab_size: u32,
    },
    /// Reading a stream failed: standard input, or the output of a decoder.
    Stream {
        /// The input.
        input: String,
        /// Bytes that came before, decompressed.
        offset: u64,
        /// Offset of the decoder in the stored input, if there is one.
        stored: Option<u64>,
        /// The error of the system or the decoder.
        source: io::Error,
    },
    /// The memory for a document cannot be allocated.
    NoMemory {
        /// The input.
        input: String,
        /// Bytes that came before, decompressed.
        offset: u64,
        /// Bytes requested in one allocation.
        bytes: u64,
    },
    /// Some outputs were finished when a later one failed, and could not be rolled back.
    LeftBehind {
        /// The output that still exists.
        file: String,
        /// Why the later one failed.
        source: Box<Error>,
    },
    /// An earlier run of the same outputs was interrupted.
    WasInterrupted {
        /// Its journal.
        object: String,
    },
    /// An earlier run of the same outputs had other settings.
    OtherRun {
        /// Its journal.
        journal: String,
        /// The setting.
        key: String,
        /// Its value in the earlier run.
        there: String,
        /// Its value in this run.
        here: String,
    },
    /// An input or a draft of a resumed run is not what the journal recorded.
    Changed {
        /// The input, or a part of a draft.
        object: String,
        /// What was expected.
        expected: String,
        /// What was found.
        found: String,
    },
    /// All outputs of a resumed run exist already.
    Complete {
        /// The manifest that shows it.
        object: String,
    },
    /// All outputs exist, but of a run with other settings or inputs.
    OtherSettings {
        /// One of their manifests.
        object: String,
    },
    /// The run was asked to stop, and can be resumed.
    Stopped,
    /// The run failed, but can be resumed from what it had committed.
    CanResume {
        /// The error.
        source: Box<Error>,
    },
}

/// An invalid line of an input, and its position.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BadLine {
    /// The input.
    pub input: String,
    /// The line, counted from 1; `None` if reading started in the middle of the file.
    pub line: Option<u64>,
    /// Start of the line, in bytes from the start of the file.
    pub offset: u64,
    /// Position of the error in the line, in bytes from its start, counted from 0.
    pub column: u64,
    /// The input is compressed, and `offset` counts decompressed bytes.
    pub decompressed: bool,
    /// What was found.
    pub found: String,
    /// What was expected.
    pub expected: String,
    /// The likely cause.
    pub hint: Option<&'static str>,
}

/// `std`'s, with our [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// The system starts no more threads.
    pub(crate) fn no_thread(source: io::Error) -> Self {
        storage::Error::from_io("start", "a thread", source).into()
    }
}

impl From<storage::Error> for Error {
    fn from(error: storage::Error) -> Self {
        Error::Storage(error)
    }
}

impl From<indexed::Error> for Error {
    fn from(error: indexed::Error) -> Self {
        match error {
            indexed::Error::Storage(error) => Error::Storage(error),
            other => Error::Indexed(Box::new(other)),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Storage(error) => error.fmt(f),
            Error::Indexed(error) => error.fmt(f),
            Error::BadLine(line) => line.fmt(f),
            Error::BadInput { input, found, expected } => {
                write!(f, "read {input}: got {found}, due {expected}")
            }
            Error::BadOption { name, found, expected } => {
                write!(f, "--{name}: got {found}, due {expected}")
            }
            Error::BadVocab { file, line: None, found, expected } => {
                write!(f, "read {file}: got {found}, due {expected}")
            }
            Error::BadVocab { file, line: Some(line), found, expected } => {
                write!(f, "read {file}, line {line}: got {found}, due {expected}")
            }
            Error::UnknownToken { id, vocab_size } => {
                write!(f, "decode token {id}: due an id below {vocab_size}")?;
                write!(f, "; hint: the tokens may be of another tokenizer")
            }
            Error::Stream { input, offset, stored, source } => {
                write!(f, "read {input}, after {offset} bytes")?;
                if let Some(stored) = stored {
                    write!(f, ", decompressed, at byte {stored} of the file")?;
                }
                write!(f, ": {source}")?;
                match source.kind() {
                    io::ErrorKind::UnexpectedEof => {
                        write!(f, "; hint: the file may have been cut short")
                    }
                    _ => Ok(()),
                }
            }
            Error::NoMemory { input, offset, bytes } => {
                write!(f, "read {input}, after {offset} bytes: no memory for {bytes} bytes")?;
                write!(f, " of one document; hint: lower --line-max, and it is refused instead")
            }
            Error::LeftBehind { file, source } => {
                write!(f, "{source}; and {file} could not be taken back; hint: delete it")
            }
            Error::WasInterrupted { object } => {
                write!(f, "{object}: an earlier run was interrupted, or is at work; hint: go on ")?;
                write!(f, "with it by --resume, or throw it away by --restart")
            }
            Error::OtherRun { journal, key, there, here } => {
                write!(f, "go on with {journal}: '{key}' was {there} there and is {here} here; ")?;
                write!(f, "hint: give what was given there, or begin anew with --restart")
            }
            Error::Changed { object, expected, found } => {
                write!(f, "cannot resume with {object}: expected {expected}, found {found} ")?;
                write!(f, "(hint: restore it, or start from scratch with --restart)")
            }
            Error::Complete { object } => {
                write!(f, "{object}: the outputs are complete already")
            }
            Error::OtherSettings { object } => {
                write!(f, "{object}: the outputs are complete, but of other settings or inputs; ")?;
                write!(f, "hint: give another --out, or delete them")
            }
            Error::Stopped => f.write_str("stopped as asked; --resume goes on from here"),
            Error::CanResume { source } => {
                write!(f, "{source}; what was done stays: --resume goes on with it")
            }
        }
    }
}

impl fmt::Display for BadLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BadLine { input, line, offset, column, found, expected, .. } = self;
        let stream = if self.decompressed { "decompressed stream" } else { "file" };
        match line {
            Some(line) => write!(f, "read {input}, line {line} (byte {offset} of the {stream}), ")?,
            None => write!(f, "read {input}, the line at byte {offset} of the {stream}, ")?,
        }
        write!(f, "at byte {column} of the line: got {found}, due {expected}")?;
        self.hint.map_or(Ok(()), |hint| write!(f, "; hint: {hint}"))
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Storage(error) => std::error::Error::source(error),
            Error::Indexed(error) => std::error::Error::source(error.as_ref()),
            Error::Stream { source, .. } => Some(source),
            Error::LeftBehind { source, .. } | Error::CanResume { source } => Some(source),
            _ => None,
        }
    }
}
