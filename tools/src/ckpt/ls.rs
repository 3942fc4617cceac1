//! `feedline ckpt ls`: lists the steps of a folder.

use std::sync::Arc;

use anyhow::Result;
use ckpt::{Checkpoint, Checkpoints};
use clap::Args;
use serde::Serialize;
use storage::{ByteSize, Key, Storage};

use super::CkptOutput;
use super::leftovers::{Leftover, leftovers};
use crate::ui::output::{checkpoints, steps_named};
use crate::ui::step_folder::existing;
use crate::ui::terminal::{table, thousands};

/// Arguments of `feedline ckpt ls`.
#[derive(Debug, Args)]
pub struct LsArgs {
    /// Folder of steps.
    #[arg(value_name = "FOLDER")]
    pub folder: String,
    /// Print JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

/// A folder of steps; `--json` prints it as it is.
#[derive(Debug, Serialize)]
pub struct Listed {
    folder: String,
    /// The step that a run would resume from.
    newest: Option<u64>,
    steps: Vec<StepLine>,
    leftovers: Vec<Leftover>,
}

#[derive(Debug, Serialize)]
struct StepLine {
    step: u64,
    bytes: Option<u64>,
    files: Option<usize>,
    tensors: Option<usize>,
    samples_consumed: Option<u64>,
    /// Whether all its bytes have been verified.
    verified: bool,
    /// Its fault; `None` if manifest and files agree.
    fault: Option<String>,
}

pub(crate) fn run(args: &LsArgs) -> Result<CkptOutput> {
    let listed = list(&existing(&args.folder, "list")?)?;
    CkptOutput::new(args.json, &listed, listed.text(), true)
}

/// Lists the steps directly below the root of a store. The folder is listed once, and of each step
/// its manifest is read.
///
/// # Errors
/// Errors of the store. The fault of a step is in its line.
pub fn list(store: &Arc<dyn Storage>) -> Result<Listed> {
    let checkpoints = checkpoints(store);
    let there = checkpoints.list_folder()?;
    let (mut steps, mut faults) = (Vec::new(), Vec::new());
    for &step in there.steps() {
        match checkpoints.open_listed(&there, step) {
            Ok(open) => steps.push(StepLine::complete(&open, there.is_verified(&open))),
            Err(error) => faults.push((step, error)),
        }
    }
    let newest = steps.last().map(|line| line.step);
    let faults = faults_now(&checkpoints, store, faults)?;
    steps.extend(faults.into_iter().map(|(step, fault)| StepLine::faulty(step, fault)));
    steps.sort_by_key(|line| line.step);
    let folder = store.display(&Key::root());
    Ok(Listed { folder, newest, steps, leftovers: leftovers(&**store)? })
}

/// The faults of steps that could not be opened, as text. Steps that were deleted after they were
/// listed are omitted: that is no fault.
pub(crate) fn faults_now(
    checkpoints: &Checkpoints,
    store: &Arc<dyn Storage>,
    mut faults: Vec<(u64, ckpt::Error)>,
) -> Result<Vec<(u64, String)>> {
    if faults.is_empty() {
        return Ok(Vec::new());
    }
    let named = steps_named(&**store)?;
    faults.retain(|(step, _)| named.binary_search(step).is_ok());
    let steps: Vec<u64> = faults.iter().map(|(step, _)| *step).collect();
    let damaged = checkpoints.still_there(&steps)?;
    let text = |(step, error): (u64, ckpt::Error)| match error {
        error if damaged.contains(&step) => (step, error.to_string()),
        error @ ckpt::Error::Uncommitted { .. } => (step, error.to_string()),
        _ => (step, "being deleted".to_owned()),
    };
    Ok(faults.into_iter().map(text).collect())
}

impl Listed {
    fn text(&self) -> String {
        let mut text = format!("checkpoints in {}\n", self.folder);
        let rows: Vec<_> = self.steps.iter().map(StepLine::row).collect();
        if rows.is_empty() {
            text += "  no step\n";
        } else {
            text += &table(&["step", "size", "files", "tensors", "samples", "state"], &rows);
        }
        for left in &self.leftovers {
            text += &format!("  {} ({}): {}\n", left.name, ByteSize(left.bytes), left.meaning);
        }
        text
    }
}

impl StepLine {
    fn complete(open: &Checkpoint, verified: bool) -> Self {
        let (files, bytes) = open.size();
        StepLine {
            step: open.step(),
            bytes: Some(bytes),
            files: Some(files),
            tensors: Some(open.tensors().len()),
            samples_consumed: open.meta()["samples_consumed"].as_u64(),
            verified,
            fault: None,
        }
    }

    fn faulty(step: u64, fault: String) -> Self {
        StepLine {
            step,
            bytes: None,
            files: None,
            tensors: None,
            samples_consumed: None,
            verified: false,
            fault: Some(fault),
        }
    }

    fn row(&self) -> Vec<String> {
        let count = |n: Option<u64>| n.map_or_else(|| "-".to_owned(), thousands);
        vec![
            self.step.to_string(),
            self.bytes.map_or_else(|| "-".to_owned(), |bytes| ByteSize(bytes).to_string()),
            count(self.files.map(|n| n as u64)),
            count(self.tensors.map(|n| n as u64)),
            count(self.samples_consumed),
            self.fault.clone().unwrap_or_else(|| {
                if self.verified { "complete, verified" } else { "complete" }.to_owned()
            }),
        ]
    }
}
