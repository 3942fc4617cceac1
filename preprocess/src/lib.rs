//! JSON lines to tokens.
//!
//! [`run`] turns files of JSON lines into the pair of `.bin` and `.idx` that Megatron
//! reads, on all cores, in the order of the input and to the same bytes for every number of
//! workers. A bad line ends the run with an error that names its position; nothing is skipped
//! silently.
//!
//! In reading order: `input` finds and decompresses the inputs and cuts them into batches
//! (`batch`), `json` parses lines and `tfrecord` records, a [`Tokenizer`] encodes text,
//! [`objective`] derives sequences from it, `pipeline` runs the threads, and `tokens` writes the
//! outputs and their journal.
//! [`clean`] filters and deduplicates JSON lines. `train` makes a tokenizer from them.
//! [`encode_batch()`] encodes texts that are in memory. [`cli`] is the program.

#![forbid(unsafe_code)]

mod batch;
mod checksum;
pub mod clean;
pub mod cli;
mod encode_batch;
mod error;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod identity;
mod input;
mod json;
pub mod objective;
mod options;
mod pipeline;
mod tfrecord;
mod tokenizer;
mod tokens;
#[cfg(feature = "general")]
pub mod train;

pub use batch::encoded::Skipped;
pub use batch::report::{InputReport, Output, PreprocessProgress, Report, Stages};
pub use encode_batch::{TokenBatch, encode_batch};
pub use error::{BadLine, Error, Result};
pub use input::{Format, InputOptions, Separator, TextRules};
pub use options::{
    EmptyDocuments, Lists, Objective, OnBadLine, PreprocessOptions, ResumePolicy, Shard,
    SpanOptions,
};
pub use tokenizer::{
    Cpm1, EncDec, EncDecKind, EncDecSpaces, EncodeError, Encoder, ExportedTokenizer, Gpt2,
    HuggingFace, Jieba, JiebaWords, ModelTokens, Null, Pattern, Pieces, Tiktoken, Tokenizer,
    TokenizerSpec, WordPiece, WordPieceCase, WordPieceRules, open_gpt2, open_tokenizer, pieces,
};
pub use tokens::estimate::{Estimate, estimate};
pub use tokens::run::{run, run_until};
