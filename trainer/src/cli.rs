use clap::{Args, Parser, Subcommand};

use crate::cmd::{EvalArgs, GenerateArgs, ReportArgs};

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
    /// SIGTERM or SIGINT: finishes the step, saves, and exits with 75; a second one ends at once.
    /// Exit 0: all steps done. 75: stopped and saved, start it again. 2: could not.
    Train(TrainArgs),
    /// Writes text from a checkpoint.
    Generate(GenerateArgs),
    /// Measures a checkpoint: WikiText, LAMBADA, or a corpus.
    Eval(EvalArgs),
    /// Writes a page about runs: loss, speed, stalls, layout, as one HTML file.
    Report(ReportArgs),
    /// Tells what a run will take: parameters, memory, steps, disk, time.
    ///
    /// Exit 0: it can run. 1: it cannot, and the plan says why. 2: the config cannot be read.
    Plan(PlanArgs),
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
    /// Speed of training, for the time that the run takes, as `log.jsonl` of a run like it has it.
    #[arg(long, value_name = "N")]
    pub(crate) tokens_per_s: Option<f64>,
}
