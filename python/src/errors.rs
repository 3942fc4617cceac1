//! Errors of our crates as Python's exceptions.
//!
//! The text of an exception is that of the error. Its class is the most usual one of Python for
//! that kind: `FileNotFoundError` and other kinds of `OSError` with `errno` and `filename` for what
//! a store reports, `ValueError` for arguments and settings, and classes of `feedline.errors` for
//! what Python has no class for.

use pyo3::exceptions::{
    PyFileExistsError, PyFileNotFoundError, PyIndexError, PyKeyError, PyKeyboardInterrupt,
    PyOSError, PyPermissionError, PyRuntimeError, PyValueError,
};
use pyo3::import_exception;
use pyo3::prelude::*;
use tools::ui::inspect_target::NothingFound;

import_exception!(feedline.errors, FeedlineError);
import_exception!(feedline.errors, CorruptError);
import_exception!(feedline.errors, StalledError);
import_exception!(feedline.errors, ClosedError);
import_exception!(feedline.errors, OtherDataError);
import_exception!(feedline.errors, InterruptedRunError);
import_exception!(feedline.errors, StepExistsError);
import_exception!(feedline.errors, FolderHeldError);
import_exception!(feedline.errors, AbortedError);

/// `errno` of Linux.
const ENOENT: i32 = 2;
const EIO: i32 = 5;
const EACCES: i32 = 13;
const EEXIST: i32 = 17;
const ENOSPC: i32 = 28;

/// An error of one of our crates as an exception.
pub(crate) trait IntoPython {
    /// The exception.
    fn into_python(self) -> PyErr;
}

/// The value, or the error as an exception.
pub(crate) trait OrRaise<T> {
    /// # Errors
    /// The exception of the error.
    fn or_raise(self) -> PyResult<T>;
}

impl<T, E: IntoPython> OrRaise<T> for Result<T, E> {
    fn or_raise(self) -> PyResult<T> {
        self.map_err(IntoPython::into_python)
    }
}

impl IntoPython for storage::Error {
    fn into_python(self) -> PyErr {
        of_storage(&self, self.to_string())
    }
}

/// The class is that of the store's error; the text may be from the crate that encountered it.
fn of_storage(error: &storage::Error, text: String) -> PyErr {
    use storage::Error as E;
    match error {
        E::NotFound { object } => PyFileNotFoundError::new_err((ENOENT, text, object.clone())),
        E::Exists { object } => PyFileExistsError::new_err((EEXIST, text, object.clone())),
        E::NoSpace { object, .. } => PyOSError::new_err((ENOSPC, text, object.clone())),
        E::Denied { object, .. } => PyPermissionError::new_err((EACCES, text, object.clone())),
        E::Io { object, source, .. } => {
            let errno = source.raw_os_error().unwrap_or(EIO);
            PyOSError::new_err((errno, text, object.clone()))
        }
        E::Remote(remote) => of_remote(remote, text),
        E::Corrupt { .. } | E::ShortRead { .. } | E::Changed { .. } => CorruptError::new_err(text),
        E::Stuck { .. } | E::StageTimeout { .. } => StalledError::new_err(text),
        E::BadKey { .. } | E::BadUrl { .. } => PyValueError::new_err(text),
        E::Interrupted => PyKeyboardInterrupt::new_err(text),
        _ => PyOSError::new_err((EIO, text)),
    }
}

/// The class is that of the cause.
fn of_remote(error: &storage::RemoteError, text: String) -> PyErr {
    use storage::RemoteErrorKind as K;
    let object = error.object.clone();
    match error.cause {
        K::NoCredentials | K::Expired | K::Denied => {
            PyPermissionError::new_err((EACCES, text, object))
        }
        K::NoBucket => PyFileNotFoundError::new_err((ENOENT, text, object)),
        K::Replaced => CorruptError::new_err(text),
        K::Stalled | K::Drip => StalledError::new_err(text),
        _ => PyOSError::new_err((EIO, text, object)),
    }
}

impl IntoPython for indexed::Error {
    fn into_python(self) -> PyErr {
        of_indexed(&self, self.to_string())
    }
}

/// The class is that of the error; the text may be of the crate that met it.
fn of_indexed(error: &indexed::Error, text: String) -> PyErr {
    use indexed::Error as E;
    match error {
        E::Storage(error) => of_storage(error, text),
        E::NoDataset { prefix, .. } => PyFileNotFoundError::new_err((ENOENT, text, prefix.clone())),
        E::Malformed { .. } | E::BadCache { .. } | E::BadPlace { .. } => {
            CorruptError::new_err(text)
        }
        E::NotKept { .. } | E::LeftBehind { .. } => PyOSError::new_err((EIO, text)),
        _ => PyValueError::new_err(text),
    }
}

impl IntoPython for loader::Error {
    fn into_python(self) -> PyErr {
        use loader::Error as E;
        let text = self.to_string();
        match self {
            E::Storage(error) => of_storage(&error, text),
            E::Indexed(error) => error.into_python(),
            E::FileLength { .. } | E::PieceOutside { .. } | E::BlendSample { .. } => {
                CorruptError::new_err(text)
            }
            E::Late { .. } => StalledError::new_err(text),
            E::TooFewSamples { .. } => PyIndexError::new_err(text),
            E::Option { .. } | E::SampleLength { .. } | E::Triple { .. } | E::Sample { .. } => {
                PyValueError::new_err(text)
            }
            E::ThreadPanicked => PyRuntimeError::new_err(text),
            _ => FeedlineError::new_err(text),
        }
    }
}

impl IntoPython for preprocess::Error {
    fn into_python(self) -> PyErr {
        let text = self.to_string();
        of_preprocess(self, text)
    }
}

/// The text may be that of an enclosing error.
fn of_preprocess(error: preprocess::Error, text: String) -> PyErr {
    use preprocess::Error as E;
    match error {
        E::Storage(error) => of_storage(&error, text),
        E::Indexed(error) => of_indexed(&error, text),
        E::Stream { source, .. } => {
            PyOSError::new_err((source.raw_os_error().unwrap_or(EIO), text))
        }
        E::Complete { .. } | E::OtherSettings { .. } => PyFileExistsError::new_err((EEXIST, text)),
        E::WasInterrupted { .. } | E::OtherRun { .. } | E::Changed { .. } => {
            InterruptedRunError::new_err(text)
        }
        E::Stopped => PyKeyboardInterrupt::new_err(text),
        // What failed decides the class; that it can be resumed is in the text.
        E::CanResume { source } => of_preprocess(*source, text),
        _ => PyValueError::new_err(text),
    }
}

impl IntoPython for ckpt::Error {
    fn into_python(self) -> PyErr {
        use ckpt::Error as E;
        let text = self.to_string();
        match self {
            E::Storage(error) => of_storage(&error, text),
            E::StepExists { object } => StepExistsError::new_err((EEXIST, text, object)),
            E::NoStep { object, .. } | E::Uncommitted { object } => {
                PyFileNotFoundError::new_err((ENOENT, text, object))
            }
            E::NoTensor { .. } | E::NoBlob { .. } => PyKeyError::new_err(text),
            E::Corrupt { .. } | E::BadManifest { .. } => CorruptError::new_err(text),
            E::Held { .. } | E::LeaseLost { .. } => FolderHeldError::new_err(text),
            E::Aborted { .. } => AbortedError::new_err(text),
            E::Cancelled => PyKeyboardInterrupt::new_err(text),
            E::Panicked { .. } => PyRuntimeError::new_err(text),
            E::BadRequest { .. }
            | E::BadInput { .. }
            | E::BadState { .. }
            | E::BadLayout { .. }
            | E::OtherModel { .. }
            | E::Unfit { .. } => PyValueError::new_err(text),
            _ => FeedlineError::new_err(text),
        }
    }
}

impl IntoPython for feed::Error {
    fn into_python(self) -> PyErr {
        match self {
            feed::Error::Storage(error) => error.into_python(),
            feed::Error::Indexed(error) => error.into_python(),
            feed::Error::Loader(error) => error.into_python(),
            feed::Error::Tokenizer(error) => error.into_python(),
            other => PyValueError::new_err(other.to_string()),
        }
    }
}

impl IntoPython for recipe::config::ConfigError {
    fn into_python(self) -> PyErr {
        let text = self.to_string();
        match self {
            recipe::config::ConfigError::Read { source, .. } => of_storage(&source, text),
            _ => PyValueError::new_err(text),
        }
    }
}

/// A chain of errors of the verbs: the first that a crate of Feedline raised decides the class.
impl IntoPython for anyhow::Error {
    fn into_python(self) -> PyErr {
        let text = storage::one_line(&*self).to_string();
        let this = match self.downcast::<ckpt::Error>() {
            Ok(error) => return error.into_python(),
            Err(other) => other,
        };
        for cause in this.chain() {
            if let Some(error) = cause.downcast_ref::<storage::Error>() {
                return of_storage(error, text);
            }
            if cause.is::<NothingFound>() {
                return PyFileNotFoundError::new_err((ENOENT, text));
            }
            if let Some(indexed::Error::NoDataset { prefix, .. }) = cause.downcast_ref() {
                return PyFileNotFoundError::new_err((ENOENT, text, prefix.clone()));
            }
        }
        PyValueError::new_err(text)
    }
}
