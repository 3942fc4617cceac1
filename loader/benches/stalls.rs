//! How often training waits for data when one read in fifty completes a second late.
//!
//! ```text
//! cargo bench -p loader --bench stalls -- PREFIX [SECONDS] [SAMPLES A SECOND] [LATE PER MILLE]
//! ```
//!
//! By default 1,300 samples of 2,048 tokens a second: ten times what a model of a billion
//! parameters consumes on eight GPUs at 400 TFLOP/s each. Prints the metrics of the loader;
//! `stalls` are waits of more than a millisecond for a batch. A second thread only sleeps, a
//! millisecond at a time: where it wakes late too, other work has delayed this process.

#![expect(clippy::print_stdout, reason = "a benchmark prints its results")]

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use indexed::{GptIndex, GptIndexConfig, IndexedDataset, Split};
use loader::batch::{GptAssemble, GptConfig};
use loader::{GptOrder, Loader, LoaderOptions};
use storage::Storage;
use storage::testing::fault_store::{ReadFaultLayer, ReadFaults};

const SEQ_LEN: usize = 2048;
const MICRO_BATCH: usize = 8;

/// Shorter waits are ignored.
const LONG: Duration = Duration::from_millis(1);

fn main() -> Result<(), Box<dyn Error>> {
    // Cargo passes `--bench`.
    let mut args = std::env::args().skip(1).filter(|arg| !arg.starts_with("--"));
    let Some(prefix) = args.next() else {
        println!("stalls: no PREFIX was given; nothing to measure");
        return Ok(());
    };
    let seconds: f64 = args.next().map_or(Ok(60.0), |text| text.parse())?;
    let rate: f64 = args.next().map_or(Ok(1300.0), |text| text.parse())?;
    let late_per_mille = args.next().map_or(Ok(20), |text| text.parse())?;
    let (store, key) = storage::locate(&prefix)?;
    let late = Duration::from_secs(1);
    let faults = ReadFaults { late_per_mille, late, ..ReadFaults::default() };
    let store: Arc<dyn Storage> = Arc::new(ReadFaultLayer::new(store, 1, faults));
    let dataset = Arc::new(IndexedDataset::open(&store, &key)?);
    let samples = (seconds * rate) as u64;
    let config = GptIndexConfig {
        dataset_path: prefix,
        split: Some("1,0,0".to_owned()),
        seq_len: SEQ_LEN as u64,
        seed: 1234,
        num_samples: Some(samples),
        add_extra_token: true,
        drop_last_partial_valid: true,
        tokenizer: serde_json::json!({}),
    };
    let index = Arc::new(GptIndex::build(&dataset, Split::Train, &config)?);
    let assemble = GptAssemble::new(GptConfig::new(SEQ_LEN), vec![dataset.dtype()])?;
    let order = Arc::new(GptOrder::new(dataset, index, SEQ_LEN)?);
    // Of some 4,600 reads a second 91 are late at any time: the loader tunes its queue depth.
    let options = LoaderOptions::new(MICRO_BATCH, 0..samples);
    let mut loader = Loader::start(order, assemble, options)?;
    let is_done = Arc::new(AtomicBool::new(false));
    let sleeper = std::thread::spawn({
        let is_done = Arc::clone(&is_done);
        move || oversleeps(&is_done)
    });
    let mut started = None;
    let mut taken = 0;
    let mut waits: Vec<(Instant, Duration)> = Vec::new();
    loop {
        let asked = Instant::now();
        let Some(batch) = loader.next_batch()? else { break };
        // The wait for the first batch is start-up.
        if taken > 0 && asked.elapsed() > LONG {
            waits.push((asked, asked.elapsed()));
        }
        taken += batch.rows as u64;
        loader.recycle(batch);
        // The first batch starts the clock: nothing could be read ahead of it.
        let started: &mut Instant = started.get_or_insert_with(Instant::now);
        let due = *started + Duration::from_secs_f64(taken as f64 / rate);
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
    }
    is_done.store(true, Ordering::Relaxed);
    let late = sleeper.join().map_err(|_| "the thread that sleeps panicked")?;
    println!("{}", serde_json::to_string_pretty(&loader.metrics())?);
    print_waits(started, &waits, &late);
    Ok(())
}

/// Sleeps until `is_done` is set. Returns when it woke late, and by how much.
fn oversleeps(is_done: &AtomicBool) -> Vec<(Instant, Duration)> {
    let mut late = Vec::new();
    while !is_done.load(Ordering::Relaxed) {
        let started = Instant::now();
        std::thread::sleep(LONG);
        let over = started.elapsed().saturating_sub(LONG);
        if over > LONG {
            late.push((started, over));
        }
    }
    late
}

/// Each wait, and by how much the thread that only sleeps was late in the same 20 ms.
fn print_waits(
    started: Option<Instant>,
    waits: &[(Instant, Duration)],
    late: &[(Instant, Duration)],
) {
    let near = Duration::from_millis(20);
    let longest = late.iter().map(|(_, over)| *over).max().unwrap_or_default();
    println!("a thread that only sleeps woke late {} times, by {longest:.1?} at most", late.len());
    let Some(started) = started else { return };
    for (asked, wait) in waits {
        let over = late
            .iter()
            .filter(|(at, over)| *at <= *asked + *wait + near && *at + *over + near >= *asked);
        let over = over.map(|(_, over)| *over).max();
        let over = over.map_or("was not late".to_owned(), |over| format!("was late by {over:.1?}"));
        println!(
            "at {:.3} s: waited {wait:.1?}; the sleeping thread {over}",
            (*asked - started).as_secs_f64()
        );
    }
}
