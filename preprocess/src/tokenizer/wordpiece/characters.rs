//! What BERT's tokenizer does with each character, in the versions of Unicode that Hugging Face's
//! `tokenizers` has: its categories are of version 8, its decompositions of version 12.

use std::sync::OnceLock;

use unicode_normalization::UnicodeNormalization as _;

use super::super::classes::ranges;

/// What is known of a character, a bit each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Traits(u8);

impl Traits {
    /// A control or format character: as if it were not there.
    pub(super) const REMOVED: Traits = Traits(1);
    /// Between words.
    pub(super) const SPACE: Traits = Traits(2);
    /// Punctuation, a word of its own.
    pub(super) const SIGN: Traits = Traits(4);
    /// A Han character, a word of its own.
    pub(super) const HAN: Traits = Traits(8);
    /// An accent, which lower-casing takes away.
    pub(super) const ACCENT: Traits = Traits(16);
    /// Newer than the decompositions.
    pub(super) const NEW: Traits = Traits(32);
    /// A sign or Han that stays as it is.
    pub(super) const ALONE: Traits = Traits(64);

    #[inline]
    pub(super) fn has(self, any: Traits) -> bool {
        self.0 & any.0 != 0
    }

    pub(super) const fn or(self, other: Traits) -> Traits {
        Traits(self.0 | other.0)
    }
}

/// By character.
#[derive(Debug)]
pub(super) struct Characters(Vec<Traits>);

/// The blocks that BERT's authors took Chinese to be, with the slip that its port made in the first
/// number of the last but two.
const HAN: [(u32, u32); 8] = [
    (0x4e00, 0x9fff),
    (0x3400, 0x4dbf),
    (0x2_0000, 0x2_a6df),
    (0x2_a700, 0x2_b73f),
    (0x2_b740, 0x2_b81f),
    (0x2_b920, 0x2_ceaf),
    (0xf900, 0xfaff),
    (0x2_f800, 0x2_fa1f),
];

impl Characters {
    /// The one table of this process.
    pub(super) fn get() -> &'static Characters {
        static CHARACTERS: OnceLock<Characters> = OnceLock::new();
        CHARACTERS.get_or_init(Characters::build)
    }

    #[inline]
    pub(super) fn of(&self, char: char) -> Traits {
        self.0[char as usize]
    }

    fn build() -> Characters {
        let mut all = vec![Traits::default(); 0x11_0000];
        let mut add = |(first, last): (u32, u32), of: Traits| {
            for traits in &mut all[first as usize..=last as usize] {
                *traits = traits.or(of);
            }
        };
        for (pattern, of) in [
            // Those named have had another category since.
            (r"[[\p{P}\u{166d}\u{111c9}]&&\p{Age=8.0}]", Traits::SIGN),
            (r"[!-/:-@\[-`{-~]", Traits::SIGN),
            (
                r"[[\p{Mn}\u{1734}\u{1171e}]&&\p{Age=8.0}--\u{111c9}\u{1885}\u{1886}\u{a9bd}]",
                Traits::ACCENT,
            ),
            (r"[[\p{Cc}\p{Cf}]&&\p{Age=8.0}--[\t\n\r]]", Traits::REMOVED),
            (r"[\p{Co}\u{0}\u{fffd}]", Traits::REMOVED),
            (r"[\s--\p{Cc}]", Traits::SPACE),
            (r"[\t\n\r]", Traits::SPACE),
            (r"[\P{Age=12.1}]", Traits::NEW),
        ] {
            ranges(pattern).into_iter().for_each(|range| add(range, of));
        }
        HAN.into_iter().for_each(|range| add(range, Traits::HAN));
        let mut characters = Characters(all);
        for code in (0..0x11_0000).filter_map(char::from_u32) {
            let whole = characters.of(code);
            let same = characters.decomposed(code).eq([code]);
            if whole.has(Traits::SIGN.or(Traits::HAN)) && same && code.to_lowercase().eq([code]) {
                characters.0[code as usize] = whole.or(Traits::ALONE);
            }
        }
        characters
    }

    fn decomposed(&self, char: char) -> impl Iterator<Item = char> {
        let new = self.of(char).has(Traits::NEW);
        let old = Some(char).filter(|_| !new).into_iter();
        old.nfd().chain(Some(char).filter(|_| new))
    }

    /// Appends what lower-casing makes of a text: without accents, in small letters.
    pub(super) fn lower(&self, text: &str, out: &mut String) {
        let is_new = |char: char| self.of(char).has(Traits::NEW);
        let mut rest = text;
        while !rest.is_empty() {
            let len = rest.find(is_new).unwrap_or(rest.len());
            let (old, after) = rest.split_at(len);
            let (new, after) = after.split_at(after.chars().next().map_or(0, char::len_utf8));
            let kept = old.nfd().chain(new.chars());
            let kept = kept.filter(|&char| !self.of(char).has(Traits::ACCENT));
            out.extend(kept.flat_map(char::to_lowercase));
            rest = after;
        }
    }
}
