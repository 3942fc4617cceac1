//! Takeover of a save whose agent died.

use std::time::{Duration, Instant};

use crate::base::save_control::SaveControl;
use crate::plan::SavePlan;
use crate::save::snapshot::Snapshot;
use crate::{Blob, Checkpoint, Checkpoints, Error, PeakRate, RegionRequest, Result, SaveReport};

/// Saves the snapshot of an agent that died. The agent may have written none, some or all of it. A
/// joint save cannot be restarted: the step is then committed only if this writer's part existed.
pub(crate) fn save(
    steps: &Checkpoints,
    plan: &SavePlan,
    snapshot: &Snapshot,
    arena: &[u8],
    control: &SaveControl,
) -> Result<SaveReport> {
    if let Some(together) = snapshot.together() {
        return steps.take_over(snapshot.step, plan, &together, control);
    }
    // Frees the space of what the agent wrote: this save may need it.
    if let Err(error) = steps.sweep() {
        log::warn!("orphaned files of the agent are not removed yet: {error}");
    }
    let started = Instant::now();
    let saved = snapshot.save(steps, plan, arena, control);
    if !matches!(saved, Err(Error::StepExists { .. })) {
        return saved;
    }
    let there = steps.open_step(snapshot.step)?;
    let (pieces, blobs) = (snapshot.pieces(plan, arena)?, snapshot.blobs(arena)?);
    if *there.meta() != snapshot.meta || !is_same(&there, plan, &pieces, &blobs)? {
        return saved;
    }
    log::info!("{}: already saved by the agent", there.display());
    let (files, bytes) = there.size();
    Ok(SaveReport {
        step: snapshot.step,
        bytes,
        files,
        plan: Duration::ZERO,
        write: started.elapsed(),
        sync: Duration::ZERO,
        commit: Duration::ZERO,
        peak_bytes_per_s: PeakRate::of(&*steps.store).map(|peak| peak.write_bytes_per_s),
    })
}

/// Whether the step has exactly these pieces, all tensors of the plan, and these blobs.
fn is_same(
    there: &Checkpoint,
    plan: &SavePlan,
    pieces: &[&[u8]],
    blobs: &[Blob<'_>],
) -> Result<bool> {
    if there.check_against(plan.specs()).is_err()
        || (there.tensors().len(), there.blobs().count()) != (plan.specs().len(), blobs.len())
    {
        return Ok(false);
    }
    let mut buf = Vec::new();
    for (piece, bytes) in plan.pieces_of(0).zip(pieces) {
        let spec = &plan.specs()[piece.tensor];
        buf.resize(bytes.len(), 0);
        let (name, group, region) = (&spec.name, spec.group, piece.region.clone());
        there.read(vec![RegionRequest { name, group, region, into: &mut buf }])?;
        if buf != *bytes {
            return Ok(false);
        }
    }
    for blob in blobs {
        if !there.blobs().any(|name| name == blob.name) || there.blob(blob.name)? != blob.bytes {
            return Ok(false);
        }
    }
    Ok(true)
}
