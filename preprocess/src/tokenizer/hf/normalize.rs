//! What happens to a text before it is cut into pieces.
//!
//! The Unicode tables are those that Hugging Face's own library is built with, which are of
//! Unicode 9: newer ones would compose and reorder characters that were assigned since, and give
//! other ids.

use std::borrow::Cow;
use std::sync::OnceLock;

use serde::Deserialize;
use serde_json::Value;
use unicode_normalization_alignments::{IsNormalized, UnicodeNormalization, is_nfc_quick};

/// The steps of a normalizer, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Normalizer(pub(super) Vec<Step>);

/// One of the normalizers that byte-level and character-level BPE come with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Nfc,
    /// Before a text that is not empty.
    Prepend(String),
    Replace {
        pattern: String,
        content: String,
    },
}

#[derive(Deserialize)]
#[serde(tag = "type")]
enum Given {
    Sequence {
        normalizers: Vec<Given>,
    },
    #[serde(rename = "NFC")]
    Nfc,
    Prepend {
        prepend: String,
    },
    Replace {
        pattern: Literal,
        content: String,
    },
}

/// A pattern that is no regular expression.
#[derive(Deserialize)]
struct Literal {
    #[serde(rename = "String")]
    literal: String,
}

impl Step {
    /// A space becomes the sign for one.
    pub(super) fn is_meta(&self) -> bool {
        matches!(self, Step::Replace { pattern, content } if pattern == " " && content == "▁")
    }
}

impl Normalizer {
    /// None for a normalizer that is not among ours.
    pub(super) fn new(given: &Value) -> Option<Self> {
        let mut steps = Vec::new();
        if !given.is_null() {
            collect(Given::deserialize(given).ok()?, &mut steps);
        }
        let empty =
            |step: &Step| matches!(step, Step::Replace { pattern, .. } if pattern.is_empty());
        (!steps.iter().any(empty)).then_some(Normalizer(steps))
    }

    /// The text that is left, borrowed where nothing changes.
    #[inline]
    pub(super) fn apply<'a>(&self, text: &'a str) -> Cow<'a, str> {
        self.0.iter().fold(Cow::Borrowed(text), |text, step| match step {
            Step::Nfc => nfc(text),
            Step::Prepend(_) if text.is_empty() => text,
            Step::Prepend(prefix) => Cow::Owned(format!("{prefix}{text}")),
            Step::Replace { pattern, content } if text.contains(pattern) => {
                Cow::Owned(text.replace(pattern, content))
            }
            Step::Replace { .. } => text,
        })
    }

    /// Whether what is left of a text is what is left of its two halves.
    pub(super) fn may_cut(&self, text: &str, at: usize) -> bool {
        self.0.iter().all(|step| match step {
            Step::Nfc => {
                let before = text[..at].chars().next_back();
                before.is_none_or(inert) && text[at..].chars().next().is_none_or(inert)
            }
            Step::Prepend(_) => false,
            Step::Replace { pattern, .. } => pattern.len() == 1,
        })
    }
}

fn collect(given: Given, steps: &mut Vec<Step>) {
    match given {
        Given::Sequence { normalizers } => {
            normalizers.into_iter().for_each(|one| collect(one, steps));
        }
        Given::Nfc => steps.push(Step::Nfc),
        Given::Prepend { prepend } => steps.push(Step::Prepend(prepend)),
        Given::Replace { pattern, content } => {
            steps.push(Step::Replace { pattern: pattern.literal, content });
        }
    }
}

/// Normalization form C. Only characters that are not [`inert`] can change, with the inert one
/// before them, so that the rest is copied as it is.
fn nfc(text: Cow<'_, str>) -> Cow<'_, str> {
    let mut normal = String::new();
    let (mut copied, mut at) = (0, 0);
    while let Some(next) = first_not_inert(&text, at) {
        let before = text[copied..next].chars().next_back().map_or(0, char::len_utf8);
        let start = next - before;
        let end = text[next..].char_indices().find(|&(_, char)| inert(char));
        at = end.map_or(text.len(), |(len, _)| next + len);
        normal.push_str(&text[copied..start]);
        normal.extend(text[start..at].nfc().map(|(char, _)| char));
        copied = at;
    }
    if copied == 0 {
        return text;
    }
    normal.push_str(&text[copied..]);
    Cow::Owned(normal)
}

/// Where, at or after `from`, the first character is that may change.
fn first_not_inert(text: &str, from: usize) -> Option<usize> {
    /// The first byte of U+0300, before which all characters are inert.
    const FIRST_LEAD: u8 = 0xcc;
    let mut at = from;
    loop {
        at += text.as_bytes()[at..].iter().position(|&byte| byte >= FIRST_LEAD)?;
        let char = text[at..].chars().next()?;
        if !inert(char) {
            return Some(at);
        }
        at += char.len_utf8();
    }
}

/// Whether a character neither changes nor has to do with the one before it: a bit each, 136 KiB,
/// made when first asked for.
fn inert(char: char) -> bool {
    static TABLE: OnceLock<Vec<u64>> = OnceLock::new();
    let table = TABLE.get_or_init(|| {
        let mut table = vec![0_u64; 0x11_0000 / 64];
        for char in '\0'..=char::MAX {
            let alone = [char].into_iter();
            let quick = is_nfc_quick(alone) == IsNormalized::Yes;
            let starts =
                unicode_normalization_alignments::char::canonical_combining_class(char) == 0;
            let code = char as usize; // fits: 21 bits
            table[code / 64] |= u64::from(quick && starts) << (code % 64);
        }
        table
    });
    let code = char as usize; // fits: 21 bits
    table[code / 64] >> (code % 64) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str) {
        let due: String = text.nfc().map(|(char, _)| char).collect();
        assert_eq!(nfc(Cow::Borrowed(text)), due, "{text:?}");
    }

    #[test]
    fn composition_is_that_of_the_whole_text() {
        for text in
            ["", "a", "e\u{301}", "\u{301}", "e\u{301}\u{323}x", "\u{1100}\u{1161}\u{11a8}a"]
        {
            check(text);
        }
        // Every pair and triple of characters that meet in some way.
        let met = [
            'a', 'e', '\u{301}', '\u{323}', '\u{345}', '\u{212b}', '\u{1100}', '\u{1161}',
            '\u{11a8}', '\u{ac00}', '\u{f900}', '中', '\u{9c7}', '\u{9be}', ' ', '\u{1e0a}',
        ];
        for first in met {
            for second in met {
                for third in met {
                    check(&String::from_iter([first, second, third, 'x', '\u{307}']));
                }
            }
        }
        for chars in ('\0'..=char::MAX).collect::<Vec<_>>().chunks(100) {
            check(&chars.iter().flat_map(|&char| ['a', char, '\u{301}']).collect::<String>());
        }
    }

    #[test]
    fn what_is_not_ours_is_told() {
        let given = |text: &str| Normalizer::new(&serde_json::from_str(text).unwrap());
        assert_eq!(given("null"), Some(Normalizer::default()));
        assert!(given(r#"{"type": "Sequence", "normalizers": [{"type": "NFC"}]}"#).is_some());
        assert_eq!(given(r#"{"type": "NFKC"}"#), None);
        assert_eq!(given(r#"{"type": "Replace", "pattern": {"Regex": "a"}, "content": ""}"#), None);
        assert_eq!(given(r#"{"type": "Replace", "pattern": {"String": ""}, "content": ""}"#), None);
    }
}
