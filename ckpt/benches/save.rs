//! Saves, loads and verifies the state of a GPT, compared with `dd` with direct I/O on the same
//! device:
//!
//! ```text
//! cargo bench -p ckpt --bench save -- [FOLDER [GIB [THREADS]]]
//! ```
//!
//! Default: a temporary folder, 1 GiB, 2 threads. Rounds of all kinds take turns, since devices of
//! virtual machines drift; every number is the best of five, followed by the median.

#![expect(clippy::print_stdout, reason = "a benchmark prints what it measured")]

use std::error::Error;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use ckpt::{CheckpointOptions, Checkpoints, Dtype, Group, TensorData, TensorRead};
use storage::{ByteSize, Key, rate_text};

const ROUNDS: u64 = 5;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1).filter(|arg| !arg.starts_with("--"));
    let temp = tempfile::tempdir()?;
    let folder = args.next().map_or_else(|| temp.path().to_owned(), Into::into);
    let gib: f64 = args.next().map_or(Ok(1.0), |text| text.parse())?;
    let options = CheckpointOptions {
        threads: args.next().map_or(Ok(2), |text| text.parse())?,
        ..CheckpointOptions::default()
    };

    let state = State::new((gib * f64::from(1 << 30)) as u64);
    let tensors: Vec<_> = state.data().collect();
    let bytes: u64 = tensors.iter().map(|tensor| tensor.bytes.len() as u64).sum();
    let url = folder.to_str().ok_or("the folder's name is not UTF-8")?;
    let steps = Checkpoints::open(storage::open_url(url)?, Key::new("bench-ckpt")?);
    let steps = steps.with_options(options);
    println!("{} in {} tensors, {options:?}, in {url}", ByteSize(bytes), tensors.len());

    let mut times: [(&str, Vec<Duration>); 5] =
        ["dd write, direct", "save", "dd read, direct", "load, verified", "verify"]
            .map(|name| (name, Vec::new()));
    let [dd_write, save, dd_read, load, verify] = &mut times;
    let mut buffers: Vec<Vec<u8>> = tensors.iter().map(|t| vec![0; t.bytes.len()]).collect();
    for step in 0..ROUNDS {
        let path = folder.join("bench-dd");
        dd_write.1.push(dd(&path, Direction::Write, bytes)?);
        let report = steps.save(step, &tensors, &[], serde_json::Value::Null)?;
        println!("{report}");
        save.1.push(report.total());

        dd_read.1.push(dd(&path, Direction::Read, bytes)?);
        std::fs::remove_file(&path)?;
        drop_caches();
        let checkpoint = steps.newest()?.ok_or("nothing was saved")?;
        let reads = tensors.iter().zip(&mut buffers);
        let reads = reads.map(|(t, into)| TensorRead { name: t.name, group: t.group, into });
        let started = Instant::now();
        checkpoint.read_tensors(reads.collect())?;
        load.1.push(started.elapsed());
        let same = tensors.iter().zip(&buffers).all(|(tensor, buffer)| tensor.bytes == buffer);
        assert!(same, "the loaded bytes differ from the saved ones");

        drop_caches();
        let started = Instant::now();
        checkpoint.verify()?;
        verify.1.push(started.elapsed());
        steps.retain(1)?;
    }
    for (name, mut times) in times {
        times.sort();
        let (best, median) = (times[0], times[times.len() / 2]);
        println!("{name:18} {:>14}  (median {})", rate_text(bytes, best), rate_text(bytes, median));
    }
    std::fs::remove_dir_all(folder.join("bench-ckpt"))?;
    Ok(())
}

/// A GPT of 1,024 channels with as many layers as it takes: bf16 weights, fp32 master and moments.
struct State {
    tensors: Vec<(String, Group, Dtype, Vec<u64>)>,
    bytes: Vec<u8>,
}

impl State {
    fn new(bytes: u64) -> Self {
        let width = 1024;
        let mut tensors = Vec::new();
        let mut total = 0;
        for layer in 0.. {
            if total >= bytes {
                break;
            }
            for (part, shape) in [
                ("attention.qkv.weight", vec![3 * width, width]),
                ("attention.proj.weight", vec![width, width]),
                ("mlp.up.weight", vec![4 * width, width]),
                ("mlp.down.weight", vec![width, 4 * width]),
                ("mlp.up.bias", vec![4 * width]),
                ("norm.weight", vec![width]),
            ] {
                for group in Group::ALL {
                    let dtype = if group == Group::Model { Dtype::BF16 } else { Dtype::F32 };
                    total += shape.iter().product::<u64>() * dtype.item_bytes();
                    tensors.push((format!("layers.{layer}.{part}"), group, dtype, shape.clone()));
                }
            }
        }
        // Incompressible bytes.
        let mut word = 1_u64;
        let next = |_| {
            word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            word.to_le_bytes()
        };
        let buffer = (0..total / 8).flat_map(next).collect();
        State { tensors, bytes: buffer }
    }

    fn data(&self) -> impl Iterator<Item = TensorData<'_>> {
        let mut rest = self.bytes.as_slice();
        self.tensors.iter().map(move |(name, group, dtype, shape)| {
            let len = shape.iter().product::<u64>() * dtype.item_bytes();
            let (bytes, after) = rest.split_at(len as usize);
            rest = after;
            TensorData { name, group: *group, dtype: *dtype, shape, bytes }
        })
    }
}

#[derive(Clone, Copy)]
enum Direction {
    Write,
    Read,
}

/// The peak rate of the device: one stream of 8 MiB requests with direct I/O.
fn dd(path: &Path, direction: Direction, bytes: u64) -> Result<Duration, Box<dyn Error>> {
    let count = format!("count={}", bytes.div_ceil(8 << 20));
    let file = |key: &str| format!("{key}={}", path.display());
    let mut command = Command::new("dd");
    match direction {
        Direction::Write => {
            command.args(["if=/dev/zero", &file("of"), "oflag=direct", "conv=fdatasync"])
        }
        Direction::Read => command.args([&file("if"), "of=/dev/null", "iflag=direct"]),
    };
    let started = Instant::now();
    let output = command.args(["bs=8M", &count]).output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into());
    }
    Ok(started.elapsed())
}

/// Drops the page cache, so that reads come from the device. Without the permission they still do
/// where the store uses direct I/O.
fn drop_caches() {
    let _ = std::fs::write("/proc/sys/vm/drop_caches", "1");
}
