use crate::TokenizerSpec;

/// What to turn into what. Start from [`Options::new`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Files of JSON lines, plain or compressed with Zstandard, in the order in which their
    /// documents are written. `-` is standard input.
    pub inputs: Vec<String>,
    /// The outputs' folder, and how their names begin.
    pub out_prefix: String,
    /// The key that holds the text. Default: `text`.
    pub key: String,
    /// Default: GPT-2's.
    pub tokenizer: TokenizerSpec,
    /// End every document that has tokens with the tokenizer's end. Default: no.
    pub append_eod: bool,
    /// Threads that tokenize, at most 1024. Default: one for every core.
    pub workers: usize,
    /// A longer line is refused. While it is worked on, a line takes three to ten times its length
    /// in memory, and up to forty if it is all one word. Default and maximum: 1 GiB.
    pub line_bytes_max: u64,
    /// Bytes that are read and cut at a time. The outputs do not depend on it. Default: from 64 KiB
    /// to 2 MiB, by the size of the inputs.
    pub block_bytes: Option<usize>,
}

impl Options {
    /// The defaults.
    #[must_use]
    pub fn new(inputs: Vec<String>, out_prefix: impl Into<String>) -> Self {
        Options {
            inputs,
            out_prefix: out_prefix.into(),
            key: "text".to_owned(),
            tokenizer: TokenizerSpec { kind: "gpt2".to_owned(), ..TokenizerSpec::default() },
            append_eod: false,
            workers: std::thread::available_parallelism().map_or(1, usize::from),
            line_bytes_max: 1 << 30,
            block_bytes: None,
        }
    }
}
