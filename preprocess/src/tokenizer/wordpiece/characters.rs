//! How BERT's tokenizer treats each character. Hugging Face's `tokenizers` has categories of
//! Unicode 8 and decompositions of Unicode 12; the Python program has those of its interpreter,
//! here Unicode 14 as in Python 3.11.

use std::borrow::Cow;
use std::sync::OnceLock;

use unicode_normalization::UnicodeNormalization as _;

use super::super::classes::ranges;
use super::WordPieceRules;

/// Properties of a character, a bit each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Traits(u8);

impl Traits {
    /// A control or format character, which is removed.
    pub(super) const REMOVED: Traits = Traits(1);
    /// Between words.
    pub(super) const SPACE: Traits = Traits(2);
    /// Punctuation, a word of its own.
    pub(super) const SIGN: Traits = Traits(4);
    /// A Han character, a word of its own.
    pub(super) const HAN: Traits = Traits(8);
    /// An accent, which lower-casing removes.
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
pub(super) struct Characters {
    traits: Vec<Traits>,
    rules: WordPieceRules,
}

/// Characters that have a trait, as patterns of `regex_syntax`.
type Patterns = [(&'static str, Traits); 8];

const HUGGING_FACE: Patterns = [
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
];

const FULL_TOKENIZER: Patterns = [
    (r"[\p{P}&&\p{Age=14.0}]", Traits::SIGN),
    (r"[!-/:-@\[-`{-~]", Traits::SIGN),
    (r"[[\p{Mn}\u{1171e}]&&\p{Age=14.0}]", Traits::ACCENT),
    (r"[[\p{Cc}\p{Cf}]&&\p{Age=14.0}--[\t\n\r]]", Traits::REMOVED),
    (r"[\u{0}\u{fffd}]", Traits::REMOVED),
    (r"[\s--\p{Cc}]", Traits::SPACE),
    (r"[\t\n\r]", Traits::SPACE),
    (r"[\P{Age=14.0}]", Traits::NEW),
];

/// The start of the Chinese characters of extension E; the port starts later, by mistake.
const HAN_E: u32 = 0x2_b820;
const HAN_E_IN_PORT: u32 = 0x2_b920;

/// The blocks that BERT's authors treat as Chinese.
const HAN: [(u32, u32); 8] = [
    (0x4e00, 0x9fff),
    (0x3400, 0x4dbf),
    (0x2_0000, 0x2_a6df),
    (0x2_a700, 0x2_b73f),
    (0x2_b740, 0x2_b81f),
    (HAN_E, 0x2_ceaf),
    (0xf900, 0xfaff),
    (0x2_f800, 0x2_fa1f),
];

impl Characters {
    /// The one table of these rules in this process.
    pub(super) fn get(rules: WordPieceRules) -> &'static Characters {
        static PORT: OnceLock<Characters> = OnceLock::new();
        static ORIGINAL: OnceLock<Characters> = OnceLock::new();
        let table = match rules {
            WordPieceRules::HuggingFace => &PORT,
            WordPieceRules::FullTokenizer => &ORIGINAL,
        };
        table.get_or_init(|| Characters::build(rules))
    }

    #[inline]
    pub(super) fn of(&self, char: char) -> Traits {
        self.traits[char as usize]
    }

    fn build(rules: WordPieceRules) -> Characters {
        let mut all = vec![Traits::default(); 0x11_0000];
        let mut add = |(first, last): (u32, u32), of: Traits| {
            for traits in &mut all[first as usize..=last as usize] {
                *traits = traits.or(of);
            }
        };
        let patterns = match rules {
            WordPieceRules::HuggingFace => HUGGING_FACE,
            WordPieceRules::FullTokenizer => FULL_TOKENIZER,
        };
        for (pattern, of) in patterns {
            ranges(pattern).into_iter().for_each(|range| add(range, of));
        }
        for (first, last) in HAN {
            let slips = first == HAN_E && rules == WordPieceRules::HuggingFace;
            add((if slips { HAN_E_IN_PORT } else { first }, last), Traits::HAN);
        }
        let mut characters = Characters { traits: all, rules };
        for code in (0..0x11_0000).filter_map(char::from_u32) {
            let whole = characters.of(code);
            let same = characters.decomposed(code).eq([code]);
            if whole.has(Traits::SIGN.or(Traits::HAN)) && same && code.to_lowercase().eq([code]) {
                characters.traits[code as usize] = whole.or(Traits::ALONE);
            }
        }
        characters
    }

    fn decomposed(&self, char: char) -> impl Iterator<Item = char> {
        let new = self.of(char).has(Traits::NEW);
        let old = Some(char).filter(|_| !new).into_iter();
        old.nfd().chain(Some(char).filter(|_| new))
    }

    /// Appends a text in lower case, without accents.
    pub(super) fn lower(&self, text: &str, out: &mut String) {
        let is_new = |char: char| self.of(char).has(Traits::NEW);
        let is_kept = |char: &char| !self.of(*char).has(Traits::ACCENT);
        let mut rest = text;
        while !rest.is_empty() {
            let len = rest.find(is_new).unwrap_or(rest.len());
            let (old, after) = rest.split_at(len);
            let (new, after) = after.split_at(after.chars().next().map_or(0, char::len_utf8));
            match self.rules {
                WordPieceRules::HuggingFace => {
                    let kept = old.nfd().chain(new.chars()).filter(is_kept);
                    out.extend(kept.flat_map(char::to_lowercase));
                }
                // Python does not lower-case characters that are newer than its Unicode version.
                WordPieceRules::FullTokenizer => {
                    let lower = old.chars().flat_map(char::to_lowercase).nfd();
                    out.extend(lower.filter(is_kept).chain(new.chars()));
                }
            }
            rest = after;
        }
    }

    /// The text with words that have a capital sigma in lower case, for which Python considers the
    /// letters around it: at the end of a word it becomes another letter than within. Words are
    /// separated by spaces, Han and characters that this Python version does not know.
    pub(super) fn with_small_sigmas<'a>(&self, text: &'a str) -> Cow<'a, str> {
        const SIGMA: char = '\u{3a3}';
        if !text.contains(SIGMA) {
            return Cow::Borrowed(text);
        }
        let mut out = String::with_capacity(text.len());
        let ends = Traits::SPACE.or(Traits::HAN).or(Traits::NEW);
        let is_end = |char: char| self.of(char).has(ends);
        for part in text.split_inclusive(is_end) {
            let end = part.chars().next_back().filter(|&char| is_end(char));
            let word = &part[..part.len() - end.map_or(0, char::len_utf8)];
            if word.contains(SIGMA) {
                let kept = word.chars().filter(|&char| !self.of(char).has(Traits::REMOVED));
                out.push_str(&kept.collect::<String>().to_lowercase());
            } else {
                out.push_str(word);
            }
            out.extend(end);
        }
        Cow::Owned(out)
    }
}
