//! The files that cache an index between runs, under Megatron's names: the MD5 of a text that
//! describes it, then the class, the part and the array.
//!
//! The name does not depend on the data that an index was made from. So every number of the files
//! that are found is checked, and then a seal is written beside them: the state of the data and of
//! the files at that time. If the seal still matches, the files are used without being read, so
//! that a run over a hundred million documents starts at once.

use md5::{Digest as _, Md5};
use serde_json::{Map, Value, json};
use storage::{Key, Storage};

use crate::cache::file_stamp::stamp;
use crate::cache::npy::Npy;
use crate::cache::python_json::dumps;
use crate::{Error, Result};

/// The default folder of Megatron for the indexes of a dataset.
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
    /// `class_and_part`: for example `GPTDataset-train`.
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

    fn seal_key(&self) -> Result<Key> {
        self.key("feedline.json")
    }
}

/// Builds and checks an index that is cached as `N` arrays.
pub(crate) trait CachedIndex<const N: usize> {
    type Index;

    /// The names of the arrays.
    const ARRAYS: [&'static str; N];

    /// The inputs of the index that its description lacks, for the seal.
    fn made_from(&self) -> Result<Value>;

    /// The index of these arrays if their types and shapes are right, else the fault.
    fn assemble(&self, arrays: [Npy; N]) -> std::result::Result<Self::Index, String>;

    /// Checks every number and returns the fault, if any.
    fn check(&self, index: &Self::Index) -> Result<Option<String>>;

    /// Builds the index.
    fn build(&self) -> Result<Self::Index>;

    /// Its arrays, in the order of their names.
    fn arrays(index: &Self::Index) -> [&Npy; N];
}

/// What the files with the names of an index are.
enum CacheState<T> {
    /// Files with a matching seal.
    Sealed(T),
    /// Files of the right shapes.
    Unsealed(T),
    /// Files that are not a complete index.
    Bad,
    Nothing,
}

/// What happens if an index that was built cannot be saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IfNotKept {
    /// A warning: the next run builds it again.
    Warn,
    /// An error: saving it was the purpose.
    Fail,
}

/// The cached index of these names, if all its files exist and are right; else it is built and
/// saved, with a warning if the files were wrong.
pub(crate) fn load_or_build<R: CachedIndex<N>, const N: usize>(
    recipe: &R,
    store: &dyn Storage,
    names: &Names,
    if_not_kept: IfNotKept,
) -> Result<R::Index> {
    let display = store.display(&names.description_key()?);
    let is_bad = match find(recipe, store, names)? {
        CacheState::Sealed(index) => {
            log::info!("sample order: loaded from {display}; its seal is valid");
            return Ok(index);
        }
        CacheState::Unsealed(index) => match recipe.check(&index)? {
            None => {
                log::info!("sample order: loaded from {display}; every entry was checked");
                seal(recipe, store, names);
                return Ok(index);
            }
            Some(reason) => {
                warn_rebuild(&display, &reason);
                true
            }
        },
        CacheState::Bad => true,
        CacheState::Nothing => false,
    };
    let index = recipe.build()?;
    let folder = store.display(&names.folder);
    let cleared = if is_bad { clear(store, names, R::ARRAYS) } else { Ok(()) };
    match cleared.and_then(|()| save::<R, N>(store, names, &index)) {
        Ok(Saved::All) => log::info!("sample order: built and saved in {folder}"),
        // Files that this process neither wrote nor checked are not sealed.
        Ok(Saved::NotAll) if if_not_kept == IfNotKept::Warn => return Ok(index),
        Ok(Saved::NotAll) => {
            return match find(recipe, store, names)? {
                CacheState::Sealed(index) | CacheState::Unsealed(index) => Ok(index),
                CacheState::Bad | CacheState::Nothing => {
                    let reason = "another process is still writing it".to_owned();
                    Err(Error::NotKept { folder, reason })
                }
            };
        }
        Err(error) if if_not_kept == IfNotKept::Fail => {
            return Err(Error::NotKept { folder, reason: storage::one_line(&error) });
        }
        Err(error) => {
            log::warn!("sample order: built but not saved in {folder}: {error}");
            return Ok(index);
        }
    }
    seal(recipe, store, names);
    // The written files are used from now on: all processes of the machine share their pages, and
    // the kernel reclaims them when memory is short.
    match find(recipe, store, names)? {
        CacheState::Sealed(mapped) => Ok(mapped),
        _ => Ok(index),
    }
}

/// Checks every number of the files under these names, whatever their seal says: the seal covers
/// parts of each file, and a bit may have flipped elsewhere. Without a matching seal
/// [`load_or_build`] does the check, so this returns [`Error::NoCache`].
pub(crate) fn verify<R: CachedIndex<N>, const N: usize>(
    recipe: &R,
    store: &dyn Storage,
    names: &Names,
) -> Result<R::Index> {
    let file = store.display(&names.description_key()?);
    let CacheState::Sealed(index) = find(recipe, store, names)? else {
        return Err(Error::NoCache { file });
    };
    match recipe.check(&index)? {
        None => Ok(index),
        Some(found) => Err(Error::BadCache { file, found }),
    }
}

fn warn_rebuild(display: &str, reason: &str) {
    log::warn!("sample order: rebuilding {display}: {reason}");
}

fn find<R: CachedIndex<N>, const N: usize>(
    recipe: &R,
    store: &dyn Storage,
    names: &Names,
) -> Result<CacheState<R::Index>> {
    let description = names.description_key()?;
    let bad = |reason: &str| {
        warn_rebuild(&store.display(&description), reason);
        Ok(CacheState::Bad)
    };
    let mut missing = Vec::new();
    match store.open(&description) {
        Err(storage::Error::NotFound { object: what }) => missing.push(what),
        Err(error) => return Err(error.into()),
        Ok(object) => {
            let expected = names.description.as_bytes();
            if object.len_bytes() != expected.len() as u64
                || storage::read_all(store, &description)? != expected
            {
                return bad("description.txt does not match its name");
            }
        }
    }
    let mut opened = Vec::with_capacity(N);
    for array in R::ARRAYS {
        match Npy::open(store, &names.array_key(array)?) {
            Ok(npy) => opened.push(npy),
            Err(Error::Storage(storage::Error::NotFound { object: what })) => missing.push(what),
            Err(error @ Error::Malformed { .. }) => return bad(&error.to_string()),
            Err(error) => return Err(error),
        }
    }
    if missing.len() == N + 1 {
        return Ok(CacheState::Nothing);
    }
    if !missing.is_empty() {
        return bad(&format!("missing {}", missing.join(", ")));
    }
    let opened = <[Npy; N]>::try_from(opened).expect("no file is missing, so each was opened");
    let index = match recipe.assemble(opened) {
        Ok(index) => index,
        Err(reason) => return bad(&reason),
    };
    if !is_sealed(recipe, store, names)? {
        return Ok(CacheState::Unsealed(index));
    }
    R::arrays(&index).iter().for_each(|array| array.advise_random());
    Ok(CacheState::Sealed(index))
}

/// The text of a seal over the files as they are now.
fn seal_text<R: CachedIndex<N>, const N: usize>(
    recipe: &R,
    store: &dyn Storage,
    names: &Names,
) -> Result<String> {
    let mut arrays = Map::new();
    for array in R::ARRAYS {
        let object = store.open(&names.array_key(array)?)?;
        arrays.insert(array.to_owned(), stamp(object.as_ref())?);
    }
    let seal = json!({
        "format": "feedline-order-seal",
        "version": 1,
        "made_from": recipe.made_from()?,
        "arrays": arrays,
    });
    Ok(format!("{seal:#}\n"))
}

fn is_sealed<R: CachedIndex<N>, const N: usize>(
    recipe: &R,
    store: &dyn Storage,
    names: &Names,
) -> Result<bool> {
    let key = names.seal_key()?;
    let len_bytes = match store.open(&key) {
        Err(storage::Error::NotFound { .. }) => return Ok(false),
        Err(error) => return Err(error.into()),
        Ok(object) => object.len_bytes(),
    };
    let expected = seal_text(recipe, store, names)?;
    let fits = len_bytes == expected.len() as u64
        && storage::read_all(store, &key)? == expected.as_bytes();
    if !fits {
        let display = store.display(&key);
        log::info!(
            "sample order: data or cache changed since {display} was written; checking every entry"
        );
    }
    Ok(fits)
}

/// Seals files that this process checked or wrote. Without a seal the next run checks them again,
/// so a failure is ignored.
fn seal<R: CachedIndex<N>, const N: usize>(recipe: &R, store: &dyn Storage, names: &Names) {
    let outcome = names.seal_key().and_then(|key| {
        let text = seal_text(recipe, store, names)?;
        delete(store, &key)?;
        written_unless_exists(storage::write_all(store, &key, text.as_bytes()).map_err(Error::from))
    });
    if let Err(error) = outcome {
        log::info!("sample order: not sealed, so the next run checks it again: {error}");
    }
}

/// Who wrote the files of an index.
enum Saved {
    All,
    /// Another process, which builds the same index at the same time, has written some of them.
    NotAll,
}

/// The description is written last, so that a killed run leaves no valid cache. A run that fails
/// removes what it wrote.
fn save<R: CachedIndex<N>, const N: usize>(
    store: &dyn Storage,
    names: &Names,
    index: &R::Index,
) -> Result<Saved> {
    let mut written_keys = Vec::new();
    let written = save_to::<R, N>(store, names, index, &mut written_keys);
    if written.is_err() {
        for key in written_keys.iter().rev() {
            // The first error is reported.
            if let Err(left) = delete(store, key) {
                log::warn!("sample order: {} is orphaned: {left}", store.display(key));
            }
        }
    }
    Ok(if written? && written_keys.len() == N { Saved::All } else { Saved::NotAll })
}

/// Writes the files. Returns whether this process wrote the description, and sets `written_keys` to
/// the arrays that it wrote.
fn save_to<R: CachedIndex<N>, const N: usize>(
    store: &dyn Storage,
    names: &Names,
    index: &R::Index,
    written_keys: &mut Vec<Key>,
) -> Result<bool> {
    for (array, npy) in R::ARRAYS.iter().zip(R::arrays(index)) {
        let key = names.array_key(array)?;
        if written_unless_exists(npy.write(store, &key))? {
            written_keys.push(key);
        }
    }
    let (key, text) = (names.description_key()?, names.description.as_bytes());
    written_unless_exists(storage::write_all(store, &key, text).map_err(Error::from))
}

/// Deletes all files of an index, the description first.
fn clear(
    store: &dyn Storage,
    names: &Names,
    arrays: impl IntoIterator<Item = &'static str>,
) -> Result<()> {
    delete(store, &names.description_key()?)?;
    delete(store, &names.seal_key()?)?;
    for array in arrays {
        delete(store, &names.array_key(array)?)?;
    }
    Ok(())
}

fn delete(store: &dyn Storage, key: &Key) -> Result<()> {
    match store.delete(key) {
        Ok(()) | Err(storage::Error::NotFound { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Whether it was written; false if a file of that name existed.
fn written_unless_exists<T>(result: Result<T>) -> Result<bool> {
    match result {
        Err(Error::Storage(storage::Error::Exists { .. })) => Ok(false),
        other => other.map(|_| true),
    }
}
