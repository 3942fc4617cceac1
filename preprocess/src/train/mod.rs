//! Trains a tokenizer on a sample of a corpus.
//!
//! [`train`] reads the inputs of [`crate::run`], keeps a random sample of their documents, and
//! trains byte-pair encoding, a unigram model or WordPiece. The result is a `tokenizer.json`. For
//! byte-pair encoding and unigram it is also a SentencePiece `.model` of the same vocabulary. The
//! same inputs and options give the same bytes for any number of workers.
//!
//! In reading order: `options`; `sample`, which reads documents and draws from them; `words`, which
//! counts the words of the sample on `threads`; `pieces`, `merges` and `unigram`, which train;
//! `json` and `model`, which write both files.

mod json;
mod merges;
mod model;
mod options;
mod pieces;
mod sample;
mod threads;
mod unigram;
mod words;

use std::sync::atomic::AtomicBool;

pub use options::{ModelType, TrainOptions};
pub use sample::SampleProgress;

use crate::Result;
use threads::Threads;

/// The current step of a training run.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum TrainProgress {
    /// It reads the inputs.
    Reading(SampleProgress),
    /// It trains, after reading.
    Training {
        /// Distinct words of the sample.
        words: u64,
    },
}

/// A trained tokenizer.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TrainedTokenizer {
    /// `tokenizer.json` of Hugging Face, and the other files of the vocabulary, by name.
    pub files: Vec<(&'static str, Vec<u8>)>,
    /// Tokens of the vocabulary, special ones included.
    pub vocab_size: u64,
    /// Documents read.
    pub documents: u64,
    /// Bytes of their texts.
    pub text_bytes: u64,
    /// Bytes of the texts in the sample.
    pub sample_bytes: u64,
    /// Distinct words of the sample.
    pub words: u64,
    /// Some texts of the sample, of at most 4 MiB together, to try the tokenizer with.
    pub texts: Vec<String>,
}

/// Bytes of [`TrainedTokenizer::texts`].
const TEXTS_BYTES_MAX: usize = 4 << 20;

/// Trains a tokenizer, until `stop` is true. `progress` is called after every megabyte read, and
/// once before the training.
///
/// # Errors
/// `BadOption` of [`crate::Error`] for an option out of range, and if the sample has too few pieces
/// for the vocabulary; `BadInput`, `BadLine`, `Stream` and `Storage` for inputs; `Stopped`.
pub fn train(
    options: &TrainOptions,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(TrainProgress),
) -> Result<TrainedTokenizer> {
    options.check()?;
    let report = &mut |read| progress(TrainProgress::Reading(read));
    let sample = sample::draw(options, stop, report)?;
    let threads = Threads { workers: options.workers, stop };
    let words = words::count(options, &sample.texts, threads)?;
    let distinct = words.len() as u64;
    progress(TrainProgress::Training { words: distinct });
    let vocabulary = pieces::train(options, &words, threads)?;
    let mut files = vec![("tokenizer.json", json::tokenizer(options, &vocabulary))];
    files.push(("tokenizer_config.json", json::config(options)));
    match options.model_type {
        ModelType::Bpe | ModelType::Unigram => {
            files.push(("tokenizer.model", model::sentencepiece(options, &vocabulary)));
        }
        ModelType::WordPiece => {
            let lines = vocabulary.pieces.iter().map(|piece| format!("{}\n", piece.text));
            files.push(("vocab.txt", lines.collect::<String>().into_bytes()));
        }
        ModelType::ByteBpe => {}
    }
    let mut bytes = 0;
    let texts = sample.texts.into_iter().take_while(|text| {
        bytes += text.len();
        bytes <= TEXTS_BYTES_MAX
    });
    Ok(TrainedTokenizer {
        files,
        vocab_size: vocabulary.pieces.len() as u64,
        documents: sample.documents,
        text_bytes: sample.text_bytes,
        sample_bytes: sample.sample_bytes,
        words: distinct,
        texts: texts.collect(),
    })
}
