use clap::{Args, Parser, Subcommand};

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

#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    /// Folder of a run, of its checkpoints, or of one step.
    #[arg(long, value_name = "FOLDER")]
    pub(crate) ckpt: String,
    /// The text to go on from. Empty: the start of a document.
    #[arg(long, default_value = "")]
    pub(crate) prompt: String,
    /// Tokens to write at most; the end of a document ends it sooner.
    #[arg(long, default_value_t = 100, value_name = "N")]
    pub(crate) tokens: usize,
    /// 0 takes the likeliest token always, 1 the model's own probabilities; more is wilder.
    #[arg(long, default_value_t = 0.8, value_name = "T", value_parser = temperature)]
    pub(crate) temperature: f64,
    /// Chooses among this many of the likeliest tokens; 0 among all.
    #[arg(long, default_value_t = 50, value_name = "N")]
    pub(crate) top_k: usize,
    /// Chooses among the likeliest tokens that together have this probability.
    #[arg(long, default_value_t = 1.0, value_name = "P", value_parser = probability)]
    pub(crate) top_p: f64,
    /// The same seed gives the same text.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub(crate) seed: u64,
    /// Tokenizer. Default: the one in the run's config.
    #[arg(long, value_name = "NAME")]
    pub(crate) tokenizer: Option<String>,
}

fn temperature(text: &str) -> Result<f64, String> {
    number(text, 0.0..=100.0)
}

fn probability(text: &str) -> Result<f64, String> {
    number(text, 0.0..=1.0)
}

fn number(text: &str, range: std::ops::RangeInclusive<f64>) -> Result<f64, String> {
    let due = || format!("due a number from {} to {}", range.start(), range.end());
    text.parse().ok().filter(|number| range.contains(number)).ok_or_else(due)
}
