//! Finds datasets with names similar to a prefix that has none.

use storage::{Key, Storage};

use crate::Error;

/// Prefixes in a message, at most: more would make it unreadable.
const SIMILAR_MAX: usize = 5;

/// Prefixes of datasets (`.bin` and `.idx`) similar to a prefix without a dataset: without a suffix
/// that was given by mistake, with the ending that `preprocess` adds, such as `_text_document`, or
/// in the folder of that name. At most five. Empty if the folder cannot be listed.
#[must_use]
pub fn similar_prefixes(store: &dyn Storage, prefix: &Key) -> Vec<Key> {
    let name = prefix.name();
    let stem = name.strip_suffix(".bin").or_else(|| name.strip_suffix(".idx")).unwrap_or(name);
    let beside = datasets_in(store, &prefix.parent());
    let mut similar: Vec<Key> =
        beside.into_iter().filter(|dataset| dataset.name().starts_with(stem)).collect();
    if similar.is_empty() {
        similar = datasets_in(store, prefix);
    }
    similar.truncate(SIMILAR_MAX);
    similar
}

/// The datasets directly in a folder, by name.
fn datasets_in(store: &dyn Storage, folder: &Key) -> Vec<Key> {
    let names = store.list_names(folder).unwrap_or_default();
    let stems = names.iter().filter_map(|name| name.strip_suffix(".idx"));
    let pairs = stems.filter(|stem| names.iter().any(|name| *name == format!("{stem}.bin")));
    pairs.filter_map(|stem| folder.join(stem).ok()).collect()
}

/// Found instead of a pair: files of bare tokens have the same name.
pub(crate) const BIN_ALONE: &str = "the .bin alone";

/// The error for a prefix of which a file is missing.
pub(crate) fn no_dataset(store: &dyn Storage, prefix: &Key) -> Error {
    let is_there = |suffix| prefix.with_suffix(suffix).is_ok_and(|key| store.open(&key).is_ok());
    let found = match (is_there(".idx"), is_there(".bin")) {
        (true, false) => "the .idx alone",
        (false, true) => BIN_ALONE,
        (false, false) if prefix.name().ends_with(".bin") && is_there("") => BIN_ALONE,
        _ => "neither",
    };
    let similar = similar_prefixes(store, prefix);
    let similar = similar.iter().map(|dataset| store.display(dataset)).collect();
    Error::NoDataset { prefix: store.display(prefix), found: found.to_owned(), similar }
}
