use std::fmt;

use crate::Group;

/// What went wrong: what we were doing, to what, what came, what was due.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The store failed, or is full.
    Storage(storage::Error),
    /// That step has been saved already, and is not overwritten.
    StepExists {
        /// The step's folder.
        object: String,
    },
    /// There is no such step.
    NoStep {
        /// The step's folder, as it would be.
        object: String,
        /// Steps that are there, the nearest first.
        near: Vec<u64>,
    },
    /// The checkpoint has no such tensor.
    NoTensor {
        /// The checkpoint's folder.
        object: String,
        /// The name asked for.
        name: String,
        /// The group asked for.
        group: Group,
        /// Tensors that are there and most like it, as `group name`.
        near: Vec<String>,
    },
    /// The checkpoint has no such blob.
    NoBlob {
        /// The checkpoint's folder.
        object: String,
        /// The name asked for.
        name: String,
        /// Blobs that are there.
        near: Vec<String>,
    },
    /// The buffer or region that the caller gave does not fit the tensor.
    BadRequest {
        /// The tensor, as `group name`.
        object: String,
        /// What came.
        found: String,
        /// What was due.
        expected: String,
    },
    /// What the caller wants saved cannot be.
    BadInput {
        /// The tensor, blob or step.
        object: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A model cannot be laid out so.
    BadLayout {
        /// The mesh or the parameter.
        object: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The checkpoint is not of the model that is to be loaded.
    OtherModel {
        /// The checkpoint's folder.
        object: String,
        /// Tensors of the model that the checkpoint has not, as `group 'name'`.
        missing: Vec<String>,
        /// Tensors of the checkpoint that the model has not.
        extra: Vec<String>,
        /// Tensors that both have, with other types or shapes, and which.
        different: Vec<String>,
    },
    /// What is to be converted does not fit what is to become of it.
    Unfit {
        /// The tensor, model or file.
        object: String,
        /// What came.
        found: String,
        /// What was due.
        expected: String,
    },
    /// The bytes on the store are not those that were saved.
    Corrupt {
        /// The file.
        object: String,
        /// Where in it.
        offset: u64,
        /// What came.
        found: String,
        /// What was due.
        expected: String,
    },
    /// The manifest is whole, and says what cannot be.
    BadManifest {
        /// The manifest.
        object: String,
        /// The field or tensor in it.
        place: String,
        /// What came.
        found: String,
        /// What was due.
        expected: String,
    },
    /// The step is being written, or deleted, or was left by a crash in the midst of either.
    Uncommitted {
        /// The step's folder.
        object: String,
    },
    /// The writers of a save have given it up, all of them.
    Aborted {
        /// The step, and which writer this process is.
        object: String,
        /// Which writer it was, and what happened to it.
        reason: String,
    },
    /// Another process took this one for dead, and writes into the folder now.
    LeaseLost {
        /// The folder.
        object: String,
    },
    /// The second store has other contents under the name of a step that is to be copied there.
    Differs {
        /// The step's folder.
        object: String,
        /// The one in the second store.
        other: String,
    },
    /// The save or copy was told to end. Nothing of it is visible.
    Cancelled,
    /// A save in the background failed, which was reported once already.
    Reported {
        /// The step that was not saved.
        step: u64,
        /// Why, as text.
        first: String,
    },
    /// The process that saves in this one's stead failed.
    Agent {
        /// What it said, or what became of it.
        reason: String,
    },
    /// Somebody else writes into this folder.
    Held {
        /// The folder.
        object: String,
        /// The process that holds it.
        holder: String,
        /// The lease to delete if that process is known to be gone.
        lease: String,
    },
}

/// `std`'s, with our [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Whether the error says that a checkpoint is damaged or unfinished, rather than that the
    /// store could not be asked.
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
                write!(f, "save {object}: this step is saved already, and is not overwritten")
            }
            Error::NoStep { object, near } => {
                write!(f, "open {object}: no such step")?;
                near_text(f, "steps", &near.iter().map(u64::to_string).collect::<Vec<_>>())
            }
            Error::NoTensor { object, name, group, near } => {
                write!(f, "read {group} '{name}' of {object}: no such tensor")?;
                near_text(f, "tensors", near)
            }
            Error::NoBlob { object, name, near } => {
                write!(f, "read extra '{name}' of {object}: no such blob")?;
                near_text(f, "blobs", near)
            }
            Error::BadRequest { object, found, expected } => {
                write!(f, "read {object}: got {found}, due {expected}")
            }
            Error::Unfit { object, found, expected } => {
                write!(f, "convert {object}: got {found}, due {expected}")
            }
            Error::BadInput { object, reason } => write!(f, "save {object}: {reason}"),
            Error::BadLayout { object, reason } => write!(f, "lay out {object}: {reason}"),
            Error::OtherModel { object, missing, extra, different } => {
                write!(f, "load {object}: it is of another model")?;
                list_text(f, "missing", missing)?;
                list_text(f, "extra", extra)?;
                list_text(f, "different", different)
            }
            Error::Corrupt { object, offset, found, expected } => {
                write!(f, "{object}, at byte {offset}: got {found}, due {expected}")
            }
            Error::BadManifest { object, place, found, expected } => {
                write!(f, "{object}, {place}: got {found}, due {expected}")
            }
            Error::Uncommitted { object } => write!(
                f,
                "open {object}: it is not committed: it is being written or deleted, or a crash \
                 left it; hint: sweep removes what nobody works on"
            ),
            Error::Aborted { object, reason } => {
                write!(f, "save {object}: given up by all: {reason}")
            }
            Error::LeaseLost { object } => write!(
                f,
                "write into {object}: this process gave no sign of life for so long that another \
                 took the lease over; hint: was the store stuck, or the process stopped?"
            ),
            Error::Differs { object, other } => write!(
                f,
                "copy {object}: {other} is there with other contents, and is not overwritten; \
                 hint: two runs have one folder there"
            ),
            Error::Cancelled => f.write_str("cancelled before it was committed; nothing stays"),
            Error::Reported { step, first } => {
                write!(f, "step {step} was not saved, as was reported before ({first})")
            }
            Error::Agent { reason } => write!(f, "save by the agent process: {reason}"),
            Error::Held { object, holder, lease } => write!(
                f,
                "write into {object}: {holder} holds it; hint: stop that run, or if it is gone \
                 for certain, delete {lease}"
            ),
        }
    }
}

fn near_text(f: &mut fmt::Formatter<'_>, kind: &str, near: &[String]) -> fmt::Result {
    if near.is_empty() {
        write!(f, "; there are no {kind}")
    } else {
        write!(f, "; hint: there are {kind} {}", near.join(", "))
    }
}

/// More names than anybody reads; the error itself has all of them.
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
            // Its text is ours, so the chain goes on below it.
            Error::Storage(error) => error.source(),
            _ => None,
        }
    }
}
