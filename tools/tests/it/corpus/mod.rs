//! What makes a corpus and its tokenizer.

mod clean;
mod train;
