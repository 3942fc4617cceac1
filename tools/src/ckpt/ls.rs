//! `feedline ckpt ls`: the steps of a folder.

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use storage::{ByteSize, Key};

use super::leftovers::{Leftover, leftovers};
use super::{CkptOutput, open_folder};
use crate::ui::output::steps_named;
use crate::ui::terminal::{table, thousands};

/// Which folder.
#[derive(Debug, Args)]
pub struct LsArgs {
    /// The folder that holds the steps.
    #[arg(value_name = "FOLDER")]
    pub folder: String,
    /// Prints JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

/// A folder of steps; `--json` prints it as it is.
#[derive(Debug, Serialize)]
struct Listed {
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
    /// Whether somebody has read it whole and found it good.
    verified: bool,
    /// What is wrong with it; `None` if manifest and files agree.
    fault: Option<String>,
}

pub(crate) fn run(args: &LsArgs) -> Result<CkptOutput> {
    let store = storage::open_url(&args.folder)?;
    let checkpoints = open_folder(&args.folder)?;
    let line = |step| match checkpoints.open_step(step) {
        Ok(open) => {
            let (files, bytes) = open.size();
            StepLine {
                step,
                bytes: Some(bytes),
                files: Some(files),
                tensors: Some(open.tensors().len()),
                samples_consumed: open.meta()["samples_consumed"].as_u64(),
                verified: checkpoints.is_verified(&open).unwrap_or(false),
                fault: None,
            }
        }
        Err(error) => StepLine {
            step,
            bytes: None,
            files: None,
            tensors: None,
            samples_consumed: None,
            verified: false,
            fault: Some(error.to_string()),
        },
    };
    let steps: Vec<StepLine> = steps_named(&*store)?.into_iter().map(line).collect();
    let newest = steps.iter().rev().find(|line| line.fault.is_none()).map(|line| line.step);
    let folder = store.display(&Key::root());
    let listed = Listed { folder, newest, steps, leftovers: leftovers(&*store)? };
    CkptOutput::new(args.json, &listed, listed.text(), true)
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
