//! Splits text into Punkt's words, by code equivalent to its pattern.

use std::sync::OnceLock;

use regex_syntax::hir::{Class, HirKind};

use super::Nltk;

impl Nltk {
    /// Whether `\s` matches: with Python's own engine also the four separators of ASCII.
    pub(super) fn is_space(self, char: char) -> bool {
        char.is_whitespace() || (self == Nltk::V3_9 && matches!(char, '\x1c'..='\x1f'))
    }

    /// Quotation marks beyond ASCII, which newer versions treat like those of ASCII.
    fn is_quote(self, char: char) -> bool {
        self == Nltk::V3_10 && matches!(char, '‘' | '’' | '“' | '”' | '«' | '»')
    }

    /// Whether a character ends the word before it.
    pub(super) fn ends_word(self, char: char) -> bool {
        match char {
            ')' | '"' | ';' | '}' | ']' | '*' | ':' | '@' | '\'' | '(' | '{' | '[' | '?' | '!' => {
                true
            }
            _ => self.is_quote(char),
        }
    }

    /// Whether a character at the start of a sentence belongs to the sentence before.
    pub(super) fn closes(self, char: char) -> bool {
        matches!(char, '"' | '\'' | ')' | ']' | '}') || self.is_quote(char)
    }
}

/// As `str.isspace`.
pub(in super::super) fn is_python_space(char: char) -> bool {
    char.is_whitespace() || matches!(char, '\x1c'..='\x1f')
}

/// The words of a text, line by line: a multiple of hyphens or periods; or text that begins without
/// punctuation, up to a space or to punctuation that is not within words; or else one character.
pub(super) fn words(nltk: Nltk, text: &str) -> impl Iterator<Item = &str> {
    let lines = text.split('\n').filter(|line| !line.chars().all(is_python_space));
    lines.flat_map(move |line| {
        let mut rest = line;
        std::iter::from_fn(move || {
            rest = rest.trim_start_matches(|char| nltk.is_space(char));
            let word = &rest[..word_len(nltk, rest)?];
            rest = &rest[word.len()..];
            Some(word)
        })
    })
}

/// The length of the word that a text begins with, unless the text is empty.
fn word_len(nltk: Nltk, text: &str) -> Option<usize> {
    let first = text.chars().next()?;
    if let Some(len) = multiple(nltk, text) {
        return Some(len);
    }
    let barred = matches!(
        first,
        '(' | '"'
            | '`'
            | '{'
            | '['
            | ':'
            | ';'
            | '&'
            | '#'
            | '*'
            | '@'
            | ')'
            | '}'
            | ']'
            | '-'
            | ','
    );
    if barred {
        return Some(1);
    }
    let after = first.len_utf8();
    let more = text[after..].char_indices().find(|&(at, _)| is_end(nltk, &text[after + at..]));
    Some(more.map_or(text.len(), |(at, _)| after + at))
}

/// Whether a word before this text ends here.
fn is_end(nltk: Nltk, text: &str) -> bool {
    let hard = |text: &str| match text.chars().next() {
        None => true,
        Some('-' | '.') => multiple(nltk, text).is_some(),
        Some(char) => nltk.is_space(char) || nltk.ends_word(char),
    };
    hard(text) || text.strip_prefix(',').is_some_and(hard)
}

/// The length of the multiple that a text begins with: two hyphens or more, two periods or more, or
/// three periods or more with one space between.
fn multiple(nltk: Nltk, text: &str) -> Option<usize> {
    let run = |byte| text.bytes().take_while(|&b| b == byte).count();
    match text.as_bytes().first()? {
        b'-' => Some(run(b'-')).filter(|&len| len >= 2),
        b'.' if run(b'.') >= 2 => Some(run(b'.')),
        b'.' => {
            let (mut end, mut periods) = (1, 1);
            while let Some(space) = text[end..].chars().next().filter(|&c| nltk.is_space(c))
                && text[end + space.len_utf8()..].starts_with('.')
            {
                end += space.len_utf8() + 1;
                periods += 1;
            }
            Some(end).filter(|_| periods >= 3)
        }
        _ => None,
    }
}

/// Whether a word is a letter and a period.
pub(super) fn is_initial(nltk: Nltk, word: &str) -> bool {
    let mut chars = word.chars();
    match (chars.next(), chars.next(), chars.next()) {
        (Some(first), Some('.'), None) => is_letter(nltk, first),
        _ => false,
    }
}

/// Whether a word in lower case is a number: perhaps a hyphen, perhaps a separator, a digit, then
/// nothing but digits and separators.
pub(super) fn is_number(word: &str) -> bool {
    let word = word.strip_prefix('-').unwrap_or(word);
    let word = word.strip_prefix(['.', ',']).unwrap_or(word);
    let mut chars = word.chars();
    chars.next().is_some_and(is_digit)
        && chars.all(|char| matches!(char, ',' | '.' | '-') || is_digit(char))
}

fn is_digit(char: char) -> bool {
    static DIGITS: OnceLock<Vec<(char, char)>> = OnceLock::new();
    match char.is_ascii() {
        true => char.is_ascii_digit(),
        false => contains(DIGITS.get_or_init(|| ranges(r"\p{Nd}")), char),
    }
}

/// Whether `[^\W\d]` matches: the two engines differ in what a word's characters are.
fn is_letter(nltk: Nltk, char: char) -> bool {
    static OLD: OnceLock<Vec<(char, char)>> = OnceLock::new();
    static NEW: OnceLock<Vec<(char, char)>> = OnceLock::new();
    let letters = match nltk {
        _ if char.is_ascii() => return char.is_ascii_alphabetic() || char == '_',
        Nltk::V3_9 => OLD.get_or_init(|| ranges(r"[\p{L}\p{Nl}\p{No}]")),
        Nltk::V3_10 => NEW.get_or_init(|| ranges(r"[\p{Alphabetic}\p{M}\p{Pc}\u{200c}\u{200d}]")),
    };
    contains(letters, char)
}

fn contains(ranges: &[(char, char)], char: char) -> bool {
    let after = ranges.partition_point(|&(first, _)| first <= char);
    after.checked_sub(1).is_some_and(|at| char <= ranges[at].1)
}

fn ranges(pattern: &str) -> Vec<(char, char)> {
    let hir = regex_syntax::parse(pattern).expect("the built-in pattern is valid");
    let HirKind::Class(Class::Unicode(class)) = hir.kind() else {
        unreachable!("a class of Unicode characters");
    };
    class.iter().map(|range| (range.start(), range.end())).collect()
}
