//! `feedline ckpt drain`: copies steps from a fast store to a durable one.

use std::num::NonZeroU64;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use ckpt::{CheckpointOptions, Drain, DrainOptions};
use clap::Args;
use serde::Serialize;
use storage::ByteSize;
use storage::Storage;

use super::CkptOutput;
use super::convert::codec_if;
use super::retain::PolicyArgs;
use crate::ui::job::{CancellableJob, CountedBytes};
use crate::ui::output::checkpoints;
use crate::ui::step_folder::{check_two_folders, holding_steps, not_a_step};

/// Arguments of `feedline ckpt drain`.
#[derive(Debug, Args)]
pub struct DrainArgs {
    /// Folder of steps to copy from.
    #[arg(value_name = "FROM")]
    pub from: String,
    /// Folder to copy to, usually in another store.
    #[arg(value_name = "TO")]
    pub to: String,
    #[command(flatten)]
    policy: PolicyArgs,
    /// Maximum average rate in bytes per second [default: no limit]
    #[arg(long, value_name = "SIZE")]
    pub rate: Option<ByteSize>,
    /// Compress tensors without loss while they are copied. Only feedline reads such files.
    #[arg(long)]
    pub compress: bool,
    /// Print what would be copied; copy nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Print JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

/// The output of `feedline ckpt drain`; `--json` prints it as it is.
#[derive(Debug, Default, Serialize)]
struct Drained {
    /// Steps that are missing in TO; after a drain, those that are still missing.
    pending: Vec<u64>,
    drained: Vec<StepLine>,
    failed: Vec<Failed>,
    /// Steps that retention deleted in TO.
    deleted: Vec<u64>,
    #[serde(skip)]
    lines: Vec<String>,
}

#[derive(Debug, Serialize)]
struct StepLine {
    step: u64,
    bytes: u64,
    resumed_bytes: u64,
    elapsed_s: f64,
    tries: u32,
}

#[derive(Debug, Serialize)]
struct Failed {
    step: u64,
    why: String,
}

pub(crate) fn run(args: &DrainArgs) -> Result<CkptOutput> {
    let bytes_per_s = match args.rate {
        Some(rate) => {
            let rate = NonZeroU64::new(rate.0);
            ensure!(rate.is_some(), "cannot use --rate 0B: expected at least 1 B a second");
            rate
        }
        None => None,
    };
    let options =
        CheckpointOptions { codec: codec_if(args.compress), ..CheckpointOptions::default() };
    let work = CancellableJob::at_signals()?;
    let (from, to) = places(args)?;
    let from = Arc::new(checkpoints(&work.watch(from)));
    let to = Arc::new(checkpoints(&work.watch(to)).with_options(options));
    let retention = args.policy.retention()?;
    let source = Arc::clone(&from);
    let drain = Drain::new(from, to, DrainOptions { bytes_per_s, retention, ..Default::default() });
    let damaged = drain.damaged()?;
    let mut report = Drained { pending: drain.pending()?, ..Drained::default() };
    let failed =
        |(step, why): &(u64, ckpt::Error)| Failed { step: *step, why: storage::one_line(why) };
    if !args.dry_run {
        let bytes = |step: &u64| Some(source.open_step(*step).ok()?.size().1);
        let total = report.pending.iter().map(bytes).sum();
        work.begin(format!("drain {} steps", report.pending.len()), CountedBytes::Written, total);
        let pass = drain.run();
        let is_done = pass.as_ref().is_ok_and(|pass| pass.failed.is_empty());
        // A step whose copy was interrupted has not failed.
        let not_interrupted = if is_done { Ok(()) } else { work.check() };
        let not_interrupted = not_interrupted
            .context("cannot complete the drain (what was copied is kept; the next drain resumes)");
        let pass = work.end(not_interrupted.and_then(|()| Ok(pass?)))?;
        for step in &pass.drained {
            report.lines.push(step.to_string());
            report.drained.push(StepLine {
                step: step.step,
                bytes: step.bytes,
                resumed_bytes: step.resumed_bytes,
                elapsed_s: step.time.as_secs_f64(),
                tries: step.tries,
            });
        }
        report.pending.retain(|step| !pass.drained.iter().any(|done| done.step == *step));
        report.failed = pass.failed.iter().map(failed).collect();
        report.deleted = pass.deleted;
    }
    for step in damaged.iter().map(failed) {
        if !report.failed.iter().any(|known| known.step == step.step) {
            report.failed.push(step);
        }
    }
    CkptOutput::new(args.json, &report, report.text(), report.failed.is_empty())
}

/// The stores of both folders.
fn places(args: &DrainArgs) -> Result<(Arc<dyn Storage>, Arc<dyn Storage>)> {
    let from = holding_steps(&args.from, "drain")?;
    let to = not_a_step(&args.to, "drain into")?;
    check_two_folders(("drain", "into"), &*from, &*to)?;
    Ok((from, to))
}

impl Drained {
    fn text(&self) -> String {
        let list = |steps: &[u64]| steps.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
        let mut text: String = self.lines.iter().map(|line| format!("{line}\n")).collect();
        for failed in &self.failed {
            text += &format!("FAILED  step {}: {}\n", failed.step, failed.why);
        }
        if !self.deleted.is_empty() {
            text += &format!("deleted in the target: {}\n", list(&self.deleted));
        }
        if self.pending.is_empty() {
            // A damaged step cannot be copied, and is not in TO either.
            text + if self.failed.is_empty() { "nothing is pending\n" } else { "" }
        } else {
            text + &format!("pending: {}\n", list(&self.pending))
        }
    }
}
