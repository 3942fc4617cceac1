//! Leftovers of earlier runs of the same outputs, and their removal.

use indexed::Builder;
use storage::{Key, Manifest, Storage};

use crate::tokens::journal::Journal;
use crate::tokens::outputs::OutputPlan;
use crate::{Error, Result, ResumePolicy};

/// Suffix of a manifest's name.
pub(crate) const MANIFEST: &str = ".manifest.json";

/// Fails if an output exists: with [`Error::Complete`] if all are those of the run to be resumed.
pub(crate) fn refuse_existing(
    store: &dyn Storage,
    plans: &[OutputPlan],
    interrupted: ResumePolicy,
    settings: &str,
) -> Result<()> {
    let is_there = |prefix: &Key, suffix| {
        let key = prefix.with_suffix(suffix)?;
        match store.open(&key) {
            Err(storage::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(Error::from(error)),
            Ok(_) => Ok(Some(store.display(&key))),
        }
    };
    let (mut first, mut manifests) = (None, 0);
    for OutputPlan { prefix, .. } in plans {
        for suffix in [MANIFEST, ".bin", ".idx", ".crc"] {
            let found = is_there(prefix, suffix)?;
            manifests += usize::from(suffix == MANIFEST && found.is_some());
            first = first.or(found);
        }
    }
    match first {
        None => Ok(()),
        Some(object) if manifests == plans.len() && interrupted == ResumePolicy::Resume => {
            for OutputPlan { prefix, .. } in plans {
                let key = prefix.with_suffix(MANIFEST)?;
                if Manifest::read(store, &key)?.meta["settings"] != settings {
                    return Err(Error::OtherSettings { object: store.display(&key) });
                }
            }
            discard_drafts(store, plans)?;
            Err(Error::Complete { object })
        }
        Some(object) => Err(storage::Error::Exists { object }.into()),
    }
}

/// Removes all outputs of a run.
pub(crate) fn roll_back(
    store: &dyn Storage,
    plans: &[OutputPlan],
    mut journal: Journal,
) -> Result<()> {
    discard_drafts(store, plans)?;
    journal.discard()
}

/// Removes the leftovers of an interrupted run, unless it is still running.
pub(crate) fn discard(store: &dyn Storage, plans: &[OutputPlan], journal: &Key) -> Result<()> {
    // Held until all are removed.
    let _held = match store.resume(journal, storage::SyncPoint::default()) {
        Err(storage::Error::NotFound { .. }) => None,
        outcome => Some(outcome?),
    };
    discard_drafts(store, plans)?;
    Ok(store.discard(journal)?)
}

/// Removes the resumable uploads of all outputs, unless another process writes one.
pub(crate) fn discard_drafts(store: &dyn Storage, plans: &[OutputPlan]) -> Result<()> {
    for OutputPlan { prefix, .. } in plans {
        Builder::discard_drafts(store, prefix)?;
    }
    Ok(())
}
