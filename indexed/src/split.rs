//! Divides the sequences into training, validation and test.

use std::fmt;
use std::ops::Range;

use serde_json::{Value, json};

use crate::rng::numpy_sum;
use crate::{Error, Result};

/// A part of a dataset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Split {
    /// Training.
    Train,
    /// Validation during training.
    Valid,
    /// Test at the end.
    Test,
}

impl Split {
    /// All, in the order of a split string.
    pub const ALL: [Split; 3] = [Split::Train, Split::Valid, Split::Test];

    /// Its name in file names.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Split::Train => "train",
            Split::Valid => "valid",
            Split::Test => "test",
        }
    }
}

/// The items of a part of `count`: by the shares of a split string, or all of them without one.
pub(crate) fn part_of(split: Option<&str>, which: Split, count: u64) -> Result<Range<u64>> {
    let Some(split) = split else { return Ok(0..count) };
    let refuse = || Error::EmptySplit { split: split.to_owned(), which };
    SplitMatrix::parse(split)?.range(which, count).ok_or_else(refuse)
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A split string such as `949,50,1`, as fractions of the whole.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SplitMatrix {
    /// Where each part starts and where the last ends: 0, then running sums of the shares.
    bounds: [f64; 4],
}

impl SplitMatrix {
    /// Reads a split string: one to three numbers of digits and dots, divided by other characters.
    ///
    /// # Errors
    /// [`Error::BadSetting`] if there are no numbers, more than three, or all are 0; or if there
    /// are letters or signs.
    pub fn parse(split: &str) -> Result<Self> {
        let refuse = || Error::BadSetting {
            name: "split",
            found: format!("'{split}'"),
            expected: "one to three numbers, not all of them 0, such as '949,50,1'".to_owned(),
        };
        // Megatron ignores signs and letters: it reads '1e-3' as the numbers 1 and 3, and '1,inf,1'
        // as 1 and 1. That is never intended.
        if split.contains(|c: char| matches!(c, '-' | '+') || c.is_alphabetic()) {
            return Err(refuse());
        }
        let mut weights = [0.0_f64; 3];
        let mut count = 0;
        for number in split.split(|c: char| !c.is_ascii_digit() && c != '.') {
            if number.is_empty() {
                continue;
            }
            let weight = weights.get_mut(count).ok_or_else(refuse)?;
            *weight = number.parse().map_err(|_| refuse())?;
            count += 1;
        }
        let sum = numpy_sum(&weights);
        if sum <= 0.0 || !sum.is_finite() {
            return Err(refuse());
        }
        let mut bounds = [0.0; 4];
        for (part, weight) in weights.iter().enumerate() {
            bounds[part + 1] = bounds[part] + weight / sum;
        }
        Ok(SplitMatrix { bounds })
    }

    /// Where a part starts and ends, as fractions of the whole; `None` if its share is 0.
    #[must_use]
    pub fn share(&self, which: Split) -> Option<(f64, f64)> {
        let part = which as usize;
        let (start, end) = (self.bounds[part], self.bounds[part + 1]);
        (start < end).then_some((start, end))
    }

    /// The sequences of a part of `count`; `None` if its share is 0. Each bound is rounded to the
    /// nearest, halves to even, so a small part may be empty.
    #[must_use]
    pub fn range(&self, which: Split, count: u64) -> Option<Range<u64>> {
        // fits: the bounds are not negative, and what rounding adds at the end is truncated.
        let place = |share: f64| ((share * count as f64).round_ties_even() as u64).min(count);
        self.share(which).map(|(start, end)| place(start)..place(end))
    }

    /// As in Megatron's description: the first bound is an integer, all others are floats.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let row = |which| match self.share(which) {
            None => Value::Null,
            Some((_, end)) if which == Split::Train => json!([0, end]),
            Some((start, end)) => json!([start, end]),
        };
        Split::ALL.map(row).to_vec().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges() {
        for (split, count, expected) in [
            ("949,50,1", 50, [Some(0..47), Some(47..50), Some(50..50)]),
            ("90/8/2", 50, [Some(0..45), Some(45..49), Some(49..50)]),
            ("1", 7, [Some(0..7), None, None]),
            ("0,1", 7, [None, Some(0..7), None]),
            ("1, 1", 5, [Some(0..2), Some(2..5), None]), // 2.5 goes to the even 2
            ("1, 1", 7, [Some(0..4), Some(4..7), None]), // 3.5 goes to the even 4
            (".5,.25,.25", 0, [Some(0..0), Some(0..0), Some(0..0)]),
        ] {
            let matrix = SplitMatrix::parse(split).unwrap();
            assert_eq!(Split::ALL.map(|which| matrix.range(which, count)), expected, "{split}");
        }
    }

    #[test]
    fn refuses() {
        let letters = ["a", "1e3,1", "1,inf,1", "1,nan", "∞a,1"];
        let numbers = ["", "0,0,0", "1,2,3,4", "1.2.3", ".", "-1,2"];
        for split in letters.into_iter().chain(numbers) {
            assert!(SplitMatrix::parse(split).is_err(), "'{split}' was accepted");
        }
    }

    #[test]
    fn the_first_bound_is_an_integer() {
        let text = |split| SplitMatrix::parse(split).unwrap().to_json().to_string();
        assert_eq!(text("90,10,0"), "[[0,0.9],[0.9,1.0],null]");
        assert_eq!(text("0,1,1"), "[null,[0.0,0.5],[0.5,1.0]]");
    }
}
