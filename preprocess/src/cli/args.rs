//! Arguments of `preprocess`, and their translation into options.

use std::time::Duration;

use crate::objective::{Newlines, Nltk, SentenceSpec};
use crate::{
    EmptyDocuments, Lists, Objective, OnBadLine, PreprocessOptions, ResumePolicy, Shard,
    SpanOptions, TokenizerSpec,
};
use clap::{Parser, ValueEnum};
use indexed::Dtype;
use log::LevelFilter;
use storage::{ByteSize, Location, StderrLog, TimeSpan};

/// Tokenize JSON lines into the token files that Megatron reads.
///
/// Writes PREFIX_KEY_document.bin, .idx and .manifest.json. Documents keep the order of the input.
/// The files have the same bytes for any number of workers and after any number of interruptions.
/// The first bad line ends the run with an error that names its file, line and byte.
///
/// The flags of Megatron's, CPM-2's, Yuan's, Paddle's and GPT-NeoX's programs are accepted too.
/// Sizes are written as `64MiB`, times as `30s`.
///
/// Exit code 0: written, or already complete. 2: failed. 75: stopped by SIGTERM or SIGINT, continue
/// with --resume.
#[derive(Debug, Parser)]
#[command(
    name = "preprocess",
    version,
    max_term_width = 100,
    after_help = "\
Examples:
  preprocess --json-in my.jsonl --out data/my --tokenizer gpt2 --append-eod
  preprocess --json-in 'raw/**/*.jsonl.zst' --out data/corpus --tokenizer hf \\
    --tokenizer-model tokenizer.json --append-eod --resume
  preprocess --json-in raw/ --out data/my --tokenizer gpt2 --shard 3/16 --workers 8
  preprocess --input my.jsonl --output-prefix my --tokenizer-type GPT2BPETokenizer \\
    --vocab-file vocab.json --merge-file merges.txt --append-eod --workers 8"
)]
pub(crate) struct Cli {
    /// Files, folders, patterns or pipes to read, in order; - is standard input
    ///
    /// Files are .jsonl, .json, .txt or .parquet, plain or compressed (.zst, .gz, .bz2, .xz). Quote
    /// a pattern such as 'data/**/*.jsonl.zst', so that the shell does not expand it.
    #[arg(long, aliases = ["input", "input-path"], value_name = "FILE", num_args = 1..)]
    #[arg(required_unless_present_any = ["export_vocab", "completions"], help_heading = "Input")]
    json_in: Vec<String>,

    /// Keys that hold texts; each gives a separate dataset
    #[arg(long, aliases = ["json-keys", "jsonl-keys"], value_name = "KEY", num_args = 1..)]
    #[arg(default_value = "text", value_delimiter = ',', help_heading = "Input")]
    json_key: Vec<String>,

    #[command(flatten, next_help_heading = "Input")]
    input: crate::cli::input::InputArgs,

    /// Action on a bad line; a line longer than --line-max always ends the run
    #[arg(long, value_enum, default_value_t, help_heading = "Input")]
    on_error: CliOnError,

    /// Take the last of several texts with the same key in one object, as Python does
    ///
    /// Without this, such a line is a bad line.
    #[arg(long, help_heading = "Input")]
    last_of_duplicate_keys: bool,

    /// Refuse longer lines; a line takes three to ten times its length in memory
    #[arg(long, value_name = "SIZE", default_value = "1GiB", help_heading = "Input")]
    line_max: ByteSize,

    /// Size of the blocks in which inputs are read and split; the outputs do not depend on it
    #[arg(long, value_name = "N", hide = true)]
    block_bytes: Option<usize>,

    /// Folder and common start of the output names, such as data/wiki
    #[arg(short, long, alias = "output-prefix", value_name = "PREFIX")]
    #[arg(required_unless_present_any = ["export_vocab", "completions"], help_heading = "Output")]
    out: Option<String>,

    /// Folder of the outputs, if --out is only the start of their names
    #[arg(long, value_name = "FOLDER", hide = true)]
    output_path: Option<String>,

    /// Type of the token ids: uint16 or int32 [default: uint16 below 65,500 ids, as in Megatron]
    #[arg(long, value_name = "TYPE", value_parser = dtype, help_heading = "Output")]
    dtype: Option<Dtype>,

    /// Tokenize a sample, write nothing, and print the expected sizes and time as JSON
    #[arg(long, help_heading = "Output")]
    pub(crate) dry_run: bool,

    /// Write only the tokenizer's vocab.json and merges.txt to this folder
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["json_in", "out"])]
    #[arg(help_heading = "Output")]
    pub(crate) export_vocab: Option<String>,

    /// Kind of tokenizer: gpt2, hf, tiktoken, sentencepiece, wordpiece, jieba, null and others
    ///
    /// gpt2 has a built-in vocabulary, or takes vocab.json and merges.txt. hf takes a
    /// tokenizer.json or a folder of BERT. null is for texts that are ids. The others are encdec,
    /// yuan and cpm-t5 of the CPM models, cpm1, bert-cased, BertWordPieceLowerCase and
    /// BertWordPieceCase. Megatron's, Paddle's and GPT-NeoX's names of these are accepted too.
    #[arg(long, aliases = ["tokenizer-type", "tokenizer-name"], value_name = "KIND")]
    #[arg(default_value = "gpt2", help_heading = "Tokenizer")]
    tokenizer: String,

    /// Vocabulary: vocab.json, vocab.txt, or the folder that contains it
    #[arg(long, aliases = ["tokenizer-path", "vocab-path"], value_name = "FILE")]
    #[arg(help_heading = "Tokenizer")]
    vocab_file: Option<String>,

    /// merges.txt that belongs to vocab.json
    #[arg(long, value_name = "FILE", help_heading = "Tokenizer")]
    merge_file: Option<String>,

    /// File of a tokenizer that has a single file, or its folder
    #[arg(long, alias = "tokenizer-name-or-path", value_name = "FILE")]
    #[arg(help_heading = "Tokenizer")]
    tokenizer_model: Option<String>,

    /// More special tokens
    ///
    /// For gpt2 and hf, their ids follow the vocabulary. For Megatron's tiktoken files they replace
    /// the built-in special tokens.
    #[arg(long, aliases = ["special-tokens", "tiktoken-special-tokens"])]
    #[arg(value_name = "TOKEN", num_args = 1.., help_heading = "Tokenizer")]
    tokenizer_special_tokens: Vec<String>,

    /// Token that ends documents [default: from the files of hf and tiktoken]
    #[arg(long, value_name = "TOKEN", help_heading = "Tokenizer")]
    eod_token: Option<String>,

    /// Number of ids of null, or of a Megatron tiktoken file [default: 131072]
    ///
    /// Other tokenizers define their size.
    #[arg(long, value_name = "N", help_heading = "Tokenizer")]
    vocab_size: Option<u32>,

    /// Id that ends documents of null [default: the last id]
    #[arg(long, value_name = "ID", help_heading = "Tokenizer")]
    null_tokenizer_eod_id: Option<u32>,

    /// Rule of a Hugging Face folder: that of its tokenizer.json, or of the class that it names
    ///
    /// AutoTokenizer of transformers 5 cuts and normalizes texts as the class does. Models are
    /// trained with either. By default a folder is refused where the two differ.
    #[arg(long, value_name = "RULE", value_parser = ["file", "class"])]
    #[arg(help_heading = "Tokenizer")]
    tokenizer_rule: Option<String>,

    /// Add no special tokens around documents, even if tokenizer.json does
    #[arg(long, help_heading = "Tokenizer")]
    tokenizer_hf_no_include_special_tokens: bool,

    /// Record in the manifest that the slow Hugging Face tokenizer was requested
    ///
    /// Megatron includes this in the names of its index caches. The ids are the same.
    #[arg(long, help_heading = "Tokenizer")]
    tokenizer_hf_no_use_fast: bool,

    /// Record in the manifest that code of the model may run
    ///
    /// Megatron includes this in the names of its index caches. No such code runs here.
    #[arg(long, help_heading = "Tokenizer")]
    trust_remote_code: bool,

    /// Pre-tokenizer of tiktoken: v1 or v2 (Megatron's), r50k, cl100k, o200k and others
    ///
    /// Default: detected by the vocabulary; v2 for Megatron's files.
    #[arg(long, value_name = "NAME", help_heading = "Tokenizer")]
    tiktoken_pattern: Option<String>,

    /// Ids before the vocabulary of a Megatron tiktoken file [default: 1000]
    #[arg(long, value_name = "N", help_heading = "Tokenizer")]
    tiktoken_num_special_tokens: Option<u32>,

    /// Use the SentencePiece tokenizers of Megatron before core 0.15
    ///
    /// SentencePieceTokenizer then has its own special tokens, and Llama2Tokenizer puts a
    /// beginning-of-sequence token before every text.
    #[arg(long, help_heading = "Tokenizer")]
    legacy_tokenizer: bool,

    /// Number of tokens <extra_id_0>, <extra_id_1> ... of the older SentencePieceTokenizer
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Tokenizer")]
    vocab_extra_ids: u32,

    /// Dictionary of words and frequencies that replaces jieba's own
    #[arg(long, value_name = "FILE", help_heading = "Tokenizer")]
    jieba_dict: Option<String>,

    /// More words for jieba, one per line: word, frequency, tag; the last two are optional
    #[arg(long, value_name = "FILE", help_heading = "Tokenizer")]
    user_dict: Option<String>,

    /// Drop spaces as CPM-2 intended; the ids then differ from those of its published tokenizer
    #[arg(long, help_heading = "Tokenizer")]
    cpm_spaces_meant: bool,

    /// Append <|endoftext|> to every document that is not empty
    #[arg(long, alias = "append-eos", help_heading = "Documents")]
    append_eod: bool,

    /// How a list of texts under a key becomes a document
    #[arg(long, value_enum, default_value_t, help_heading = "Documents")]
    lists: CliLists,

    /// How an empty document is written
    #[arg(long, value_enum, default_value_t, help_heading = "Documents")]
    empty_docs: CliEmpty,

    /// Form of a document in the output
    #[arg(long, value_enum, default_value_t, conflicts_with = "split_sentences")]
    #[arg(help_heading = "Documents")]
    objective: CliObjective,

    /// Write every sentence as a sequence, split by Punkt or by the rules of --lang
    #[arg(long, help_heading = "Sentences")]
    split_sentences: bool,

    /// Language of the sentences: english, chinese, newline, or another with --punkt-params
    ///
    /// With newline, every line is a sentence.
    #[arg(long, value_name = "LANGUAGE", default_value = "english", help_heading = "Sentences")]
    lang: String,

    /// Paddle's spelling of --lang newline
    #[arg(long, hide = true)]
    chinese: bool,

    /// Keep the white space between sentences, as part of the sentence before it
    #[arg(long, help_heading = "Sentences")]
    keep_newlines: bool,

    /// Folder of NLTK's punkt_tab for a language, in place of the built-in English
    #[arg(long, value_name = "FOLDER", help_heading = "Sentences")]
    punkt_params: Option<String>,

    /// Version of NLTK whose sentences to reproduce: 3.9 or 3.10
    ///
    /// In 3.9 only ASCII quotes close a sentence.
    #[arg(long, value_name = "VERSION", default_value = "3.10", value_parser = ["3.9", "3.10"])]
    #[arg(help_heading = "Sentences", hide_possible_values = true)]
    punkt_version: String,

    /// Text that ends a sentence, as in Yuan's program
    #[arg(long, value_name = "TEXT", help_heading = "Sentences")]
    sentence_splitter: Option<String>,

    /// Share of the tokens that are masked
    #[arg(long, alias = "noisy-density", value_name = "SHARE", default_value_t = 0.15)]
    #[arg(help_heading = "Objective cpm2")]
    noise_density: f64,

    /// Mean length of masked spans, in tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 3.0, help_heading = "Objective cpm2")]
    mean_noise_span_length: f64,

    /// Seed of the spans, together with the index of the document in the input
    #[arg(long, value_name = "N", default_value_t = 233, help_heading = "Objective cpm2")]
    seed: u64,

    /// Write the format of CPM-2's own programs: 16-bit offsets, no document index
    #[arg(long, help_heading = "Objective cpm2")]
    cpm_compat: bool,

    /// Resume an interrupted run of these outputs; start from scratch if there is none
    ///
    /// The part of the inputs that was read must be unchanged. An input whose modification time has
    /// changed is read again and compared.
    #[arg(long, help_heading = "Resume and sharding")]
    pub(crate) resume: bool,

    /// Discard an interrupted run of these outputs
    #[arg(long, conflicts_with = "resume", help_heading = "Resume and sharding")]
    restart: bool,

    /// Maximum time between commits: the maximum work that a kill loses
    ///
    /// Each commit waits for the disk, so small values are slow.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration)]
    #[arg(help_heading = "Resume and sharding")]
    commit_interval: Duration,

    /// Write shard I of N, from 0, such as 3/16; slurm: the shard of this task of a job array
    ///
    /// `feedline merge` joins the shards.
    #[arg(long, value_name = "I/N", help_heading = "Resume and sharding")]
    shard: Option<Shard>,

    /// Threads that tokenize; more than the number of cores is slower [default: one per core]
    #[arg(long, alias = "threads", value_name = "N", help_heading = "Process")]
    workers: Option<usize>,

    /// Time between progress lines [default: 60s; 200ms on a terminal]
    ///
    /// A bare number counts documents, as in Megatron.
    #[arg(long, value_name = "TIME", help_heading = "Process")]
    pub(crate) log_interval: Option<Interval>,

    /// Write log lines of this severity and above to standard error: off, error, warn, info or
    /// debug. Default: warn, and off with --quiet
    #[arg(
        long,
        value_name = "LEVEL",
        help_heading = "Process",
        value_parser = StderrLog::level
    )]
    pub(crate) log: Option<LevelFilter>,

    /// Print neither progress nor summary
    #[arg(long, help_heading = "Process")]
    pub(crate) quiet: bool,

    /// Write a detailed summary to this file, as JSON
    #[arg(long, value_name = "FILE", help_heading = "Process")]
    pub(crate) report: Option<String>,

    /// Print a shell completion script; `preprocess completions SHELL` is the same
    #[arg(long, value_name = "SHELL", conflicts_with_all = ["json_in", "out"])]
    #[arg(help_heading = "Process")]
    pub(crate) completions: Option<clap_complete::Shell>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum CliObjective {
    /// A sequence of tokens.
    #[default]
    Document,
    /// CPM-2's context, target and target_offset.
    Cpm2,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum CliEmpty {
    /// A document without a sequence.
    #[default]
    Megatron,
    /// An empty sequence, or the end of document alone, as preprocess_data_fast.py does.
    Sequence,
    /// Not written.
    Skip,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum CliLists {
    /// One sequence per text, as in Megatron.
    #[default]
    Sequences,
    /// One text, with blank lines between the texts, as in GPT-NeoX.
    Joined,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum CliOnError {
    /// End the run.
    #[default]
    Fail,
    /// Omit the line, count it and report it.
    Skip,
}

fn dtype(text: &str) -> Result<Dtype, String> {
    match text {
        "uint16" => Ok(Dtype::U16),
        "int32" => Ok(Dtype::I32),
        _ => Err("expected uint16 or int32".to_owned()),
    }
}

const TIME_EXPECTED: &str = "expected a number and ms, s or min, such as 30s";

fn duration(text: &str) -> Result<Duration, String> {
    match text.parse()? {
        Interval::Time(time) => Ok(time),
        Interval::Documents(_) => Err(TIME_EXPECTED.to_owned()),
    }
}

/// Time or documents between progress lines.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Interval {
    Time(Duration),
    Documents(u64),
}

impl std::str::FromStr for Interval {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<u64>() {
            Ok(0) => Err("expected at least 1, found 0".to_owned()),
            Ok(count) => Ok(Interval::Documents(count)),
            Err(_) => match text.parse()? {
                TimeSpan(Duration::ZERO) => Err(format!("expected at least 1ms, found {text}")),
                TimeSpan(time) => Ok(Interval::Time(time)),
            },
        }
    }
}

impl Cli {
    fn sentences(&self) -> SentenceSpec {
        SentenceSpec {
            lang: Some(match self.chinese {
                true => "newline".to_owned(),
                false => self.lang.clone(),
            }),
            separator: self.sentence_splitter.clone(),
            newlines: if self.keep_newlines { Newlines::Keep } else { Newlines::Drop },
            params: self.punkt_params.clone(),
            nltk: if self.punkt_version == "3.9" { Nltk::V3_9 } else { Nltk::V3_10 },
        }
    }

    pub(crate) fn options(&self) -> PreprocessOptions {
        let out = match (&self.output_path, &self.out) {
            (Some(folder), Some(name)) => Location::new(folder).join(name).to_string(),
            (_, out) => out.clone().unwrap_or_default(),
        };
        let mut options = PreprocessOptions::new(self.json_in.clone(), out);
        let newline = (self.objective == CliObjective::Cpm2).then_some("<n>");
        options.input = self.input.options(newline);
        options.keys.clone_from(&self.json_key);
        options.tokenizer = TokenizerSpec {
            kind: crate::cli::compat::tokenizer_kind(&self.tokenizer).to_owned(),
            vocab_file: self.vocab_file.clone(),
            merge_file: self.merge_file.clone(),
            model: self.tokenizer_model.clone(),
            jieba_dict: self.jieba_dict.clone(),
            user_dict: self.user_dict.clone(),
            cpm_spaces_meant: self.cpm_spaces_meant,
            tokenizer_rule: self.tokenizer_rule.clone(),
            without_special_tokens: self.tokenizer_hf_no_include_special_tokens,
            slow: self.tokenizer_hf_no_use_fast,
            trust_remote_code: self.trust_remote_code,
            special_tokens: self.tokenizer_special_tokens.clone(),
            eod_token: self.eod_token.clone(),
            tiktoken_pattern: self.tiktoken_pattern.clone(),
            tiktoken_num_special_tokens: self.tiktoken_num_special_tokens,
            vocab_size: self.vocab_size,
            null_eod_id: self.null_tokenizer_eod_id,
            legacy: self.legacy_tokenizer,
            vocab_extra_ids: self.vocab_extra_ids,
        };
        if self.split_sentences || self.sentence_splitter.is_some() {
            options.objective = Objective::Sentences(self.sentences());
        }
        if self.objective == CliObjective::Cpm2 {
            options.objective = Objective::Spans(SpanOptions {
                density: self.noise_density,
                mean_len: self.mean_noise_span_length,
                seed: self.seed,
                cpm_compat: self.cpm_compat,
            });
        }
        options.append_eod = self.append_eod;
        options.lists = match self.lists {
            CliLists::Sequences => Lists::Sequences,
            CliLists::Joined => Lists::Joined,
        };
        options.empty_documents = match self.empty_docs {
            CliEmpty::Megatron => EmptyDocuments::Megatron,
            CliEmpty::Sequence => EmptyDocuments::Sequence,
            CliEmpty::Skip => EmptyDocuments::Skip,
        };
        options.dtype = self.dtype;
        options.on_bad_line = match self.on_error {
            CliOnError::Fail => OnBadLine::Fail,
            CliOnError::Skip => OnBadLine::Skip,
        };
        options.last_of_duplicate_keys = self.last_of_duplicate_keys;
        options.interrupted = match (self.resume, self.restart) {
            (true, _) => ResumePolicy::Resume,
            (_, true) => ResumePolicy::Restart,
            _ => ResumePolicy::Refuse,
        };
        options.shard = self.shard;
        options.workers = self.workers.unwrap_or(options.workers);
        options.line_bytes_max = self.line_max.0;
        options.block_bytes = self.block_bytes;
        options.commit_every = self.commit_interval;
        options
    }
}

#[cfg(test)]
#[path = "../../../tests/include/command_page.rs"]
mod command_page;

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;
    use crate::cli::compat::translate;

    fn parse(words: Vec<String>) -> Result<(), String> {
        let words = translate(words.into_iter().map(Into::into))?.arguments;
        Cli::try_parse_from(words).map(drop).map_err(|error| error.to_string())
    }

    #[test]
    fn reference_page() {
        command_page::check_page(Cli::command(), "preprocess", &parse);
    }

    #[test]
    fn other_spellings_are_accepted() {
        for line in [
            "completions bash",
            "--completions zsh",
            "--json-in a --out b --threads 2 --commit-interval 2m --log-interval 1h",
            "-o b --json-in a --log-interval 1000",
            "--input_path a --output_prefix b --commit_interval 2min",
        ] {
            let words = format!("preprocess {line}").split(' ').map(str::to_owned).collect();
            parse(words).unwrap_or_else(|error| panic!("{line}: {error}"));
        }
        let words = ["preprocess", "--json-in", "a", "--out", "b", "--commit-interval", "30"];
        assert!(parse(words.map(str::to_owned).to_vec()).is_err(), "a time without a unit");
    }
}
