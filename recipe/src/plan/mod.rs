//! Estimates the cost of a run before it starts: parameters, memory, arithmetic, disk and time.
//!
//! A plan is a pure function of the config and of [`PlanInputs`], the known facts about the corpus
//! and the machine, so it can be made anywhere, for any size. A run that cannot work is refused
//! with the reason; one that will be slow or large has a warning. Every estimate names its formula,
//! because efficiencies by different formulas cannot be compared.

mod count;
mod inputs;
mod machine;
mod memory;
mod offload;
mod table;

use serde::Serialize;

use crate::config::{Config, Division, ModelConfig};
use crate::model::Blueprint;
use crate::schedule::Pipeline;

pub use count::{Flop, Parameters};
pub use inputs::ActivationOffloadPlan;
pub use machine::{machine_memory, process_memory};
pub use memory::{MemoryPlan, StagePlan};
pub use offload::OffloadPlan;

/// Epochs after which repeated text is worth less than new text (Muennighoff et al. 2023, "Scaling
/// data-constrained language models").
const EPOCHS_MANY: f64 = 4.0;

/// Known facts besides the config. All are optional; estimates that need a missing one are omitted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PlanInputs {
    /// Tokens of the text of the corpus.
    pub corpus_tokens: Option<u64>,
    /// Memory of each rank, on the device and in the host: a plan that needs more is refused.
    pub memory_bytes: Option<u64>,
    /// Memory of the machine that plans, if the run may be for another machine: a plan that needs
    /// more has a warning.
    pub planner_memory_bytes: Option<u64>,
    /// Memory that the process of a rank can use on this machine, if it computes on the CPU: a run
    /// whose state alone needs more is refused, because an allocation would fail.
    pub process_memory_bytes: Option<u64>,
    /// Measured speed of training, of all ranks together.
    pub tokens_per_s: Option<f64>,
    /// Rate of large matrix products on one rank, in floating-point operations per second: the
    /// reference of the efficiency, and a lower bound of the time if `tokens_per_s` is unknown.
    pub flop_per_s: Option<f64>,
    /// World size. Default: the minimum for `tp` and `pp`.
    pub world: Option<u64>,
    /// Total rate of the disks of a rank, in bytes per second: for an offloaded optimizer and
    /// spilled inputs of layers.
    pub disk_bytes_per_s: Option<f64>,
}

/// The cost of a run. Displayed as a table; serialized with units in the keys.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunPlan {
    /// The shape of the model, as text.
    pub model: String,
    /// Parameters.
    pub parameters: Parameters,
    /// The division of the ranks, if it is possible.
    pub layout: Option<Division>,
    /// The stages of the pipeline, in order.
    pub stages: Vec<StagePlan>,
    /// Peak memory of the rank that needs the most.
    pub memory_bytes: MemoryPlan,
    /// The fraction of a step in which a rank of the pipeline waits for others.
    pub bubble: f64,
    /// Floating-point operations.
    pub flop: Flop,
    /// The length of the run.
    pub run: RunLength,
    /// The checkpoints on disk.
    pub checkpoint: Saving,
    /// The traffic of each update, if weights and moments are offloaded.
    pub offload: Option<OffloadPlan>,
    /// The traffic of each step, if inputs of layers are spilled until the backward pass.
    pub inputs: Option<ActivationOffloadPlan>,
    /// The time of the run, if the speed is known.
    pub time: Option<Time>,
    /// The utilization of the ranks, if both speeds are known.
    pub efficiency: Option<Efficiency>,
    /// The loss of uniform predictions: the logarithm of the vocabulary size.
    pub loss_initial_nats: f64,
    /// Why the run cannot start. Empty if it can.
    pub refusals: Vec<String>,
    /// Warnings.
    pub warnings: Vec<String>,
}

/// The length of the run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RunLength {
    /// Optimizer steps.
    pub steps: u64,
    /// Micro-batches of one replica in one step.
    pub accumulation: u64,
    /// Tokens of one step.
    pub tokens_per_step: u64,
    /// Total samples.
    pub samples: u64,
    /// Total tokens.
    pub tokens: u64,
    /// Passes over the training share of the corpus, if its size is known.
    pub epochs: Option<f64>,
}

/// The checkpoints of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Saving {
    /// One checkpoint: weights and both moments in f32, 12 bytes a parameter.
    pub checkpoint_bytes: u64,
    /// Total number of checkpoints, including the last.
    pub count: u64,
    /// Peak bytes on the disk: the retained checkpoints, and the one being written.
    pub disk_bytes_max: u64,
}

/// The time of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Time {
    /// The assumed speed.
    pub tokens_per_s: f64,
    /// The whole run, without saving and evaluation.
    pub run_s: f64,
    /// The source of the speed.
    pub basis: String,
}

/// The fraction of the peak floating-point rate that training uses, without recomputation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Efficiency {
    /// By `6 N + 12 L h s`.
    pub mfu_6n_12lhs: f64,
    /// By `6 N + 6 L h s`.
    pub mfu_6n_6lhs: f64,
}

impl RunPlan {
    /// Plans a checked config.
    #[must_use]
    pub fn new(config: &Config, known: &PlanInputs) -> Self {
        let shape = &config.model;
        let parallel = &config.parallel;
        let model = Blueprint::new(shape, parallel.tp);
        let ranks_min = parallel.tp * parallel.pp;
        let (layout, refusals) = match config.divide(known.world.unwrap_or(ranks_min)) {
            Ok(division) => (Some(division), Vec::new()),
            Err(refusals) => (None, refusals),
        };
        // A layout that does not divide is shown as one replica.
        let micro_batches = config.batch.micro_batches();
        let one =
            Division { world: ranks_min, dp: 1, tp: parallel.tp, pp: parallel.pp, micro_batches };
        let division = layout.unwrap_or(one);
        let stages = memory::stages(config, &model, &division);
        let largest = stages.iter().map(|stage| stage.memory_bytes).max_by_key(|all| all.total);
        let pipeline = Pipeline {
            ranks: division.pp as usize,              // fits: at most 1024
            chunks: parallel.virtual_stages as usize, // fits: at most 64
        };
        let micro_batches = usize::try_from(division.micro_batches).unwrap_or(usize::MAX);
        let bubble = parallel.schedule.bubble(pipeline, micro_batches);
        let (parameters, flop) = (Parameters::of(&model), Flop::of(config, &model));
        let run = run(config, known, &division);
        let time = time(&run, &flop, known, &division, bubble);
        let step_s = time.as_ref().map(|time| run.tokens_per_step as f64 / time.tokens_per_s);
        let mut plan = RunPlan {
            model: describe(shape),
            parameters,
            layout,
            offload: OffloadPlan::of(config, known, &division, &stages, step_s),
            inputs: ActivationOffloadPlan::of(config, known, &stages, step_s),
            stages,
            memory_bytes: largest.unwrap_or_default(),
            bubble,
            flop,
            run,
            checkpoint: saving(config, &parameters),
            time,
            efficiency: efficiency(&flop, known, &division),
            loss_initial_nats: (shape.vocab as f64).ln(),
            refusals,
            warnings: Vec::new(),
        };
        plan.refuse(config, known);
        plan.warn(config, known);
        plan
    }

    fn refuse(&mut self, config: &Config, known: &PlanInputs) {
        let seq_len = config.model.seq_len;
        if let Some(tokens) = known.corpus_tokens.map(|tokens| training_tokens(config, tokens))
            && tokens <= seq_len as f64
            && !config.objective().hides()
        {
            self.refusals.push(format!(
                "expected at least {} tokens in the training split, found {tokens:.0} (hint: \
                 a smaller model.seq_len, or another data.split)",
                seq_len + 1
            ));
        }
        if let Some(lack) = known.memory_bytes.and_then(|have| self.lacks_memory(have)) {
            self.refusals.push(lack);
        }
        let state = self.memory_bytes.state_bytes();
        if let Some(have) = known.process_memory_bytes.filter(|have| state > *have) {
            let (state, have) = (storage::ByteSize(state), storage::ByteSize(have));
            self.refusals.push(format!(
                "weights and moments of a rank need {state} of memory, and its process can use \
                 {have} (hint: a smaller model, parallel.zero, tp or pp over more machines, or \
                 optim.offload)"
            ));
        }
        let evaluates = config.eval.every > 0 && config.eval.every <= self.run.steps;
        if evaluates && share(config, 1) == 0.0 {
            self.refusals.push(format!(
                "eval.every is {}, but data.split '{}' has no share for validation (hint: \
                 eval.every=0 disables evaluation)",
                config.eval.every, config.data.split.0
            ));
        }
    }

    /// The message for a rank that needs more memory than it has.
    fn lacks_memory(&self, have: u64) -> Option<String> {
        let all = &self.memory_bytes;
        if all.total <= have {
            return None;
        }
        let (need, have) = (storage::ByteSize(all.total), storage::ByteSize(have));
        let hint = if all.gradients > all.activations {
            "a larger batch.micro holds fewer gradient sums; then parallel.tp or pp"
        } else {
            "a smaller batch.micro, parallel.recompute, precision.dtype = \"bf16\", then \
             parallel.tp or pp"
        };
        Some(format!("a rank needs about {need} of memory and has {have} (hint: {hint})"))
    }

    fn warn(&mut self, config: &Config, known: &PlanInputs) {
        self.warnings.extend(config.idle());
        self.warnings.extend(known.planner_memory_bytes.and_then(|have| self.lacks_memory(have)));
        if let Some(epochs) = self.run.epochs.filter(|epochs| *epochs > EPOCHS_MANY) {
            self.warnings.push(format!(
                "the run reads its corpus {epochs:.1} times; after {EPOCHS_MANY} times more text \
                 helps more than more steps"
            ));
        }
        if self.offload.as_ref().is_some_and(OffloadPlan::is_behind) {
            self.warnings.push(
                "the disk needs more time for an update than the ranks for the rest of a step \
                 (hint: a larger batch.global, parallel.zero = 1 over more replicas, or a faster \
                 disk)"
                    .to_owned(),
            );
        }
        if self.inputs.as_ref().is_some_and(ActivationOffloadPlan::is_behind) {
            self.warnings.push(
                "the disk needs more time for the inputs of layers than the ranks for the rest of \
                 a step (hint: a faster disk, or several in parallel.activation_offload)"
                    .to_owned(),
            );
        }
        if self.inputs.as_ref().is_some_and(|all| all.spared_bytes == 0) {
            self.warnings.push(
                "parallel.activation_offload saves no memory: its buffers are as large as the \
                 inputs it moves"
                    .to_owned(),
            );
        }
        let every = config.checkpoint.every.steps;
        if config.checkpoint.every.minutes.is_none() && (every == 0 || every > self.run.steps) {
            self.warnings.push(format!(
                "checkpoint.every.steps is {every} of {} steps: the run saves only at its end, and \
                 a kill loses all progress",
                self.run.steps
            ));
        }
    }
}

fn describe(model: &ModelConfig) -> String {
    let layers = match model.decoder_layers() {
        0 => format!("{} layers", model.layers),
        decoder => format!("{} and {decoder} layers", model.layers),
    };
    let sequence = match model.dec_len {
        None => format!("sequence {}", model.seq_len),
        Some(answer) => format!("sequences {} and {answer}", model.seq_len),
    };
    format!(
        "{:?}: {layers}, hidden {}, {} heads of {}, ffn {}, vocabulary {} in {} rows, {sequence}",
        model.family,
        model.hidden,
        model.heads,
        model.head_dim(),
        model.ffn(),
        model.vocab,
        model.padded_vocab()
    )
    .to_lowercase()
}

fn run(config: &Config, known: &PlanInputs, division: &Division) -> RunLength {
    let tokens = config.samples_total() * config.model.tokens_per_sample();
    // The output of a decoder belongs to the same text.
    let text = config.samples_total() * config.model.seq_len;
    let corpus = known.corpus_tokens.map(|corpus| training_tokens(config, corpus));
    RunLength {
        steps: config.steps_total(),
        accumulation: division.micro_batches,
        tokens_per_step: config.tokens_per_step(),
        samples: config.samples_total(),
        tokens,
        epochs: corpus.filter(|corpus| *corpus > 0.0).map(|corpus| text as f64 / corpus),
    }
}

fn saving(config: &Config, parameters: &Parameters) -> Saving {
    let (steps, every) = (config.steps_total(), config.checkpoint.every.steps);
    let count = if every == 0 { 1 } else { steps.div_ceil(every) };
    let checkpoint_bytes = 3 * 4 * parameters.total;
    // The oldest is deleted only after the newest is complete.
    let on_disk = count.min(config.checkpoint.keep.last + 1);
    Saving { checkpoint_bytes, count, disk_bytes_max: on_disk * checkpoint_bytes }
}

fn time(
    run: &RunLength,
    flop: &Flop,
    known: &PlanInputs,
    division: &Division,
    bubble: f64,
) -> Option<Time> {
    let measured = known.tokens_per_s.map(|speed| (speed, "measured speed".to_owned()));
    let (tokens_per_s, basis) = measured.or_else(|| {
        let speed = known.flop_per_s?;
        let text = format!("matrix products at {:.1} GFLOP/s per rank: a lower bound", speed / 1e9);
        let all = speed * division.world as f64 * (1.0 - bubble);
        Some((all / flop.per_token_6n_12lhs as f64, text))
    })?;
    let run_s = run.tokens as f64 / tokens_per_s;
    run_s.is_finite().then_some(Time { tokens_per_s, run_s, basis })
}

fn efficiency(flop: &Flop, known: &PlanInputs, division: &Division) -> Option<Efficiency> {
    let peak = known.flop_per_s.filter(|speed| *speed > 0.0)? * division.world as f64;
    let used = |per_token: u64| Some(known.tokens_per_s? * per_token as f64 / peak);
    Some(Efficiency {
        mfu_6n_12lhs: used(flop.per_token_6n_12lhs)?,
        mfu_6n_6lhs: used(flop.per_token_6n_6lhs)?,
    })
}

/// The split is by documents; by tokens it holds on average.
fn training_tokens(config: &Config, corpus_tokens: u64) -> f64 {
    corpus_tokens as f64 * share(config, 0)
}

/// The fraction of the documents of a split: 0 train, 1 validation, 2 test.
fn share(config: &Config, which: usize) -> f64 {
    let shares = config.data.split.shares().unwrap_or_default();
    shares.get(which).map_or(0.0, |share| share / shares.iter().sum::<f64>())
}
