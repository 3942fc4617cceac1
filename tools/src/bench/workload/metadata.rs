//! Metadata: hundreds of small objects, and the start of all ranks at once.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::Result;
use storage::{Key, RangeRead};

use crate::bench::histogram::Histogram;
use crate::bench::measure::counters::Counters;
use crate::bench::patterns::PatternRun;
use crate::bench::target::TargetFolder;
use crate::bench::workload::concurrent::on_threads;

/// Size of an object: less than a block of any file system.
const OBJECT_BYTES: usize = 1000;

/// Operations on the objects, in this order.
const STEPS: [&str; 6] = ["create", "stat", "open", "read", "list", "delete"];

/// Creates, stats, opens, reads, lists and removes `files` objects, on `threads` threads with a
/// folder each.
///
/// # Errors
/// If the store fails.
pub fn names(
    place: &TargetFolder,
    files: usize,
    threads: usize,
    member: usize,
) -> Result<PatternRun> {
    let before = Counters::now();
    let barrier = Barrier::new(threads);
    let each = files.div_ceil(threads);
    let folder = |nth| format!("names-{member}-{nth}");
    let done = on_threads(threads, |nth| one(place, &folder(nth), each, &barrier))?;
    let mut run = PatternRun::default();
    for (nth, step) in STEPS.iter().enumerate() {
        let mut seconds = 0_f64;
        let mut ops = 0;
        for steps in &done {
            let (latency, took): &(Histogram, Duration) = &steps[nth];
            run.latency.join(latency);
            seconds = seconds.max(took.as_secs_f64());
            // A listing is one operation that returns many objects.
            ops += if *step == "list" { each as u64 } else { latency.count() };
        }
        run.more.insert(format!("{step}_per_s"), ops as f64 / seconds.max(1e-9));
        run.seconds += seconds;
    }
    run.ops = run.latency.count();
    run.bytes = (each * done.len() * OBJECT_BYTES) as u64;
    run.record_cpu(&Counters::since(&before));
    Ok(run)
}

/// Latencies of the operations of each step, and the time of the step.
fn one(
    place: &TargetFolder,
    folder: &str,
    count: usize,
    barrier: &Barrier,
) -> Result<Vec<(Histogram, Duration)>> {
    let store = place.store.as_ref();
    let names = (0..count).map(|nth| place.key(&format!("{folder}/object-{nth:06}")));
    let names = names.collect::<storage::Result<Vec<_>>>()?;
    let folder = place.key(folder)?;
    let mut bytes = vec![7; OBJECT_BYTES];
    let mut failed = None;
    let mut steps = Vec::with_capacity(STEPS.len());
    for step in STEPS {
        // All threads are in the same step, also after an error of one.
        barrier.wait();
        let started = Instant::now();
        let mut latency = Histogram::default();
        let count = if failed.is_some() {
            0
        } else if step == "list" {
            1
        } else {
            names.len()
        };
        for name in &names[..count.min(names.len())] {
            let started = Instant::now();
            let done = match step {
                "create" => storage::write_all(store, name, &bytes).map(drop),
                "stat" => stat(place, name),
                "open" => store.open(name).map(drop),
                "read" => store.open(name).and_then(|object| {
                    object.read_many(&mut [RangeRead { offset: 0, buf: &mut bytes }])
                }),
                "list" => store.list(&folder).map(drop),
                _ => store.delete(name),
            };
            latency.add(started.elapsed());
            if let Err(error) = done {
                failed = Some(error);
                break;
            }
        }
        steps.push((latency, started.elapsed()));
    }
    match failed {
        Some(error) => Err(place.with_hint(error)),
        None => {
            store.delete_folder(&folder)?;
            Ok(steps)
        }
    }
}

/// Stats an object; in a bucket, by opening it.
fn stat(place: &TargetFolder, name: &Key) -> storage::Result<()> {
    match place.path_of(name) {
        Some(path) => {
            let found = std::fs::metadata(&path).map(drop);
            found.map_err(|e| storage::Error::from_io("stat", path.display().to_string(), e))
        }
        None => place.store.open(name).map(drop),
    }
}

/// Size of the index that every rank reads at its start: that of 80,000 documents.
const INDEX_BYTES: usize = 1 << 20;
const INDEX: &str = "tokens.idx";

/// Writes the index that [`start`] reads, in addition to the data.
///
/// # Errors
/// If the store fails.
pub fn prepare_start(place: &TargetFolder) -> Result<()> {
    let mut index = vec![0; INDEX_BYTES];
    crate::bench::workload::reads::fill(&mut index, 1, 0);
    let written = storage::write_all(place.store.as_ref(), &place.key(INDEX)?, &index);
    written.map(drop).map_err(|error| place.with_hint(error))
}

/// Runs `ranks` ranks, each with its own store, that open index and data, and read the index and a
/// sample.
///
/// # Errors
/// If the store fails.
pub fn start(place: &TargetFolder, ranks: usize, sample_bytes: usize) -> Result<PatternRun> {
    let before = Counters::now();
    let rank = |nth: usize| -> Result<(Instant, Instant)> {
        let started = Instant::now();
        let store = place.reopen()?;
        storage::read_all(store.as_ref(), &place.key(INDEX)?)?;
        let data = store.open(&crate::bench::workload::reads::data_key(place)?)?;
        let mut sample = vec![0; sample_bytes];
        let places = data.len_bytes().saturating_sub(sample_bytes as u64) + 1;
        let offset = crate::bench::random::word(nth as u64, 0) % places;
        data.read_many(&mut [RangeRead { offset, buf: &mut sample }])?;
        Ok((started, Instant::now()))
    };
    let done = on_threads(ranks, rank)?;
    let mut run = PatternRun::default();
    let started = done.iter().map(|(started, _)| *started).min();
    for (_, ended) in done {
        let took = started.map_or(Duration::ZERO, |started| ended - started);
        run.latency.add(took);
        run.seconds = run.seconds.max(took.as_secs_f64());
        run.ops += 1;
        run.bytes += (INDEX_BYTES + sample_bytes) as u64;
    }
    run.more.insert("first_rank_s".to_owned(), run.latency.quantile_ms(0.0) / 1e3);
    run.record_cpu(&Counters::since(&before));
    Ok(run)
}
