//! Write and read rates of one folder, by engine, with direct and with buffered I/O.
//!
//! ```text
//! cargo bench -p storage --bench io -- [FOLDER] [MIB]
//! ```
//!
//! Reads are cold: the file is written with direct I/O, or dropped from the page cache before each.

#![expect(clippy::print_stdout, reason = "a benchmark prints its results")]

use std::error::Error;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use storage::{Key, RangeRead, Storage, open_url, rate_text};

const MIB: usize = 1 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    // Cargo passes `--bench`.
    let mut args = std::env::args().skip(1).filter(|arg| !arg.starts_with("--"));
    let base = args.next().unwrap_or_else(|| ".".to_owned());
    let len = args.next().map_or(Ok(1024), |text| text.parse::<usize>())? * MIB;
    let folder = tempfile::tempdir_in(&base)?;
    let root = folder.path().display();
    println!("{} MiB in {root}, {} MiB written by std with buffered I/O:", len / MIB, len / MIB);
    by_std(&folder.path().join("std"), len)?;
    for engine in ["ring", "pread"] {
        for direct in ["on", "off"] {
            let url = format!("file:{root}?engine={engine}&direct={direct}");
            let Ok(store) = open_url(&url) else {
                println!("{engine:5} direct={direct:3}  not available here");
                continue;
            };
            println!("{engine:5} direct={direct:3}  {}", bench(&*store, folder.path(), len)?);
        }
    }
    Ok(())
}

fn bench(store: &dyn Storage, folder: &Path, len: usize) -> Result<String, Box<dyn Error>> {
    let key = Key::new("bench")?;
    let block = noise(4 * MIB);
    let started = Instant::now();
    let mut upload = store.create(&key, len as u64)?;
    for _ in 0..len / block.len() {
        upload.write(&block)?;
    }
    upload.finish()?;
    let written = rate_text(len as u64, started.elapsed());

    let file = folder.join("bench");
    let object = store.open(&key)?;
    let mut buf = vec![0; 64 * MIB];
    drop_from_cache(&file)?;
    let started = Instant::now();
    for offset in (0..len).step_by(buf.len()) {
        let buf = &mut buf[..(len - offset).min(64 * MIB)];
        object.read_many(&mut [RangeRead { offset: offset as u64, buf }])?;
    }
    let streamed = rate_text(len as u64, started.elapsed());

    drop_from_cache(&file)?;
    let cold = samples(&*object, len)?;
    let warm = samples(&*object, len)?;
    store.delete(&key)?;
    let count = (BATCHES * BATCH) as f64;
    let per_second = |time: Duration| count / time.as_secs_f64();
    Ok(format!(
        "write+fsync {written:>13}   read {streamed:>13}   \
         8 KiB reads/s: cold {:>8.0}, warm {:>8.0}",
        per_second(cold),
        per_second(warm)
    ))
}

/// Batches of a loader: 64 samples of 8 KiB, at random offsets that are equal in every run.
const BATCHES: usize = 200;
const BATCH: usize = 64;

fn samples(object: &dyn storage::Object, len: usize) -> Result<Duration, Box<dyn Error>> {
    let mut bufs = vec![vec![0; 8192]; BATCH];
    let mut state = 1_u64;
    let started = Instant::now();
    for _ in 0..BATCHES {
        let mut reads: Vec<_> = bufs
            .iter_mut()
            .map(|buf| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                RangeRead { offset: (state >> 16) % (len as u64 - 8192), buf }
            })
            .collect();
        object.read_many(&mut reads)?;
    }
    Ok(started.elapsed())
}

/// Plain reads and writes by the standard library, for comparison.
fn by_std(path: &Path, len: usize) -> Result<(), Box<dyn Error>> {
    let block = noise(4 * MIB);
    let started = Instant::now();
    let mut file = File::create_new(path)?;
    for _ in 0..len / block.len() {
        file.write_all(&block)?;
    }
    file.sync_all()?;
    let written = rate_text(len as u64, started.elapsed());
    drop_from_cache(path)?;
    let mut buf = vec![0; 4 * MIB];
    let started = Instant::now();
    let mut file = File::open(path)?;
    while file.read(&mut buf)? > 0 {}
    println!(
        "std               write+fsync {written:>13}   read {:>13}",
        rate_text(len as u64, started.elapsed())
    );
    std::fs::remove_file(path)?;
    Ok(())
}

/// Clean pages of one file are dropped by coreutils' `dd`, without root.
fn drop_from_cache(path: &Path) -> Result<(), Box<dyn Error>> {
    let input = format!("if={}", path.display());
    let status =
        Command::new("dd").args([&input, "iflag=nocache", "count=0", "status=none"]).status()?;
    if status.success() { Ok(()) } else { Err("dd could not drop the file from the cache".into()) }
}

/// Bytes that no layer can compress.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 88_172_645_463_325_252_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..len / 8).flat_map(|_| next()).collect()
}
