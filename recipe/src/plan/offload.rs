use serde::Serialize;

use super::{PlanInputs, StagePlan};
use crate::config::{Config, Division, Offload};

/// Offloaded weights and moments, of the rank that has the most.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OffloadPlan {
    /// The value in the config: `cpu`, or `nvme:` and folders.
    pub place: Offload,
    /// f32 weights and both moments: 12 bytes per parameter in the slice of the rank.
    pub state_bytes: u64,
    /// Bytes of two generations on all disks together; an update reads one and writes the other.
    pub disk_bytes: u64,
    /// Bytes that an update reads.
    pub read_bytes_per_step: u64,
    /// Bytes that an update writes.
    pub write_bytes_per_step: u64,
    /// Time of the disks for both, if their speed is known.
    pub disk_s_per_step: Option<f64>,
    /// Time of the rest of a step, if the speed of training is known.
    pub compute_s_per_step: Option<f64>,
}

impl OffloadPlan {
    /// `None` if nothing is offloaded. `step_s` is the time of a step without it.
    pub(super) fn of(
        config: &Config,
        known: &PlanInputs,
        division: &Division,
        stages: &[StagePlan],
        step_s: Option<f64>,
    ) -> Option<Self> {
        let place = config.optim.offload.clone();
        let on_disk = match place {
            Offload::None => return None,
            Offload::Cpu => false,
            Offload::Nvme(_) => true,
        };
        let replicas = if config.parallel.zero > 0 { division.dp } else { 1 };
        let params = stages.iter().map(|stage| stage.parameters).max().unwrap_or(0);
        let state_bytes = 12 * params.div_ceil(replicas);
        let disk_s = |speed: f64| 2.0 * state_bytes as f64 / speed;
        let speed = known.disk_bytes_per_s.filter(|speed| on_disk && *speed > 0.0);
        Some(OffloadPlan {
            place,
            state_bytes,
            disk_bytes: if on_disk { 2 * state_bytes } else { 0 },
            read_bytes_per_step: state_bytes,
            write_bytes_per_step: state_bytes,
            disk_s_per_step: speed.map(disk_s),
            compute_s_per_step: step_s,
        })
    }

    /// Whether the disk takes longer for an update than the rest of a step.
    pub(super) fn is_behind(&self) -> bool {
        self.disk_s_per_step.zip(self.compute_s_per_step).is_some_and(|(disk, rest)| disk > rest)
    }
}
