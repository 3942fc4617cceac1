//! CPM-2's objective: spans of a document are hidden behind markers, once, when it is tokenized.
//!
//! A document, its end included, is cut into pieces: keep, noise, keep, noise, and so on; the last
//! is noise. Piece `k` of the noise is replaced by the marker `V + k`, where `V` is the size of the
//! vocabulary, and three datasets take one sequence each:
//!
//! ```text
//! context   keep_0  V+0  keep_1  V+1  ...
//! target    V+0  noise_0  V+1  noise_1  ...
//! offsets   start and length of each part of the target, the marker included
//! ```
//!
//! The cuts depend only on the document's number and the seed, not on the order of the work or on
//! other documents. [`corrupt`] does all of it; [`choose_spans`] and [`lay_out`] are its halves.

use std::fmt;

use indexed::Dtype;

use crate::{Error, Result};

/// How spans are chosen and written. Start from [`SpanConfig::new`].
#[derive(Clone, Debug, PartialEq)]
pub struct SpanConfig {
    /// The share of the tokens that is hidden, above 0 and below 1. Default: 0.15.
    pub density: f64,
    /// Tokens of a span, on average, at least 1. Default: 3.
    pub mean_len: f64,
    /// Ids from here on are markers.
    pub vocab_size: u32,
    /// Default: 233, as in the original.
    pub seed: u64,
    /// The type of the context and the target: with 16 bits a document has at most `65,536 - V`
    /// spans. Default: as Megatron's writer decides for the vocabulary.
    pub ids: Dtype,
    /// The type of the offsets: with 16 bits a target ends at 65,535 at the latest, that is, at
    /// documents of about 330,000 tokens. Default: 32 bits; the original has 16.
    pub offsets: Dtype,
    /// A document with more spans gets this many, and longer ones, so that as much is hidden. It is
    /// for training whose sample is a whole document and whose vocabulary has as many sentinels,
    /// 190 in CPM-2's. Default: no limit, because the original's samples are short cuts of
    /// documents and count their sentinels from 0.
    pub spans_max: u32,
}

/// A document's three sequences.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Triple {
    /// The pieces that are kept, with a marker after each.
    pub context: Vec<u32>,
    /// The pieces that are hidden, with their marker before each.
    pub target: Vec<u32>,
    /// For each piece in `target`, the position of its marker, and its length with the marker.
    pub offsets: Vec<u32>,
}

/// Tokens of a document that are hidden: from `start` to before `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The first.
    pub start: u32,
    /// One past the last.
    pub end: u32,
}

/// Why a document is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dropped {
    /// It has more than 5,000,000 characters. The original means to drop it, and crashes.
    LongLine,
    /// It has fewer than 10 tokens, its end not counted.
    FewTokens,
}

/// A document that the chosen types cannot hold. The original writes such values modulo 65,536.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpanError {
    /// What was found.
    pub found: String,
    /// What was expected.
    pub expected: String,
    /// What helps.
    pub hint: &'static str,
}

impl SpanConfig {
    /// The defaults for a vocabulary.
    #[must_use]
    pub fn new(vocab_size: u32) -> Self {
        SpanConfig {
            density: 0.15,
            mean_len: 3.0,
            vocab_size,
            seed: 233,
            ids: Dtype::for_vocab(Some(u64::from(vocab_size))),
            offsets: Dtype::I32,
            spans_max: u32::MAX,
        }
    }

    /// Refuses settings by which no spans can be chosen.
    ///
    /// # Errors
    /// [`Error::BadOption`].
    pub fn check(&self) -> Result<()> {
        let bad = |name, found: String, expected: &str| {
            Err(Error::BadOption { name, found, expected: expected.to_owned(), hint: None })
        };
        if !(self.density > 0.0 && self.density < 1.0) {
            return bad("noisy-density", self.density.to_string(), "a number above 0 and below 1");
        }
        if !(self.mean_len >= 1.0 && self.mean_len.is_finite()) {
            return bad("mean-noise-span-length", self.mean_len.to_string(), "at least 1");
        }
        if self.spans_max == 0 {
            return bad("max-sentinels", "0".to_owned(), "at least 1");
        }
        if self.vocab_size > self.ids.token_max() {
            let expected = format!("at most {} for {} ids", self.ids.token_max(), self.ids);
            return bad("vocab-size", self.vocab_size.to_string(), &expected);
        }
        Ok(())
    }
}

impl Dropped {
    /// Whether the original drops a document: `line_chars` are the characters of its line, the
    /// newline included, and `tokens` are counted before the end is appended.
    #[must_use]
    pub fn of(line_chars: u64, tokens: u64) -> Option<Self> {
        match (line_chars, tokens) {
            (5_000_001.., _) => Some(Dropped::LongLine),
            (_, ..10) => Some(Dropped::FewTokens),
            _ => None,
        }
    }
}

/// Makes the three sequences of a document from its ids, the last of which is its end.
///
/// `document` is any number that no other document has, and that does not depend on the order of
/// the work.
///
/// # Errors
/// [`SpanError`] if a marker or an offset does not fit its type, an id is a marker's, or there are
/// fewer than 2 ids: the triple is then invalid.
pub fn corrupt(
    ids: &[u32],
    document: u64,
    config: &SpanConfig,
    triple: &mut Triple,
) -> std::result::Result<(), SpanError> {
    if ids.len() < 2 || u32::try_from(ids.len()).is_err() {
        return Err(SpanError {
            found: format!("a document of {} tokens", ids.len()),
            expected: "2 to 4294967295 tokens".to_owned(),
            hint: "skip the document: it needs a visible and a hidden token",
        });
    }
    let mut spans = Vec::new();
    choose_spans(ids.len() as u32, document, config, &mut spans); // fits: checked above
    lay_out(ids, &spans, config, triple)
}

/// Chooses the spans of a document of `tokens`, 2 or more, its end among them.
///
/// Their number and sum are the original's, where Python's `round` takes halves to the even side.
/// All ways to cut that many kept and that many hidden tokens into that many pieces, none of them
/// empty, are equally likely. The original's choice cannot be reproduced, because it depends on
/// which process took which document. This one is drawn from `SplitMix64`, which starts at the mix
/// of the seed and the mixed document number.
pub fn choose_spans(tokens: u32, document: u64, config: &SpanConfig, spans: &mut Vec<Span>) {
    let noise = (f64::from(tokens) * config.density).round_ties_even();
    let noise = (noise as u32).clamp(1, tokens - 1);
    let keep = tokens - noise;
    let count = (f64::from(noise) / config.mean_len).round_ties_even() as u32;
    // More pieces than tokens on either side would leave some of them empty.
    let count = count.max(1).min(noise).min(keep).min(config.spans_max);

    let mut rng = SplitMix64(mix(config.seed ^ mix(document.wrapping_add(GOLDEN))));
    spans.clear();
    spans.extend((0..count).map(|_| Span { start: 0, end: 0 }));
    // For each span first its length, then the number of tokens kept before it.
    each_piece(noise, count, &mut rng, |k, len| spans[k].end = len);
    each_piece(keep, count, &mut rng, |k, len| spans[k].start = len);
    let mut at = 0;
    for span in spans {
        span.start += at;
        span.end += span.start;
        at = span.end;
    }
}

/// Writes a document's three sequences with the given spans hidden. Tokens after the last span are
/// lost, so it should end with the document.
///
/// # Errors
/// As [`corrupt`].
///
/// # Panics
/// If the spans overlap, are out of order, or reach beyond the document.
pub fn lay_out(
    ids: &[u32],
    spans: &[Span],
    config: &SpanConfig,
    triple: &mut Triple,
) -> std::result::Result<(), SpanError> {
    let Triple { context, target, offsets } = triple;
    context.clear();
    target.clear();
    offsets.clear();
    let vocab_size = config.vocab_size;
    if let Some(id) = ids.iter().find(|&&id| id >= vocab_size) {
        return Err(SpanError {
            found: format!("token {id}"),
            expected: format!("an id below {vocab_size}, the first marker"),
            hint: "use the vocabulary size of the tokenizer",
        });
    }
    check_fits(ids.len(), spans, config)?;
    let mut kept = 0;
    for (marker, span) in (vocab_size..).zip(spans) {
        let (start, end) = (span.start as usize, span.end as usize);
        context.extend_from_slice(&ids[kept..start]);
        context.push(marker);
        offsets.push(target.len() as u32); // fits: checked
        offsets.push(1 + span.end - span.start);
        target.push(marker);
        target.extend_from_slice(&ids[start..end]);
        kept = end;
    }
    Ok(())
}

fn check_fits(
    tokens: usize,
    spans: &[Span],
    config: &SpanConfig,
) -> std::result::Result<(), SpanError> {
    let ids = u64::from(config.ids.token_max()) + 1;
    let markers_max = ids.saturating_sub(u64::from(config.vocab_size));
    if spans.len() as u64 > markers_max {
        return Err(SpanError {
            found: format!("a document of {tokens} tokens with {} spans", spans.len()),
            expected: format!("at most {markers_max} spans with {} ids", config.ids),
            hint: "use 32-bit ids, or divide the document",
        });
    }
    let (mut offset, mut largest) = (0, 0);
    for span in spans {
        let len = 1 + u64::from(span.end - span.start);
        largest = largest.max(offset).max(len);
        offset += len;
    }
    let offset_max = config.offsets.token_max();
    if largest > u64::from(offset_max) {
        return Err(SpanError {
            found: format!("a document of {tokens} tokens with an offset of {largest}"),
            expected: format!("at most {offset_max} in {} offsets", config.offsets),
            hint: "use 32-bit offsets, or divide the document",
        });
    }
    Ok(())
}

/// Cuts `tokens` into `count` pieces, none empty, all ways equally likely: of the `tokens - 1`
/// places between two tokens it chooses `count - 1`. From left to right, each is taken with the
/// probability of those still to be chosen among those still ahead.
fn each_piece(tokens: u32, count: u32, rng: &mut SplitMix64, mut put: impl FnMut(usize, u32)) {
    let (mut piece, mut start) = (0, 0);
    let mut remaining = count - 1;
    for place in 1..tokens {
        if remaining == 0 {
            break;
        }
        if rng.below(tokens - place) < remaining {
            put(piece, place - start);
            (piece, start, remaining) = (piece + 1, place, remaining - 1);
        }
    }
    put(piece, tokens - start);
}

/// The odd number nearest to 2^64 divided by the golden ratio.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Steele, Lea and Flood's generator: any seed is as good as the next.
struct SplitMix64(u64);

impl SplitMix64 {
    fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        mix(self.0)
    }

    /// A number below `end`, all equally likely: Lemire's multiplication, whose biased results are
    /// drawn again.
    fn below(&mut self, end: u32) -> u32 {
        loop {
            let product = (self.next_u64() >> 32) * u64::from(end);
            let (high, low) = ((product >> 32) as u32, product as u32);
            if low >= end || low >= end.wrapping_neg() % end {
                return high;
            }
        }
    }
}

/// The finalizer of `SplitMix64`: every bit of the input moves every bit of the output.
fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

impl fmt::Display for SpanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SpanError { found, expected, hint } = self;
        write!(f, "cannot hide spans: expected {expected}, found {found} (hint: {hint})")
    }
}

impl std::error::Error for SpanError {}
