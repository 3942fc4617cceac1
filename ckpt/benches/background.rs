//! How long an async save blocks its caller, compared with a plain copy of the same bytes and, if a
//! Python with torch is given, with `torch.distributed.checkpoint.async_save` of the same state:
//!
//! ```text
//! cargo bench -p ckpt --bench background -- FOLDER [GIB [PYTHON]]
//! ```
//!
//! Default: 2 GiB. Rounds of all kinds take turns. The plain copy is `memcpy`, tensor by tensor and
//! all at once, into memory that was touched before.

#![expect(clippy::print_stdout, reason = "a benchmark prints what it measured")]

use std::error::Error;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ckpt::{AsyncSaveOptions, AsyncSaver, Checkpoints, Dtype, Group, TensorData};
use storage::{ByteSize, Key, copy_past_cache, rate_text};

const ROUNDS: u64 = 7;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1).filter(|arg| !arg.starts_with("--"));
    let folder = args.next().ok_or("expected a folder on a device, not in memory")?;
    let gib: f64 = args.next().map_or(Ok(2.0), |text| text.parse())?;
    let python = args.next();

    let shapes = shapes((gib * f64::from(1 << 30)) as u64);
    let source: Vec<Vec<u8>> = shapes.iter().map(|shape| fill(bytes_of(shape))).collect();
    let bytes: u64 = source.iter().map(|tensor| tensor.len() as u64).sum();
    let names: Vec<String> = (0..shapes.len()).map(|i| format!("layers.{i}.weight")).collect();
    let data = |i: usize| TensorData {
        name: &names[i],
        group: Group::Master,
        dtype: Dtype::F32,
        shape: &shapes[i],
        bytes: &source[i],
    };
    let tensors: Vec<_> = (0..shapes.len()).map(data).collect();
    println!("{} in {} tensors, in {folder}", ByteSize(bytes), tensors.len());

    let steps = Checkpoints::open(storage::open_url(&folder)?, Key::new("bench-background")?);
    let steps = Arc::new(steps);
    let background = AsyncSaver::new(Arc::clone(&steps), AsyncSaveOptions::default())?;
    let started = Instant::now();
    background.reserve(bytes + (1 << 20))?;
    println!("memory for the copy, once: {}", rate_text(bytes, started.elapsed()));
    let mut peer = python.map(|python| Peer::start(&python, &folder, &shapes)).transpose()?;

    let whole: Vec<u8> = source.concat();
    let mut into = vec![1; whole.len()];
    let mut times: Vec<(&str, Vec<Duration>)> = Vec::new();
    let mut add = |name, time| match times.iter_mut().find(|(known, _)| *known == name) {
        Some((_, times)) => times.push(time),
        None => times.push((name, vec![time])),
    };
    for step in 0..ROUNDS {
        add("memcpy, all at once", timed(|| into.copy_from_slice(&whole)));
        add("memcpy, by tensor", timed(|| copy_each(&mut into, &source, <[u8]>::copy_from_slice)));
        add("one thread, past the cache", timed(|| copy_each(&mut into, &source, copy_past_cache)));
        let started = Instant::now();
        let save = background.save(step, &tensors, &[], serde_json::Value::Null)?;
        add("save() keeps its caller", started.elapsed());
        let report = save.save.ok_or("it is waited for below")?.wait()?;
        println!("{report}");
        steps.retain(1)?;
        if let Some(peer) = &mut peer {
            let (block, _) = peer.save()?;
            add("DCP async_save keeps its caller", block);
        }
    }
    for (name, times) in &mut times {
        times.sort();
        let (best, median) = (times[0], times[times.len() / 2]);
        let (best, middle) = (rate_text(bytes, best), rate_text(bytes, median));
        println!("{name:32} {:8.3} s  {middle:>14}  (best {best})", median.as_secs_f64());
    }
    drop(background);
    std::fs::remove_dir_all(std::path::Path::new(&folder).join("bench-background"))?;
    Ok(())
}

fn timed(work: impl FnOnce()) -> Duration {
    let started = Instant::now();
    work();
    started.elapsed()
}

fn copy_each(mut into: &mut [u8], source: &[Vec<u8>], copy: impl Fn(&mut [u8], &[u8])) {
    for tensor in source {
        let (part, rest) = into.split_at_mut(tensor.len());
        copy(part, tensor);
        into = rest;
    }
}

/// The weights of a GPT of 1,024 channels, in fp32.
fn shapes(bytes: u64) -> Vec<Vec<u64>> {
    let layer =
        [vec![3072, 1024], vec![1024, 1024], vec![4096, 1024], vec![1024, 4096], vec![1024]];
    let mut shapes = Vec::new();
    let mut total = 0;
    for shape in layer.iter().cycle() {
        if total >= bytes {
            break;
        }
        total += bytes_of(shape) as u64;
        shapes.push(shape.clone());
    }
    shapes
}

fn bytes_of(shape: &[u64]) -> usize {
    shape.iter().product::<u64>() as usize * 4
}

/// Incompressible bytes.
fn fill(len: usize) -> Vec<u8> {
    let mut word = len as u64 | 1;
    let next = |_| {
        word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        word.to_le_bytes()
    };
    (0..len / 8).flat_map(next).collect()
}

/// A Python process that saves a state of the same shapes on request.
struct Peer {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Peer {
    fn start(python: &str, folder: &str, shapes: &[Vec<u64>]) -> Result<Self, Box<dyn Error>> {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/peers/dcp_async.py");
        let mut command = Command::new(python);
        command.arg(script).arg(folder).arg(serde_json::to_string(shapes)?);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = child.stdin.take().ok_or("piped above")?;
        let output = BufReader::new(child.stdout.take().ok_or("piped above")?);
        let mut peer = Peer { child, input, output };
        let version = peer.line()?;
        println!("peer: {version}");
        Ok(peer)
    }

    /// Seconds that the caller was blocked, and seconds until the step was committed.
    fn save(&mut self) -> Result<(Duration, Duration), Box<dyn Error>> {
        writeln!(self.input, "save")?;
        let line = self.line()?;
        let mut seconds = line.split(' ').map(|word| word.parse().map(Duration::from_secs_f64));
        let mut next = || seconds.next().ok_or("expected two numbers");
        Ok((next()??, next()??))
    }

    fn line(&mut self) -> Result<String, Box<dyn Error>> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        if line.is_empty() { Err("the peer ended".into()) } else { Ok(line.trim().to_owned()) }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = writeln!(self.input, "end");
        let _ = self.child.wait();
    }
}
