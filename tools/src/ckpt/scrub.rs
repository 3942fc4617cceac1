//! `feedline ckpt scrub`: all steps verified, slowly enough that a run beside it does not notice.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::Args;
use storage::ByteSize;

use super::CkptOutput;
use super::verify::{StepVerdict, Verified, steps_of, verify_step};
use crate::ui::terminal::ProgressLine;

/// What to scrub, and how fast.
#[derive(Debug, Args)]
pub struct ScrubArgs {
    /// The folder that holds the steps, or one step.
    #[arg(value_name = "FOLDER")]
    pub folder: String,
    /// The most that is read in a second, on average. Minimum: 1 B.
    #[arg(long, value_name = "SIZE", default_value = "200MiB")]
    pub rate: ByteSize,
    /// Prints JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

pub(crate) fn run(args: &ScrubArgs, line: &mut ProgressLine) -> Result<CkptOutput> {
    ensure!(args.rate.0 > 0, "--rate: got 0 B, due at least 1 B a second");
    let (store, steps) = steps_of(&args.folder)?;
    let is_only = steps.len() == 1;
    let mut verified = Verified { steps: Vec::new() };
    for step in steps {
        let begun = Instant::now();
        let mut pace = |done: u64| {
            let due = Duration::from_secs_f64(done as f64 / args.rate.0 as f64);
            thread::sleep(due.saturating_sub(begun.elapsed()));
        };
        let outcome = verify_step(&store, step, false, line, &mut pace);
        verified.steps.extend(StepVerdict::of(&store, step, outcome, is_only)?);
    }
    CkptOutput::new(args.json, &verified, verified.text(), verified.ok())
}
