//! The peak memory of the ranks of each stage.

use ckpt::offload::{OffloadOptions, SpillOptions};
use serde::Serialize;

use super::inputs::{input_bytes, moved_bytes, resident_bytes};
use crate::config::{
    ComputeOn, Config, Division, Dtype, Family, ModelConfig, Offload, Positions, Schedule,
};
use crate::model::{Blueprint, head_chunk_rows};
use crate::schedule::{Pass, Pipeline};

/// Bytes of a parameter in f32.
const F32_BYTES: u64 = 4;

/// Peak memory of one rank by component, in bytes, of the device and of its process in the host.
/// `offload`, `input_buffers`, `staging` and `program` are in the host. Weights, gradients and
/// moments are exact, the rest is an estimate that agrees with measured runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    /// f32 weights: 4 bytes per parameter in the slice of this replica. 0 if they are offloaded.
    pub weights: u64,
    /// Weights for computation, if they are separate: copies in 16 bits or of offloaded weights,
    /// whole weights if there are slices, and with ZeRO 3 those of two units.
    pub compute_copy: u64,
    /// Both moments of AdamW: 8 bytes per parameter in the slice of this replica. 0 if they are
    /// offloaded.
    pub moments: u64,
    /// Offloaded weights and moments: 12 bytes per parameter in host memory; on a disk only the
    /// staging buffers.
    pub offload: u64,
    /// Gradient sums held by the tree over the micro-batches, `floor(log2(micro-batches))` of them:
    /// 4 bytes per use of a parameter, because a word embedding that is tied to the head has two.
    pub gradients: u64,
    /// Activations of the micro-batches in flight: for each layer and token `4 hidden + 4 attention
    /// width + 2 ffn` numbers (4 ffn if gated), and the attention matrix if it has a learned bias
    /// or dropout; a byte per element of a dropout mask. A recomputed layer keeps `hidden`, or
    /// nothing if its input is spilled.
    pub activations: u64,
    /// Staging buffers for spilled inputs of layers.
    pub input_buffers: u64,
    /// Temporary memory of the backward pass: the logits of 512 tokens, their probabilities and the
    /// gradient of the head, or the gradients of one micro-batch, whichever is more.
    pub backward: u64,
    /// Buffers of gradients and weights for communication between replicas.
    pub exchange: u64,
    /// The snapshot of the state from which a checkpoint is written while training continues.
    pub staging: u64,
    /// The program: libtorch, its threads, the tokenizer.
    pub program: u64,
    /// The sum.
    pub total: u64,
}

impl MemoryPlan {
    /// Memory that a rank holds for the whole run, in bytes: weights, their copies and moments, on
    /// the device or in host memory.
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
    /// Elements of the weights on one rank, padding included.
    pub parameters: u64,
    /// Maximum of micro-batches in flight; with several pieces, of their parts.
    pub in_flight: u64,
    /// Inputs of layers that one rank spills in a step.
    pub moved_bytes: u64,
    /// Peak of their spilled bytes.
    pub away_bytes: u64,
    /// Peak memory of one rank.
    pub memory_bytes: MemoryPlan,
}

/// Sizes of one rank of a stage.
struct RankParams {
    pieces: Vec<std::ops::Range<usize>>,
    /// Elements of parameters.
    params: u64,
    /// Elements of uses of parameters.
    uses: u64,
    /// Elements of the parameters of the largest unit.
    unit_params: u64,
    /// Elements of the weight of the head, if it is the last stage.
    head: Option<u64>,
}

/// Every stage of the pipeline of a checked config with this division.
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
        // The weight of the head is the last matrix that is used.
        let heads =
            model.uses().iter().zip(model.uses().iter().map(|it| &model.params()[it.param]));
        let head = heads.filter(|(it, spec)| it.unit == last && spec.decays());
        let head = head.map(|(it, _)| elements[it.param]).max().filter(|_| here(last));
        let unit_params = of_unit.into_iter().enumerate().filter(|(unit, _)| here(*unit));
        let unit_params = unit_params.map(|(_, count)| count).max().unwrap_or(0);
        RankParams { pieces, params, uses, unit_params, head }
    }
}

/// Bytes of a number in the compute precision.
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
    (activations, spilled_bytes): (u64, u64),
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

    // Activations, temporary memory: numbers of one micro-batch in one unit.
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
        // From the second step on the heap is fragmented: the next logits do not fit into its
        // holes, and held gradient sums make another hole. Measured, although some runs have none.
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
        input_buffers: input_buffers(config, spilled_bytes),
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

/// Memory of a process without weights: libtorch and its tables, the tokenizer, the loader.
/// Measured on x86-64 Linux with one layer of 2 numbers.
const PROGRAM_BYTES: u64 = 165 << 20;

/// Host memory for this many bytes of offloaded weights and moments.
fn offloaded(config: &Config, bytes: u64) -> u64 {
    match &config.optim.offload {
        Offload::None => 0,
        Offload::Cpu => bytes,
        Offload::Nvme(disks) => bytes.min(OffloadOptions::default().memory_bytes(disks.len())),
    }
}

/// Staging buffers for inputs of which this many bytes are spilled.
fn input_buffers(config: &Config, spilled_bytes: u64) -> u64 {
    match config.parallel.activation_offload {
        Offload::Nvme(_) => spilled_bytes.min(SpillOptions::default().memory_bytes()),
        _ => 0,
    }
}

/// Snapshot of the state of a rank while a checkpoint is written in the background.
fn staging(config: &Config, division: &Division, held: &RankParams) -> u64 {
    // State on a disk is saved from there.
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

/// Peak bytes of the activations on a rank of the pipeline, and the number of micro-batches in
/// flight at that time.
fn activations(
    config: &Config,
    division: &Division,
    pieces: &[std::ops::Range<usize>],
    rank: usize,
) -> (u64, u64) {
    let unit_activations =
        |recomputes: bool, unit: usize| unit_bytes(config, division.tp, unit, recomputes);
    let recomputes = |unit: usize| recomputes(config, division, unit);
    let moves = config.parallel.activation_offload != Offload::None;
    let of_piece = |units: &std::ops::Range<usize>| {
        let here = units.clone().filter(|unit| !(moves && recomputes(*unit)));
        let resident = if moves { resident_bytes(config, division, units) } else { 0 };
        here.map(|unit| unit_activations(recomputes(unit), unit))
            .fold(resident, u64::saturating_add)
    };
    let bytes: Vec<u64> = pieces.iter().map(of_piece).collect();
    // During its recomputation a layer keeps all activations.
    let recomputed = pieces.iter().flat_map(Clone::clone).filter(|unit| recomputes(*unit));
    let recomputed = recomputed.map(|unit| unit_activations(false, unit)).max().unwrap_or(0);
    let (peak, count) = peak_in_flight(config, division, &bytes, rank);
    (peak.saturating_add(recomputed), count)
}

/// Whether the backward pass recomputes a unit.
pub(super) fn recomputes(config: &Config, division: &Division, unit: usize) -> bool {
    let by_weights = division.dp > 1 && config.parallel.zero == 3;
    by_weights || config.parallel.recomputes(unit as u64)
}

/// Bytes of inputs that a rank spills in a step, and their peak.
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
    (all.saturating_mul(division.micro_batches), peak_in_flight(config, division, &bytes, rank).0)
}

/// The peak bytes of the micro-batches in flight on a rank, given the bytes in each of its pieces,
/// and the number of micro-batches.
fn peak_in_flight(config: &Config, division: &Division, bytes: &[u64], rank: usize) -> (u64, u64) {
    if config.parallel.schedule == Schedule::Gpipe {
        let all = bytes.iter().fold(0_u64, |sum, bytes| sum.saturating_add(*bytes));
        let count = division.micro_batches;
        return (all.saturating_mul(count), count);
    }
    let shape = Pipeline { ranks: division.pp as usize, chunks: bytes.len() };
    // The pipeline reaches its steady state in a few rounds.
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

/// Activations of one unit for one micro-batch.
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
    let per_token = activations_per_token(model, tp, shared, is_decoder).saturating_mul(number);
    let per_token = per_token.saturating_add(mask_bytes_per_token(model, tp, shared, is_decoder));
    let matrix = attention_matrix(model, is_decoder, number) / tp;
    inputs
        .saturating_add(tokens.saturating_mul(per_token))
        .saturating_add(config.batch.micro.saturating_mul(matrix))
}

/// Numbers that a layer keeps of a token, besides its input: outputs of norms and the residual
/// stream, from queries to the attention output, and the feed-forward block.
fn activations_per_token(model: &ModelConfig, tp: u64, shared: u64, is_decoder: bool) -> u64 {
    let blocks = if is_decoder { 2 } else { 1 };
    let stream = model.hidden / shared * blocks + model.hidden * (1 + blocks);
    let attention = 4 * model.attention_width() / tp * blocks;
    let widths = if model.activation().is_gated() { 4 } else { 2 };
    stream + attention + widths * model.ffn() / tp
}

/// Bytes of the dropout masks of a layer for a token.
fn mask_bytes_per_token(model: &ModelConfig, tp: u64, shared: u64, is_decoder: bool) -> u64 {
    let blocks = if is_decoder { 3 } else { 2 };
    let is_relative = model.positions() == Positions::RelativeBias;
    let inner = if is_relative { model.ffn() / tp } else { 0 };
    if model.dropout > 0.0 { blocks * model.hidden / shared + inner } else { 0 }
}

/// Bytes of the attention matrices of a sample, if the kernel needs them: with a learned bias; or
/// with dropout: f32 before it, a byte per element of the mask, and the result.
fn attention_matrix(model: &ModelConfig, is_decoder: bool, number: u64) -> u64 {
    let bytes = match model.positions() {
        _ if model.attention_dropout() > 0.0 => 4 + 1 + number,
        Positions::RelativeBias => number,
        _ => return 0,
    };
    let (seq_len, dec_len) = (model.seq_len, model.dec_len.unwrap_or(0));
    let cells = if is_decoder { dec_len * (dec_len + seq_len) } else { seq_len * seq_len };
    cells.saturating_mul(model.heads).saturating_mul(bytes)
}
