//! Runs of sentences for BERT, T5 and ICT: Megatron's `build_mapping` and `build_blocks_mapping`.

use crate::Result;
use crate::npy::{Element, Npy, NpyBuilder};
use crate::rng::{Mt19937, Mt19937x64};

/// A document with a sentence longer than this is passed over.
const SENTENCE_TOKENS_MAX: u32 = 512;

/// The settings of [`build_mapping`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MappingConfig {
    /// At most so many epochs.
    pub num_epochs: u64,
    /// No epoch is begun once there are so many samples; one that is begun is not cut.
    pub max_num_samples: u64,
    /// Tokens that a sample should fill, at least 2.
    pub max_seq_length: u32,
    /// The share of samples that get a shorter target at random.
    pub short_seq_prob: f64,
    /// The seed of the targets; that of the shuffle is one more.
    pub seed: u32,
    /// Sentences that a sample has at least, unless its document has ended.
    pub min_num_sent: u32,
}

/// The settings of [`build_blocks_mapping`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlocksConfig {
    /// At most so many epochs.
    pub num_epochs: u64,
    /// No epoch is begun once there are so many samples; one that is begun is not cut.
    pub max_num_samples: u64,
    /// Tokens that a block and the title of its document should fill.
    pub max_seq_length: u32,
    /// The shuffle's is one more.
    pub seed: u32,
    /// Sentences that a block has at least, unless its document has ended: 2, or 1 if blocks of
    /// one sentence are wanted.
    pub min_num_sent: u32,
}

/// Rows of (first sentence, sentence after the last, target length), shuffled.
///
/// `documents` are the first sentences of the documents and, last, the number of sentences; `sizes`
/// are the tokens of each sentence. `T` is `u32`, or `u64` for more sentences than that can count.
///
/// # Errors
/// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
///
/// # Panics
/// If `documents` fall or reach beyond `sizes`.
pub fn build_mapping<T: Element>(
    documents: &[u64],
    sizes: &[u32],
    config: &MappingConfig,
) -> Result<Npy> {
    let mut targets = Targets::new(config);
    let mut rows: Vec<[i64; 3]> = Vec::new();
    for _ in 0..config.num_epochs {
        let rows_before = rows.len();
        if rows_before as u64 >= config.max_num_samples {
            break;
        }
        for (start, sentences) in documents_of(documents, sizes) {
            if sentences.len() > 1 && has_long_sentence(sentences)
                || sentences.len() < config.min_num_sent as usize
                || sentences.is_empty()
            {
                continue;
            }
            let mut target = targets.draw();
            let (min, left) = (config.min_num_sent, 1);
            cut(sentences, min, left, |from, to, is_end, length| {
                if length < target && !is_end {
                    return false;
                }
                rows.push([start + from, start + to, i64::from(target)]);
                target = targets.draw(); // after the last of a document too
                true
            });
        }
        if rows.len() == rows_before {
            break; // an epoch like all that would follow
        }
    }
    shuffled::<T, _>(rows, config.seed)
}

/// Rows of (first sentence, sentence after the last, document, number of the block in its epoch),
/// shuffled. `title_sizes` are the tokens of each document's title; the rest is as with
/// [`build_mapping`].
///
/// # Errors
/// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
///
/// # Panics
/// If `documents` fall or reach beyond `sizes`, or a document has no title size.
pub fn build_blocks_mapping<T: Element>(
    documents: &[u64],
    sizes: &[u32],
    title_sizes: &[u32],
    config: &BlocksConfig,
) -> Result<Npy> {
    let mut rows: Vec<[i64; 4]> = Vec::new();
    let min = config.min_num_sent;
    for _ in 0..config.num_epochs {
        let rows_before = rows.len();
        if rows_before as u64 >= config.max_num_samples {
            break;
        }
        let mut block = 0;
        for (document, (start, sentences)) in documents_of(documents, sizes).enumerate() {
            let is_short = sentences.len() < min as usize || sentences.is_empty();
            if is_short || has_long_sentence(sentences) {
                continue;
            }
            let target = i64::from(config.max_seq_length) - i64::from(title_sizes[document]);
            cut(sentences, min, min as usize - 1, |from, to, is_end, length| {
                if i64::from(length) < target && !is_end {
                    return false;
                }
                rows.push([start + from, start + to, document as i64, block]);
                block += 1;
                true
            });
        }
        if rows.len() == rows_before {
            break; // an epoch like all that would follow
        }
    }
    shuffled::<T, _>(rows, config.seed)
}

/// Offers runs of sentences, growing, to `take`, which begins the next run by taking one: those of
/// at least `min` sentences with more than `left_min` behind them, and the last of the document.
fn cut(
    sentences: &[u32],
    min: u32,
    left_min: usize,
    mut take: impl FnMut(i64, i64, bool, u32) -> bool,
) {
    let (mut from, mut length) = (0, 0_u32);
    for (place, size) in sentences.iter().enumerate() {
        length = length.saturating_add(*size);
        let to = place + 1;
        let (count, left) = (to - from, sentences.len() - to);
        let is_end = left == 0;
        let is_offered = is_end || left > left_min && count >= min as usize;
        if is_offered && take(from as i64, to as i64, is_end, length) {
            (from, length) = (to, 0);
        }
    }
}

/// The first sentence of each document, and the sizes of all its sentences.
fn documents_of<'a>(
    documents: &'a [u64],
    sizes: &'a [u32],
) -> impl Iterator<Item = (i64, &'a [u32])> {
    // fits: 64 bits
    documents.windows(2).map(|ends| (ends[0] as i64, &sizes[ends[0] as usize..ends[1] as usize]))
}

fn has_long_sentence(sentences: &[u32]) -> bool {
    sentences.iter().any(|&size| size > SENTENCE_TOKENS_MAX)
}

fn shuffled<T: Element, const N: usize>(mut rows: Vec<[i64; N]>, seed: u32) -> Result<Npy> {
    Mt19937x64::new(u64::from(seed) + 1).shuffle_by_remainder(&mut rows);
    let mut array = NpyBuilder::<T>::new("mapping", &[rows.len() as u64, N as u64])?;
    rows.as_flattened().iter().for_each(|&value| array.push(value));
    Ok(array.finish())
}

/// The target length of each sample: the most, but for one in so many a random shorter one.
struct Targets {
    rng: Mt19937,
    /// One in so many; 0 for none.
    ratio: u32,
    max: u32,
}

impl Targets {
    fn new(config: &MappingConfig) -> Self {
        let prob = config.short_seq_prob;
        assert!(config.max_seq_length >= 2, "a target of 2 or more");
        // fits: probabilities small enough to be cut are none at all
        let ratio = if prob == 0.0 { 0 } else { (1.0 / prob).round() as u32 };
        Targets { rng: Mt19937::new(config.seed), ratio, max: config.max_seq_length }
    }

    fn draw(&mut self) -> u32 {
        if self.ratio == 0 {
            return self.max; // without a draw
        }
        let word = self.rng.next_u32();
        if word.is_multiple_of(self.ratio) { 2 + word % (self.max - 1) } else { self.max }
    }
}
