//! Classifies the entries of a folder of steps that are not steps.

use std::path::Path;

use serde::Serialize;
use storage::{Key, Liveness, ProcessIdentity, Result, Storage};

use crate::ui::unfinished_files::UnfinishedFiles;

/// Something in a folder of checkpoints that is not a step.
#[derive(Debug, Serialize)]
pub struct Leftover {
    /// Its name.
    pub name: String,
    /// `save`, `deletion`, `damaged`, `lease`, `meeting`, `pin`, `mark` or `drain`.
    pub kind: &'static str,
    /// The process that created it, if the name records it.
    pub owner: Option<String>,
    /// Whether that process is alive: `alive`, `dead`, `ours` or `unknown`.
    pub owner_is: &'static str,
    /// Bytes of all its objects, unfinished uploads included.
    pub bytes: u64,
    /// Its meaning, and its later treatment.
    pub meaning: &'static str,
}

/// Prefix of the names, kind, and meaning: if the owner is dead, and if it may be alive.
const KINDS: [(&str, &str, &str, &str); 8] = [
    (
        ".tmp-",
        "save",
        "an interrupted save; the next sweep removes it",
        "a save in progress, or of a process that cannot be checked from here; not removed",
    ),
    (
        ".trash-",
        "deletion",
        "an interrupted deletion of a step; the next sweep finishes it",
        "a deletion of a step in progress",
    ),
    (
        ".damaged-",
        "damaged",
        "a damaged step, set aside by a save; never removed; fix: inspect it, then delete it",
        "a damaged step, set aside by a save; never removed; fix: inspect it, then delete it",
    ),
    (
        ".lease-",
        "lease",
        "the lease of a dead process; the next writer removes it",
        "the lease of a writer; no other process writes while it exists",
    ),
    (
        ".save-",
        "meeting",
        "the rendezvous of a joint save by dead processes; a sweep removes it",
        "the rendezvous of a joint save in progress",
    ),
    (
        ".pin-",
        "pin",
        "the pin of a dead reader; its step may be deleted",
        "the pin of a reader; its step is not deleted",
    ),
    (
        ".retain-",
        "mark",
        "the marker of an interrupted deletion of steps",
        "the marker of a deletion of steps in progress",
    ),
    (
        ".drain-",
        "drain",
        "an interrupted copy of a step; the next drain resumes it",
        "a copy of a step, in progress or interrupted; the next drain resumes it",
    ),
];

/// All entries of a folder that have one of the hidden names.
///
/// # Errors
/// If the store fails.
pub fn leftovers(store: &dyn Storage) -> Result<Vec<Leftover>> {
    let mut found = Vec::new();
    for name in store.list_names(&Key::root())? {
        let kind = KINDS.iter().find(|(prefix, ..)| name.starts_with(prefix));
        let Some((prefix, kind, if_dead, else_is)) = kind else { continue };
        let owner = owner_of(&name[prefix.len()..]);
        let life = owner.as_ref().map(ProcessIdentity::life);
        let key = Key::new(&name)?;
        // An object store has no such path, and no files of unfinished uploads.
        let unfinished = UnfinishedFiles::find(Path::new(&store.display(&key)));
        let unfinished_bytes = unfinished.map_or(0, |files| files.bytes());
        found.push(Leftover {
            kind,
            owner: owner.as_ref().map(ProcessIdentity::label),
            owner_is: match life {
                Some(Liveness::Dead) => "dead",
                Some(Liveness::Ours) => "ours",
                Some(Liveness::Alive) => "alive",
                _ => "unknown",
            },
            bytes: bytes_of(store, &key)? + unfinished_bytes,
            meaning: if matches!(life, Some(Liveness::Dead)) { if_dead } else { else_is },
            name,
        });
    }
    Ok(found)
}

/// Bytes of an object, such as a lease or a pin, or of all objects in a folder; 0 if it was removed
/// meanwhile.
fn bytes_of(store: &dyn Storage, key: &Key) -> Result<u64> {
    match store.open(key) {
        Ok(object) => return Ok(object.len_bytes()),
        Err(storage::Error::NotFound { .. }) => {}
        // A file system refuses to open a folder as a file.
        Err(error) if store.list(key).is_err() => return Err(error),
        Err(_) => {}
    }
    match store.list(key) {
        Ok(entries) => Ok(entries.iter().map(|entry| entry.bytes).sum()),
        Err(storage::Error::NotFound { .. }) => Ok(0),
        Err(error) => Err(error),
    }
}

/// Names of leases end with the owner; names of folders end with `step-000012000-` and the owner.
fn owner_of(rest: &str) -> Option<ProcessIdentity> {
    let is_step = rest.get(..17).is_some_and(|name| ckpt::step_of(name).is_some());
    ProcessIdentity::parse(if is_step { rest.get(18..)? } else { rest })
}
