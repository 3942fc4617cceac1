//! Normalizes a text before it is cut: replaces characters, collapses white space, and puts a space
//! before or after it.
//!
//! The library spells a space as U+2581 in the text that it cuts. We spell it as one space, and so
//! a U+2581 of the text, because no later step distinguishes them. [`each_spelled`] converts back.

use super::charsmap::Charsmap;
use super::model::{NormalizerSpec, SPACE};
use super::trie::Trie;
use crate::Result;

/// The normalizer of a model.
#[derive(Debug)]
pub(super) struct Normalizer {
    charsmap: Charsmap,
    /// User-defined pieces, as spelled in a text.
    user_defined: Trie,
    /// By code point, one bit: a rule or a user-defined piece begins with it, or it is U+2581.
    touched: Vec<u64>,
    /// Bytes that stay as they are if an ASCII byte follows. No space is.
    plain: [bool; 256],
    /// A space is a space, whatever follows.
    space_is_plain: bool,
    pub(super) options: NormalizerOptions,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NormalizerOptions {
    pub(super) add_dummy_prefix: bool,
    pub(super) remove_extra_whitespaces: bool,
    /// Spaces are spelled U+2581, and thereby the same as it.
    pub(super) escape_whitespaces: bool,
    pub(super) whitespace_as_suffix: bool,
    /// No rule and no user-defined piece has a space in it, so that a text may be cut at one.
    pub(super) spaces_stand_alone: bool,
}

/// One step: a number of bytes, and their replacement if there is one.
type Step<'a> = (usize, Option<&'a str>);

impl Normalizer {
    pub(super) fn new(
        file: &str,
        spec: &NormalizerSpec<'_>,
        user_defined: &[&str],
        whitespace_as_suffix: bool,
    ) -> Result<Self> {
        let mut touched = vec![0; 0x11_0000 / 64];
        let mut plain: [bool; 256] = std::array::from_fn(|byte| byte < 0x80);
        plain[usize::from(b' ')] = false;
        let mut spaces_stand_alone = true;
        let mut note = |key: &str| {
            let first = key.chars().next().map_or(0, u32::from) as usize;
            touched[first / 64] |= 1_u64 << (first % 64);
            if key.as_bytes().get(1).is_none_or(u8::is_ascii) {
                plain[usize::from(key.as_bytes()[0])] = false;
            }
            spaces_stand_alone &= !key.contains(' ');
        };
        user_defined.iter().for_each(|key| note(key));
        let charsmap = Charsmap::with_keys(file, spec.charsmap, note)?;
        let space_is_plain = touched[0] >> b' ' & 1 == 0;
        let space = SPACE.chars().map(|char| char as usize).next().unwrap_or_default();
        touched[space / 64] |= 1 << (space % 64);
        let user_defined = user_defined.iter().map(|text| text.as_bytes()).zip(0..).collect();
        let NormalizerSpec { add_dummy_prefix, remove_extra_whitespaces, .. } = *spec;
        let options = NormalizerOptions {
            add_dummy_prefix,
            remove_extra_whitespaces,
            escape_whitespaces: spec.escape_whitespaces,
            whitespace_as_suffix,
            spaces_stand_alone,
        };
        let user_defined = Trie::new(user_defined);
        Ok(Normalizer { charsmap, user_defined, touched, plain, space_is_plain, options })
    }

    /// Writes the normalized text to `out`, which it clears first.
    pub(super) fn normalize(&self, text: &str, out: &mut Vec<u8>) {
        out.clear();
        let NormalizerOptions { remove_extra_whitespaces: trim, .. } = self.options;
        let mut at = 0;
        while trim && at < text.len() {
            match self.step(text, at) {
                (len, Some(" ")) => at += len,
                (len, None) if &text[at..at + len] == " " => at += len,
                _ => break,
            }
        }
        if at == text.len() {
            return;
        }
        out.reserve(text.len() - at + SPACE.len());
        let dummy = self.options.add_dummy_prefix;
        if dummy && !self.options.whitespace_as_suffix {
            out.push(b' ');
        }
        self.body(text, at, out);
        if trim {
            while out.last() == Some(&b' ') {
                out.pop();
            }
        }
        if dummy && self.options.whitespace_as_suffix {
            out.push(b' ');
        }
    }

    /// From `at` to the end; drops white space after white space if extra white space is removed.
    fn body(&self, text: &str, mut at: usize, out: &mut Vec<u8>) {
        let bytes = text.as_bytes();
        let trim = self.options.remove_extra_whitespaces;
        let mut after_space = trim;
        while at < bytes.len() {
            let run = self.plain_run(&bytes[at..]);
            let run = run + self.untouched_run(&text[at + run..]);
            if run > 0 {
                out.extend_from_slice(&bytes[at..at + run]);
                at += run;
                after_space = false;
                continue;
            }
            if bytes[at] == b' ' && self.space_is_plain {
                if !after_space {
                    out.push(b' ');
                }
                after_space = trim;
                at += 1;
                continue;
            }
            let (len, becomes) = self.step(text, at);
            let mut piece = becomes.unwrap_or(&text[at..at + len]);
            at += len;
            while after_space && let Some(rest) = piece.strip_prefix(' ') {
                piece = rest;
            }
            if !piece.is_empty() {
                self.push(piece, out);
                after_space = trim && piece.ends_with(' ');
            }
        }
    }

    /// Whether a byte stays as it is if an ASCII byte follows.
    pub(super) fn is_plain(&self, byte: u8) -> bool {
        self.plain[usize::from(byte)]
    }

    /// How many bytes stay as they are, at the least.
    #[inline]
    fn plain_run(&self, bytes: &[u8]) -> usize {
        let run = bytes.iter().take_while(|&&byte| self.plain[usize::from(byte)]).count();
        // The last of them may be changed together with the bytes after it.
        match bytes.get(run) {
            Some(byte) if byte.is_ascii() => run,
            _ => run.saturating_sub(1),
        }
    }

    /// How many bytes the characters beyond ASCII take that no rule begins with.
    #[inline]
    fn untouched_run(&self, text: &str) -> usize {
        let touched = |char: char| {
            let code = char as usize;
            char.is_ascii() || self.touched[code / 64] >> (code % 64) & 1 == 1
        };
        text.find(touched).unwrap_or(text.len())
    }

    #[inline]
    fn step<'a>(&'a self, text: &'a str, at: usize) -> Step<'a> {
        let rest = &text[at..];
        let first = rest.chars().next().unwrap_or_default();
        let code = first as usize;
        if self.touched[code / 64] >> (code % 64) & 1 == 0 {
            return (first.len_utf8(), None);
        }
        if let Some((len, _)) = self.user_defined.longest(rest.as_bytes()) {
            return (len, None);
        }
        match self.charsmap.longest(rest.as_bytes()) {
            Some((len, becomes)) => (len, Some(becomes)),
            None => (first.len_utf8(), None),
        }
    }

    #[inline]
    fn push(&self, piece: &str, out: &mut Vec<u8>) {
        if self.options.escape_whitespaces && piece.contains(SPACE) {
            out.extend_from_slice(piece.replace(SPACE, " ").as_bytes());
        } else {
            out.extend_from_slice(piece.as_bytes());
        }
    }
}

/// A piece of a vocabulary as the normalizer spells it. None: no normalised text has such a piece.
pub(super) fn spell_piece(piece: &str, escape_whitespaces: bool) -> Option<String> {
    match escape_whitespaces {
        true if piece.contains(' ') => None,
        true => Some(piece.replace(SPACE, " ")),
        false => Some(piece.to_owned()),
    }
}

/// Calls `each` with the bytes in the library's spelling.
pub(super) fn each_spelled(text: &[u8], escape_whitespaces: bool, mut each: impl FnMut(u8)) {
    for byte in text {
        match byte {
            b' ' if escape_whitespaces => SPACE.bytes().for_each(&mut each),
            byte => each(*byte),
        }
    }
}
