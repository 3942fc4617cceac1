//! The folder of checkpoints that an argument names, and what is wrong with another argument.

use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, bail};
use storage::{Key, Storage};

use crate::ui::inspect_target::NothingFound;

/// What `run.dir` has below it, unless the config names another folder.
const BELOW_RUN: &str = "ckpt";

/// A folder that holds at least one step. `doing` is the verb of the message.
///
/// # Errors
/// If it is absent, holds no step, is itself a step or a file; the hint names the folder that may
/// be meant.
pub(crate) fn holding_steps(name: &str, doing: &str) -> Result<Arc<dyn Storage>> {
    let store = existing(name, doing)?;
    if !has_steps(&*store)? {
        bail!("cannot {doing} {name}: expected a folder with steps (step-*), found none in it");
    }
    Ok(store)
}

/// A folder that exists, and may be empty.
///
/// # Errors
/// As [`holding_steps`], but for a folder without steps.
pub fn existing(name: &str, doing: &str) -> Result<Arc<dyn Storage>> {
    let store = not_a_step(name, doing)?;
    let is_there = match local_path(&*store) {
        Some(path) => Path::new(&path).exists(),
        // A bucket has no folders but those with something in them.
        None => !store.list_names(&Key::root())?.is_empty(),
    };
    if !is_there {
        return Err(NothingFound::error(format!(
            "cannot {doing} {name}: expected a folder with steps (step-*), found nothing there"
        )));
    }
    Ok(store)
}

/// A folder that may be absent, in which steps are or are to be.
///
/// # Errors
/// If it is a step or a file, or the folder of a run whose steps are below it.
pub(crate) fn not_a_step(name: &str, doing: &str) -> Result<Arc<dyn Storage>> {
    let name = name.trim_end_matches('/');
    let name = if name.is_empty() { "/" } else { name };
    let store = storage::open_url(name)?;
    if let Some(path) = local_path(&*store)
        && Path::new(&path).is_file()
    {
        bail!("cannot {doing} {name}: expected a folder with steps (step-*), found a file");
    }
    let whole = with_last_component(name);
    let bare = whole.split('?').next().unwrap_or_default();
    if let Some((folder, last)) = bare.rsplit_once('/').or(Some((".", bare)))
        && ckpt::step_of(last).is_some()
    {
        bail!(
            "cannot {doing} {name}: expected a folder with steps (step-*), found a step (hint: \
             give the folder that holds it, {folder})"
        );
    }
    if let Some(inner) = run_steps(&*store)? {
        bail!(
            "cannot {doing} {name}: expected a folder with steps (step-*), found the folder of a \
             run (hint: its steps are in {inner})"
        );
    }
    Ok(store)
}

/// The folder of steps below the folder of a run, if it has one and no steps itself.
pub(crate) fn run_steps(store: &dyn Storage) -> Result<Option<String>> {
    let names = store.list_names(&Key::root())?;
    let is_step = |name: &String| ckpt::step_of(name).is_some();
    if names.iter().any(is_step) || !names.iter().any(|name| name == BELOW_RUN) {
        return Ok(None);
    }
    let below = Key::new(BELOW_RUN)?;
    // It may be a file of that name.
    let inner = store.list_names(&below).unwrap_or_default();
    Ok(inner.iter().any(is_step).then(|| store.display(&below)))
}

/// Whether two names are known to be of one folder.
pub(crate) fn is_same_folder(a: &dyn Storage, b: &dyn Storage) -> bool {
    let place = |store: &dyn Storage| {
        let name = store.display(&Key::root());
        let real = std::fs::canonicalize(&name).ok();
        real.and_then(|path| path.to_str().map(str::to_owned)).unwrap_or(name)
    };
    place(a) == place(b)
}

/// `.`, `..` and paths that end so have no last component that a key could be: their absolute path
/// has one.
pub(crate) fn with_last_component(name: &str) -> Cow<'_, str> {
    let ends_in_dots = matches!(name.rsplit('/').next(), Some("." | ".."));
    let real = ends_in_dots.then(|| std::fs::canonicalize(name).ok()).flatten();
    match real.as_deref().and_then(Path::to_str) {
        Some(path) => Cow::Owned(path.to_owned()),
        None => Cow::Borrowed(name),
    }
}

fn has_steps(store: &dyn Storage) -> Result<bool> {
    Ok(store.list_names(&Key::root())?.iter().any(|name| ckpt::step_of(name).is_some()))
}

/// The path of a store's folder; `None` for one that is not in a file system.
fn local_path(store: &dyn Storage) -> Option<String> {
    let name = store.display(&Key::root());
    (!name.contains("://")).then_some(name)
}
