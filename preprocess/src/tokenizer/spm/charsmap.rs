//! The rules by which characters are replaced before a text is cut: SentencePiece's
//! `precompiled_charsmap`, which Hugging Face's `Precompiled` normalizer holds too.
//!
//! A little-endian u32 counts the bytes of a Darts-clone double array, which follows; then come the
//! replacements, each ended by NUL. The array maps a string to where its replacement begins.

use crate::{Error, Result};

/// The replacement of each of a set of strings.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Charsmap {
    units: Vec<Unit>,
    blob: String,
}

/// The longest string that a rule may replace. Those of Unicode's normal forms are up to 12 bytes.
const KEY_BYTES_MAX: usize = 256;

/// Maximum number of steps in a double array. The largest in use, of case-folding NFKC, take a
/// twentieth.
const STEPS_MAX: usize = 1 << 22;

/// A unit of Darts-clone's array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Unit(u32);

impl Unit {
    fn has_leaf(self) -> bool {
        self.0 >> 8 & 1 == 1
    }

    /// Of a leaf.
    fn value(self) -> u32 {
        self.0 & 0x7fff_ffff
    }

    /// The byte that leads here; None for a leaf.
    fn label(self) -> Option<u8> {
        (self.0 >> 31 == 0).then_some(self.0 as u8) // fits: its lowest eight bits
    }

    fn offset(self) -> u32 {
        self.0 >> 10 << ((self.0 & 1 << 9) >> 6)
    }
}

impl Charsmap {
    /// Reads the rules. `file` is for messages. No bytes are no rules.
    ///
    /// # Errors
    /// [`Error::BadVocab`].
    pub(crate) fn new(file: &str, bytes: &[u8]) -> Result<Self> {
        Charsmap::with_keys(file, bytes, |_| {})
    }

    /// As [`Charsmap::new`]; `key` is called with every string that is replaced.
    pub(super) fn with_keys(file: &str, bytes: &[u8], mut key: impl FnMut(&str)) -> Result<Self> {
        let bad = |found: String, expected: &str| {
            let (file, expected) =
                (file.to_owned(), format!("precompiled_charsmap to have {expected}"));
            Error::BadVocab { file, line: None, found, expected, hint: None }
        };
        let Some((len, rest)) = bytes.split_first_chunk() else {
            return match bytes.len() {
                0 => Ok(Charsmap { units: Vec::new(), blob: String::new() }),
                len => Err(bad(format!("{len} bytes"), "at least 4 bytes")),
            };
        };
        let len = u32::from_le_bytes(*len) as usize;
        if len == 0 || !len.is_multiple_of(4) || len > rest.len() {
            let expected =
                format!("a trie length that is a multiple of 4 from 4 to {}", rest.len());
            return Err(bad(format!("{len} bytes"), &expected));
        }
        let (units, blob) = rest.split_at(len);
        let blob = std::str::from_utf8(blob)
            .map_err(|_| bad("invalid UTF-8".to_owned(), "replacements in UTF-8"))?;
        let words = units.chunks_exact(4);
        let units = words.map(|word| Unit(u32::from_le_bytes(word.try_into().expect("4 bytes"))));
        let charsmap = Charsmap { units: units.collect(), blob: blob.to_owned() };
        charsmap
            .each_rule(|bytes, start| {
                let text = std::str::from_utf8(bytes).map_err(|_| "a rule that is not UTF-8")?;
                charsmap.replacement(start).ok_or("a rule without its replacement")?;
                key(text);
                Ok(())
            })
            .map_err(|found| bad(found.to_owned(), "a valid trie of UTF-8 rules"))?;
        Ok(charsmap)
    }

    /// The bytes that the longest rule at the beginning of the text replaces, and the replacement.
    #[inline]
    pub(super) fn longest(&self, text: &[u8]) -> Option<(usize, &str)> {
        let (len, start) = self.matches(text).last()?;
        Some((len, self.replacement(start)?))
    }

    /// As [`Charsmap::longest`], but the shortest rule, as Hugging Face's `Precompiled` takes.
    pub(crate) fn shortest(&self, text: &[u8]) -> Option<(usize, &str)> {
        // It ignores the text from a NUL on.
        let end = memchr::memchr(0, text).unwrap_or(text.len());
        let (len, start) = self.matches(&text[..end]).next()?;
        Some((len, self.replacement(start)?))
    }

    /// The rules that the text begins with, the shortest first: bytes, and where the replacement
    /// begins.
    #[inline]
    fn matches(&self, text: &[u8]) -> impl Iterator<Item = (usize, u32)> {
        let mut base = self.units.first().map_or(0, |root| root.offset());
        let units = text.iter().map_while(move |&byte| {
            let at = base ^ u32::from(byte);
            let unit = self.units.get(at as usize).filter(|unit| unit.label() == Some(byte))?;
            base = at ^ unit.offset();
            Some(if unit.has_leaf() { Some(self.units.get(base as usize)?.value()) } else { None })
        });
        (1..).zip(units).filter_map(|(len, start)| Some((len, start?)))
    }

    fn replacement(&self, start: u32) -> Option<&str> {
        let rest = self.blob.get(start as usize..)?;
        Some(&rest[..memchr::memchr(0, rest.as_bytes())?])
    }

    /// Calls `each` with every string of the array and its value. Equal endings share their units,
    /// so there may be more steps than units, and in a broken array no end of them.
    fn each_rule(
        &self,
        mut each: impl FnMut(&[u8], u32) -> std::result::Result<(), &'static str>,
    ) -> std::result::Result<(), &'static str> {
        let units = &self.units;
        // The children of a unit, by its base: all units, in the order of the base they belong to.
        let mut children: Vec<(u32, u32)> = (0..)
            .zip(units)
            .filter_map(|(at, unit)| unit.label().map(|label| (at ^ u32::from(label), at)))
            .collect();
        children.sort_unstable();
        let mut open: Vec<(u32, usize, u8)> =
            self.units.first().map(|_| (0, 0, 0)).into_iter().collect();
        let mut key = Vec::new();
        let mut steps = 0;
        while let Some((at, depth, label)) = open.pop() {
            steps += 1;
            if steps > STEPS_MAX || depth > KEY_BYTES_MAX {
                return Err("an endless chain of units");
            }
            if depth > 0 {
                key.truncate(depth - 1);
                key.push(label);
            }
            let unit = units[at as usize];
            let base = at ^ unit.offset();
            if unit.has_leaf() && depth == 0 {
                return Err("a rule for the empty string");
            }
            if unit.has_leaf() {
                let leaf = units.get(base as usize).filter(|leaf| leaf.label().is_none());
                let leaf = leaf.ok_or("an invalid leaf")?;
                each(&key, leaf.value())?;
            }
            let first = children.partition_point(|&(of, _)| of < base);
            for &(_, child) in children[first..].iter().take_while(|&&(of, _)| of == base) {
                if child != at && child != 0 {
                    let label = units[child as usize].label().ok_or("a leaf in place of a unit")?;
                    open.push((child, depth + 1, label));
                }
            }
        }
        Ok(())
    }
}
