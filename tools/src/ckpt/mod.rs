//! `feedline ckpt`: the commands for checkpoints, one module per verb.

pub mod bench;
mod bench_workers;
pub mod convert;
pub mod diff;
pub mod doctor;
pub mod drain;
pub mod export;
mod export_config;
mod export_tokenizer;
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

use crate::command::Invocation;
use crate::ui::inspect_target::InspectTarget;
use crate::ui::output::checkpoints;
use crate::ui::terminal::ProgressLine;

/// Subcommands of `feedline ckpt`.
#[derive(Debug, Subcommand)]
pub enum CkptVerb {
    /// List the steps of a folder, and its leftover files.
    ///
    /// Steps that retention deletes while this runs are omitted.
    ///
    /// Exit code 0: listed. 2: the folder does not exist, holds no steps, or cannot be read.
    #[command(after_help = "\
Examples:
  feedline ckpt ls run/ckpt
  feedline ckpt ls s3://bucket/run/ckpt --json")]
    Ls(ls::LsArgs),
    /// Print the contents of a step: groups, tensors, files with their sizes, and blobs.
    ///
    /// Exit code 0: printed. 2: the step cannot be opened.
    #[command(after_help = "\
Examples:
  feedline ckpt inspect run/ckpt
  feedline ckpt inspect run/ckpt/step-000000001000 --name-has embedding")]
    Inspect(inspect::InspectArgs),
    /// Read every byte of a step, or of all steps, and compare it with the recorded checksums.
    ///
    /// Steps that retention deletes while this runs are reported, and do not count as damage.
    ///
    /// Exit code 0: intact. 1: damaged, and the output names the place. 2: not found.
    #[command(after_help = "\
Examples:
  feedline ckpt verify run/ckpt
  feedline ckpt verify run/ckpt/step-000000001000 --quick")]
    Verify(verify::VerifyArgs),
    /// Compare two steps, tensor by tensor and blob by blob.
    ///
    /// Exit code 0: equal. 1: different, and the output names the differences. 2: one of them
    /// cannot be read.
    #[command(after_help = "\
Examples:
  feedline ckpt diff run/ckpt/step-000000001000 run/ckpt/step-000000002000
  feedline ckpt diff run/ckpt s3://bucket/run/ckpt --read")]
    Diff(diff::DiffArgs),
    /// Write the weights of a step as a folder that `transformers` opens.
    ///
    /// config.json has the activation, epsilon, dropout, special tokens and positions of the run. A
    /// network that transformers cannot express is refused. The tokenizer's files are written to
    /// the same folder.
    ///
    /// Tensors are copied through buffers of --memory, so memory use does not grow with the model.
    /// The folder appears under its name when it is complete.
    ///
    /// Exit code 0: written. 2: not written.
    #[command(after_help = "\
Examples:
  feedline ckpt export run/ckpt hf-model
  feedline ckpt export run/ckpt/step-000000001000 hf-model --dtype BF16 --max-shard 10GB
  feedline ckpt export run/ckpt hf-model --tokenizer hf:tokenizer.json")]
    Export(Box<export::ExportArgs>),
    /// Import a checkpoint of Hugging Face, torch, Megatron-LM or DeepSpeed as a step.
    ///
    /// Needs neither Python nor torch. Pickles are parsed as data: no code in them runs. Memory use
    /// does not grow with the model.
    ///
    /// Exit code 0: written. 2: not written.
    #[command(after_help = "\
Examples:
  feedline ckpt import gpt2/ run/ckpt --from hf
  feedline ckpt import megatron/iter_0001000 run/ckpt --from megatron --step 1000
  feedline ckpt import model.pt run/ckpt --from torch --rename rules.txt --extend-vocab 50304")]
    Import(Box<convert::ImportArgs>),
    /// Rewrite a step with complete tensors, in files of another size.
    ///
    /// A step loads into any layout without this. It is for other programs, which expect complete
    /// tensors, and for stores that work better with larger or smaller files.
    ///
    /// Exit code 0: written. 2: not written.
    #[command(after_help = "\
Examples:
  feedline ckpt reshard run/ckpt/step-000000001000 resharded --max-shard 10GB
  feedline ckpt reshard run/ckpt archive --without-optimizer --compress")]
    Reshard(Box<convert::ReshardArgs>),
    /// Delete old steps; the newest complete step is always retained.
    ///
    /// Exit code 0: done. 2: not done, or no step is complete.
    #[command(after_help = "\
Examples:
  feedline ckpt retain run/ckpt --keep-last 5 --keep-every 10000 --dry-run
  feedline ckpt retain run/ckpt --keep-last 5 --keep-every 10000")]
    Retain(retain::RetainArgs),
    /// Copy steps to a second store, and verify each of them while it is copied.
    ///
    /// An interrupted copy is resumed.
    ///
    /// Exit code 0: all steps are copied. 1: a step cannot be copied, for example a damaged one,
    /// and the output says why. 2: a store cannot be read, or FROM holds no step.
    #[command(after_help = "\
Examples:
  feedline ckpt drain /nvme/run/ckpt s3://bucket/run/ckpt
  feedline ckpt drain /nvme/run/ckpt /lustre/run/ckpt --rate 500MB --keep-last 10")]
    Drain(drain::DrainArgs),
    /// Test what a store supports for checkpoints, and classify the files of a folder of steps.
    ///
    /// Exit code 0: the store supports everything that checkpoints need. 1: it lacks something. 2:
    /// it cannot be tested.
    #[command(after_help = "\
Examples:
  feedline ckpt doctor run/ckpt
  feedline ckpt doctor s3://bucket/run/ckpt --json")]
    Doctor(doctor::DoctorArgs),
    /// Verify all steps at a limited rate, next to a run that trains.
    ///
    /// Exit code 0: all are intact. 1: one is damaged. 2: the folder cannot be read.
    #[command(after_help = "\
Examples:
  feedline ckpt scrub run/ckpt --rate 100MiB")]
    Scrub(scrub::ScrubArgs),
    /// Measure how fast a state is saved to a folder and loaded from it, compared with fio.
    ///
    /// The rates of fio are stored in the user's cache folder. Later saves to the same mount report
    /// their own rate as a share of fio's.
    ///
    /// Exit code 0: measured. 2: not measured.
    #[command(after_help = "\
Examples:
  feedline ckpt bench /lustre/scratch --bytes 8GB
  feedline ckpt bench /nvme --rows save,load --rounds 3 --json")]
    Bench(bench::BenchArgs),
}

/// Result of a command, as JSON and as text.
#[derive(Debug)]
pub struct CkptOutput {
    /// Whether to print JSON.
    pub json: bool,
    /// The result as JSON.
    pub value: Value,
    /// The result as text.
    pub text: String,
    /// Whether the check passed.
    pub ok: bool,
}

impl CkptOutput {
    pub(crate) fn new(json: bool, value: &impl Serialize, text: String, ok: bool) -> Result<Self> {
        Ok(CkptOutput { json, value: serde_json::to_value(value)?, text, ok })
    }
}

/// Runs a command.
///
/// # Errors
/// If the command fails. A failed check is a [`CkptOutput`].
pub fn run(
    verb: &CkptVerb,
    invocation: &Invocation,
    line: &mut ProgressLine,
) -> Result<CkptOutput> {
    match verb {
        CkptVerb::Ls(args) => ls::run(args),
        CkptVerb::Inspect(args) => inspect::run(args),
        CkptVerb::Verify(args) => verify::run(args, line),
        CkptVerb::Diff(args) => diff::run(args, line),
        CkptVerb::Export(args) => export::run_export(args, line),
        CkptVerb::Import(args) => convert::run_import(args, line),
        CkptVerb::Reshard(args) => convert::run_reshard(args, line),
        CkptVerb::Drain(args) => drain::run(args),
        CkptVerb::Doctor(args) => doctor::run(args),
        CkptVerb::Retain(args) => retain::run(args),
        CkptVerb::Scrub(args) => scrub::run(args, line),
        CkptVerb::Bench(args) => bench::run(args, invocation, line),
    }
}

/// The step of that name, or of a folder of steps the newest that is complete.
pub(crate) fn open_step(name: &str) -> Result<Checkpoint> {
    open_target(&InspectTarget::find(name)?, name)
}

/// The step that a target names, or of a folder of steps the newest that is complete. `name` is for
/// errors.
///
/// # Errors
/// If it is not a checkpoint, or cannot be opened.
pub fn open_target(target: &InspectTarget, name: &str) -> Result<Checkpoint> {
    match target {
        InspectTarget::Checkpoint { store, step } => Ok(checkpoints(store).open_step(*step)?),
        InspectTarget::Checkpoints { store } => {
            let newest = checkpoints(store).newest()?;
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
