//! Pre-tokenizer patterns, and inputs in other formats than JSON.

mod patterns;
mod tfrecord;
