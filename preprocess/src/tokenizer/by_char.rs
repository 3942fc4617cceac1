//! Merging by characters, for scripts whose pieces are long and rarely the same, as Chinese is.
//!
//! Nearly every character begins a token. So its own tokens are read from a table, and it remains
//! to check whether the last token before it and its first may be adjacent: whether the two alone,
//! merged as a text, remain the two. If every two neighbours of a sequence of tokens may, and each
//! is the result of merging its bytes, then the sequence is the result of merging the text. For
//! suppose that merging crosses a border of the sequence, and take the first merge that does. Until
//! then nothing has crossed any border, so that the two tokens of this one have been merged as they
//! would be alone, and the next merge would cross their border there as well. In the same way every
//! two neighbours in a text that has been merged may be adjacent.

use super::merge::{MergeBuffers, Merger, SHORT_BYTES_MAX};

/// The characters of the table: CJK, most of all, which all have three bytes.
const FIRST: u32 = 0x3000;
const COUNT: usize = 0x7000;

/// Ids are below 2^21, and 0 is for none.
const ID_BITS: u32 = 21;

/// Cached pairs of tokens: 512 KiB.
const PAIRS: usize = 1 << 16;

/// Groups further back than a short piece are never merged again, and each has at least a byte.
const GROUPS: usize = 4 * SHORT_BYTES_MAX;

/// The tokens of single characters in a vocabulary.
#[derive(Debug)]
pub(super) struct CharMerger {
    /// One more than each of the ids of a character, the first at the bottom.
    units: Box<[u64]>,
    /// Bytes of the tokens, by id; 0 if unknown.
    lens: Vec<u8>,
}

/// The buffers of [`CharMerger::merge`], reused between calls.
#[derive(Debug)]
pub(super) struct CharMergeBuffers {
    /// Two ids and whether they may be adjacent, or 0.
    pairs: Box<[u64; PAIRS]>,
    /// Where groups of characters start that were merged as one, in bytes and in ids.
    groups: Vec<(usize, usize)>,
    pair_ids: Vec<u32>,
}

impl CharMergeBuffers {
    pub(super) fn new() -> Self {
        let pairs = vec![0; PAIRS].into_boxed_slice();
        let pairs = pairs.try_into().expect("so many were made");
        CharMergeBuffers { pairs, groups: Vec::new(), pair_ids: Vec::new() }
    }
}

impl CharMerger {
    pub(super) fn new(merger: &Merger) -> Self {
        let (mut ids, mut scratch) = (Vec::new(), MergeBuffers::default());
        let units = (FIRST..).take(COUNT).map(|code| {
            let code = char::from_u32(code).expect("below the surrogates");
            ids.clear();
            merger.merge(code.encode_utf8(&mut [0; 4]).as_bytes(), &mut scratch, &mut ids);
            ids.iter().rev().fold(0, |unit, &id| (unit << ID_BITS) | u64::from(id + 1))
        });
        CharMerger { units: units.collect(), lens: merger.token_lens().to_vec() }
    }

    /// Whether a piece may be merged by characters.
    #[inline]
    pub(super) fn is_for(piece: &[u8]) -> bool {
        piece.len() > 3 && matches!(piece[0], 0xe3..=0xe9)
    }

    /// Appends the ids of a piece. False, with nothing appended, if more characters than a short
    /// piece has would have to be merged as one.
    pub(super) fn merge(
        &self,
        merger: &Merger,
        piece: &[u8],
        (scratch, memory): (&mut MergeBuffers, &mut CharMergeBuffers),
        ids: &mut Vec<u32>,
    ) -> bool {
        let ids_start = ids.len();
        if self.push_units(merger, piece, (scratch, memory), ids) {
            return true;
        }
        ids.truncate(ids_start);
        memory.groups.clear();
        let mut at = 0;
        while at < piece.len() {
            let mut group = (at, ids.len());
            at = self.push_unit(merger, piece, at, scratch, ids);
            while let Some(&before) = memory.groups.last() {
                let pair = [ids[group.1 - 1], ids[group.1]];
                if self.may_be_adjacent(merger, (piece, group.0), pair, (scratch, memory)) {
                    break;
                }
                memory.groups.pop();
                group = before;
                ids.truncate(group.1);
                if at - group.0 > SHORT_BYTES_MAX {
                    ids.truncate(ids_start);
                    return false;
                }
                merger.merge(&piece[group.0..at], scratch, ids);
            }
            if memory.groups.len() == GROUPS {
                memory.groups.drain(..GROUPS / 2);
            }
            memory.groups.push(group);
        }
        true
    }

    /// Appends the ids of all characters, which is correct for most texts. False: two of them may
    /// not be adjacent, or one is not in the table.
    fn push_units(
        &self,
        merger: &Merger,
        piece: &[u8],
        (scratch, memory): (&mut MergeBuffers, &mut CharMergeBuffers),
        ids: &mut Vec<u32>,
    ) -> bool {
        let (chars, rest) = piece.as_chunks::<3>();
        if !rest.is_empty() {
            return false;
        }
        let mut len = ids.len();
        ids.resize(len + piece.len(), 0);
        let mut last = None;
        for (char, i) in chars.iter().zip(0..) {
            let Some(unit) = self.unit(*char) else { return false };
            // Three are written for each, and as many kept as it has, without a branch.
            let three = [unit, unit >> ID_BITS, unit >> (2 * ID_BITS)].map(id_of_unit);
            let count =
                1 + usize::from(unit >> ID_BITS != 0) + usize::from(unit >> (2 * ID_BITS) != 0);
            if let Some(last) = last
                && !self.may_be_adjacent(
                    merger,
                    (piece, 3 * i),
                    [last, three[0]],
                    (scratch, memory),
                )
            {
                return false;
            }
            ids[len..][..3].copy_from_slice(&three);
            len += count;
            last = Some(three[count - 1]);
        }
        ids.truncate(len);
        true
    }

    /// The ids of a character of the table, one more than each.
    #[inline]
    fn unit(&self, [lead, second, third]: [u8; 3]) -> Option<u64> {
        let code = (u32::from(lead & 0xf) << 12)
            | (u32::from(second & 0x3f) << 6)
            | u32::from(third & 0x3f);
        matches!(lead, 0xe3..=0xe9).then(|| self.units[(code - FIRST) as usize])
    }

    /// Appends the ids of the character at `at`, and returns its end.
    #[inline]
    fn push_unit(
        &self,
        merger: &Merger,
        piece: &[u8],
        at: usize,
        scratch: &mut MergeBuffers,
        ids: &mut Vec<u32>,
    ) -> usize {
        if let Some(mut unit) = piece[at..].first_chunk().and_then(|char| self.unit(*char)) {
            while unit != 0 {
                ids.push(id_of_unit(unit));
                unit >>= ID_BITS;
            }
            return at + 3;
        }
        let inside = piece[at + 1..].iter().take_while(|&&byte| byte & 0xc0 == 0x80);
        let end = at + 1 + inside.count();
        merger.merge(&piece[at..end], scratch, ids);
        end
    }

    /// Whether two tokens that meet at a position of a piece may be adjacent.
    #[inline]
    fn may_be_adjacent(
        &self,
        merger: &Merger,
        (piece, at): (&[u8], usize),
        [left, right]: [u32; 2],
        (scratch, memory): (&mut MergeBuffers, &mut CharMergeBuffers),
    ) -> bool {
        let key = ((u64::from(left) << ID_BITS) | u64::from(right)) + 1;
        let slot = key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - PAIRS.trailing_zeros());
        let known = memory.pairs[slot as usize % PAIRS];
        if known >> 1 == key {
            return known & 1 != 0;
        }
        self.compute_adjacency(merger, (piece, at), [left, right], (scratch, memory)).is_some_and(
            |answer| {
                memory.pairs[slot as usize % PAIRS] = (key << 1) | u64::from(answer);
                answer
            },
        )
    }

    /// Whether merging keeps the two tokens; `None` for a token of unknown length.
    #[cold]
    fn compute_adjacency(
        &self,
        merger: &Merger,
        (piece, at): (&[u8], usize),
        [left, right]: [u32; 2],
        (scratch, memory): (&mut MergeBuffers, &mut CharMergeBuffers),
    ) -> Option<bool> {
        let len = |id: u32| usize::from(self.lens[id as usize]);
        let (start, end) = (at.checked_sub(len(left))?, at + len(right));
        memory.pair_ids.clear();
        merger.merge(&piece[start..end], scratch, &mut memory.pair_ids);
        Some(memory.pair_ids == [left, right])
    }
}

/// The first id of a unit that has one.
#[inline]
fn id_of_unit(unit: u64) -> u32 {
    ((unit & ((1 << ID_BITS) - 1)) as u32).wrapping_sub(1) // fits: masked
}
