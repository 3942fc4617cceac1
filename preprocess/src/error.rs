use std::{fmt, io};

use crate::EncodeError;

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
        /// A command or a setting that may help.
        hint: Option<String>,
    },
    /// An option has an invalid value.
    BadOption {
        /// Its name, as on the command line without the dashes.
        name: &'static str,
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
        /// A command or a setting that may help.
        hint: Option<String>,
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
        /// A command or a setting that may help.
        hint: Option<String>,
    },
    /// A text cannot be encoded.
    BadText {
        /// Its index in the batch, from 0.
        text: usize,
        /// Why.
        refused: Box<EncodeError>,
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
        /// Decompressed bytes read before it.
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
        /// Decompressed bytes read before it.
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
    /// An input or a draft of a resumed run differs from its record in the journal.
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
    /// The run failed, but can be resumed from its last commit.
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
    /// The system cannot start a thread.
    pub(crate) fn no_thread(source: io::Error) -> Self {
        storage::Error::from_io("start", "a thread", source).into()
    }

    /// Adds a command or a setting that may help to an error that has a place for it.
    pub(crate) fn with_hint(mut self, text: impl Into<String>) -> Self {
        if let Error::BadInput { hint, .. }
        | Error::BadOption { hint, .. }
        | Error::BadVocab { hint, .. } = &mut self
        {
            *hint = Some(text.into());
        }
        self
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
            Error::BadInput { input, found, expected, hint } => {
                write!(f, "cannot read {input}")?;
                write_mismatch(f, expected, found, hint.as_deref())
            }
            Error::BadOption { name, found, expected, hint } => {
                write!(f, "cannot use --{name}")?;
                write_mismatch(f, expected, found, hint.as_deref())
            }
            Error::BadVocab { file, line, found, expected, hint } => {
                write!(f, "cannot read {file}")?;
                line.map_or(Ok(()), |line| write!(f, ", line {line}"))?;
                write_mismatch(f, expected, found, hint.as_deref())
            }
            Error::BadText { text, refused } => {
                let EncodeError { found, expected, hint } = refused.as_ref();
                write!(f, "cannot encode text {text}")?;
                write_mismatch(f, expected, found, *hint)
            }
            Error::UnknownToken { id, vocab_size } => {
                write!(f, "cannot decode token {id}: expected an id below {vocab_size} ")?;
                write!(f, "(hint: use the tokenizer that wrote the tokens)")
            }
            Error::Stream { input, offset, stored, source } => {
                write_stream(f, input, *offset, *stored, source)
            }
            Error::NoMemory { input, offset, bytes } => {
                write!(f, "cannot read {input} after {offset} bytes: cannot allocate {bytes} ")?;
                write!(f, "bytes for one document (hint: lower --line-max to refuse it)")
            }
            Error::LeftBehind { file, source } => {
                write!(f, "{source}; {file} was not rolled back (hint: delete it)")
            }
            Error::WasInterrupted { object } => {
                write!(f, "cannot create {object}: an earlier run was interrupted, or is still ")?;
                write!(f, "running (hint: --resume continues it, --restart discards it)")
            }
            Error::OtherRun { journal, key, there, here } => {
                write!(f, "cannot resume {journal}: expected {key} = {there}, found {here} ")?;
                write!(f, "(hint: use the settings of the interrupted run, or --restart)")
            }
            Error::Changed { object, expected, found } => {
                write!(f, "cannot resume with {object}: expected {expected}, found {found} ")?;
                write!(f, "(hint: restore it, or start from scratch with --restart)")
            }
            Error::Complete { object } => {
                write!(f, "{object}: outputs are already complete; nothing to do")
            }
            Error::OtherSettings { object } => {
                write!(f, "cannot resume {object}: outputs are complete, but of other settings ")?;
                write!(f, "or inputs (hint: choose another --out, or delete the outputs)")
            }
            Error::Stopped => f.write_str("stopped on request; --resume continues from here"),
            Error::CanResume { source } => {
                write!(f, "{source}; committed output is retained, and --resume continues from it")
            }
        }
    }
}

impl fmt::Display for BadLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BadLine { input, line, offset, column, found, expected, .. } = self;
        let stream = if self.decompressed { "decompressed stream" } else { "file" };
        write!(f, "cannot read {input}, ")?;
        match line {
            Some(line) => write!(f, "line {line} (byte {offset} of the {stream}), ")?,
            None => write!(f, "the line at byte {offset} of the {stream}, ")?,
        }
        write!(f, "at byte {column} of the line")?;
        write_mismatch(f, expected, found, self.hint)
    }
}

fn write_mismatch(
    f: &mut fmt::Formatter<'_>,
    expected: &str,
    found: &str,
    hint: Option<&str>,
) -> fmt::Result {
    write!(f, ": expected {expected}, found {found}")?;
    hint.map_or(Ok(()), |hint| write!(f, " (hint: {hint})"))
}

fn write_stream(
    f: &mut fmt::Formatter<'_>,
    input: &str,
    offset: u64,
    stored: Option<u64>,
    source: &io::Error,
) -> fmt::Result {
    write!(f, "cannot read {input} after {offset} ")?;
    match stored {
        Some(stored) => write!(f, "decompressed bytes, at byte {stored} of the file")?,
        None => f.write_str("bytes")?,
    }
    write!(f, ": {source}")?;
    match source.kind() {
        io::ErrorKind::UnexpectedEof => f.write_str(" (hint: the file may be truncated)"),
        _ => Ok(()),
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
