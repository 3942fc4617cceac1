//! A save that another process had begun, and died over.

use std::time::{Duration, Instant};

use crate::control::Control;
use crate::snapshot::Snapshot;
use crate::{Blob, Checkpoint, Checkpoints, Error, Peak, Result, SaveReport, TensorData};

/// Saves what an agent was to save that is gone. It may have left any part of it, or all.
pub(crate) fn save(
    steps: &Checkpoints,
    snapshot: &Snapshot,
    tensors: &[TensorData<'_>],
    blobs: &[Blob<'_>],
    control: &Control,
) -> Result<SaveReport> {
    // What it had written may be the room that this save needs.
    if let Err(error) = steps.sweep() {
        log::warn!("what the agent has left stays for now: {error}");
    }
    let begun = Instant::now();
    let saved = steps.save_watched(snapshot.step, tensors, blobs, snapshot.meta.clone(), control);
    if !matches!(saved, Err(Error::StepExists { .. })) {
        return saved;
    }
    let there = steps.open_step(snapshot.step)?;
    if *there.meta() != snapshot.meta || !is_same(&there, tensors, blobs)? {
        return saved;
    }
    log::info!("{}: the agent had saved it", there.display());
    let (files, bytes) = there.size();
    Ok(SaveReport {
        step: snapshot.step,
        bytes,
        files,
        plan: Duration::ZERO,
        write: begun.elapsed(),
        sync: Duration::ZERO,
        commit: Duration::ZERO,
        peak_bytes_per_s: Peak::of(&*steps.store).map(|peak| peak.write_bytes_per_s),
    })
}

/// Whether the step has these very tensors and blobs.
fn is_same(there: &Checkpoint, tensors: &[TensorData<'_>], blobs: &[Blob<'_>]) -> Result<bool> {
    if (there.tensors().len(), there.blobs().count()) != (tensors.len(), blobs.len()) {
        return Ok(false);
    }
    let mut buf = Vec::new();
    for tensor in tensors {
        let Ok(entry) = there.tensor(tensor.name, tensor.group) else { return Ok(false) };
        if (entry.dtype, entry.shape.as_slice()) != (tensor.dtype, tensor.shape) {
            return Ok(false);
        }
        buf.resize(tensor.bytes.len(), 0);
        there.read_tensor(tensor.name, tensor.group, &mut buf)?;
        if buf != tensor.bytes {
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
