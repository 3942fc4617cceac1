use super::{Codec, Input, InputLocation, WHOLE, bad_input};
use crate::{Error, Result};

/// The part of the inputs for one of several machines: shard `i` of `n`, counted from 0.
///
/// All inputs in their order are cut into `n` shards of equal length, by stored bytes. Together,
/// the shards contain each document once, and one after another they are in order. A document of a
/// plain file of lines belongs to the shard of its first byte; an input that cannot be read from
/// the middle (compressed files, JSON lists, Parquet) belongs entirely to the shard of its first
/// byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    i: u64,
    n: u64,
}

impl Share {
    /// Shard `i` of `n`.
    ///
    /// # Errors
    /// [`Error::BadOption`] unless `i` is below `n`.
    pub(crate) fn new(i: u64, n: u64) -> Result<Self> {
        if i < n {
            return Ok(Share { i, n });
        }
        let expected = "I/N with I from 0 to N-1, such as 0/4";
        Err(Error::BadOption {
            name: "shard",
            found: format!("{i}/{n}"),
            expected: expected.to_owned(),
            hint: None,
        })
    }

    /// Its first byte among `bytes`, and the first byte of the next shard.
    fn of(self, bytes: u64) -> (u64, u64) {
        let cut = |i| u128::from(bytes) * u128::from(i) / u128::from(self.n);
        // fits: at most `bytes`.
        (cut(self.i) as u64, cut(self.i + 1) as u64)
    }
}

/// Restricts the inputs to a shard. Inputs without a part in it stay in the list.
///
/// # Errors
/// [`Error::BadInput`] for a stream, whose length is unknown.
pub(crate) fn share_out(inputs: &mut [Input], share: Share) -> Result<()> {
    let mut all = 0_u64;
    for input in &*inputs {
        let (Some(bytes), InputLocation::Object { .. }) = (input.stored_bytes, &input.place) else {
            let expected = "files, because a stream cannot be divided into shards";
            return Err(bad_input(&input.name, "a pipe", expected));
        };
        all += bytes;
    }
    let (first, end) = share.of(all);
    let mut start = 0;
    for input in inputs {
        let bytes = input.stored_bytes.unwrap_or(0);
        let here = |at: u64| at.saturating_sub(start).min(bytes);
        input.part = if input.is_splittable() {
            here(first)..here(end)
        } else if (first..end).contains(&start) {
            WHOLE
        } else {
            0..0
        };
        start += bytes;
    }
    Ok(())
}

impl Input {
    /// Whether reading may start after any line end.
    fn is_splittable(&self) -> bool {
        self.codec == Codec::Plain && self.shape.is_lines()
    }
}
