use indexed::rng::{RandomState, numpy_sum};

use crate::{Error, Result};

/// How Megatron's `MaskedWordPieceDataset` chooses the tokens that a model predicts.
#[derive(Clone, Debug, PartialEq)]
pub struct Masking {
    /// The share of tokens to choose. More than 0, less than 1.
    pub probability: f64,
    /// The longest run of words that is chosen at once. Minimum: 1.
    pub ngram_max: usize,
    /// How long the runs are.
    pub lengths: NgramLengths,
    /// Whether a word is chosen with all of its pieces (`masking_do_full_word`).
    pub full_words: bool,
    /// The id that starts a text, which is never chosen.
    pub cls: i64,
    /// The id that ends a part of a text, which is never chosen.
    pub sep: i64,
    /// The id that replaces masked tokens.
    pub mask: i64,
    /// The vocabulary.
    pub vocabulary: Vocabulary,
}

/// How long the runs of words are that are chosen at once, n from 1 to the longest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NgramLengths {
    /// In proportion to 1/n.
    #[default]
    ShorterFirst,
    /// The reverse: the longest are as likely as the shortest are with
    /// [`NgramLengths::ShorterFirst`] (`masking_use_longer_ngrams`).
    LongerFirst,
    /// Geometric with p = 0.2, cut at the longest (`masking_use_geometric_distribution`).
    Geometric,
}

/// p of [`NgramLengths::Geometric`], after SpanBERT.
const GEOMETRIC_P: f64 = 0.2;

/// The ids from 0 on, and which of them continue a word.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Vocabulary {
    continues: Vec<bool>,
}

impl Vocabulary {
    /// Takes the texts of all ids, in the order of the ids: WordPiece marks a continuation with
    /// `##`.
    pub fn new<T: AsRef<str>>(texts: impl IntoIterator<Item = T>) -> Self {
        let continues = texts.into_iter().map(|text| text.as_ref().starts_with("##"));
        Vocabulary { continues: continues.collect() }
    }

    /// How many ids there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.continues.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.continues.is_empty()
    }

    /// Whether an id continues a word; `None` if there is no such id.
    fn continues(&self, id: i64) -> Option<bool> {
        self.continues.get(usize::try_from(id).ok()?).copied()
    }
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Vocabulary of {} ids", self.len())
    }
}

/// Tokens that were chosen at once.
#[derive(Clone, Copy, Debug)]
pub(super) struct MaskedSpan {
    /// Indices into [`Masker::members`].
    start: u32,
    end: u32,
}

/// Chooses the tokens to mask, with reused buffers.
#[derive(Debug)]
pub(super) struct Masker {
    pub(super) masking: Masking,
    /// The probability of each run length and all shorter ones.
    up_to: Vec<f64>,
    /// The positions of all tokens that may be chosen, ascending. A word is a run of them: its
    /// pieces are consecutive, apart from special tokens between them.
    members: Vec<u32>,
    /// Where in `members` each word starts, and the end of the last.
    words: Vec<u32>,
    /// The words in the order in which they are considered.
    order: Vec<u32>,
    /// Which tokens are chosen.
    is_chosen: Vec<bool>,
    /// The chosen spans, sorted by their first token in the end.
    spans: Vec<MaskedSpan>,
}

impl Masker {
    /// # Errors
    /// [`Error::Option`] for a setting out of its range.
    pub(super) fn new(masking: Masking) -> Result<Self> {
        if !(masking.probability > 0.0 && masking.probability < 1.0) {
            let found = masking.probability as u64;
            return Err(Error::Option {
                name: "masking_probability",
                found,
                expected: "between 0 and 1",
            });
        }
        if masking.ngram_max == 0 {
            return Err(Error::Option {
                name: "masking_max_ngram",
                found: 0,
                expected: "at least 1",
            });
        }
        if masking.vocabulary.is_empty() {
            return Err(Error::Option { name: "vocabulary", found: 0, expected: "at least 1 id" });
        }
        Ok(Masker {
            up_to: cumulative(masking.ngram_max, masking.lengths),
            masking,
            members: Vec::new(),
            words: Vec::new(),
            order: Vec::new(),
            is_chosen: Vec::new(),
            spans: Vec::new(),
        })
    }

    /// Chooses among the tokens of a sample that was built for `target_len` of them, and calls
    /// `visit` for each token as it is chosen, so that random numbers are drawn in Megatron's
    /// order.
    ///
    /// # Errors
    /// The first id outside the vocabulary.
    pub(super) fn choose(
        &mut self,
        tokens: &[i64],
        target_len: u32,
        rng: &mut RandomState,
        mut visit: impl FnMut(&mut RandomState, usize),
    ) -> std::result::Result<(), i64> {
        self.find_words(tokens)?;
        let count_max = count_max(self.masking.probability, target_len, tokens.len());
        self.is_chosen.clear();
        self.is_chosen.resize(tokens.len(), false);
        self.spans.clear();
        let words = self.words.len() - 1;
        self.order.clear();
        self.order.extend(0..words as u32); // fits: a sample has fewer tokens
        rng.shuffle(&mut self.order);
        let mut chosen = 0;
        for &word in &self.order {
            if chosen as f64 >= count_max {
                break;
            }
            let ngram = match self.masking.lengths {
                NgramLengths::Geometric => rng.geometric(GEOMETRIC_P) as usize, // fits: saturates
                _ => 1 + choice(&self.up_to, rng),
            };
            let ngram = ngram.min(self.masking.ngram_max);
            let start = self.words[word as usize];
            let end_after = |n: usize| self.words[words.min(word as usize + n)];
            let fits = |end: &u32| count_max >= f64::from(chosen + end - start);
            // The longest run of at most `ngram` words that does not exceed the maximum.
            let Some(end) = (1..=ngram).rev().map(end_after).find(fits) else { continue };
            let span = &self.members[start as usize..end as usize];
            if span.iter().any(|&position| self.is_chosen[position as usize]) {
                continue;
            }
            for &position in span {
                self.is_chosen[position as usize] = true;
                visit(rng, position as usize);
            }
            chosen += end - start;
            self.spans.push(MaskedSpan { start, end });
        }
        self.spans.sort_unstable_by_key(|span| span.start);
        Ok(())
    }

    /// The chosen positions, ascending.
    pub(super) fn chosen(&self) -> impl Iterator<Item = usize> + '_ {
        (0..)
            .zip(&self.is_chosen)
            .filter_map(|(position, &is_chosen)| is_chosen.then_some(position))
    }

    /// The positions of each chosen span, sorted by the first.
    pub(super) fn spans(&self) -> impl Iterator<Item = &[u32]> {
        self.spans.iter().map(|span| &self.members[span.start as usize..span.end as usize])
    }

    fn find_words(&mut self, tokens: &[i64]) -> std::result::Result<(), i64> {
        let Masking { cls, sep, full_words, vocabulary, .. } = &self.masking;
        self.members.clear();
        self.words.clear();
        for (position, &token) in tokens.iter().enumerate() {
            if token == *cls || token == *sep {
                continue;
            }
            let continues = vocabulary.continues(token).ok_or(token)?;
            if !(continues && *full_words && !self.words.is_empty()) {
                self.words.push(self.members.len() as u32); // fits: below
            }
            self.members.push(position as u32); // fits: a sample is much shorter
        }
        self.words.push(self.members.len() as u32);
        Ok(())
    }
}

/// The maximum number of chosen tokens. It may be a fraction, and is compared as such.
fn count_max(probability: f64, target_len: u32, len: usize) -> f64 {
    let share = (len as f64 * probability).round_ties_even().max(1.0);
    (probability * f64::from(target_len)).min(share)
}

/// The probability of each length and all shorter ones, with numpy's rounding of every step.
fn cumulative(ngram_max: usize, lengths: NgramLengths) -> Vec<f64> {
    let mut p: Vec<f64> = (1..=ngram_max).map(|n| 1.0 / n as f64).collect();
    let sum = numpy_sum(&p);
    p.iter_mut().for_each(|p| *p /= sum);
    // numpy normalises again at each choice, and adds a reversed array in the order of memory.
    let sum = numpy_sum(&p);
    p.iter_mut().for_each(|p| *p /= sum);
    if lengths == NgramLengths::LongerFirst {
        p.reverse();
    }
    let mut up_to = 0.0;
    p.iter_mut().for_each(|p| {
        up_to += *p;
        *p = up_to;
    });
    p.iter_mut().for_each(|p| *p /= up_to);
    p
}

/// `choice` of numpy with cumulative probabilities: the index of the first above a random number.
fn choice(up_to: &[f64], rng: &mut RandomState) -> usize {
    let random = rng.random_sample();
    up_to.partition_point(|&up_to| up_to <= random).min(up_to.len() - 1)
}
