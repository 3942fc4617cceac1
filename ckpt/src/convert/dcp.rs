//! Folders of `torch.distributed.checkpoint`: tensors in boxes, each a small `torch.save` archive.

use std::collections::HashMap;

use super::import::Import;
use super::made::DerivedTensor;
use super::pickle::{Id, Pickle, PickleNode};
use super::source::TensorSource;
use super::torch::{Names, TorchFile, dtype_of};
use super::zip::Member;
use crate::{Dtype, Error, Group, Result, Span, region};
use storage::{Key, Storage};

const METADATA: &str = ".metadata";

/// A tensor takes some hundred bytes of metadata per box.
const METADATA_BYTES_MAX: u64 = 1 << 30;

pub(crate) fn open(url: &str) -> Result<Import> {
    let store = storage::open_url(url)?;
    let key = Key::new(METADATA)?;
    let object = store.display(&key);
    let bad = |offset: usize, found: &str, expected: &str| Error::Corrupt {
        object: object.clone(),
        offset: offset as u64,
        found: found.to_owned(),
        expected: expected.to_owned(),
    };
    if store.open(&key)?.len_bytes() > METADATA_BYTES_MAX {
        return Err(bad(0, "more", "at most 1 GiB of metadata of a distributed checkpoint"));
    }
    let bytes = storage::read_all(&*store, &key)?;
    let (pickle, _) = Pickle::read(&bytes)
        .map_err(|fault| bad(fault.offset, &fault.reason, "a pickle of torch.distributed"))?;
    let (Some(tensors), Some(places)) = (
        pickle.get(pickle.root, "state_dict_metadata").and_then(|id| pickle.pairs(id)),
        pickle.get(pickle.root, "storage_data").and_then(|id| pickle.pairs(id)),
    ) else {
        return Err(bad(0, "another pickle", "one with state_dict_metadata and storage_data"));
    };
    let places = places_of(&pickle, places).ok_or_else(|| {
        bad(0, "an invalid storage entry", "path, offset and length of each storage")
    })?;

    let mut source = TensorSource::of_files(&store, store.display(&Key::root()));
    let mut files = HashMap::new();
    let (mut made, mut dropped, names) = (Vec::new(), Vec::new(), Names::new());
    for &(name, entry) in tensors {
        let Some(name) = pickle.text(name) else { continue };
        names.count(name, &object)?;
        let Some(boxes) = pickle.get(entry, "chunks").and_then(|id| pickle.items(id)) else {
            // Not a tensor but a pickled object, such as a step.
            dropped.push(name.to_owned());
            continue;
        };
        let Some((dtype, shape)) = kind_of(&pickle, entry) else {
            let found = format!("'{name:.80}' without them");
            return Err(bad(0, &found, "properties and a size of each tensor"));
        };
        let Some((group, parameter)) = role_of(name) else {
            dropped.push(name.to_owned());
            continue;
        };
        let mut tensor = DerivedTensor::new(parameter.to_owned(), group, dtype, shape);
        for &chunk in boxes {
            names.count(name, &object)?;
            let (start, spans) = span_of(&pickle, chunk).ok_or_else(|| {
                let found = format!("a box of '{name:.80}' without them");
                bad(0, &found, "offsets and sizes of each box")
            })?;
            let place = places.get(&(name, start.clone()));
            let place = place.ok_or_else(|| {
                let found = format!("none for '{name:.80}' at {start:?}");
                bad(0, &found, "a storage entry for each box")
            })?;
            let from = chunk_of(&mut source, &*store, &mut files, name, place)?;
            let lens: Vec<u64> = spans.iter().map(|span| span.len).collect();
            if source.tensors()[from].shape != lens {
                let found = format!("'{name:.80}' of shape {:?}", source.tensors()[from].shape);
                return Err(bad(0, &found, &format!("shape {lens:?}")));
            }
            tensor.put(start, from, &region::whole(&lens));
        }
        tensor.check_boxes(&source)?;
        made.push(tensor);
    }
    Ok(Import { source, made, dropped, step: None, heads: None })
}

/// The file, and the part of it, of each box of each name.
type Places<'a> = HashMap<(&'a str, Vec<u64>), (&'a str, Member)>;

fn places_of<'a>(pickle: &'a Pickle, pairs: &[(Id, Id)]) -> Option<Places<'a>> {
    let mut places = HashMap::new();
    for &(index, info) in pairs {
        let name = pickle.text(pickle.get(index, "fqn")?)?;
        // Pickled objects have no offset, and are not imported.
        let Some(start) = pickle.get(index, "offset").and_then(|id| pickle.sizes(id)) else {
            continue;
        };
        let path = pickle.text(pickle.get(info, "relative_path")?)?;
        let offset = pickle.size(pickle.get(info, "offset")?)?;
        let bytes = pickle.size(pickle.get(info, "length")?)?;
        let changed = pickle.get(info, "transform_descriptors");
        if changed.is_some_and(|id| !matches!(pickle.node(id), PickleNode::None)) {
            return None;
        }
        places.insert((name, start), (path, Member::new(offset, bytes)));
    }
    Some(places)
}

/// Type and shape. `U8` also represents a type that cannot be read, as in the source.
fn kind_of(pickle: &Pickle, entry: Id) -> Option<(Dtype, Vec<u64>)> {
    let properties = pickle.get(entry, "properties")?;
    let PickleNode::Built(built) = pickle.node(properties) else { return None };
    // Newer versions pickle a tuple whose first item is the type, older ones the attributes.
    let state = built.state?;
    let dtype = match pickle.node(state) {
        PickleNode::Tuple(items) => *items.first()?,
        _ => pickle.get(properties, "dtype")?,
    };
    let PickleNode::Global(_, dtype) = pickle.node(dtype) else { return None };
    Some((dtype_of(dtype).unwrap_or(Dtype::U8), pickle.sizes(pickle.get(entry, "size")?)?))
}

fn span_of(pickle: &Pickle, chunk: Id) -> Option<(Vec<u64>, Vec<Span>)> {
    let start = pickle.sizes(pickle.get(chunk, "offsets")?)?;
    let lens = pickle.sizes(pickle.get(chunk, "sizes")?)?;
    let spans = start.iter().zip(&lens).map(|(&start, &len)| Span { start, len }).collect();
    (start.len() == lens.len()).then_some((start, spans))
}

/// Adds the tensor of a box to the source.
fn chunk_of(
    source: &mut TensorSource,
    store: &dyn Storage,
    files: &mut HashMap<String, usize>,
    name: &str,
    (path, within): &(&str, Member),
) -> Result<usize> {
    let key = Key::new(*path)?;
    let object = store.open(&key)?;
    let len = object.len_bytes();
    let file = *files.entry((*path).to_owned()).or_insert_with(|| source.add_file(key, len));
    let corrupt = |found: String| Error::Corrupt {
        object: object.display(),
        offset: within.offset,
        found,
        expected: format!("the tensor '{name:.80}'"),
    };
    if within.offset.checked_add(within.bytes).is_none_or(|end| end > len) {
        return Err(corrupt(format!("{} bytes in a file of {len}", within.bytes)));
    }
    let archive = TorchFile::read(source, &*object, *within, file)?;
    let tensor = archive.tensor(archive.pickle.root)?;
    let tensor = tensor.ok_or_else(|| corrupt("another object".to_owned()))?;
    source.add(name.to_owned(), Group::Model, tensor.dtype, tensor.shape, tensor.extents)
}

/// The group and parameter of a name: `optim.state.NAME.exp_avg` of torch,
/// `optimizer.state.exp_avg.NAME` of Megatron, or a weight under `model.`; `None` for an
/// optimizer's counters.
fn role_of(name: &str) -> Option<(Group, &str)> {
    let states = [
        ("exp_avg_sq", Group::ExpAvgSq),
        ("exp_avg", Group::ExpAvg),
        ("fp32_param", Group::Master),
        ("master", Group::Master),
    ];
    if let Some((_, rest)) = name.split_once("state.")
        && name.starts_with("optim")
    {
        for (word, group) in states {
            if let Some(of) = rest.strip_prefix(word).and_then(|rest| rest.strip_prefix('.')) {
                return Some((group, of.strip_prefix("module.").unwrap_or(of)));
            }
            if let Some(of) = rest.strip_suffix(word).and_then(|rest| rest.strip_suffix('.')) {
                return Some((group, of.strip_prefix("model.").unwrap_or(of)));
            }
        }
        return None;
    }
    Some((Group::Model, name.strip_prefix("model.").unwrap_or(name)))
}
