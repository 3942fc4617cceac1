//! Unicode's normalization forms.
//!
//! The tables are those that Hugging Face's own library is built with, which are of Unicode 9:
//! newer ones would compose and reorder characters that were assigned since, and give other ids.

use std::borrow::Cow;
use std::sync::OnceLock;

use unicode_normalization_alignments::{
    IsNormalized, UnicodeNormalization, char::canonical_combining_class, is_nfc_quick,
    is_nfd_quick, is_nfkc_quick, is_nfkd_quick,
};

/// Composed or decomposed, by canonical or by compatible equivalence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NormalForm {
    C,
    D,
    Kc,
    Kd,
}

/// Normalizes a text. Only characters that are not [`inert`] can change, with the inert one before
/// them, so that the rest is copied as it is.
pub(super) fn apply(form: NormalForm, text: Cow<'_, str>) -> Cow<'_, str> {
    let table = table(form);
    let mut normal = String::new();
    let (mut copied, mut at) = (0, 0);
    while let Some(next) = first_not_inert(table, &text, at) {
        let before = text[copied..next].chars().next_back().map_or(0, char::len_utf8);
        let start = next - before;
        let end = text[next..].char_indices().find(|&(_, char)| is_set(table, char));
        at = end.map_or(text.len(), |(len, _)| next + len);
        normal.push_str(&text[copied..start]);
        let changed = &text[start..at];
        match form {
            NormalForm::C => normal.extend(changed.nfc().map(|(char, _)| char)),
            NormalForm::D => normal.extend(changed.nfd().map(|(char, _)| char)),
            NormalForm::Kc => normal.extend(changed.nfkc().map(|(char, _)| char)),
            NormalForm::Kd => normal.extend(changed.nfkd().map(|(char, _)| char)),
        }
        copied = at;
    }
    if copied == 0 {
        return text;
    }
    normal.push_str(&text[copied..]);
    Cow::Owned(normal)
}

/// Whether a character neither changes nor combines with the one before it.
pub(super) fn inert(form: NormalForm, char: char) -> bool {
    is_set(table(form), char)
}

/// The position of the first character at or after `from` that may change.
fn first_not_inert(table: &[u64], text: &str, from: usize) -> Option<usize> {
    let mut at = from;
    loop {
        at += text.as_bytes()[at..].iter().position(|byte| !byte.is_ascii())?;
        let char = text[at..].chars().next()?;
        if !is_set(table, char) {
            return Some(at);
        }
        at += char.len_utf8();
    }
}

/// Whether each character is inert: a bit each, 136 KiB, built on first use. All of ASCII is.
fn table(form: NormalForm) -> &'static [u64] {
    static TABLES: [OnceLock<Vec<u64>>; 4] = [const { OnceLock::new() }; 4];
    TABLES[form as usize].get_or_init(|| {
        let mut table = vec![0_u64; 0x11_0000 / 64];
        for char in '\0'..=char::MAX {
            let alone = [char].into_iter();
            let quick = match form {
                NormalForm::C => is_nfc_quick(alone),
                NormalForm::D => is_nfd_quick(alone),
                NormalForm::Kc => is_nfkc_quick(alone),
                NormalForm::Kd => is_nfkd_quick(alone),
            };
            let starts = canonical_combining_class(char) == 0;
            let code = char as usize; // fits: 21 bits
            table[code / 64] |= u64::from(quick == IsNormalized::Yes && starts) << (code % 64);
        }
        table
    })
}

fn is_set(table: &[u64], char: char) -> bool {
    let code = char as usize; // fits: 21 bits
    table[code / 64] >> (code % 64) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str) {
        let chars = |form| match form {
            NormalForm::C => text.nfc().map(|(char, _)| char).collect::<String>(),
            NormalForm::D => text.nfd().map(|(char, _)| char).collect(),
            NormalForm::Kc => text.nfkc().map(|(char, _)| char).collect(),
            NormalForm::Kd => text.nfkd().map(|(char, _)| char).collect(),
        };
        for form in [NormalForm::C, NormalForm::D, NormalForm::Kc, NormalForm::Kd] {
            assert_eq!(apply(form, Cow::Borrowed(text)), chars(form), "{form:?} of {text:?}");
        }
    }

    #[test]
    fn forms_equal_those_of_the_whole_text() {
        for text in
            ["", "a", "e\u{301}", "\u{301}", "e\u{301}\u{323}x", "\u{1100}\u{1161}\u{11a8}a"]
        {
            check(text);
        }
        // Every pair and triple of characters that meet in some way.
        let met = [
            'a', 'e', '\u{301}', '\u{323}', '\u{345}', '\u{212b}', '\u{1100}', '\u{1161}',
            '\u{11a8}', '\u{ac00}', '\u{f900}', '中', '\u{9c7}', '\u{9be}', ' ', '\u{1e0a}',
            '\u{a0}', '\u{b4}', 'ﬁ', '\u{ff9e}', '\u{ff76}',
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
}
