//! Samples a second of 2,048 tokens, shuffled and in order, cold and warm, against fio.
//!
//! ```text
//! cargo bench -p loader --bench loader -- [FOLDER] [GIB] [SECONDS] [DEPTH] [ROUNDS]
//! ```
//!
//! With ROUNDS each of these reads is timed as often with and without verification of the blocks,
//! in turn, and the median ratio is printed instead. DEPTH 0 is the default.
//!
//! The corpus is generated in the folder and stays there for later runs. Cold means that the file
//! was dropped from the page cache before. fio, if installed, reads the same file in blocks of the
//! mean size of the loader's requests. The bytes that the device moved are from its own counters.

#![expect(clippy::print_stdout, reason = "a benchmark prints its results")]

use std::error::Error;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use indexed::{Builder, Dtype, GptIndex, GptIndexConfig, IndexedDataset, Split};
use loader::batch::{GptAssemble, GptConfig};
use loader::{DataFile, GptOrder, Loader, LoaderOptions, PieceRef, SampleOrder};
use storage::{Key, rate_text};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const SEQ_LEN: usize = 2048;
const MICRO_BATCH: usize = 8;

struct Bench {
    bin: PathBuf,
    time: Duration,
    depth: Option<usize>,
}

/// The result of a read of some seconds.
struct Ran {
    line: String,
    /// Samples a second.
    rate: f64,
    /// Microseconds of processors a sample.
    cpu_us: f64,
    /// Bytes of a request, on average.
    block: u64,
}

fn main() -> Result<()> {
    // Cargo passes `--bench`.
    let mut args = std::env::args().skip(1).filter(|arg| !arg.starts_with("--"));
    let folder = args.next().unwrap_or_else(|| ".".to_owned());
    let gib: u64 = args.next().map_or(Ok(1), |text| text.parse())?;
    let seconds = args.next().map_or(Ok(10), |text| text.parse())?;
    let depth = args.next().map(|text| text.parse()).transpose()?.filter(|&depth| depth > 0);
    let rounds: usize = args.next().map_or(Ok(0), |text| text.parse())?;
    let dataset = corpus(&folder, gib << 30)?;
    let bin = Path::new(&folder).join(format!("corpus_{gib}.bin"));
    let bench = Bench { bin, time: Duration::from_secs(seconds), depth };
    let config = GptIndexConfig {
        dataset_path: "corpus".to_owned(),
        split: Some("1,0,0".to_owned()),
        seq_len: SEQ_LEN as u64,
        seed: 1234,
        num_samples: None,
        add_extra_token: true,
        drop_last_partial_valid: true,
        tokenizer: serde_json::json!({}),
    };
    let index = Arc::new(GptIndex::build(&dataset, Split::Train, &config)?);
    let shuffled: Arc<dyn SampleOrder> = Arc::new(GptOrder::new(dataset.clone(), index, SEQ_LEN)?);
    let in_order: Arc<dyn SampleOrder> = Arc::new(InOrder([DataFile::bin_of(&dataset)?]));
    let cases = [
        ("shuffled, cold", true),
        ("shuffled, cache not dropped", false),
        ("in order, cold", true),
    ];
    if rounds > 0 {
        for ((what, cold), order) in cases.into_iter().zip([&shuffled, &shuffled, &in_order]) {
            bench.compare(what, order, cold, rounds)?;
        }
        return Ok(());
    }
    let shown = |(what, cold), order| -> Result<u64> {
        let ran = bench.run(order, cold, true)?;
        println!("{what}: {}", ran.line);
        Ok(ran.block)
    };
    let block = shown(cases[0], &shuffled)?;
    bench.fio("randread", block)?;
    shown(cases[1], &shuffled)?;
    shown(cases[2], &in_order)?;
    bench.fio("read", 1 << 20)?;
    Ok(())
}

/// The tokens of a file in its order.
#[derive(Debug)]
struct InOrder([DataFile; 1]);

impl SampleOrder for InOrder {
    fn sources(&self) -> &[DataFile] {
        &self.0
    }

    fn sample_count(&self) -> u64 {
        (self.0[0].len_bytes / 2 - 1) / SEQ_LEN as u64
    }

    fn pieces(&self, sample: u64, into: &mut Vec<PieceRef>) -> loader::Result<()> {
        let seq_bytes = 2 * SEQ_LEN as u64;
        let (offset_bytes, len_bytes) = (sample * seq_bytes, seq_bytes + 2);
        into.push(PieceRef { file: 0, offset_bytes, len_bytes });
        Ok(())
    }

    fn name(&self) -> String {
        "a file in its order".to_owned()
    }
}

/// Documents of 100 to 1,100 tokens.
fn corpus(folder: &str, bytes: u64) -> Result<Arc<IndexedDataset>> {
    let store = storage::open_url(folder)?;
    let key = Key::new(format!("corpus_{}", bytes >> 30))?;
    if store.open(&key.with_suffix(".idx")?).is_err() {
        let mut builder = Builder::create(&store, &key, Dtype::U16)?;
        let noise: Vec<u32> = (0..1100_u32).map(|at| at.wrapping_mul(40_503) >> 16).collect();
        let (mut made, mut state) = (0, 7_u64);
        while made < bytes {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let len = 100 + (state >> 33) as usize % 1000;
            builder.add_sequence(&noise[..len])?;
            builder.end_document()?;
            made += 2 * len as u64;
        }
        builder.finish()?;
    }
    Ok(Arc::new(IndexedDataset::open(&store, &key)?))
}

impl Bench {
    /// Prints medians of the rates with and without verification of the blocks, and the median of
    /// the ratios of two consecutive runs: a disk may be slower for seconds, which affects both.
    fn compare(
        &self,
        what: &str,
        order: &Arc<dyn SampleOrder>,
        cold: bool,
        rounds: usize,
    ) -> Result<()> {
        let mut rates = [Vec::new(), Vec::new()];
        let mut cpus = [Vec::new(), Vec::new()];
        for round in 0..2 * rounds {
            // Each goes first equally often: the order alternates between pairs.
            let verify = (round + round / 2) % 2 == 0;
            let ran = self.run(order, cold, verify)?;
            rates[usize::from(verify)].push(ran.rate);
            cpus[usize::from(verify)].push(ran.cpu_us);
        }
        let median = |mut values: Vec<f64>| {
            values.sort_by(f64::total_cmp);
            values[values.len() / 2]
        };
        let ratio = median(rates[1].iter().zip(&rates[0]).map(|(with, of)| with / of).collect());
        let [without, with] = rates.map(median);
        let [cpu_without, cpu_with] = cpus.map(median);
        println!(
            "{what}: {with:.0} samples/s with verification, {without:.0} without, {ratio:.3} of a \
             pair; {cpu_with:.1} and {cpu_without:.1} us CPU a sample"
        );
        Ok(())
    }

    fn run(&self, order: &Arc<dyn SampleOrder>, cold: bool, verify: bool) -> Result<Ran> {
        if cold {
            drop_from_cache(&self.bin)?;
        }
        let mut options = LoaderOptions::new(MICRO_BATCH, 0..order.sample_count());
        (options.depth, options.verify) = (self.depth, verify);
        let assemble = GptAssemble::new(GptConfig::new(SEQ_LEN), vec![Dtype::U16])?;
        let moved_before = sectors_read(&self.bin)?;
        let (cpu_before, started) = (cpu_seconds()?, Instant::now());
        let mut loader = Loader::start(Arc::clone(order), assemble, options)?;
        while started.elapsed() < self.time {
            let Some(batch) = loader.next_batch()? else { break };
            loader.recycle(batch);
        }
        let (took, metrics) = (started.elapsed(), loader.metrics());
        let cpu = cpu_seconds()? - cpu_before;
        drop(loader);
        let moved = (sectors_read(&self.bin)? - moved_before) * 512;
        // Bytes read ahead count as well: the device has moved them.
        let wanted = metrics.moved_bytes as f64 / metrics.moved_per_wanted.max(1e-9);
        let rate = metrics.samples as f64 / took.as_secs_f64();
        let cpu_us = cpu * 1e6 / metrics.samples as f64;
        let line = format!(
            "{rate:.0} samples/s, {} wanted, {:.2} times moved, {cpu_us:.1} us CPU a sample, first \
             batch after {:.1} ms\n  {}",
            rate_text(wanted as u64, took),
            moved as f64 / wanted,
            metrics.first_batch_us as f64 / 1000.0,
            serde_json::to_string(&metrics)?
        );
        Ok(Ran { line, rate, cpu_us, block: (wanted / metrics.reads.max(1) as f64) as u64 })
    }

    fn fio(&self, pattern: &str, block: u64) -> Result<()> {
        let block = block.next_multiple_of(512);
        let depth = self.depth.unwrap_or(64);
        let output = Command::new("fio")
            .args(["--name=read", "--ioengine=io_uring", "--direct=1", "--output-format=json"])
            .args(["--time_based", "--readonly", "--norandommap"])
            .arg(format!("--filename={}", self.bin.display()))
            .args([
                format!("--rw={pattern}"),
                format!("--bs={block}"),
                format!("--iodepth={depth}"),
            ])
            .arg(format!("--runtime={}", self.time.as_secs()))
            .output();
        let Ok(output) = output else {
            println!("fio: not installed");
            return Ok(());
        };
        let report: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        let read = &report["jobs"][0]["read"];
        let (iops, rate) = (read["iops"].as_f64(), read["bw_bytes"].as_u64());
        println!(
            "fio {pattern}, {block} bytes, depth {depth}: {:.0} reads/s, {}",
            iops.unwrap_or(0.0),
            rate_text(rate.unwrap_or(0), Duration::from_secs(1))
        );
        Ok(())
    }
}

fn drop_from_cache(path: &Path) -> Result<()> {
    // `dd` can drop pages, std cannot.
    let of = format!("of={}", path.display());
    let done = Command::new("dd")
        .args([&of, "oflag=nocache", "conv=notrunc,fdatasync", "count=0", "status=none"])
        .status()?;
    if done.success() { Ok(()) } else { Err("dd could not drop the file from the cache".into()) }
}

/// Sectors that the device of a file has read since the system was started.
fn sectors_read(path: &Path) -> Result<u64> {
    let device = std::fs::metadata(path)?.dev();
    let (major, minor) = (device >> 8 & 0xfff, device & 0xff | device >> 12 & 0xfff00);
    let stat = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/stat"))?;
    Ok(stat.split_whitespace().nth(2).ok_or("the device has no counters")?.parse()?)
}

/// User and system time of this process, in seconds.
fn cpu_seconds() -> Result<f64> {
    const TICKS_A_SECOND: f64 = 100.0;
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let after_name = stat.rsplit_once(')').ok_or("no name in /proc/self/stat")?.1;
    let ticks = after_name.split_whitespace().skip(11).take(2);
    Ok(ticks.map(|text| text.parse::<f64>().unwrap_or(0.0)).sum::<f64>() / TICKS_A_SECOND)
}
