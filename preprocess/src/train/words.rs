//! The words of a sample, within which a trainer may merge, and their counts.
//!
//! Distinct words are found by white space first, so that the rules that split them further run
//! once per word and not once per occurrence.

use std::collections::HashMap;
use std::hash::Hash;

use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::pre_tokenizers::unicode_scripts::UnicodeScripts;
use tokenizers::{
    NormalizedString, Normalizer as _, OffsetReferential, OffsetType, PreTokenizedString,
    PreTokenizer,
};

use super::threads::Threads;
use super::{ModelType, TrainOptions};
use crate::{Pattern, Result};

/// Represents a space, as in SentencePiece.
pub(super) const SPACE: char = '\u{2581}';

/// Longer words are cut: they are not real words, and the trainer of `unigram` takes memory by the
/// length. Words of `byte-bpe` are not, as its tokenizer does not cut them either.
const WORD_CHARS_MAX: usize = 256;

/// Part of a text, and whether a space or the start of the text is before it.
type Run<'a> = (bool, &'a str);

/// Words with their counts, sorted by word.
pub(super) fn count(
    options: &TrainOptions,
    texts: &[String],
    threads: Threads<'_>,
) -> Result<Vec<(String, u64)>> {
    let runs = threads.counted(texts, |text, counts| add_runs(options, text, counts))?;
    let mut runs: Vec<(Run<'_>, u64)> = runs.into_iter().collect();
    runs.sort_unstable();
    let words = threads.counted(&runs, |(run, times), counts| {
        cut(options, *run, &mut |word: &str| add(counts, word.to_owned(), *times));
    })?;
    let mut words: Vec<(String, u64)> = words.into_iter().collect();
    words.sort_unstable();
    Ok(match options.model_type {
        ModelType::ByteBpe => words,
        _ => covered(options, words),
    })
}

fn add<K: Hash + Eq>(counts: &mut HashMap<K, u64>, key: K, times: u64) {
    *counts.entry(key).or_default() += times;
}

/// Counts the runs of a text between spaces and line ends.
fn add_runs<'a>(options: &TrainOptions, text: &'a str, counts: &mut HashMap<Run<'a>, u64>) {
    if options.model_type == ModelType::ByteBpe {
        let is_digit = |c: char| options.split_digits && c.is_numeric();
        for part in text.split_inclusive(is_digit) {
            let digit = part.chars().next_back().filter(|c| is_digit(*c));
            let (part, digit) = part.split_at(part.len() - digit.map_or(0, char::len_utf8));
            Pattern::Gpt2.pieces(part).for_each(|piece| add(counts, (false, piece), 1));
            if !digit.is_empty() {
                add(counts, (false, digit), 1);
            }
        }
        return;
    }
    for part in text.split([' ', SPACE]) {
        // No token contains a line end, a tab or another control character.
        let mut runs = part.split(|c: char| c.is_whitespace() || c.is_control());
        if let Some(first) = runs.next() {
            add(counts, (true, first), 1);
        }
        runs.filter(|run| !run.is_empty()).for_each(|run| add(counts, (false, run), 1));
    }
}

/// Cuts a run into words.
fn cut(options: &TrainOptions, (spaced, run): Run<'_>, word: &mut dyn FnMut(&str)) {
    let bounded = &mut |text: &str| {
        let mut rest = text;
        while let Some((end, _)) = rest.char_indices().nth(WORD_CHARS_MAX) {
            word(&rest[..end]);
            rest = &rest[end..];
        }
        word(rest);
    };
    match options.model_type {
        ModelType::ByteBpe => word(&run.bytes().map(byte_character).collect::<String>()),
        ModelType::WordPiece => {
            for part in pre_tokenized(&BertPreTokenizer, bert(options.lowercase, run)) {
                bounded(&part);
            }
        }
        ModelType::Bpe | ModelType::Unigram => {
            let mut text = String::with_capacity(run.len() + SPACE.len_utf8());
            text.extend(spaced.then_some(SPACE));
            for part in scripts(run, options.split_digits) {
                text.push_str(&part);
                bounded(&text);
                text.clear();
            }
            if !text.is_empty() {
                bounded(&text); // a space before a space or a line end
            }
        }
    }
}

/// Parts of one script each, as SentencePiece's pieces are; with `split_digits`, digits alone.
fn scripts(run: &str, split_digits: bool) -> Vec<String> {
    let parts: Vec<String> = match run.is_ascii() {
        true => run
            .as_bytes()
            .chunk_by(|a, b| a.is_ascii_alphabetic() == b.is_ascii_alphabetic())
            .map(|part| String::from_utf8_lossy(part).into_owned())
            .collect(),
        false => pre_tokenized(&UnicodeScripts, NormalizedString::from(run)),
    };
    if !split_digits {
        return parts;
    }
    let mut single = Vec::new();
    for part in parts {
        let mut rest = part.as_str();
        while let Some((at, digit)) = rest.char_indices().find(|(_, c)| c.is_numeric()) {
            single.extend((at > 0).then(|| rest[..at].to_owned()));
            single.push(digit.to_string());
            rest = &rest[at + digit.len_utf8()..];
        }
        single.extend((!rest.is_empty()).then(|| rest.to_owned()));
    }
    single
}

/// BERT's normalizer, with the settings that `tokenizer.json` gets.
fn bert(lowercase: bool, run: &str) -> NormalizedString {
    let mut text = NormalizedString::from(run);
    BertNormalizer::new(true, true, None, lowercase)
        .normalize(&mut text)
        .expect("it has no errors");
    text
}

fn pre_tokenized(rule: &impl PreTokenizer, text: NormalizedString) -> Vec<String> {
    let mut text = PreTokenizedString::from(text);
    rule.pre_tokenize(&mut text).expect("these rules have no errors");
    let splits = text.get_splits(OffsetReferential::Normalized, OffsetType::Byte);
    splits.into_iter().map(|(part, ..)| part.to_owned()).collect()
}

/// The character that represents a byte in GPT-2's vocabularies.
pub(super) fn byte_character(byte: u8) -> char {
    match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        0..=0x20 => char::from_u32(0x100 + u32::from(byte)).expect("no surrogate"),
        0x7f..=0xa0 => char::from_u32(0x121 + u32::from(byte) - 0x7f).expect("no surrogate"),
        0xad => '\u{143}',
    }
}

/// Removes the rarest characters: they get no token. A word ends before them, except in
/// WordPiece, where a word with one of them is unknown as a whole.
fn covered(options: &TrainOptions, words: Vec<(String, u64)>) -> Vec<(String, u64)> {
    let mut characters: HashMap<char, u64> = HashMap::new();
    for (word, times) in &words {
        word.chars().for_each(|c| add(&mut characters, c, *times));
    }
    let all: u64 = characters.values().sum();
    let mut order: Vec<(char, u64)> = characters.into_iter().collect();
    order.sort_unstable_by_key(|&(c, times)| (std::cmp::Reverse(times), c));
    let mut seen = 0;
    let mut kept: HashMap<char, ()> = HashMap::new();
    for (c, times) in order {
        let enough = seen as f64 >= options.character_coverage * all as f64;
        if !enough || is_always_covered(c) {
            kept.insert(c, ());
        }
        seen += times;
    }
    let mut found: HashMap<String, u64> = HashMap::new();
    for (word, times) in words {
        if word.chars().all(|c| kept.contains_key(&c)) {
            add(&mut found, word, times);
        } else if options.model_type != ModelType::WordPiece {
            let parts = word.split(|c| !kept.contains_key(&c)).filter(|part| !part.is_empty());
            parts.for_each(|part| add(&mut found, part.to_owned(), times));
        }
    }
    let mut words: Vec<(String, u64)> = found.into_iter().collect();
    words.sort_unstable();
    words
}

/// Characters that have a token whatever the sample is: printable ASCII and the space. A token of a
/// byte, such as `<0x0A>`, is then never the best way to write the text `<0x0A>`.
pub(super) fn is_always_covered(c: char) -> bool {
    c.is_ascii_graphic() || c == SPACE
}
