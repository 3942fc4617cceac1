//! DeepSpeed's checkpoints: weights and Adam's moments, flattened and partitioned over all ranks.
//!
//! `param_shapes` in the model states has names and shapes by group, in the order in which
//! parameters were flattened. With ZeRO stages 1 and 2, a group is one flat vector that is split
//! into equal parts, one per rank, with padding at its end. With stage 3, every parameter is split
//! separately into parts of `ceil(elements / ranks)`, and a rank's vector has its parts end to end.
//! In both cases a parameter is a list of extents of the files, so nothing is joined in advance.

use std::collections::{BTreeMap, HashSet};

use super::import::{Import, folder_by, part_of};
use super::megatron;
use super::pickle::Id;
use super::source::{ElementType, FileExtent, TensorSource};
use super::torch::{Tensor, TorchFile};
use crate::{Dtype, Error, Group, Result, region};

/// The files of one model-parallel rank.
#[derive(Default)]
struct Rank {
    model: Option<String>,
    /// By data-parallel rank.
    optim: BTreeMap<u64, String>,
}

/// One parameter: name and shape.
type Param = (String, Vec<u64>);

pub(crate) fn open(url: &str) -> Result<Import> {
    let (store, folder) = folder_by(url, "latest", str::to_owned)?;
    let mut source = TensorSource::of_files(&store, store.display(&folder));
    let mut ranks: BTreeMap<u64, Rank> = BTreeMap::new();
    for name in store.list_names(&folder)? {
        match parse(&name) {
            Some((dp, mp, "model_states.pt")) => {
                let rank = ranks.entry(mp).or_default();
                if rank.model.is_none() || dp == 0 {
                    rank.model = Some(name);
                }
            }
            Some((dp, mp, "optim_states.pt")) => {
                ranks.entry(mp).or_default().optim.insert(dp, name);
            }
            // Experts and the layers of a pipeline are files of their own: the model would lack
            // them.
            _ if name.ends_with("model_states.pt") || name.ends_with("optim_states.pt") => {
                let expected = "files of ranks alone, without experts and layers of a pipeline";
                return Err(unfit(&source, format!("{name:.80}"), expected));
            }
            _ => {}
        }
    }
    if ranks.is_empty() {
        let expected = "*_model_states.pt and *_optim_states.pt, or `latest` with their folder";
        return Err(unfit(&source, "none".to_owned(), expected));
    }
    check_numbers(&source, "model-parallel", ranks.keys(), None)?;
    let mut all = Vec::new();
    let (mut step, mut facts, mut dropped) = (None, None, Vec::new());
    for rank in ranks.values() {
        let Some(model) = &rank.model else {
            let found = "a rank without them".to_owned();
            return Err(unfit(&source, found, "model states of every rank"));
        };
        let model = TorchFile::open(&mut source, &*store, &folder.join(model)?)?;
        let number = |key| model.pickle.size(model.pickle.get(model.pickle.root, key)?);
        check_numbers(&source, "model-parallel", ranks.keys(), number("mp_world_size"))?;
        step = number("global_steps").or_else(|| number("iteration"));
        facts.get_or_insert_with(|| megatron::MegatronArgs::of(&model));
        let first = source.tensors().len();
        if rank.optim.is_empty() {
            add_module(&mut source, &model, |_| true)?;
        } else {
            let expected = number("dp_world_size");
            check_numbers(&source, "data-parallel", rank.optim.keys(), expected)?;
            let optim = rank
                .optim
                .values()
                .map(|name| TorchFile::open(&mut source, &*store, &folder.join(name)?))
                .collect::<Result<Vec<_>>>()?;
            add_zero(&mut source, &model, &optim)?;
            dropped.extend(tied_names(&model)?);
        }
        all.push((first..source.tensors().len()).collect::<Vec<_>>());
    }
    let is_megatron = source.tensors().iter().any(|tensor| tensor.name.contains("query_key_value"));
    if !is_megatron && all.len() == 1 {
        let mut import = Import::of(source);
        (import.step, import.dropped) = (step, dropped);
        return Ok(import);
    }
    let mut import = megatron::merge(source, &[all], facts.unwrap_or_default())?;
    import.step = step;
    import.dropped.extend(dropped);
    Ok(import)
}

/// Rejects an incomplete set of ranks. `expected` is their number, if the checkpoint has it.
fn check_numbers<'a>(
    source: &TensorSource,
    kind: &str,
    numbers: impl ExactSizeIterator<Item = &'a u64> + Clone,
    expected: Option<u64>,
) -> Result<()> {
    let there = numbers.len() as u64;
    if numbers.clone().copied().eq(0..there) && expected.is_none_or(|expected| expected == there) {
        return Ok(());
    }
    let found = format!("ranks {:?}", numbers.collect::<Vec<_>>());
    let count = expected.unwrap_or(there);
    Err(unfit(source, found, &format!("files of all {count} {kind} ranks")))
}

/// Data-parallel rank, model-parallel rank and kind of a file.
fn parse(name: &str) -> Option<(u64, u64, &str)> {
    let name = name.strip_prefix("bf16_").unwrap_or(name);
    let name = name.strip_prefix("fp16_").unwrap_or(name);
    let (dp, rest) = match name.strip_prefix("zero_pp_rank_") {
        Some(rest) => rest.split_once('_').and_then(|(dp, rest)| Some((dp.parse().ok()?, rest)))?,
        None => (0, name),
    };
    let (mp, kind) = rest.strip_prefix("mp_rank_")?.split_once('_')?;
    Some((dp, mp.parse().ok()?, kind))
}

/// Adds the weights of the module itself, which are complete with stages below 3.
fn add_module(
    source: &mut TensorSource,
    model: &TorchFile,
    is_wanted: impl Fn(&str) -> bool,
) -> Result<()> {
    let Some(module) = model.pickle.get(model.pickle.root, "module") else { return Ok(()) };
    for (name, tensor) in model.leaves(module)? {
        if is_wanted(&name) {
            let name = plain(&name).to_owned();
            source.add(name, Group::Model, tensor.dtype, tensor.shape, tensor.extents)?;
        }
    }
    Ok(())
}

/// Adds parameters, moments and buffers.
fn add_zero(source: &mut TensorSource, model: &TorchFile, optim: &[TorchFile]) -> Result<()> {
    let params = params_of(source, model)?;
    let state = |file: &TorchFile| file.pickle.get(file.pickle.root, "optimizer_state_dict");
    let stage = optim
        .first()
        .and_then(|file| file.pickle.size(file.pickle.get(state(file)?, "zero_stage")?))
        .filter(|stage| (1..=3).contains(stage))
        .ok_or_else(|| unfit(source, "another value".to_owned(), "zero_stage 1, 2 or 3"))?;
    let frozen = model.pickle.get(model.pickle.root, "frozen_param_shapes");
    if frozen.and_then(|id| model.pickle.pairs(id)).is_some_and(|pairs| !pairs.is_empty()) {
        let found = "frozen parameters (hint: save with all parameters trainable)".to_owned();
        return Err(unfit(source, found, "trainable parameters only"));
    }
    let weights = if stage == 3 { "fp32_flat_groups" } else { "single_partition_of_fp32_groups" };
    let flats = optim
        .iter()
        .map(|file| {
            let list = state(file).and_then(|state| file.pickle.get(state, weights));
            let items = list.and_then(|list| file.pickle.items(list)).unwrap_or_default();
            items.iter().map(|&item| flat(file, item)).collect::<Result<Vec<_>>>()
        })
        .collect::<Result<Vec<_>>>()?;
    add_flats(source, &params, &flats, stage, Group::Model)?;
    for (word, group) in [("exp_avg", Group::ExpAvg), ("exp_avg_sq", Group::ExpAvgSq)] {
        let flats = optim
            .iter()
            .map(|file| moments(file, state(file), word))
            .collect::<Result<Vec<_>>>()?;
        if flats.iter().all(|flats| !flats.is_empty()) {
            add_flats(source, &params, &flats, stage, group)?;
        }
    }
    let buffers = model.pickle.get(model.pickle.root, "buffer_names");
    let buffers: HashSet<&str> = buffers
        .and_then(|id| model.pickle.items(id))
        .unwrap_or_default()
        .iter()
        .filter_map(|&name| model.pickle.text(name))
        .collect();
    add_module(source, model, |name| buffers.contains(name))
}

fn params_of(source: &TensorSource, model: &TorchFile) -> Result<Vec<Vec<Param>>> {
    let pickle = &model.pickle;
    let missing = || unfit(source, "none".to_owned(), "param_shapes in the model states");
    let list = pickle.get(pickle.root, "param_shapes").ok_or_else(missing)?;
    let groups = pickle.items(list).map_or_else(|| vec![list], <[Id]>::to_vec);
    let param = |&(name, shape): &(Id, Id)| -> Result<Param> {
        let shape = pickle.sizes(shape).ok_or_else(missing)?;
        Ok((model.name(name)?.to_owned(), shape))
    };
    let params = |group| -> Result<Vec<Param>> {
        pickle.pairs(group).ok_or_else(missing)?.iter().map(param).collect()
    };
    groups.into_iter().map(params).collect()
}

/// Adam's moments of a rank, one vector per group; empty if they are stored otherwise.
fn moments(file: &TorchFile, state: Option<Id>, word: &str) -> Result<Vec<Tensor>> {
    let pickle = &file.pickle;
    let by_group = ["base_optimizer_state", "optimizer_state_dict"]
        .iter()
        .find_map(|key| pickle.get(pickle.get(state?, key)?, "state"))
        .and_then(|id| pickle.pairs(id));
    let mut numbered: Vec<(u64, Id)> = by_group
        .unwrap_or_default()
        .iter()
        .filter_map(|&(number, values)| Some((pickle.size(number)?, pickle.get(values, word)?)))
        .collect();
    numbered.sort_unstable();
    numbered.into_iter().map(|(_, id)| flat(file, id)).collect()
}

fn flat(file: &TorchFile, id: Id) -> Result<Tensor> {
    file.tensor(id)?.ok_or_else(|| Error::Unfit {
        object: "a flat vector of ZeRO".to_owned(),
        found: "another object".to_owned(),
        expected: "a tensor".to_owned(),
    })
}

/// Adds every parameter of one kind. `flats` has a list for each data-parallel rank.
fn add_flats(
    source: &mut TensorSource,
    params: &[Vec<Param>],
    flats: &[Vec<Tensor>],
    stage: u64,
    group: Group,
) -> Result<()> {
    let elements = |tensor: &Tensor| tensor.shape.iter().product::<u64>();
    let is_f32 =
        |tensor: &Tensor| tensor.dtype == ElementType::Known(Dtype::F32) && tensor.shape.len() == 1;
    if !flats.iter().flatten().all(is_f32) {
        return Err(unfit(source, "another type".to_owned(), "flat vectors of F32"));
    }
    let ranks = flats.len() as u64;
    let joined = |tensors: &[&Tensor]| -> Vec<FileExtent> {
        tensors.iter().flat_map(|tensor| tensor.extents.iter().copied()).collect()
    };
    if stage == 3 {
        let vectors: Vec<Vec<FileExtent>> =
            flats.iter().map(|rank| joined(&rank.iter().collect::<Vec<_>>())).collect();
        let mut at = 0_u64;
        for (name, shape) in params.iter().flatten() {
            let count = elements_of(source, name, shape)?;
            let share = count.div_ceil(ranks);
            let mut extents = Vec::new();
            for (rank, vector) in vectors.iter().enumerate() {
                let left = count.saturating_sub(share * rank as u64);
                extents.extend(part_of(vector, at * 4, left.min(share) * 4));
            }
            at += share;
            source.add(plain(name).to_owned(), group, Dtype::F32, shape.clone(), extents)?;
        }
        return Ok(());
    }
    for (place, params) in params.iter().enumerate() {
        let parts: Option<Vec<&Tensor>> = flats.iter().map(|rank| rank.get(place)).collect();
        let parts = parts.ok_or_else(|| {
            let expected = format!("a flat vector of group {place} in every rank");
            unfit(source, "a rank without it".to_owned(), &expected)
        })?;
        let there: u64 = parts.iter().map(|part| elements(part)).sum();
        let vector = joined(&parts);
        let mut at = 0_u64;
        for (name, shape) in params {
            let count = elements_of(source, name, shape)?;
            let extents = part_of(&vector, at * 4, count * 4);
            source.add(plain(name).to_owned(), group, Dtype::F32, shape.clone(), extents)?;
            at += count;
        }
        // Each rank's part is padded to 4 bytes for NCCL, so the end is a multiple of 2 x ranks.
        let align = 2 * ranks;
        if at.next_multiple_of(align) != there.next_multiple_of(align) {
            let expected = format!("{at} elements and less than {align} of padding");
            return Err(unfit(source, format!("{there} elements in group {place}"), &expected));
        }
    }
    Ok(())
}

fn elements_of(source: &TensorSource, name: &str, shape: &[u64]) -> Result<u64> {
    let count = region::elements(shape.iter().copied()).filter(|count| *count < 1 << 60);
    count.ok_or_else(|| {
        unfit(source, format!("'{name}' of shape {shape:?}"), "fewer than 2^60 elements")
    })
}

/// Names of weights that are copies of other weights.
fn tied_names(model: &TorchFile) -> Result<Vec<String>> {
    let pickle = &model.pickle;
    let shared = pickle.get(pickle.root, "shared_params").and_then(|id| pickle.pairs(id));
    let names = shared.unwrap_or_default().iter();
    names.map(|&(name, _)| model.name(name).map(str::to_owned)).collect()
}

/// The name without the prefix that wrappers add.
fn plain(name: &str) -> &str {
    name.strip_prefix("module.").unwrap_or(name)
}

fn unfit(source: &TensorSource, found: String, expected: &str) -> Error {
    Error::Unfit { object: source.display().to_owned(), found, expected: expected.to_owned() }
}
