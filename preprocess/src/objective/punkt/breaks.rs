//! Finds the places where a sentence may end.

use memchr::{memchr3, memrchr3};

use super::{Newlines, Nltk};

/// A mark that may end a sentence, and what decides about it.
#[derive(Clone, Copy)]
pub(super) struct SentenceBreak {
    /// Where the search for the word before it ends.
    start: usize,
    /// Where the sentence would end.
    pub(super) end: usize,
    /// Where the next one would begin, if that is not the same.
    pub(super) next_word: Option<usize>,
    /// The end of the word after, or of one character of punctuation.
    pub(super) context_end: usize,
}

/// Calls `found` with each place of a text and the start of the word before it. Of places within
/// one word, it takes the last.
pub(super) fn places(
    nltk: Nltk,
    newlines: Newlines,
    text: &str,
    found: &mut impl FnMut(&SentenceBreak, usize),
) {
    // The place found last, and the word before it, up to the start of the place.
    let mut last: Option<SentenceBreak> = None;
    let (mut word_start, mut word_end) = (0, 0);
    let mut at = 0;
    while let Some(place) = match newlines {
        Newlines::Drop => next_mark(nltk, text, at),
        Newlines::Keep => next_mark_and_space(nltk, text, at),
    } {
        let between = &text.as_bytes()[word_end..place.start];
        let space = between.iter().rposition(|byte| byte.is_ascii_whitespace() || *byte == 0x0b);
        // A space at the first byte does not count, as in the original.
        let start = match space {
            None | Some(0) => word_start,
            Some(space) => word_end + space + 1,
        };
        if let Some(last) = last.replace(place)
            && word_end <= start
        {
            found(&last, word_start);
        }
        (word_start, word_end) = (start, place.start);
        at = place.end;
    }
    if let Some(last) = last {
        found(&last, word_start);
    }
}

/// The first mark from `at` on before punctuation, or before a space and another word.
fn next_mark(nltk: Nltk, text: &str, mut at: usize) -> Option<SentenceBreak> {
    loop {
        let start = at + memchr3(b'.', b'?', b'!', &text.as_bytes()[at..])?;
        at = start + 1;
        let char = text[at..].chars().next()?;
        if nltk.ends_word(char) {
            let context_end = at + char.len_utf8();
            return Some(SentenceBreak { start, end: at, next_word: None, context_end });
        }
        if nltk.is_space(char) {
            let next_word = skip_space(nltk, text, at);
            if next_word == text.len() {
                return None;
            }
            let context_end = skip_word(nltk, text, next_word);
            return Some(SentenceBreak { start, end: at, next_word: Some(next_word), context_end });
        }
    }
}

/// The last mark of the first run without space that has one before anything else, and the space
/// after it.
fn next_mark_and_space(nltk: Nltk, text: &str, mut at: usize) -> Option<SentenceBreak> {
    loop {
        let start = skip_space(nltk, text, at);
        let run_end = skip_word(nltk, text, start);
        if start == run_end {
            return None;
        }
        let last_before = |end: usize| {
            let mark = memrchr3(b'.', b'?', b'!', &text.as_bytes()[start..end])?;
            Some(start + mark)
        };
        let mark = last_before(run_end);
        let next = mark.map(|mark| (mark, skip_space(nltk, text, mark + 1)));
        // The last mark of the text has nothing after it, but one before it in the same run has.
        let next = match next {
            Some((mark, end)) if end == text.len() => {
                last_before(mark).map(|mark| (mark, mark + 1))
            }
            other => other,
        };
        if let Some((_, end)) = next {
            let char = text[end..].chars().next()?;
            let (next_word, context_end) = match nltk.ends_word(char) {
                true => (None, end + char.len_utf8()),
                false => (Some(end), skip_word(nltk, text, end)),
            };
            return Some(SentenceBreak { start, end, next_word, context_end });
        }
        at = run_end;
    }
}

fn skip_space(nltk: Nltk, text: &str, at: usize) -> usize {
    text.len() - text[at..].trim_start_matches(|char| nltk.is_space(char)).len()
}

fn skip_word(nltk: Nltk, text: &str, mut at: usize) -> usize {
    while let Some(&byte) = text.as_bytes().get(at) {
        // The common case: printable ASCII is no space.
        if matches!(byte, b'!'..=b'~') {
            at += 1;
            continue;
        }
        match text[at..].chars().next() {
            Some(char) if !nltk.is_space(char) => at += char.len_utf8(),
            _ => break,
        }
    }
    at
}
