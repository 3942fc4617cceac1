//! A user's words, as `jieba.load_userdict` takes them: `word [frequency] [tag]` a line. A word
//! without a frequency gets one that makes it likelier than the parts it would be cut into.

use std::collections::{HashMap, HashSet};

use super::alphabet::code_of;
use super::dictionary::{Words, bad_line, frequency, lines};
use crate::Result;

/// The work for a word without a frequency is the square of its length.
const WORD_CHARS_MAX: usize = 4096;

/// Adds the words of a file, and returns those with frequency 0, as codes.
pub(super) fn add<'t>(
    words: &mut Words<'t>,
    text: &'t str,
    file: &str,
) -> Result<HashSet<Vec<u16>>> {
    let mut known = Known::default();
    for &(word, frequency) in &words.entries {
        known.add(word, frequency);
    }
    let mut never = HashSet::new();
    for (number, line) in lines(text) {
        let bad = |expected: &str| bad_line(file, number, line, expected);
        let line = line.trim_start_matches('\u{feff}');
        if line.is_empty() {
            continue;
        }
        let (word, given) = fields(line);
        if word.chars().nth(WORD_CHARS_MAX).is_some() {
            return Err(bad("a word of at most 4096 characters"));
        }
        let count = match given {
            Some(digits) => frequency(digits).ok_or_else(|| bad("a frequency of at most 2^53"))?,
            None => known.suggest(word, words.total),
        };
        words.add(word, count).ok_or_else(|| bad("frequencies below 2^63 in total"))?;
        known.add(word, count);
        if count == 0 {
            never.extend(word.chars().map(code_of).collect::<Option<Vec<_>>>());
        }
    }
    Ok(never)
}

/// The word and its frequency. A tag and a frequency are taken from the end if possible; the rest
/// is the word, which is not empty.
fn fields(line: &str) -> (&str, Option<&str>) {
    let cut = |line, of: fn(&u8) -> bool| -> Option<(&str, &str)> {
        let (before, last) = str::rsplit_once(line, ' ')?;
        let fits = !before.is_empty() && !last.is_empty() && last.as_bytes().iter().all(of);
        fits.then_some((before, last))
    };
    let untagged = cut(line, u8::is_ascii_lowercase).map(|(before, _)| before);
    let counted = |line| cut(line, u8::is_ascii_digit);
    match untagged.and_then(counted).or_else(|| counted(line)) {
        Some((word, frequency)) => (word, Some(frequency)),
        None => (untagged.unwrap_or(line), None),
    }
}

/// Frequencies by word. The beginnings of words have 0.
#[derive(Debug, Default)]
struct Known<'t>(HashMap<&'t str, u64>);

impl<'t> Known<'t> {
    fn add(&mut self, word: &'t str, frequency: u64) {
        self.0.insert(word, frequency);
        for (end, _) in word.char_indices().skip(1) {
            self.0.entry(&word[..end]).or_insert(0);
        }
    }

    /// One more than the expected frequency of the word's parts together.
    fn suggest(&self, word: &str, total: u64) -> u64 {
        let total = total as f64;
        let share = |part: &str| self.0.get(part).copied().unwrap_or(1) as f64 / total;
        let together = self.cut(word, total).into_iter().fold(1.0, |all, part| all * share(part));
        // fits: a product of shares is at most 1, unless the user repeated words; then it is capped
        let suggested = ((together * total) as u64).saturating_add(1);
        suggested.max(self.0.get(word).copied().unwrap_or(1))
    }

    /// Without the hidden Markov model, which leaves runs of Latin letters and digits whole.
    fn cut<'w>(&self, word: &'w str, total: f64) -> Vec<&'w str> {
        let mut parts = Vec::new();
        let is_block = |char: char| code_of(char).is_some();
        let mut rest = word;
        while let Some(first) = rest.chars().next() {
            let len = if is_block(first) {
                let len = rest.find(|char| !is_block(char)).unwrap_or(rest.len());
                self.cut_block(&rest[..len], total, &mut parts);
                len
            } else {
                let len = if rest.starts_with("\r\n") { 2 } else { first.len_utf8() };
                parts.push(&rest[..len]);
                len
            };
            rest = &rest[len..];
        }
        parts
    }

    fn cut_block<'w>(&self, block: &'w str, total: f64, parts: &mut Vec<&'w str>) {
        let places: Vec<usize> =
            block.char_indices().map(|(at, _)| at).chain([block.len()]).collect();
        let count = places.len() - 1;
        let log = |frequency: u64| (frequency.max(1) as f64).ln() - total.ln();
        let mut route = vec![(0.0, 0); count + 1];
        for start in (0..count).rev() {
            let mut best = None;
            for end in start + 1..=count {
                let Some(&frequency) = self.0.get(&block[places[start]..places[end]]) else {
                    break;
                };
                let sum = log(frequency) + route[end].0;
                if frequency > 0 && best.is_none_or(|(best, _)| sum >= best) {
                    best = Some((sum, end));
                }
            }
            route[start] = best.unwrap_or_else(|| (log(0) + route[start + 1].0, start + 1));
        }
        let (mut at, mut run) = (0, 0);
        while at < count {
            let end = route[at].1;
            let latin = end - at == 1 && block.as_bytes()[places[at]].is_ascii_alphanumeric();
            if !latin {
                parts.extend((run < at).then(|| &block[places[run]..places[at]]));
                parts.push(&block[places[at]..places[end]]);
                run = end;
            }
            at = end;
        }
        parts.extend((run < at).then(|| &block[places[run]..places[at]]));
    }
}
