//! `feedline bench`: measures stores with the requests of a training run, and recommends a use of
//! each store.
//!
//! In reading order: [`demand`] computes the requirements of a run, [`patterns`] lists its I/O
//! patterns; [`target`] opens and cleans targets, [`rounds`] measures every pattern on every target
//! in turn, with [`workload::reads`], [`workload::replay`], [`workload::saves`] and
//! [`workload::metadata`]. [`processes`] synchronizes several processes, [`crate::ui::timeout`]
//! guards against stuck stores, and [`fio::comparison`] runs the same requests with fio.
//! [`measure::validity`] judges how far a number can be trusted, [`measure::stats`] which
//! differences are significant, [`report::verdict`] derives recommendations; [`mod@report`],
//! [`report::tables`] and [`report::page`] show the results.

pub mod chart;
pub mod demand;
pub mod fio;
pub mod histogram;
pub mod measure;
pub mod patterns;
pub mod processes;
pub mod random;
pub mod report;
pub mod rounds;
pub mod target;
pub mod workload;

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::available_parallelism;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use clap::Args;
use recipe::config::Config;
use storage::simulate::Simulation;
use storage::{ByteSize, Location, TimeSpan};

use crate::command::Invocation;
use crate::ui::simulate::Simulate;
use crate::ui::terminal::ProgressLine;
use crate::ui::timeout::{StopSignal, timeout_seconds};
use demand::Need;
use fio::comparison::FioPairs;
use patterns::Pattern;
use processes::BenchProcesses;
use report::{Method, PatternReport, Report, TargetReport};
use rounds::{Measured, Session, Settings};
use target::TargetFolder;
use workload::saves::WriterBuffers;

/// Arguments of `feedline bench`.
#[derive(Args, Clone, Debug)]
pub struct BenchArgs {
    /// Folders, mounts or s3:// URLs that exist.
    ///
    /// All files are written to one new folder of each target, which is removed at the end.
    #[arg(value_name = "TARGET", required = true, num_args = 1..=report::page::TARGETS_MAX)]
    pub targets: Vec<String>,
    /// Config of a run, in place of --parameters and --seq-length.
    ///
    /// The benchmark then replays the sample order of the run, for which it reads the .idx files.
    #[arg(long = "config", alias = "from", value_name = "CONFIG.toml", help_heading = "Workload")]
    #[arg(conflicts_with_all = ["model", "seq"])]
    pub from: Option<String>,
    /// Parameters of the model, such as 350m or 11b.
    #[arg(long = "parameters", alias = "model", value_name = "N", default_value = "1b")]
    #[arg(help_heading = "Workload")]
    pub model: String,
    /// Accelerators of the cluster. More need a higher sample rate.
    #[arg(long, value_name = "N", default_value_t = 64, help_heading = "Workload")]
    pub ranks: u64,
    /// Tokens per sample.
    #[arg(long = "seq-length", alias = "seq", value_name = "TOKENS", default_value_t = 2048)]
    #[arg(help_heading = "Workload")]
    pub seq: u64,
    /// Floating-point operations per second that one accelerator reaches in training.
    ///
    /// More need a higher sample rate.
    #[arg(long, value_name = "RATE", default_value_t = 4e14, help_heading = "Workload")]
    pub flops: f64,
    /// Patterns to measure, separated by commas [default: all]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PATTERN")]
    #[arg(help_heading = "Measurement")]
    pub patterns: Vec<Pattern>,
    /// Number of rounds, after one warm-up round. With fewer than 5, no difference is significant.
    #[arg(long = "rounds", alias = "runs", value_name = "N", default_value_t = 5)]
    #[arg(help_heading = "Measurement")]
    pub runs: usize,
    /// Length of one measurement, where it can be chosen. Shorter ones miss stalls.
    #[arg(long = "duration", alias = "seconds", value_name = "TIME", default_value = "5s")]
    #[arg(value_parser = duration_seconds, help_heading = "Measurement")]
    pub seconds: f64,
    /// Size of the file to read. If it fits into caches of the servers, the result is their rate.
    #[arg(long, value_name = "SIZE", default_value = "1GiB", help_heading = "Measurement")]
    pub bytes: ByteSize,
    /// Size of a checkpoint over all processes, held in memory.
    #[arg(long, value_name = "SIZE", default_value = "512MiB", help_heading = "Measurement")]
    pub checkpoint: ByteSize,
    /// Writers, and readers of checkpoints, in each process.
    #[arg(long, value_name = "N", default_value_t = 4, help_heading = "Measurement")]
    pub writers: usize,
    /// Small objects that are created, opened and removed.
    #[arg(long, value_name = "N", default_value_t = 400, help_heading = "Measurement")]
    pub files: usize,
    /// Seed of everything random.
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Measurement")]
    pub seed: u64,
    /// Time after which a request, or a measurement beyond its length, counts as stuck.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = timeout_seconds)]
    #[arg(help_heading = "Measurement")]
    pub timeout: u64,
    /// Do not run fio, which otherwise performs the same reads and writes if it is installed.
    #[arg(long, help_heading = "Measurement")]
    pub no_fio: bool,
    /// Processes of this machine that measure at the same time.
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Several clients")]
    pub processes: usize,
    /// Folder that all hosts share, in which processes of several hosts find each other.
    ///
    /// Start the same command on each host with --process, or on all of them with srun.
    #[arg(long = "rendezvous", alias = "meet", value_name = "FOLDER")]
    #[arg(help_heading = "Several clients")]
    pub meet: Option<String>,
    /// Index and count of this process, `0/4` for the first of four [default: from srun]
    #[arg(long = "process", alias = "member", value_name = "I/N", value_parser = member)]
    #[arg(requires = "meet", help_heading = "Several clients")]
    pub member: Option<(usize, usize)>,
    /// Simulate another store: lustre, ceph, s3, nfs or the file of a model.
    ///
    /// Values of the model may follow, as lustre,servers.stripes=8. If the option is given several
    /// times, each target is measured with each model. Results then depend on the numbers in the
    /// model, and every output is marked as simulated. A target should be fast, such as /dev/shm.
    #[arg(long, value_name = "MODEL[,KEY=VALUE]...", help_heading = "Simulation")]
    pub simulate: Vec<String>,
    /// Write the report as a self-contained HTML page to a new file.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub html: Option<PathBuf>,
    /// Print JSON, with units in the keys.
    #[arg(long, help_heading = "Output")]
    pub json: bool,
    /// Run as a child of another process of the benchmark, and end with it.
    #[arg(long, hide = true)]
    pub child: bool,
}

/// Runs the benchmark. Returns the report in the first process, and `None` in the others.
///
/// # Errors
/// If an argument or a target is invalid, a request fails, or the run is interrupted. The test
/// files are removed in any case; if a stuck target prevents that, the error names what remains.
pub fn run(
    args: &BenchArgs,
    invocation: &Invocation,
    line: &mut ProgressLine,
) -> Result<Option<Report>> {
    let stop = StopSignal::at_signals()?;
    check(args)?;
    let part = part(args)?;
    let settings = Arc::new(settings(args, part)?);
    let mut group = join_group(args, invocation, part, &stop)?;
    let mut silent = ProgressLine::silent();
    let line = if args.child { &mut silent } else { line };
    if args.child {
        processes::stop_with_parent(&stop);
    }
    let mut places = Vec::new();
    let measured = measure(args, &settings, &group, &stop, &mut places, line);
    let measured = measured.map_err(|error| match group.failure_of_other() {
        Some(why) => anyhow!("cannot measure: another process failed: {why}"),
        None => error,
    });
    if let Err(error) = &measured {
        group.fail(&storage::one_line(&**error));
    }
    line.show("removing the test files");
    group.leave();
    let removed = if group.member == 0 { remove(&places) } else { Ok(()) };
    let ended = group.end();
    line.clear();
    let (measured, peers) = match (measured, removed) {
        (Ok(measured), Ok(())) => measured,
        (Ok(_), Err(left)) => return Err(left),
        (Err(error), Ok(())) => return Err(error),
        (Err(error), Err(left)) => bail!("{}; {left}", storage::one_line(&*error)),
    };
    ended?;
    if group.member > 0 {
        return Ok(None);
    }
    let mut report = report(args, &settings, &places, (&measured, &peers));
    if let Some(file) = &args.html {
        write_page(file, &report)?;
        report.page = Some(file.clone());
    }
    Ok(Some(report))
}

/// Checks the arguments before a target is touched.
fn check(args: &BenchArgs) -> Result<()> {
    for (name, found) in [
        ("--rounds", args.runs),
        ("--writers", args.writers),
        ("--files", args.files),
        ("--processes", args.processes),
    ] {
        ensure!((1..=100_000).contains(&found), "cannot use {name} {found}: expected 1 to 100000");
    }
    let seconds = args.seconds;
    ensure!(
        (0.05..=3600.0).contains(&seconds),
        "cannot use --duration {seconds}: expected 0.05s to 1h"
    );
    ensure!(args.timeout > 0, "cannot use --timeout 0: expected at least 1");
    ensure!(args.bytes.0 >= 16 << 20, "cannot use --bytes {}: expected at least 16MiB", args.bytes);
    let is_named = args.targets.iter().all(|target| !target.is_empty());
    ensure!(
        is_named,
        "cannot measure '': expected a folder, mount or bucket, found an empty name (hint: set the \
         shell variable of that argument)"
    );
    let together = args.meet.is_some() && !args.child && args.processes > 1;
    let count = args.targets.len() * args.simulate.len().max(1);
    let most = report::page::TARGETS_MAX;
    ensure!(
        count <= most,
        "cannot measure {count} targets: expected at most {most}, counted once for each --simulate"
    );
    ensure!(
        !together,
        "cannot use --processes with --rendezvous: expected one of them (hint: start the command \
         once for each process)"
    );
    if let Some(file) = &args.html {
        ensure!(!file.exists(), "cannot write --html {}: file exists", file.display());
    }
    Ok(())
}

/// Index of this process, and the count of processes.
fn part(args: &BenchArgs) -> Result<(usize, usize)> {
    let Some(_) = &args.meet else { return Ok((0, args.processes)) };
    let from_srun = |name: &str| std::env::var(name).ok()?.parse::<usize>().ok();
    let srun = from_srun("SLURM_PROCID").zip(from_srun("SLURM_NTASKS"));
    let part = args.member.or(srun);
    part.context("cannot use --rendezvous: expected --process I/N or srun, found neither")
}

fn join_group(
    args: &BenchArgs,
    invocation: &Invocation,
    part: (usize, usize),
    stop: &StopSignal,
) -> Result<BenchProcesses> {
    // A process may prepare for a long time before it joins.
    let timeout = Duration::from_secs(args.timeout.saturating_mul(10));
    if let Some(folder) = &args.meet {
        // Steps of one job must not share a rendezvous.
        let ids = ["SLURM_JOB_ID", "SLURM_STEP_ID"].map(|name| std::env::var(name).ok());
        let [job, step] = ids.map(|id| id.unwrap_or_else(|| "0".to_owned()));
        return BenchProcesses::join(part, folder, &format!("{job}-{step}"), timeout, stop);
    }
    if args.processes == 1 {
        return Ok(BenchProcesses::alone());
    }
    let folder = std::env::temp_dir();
    let folder = folder.to_str().context("cannot use the temporary folder: name is not UTF-8")?;
    let folder = format!("{}/{}{}", folder, target::FOLDER, unique_id());
    fs::create_dir(&folder).with_context(|| format!("cannot create {folder}"))?;
    let mut group = BenchProcesses::join(part, &folder, "0-0", timeout, stop)?;
    group.remove_at_end(&folder);
    let more = [format!("--rendezvous={folder}"), "--child".to_owned()];
    group.start_others(invocation, &more)?;
    Ok(group)
}

fn settings(args: &BenchArgs, (member, members): (usize, usize)) -> Result<Settings> {
    let (need, order) = match &args.from {
        Some(file) => {
            let config = Config::load(file, &[])?;
            let order = feed::order_of(&config)?;
            (Need::of_config(&config, args.ranks, args.flops)?, Some(order))
        }
        None => (Need::of_size(&args.model, args.ranks, args.seq, args.flops)?, None),
    };
    ensure!(
        need.sample_bytes <= args.bytes.0,
        "cannot use --bytes {}: expected at least one sample of {} bytes",
        args.bytes,
        need.sample_bytes
    );
    let patterns =
        if args.patterns.is_empty() { Pattern::ALL.to_vec() } else { args.patterns.clone() };
    let saves = [Pattern::Save, Pattern::SaveOne, Pattern::Restore, Pattern::Mix];
    let is_saved = saves.iter().any(|pattern| patterns.contains(pattern));
    let state_bytes = if is_saved { args.checkpoint.0 / members as u64 } else { 0 };
    let state_seed = random::word(args.seed, member as u64);
    let state = WriterBuffers::new(state_bytes, args.writers, state_seed)?;
    Ok(Settings {
        need,
        order,
        processes: members,
        patterns,
        runs: args.runs,
        seconds: args.seconds,
        data_bytes: args.bytes.0,
        state,
        writers: args.writers,
        files: args.files.div_ceil(members),
        ranks: ranks_here(args.ranks, members),
        seed: args.seed,
        timeout: Duration::from_secs(args.timeout),
        fio: !args.no_fio && members == 1 && fio::is_there(),
    })
}

/// Maximum number of threads of one process; each acts as a rank.
const RANKS_MAX: u64 = 256;

fn ranks_here(ranks: u64, members: usize) -> usize {
    ranks.div_ceil(members as u64).clamp(1, RANKS_MAX) as usize // fits: 256
}

/// Opens all targets and measures them. The caller removes the files that were written to `places`.
fn measure(
    args: &BenchArgs,
    settings: &Arc<Settings>,
    group: &BenchProcesses,
    stop: &StopSignal,
    places: &mut Vec<Arc<TargetFolder>>,
    line: &mut ProgressLine,
) -> Result<(Measured, Vec<FioPairs>)> {
    let id = group.exchange("id", unique_id())?.swap_remove(0);
    for (nth, (url, name, model)) in targets_and_models(args).into_iter().enumerate() {
        let simulate = Simulate { simulate: model, simulate_seed: args.seed };
        let (simulation, id) = (simulate.start()?, format!("{id}-{nth}"));
        let limit = Duration::from_secs(args.timeout);
        let what = format!("open {name}");
        let open = move || TargetFolder::open(&name, &url, simulation, &id);
        places.push(Arc::new(stop.guard(&what, limit, open)?));
    }
    let (settings, stop) = (Arc::clone(settings), stop.clone());
    let session = Session { settings, places: places.clone(), group, stop };
    session.prepare(line)?;
    session.rounds(line)
}

/// Maximum time until a target has removed a folder.
const REMOVE_WAIT: Duration = Duration::from_secs(20);

fn remove(places: &[Arc<TargetFolder>]) -> Result<()> {
    let mut left = Vec::new();
    for place in places.iter().filter(|place| place.may_have_files()) {
        // A new signal: folders are removed after an interruption too.
        let (place, folder) = (Arc::clone(place), place.folder());
        let what = format!("remove {folder}");
        let removed = StopSignal::default().guard(&what, REMOVE_WAIT, move || place.remove());
        if let Err(error) = removed {
            log::debug!("{error:#}");
            left.push(folder);
        }
    }
    let left = left.join(" ");
    ensure!(
        left.is_empty(),
        "cannot remove {left}: no response (hint: delete it when the target responds again)"
    );
    Ok(())
}

fn report(
    args: &BenchArgs,
    settings: &Settings,
    places: &[Arc<TargetFolder>],
    (measured, peers): (&Measured, &[FioPairs]),
) -> Report {
    let targets = places.iter().zip(measured).zip(peers).map(|((place, measured), peers)| {
        let profile = place.store.profile();
        let of = |(pattern, runs): (&Pattern, &Vec<patterns::PatternRun>)| {
            PatternReport::of(*pattern, runs, place.witness, args.seed)
        };
        let model = place.simulation.iter();
        TargetReport {
            name: place.name.clone(),
            url: place.url.clone(),
            simulated: place.simulation.as_ref().map(|model| model.label()),
            file_system: profile.file_system.clone(),
            mount_point: profile.mount_point.clone(),
            engine: profile.engine.to_string(),
            direct: profile.direct,
            witness: place.witness,
            notes: model.flat_map(model_notes).chain(peers.failed()).collect(),
            patterns: measured.iter().map(of).collect(),
            peers: peers.peers(args.seed),
        }
    });
    let order = settings.order.as_ref().map(|order| order.name());
    let processes = settings.processes;
    let method = Method {
        runs: args.runs,
        seconds: args.seconds,
        data_bytes: args.bytes.0,
        checkpoint_bytes: settings.state.part_bytes() * (args.writers * processes) as u64,
        processes,
        writers: args.writers,
        ranks_started: settings.ranks * processes,
        seed: args.seed,
        order: order.unwrap_or_else(|| "random, without --config".to_owned()),
        machine: machine(),
    };
    Report::new(settings.need.clone(), method, targets.collect())
}

/// The assumptions of the model, and whether the store below it was fast enough.
fn model_notes(model: &Arc<Simulation>) -> Vec<String> {
    let counted = model.counters();
    let ops = counted.reads + counted.writes + counted.commits + counted.metas;
    let mut notes = vec![model.about()];
    if counted.late_ops * LATE_SHARE > ops {
        notes.push(format!(
            "{} of {ops} operations were slower than the model: the file system below adds its own \
             latency (hint: use --simulate on /dev/shm)",
            counted.late_ops
        ));
    }
    notes
}

/// One in this many operations may be late.
const LATE_SHARE: u64 = 20;

fn machine() -> String {
    let cores = available_parallelism().map_or(1, std::num::NonZero::get);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!("{cores} cores, Linux {}", kernel.trim())
}

/// An id that no other process generates: process id and time.
fn unique_id() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{:x}-{:x}", std::process::id(), since.as_nanos())
}

/// Every target with every model: URL, name and model.
fn targets_and_models(args: &BenchArgs) -> Vec<(String, String, Option<String>)> {
    let models: Vec<Option<&String>> = match args.simulate.as_slice() {
        [] => vec![None],
        some => some.iter().map(Some).collect(),
    };
    let short = names_of(&args.targets);
    let each = args.targets.iter().zip(&short);
    let each = each.flat_map(|(url, name)| models.iter().map(move |model| (url, name, *model)));
    let all: Vec<_> = each.collect();
    let label = |(_, name, model): &(&String, &String, Option<&String>)| match model {
        Some(model) => format!("{name} as {model} (simulated)"),
        None => (*name).clone(),
    };
    let names = distinct(all.iter().map(label));
    let all = all.into_iter().zip(names);
    all.map(|((url, _, model), name)| (url.clone(), name, model.cloned())).collect()
}

/// Names of the targets: URLs without options, unless only the options differ.
fn names_of(targets: &[String]) -> Vec<String> {
    let short = |url: &String| Location::new(url).without_options().to_string();
    let is_one = |name: &String| targets.iter().filter(|url| short(url) == *name).count() == 1;
    let name = |url: &String| Some(short(url)).filter(is_one).unwrap_or_else(|| url.clone());
    distinct(targets.iter().map(name))
}

/// Appends a number to repeated names.
fn distinct(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut seen: Vec<String> = Vec::new();
    let number = |name: String| {
        let again = seen.iter().filter(|other| **other == name).count();
        seen.push(name.clone());
        if again > 0 { format!("{name} ({})", again + 1) } else { name }
    };
    names.map(number).collect()
}

fn write_page(file: &Path, report: &Report) -> Result<()> {
    let named = || format!("cannot write {}", file.display());
    let mut out = OpenOptions::new().write(true).create_new(true).open(file).with_context(named)?;
    out.write_all(report::page::html(report).as_bytes()).with_context(named)
}

fn member(text: &str) -> Result<(usize, usize), String> {
    let parts = text.split_once('/').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    parts.filter(|(nth, count)| nth < count).ok_or_else(|| "expected I/N, such as 0/4".to_owned())
}

/// A time such as `500ms`; a bare number is seconds.
fn duration_seconds(text: &str) -> Result<f64, String> {
    text.parse().or_else(|_| text.parse().map(|TimeSpan(time)| time.as_secs_f64()))
}
