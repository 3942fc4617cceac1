//! `feedline ckpt`: all there is to do with checkpoints, a module per verb.

pub mod bench;
mod bench_workers;
pub mod convert;
pub mod diff;
pub mod doctor;
pub mod drain;
mod export_config;
pub mod inspect;
pub mod leftovers;
pub mod ls;
pub mod retain;
pub mod scrub;
pub mod verify;

use anyhow::{Context as _, Result};
use ckpt::Checkpoint;
use clap::Subcommand;
use serde::Serialize;
use serde_json::Value;

use crate::ui::inspect_target::InspectTarget;
use crate::ui::output::checkpoints;
use crate::ui::terminal::ProgressLine;

/// What can be done.
#[derive(Debug, Subcommand)]
pub enum CkptVerb {
    /// Lists the steps of a folder and what else lies there.
    ///
    /// Steps that retention deletes meanwhile are left out. Exit 0: listed. 2: the folder is
    /// absent, is not one that holds steps, or cannot be read.
    Ls(ls::LsArgs),
    /// Tells what is in a step: groups, tensors, where their bytes are, blobs.
    ///
    /// Exit 0: told. 2: it cannot be opened.
    Inspect(inspect::InspectArgs),
    /// Reads every byte of a step, or of all steps, and compares it with every checksum and rule.
    ///
    /// Steps that retention deletes meanwhile are reported and are not damage. Exit 0: whole. 1:
    /// damaged, and the output says where. 2: it cannot be found.
    Verify(verify::VerifyArgs),
    /// Compares two steps tensor by tensor and blob by blob.
    ///
    /// Exit 0: the same. 1: they differ, and the output says where. 2: one cannot be read.
    Diff(diff::DiffArgs),
    /// Writes the weights of a step as a folder that `transformers` opens.
    ///
    /// Each tensor passes through bounded buffers, so memory does not grow with the model. The
    /// folder appears when it is whole. Exit 0: written. 2: it could not be.
    Export(Box<convert::ExportArgs>),
    /// Writes another program's checkpoint as a step: of Hugging Face, Megatron-LM, DeepSpeed, or
    /// torch.
    ///
    /// Needs neither Python nor torch, and executes nothing: pickles are read as data, and tensors
    /// from where they lie. Memory does not grow with the model. Exit 0: written. 2: it could not
    /// be.
    Import(Box<convert::ImportArgs>),
    /// Writes a step anew with whole tensors in files of another size.
    ///
    /// A step can be loaded into any layout as it is; this is for other tools, which want whole
    /// tensors, and for stores that want larger or smaller files. Exit 0: written. 2: it could not
    /// be.
    Reshard(Box<convert::ReshardArgs>),
    /// Deletes old steps, never the newest.
    ///
    /// Exit 0: done. 2: it could not be, or no step is complete.
    Retain(retain::RetainArgs),
    /// Copies steps from a fast store to a lasting one, each checked on its way.
    ///
    /// An interrupted drain is resumed. Exit 0: all are there. 1: a step could not be copied, such
    /// as a damaged one, and the output says why. 2: a store cannot be read, or FROM holds no step.
    Drain(drain::DrainArgs),
    /// Tells what a store offers to checkpoints, and what each thing in a folder of them is.
    ///
    /// Exit 0: all that checkpoints rely on is there. 1: something is not. 2: it cannot be told.
    Doctor(doctor::DoctorArgs),
    /// Verifies all steps at a bounded rate, beside a run that trains.
    ///
    /// Exit 0: all are whole. 1: one is damaged. 2: the folder cannot be read.
    Scrub(scrub::ScrubArgs),
    /// Measures how quickly a state is saved into a folder and loaded from it, beside fio.
    ///
    /// What fio wrote and read is kept in the user's cache folder: saves to the same mount then say
    /// which share of it they reached. Exit 0: measured. 2: it could not be.
    Bench(bench::BenchArgs),
}

/// What a verb found: the same for a program and for a person.
#[derive(Debug)]
pub struct CkptOutput {
    /// Whether to print JSON.
    pub json: bool,
    /// For a program.
    pub value: Value,
    /// For a person.
    pub text: String,
    /// Whether the answer to what was checked is yes.
    pub ok: bool,
}

impl CkptOutput {
    pub(crate) fn new(json: bool, value: &impl Serialize, text: String, ok: bool) -> Result<Self> {
        Ok(CkptOutput { json, value: serde_json::to_value(value)?, text, ok })
    }
}

/// Does what is asked.
///
/// # Errors
/// If it cannot be done; that what was checked is not so is a [`CkptOutput`].
pub fn run(verb: &CkptVerb, line: &mut ProgressLine) -> Result<CkptOutput> {
    match verb {
        CkptVerb::Ls(args) => ls::run(args),
        CkptVerb::Inspect(args) => inspect::run(args),
        CkptVerb::Verify(args) => verify::run(args, line),
        CkptVerb::Diff(args) => diff::run(args, line),
        CkptVerb::Export(args) => convert::run_export(args, line),
        CkptVerb::Import(args) => convert::run_import(args, line),
        CkptVerb::Reshard(args) => convert::run_reshard(args, line),
        CkptVerb::Drain(args) => drain::run(args),
        CkptVerb::Doctor(args) => doctor::run(args),
        CkptVerb::Retain(args) => retain::run(args),
        CkptVerb::Scrub(args) => scrub::run(args, line),
        CkptVerb::Bench(args) => bench::run(args, line),
    }
}

/// The step of that name, or of a folder of steps the newest that is complete.
pub(crate) fn open_step(name: &str) -> Result<Checkpoint> {
    match InspectTarget::find(name)? {
        InspectTarget::Checkpoint { store, step } => Ok(checkpoints(&store).open_step(step)?),
        InspectTarget::Checkpoints { store } => {
            let newest = checkpoints(&store).newest()?;
            newest.with_context(|| {
                format!("cannot open {name}: expected a complete step, found none")
            })
        }
        InspectTarget::Tokens { .. } | InspectTarget::Foreign { .. } => {
            anyhow::bail!(
                "cannot open {name}: expected a step (step-*) or a folder that holds steps, found \
                 token files"
            )
        }
    }
}
