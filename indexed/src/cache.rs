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

/// An index that is kept as `N` arrays.
pub(crate) trait Kept<const N: usize> {
    /// Their names.
    const ARRAYS: [&'static str; N];

    /// The arrays, in the order of their names.
    fn arrays(&self) -> [&Npy; N];
}

/// What lies under an index's names.
enum Found<T> {
    Good(T),
    /// Files that are not the index, or not all of it.
    Bad,
    Nothing,
}

/// The index that is kept under these names, if all its files are there and `check` takes them;
/// else a warning says why, and it is built and kept. A cache that cannot be written costs its
/// building again, which is a warning and no failure.
pub(crate) fn load_or_build<T: Kept<N>, const N: usize>(
    store: &dyn Storage,
    names: &Names,
    check: impl FnOnce([Npy; N]) -> std::result::Result<T, String>,
    build: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let found = load(store, names, T::ARRAYS, check)?;
    let is_bad = matches!(found, Found::Bad);
    if let Found::Good(index) = found {
        log::info!("sample order from the cache {}", store.display(&names.description_key()?));
        return Ok(index);
    }
    let index = build()?;
    let folder = store.display(&names.folder);
    let cleared = if is_bad { clear(store, names, T::ARRAYS) } else { Ok(()) };
    match cleared.and_then(|()| save(store, names, &index)) {
        Ok(()) => log::info!("sample order built, and kept in {folder}"),
        Err(error) => log::warn!("sample order built, but not kept in {folder}: {error}"),
    }
    Ok(index)
}

fn load<T, const N: usize>(
    store: &dyn Storage,
    names: &Names,
    arrays: [&str; N],
    check: impl FnOnce([Npy; N]) -> std::result::Result<T, String>,
) -> Result<Found<T>> {
    let description = names.description_key()?;
    let bad = |why: &str| {
        let shown = store.display(&description);
        log::warn!("the cached sample order {shown} is not used, and rebuilt: {why}");
        Ok(Found::Bad)
    };
    let mut absent = Vec::new();
    match store.open(&description) {
        Err(storage::Error::NotFound { what }) => absent.push(what),
        Err(error) => return Err(error.into()),
        Ok(object) => {
            let due = names.description.as_bytes();
            if object.len_bytes() != due.len() as u64
                || storage::read_all(store, &description)? != due
            {
                return bad("its description.txt is not what its name says");
            }
        }
    }
    let mut opened = Vec::with_capacity(N);
    for array in arrays {
        match Npy::open(store, &names.array_key(array)?) {
            Ok(npy) => opened.push(npy),
            Err(Error::Storage(storage::Error::NotFound { what })) => absent.push(what),
            Err(error @ Error::Malformed { .. }) => return bad(&error.to_string()),
            Err(error) => return Err(error),
        }
    }
    if absent.len() == N + 1 {
        return Ok(Found::Nothing);
    }
    if !absent.is_empty() {
        return bad(&format!("it lacks {}", absent.join(", ")));
    }
    let opened = <[Npy; N]>::try_from(opened).expect("none is absent, so each was opened");
    check(opened).map_or_else(|why| bad(&why), |index| Ok(Found::Good(index)))
}

/// The description is written last, so that what a killed run leaves is no cache. Another process
/// may build the same index at the same time: its files are as good as ours.
fn save<T: Kept<N>, const N: usize>(store: &dyn Storage, names: &Names, index: &T) -> Result<()> {
    for (array, npy) in T::ARRAYS.iter().zip(index.arrays()) {
        unless_taken(npy.write(store, &names.array_key(array)?))?;
    }
    let (key, text) = (names.description_key()?, names.description.as_bytes());
    unless_taken(storage::write_all(store, &key, text).map(drop).map_err(Error::from))
}

/// Deletes all files of an index, the description first.
fn clear(
    store: &dyn Storage,
    names: &Names,
    arrays: impl IntoIterator<Item = &'static str>,
) -> Result<()> {
    let mut keys = vec![names.description_key()?];
    for array in arrays {
        keys.push(names.array_key(array)?);
    }
    for key in keys {
        match store.delete(&key) {
            Ok(()) | Err(storage::Error::NotFound { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn unless_taken(result: Result<()>) -> Result<()> {
    match result {
        Err(Error::Storage(storage::Error::Exists { .. })) => Ok(()),
        other => other,
    }
}
