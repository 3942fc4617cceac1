//! Inputs of layers that wait for the backward pass elsewhere.

use std::ops::Range;

use serde::Serialize;

use super::memory::{number_bytes, recomputes};
use super::{PlanInputs, StagePlan};
use crate::config::{Config, Division, Offload};

/// What moves, of the rank that moves the most.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ActivationOffloadPlan {
    /// As the config has it: `cpu` or `nvme:` and folders.
    pub place: Offload,
    /// What a step moves away, and as much back; what is needed again before its turn to be
    /// written has come is not.
    pub bytes_per_step: u64,
    /// What is away at once, at most.
    pub away_bytes: u64,
    /// What the rank's memory is spared of that, the buffers counted.
    pub spared_bytes: u64,
    /// How long the disks take for both ways, if their speed is known.
    pub disk_s_per_step: Option<f64>,
    /// How long a step takes besides, if the speed of training is known.
    pub compute_s_per_step: Option<f64>,
}

impl ActivationOffloadPlan {
    /// `None` where nothing moves. `step_s` is the time of a step without it.
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

    /// Whether the disk takes longer than the ranks for all else of a step.
    pub(super) fn is_behind(&self) -> bool {
        self.disk_s_per_step.zip(self.compute_s_per_step).is_some_and(|(disk, rest)| disk > rest)
    }
}

/// Bytes between two units of a micro-batch: of a unit's own stack, and of the text that a decoder
/// carries along.
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

/// What moves of the inputs of a piece's units, a micro-batch. The first unit of a stack has none
/// of its own, and the text stays, since all layers of a decoder have it; but for the last one, if
/// it is the first that the piece has.
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

/// What stays of them: the text, once.
pub(super) fn kept_bytes(config: &Config, division: &Division, units: &Range<usize>) -> u64 {
    let first = units.start.max(config.model.layers as usize); // fits: of a model
    let is_there = first < units.end && first as u64 + 1 < config.model.units();
    if is_there { input_bytes(config, division.tp, first).1 } else { 0 }
}
