//! Rewrites texts, and the lines that contain them.

use std::ops::Range;
use std::sync::OnceLock;

use crate::clean::filter::char_set::CharSet;

/// As Megatron's `general_cleaning`, which replaces `  +|\b\n+ |\b\n+` by a space: runs of spaces,
/// and newlines after a letter, digit or underscore with the space that may follow. False: no
/// change is needed, and `fixed` is empty.
pub(in crate::clean) fn spaces(text: &str, fixed: &mut String) -> bool {
    fixed.clear();
    let (bytes, mut done, mut at) = (text.as_bytes(), 0, 0);
    while let Some(found) = memchr::memchr2(b' ', b'\n', &bytes[at..]) {
        let start = at + found;
        let first = bytes[start];
        let run = bytes[start..].iter().take_while(|byte| **byte == first).count();
        at = start + run;
        let joins = first == b'\n' && text[..start].chars().next_back().is_some_and(is_word);
        if joins && bytes.get(at) == Some(&b' ') {
            at += 1;
        }
        if joins || (first == b' ' && run > 1) {
            fixed.push_str(&text[done..start]);
            fixed.push(' ');
            done = at;
        }
    }
    if done > 0 {
        fixed.push_str(&text[done..]);
    }
    done > 0
}

/// `\w` of Python: letters, numbers and the underscore, but no marks.
fn is_word(char: char) -> bool {
    static WORD: OnceLock<CharSet> = OnceLock::new();
    if char.is_ascii() {
        return char.is_ascii_alphanumeric() || char == '_';
    }
    WORD.get_or_init(|| CharSet::new(r"[\p{L}\p{N}]").expect("the built-in pattern is valid"))
        .has(char)
}

/// A text in lower case and without white space.
pub(in crate::clean) fn fold(text: &str, folded: &mut String) {
    folded.clear();
    for char in text.chars().filter(|char| !char.is_whitespace()) {
        if char.is_ascii() {
            folded.push(char.to_ascii_lowercase());
        } else {
            folded.extend(char.to_lowercase());
        }
    }
}

/// Appends the line with its text replaced; `span` is the text within the quotes.
pub(in crate::clean) fn rewrite(line: &str, span: Range<usize>, text: &str, out: &mut Vec<u8>) {
    out.extend_from_slice(&line.as_bytes()[..span.start]);
    for part in text.split_inclusive(|char: char| char < ' ' || char == '"' || char == '\\') {
        let (plain, last) = part.split_at(part.len() - usize::from(ends_special(part)));
        out.extend_from_slice(plain.as_bytes());
        match last.as_bytes() {
            [] => {}
            b"\n" => out.extend_from_slice(b"\\n"),
            b"\r" => out.extend_from_slice(b"\\r"),
            b"\t" => out.extend_from_slice(b"\\t"),
            [byte @ (b'"' | b'\\')] => out.extend_from_slice(&[b'\\', *byte]),
            bytes => out.extend_from_slice(format!("\\u{:04x}", bytes[0]).as_bytes()),
        }
    }
    out.extend_from_slice(&line.as_bytes()[span.end..]);
}

/// Whether the last character of a part needs an escape: it is of one byte.
fn ends_special(part: &str) -> bool {
    part.as_bytes().last().is_some_and(|byte| *byte < b' ' || matches!(byte, b'"' | b'\\'))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The results of Python's `re.sub(r"  +|\b\n+ |\b\n+", " ", text)`.
    #[test]
    fn spaces_are_those_of_the_expression() {
        for (text, expected) in [
            ("a  b", "a b"),
            ("a b", "a b"),
            ("a\nb", "a b"),
            ("a\n\n b", "a b"),
            ("a\n  b", "a  b"),
            (".\nb", ".\nb"),
            (".\n\n b", ".\n\n b"),
            ("   ", " "),
            ("é\n", "é "),
            ("春\n\n眠", "春 眠"),
            ("a \n b", "a \n b"),
            ("_\n1\n", "_ 1 "),
            ("", ""),
            ("\na", "\na"),
            ("का\nb", "का\nb"),
        ] {
            let mut fixed = String::new();
            let found = if spaces(text, &mut fixed) { &fixed } else { text };
            assert_eq!(found, expected, "{text:?}");
        }
    }

    #[test]
    fn folding_takes_case_and_white_space() {
        let mut folded = String::new();
        fold("Ab \u{3000}Ç\n\tİ 春", &mut folded);
        assert_eq!(folded, "abçi\u{307}春");
    }

    #[test]
    fn rewriting_changes_only_the_text() {
        let line = r#"{"a": 1, "text" : "old", "b": NaN}"#;
        let start = line.find("old").unwrap();
        let text = "q\"b\\ \u{1}\n\té春\u{7f}";
        let mut out = Vec::new();
        rewrite(line, start..start + 3, text, &mut out);
        let out = String::from_utf8(out).unwrap();
        let expected = "{\"a\": 1, \"text\" : \"q\\\"b\\\\ \\u0001\\n\\té春\u{7f}\", \"b\": NaN}";
        assert_eq!(out, expected);
        assert_eq!(crate::json::scanner::TextFinder::new("text").find(&out).unwrap(), text);
    }
}
