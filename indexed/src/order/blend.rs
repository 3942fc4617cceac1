//! Mixes several datasets into one order: Megatron's `build_blending_indices` and its exhaustive
//! variant, and their cache.

use serde_json::{Value, json};
use storage::{Key, Storage};

use crate::cache::index_cache::{self, IfNotKept, Names};
use crate::cache::npy::{Descr, Npy, NpyBuilder};
use crate::rng::numpy_sum;
use crate::{Error, Result, Split};

/// Megatron builds half a percent more samples of each dataset than its share of the blend.
const SURPLUS: f64 = 0.005;

/// Datasets are numbered with 16 bits and a sign, and Megatron keeps the last number unused.
const DATASETS_MAX: usize = 32_766;

/// The share of each dataset in a blend.
#[derive(Clone, Debug, PartialEq)]
pub enum BlendWeights {
    /// A total number of samples in these proportions.
    Weighted {
        /// One for each dataset; they sum to 1, as [`normalize_weights`] gives them.
        weights: Vec<f64>,
        /// Total number of samples.
        size: u64,
    },
    /// Every sample of every dataset once, spread evenly.
    Exhaustive {
        /// The samples of each dataset.
        sizes: Vec<u64>,
    },
}

/// The settings that decide a blend, all of which are in the name of its cache.
#[derive(Clone, Debug, PartialEq)]
pub struct BlendConfig {
    /// The [description](crate::GptIndexConfig::description) of each dataset's index.
    pub datasets: Vec<Value>,
    /// The part of the datasets.
    pub which: Split,
    /// The share of each dataset.
    pub weights: BlendWeights,
    /// How many samples the index of each dataset has. The blend must not use more.
    pub available: Vec<u64>,
}

/// The order of the samples of a blend.
#[derive(Debug)]
pub struct BlendIndex {
    /// The dataset of each sample.
    dataset: Npy,
    /// The index of the sample in its dataset.
    dataset_sample: Npy,
}

/// Weights divided by their sum, as numpy adds them.
///
/// # Errors
/// [`Error::BadSetting`] if one is not a finite number above 0, or there are none.
pub fn normalize_weights(weights: &[f64]) -> Result<Vec<f64>> {
    let sum = numpy_sum(weights);
    let is_good = |weight: &f64| weight.is_finite() && *weight > 0.0;
    if !weights.iter().all(is_good) || !is_good(&sum) {
        let expected = "finite numbers above 0, one for each dataset".to_owned();
        return Err(Error::BadSetting {
            name: "blend weights",
            found: format!("{weights:?}"),
            expected,
        });
    }
    Ok(weights.iter().map(|weight| weight / sum).collect())
}

/// How many samples to build of each dataset, by its normalized weight, for a blend of `samples`,
/// and how many the blend then has.
#[must_use]
pub fn blend_sizes(weights: &[f64], samples: u64) -> (Vec<u64>, u64) {
    // fits: shares of a count that is small enough to be trained on
    let shares = weights.iter().map(|weight| (samples as f64 * weight).ceil());
    let build = shares.clone().map(|share| (share * (1.0 + SURPLUS)).ceil() as u64).collect();
    (build, shares.map(|share| share as u64).sum())
}

impl BlendIndex {
    /// Builds the order: each next sample is of the dataset that is furthest behind its weight; of
    /// several the first.
    ///
    /// # Errors
    /// [`Error::TooBig`] for too many datasets, [`Error::OutOfMemory`].
    pub fn build(weights: &BlendWeights) -> Result<Self> {
        match weights {
            BlendWeights::Weighted { weights, size } => blend(weights, &[], *size),
            BlendWeights::Exhaustive { sizes } => {
                let total: u64 = sizes.iter().sum();
                let share = |&size: &u64| size as f64 / total as f64;
                blend(&sizes.iter().map(share).collect::<Vec<_>>(), sizes, total)
            }
        }
    }

    /// Maps the order from cached files, written by Megatron or by this crate, or builds and saves
    /// it. As with [`GptIndex::load_or_build`](crate::GptIndex::load_or_build), wrong files are
    /// rebuilt with a warning.
    ///
    /// # Errors
    /// As [`BlendIndex::build_checked`], and [`Error::Storage`] if a file that exists cannot be
    /// read.
    pub fn load_or_build(config: &BlendConfig, store: &dyn Storage, folder: &Key) -> Result<Self> {
        let names = names_of(config, folder)?;
        index_cache::load_or_build(&BlendSpec(config), store, &names, IfNotKept::Warn)
    }

    /// As [`GptIndex::load_or_keep`](crate::GptIndex::load_or_keep).
    ///
    /// # Errors
    /// As there.
    pub fn load_or_keep(config: &BlendConfig, store: &dyn Storage, folder: &Key) -> Result<Self> {
        let names = names_of(config, folder)?;
        index_cache::load_or_build(&BlendSpec(config), store, &names, IfNotKept::Fail)
    }

    /// As [`GptIndex::verify_cache`](crate::GptIndex::verify_cache).
    ///
    /// # Errors
    /// As there.
    pub fn verify_cache(config: &BlendConfig, store: &dyn Storage, folder: &Key) -> Result<Self> {
        let names = names_of(config, folder)?;
        index_cache::verify(&BlendSpec(config), store, &names)
    }

    /// Builds the order after checking the settings and that the datasets have enough samples.
    ///
    /// # Errors
    /// As [`BlendIndex::build`]; [`Error::BadSetting`] for a weight that is not above 0 or a
    /// dataset without samples, as Megatron refuses them; [`Error::TooFewSamples`].
    pub fn build_checked(config: &BlendConfig) -> Result<Self> {
        config.check()?;
        let index = BlendIndex::build(&config.weights)?;
        config.has_enough(&index.counts(config.available.len()))?;
        Ok(index)
    }

    /// Number of samples of each dataset.
    fn counts(&self, datasets: usize) -> Vec<u64> {
        let mut counts = vec![0; datasets];
        (0..self.sample_count()).for_each(|place| counts[self.sample(place).0] += 1);
        counts
    }

    /// Number of samples.
    #[must_use]
    pub fn sample_count(&self) -> u64 {
        self.dataset.shape()[0]
    }

    /// The dataset of a sample, and its index in that dataset.
    ///
    /// # Panics
    /// If there is no such sample.
    #[must_use]
    pub fn sample(&self, sample: u64) -> (usize, u64) {
        (self.dataset.at(sample) as usize, self.dataset_sample.at(sample) as u64) // fits: counts
    }

    /// The dataset of each sample, int16, shape `[samples]`.
    #[must_use]
    pub fn dataset_index(&self) -> &Npy {
        &self.dataset
    }

    /// The index of each sample in its dataset, int64, shape `[samples]`.
    #[must_use]
    pub fn dataset_sample_index(&self) -> &Npy {
        &self.dataset_sample
    }
}

/// One blend.
struct BlendSpec<'a>(&'a BlendConfig);

/// The names of the files of a blend, after checking its settings.
fn names_of(config: &BlendConfig, folder: &Key) -> Result<Names> {
    config.check()?;
    Ok(Names::new(&config.description(), folder, &format!("BlendedDataset-{}", config.which)))
}

impl index_cache::CachedIndex<2> for BlendSpec<'_> {
    type Index = BlendIndex;

    const ARRAYS: [&'static str; 2] = ["dataset_index", "dataset_sample_index"];

    fn made_from(&self) -> Result<Value> {
        Ok(json!({ "available_samples": self.0.available }))
    }

    fn assemble(
        &self,
        [dataset, dataset_sample]: [Npy; 2],
    ) -> std::result::Result<BlendIndex, String> {
        let samples = self.0.weights.sample_count();
        let shapes = (dataset.shape(), dataset_sample.shape());
        if shapes != (&[samples], &[samples])
            || (dataset.descr(), dataset_sample.descr()) != (Descr::I16, Descr::I64)
        {
            let (found, sample_found) = (dataset.descr().name(), dataset_sample.descr().name());
            let (shape, sample_shape) = shapes;
            return Err(format!(
                "expected <i2 and <i8 arrays of {samples} samples, found {found} {shape:?} and \
                 {sample_found} {sample_shape:?}"
            ));
        }
        Ok(BlendIndex { dataset, dataset_sample })
    }

    /// Within each dataset, samples must count up from 0.
    fn check(&self, index: &BlendIndex) -> Result<Option<String>> {
        let mut counts = vec![0; self.0.available.len()];
        for place in 0..index.sample_count() {
            let (dataset, sample) = index.sample(place);
            match counts.get_mut(dataset) {
                Some(count) if *count == sample => *count += 1,
                _ => {
                    return Ok(Some(format!(
                        "expected consecutive samples of each dataset, found sample {sample} of \
                         dataset {dataset} in entry {place}"
                    )));
                }
            }
        }
        self.0.has_enough(&counts)?;
        Ok(None)
    }

    fn build(&self) -> Result<BlendIndex> {
        BlendIndex::build_checked(self.0)
    }

    fn arrays(index: &BlendIndex) -> [&Npy; 2] {
        [&index.dataset, &index.dataset_sample]
    }
}

impl BlendWeights {
    fn dataset_count(&self) -> usize {
        match self {
            BlendWeights::Weighted { weights, .. } => weights.len(),
            BlendWeights::Exhaustive { sizes } => sizes.len(),
        }
    }

    /// Number of samples of the blend.
    #[must_use]
    pub fn sample_count(&self) -> u64 {
        match self {
            BlendWeights::Weighted { size, .. } => *size,
            BlendWeights::Exhaustive { sizes } => sizes.iter().sum(),
        }
    }
}

impl BlendConfig {
    /// The description that names the cache of the blend, as in Megatron.
    #[must_use]
    pub fn description(&self) -> Value {
        let (weights, size) = match &self.weights {
            BlendWeights::Weighted { weights, size } => (json!(weights), json!(size)),
            BlendWeights::Exhaustive { sizes } => (json!(sizes), Value::Null),
        };
        json!({
            "class": "BlendedDataset",
            "datasets": self.datasets,
            "split": self.which.name(),
            "weights": weights,
            "size": size,
        })
    }

    fn check(&self) -> Result<()> {
        let parts = self.weights.dataset_count();
        if parts != self.datasets.len() || parts != self.available.len() {
            let found = format!("{parts} weights and {} sample counts", self.available.len());
            let expected =
                format!("a weight and a sample count for each of {} datasets", self.datasets.len());
            return Err(Error::BadSetting { name: "blend", found, expected });
        }
        match &self.weights {
            BlendWeights::Weighted { weights, .. } => normalize_weights(weights).map(drop),
            BlendWeights::Exhaustive { sizes } => match sizes.iter().position(|&size| size == 0) {
                None => Ok(()),
                Some(dataset) => Err(Error::BadSetting {
                    name: "blend",
                    found: format!("dataset {dataset} without samples"),
                    expected: "samples in every dataset".to_owned(),
                }),
            },
        }
    }

    fn has_enough(&self, counts: &[u64]) -> Result<()> {
        let which = self.which;
        for (dataset, (&expected, &found)) in counts.iter().zip(&self.available).enumerate() {
            if expected > found {
                return Err(Error::TooFewSamples { dataset, which, found, expected });
            }
        }
        Ok(())
    }
}

/// `sizes` is empty if datasets never run out.
fn blend(weights: &[f64], sizes: &[u64], total: u64) -> Result<BlendIndex> {
    if weights.len() > DATASETS_MAX {
        let (found, most) = (weights.len() as u128, DATASETS_MAX as u128);
        return Err(Error::TooBig { object: "datasets in a blend", found, most });
    }
    if weights.is_empty() && total > 0 {
        let (found, expected) = ("none".to_owned(), "one for each dataset".to_owned());
        return Err(Error::BadSetting { name: "blend weights", found, expected });
    }
    let mut dataset = NpyBuilder::<i16>::new("dataset index", &[total])?;
    let mut dataset_sample = NpyBuilder::<i64>::new("dataset sample index", &[total])?;
    let mut left = RemainingDatasets {
        numbers: (0..weights.len() as i16).collect(), // fits: checked above
        weights: weights.to_vec(),
        counts: vec![0.0; weights.len()],
    };
    for place in (0..weights.len()).rev() {
        left.remove_if_used_up(place, sizes);
    }
    for sample in 0..total {
        let chosen = furthest_behind(&left.weights, &left.counts, sample.max(1) as f64);
        dataset.push(left.numbers[chosen].into());
        dataset_sample.push(left.counts[chosen] as i64); // fits: a count
        left.counts[chosen] += 1.0;
        left.remove_if_used_up(chosen, sizes);
    }
    Ok(BlendIndex { dataset: dataset.finish(), dataset_sample: dataset_sample.finish() })
}

/// The datasets that are not used up, in ascending order.
struct RemainingDatasets {
    numbers: Vec<i16>,
    weights: Vec<f64>,
    /// Samples drawn from each.
    counts: Vec<f64>,
}

impl RemainingDatasets {
    fn remove_if_used_up(&mut self, place: usize, sizes: &[u64]) {
        let size = sizes.get(self.numbers[place] as usize); // fits: not negative
        if size.is_some_and(|&size| self.counts[place] >= size as f64) {
            self.numbers.remove(place);
            self.weights.remove(place);
            self.counts.remove(place);
        }
    }
}

/// The first index with the largest `weight * drawn - count`, in doubles as in Megatron.
fn furthest_behind(weights: &[f64], counts: &[f64], drawn: f64) -> usize {
    let (mut chosen, mut most) = (0, f64::NEG_INFINITY);
    for (place, (weight, count)) in weights.iter().zip(counts).enumerate() {
        let behind = weight * drawn - count;
        if behind > most {
            (chosen, most) = (place, behind);
        }
    }
    chosen
}
