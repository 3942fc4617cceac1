//! `feedline ckpt bench`: measures how fast a state is saved to a folder and loaded from it,
//! compared with fio.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use ckpt::bench::{SyntheticState, time_of_files};
use ckpt::{CheckpointOptions, Checkpoints, PeakRate, SaveReport};
use clap::{Args, ValueEnum};
use serde::Serialize;
use storage::{ByteSize, Key};

use super::CkptOutput;
use crate::bench::target::check_folder;
use crate::ckpt::bench_workers;
use crate::command::Invocation;
use crate::ui::terminal::{ProgressLine, table};
use crate::ui::timeout::StopSignal;

/// Arguments of `feedline ckpt bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// A folder on the file system to measure. Files that are written there are removed.
    #[arg(value_name = "FOLDER")]
    pub folder: PathBuf,
    /// Size of the state: the weights of a GPT and its Adam state, held in memory.
    ///
    /// If the state fits into a cache of the store, the result is the rate of that cache.
    #[arg(long, value_name = "SIZE", default_value = "8GB")]
    pub bytes: ByteSize,
    /// Number of rounds; medians are reported. Fewer rounds make the result less certain.
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub rounds: u32,
    /// Files written, or batches read, at the same time.
    #[arg(long, alias = "workers", value_name = "N", default_value_t = 2)]
    pub threads: usize,
    /// Maximum size of one file.
    #[arg(long = "max-shard", alias = "shard-bytes", value_name = "SIZE", default_value = "4GiB")]
    pub shard_bytes: ByteSize,
    /// Measurements to make, separated by commas.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Row::ALL)]
    pub rows: Vec<Row>,
    /// Numbers of processes, separated by commas, that save at the same time, each its part of the
    /// state.
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [2, 4, 8])]
    pub processes: Vec<usize>,
    /// Print JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
    /// Run as one of several processes, `1/4` as the second of four: save this part of the state
    /// once, when a line arrives on standard input.
    #[arg(long, hide = true, value_parser = part)]
    pub part: Option<(usize, usize)>,
}

/// A measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Row {
    /// A durable save with checksums, compared with fio's sequential write.
    Save,
    /// A verified load, compared with fio's sequential read.
    Load,
    /// Writing the files of a save with checksums and without.
    Sums,
    /// The commit of 64 files after their data is written.
    Commit,
    /// Saves by several processes at the same time.
    Processes,
}

impl Row {
    const ALL: [Row; 5] = [Row::Save, Row::Load, Row::Sums, Row::Commit, Row::Processes];
}

/// The output of `feedline ckpt bench`; `--json` prints it as it is.
#[derive(Debug, Default, Serialize)]
struct Measured {
    folder: String,
    file_system: String,
    state_bytes: u64,
    rounds: u32,
    rates: Vec<Rate>,
    /// Extra time of the files of a save with checksums, as a share of the time without.
    sums_cost_ratio: Option<f64>,
    /// Time from the last byte of 64 files to the end of the save.
    commit_64_files_ms: Option<f64>,
    /// Peak memory of a save, beyond the state.
    staging_peak_bytes: Option<u64>,
    staging_bound_bytes: u64,
    processes: Vec<bench_workers::WorkersTotal>,
}

/// Bytes per second of one measurement, in every round.
#[derive(Debug, Serialize)]
struct Rate {
    what: &'static str,
    median_bytes_per_s: f64,
    bytes_per_s: Vec<f64>,
    /// Median of the ratios to fio in each round.
    share_of_fio: Option<f64>,
}

pub(crate) fn run(
    args: &BenchArgs,
    invocation: &Invocation,
    line: &mut ProgressLine,
) -> Result<CkptOutput> {
    let mut bench = Bench::new(args, invocation)?;
    if let Some((part, parts)) = args.part {
        return bench.one_part(part, parts);
    }
    bench.stop = StopSignal::at_signals()?;
    let measured = bench.measure(line);
    line.clear();
    bench.remove()?;
    bench.stop.check()?;
    let measured = measured?;
    CkptOutput::new(args.json, &measured, measured.text(), true)
}

/// Common state of the measurements.
struct Bench<'a> {
    args: &'a BenchArgs,
    invocation: &'a Invocation,
    /// A temporary folder in the one on the command line.
    folder: PathBuf,
    options: CheckpointOptions,
    /// At a signal, the current operation is finished, and all files are removed.
    stop: StopSignal,
}

impl<'a> Bench<'a> {
    fn new(args: &'a BenchArgs, invocation: &'a Invocation) -> Result<Self> {
        ensure!(args.rounds > 0, "cannot use --rounds 0: expected at least 1");
        ensure!(args.threads > 0, "cannot use --threads 0: expected at least 1");
        if args.part.is_none() {
            check_folder(&args.folder.to_string_lossy(), &args.folder)?;
        }
        let folder = args.folder.join(format!(".bench-ckpt-{}", std::process::id()));
        let (threads, shard_bytes_max) = (args.threads, args.shard_bytes.0);
        let options =
            CheckpointOptions { threads, shard_bytes_max, ..CheckpointOptions::default() };
        Ok(Bench { args, invocation, folder, options, stop: StopSignal::default() })
    }

    fn steps(&self, options: CheckpointOptions) -> Result<Checkpoints> {
        let url = self.folder.to_str().context("cannot use the folder: name is not UTF-8")?;
        Ok(Checkpoints::open(storage::open_url(url)?, Key::new("run")?).with_options(options))
    }

    fn measure(&self, line: &mut ProgressLine) -> Result<Measured> {
        let has = |row| self.args.rows.contains(&row);
        let url = self.folder.to_str().context("cannot use the folder: name is not UTF-8")?;
        let store = storage::open_url(url)?;
        let mut measured = Measured {
            folder: self.args.folder.display().to_string(),
            file_system: store.profile().file_system.clone(),
            rounds: self.args.rounds,
            staging_bound_bytes: self.options.staging_bytes_max,
            ..Measured::default()
        };
        line.show("generating a state");
        let mut state = SyntheticState::gpt(self.args.bytes.0);
        measured.state_bytes = state.bytes();
        if has(Row::Save) || has(Row::Load) {
            self.save_and_load(&mut state, &mut measured, line)?;
        }
        if has(Row::Sums) {
            measured.sums_cost_ratio = Some(self.sums(&state, line)?);
        }
        if has(Row::Commit) {
            measured.commit_64_files_ms = Some(self.commit(&state, line)?);
        }
        drop(state);
        if has(Row::Processes) {
            measured.processes =
                bench_workers::all(self.args, self.invocation, &self.folder, &self.stop, line)?;
        }
        let peak = |what| measured.rates.iter().find(|rate| rate.what == what);
        if let (Some(write), Some(read)) =
            (peak(crate::bench::fio::checkpoint::WRITE), peak(crate::bench::fio::checkpoint::READ))
        {
            let (write, read) = (write.median_bytes_per_s, read.median_bytes_per_s);
            PeakRate::keep(&*store, write as u64, read as u64)?;
        }
        Ok(measured)
    }

    fn save_and_load(
        &self,
        state: &mut SyntheticState,
        measured: &mut Measured,
        line: &mut ProgressLine,
    ) -> Result<()> {
        let steps = self.steps(self.options)?;
        let bytes = state.bytes();
        let [mut fio_write, mut save, mut fio_read, mut load] = [const { Vec::new() }; 4];
        for round in 1..=self.args.rounds {
            let mut show = |what: &str| {
                line.show(&format!("round {round}: {what}"));
                self.stop.check()
            };
            let file = self.folder.join("fio");
            // The second of the two may find the device warmed up or throttled.
            let fio_turn = usize::from(round % 2 == 0);
            for turn in 0..2 {
                if turn == fio_turn {
                    show("fio write")?;
                    fio_write.extend(crate::bench::fio::checkpoint::write(&file, bytes)?);
                    continue;
                }
                show("save")?;
                let watch = MemoryWatch::start()?;
                let report = steps.save(u64::from(round), &state.tensors(), &[], ().into())?;
                let taken = watch.stop()?;
                measured.staging_peak_bytes = measured.staging_peak_bytes.max(Some(taken));
                save.push(rate(bytes, report.total()));
            }
            for turn in (0..2).filter(|_| self.args.rows.contains(&Row::Load)) {
                if turn == fio_turn {
                    show("fio read")?;
                    fio_read.extend(crate::bench::fio::checkpoint::read(&file, bytes)?);
                    continue;
                }
                drop_pages(&self.folder);
                show("load")?;
                let started = Instant::now();
                steps.open_step(u64::from(round))?.read_tensors(state.reads())?;
                load.push(rate(bytes, started.elapsed()));
            }
            steps.retain(1)?;
            remove_file(&file)?;
        }
        for (what, ours, theirs) in [
            ("save, durable", save, (crate::bench::fio::checkpoint::WRITE, fio_write)),
            ("load, verified", load, (crate::bench::fio::checkpoint::READ, fio_read)),
        ] {
            let (fio, theirs) = theirs;
            measured.rates.extend(Rate::new(what, ours, Some(&theirs)));
            measured.rates.extend(Rate::new(fio, theirs, None));
        }
        Ok(())
    }

    /// Median of the ratios of all rounds: devices drift.
    fn sums(&self, state: &SyntheticState, line: &mut ProgressLine) -> Result<f64> {
        let steps = self.steps(self.options)?;
        let tensors = state.tensors();
        let mut ratios = Vec::new();
        for round in 0..2 * self.args.rounds {
            line.show(&format!("round {round}: files with and without checksums"));
            self.stop.check()?;
            // The second of the two may find the device warmed up or throttled.
            let first = round % 2 == 0;
            let times = [first, !first].map(|sums| time_of_files(&steps, &tensors, sums));
            let [a, b] = times;
            let (with, without) = if first { (a?, b?) } else { (b?, a?) };
            ratios.push(with.as_secs_f64() / without.as_secs_f64() - 1.0);
        }
        Ok(median(&ratios))
    }

    fn commit(&self, state: &SyntheticState, line: &mut ProgressLine) -> Result<f64> {
        // Slightly more than a 64th, because tensors are not cut to fill files.
        let shard_bytes_max = state.bytes() / 58;
        let steps = self.steps(CheckpointOptions { shard_bytes_max, ..self.options })?;
        let mut after = Vec::new();
        for round in 0..self.args.rounds {
            line.show(&format!("round {round}: 64 files"));
            self.stop.check()?;
            let step = u64::from(round) + 1_000_000;
            let SaveReport { sync, commit, .. } =
                steps.save(step, &state.tensors(), &[], ().into())?;
            after.push((sync + commit).as_secs_f64() * 1e3);
            steps.retain(1)?;
        }
        Ok(median(&after))
    }

    fn one_part(&self, part: usize, parts: usize) -> Result<CkptOutput> {
        let steps = self.steps(self.options)?;
        let state = SyntheticState::part_of_gpt(self.args.bytes.0, part, parts);
        writeln!(io::stdout(), "ready")?;
        ensure!(
            io::stdin().read_line(&mut String::new())? > 0,
            "cannot read standard input: expected a line, found end of file"
        );
        let started = Instant::now();
        let report = steps.save(1, &state.tensors(), &[], ().into())?;
        let seconds = started.elapsed().as_secs_f64();
        writeln!(io::stdout(), "done {} {seconds}", report.bytes)?;
        self.remove()?;
        CkptOutput::new(true, &(), String::new(), true)
    }

    fn remove(&self) -> Result<()> {
        match std::fs::remove_dir_all(&self.folder) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e.into()),
            _ => Ok(()),
        }
    }
}

impl Rate {
    fn new(what: &'static str, bytes_per_s: Vec<f64>, fio: Option<&[f64]>) -> Option<Self> {
        let median_bytes_per_s = (!bytes_per_s.is_empty()).then(|| median(&bytes_per_s))?;
        let shares = |fio: &[f64]| -> Vec<f64> {
            bytes_per_s.iter().zip(fio).map(|(ours, theirs)| ours / theirs).collect()
        };
        let shares = fio.map(shares).filter(|shares| !shares.is_empty());
        let share_of_fio = shares.map(|shares| median(&shares));
        Some(Rate { what, median_bytes_per_s, bytes_per_s, share_of_fio })
    }
}

impl Measured {
    fn text(&self) -> String {
        let mut rows = Vec::new();
        let gb = |rate: f64| format!("{:.2} GB/s", rate / 1e9);
        for Rate { what, median_bytes_per_s, share_of_fio, .. } in &self.rates {
            let share = share_of_fio.map_or_else(String::new, |share| format!("{share:.3} of fio"));
            rows.push(vec![(*what).to_owned(), gb(*median_bytes_per_s), share]);
        }
        let mut add = |what: &str, value: String, beside: String| {
            rows.push(vec![what.to_owned(), value, beside]);
        };
        if let Some(cost) = self.sums_cost_ratio {
            add("cost of checksums", format!("{:.1} %", 100.0 * cost), String::new());
        }
        if let Some(ms) = self.commit_64_files_ms {
            add("sync and commit of 64 files", format!("{ms:.1} ms"), String::new());
        }
        if let Some(peak) = self.staging_peak_bytes {
            let bound = format!("limit {}", ByteSize(self.staging_bound_bytes));
            add("memory of a save", ByteSize(peak).to_string(), bound);
        }
        for bench_workers::WorkersTotal { processes, median_bytes_per_s, of_one } in &self.processes
        {
            let beside = format!("{of_one:.3} of one process");
            add(&format!("{processes} processes"), gb(*median_bytes_per_s), beside);
        }
        let head = format!(
            "state of a GPT, {}, in {} ({}), rounds: {}; values are medians\n",
            ByteSize(self.state_bytes),
            self.folder,
            self.file_system,
            self.rounds
        );
        head + &table(&["measurement", "median", "comparison"], &rows)
    }
}

/// Samples the memory of this process every few milliseconds.
pub(crate) struct MemoryWatch {
    before: u64,
    stop: std::sync::Arc<AtomicBool>,
    sampler: thread::JoinHandle<u64>,
}

impl MemoryWatch {
    pub(crate) fn start() -> Result<Self> {
        let stop = std::sync::Arc::new(AtomicBool::new(false));
        let stop_flag = std::sync::Arc::clone(&stop);
        let before = resident_bytes()?;
        let sample = move || {
            let mut most = 0;
            while !stop_flag.load(Ordering::Relaxed) {
                most = most.max(resident_bytes().unwrap_or(0));
                thread::sleep(Duration::from_millis(5));
            }
            most
        };
        let sampler = thread::Builder::new().name("memory".to_owned()).spawn(sample)?;
        Ok(MemoryWatch { before, stop, sampler })
    }

    /// Peak memory beyond that at the start, in bytes.
    pub(crate) fn stop(self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        let most =
            self.sampler.join().ok().context("cannot measure memory: the thread panicked")?;
        Ok(most.saturating_sub(self.before))
    }
}

/// Anonymous memory of this process, without pages of files.
fn resident_bytes() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    Ok(kib.context("cannot read /proc/self/status: no RssAnon")? << 10)
}

/// Drops all files below from the page cache, with a tool that every system has.
fn drop_pages(folder: &Path) {
    let drop =
        "find \"$0\" -type f -exec dd of={} oflag=nocache conv=notrunc,fdatasync count=0 \\;";
    // Only a file system without direct I/O caches their pages. On such a file system, dropping
    // them is best effort.
    let _ = Command::new("sh").args(["-c", drop]).arg(folder).stderr(Stdio::null()).status();
}

pub(crate) fn remove_file(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e.into()),
        _ => Ok(()),
    }
}

fn part(text: &str) -> Result<(usize, usize), String> {
    let parts = text.split_once('/').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    parts.filter(|(part, parts)| part < parts).ok_or_else(|| "expected PART/PARTS".to_owned())
}

pub(super) fn rate(bytes: u64, took: Duration) -> f64 {
    bytes as f64 / took.as_secs_f64().max(1e-9)
}

pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = (sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
    (low + high) / 2.0
}
