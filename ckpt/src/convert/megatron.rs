//! Megatron-LM's `mp_rank_TT[_PPP]/model_optim_rng.pt`, merged to a GPT-2 with the names of Hugging
//! Face.
//!
//! A rank has rows of some matrices and columns of others. The rows of the fused query, key and
//! value matrix are ordered differently in each `checkpoint_version`: within a rank `[3, heads,
//! width]` in version 0, `[heads, width, 3]` in 1 and `[heads, 3, width]` from 2 on; here all
//! queries come first, then keys, then values. Hugging Face keeps matrices as `[in, out]`, Megatron
//! as `[out, in]`.

mod facts;

use std::collections::BTreeMap;

use super::import::{Import, folder_by};
use super::made::DerivedTensor;
use super::source::TensorSource;
use super::torch::{Tensor, TorchFile};
use crate::{Error, Group, Result, Span};
pub(crate) use facts::MegatronArgs;
use facts::count_text;
use storage::{Key, Storage};

/// How the ranks' parts of a tensor are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RankJoin {
    /// Every rank has all of it.
    Same,
    /// Each rank has some rows.
    Rows,
    /// Each rank has some columns.
    Columns,
    /// Each rank has some heads, with their queries, keys and values.
    Qkv,
}

/// Suffix of Megatron's name, name in GPT-2, how parts are joined, and whether the result is
/// transposed. The classic names first, then those of Megatron-Core, with and without Transformer
/// Engine.
const GLOBAL: [(&str, &str, RankJoin, bool); 5] = [
    ("embedding.word_embeddings.weight", "transformer.wte.weight", RankJoin::Rows, false),
    ("embedding.position_embeddings.weight", "transformer.wpe.weight", RankJoin::Same, false),
    ("final_layernorm.weight", "transformer.ln_f.weight", RankJoin::Same, false),
    ("final_layernorm.bias", "transformer.ln_f.bias", RankJoin::Same, false),
    ("output_layer.weight", "lm_head.weight", RankJoin::Rows, false),
];
const LAYER: [(&str, &str, RankJoin, bool); 28] = [
    ("input_layernorm.weight", "ln_1.weight", RankJoin::Same, false),
    ("input_layernorm.bias", "ln_1.bias", RankJoin::Same, false),
    ("attention.query_key_value.weight", "attn.c_attn.weight", RankJoin::Qkv, true),
    ("attention.query_key_value.bias", "attn.c_attn.bias", RankJoin::Qkv, false),
    ("attention.dense.weight", "attn.c_proj.weight", RankJoin::Columns, true),
    ("attention.dense.bias", "attn.c_proj.bias", RankJoin::Same, false),
    ("self_attention.query_key_value.weight", "attn.c_attn.weight", RankJoin::Qkv, true),
    ("self_attention.query_key_value.bias", "attn.c_attn.bias", RankJoin::Qkv, false),
    ("self_attention.dense.weight", "attn.c_proj.weight", RankJoin::Columns, true),
    ("self_attention.dense.bias", "attn.c_proj.bias", RankJoin::Same, false),
    ("post_attention_layernorm.weight", "ln_2.weight", RankJoin::Same, false),
    ("post_attention_layernorm.bias", "ln_2.bias", RankJoin::Same, false),
    ("mlp.dense_h_to_4h.weight", "mlp.c_fc.weight", RankJoin::Rows, true),
    ("mlp.dense_h_to_4h.bias", "mlp.c_fc.bias", RankJoin::Rows, false),
    ("mlp.dense_4h_to_h.weight", "mlp.c_proj.weight", RankJoin::Columns, true),
    ("mlp.dense_4h_to_h.bias", "mlp.c_proj.bias", RankJoin::Same, false),
    ("self_attention.linear_qkv.layer_norm_weight", "ln_1.weight", RankJoin::Same, false),
    ("self_attention.linear_qkv.layer_norm_bias", "ln_1.bias", RankJoin::Same, false),
    ("self_attention.linear_qkv.weight", "attn.c_attn.weight", RankJoin::Qkv, true),
    ("self_attention.linear_qkv.bias", "attn.c_attn.bias", RankJoin::Qkv, false),
    ("self_attention.linear_proj.weight", "attn.c_proj.weight", RankJoin::Columns, true),
    ("self_attention.linear_proj.bias", "attn.c_proj.bias", RankJoin::Same, false),
    ("pre_mlp_layernorm.weight", "ln_2.weight", RankJoin::Same, false),
    ("pre_mlp_layernorm.bias", "ln_2.bias", RankJoin::Same, false),
    ("mlp.linear_fc1.layer_norm_weight", "ln_2.weight", RankJoin::Same, false),
    ("mlp.linear_fc1.layer_norm_bias", "ln_2.bias", RankJoin::Same, false),
    ("mlp.linear_fc1.weight", "mlp.c_fc.weight", RankJoin::Rows, true),
    ("mlp.linear_fc1.bias", "mlp.c_fc.bias", RankJoin::Rows, false),
];
/// The second matrix of Megatron-Core.
const LAYER_FC2: [(&str, &str, RankJoin, bool); 2] = [
    ("mlp.linear_fc2.weight", "mlp.c_proj.weight", RankJoin::Columns, true),
    ("mlp.linear_fc2.bias", "mlp.c_proj.bias", RankJoin::Same, false),
];

/// Rows of queries, keys and values are moved one by one. A tensor without elements may claim any
/// number of them; the widest model has 60,000.
const QKV_ROWS_MAX: u64 = 3 << 18;

/// A name may contain any layer number.
const LAYERS_MAX: u64 = 1 << 20;

/// A pipeline stage or virtual stage: the tensors of each tensor-parallel rank.
pub(crate) type Stage = Vec<Vec<usize>>;

pub(crate) fn open(url: &str) -> Result<Import> {
    let tracker = "latest_checkpointed_iteration.txt";
    let (store, folder) = folder_by(url, tracker, |text| match text.parse::<u64>() {
        Ok(iteration) => format!("iter_{iteration:07}"),
        Err(_) => text.to_owned(),
    })?;
    let mut source = TensorSource::of_files(&store, store.display(&folder));
    // By stage, then by rank.
    let mut files: BTreeMap<u64, BTreeMap<u64, TorchFile>> = BTreeMap::new();
    for name in store.list_names(&folder)? {
        let Some(rest) = name.strip_prefix("mp_rank_") else { continue };
        let numbers: Vec<_> = rest.split('_').map(str::parse::<u64>).collect();
        let (tensor, pipeline) = match numbers[..] {
            [Ok(tensor)] => (tensor, 0),
            [Ok(tensor), Ok(pipeline)] => (tensor, pipeline),
            _ => return Err(unfit(&source, name, "mp_rank_TT or mp_rank_TT_PPP without experts")),
        };
        let file = open_rank(&mut source, &*store, &folder.join(&name)?)?;
        if files.entry(pipeline).or_default().insert(tensor, file).is_some() {
            return Err(unfit(&source, format!("a second one, {name}"), "one folder per rank"));
        }
    }
    let first = files.values().next().and_then(|stage| stage.values().next());
    let facts = first.map(MegatronArgs::of).unwrap_or_default();
    check_ranks(&source, &files, facts)?;
    let step =
        first.and_then(|file| file.pickle.size(file.pickle.get(file.pickle.root, "iteration")?));
    let stages = stages_of(&mut source, &files)?;
    let mut import = merge(source, &stages, facts)?;
    import.step = step;
    Ok(import)
}

/// Rejects folders that are not those of all ranks.
fn check_ranks(
    source: &TensorSource,
    files: &BTreeMap<u64, BTreeMap<u64, TorchFile>>,
    facts: MegatronArgs,
) -> Result<()> {
    let tensor = files.values().next().map_or(0, BTreeMap::len) as u64;
    let pipeline = files.len() as u64;
    let is_complete = tensor > 0
        && files.keys().copied().eq(0..pipeline)
        && files.values().all(|stage| stage.keys().copied().eq(0..tensor))
        && facts.tensor_ranks.is_none_or(|count| count == tensor)
        && facts.pipeline_ranks.is_none_or(|count| count == pipeline);
    if is_complete {
        return Ok(());
    }
    let found: Vec<_> = files.iter().map(|(stage, ranks)| (stage, ranks.keys())).collect();
    let expected = format!(
        "mp_rank_* folders of all {} tensor-parallel ranks in each of {} stages",
        facts.tensor_ranks.unwrap_or(tensor.max(1)),
        facts.pipeline_ranks.unwrap_or(pipeline.max(1)),
    );
    Err(unfit(source, format!("stages and ranks {found:?}"), &expected))
}

fn open_rank(source: &mut TensorSource, store: &dyn Storage, folder: &Key) -> Result<TorchFile> {
    for name in ["model_optim_rng.pt", "model_rng.pt"] {
        match TorchFile::open(source, store, &folder.join(name)?) {
            Err(Error::Storage(storage::Error::NotFound { .. })) => {}
            other => return other,
        }
    }
    let found = format!("neither in {}", store.display(folder));
    Err(unfit(source, found, "model_optim_rng.pt or model_rng.pt"))
}

/// The stages in the order of their layers. Files with virtual stages have `model0`, `model1`, ...:
/// the first virtual stages of all stages come first.
fn stages_of(
    source: &mut TensorSource,
    files: &BTreeMap<u64, BTreeMap<u64, TorchFile>>,
) -> Result<Vec<Stage>> {
    let mut stages = Vec::new();
    let first = files.values().next().and_then(|stage| stage.values().next());
    let has =
        |key: &str| first.is_some_and(|file| file.pickle.get(file.pickle.root, key).is_some());
    let mut keys: Vec<String> =
        (0..).map(|part| format!("model{part}")).take_while(|key| has(key)).collect();
    if keys.is_empty() {
        keys.push("model".to_owned());
    }
    for key in keys {
        for ranks in files.values() {
            let mut stage = Vec::new();
            for file in ranks.values() {
                let Some(model) = file.pickle.get(file.pickle.root, &key) else {
                    let found = "a rank without it".to_owned();
                    return Err(unfit(source, found, &format!("'{key}' in every rank")));
                };
                let mut tensors = Vec::new();
                for (name, tensor) in file.leaves(model)? {
                    let Tensor { dtype, shape, extents } = tensor;
                    tensors.push(source.add(name, Group::Model, dtype, shape, extents)?);
                }
                stage.push(tensors);
            }
            stages.push(stage);
        }
    }
    Ok(stages)
}

/// A tensor to be joined, and each rank's part.
#[derive(Default)]
struct Slot {
    /// The stage that holds it. Another may hold a copy, as the last holds the embedding.
    stage: usize,
    parts: Vec<usize>,
    join: Option<(RankJoin, bool)>,
}

/// Joins the ranks' parts.
pub(crate) fn merge(source: TensorSource, stages: &[Stage], facts: MegatronArgs) -> Result<Import> {
    facts.check(&source)?;
    let mut slots: BTreeMap<(Group, String), Slot> = BTreeMap::new();
    let mut order = Vec::new();
    let (mut dropped, mut first_layer) = (Vec::new(), 0);
    for (number, stage) in stages.iter().enumerate() {
        let mut layers = 0;
        for tensors in stage {
            let mut seen = std::collections::HashSet::new();
            for &tensor in tensors {
                let of = &source.tensors()[tensor];
                if is_skipped(&of.name) {
                    dropped.push(of.name.clone());
                    continue;
                }
                let (layer, name, join) = map_name(&of.name).ok_or_else(|| {
                    unfit(&source, format!("'{}'", of.name), "parameters of GPT-2")
                })?;
                if layer.is_some_and(|layer| layer >= LAYERS_MAX) {
                    let expected = format!("fewer than {LAYERS_MAX} layers");
                    return Err(unfit(&source, format!("'{}'", of.name), &expected));
                }
                layers = layers.max(layer.map_or(0, |layer| layer + 1));
                let name = layer.map_or_else(
                    || name.to_owned(),
                    |layer| format!("transformer.h.{}.{name}", first_layer + layer),
                );
                let key = (of.group, name);
                if !seen.insert(key.clone()) {
                    let found = format!("'{}' twice", of.name);
                    return Err(unfit(&source, found, "each parameter once per rank"));
                }
                let slot = slots.entry(key.clone()).or_default();
                if slot.join.is_none() {
                    (slot.stage, slot.join) = (number, Some(join));
                    order.push(key);
                }
                if slot.stage == number {
                    slot.parts.push(tensor);
                }
            }
        }
        first_layer += layers;
    }
    let ranks = stages.first().map_or(1, Vec::len);
    let mut made = Vec::new();
    for key in order {
        let Slot { parts, join, .. } = slots.remove(&key).unwrap_or_default();
        let Some((join, is_transposed)) = join else { continue };
        let (group, name) = key;
        if parts.len() != ranks {
            let found = format!("'{name}' in {}", parts.len());
            return Err(unfit(&source, found, &format!("each parameter in {ranks} ranks")));
        }
        let tensor = join_parts(&source, group, name, &parts, join, facts)?;
        made.push(if is_transposed { tensor.transpose()? } else { tensor });
    }
    facts.check_complete(&source, &made, first_layer)?;
    Ok(Import { source, made, dropped, step: None, heads: facts.heads })
}

/// Whether a tensor is a copy of the embedding, or library state that is not a parameter.
fn is_skipped(name: &str) -> bool {
    name.contains("word_embeddings_for_head")
        || name.ends_with("_extra_state")
        || name.ends_with("rotary_pos_emb.inv_freq")
}

/// Layer, name in GPT-2, and how parts are joined, for a name in Megatron.
fn map_name(name: &str) -> Option<(Option<u64>, &'static str, (RankJoin, bool))> {
    let found = |&(_, ours, join, is_transposed): &(&str, &'static str, RankJoin, bool)| {
        (ours, (join, is_transposed))
    };
    if let Some((_, rest)) = name.split_once("layers.") {
        let (layer, end) = rest.split_once('.')?;
        let mut all = LAYER.iter().chain(&LAYER_FC2);
        let (ours, join) = found(all.find(|(theirs, ..)| *theirs == end)?);
        return Some((Some(layer.parse().ok()?), ours, join));
    }
    let ends = |theirs: &str| {
        name.strip_suffix(theirs).is_some_and(|front| front.is_empty() || front.ends_with('.'))
    };
    let (ours, join) = found(GLOBAL.iter().find(|(theirs, ..)| ends(theirs))?);
    Some((None, ours, join))
}

fn join_parts(
    source: &TensorSource,
    group: Group,
    name: String,
    parts: &[usize],
    join: RankJoin,
    facts: MegatronArgs,
) -> Result<DerivedTensor> {
    let first = &source.tensors()[parts[0]];
    let same = |&part: &usize| {
        let other = &source.tensors()[part];
        (other.dtype, &other.shape) == (first.dtype, &first.shape)
    };
    let axis = if join == RankJoin::Columns { 1 } else { 0 };
    if !parts.iter().all(same) || first.shape.len() <= axis {
        let expected = format!("one shape of '{name}' in all ranks");
        return Err(unfit(source, "several".to_owned(), &expected));
    }
    if join == RankJoin::Same {
        let mut made = DerivedTensor::same(source, parts[0]);
        (made.name, made.group) = (name, group);
        return Ok(made);
    }
    let ranks = parts.len() as u64;
    let mut shape = first.shape.clone();
    let len = shape[axis];
    shape[axis] = len.checked_mul(ranks).ok_or_else(|| {
        unfit(source, format!("'{name}' of shape {:?}", first.shape), "fewer than 2^64 elements")
    })?;
    let order = if join == RankJoin::Qkv {
        qkv_rows(source, &name, len, ranks, facts)?
    } else {
        vec![[0, 0, len]]
    };
    let mut made = DerivedTensor::new(name, group, first.dtype, shape.clone());
    for (rank, &part) in parts.iter().enumerate() {
        for &[from, to, count] in &order {
            let mut spans = crate::region::whole(&first.shape);
            spans[axis] = Span { start: from, len: count };
            let mut at = vec![0; shape.len()];
            // A rank has a share of queries, keys and values each; of other tensors, one block.
            let (third, share) =
                if join == RankJoin::Qkv { (shape[0] / 3, len / 3) } else { (0, len) };
            at[axis] = if third == 0 {
                rank as u64 * share
            } else {
                (to / share) * third + rank as u64 * share + to % share
            };
            made.put(at, part, &spans);
        }
    }
    Ok(made)
}

/// Runs of a rank's rows as `[source, destination, count]`, where the destination has all queries
/// first, then keys, then values.
fn qkv_rows(
    source: &TensorSource,
    name: &str,
    rows: u64,
    ranks: u64,
    facts: MegatronArgs,
) -> Result<Vec<[u64; 3]>> {
    let share = rows / 3;
    if rows == 0 || rows > QKV_ROWS_MAX || !rows.is_multiple_of(3) {
        let expected = format!("a positive multiple of 3, at most {QKV_ROWS_MAX}");
        return Err(unfit(source, format!("'{name}' of {rows} rows"), &expected));
    }
    if facts.version == 0 {
        return Ok((0..3).map(|part| [part * share, part * share, share]).collect());
    }
    let heads = facts.heads.filter(|heads| heads.is_multiple_of(ranks)).map(|heads| heads / ranks);
    let width = heads.filter(|&heads| heads > 0 && rows.is_multiple_of(3 * heads));
    let Some((heads, width)) = width.map(|heads| (heads, rows / 3 / heads)) else {
        let found = format!("'{name}' of {rows} rows and {} heads", count_text(facts.heads));
        return Err(unfit(source, found, "3 x width rows for each head of each rank"));
    };
    let mut runs = Vec::new();
    for head in 0..heads {
        for part in 0..3 {
            let to = part * share + head * width;
            if facts.version == 1 {
                let row = |at| [(head * width + at) * 3 + part, to + at, 1];
                runs.extend((0..width).map(row));
            } else {
                runs.push([(head * 3 + part) * width, to, width]);
            }
        }
    }
    Ok(runs)
}

fn unfit(source: &TensorSource, found: String, expected: &str) -> Error {
    Error::Unfit { object: source.display().to_owned(), found, expected: expected.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_map_to_gpt2() {
        let check = |name: &str, expected: Option<(Option<u64>, &str)>| {
            assert_eq!(map_name(name).map(|(layer, ours, _)| (layer, ours)), expected, "{name}");
        };
        let classic = "language_model.transformer.layers.7.attention.query_key_value.weight";
        check(classic, Some((Some(7), "attn.c_attn.weight")));
        check("decoder.layers.0.mlp.linear_fc2.bias", Some((Some(0), "mlp.c_proj.bias")));
        check("decoder.final_layernorm.bias", Some((None, "transformer.ln_f.bias")));
        check("embedding.word_embeddings.weight", Some((None, "transformer.wte.weight")));
        check("output_layer.weight", Some((None, "lm_head.weight")));
        check("decoder.layers.0.mlp.router.weight", None);
        check("decoder.layers.x.mlp.linear_fc2.bias", None);
        check("unembedding.word_embeddings.weight", None);
    }
}
