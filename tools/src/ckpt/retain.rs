//! `feedline ckpt retain`: deletes old steps.

use std::num::NonZeroU64;

use anyhow::{Result, bail, ensure};
use ckpt::{Check, Keep, Retention, RetentionPlan};
use clap::Args;
use serde::Serialize;

use super::CkptOutput;
use crate::ui::output::checkpoints;
use crate::ui::step_folder::holding_steps;

/// Arguments of `feedline ckpt retain`.
#[derive(Debug, Args)]
pub struct RetainArgs {
    /// Folder of steps.
    #[arg(value_name = "FOLDER")]
    pub folder: String,
    #[command(flatten)]
    policy: PolicyArgs,
    /// Print what would be deleted; delete nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Print JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

/// Options of the retention policy.
#[derive(Debug, Args)]
pub(crate) struct PolicyArgs {
    /// Number of newest complete steps to retain; at least 1.
    #[arg(long, value_name = "N", default_value_t = 3)]
    keep_last: usize,
    /// Always retain steps whose number is a multiple of N [default: none]
    #[arg(long, value_name = "N")]
    keep_every: Option<NonZeroU64>,
    /// Verify every byte of the newest step before deleting any.
    ///
    /// Without this, a step is read only if no retained step is recorded as verified.
    #[arg(long)]
    verify: bool,
    /// Compare only the lengths of the files with the manifest.
    ///
    /// Faster, but damaged bytes are not detected, and the last intact step may be deleted.
    #[arg(long = "quick", alias = "lengths", conflicts_with = "verify")]
    lengths: bool,
}

impl PolicyArgs {
    pub(crate) fn retention(&self) -> Result<Retention> {
        ensure!(self.keep_last > 0, "cannot use --keep-last 0: expected at least 1");
        let check = match (self.verify, self.lengths) {
            (true, _) => Check::NewestBytesAlways,
            (_, true) => Check::Lengths,
            _ => Check::default(),
        };
        Ok(Retention { keep_last: self.keep_last, keep_every: self.keep_every, check })
    }
}

/// The deleted and the retained steps; `--json` prints them as they are.
#[derive(Debug, Serialize)]
struct Retained {
    deleted: Vec<u64>,
    kept: Vec<KeptStep>,
    /// Damaged steps: not counted, and not deleted.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    damaged: Vec<u64>,
    dry_run: bool,
}

#[derive(Debug, Serialize)]
struct KeptStep {
    step: u64,
    why: String,
}

pub(crate) fn run(args: &RetainArgs) -> Result<CkptOutput> {
    let policy = args.policy.retention()?;
    let checkpoints = checkpoints(&holding_steps(&args.folder, "delete old steps of")?);
    let RetentionPlan { keep, delete } = if args.dry_run {
        checkpoints.plan_retention(&policy, &[])?
    } else {
        checkpoints.retain_by(&policy, &[])?
    };
    let is_known = |step: &u64| delete.contains(step) || keep.iter().any(|(kept, _)| kept == step);
    let mut damaged = checkpoints.list_folder()?.steps().to_vec();
    damaged.retain(|step| !is_known(step));
    let damaged = checkpoints.still_there(&damaged)?;
    if keep.is_empty() {
        bail!(
            "cannot delete old steps of {}: expected a complete step, found {} damaged (hint: \
             feedline ckpt verify reports what is damaged)",
            args.folder,
            damaged.len()
        );
    }
    let kept = |(step, why): (u64, Keep)| KeptStep { step, why: why.to_string() };
    let kept = keep.into_iter().map(kept).collect();
    let retained = Retained { deleted: delete, kept, damaged, dry_run: args.dry_run };
    CkptOutput::new(args.json, &retained, retained.text(), true)
}

impl Retained {
    fn text(&self) -> String {
        let list = |steps: &[u64]| steps.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
        let steps = if self.deleted.is_empty() { "none".to_owned() } else { list(&self.deleted) };
        let verb = if self.dry_run { "would delete" } else { "deleted" };
        let kept = self.kept.iter().map(|kept| format!("  {}: {}\n", kept.step, kept.why));
        let mut text = format!("{verb} {steps}\nkept\n{}", kept.collect::<String>());
        if !self.damaged.is_empty() {
            text += &format!("damaged, not counted and not touched: {}\n", list(&self.damaged));
        }
        text
    }
}
