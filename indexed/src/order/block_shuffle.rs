//! An order for stores with a cost per request: adjacent samples are read together and shuffled
//! afterwards.
//!
//! It is not Megatron's order, and a run must declare it. Samples are numbered in the order of
//! their tokens in the file. Each `block_samples` consecutive samples are a block, which is read in
//! one request. The blocks are permuted; then the samples of each `window_blocks` blocks in the new
//! order are permuted together. No table is stored: the sample at a position and the position of a
//! sample are computed from the seed and the epoch alone. `FORMAT.md` has the definition, for other
//! programs.

use crate::order::feistel::{Permutation, derive, mix};
use crate::{Error, Result};

/// A block shuffle of a number of samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockShuffle {
    samples: u64,
    block_samples: u64,
    window_blocks: u64,
    seed: u64,
}

/// The order of one epoch: a permutation of `0..samples`.
#[derive(Clone, Copy, Debug)]
pub struct BlockEpoch {
    shuffle: BlockShuffle,
    /// The key from which those of the windows are derived.
    key: u64,
    blocks: Permutation,
    block_count: u64,
    /// Samples that the last block lacks.
    lacking: u64,
    /// Rank of the last block, which may be short, in the order of the blocks.
    short_rank: u64,
    /// The first position after the window of the last block.
    short_window_end: u64,
}

impl BlockShuffle {
    /// 64 samples of 2,048 tokens of 16 bits are 256 KiB: one request whose transfer takes longer
    /// than its latency.
    pub const BLOCK_SAMPLES: u64 = 64;

    /// With 512 blocks or more, training is as good as with a full shuffle, as others measured. 512
    /// blocks of 256 KiB are 128 MiB, and two or three windows are in memory at a time.
    pub const WINDOW_BLOCKS: u64 = 512;

    /// Defines the order of every epoch.
    ///
    /// # Errors
    /// [`Error::BadSetting`] for an empty block or window, or a window of more than 2^48 samples.
    pub fn new(samples: u64, block_samples: u64, window_blocks: u64, seed: u64) -> Result<Self> {
        const MOST: u64 = 1 << 48;
        for (name, found) in [("block samples", block_samples), ("window blocks", window_blocks)] {
            if found == 0 {
                let expected = "at least 1".to_owned();
                return Err(Error::BadSetting { name, found: "0".to_owned(), expected });
            }
        }
        let window = block_samples.checked_mul(window_blocks);
        if window.is_none_or(|window| window > MOST) || samples > MOST {
            let found = format!(
                "windows of {window_blocks} blocks of {block_samples} samples, {samples} in total"
            );
            let expected = format!("at most {MOST} samples in a window and in total");
            return Err(Error::BadSetting { name: "block shuffle", found, expected });
        }
        Ok(BlockShuffle { samples, block_samples, window_blocks, seed })
    }

    /// Samples of an epoch.
    #[must_use]
    pub fn sample_count(&self) -> u64 {
        self.samples
    }

    /// The order of an epoch.
    #[must_use]
    pub fn epoch(&self, epoch: u64) -> BlockEpoch {
        let key = derive(mix(self.seed), epoch);
        let block_count = self.samples.div_ceil(self.block_samples);
        let blocks = Permutation::new(derive(key, 0), block_count);
        let lacking = block_count * self.block_samples - self.samples;
        let short_rank = block_count.checked_sub(1).map_or(0, |last| blocks.backward(last));
        let ranks = (short_rank / self.window_blocks + 1) * self.window_blocks;
        let short_window_end = ranks.min(block_count) * self.block_samples - lacking;
        let shuffle = *self;
        BlockEpoch { shuffle, key, blocks, block_count, lacking, short_rank, short_window_end }
    }
}

impl BlockEpoch {
    /// The sample at a position.
    ///
    /// # Panics
    /// If there is no such position.
    #[must_use]
    pub fn sample(&self, position: u64) -> u64 {
        let BlockShuffle { samples, block_samples, window_blocks, .. } = self.shuffle;
        assert!(position < samples, "position {position} of {samples}");
        let window = self.window_of(position);
        let start = self.rank_start(window * window_blocks);
        let place = start + self.window(window, start).forward(position - start);
        let (rank, within) = self.rank_of(place);
        self.blocks.forward(rank) * block_samples + within
    }

    /// One past the last position of the window of a position: until there the samples are those of
    /// a few whole blocks, in another order.
    ///
    /// # Panics
    /// If there is no such position.
    #[must_use]
    pub fn window_end(&self, position: u64) -> u64 {
        assert!(position < self.shuffle.samples, "position {position}");
        let end_rank = (self.window_of(position) + 1) * self.shuffle.window_blocks;
        self.rank_start(end_rank.min(self.block_count))
    }

    /// The position of a sample.
    ///
    /// # Panics
    /// If there is no such sample.
    #[must_use]
    pub fn position(&self, sample: u64) -> u64 {
        let BlockShuffle { samples, block_samples, window_blocks, .. } = self.shuffle;
        assert!(sample < samples, "sample {sample} of {samples}");
        let rank = self.blocks.backward(sample / block_samples);
        let window = rank / window_blocks;
        let start = self.rank_start(window * window_blocks);
        let place = self.rank_start(rank) + sample % block_samples;
        start + self.window(window, start).backward(place - start)
    }

    fn window_of(&self, position: u64) -> u64 {
        // After the short block, all positions are too low by the samples that it lacks.
        let is_behind = position >= self.short_window_end;
        let lacking = if is_behind { self.lacking } else { 0 };
        (position + lacking) / (self.shuffle.block_samples * self.shuffle.window_blocks)
    }

    /// The position of the first sample of the block with this rank in the order of the blocks.
    fn rank_start(&self, rank: u64) -> u64 {
        let lacking = if rank > self.short_rank { self.lacking } else { 0 };
        rank * self.shuffle.block_samples - lacking
    }

    /// The rank of the block of a position in the order of the blocks, and the position in the
    /// block.
    fn rank_of(&self, place: u64) -> (u64, u64) {
        let block_samples = self.shuffle.block_samples;
        let is_behind = place >= self.rank_start(self.short_rank + 1);
        let place = place + if is_behind { self.lacking } else { 0 };
        (place / block_samples, place % block_samples)
    }

    /// The permutation of the samples of the window that starts at `start`.
    fn window(&self, window: u64, start: u64) -> Permutation {
        let end_rank = ((window + 1) * self.shuffle.window_blocks).min(self.block_count);
        Permutation::new(derive(self.key, 1 + window), self.rank_start(end_rank) - start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shuffle(samples: u64, block: u64, window: u64) -> BlockShuffle {
        BlockShuffle::new(samples, block, window, 1234).unwrap()
    }

    #[test]
    fn every_size_is_permuted_within_whole_windows() {
        for samples in (0..40).chain([97, 100, 101, 255, 256, 257, 1000]) {
            for (block, window) in [(1, 1), (1, 7), (3, 1), (4, 3), (5, 8), (64, 2), (1 << 20, 5)] {
                let shuffle = shuffle(samples, block, window);
                for epoch in 0..3 {
                    check(&shuffle.epoch(epoch), samples, block, window);
                }
            }
        }
    }

    fn check(order: &BlockEpoch, samples: u64, block: u64, window: u64) {
        let what = format!("{samples} samples, blocks of {block}, windows of {window}");
        let mut seen = vec![false; samples as usize];
        // Each window has the samples of its number of whole blocks and no others.
        let mut blocks_now = std::collections::BTreeMap::new();
        let mut windows = 0;
        for position in 0..samples {
            let sample = order.sample(position);
            assert!(!std::mem::replace(&mut seen[sample as usize], true), "{what}: {sample} twice");
            assert_eq!(order.position(sample), position, "{what}");
            *blocks_now.entry(sample / block).or_insert(0) += 1;
            let is_whole = |(&nth, &count): (&u64, &u64)| count == block.min(samples - nth * block);
            let blocks_left = samples.div_ceil(block) - windows * window;
            if blocks_now.len() as u64 == window.min(blocks_left) && blocks_now.iter().all(is_whole)
            {
                assert_eq!(order.window_end(position), position + 1, "{what}");
                blocks_now.clear();
                windows += 1;
            }
            assert!(blocks_now.len() as u64 <= window, "{what}");
            assert!(order.window_end(position) > position, "{what}");
        }
        assert!(blocks_now.is_empty(), "{what}");
    }

    /// Numbers that another implementation of the definition must return; `tests/readers` has one.
    #[test]
    fn known_answers() {
        let take = |order: BlockEpoch| (0..12).map(|at| order.sample(at)).collect::<Vec<_>>();
        let small = shuffle(23, 4, 3);
        assert_eq!(take(small.epoch(0)), KNOWN[0]);
        assert_eq!(take(small.epoch(1)), KNOWN[1]);
        let large = BlockShuffle::new(1_000_000_007, 256, 512, 42).unwrap();
        assert_eq!(take(large.epoch(3)), KNOWN[2]);
    }

    const KNOWN: [[u64; 12]; 3] = [
        [3, 22, 13, 15, 12, 20, 14, 1, 21, 2, 0, 7],
        [8, 10, 11, 4, 9, 14, 5, 13, 12, 7, 6, 15],
        [
            330_014_890,
            49_686_483,
            798_403_612,
            524_147_707,
            907_922_746,
            291_896_894,
            157_062_844,
            358_044_939,
            967_727_888,
            958_239_202,
            812_763_093,
            530_225_839,
        ],
    ];

    #[test]
    fn empty_blocks_and_windows_are_refused_by_name() {
        for (samples, block, window) in
            [(1, 0, 1), (1, 1, 0), (1, 1 << 40, 1 << 40), (1 << 60, 1, 1)]
        {
            assert!(BlockShuffle::new(samples, block, window, 0).is_err());
        }
    }
}
