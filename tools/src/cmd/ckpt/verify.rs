//! `feedline ckpt verify`: whether steps are whole.

use std::sync::Arc;

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;
use storage::{ByteSize, Key, Storage};

use super::Answer;
use crate::cmd::{checkpoints, steps_named};
use crate::report::{Bar, ProgressLine};
use crate::target::Target;

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
pub(super) struct Verified {
    pub(super) steps: Vec<StepVerdict>,
}

#[derive(Debug, Serialize)]
pub(super) struct StepVerdict {
    pub(super) folder: String,
    pub(super) step: u64,
    pub(super) ok: bool,
    /// Bytes that were read and summed.
    pub(super) verified_bytes: u64,
    /// What is wrong, and where.
    pub(super) fault: Option<String>,
}

pub(super) fn run(args: &VerifyArgs, line: &mut ProgressLine) -> Result<Answer> {
    let (store, steps) = steps_of(&args.name)?;
    let verdict = |step| match verify_step(&store, step, args.quick, line, &mut |_| ()) {
        Ok(verdict) => verdict,
        Err(error) => StepVerdict::damaged(&store, step, &error),
    };
    let verified = Verified { steps: steps.into_iter().map(verdict).collect() };
    Answer::new(args.json, &verified, verified.text(), verified.ok())
}

/// The store and the steps that a name means.
pub(super) fn steps_of(name: &str) -> Result<(Arc<dyn Storage>, Vec<u64>)> {
    match Target::find(name)? {
        Target::Checkpoint { store, step } => Ok((store, vec![step])),
        Target::Checkpoints { store } => {
            let steps = steps_named(&*store)?;
            Ok((store, steps))
        }
        Target::Tokens { .. } | Target::Foreign { .. } => {
            bail!("{name}: got token files, due a step-* folder or one that holds such")
        }
    }
}

/// Verifies one step; `pace` hears how many of its bytes are verified, and may take its time.
pub(super) fn verify_step(
    store: &Arc<dyn Storage>,
    step: u64,
    quick: bool,
    line: &mut ProgressLine,
    pace: &mut dyn FnMut(u64),
) -> ckpt::Result<StepVerdict> {
    let open = checkpoints(store).open_step(step)?;
    let verified_bytes = if quick {
        0
    } else {
        let mut bar = Bar::new(line, format!("verify step {step}"), open.size().1);
        let report = open.verify_with(&mut |done| {
            bar.at(done);
            pace(done);
        })?;
        report.bytes
    };
    Ok(StepVerdict { folder: open.display(), step, ok: true, verified_bytes, fault: None })
}

impl StepVerdict {
    pub(super) fn damaged(store: &Arc<dyn Storage>, step: u64, error: &ckpt::Error) -> Self {
        let folder = store.display(&Key::root());
        let fault = Some(storage::one_line(error));
        StepVerdict { folder, step, ok: false, verified_bytes: 0, fault }
    }
}

impl Verified {
    pub(super) fn ok(&self) -> bool {
        self.steps.iter().all(|step| step.ok)
    }

    pub(super) fn text(&self) -> String {
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
