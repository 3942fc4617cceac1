use crate::{Error, Result};

/// Boundaries of sequences that must not attend to one another: offsets into the rows of a batch
/// laid one after the other, as attention kernels for variable lengths take them (`cu_seqlens`).
///
/// The first is 0, each row starts a run, the last is the length of all rows. A run is never empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SequenceBounds {
    offsets: Vec<i32>,
}

impl SequenceBounds {
    /// The offsets, one more than there are runs; none if they were not requested.
    #[must_use]
    pub fn offsets(&self) -> &[i32] {
        &self.offsets
    }

    /// The longest run, which the kernels need as well.
    #[must_use]
    pub fn len_max(&self) -> i32 {
        self.offsets.windows(2).map(|ends| ends[1] - ends[0]).max().unwrap_or(0)
    }

    /// The run of each token within its row, counted from 0, for row `row` of `len` tokens. All are
    /// 0 if no runs were requested.
    #[must_use]
    pub fn runs_of_row(&self, row: usize, len: usize) -> Vec<u32> {
        let (first, end) = (row * len, (row + 1) * len);
        let begins = |at: &usize| self.offsets.binary_search(&(*at as i32)).is_ok();
        let mut run = 0;
        (first..end)
            .map(|at| {
                run += u32::from(at > first && begins(&at));
                run
            })
            .collect()
    }

    /// The attention mask, `true` for pairs that are masked out: shape `[queries, keys]`,
    /// row-major. This is the dense mask equivalent to the offsets, for comparison and for kernels
    /// without variable lengths: a query attends to the keys of its own run. If queries and keys
    /// are the same tokens and the model is causal, `left_to_right` masks the later ones too.
    #[must_use]
    pub fn blocked(query_runs: &[u32], key_runs: &[u32], direction: Direction) -> Vec<bool> {
        let mut blocked = Vec::with_capacity(query_runs.len() * key_runs.len());
        for (query, query_run) in query_runs.iter().enumerate() {
            blocked.extend(key_runs.iter().enumerate().map(|(key, key_run)| {
                let later = direction == Direction::LeftToRight && key > query;
                later || query_run != key_run
            }));
        }
        blocked
    }

    /// Removes all runs, and starts the first if they are requested.
    pub(super) fn begin(&mut self, wanted: bool) {
        self.offsets.clear();
        if wanted {
            self.offsets.push(0);
        }
    }

    /// Ends a row of `len` tokens, in which runs start at `starts`: ascending, none of them 0, all
    /// below `len`. Does nothing if runs are not requested.
    ///
    /// # Errors
    /// [`Error::Option`] if the rows have more tokens than an offset can count.
    pub(super) fn push_row(&mut self, starts: &[u32], len: usize) -> Result<()> {
        let Some(&first) = self.offsets.last() else { return Ok(()) };
        let end = first as u64 + len as u64; // fits: no offset is negative
        let Ok(end) = i32::try_from(end) else {
            let expected = "fewer than 2^31 tokens in a batch";
            return Err(Error::Option { name: "micro_batch", found: end, expected });
        };
        self.offsets.extend(starts.iter().map(|&start| first + start as i32)); // fits: below `end`
        self.offsets.push(end);
        Ok(())
    }
}

/// Whether a token may attend to later tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// It may not: decoders.
    LeftToRight,
    /// It may: encoders, and cross-attention of decoders.
    Both,
}

/// Position of each token in its run, with runs that start at 0 and at `starts`.
pub(super) fn positions(starts: &[u32], row: &mut [i64]) {
    let mut begin = 0;
    for end in starts.iter().map(|&start| start as usize).chain([row.len()]) {
        for (position, place) in (0..).zip(&mut row[begin..end]) {
            *place = position;
        }
        begin = end;
    }
}

/// The starts of runs: the positions after tokens that end a run.
pub(super) fn starts_after(ends: impl Iterator<Item = bool>, len: usize, starts: &mut Vec<u32>) {
    starts.clear();
    let after = (1..).zip(ends).filter_map(|(next, is_end)| is_end.then_some(next));
    starts.extend(after.filter(|&next| (next as usize) < len));
}
