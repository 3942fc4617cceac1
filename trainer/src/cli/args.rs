use std::ffi::OsString;

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use log::LevelFilter;
use storage::StderrLog;

use crate::cli::{EvalTask, GenerateArgs, ImportArgs, ReportArgs, SweepArgs};

/// Train GPT, T5 and BERT on token files, plan such runs, and use the trained models.
///
/// Sizes are written as `64MiB` or `3GB`. A file or folder may be a path or a URL such as
/// `s3://bucket/key`.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) verb: Verb,

    /// Write log lines of this severity and above to standard error: off, error, warn, info or
    /// debug. Ranks other than the first write warnings at most
    #[arg(
        long,
        global = true,
        value_name = "LEVEL",
        default_value = "info",
        value_parser = StderrLog::level
    )]
    pub(crate) log: LevelFilter,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Train a model; resume from the newest complete checkpoint of the run, if there is one.
    ///
    /// A process that torchrun, srun or `trainer launch` starts is a rank of the run. After
    /// SIGTERM, SIGINT or SIGUSR1 the run finishes its step, saves a checkpoint if checkpoint.grace
    /// suffices, and exits with 75. A second signal ends it at once.
    ///
    /// Exit code 0: all steps done. 2: failed. 3: another rank is lost or failed, start all ranks
    /// again. 4: done and saved, but an earlier save or a copy to the second store failed. 75:
    /// stopped and saved, start the same command again.
    #[command(after_help = include_str!("examples/train.txt"))]
    Train(TrainArgs),
    /// Generate text with a checkpoint.
    #[command(after_help = include_str!("examples/generate.txt"))]
    Generate(GenerateArgs),
    /// Measure a checkpoint with WikiText, LAMBADA or a corpus.
    #[command(subcommand)]
    Eval(EvalTask),
    /// Write an HTML page about one run or several: loss, speed, stalls and layout.
    #[command(after_help = include_str!("examples/report.txt"))]
    Report(ReportArgs),
    /// Train at rising learning rates, and report at which rates the loss falls.
    ///
    /// The sweep has its own folder in the folder of the run, and saves no checkpoints.
    #[command(after_help = include_str!("examples/lr-sweep.txt"))]
    LrSweep(SweepArgs),
    /// Print what a run needs: parameters, memory, steps, disk space and time.
    ///
    /// Exit code 0: the run can start. 1: it cannot, and the plan says why. 2: the config cannot be
    /// read.
    #[command(after_help = include_str!("examples/plan.txt"))]
    Plan(PlanArgs),
    /// Convert the configuration of another system to a config, with the status of every key.
    ///
    /// Exit code 0: every key was converted. 1: some were not, or a required key is missing, and
    /// the output names them. 2: a file cannot be read.
    #[command(after_help = include_str!("examples/import-config.txt"))]
    ImportConfig(ImportArgs),
    /// Start several ranks of a run on this machine.
    ///
    /// Each line that a rank prints starts with its number. SIGTERM or SIGINT stops all ranks; a
    /// second one kills them. When one rank fails, the others are stopped too. The exit code is the
    /// worst of all ranks; a killed rank counts as 3.
    #[command(after_help = include_str!("examples/launch.txt"))]
    Launch(LaunchArgs),
    /// Print a completion script for SHELL: bash, zsh, fish, elvish or powershell.
    #[command(after_help = include_str!("examples/completions.txt"))]
    Completions { shell: Shell },
    /// Save checkpoints for a trainer, which starts this process.
    #[command(hide = true)]
    CkptAgent,
}

#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    /// Config of the run, a TOML file.
    pub(crate) config: String,
    /// Override a key of the config, as `--set optim.lr.peak=1e-3`. May be given several times.
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
    /// Print JSON, with units in the keys.
    #[arg(long)]
    pub(crate) json: bool,
    /// Plan without the corpus and the tokenizer.
    ///
    /// Without this, a run whose corpus or tokenizer does not exist cannot start: exit code 1.
    #[arg(long)]
    pub(crate) no_data: bool,
    /// Number of ranks [default: the fewest that parallel.tp and parallel.pp allow]
    #[arg(long = "ranks", alias = "world", value_name = "N", help_heading = "Cluster")]
    pub(crate) world: Option<u64>,
    /// Memory of one rank: exit code 1 if the run needs more.
    ///
    /// It is compared with the total of the plan. On a GPU the total also has the rows in host
    /// memory, and not the context of CUDA and the buffers of NCCL. Without this option, a run that
    /// needs more memory than this machine has gets a warning.
    #[arg(long, value_name = "SIZE", help_heading = "Cluster")]
    pub(crate) memory: Option<storage::ByteSize>,
    /// Training speed of all ranks in tokens per second, to estimate the time of the run.
    ///
    /// `log.jsonl` of a similar run contains it.
    #[arg(long, value_name = "N", help_heading = "Cluster")]
    pub(crate) tokens_per_s: Option<f64>,
    /// Speed of large matrix products on one rank, in 10^12 operations per second.
    ///
    /// For an H100 in bf16 it is 989. With --tokens-per-s, the plan prints the efficiency; without
    /// it, the shortest possible time.
    #[arg(long, value_name = "N", help_heading = "Cluster")]
    pub(crate) tflop_per_s: Option<f64>,
    /// Bytes per second that the disks of one rank read and write together, such as 3GB.
    ///
    /// Used for optim.offload and parallel.activation_offload on disks. `feedline offload bench`
    /// measures it.
    #[arg(long, value_name = "SIZE", help_heading = "Cluster")]
    pub(crate) disk_per_s: Option<storage::ByteSize>,
}

#[derive(Debug, Args)]
pub(crate) struct LaunchArgs {
    /// Number of ranks.
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) ranks: u16,
    /// Command of each rank, without the name of this program: `train run.toml`.
    #[arg(last = true, required = true, value_name = "ARGS")]
    pub(crate) command: Vec<OsString>,
}
