//! Samples in the order of a run through the loader, from test data of any length.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use loader::{DataFile, Loader, LoaderOptions, PieceRef, Ranks, RawAssemble, SampleOrder};

use crate::bench::measure::counters::{CounterSource, Counters};
use crate::bench::patterns::PatternRun;
use crate::bench::random::word;
use crate::bench::workload::reads::{ReadWorkload, data_source, open_data, resident};

/// Random samples of one length.
#[derive(Debug)]
struct Shuffled {
    source: [DataFile; 1],
    sample_bytes: u64,
    seed: u64,
}

impl SampleOrder for Shuffled {
    fn sources(&self) -> &[DataFile] {
        &self.source
    }

    fn sample_count(&self) -> u64 {
        u64::from(u32::MAX)
    }

    fn pieces(&self, sample: u64, into: &mut Vec<PieceRef>) -> loader::Result<()> {
        let places = (self.source[0].len_bytes - self.sample_bytes) / 2 + 1;
        let offset_bytes = word(self.seed, sample) % places * 2;
        into.push(PieceRef { file: 0, offset_bytes, len_bytes: self.sample_bytes });
        Ok(())
    }

    fn name(&self) -> String {
        "shuffled samples".to_owned()
    }
}

/// The pieces of another order, mapped to one file. If that is shorter than all files of the order,
/// positions wrap around.
#[derive(Debug)]
pub struct WrappedOrder {
    inner: Arc<dyn SampleOrder>,
    /// Start of each file of the order in their concatenation.
    begins: Vec<u64>,
    source: [DataFile; 1],
}

impl WrappedOrder {
    /// Maps the concatenated files of an order to `source`.
    #[must_use]
    pub fn new(inner: Arc<dyn SampleOrder>, source: DataFile) -> Self {
        let mut end = 0_u64;
        let begin = |source: &DataFile| {
            let begin = end;
            end = end.saturating_add(source.len_bytes);
            begin
        };
        let begins = inner.sources().iter().map(begin).collect();
        WrappedOrder { inner, begins, source: [source] }
    }
}

impl SampleOrder for WrappedOrder {
    fn sources(&self) -> &[DataFile] {
        &self.source
    }

    fn sample_count(&self) -> u64 {
        self.inner.sample_count()
    }

    fn pieces(&self, sample: u64, into: &mut Vec<PieceRef>) -> loader::Result<()> {
        let first = into.len();
        self.inner.pieces(sample, into)?;
        let data_bytes = self.source[0].len_bytes;
        for piece in &mut into[first..] {
            piece.len_bytes = piece.len_bytes.min(data_bytes);
            let at = self.begins[piece.file as usize].saturating_add(piece.offset_bytes);
            // Adjacent pieces stay adjacent, except where positions wrap around.
            piece.offset_bytes = (at % data_bytes).min(data_bytes - piece.len_bytes);
            piece.file = 0;
        }
        Ok(())
    }

    fn together_until(&self, sample: u64) -> u64 {
        self.inner.together_until(sample)
    }

    fn name(&self) -> String {
        self.inner.name()
    }
}

/// The order to replay, and the part of this process.
#[derive(Debug)]
pub struct Replay<'a> {
    /// The order of a run; `None` for random samples of this length.
    pub order: Option<&'a Arc<dyn SampleOrder>>,
    /// Bytes of a sample.
    pub sample_bytes: u64,
    /// Index of this process, and their count.
    pub part: (u32, u32),
    /// Index of the round, and their count: each round starts at another position of the order.
    pub round: (u64, u64),
}

/// Rows of a batch.
const MICRO_BATCH: usize = 8;

/// Prefetch window: small, so that a short run measures the device.
const WINDOW_BYTES: u64 = 32 << 20;

/// Takes batches as fast as the loader delivers them.
///
/// # Errors
/// If the loader fails.
pub fn replay(load: &ReadWorkload<'_>, replay: &Replay<'_>) -> Result<PatternRun> {
    let source = data_source(load.place)?;
    let data_bytes = source.len_bytes;
    let (order, corpus_bytes): (Arc<dyn SampleOrder>, u64) = match replay.order {
        Some(order) => {
            let corpus_bytes = order.sources().iter().map(|source| source.len_bytes).sum();
            (Arc::new(WrappedOrder::new(Arc::clone(order), source)), corpus_bytes)
        }
        None => {
            let (sample_bytes, seed) = (replay.sample_bytes, load.seed);
            (Arc::new(Shuffled { source: [source], sample_bytes, seed }), u64::MAX)
        }
    };
    let count = order.sample_count();
    let first = count / replay.round.1.max(1) * replay.round.0;
    let mut options = LoaderOptions::new(MICRO_BATCH, first.min(count)..count);
    options.ranks = Ranks::one(replay.part.0, replay.part.1);
    options.window_bytes = WINDOW_BYTES;
    options.timeout = load.timeout;
    if corpus_bytes > data_bytes {
        // Samples that are adjacent here would be far apart in the corpus, and not coalesced.
        options.gap_bytes = Some(0);
    }
    let resident = resident(load.place, open_data(load.place)?.as_ref());
    let before = Counters::now();
    let started = Instant::now();
    let mut loader = Loader::start(order, RawAssemble, options)?;
    let until = started + Duration::from_secs_f64(load.seconds);
    let mut run = PatternRun::default();
    let mut requested = started;
    while let Some(batch) = loader.next_batch()? {
        load.stop.check()?;
        let now = Instant::now();
        run.latency.add(now - requested);
        let after_s = (now - started).as_secs_f64();
        let (rows, bytes) = (batch.rows() as u64, batch.len_bytes() as u64);
        loader.recycle(batch);
        run.record_completion(after_s, bytes);
        run.ops += rows.saturating_sub(1);
        run.seconds = after_s;
        requested = Instant::now();
        if now >= until {
            break;
        }
    }
    let metrics = loader.metrics();
    let taken = Counters::since(&before);
    run.bytes = metrics.delivered_bytes;
    run.record_cpu(&taken);
    // Prefetched bytes that were not delivered count neither as moved nor as delivered.
    let wanted = metrics.moved_bytes as f64 / metrics.moved_per_wanted.max(1e-9);
    let moved = match load.place.witness {
        CounterSource::Kernel => taken.read_bytes as f64,
        _ => metrics.moved_bytes as f64,
    };
    run.moved_bytes = (moved / wanted.max(1.0) * run.bytes as f64) as u64; // fits: of bytes
    run.more.extend(resident);
    run.more.insert("first_batch_s".to_owned(), metrics.first_batch_us as f64 / 1e6);
    run.more.insert("depth".to_owned(), metrics.depth as f64);
    run.more.insert("moved_per_wanted".to_owned(), metrics.moved_per_wanted);
    Ok(run)
}
