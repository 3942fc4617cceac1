//! Computes how many epochs, documents and samples a GPT index has, before it is built.

use std::ops::Range;

use crate::cache::npy::Descr;
use crate::split::part_of;
use crate::{Error, GptIndexConfig, IndexedDataset, Result, SampleRule, Split};

/// The counts of a GPT index: a pure function of the dataset's lengths and the settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// The sequences of the part; this index treats each as a document.
    pub sequences: Range<u32>,
    pub epochs: u64,
    pub rule: SampleRule,
    pub sample_count: u64,
    /// If the last epoch is shuffled separately, the samples of the epochs before it.
    pub samples_before_last_epoch: Option<u64>,
}

/// Positions and sequence numbers are 32-bit integers in Megatron's document index, and so is its
/// count of epochs.
const COUNT_MAX: u64 = i32::MAX as u64;

impl Plan {
    pub(crate) fn new(
        dataset: &IndexedDataset,
        which: Split,
        config: &GptIndexConfig,
    ) -> Result<Self> {
        let rule = sample_rule(which, config)?;
        let sequences = part_of(config.split.as_deref(), which, dataset.sequence_count())?;
        check_max("sequences (numbered in 32 bits)", sequences.end.into())?;
        let tokens = dataset.tokens_in(&sequences);
        let sequences = sequences.start as u32..sequences.end as u32; // fits: checked above
        let epochs = match config.num_samples {
            None => 1,
            Some(samples) => epochs_for(samples, tokens, &rule).ok_or_else(|| Error::NoTokens {
                file: dataset.display(),
                which,
                sequences: sequences.len() as u64,
                sequences_all: dataset.sequence_count(),
                samples,
            })?,
        };
        check_max("epochs", epochs)?;
        let tokens_all = epochs * u128::from(tokens);
        let fits = |_| Error::TooBig { object: "tokens", found: tokens_all, most: u64::MAX.into() };
        let sample_count = rule.sample_count(u64::try_from(tokens_all).map_err(fits)?)?;
        let epochs = epochs as u64; // fits: checked above
        let samples_before_last_epoch = match config.num_samples {
            Some(samples) if epochs > 1 => separate_last_epoch(samples, epochs, tokens, &rule),
            _ => None,
        };
        Ok(Plan { sequences, epochs, rule, sample_count, samples_before_last_epoch })
    }

    pub(crate) fn document_index_len(&self) -> u64 {
        self.epochs * self.sequences.len() as u64 // fits: both are below 2^31
    }

    /// The element type of the sample index.
    pub(crate) fn sample_descr(&self) -> Descr {
        if self.document_index_len() <= COUNT_MAX { Descr::I32 } else { Descr::I64 }
    }

    /// The element type of the shuffle index.
    pub(crate) fn shuffle_descr(&self) -> Descr {
        if self.sample_count < u64::from(u32::MAX) - 1 { Descr::U32 } else { Descr::I64 }
    }
}

fn sample_rule(which: Split, config: &GptIndexConfig) -> Result<SampleRule> {
    if !(1..=COUNT_MAX).contains(&config.seq_len) {
        let (found, expected) = (config.seq_len.to_string(), format!("1 to {COUNT_MAX}"));
        return Err(Error::BadSetting { name: "seq_len", found, expected });
    }
    Ok(SampleRule {
        seq_len: config.seq_len,
        add_extra_token: config.add_extra_token,
        // Training and test always drop it.
        keep_last_partial: which == Split::Valid && !config.drop_last_partial_valid,
    })
}

/// The fewest epochs with this many samples, at least 1; `None` if no number of epochs suffices.
/// For no samples one suffices, also without tokens, where Megatron does not end.
fn epochs_for(samples: u64, tokens: u64, rule: &SampleRule) -> Option<u128> {
    let needed = u128::from(samples) * u128::from(rule.seq_len) + u128::from(rule.extra_tokens());
    match (samples, tokens) {
        (0, 0) => Some(1),
        (_, 0) => None,
        _ => Some(needed.div_ceil(tokens.into()).max(1)),
    }
}

/// The samples before the last epoch, if less than 80 % of the last epoch is used. It is then
/// shuffled separately, so that the tokens used once more are last.
fn separate_last_epoch(samples: u64, epochs: u64, tokens: u64, rule: &SampleRule) -> Option<u64> {
    let extra = rule.extra_tokens();
    let before = ((epochs - 1) * tokens - extra) / rule.seq_len; // fits: all epochs' tokens do
    let in_last = samples - before;
    let per_epoch = (tokens - extra) / rule.seq_len;
    assert!(in_last <= per_epoch + 1, "more samples of one epoch than an epoch has");
    (in_last < (0.80 * per_epoch as f64) as u64).then_some(before)
}

fn check_max(object: &'static str, found: u128) -> Result<()> {
    if found > COUNT_MAX.into() {
        return Err(Error::TooBig { object, found, most: COUNT_MAX.into() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The threshold is `int(0.80 * per_epoch)` in doubles, exclusive.
    #[test]
    fn the_last_epoch_is_separate_below_80_percent() {
        let rule = SampleRule { seq_len: 4, add_extra_token: true, keep_last_partial: false };
        // 401 tokens are 100 samples, and so 80 in the last epoch are too many.
        for (in_last, expected) in [(1, Some(100)), (79, Some(100)), (80, None), (100, None)] {
            assert_eq!(separate_last_epoch(100 + in_last, 2, 401, &rule), expected, "{in_last}");
        }
        // 80 % of 9 samples an epoch are 7.2, which is truncated to 7; of 1 sample, to 0.
        for (in_last, expected) in [(6, Some(18)), (7, None)] {
            assert_eq!(separate_last_epoch(18 + in_last, 3, 37, &rule), expected, "{in_last}");
        }
        assert_eq!(separate_last_epoch(2, 2, 5, &rule), None);
    }

    #[test]
    fn epochs_are_the_fewest_that_suffice() {
        let rule = SampleRule { seq_len: 4, add_extra_token: true, keep_last_partial: false };
        for (samples, tokens, expected) in [
            (0, 9, Some(1)),
            (2, 9, Some(1)),
            (3, 9, Some(2)),
            (2, 8, Some(2)), // 8 tokens and the label of the last
            (1, 1, Some(5)),
            (1, 0, None),
            (0, 0, Some(1)),
            (u64::MAX, 1, Some(4 * u128::from(u64::MAX) + 1)),
        ] {
            assert_eq!(epochs_for(samples, tokens, &rule), expected, "{samples} of {tokens}");
        }
        let rule = SampleRule { add_extra_token: false, ..rule };
        assert_eq!(epochs_for(2, 8, &rule), Some(1));
        assert_eq!(epochs_for(0, 0, &rule), Some(1));
    }
}
