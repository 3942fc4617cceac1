//! `feedline tokenizer`: trains a tokenizer.

use std::io::{self, Write as _};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use preprocess::train::{
    ModelType, SampleProgress, TrainOptions, TrainProgress, TrainedTokenizer, train,
};
use preprocess::{Format, InputOptions, TokenizerSpec, open_tokenizer};
use serde::Serialize;
use storage::{ByteSize, Key, Location, rate_text};

use crate::ui::output::Output;
use crate::ui::terminal::{FactTable, thousands};
use crate::ui::timeout::StopSignal;

/// Subcommands of `feedline tokenizer`.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum TokenizerVerb {
    /// Train a tokenizer on JSON lines, text, TFRecord or Parquet
    ///
    /// Writes a folder that transformers opens: tokenizer.json, and for bpe and unigram also
    /// SentencePiece's tokenizer.model, with the same ids. The same inputs give the same bytes for
    /// any number of workers.
    Train(Box<TrainArgs>),
}

/// Options of `feedline tokenizer train`.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  feedline tokenizer train --type bpe --vocab-size 32000 --out tokenizer corpus/*.jsonl.zst
  feedline tokenizer train --type unigram --vocab-size 8000 --out tokenizer s3://bucket/corpus")]
pub struct TrainArgs {
    /// Files, folders and patterns of JSON lines, text, TFRecord or Parquet, plain or compressed;
    /// - is standard input
    #[arg(value_name = "INPUT", required = true, help_heading = "Input")]
    inputs: Vec<String>,

    /// The key that holds the text
    #[arg(long, value_name = "KEY", default_value = "text", help_heading = "Input")]
    json_key: String,

    /// Input format: auto, jsonl, json, txt, parquet or tfrecord
    #[arg(long, value_name = "FORMAT", default_value = "auto", help_heading = "Input")]
    format: Format,

    /// Size of the random sample of the text to train on, held in memory; at most 1GiB
    #[arg(long, value_name = "SIZE", default_value = "256MiB", help_heading = "Input")]
    sample: ByteSize,

    /// Seed of the sample
    #[arg(long, value_name = "N", default_value_t = 1234, help_heading = "Input")]
    seed: u64,

    /// Algorithm: bpe, byte-bpe (GPT-2), unigram or wordpiece (BERT)
    #[arg(long = "type", value_name = "TYPE", help_heading = "Tokenizer")]
    model_type: ModelType,

    /// Number of tokens, including special tokens and bytes
    #[arg(long, value_name = "N", help_heading = "Tokenizer")]
    vocab_size: u64,

    /// More special tokens, separated by commas
    ///
    /// bpe and unigram have <unk>, <s> and </s>; byte-bpe has <|endoftext|>; wordpiece has those of
    /// BERT.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', help_heading = "Tokenizer")]
    special_tokens: Vec<String>,

    /// Fraction of the characters that have a token; the rarest become bytes, in wordpiece the
    /// unknown token
    #[arg(long, value_name = "SHARE", default_value_t = 0.9995, help_heading = "Tokenizer")]
    character_coverage: f64,

    /// Make each digit a token
    #[arg(long, help_heading = "Tokenizer")]
    split_digits: bool,

    /// Encode texts in lower case and without accents (wordpiece only)
    #[arg(long, help_heading = "Tokenizer")]
    lowercase: bool,

    /// Folder to write; it must be empty or absent
    #[arg(short, long, value_name = "FOLDER", help_heading = "Output")]
    out: String,

    /// Print the summary as JSON
    #[arg(long, help_heading = "Output")]
    json: bool,

    /// Threads [default: one per core]
    #[arg(long, alias = "threads", value_name = "N", help_heading = "Process")]
    workers: Option<usize>,
}

/// The output of `feedline tokenizer train`; `--json` prints it as it is.
#[derive(Debug, Serialize)]
struct Trained {
    vocab_size: u64,
    documents: u64,
    text_bytes: u64,
    sample_bytes: u64,
    words: u64,
    bytes_per_token: f64,
    elapsed_s: f64,
    outputs: Vec<Output>,
}

/// Trains, and prints a summary.
///
/// # Errors
/// As [`train`], and for a folder that exists or cannot be written; no folder remains then.
pub fn run(verb: &TokenizerVerb, out: &mut dyn io::Write) -> Result<()> {
    let TokenizerVerb::Train(args) = verb;
    let start = Instant::now();
    check_free(&args.out)?;
    let stop = StopSignal::at_signals()?;
    let mut reporter = Reporter::default();
    let trained = match train(&args.options(), &stop.0, &mut |progress| reporter.show(progress)) {
        Err(preprocess::Error::Stopped) => bail!("interrupted"),
        trained => trained?,
    };
    let outputs = write(args, &trained)?;
    let report = Trained {
        vocab_size: trained.vocab_size,
        documents: trained.documents,
        text_bytes: trained.text_bytes,
        sample_bytes: trained.sample_bytes,
        words: trained.words,
        bytes_per_token: bytes_per_token(args, &trained)?,
        elapsed_s: start.elapsed().as_secs_f64(),
        outputs,
    };
    match args.json {
        true => serde_json::to_writer_pretty(&mut *out, &report).map_err(io::Error::from)?,
        false => out.write_all(report.text().as_bytes())?,
    }
    if args.json {
        writeln!(out)?;
    }
    Ok(out.flush()?)
}

/// Writes the files; if one fails, those before it are removed.
fn write(args: &TrainArgs, trained: &TrainedTokenizer) -> Result<Vec<Output>> {
    let (store, folder) = storage::locate(&args.out)?;
    let mut outputs: Vec<(Key, Output)> = Vec::new();
    for (file, bytes) in &trained.files {
        let key = folder.join(file)?;
        match storage::write_all(store.as_ref(), &key, bytes) {
            Ok(entry) => {
                let output = Output::new(store.display(&key), &entry);
                outputs.push((key, output));
            }
            Err(error) => {
                outputs.iter().for_each(|(key, _)| drop(store.delete(key)));
                return Err(error.into());
            }
        }
    }
    Ok(outputs.into_iter().map(|(_, output)| output).collect())
}

/// Refuses a folder with files before any work.
fn check_free(out: &str) -> Result<()> {
    let (store, folder) = storage::locate(out)?;
    match store.list_names(&folder)?.first() {
        None => Ok(()),
        Some(name) => bail!(
            "cannot write {out}: expected an empty or absent folder, found {name} in it (hint: \
             choose another --out)"
        ),
    }
}

/// Bytes per token of a part of the sample, by the tokenizer that was written.
fn bytes_per_token(args: &TrainArgs, trained: &TrainedTokenizer) -> Result<f64> {
    let is_model = trained.files.iter().any(|(name, _)| *name == "tokenizer.model");
    let (kind, file) =
        if is_model { ("sentencepiece", "tokenizer.model") } else { ("hf", "tokenizer.json") };
    let spec = TokenizerSpec {
        kind: kind.to_owned(),
        model: Some(Location::new(&args.out).join(file).to_string()),
        ..TokenizerSpec::default()
    };
    let tokenizer = open_tokenizer(&spec)?;
    let mut encoder = tokenizer.encoder();
    let (mut bytes, mut tokens, mut ids) = (0, 0, Vec::new());
    for text in &trained.texts {
        ids.clear();
        encoder.encode(text, &mut ids);
        bytes += text.len();
        tokens += ids.len();
    }
    Ok(bytes as f64 / tokens.max(1) as f64)
}

impl TrainArgs {
    fn options(&self) -> TrainOptions {
        let mut options = TrainOptions::new(self.inputs.clone(), self.model_type, self.vocab_size);
        options.input = InputOptions { format: self.format, ..InputOptions::default() };
        options.key.clone_from(&self.json_key);
        options.sample_bytes = self.sample.0;
        options.seed = self.seed;
        options.character_coverage = self.character_coverage;
        options.split_digits = self.split_digits;
        options.lowercase = self.lowercase;
        options.special_tokens.clone_from(&self.special_tokens);
        options.workers = self.workers.unwrap_or(options.workers);
        options
    }
}

impl Trained {
    /// Text for the terminal.
    fn text(&self) -> String {
        let mut facts = FactTable::default();
        facts.add("tokens", thousands(self.vocab_size));
        facts.add("documents", thousands(self.documents));
        let read = ByteSize(self.text_bytes);
        facts.add("trained on", format!("{} of {read} of text", ByteSize(self.sample_bytes)));
        facts.add("distinct words", thousands(self.words));
        facts.add("bytes per token", format!("{:.3}, on the sample", self.bytes_per_token));
        let rate = rate_text(self.text_bytes, Duration::from_secs_f64(self.elapsed_s));
        facts.add("time", format!("{:.1} s, {rate}", self.elapsed_s));
        for output in &self.outputs {
            facts.add("wrote", format!("{}, {}", output.name, ByteSize(output.bytes)));
        }
        facts.text()
    }
}

/// Reports progress on standard error.
#[derive(Default)]
struct Reporter {
    shown: Option<Instant>,
}

impl Reporter {
    fn show(&mut self, progress: TrainProgress) {
        let interval = Duration::from_secs(5);
        let line = match progress {
            TrainProgress::Reading(SampleProgress {
                stored_bytes,
                stored_bytes_all,
                documents,
                ..
            }) => {
                if self.shown.get_or_insert_with(Instant::now).elapsed() < interval {
                    return;
                }
                let all = stored_bytes_all.map(|all| format!(" of {}", ByteSize(all)));
                let (read, all) = (ByteSize(stored_bytes), all.unwrap_or_default());
                format!("read {read}{all}, {} documents", thousands(documents))
            }
            TrainProgress::Training { words } => {
                format!("training on {} distinct words", thousands(words))
            }
            _ => return,
        };
        self.shown = Some(Instant::now());
        // Progress that cannot be shown must not end the run.
        let _ = writeln!(io::stderr(), "{line}");
    }
}
