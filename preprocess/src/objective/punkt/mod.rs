//! NLTK's Punkt: finds the ends of sentences by abbreviations, collocations, words that begin
//! sentences, and the cases in which words were seen.
//!
//! A place where a sentence may end is a period, question or exclamation mark before a space or
//! punctuation. The word it ends and the next one decide ([`Punkt::ends_sentence`]); closing quotes
//! and brackets then go to the sentence they close. `params` are the trained parameters of a
//! language, `breaks` finds the candidates, `words` splits text as Punkt does.

mod breaks;
mod params;
mod words;

use std::ops::Range;

use breaks::{SentenceBreak, places};
use params::{Params, seen};
pub(super) use words::is_python_space;
use words::{is_initial, is_number, words};

use crate::Result;

/// The version of NLTK whose rules apply; they changed with 3.10.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Nltk {
    /// 3.6.6 to 3.9: closing quotes are those of ASCII.
    V3_9,
    /// 3.10: curly quotes and guillemets close sentences as well.
    #[default]
    V3_10,
}

/// How white space between two sentences is treated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Newlines {
    /// It belongs to neither.
    #[default]
    Drop,
    /// It belongs to the sentence before, as with Megatron's `--keep-newlines`.
    Keep,
}

/// The type of every number in the parameters.
const NUMBER: &str = "##number##";

/// Splits texts of one language.
#[derive(Debug)]
pub(super) struct Punkt {
    params: Params,
    nltk: Nltk,
    newlines: Newlines,
}

/// A word, and its properties without its context.
#[derive(Clone, Copy)]
struct Word<'a> {
    text: &'a str,
    /// It ends a sentence, unless the next word decides otherwise.
    ends: bool,
    /// It is an abbreviation, or an ellipsis.
    is_short: bool,
}

/// Whether a word begins a sentence.
#[derive(PartialEq)]
enum Begins {
    Yes,
    No,
    Unknown,
}

impl Punkt {
    pub(super) fn english(nltk: Nltk, newlines: Newlines) -> Result<Self> {
        Ok(Punkt { params: Params::english()?, nltk, newlines })
    }

    pub(super) fn from_folder(folder: &str, nltk: Nltk, newlines: Newlines) -> Result<Self> {
        Ok(Punkt { params: Params::from_folder(folder)?, nltk, newlines })
    }

    /// Appends the sentences of a text, as byte ranges of a longer text in which this one begins at
    /// `base`.
    pub(super) fn split(&self, text: &str, base: usize, out: &mut Vec<Range<usize>>) {
        let mut sentences = Realign { nltk: self.nltk, text, base, before: None, skip: 0, out };
        let mut start = 0;
        let mut decide = |place: &SentenceBreak, context_start: usize| {
            if self.has_end(&text[context_start..place.context_end]) {
                sentences.push(start..place.end);
                start = place.next_word.unwrap_or(place.end);
            }
        };
        places(self.nltk, self.newlines, text, &mut decide);
        sentences.push(start..text.trim_end_matches(is_python_space).len());
        sentences.finish();
    }

    /// Whether a sentence ends within these words, the last not counted.
    fn has_end(&self, context: &str) -> bool {
        let mut before: Option<Word<'_>> = None;
        words(self.nltk, context).any(|text| {
            let word = self.word(text);
            before.replace(word).is_some_and(|before| self.ends_sentence(before, word))
        })
    }

    fn word<'a>(&self, text: &'a str) -> Word<'a> {
        let is_mark = matches!(text, "." | "?" | "!");
        let is_ellipsis = text.len() >= 2 && text.bytes().all(|byte| byte == b'.');
        let stem = text.strip_suffix('.').filter(|stem| !is_mark && !stem.ends_with('.'));
        let is_abbreviation = stem.is_some_and(|stem| {
            let stem = stem.to_lowercase();
            let last = stem.rsplit('-').next().unwrap_or(&stem);
            let known = &self.params.abbreviations;
            known.contains(&stem) || known.contains(last)
        });
        let ends = is_mark || (stem.is_some() && !is_abbreviation);
        Word { text, ends, is_short: is_ellipsis || is_abbreviation }
    }

    /// Whether a sentence ends between two words.
    fn ends_sentence(&self, word: Word<'_>, next: Word<'_>) -> bool {
        if !word.text.ends_with('.') {
            return word.ends;
        }
        let word_type = type_of(word.text);
        let word_type = without_period(&word_type);
        let next_type = type_of(next.text);
        let next_type = if next.ends { without_period(&next_type) } else { &next_type };
        if self.params.collocations.contains(&format!("{word_type}\t{next_type}")) {
            return false;
        }
        let seen = self.params.contexts.get(next_type).copied().unwrap_or(0);
        let begins = begins_sentence(next.text, seen);
        let is_upper = next.text.starts_with(char::is_uppercase);
        let initial = is_initial(self.nltk, word.text);
        if word.is_short && !initial {
            let starts = is_upper && self.params.starters.contains(next_type);
            if begins == Begins::Yes || starts {
                return true;
            }
        }
        if initial || word_type == NUMBER {
            let always_upper = is_upper && seen & seen::LOWER == 0;
            let of_name = begins == Begins::Unknown && initial && always_upper;
            if begins == Begins::No || of_name {
                return false;
            }
        }
        word.ends
    }
}

fn begins_sentence(word: &str, seen: u8) -> Begins {
    let is_mark = matches!(word, ";" | ":" | "," | "." | "!" | "?");
    let lower = word.starts_with(char::is_lowercase);
    let upper = word.starts_with(char::is_uppercase);
    if is_mark || (lower && (seen & seen::UPPER != 0 || seen & seen::BEGIN_LOWER == 0)) {
        Begins::No
    } else if upper && seen & seen::LOWER != 0 && seen & seen::MIDDLE_UPPER == 0 {
        Begins::Yes
    } else {
        Begins::Unknown
    }
}

/// The type of a word in the parameters.
fn type_of(word: &str) -> String {
    let lower = word.to_lowercase();
    if is_number(&lower) { NUMBER.to_owned() } else { lower }
}

fn without_period(word_type: &str) -> &str {
    word_type.strip_suffix('.').filter(|stem| !stem.is_empty()).unwrap_or(word_type)
}

/// Moves closing punctuation at the beginning of a sentence to the sentence before.
struct Realign<'a> {
    nltk: Nltk,
    text: &'a str,
    base: usize,
    /// A sentence whose end depends on the next one.
    before: Option<Range<usize>>,
    /// Bytes at its start that belong to the sentence before it.
    skip: usize,
    out: &'a mut Vec<Range<usize>>,
}

impl Realign<'_> {
    fn push(&mut self, next: Range<usize>) {
        if let Some(before) = self.before.replace(next.clone()) {
            let start = before.start + self.skip;
            match self.closing(next.clone()) {
                Some((closers, all)) => {
                    self.put(start..next.start + closers);
                    self.skip = all;
                }
                None => {
                    self.put(start..before.end);
                    self.skip = 0;
                }
            }
        }
    }

    fn finish(mut self) {
        if let Some(last) = self.before.take() {
            self.put(last.start + self.skip..last.end);
        }
    }

    fn put(&mut self, sentence: Range<usize>) {
        if sentence.start < sentence.end {
            self.out.push(self.base + sentence.start..self.base + sentence.end);
        }
    }

    /// The bytes of the closing punctuation that a sentence begins with, alone and with the space
    /// after it, which must follow unless there are dashes or nothing.
    fn closing(&self, sentence: Range<usize>) -> Option<(usize, usize)> {
        let text = self.text.get(sentence)?;
        let rest = text.trim_start_matches(|char| self.nltk.closes(char));
        let bare = rest.trim_start_matches(|char| self.nltk.is_space(char));
        let (closers, all) = (text.len() - rest.len(), text.len() - bare.len());
        let is_separate = all > closers || rest.is_empty() || rest.starts_with("--");
        (closers > 0 && is_separate).then_some((closers, all))
    }
}
