//! Selects the samples of each rank from the order that all share.

use std::ops::Range;

use crate::{Error, Result};

/// The data-parallel ranks that a loader serves. The sequence over all ranks is the same whatever
/// their number: as in Megatron's sampler the order is cut into chunks of `of` micro-batches, one
/// after the other, and each rank takes its micro-batch of every chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ranks {
    /// The first rank served.
    pub first: u32,
    /// How many ranks are served: 1 for a rank that reads for itself, all ranks of the node for a
    /// node reader.
    pub count: u32,
    /// How many data-parallel ranks the run has.
    pub of: u32,
}

impl Ranks {
    /// The only rank.
    pub const ALONE: Ranks = Ranks { first: 0, count: 1, of: 1 };

    /// One rank of several.
    #[must_use]
    pub fn one(rank: u32, of: u32) -> Self {
        Ranks { first: rank, count: 1, of }
    }
}

/// The batches of some ranks: which samples each has. Pure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RankSchedule {
    samples: Range<u64>,
    chunk: u64,
    rows: Range<u64>,
}

impl RankSchedule {
    pub(crate) fn new(samples: Range<u64>, micro_batch: usize, ranks: Ranks) -> Result<Self> {
        let Ranks { first, count, of } = ranks;
        let bad =
            |name, found: u32, expected| Err(Error::Option { name, found: found.into(), expected });
        if count == 0 {
            return bad("ranks.count", count, "at least 1");
        }
        if first.checked_add(count).is_none_or(|end| end > of) {
            return bad("ranks.of", of, "at least ranks.first + ranks.count");
        }
        if micro_batch == 0 {
            return bad("micro_batch", 0, "at least 1");
        }
        let micro = micro_batch as u64;
        let Some(chunk) = micro.checked_mul(of.into()) else {
            return bad("ranks.of", of, "a product with micro_batch below 2^64");
        };
        let rows = u64::from(first) * micro..u64::from(first + count) * micro;
        Ok(RankSchedule { samples, chunk, rows })
    }

    /// The same for each rank. If the last chunk is short, some ranks have fewer rows or none, but
    /// every rank has a batch of it.
    pub(crate) fn batch_count(&self) -> u64 {
        (self.samples.end - self.samples.start).div_ceil(self.chunk)
    }

    pub(crate) fn rows_max(&self) -> u64 {
        self.rows.end - self.rows.start
    }

    /// The samples of the `nth` batch.
    pub(crate) fn batch(&self, nth: u64) -> Range<u64> {
        let chunk = self.samples.start + nth * self.chunk;
        let at = |row| chunk.saturating_add(row).min(self.samples.end);
        at(self.rows.start)..at(self.rows.end)
    }

    /// Samples consumed by all ranks together after this many batches of each.
    pub(crate) fn consumed(&self, batches: u64) -> u64 {
        self.samples.start.saturating_add(batches.saturating_mul(self.chunk)).min(self.samples.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(schedule: &RankSchedule) -> Vec<Vec<u64>> {
        (0..schedule.batch_count()).map(|nth| schedule.batch(nth).collect()).collect()
    }

    #[test]
    fn ranks_cover_every_sample_once_and_in_order() {
        for of in [1, 2, 3, 8] {
            for end in [5, 24, 29, 41] {
                let one = |rank| RankSchedule::new(5..end, 3, Ranks::one(rank, of)).unwrap();
                let ranks: Vec<_> = (0..of).map(|rank| stream(&one(rank))).collect();
                let batches = one(0).batch_count();
                assert!(ranks.iter().all(|batches_of| batches_of.len() as u64 == batches));
                let global: Vec<u64> = (0..batches as usize)
                    .flat_map(|nth| ranks.iter().flat_map(move |rank| rank[nth].clone()))
                    .collect();
                assert_eq!(global, (5..end).collect::<Vec<_>>(), "{of} ranks to {end}");
                assert_eq!(one(0).consumed(batches), end);
                let node = RankSchedule::new(5..end, 3, Ranks { first: 0, count: of, of }).unwrap();
                assert_eq!(stream(&node).concat(), global);
            }
        }
    }

    #[test]
    fn run_can_resume_with_other_ranks_after_any_batch() {
        let before = RankSchedule::new(0..100, 2, Ranks::one(1, 3)).unwrap();
        assert_eq!((before.batch(4), before.consumed(5)), (26..28, 30));
        let after = RankSchedule::new(before.consumed(5)..100, 5, Ranks::one(0, 2)).unwrap();
        assert_eq!(after.batch(0), 30..35);
    }

    #[test]
    fn invalid_ranks_are_refused() {
        for (micro, first, count, of) in
            [(0, 0, 1, 1), (1, 0, 0, 1), (1, 1, 1, 1), (1, 0, 2, 1), (1, u32::MAX, 1, u32::MAX)]
        {
            assert!(RankSchedule::new(0..9, micro, Ranks { first, count, of }).is_err());
        }
    }
}
