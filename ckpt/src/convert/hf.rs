//! Folders of Hugging Face: opened, and written.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;

use super::import::Import;
use super::source::{FileExtent, TensorSource};
use super::step::weight_index;
use super::write::{ConvertLimits, ProgressFn, WriteJob, check, lay_out};
use crate::format::safetensors;
use crate::{Error, Group, Result};
use storage::{FileEntry, Key, ProcessIdentity, Storage, write_all};

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// An index has a line a tensor.
const SMALL_BYTES_MAX: u64 = 64 << 20;

/// Configurations and tokenizers, which go with the weights.
const COMPANIONS: [&str; 9] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
];

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

pub(crate) fn open(url: &str) -> Result<Import> {
    if url.trim_end_matches('/').ends_with(".safetensors") {
        let (store, key) = storage::locate(url)?;
        let mut source = TensorSource::of_files(&store, store.display(&key));
        add_file(&mut source, &*store, &key)?;
        return Ok(Import::of(source));
    }
    let store = storage::open_url(url)?;
    let names = store.list_names(&Key::root())?;
    let has = |name: &str| names.iter().any(|there| there == name);
    let mut source = TensorSource::of_files(&store, store.display(&Key::root()));
    if has(INDEX) {
        let index = read_index(&store)?;
        let mut files: Vec<&String> = index.weight_map.values().collect();
        files.sort_unstable();
        files.dedup();
        for file in files {
            add_file(&mut source, &*store, &Key::new(file)?)?;
        }
        let there: std::collections::HashSet<&str> =
            source.tensors().iter().map(|tensor| tensor.name.as_str()).collect();
        let missing: Vec<&str> = index
            .weight_map
            .keys()
            .map(String::as_str)
            .filter(|name| !there.contains(name))
            .collect();
        if !missing.is_empty() {
            let got = format!("{} without a tensor: {}", missing.len(), list(&missing));
            return Err(unfit(&source, got, "every tensor of the index in its file"));
        }
    } else if has(SINGLE) {
        add_file(&mut source, &*store, &Key::new(SINGLE)?)?;
    } else {
        let due = format!("{SINGLE} or {INDEX} in it; hint: --from names other formats");
        return Err(unfit(&source, "neither".to_owned(), &due));
    }
    for name in COMPANIONS.into_iter().filter(|name| has(name)) {
        let key = Key::new(name)?;
        if store.open(&key)?.len_bytes() <= SMALL_BYTES_MAX {
            source.add_blob(name.to_owned(), storage::read_all(&*store, &key)?);
        }
    }
    let heads = config_of(&source).and_then(|config| {
        ["n_head", "num_attention_heads", "num_heads"].iter().find_map(|key| config[*key].as_u64())
    });
    Ok(Import { heads, ..Import::of(source) })
}

/// The `config.json` that came along, if it is one.
pub(crate) fn config_of(source: &TensorSource) -> Option<Value> {
    let (_, bytes) = source.blobs().iter().find(|(name, _)| name == "config.json")?;
    serde_json::from_slice(bytes).ok()
}

fn read_index(store: &Arc<dyn Storage>) -> Result<Index> {
    let key = Key::new(INDEX)?;
    let bytes = storage::read_small(&**store, &key, SMALL_BYTES_MAX)?;
    serde_json::from_slice(&bytes).map_err(|error| Error::Corrupt {
        object: store.display(&key),
        offset: 0,
        found: error.to_string(),
        expected: "a weight_map of names to files".to_owned(),
    })
}

/// Adds the tensors of a safetensors file.
fn add_file(source: &mut TensorSource, store: &dyn Storage, key: &Key) -> Result<()> {
    let object = store.open(key)?;
    let header = safetensors::read_header(&*object)?;
    let start = header.bytes.len() as u64;
    let file = source.add_file(key.clone(), object.len_bytes());
    for entry in header.entries {
        let [begin, end] = entry.data_offsets;
        let offset = start.checked_add(begin);
        let (Some(offset), Some(bytes)) = (offset, end.checked_sub(begin)) else {
            return Err(Error::Corrupt {
                object: object.display(),
                offset: 8,
                found: format!("data_offsets [{begin}, {end}] of '{:.80}'", entry.name),
                expected: "a range".to_owned(),
            });
        };
        let extents = vec![FileExtent { file, offset, bytes }];
        source.add(entry.name, Group::Model, entry.dtype, entry.shape, extents)?;
    }
    Ok(())
}

/// What an export wrote.
#[derive(Clone, Debug)]
pub struct Exported {
    /// All files, in their order.
    pub files: Vec<FileEntry>,
    /// Tensors.
    pub tensors: usize,
    /// Bytes of all files.
    pub bytes: u64,
}

/// Writes a folder that `transformers` opens: safetensors files, an index if there are several, and
/// `companions` such as `config.json`. The folder appears when it is whole.
///
/// # Errors
/// [`storage::Error::Exists`] within [`Error::Storage`] if the folder is there,
/// [`storage::Error::Unsupported`] where a folder cannot appear at once, [`Error::Unfit`] for
/// recipes that are none, or what a store says; nothing is left then.
pub fn export(
    import: &Import,
    companions: &[(String, Vec<u8>)],
    store: &Arc<dyn Storage>,
    folder: &Key,
    bounds: ConvertLimits,
    tell: ProgressFn<'_>,
) -> Result<Exported> {
    let Import { source, made, .. } = import;
    check(made, source)?;
    if let Some(other) = made.iter().find(|made| made.group != Group::Model) {
        return Err(unfit(source, format!("{} '{}'", other.group, other.name), "weights alone"));
    }
    if store.list_names(&folder.parent())?.iter().any(|name| name == folder.name()) {
        return Err(storage::Error::Exists { object: store.display(folder) }.into());
    }
    if !store.has_atomic_publish(&folder.parent())? {
        let (operation, object) = ("export a folder that appears at once", store.display(folder));
        return Err(storage::Error::Unsupported { operation, object }.into());
    }
    let name = |number: usize, count: usize| match count {
        1 => SINGLE.to_owned(),
        _ => format!("model-{number:05}-of-{count:05}.safetensors"),
    };
    let members = 0..made.len();
    let files = lay_out(made, members, bounds.shard_bytes_max, name)?;
    let need_bytes = files.iter().map(|file| file.bytes(made)).sum::<u64>();
    let need_bytes = need_bytes + need_bytes / 50 + (1 << 20);
    if let Some(free) = store.free_bytes()?.filter(|&free| free < need_bytes) {
        let (object, free_bytes) = (store.display(folder), Some(free));
        return Err(storage::Error::NoSpace { object, need_bytes, free_bytes }.into());
    }
    let staging = format!(".tmp-export-{}-{}", folder.name(), ProcessIdentity::new());
    let staging = folder.parent().join(&staging)?;
    let block_bytes = 4 << 20;
    let job = WriteJob {
        store: &**store,
        folder: &staging,
        source,
        made,
        block_bytes,
        codec: None,
        bounds,
        tell,
    };
    let write = || -> Result<Vec<FileEntry>> {
        let mut entries: Vec<FileEntry> =
            job.write(&files)?.into_iter().map(|(entry, _)| entry).collect();
        let index = weight_index(made, &files).filter(|_| files.len() > 1);
        let index = index.map(|bytes| (INDEX.to_owned(), bytes));
        for (name, bytes) in companions.iter().chain(&index) {
            entries.push(write_all(&**store, &staging.join(name)?, bytes)?);
        }
        store.publish(&staging, folder)?;
        Ok(entries)
    };
    let files = write().inspect_err(|_| {
        if let Err(error) = store.delete_folder(&staging) {
            log::warn!("an export that failed leaves {}: {error}", store.display(&staging));
        }
    })?;
    let bytes = files.iter().map(|file| file.bytes).sum();
    Ok(Exported { files, tensors: made.len(), bytes })
}

/// Up to five names.
fn list(names: &[&str]) -> String {
    let shown = names.iter().take(5).map(|name| format!("'{name:.80}'")).collect::<Vec<_>>();
    let more = if names.len() > 5 { ", ..." } else { "" };
    shown.join(", ") + more
}

fn unfit(source: &TensorSource, found: String, expected: &str) -> Error {
    Error::Unfit { object: source.display().to_owned(), found, expected: expected.to_owned() }
}
