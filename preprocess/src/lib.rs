//! JSON lines to tokens.
//!
//! [`run`] turns files of JSON lines into the pair of `.bin` and `.idx` that Megatron reads, on all
//! cores, in the order of the input and to the same bytes for every number of workers. Whatever is
//! wrong with a line ends the run with its place; nothing is skipped in silence. In reading order:
//! `run` is the pipeline, `parcel` what goes round in it, `input` where bytes come from, `json`
//! what a line is, [`Tokenizer`] what a text is made into, and `commit` what is written.

#![forbid(unsafe_code)]

pub mod clean;
mod commit;
mod error;
mod input;
mod json;
pub mod objective;
mod options;
mod parcel;
mod report;
mod run;
mod tokenizer;
mod work;

pub use error::{BadLine, Error, Result};
pub use options::Options;
pub use report::{InputReport, Output, Progress, Report};
pub use run::run;
pub use tokenizer::{
    Encode, Gpt2, Pattern, Pieces, Tokenizer, TokenizerSpec, open_gpt2, open_tokenizer, pieces,
};
