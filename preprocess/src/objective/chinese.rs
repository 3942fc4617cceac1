//! Sentences of Chinese text.
//!
//! A sentence ends
//! - with `。`, `！`, `？`, `；`, `｡`, `!`, `?` or `……`, as many as there are, and the closing quotes
//!   and brackets after them: `”`, `’`, `」`, `』`, `）`, `】`, `》`, `〉`, `)`; but not if a comma, a
//!   colon or an enumeration comma follows, for then the quotation is within a sentence;
//! - at a line feed.
//!
//! White space at its ends belongs to no sentence, and white space alone is no sentence. With
//! [`Newlines::Keep`], it belongs to the sentence before it, and at the start of the text to the
//! first one. So `他问：“去吗？！”她说：“好。”，就走了。` is two sentences, split before `她`.

use std::ops::Range;

use super::Newlines;

/// Appends the sentences of a text.
pub(super) fn split(text: &str, newlines: Newlines, out: &mut Vec<Range<usize>>) {
    let skip_space = |at: usize| text.len() - text[at..].trim_start().len();
    let mut start = 0;
    while skip_space(start) < text.len() {
        let first = skip_space(start);
        let end = first + sentence_len(&text[first..]);
        let sentence = match newlines {
            Newlines::Drop => first..first + text[first..end].trim_end().len(),
            Newlines::Keep => start..skip_space(end),
        };
        start = end.max(sentence.end);
        out.push(sentence);
    }
}

/// The length of the sentence that a text begins with, a line feed at its end included.
fn sentence_len(text: &str) -> usize {
    let mut at = 0;
    while let Some(found) = text[at..].find(|char| is_end(char) || matches!(char, '\n' | '…')) {
        at += found;
        let tail = &text[at..];
        if tail.starts_with('\n') {
            return at + 1;
        }
        if tail.starts_with('…') && !tail.starts_with("……") {
            at += '…'.len_utf8();
            continue;
        }
        at = text.len() - tail.trim_start_matches(|char| is_end(char) || is_closing(char)).len();
        if !text[at..].starts_with(['，', ',', '、', '：', ':']) {
            return at;
        }
    }
    text.len()
}

/// Whether a character ends a sentence. Two ellipses do so, too.
fn is_end(char: char) -> bool {
    matches!(char, '。' | '！' | '？' | '；' | '｡' | '!' | '?')
}

fn is_closing(char: char) -> bool {
    matches!(char, '”' | '’' | '」' | '』' | '）' | '】' | '》' | '〉' | ')' | '…')
}
