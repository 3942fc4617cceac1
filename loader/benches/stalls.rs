//! How often training waits for data when one read in fifty comes a second late.
//!
//! ```text
//! cargo bench -p loader --bench stalls -- PREFIX [SECONDS] [SAMPLES A SECOND] [LATE PER MILLE]
//! ```
//!
//! By default 1,300 samples of 2,048 tokens a second: ten times what a model of a billion
//! parameters consumes on eight GPUs at 400 TFLOP/s each. Prints what the loader counted; `stalls`
//! are waits of more than a millisecond for a batch that was due.

#![expect(clippy::print_stdout, reason = "a benchmark prints its results")]

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use indexed::{GptIndex, GptIndexConfig, IndexedDataset, Split};
use loader::batch::{GptAssemble, GptConfig};
use loader::{GptOrder, Loader, LoaderOptions};
use storage::Storage;
use storage::sim::{FaultyStore, ReadFaults};

const SEQ_LEN: usize = 2048;
const MICRO_BATCH: usize = 8;

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
    let store: Arc<dyn Storage> = Arc::new(FaultyStore::new(store, 1, faults));
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
    // Of some 4,600 reads a second 91 are late at any time: the loader finds by itself how many it
    // must have in flight.
    let options = LoaderOptions::new(MICRO_BATCH, 0..samples);
    let mut loader = Loader::start(order, assemble, options)?;
    let mut begun = None;
    let mut taken = 0;
    while let Some(batch) = loader.next_batch()? {
        taken += batch.rows as u64;
        loader.recycle(batch);
        // The first batch starts the clock: nothing could be read ahead of it.
        let begun: &mut Instant = begun.get_or_insert_with(Instant::now);
        let due = *begun + Duration::from_secs_f64(taken as f64 / rate);
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
    }
    println!("{}", serde_json::to_string_pretty(&loader.metrics())?);
    Ok(())
}
