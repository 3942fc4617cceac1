//! Byte-pair merging: of all neighbours the pair of lowest rank becomes one token, the leftmost
//! first, until no pair of neighbours has a rank.
//!
//! Short pieces, which nearly all are, scan an array on the stack. Long ones, such as a line of
//! a hundred thousand dashes, use a heap, so that the time grows as n log n and not as n squared.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Ids below this fit a slot of the pair table.
pub(super) const ID_LIMIT: usize = (1 << ID_BITS) - 1;
/// So do ranks below this.
pub(super) const RANK_LIMIT: usize = 1 << RANK_BITS;

const ID_BITS: u32 = 21;
const RANK_BITS: u32 = 22;
const _: () = assert!(2 * ID_BITS + RANK_BITS == u64::BITS);

/// The positions of a short piece are the bits of one word.
pub(super) const SHORT_BYTES_MAX: usize = 64;
const POSITION_BITS: u32 = SHORT_BYTES_MAX.trailing_zeros();
const _: () = assert!(RANK_BITS + POSITION_BITS < 31, "a rank and a position are one i32");

/// No rank at any position. Signed, for the oldest vector instructions compare no other numbers.
const UNRANKED: i32 = i32::MAX;

/// No merge. It is more than any rank.
const NONE: u32 = u32::MAX;
const _: () = assert!(RANK_LIMIT < NONE as usize);

/// One merge, in ids: `left` followed by `right` becomes `merged`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Merge {
    pub(super) left: u32,
    pub(super) right: u32,
    pub(super) merged: u32,
}

/// The merges of a vocabulary, ready to be applied.
#[derive(Debug)]
pub(super) struct Merger {
    byte_ids: [u32; 256],
    byte_pairs: BytePairs,
    /// What the merge of each rank makes.
    merged: Vec<u32>,
    pairs: Pairs,
}

/// The memory of [`Merger::merge`] between calls.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    nodes: Vec<Node>,
    /// Rank and position of pairs that may have gone since: the lowest rank first, then the
    /// leftmost.
    heap: BinaryHeap<Reverse<(u32, u32)>>,
}

/// A token of a long piece, at the position of its first byte.
#[derive(Clone, Copy, Debug)]
struct Node {
    id: u32,
    /// The rank of the pair that it is the left half of, or [`NONE`].
    rank: u32,
    prev: u32,
    next: u32,
}

/// Scratch is given back to the system when it is larger: 16 bytes a node, about as many for the
/// heap, so a piece of 2 MiB keeps its memory.
const SCRATCH_NODES_KEPT_MAX: usize = 2 << 20;

impl Merger {
    /// `merges` are in rank order and no pair is in it twice; ids and ranks are within their
    /// limits.
    pub(super) fn new(byte_ids: [u32; 256], merges: &[Merge]) -> Self {
        let merged = merges.iter().map(|merge| merge.merged).collect();
        let ranked: Vec<_> =
            merges.iter().zip(0..).map(|(one, rank)| (one.left, one.right, rank)).collect();
        Merger::ranked(byte_ids, &ranked, merged)
    }

    /// Of pairs, left and right, and their ranks, which several may share; `merged` is what each
    /// rank makes.
    pub(super) fn ranked(
        byte_ids: [u32; 256],
        pairs: &[(u32, u32, u32)],
        merged: Vec<u32>,
    ) -> Self {
        assert!(merged.len() <= RANK_LIMIT, "the ranks fit a slot");
        let pairs = Pairs::new(pairs);
        Merger { byte_pairs: BytePairs::new(&byte_ids, &pairs), byte_ids, merged, pairs }
    }

    /// How many bytes each token has, by id; 0 for one that has 256 or more, or is made of what no
    /// merge before it makes.
    pub(super) fn token_lens(&self) -> Vec<u8> {
        let ids_end = self.byte_ids.iter().chain(&self.merged).max().map_or(0, |&id| id + 1);
        let mut lens = vec![0_u8; ids_end as usize];
        for &id in &self.byte_ids {
            lens[id as usize] = 1;
        }
        let mut pairs: Vec<_> = self.pairs.iter().collect();
        pairs.sort_unstable();
        for (rank, left, right) in pairs {
            let halves = [left, right].map(|id| lens.get(id as usize).copied().unwrap_or(0));
            if !halves.contains(&0) {
                lens[self.merged[rank as usize] as usize] =
                    halves[0].checked_add(halves[1]).unwrap_or(0);
            }
        }
        lens
    }

    /// The two tokens that a token is made of, and its rank: what the merges of lower rank leave
    /// of it, if that is two. If it is for every token of a vocabulary of ranks, then no other pair
    /// that makes one can ever stand in a text. For suppose that x and y do, that xy is a token of
    /// rank r, and that all merges below rank q have been applied. No merge has crossed the ends of
    /// xy, so that they make x and y of xy alone as well. If q is at most r, those from q up to r
    /// leave x and y as they are or make fewer than two of them, so that x and y are the two; and
    /// if q is more than r, those up to r have made one token of xy, not two.
    pub(super) fn halves(&self, token: &[u8], rank: u32) -> Option<(u32, u32, u32)> {
        let mut parts: Vec<u32> =
            token.iter().map(|&byte| self.byte_ids[usize::from(byte)]).collect();
        while parts.len() > 2 {
            let ranks = parts.windows(2).map(|two| self.pairs.rank(two[0], two[1]));
            let (lowest, at) = ranks.zip(0..).min().filter(|&(lowest, _)| lowest < rank)?;
            parts.splice(at..at + 2, [self.merged[lowest as usize]]);
        }
        (self.pairs.rank(parts[0], parts[1]) == rank).then_some((parts[0], parts[1], rank))
    }

    /// Appends the ids of a piece.
    ///
    /// # Panics
    /// If the piece is 4 GiB or longer.
    pub(super) fn merge(&self, piece: &[u8], scratch: &mut Scratch, ids: &mut Vec<u32>) {
        match piece.len() {
            0..=16 => self.merge_short::<16>(piece, ids),
            17..=32 => self.merge_short::<32>(piece, ids),
            33..=SHORT_BYTES_MAX => self.merge_short::<SHORT_BYTES_MAX>(piece, ids),
            _ => self.merge_long(piece, scratch, ids),
        }
    }

    /// Tokens stand where their first byte stood, and bit i of `alive` says that one stands at i. A
    /// pair's rank and, below it, its position are one number, so that the least of all numbers is
    /// the pair to merge: a loop without branches, which the compiler turns into vector code.
    fn merge_short<const BYTES: usize>(&self, piece: &[u8], ids: &mut Vec<u32>) {
        const { assert!(BYTES <= SHORT_BYTES_MAX) };
        let len = piece.len();
        let mut at = [0_u32; BYTES];
        let mut ranked = [UNRANKED; BYTES];
        for (id, &byte) in at.iter_mut().zip(piece) {
            *id = self.byte_ids[usize::from(byte)];
        }
        for (i, (ranked, bytes)) in ranked.iter_mut().zip(piece.windows(2)).enumerate() {
            *ranked = rank_at(self.byte_pairs.rank(bytes[0], bytes[1]), i);
        }
        let mut alive = if len == 64 { u64::MAX } else { (1 << len) - 1 };
        loop {
            let lowest = ranked.iter().fold(UNRANKED, |lowest, &one| lowest.min(one));
            if lowest == UNRANKED {
                break;
            }
            let (rank, left) =
                (lowest as usize >> POSITION_BITS, lowest as usize % SHORT_BYTES_MAX);
            let right = next(alive, left);
            at[left] = self.merged[rank];
            alive &= !(1 << right);
            ranked[right] = UNRANKED;
            let after = next(alive, left);
            let rank = if after < len { self.pairs.rank(at[left], at[after]) } else { NONE };
            ranked[left] = rank_at(rank, left);
            let before = alive & ((1 << left) - 1);
            if before != 0 {
                let before = 63 - before.leading_zeros() as usize;
                ranked[before] = rank_at(self.pairs.rank(at[before], at[left]), before);
            }
        }
        while alive != 0 {
            ids.push(at[alive.trailing_zeros() as usize]);
            alive &= alive - 1;
        }
    }

    fn merge_long(&self, piece: &[u8], scratch: &mut Scratch, ids: &mut Vec<u32>) {
        let len = u32::try_from(piece.len()).expect("a piece is shorter than 4 GiB");
        let Scratch { nodes, heap } = scratch;
        nodes.clear();
        nodes.extend(piece.iter().zip(0..len).map(|(&byte, i)| Node {
            id: self.byte_ids[usize::from(byte)],
            rank: NONE,
            prev: i.wrapping_sub(1),
            next: i + 1,
        }));
        heap.clear();
        for i in 0..len {
            self.rank_pair(nodes, heap, i);
        }
        while let Some(Reverse((rank, left))) = heap.pop() {
            // An entry is stale when its pair has changed since.
            if nodes[left as usize].rank != rank {
                continue;
            }
            let right = nodes[left as usize].next;
            let after = nodes[right as usize].next;
            nodes[right as usize].rank = NONE;
            nodes[left as usize].id = self.merged[rank as usize];
            nodes[left as usize].next = after;
            if after < len {
                nodes[after as usize].prev = left;
            }
            self.rank_pair(nodes, heap, left);
            let before = nodes[left as usize].prev;
            if left > 0 {
                self.rank_pair(nodes, heap, before);
            }
        }
        let mut i = 0;
        while i < len {
            ids.push(nodes[i as usize].id);
            i = nodes[i as usize].next;
        }
        if nodes.capacity() > SCRATCH_NODES_KEPT_MAX {
            *scratch = Scratch::default();
        }
    }

    /// Ranks the pair whose left half is at `left` anew.
    fn rank_pair(&self, nodes: &mut [Node], heap: &mut BinaryHeap<Reverse<(u32, u32)>>, left: u32) {
        let Node { id, next, .. } = nodes[left as usize];
        let rank = nodes.get(next as usize).map_or(NONE, |right| self.pairs.rank(id, right.id));
        nodes[left as usize].rank = rank;
        if rank != NONE {
            heap.push(Reverse((rank, left)));
        }
    }
}

/// The first token after the one at `i`; 64 or more if there is none.
#[inline]
fn next(alive: u64, i: usize) -> usize {
    (alive & (u64::MAX << i << 1)).trailing_zeros() as usize
}

/// A rank, if it is one, at a position of a short piece.
#[inline]
fn rank_at(rank: u32, position: usize) -> i32 {
    // fits: asserted of the constants; a position is below SHORT_BYTES_MAX
    if rank == NONE { UNRANKED } else { ((rank as i32) << POSITION_BITS) | position as i32 }
}

/// From a pair of bytes to its rank. Every merging begins with these, one a byte, and the bytes of
/// one script keep to few rows, which a first-level cache holds.
#[derive(Debug)]
struct BytePairs(Vec<[u32; 256]>);

impl BytePairs {
    fn new(byte_ids: &[u32; 256], pairs: &Pairs) -> Self {
        BytePairs(
            byte_ids.iter().map(|&left| byte_ids.map(|right| pairs.rank(left, right))).collect(),
        )
    }

    #[inline]
    fn rank(&self, left: u8, right: u8) -> u32 {
        self.0[usize::from(left)][usize::from(right)]
    }
}

/// From a pair of ids to its rank: open addressing, one word a slot, less than half full. GPT-2's
/// 50,000 merges take 1 MiB, which a core's second-level cache holds.
#[derive(Debug)]
struct Pairs {
    /// `left`, `right` and rank from the top bit down, or [`EMPTY`].
    slots: Vec<u64>,
    shift: u32,
}

/// No pair: its ids would be [`ID_LIMIT`].
const EMPTY: u64 = u64::MAX;

impl Pairs {
    fn new(ranked: &[(u32, u32, u32)]) -> Self {
        let slot_count = (ranked.len() * 2 + 1).next_power_of_two().max(2);
        let shift = u64::BITS - slot_count.trailing_zeros();
        let mut pairs = Pairs { slots: vec![EMPTY; slot_count], shift };
        for &(left, right, rank) in ranked {
            let pair = key(left, right);
            let mut slot = pairs.slot_of(pair);
            while pairs.slots[slot] != EMPTY {
                slot = pairs.after(slot);
            }
            pairs.slots[slot] = (pair << RANK_BITS) | u64::from(rank);
        }
        pairs
    }

    /// Rank, left and right of every pair.
    fn iter(&self) -> impl Iterator<Item = (u32, u32, u32)> {
        // fits: 21 bits
        let id = |slot: u64, shift: u32| ((slot >> shift) & ID_LIMIT as u64) as u32;
        self.slots.iter().filter(|&&slot| slot != EMPTY).map(move |&slot| {
            let rank = (slot & (RANK_LIMIT as u64 - 1)) as u32; // fits: 22 bits
            (rank, id(slot, ID_BITS + RANK_BITS), id(slot, RANK_BITS))
        })
    }

    /// The rank of a pair, or [`NONE`].
    #[inline]
    fn rank(&self, left: u32, right: u32) -> u32 {
        let pair = key(left, right);
        let mut slot = self.slot_of(pair);
        loop {
            let found = self.slots[slot];
            if found >> RANK_BITS == pair {
                return (found & (RANK_LIMIT as u64 - 1)) as u32; // fits: 22 bits
            }
            if found == EMPTY {
                return NONE;
            }
            slot = self.after(slot);
        }
    }

    /// Fibonacci hashing: the top bits of a product by 2^64 divided by the golden ratio.
    #[inline]
    fn slot_of(&self, pair: u64) -> usize {
        (pair.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize
    }

    #[inline]
    fn after(&self, slot: usize) -> usize {
        (slot + 1) & (self.slots.len() - 1)
    }
}

#[inline]
fn key(left: u32, right: u32) -> u64 {
    (u64::from(left) << ID_BITS) | u64::from(right)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition, word by word: of all pairs the lowest rank, of those the leftmost.
    fn by_definition(merges: &[Merge], piece: &[u8]) -> Vec<u32> {
        let mut ids: Vec<u32> = piece.iter().map(|&byte| u32::from(byte)).collect();
        loop {
            let rank_of = |i: usize| {
                merges.iter().position(|merge| (merge.left, merge.right) == (ids[i], ids[i + 1]))
            };
            let ranked = (0..ids.len().saturating_sub(1)).filter_map(|i| Some((rank_of(i)?, i)));
            let Some((rank, i)) = ranked.min() else { return ids };
            ids.splice(i..i + 2, [merges[rank].merged]);
        }
    }

    /// Random merges of few letters, so that pairs meet, overlap and make each other; among them
    /// two ways to one token, which GPT-2's own vocabulary has not.
    #[test]
    fn every_way_of_merging_follows_the_definition() {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = |limit: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize % limit
        };
        for _ in 0..300 {
            let mut made: Vec<u32> = (0..3).collect();
            let mut merges: Vec<Merge> = Vec::new();
            for id in 256..256 + next(30) as u32 {
                let (left, right) = (made[next(made.len())], made[next(made.len())]);
                if merges.iter().any(|merge| (merge.left, merge.right) == (left, right)) {
                    continue;
                }
                let again = made.len() > 3 && next(5) == 0;
                let merged = if again { made[made.len() - 1] } else { id };
                merges.push(Merge { left, right, merged });
                made.push(merged);
            }
            let merger = Merger::new(std::array::from_fn(|byte| byte as u32), &merges);
            let mut scratch = Scratch::default();
            for len in (1..20).chain([31, 32, 33, 63, 64, 65, 130]) {
                let piece: Vec<u8> = (0..len).map(|_| next(3) as u8).collect();
                let due = by_definition(&merges, &piece);
                let (mut ids, mut long_ids) = (Vec::new(), Vec::new());
                merger.merge(&piece, &mut scratch, &mut ids);
                merger.merge_long(&piece, &mut scratch, &mut long_ids);
                assert_eq!(ids, due, "{merges:?} on {piece:?}");
                assert_eq!(long_ids, due, "by heap, {merges:?} on {piece:?}");
            }
        }
    }
}
