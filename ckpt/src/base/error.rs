use std::fmt;

use crate::Group;

/// The errors of this crate: the operation, its object, what was found and what was expected.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The store failed, or is full.
    Storage(storage::Error),
    /// The step exists already, and is not overwritten.
    StepExists {
        /// The step's folder.
        object: String,
    },
    /// There is no such step.
    NoStep {
        /// The step's folder, as it would be.
        object: String,
        /// Existing steps, nearest first.
        similar: Vec<u64>,
    },
    /// The checkpoint has no such tensor.
    NoTensor {
        /// The checkpoint's folder.
        object: String,
        /// The requested name.
        name: String,
        /// The requested group.
        group: Group,
        /// Existing tensors with the most similar names, as `group name`.
        similar: Vec<String>,
    },
    /// The checkpoint has no such blob.
    NoBlob {
        /// The checkpoint's folder.
        object: String,
        /// The requested name.
        name: String,
        /// Existing blobs.
        similar: Vec<String>,
    },
    /// The buffer or region passed by the caller does not fit the tensor.
    BadRequest {
        /// The operation, as a verb.
        operation: &'static str,
        /// The tensor, as `group name`.
        object: String,
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// The caller's input cannot be saved.
    BadInput {
        /// The tensor, blob or step.
        object: String,
        /// Why it was rejected.
        reason: String,
    },
    /// A thread of the save panicked.
    Panicked {
        /// The step, and which writer this process is.
        object: String,
    },
    /// An offloaded state cannot be used this way.
    BadState {
        /// The operation, as a verb.
        operation: &'static str,
        /// The state, or its folders.
        object: String,
        /// Why it was rejected.
        reason: String,
    },
    /// The model cannot be partitioned this way.
    BadLayout {
        /// The mesh or the parameter.
        object: String,
        /// Why it was rejected.
        reason: String,
    },
    /// The checkpoint does not match the model to be loaded.
    OtherModel {
        /// The checkpoint's folder.
        object: String,
        /// Tensors of the model that the checkpoint lacks, as `group 'name'`.
        missing: Vec<String>,
        /// Tensors of the checkpoint that the model lacks.
        extra: Vec<String>,
        /// Tensors that both have with different types or shapes, and the difference.
        different: Vec<String>,
    },
    /// The input of a conversion does not fit its output.
    Unfit {
        /// The tensor, model or file.
        object: String,
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// The stored bytes differ from those that were saved.
    Corrupt {
        /// The file.
        object: String,
        /// The byte offset in it.
        offset: u64,
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// The manifest is intact but invalid.
    BadManifest {
        /// The manifest.
        object: String,
        /// The field or tensor in it.
        place: String,
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// The step is being written or deleted, or a crash interrupted either.
    Uncommitted {
        /// The step's folder.
        object: String,
    },
    /// A joint save was aborted by all writers.
    Aborted {
        /// The step, and which writer this process is.
        object: String,
        /// The writer that failed, and its error.
        reason: String,
    },
    /// Another process considered this one dead, and has taken over the lease. That is final: this
    /// process changes nothing in the folder any more.
    LeaseLost {
        /// The folder.
        object: String,
        /// The process that took over.
        holder: String,
    },
    /// The second store has other contents under the name of the step to be copied.
    Differs {
        /// The step's folder.
        object: String,
        /// The one in the second store.
        other: String,
    },
    /// The save or copy was cancelled. Nothing of it is visible.
    Cancelled,
    /// A save in the background failed; the error was returned before.
    Reported {
        /// The step that was not saved.
        step: u64,
        /// The text of the error.
        first: String,
    },
    /// The agent process failed.
    Agent {
        /// What it reported, or how it ended.
        reason: String,
    },
    /// Another process writes into this folder.
    Held {
        /// The folder.
        object: String,
        /// The process that holds the lease.
        holder: String,
        /// The lease to delete if that process is known to be dead.
        lease: String,
    },
}

/// `std`'s, with our [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Whether the checkpoint is damaged or unfinished, as opposed to the store being unavailable.
    pub(crate) fn is_damage(&self) -> bool {
        use storage::Error as Store;
        match self {
            Error::Corrupt { .. }
            | Error::BadManifest { .. }
            | Error::NoStep { .. }
            | Error::Uncommitted { .. } => true,
            Error::Storage(error) => matches!(
                error,
                Store::NotFound { .. }
                    | Store::Corrupt { .. }
                    | Store::ShortRead { .. }
                    | Store::BadKey { .. }
            ),
            _ => false,
        }
    }
}

impl From<storage::Error> for Error {
    fn from(error: storage::Error) -> Self {
        Error::Storage(error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Storage(error) => error.fmt(f),
            Error::StepExists { object } => {
                write!(f, "cannot save {object}: step already exists and is not overwritten")
            }
            Error::NoStep { object, similar } => {
                write!(f, "cannot open {object}: no such step")?;
                similar_text(f, "steps", &similar.iter().map(u64::to_string).collect::<Vec<_>>())
            }
            Error::NoTensor { object, name, group, similar } => {
                write!(f, "cannot read {group} '{name}' of {object}: no such tensor")?;
                similar_text(f, "tensors", similar)
            }
            Error::NoBlob { object, name, similar } => {
                write!(f, "cannot read extra '{name}' of {object}: no such blob")?;
                similar_text(f, "blobs", similar)
            }
            Error::BadRequest { operation, object, found, expected } => {
                write!(f, "cannot {operation} {object}: expected {expected}, found {found}")
            }
            Error::BadState { operation, object, reason } => {
                write!(f, "cannot {operation} {object}: {reason}")
            }
            Error::Unfit { object, found, expected } => {
                write!(f, "cannot convert {object}: expected {expected}, found {found}")
            }
            Error::BadInput { object, reason } => write!(f, "cannot save {object}: {reason}"),
            Error::Panicked { object } => write!(f, "cannot save {object}: a thread panicked"),
            Error::BadLayout { object, reason } => write!(f, "cannot partition {object}: {reason}"),
            Error::OtherModel { object, missing, extra, different } => {
                write!(f, "cannot load {object}: model does not match")?;
                list_text(f, "missing", missing)?;
                list_text(f, "unexpected", extra)?;
                list_text(f, "different", different)
            }
            Error::Corrupt { object, offset, found, expected } => write!(
                f,
                "cannot read {object}: expected {expected}, found {found} at byte {offset}"
            ),
            Error::BadManifest { object, place, found, expected } => {
                write!(f, "cannot read {object}: {place}: expected {expected}, found {found}")
            }
            Error::Uncommitted { object } => write!(
                f,
                "cannot open {object}: step is not committed; it is being written or deleted, or \
                 a crash interrupted it (hint: the next run in this folder removes orphans)"
            ),
            Error::Aborted { object, reason } => {
                write!(f, "cannot save {object}: aborted by all writers: {reason}")
            }
            Error::LeaseLost { object, holder } => lease_lost_text(f, object, holder),
            Error::Differs { object, other } => write!(
                f,
                "cannot copy {object}: {other} exists with other contents and is not overwritten \
                 (hint: give each run its own folder in the second store)"
            ),
            Error::Cancelled => f.write_str("cannot commit: cancelled; nothing was saved"),
            Error::Reported { step, first } => {
                write!(f, "cannot save step {step}: already reported: {first}")
            }
            Error::Agent { reason } => {
                write!(f, "cannot save through the agent process: {reason}")
            }
            Error::Held { object, holder, lease } => write!(
                f,
                "cannot write checkpoints to {object}: lease held by {holder} (hint: stop that \
                 run, or delete {lease} if it is dead)"
            ),
        }
    }
}

fn lease_lost_text(f: &mut fmt::Formatter<'_>, object: &str, holder: &str) -> fmt::Result {
    write!(
        f,
        "cannot write to {object}: lease expired and was taken over by {holder} (hint: this \
         process sent no heartbeat in time, because it was stopped, its machine was suspended or \
         its store did not respond)"
    )
}

fn similar_text(f: &mut fmt::Formatter<'_>, kind: &str, similar: &[String]) -> fmt::Result {
    if similar.is_empty() {
        write!(f, "; there are no {kind}")
    } else {
        write!(f, " (hint: existing {kind} are {})", similar.join(", "))
    }
}

/// Names listed in a message; the error has all of them.
const NAMES_MAX: usize = 20;

fn list_text(f: &mut fmt::Formatter<'_>, kind: &str, names: &[String]) -> fmt::Result {
    if names.is_empty() {
        return Ok(());
    }
    let shown = names[..names.len().min(NAMES_MAX)].join(", ");
    write!(f, "; {} {kind}: {shown}", names.len())?;
    if names.len() > NAMES_MAX { write!(f, ", ...") } else { Ok(()) }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            // Its text is part of this one's, so the chain continues with its source.
            Error::Storage(error) => error.source(),
            _ => None,
        }
    }
}
