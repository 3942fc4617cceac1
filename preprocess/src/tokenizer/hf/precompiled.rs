//! SentencePiece's rules of replacement as Hugging Face's `Precompiled` applies them.
//!
//! A whole grapheme of at most five bytes is replaced by the shortest rule that it begins with;
//! otherwise each of its characters is replaced alone. Between two characters that combine with
//! nothing a grapheme always ends, so that Unicode's rules are needed only for the stretches
//! between.

use std::borrow::Cow;

use unicode_segmentation::UnicodeSegmentation as _;

use super::super::spm::charsmap::Charsmap;

/// A longer grapheme is taken character by character.
const GRAPHEME_BYTES_MAX: usize = 5;

/// The text with all replacements.
pub(super) fn apply<'a>(charsmap: &Charsmap, text: Cow<'a, str>) -> Cow<'a, str> {
    let mut out = Replaced { text: &text, done: 0, out: String::new() };
    let mut start = 0;
    while start < text.len() {
        let end = stretch_end(&text, start);
        let stretch = &text[start..end];
        let mut chars = stretch.chars();
        if let (Some(_), None) = (chars.next(), chars.next()) {
            out.replace(charsmap, start..end);
        } else {
            for (at, grapheme) in stretch.grapheme_indices(true) {
                let at = start + at;
                let is_short = grapheme.len() <= GRAPHEME_BYTES_MAX;
                if is_short && out.replace(charsmap, at..at + grapheme.len()) {
                    continue;
                }
                for (inner, char) in grapheme.char_indices() {
                    out.replace(charsmap, at + inner..at + inner + char.len_utf8());
                }
            }
        }
        start = end;
    }
    if out.done == 0 && out.out.is_empty() {
        return text;
    }
    let Replaced { mut out, done, .. } = out;
    out.push_str(&text[done..]);
    Cow::Owned(out)
}

/// A text being copied.
struct Replaced<'a> {
    text: &'a str,
    /// The text up to here has been copied.
    done: usize,
    out: String,
}

impl Replaced<'_> {
    #[inline]
    fn replace(&mut self, charsmap: &Charsmap, range: std::ops::Range<usize>) -> bool {
        let Some((_, with)) = charsmap.shortest(&self.text.as_bytes()[range.clone()]) else {
            return false;
        };
        self.out.push_str(&self.text[self.done..range.start]);
        self.out.push_str(with);
        self.done = range.end;
        true
    }
}

/// The end of the shortest stretch from `start` on whose end is certainly that of a grapheme.
#[inline]
fn stretch_end(text: &str, start: usize) -> usize {
    let mut chars = text[start..].char_indices();
    let mut before = chars.next().map(|(_, char)| char);
    for (at, char) in chars {
        let apart = before.is_some_and(stands_alone) && stands_alone(char);
        if apart && (before, char) != (Some('\r'), '\n') {
            return start + at;
        }
        before = Some(char);
    }
    text.len()
}

/// Characters of the property Other that take part in no rule but the last, and controls of ASCII,
/// which break on both sides.
#[inline]
fn stands_alone(char: char) -> bool {
    matches!(char, '\0'..='\x7f' | '\u{3041}'..='\u{3096}' | '\u{30a1}'..='\u{30ff}'
        | '\u{4e00}'..='\u{9fff}' | '\u{ff01}'..='\u{ff5e}')
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Between two characters that stand alone a grapheme ends, whatever is around them.
    #[test]
    fn stretches_end_where_graphemes_do() {
        let alone: Vec<char> = ('\0'..=char::MAX).filter(|&char| stands_alone(char)).collect();
        let odd = ['\u{301}', '\u{200d}', '\u{600}', '\u{1f1e6}', '👍', '\r', '\n', '\u{915}'];
        for (number, &char) in alone.iter().enumerate() {
            let next = alone[(number * 7919 + 13) % alone.len()];
            let (left, right) = (odd[number % odd.len()], odd[number / odd.len() % odd.len()]);
            let text = String::from_iter([left, char, next, right]);
            let ends: Vec<usize> = text.grapheme_indices(true).map(|(at, _)| at).collect();
            let mut start = 0;
            while start < text.len() {
                assert!(ends.contains(&start), "{text:?} at {start}");
                start = stretch_end(&text, start);
            }
        }
    }
}
