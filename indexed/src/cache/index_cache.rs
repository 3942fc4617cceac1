//! The files in which an index is kept between runs, under Megatron's names: the MD5 of a text that
//! describes it, then the class, the part and the array.
//!
//! The name says nothing of the data that an index was made from. So files that are found are
//! checked, every number of them, and then a seal is left beside them: what the data and the files
//! looked like at the time. Where the seal still fits, they are used without being read, which is
//! what lets a run over a hundred million documents begin at once.

use md5::{Digest as _, Md5};
use serde_json::{Map, Value, json};
use storage::{Key, Storage};

use crate::cache::file_stamp::stamp;
use crate::cache::npy::Npy;
use crate::cache::python_json::dumps;
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

    fn seal_key(&self) -> Result<Key> {
        self.key("feedline.json")
    }
}

/// How an index that is kept as `N` arrays is made and checked.
pub(crate) trait CachedIndex<const N: usize> {
    type Index;

    /// The names of the arrays.
    const ARRAYS: [&'static str; N];

    /// What it is made from and its description does not tell, for the seal.
    fn made_from(&self) -> Result<Value>;

    /// The index of these arrays if their types and shapes are right, else what is wrong.
    fn assemble(&self, arrays: [Npy; N]) -> std::result::Result<Self::Index, String>;

    /// Looks at every number, and says what is wrong.
    fn check(&self, index: &Self::Index) -> Result<Option<String>>;

    /// Makes it.
    fn build(&self) -> Result<Self::Index>;

    /// Its arrays, in the order of their names.
    fn arrays(index: &Self::Index) -> [&Npy; N];
}

/// What lies under an index's names.
enum CacheState<T> {
    /// Files whose seal fits.
    Sealed(T),
    /// Files of the right shapes.
    Unsealed(T),
    /// Files that are not the index, or not all of it.
    Bad,
    Nothing,
}

/// What happens if an index that was built cannot be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IfNotKept {
    /// It costs its building again, so a warning says it.
    Warn,
    /// Keeping it was the purpose.
    Fail,
}

/// The index that is kept under these names, if all its files are there and are right; else a
/// warning says why, and it is built and kept.
pub(crate) fn load_or_build<R: CachedIndex<N>, const N: usize>(
    recipe: &R,
    store: &dyn Storage,
    names: &Names,
    if_not_kept: IfNotKept,
) -> Result<R::Index> {
    let shown = store.display(&names.description_key()?);
    let is_bad = match find(recipe, store, names)? {
        CacheState::Sealed(index) => {
            log::info!("sample order: loaded from {shown}; its seal is valid");
            return Ok(index);
        }
        CacheState::Unsealed(index) => match recipe.check(&index)? {
            None => {
                log::info!("sample order: loaded from {shown}; every entry was checked");
                seal(recipe, store, names);
                return Ok(index);
            }
            Some(why) => {
                warn_of_bad(&shown, &why);
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
        // Files that we neither wrote nor checked are not ours to seal.
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
    // What was written is used from now on: its pages are shared by all processes of the machine,
    // and given back when memory is short.
    match find(recipe, store, names)? {
        CacheState::Sealed(mapped) => Ok(mapped),
        _ => Ok(index),
    }
}

/// Checks every number of the files under these names, whatever their seal says: it covers parts
/// of each file, and a bit may have flipped in another. Without a seal that fits, which is when
/// [`load_or_build`] checks by itself, it is [`Error::NoCache`].
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

fn warn_of_bad(shown: &str, why: &str) {
    log::warn!("sample order: rebuilding {shown}: {why}");
}

fn find<R: CachedIndex<N>, const N: usize>(
    recipe: &R,
    store: &dyn Storage,
    names: &Names,
) -> Result<CacheState<R::Index>> {
    let description = names.description_key()?;
    let bad = |why: &str| {
        warn_of_bad(&store.display(&description), why);
        Ok(CacheState::Bad)
    };
    let mut absent = Vec::new();
    match store.open(&description) {
        Err(storage::Error::NotFound { object: what }) => absent.push(what),
        Err(error) => return Err(error.into()),
        Ok(object) => {
            let due = names.description.as_bytes();
            if object.len_bytes() != due.len() as u64
                || storage::read_all(store, &description)? != due
            {
                return bad("description.txt does not match its name");
            }
        }
    }
    let mut opened = Vec::with_capacity(N);
    for array in R::ARRAYS {
        match Npy::open(store, &names.array_key(array)?) {
            Ok(npy) => opened.push(npy),
            Err(Error::Storage(storage::Error::NotFound { object: what })) => absent.push(what),
            Err(error @ Error::Malformed { .. }) => return bad(&error.to_string()),
            Err(error) => return Err(error),
        }
    }
    if absent.len() == N + 1 {
        return Ok(CacheState::Nothing);
    }
    if !absent.is_empty() {
        return bad(&format!("missing {}", absent.join(", ")));
    }
    let opened = <[Npy; N]>::try_from(opened).expect("none is absent, so each was opened");
    let index = match recipe.assemble(opened) {
        Ok(index) => index,
        Err(why) => return bad(&why),
    };
    if !is_sealed(recipe, store, names)? {
        return Ok(CacheState::Unsealed(index));
    }
    R::arrays(&index).iter().for_each(|array| array.expect_random_reads());
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
    let due = seal_text(recipe, store, names)?;
    let fits = len_bytes == due.len() as u64 && storage::read_all(store, &key)? == due.as_bytes();
    if !fits {
        let shown = store.display(&key);
        log::info!(
            "sample order: data or cache changed since {shown} was written; checking every entry"
        );
    }
    Ok(fits)
}

/// Seals files that were checked or written by us. Without a seal they are checked again by the
/// next run, so failing is no failure.
fn seal<R: CachedIndex<N>, const N: usize>(recipe: &R, store: &dyn Storage, names: &Names) {
    let outcome = names.seal_key().and_then(|key| {
        let text = seal_text(recipe, store, names)?;
        delete(store, &key)?;
        write_unless_taken(storage::write_all(store, &key, text.as_bytes()).map_err(Error::from))
    });
    if let Err(error) = outcome {
        log::info!("sample order: not sealed, so the next run checks it again: {error}");
    }
}

/// Who wrote the files of an index.
enum Saved {
    All,
    /// Another process has written some of them, which builds the same index at the same time.
    NotAll,
}

/// The description is written last, so that what a killed run leaves is no cache. One that fails
/// takes back what it wrote.
fn save<R: CachedIndex<N>, const N: usize>(
    store: &dyn Storage,
    names: &Names,
    index: &R::Index,
) -> Result<Saved> {
    let mut ours = Vec::new();
    let written = save_to::<R, N>(store, names, index, &mut ours);
    if written.is_err() {
        for key in ours.iter().rev() {
            // The first error is the one to tell.
            if let Err(left) = delete(store, key) {
                log::warn!("sample order: {} is orphaned: {left}", store.display(key));
            }
        }
    }
    Ok(if written? && ours.len() == N { Saved::All } else { Saved::NotAll })
}

/// Writes the files. Says whether the description is ours, and `ours` which of the arrays are.
fn save_to<R: CachedIndex<N>, const N: usize>(
    store: &dyn Storage,
    names: &Names,
    index: &R::Index,
    ours: &mut Vec<Key>,
) -> Result<bool> {
    for (array, npy) in R::ARRAYS.iter().zip(R::arrays(index)) {
        let key = names.array_key(array)?;
        if write_unless_taken(npy.write(store, &key))? {
            ours.push(key);
        }
    }
    let (key, text) = (names.description_key()?, names.description.as_bytes());
    write_unless_taken(storage::write_all(store, &key, text).map_err(Error::from))
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

/// Whether it was written; else something of that name was there.
fn write_unless_taken<T>(result: Result<T>) -> Result<bool> {
    match result {
        Err(Error::Storage(storage::Error::Exists { .. })) => Ok(false),
        other => other.map(|_| true),
    }
}
