//! `feedline ckpt verify`: whether steps are whole.

use std::sync::Arc;

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;
use storage::{ByteSize, Key, Storage};

use super::CkptOutput;
use crate::ui::inspect_target::InspectTarget;
use crate::ui::output::{checkpoints, steps_named};
use crate::ui::terminal::{Bar, ProgressLine};

/// What to verify, and how thoroughly.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// A step-* folder; or the folder that holds such, for all of them.
    #[arg(value_name = "CKPT")]
    pub name: String,
    /// Compares only the manifest with itself and with the lengths of the files, in milliseconds.
    #[arg(long)]
    pub quick: bool,
    /// Prints JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

/// What was verified; `--json` prints it as it is.
#[derive(Debug, Serialize)]
pub(crate) struct Verified {
    pub(crate) steps: Vec<StepVerdict>,
}

#[derive(Debug, Serialize)]
pub(crate) struct StepVerdict {
    pub(crate) folder: String,
    pub(crate) step: u64,
    pub(crate) ok: bool,
    /// Bytes that were read and summed.
    pub(crate) verified_bytes: u64,
    /// What is wrong, and where.
    pub(crate) fault: Option<String>,
}

pub(crate) fn run(args: &VerifyArgs, line: &mut ProgressLine) -> Result<CkptOutput> {
    let (store, steps) = steps_of(&args.name)?;
    let is_only = steps.len() == 1;
    let mut verified = Verified { steps: Vec::new() };
    for step in steps {
        let outcome = verify_step(&store, step, args.quick, line, &mut |_| ());
        verified.steps.extend(StepVerdict::of(&store, step, outcome, is_only)?);
    }
    CkptOutput::new(args.json, &verified, verified.text(), verified.ok())
}

/// The store and the steps that a name means.
pub(crate) fn steps_of(name: &str) -> Result<(Arc<dyn Storage>, Vec<u64>)> {
    match InspectTarget::find(name)? {
        InspectTarget::Checkpoint { store, step } => Ok((store, vec![step])),
        InspectTarget::Checkpoints { store } => {
            let steps = steps_named(&*store)?;
            Ok((store, steps))
        }
        InspectTarget::Tokens { .. } | InspectTarget::Foreign { .. } => {
            bail!("{name}: got token files, due a step-* folder or one that holds such")
        }
    }
}

/// Verifies one step; `pace` hears how many of its bytes are verified, and may take its time.
pub(crate) fn verify_step(
    store: &Arc<dyn Storage>,
    step: u64,
    quick: bool,
    line: &mut ProgressLine,
    pace: &mut dyn FnMut(u64),
) -> ckpt::Result<StepVerdict> {
    let steps = checkpoints(store);
    let open = steps.open_step(step)?;
    let verified_bytes = if quick {
        0
    } else {
        let mut bar = Bar::new(line, format!("verify step {step}"), open.size().1);
        let report = open.verify_with(&mut |done| {
            bar.at(done);
            pace(done);
        })?;
        steps.note_verified(&open);
        report.bytes
    };
    Ok(StepVerdict { folder: open.display(), step, ok: true, verified_bytes, fault: None })
}

impl StepVerdict {
    /// Whole, damaged, or `None` if it went meanwhile, as retention deletes old steps. What keeps
    /// us from looking, such as a store that does not answer, says nothing of the step: an error.
    pub(crate) fn of(
        store: &Arc<dyn Storage>,
        step: u64,
        outcome: ckpt::Result<Self>,
        is_only: bool,
    ) -> Result<Option<Self>> {
        let error = match outcome {
            Ok(verdict) => return Ok(Some(verdict)),
            Err(ckpt::Error::NoStep { .. }) if !is_only => return Ok(None),
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
                )
        );
        if !is_damage {
            return Err(error.into());
        }
        let gone = |there: Vec<u64>| !there.contains(&step);
        if !is_only && steps_named(&**store).is_ok_and(gone) {
            return Ok(None);
        }
        let folder = store.display(&Key::root());
        let fault = Some(storage::one_line(&error));
        Ok(Some(StepVerdict { folder, step, ok: false, verified_bytes: 0, fault }))
    }
}

impl Verified {
    pub(crate) fn ok(&self) -> bool {
        self.steps.iter().all(|step| step.ok)
    }

    pub(crate) fn text(&self) -> String {
        let line = |step: &StepVerdict| match &step.fault {
            Some(fault) => format!("DAMAGED  step {}: {fault}\n", step.step),
            None if step.verified_bytes == 0 => {
                format!("whole    step {}: manifest and lengths agree\n", step.step)
            }
            None => {
                let size = ByteSize(step.verified_bytes);
                format!("whole    step {}: {size}, all checksums agree\n", step.step)
            }
        };
        self.steps.iter().map(line).collect()
    }
}
