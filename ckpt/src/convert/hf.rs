//! Opens and writes folders of Hugging Face.
//!
//! The index determines which tensor is read from which file. Other tensors of its files (a copy
//! that a later file replaces, a tensor of another variant) are skipped and reported.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;

use super::import::Import;
use super::source::{ElementType, FileExtent, TensorSource};
use super::step::weight_index;
use super::torch::{Tensor, TorchFile};
use super::write::{ConvertLimits, ProgressFn, WriteJob, check, lay_out};
use crate::format::safetensors;
use crate::{Error, Group, Result};
use storage::{FileEntry, Key, Location, ProcessIdentity, Storage, write_all};

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
pub(crate) const PICKLED_SINGLE: &str = "pytorch_model.bin";

/// An index has one line per tensor.
const SMALL_BYTES_MAX: u64 = 64 << 20;

/// Configurations and tokenizers, which are copied with the weights.
const COMPANIONS: [&str; 11] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "tokenizer.model",
];

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// How a folder of Hugging Face stores its weights.
struct WeightLayout {
    /// The file of a model with a single file.
    single: &'static str,
    /// The index of a model with several files: the file of each tensor.
    index: &'static str,
    tensors_of: ReadTensors,
}

/// Lists the tensors of one file, which it adds to the source.
type ReadTensors = fn(&mut TensorSource, &dyn Storage, &Key) -> Result<Vec<(String, Tensor)>>;

const SAFETENSORS: WeightLayout =
    WeightLayout { single: SINGLE, index: INDEX, tensors_of: safetensors_of };

/// Written before safetensors, and with `safe_serialization=False`.
const PICKLES: WeightLayout = WeightLayout {
    single: PICKLED_SINGLE,
    index: "pytorch_model.bin.index.json",
    tensors_of: pickled_of,
};

/// Opens a folder, or one file of safetensors.
pub(crate) fn open(url: &str) -> Result<Import> {
    if !Location::new(url).file_name().ends_with(".safetensors") {
        return open_folder(url, &[SAFETENSORS, PICKLES]);
    }
    let (store, key) = storage::locate(url)?;
    check_complete_file(&*store, &key)?;
    let mut source = TensorSource::of_files(&store, store.display(&key));
    for (name, tensor) in safetensors_of(&mut source, &*store, &key)? {
        source.add(name, Group::Model, tensor.dtype, tensor.shape, tensor.extents)?;
    }
    Ok(Import::of(source))
}

/// Opens a folder whose weights were written by `torch.save`.
pub(crate) fn open_pickles(url: &str) -> Result<Import> {
    open_folder(url, &[PICKLES])
}

fn open_folder(url: &str, layouts: &[WeightLayout]) -> Result<Import> {
    let store = storage::open_url(url)?;
    let names = store.list_names(&Key::root())?;
    let has = |name: &str| names.iter().any(|there| there == name);
    let mut source = TensorSource::of_files(&store, store.display(&Key::root()));
    let layout = layouts.iter().find(|layout| has(layout.index) || has(layout.single));
    let Some(layout) = layout else {
        let of = |layout: &WeightLayout| format!("{} or {}", layout.single, layout.index);
        let expected = layouts.iter().map(of).collect::<Vec<_>>().join(", or ");
        let found = "none of these files (hint: select another format with --from)".to_owned();
        return Err(unfit(&source, found, &expected));
    };
    let mut dropped = Vec::new();
    if has(layout.index) {
        let index = read_index(&*store, &Key::new(layout.index)?)?;
        if has(layout.single) && !index.weight_map.values().any(|file| file == layout.single) {
            let found = format!(
                "{} and {} of other files (hint: remove one of them, or pass the path of the file)",
                layout.single, layout.index
            );
            return Err(unfit(&source, found, "one model"));
        }
        dropped = add_assigned(&mut source, &*store, layout, &index)?;
    } else {
        for (name, tensor) in (layout.tensors_of)(&mut source, &*store, &Key::new(layout.single)?)?
        {
            source.add(name, Group::Model, tensor.dtype, tensor.shape, tensor.extents)?;
        }
    }
    add_companions(&mut source, &*store, &Key::root(), &names)?;
    let heads = heads_of(&source);
    Ok(Import { heads, dropped, ..Import::of(source) })
}

/// Adds each tensor of the index from the file that the index assigns it to. Returns the
/// other tensors of the files, which are skipped: other copies, and tensors not in the index.
fn add_assigned(
    source: &mut TensorSource,
    store: &dyn Storage,
    layout: &WeightLayout,
    index: &Index,
) -> Result<Vec<String>> {
    let files: BTreeSet<&String> = index.weight_map.values().collect();
    let (mut found, mut left_out) = (HashSet::new(), Vec::new());
    for file in files {
        for (name, tensor) in (layout.tensors_of)(source, store, &Key::new(file)?)? {
            if index.weight_map.get(&name) == Some(file) {
                found.insert(name.clone());
                source.add(name, Group::Model, tensor.dtype, tensor.shape, tensor.extents)?;
            } else {
                left_out.push(format!("{name} ({file}: not assigned by the index)"));
            }
        }
    }
    let missing = index.weight_map.iter().filter(|(name, _)| !found.contains(*name));
    let missing: Vec<String> = missing.map(|(name, file)| format!("{name} in {file}")).collect();
    if missing.is_empty() {
        return Ok(left_out);
    }
    let found = format!("{} missing: {}", missing.len(), list(&missing));
    Err(unfit(source, found, "every tensor in the file that the index assigns it to"))
}

/// Adds configurations and tokenizers that are in the folder.
pub(crate) fn add_companions(
    source: &mut TensorSource,
    store: &dyn Storage,
    folder: &Key,
    names: &[String],
) -> Result<()> {
    for name in COMPANIONS.into_iter().filter(|name| names.iter().any(|there| there == name)) {
        let key = folder.join(name)?;
        if store.open(&key)?.len_bytes() <= SMALL_BYTES_MAX {
            source.add_blob(name.to_owned(), storage::read_all(store, &key)?);
        }
    }
    Ok(())
}

/// Attention heads, from the `config.json` of the source.
pub(crate) fn heads_of(source: &TensorSource) -> Option<u64> {
    let config = config_of(source)?;
    ["n_head", "num_attention_heads", "num_heads"].iter().find_map(|key| config[*key].as_u64())
}

/// Rejects a file with a part of a model, by its name or by an index in the same folder.
pub(crate) fn check_complete_file(store: &dyn Storage, key: &Key) -> Result<()> {
    let partial = |found: String| Error::Unfit {
        object: store.display(key),
        found: format!("{found} (hint: import the folder, whose index lists all files)"),
        expected: "a complete model".to_owned(),
    };
    if let Some((number, count)) = shard_of(key.name()).filter(|(_, count)| *count > 1) {
        return Err(partial(format!("file {number} of {count} of a model")));
    }
    for layout in [SAFETENSORS, PICKLES] {
        // Without a readable index, the file counts as complete.
        let Ok(index) = read_index(store, &key.parent().join(layout.index)?) else { continue };
        let files: BTreeSet<&str> = index.weight_map.values().map(String::as_str).collect();
        if files.contains(key.name()) && files.len() > 1 {
            return Err(partial(format!("one of the {} files of {}", files.len(), layout.index)));
        }
    }
    Ok(())
}

/// Number and count of a file such as `model-00001-of-00002.safetensors`.
fn shard_of(name: &str) -> Option<(u64, u64)> {
    let (stem, _) = name.rsplit_once('.')?;
    let (front, count) = stem.rsplit_once("-of-")?;
    let (_, number) = front.rsplit_once('-')?;
    Some((number.parse().ok()?, count.parse().ok()?))
}

/// The `config.json` of the source, if it is valid JSON.
pub(crate) fn config_of(source: &TensorSource) -> Option<Value> {
    let (_, bytes) = source.blobs().iter().find(|(name, _)| name == "config.json")?;
    serde_json::from_slice(bytes).ok()
}

fn read_index(store: &dyn Storage, key: &Key) -> Result<Index> {
    let bytes = storage::read_small(store, key, SMALL_BYTES_MAX)?;
    serde_json::from_slice(&bytes).map_err(|error| Error::Corrupt {
        object: store.display(key),
        offset: 0,
        found: error.to_string(),
        expected: "a weight_map of names to files".to_owned(),
    })
}

/// The tensors of a file of `torch.save`.
fn pickled_of(
    source: &mut TensorSource,
    store: &dyn Storage,
    key: &Key,
) -> Result<Vec<(String, Tensor)>> {
    TorchFile::open(source, store, key)?.state_dict()
}

/// The tensors of a safetensors file, which is added to the source's files.
fn safetensors_of(
    source: &mut TensorSource,
    store: &dyn Storage,
    key: &Key,
) -> Result<Vec<(String, Tensor)>> {
    let object = store.open(key)?;
    let header = safetensors::read_header(&*object)?;
    header.check_coverage(&*object)?;
    let start = header.bytes.len() as u64;
    let file = source.add_file(key.clone(), object.len_bytes());
    // No overflow: the header's ranges cover the file.
    let extents = |[begin, end]: [u64; 2]| {
        vec![FileExtent { file, offset: start + begin, bytes: end - begin }]
    };
    let known = header.entries.into_iter().map(|entry| {
        let extents = extents(entry.data_offsets);
        (entry.name, Tensor { dtype: entry.dtype.into(), shape: entry.shape, extents })
    });
    let foreign = header.foreign.into_iter().map(|entry| {
        let dtype = ElementType::Foreign(entry.type_label());
        (entry.name, Tensor { dtype, shape: entry.shape, extents: Vec::new() })
    });
    Ok(known.chain(foreign).collect())
}

/// The result of an export.
#[derive(Clone, Debug)]
pub struct Exported {
    /// All files, in the order in which they were written.
    pub files: Vec<FileEntry>,
    /// The number of tensors.
    pub tensors: usize,
    /// Bytes of all files.
    pub bytes: u64,
}

/// Writes a folder that `transformers` opens: safetensors files, an index if there are several, and
/// `companions` such as `config.json`. The folder is published once it is complete.
///
/// # Errors
/// [`storage::Error::Exists`] within [`Error::Storage`] if the folder exists,
/// [`storage::Error::Unsupported`] if the store cannot publish a folder atomically,
/// [`Error::Unfit`] for tensors that cannot be derived, or errors of the store. Then all files are
/// removed.
pub fn export(
    import: &Import,
    companions: &[(String, Vec<u8>)],
    store: &Arc<dyn Storage>,
    folder: &Key,
    bounds: ConvertLimits,
    progress: ProgressFn<'_>,
) -> Result<Exported> {
    let Import { source, made, .. } = import;
    check(made, source)?;
    if let Some(other) = made.iter().find(|made| made.group != Group::Model) {
        return Err(unfit(source, format!("{} '{}'", other.group, other.name), "weights only"));
    }
    if store.list_names(&folder.parent())?.iter().any(|name| name == folder.name()) {
        return Err(storage::Error::Exists { object: store.display(folder) }.into());
    }
    if !store.has_atomic_publish(&folder.parent())? {
        let (operation, object) = ("atomically publish", store.display(folder));
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
        progress,
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
            log::warn!("{}: failed export is not removed: {error}", store.display(&staging));
        }
    })?;
    let bytes = files.iter().map(|file| file.bytes).sum();
    Ok(Exported { files, tensors: made.len(), bytes })
}

/// Up to five names, for a message.
fn list(names: &[String]) -> String {
    let shown = names.iter().take(5).map(|name| format!("'{name:.80}'")).collect::<Vec<_>>();
    let more = if names.len() > 5 { ", ..." } else { "" };
    shown.join(", ") + more
}

fn unfit(source: &TensorSource, found: String, expected: &str) -> Error {
    Error::Unfit { object: source.display().to_owned(), found, expected: expected.to_owned() }
}
