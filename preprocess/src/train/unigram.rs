//! Trains a unigram language model by expectation maximization (Kudo 2018, "Subword
//! Regularization"), with the steps and constants of SentencePiece's trainer.
//!
//! The trainer of the `tokenizers` crate was measured first: on the corpus of the demo its pieces
//! encode 9 % fewer bytes per token than SentencePiece's, because it looks for its first pieces in
//! distinct words and not in the text. Here a piece counts as often as it occurs.
//!
//! Expected counts are added as integers, so that the result does not depend on how words are
//! divided among threads.

use std::collections::{HashMap, HashSet};

use super::pieces::PIECE_CHARS_MAX;
use super::threads::Threads;
use crate::Result;
use crate::tokenizer::Trie;

/// The pieces that training begins with.
const SEEDS_MAX: usize = 1_000_000;

/// Candidate strings of one length, the most frequent ones: a bound of memory.
const STRINGS_MAX: usize = 4_000_000;

/// Rounds of expectation and maximization between two prunings.
const ROUNDS: usize = 2;

/// The part of the pieces that a pruning keeps.
const KEPT: f64 = 0.75;

/// Pruning ends at this many pieces per wanted piece.
const SPARE: f64 = 1.1;

/// A piece with a smaller expected count is dropped.
const EXPECTED_MIN: f64 = 0.5;

/// Units of an expected count.
const UNITS: f64 = (1 << 20) as f64;

/// Words, and how often each occurs.
type Words = [(String, u64)];

/// The `wanted` best pieces with their log probabilities; all of `characters` are among them, and
/// none of `special`.
pub(super) fn train(
    words: &Words,
    characters: &[char],
    special: &[String],
    wanted: usize,
    threads: Threads<'_>,
) -> Result<Vec<(String, f64)>> {
    let mut pieces = seeds(words, characters, threads)?;
    pieces.retain(|piece| !special.contains(&piece.text));
    let spare = (wanted as f64 * SPARE) as usize;
    loop {
        let mut lattice = Lattice::new(&pieces);
        for _ in 0..ROUNDS {
            let expected = lattice.expected(words, threads)?;
            lattice.maximize(&expected);
        }
        pieces = lattice.remaining(&pieces);
        if pieces.len() <= spare {
            break;
        }
        let lattice = Lattice::new(&pieces);
        let frequencies = lattice.best_counts(words, threads)?;
        let kept = lattice.kept(words, &frequencies, spare);
        let mut nth = 0..;
        pieces.retain(|_| kept.contains(&nth.next().expect("it has no end")));
    }
    // Characters first, because all are required; then the most probable pieces.
    pieces.sort_by(|a, b| {
        (a.is_character(), a.score, &b.text)
            .partial_cmp(&(b.is_character(), b.score, &a.text))
            .expect("scores are numbers")
            .reverse()
    });
    pieces.truncate(wanted);
    Ok(pieces.into_iter().map(|piece| (piece.text, piece.score)).collect())
}

/// A piece and the logarithm of its probability.
#[derive(Clone, Debug)]
struct Candidate {
    text: String,
    score: f64,
}

impl Candidate {
    fn is_character(&self) -> bool {
        self.text.chars().nth(1).is_none()
    }
}

/// All characters, and the strings inside words that are the best candidates: those that occur at
/// least twice and are not always followed by the same character, by occurrences times characters.
fn seeds(words: &Words, characters: &[char], threads: Threads<'_>) -> Result<Vec<Candidate>> {
    let single = threads.counted(words, |(word, times), counts| {
        word.chars().for_each(|c| *counts.entry(c).or_default() += times);
    })?;
    let mut candidates: Vec<(String, u64)> = Vec::new();
    let mut shorter: HashMap<&str, u64> = HashMap::new();
    for chars in 2..=PIECE_CHARS_MAX {
        let strings = threads.counted(words, |(word, times), counts| {
            for string in strings(word, chars) {
                let is_known = |part: &str| chars == 2 || shorter.contains_key(part);
                if is_known(without_last(string)) && is_known(without_first(string)) {
                    *counts.entry(string).or_default() += times;
                }
            }
        })?;
        let mut strings: Vec<(&str, u64)> =
            strings.into_iter().filter(|(_, times)| *times >= 2).collect();
        strings.sort_unstable_by(|a, b| (b.1, a.0).cmp(&(a.1, b.0)));
        strings.truncate(STRINGS_MAX);
        let prefixes = strings.iter().map(|(string, times)| (without_last(string), *times));
        let inner: HashSet<&str> = prefixes
            .filter(|(prefix, times)| shorter.get(prefix) == Some(times))
            .map(|(prefix, _)| prefix)
            .collect();
        let maximal = shorter.iter().filter(|(string, _)| !inner.contains(*string));
        let score =
            |(string, times): (&&str, &u64)| ((*string).to_owned(), times * (chars as u64 - 1));
        candidates.extend(maximal.map(score));
        shorter = strings.into_iter().collect();
        if shorter.is_empty() {
            break;
        }
    }
    candidates.extend(shorter.iter().map(|(s, n)| ((*s).to_owned(), n * PIECE_CHARS_MAX as u64)));
    candidates.sort_unstable_by(|a, b| (b.1, &a.0).cmp(&(a.1, &b.0)));
    candidates.truncate(SEEDS_MAX);
    // A character that is not in the sample occurs once.
    let singles = characters.iter().map(|c| (c.to_string(), single.get(c).copied().unwrap_or(1)));
    let all: Vec<(String, u64)> = singles.chain(candidates).collect();
    let sum: u64 = all.iter().map(|(_, score)| score).sum();
    let score = |times: u64| (times as f64).ln() - (sum as f64).ln();
    Ok(all.into_iter().map(|(text, times)| Candidate { text, score: score(times) }).collect())
}

/// The strings of `chars` characters in a word.
fn strings(word: &str, chars: usize) -> impl Iterator<Item = &str> {
    let ends = word.char_indices().map(|(at, _)| at).chain([word.len()]).skip(chars);
    word.char_indices().zip(ends).map(|((start, _), end)| &word[start..end])
}

fn without_first(string: &str) -> &str {
    let mut rest = string.chars();
    rest.next();
    rest.as_str()
}

fn without_last(string: &str) -> &str {
    let mut rest = string.chars();
    rest.next_back();
    rest.as_str()
}

/// The ways to write a text with pieces.
struct Lattice<'a> {
    trie: Trie,
    texts: Vec<&'a str>,
    is_character: Vec<bool>,
    /// Minus infinity for a piece that was dropped.
    scores: Vec<f64>,
}

/// A piece in a text.
#[derive(Clone, Copy, Debug)]
struct Edge {
    start: usize,
    end: usize,
    piece: u32,
}

impl<'a> Lattice<'a> {
    fn new(pieces: &'a [Candidate]) -> Self {
        let entry = |(nth, piece): (usize, &'a Candidate)| (piece.text.as_bytes(), nth as u32);
        Lattice {
            trie: Trie::new(pieces.iter().enumerate().map(entry).collect()),
            texts: pieces.iter().map(|piece| piece.text.as_str()).collect(),
            is_character: pieces.iter().map(Candidate::is_character).collect(),
            scores: pieces.iter().map(|piece| piece.score).collect(),
        }
    }

    /// The edges of a text, by their starts.
    fn edges(&self, text: &str, edges: &mut Vec<Edge>) {
        edges.clear();
        for (start, _) in text.char_indices() {
            let mut state = self.trie.root();
            for (end, byte) in text.bytes().enumerate().skip(start) {
                let Some(next) = self.trie.step(state, byte) else { break };
                state = next;
                let piece = state.value().filter(|&id| self.scores[id as usize].is_finite());
                edges.extend(piece.map(|piece| Edge { start, end: end + 1, piece }));
            }
        }
    }

    /// The expected count of each piece, in [`UNITS`].
    fn expected(&self, words: &Words, threads: Threads<'_>) -> Result<Vec<u64>> {
        let parts = threads.in_parts(words, |part| {
            let mut expected = vec![0; self.texts.len()];
            let (mut edges, mut before, mut after) = (Vec::new(), Vec::new(), Vec::new());
            for (word, times) in part {
                self.edges(word, &mut edges);
                before.clear();
                before.resize(word.len() + 1, f64::NEG_INFINITY);
                after.clear();
                after.resize(word.len() + 1, f64::NEG_INFINITY);
                (before[0], after[word.len()]) = (0.0, 0.0);
                for &Edge { start, end, piece } in &edges {
                    let path = before[start] + self.scores[piece as usize];
                    before[end] = sum_of_exponents(before[end], path);
                }
                for &Edge { start, end, piece } in edges.iter().rev() {
                    let path = after[end] + self.scores[piece as usize];
                    after[start] = sum_of_exponents(after[start], path);
                }
                let all = before[word.len()];
                for &Edge { start, end, piece } in &edges {
                    let path = before[start] + self.scores[piece as usize] + after[end];
                    let count = *times as f64 * (path - all).exp();
                    expected[piece as usize] += (count * UNITS).round() as u64;
                }
            }
            expected
        })?;
        Ok(sums(parts))
    }

    /// Sets the scores from expected counts, with the digamma function as a sparse prior, and drops
    /// rare pieces.
    fn maximize(&mut self, expected: &[u64]) {
        let counts: Vec<f64> = expected
            .iter()
            .zip(&self.is_character)
            .map(|(&units, &stays)| match units as f64 / UNITS {
                count if count >= EXPECTED_MIN => count,
                _ if stays => EXPECTED_MIN,
                _ => 0.0,
            })
            .collect();
        let sum = digamma(counts.iter().sum());
        for (score, count) in self.scores.iter_mut().zip(counts) {
            *score = if count > 0.0 { digamma(count) - sum } else { f64::NEG_INFINITY };
        }
    }

    /// How often each piece is in the best segmentations of the words.
    fn best_counts(&self, words: &Words, threads: Threads<'_>) -> Result<Vec<u64>> {
        let parts = threads.in_parts(words, |part| {
            let mut counts = vec![0; self.texts.len()];
            let (mut edges, mut path) = (Vec::new(), Vec::new());
            for (word, times) in part {
                self.best(word, None, &mut edges, &mut path);
                path.iter().for_each(|&piece| counts[piece as usize] += times);
            }
            counts
        })?;
        Ok(sums(parts))
    }

    /// The best path through a text without a piece, from its end, and its score.
    fn best(
        &self,
        text: &str,
        without: Option<u32>,
        edges: &mut Vec<Edge>,
        path: &mut Vec<u32>,
    ) -> f64 {
        self.edges(text, edges);
        let mut best = vec![(f64::NEG_INFINITY, None); text.len() + 1];
        best[0].0 = 0.0;
        for edge in edges.iter().filter(|edge| Some(edge.piece) != without) {
            let score = best[edge.start].0 + self.scores[edge.piece as usize];
            if score > best[edge.end].0 {
                best[edge.end] = (score, Some(*edge));
            }
        }
        path.clear();
        let mut at = text.len();
        while let (_, Some(edge)) = best[at] {
            path.push(edge.piece);
            at = edge.start;
        }
        best[text.len()].0
    }

    /// The pieces whose loss would cost most: by how much the likelihood of the words falls if a
    /// piece is written by its best alternative.
    fn kept(&self, words: &Words, frequencies: &[u64], spare: usize) -> HashSet<usize> {
        let word_count: u64 = words.iter().map(|(_, times)| times).sum();
        let sum: u64 = frequencies.iter().sum();
        let (mut kept, mut losses) = (HashSet::new(), Vec::new());
        let (mut edges, mut path) = (Vec::new(), Vec::new());
        for (nth, text) in self.texts.iter().enumerate() {
            let alternative = self.best(text, Some(nth as u32), &mut edges, &mut path);
            let is_needed = alternative == f64::NEG_INFINITY || self.is_character[nth];
            let frequency = frequencies[nth] as f64;
            if is_needed || (alternative > self.scores[nth] && frequencies[nth] > 0) {
                kept.insert(nth);
            } else if frequencies[nth] > 0 {
                let log_own = frequency.ln() - (sum as f64).ln();
                let new_sum = sum as f64 + frequency * (path.len() as f64 - 1.0);
                let log_new = |&id: &u32| (frequencies[id as usize] as f64 + frequency).ln();
                let log_path: f64 = path.iter().map(|id| log_new(id) - new_sum.ln()).sum();
                losses.push((frequency / word_count as f64 * (log_own - log_path), nth));
            }
        }
        losses.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let size = spare.max((self.texts.len() as f64 * KEPT) as usize);
        let free = size.saturating_sub(kept.len());
        kept.extend(losses.into_iter().take(free).map(|(_, nth)| nth));
        kept
    }

    /// The pieces that were not dropped, with their new scores.
    fn remaining(&self, pieces: &[Candidate]) -> Vec<Candidate> {
        let scored = pieces.iter().zip(&self.scores).filter(|(_, score)| score.is_finite());
        scored.map(|(piece, &score)| Candidate { text: piece.text.clone(), score }).collect()
    }
}

fn sums(parts: Vec<Vec<u64>>) -> Vec<u64> {
    let add = |mut all: Vec<u64>, part: Vec<u64>| {
        all.iter_mut().zip(part).for_each(|(all, part)| *all += part);
        all
    };
    parts.into_iter().reduce(add).unwrap_or_default()
}

/// `ln(exp(a) + exp(b))`.
fn sum_of_exponents(a: f64, b: f64) -> f64 {
    let (small, large) = if a < b { (a, b) } else { (b, a) };
    if small == f64::NEG_INFINITY { large } else { large + (small - large).exp().ln_1p() }
}

/// The logarithmic derivative of the gamma function, for positive numbers: its recurrence up to 7,
/// and from there its asymptotic series (Abramowitz and Stegun 6.3.5 and 6.3.18).
fn digamma(mut x: f64) -> f64 {
    let mut result = 0.0;
    while x < 7.0 {
        result -= 1.0 / x;
        x += 1.0;
    }
    let inverse = 1.0 / (x * x);
    let series = inverse
        * (1.0 / 12.0 - inverse * (1.0 / 120.0 - inverse * (1.0 / 252.0 - inverse / 240.0)));
    result + x.ln() - 0.5 / x - series
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    /// Euler's constant and its neighbours, to the digits of the tables.
    #[test]
    fn digamma_has_the_values_of_the_tables() {
        let euler = 0.577_215_664_901_532_9;
        for (x, expected) in [(1.0, -euler), (2.0, 1.0 - euler), (10.0, 2.251_752_589_066_721)] {
            assert!((digamma(x) - expected).abs() < 1e-9, "digamma({x}) = {}", digamma(x));
        }
    }

    /// The expected counts of a word with every segmentation written out.
    #[test]
    fn expected_counts_are_those_of_all_paths() {
        let piece = |text: &str, p: f64| Candidate { text: text.to_owned(), score: p.ln() };
        let pieces = [
            piece("a", 0.4),
            piece("b", 0.3),
            piece("ab", 0.2),
            piece("abb", 0.05),
            piece("bb", 0.05),
        ];
        let lattice = Lattice::new(&pieces);
        let words = [("abb".to_owned(), 3)];
        let stop = AtomicBool::new(false);
        let threads = Threads { workers: 2, stop: &stop };
        let expected = lattice.expected(&words, threads).unwrap();
        // a b b, ab b, a bb, abb
        let paths = [0.4 * 0.3 * 0.3, 0.2 * 0.3, 0.4 * 0.05, 0.05];
        let all: f64 = paths.iter().sum();
        let share = |of: f64| 3.0 * of / all;
        let counts = [
            share(paths[0] + paths[2]),
            share(2.0 * paths[0] + paths[1]),
            share(paths[1]),
            share(paths[3]),
            share(paths[2]),
        ];
        for (units, count) in expected.iter().zip(counts) {
            assert!((*units as f64 / UNITS - count).abs() < 1e-5, "{expected:?} {count}");
        }
    }
}
