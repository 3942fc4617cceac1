//! Activations on disks, in the order of a step: the forward pass writes all of them, and the
//! backward pass reads the last one first.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, ensure};
use ckpt::offload::{Folder, Spill, SpillHandle, SpillOptions, SpillReport};
use serde::Serialize;
use storage::{ByteSize, Key, Storage};

use super::{BenchArgs, numbers};
use crate::bench::fio;
use crate::ckpt::bench::median;
use crate::ui::terminal::ProgressLine;
use crate::ui::timeout::StopSignal;

/// Measurements of activations. Bytes are those that the disks moved: activations that are needed
/// again while still in memory are not counted.
#[derive(Debug, Serialize)]
pub(super) struct MovedInputs {
    /// Bytes that a step writes and reads back.
    bytes_per_step: u64,
    layer_bytes: u64,
    /// Writes of the forward pass.
    writes: TransferDirection,
    /// Reads of the backward pass.
    reads: TransferDirection,
    /// Bytes of both divided by the time of both, for `trainer plan --disk-per-s`.
    both: TransferDirection,
    /// The share of the read bytes that was not prefetched.
    late_share: f64,
    /// Memory of all buffers.
    memory_bytes: u64,
}

#[derive(Debug, Serialize)]
struct TransferDirection {
    bytes_per_s: f64,
    fio_bytes_per_s: Option<f64>,
    of_fio: Option<f64>,
}

/// Refuses sizes that would stay in the buffers.
pub(super) fn check(args: &BenchArgs) -> Result<()> {
    let (all, layer) = (args.input_bytes, args.layer_bytes);
    let least = ByteSize(2 * SpillOptions::default().memory_bytes());
    ensure!(layer.0 > 0, "cannot use --layer-bytes {layer}: expected at least 1 B");
    ensure!(
        all.0 == 0 || all.0 >= least.0,
        "cannot use --input-bytes {all}: expected 0 B or at least {least}, as less stays in the \
         buffers"
    );
    Ok(())
}

/// Measures activations, and fio with the same number of bytes on the same disks.
pub(super) fn run(
    args: &BenchArgs,
    (folders, stores): (&[PathBuf], Vec<Arc<dyn Storage>>),
    (stop, line): (&StopSignal, &mut ProgressLine),
) -> Result<MovedInputs> {
    let layers = args.input_bytes.0.div_ceil(args.layer_bytes.0);
    let bytes = layers * args.layer_bytes.0;
    let homes = stores.into_iter().map(|store| Folder { store, key: Key::root() }).collect();
    let spill = Spill::open(homes, SpillOptions::default())?;
    let layer_bytes = usize::try_from(args.layer_bytes.0)?;
    let layer: Vec<u8> = numbers().flatten().take(layer_bytes).collect();
    let files: Vec<PathBuf> = folders.iter().map(|folder| folder.join("fio-inputs")).collect();
    let files: Vec<&Path> = files.iter().map(PathBuf::as_path).collect();
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    // The first round creates all files, as the first step of a run does.
    for round in 0..=args.rounds {
        line.show(&format!("round {round}: activations"));
        stop.check()?;
        // feedline and fio run first in alternate rounds.
        let before = if round % 2 == 1 { in_place(&files, bytes)? } else { None };
        stop.check()?;
        let step = step(&spill, &layer, layers, stop)?;
        let fio = if round % 2 == 1 { before } else { in_place(&files, bytes)? };
        if round > 0 {
            ours.push(step);
            theirs.extend(fio);
        }
    }
    let direction = |moved: fn([Moved; 2]) -> Moved| {
        let rates = |all: &[[Moved; 2]]| all.iter().map(|step| moved(*step).rate()).collect();
        let (ours, theirs): (Vec<f64>, Vec<f64>) = (rates(&ours), rates(&theirs));
        let shares: Vec<f64> = ours.iter().zip(&theirs).map(|(own, fio)| own / fio).collect();
        let median_of = |values: &[f64]| (!values.is_empty()).then(|| median(values));
        let (fio_bytes_per_s, of_fio) = (median_of(&theirs), median_of(&shares));
        TransferDirection { bytes_per_s: median(&ours), fio_bytes_per_s, of_fio }
    };
    let report = spill.report();
    Ok(MovedInputs {
        bytes_per_step: bytes,
        layer_bytes: args.layer_bytes.0,
        writes: direction(|[writes, _]| writes),
        reads: direction(|[_, reads]| reads),
        both: direction(|[writes, reads]| Moved {
            bytes: writes.bytes + reads.bytes,
            seconds: writes.seconds + reads.seconds,
        }),
        late_share: report.late_bytes as f64
            / (report.read_bytes + report.late_bytes).max(1) as f64,
        memory_bytes: report.memory_bytes,
    })
}

/// Bytes and time of one direction.
#[derive(Clone, Copy, Debug)]
struct Moved {
    bytes: u64,
    seconds: f64,
}

impl Moved {
    fn rate(self) -> f64 {
        self.bytes as f64 / self.seconds.max(1e-9)
    }
}

/// One step without computation, so that all its time is that of the disks.
fn step(spill: &Spill, layer: &[u8], layers: u64, stop: &StopSignal) -> Result<[Moved; 2]> {
    let before = spill.report();
    let forward_start = Instant::now();
    let mut spilled = Vec::new();
    for _ in 0..layers {
        stop.check()?;
        spilled.push(spill.put(layer)?);
    }
    let seconds = forward_start.elapsed().as_secs_f64();
    let bytes = spill.report().write_bytes - before.write_bytes;
    let writes = Moved { bytes, seconds };
    let backward_start = Instant::now();
    spilled.iter().rev().for_each(SpillHandle::expect);
    let mut into = vec![0; layer.len()];
    for layer in spilled.into_iter().rev() {
        stop.check()?;
        layer.take(&mut into)?;
    }
    let seconds = backward_start.elapsed().as_secs_f64();
    let after = spill.report();
    let read = |report: SpillReport| report.read_bytes + report.late_bytes;
    let reads = Moved { bytes: read(after) - read(before), seconds };
    Ok([writes, reads])
}

/// fio writes and reads existing files. It makes nothing durable, and neither does the offload.
fn in_place(files: &[&Path], bytes: u64) -> Result<Option<[Moved; 2]>> {
    if !fio::is_there() {
        return Ok(None);
    }
    let bytes = bytes >> 20 << 20;
    let direction = |what| {
        let mut job = fio::job(files)?;
        fio::ring(&mut job, 32);
        job.args(["--direct=1", "--bs=1m", &format!("--rw={what}"), &format!("--size={bytes}")]);
        let rate = fio::rate(job, what)?;
        anyhow::Ok(Moved { bytes, seconds: bytes as f64 / rate })
    };
    Ok(Some([direction("write")?, direction("read")?]))
}

impl MovedInputs {
    /// Rows of the table.
    pub(super) fn rows(&self) -> Vec<Vec<String>> {
        let gb = |rate: f64| format!("{:.2} GB/s", rate / 1e9);
        let ways = [
            ("activations written", &self.writes),
            ("  read back", &self.reads),
            ("  both, in turn", &self.both),
        ];
        let mut rows = Vec::new();
        for (what, TransferDirection { bytes_per_s, fio_bytes_per_s, of_fio }) in ways {
            let beside = of_fio.zip(*fio_bytes_per_s);
            let beside = beside.map(|(share, rate)| format!("{share:.3} of fio, {}", gb(rate)));
            rows.push(vec![what.to_owned(), gb(*bytes_per_s), beside.unwrap_or_default()]);
        }
        let late = format!("{:.1} %", 100.0 * self.late_share);
        rows.push(vec!["  not prefetched".to_owned(), late, String::new()]);
        let memory = ByteSize(self.memory_bytes).to_string();
        let of = format!("for {} per step", ByteSize(self.bytes_per_step));
        rows.push(vec!["  buffers".to_owned(), memory, of]);
        rows
    }
}
