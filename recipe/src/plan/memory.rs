//! The peak memory of each stage's ranks.

use ckpt::offload::{OffloadOptions, SpillOptions};
use serde::Serialize;

use super::inputs::{input_bytes, kept_bytes, moved_bytes};
use crate::config::{
    ComputeOn, Config, Division, Dtype, Family, ModelConfig, Offload, Positions, Schedule,
};
use crate::model::{Blueprint, head_chunk_rows};
use crate::schedule::{Pass, Pipeline};

/// Bytes of a parameter in f32.
const F32_BYTES: u64 = 4;

/// Peak memory of one rank by component, in bytes. Weights, gradients and moments are exact, the
/// rest is an estimate that measured runs agree with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    /// f32 weights: 4 bytes a parameter, of the slice that this replica has. None where they are
    /// offloaded.
    pub weights: u64,
    /// What computes where that is something else: copies in 16 bits or of offloaded weights, whole
    /// weights where there are slices, and with ZeRO 3 those of two units.
    pub compute_copy: u64,
    /// Both moments of AdamW: 8 bytes a parameter, of the slice that this replica has. None where
    /// they are offloaded.
    pub moments: u64,
    /// Weights and moments that are offloaded: 12 bytes a parameter in the host's memory; of those
    /// on a disk the buffers that they pass through.
    pub offload: u64,
    /// Sums of gradients that wait in the tree over the micro-batches, `floor(log2(micro-batches))`
    /// of them: 4 bytes a use of a parameter, for a word embedding that is the head has two.
    pub gradients: u64,
    /// What the backward pass keeps of the micro-batches under way: for each layer and token
    /// `4 hidden + 4 attention width + 2 ffn` numbers (4 ffn if gated), and the matrix of the
    /// attention where it has a learned bias or dropout; of what is dropped a byte each. A layer
    /// that is recomputed keeps `hidden`, or nothing if its input waits elsewhere.
    pub activations: u64,
    /// Buffers that inputs of layers pass on their way to a disk.
    pub input_buffers: u64,
    /// The backward pass at work: the logits of 512 tokens, their probabilities and the gradient of
    /// the head, or the gradients of one micro-batch, whichever is more.
    pub backward: u64,
    /// Gradients and weights on their way between replicas.
    pub exchange: u64,
    /// The copy of the state that a checkpoint is written from while the run goes on.
    pub staging: u64,
    /// The program: libtorch, its threads, the tokenizer.
    pub program: u64,
    /// The sum.
    pub total: u64,
}

impl MemoryPlan {
    /// What a rank holds from its first to its last step, in bytes: weights, their copies and
    /// moments, here or in the host's memory.
    #[must_use]
    pub fn state_bytes(&self) -> u64 {
        let parts = [self.weights, self.compute_copy, self.moments, self.offload];
        parts.into_iter().fold(0, u64::saturating_add)
    }
}

/// The ranks of one stage of the pipeline.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StagePlan {
    /// Units of each of its pieces, as ranges `first..end`.
    pub units: Vec<std::ops::Range<usize>>,
    /// Elements of the weights on one rank of it, padding included.
    pub parameters: u64,
    /// Micro-batches, or with several pieces parts of them, that are kept at once at most.
    pub in_flight: u64,
    /// Inputs of layers that one rank of it moves away in a step.
    pub moved_bytes: u64,
    /// What of them is away at once, at most.
    pub away_bytes: u64,
    /// Peak memory of one rank.
    pub memory_bytes: MemoryPlan,
}

/// What one rank of a stage has.
struct RankParams {
    pieces: Vec<std::ops::Range<usize>>,
    /// Elements of parameters.
    params: u64,
    /// Elements of uses of parameters.
    uses: u64,
    /// Elements of the parameters of the largest unit.
    unit_params: u64,
    /// Elements of the head's weight, if it is the last stage.
    head: Option<u64>,
}

/// Every stage of the pipeline, of a checked config that divides so.
pub(super) fn stages(config: &Config, model: &Blueprint, division: &Division) -> Vec<StagePlan> {
    let pieces = config.pieces();
    let of_rank = |rank: usize| {
        let pp = division.pp as usize; // fits: at most 1024
        let own: Vec<_> = pieces.iter().skip(rank).step_by(pp).cloned().collect();
        let held = RankParams::of(model, own, division.tp as usize);
        let (bytes, in_flight) = activations(config, division, &held.pieces, rank);
        let (moved_bytes, away_bytes) = moved(config, division, &held.pieces, rank);
        let memory_bytes = memory(config, division, &held, (bytes, away_bytes));
        let (units, parameters) = (held.pieces, held.params);
        StagePlan { units, parameters, in_flight, moved_bytes, away_bytes, memory_bytes }
    };
    (0..division.pp as usize).map(of_rank).collect()
}

impl RankParams {
    fn of(model: &Blueprint, pieces: Vec<std::ops::Range<usize>>, tp: usize) -> Self {
        let here = |unit: usize| pieces.iter().any(|units| units.contains(&unit));
        let elements: Vec<u64> = model
            .params()
            .iter()
            .map(|spec| spec.local_shape(tp).iter().product::<i64>() as u64) // fits: of memory
            .collect();
        let specs = || model.params().iter().zip(&elements);
        let own = specs().filter(|(spec, _)| spec.units.iter().any(|unit| here(*unit)));
        let params = own.map(|(_, count)| count).sum();
        let used = model.uses().iter().filter(|it| here(it.unit));
        let uses = used.map(|it| elements[it.param]).sum();
        let mut of_unit = vec![0; model.units()];
        for it in model.uses() {
            of_unit[it.unit] += elements[it.param];
        }
        let last = model.units() - 1;
        // The head's weight is the last matrix that is used.
        let heads =
            model.uses().iter().zip(model.uses().iter().map(|it| &model.params()[it.param]));
        let head = heads.filter(|(it, spec)| it.unit == last && spec.decays());
        let head = head.map(|(it, _)| elements[it.param]).max().filter(|_| here(last));
        let unit_params = of_unit.into_iter().enumerate().filter(|(unit, _)| here(*unit));
        let unit_params = unit_params.map(|(_, count)| count).max().unwrap_or(0);
        RankParams { pieces, params, uses, unit_params, head }
    }
}

/// Bytes of a number that is computed with.
pub(super) fn number_bytes(config: &Config) -> u64 {
    match config.precision.dtype {
        Dtype::Fp32 => F32_BYTES,
        Dtype::Bf16 | Dtype::Fp16 => 2,
    }
}

fn memory(
    config: &Config,
    division: &Division,
    held: &RankParams,
    (activations, away): (u64, u64),
) -> MemoryPlan {
    let (model, parallel) = (&config.model, &config.parallel);
    let number = number_bytes(config);
    let zero = if division.dp > 1 { parallel.zero } else { 0 };
    let slice = |elements: u64| if zero > 0 { elements.div_ceil(division.dp) } else { elements };
    let is_here = config.optim.offload == Offload::None;
    let (state, computing) = (F32_BYTES * slice(held.params), number * held.params);
    let (weights, moments) = if is_here { (state, 2 * state) } else { (0, 0) };
    let offload = offloaded(config, 3 * state);
    let compute_copy = match zero {
        3 => 2 * number * held.unit_params,
        0 if is_here && number == F32_BYTES => 0,
        0 => computing,
        _ if is_here => computing,
        _ => computing + number * slice(held.params),
    };
    let waiting = F32_BYTES * u64::from(division.micro_batches.max(1).ilog2());
    let gradients = waiting * if zero >= 2 { slice(held.uses) } else { held.uses };

    // Under way, at work: numbers of one micro-batch, in one unit.
    let tokens = config.batch.micro.saturating_mul(model.seq_len.max(model.dec_len.unwrap_or(0)));
    let narrow = if number == F32_BYTES { 0 } else { number };
    let unit_work =
        tokens.saturating_mul((2 * model.ffn() / division.tp + 4 * model.hidden) * number);
    let bucket = (parallel.bucket_mib << 20).max(F32_BYTES * held.unit_params);
    let fresh = if zero >= 2 { bucket } else { F32_BYTES * held.uses };
    let body = unit_work.saturating_add(fresh + narrow * held.unit_params);
    let at_head = held.head.map_or(0, |weight| {
        let chunk = head_chunk_rows(config.run.device == ComputeOn::Cuda);
        let rows = head_tokens(config).min(chunk);
        let logits = rows * model.vocab_rows(division.tp);
        // Matrix products pack the weight twice; measured with full chunks.
        let packed = 2 * F32_BYTES * weight * rows / chunk;
        // From the second step on the heap has holes into which the next logits do not fit, and
        // sums that wait make another one; measured, though now and then there is none.
        let holes = F32_BYTES * logits * if waiting > 0 { 2 } else { 1 };
        logits * (2 * F32_BYTES + narrow) + (F32_BYTES + narrow) * weight + packed + holes
    });
    let exchange = match (division.dp, zero) {
        (1, _) => 0,
        (_, 0 | 1) => F32_BYTES * held.uses / 2 + bucket,
        _ => 3 * bucket,
    };
    let mut all = MemoryPlan {
        weights,
        compute_copy,
        moments,
        offload,
        gradients,
        activations,
        input_buffers: input_buffers(config, away),
        backward: body.max(at_head),
        exchange,
        staging: staging(config, division, held),
        program: PROGRAM_BYTES,
        total: 0,
    };
    all.total = [
        weights,
        compute_copy,
        moments,
        offload,
        gradients,
        activations,
        all.input_buffers,
        all.backward,
        exchange,
        all.staging,
        all.program,
    ]
    .into_iter()
    .fold(0, u64::saturating_add);
    all
}

/// What a process has before it has a weight: libtorch and its tables, the tokenizer, the loader.
/// Measured on x86-64 Linux with one layer of 2 numbers.
const PROGRAM_BYTES: u64 = 165 << 20;

/// What the host's memory has of so many bytes of weights and moments that are offloaded.
fn offloaded(config: &Config, bytes: u64) -> u64 {
    match &config.optim.offload {
        Offload::None => 0,
        Offload::Cpu => bytes,
        Offload::Nvme(disks) => bytes.min(OffloadOptions::default().memory_bytes(disks.len())),
    }
}

/// What inputs pass on their way to a disk, of which so many bytes are away.
fn input_buffers(config: &Config, away: u64) -> u64 {
    match config.parallel.activation_offload {
        Offload::Nvme(_) => away.min(SpillOptions::default().memory_bytes()),
        _ => 0,
    }
}

/// A rank's share of the state, while it is written behind the run.
fn staging(config: &Config, division: &Division, held: &RankParams) -> u64 {
    // What is on a disk is saved as it lies there.
    if !config.checkpoint.background || matches!(config.optim.offload, Offload::Nvme(_)) {
        return 0;
    }
    3 * F32_BYTES * held.params.div_ceil(division.dp)
}

/// Rows of logits of a micro-batch.
fn head_tokens(config: &Config) -> u64 {
    let model = &config.model;
    let tokens = match model.family {
        Family::Gpt => model.seq_len,
        Family::T5 => model.dec_len.unwrap_or(0),
        Family::Bert => (model.seq_len as f64 * config.data.mask_prob).ceil() as u64,
    };
    config.batch.micro.saturating_mul(tokens)
}

/// Peak bytes of what the backward pass keeps on a rank of the pipeline, and how many micro-batches
/// it keeps then.
fn activations(
    config: &Config,
    division: &Division,
    pieces: &[std::ops::Range<usize>],
    rank: usize,
) -> (u64, u64) {
    let kept = |recomputes: bool, unit: usize| unit_bytes(config, division.tp, unit, recomputes);
    let recomputes = |unit: usize| recomputes(config, division, unit);
    let moves = config.parallel.activation_offload != Offload::None;
    let of_piece = |units: &std::ops::Range<usize>| {
        let here = units.clone().filter(|unit| !(moves && recomputes(*unit)));
        let stays = if moves { kept_bytes(config, division, units) } else { 0 };
        here.map(|unit| kept(recomputes(unit), unit)).fold(stays, u64::saturating_add)
    };
    let bytes: Vec<u64> = pieces.iter().map(of_piece).collect();
    // While a layer is computed again it keeps everything.
    let again = pieces.iter().flat_map(Clone::clone).filter(|unit| recomputes(*unit));
    let again = again.map(|unit| kept(false, unit)).max().unwrap_or(0);
    let (peak, count) = under_way(config, division, &bytes, rank);
    (peak.saturating_add(again), count)
}

/// Whether the backward pass computes a unit again.
pub(super) fn recomputes(config: &Config, division: &Division, unit: usize) -> bool {
    let by_weights = division.dp > 1 && config.parallel.zero == 3;
    by_weights || config.parallel.recomputes(unit as u64)
}

/// Bytes of inputs that a rank moves away in a step, and those that are away at once.
fn moved(
    config: &Config,
    division: &Division,
    pieces: &[std::ops::Range<usize>],
    rank: usize,
) -> (u64, u64) {
    if config.parallel.activation_offload == Offload::None {
        return (0, 0);
    }
    let of_piece = |units| moved_bytes(config, division, units);
    let bytes: Vec<u64> = pieces.iter().map(of_piece).collect();
    let all = bytes.iter().fold(0_u64, |sum, bytes| sum.saturating_add(*bytes));
    (all.saturating_mul(division.micro_batches), under_way(config, division, &bytes, rank).0)
}

/// The peak of what a rank has of the micro-batches between their passes, of so many bytes in each
/// of its pieces, and how many micro-batches that is.
fn under_way(config: &Config, division: &Division, bytes: &[u64], rank: usize) -> (u64, u64) {
    if config.parallel.schedule == Schedule::Gpipe {
        let all = bytes.iter().fold(0_u64, |sum, bytes| sum.saturating_add(*bytes));
        let count = division.micro_batches;
        return (all.saturating_mul(count), count);
    }
    let shape = Pipeline { ranks: division.pp as usize, chunks: bytes.len() };
    // A few rounds of the pipeline reach its steady state.
    let micro = division.micro_batches.min(4 * division.pp) as usize; // fits: at most 4096
    let (mut now, mut peak, mut count, mut count_max) = (0_u64, 0, 0_u64, 0);
    for action in config.parallel.schedule.actions(shape, rank, micro) {
        let bytes = bytes[action.chunk];
        match action.pass {
            Pass::Forward => (now, count) = (now.saturating_add(bytes), count + 1),
            Pass::Backward => (now, count) = (now.saturating_sub(bytes), count - 1),
        }
        (peak, count_max) = (peak.max(now), count_max.max(count));
    }
    (peak, count_max)
}

/// What one unit keeps of one micro-batch.
fn unit_bytes(config: &Config, tp: u64, unit: usize, recomputes: bool) -> u64 {
    let model = &config.model;
    let is_decoder = unit as u64 >= model.layers;
    let len = if is_decoder { model.dec_len.unwrap_or(0) } else { model.seq_len };
    let tokens = config.batch.micro.saturating_mul(len);
    let shared = if config.parallel.sequence_parallel { tp } else { 1 };
    let number = number_bytes(config);
    let (own, carried) = input_bytes(config, tp, unit);
    let inputs = own.saturating_add(carried);
    if recomputes {
        return inputs;
    }
    let kept = kept_per_token(model, tp, shared, is_decoder).saturating_mul(number);
    let kept = kept.saturating_add(drops_per_token(model, tp, shared, is_decoder));
    let matrix = attention_matrix(model, is_decoder, number) / tp;
    inputs
        .saturating_add(tokens.saturating_mul(kept))
        .saturating_add(config.batch.micro.saturating_mul(matrix))
}

/// Numbers that a layer keeps of a token, besides its input: norms' outputs and the residual
/// stream, queries to the mixed values, and the feed-forward block.
fn kept_per_token(model: &ModelConfig, tp: u64, shared: u64, is_decoder: bool) -> u64 {
    let blocks = if is_decoder { 2 } else { 1 };
    let stream = model.hidden / shared * blocks + model.hidden * (1 + blocks);
    let attention = 4 * model.attention_width() / tp * blocks;
    let widths = if model.activation().is_gated() { 4 } else { 2 };
    stream + attention + widths * model.ffn() / tp
}

/// Bytes that say what a layer has dropped of a token.
fn drops_per_token(model: &ModelConfig, tp: u64, shared: u64, is_decoder: bool) -> u64 {
    let blocks = if is_decoder { 3 } else { 2 };
    let is_relative = model.positions() == Positions::RelativeBias;
    let inner = if is_relative { model.ffn() / tp } else { 0 };
    if model.dropout > 0.0 { blocks * model.hidden / shared + inner } else { 0 }
}

/// Bytes of the matrices of the attention of a sample, where a kernel cannot do without: with a
/// learned bias; or with dropout, f32 before it, a byte of what it drops, and what it leaves.
fn attention_matrix(model: &ModelConfig, is_decoder: bool, number: u64) -> u64 {
    let bytes = match model.positions() {
        _ if model.attention_dropout() > 0.0 => 4 + 1 + number,
        Positions::RelativeBias => number,
        _ => return 0,
    };
    let (text, answer) = (model.seq_len, model.dec_len.unwrap_or(0));
    let cells = if is_decoder { answer * (answer + text) } else { text * text };
    cells.saturating_mul(model.heads).saturating_mul(bytes)
}
