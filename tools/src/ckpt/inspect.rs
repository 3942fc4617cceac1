//! `feedline ckpt inspect`: prints the contents of a step.

use anyhow::Result;
use ckpt::TensorEntry;
use clap::Args;
use serde::Serialize;
use storage::ByteSize;

use super::{CkptOutput, open_step};
use crate::data::inspect::{StepSummary, step_of};
use crate::ui::terminal::table;

/// Arguments of `feedline ckpt inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// A step-* folder, or a folder of steps for the newest complete one.
    #[arg(value_name = "CKPT")]
    pub name: String,
    /// List every tensor; --json always does.
    #[arg(long)]
    pub tensors: bool,
    /// List only tensors whose name contains TEXT.
    #[arg(long, value_name = "TEXT")]
    pub name_has: Option<String>,
    /// Print JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

/// A step and its tensors; `--json` prints it as it is.
#[derive(Debug, Serialize)]
struct Inspected {
    #[serde(flatten)]
    step: StepSummary,
    tensors: Vec<TensorLine>,
}

#[derive(Debug, Serialize)]
struct TensorLine {
    group: &'static str,
    name: String,
    dtype: &'static str,
    shape: Vec<u64>,
    bytes: u64,
    /// Bytes that the tensor takes in the files.
    stored_bytes: u64,
    /// Number of chunks.
    chunks: usize,
    /// Files that hold the chunks.
    files: Vec<String>,
}

pub(crate) fn run(args: &InspectArgs) -> Result<CkptOutput> {
    let open = open_step(&args.name)?;
    let is_wanted = |tensor: &&TensorEntry| {
        args.name_has.as_ref().is_none_or(|text| tensor.name.contains(text.as_str()))
    };
    let tensors = open.tensors().iter().filter(is_wanted).map(TensorLine::new).collect();
    let found = Inspected { step: step_of(&open), tensors };
    let mut text = found.step.text();
    if args.tensors || args.name_has.is_some() {
        let rows: Vec<_> = found.tensors.iter().map(TensorLine::row).collect();
        text += "\n";
        text += &table(&["tensor", "group", "type", "shape", "size", "chunks"], &rows);
    }
    CkptOutput::new(args.json, &found, text, true)
}

impl TensorLine {
    fn new(tensor: &TensorEntry) -> Self {
        let mut files: Vec<String> = tensor.chunks.iter().map(|chunk| chunk.file.clone()).collect();
        files.dedup();
        TensorLine {
            group: tensor.group.name(),
            name: tensor.name.clone(),
            dtype: tensor.dtype.name(),
            shape: tensor.shape.clone(),
            bytes: tensor.bytes(),
            stored_bytes: tensor.chunks.iter().map(ckpt::Chunk::stored_bytes).sum(),
            chunks: tensor.chunks.len(),
            files,
        }
    }

    fn row(&self) -> Vec<String> {
        vec![
            self.name.clone(),
            self.group.to_owned(),
            self.dtype.to_owned(),
            format!("{:?}", self.shape),
            ByteSize(self.bytes).to_string(),
            self.chunks.to_string(),
        ]
    }
}
