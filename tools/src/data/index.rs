//! `feedline index build`: builds the sample indexes of a run before it starts, without torch or a
//! GPU.
//!
//! Builds, or finds and checks, the indexes that Megatron's data path would build at the start of a
//! run. They are in the files where the run looks for them.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, ValueEnum};
use indexed::{
    BlendConfig, BlendIndex, BlendWeights, GptIndex, GptIndexConfig, IndexedDataset, MaskedConfig,
    MaskedIndex, MaskedKind, Split, SplitMatrix, blend_sizes, normalize_weights,
};
use serde::Serialize;
use serde_json::Value;

use crate::ui::job::{CancellableJob, CountedBytes};
use crate::ui::terminal::{table, thousands};

/// Arguments of `feedline index build`.
#[derive(Debug, Args)]
pub struct IndexBuild {
    /// Prefixes of .bin and .idx, or weights and prefixes in turn, as in Megatron's --data-path.
    #[arg(value_name = "[WEIGHT] PREFIX", required_unless_present_any = ["train", "valid", "test"])]
    pub data: Vec<String>,
    /// Data for training only, as in Megatron's --train-data-path; --split is then ignored.
    #[arg(long, value_name = "[WEIGHT] PREFIX", num_args = 1.., conflicts_with = "data")]
    #[arg(help_heading = "Data")]
    pub train: Vec<String>,
    /// Data for validation only, as in Megatron's --valid-data-path.
    #[arg(long, value_name = "[WEIGHT] PREFIX", num_args = 1.., conflicts_with = "data")]
    #[arg(help_heading = "Data")]
    pub valid: Vec<String>,
    /// Data for testing only, as in Megatron's --test-data-path.
    #[arg(long, value_name = "[WEIGHT] PREFIX", num_args = 1.., conflicts_with = "data")]
    #[arg(help_heading = "Data")]
    pub test: Vec<String>,
    /// Shares of training, validation and test.
    #[arg(long, value_name = "SHARES", default_value = "969,30,1", help_heading = "Data")]
    pub split: String,
    /// Tokens per sample.
    #[arg(long, value_name = "TOKENS", help_heading = "Samples")]
    pub seq_length: u64,
    /// Samples of training, validation and test, such as 1000000,2560,0 [default: one epoch each]
    #[arg(long, value_name = "COUNTS", value_parser = sample_counts, help_heading = "Samples")]
    pub samples: Option<SampleCounts>,
    /// Seed of all shuffles.
    #[arg(long, value_name = "N", default_value_t = 1234, help_heading = "Samples")]
    pub seed: u32,
    /// Omit the extra token of each sample, which is the label of its last token.
    #[arg(long, help_heading = "Samples")]
    pub no_extra_token: bool,
    /// Build samples of sentences for BERT or T5 in place of GPT samples.
    #[arg(long, value_enum, help_heading = "Samples")]
    pub masked: Option<Masked>,
    /// Sequence length of T5's decoder, in tokens.
    #[arg(long, value_name = "TOKENS", default_value_t = 128, help_heading = "Samples")]
    pub decoder_seq_length: u64,
    /// Share of tokens that are masked.
    #[arg(long, value_name = "SHARE", default_value_t = 0.15, help_heading = "Samples")]
    pub mask_prob: f64,
    /// Share of samples with a shorter target length.
    #[arg(long, value_name = "SHARE", default_value_t = 0.1, help_heading = "Samples")]
    pub short_seq_prob: f64,
    /// Folder of the index files [default: PREFIX/cache/...]
    ///
    /// Without it, the indexes of blends are not stored, as with Megatron.
    #[arg(long, value_name = "FOLDER", help_heading = "Files")]
    pub data_cache_path: Option<String>,
    /// A description.txt of an earlier run, or a JSON file with the tokenizer's description.
    ///
    /// The description is part of the file names: without it, a run does not find the files.
    #[arg(long, value_name = "FILE", help_heading = "Files")]
    pub tokenizer_from: Option<String>,
    /// Print JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

/// Samples of training, validation and test; missing counts are 0.
#[derive(Clone, Debug)]
pub struct SampleCounts(Vec<u64>);

/// One argument, so that a prefix may follow it.
fn sample_counts(text: &str) -> Result<SampleCounts, String> {
    let expected = || format!("expected one to three numbers, as 1000000,2560,0, found {text:?}");
    let counts: Result<Vec<u64>, _> = text.split(',').map(|count| count.trim().parse()).collect();
    let counts = counts.map_err(|_| expected())?;
    if counts.len() > Split::ALL.len() { Err(expected()) } else { Ok(SampleCounts(counts)) }
}

/// The model whose sentence samples are built. The other settings are those of Megatron's
/// pretrain_bert.py and pretrain_t5.py.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Masked {
    /// BERT, with pairs for next sentence prediction.
    Bert,
    /// BERT without next sentence prediction.
    BertNoHead,
    /// T5.
    T5,
}

/// The output of `feedline index build`; `--json` prints it as it is.
#[derive(Debug, Serialize)]
pub struct Indexes {
    /// Every order, a blend after its datasets.
    pub orders: Vec<OrderRow>,
}

/// One order.
#[derive(Debug, Serialize)]
pub struct OrderRow {
    /// `train`, `valid` or `test`.
    pub part: &'static str,
    /// The prefix, or the number of datasets of a blend.
    pub dataset: String,
    /// Its samples.
    pub samples: u64,
    /// The time that finding or building it took.
    pub elapsed_s: f64,
    /// The folder of its files, if they are stored.
    pub folder: Option<String>,
}

/// Prefixes, and weights if there are any.
struct Blend {
    prefixes: Vec<String>,
    weights: Option<Vec<f64>>,
}

/// Builds or checks all orders.
///
/// # Errors
/// If a setting or a dataset is invalid. Finished orders are retained, and the next run finds them;
/// nothing remains of an unfinished one.
pub fn build(args: &IndexBuild, work: &Arc<CancellableJob>) -> Result<Indexes> {
    let mut run = IndexRun { args, tokenizer: Value::Null, orders: Vec::new(), work };
    let built = run.build();
    let kept = run.orders.iter().filter(|order| order.folder.is_some()).count();
    match built {
        Ok(()) => Ok(Indexes { orders: run.orders }),
        Err(error) if kept == 0 => Err(error),
        Err(error) => {
            Err(error.context(format!("cannot build all orders ({kept} finished and kept)")))
        }
    }
}

struct IndexRun<'a> {
    args: &'a IndexBuild,
    tokenizer: Value,
    orders: Vec<OrderRow>,
    work: &'a Arc<CancellableJob>,
}

impl IndexRun<'_> {
    fn build(&mut self) -> Result<()> {
        let args = self.args;
        if let Some(file) = &args.tokenizer_from {
            self.tokenizer = tokenizer_of(file)?;
        }
        if args.data.is_empty() {
            let of_parts = [&args.train, &args.valid, &args.test];
            for (which, data) in Split::ALL.into_iter().zip(of_parts) {
                if !data.is_empty() {
                    let blend = Blend::parse(data)?;
                    let is_blend = blend.prefixes.len() > 1;
                    self.part(which, &blend, None, is_blend)?;
                }
            }
            return Ok(());
        }
        let (blend, matrix) = (Blend::parse(&args.data)?, SplitMatrix::parse(&args.split)?);
        let is_blend = blend.prefixes.len() > 1 || blend.weights.is_some();
        for which in Split::ALL {
            if matrix.share(which).is_some() {
                self.part(which, &blend, Some(&args.split), is_blend)?;
            }
        }
        Ok(())
    }

    /// Shows which order is built. Its progress counts reads and writes; their total is unknown.
    fn show(&self, what: &str) {
        let nth = self.orders.len() + 1;
        self.work.begin(format!("order {nth}, {what}"), CountedBytes::Any, None);
    }

    fn part(
        &mut self,
        which: Split,
        blend: &Blend,
        split: Option<&str>,
        is_blend: bool,
    ) -> Result<()> {
        let counts = self.args.samples.as_ref();
        let samples =
            counts.map(|SampleCounts(counts)| counts.get(which as usize).copied().unwrap_or(0));
        if !is_blend {
            self.dataset(which, &blend.prefixes[0], split, samples)?;
            return Ok(());
        }
        let weights = blend.weights.as_deref().map(normalize_weights).transpose()?;
        let (shares, size) = match (&weights, samples) {
            (Some(weights), Some(samples)) => {
                let (shares, size) = blend_sizes(weights, samples);
                (shares.into_iter().map(Some).collect(), size)
            }
            (Some(_), None) => bail!("cannot blend by weights: expected --samples, as in Megatron"),
            (None, _) => (vec![None; blend.prefixes.len()], 0),
        };
        let (mut datasets, mut available) = (Vec::new(), Vec::new());
        for (prefix, share) in blend.prefixes.iter().zip(shares) {
            let (description, count) = self.dataset(which, prefix, split, share)?;
            datasets.push(description);
            available.push(count);
        }
        let total = available.iter().sum();
        let weights = match (weights, samples) {
            // Megatron divides by the sum twice, and the second time may change the last bit.
            (Some(weights), _) => {
                BlendWeights::Weighted { weights: normalize_weights(&weights)?, size }
            }
            // Weights would be the counts, and none may be 0.
            (None, Some(0)) if available.contains(&0) => return Ok(()),
            (None, Some(samples)) => {
                let counts: Vec<f64> = available.iter().map(|&count| count as f64).collect();
                let size = samples.min(total);
                BlendWeights::Weighted { weights: normalize_weights(&counts)?, size }
            }
            (None, None) => BlendWeights::Exhaustive { sizes: available.clone() },
        };
        self.blend(&BlendConfig { datasets, which, weights, available })
    }

    fn blend(&mut self, config: &BlendConfig) -> Result<()> {
        let dataset = format!("a blend of {}", config.available.len());
        self.show(&format!("{} of {dataset}", config.which));
        let start = Instant::now();
        let (index, folder) = match &self.args.data_cache_path {
            Some(folder) => {
                let (store, key) = self.work.locate(folder)?;
                let shown = store.display(&key);
                (BlendIndex::load_or_keep(config, store.as_ref(), &key)?, Some(shown))
            }
            None => (BlendIndex::build_checked(config)?, None),
        };
        self.work.check()?;
        self.orders.push(OrderRow {
            part: config.which.name(),
            dataset,
            samples: index.sample_count(),
            elapsed_s: start.elapsed().as_secs_f64(),
            folder,
        });
        Ok(())
    }

    /// Builds or checks the order of one dataset; returns its description and sample count.
    fn dataset(
        &mut self,
        which: Split,
        prefix: &str,
        split: Option<&str>,
        num_samples: Option<u64>,
    ) -> Result<(Value, u64)> {
        self.show(&format!("{which} of {prefix}"));
        let start = Instant::now();
        let (store, key) = self.work.locate(prefix)?;
        let dataset = IndexedDataset::open_ready(&store, &key)?;
        let kind = self.args.masked.map(|masked| masked.kind(self.args));
        let (cache, folder) = match &self.args.data_cache_path {
            Some(folder) => self.work.locate(folder)?,
            None => {
                let class = kind.map_or("GPTDataset", MaskedKind::class);
                (store, key.join(&format!("cache/{class}_indices"))?)
            }
        };
        let config = self.gpt_config(prefix, split, num_samples);
        let (description, samples) = match kind {
            None => {
                let index =
                    GptIndex::load_or_keep(&dataset, which, &config, cache.as_ref(), &folder)?;
                (config.description(which)?, index.sample_count())
            }
            Some(kind) => {
                let config = self.masked_config(kind, config);
                let index =
                    MaskedIndex::load_or_keep(&dataset, which, &config, cache.as_ref(), &folder)?;
                (config.description(which)?, index.sample_count())
            }
        };
        self.work.check()?;
        self.orders.push(OrderRow {
            part: which.name(),
            dataset: prefix.to_owned(),
            samples,
            elapsed_s: start.elapsed().as_secs_f64(),
            folder: Some(cache.display(&folder)),
        });
        Ok((description, samples))
    }

    fn gpt_config(
        &self,
        prefix: &str,
        split: Option<&str>,
        num_samples: Option<u64>,
    ) -> GptIndexConfig {
        GptIndexConfig {
            dataset_path: prefix.to_owned(),
            split: split.map(str::to_owned),
            seq_len: self.args.seq_length,
            seed: self.args.seed,
            num_samples,
            add_extra_token: !self.args.no_extra_token,
            drop_last_partial_valid: true,
            tokenizer: self.tokenizer.clone(),
        }
    }

    fn masked_config(&self, kind: MaskedKind, gpt: GptIndexConfig) -> MaskedConfig {
        MaskedConfig {
            kind,
            dataset_path: gpt.dataset_path,
            split: gpt.split,
            seq_len: gpt.seq_len,
            seed: gpt.seed,
            num_samples: gpt.num_samples,
            tokenizer: gpt.tokenizer,
            masking_probability: self.args.mask_prob,
            short_sequence_probability: self.args.short_seq_prob,
            masking_max_ngram: if matches!(kind, MaskedKind::T5 { .. }) { 10 } else { 3 },
            masking_do_full_word: true,
            masking_do_permutation: false,
            masking_use_longer_ngrams: false,
            masking_use_geometric_distribution: matches!(kind, MaskedKind::T5 { .. }),
        }
    }
}

impl Masked {
    fn kind(self, args: &IndexBuild) -> MaskedKind {
        match self {
            Masked::Bert => MaskedKind::Bert { classification_head: true },
            Masked::BertNoHead => MaskedKind::Bert { classification_head: false },
            Masked::T5 => MaskedKind::T5 { sequence_length_decoder: args.decoder_seq_length },
        }
    }
}

impl Blend {
    /// As in Megatron, all words are prefixes if their number is odd, or if no word in the place of
    /// a weight is a number.
    fn parse(words: &[String]) -> Result<Self> {
        let numbers = words.iter().step_by(2).map(|word| word.trim().parse::<f64>());
        let is_number: Vec<bool> = numbers.clone().map(|number| number.is_ok()).collect();
        let prefixes = |step: usize| words.iter().skip(step - 1).step_by(step);
        let prefixes = |step| prefixes(step).map(|word| word.trim().to_owned()).collect();
        if words.len() % 2 == 1 || !is_number.contains(&true) {
            return Ok(Blend { prefixes: prefixes(1), weights: None });
        }
        ensure!(
            !is_number.contains(&false),
            "cannot blend {}: expected a weight for each prefix, found some without",
            words.join(" ")
        );
        let weights = numbers.collect::<std::result::Result<_, _>>()?;
        Ok(Blend { prefixes: prefixes(2), weights: Some(weights) })
    }
}

/// The description of a tokenizer, from a description.txt of any class or a file with nothing else.
pub(crate) fn tokenizer_of(file: &str) -> Result<Value> {
    let (store, key) = storage::locate(file)?;
    let bytes = storage::read_all(store.as_ref(), &key)?;
    let value: Value = serde_json::from_slice(&bytes)
        .with_context(|| format!("cannot read {}", Path::new(file).display()))?;
    let inside = value.get("tokenizer").or_else(|| value.pointer("/datasets/0/tokenizer"));
    Ok(inside.cloned().unwrap_or(value))
}

impl Indexes {
    /// Text for the terminal.
    #[must_use]
    pub fn text(&self) -> String {
        let row = |order: &OrderRow| {
            vec![
                order.part.to_owned(),
                order.dataset.clone(),
                thousands(order.samples),
                format!("{:.1}", order.elapsed_s),
                order.folder.clone().unwrap_or_else(|| "not kept".to_owned()),
            ]
        };
        let rows: Vec<_> = self.orders.iter().map(row).collect();
        table(&["part", "dataset", "samples", "s", "folder"], &rows)
    }
}
