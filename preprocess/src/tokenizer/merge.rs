//! Byte-pair merging: of all neighbours the pair of lowest rank becomes one token, the leftmost
//! first, until no pair of neighbours has a rank.
//!
//! Short pieces, which nearly all are, scan an array on the stack. Long ones, such as a line of
//! a hundred thousand dashes, use a heap, so that the time grows as n log n and not as n squared.
//! Very long ones are merged in windows, so that the memory does not grow with them.

mod short;
pub(super) mod windows;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet};
use std::ops::Range;

use short::Short;
use windows::{RowToken, WINDOW_BYTES, WindowedMerge, merge_in_windows};

/// Ids below this fit a slot of the pair table.
pub(super) const ID_LIMIT: usize = (1 << ID_BITS) - 1;
/// So do ranks below this.
pub(super) const RANK_LIMIT: usize = 1 << RANK_BITS;

const ID_BITS: u32 = 21;
const RANK_BITS: u32 = 22;
const _: () = assert!(2 * ID_BITS + RANK_BITS == u64::BITS);

/// The positions of a short piece are the bits of one word.
pub(super) const SHORT_BYTES_MAX: usize = 64;
const LONG_BYTES_MIN: usize = SHORT_BYTES_MAX + 1;

/// No merge: the first number that is no rank.
const NONE: u32 = RANK_LIMIT as u32;

/// No token.
const NO_ID: u32 = ID_LIMIT as u32;

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
    /// The result of the merge of each rank.
    merged: Vec<u32>,
    token_lens: Vec<u8>,
    pairs: PairRanks,
}

/// The buffers of [`Merger::merge`], reused between calls.
#[derive(Debug, Default)]
pub(super) struct MergeBuffers {
    nodes: Vec<MergeNode>,
    /// Rank and position of pairs, some of which may be stale: the lowest rank first, then the
    /// leftmost.
    heap: BinaryHeap<Reverse<(u32, u32)>>,
}

/// A token of a long piece, at the position of its first byte.
#[derive(Clone, Copy, Debug)]
struct MergeNode {
    id: u32,
    /// The rank of the pair that it is the left half of, or [`NONE`].
    rank: u32,
    prev: u32,
    next: u32,
}

/// Larger scratch is freed after use: 16 bytes a node, about as many for the heap, so a piece of
/// 2 MiB keeps its memory.
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

    /// From pairs, left and right, and their ranks, which several may share, the lowest first;
    /// `merged` is the result of each rank.
    pub(super) fn ranked(
        byte_ids: [u32; 256],
        pairs: &[(u32, u32, u32)],
        merged: Vec<u32>,
    ) -> Self {
        assert!(merged.len() <= RANK_LIMIT, "the ranks fit a slot");
        let token_lens = token_lens(&byte_ids, pairs, &merged);
        let pairs = PairRanks::new(pairs);
        let byte_pairs = BytePairs::new(&byte_ids, &pairs);
        Merger { byte_ids, byte_pairs, merged, token_lens, pairs }
    }

    /// The number of bytes of each token, by id; 0 for a token with 256 or more, of parts that no
    /// merge before it makes, or of two lengths.
    pub(super) fn token_lens(&self) -> &[u8] {
        &self.token_lens
    }

    /// The two tokens that a token is merged from, and its rank: the result of the merges of lower
    /// rank, if that is two tokens. If it is two for every token of a vocabulary of ranks, then no
    /// other pair that makes a token can ever be in a text. For suppose that x and y are, that xy
    /// is a token of rank r, and that all merges below rank q have been applied. No merge has
    /// crossed the ends of xy, so that they make x and y of xy alone as well. If q is at most r,
    /// those from q up to r leave x and y as they are or make fewer than two of them, so that x and
    /// y are the two; and if q is more than r, those up to r have made one token of xy, not two.
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
    pub(super) fn merge(&self, piece: &[u8], scratch: &mut MergeBuffers, ids: &mut Vec<u32>) {
        match piece.len() {
            0..=8 => self.merge_short::<8>(piece, ids),
            9..=16 => self.merge_short::<16>(piece, ids),
            17..=32 => self.merge_short::<32>(piece, ids),
            33..=SHORT_BYTES_MAX => self.merge_short::<SHORT_BYTES_MAX>(piece, ids),
            LONG_BYTES_MIN..=WINDOW_BYTES => self.merge_long(piece, scratch, ids),
            _ => self.merge_windows(piece, WINDOW_BYTES, scratch, ids),
        }
    }

    fn merge_short<const BYTES: usize>(&self, piece: &[u8], ids: &mut Vec<u32>) {
        let mut short = Short::<BYTES>::new(self, piece);
        while short.step(self) {}
        short.push_ids(ids);
    }

    fn merge_windows(
        &self,
        piece: &[u8],
        window_bytes: usize,
        scratch: &mut MergeBuffers,
        ids: &mut Vec<u32>,
    ) {
        let mut merging = MergeInto { merger: self, piece, scratch, ids };
        merge_in_windows(piece.len(), window_bytes, &mut merging);
    }

    fn merge_long(&self, piece: &[u8], scratch: &mut MergeBuffers, ids: &mut Vec<u32>) {
        self.merge_nodes(piece, scratch);
        let nodes = &scratch.nodes;
        let mut i = 0;
        while let Some(node) = nodes.get(i) {
            ids.push(node.id);
            i = node.next as usize;
        }
        if nodes.capacity() > SCRATCH_NODES_KEPT_MAX {
            *scratch = MergeBuffers::default();
        }
    }

    /// Leaves the tokens of a piece in the list of nodes.
    fn merge_nodes(&self, piece: &[u8], scratch: &mut MergeBuffers) {
        let len = u32::try_from(piece.len()).expect("a piece is shorter than 4 GiB");
        let MergeBuffers { nodes, heap } = scratch;
        nodes.clear();
        nodes.extend(piece.iter().zip(0..len).map(|(&byte, i)| MergeNode {
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
    }

    /// Updates the rank of the pair whose left half is at `left`.
    fn rank_pair(
        &self,
        nodes: &mut [MergeNode],
        heap: &mut BinaryHeap<Reverse<(u32, u32)>>,
        left: u32,
    ) {
        let MergeNode { id, next, .. } = nodes[left as usize];
        let rank = nodes.get(next as usize).map_or(NONE, |right| self.pairs.rank(id, right.id));
        nodes[left as usize].rank = rank;
        if rank != NONE {
            heap.push(Reverse((rank, left)));
        }
    }
}

/// One long piece, and where its ids go.
struct MergeInto<'a> {
    merger: &'a Merger,
    piece: &'a [u8],
    scratch: &'a mut MergeBuffers,
    ids: &'a mut Vec<u32>,
}

impl WindowedMerge for MergeInto<'_> {
    type Mark = usize;

    fn symbol_bytes_max(&self) -> usize {
        1
    }

    fn merge(&mut self, bytes: Range<usize>, row: &mut Vec<RowToken>) {
        self.merger.merge_nodes(&self.piece[bytes.clone()], self.scratch);
        row.clear();
        let mut i = 0;
        while let Some(&MergeNode { id, next, .. }) = self.scratch.nodes.get(i) {
            row.push(RowToken { id, bytes: bytes.start + i..bytes.start + next as usize });
            i = next as usize;
        }
    }

    fn mark(&self) -> usize {
        self.ids.len()
    }

    fn rewind(&mut self, mark: usize) {
        self.ids.truncate(mark);
    }

    fn push(&mut self, token: &RowToken) {
        self.ids.push(token.id);
    }
}

fn token_lens(byte_ids: &[u32; 256], pairs: &[(u32, u32, u32)], merged: &[u32]) -> Vec<u8> {
    let ids_end = byte_ids.iter().chain(merged).max().map_or(0, |&id| id + 1);
    // Of two lengths: the space may be a byte, or the three bytes that represent it.
    let mut ambiguous = HashSet::new();
    loop {
        let (mut lens, known) = (vec![0_u8; ids_end as usize], ambiguous.len());
        for &id in byte_ids {
            lens[id as usize] = u8::from(!ambiguous.contains(&id));
        }
        for &(left, right, rank) in pairs {
            let halves = [left, right].map(|id| lens.get(id as usize).copied().unwrap_or(0));
            let id = merged[rank as usize];
            if halves.contains(&0) || ambiguous.contains(&id) {
                continue;
            }
            let len = halves[0].checked_add(halves[1]).unwrap_or(0);
            if lens[id as usize] != 0 && lens[id as usize] != len {
                ambiguous.insert(id);
            }
            lens[id as usize] = len;
        }
        if ambiguous.len() == known {
            return lens;
        }
    }
}

/// From a pair of bytes to its rank. Every merging begins with these, one a byte, and the bytes of
/// one script keep to few rows, which a first-level cache holds.
#[derive(Debug)]
struct BytePairs(Vec<[u32; 256]>);

impl BytePairs {
    fn new(byte_ids: &[u32; 256], pairs: &PairRanks) -> Self {
        BytePairs(
            byte_ids.iter().map(|&left| byte_ids.map(|right| pairs.rank(left, right))).collect(),
        )
    }

    #[inline]
    fn rank(&self, left: u8, right: u8) -> u32 {
        self.0[usize::from(left)][usize::from(right)]
    }
}

/// From a pair of ids to its rank: buckets of four words, half a cache line, a third full. GPT-2's
/// 50,000 merges take 1 MiB, which a core's second-level cache holds. Pairs that do not fit a full
/// bucket are in the next, so that nearly every lookup reads one, without a branch that depends on
/// its contents.
#[derive(Debug)]
struct PairRanks {
    /// `left`, `right` and rank from the top bit down, or [`EMPTY`].
    buckets: Vec<[u64; BUCKET]>,
    shift: u32,
}

const BUCKET: usize = 4;

/// No pair: its ids would both be [`NO_ID`].
const EMPTY: u64 = u64::MAX;

impl PairRanks {
    fn new(ranked: &[(u32, u32, u32)]) -> Self {
        let count = (ranked.len() * 2 / BUCKET + 1).next_power_of_two().max(2);
        let shift = u64::BITS - count.trailing_zeros();
        let mut pairs = PairRanks { buckets: vec![[EMPTY; BUCKET]; count], shift };
        for &(left, right, rank) in ranked {
            let pair = key(left, right);
            let mut bucket = pairs.bucket_of(pair);
            let slot = loop {
                match pairs.buckets[bucket].iter_mut().find(|slot| **slot == EMPTY) {
                    Some(slot) => break slot,
                    None => bucket = (bucket + 1) % count,
                }
            };
            *slot = pair | u64::from(rank);
        }
        pairs
    }

    /// The rank of a pair, or [`NONE`].
    #[inline]
    fn rank(&self, left: u32, right: u32) -> u32 {
        let pair = key(left, right);
        let mut bucket = self.bucket_of(pair);
        loop {
            // The pair itself leaves its rank; another leaves more than any rank.
            let [a, b, c, d] = self.buckets[bucket].map(|slot| slot ^ pair);
            let found = a.min(b).min(c.min(d)).min(NONE.into());
            if found < NONE.into() || self.buckets[bucket][BUCKET - 1] == EMPTY {
                return found as u32; // fits: no more than NONE
            }
            bucket = (bucket + 1) % self.buckets.len();
        }
    }

    /// Fibonacci hashing: the top bits of a product by 2^64 divided by the golden ratio.
    #[inline]
    fn bucket_of(&self, pair: u64) -> usize {
        ((pair >> RANK_BITS).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize
    }
}

/// A pair in the bits of a slot.
#[inline]
fn key(left: u32, right: u32) -> u64 {
    ((u64::from(left) << ID_BITS) | u64::from(right)) << RANK_BITS
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

    /// As where the space and the three bytes that represent it are one token.
    #[test]
    fn a_token_of_two_lengths_has_none() {
        let mut byte_ids: [u32; 256] = std::array::from_fn(|byte| byte as u32);
        byte_ids[usize::from(b' ')] = 300;
        let (part, longer) = (301, 302);
        let pairs = [(0xe2, 0x96, 0), (part, 0x81, 1), (300, 0x61, 2), (part, part, 3)];
        let lens = token_lens(&byte_ids, &pairs, &[part, 300, longer, 303]);
        assert_eq!((lens[300], lens[longer as usize]), (0, 0));
        assert_eq!((lens[0x61], lens[part as usize], lens[303]), (1, 2, 4));
    }

    /// Random merges of few letters, so that pairs meet, overlap and make each other; among them
    /// two ways to one token, and merges of lower rank than those that make their halves, neither
    /// of which GPT-2's own vocabulary has.
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
            if next(3) == 0 {
                for at in 1..merges.len() {
                    merges.swap(at, next(at + 1));
                }
            }
            let merger = Merger::new(std::array::from_fn(|byte| byte as u32), &merges);
            let mut scratch = MergeBuffers::default();
            for len in (1..20).chain([31, 32, 33, 63, 64, 65, 130]) {
                // Of bytes at random, or of some that repeat: long runs of one, pairs and so on.
                let period = if next(2) == 0 { len } else { 1 + next(4) };
                let repeated: Vec<u8> = (0..period).map(|_| next(3) as u8).collect();
                let piece: Vec<u8> = repeated.into_iter().cycle().take(len).collect();
                let expected = by_definition(&merges, &piece);
                let (mut ids, mut long_ids) = (Vec::new(), Vec::new());
                merger.merge(&piece, &mut scratch, &mut ids);
                merger.merge_long(&piece, &mut scratch, &mut long_ids);
                assert_eq!(ids, expected, "{merges:?} on {piece:?}");
                assert_eq!(long_ids, expected, "by heap, {merges:?} on {piece:?}");
                for window_bytes in [1, 2, 3, 8, 40] {
                    let mut window_ids = vec![7];
                    merger.merge_windows(&piece, window_bytes, &mut scratch, &mut window_ids);
                    let windows = format!("windows of {window_bytes}");
                    assert_eq!(window_ids[1..], expected, "{windows}, {merges:?} {piece:?}");
                }
            }
        }
    }
}
