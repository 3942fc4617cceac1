//! Text to token files: the command, tokenizers, cleaning, resuming.
//!
//! One binary, because each test binary links all dependencies of the crate.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod changed;
mod clean;
mod command;
mod common;
mod encdec;
mod hugging_face;
mod inputs;
mod jieba;
mod megatron;
mod neox;
mod output;
mod resume;
mod sentencepiece;
mod sentences;
mod spans;
mod tokenizer;
mod tokenizer_files;
mod vocab;
mod wordpiece;
