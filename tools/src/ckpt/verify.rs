//! `feedline ckpt verify`: checks whether steps are intact.

use anyhow::{Result, bail};
use ckpt::{Checkpoint, Checkpoints};
use clap::Args;
use serde::Serialize;
use storage::ByteSize;

use super::CkptOutput;
use crate::ui::inspect_target::InspectTarget;
use crate::ui::output::checkpoints;
use crate::ui::terminal::{Bar, ProgressLine};

/// Arguments of `feedline ckpt verify`.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// A step-* folder, or a folder of steps for all of them.
    #[arg(value_name = "CKPT")]
    pub name: String,
    /// Compare only the manifest with itself and with the lengths of the files.
    ///
    /// Takes milliseconds, but damaged bytes are not detected.
    #[arg(long)]
    pub quick: bool,
    /// Print JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

/// The output of `feedline ckpt verify`; `--json` prints it as it is.
#[derive(Debug, Serialize)]
pub struct Verified {
    pub(crate) steps: Vec<StepVerdict>,
    /// Steps that were deleted before they were verified, as retention deletes old ones, or that
    /// are not committed yet.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) skipped: Vec<u64>,
}

#[derive(Debug, Serialize)]
pub(crate) struct StepVerdict {
    pub(crate) folder: String,
    pub(crate) step: u64,
    pub(crate) ok: bool,
    /// Bytes that were read and compared with their checksums.
    pub(crate) verified_bytes: u64,
    /// The fault and its location.
    pub(crate) fault: Option<String>,
}

pub(crate) fn run(args: &VerifyArgs, line: &mut ProgressLine) -> Result<CkptOutput> {
    let verified = verify(&InspectTarget::find(&args.name)?, |steps, open| {
        if args.quick {
            return Ok(0);
        }
        verify_bytes(steps, open, line, &mut |_| ())
    })?;
    CkptOutput::new(args.json, &verified, verified.text(), verified.ok())
}

/// Verifies the step that a target names, or all steps of a folder. `read` verifies the bytes of an
/// open step and returns their number.
///
/// # Errors
/// If it is not a checkpoint, a store does not respond, or no step remains to verify. Damage is in
/// the verdict.
pub fn verify(
    target: &InspectTarget,
    mut read: impl FnMut(&Checkpoints, &Checkpoint) -> ckpt::Result<u64>,
) -> Result<Verified> {
    let mut verified = Verified { steps: Vec::new(), skipped: Vec::new() };
    let damaged_in = target.display();
    each_step(target, |steps, step, opened| {
        let outcome = opened.and_then(|open| {
            let verified_bytes = read(steps, &open)?;
            let folder = open.display();
            Ok(StepVerdict { folder, step, ok: true, verified_bytes, fault: None })
        });
        match outcome_of(steps, step, outcome)? {
            StepOutcome::Intact(verdict) => verified.steps.push(verdict),
            StepOutcome::Damaged(fault) => {
                let (folder, fault) = (damaged_in.clone(), Some(fault));
                let verdict = StepVerdict { folder, step, ok: false, verified_bytes: 0, fault };
                verified.steps.push(verdict);
            }
            StepOutcome::Skipped => verified.skipped.push(step),
        }
        Ok(())
    })?;
    if verified.steps.is_empty() {
        bail!("cannot verify {damaged_in}: {NONE_LEFT}");
    }
    Ok(verified)
}

/// The reason that no step was verified.
pub(crate) const NONE_LEFT: &str =
    "expected a committed step, found none: each was removed meanwhile, or is not committed yet";

/// Opens each step of a target and passes it to `visit`, or the error. The folder is listed once.
///
/// # Errors
/// Errors of `visit` and of the store, and token files.
pub(crate) fn each_step(
    target: &InspectTarget,
    mut visit: impl FnMut(&Checkpoints, u64, ckpt::Result<Checkpoint>) -> Result<()>,
) -> Result<()> {
    match target {
        InspectTarget::Checkpoint { store, step } => {
            let steps = checkpoints(store);
            visit(&steps, *step, steps.open_step(*step))
        }
        InspectTarget::Checkpoints { store } => {
            let steps = checkpoints(store);
            let there = steps.list_folder()?;
            for &step in there.steps() {
                visit(&steps, step, steps.open_listed(&there, step))?;
            }
            Ok(())
        }
        InspectTarget::Tokens { store, prefix } | InspectTarget::Foreign { store, prefix, .. } => {
            bail!(
                "cannot verify {}: expected a step (step-*) or a folder that holds steps, found \
                 token files",
                store.display(prefix)
            )
        }
    }
}

/// The reason that a step was not checked.
pub(crate) const SKIPPED: &str = "removed meanwhile, or not committed yet";

/// Result for one step.
pub(crate) enum StepOutcome<T> {
    Intact(T),
    /// The fault and its location.
    Damaged(String),
    /// The step was deleted meanwhile, as retention deletes old steps, or is not committed yet.
    Skipped,
}

/// Distinguishes damage from a step that was deleted meanwhile. A failure to read, such as a store
/// that does not respond, does not show damage and is an error.
pub(crate) fn outcome_of<T>(
    steps: &Checkpoints,
    step: u64,
    outcome: ckpt::Result<T>,
) -> Result<StepOutcome<T>> {
    let error = match outcome {
        Ok(intact) => return Ok(StepOutcome::Intact(intact)),
        Err(ckpt::Error::NoStep { .. } | ckpt::Error::Uncommitted { .. }) => {
            return Ok(StepOutcome::Skipped);
        }
        Err(error) => error,
    };
    let is_damage = matches!(
        &error,
        ckpt::Error::Corrupt { .. }
            | ckpt::Error::BadManifest { .. }
            | ckpt::Error::Storage(
                storage::Error::Corrupt { .. }
                    | storage::Error::NotFound { .. }
                    | storage::Error::ShortRead { .. }
                    | storage::Error::BadKey { .. }
            )
    );
    if !is_damage {
        return Err(error.into());
    }
    if steps.still_there(&[step])?.is_empty() {
        return Ok(StepOutcome::Skipped);
    }
    Ok(StepOutcome::Damaged(storage::one_line(&error)))
}

/// Reads a step and compares it with its checksums; records that it is intact. `pace` receives the
/// number of bytes verified so far, and may block.
pub(crate) fn verify_bytes(
    steps: &Checkpoints,
    open: &Checkpoint,
    line: &mut ProgressLine,
    pace: &mut dyn FnMut(u64),
) -> ckpt::Result<u64> {
    let mut bar = Bar::new(line, format!("verify step {}", open.step()), open.size().1);
    let report = open.verify_with(&mut |done| {
        bar.at(done);
        pace(done);
    })?;
    steps.note_verified(open);
    Ok(report.bytes)
}

impl Verified {
    /// Whether all steps are intact.
    #[must_use]
    pub fn ok(&self) -> bool {
        self.steps.iter().all(|step| step.ok)
    }

    pub(crate) fn text(&self) -> String {
        let line = |step: &StepVerdict| match &step.fault {
            Some(fault) => format!("DAMAGED   step {}: {fault}\n", step.step),
            None if step.verified_bytes == 0 => {
                format!("complete  step {}: manifest and lengths agree\n", step.step)
            }
            None => {
                let size = ByteSize(step.verified_bytes);
                format!("complete  step {}: {size}, all checksums agree\n", step.step)
            }
        };
        let skipped = self.skipped.iter();
        let skipped = skipped.map(|step| format!("skipped   step {step}: {SKIPPED}\n"));
        self.steps.iter().map(line).chain(skipped).collect()
    }
}
