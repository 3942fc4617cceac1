use std::time::Duration;

use clap::Parser;
use preprocess::{Options, TokenizerSpec};
use storage::ByteSize;

/// JSON lines to the token files that Megatron reads.
///
/// Writes PREFIX_KEY_document.bin, .idx and .manifest.json. The documents are in the order of the
/// input, and the files are the same bytes for every number of workers. The first bad line ends the
/// run, with its file, line and byte, and nothing is left under those names.
#[derive(Debug, Parser)]
#[command(name = "preprocess", version, max_term_width = 100)]
pub(crate) struct Cli {
    /// Files of JSON lines, plain or Zstandard, in order; - is standard input
    #[arg(long, alias = "input", value_name = "FILE", num_args = 1..)]
    #[arg(required_unless_present = "export_vocab")]
    json_in: Vec<String>,

    /// Folder of the outputs, and how their names begin, such as data/wiki
    #[arg(long, alias = "output-prefix", value_name = "PREFIX")]
    #[arg(required_unless_present = "export_vocab")]
    out: Option<String>,

    /// The key that holds the text
    #[arg(long, alias = "json-keys", value_name = "KEY", default_value = "text")]
    json_key: String,

    /// gpt2: byte-level BPE, with GPT-2's own vocabulary unless files are given
    #[arg(long, alias = "tokenizer-type", value_name = "KIND", default_value = "gpt2")]
    tokenizer: String,

    /// vocab.json of another vocabulary of the same kind
    #[arg(long, value_name = "FILE")]
    vocab_file: Option<String>,

    /// merges.txt of another vocabulary of the same kind
    #[arg(long, value_name = "FILE")]
    merge_file: Option<String>,

    /// End every document that is not empty with <|endoftext|>
    #[arg(long)]
    append_eod: bool,

    /// Threads that tokenize; more than there are cores is slower [default: one a core]
    #[arg(long, value_name = "N")]
    workers: Option<usize>,

    /// Refuse longer lines; a line takes three to ten times its length in memory
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    line_max: ByteSize,

    /// Between progress lines: a time such as 30s, or Megatron's bare number of documents
    /// [default: 10s; 200ms on a terminal]
    #[arg(long, value_name = "TIME")]
    pub(crate) log_interval: Option<Interval>,

    /// No progress and no summary
    #[arg(long)]
    pub(crate) quiet: bool,

    /// Write what the summary says, and more, as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<String>,

    /// Only write the tokenizer's vocab.json and merges.txt into this folder
    #[arg(long, value_name = "DIR", conflicts_with_all = ["json_in", "out"])]
    pub(crate) export_vocab: Option<String>,
}

/// How often to tell.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Interval {
    Time(Duration),
    Documents(u64),
}

impl std::str::FromStr for Interval {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refuse =
            || format!("'{text}' is no time: write a number and ms, s or min, such as 30s");
        let digits = text.trim_end_matches(|char: char| char.is_ascii_alphabetic());
        let count: u64 = digits.parse().map_err(|_| refuse())?;
        match &text[digits.len()..] {
            _ if count == 0 => Err("at least 1 is due".to_owned()),
            "ms" => Ok(Interval::Time(Duration::from_millis(count))),
            "s" => Ok(Interval::Time(Duration::from_secs(count))),
            "min" => Ok(Interval::Time(Duration::from_secs(count.saturating_mul(60)))),
            "" => Ok(Interval::Documents(count)),
            _ => Err(refuse()),
        }
    }
}

impl Cli {
    pub(crate) fn options(&self) -> Options {
        let mut options =
            Options::new(self.json_in.clone(), self.out.as_deref().unwrap_or_default());
        options.key.clone_from(&self.json_key);
        options.tokenizer = TokenizerSpec {
            kind: self.tokenizer.clone(),
            vocab_file: self.vocab_file.clone(),
            merge_file: self.merge_file.clone(),
            ..TokenizerSpec::default()
        };
        options.append_eod = self.append_eod;
        options.workers = self.workers.unwrap_or(options.workers);
        options.line_bytes_max = self.line_max.0;
        options
    }
}
