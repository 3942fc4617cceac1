//! Arguments of `preprocess`, and their translation into options.

use std::time::Duration;

use clap::{Parser, ValueEnum};
use indexed::Dtype;
use preprocess::objective::{Newlines, Nltk, SentenceSpec};
use preprocess::{
    EmptyDocuments, Lists, Objective, OnBadLine, PreprocessOptions, ResumePolicy, Shard,
    SpanOptions, TokenizerSpec,
};
use storage::ByteSize;

/// JSON lines to the token files that Megatron reads.
///
/// Writes PREFIX_KEY_document.bin, .idx and .manifest.json. The documents are in the order of the
/// input, and the files are the same bytes for every number of workers, however often the run was
/// interrupted. The first bad line ends the run, with its file, line and byte. The command lines of
/// Megatron's, CPM-2's, Paddle's and GPT-NeoX's programs are understood too.
#[derive(Debug, Parser)]
#[command(name = "preprocess", version, max_term_width = 100)]
pub(crate) struct Cli {
    /// In order: files (.jsonl, .json, .txt, plain or .zst, .gz, .bz2 or .xz), folders of them,
    /// patterns such as 'data/**/*.jsonl.zst', pipes; - is standard input
    #[arg(long, aliases = ["input", "input-path"], value_name = "FILE", num_args = 1..)]
    #[arg(required_unless_present_any = ["export_vocab", "completions"])]
    json_in: Vec<String>,

    #[command(flatten)]
    input: crate::cli::input::InputArgs,

    /// Folder of the outputs, and how their names begin, such as data/wiki
    #[arg(long, alias = "output-prefix", value_name = "PREFIX")]
    #[arg(required_unless_present_any = ["export_vocab", "completions"])]
    out: Option<String>,

    /// Folder of the outputs, if --out is only how their names begin
    #[arg(long, value_name = "DIR", hide = true)]
    output_path: Option<String>,

    /// The keys that hold texts; each is a dataset of its own
    #[arg(long, aliases = ["json-keys", "jsonl-keys"], value_name = "KEY", num_args = 1..)]
    #[arg(default_value = "text", value_delimiter = ',')]
    json_key: Vec<String>,

    /// gpt2 with its own vocabulary or vocab.json and merges.txt; hf, a tokenizer.json or a folder
    /// of BERT; tiktoken; sentencepiece; encdec, yuan and cpm-t5 of the CPM line; cpm1; jieba;
    /// wordpiece or bert-cased; BertWordPieceLowerCase or BertWordPieceCase; null, where texts are
    /// ids; and Megatron's, Paddle's and GPT-NeoX's names of these
    #[arg(long, aliases = ["tokenizer-type", "tokenizer-name"], value_name = "KIND")]
    #[arg(default_value = "gpt2")]
    tokenizer: String,

    /// The vocabulary: vocab.json, vocab.txt, or the folder that has it
    #[arg(long, aliases = ["tokenizer-path", "vocab-path"], value_name = "FILE")]
    vocab_file: Option<String>,

    /// merges.txt, which belongs to vocab.json
    #[arg(long, value_name = "FILE")]
    merge_file: Option<String>,

    /// The one file of tokenizers that have one, or its folder
    #[arg(long, alias = "tokenizer-name-or-path", value_name = "FILE")]
    tokenizer_model: Option<String>,

    /// Put no special tokens around the documents, whatever tokenizer.json says
    #[arg(long)]
    tokenizer_hf_no_include_special_tokens: bool,

    /// Say in the manifest, of which Megatron's index caches are named, that Hugging Face's slow
    /// tokenizer was asked for; ids are the same
    #[arg(long)]
    tokenizer_hf_no_use_fast: bool,

    /// Say there, too, that code of the model may be run; none is ever
    #[arg(long)]
    trust_remote_code: bool,

    /// More special tokens: of gpt2 and hf with ids behind the others, of Megatron's files for
    /// tiktoken in the place of its own
    #[arg(long, aliases = ["special-tokens", "tiktoken-special-tokens"])]
    #[arg(value_name = "TOKEN", num_args = 1..)]
    tokenizer_special_tokens: Vec<String>,

    /// The token that ends documents [default: what the files of hf and tiktoken say]
    #[arg(long, value_name = "TOKEN")]
    eod_token: Option<String>,

    /// Pre-tokenizer of tiktoken: v1 or v2, which are Megatron's, r50k, cl100k, o200k ...
    /// [default: told by the vocabulary; v2 for Megatron's files]
    #[arg(long, value_name = "NAME")]
    tiktoken_pattern: Option<String>,

    /// Ids before the vocabulary of a file of Megatron's for tiktoken [default: 1000]
    #[arg(long, value_name = "N")]
    tiktoken_num_special_tokens: Option<u32>,

    /// Ids in all: of null, and of a file of Megatron's for tiktoken [default: 131072]; others know
    /// theirs
    #[arg(long, value_name = "N")]
    vocab_size: Option<u32>,

    /// The id that ends documents of null [default: the last]
    #[arg(long, value_name = "ID")]
    null_tokenizer_eod_id: Option<u32>,

    /// SentencePiece's tokenizers as Megatron had them before core 0.15: SentencePieceTokenizer
    /// with tokens of its own, Llama2Tokenizer with a beginning before every text
    #[arg(long)]
    legacy_tokenizer: bool,

    /// How many <extra_id_0>, <extra_id_1> ... the older SentencePieceTokenizer has
    #[arg(long, value_name = "N", default_value_t = 0)]
    vocab_extra_ids: u32,

    /// Words with frequencies, in the place of jieba's own dictionary
    #[arg(long, value_name = "FILE")]
    jieba_dict: Option<String>,

    /// More words for jieba: a word, its frequency, a tag; the last two may be missing
    #[arg(long, value_name = "FILE")]
    user_dict: Option<String>,

    /// Drop spaces as CPM-2 meant to, not as it does: other ids than the published tokenizer's
    #[arg(long)]
    cpm_spaces_meant: bool,

    /// What a document becomes: a sequence, or CPM-2's context, target and target_offset
    #[arg(long, value_enum, default_value_t, conflicts_with = "split_sentences")]
    objective: CliObjective,

    /// Every sentence is a sequence, by Punkt or by --lang's own rules
    #[arg(long)]
    split_sentences: bool,

    /// Of the sentences: english; chinese; newline, where each line is one; or another, with
    /// --punkt-params
    #[arg(long, value_name = "LANGUAGE", default_value = "english")]
    lang: String,

    /// Paddle's way to say --lang newline
    #[arg(long, hide = true)]
    chinese: bool,

    /// White space between sentences belongs to the one before
    #[arg(long)]
    keep_newlines: bool,

    /// Folder of NLTK's punkt_tab for a language, in place of the English that is built in
    #[arg(long, value_name = "DIR")]
    punkt_params: Option<String>,

    /// Split sentences as this version of NLTK does: 3.10, or 3.9, to which only ASCII quotes close
    #[arg(long, value_name = "VERSION", default_value = "3.10", value_parser = ["3.9", "3.10"])]
    punkt_version: String,

    /// Sentences end at this text, as Yuan's program has it
    #[arg(long, value_name = "TEXT")]
    sentence_splitter: Option<String>,

    /// The share of the tokens that cpm2 hides
    #[arg(long, alias = "noisy-density", value_name = "SHARE", default_value_t = 0.15)]
    noise_density: f64,

    /// The mean length of the spans that cpm2 hides, in tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 3.0)]
    mean_noise_span_length: f64,

    /// With which cpm2 chooses spans, together with a document's place in the input
    #[arg(long, value_name = "N", default_value_t = 233)]
    seed: u64,

    /// Write for CPM-2's own programs: 16-bit offsets, and no document index
    #[arg(long)]
    cpm_compat: bool,

    /// End every document that is not empty with <|endoftext|>
    #[arg(long, alias = "append-eos")]
    append_eod: bool,

    /// A list of texts under a key is a document with a sequence for each (sequences, as Megatron
    /// has it), or one text with blank lines between them (joined, as GPT-NeoX has it)
    #[arg(long, value_enum, default_value_t)]
    lists: CliLists,

    /// An empty document is an entry without a sequence (megatron), an empty sequence or its end
    /// alone (sequence, as preprocess_data_fast.py has it), or nothing (skip)
    #[arg(long, value_enum, default_value_t)]
    empty_docs: CliEmpty,

    /// uint16 or int32 [default: uint16 below 65,500 ids, as Megatron's writer]
    #[arg(long, value_name = "TYPE", value_parser = dtype)]
    dtype: Option<Dtype>,

    /// What a bad line does: end the run, or be left out, counted and told of. One over --line-max
    /// ends it always
    #[arg(long, value_enum, default_value_t)]
    on_error: CliOnError,

    /// Of texts under equal keys of one object take the last, as Python does; without it such a
    /// line is a bad one
    #[arg(long)]
    last_of_duplicate_keys: bool,

    /// Continue an interrupted run of these outputs; without one, start. What was read of the
    /// inputs must be unchanged: an input that was written or copied since is read again to compare
    #[arg(long)]
    pub(crate) resume: bool,

    /// Throw away what an interrupted run of these outputs has left
    #[arg(long, conflicts_with = "resume")]
    restart: bool,

    /// The most time between commits, which is the most work that a kill costs
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration)]
    commit_interval: Duration,

    /// Write share I of N, from 0, such as 3/16; slurm: this task of a job array. feedline merge
    /// makes one of them
    #[arg(long, value_name = "I/N")]
    shard: Option<Shard>,

    /// Threads that tokenize; more than there are cores is slower [default: one a core]
    #[arg(long, value_name = "N")]
    workers: Option<usize>,

    /// Refuse longer lines; a line takes three to ten times its length in memory
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    line_max: ByteSize,

    /// Bytes that are read and cut at a time; the outputs do not depend on it
    #[arg(long, value_name = "N", hide = true)]
    block_bytes: Option<usize>,

    /// Between progress lines: a time such as 30s, or Megatron's bare number of documents
    /// [default: 60s; 200ms on a terminal]
    #[arg(long, value_name = "TIME")]
    pub(crate) log_interval: Option<Interval>,

    /// No progress and no summary
    #[arg(long)]
    pub(crate) quiet: bool,

    /// Write what the summary says, and more, as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<String>,

    /// Tokenize a sample, write nothing, and say how large the outputs will be and how long it will
    /// take
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// Only write the tokenizer's vocab.json and merges.txt into this folder
    #[arg(long, value_name = "DIR", conflicts_with_all = ["json_in", "out"])]
    pub(crate) export_vocab: Option<String>,

    /// Only print the completions of a shell
    #[arg(long, value_name = "SHELL", conflicts_with_all = ["json_in", "out"])]
    pub(crate) completions: Option<clap_complete::Shell>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum CliObjective {
    #[default]
    Document,
    Cpm2,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum CliEmpty {
    #[default]
    Megatron,
    Sequence,
    Skip,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum CliLists {
    #[default]
    Sequences,
    Joined,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum CliOnError {
    #[default]
    Fail,
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

/// How often to tell.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Interval {
    Time(Duration),
    Documents(u64),
}

impl std::str::FromStr for Interval {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refuse = || TIME_EXPECTED.to_owned();
        let digits = text.trim_end_matches(|char: char| char.is_ascii_alphabetic());
        let count: u64 = digits.parse().map_err(|_| refuse())?;
        match &text[digits.len()..] {
            _ if count == 0 => Err("expected at least 1".to_owned()),
            "ms" => Ok(Interval::Time(Duration::from_millis(count))),
            "s" => Ok(Interval::Time(Duration::from_secs(count))),
            "min" => Ok(Interval::Time(Duration::from_secs(count.saturating_mul(60)))),
            "" => Ok(Interval::Documents(count)),
            _ => Err(refuse()),
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
            (Some(folder), Some(name)) => format!("{}/{name}", folder.trim_end_matches('/')),
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
