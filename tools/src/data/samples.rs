//! `feedline samples`: reads the samples of a training run as the run would.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::{Args, ValueEnum};
use indexed::{BlockShuffle, GptIndex, GptIndexConfig, IndexedDataset, Split, TokenStream};
use loader::batch::{GptAssemble, GptConfig};
use loader::{
    Assemble, Batch, BlockOrder, FileOrder, GptOrder, Loader, LoaderOptions, Metrics, Ranks,
    RawAssemble, RawBatch, SampleOrder,
};
use serde::Serialize;
use sha2::{Digest as _, Sha256};
use storage::{ByteSize, Key};

use crate::ui::job::{CancellableJob, CountedBytes};
use crate::ui::simulate::Simulate;
use crate::ui::terminal::{FactTable, thousands};
use crate::ui::timeout::timeout_seconds;

pub use crate::data::samples_show::{Shown, show};

/// The order in which samples are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OrderKind {
    /// Megatron's shuffle of all documents and samples.
    Megatron,
    /// A shuffle of blocks, which needs fewer and larger requests.
    Block,
    /// The order of the file, one sample per sequence, as `feedline materialize` writes it.
    File,
}

/// Arguments of `feedline samples`.
#[derive(Args, Clone, Debug)]
pub struct SamplesArgs {
    /// Prefix of a GPT dataset: a path or a URL. With --show, the config of a run.
    #[arg(value_name = "PREFIX")]
    pub prefix: String,
    /// Tokens per sample.
    #[arg(long, default_value_t = 2048, value_name = "TOKENS", help_heading = "Samples")]
    pub seq_length: u64,
    /// Samples to read [default: to the end of the order]
    #[arg(long, value_name = "N", help_heading = "Samples")]
    pub samples: Option<u64>,
    /// First sample to read. To continue a run: the number of samples that it has consumed.
    #[arg(long, default_value_t = 0, value_name = "N", help_heading = "Samples")]
    pub first: u64,
    /// Number of samples for which Megatron's order is built; it determines the number of epochs.
    ///
    /// Default: the last sample to read; one epoch without --samples.
    #[arg(long, value_name = "N", help_heading = "Samples")]
    pub built_for: Option<u64>,
    /// Seed of the shuffles.
    #[arg(long, value_name = "N", default_value_t = 1234, help_heading = "Samples")]
    pub seed: u32,
    /// Shares of training, validation and test; the samples of training are read.
    #[arg(long, default_value = "1,0,0", value_name = "SHARES", help_heading = "Samples")]
    pub split: String,
    /// Order of the samples.
    #[arg(long, value_enum, default_value = "megatron", help_heading = "Samples")]
    pub order: OrderKind,
    /// Samples per batch.
    #[arg(long, default_value_t = 8, value_name = "N", help_heading = "Samples")]
    pub micro_batch: usize,
    /// Data-parallel rank whose samples are read.
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Samples")]
    pub rank: u32,
    /// Number of data-parallel ranks.
    #[arg(long, default_value_t = 1, value_name = "N", help_heading = "Samples")]
    pub ranks: u32,
    /// Folder of Megatron's index files [default: none, and the index is not stored]
    #[arg(long = "data-cache-path", alias = "cache", value_name = "FOLDER")]
    #[arg(help_heading = "Samples")]
    pub cache: Option<String>,
    /// Maximum samples per second, to read as slowly as training does [default: no limit]
    #[arg(long, value_name = "N", help_heading = "Reading")]
    pub rate: Option<f64>,
    /// Requests in flight [default: found by measuring]
    #[arg(long, value_name = "N", help_heading = "Reading")]
    pub depth: Option<usize>,
    /// Maximum size of the data that is read ahead. With a small window, slow requests stall the
    /// reader.
    #[arg(long, default_value = "512MiB", value_name = "SIZE", value_parser = window)]
    #[arg(help_heading = "Reading")]
    pub window: ByteSize,
    /// Maximum wait for a batch or a request. With less, a slow store fails the run.
    #[arg(long, default_value = "300s", value_name = "TIME", value_parser = timeout_seconds)]
    #[arg(help_heading = "Reading")]
    pub timeout: u64,
    /// Do not compare the data with its checksums (PREFIX.crc). Damaged tokens are then not
    /// detected.
    #[arg(long, help_heading = "Reading")]
    pub no_verify: bool,
    /// Deliver the bytes of the samples without making tensors, as the node reader does.
    #[arg(long, conflicts_with = "hash", help_heading = "Reading")]
    pub raw: bool,
    /// The simulated store, if there is one.
    #[command(flatten)]
    pub simulate: Simulate,
    /// Print the SHA-256 of all tokens, each sample with its extra token, as little-endian int64.
    #[arg(long, help_heading = "Output")]
    pub hash: bool,
    /// Print samples of a run with file, sequence and text of each part.
    ///
    /// PREFIX is then the config of a run with any objective. --first and --samples choose the
    /// samples by their index in the run's order. Default: the samples of one step.
    #[arg(long, conflicts_with_all = ["hash", "raw"], help_heading = "Output")]
    pub show: bool,
    /// Print JSON, with units in the keys.
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

/// A size; a bare number is MiB.
fn window(text: &str) -> Result<ByteSize, String> {
    match text.parse::<u64>() {
        Ok(mebibytes) => Ok(ByteSize(mebibytes.saturating_mul(1 << 20))),
        Err(_) => text.parse(),
    }
}

/// The output of `feedline samples`; `--json` prints it as it is.
#[derive(Debug, Serialize)]
pub struct Samples {
    /// The simulated store, if there was one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub simulated: Option<String>,
    /// Name of the order.
    pub order: String,
    /// Samples that the order has.
    pub samples_of_order: u64,
    /// Samples read.
    pub samples: u64,
    /// From the start of the loader to the last batch.
    pub seconds: f64,
    /// Opening the dataset and mapping or building its index.
    pub index_seconds: f64,
    /// From the start of the loader to the first batch.
    pub first_batch_seconds: f64,
    /// Samples per second.
    pub samples_per_second: f64,
    /// Bytes of samples per second.
    pub bytes_per_second: f64,
    /// SHA-256 of the tokens of all samples in order, each with its extra token, as little-endian
    /// int64.
    pub sha256: Option<String>,
    /// Metrics of the loader.
    pub loader: Metrics,
}

/// Reads the samples.
///
/// # Errors
/// If the dataset, the index or a read fails.
pub fn samples(args: &SamplesArgs, work: &Arc<CancellableJob>) -> Result<Samples> {
    let started = Instant::now();
    let (mut store, key) = storage::locate(&args.prefix)?;
    let simulation = args.simulate.start()?;
    if let Some(simulation) = &simulation {
        store = simulation.wrap(store);
    }
    let dataset = Arc::new(IndexedDataset::open_ready(&store, &key)?);
    work.begin("order", CountedBytes::Any, None);
    let order = order_of(args, &dataset, work)?;
    work.check()?;
    let index_seconds = started.elapsed().as_secs_f64();
    let total = order.sample_count();
    let end = args.samples.map_or(total, |count| args.first.saturating_add(count));
    let mut options = LoaderOptions::new(args.micro_batch, args.first..end);
    options.ranks = Ranks::one(args.rank, args.ranks);
    options.depth = args.depth;
    options.window_bytes = args.window.0;
    options.timeout = Duration::from_secs(args.timeout);
    options.verify = !args.no_verify;
    let seq_len = usize::try_from(args.seq_length).context("cannot use --seq-length")?;
    let name = order.name();
    let mut hasher = args.hash.then(Sha256::new);
    let started = Instant::now();
    let sample_bytes = args.seq_length.saturating_add(1) * dataset.dtype().item_bytes();
    let count = end.min(total).saturating_sub(args.first) / u64::from(args.ranks).max(1);
    work.begin("samples", CountedBytes::Read, Some(count.saturating_mul(sample_bytes)));
    let shown = (work.as_ref(), sample_bytes);
    let (taken, metrics) = if args.raw {
        drain(Loader::start(order, RawAssemble, options)?, args.rate, shown, RawBatch::rows)?
    } else {
        let assemble = GptAssemble::new(GptConfig::new(seq_len), vec![dataset.dtype()])?;
        drain(Loader::start(order, assemble, options)?, args.rate, shown, |batch| {
            if let Some(hasher) = &mut hasher {
                add(hasher, batch);
            }
            batch.rows
        })?
    };
    let seconds = started.elapsed().as_secs_f64();
    Ok(Samples {
        simulated: simulation.map(|simulation| simulation.about()),
        order: name,
        samples_of_order: total,
        samples: taken,
        seconds,
        index_seconds,
        first_batch_seconds: metrics.first_batch_us as f64 / 1e6,
        samples_per_second: taken as f64 / seconds,
        bytes_per_second: metrics.delivered_bytes as f64 / seconds,
        sha256: hasher.map(|hasher| hex(&hasher.finalize())),
        loader: metrics,
    })
}

/// Takes all batches, at most `rate` samples per second; `rows` is called with each.
fn drain<A: Assemble>(
    mut loader: Loader<A>,
    rate: Option<f64>,
    (work, sample_bytes): (&CancellableJob, u64),
    mut rows: impl FnMut(&A::Batch) -> usize,
) -> Result<(u64, Metrics)> {
    let (started, mut taken) = (Instant::now(), 0);
    while let Some(batch) = loader.next_batch()? {
        work.check()?;
        let new = rows(&batch) as u64;
        work.moved(CountedBytes::Read, new * sample_bytes);
        taken += new;
        loader.recycle(batch);
        if let Some(rate) = rate {
            let scheduled = started + Duration::from_secs_f64(taken as f64 / rate);
            std::thread::sleep(scheduled.saturating_duration_since(Instant::now()));
        }
    }
    Ok((taken, loader.metrics()))
}

fn order_of(
    args: &SamplesArgs,
    dataset: &Arc<IndexedDataset>,
    work: &Arc<CancellableJob>,
) -> Result<Arc<dyn SampleOrder>> {
    let seq_len = usize::try_from(args.seq_length).context("cannot use --seq-length")?;
    Ok(match args.order {
        OrderKind::Megatron => {
            let index = Arc::new(megatron_index(args, dataset, work)?);
            Arc::new(GptOrder::new(Arc::clone(dataset), index, seq_len)?)
        }
        OrderKind::Block => {
            let split = Some(args.split.as_str());
            let stream = TokenStream::new(dataset, Split::Train, split, args.seq_length, true)?;
            let (block, window) = (BlockShuffle::BLOCK_SAMPLES, BlockShuffle::WINDOW_BLOCKS);
            let seed = args.seed.into();
            let shuffle = BlockShuffle::new(stream.sample_count(), block, window, seed)?;
            let last = args.samples.map_or(1, |count| args.first.saturating_add(count));
            let epochs = last.div_ceil(stream.sample_count()).max(1);
            Arc::new(BlockOrder::new(dataset, stream, &shuffle, epochs)?)
        }
        OrderKind::File => Arc::new(FileOrder::new(Arc::clone(dataset), seq_len)?),
    })
}

fn megatron_index(
    args: &SamplesArgs,
    dataset: &IndexedDataset,
    work: &Arc<CancellableJob>,
) -> Result<GptIndex> {
    let reached = args.samples.map(|count| args.first.saturating_add(count));
    let config = GptIndexConfig {
        dataset_path: args.prefix.clone(),
        split: Some(args.split.clone()),
        seq_len: args.seq_length,
        seed: args.seed,
        num_samples: args.built_for.or(reached),
        add_extra_token: true,
        drop_last_partial_valid: true,
        tokenizer: serde_json::Value::Null,
    };
    let Some(folder) = &args.cache else {
        return Ok(GptIndex::build(dataset, Split::Train, &config)?);
    };
    let store = work.open_url(folder)?;
    Ok(GptIndex::load_or_keep(dataset, Split::Train, &config, store.as_ref(), &Key::root())?)
}

/// Hashes each row: the inputs, then the last label, as the sample is stored.
fn add(hasher: &mut Sha256, batch: &Batch) {
    for row in 0..batch.rows {
        let place = row * batch.seq_len..(row + 1) * batch.seq_len;
        for token in &batch.tokens[place.clone()] {
            hasher.update(token.to_le_bytes());
        }
        if let Some(last) = batch.labels[place].last() {
            hasher.update(last.to_le_bytes());
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Samples {
    /// Text for the terminal.
    #[must_use]
    pub fn text(&self) -> String {
        let metrics = &self.loader;
        let mut facts = FactTable::default();
        if let Some(about) = &self.simulated {
            facts.add("store", about);
        }
        facts.add("order", &self.order);
        let of = thousands(self.samples_of_order);
        facts.add("samples", format!("{} of {of}", thousands(self.samples)));
        facts.add("time to open and index", format!("{:.3} s", self.index_seconds));
        facts.add("time to first batch", format!("{:.3} s", self.first_batch_seconds));
        facts.add("samples per second", thousands(self.samples_per_second as u64));
        facts.add("bytes per second", ByteSize(self.bytes_per_second as u64));
        facts.add("bytes moved per byte wanted", format!("{:.3}", metrics.moved_per_wanted));
        facts.add("bytes from the page cache", ByteSize(metrics.page_cache_bytes));
        let reads = thousands(metrics.reads);
        facts.add("requests", format!("{reads}, queue depth {} at the end", metrics.depth));
        let (p50, p99) = (metrics.read_p50_us, metrics.read_p99_us);
        facts.add("request latency", format!("p50 {p50} us, p99 {p99} us"));
        let stalled = metrics.stalled_us / 1000;
        facts.add("waits over 1 ms", format!("{}, {stalled} ms in total", metrics.stalls));
        if let Some(hash) = &self.sha256 {
            facts.add("sha256 of the tokens", hash);
        }
        facts.text()
    }
}
