use std::{fmt, io};

/// What went wrong: what we were doing, to what, what came, what was due.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The store failed.
    Storage(storage::Error),
    /// The token files could not be written.
    Indexed(Box<indexed::Error>),
    /// A line of an input is not what it should be.
    BadLine(Box<BadLine>),
    /// An input cannot be used at all.
    BadInput {
        /// The input.
        input: String,
        /// What came.
        found: String,
        /// What was due.
        expected: String,
    },
    /// An option has a value that cannot be used.
    BadOption {
        /// Its name, as on the command line but without the dashes.
        name: &'static str,
        /// What came.
        found: String,
        /// What was due.
        expected: String,
    },
    /// A file of a vocabulary is not what it should be.
    BadVocab {
        /// The file.
        file: String,
        /// The line, counted from 1, where lines have a meaning.
        line: Option<u64>,
        /// What came.
        found: String,
        /// What was due.
        expected: String,
    },
    /// An id that no token has.
    UnknownToken {
        /// The id.
        id: u32,
        /// How many there are.
        vocab_size: u32,
    },
    /// An input that is a stream broke off: standard input, or what a decoder makes.
    Stream {
        /// The input.
        input: String,
        /// Bytes that came before, decompressed.
        offset: u64,
        /// How far in what is stored a decoder was, if there is one.
        stored: Option<u64>,
        /// What the system or the decoder said.
        source: io::Error,
    },
    /// The system has no memory for a document.
    NoMemory {
        /// The input.
        input: String,
        /// Bytes that came before, decompressed.
        offset: u64,
        /// How many were due in one piece.
        bytes: u64,
    },
    /// Some outputs were finished when a later one failed, and could not be taken back.
    LeftBehind {
        /// The output that is there still.
        file: String,
        /// Why the later one failed.
        source: Box<Error>,
    },
    /// An earlier run of the same outputs was interrupted.
    WasInterrupted {
        /// Its journal.
        object: String,
    },
    /// An earlier run of the same outputs was of other settings.
    OtherRun {
        /// Its journal.
        journal: String,
        /// Which setting.
        key: String,
        /// What it was there.
        there: String,
        /// What it is here.
        here: String,
    },
    /// All that a resumed run was to make is there.
    Complete {
        /// The manifest that says so.
        object: String,
    },
    /// All outputs are there, but of a run with other settings or inputs.
    OtherSettings {
        /// A manifest of theirs.
        object: String,
    },
    /// The run was asked to stop, and can be gone on with.
    Stopped,
    /// The run failed, but what it had committed can be gone on with.
    CanResume {
        /// Why it failed.
        source: Box<Error>,
    },
}

/// A line of an input that is not what it should be, and where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BadLine {
    /// The input.
    pub input: String,
    /// The line, counted from 1; none if the file was entered in the middle.
    pub line: Option<u64>,
    /// Where the line begins, in bytes from the start of the file.
    pub offset: u64,
    /// Where in the line the fault is, in bytes from its start, counted from 0.
    pub column: u64,
    /// The input is compressed, and `offset` counts decompressed bytes.
    pub decompressed: bool,
    /// What came.
    pub found: String,
    /// What was due.
    pub expected: String,
    /// The likely cause.
    pub hint: Option<&'static str>,
}

/// `std`'s, with our [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

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
