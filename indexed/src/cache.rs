//! The files in which an index is kept between runs, under Megatron's names: the MD5 of a text that
//! describes it, then the class, the part and the array.

use md5::{Digest as _, Md5};
use serde_json::Value;
use storage::{Key, Storage};

use crate::npy::Npy;
use crate::python_json::dumps;
use crate::{Error, Result};

/// Where Megatron keeps the indexes of a dataset unless it is told otherwise.
///
/// # Errors
/// [`Error::Storage`] if the key would be too long.
pub fn default_cache_folder(prefix: &Key) -> Result<Key> {
    Ok(prefix.join("cache/GPTDataset_indices")?)
}

/// The names of one index's files.
#[derive(Debug)]
pub(crate) struct Names {
    folder: Key,
    stem: String,
    description: String,
}

impl Names {
    /// `class_and_part` is such as `GPTDataset-train`.
    pub(crate) fn new(description: &Value, folder: &Key, class_and_part: &str) -> Self {
        let description = dumps(description);
        let hash: String =
            Md5::digest(&description).iter().map(|byte| format!("{byte:02x}")).collect();
        Names { folder: folder.clone(), stem: format!("{hash}-{class_and_part}-"), description }
    }

    fn key(&self, name: &str) -> Result<Key> {
        Ok(self.folder.join(&format!("{}{name}", self.stem))?)
    }

    fn description_key(&self) -> Result<Key> {
        self.key("description.txt")
    }

    fn array_key(&self, array: &str) -> Result<Key> {
        self.key(&format!("{array}.npy"))
    }
}

/// The index that is kept under these names, if all its files are there and `check` takes them;
/// else `None`, with a warning that says why unless there is nothing at all.
pub(crate) fn load<T, const N: usize>(
    store: &dyn Storage,
    names: &Names,
    arrays: [&str; N],
    check: impl FnOnce([Npy; N]) -> std::result::Result<T, String>,
) -> Result<Option<T>> {
    let description = names.description_key()?;
    let shown = store.display(&description);
    let mut absent = Vec::new();
    match store.open(&description) {
        Err(storage::Error::NotFound { what }) => absent.push(what),
        Err(error) => return Err(error.into()),
        Ok(object) => {
            let same_len = object.len_bytes() == names.description.len() as u64;
            let is_due =
                same_len && storage::read_all(store, &description)? == names.description.as_bytes();
            if !is_due {
                return rebuild(&shown, "its description.txt is not what its name says");
            }
        }
    }
    let mut opened = Vec::with_capacity(N);
    for array in arrays {
        match Npy::open(store, &names.array_key(array)?) {
            Ok(npy) => opened.push(npy),
            Err(Error::Storage(storage::Error::NotFound { what })) => absent.push(what),
            Err(error @ Error::Malformed { .. }) => return rebuild(&shown, &error.to_string()),
            Err(error) => return Err(error),
        }
    }
    if absent.len() == N + 1 {
        return Ok(None);
    }
    let Ok(opened) = <[Npy; N]>::try_from(opened) else {
        return rebuild(&shown, &format!("it lacks {}", absent.join(", ")));
    };
    if !absent.is_empty() {
        return rebuild(&shown, &format!("it lacks {}", absent.join(", ")));
    }
    match check(opened) {
        Ok(index) => {
            log::info!("sample order from the cache {shown}");
            Ok(Some(index))
        }
        Err(why) => rebuild(&shown, &why),
    }
}

fn rebuild<T>(shown: &str, why: &str) -> Result<Option<T>> {
    log::warn!("the cached sample order {shown} is not used, and rebuilt: {why}");
    Ok(None)
}

/// Keeps an index, instead of what may lie under its names. The description is written last, so
/// that files of a killed run are no cache. A cache that cannot be written costs its building
/// again, which is a warning and no failure.
pub(crate) fn save<const N: usize>(
    store: &dyn Storage,
    names: &Names,
    arrays: [&str; N],
    built: [&Npy; N],
) {
    let shown = store.display(&names.folder);
    match try_save(store, names, arrays, built) {
        Ok(()) => log::info!("sample order built, and kept in {shown}"),
        Err(error) => log::warn!("sample order built, but not kept in {shown}: {error}"),
    }
}

fn try_save<const N: usize>(
    store: &dyn Storage,
    names: &Names,
    arrays: [&str; N],
    built: [&Npy; N],
) -> Result<()> {
    let description = names.description_key()?;
    delete_if_there(store, &description)?;
    for (array, npy) in arrays.iter().zip(built) {
        let key = names.array_key(array)?;
        delete_if_there(store, &key)?;
        unless_taken(npy.write(store, &key))?;
    }
    let text = names.description.as_bytes();
    unless_taken(storage::write_all(store, &description, text).map(drop).map_err(Error::from))
}

fn delete_if_there(store: &dyn Storage, key: &Key) -> Result<()> {
    match store.delete(key) {
        Err(storage::Error::NotFound { .. }) => Ok(()),
        other => Ok(other?),
    }
}

/// Another process may build the same index at the same time: its bytes are ours.
fn unless_taken(result: Result<()>) -> Result<()> {
    match result {
        Err(Error::Storage(storage::Error::Exists { .. })) => Ok(()),
        other => other,
    }
}
