//! Words and their frequencies: jieba's own or those of a file, and a user's in addition.

use std::collections::{HashMap, HashSet};

use storage::Crc64;

use super::super::double_array::{Trie, VALUES_MAX};
use super::super::vocab::read_text;
use super::alphabet::code_of;
use super::user;
use crate::{Error, Result};

/// Its uncompressed length and one more, so that a longer file would be noticed.
const BUILT_IN_BYTES_MAX: usize = 5_071_853;

/// Above it a double does not hold every number, and a logarithm would be that of another one.
const FREQUENCY_MAX: u64 = 1 << 53;

/// The largest sum of frequencies: 2^10 times the largest frequency.
const TOTAL_MAX: u64 = 1 << 63;

/// The words that can occur in a block, and the logarithms of their shares of the whole.
#[derive(Debug)]
pub(super) struct Dictionary {
    /// From the codes of a word to its place in `logs`.
    pub(super) trie: Trie,
    /// The first is for words that are not in the dictionary.
    pub(super) logs: Vec<f64>,
    /// By the first of two ASCII characters: the second, for words of ASCII alone.
    pub(super) ascii_pairs: [u128; 128],
    /// Words of a user with frequency 0, which the hidden Markov model must not make.
    pub(super) never: HashSet<Vec<u16>>,
    /// Of the words and their frequencies.
    pub(super) checksum: u64,
}

/// As in the files. The last entry of a word wins; all count for the total.
#[derive(Debug, Default)]
pub(super) struct Words<'t> {
    pub(super) entries: Vec<(&'t str, u64)>,
    pub(super) total: u64,
}

impl Dictionary {
    /// jieba's own, or the words of `dict`; then those of `user`.
    pub(super) fn open(dict: Option<&str>, user: Option<&str>) -> Result<Self> {
        let file = dict.unwrap_or("jieba's dictionary");
        let text = dict.map_or_else(|| Ok(built_in()), read_text)?;
        let mut words = Words::default();
        for (number, line) in lines(&text) {
            let mut read = || {
                let mut fields = line.split(' ');
                words.add(fields.next()?, frequency(fields.next()?)?)
            };
            let expected = "a word, a space and a frequency of at most 2^53, below 2^63 in total";
            read().ok_or_else(|| bad_line(file, number, line, expected))?;
        }
        if words.total == 0 {
            return Err(bad_file(file, "none", "at least one word with a frequency"));
        }
        let user_text = user.map_or_else(|| Ok(String::new()), read_text)?;
        let mut never = HashSet::new();
        if let Some(user) = user {
            never = user::add(&mut words, &user_text, user)?;
        }
        words.build(never).ok_or_else(|| {
            let found = format!("{} words", words.entries.len());
            bad_file(user.unwrap_or(file), &found, "words with fewer than 2^24 prefixes in total")
        })
    }
}

impl<'t> Words<'t> {
    /// None: the sum of the frequencies is too large.
    pub(super) fn add(&mut self, word: &'t str, frequency: u64) -> Option<()> {
        self.total = self.total.checked_add(frequency).filter(|&total| total < TOTAL_MAX)?;
        self.entries.push((word, frequency));
        Some(())
    }

    fn build(&self, never: HashSet<Vec<u16>>) -> Option<Dictionary> {
        let mut codes = Vec::new();
        let mut words: Vec<(std::ops::Range<usize>, u64)> = Vec::new();
        for &(word, frequency) in &self.entries {
            let start = codes.len();
            // A word with another character is in no block, and never looked up.
            match word.chars().try_for_each(|char| code_of(char).map(|code| codes.push(code))) {
                Some(()) if !word.is_empty() => words.push((start..codes.len(), frequency)),
                _ => codes.truncate(start),
            }
        }
        let spelled = |word: &std::ops::Range<usize>| &codes[word.clone()];
        words.sort_by(|(a, _), (b, _)| spelled(a).cmp(spelled(b)));
        let last_entries = words.chunk_by(|(a, _), (b, _)| spelled(a) == spelled(b));
        let mut ascii_pairs = [0; 128];
        let mut logs = Logs::new(self.total);
        let mut keys = Vec::with_capacity(words.len());
        let mut sum = Crc64::new();
        sum.update(&self.total.to_le_bytes());
        for (word, frequency) in last_entries.filter_map(<[_]>::last) {
            let word = spelled(word);
            if word.len() > 1 && word.iter().all(|&code| code < 128) {
                ascii_pairs[usize::from(word[0])] |= 1_u128 << word[1];
            }
            sum.update(&frequency.to_le_bytes());
            sum.update(&(word.len() as u64).to_le_bytes());
            word.iter().for_each(|code| sum.update(&code.to_le_bytes()));
            keys.push((word, logs.place(*frequency)?));
        }
        let trie = Trie::new(keys.into_iter())?;
        let mut never_words: Vec<_> = never.iter().collect();
        never_words.sort_unstable();
        never_words.into_iter().flatten().for_each(|code| sum.update(&code.to_le_bytes()));
        Some(Dictionary { trie, logs: logs.logs, ascii_pairs, never, checksum: sum.value() })
    }
}

/// One logarithm for each frequency: there are few different ones.
struct Logs {
    logs: Vec<f64>,
    log_total: f64,
    places: HashMap<u64, u32>,
}

impl Logs {
    fn new(total: u64) -> Self {
        let log_total = (total as f64).ln();
        // A frequency of 0 counts as 1, and is that of no word.
        Logs { logs: vec![0.0 - log_total], log_total, places: HashMap::from([(0, 0)]) }
    }

    fn place(&mut self, frequency: u64) -> Option<u32> {
        let next = self.logs.len();
        if next >= VALUES_MAX {
            return None;
        }
        Some(*self.places.entry(frequency).or_insert_with(|| {
            self.logs.push((frequency as f64).ln() - self.log_total);
            next as u32 // fits: below VALUES_MAX
        }))
    }
}

fn built_in() -> String {
    let packed = include_bytes!("../../../assets/jieba/dict.txt.zst");
    let text =
        zstd::bulk::decompress(packed, BUILT_IN_BYTES_MAX).expect("the built-in file is valid");
    String::from_utf8(text).expect("the built-in file is valid")
}

/// The lines without the white space around them, and their numbers from 1.
pub(super) fn lines(text: &str) -> impl Iterator<Item = (u64, &str)> {
    let space = |char| matches!(char, ' ' | '\t' | '\r' | '\x0b' | '\x0c');
    let lines = text.strip_suffix('\n').unwrap_or(text).split('\n');
    (1..).zip(lines.map(move |line| line.trim_matches(space)))
}

/// Digits alone: Python's signs and underscores are refused.
pub(super) fn frequency(text: &str) -> Option<u64> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|&frequency| digits && frequency <= FREQUENCY_MAX)
}

pub(super) fn bad_line(file: &str, number: u64, line: &str, expected: &str) -> Error {
    // A line may be the whole of a file that is something else.
    let shown: String = line.chars().take(80).collect();
    let (found, expected) = (format!("'{shown}'"), expected.to_owned());
    Error::BadVocab { file: file.to_owned(), line: Some(number), found, expected, hint: None }
}

fn bad_file(file: &str, found: &str, expected: &str) -> Error {
    let (found, expected) = (found.to_owned(), expected.to_owned());
    Error::BadVocab { file: file.to_owned(), line: None, found, expected, hint: None }
}
