//! BPE over characters, with bytes for those that the vocabulary lacks, as in Llama 2.
//!
//! There is no pre-tokenizer, so that a document is one piece. But where no merge joins the last
//! character of one token to the first of another, there is a seam that nothing ever crosses, and
//! the parts between seams, mostly words, are pieces like any others. Within a piece the engine of
//! byte-level BPE is used: the first merges make characters from their bytes, and the rest are
//! those of the vocabulary. A character that is not in it may be merged only in part, and is then
//! written as its bytes.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

use super::super::Encoder;
use super::super::bpe::{Bpe, BpeEncoder};
use super::super::merge::{ID_LIMIT, Merge, RANK_LIMIT};
use super::super::split::Pattern;
use super::own::{Ids, Supported, merges};
use super::tokens::byte_token;

/// Represents a space in the vocabulary.
pub(super) const META: char = '▁';

/// The engine.
#[derive(Debug)]
pub(super) struct Chars {
    bpe: Bpe,
    seams: Seams,
    /// The ids from here on are beginnings of characters, whose byte ids are in `parts`.
    first_part: u32,
    parts: Vec<Vec<u32>>,
}

/// Encodes one text after another.
#[derive(Debug)]
pub(super) struct CharsEncoder<'a> {
    chars: &'a Chars,
    bpe: BpeEncoder<'a>,
}

/// How a space is spelled in the vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Space {
    /// As the model is given it.
    AsItIs,
    /// As [`META`], which the normalizer need not put in its place.
    Meta,
}

/// Whether a merge may join a space to the character before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Words {
    Joined,
    Apart,
}

impl Chars {
    /// From tokens and their ids, below the limit, and pairs of tokens in rank order.
    ///
    /// # Errors
    /// Why this vocabulary is not of the kind.
    pub(super) fn new(
        ids: &Ids<'_>,
        pairs: &[(&str, &str)],
        space: Space,
        words: Words,
    ) -> Supported<Self> {
        let mut byte_ids = [0; 256];
        for (id, byte) in byte_ids.iter_mut().zip(0..=255_u8) {
            let token = format!("<0x{byte:02X}>");
            *id = *ids.get(&*token).ok_or_else(|| format!("no token {token}"))?;
        }
        let first_part = ids.values().max().map_or(0, |&id| id + 1);
        let mut building = Building {
            byte_ids,
            first_part,
            parts: Vec::new(),
            part_ids: HashMap::new(),
            merges: Vec::new(),
        };
        let mut buffer = [0; 4];
        for (token, &id) in ids {
            let mut chars = token.chars();
            if let (Some(char), None) = (chars.next(), chars.next()) {
                building.add_char(char.encode_utf8(&mut buffer).as_bytes(), id);
            }
        }
        if space == Space::Meta {
            building.byte_ids[usize::from(b' ')] =
                *ids.get("▁").ok_or_else(|| format!("no token {META}"))?;
        }
        let Building { byte_ids, parts, mut merges, .. } = building;
        if pairs
            .iter()
            .any(|(left, right)| [left, right].into_iter().any(|one| byte_token(one).is_some()))
        {
            return Err("a merge of byte tokens".to_owned());
        }
        merges.extend(self::merges(ids, pairs)?);
        if merges.len() > RANK_LIMIT || first_part as usize + parts.len() > ID_LIMIT {
            return Err(format!("too many merges ({}) or tokens ({first_part})", merges.len()));
        }
        let bpe = Bpe::new(byte_ids, &merges, Pattern::Whole);
        Ok(Chars { bpe, seams: Seams::new(pairs, space, words), first_part, parts })
    }

    pub(super) fn encoder(&self) -> CharsEncoder<'_> {
        CharsEncoder { chars: self, bpe: self.bpe.encoder() }
    }

    pub(super) fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        self.encode_by(text, ids, |piece, ids| self.bpe.encode(piece, ids));
    }

    /// A place at or after `at` that no merge crosses.
    pub(super) fn cut_after(&self, text: &str, at: usize) -> Option<usize> {
        let at = (at..=text.len()).find(|&at| text.is_char_boundary(at))?;
        let before = text[..at].chars().next_back()?;
        self.seams.next(&text[at..], Some(before)).map(|len| at + len)
    }

    #[inline]
    fn encode_by(
        &self,
        text: &str,
        ids: &mut Vec<u32>,
        mut encode: impl FnMut(&str, &mut Vec<u32>),
    ) {
        let from = ids.len();
        let mut rest = text;
        while let Some(len) = self.seams.next(rest, None) {
            let (piece, after) = rest.split_at(len);
            encode(piece, ids);
            rest = after;
        }
        encode(rest, ids);
        if ids[from..].iter().any(|&id| id >= self.first_part) {
            let made = ids.split_off(from);
            for id in made {
                match id.checked_sub(self.first_part) {
                    Some(part) => ids.extend_from_slice(&self.parts[part as usize]),
                    None => ids.push(id),
                }
            }
        }
    }
}

impl Encoder for CharsEncoder<'_> {
    fn encode(&mut self, text: &str, ids: &mut Vec<u32>) {
        let CharsEncoder { chars, bpe } = self;
        chars.encode_by(text, ids, |piece, ids| bpe.encode(piece, ids));
    }
}

/// The merges that make characters.
struct Building {
    byte_ids: [u32; 256],
    first_part: u32,
    parts: Vec<Vec<u32>>,
    /// The parts' ids, by their bytes.
    part_ids: HashMap<Vec<u8>, u32>,
    merges: Vec<Merge>,
}

impl Building {
    /// Adds merges that make a character's token from its bytes, from the left.
    fn add_char(&mut self, bytes: &[u8], id: u32) {
        if let [byte] = bytes {
            self.byte_ids[usize::from(*byte)] = id;
            return;
        }
        let mut left = self.byte_ids[usize::from(bytes[0])];
        for end in 2..bytes.len() {
            left = match self.part_ids.get(&bytes[..end]) {
                Some(&part) => part,
                None => self.add_part(left, &bytes[..end]),
            };
        }
        let right = self.byte_ids[usize::from(bytes[bytes.len() - 1])];
        self.merges.push(Merge { left, right, merged: id });
    }

    fn add_part(&mut self, left: u32, bytes: &[u8]) -> u32 {
        let ids: Vec<u32> = bytes.iter().map(|&byte| self.byte_ids[usize::from(byte)]).collect();
        let part = self.first_part + self.parts.len() as u32; // fits: below four a character
        self.merges.push(Merge { left, right: ids[ids.len() - 1], merged: part });
        self.parts.push(ids);
        self.part_ids.insert(bytes.to_owned(), part);
        part
    }
}

/// Where pieces end: between characters that no merge brings together.
#[derive(Debug)]
struct Seams {
    /// Bit `right` of entry `left`: the two ASCII characters are joined.
    ascii: [u128; 128],
    /// The other pairs that are joined.
    wide: HashSet<u64, BuildHasherDefault<Fibonacci>>,
}

impl Seams {
    fn new(pairs: &[(&str, &str)], space: Space, words: Words) -> Self {
        let mut seams = Seams { ascii: [0; 128], wide: HashSet::default() };
        for (left, right) in pairs {
            let (Some(left), Some(right)) = (left.chars().next_back(), right.chars().next()) else {
                continue;
            };
            if words == Words::Apart && right == META {
                continue;
            }
            seams.join(left, right);
            if space == Space::Meta {
                let plain = |char| if char == META { ' ' } else { char };
                seams.join(plain(left), right);
                seams.join(left, plain(right));
                seams.join(plain(left), plain(right));
            }
        }
        seams
    }

    fn join(&mut self, left: char, right: char) {
        match (u8::try_from(left), u8::try_from(right)) {
            (Ok(left @ 0..128), Ok(right @ 0..128)) => self.ascii[usize::from(left)] |= 1 << right,
            _ => {
                self.wide.insert(key(left, right));
            }
        }
    }

    #[inline]
    fn joined(&self, left: char, right: char) -> bool {
        if left.is_ascii() && right.is_ascii() {
            return self.ascii[left as usize] >> (right as u32) & 1 == 1; // fits: ASCII
        }
        self.wide.contains(&key(left, right))
    }

    /// The first seam of a text that follows `before`.
    #[inline]
    fn next(&self, text: &str, mut before: Option<char>) -> Option<usize> {
        for (at, char) in text.char_indices() {
            if before.is_some_and(|before| !self.joined(before, char)) {
                return Some(at);
            }
            before = Some(char);
        }
        None
    }
}

fn key(left: char, right: char) -> u64 {
    (u64::from(u32::from(left)) << 32) | u64::from(u32::from(right))
}

/// Pairs of characters come from vocabularies, and their hash need not be hard to foresee: a text
/// cannot add to the set.
#[derive(Debug, Default)]
struct Fibonacci(u64);

impl Hasher for Fibonacci {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(u64::from(byte)));
    }

    fn write_u64(&mut self, word: u64) {
        let mixed = (self.0 ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
