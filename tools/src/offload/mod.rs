//! `feedline offload`: measures optimizer state and activations that are offloaded to host memory
//! or to disks, and lists leftovers.

mod activations;
mod leftovers;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use ckpt::offload::{
    self, AdamW, Folder, Offload, OffloadOptions, StepReport, Update, WeightsOut, bench,
};
use ckpt::{Checkpoints, Dtype};
use clap::{Args, Subcommand};
use serde::Serialize;
use storage::{ByteSize, Key, Storage, Width};

use self::activations::MovedInputs;
use crate::bench::demand::parameters_of;
use crate::bench::fio::checkpoint;
use crate::bench::target::check_folder;
use crate::ckpt::CkptOutput;
use crate::ckpt::bench::{MemoryWatch, median, remove_file};
use crate::ui::terminal::{ProgressLine, table};
use crate::ui::timeout::StopSignal;

/// Subcommands of `feedline offload`.
#[derive(Debug, Subcommand)]
pub enum OffloadVerb {
    /// Measure updates of optimizer state in host memory and on disks, compared with fio.
    ///
    /// Also measures the memory bandwidth, a checkpoint of the state, and how fast layer inputs are
    /// written to the disks and read back.
    ///
    /// Exit code 0: measured. 2: not measured.
    #[command(after_help = "\
Examples:
  feedline offload bench /nvme0 /nvme1 --parameters 1b
  feedline offload bench /nvme0 --parameters 0 --input-bytes 0B --json")]
    Bench(BenchArgs),
    /// List the offloaded state that ranks keep in folders of this node, and remove orphans.
    ///
    /// A run that resumes with fewer ranks removes the state of the other ranks in folders that its
    /// own ranks can reach. State on a node without ranks remains until --remove deletes it.
    ///
    /// Exit code 0: done. 2: not done.
    #[command(name = "ls", alias = "left")]
    #[command(after_help = "\
Examples:
  feedline offload ls /nvme0 /nvme1
  feedline offload ls /nvme0 --remove /lustre/run/ckpt")]
    Left(leftovers::LeftArgs),
}

/// Arguments of `feedline offload bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Folder on the file system to measure, or one on each disk that the state is spread over.
    ///
    /// Files that are written there are removed. The checkpoint is written to the first folder.
    #[arg(value_name = "FOLDER", required = true, num_args = 1..)]
    pub folders: Vec<PathBuf>,
    /// Parameters of the model, such as 250m or 1.3b; 0 omits updates on the disks.
    ///
    /// Each parameter has 12 bytes of state, and the disks hold two generations of it.
    #[arg(long, value_name = "N", default_value = "250m", value_parser = parameters)]
    pub parameters: u64,
    /// Parameters that are updated in host memory; 0 omits the measurement.
    ///
    /// If their state fits into the CPU caches, the result is the rate of the caches.
    #[arg(long, value_name = "N", default_value = "67108864", value_parser = parameters)]
    pub host_parameters: u64,
    /// Layer inputs that a step writes and reads back, as with parallel.activation_offload.
    ///
    /// The files of fio have the same size. 0B omits the measurement. Less than 128MiB is refused,
    /// as it would remain in the buffers.
    #[arg(long, value_name = "SIZE", default_value = "2GiB")]
    pub input_bytes: ByteSize,
    /// Size of one layer input: micro-batch x sequence length x hidden size x 2 or 4 bytes.
    #[arg(long, value_name = "SIZE", default_value = "16MiB")]
    pub layer_bytes: ByteSize,
    /// Number of rounds; medians are reported. Fewer rounds make the result less certain.
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub rounds: u64,
    /// Threads that compute [default: one per core]
    #[arg(long, alias = "workers", value_name = "N")]
    pub threads: Option<usize>,
    /// Memory for data in flight to and from the disks. With less, the disks wait.
    #[arg(long = "memory", alias = "buffer-bytes", value_name = "SIZE", default_value = "256MiB")]
    pub buffer_bytes: ByteSize,
    /// Print JSON, with units in the keys.
    #[arg(long)]
    pub json: bool,
}

/// The output of `feedline offload bench`; `--json` prints it as it is.
#[derive(Debug, Default, Serialize)]
struct Measured {
    folders: Vec<String>,
    file_systems: Vec<String>,
    vectors: String,
    threads: usize,
    parameters: u64,
    host_parameters: u64,
    triad_bytes_per_s: f64,
    /// Gradients in bf16, new weights in bf16: 28 bytes per parameter.
    host_step_bytes_per_s: f64,
    host_step_of_triad: f64,
    /// Gradients in f32 and no new weights: the same number of bytes, and the work of libtorch.
    host_f32_step_bytes_per_s: f64,
    host_f32_step_of_triad: f64,
    fio_bytes_per_s: Option<f64>,
    /// fio with new data in each write.
    fio_new_data_bytes_per_s: Option<f64>,
    disk_step_bytes_per_s: f64,
    disk_step_of_fio: Option<f64>,
    disk_step_of_fio_new_data: Option<f64>,
    disk_step_s: f64,
    /// Tiles in flight in the fastest step.
    disk_depth: usize,
    checkpoint_ms: f64,
    checkpoint_method: String,
    /// Time of the step that needs new files, divided by the median of the others.
    step_after_checkpoint_ratio: f64,
    memory_peak_bytes: u64,
    /// `None` if they were not measured.
    inputs: Option<MovedInputs>,
}

/// A number of parameters, as `250000000` or `250m`.
fn parameters(text: &str) -> Result<u64, String> {
    let count = text.parse().ok().or_else(|| parameters_of(text));
    count.ok_or_else(|| format!("expected a number, or one with m, b or t as 1.3b, found '{text}'"))
}

/// Runs a command.
///
/// # Errors
/// If the command fails.
pub fn run(verb: &OffloadVerb, line: &mut ProgressLine) -> Result<CkptOutput> {
    match verb {
        OffloadVerb::Bench(args) => measure(args, line),
        OffloadVerb::Left(args) => leftovers::run(args),
    }
}

fn measure(args: &BenchArgs, line: &mut ProgressLine) -> Result<CkptOutput> {
    ensure!(args.rounds > 0, "cannot use --rounds 0: expected at least 1");
    activations::check(args)?;
    for folder in &args.folders {
        check_folder(&folder.to_string_lossy(), folder)?;
    }
    let stop = StopSignal::at_signals()?;
    let own = format!(".bench-offload-{}", std::process::id());
    let folders: Vec<PathBuf> = args.folders.iter().map(|folder| folder.join(&own)).collect();
    let open = |folder: &PathBuf| {
        let url = folder.to_str().context("cannot use the folder: name is not UTF-8")?;
        Ok(storage::open_url(url)?)
    };
    let stores = folders.iter().map(open).collect::<Result<Vec<_>>>()?;
    let mut options =
        OffloadOptions { buffer_bytes_max: args.buffer_bytes.0, ..OffloadOptions::default() };
    options.threads = args.threads.unwrap_or(options.threads);
    let mut measured = Measured {
        folders: args.folders.iter().map(|folder| folder.display().to_string()).collect(),
        file_systems: stores.iter().map(|store| store.profile().file_system.clone()).collect(),
        vectors: format!("{:?}", Width::widest()),
        threads: options.threads,
        parameters: args.parameters,
        host_parameters: args.host_parameters,
        ..Measured::default()
    };
    let in_memory = match args.host_parameters {
        0 => Ok(()),
        _ => host(args, options, &mut measured, (&stop, line)),
    };
    let on_disks = in_memory.and_then(|()| match args.parameters {
        0 => Ok(()),
        _ => disk(args, options, (&folders, stores.clone()), &mut measured, (&stop, line)),
    });
    let outcome = on_disks.and_then(|()| {
        if args.input_bytes.0 > 0 {
            measured.inputs = Some(activations::run(args, (&folders, stores), (&stop, line))?);
        }
        Ok(())
    });
    line.clear();
    for folder in folders.iter().filter(|folder| folder.exists()) {
        std::fs::remove_dir_all(folder)?;
    }
    stop.check()?;
    outcome?;
    CkptOutput::new(args.json, &measured, measured.text(), true)
}

/// Bytes that an update moves between processor and memory: three arrays both ways, a gradient and
/// a rounded weight of two bytes each.
const HOST_BYTES: f64 = 28.0;

/// Bytes that an update moves between memory and disk.
const DISK_BYTES: f64 = 24.0;

fn host(
    args: &BenchArgs,
    options: OffloadOptions,
    measured: &mut Measured,
    (stop, line): (&StopSignal, &mut ProgressLine),
) -> Result<()> {
    let layout = bench::layout(args.host_parameters)?;
    let mut state = Offload::in_memory(offload::plan(&layout)?, &layout, 0, options)?;
    let given = SyntheticInputs::new(&state);
    state.fill(&given.weights(&state), 0, ().into())?;
    let mut halves: Vec<Vec<u8>> =
        state.params().iter().map(|param| vec![0; 2 * param.elements]).collect();
    let (mut triads, mut rates, mut shares) = (vec![], [vec![], vec![]], [vec![], vec![]]);
    // The first round allocates the pages and is not counted.
    for round in 0..=args.rounds {
        line.show(&format!("round {round}: memory"));
        stop.check()?;
        let bytes = 24 * args.host_parameters as usize; // fits: of memory
        let triad = bench::triad(bytes, options.threads, 3)?;
        let copies = halves.iter_mut().map(|bytes| WeightsOut { dtype: Dtype::BF16, bytes });
        let first = state.step(&adamw(round + 1), given.updates(&state, copies), ().into())?;
        let second = state.step(&adamw(round + 1), given.singles(&state), ().into())?;
        if round > 0 {
            triads.push(triad);
            for (kind, report) in [first, second].into_iter().enumerate() {
                let rate = HOST_BYTES * args.host_parameters as f64 / report.time.as_secs_f64();
                rates[kind].push(rate);
                shares[kind].push(rate / triad);
            }
        }
    }
    measured.triad_bytes_per_s = median(&triads);
    [measured.host_step_bytes_per_s, measured.host_f32_step_bytes_per_s] =
        rates.each_ref().map(|rates| median(rates));
    [measured.host_step_of_triad, measured.host_f32_step_of_triad] =
        shares.each_ref().map(|shares| median(shares));
    Ok(())
}

fn disk(
    args: &BenchArgs,
    options: OffloadOptions,
    (folders, stores): (&[PathBuf], Vec<Arc<dyn Storage>>),
    measured: &mut Measured,
    (stop, line): (&StopSignal, &mut ProgressLine),
) -> Result<()> {
    let layout = bench::layout(args.parameters)?;
    let watch = MemoryWatch::start()?;
    let plan = offload::plan_over(&layout, stores.len())?;
    let steps = Checkpoints::open(Arc::clone(&stores[0]), Key::new("run")?);
    let key = Key::new("state")?;
    let homes = stores.into_iter().map(|store| Folder { store, key: key.clone() }).collect();
    let mut state = Offload::on_disks(homes, "bench", plan, &layout, 0, options)?;
    let (given, state_bytes) = (SyntheticInputs::new(&state), state.state_bytes());
    line.show("initializing the state");
    state.fill(&given.weights(&state), 0, ().into())?;
    let step = |state: &mut Offload, number: u64| -> Result<StepReport> {
        let updates = given.updates(state, std::iter::empty());
        Ok(state.step(&adamw(number), updates, ().into())?)
    };
    // The first step creates the files, the others try one queue depth each; the fastest one is
    // kept.
    const WARM: u64 = 5;
    for number in 1..=WARM {
        line.show(&format!("tuning the queue depth: {number} of {WARM}"));
        stop.check()?;
        step(&mut state, number)?;
    }
    // The files of fio are removed at the end: a disk may be busy with removed files.
    let files: Vec<PathBuf> = folders.iter().map(|folder| folder.join("fio")).collect();
    let paths: Vec<&Path> = files.iter().map(PathBuf::as_path).collect();
    line.show("creating the fio files");
    stop.check()?;
    let fio = || -> Result<[Option<f64>; 2]> {
        Ok([checkpoint::mixed(&paths, state_bytes)?, checkpoint::refilled(&paths, state_bytes)?])
    };
    checkpoint::mixed(&paths, state_bytes)?;
    let (mut rates, mut times) = (vec![], vec![]);
    let (mut fios, mut shares) = ([vec![], vec![]], [vec![], vec![]]);
    for round in 1..=args.rounds {
        line.show(&format!("round {round}: disks"));
        stop.check()?;
        // feedline and fio run first in alternate rounds.
        let before = if round % 2 == 1 { Some(fio()?) } else { None };
        let started = Instant::now();
        let report = step(&mut state, WARM + round)?;
        state.settle()?;
        let seconds = started.elapsed().as_secs_f64();
        let theirs = before.map_or_else(fio, Ok)?;
        let rate = DISK_BYTES * args.parameters as f64 / seconds;
        for (kind, theirs) in theirs.into_iter().enumerate() {
            shares[kind].extend(theirs.map(|theirs| rate / theirs));
            fios[kind].extend(theirs);
        }
        rates.push(rate);
        times.push(seconds);
        measured.disk_depth = report.depth;
    }
    paths.iter().filter(|path| path.exists()).try_for_each(|path| remove_file(path))?;
    measured.disk_step_bytes_per_s = median(&rates);
    measured.disk_step_s = median(&times);
    let of = |all: &Vec<f64>| (!all.is_empty()).then(|| median(all));
    [measured.fio_bytes_per_s, measured.fio_new_data_bytes_per_s] = fios.each_ref().map(of);
    [measured.disk_step_of_fio, measured.disk_step_of_fio_new_data] = shares.each_ref().map(of);
    line.show("checkpoint");
    let started = Instant::now();
    let (_, method) = steps.save_offloaded(1, &mut state, &[], ().into(), None)?;
    measured.checkpoint_ms = started.elapsed().as_secs_f64() * 1e3;
    measured.checkpoint_method = method.to_string();
    // The second step after the checkpoint cannot write in place: those files hold the data of the
    // checkpoint.
    let last = WARM + args.rounds;
    step(&mut state, last + 1)?;
    state.settle()?;
    let started = Instant::now();
    step(&mut state, last + 2)?;
    state.settle()?;
    measured.step_after_checkpoint_ratio = started.elapsed().as_secs_f64() / measured.disk_step_s;
    measured.memory_peak_bytes = watch.stop()?;
    Ok(())
}

fn adamw(step: u64) -> AdamW {
    AdamW { step, lr: 1e-4, beta1: 0.9, beta2: 0.95, eps: 1e-8, grad_divisor: 1.0 }
}

/// f32 numbers between -1 and 1, the same in every run.
fn numbers() -> impl Iterator<Item = [u8; 4]> {
    let mut word = 1_u64;
    std::iter::repeat_with(move || {
        word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        ((word >> 40) as f32 / (1 << 23) as f32 - 1.0).to_le_bytes()
    })
}

/// Numbers for the largest parameter, used for all of them: the results are not checked.
struct SyntheticInputs {
    /// In f32.
    weights: Vec<u8>,
    /// In bf16.
    grads: Vec<u8>,
}

impl SyntheticInputs {
    fn new(state: &Offload) -> Self {
        let most = state.params().iter().map(|param| param.elements).max().unwrap_or(0);
        let weights: Vec<u8> = numbers().take(most).flatten().collect();
        let upper = |number: &[u8; 4]| [number[2], number[3]];
        let grads = weights.as_chunks().0.iter().flat_map(upper).collect();
        SyntheticInputs { weights, grads }
    }

    fn weights(&self, state: &Offload) -> Vec<&[u8]> {
        state.params().iter().map(|param| &self.weights[..4 * param.elements]).collect()
    }

    fn updates<'a>(
        &'a self,
        state: &Offload,
        mut copies: impl Iterator<Item = WeightsOut<'a>>,
    ) -> Vec<Update<'a>> {
        let update = |param: &offload::StateParam| Update {
            grad: &self.grads[..2 * param.elements],
            grad_dtype: Dtype::BF16,
            weight_decay: 0.1,
            weights: copies.next().unwrap_or(WeightsOut { dtype: Dtype::BF16, bytes: &mut [] }),
        };
        state.params().iter().map(update).collect()
    }

    /// Updates with gradients in f32 and without a copy of the new weights.
    fn singles(&self, state: &Offload) -> Vec<Update<'_>> {
        let update = |param: &offload::StateParam| Update {
            grad: &self.weights[..4 * param.elements],
            grad_dtype: Dtype::F32,
            weight_decay: 0.1,
            weights: WeightsOut { dtype: Dtype::F32, bytes: &mut [] },
        };
        state.params().iter().map(update).collect()
    }
}

impl Measured {
    fn text(&self) -> String {
        let gb = |rate: f64| format!("{:.2} GB/s", rate / 1e9);
        let row = |what: &str, value: String, beside: String| vec![what.to_owned(), value, beside];
        let share = |share: Option<f64>, of: &str| {
            share.map_or_else(String::new, |share| format!("{share:.3} of {of}"))
        };
        let memory = [
            row("stream triad", gb(self.triad_bytes_per_s), String::new()),
            row(
                "update in memory",
                gb(self.host_step_bytes_per_s),
                share(Some(self.host_step_of_triad), "the triad"),
            ),
            row(
                "  f32 gradients, no weight copies",
                gb(self.host_f32_step_bytes_per_s),
                share(Some(self.host_f32_step_of_triad), "the triad"),
            ),
        ];
        let mut rows: Vec<_> = memory.into_iter().filter(|_| self.host_parameters > 0).collect();
        rows.extend(
            self.fio_bytes_per_s.map(|rate| row("fio mixed, direct", gb(rate), String::new())),
        );
        rows.extend(
            self.fio_new_data_bytes_per_s
                .map(|rate| row("  with new data in each write", gb(rate), String::new())),
        );
        let shares = self.disk_step_of_fio.zip(self.disk_step_of_fio_new_data);
        let of_fio = shares.map_or_else(String::new, |(fio, refilled)| {
            format!("{fio:.3} of fio, {refilled:.3} of fio with new data")
        });
        let disk = [
            row("update on disk, durable", gb(self.disk_step_bytes_per_s), of_fio),
            row("  time of one update", format!("{:.2} s", self.disk_step_s), String::new()),
            row(
                "checkpoint",
                format!("{:.1} ms", self.checkpoint_ms),
                format!("by {}", self.checkpoint_method),
            ),
            row(
                "update after a checkpoint",
                format!("{:.2} s", self.disk_step_s * self.step_after_checkpoint_ratio),
                format!("{:.2} of other updates", self.step_after_checkpoint_ratio),
            ),
            row("memory", ByteSize(self.memory_peak_bytes).to_string(), String::new()),
        ];
        rows.extend(disk.into_iter().filter(|_| self.parameters > 0));
        rows.extend(self.inputs.iter().flat_map(MovedInputs::rows));
        let head = format!(
            "{} parameters in {} ({}), {} in memory, {}, {} threads, queue depth {}\n",
            self.parameters,
            self.folders.join(", "),
            self.file_systems.join(", "),
            self.host_parameters,
            self.vectors,
            self.threads,
            self.disk_depth
        );
        head + &table(&["measurement", "median", "comparison"], &rows)
    }
}
