//! Random reads of a reader compared with fio, alternating on the same file: same engine, block and
//! depth.
//!
//! ```text
//! cargo bench -p storage --bench reader -- [FOLDER] [MIB] [BLOCK] [DEPTH] [SECONDS] [OPTIONS]
//! ```
//!
//! fio reads by io_uring with `O_DIRECT`, once plainly and once with registered buffers and files.
//! The ratio is that of the medians of five turns.

#![expect(clippy::print_stdout, reason = "a benchmark prints its results")]

use std::error::Error;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use storage::{BufferPool, Key, Object, ReadRequest, Reader, ReaderOptions, Storage, open_url};

type Outcome<T> = Result<T, Box<dyn Error>>;

const TURNS: usize = 5;

#[derive(Clone, Copy)]
struct Load {
    block: usize,
    depth: usize,
    time: Duration,
}

fn main() -> Outcome<()> {
    // Cargo passes `--bench`.
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let number = |i: usize, default: usize| args.get(i).map_or(Ok(default), |text| text.parse());
    let base = args.first().map_or(".", String::as_str);
    let (mib, seconds) = (number(1, 1024)?, number(4, 3)?);
    let (block, depth) = (number(2, 8192)?, number(3, 64)?);
    let load = Load { block, depth, time: Duration::from_secs(seconds as u64) };
    let options = args.get(5).map_or("", String::as_str);

    let folder = tempfile::tempdir_in(base)?;
    let store = open_url(&format!("file:{}?{options}", folder.path().display()))?;
    let key = Key::new("bench")?;
    write(&*store, &key, mib)?;
    let path = folder.path().join("bench");
    println!("{mib} MiB, {block} bytes at random, {depth} at once; reads a second:");
    let mut turns: [Vec<f64>; 3] = Default::default();
    for _ in 0..TURNS {
        turns[0].push(fio(&path, load, false)?);
        turns[1].push(fio(&path, load, true)?);
        turns[2].push(reader_rate(&*store, &key, load)?);
        let last = turns.each_ref().map(|turn| turn[turn.len() - 1]);
        println!("fio {:9.0}   fio registered {:9.0}   reader {:9.0}", last[0], last[1], last[2]);
    }
    let [plain, registered, reader_rate] = turns.map(median);
    println!(
        "reader / fio {:.3}, / fio registered {:.3}",
        reader_rate / plain,
        reader_rate / registered
    );
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn write(store: &dyn Storage, key: &Key, mib: usize) -> Outcome<()> {
    let mut random = Random(88_172_645_463_325_252);
    let block: Vec<u8> = (0..(1 << 20) / 8).flat_map(|_| random.next().to_le_bytes()).collect();
    let mut upload = store.create(key, (mib as u64) << 20)?;
    for _ in 0..mib {
        upload.write(&block)?;
    }
    upload.finish()?;
    Ok(())
}

fn fio(path: &Path, load: Load, registered: bool) -> Outcome<f64> {
    let Load { block, depth, time } = load;
    let mut fio = Command::new("fio");
    fio.args(["--name=read", "--ioengine=io_uring", "--rw=randread", "--direct=1"]);
    fio.args(["--time_based", "--output-format=terse", "--terse-version=3", "--norandommap"]);
    fio.arg(format!("--filename={}", path.display()));
    fio.args([format!("--bs={block}"), format!("--iodepth={depth}")]);
    fio.arg(format!("--runtime={}", time.as_secs()));
    if registered {
        fio.args(["--fixedbufs", "--registerfiles"]);
    }
    let output = fio.output()?;
    let text = String::from_utf8(output.stdout)?;
    // The fields of the terse format: version, program, job, group, error, then of reads: KiB, KiB
    // a second, operations a second.
    let field = text.lines().find_map(|line| line.strip_prefix("3;")?.split(';').nth(6));
    Ok(field.ok_or("fio reported no rate")?.parse()?)
}

fn reader_rate(store: &dyn Storage, key: &Key, load: Load) -> Outcome<f64> {
    let object = store.open(key)?;
    let pool = BufferPool::new(load.depth * (load.block + 4096) + (1 << 20));
    let mut options = ReaderOptions::new(&pool);
    options.depth = Some(load.depth);
    let mut reader = store.reader(&options)?;
    let mut random = Random(42);
    let blocks = object.len_bytes() / load.block as u64;
    let (mut completions, mut count, mut last_tag) = (Vec::new(), 0_u64, 0);
    let started = Instant::now();
    while started.elapsed() < load.time {
        while reader.in_flight() < reader.depth_max() {
            let offset = random.next() % blocks * load.block as u64;
            reader.submit(request(&object, &pool, offset, load.block)?);
        }
        reader.wait(Instant::now() + Duration::from_secs(10), &mut completions)?;
        for one in completions.drain(..) {
            one.outcome?;
            count += 1;
            last_tag = one.tag;
        }
    }
    let rate = count as f64 / started.elapsed().as_secs_f64();
    drain(&mut *reader)?;
    std::hint::black_box(last_tag);
    Ok(rate)
}

fn request(
    object: &Arc<dyn Object>,
    pool: &Arc<BufferPool>,
    offset: u64,
    len: usize,
) -> Outcome<ReadRequest> {
    let buf = pool.take(len).ok_or("the pool is too small")?;
    Ok(ReadRequest { object: Arc::clone(object), offset, len, buf, tag: offset, deadline: None })
}

fn drain(reader: &mut dyn Reader) -> Outcome<()> {
    while reader.in_flight() > 0 {
        reader.wait(Instant::now() + Duration::from_secs(10), &mut Vec::new())?;
    }
    Ok(())
}

/// Xorshift: offsets and bytes without a pattern.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}
