//! `feedline ckpt scrub`: verifies all steps at a rate that does not slow down a run.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::Args;
use storage::ByteSize;

use super::CkptOutput;
use super::verify::{verify, verify_bytes};
use crate::ui::inspect_target::InspectTarget;
use crate::ui::terminal::ProgressLine;

/// Arguments of `feedline ckpt scrub`.
#[derive(Debug, Args)]
pub struct ScrubArgs {
    /// Folder of steps, or one step.
    #[arg(value_name = "FOLDER")]
    pub folder: String,
    /// Maximum average rate in bytes per second; at least 1B.
    ///
    /// A higher rate takes more of the bandwidth of the run.
    #[arg(long, value_name = "SIZE", default_value = "200MiB")]
    pub rate: ByteSize,
    /// Print JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

pub(crate) fn run(args: &ScrubArgs, line: &mut ProgressLine) -> Result<CkptOutput> {
    ensure!(args.rate.0 > 0, "cannot use --rate 0B: expected at least 1 B a second");
    let verified = verify(&InspectTarget::find(&args.folder)?, |steps, open| {
        let started = Instant::now();
        verify_bytes(steps, open, line, &mut |done| {
            let earliest = Duration::from_secs_f64(done as f64 / args.rate.0 as f64);
            thread::sleep(earliest.saturating_sub(started.elapsed()));
        })
    })?;
    CkptOutput::new(args.json, &verified, verified.text(), verified.ok())
}
