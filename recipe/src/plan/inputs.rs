//! Inputs of layers that are spilled until the backward pass.

use std::ops::Range;

use serde::Serialize;

use super::memory::{number_bytes, recomputes};
use super::{PlanInputs, StagePlan};
use crate::config::{Config, Division, Offload};

/// The bytes that are spilled, of the rank that spills the most.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ActivationOffloadPlan {
    /// The value in the config: `cpu`, or `nvme:` and folders.
    pub place: Offload,
    /// Bytes that a step writes, and reads again. Inputs that are needed again before they are
    /// written do not count.
    pub bytes_per_step: u64,
    /// Peak of the spilled bytes.
    pub away_bytes: u64,
    /// Memory that this saves on the rank, less the buffers.
    pub spared_bytes: u64,
    /// Time of the disks for both directions, if their speed is known.
    pub disk_s_per_step: Option<f64>,
    /// Time of the rest of a step, if the speed of training is known.
    pub compute_s_per_step: Option<f64>,
}

impl ActivationOffloadPlan {
    /// `None` if nothing is spilled. `step_s` is the time of a step without it.
    pub(super) fn of(
        config: &Config,
        known: &PlanInputs,
        stages: &[StagePlan],
        step_s: Option<f64>,
    ) -> Option<Self> {
        let place = config.parallel.activation_offload.clone();
        if place == Offload::None {
            return None;
        }
        let most = stages.iter().max_by_key(|stage| stage.moved_bytes)?;
        let bytes_per_step = most.moved_bytes;
        let on_disk = matches!(place, Offload::Nvme(_));
        let speed = known.disk_bytes_per_s.filter(|speed| on_disk && *speed > 0.0);
        Some(ActivationOffloadPlan {
            place,
            bytes_per_step,
            away_bytes: most.away_bytes,
            spared_bytes: most.away_bytes - most.memory_bytes.input_buffers,
            disk_s_per_step: speed.map(|speed| 2.0 * bytes_per_step as f64 / speed),
            compute_s_per_step: step_s,
        })
    }

    /// Whether the disk takes longer than the rest of a step.
    pub(super) fn is_behind(&self) -> bool {
        self.disk_s_per_step.zip(self.compute_s_per_step).is_some_and(|(disk, rest)| disk > rest)
    }
}

/// Bytes between two units of a micro-batch: of the stack of the unit, and of the encoder output
/// that a decoder passes on.
pub(super) fn input_bytes(config: &Config, tp: u64, unit: usize) -> (u64, u64) {
    let model = &config.model;
    let is_decoder = unit as u64 >= model.layers;
    let (own, carried) =
        if is_decoder { (model.dec_len.unwrap_or(0), model.seq_len) } else { (model.seq_len, 0) };
    let shared = if config.parallel.sequence_parallel { tp } else { 1 };
    let bytes = |len: u64| {
        let tokens = config.batch.micro.saturating_mul(len);
        tokens.saturating_mul(model.hidden / shared) * number_bytes(config)
    };
    (bytes(own), bytes(carried))
}

/// Bytes per micro-batch that are spilled of the inputs of the units of a piece. The first unit of
/// a stack has no input of its own. The encoder output stays in memory, because all layers of a
/// decoder use it; except for the last unit, if it is the first of the piece.
pub(super) fn moved_bytes(config: &Config, division: &Division, units: &Range<usize>) -> u64 {
    let of_unit = |unit: usize| {
        let (own, carried) = input_bytes(config, division.tp, unit);
        let decoder = config.model.layers as usize; // fits: of a model
        let is_alone =
            unit as u64 + 1 == config.model.units() && (unit == units.start || unit == decoder);
        let own = if unit == 0 || unit == decoder { 0 } else { own };
        own.saturating_add(if is_alone { carried } else { 0 })
    };
    let units = units.clone().filter(|unit| recomputes(config, division, *unit));
    units.map(of_unit).fold(0, u64::saturating_add)
}

/// The bytes that stay in memory: the encoder output, once.
pub(super) fn resident_bytes(config: &Config, division: &Division, units: &Range<usize>) -> u64 {
    let first = units.start.max(config.model.layers as usize); // fits: of a model
    let is_there = first < units.end && first as u64 + 1 < config.model.units();
    if is_there { input_bytes(config, division.tp, first).1 } else { 0 }
}
