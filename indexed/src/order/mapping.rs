//! Runs of sentences for BERT, T5 and ICT: Megatron's `build_mapping` and `build_blocks_mapping`.

use crate::Result;
use crate::cache::npy::{Element, Npy, NpyBuilder};
use crate::mmididx::idx::{I32Le, I64Le};
use crate::rng::{Mt19937, Mt19937x64};

/// A document with a sentence longer than this is skipped.
const SENTENCE_TOKENS_MAX: u32 = 512;

/// The settings of [`build_mapping`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MappingConfig {
    /// Maximum of epochs.
    pub num_epochs: u64,
    /// No epoch is started after this many samples; a started epoch is not truncated.
    pub max_num_samples: u64,
    /// Tokens that a sample should fill, at least 2.
    pub max_seq_length: u32,
    /// The share of samples that get a shorter target at random.
    pub short_seq_prob: f64,
    /// The seed of the targets; the seed of the shuffle is one larger.
    pub seed: u32,
    /// Minimum of sentences in a sample, unless its document has ended.
    pub min_num_sent: u32,
}

/// The settings of [`build_blocks_mapping`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlocksConfig {
    /// Maximum of epochs.
    pub num_epochs: u64,
    /// No epoch is started after this many samples; a started epoch is not truncated.
    pub max_num_samples: u64,
    /// Tokens that a block and the title of its document should fill.
    pub max_seq_length: u32,
    /// The seed; that of the shuffle is one larger.
    pub seed: u32,
    /// Minimum of sentences in a block, unless its document has ended: 2, or 1 to allow blocks of
    /// one sentence.
    pub min_num_sent: u32,
}

/// Rows of (first sentence, sentence after the last, target length), shuffled.
///
/// `documents` are the first sentences of the documents and, last, the number of sentences; `sizes`
/// are the tokens of each sentence; both little-endian, as in an `.idx`. `T` is `u32`, or `u64` for
/// more sentences than that can count.
///
/// # Errors
/// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
///
/// # Panics
/// If `documents` decrease or exceed the length of `sizes`.
pub fn build_mapping<T: Element>(
    documents: &[I64Le],
    sizes: &[I32Le],
    config: &MappingConfig,
) -> Result<Npy> {
    // In two passes: counting is cheap, and a growing table needs twice its memory.
    let mut count = 0;
    mapping_rows(documents, sizes, config, |_| count += 1);
    let mut rows = NpyBuilder::<T>::new("mapping", &[count, 3])?;
    mapping_rows(documents, sizes, config, |row| row.iter().for_each(|&value| rows.push(value)));
    shuffle_rows(rows.data_mut(), 3 * size_of::<T>(), config.seed);
    Ok(rows.finish())
}

/// Calls `visit` with every row of [`build_mapping`], before they are shuffled.
pub(crate) fn mapping_rows(
    documents: &[I64Le],
    sizes: &[I32Le],
    config: &MappingConfig,
    mut visit: impl FnMut([i64; 3]),
) {
    let mut targets = Targets::new(config);
    let mut rows = 0;
    for _ in 0..config.num_epochs {
        let rows_before = rows;
        if rows_before >= config.max_num_samples {
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
                visit([start + from, start + to, i64::from(target)]);
                rows += 1;
                target = targets.draw(); // after the last of a document too
                true
            });
        }
        if rows == rows_before {
            break; // an epoch like all that would follow
        }
    }
}

/// Rows of (first sentence, sentence after the last, document, number of the block in its epoch),
/// shuffled. `title_sizes` are the tokens of each document's title; the rest is as with
/// [`build_mapping`].
///
/// # Errors
/// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
///
/// # Panics
/// If `documents` decrease or exceed the length of `sizes`, or a document has no title size.
pub fn build_blocks_mapping<T: Element>(
    documents: &[I64Le],
    sizes: &[I32Le],
    title_sizes: &[I32Le],
    config: &BlocksConfig,
) -> Result<Npy> {
    let mut count = 0;
    blocks_rows(documents, sizes, title_sizes, config, |_| count += 1);
    let mut rows = NpyBuilder::<T>::new("blocks mapping", &[count, 4])?;
    blocks_rows(documents, sizes, title_sizes, config, |row| {
        row.iter().for_each(|&value| rows.push(value));
    });
    shuffle_rows(rows.data_mut(), 4 * size_of::<T>(), config.seed);
    Ok(rows.finish())
}

fn blocks_rows(
    documents: &[I64Le],
    sizes: &[I32Le],
    title_sizes: &[I32Le],
    config: &BlocksConfig,
    mut visit: impl FnMut([i64; 4]),
) {
    let (min, mut rows) = (config.min_num_sent, 0);
    for _ in 0..config.num_epochs {
        let rows_before = rows;
        if rows_before >= config.max_num_samples {
            break;
        }
        let mut block = 0;
        for (document, (start, sentences)) in documents_of(documents, sizes).enumerate() {
            let is_short = sentences.len() < min as usize || sentences.is_empty();
            if is_short || has_long_sentence(sentences) {
                continue;
            }
            let title = u32::from_le_bytes(title_sizes[document]);
            let target = i64::from(config.max_seq_length) - i64::from(title);
            cut(sentences, min, min as usize - 1, |from, to, is_end, length| {
                if i64::from(length) < target && !is_end {
                    return false;
                }
                visit([start + from, start + to, document as i64, block]);
                (rows, block) = (rows + 1, block + 1);
                true
            });
        }
        if rows == rows_before {
            break; // an epoch like all that would follow
        }
    }
}

/// Offers growing runs of sentences to `take`: those of at least `min` sentences with more than
/// `left_min` sentences after them, and the last of the document. The next run starts when `take`
/// accepts one.
fn cut(
    sentences: &[I32Le],
    min: u32,
    left_min: usize,
    mut take: impl FnMut(i64, i64, bool, u32) -> bool,
) {
    let (mut from, mut length) = (0, 0_u32);
    for (place, size) in sentences.iter().enumerate() {
        length = length.saturating_add(u32::from_le_bytes(*size));
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
    documents: &'a [I64Le],
    sizes: &'a [I32Le],
) -> impl Iterator<Item = (i64, &'a [I32Le])> {
    let at = |sentence: &I64Le| i64::from_le_bytes(*sentence);
    let pairs = documents.iter().zip(documents.get(1..).unwrap_or_default());
    // fits: 64 bits
    pairs.map(move |(start, end)| (at(start), &sizes[at(start) as usize..at(end) as usize]))
}

fn has_long_sentence(sentences: &[I32Le]) -> bool {
    sentences.iter().any(|size| u32::from_le_bytes(*size) > SENTENCE_TOKENS_MAX)
}

/// Shuffles rows of three or four numbers of 32 or 64 bits.
fn shuffle_rows(data: &mut [u8], row_bytes: usize, seed: u32) {
    let mut rng = Mt19937x64::new(u64::from(seed) + 1);
    match row_bytes {
        12 => rng.shuffle_by_remainder(data.as_chunks_mut::<12>().0),
        16 => rng.shuffle_by_remainder(data.as_chunks_mut::<16>().0),
        24 => rng.shuffle_by_remainder(data.as_chunks_mut::<24>().0),
        _ => rng.shuffle_by_remainder(data.as_chunks_mut::<32>().0),
    }
}

/// The target length of each sample: the maximum, or for one in `ratio` a random shorter one.
struct Targets {
    rng: Mt19937,
    /// One in this many samples is shorter; 0: none.
    ratio: u32,
    max: u32,
}

impl Targets {
    fn new(config: &MappingConfig) -> Self {
        let prob = config.short_seq_prob;
        assert!(config.max_seq_length >= 2, "a target of 2 or more");
        // fits: probabilities this small count as none
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
