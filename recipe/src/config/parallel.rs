//! `[parallel]`: how a run is divided among ranks. A run can be resumed with other values of these
//! keys.

use std::ops::Range;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::check::{refused, within};
use super::node::KeyError;
use super::{ComputeOn, Config, Family, Offload, RecomputeMode, Reduce, Schedule, WallTime};
use crate::mesh::MicroBatchShare;

/// `[parallel]`: how the run is divided among `dp x tp x pp` ranks. `dp` follows from the number of
/// ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ParallelConfig {
    /// Tensor parallel size: ranks that share each matrix. They communicate in every layer and
    /// belong on one node. Must divide `model.heads` and `model.ffn`. Default: 1. Minimum: 1.
    /// Maximum: 1024.
    pub tp: u64,
    /// Pipeline parallel size: number of pipeline stages. Default: 1. Minimum: 1. Maximum: 1024.
    pub pp: u64,
    /// Virtual stages per pipeline stage. Only `schedule = "interleaved"` takes more than 1, and
    /// needs it. Default: 1. Minimum: 1. Maximum: 64.
    pub virtual_stages: u64,
    /// Pipeline schedule: `"1f1b"`, `"interleaved"` or `"gpipe"`. Default: `"1f1b"`.
    pub schedule: Schedule,
    /// Whether tensor parallel ranks also divide the sequence between matrices. Saves activation
    /// memory, with the same traffic. Needs `tp` of 2 or more. Default: false.
    pub sequence_parallel: bool,
    /// ZeRO stage. 0 partitions nothing among replicas, 1 optimizer state, 2 also gradients, 3 also
    /// weights. 2 and 3 need `tp = 1` and `pp = 1`. Default: 0. Minimum: 0. Maximum: 3.
    pub zero: u64,
    /// Order of the gradient sum over replicas. `"tree"` gives the same bits for every allowed
    /// number of replicas: with several replicas, their number and the micro-batches per replica
    /// must be powers of two. `"ring"` works with any numbers. Default: `"tree"`.
    pub reduce: Reduce,
    /// Layers of each stage, in the order of the forward pass: `pp x virtual_stages` numbers. With
    /// `"t5"` the layers of the encoder come before those of the decoder. Default: [], an even
    /// division with the larger stages last.
    pub layers_per_stage: Vec<u64>,
    /// Size of a gradient bucket in MiB. Smaller buckets are sent sooner, larger ones cost fewer
    /// messages. Default: 25. Minimum: 1. Maximum: 4096.
    pub bucket_mib: u64,
    /// Time without a response after which a peer counts as lost. Default: `"2m"`. Minimum: `"1s"`.
    pub timeout: WallTime,
    /// Where the inputs of recomputed layers are kept until the backward pass. `"none"`: in the
    /// memory of the device. `"cpu"`: in host memory, if a GPU computes. `"nvme:/path"`: in
    /// anonymous files in a folder. Several folders and `{local_rank}` work as in `optim.offload`.
    /// Needs `recompute.mode = "full"` or `zero = 3`. Default: `"none"`.
    pub activation_offload: Offload,
    /// Activation recomputation.
    pub recompute: RecomputeConfig,
}

/// `[parallel.recompute]`: activation recomputation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RecomputeConfig {
    /// `"none"`, or `"full"`, which recomputes each layer from its input in the backward pass.
    /// `"full"` takes about a third more arithmetic and much less memory. Default: `"none"`.
    pub mode: RecomputeMode,
    /// Layers that are not recomputed, counted from 0. Default: [].
    pub except: Vec<u64>,
}

impl Default for ParallelConfig {
    fn default() -> Self {
        ParallelConfig {
            tp: 1,
            pp: 1,
            virtual_stages: 1,
            schedule: Schedule::default(),
            sequence_parallel: false,
            zero: 0,
            reduce: Reduce::default(),
            layers_per_stage: Vec::new(),
            bucket_mib: 25,
            timeout: WallTime(Duration::from_secs(120)),
            activation_offload: Offload::None,
            recompute: RecomputeConfig::default(),
        }
    }
}

/// How the ranks of a run are divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Division {
    /// World size: all ranks.
    pub world: u64,
    /// Data parallel size: replicas.
    pub dp: u64,
    /// Tensor parallel size: ranks that share each matrix.
    pub tp: u64,
    /// Pipeline parallel size: pipeline stages.
    pub pp: u64,
    /// Micro-batches of one replica in one step.
    pub micro_batches: u64,
}

impl ParallelConfig {
    /// Whether the backward pass recomputes this layer.
    #[must_use]
    pub fn recomputes(&self, unit: u64) -> bool {
        self.recompute.mode == RecomputeMode::Full && !self.recompute.except.contains(&unit)
    }
}

impl Config {
    /// The layers of each virtual stage, in the order of the forward pass. There are
    /// `pp x virtual_stages` ranges; range `c x pp + r` is on pipeline stage `r`.
    #[must_use]
    pub fn pieces(&self) -> Vec<Range<usize>> {
        let (units, pieces) = (self.model.units(), self.parallel.pp * self.parallel.virtual_stages);
        let larger = units % pieces;
        let even = |piece| units / pieces + u64::from(piece >= pieces - larger);
        let given = &self.parallel.layers_per_stage;
        let counts = if given.is_empty() { (0..pieces).map(even).collect() } else { given.clone() };
        let mut first = 0;
        let ranges = counts.into_iter().map(|count| {
            first += count as usize; // fits: units of a model
            first - count as usize..first
        });
        ranges.collect()
    }

    /// Which micro-batches of a step each replica computes.
    #[must_use]
    pub fn share(&self, replicas: usize) -> MicroBatchShare {
        if self.parallel.zero >= 2 && replicas > 1 {
            MicroBatchShare::Stride
        } else {
            MicroBatchShare::Run
        }
    }

    /// Divides `world` ranks.
    ///
    /// # Errors
    /// Every reason why the ranks cannot be divided.
    pub fn divide(&self, world: u64) -> Result<Division, Vec<String>> {
        let (parallel, batch) = (&self.parallel, &self.batch);
        let (tp, pp) = (parallel.tp, parallel.pp);
        if world == 0 || !world.is_multiple_of(tp * pp) {
            let ranks = tp * pp;
            return Err(vec![format!(
                "expected a multiple of tp {tp} x pp {pp} = {ranks} ranks, found {world}"
            )]);
        }
        let dp = world / (tp * pp);
        let mut refusals = Vec::new();
        let mut sizes = vec![("batch.global", batch.global)];
        if let Some(ramp) = &batch.rampup {
            sizes.push(("batch.rampup.start", ramp.start));
            sizes.push(("batch.rampup.increment", ramp.increment));
        }
        for (key, size) in sizes {
            let micro_batches = size / batch.micro;
            if !size.is_multiple_of(batch.micro * dp) {
                refusals.push(format!(
                    "{key}: expected a multiple of micro {} x dp {dp} = {}, found {size}: global \
                     = micro x accumulation x dp, and dp = ranks / (tp x pp)",
                    batch.micro,
                    batch.micro * dp
                ));
            } else if parallel.schedule == Schedule::Interleaved
                && !(micro_batches / dp).is_multiple_of(pp)
            {
                refusals.push(format!(
                    "{key}: expected a multiple of pp {pp} micro-batches per replica with \
                     \"interleaved\", found {}",
                    micro_batches / dp
                ));
            }
        }
        let micro_batches = batch.micro_batches() / dp;
        let shares = |size: u64| size / batch.micro / dp;
        let is_odd = |size: &u64| !dp.is_power_of_two() || !shares(*size).is_power_of_two();
        if dp > 1
            && parallel.reduce == Reduce::Tree
            && refusals.is_empty()
            && let Some(size) = batch.sizes().find(is_odd)
        {
            refusals.push(format!(
                "parallel.reduce: expected powers of two with \"tree\", found dp {dp} and {} \
                 micro-batches per replica{} (hint: parallel.reduce = \"ring\" takes any \
                 number)",
                shares(size),
                if batch.rampup.is_some() {
                    format!(" of a batch of {size}")
                } else {
                    String::new()
                }
            ));
        }
        if let Some(given) = batch.accumulation.filter(|given| *given != micro_batches) {
            refusals.push(format!(
                "batch.accumulation: expected global / (micro x dp) = {micro_batches}, found \
                 {given}"
            ));
        }
        let division = Division { world, dp, tp, pp, micro_batches };
        if refusals.is_empty() { Ok(division) } else { Err(refusals) }
    }

    pub(super) fn check_parallel(&self) -> Result<(), KeyError> {
        let parallel = &self.parallel;
        within("parallel.tp", parallel.tp, 1..=1024)?;
        within("parallel.pp", parallel.pp, 1..=1024)?;
        within("parallel.virtual_stages", parallel.virtual_stages, 1..=64)?;
        within("parallel.zero", parallel.zero, 0..=3)?;
        within("parallel.bucket_mib", parallel.bucket_mib, 1..=4096)?;
        if parallel.timeout.0 < Duration::from_secs(1) {
            let problem = format!("expected at least 1s, found {}", parallel.timeout);
            return Err(refused("parallel.timeout", problem));
        }
        if parallel.recompute.mode == RecomputeMode::None && !parallel.recompute.except.is_empty() {
            let problem = "only valid with recompute.mode = \"full\"";
            return Err(refused("parallel.recompute.except", problem));
        }
        if let Some(layer) = parallel.recompute.except.iter().find(|at| **at >= self.model.units())
        {
            let problem = format!("expected layers below {}, found {layer}", self.model.units());
            return Err(refused("parallel.recompute.except", problem));
        }
        self.check_activation_offload()?;
        self.check_tensor_parallel()?;
        self.check_pipeline()?;
        if parallel.zero >= 2 && (parallel.tp > 1 || parallel.pp > 1) {
            let problem =
                format!("expected 0 or 1 where tp or pp is above 1, found {}", parallel.zero);
            return Err(refused("parallel.zero", problem));
        }
        Ok(())
    }

    fn check_activation_offload(&self) -> Result<(), KeyError> {
        let (parallel, key) = (&self.parallel, "parallel.activation_offload");
        let recomputes = parallel.recompute.mode == RecomputeMode::Full || parallel.zero == 3;
        match parallel.activation_offload {
            Offload::None => Ok(()),
            _ if !recomputes => {
                let problem = "expected recompute.mode = \"full\" or zero = 3, found neither";
                Err(refused(key, problem))
            }
            Offload::Cpu if self.run.device == ComputeOn::Cpu => {
                let problem = "expected none or nvme:PATH with run.device = \"cpu\", found cpu";
                Err(refused(key, problem))
            }
            _ => Ok(()),
        }
    }

    fn check_tensor_parallel(&self) -> Result<(), KeyError> {
        let (model, tp) = (&self.model, self.parallel.tp);
        for (key, size) in [("heads", model.heads), ("ffn", model.ffn())] {
            if !size.is_multiple_of(tp) {
                let problem = format!("expected a divisor of model.{key} {size}, found {tp}");
                return Err(refused("parallel.tp", problem));
            }
        }
        if !self.parallel.sequence_parallel {
            return Ok(());
        }
        if tp == 1 {
            let problem = "expected parallel.tp of at least 2, found 1";
            return Err(refused("parallel.sequence_parallel", problem));
        }
        for (key, len) in [("seq_len", model.seq_len), ("dec_len", model.dec_len.unwrap_or(0))] {
            if !len.is_multiple_of(tp) {
                let problem = format!("expected model.{key} divisible by tp {tp}, found {len}");
                return Err(refused("parallel.sequence_parallel", problem));
            }
        }
        Ok(())
    }

    fn check_pipeline(&self) -> Result<(), KeyError> {
        let (parallel, units) = (&self.parallel, self.model.units());
        let pieces = parallel.pp * parallel.virtual_stages;
        match (parallel.schedule, parallel.virtual_stages) {
            (Schedule::Interleaved, 1) => {
                let problem = "expected at least 2 with schedule \"interleaved\", found 1";
                return Err(refused("parallel.virtual_stages", problem));
            }
            (Schedule::Interleaved, _) if self.model.family != Family::Gpt => {
                let problem = "\"interleaved\" is only valid with family \"gpt\"";
                return Err(refused("parallel.schedule", problem));
            }
            (Schedule::Interleaved, _) if parallel.pp == 1 => {
                let problem = "expected at least 2 with schedule \"interleaved\", found 1";
                return Err(refused("parallel.pp", problem));
            }
            (Schedule::Interleaved, _) | (_, 1) => {}
            (_, stages) => {
                let problem =
                    format!("expected 1 unless schedule is \"interleaved\", found {stages}");
                return Err(refused("parallel.virtual_stages", problem));
            }
        }
        if units < pieces {
            let problem =
                format!("expected pp x virtual_stages of at most {units} layers, found {pieces}");
            return Err(refused("parallel.pp", problem));
        }
        let given = &parallel.layers_per_stage;
        if given.is_empty() {
            return Ok(());
        }
        let sum = given.iter().fold(0_u64, |sum, layers| sum.saturating_add(*layers));
        let problem = if given.len() as u64 != pieces {
            format!("expected pp x virtual_stages = {pieces} numbers, found {}", given.len())
        } else if sum != units {
            format!("expected a sum of {units} layers, found {sum}")
        } else if given.contains(&0) {
            "expected at least 1 layer per stage, found 0".to_owned()
        } else {
            return Ok(());
        };
        Err(refused("parallel.layers_per_stage", problem))
    }
}
