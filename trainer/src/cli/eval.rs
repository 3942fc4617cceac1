use std::io::{self, Write as _};
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand, ValueEnum};
use indexed::{IndexedDataset, Split};
use serde::Serialize;
use serde_json::Value;
use trainer::eval::{self, CorpusTask, EvalOptions};
use trainer::generate::Trained;

use super::{ProgressPrinter, TrainedArgs, read_text};

#[derive(Debug, Args)]
pub(crate) struct EvalArgs {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Perplexity of a WikiText file, per token and, adjusted, per word.
    Wikitext {
        /// The file, as it was published: `wiki.test.tokens`.
        file: String,
        #[command(flatten)]
        how: EvalSettings,
        /// Tokens from one window to the next, Megatron's --overlapping-eval: fewer give every
        /// token a longer past, and take longer. Default: the model's length.
        #[arg(long, value_name = "N")]
        stride: Option<u64>,
    },
    /// How often the last word of a passage is guessed, and its last token.
    Lambada {
        /// Lines of JSON, each with a passage under `text`.
        file: String,
        #[command(flatten)]
        how: EvalSettings,
    },
    /// Perplexity of a split of a corpus, per token.
    Corpus {
        /// Prefix of its .bin and .idx. Default: the run's own first corpus.
        prefix: Option<String>,
        #[command(flatten)]
        how: EvalSettings,
        /// Which part.
        #[arg(long, value_enum, default_value = "valid")]
        part: SplitArg,
        /// Shares of training, validation and test. Default: the run's own.
        #[arg(long, value_name = "A,B,C")]
        split: Option<String>,
        /// Tokens at most. Default: all.
        #[arg(long, value_name = "N")]
        tokens: Option<u64>,
        /// Tokens from one window to the next. Default: the model's length.
        #[arg(long, value_name = "N")]
        stride: Option<u64>,
    },
}

#[derive(Debug, Args)]
struct EvalSettings {
    #[command(flatten)]
    trained: TrainedArgs,
    /// Windows in one pass.
    #[arg(long, default_value_t = 8, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    batch: u16,
    /// Prints JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum SplitArg {
    Train,
    Valid,
    Test,
}

pub(crate) fn eval(args: &EvalArgs) -> Result<ExitCode> {
    let mut pace = ProgressPrinter::new();
    match &args.task {
        Task::Wikitext { file, how, stride } => {
            let (trained, options) = how.open(*stride)?;
            let tokenizer = how.trained.tokenizer(&trained)?;
            let text = read_text(file)?;
            let tell = &mut |done, total| {
                pace.tell(done, total, "tokens");
                Ok(())
            };
            let report = eval::wikitext(&trained, &*tokenizer, &text, options, tell)?;
            how.print("wikitext", &trained, &report)
        }
        Task::Lambada { file, how } => {
            let (trained, options) = how.open(None)?;
            let tokenizer = how.trained.tokenizer(&trained)?;
            let lines = read_text(file)?;
            let tell = &mut |done, total| {
                pace.tell(done, total, "passages");
                Ok(())
            };
            let report = eval::lambada(&trained, &*tokenizer, &lines, options, tell)?;
            how.print("lambada", &trained, &report)
        }
        Task::Corpus { prefix, how, part, split, tokens, stride } => {
            let (trained, options) = how.open(*stride)?;
            let config = trained.config();
            let (store, prefix) = storage::locate(prefix.as_deref().unwrap_or(config.corpus()))?;
            let corpus = IndexedDataset::open(&store, &prefix)?;
            let which = match part {
                SplitArg::Train => Split::Train,
                SplitArg::Valid => Split::Valid,
                SplitArg::Test => Split::Test,
            };
            let split = split.clone().unwrap_or_else(|| config.data.split.0.clone());
            let task = CorpusTask { split, which, tokens_max: *tokens };
            let tell = &mut |done, total| {
                pace.tell(done, total, "tokens");
                Ok(())
            };
            let report = eval::corpus(&trained, &corpus, &task, options, tell)?;
            how.print("corpus", &trained, &report)
        }
    }
}

impl EvalSettings {
    fn open(&self, stride: Option<u64>) -> Result<(Trained, EvalOptions)> {
        Ok((self.trained.open()?, EvalOptions { batch: usize::from(self.batch), stride }))
    }

    /// The fields of a report, a line each.
    fn print(&self, task: &str, trained: &Trained, report: &impl Serialize) -> Result<ExitCode> {
        let mut all = serde_json::json!({ "task": task, "step": trained.step() });
        if let (Value::Object(all), Value::Object(report)) =
            (&mut all, serde_json::to_value(report)?)
        {
            all.extend(report);
        }
        let mut out = io::stdout().lock();
        if self.json {
            writeln!(out, "{}", serde_json::to_string_pretty(&all)?)?;
            return Ok(ExitCode::SUCCESS);
        }
        for (name, value) in all.as_object().into_iter().flatten() {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            writeln!(out, "{:<30} {text}", name.replace('_', " "))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
