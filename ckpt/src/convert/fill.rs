//! Rows that are in no source: those of tokens added to a vocabulary.

use super::made::{DeriveBuffers, DerivedTensor, unfit};
use super::source::TensorSource;
use crate::region::{self, Span};
use crate::{Dtype, Group, Result, bands, number};
use storage::crc64;

/// Initial values of new rows.
#[derive(Clone, Debug, PartialEq)]
pub enum NewRows {
    /// All zeros.
    Zeros,
    /// The mean of the existing rows: a new token is as likely as an average one.
    Mean,
    /// Normally distributed with mean zero; a function of the seed, the name and the index alone.
    Normal {
        /// The standard deviation.
        std: f64,
        /// The seed of the values.
        seed: u64,
    },
}

/// The source of the values of new rows.
#[derive(Clone, Debug)]
pub(crate) enum RowFill {
    Zeros,
    Normal {
        std: f64,
        seed: u64,
    },
    /// One row, repeated.
    Row(Vec<f64>),
}

/// Longest row whose mean is held in memory.
const ROW_ITEMS_MAX: u64 = 1 << 24;

/// Bytes read at a time while the mean is computed.
const BAND_BYTES: u64 = 16 << 20;

impl RowFill {
    /// The values that `rows` selects for the new rows of a tensor.
    ///
    /// # Errors
    /// [`crate::Error::Unfit`] for a type without them, such as a quantized one.
    pub(crate) fn new(rows: &NewRows, source: &TensorSource, made: &DerivedTensor) -> Result<Self> {
        if !number::can_cast(Dtype::F64, made.dtype) {
            let (found, expected) = (made.dtype.to_string(), "F32, BF16, F16 or F64 for new rows");
            return Err(unfit(&made.name, found, expected));
        }
        Ok(match rows {
            // The moments of rows that were never trained are zero.
            _ if made.group != Group::Model && made.group != Group::Master => RowFill::Zeros,
            NewRows::Zeros => RowFill::Zeros,
            NewRows::Normal { std, seed } => RowFill::Normal { std: *std, seed: *seed },
            NewRows::Mean => RowFill::Row(mean_row(source, made)?),
        })
    }

    /// Appends the values of a box, row-major.
    pub(crate) fn values(&self, name: &str, spans: &[Span], dtype: Dtype, into: &mut Vec<u8>) {
        let row_items: u64 = spans[1..].iter().map(|span| span.len).product();
        let first = spans[1..].iter().fold(0, |at, span| at * span.len + span.start);
        for row in spans[0].start..spans[0].start + spans[0].len {
            for item in first..first + row_items {
                let value = match self {
                    RowFill::Zeros => 0.0,
                    RowFill::Normal { std, seed } => {
                        std * normal(*seed ^ crc64(name.as_bytes()), row, item)
                    }
                    // fits: an index of a row in memory
                    RowFill::Row(values) => values[item as usize],
                };
                number::from_f64(value, dtype, into);
            }
        }
    }
}

/// The mean of all rows, in double precision.
fn mean_row(source: &TensorSource, made: &DerivedTensor) -> Result<Vec<f64>> {
    let rows = made.shape.first().copied().unwrap_or(0);
    let row_items = region::elements(made.shape.iter().skip(1).copied());
    let row_items = row_items.filter(|items| rows > 0 && (1..=ROW_ITEMS_MAX).contains(items));
    let Some(row_items) = row_items else {
        let expected = format!("at least one row of 1 to {ROW_ITEMS_MAX} elements to average");
        return Err(unfit(&made.name, format!("shape {:?}", made.shape), &expected));
    };
    let mut sums = vec![0.0; row_items as usize]; // fits: checked above
    let item_bytes = made.dtype.item_bytes() as usize; // fits: at most 8
    let (mut buffer, mut scratch) = (Vec::new(), DeriveBuffers::default());
    let mut place = 0;
    for band in bands(&made.shape, made.dtype.item_bytes(), BAND_BYTES) {
        let items: u64 = band.iter().map(|span| span.len).product();
        buffer.resize(items as usize * item_bytes, 0); // fits: at most 16 MiB
        made.read(source, &band, &mut buffer, &mut scratch)?;
        for item in buffer.chunks_exact(item_bytes) {
            sums[place] += number::to_f64(made.dtype, item);
            place = (place + 1) % sums.len();
        }
    }
    Ok(sums.into_iter().map(|sum| sum / rows as f64).collect())
}

/// A value of the standard normal distribution (Box-Muller transform), for an index.
fn normal(seed: u64, row: u64, item: u64) -> f64 {
    let key = mix(mix(seed ^ 0x6665_6564) ^ row) ^ item.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let unit = |bits: u64| ((bits >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
    let (a, b) = (unit(mix(key)), unit(mix(key ^ 0x5555_5555_5555_5555)));
    (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()
}

/// The finalizer of SplitMix64: every input bit flips half of the output bits on average.
fn mix(mut bits: u64) -> u64 {
    bits = bits.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ bits >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_normal() {
        let values: Vec<f64> = (0..20_000).map(|i| normal(7, i / 100, i % 100)).collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let var = values.iter().map(|v| v * v).sum::<f64>() / values.len() as f64;
        assert!(mean.abs() < 0.03, "{mean}");
        assert!((var - 1.0).abs() < 0.04, "{var}");
        let inside = values.iter().filter(|v| v.abs() < 1.0).count();
        assert!((13_300..14_000).contains(&inside), "{inside} of 20,000 within one deviation");
    }
}
