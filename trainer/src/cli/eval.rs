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

#[derive(Debug, Subcommand)]
pub(crate) enum EvalTask {
    /// Compute the perplexity of a WikiText file per token and, adjusted, per word.
    #[command(after_help = include_str!("examples/wikitext.txt"))]
    Wikitext {
        /// The WikiText file as published, wiki.test.tokens.
        file: String,
        /// Tokens between the starts of two windows [default: the sequence length of the model]
        ///
        /// As Megatron's --overlapping-eval: with fewer, every token has a longer context and the
        /// evaluation takes longer.
        #[arg(long, value_name = "N")]
        stride: Option<u64>,
        #[command(flatten)]
        how: EvalSettings,
    },
    /// Measure how often the last word of a passage, and its last token, is predicted.
    #[command(after_help = include_str!("examples/lambada.txt"))]
    Lambada {
        /// JSON lines, each with a passage under `text`.
        file: String,
        #[command(flatten)]
        how: EvalSettings,
    },
    /// Compute the perplexity of a part of a corpus per token.
    #[command(after_help = include_str!("examples/corpus.txt"))]
    Corpus {
        /// Prefix of the .bin and .idx of the corpus [default: the first corpus of the run]
        prefix: Option<String>,
        /// Part to measure.
        #[arg(long, value_enum, default_value = "valid")]
        part: SplitArg,
        /// Shares of training, validation and test [default: those of the run]
        #[arg(long, value_name = "SHARES")]
        split: Option<String>,
        /// Maximum number of tokens [default: all]
        #[arg(long, value_name = "N")]
        tokens: Option<u64>,
        /// Tokens between the starts of two windows [default: the sequence length of the model]
        #[arg(long, value_name = "N")]
        stride: Option<u64>,
        #[command(flatten)]
        how: EvalSettings,
    },
}

#[derive(Debug, Args)]
pub(crate) struct EvalSettings {
    /// Windows per forward pass. More are faster and need more memory.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..))]
    batch: u16,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten, next_help_heading = "Model")]
    trained: TrainedArgs,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum SplitArg {
    Train,
    Valid,
    Test,
}

pub(crate) fn eval(task: &EvalTask) -> Result<ExitCode> {
    let mut printer = ProgressPrinter::new();
    match task {
        EvalTask::Wikitext { file, how, stride } => {
            let (trained, options) = how.open(*stride)?;
            let tokenizer = how.trained.tokenizer(&trained)?;
            let text = read_text(file)?;
            let progress = &mut printer.callback("tokens");
            let report = eval::wikitext(&trained, &*tokenizer, &text, options, progress)?;
            how.print("wikitext", &trained, &report)
        }
        EvalTask::Lambada { file, how } => {
            let (trained, options) = how.open(None)?;
            let tokenizer = how.trained.tokenizer(&trained)?;
            let lines = read_text(file)?;
            let progress = &mut printer.callback("passages");
            let report = eval::lambada(&trained, &*tokenizer, &lines, options, progress)?;
            how.print("lambada", &trained, &report)
        }
        EvalTask::Corpus { prefix, how, part, split, tokens, stride } => {
            let (trained, options) = how.open(*stride)?;
            let config = trained.config();
            let (store, prefix) = storage::locate(prefix.as_deref().unwrap_or(config.corpus()))?;
            let corpus = IndexedDataset::open_tokens(&store, &prefix)?;
            let which = Split::ALL[*part as usize];
            let split = split.clone().unwrap_or_else(|| config.data.split.0.clone());
            let task = CorpusTask { split, which, tokens_max: *tokens };
            let progress = &mut printer.callback("tokens");
            let report = eval::corpus(&trained, &corpus, &task, options, progress)?;
            how.print("corpus", &trained, &report)
        }
    }
}

impl EvalSettings {
    fn open(&self, stride: Option<u64>) -> Result<(Trained, EvalOptions)> {
        Ok((self.trained.open()?, EvalOptions { batch: usize::from(self.batch), stride }))
    }

    /// Prints the fields of a report, one per line.
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
