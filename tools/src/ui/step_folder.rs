//! Opens the folder of checkpoints that an argument names, or explains why it is not one.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, bail};
use storage::{Key, Location, Storage};

use crate::ui::inspect_target::NothingFound;

/// Folder of steps in `run.dir`, unless the config names another one.
const BELOW_RUN: &str = "ckpt";

/// A folder that holds at least one step. `operation` is the verb of the message.
///
/// # Errors
/// If it is absent, holds no step, is itself a step or a file; the hint names the folder that may
/// be meant.
pub(crate) fn holding_steps(name: &str, operation: &str) -> Result<Arc<dyn Storage>> {
    let store = existing(name, operation)?;
    if !has_steps(&*store)? {
        bail!("cannot {operation} {name}: expected a folder with steps (step-*), found none in it");
    }
    Ok(store)
}

/// Fails unless a store's root folder holds a step. `operation` is the verb of the message.
///
/// # Errors
/// [`NothingFound`], and errors of the store.
pub fn check_has_steps(store: &dyn Storage, operation: &str) -> Result<()> {
    if has_steps(store)? {
        return Ok(());
    }
    let folder = store.display(&Key::root());
    Err(NothingFound::error(format!(
        "cannot {operation} {folder}: expected a folder with steps (step-*), found none in it"
    )))
}

/// Fails if two stores are known to have the same root folder. `operation` is the verb of the
/// message, and `link` the word before the second folder.
///
/// # Errors
/// If they have.
pub fn check_two_folders(
    (operation, link): (&str, &str),
    from: &dyn Storage,
    to: &dyn Storage,
) -> Result<()> {
    if !is_same_folder(from, to) {
        return Ok(());
    }
    let [from, to] = [from, to].map(|store| store.display(&Key::root()));
    bail!("cannot {operation} {from} {link} {to}: expected two folders, found one")
}

/// A folder that exists, and may be empty.
///
/// # Errors
/// As [`holding_steps`], but for a folder without steps.
pub fn existing(name: &str, operation: &str) -> Result<Arc<dyn Storage>> {
    let store = not_a_step(name, operation)?;
    let is_there = match Location::new(name).local_path() {
        Some(path) => path.exists(),
        // A bucket has no empty folders.
        None => !store.list_names(&Key::root())?.is_empty(),
    };
    if !is_there {
        return Err(NothingFound::error(format!(
            "cannot {operation} {name}: expected a folder with steps (step-*), found nothing \
             there"
        )));
    }
    Ok(store)
}

/// A folder for steps, which may be absent.
///
/// # Errors
/// If it is a step or a file, or the folder of a run whose steps are below it.
pub(crate) fn not_a_step(name: &str, operation: &str) -> Result<Arc<dyn Storage>> {
    let name = &Location::new(name);
    let store = name.open()?;
    if name.local_path().is_some_and(Path::is_file) {
        bail!("cannot {operation} {name}: expected a folder with steps (step-*), found a file");
    }
    let full_name = with_last_component(name);
    if ckpt::step_of(full_name.file_name()).is_some() {
        let folder = full_name.parent();
        bail!(
            "cannot {operation} {name}: expected a folder with steps (step-*), found a step (hint: \
             give the folder that holds it, {folder})"
        );
    }
    if let Some(inner) = run_steps(name, &*store)? {
        bail!(
            "cannot {operation} {name}: expected a folder with steps (step-*), found the folder of \
             a run (hint: its steps are in {inner})"
        );
    }
    Ok(store)
}

/// The folder of steps below the folder of a run, whose store is given, if it has one and no steps
/// itself.
pub(crate) fn run_steps(run: &Location, store: &dyn Storage) -> Result<Option<Location>> {
    let names = store.list_names(&Key::root())?;
    let is_step = |name: &String| ckpt::step_of(name).is_some();
    if names.iter().any(is_step) || !names.iter().any(|name| name == BELOW_RUN) {
        return Ok(None);
    }
    let below = Key::new(BELOW_RUN)?;
    // It may be a file of that name.
    let inner = store.list_names(&below).unwrap_or_default();
    Ok(inner.iter().any(is_step).then(|| run.join(BELOW_RUN)))
}

/// Whether two stores are known to have the same root folder.
fn is_same_folder(a: &dyn Storage, b: &dyn Storage) -> bool {
    let place = |store: &dyn Storage| {
        let name = store.display(&Key::root());
        let real = std::fs::canonicalize(&name).ok();
        real.and_then(|path| path.to_str().map(str::to_owned)).unwrap_or(name)
    };
    // Buckets of two servers may have the same name.
    place(a) == place(b) && a.reader_group() == b.reader_group()
}

/// Replaces `.`, `..` and paths that end in them by their absolute path, whose last component can
/// be a key.
pub(crate) fn with_last_component(name: &Location) -> Location {
    let ends_in_dots = matches!(name.file_name(), "." | "..");
    let path = name.local_path().filter(|_| ends_in_dots && !name.is_url());
    let real = path.and_then(|path| std::fs::canonicalize(path).ok());
    real.as_deref().and_then(Path::to_str).map_or_else(|| name.clone(), Location::new)
}

fn has_steps(store: &dyn Storage) -> Result<bool> {
    Ok(store.list_names(&Key::root())?.iter().any(|name| ckpt::step_of(name).is_some()))
}
