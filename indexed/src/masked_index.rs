//! Runs of sentences for BERT, T5 and ICT: Megatron's `build_mapping` and `build_blocks_mapping`.

use crate::npy::{Element, Npy};
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
    /// Tokens that a sample should fill.
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
/// # Panics
/// If `documents` fall or reach beyond `sizes`.
#[must_use]
pub fn build_mapping<T: Element>(documents: &[u64], sizes: &[u32], config: &MappingConfig) -> Npy {
    let mut targets = Targets::new(config);
    let mut rows: Vec<[T; 3]> = Vec::new();
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
                rows.push([start + from, start + to, u64::from(target)].map(element));
                target = targets.draw(); // after the last of a document too
                true
            });
        }
        if rows.len() == rows_before {
            break; // an epoch like all that would follow
        }
    }
    shuffled(rows, config.seed)
}

/// Rows of (first sentence, sentence after the last, document, number of the block in its epoch),
/// shuffled. `title_sizes` are the tokens of each document's title; the rest is as with
/// [`build_mapping`].
///
/// # Panics
/// If `documents` fall or reach beyond `sizes`, or a document has no title size.
#[must_use]
pub fn build_blocks_mapping<T: Element>(
    documents: &[u64],
    sizes: &[u32],
    title_sizes: &[u32],
    config: &BlocksConfig,
) -> Npy {
    let mut rows: Vec<[T; 4]> = Vec::new();
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
                rows.push([start + from, start + to, document as u64, block].map(element));
                block += 1;
                true
            });
        }
        if rows.len() == rows_before {
            break; // an epoch like all that would follow
        }
    }
    shuffled(rows, config.seed)
}

/// Offers runs of sentences, growing, to `take`, which begins the next run by taking one: those of
/// at least `min` sentences with more than `left_min` behind them, and the last of the document.
fn cut(
    sentences: &[u32],
    min: u32,
    left_min: usize,
    mut take: impl FnMut(u64, u64, bool, u32) -> bool,
) {
    let (mut from, mut length) = (0, 0_u32);
    for (place, size) in sentences.iter().enumerate() {
        length = length.saturating_add(*size);
        let to = place + 1;
        let (count, left) = (to - from, sentences.len() - to);
        let is_end = left == 0;
        let is_offered = is_end || left > left_min && count >= min as usize;
        if is_offered && take(from as u64, to as u64, is_end, length) {
            (from, length) = (to, 0);
        }
    }
}

/// The first sentence of each document, and the sizes of all its sentences.
fn documents_of<'a>(
    documents: &'a [u64],
    sizes: &'a [u32],
) -> impl Iterator<Item = (u64, &'a [u32])> {
    // fits: one that is cut is out of the range of the sizes all the same
    documents.windows(2).map(|ends| (ends[0], &sizes[ends[0] as usize..ends[1] as usize]))
}

fn has_long_sentence(sentences: &[u32]) -> bool {
    sentences.iter().any(|&size| size > SENTENCE_TOKENS_MAX)
}

fn element<T: Element>(value: u64) -> T {
    T::from_i64(value as i64) // fits: a place in a table in memory
}

fn shuffled<T: Element, const N: usize>(mut rows: Vec<[T; N]>, seed: u32) -> Npy {
    Mt19937x64::new(u64::from(seed) + 1).shuffle_by_remainder(&mut rows);
    Npy::from_rows(rows.as_flattened(), N)
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
