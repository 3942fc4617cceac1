//! The commands that make a corpus and its tokenizer.

mod clean;
mod train;
