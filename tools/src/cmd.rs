//! One module a verb.

pub mod check;
pub mod clean;
pub mod inspect;

use std::sync::Arc;

use ckpt::Checkpoints;
use storage::{Key, Manifest, Result, Storage};

/// The manifest beside a pair of token files; `None` if they came from a tool that writes none.
pub(crate) fn token_manifest(store: &dyn Storage, prefix: &Key) -> Result<Option<Manifest>> {
    let key = prefix.with_suffix(".manifest.json")?;
    match Manifest::read(store, &key) {
        Err(storage::Error::NotFound { .. }) => Ok(None),
        other => other.map(Some),
    }
}

/// The checkpoints in a folder that has `step-*` folders directly below its root.
pub(crate) fn checkpoints(store: &Arc<dyn Storage>) -> Checkpoints {
    Checkpoints::open(Arc::clone(store), Key::root())
}

/// The steps that have a folder below the root, complete or not, the oldest first.
pub(crate) fn steps_named(store: &dyn Storage) -> Result<Vec<u64>> {
    let mut steps: Vec<u64> =
        store.names(&Key::root())?.iter().filter_map(|name| ckpt::step_of(name)).collect();
    steps.sort_unstable();
    Ok(steps)
}
