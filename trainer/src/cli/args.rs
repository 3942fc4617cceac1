use std::ffi::OsString;

use clap::{Args, Parser, Subcommand};

use crate::cli::{EvalArgs, GenerateArgs, ImportArgs, ReportArgs, SweepArgs};

/// Trains GPT on token files, plans such a run, and writes text with what it has learned.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Trains. Goes on from the newest complete checkpoint of the run, if there is one.
    ///
    /// SIGTERM, SIGINT or SIGUSR1: finishes the step, saves what fits into checkpoint.grace, and
    /// exits with 75; a second one ends at once.
    /// One of the processes that torchrun, srun or `trainer launch` start is a rank of the run.
    ///
    /// Exit 0: all steps done. 75: stopped and saved, start it again. 2: could not. 3: another rank
    /// is lost or failed; start all of them again. 4: done and saved, but a save on the way, or a
    /// copy to the second store, had failed.
    Train(TrainArgs),
    /// Writes text from a checkpoint.
    Generate(GenerateArgs),
    /// Measures a checkpoint: WikiText, LAMBADA, or a corpus.
    Eval(EvalArgs),
    /// Writes a page about runs: loss, speed, stalls, layout, as one HTML file.
    Report(ReportArgs),
    /// Trains at rising rates in a folder of its own, and tells at which the loss falls.
    LrSweep(SweepArgs),
    /// Tells what a run will take: parameters, memory, steps, disk, time.
    ///
    /// Exit 0: it can run. 1: it cannot, and the plan says why. 2: the config cannot be read.
    Plan(PlanArgs),
    /// Prints a run of another system as a config of ours, with the fate of every key.
    ///
    /// Exit 0: every key was followed. 1: some were not, or a key of ours is missing; the output
    /// says which. 2: a file cannot be read.
    ImportConfig(ImportArgs),
    /// Starts the ranks of a run on this machine, as in `trainer launch -n 8 -- train run.toml`.
    ///
    /// What they print has their number before it. SIGTERM or SIGINT: asks all of them to stop; a
    /// second one ends them. When one fails, the others are ended too. Exits with the worst code of
    /// a rank; who was killed counts as 3.
    Launch(LaunchArgs),
    /// Saves in a trainer's stead, which starts it.
    #[command(hide = true)]
    CkptAgent,
}

#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    /// The run, as a TOML file.
    pub(crate) config: String,
    /// Sets a key over the file, as `--set optim.lr.peak=1e-3`. May be given often.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(crate) sets: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
}

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// Prints JSON, with units in the keys.
    #[arg(long)]
    pub(crate) json: bool,
    /// Ranks that it is to run on. Default: as few as parallel.tp and parallel.pp ask for.
    #[arg(long, value_name = "N")]
    pub(crate) world: Option<u64>,
    /// Speed of training of all ranks, for the time that the run takes, as `log.jsonl` of a run
    /// like it has it.
    #[arg(long, value_name = "N")]
    pub(crate) tokens_per_s: Option<f64>,
    /// Speed of one rank's large matrix products, in 10^12 operations a second, as 989 of an H100
    /// in bf16: for the efficiency, or without --tokens-per-s for the time at best.
    #[arg(long, value_name = "N")]
    pub(crate) tflop_per_s: Option<f64>,
    /// What the disks of one rank read and write together in a second, as 3GB, for optim.offload
    /// and parallel.activation_offload on disks; `feedline offload bench` measures both.
    #[arg(long, value_name = "SIZE")]
    pub(crate) disk_per_s: Option<storage::ByteSize>,
    /// Memory of one rank, as 80GiB: exit 1 if the run needs more. Without it, a run that needs
    /// more than this machine has gets a warning.
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<storage::ByteSize>,
    /// Plans without the corpus and the tokenizer, which may be made later. Else a run without them
    /// cannot start: exit 1.
    #[arg(long)]
    pub(crate) no_data: bool,
}

#[derive(Debug, Args)]
pub(crate) struct LaunchArgs {
    /// How many ranks.
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) ranks: u16,
    /// What each of them does: a verb of this command and its arguments.
    #[arg(last = true, required = true, value_name = "ARGS")]
    pub(crate) command: Vec<OsString>,
}
