//! Merging of short pieces, in arrays on the stack.

use super::{Merger, NO_ID, NONE, SHORT_BYTES_MAX};

const POSITION_BITS: u32 = SHORT_BYTES_MAX.trailing_zeros();

/// A rank and below it a position, of which this is the first without a rank.
const UNRANKED: u64 = (NONE as u64) << POSITION_BITS;

/// A piece being merged. A token is at the position of its first byte, and bit i of `alive` is set
/// if there is one at i. A pair's rank and, below it, its position are one number, so that the
/// smallest number is the pair to merge. They are separate words and no vector, whose load would
/// stall on the store just made into a part of it.
#[derive(Debug)]
pub(super) struct Short<const BYTES: usize> {
    ids: [u32; BYTES],
    ranked: [u64; BYTES],
    alive: u64,
}

impl<const BYTES: usize> Short<BYTES> {
    /// From a piece of at most `BYTES` bytes.
    #[inline]
    pub(super) fn new(merger: &Merger, piece: &[u8]) -> Self {
        const { assert!(BYTES <= SHORT_BYTES_MAX && BYTES.is_power_of_two() && BYTES >= 4) };
        let mut short = Short { ids: [0; BYTES], ranked: [UNRANKED; BYTES], alive: 0 };
        for (id, &byte) in short.ids.iter_mut().zip(piece) {
            *id = merger.byte_ids[usize::from(byte)];
        }
        for (i, (ranked, bytes)) in short.ranked.iter_mut().zip(piece.windows(2)).enumerate() {
            *ranked = rank_at(merger.byte_pairs.rank(bytes[0], bytes[1]), i);
        }
        short.alive = if piece.len() == 64 { u64::MAX } else { (1 << piece.len()) - 1 };
        short
    }

    /// Merges the pair of lowest rank. False: there is none.
    #[inline(always)]
    pub(super) fn step(&mut self, merger: &Merger) -> bool {
        let Short { ids: at, ranked, alive } = self;
        let lowest = lowest(ranked);
        if lowest >= UNRANKED {
            return false;
        }
        let (rank, left) = ((lowest >> POSITION_BITS) as usize, lowest as usize % BYTES);
        let right = next(*alive, left) % BYTES;
        at[left] = merger.merged[rank];
        *alive &= !(1 << right);
        ranked[right] = UNRANKED;
        // A missing neighbour is replaced by an id that is in no pair, and its result is
        // overwritten: a branch on the ends of a piece would be unpredictable.
        let after = next(*alive, left);
        let id_after = if after < BYTES { at[after % BYTES] } else { NO_ID };
        let below = *alive & ((1 << left) - 1);
        let before = if below == 0 { left } else { 63 - below.leading_zeros() as usize } % BYTES;
        let id_before = if below == 0 { NO_ID } else { at[before] };
        ranked[before] = rank_at(merger.pairs.rank(id_before, at[left]), before);
        ranked[left] = rank_at(merger.pairs.rank(at[left], id_after), left);
        true
    }

    pub(super) fn push_ids(&self, ids: &mut Vec<u32>) {
        let mut alive = self.alive;
        while alive != 0 {
            ids.push(self.ids[alive.trailing_zeros() as usize % BYTES]);
            alive &= alive - 1;
        }
    }
}

/// The first token after the one at `i`; 64 or more if there is none.
#[inline]
fn next(alive: u64, i: usize) -> usize {
    (alive & (u64::MAX << i << 1)).trailing_zeros() as usize
}

/// A rank, or none, at a position.
#[inline]
fn rank_at(rank: u32, position: usize) -> u64 {
    (u64::from(rank) << POSITION_BITS) | position as u64
}

/// Four independent minima, so that none waits long for the one before.
#[inline]
fn lowest<const BYTES: usize>(ranked: &[u64; BYTES]) -> u64 {
    let mut rows = [UNRANKED; 4];
    for four in ranked.as_chunks::<4>().0 {
        for (low, &one) in rows.iter_mut().zip(four) {
            *low = one.min(*low);
        }
    }
    let [a, b, c, d] = rows;
    a.min(b).min(c.min(d))
}
