//! The time to build a GPT index: `cargo bench -p indexed [-- DOCUMENTS [SEQ_LEN [FOLDER]]]`.
//! Default: ten million documents of 1 to 1,000 tokens, in samples of 2,048. The tokens are holes
//! in a sparse file: the benchmark does not read them. With a folder, which retains the documents,
//! the index is built once in memory, and the last line is JSON with the sums of its arrays: see
//! `scripts/bench_index.py`. `-- block` only measures how many positions of a block shuffle are
//! computed per second.

#![expect(clippy::print_stdout, reason = "a benchmark prints what it measured")]

use std::error::Error;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use indexed::rng::RandomState;
use indexed::{
    BlockShuffle, Builder, Dtype, GptIndex, GptIndexConfig, IndexedDataset, SampleRule, Split,
    build_sample_index,
};
use md5::{Digest as _, Md5};
use storage::{Key, Storage};

fn main() -> Result<(), Box<dyn Error>> {
    // Cargo passes `--bench`.
    let mut args = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).peekable();
    if args.peek().is_some_and(|arg| arg == "block") {
        return block_shuffle();
    }
    let documents = args.next().map_or(Ok(10_000_000), |arg| arg.parse())?;
    let seq_len = args.next().map_or(Ok(2048), |arg| arg.parse())?;
    if let Some(folder) = args.next() {
        return build_once(&folder, documents, seq_len);
    }
    let folder = tempfile::tempdir()?;
    let store = storage::open_url(folder.path().to_str().ok_or("a folder that is no UTF-8")?)?;
    let prefix = Key::new("a")?;
    time("Builder, 200,000 documents", || write(&store, &Key::new("b")?, 200_000))?;
    lay_out(folder.path(), documents)?;
    let dataset = time("open and check .idx", || Ok(IndexedDataset::open(&store, &prefix)?))?;
    println!("{documents} documents, {} tokens, seq_len {seq_len}", dataset.token_count());
    stages(documents as u32, seq_len)?;

    let config = config(seq_len);
    let index = time("GptIndex::build", || Ok(GptIndex::build(&dataset, Split::Train, &config)?))?;
    for what in ["GptIndex::load_or_build, building", "GptIndex::load_or_build, from the cache"] {
        time(what, || {
            let cache = Key::new("cache")?;
            let (part, store) = (Split::Train, store.as_ref());
            Ok(GptIndex::load_or_build(&dataset, part, &config, store, &cache)?)
        })?;
    }
    let mut parts = Vec::new();
    time("GptIndex::parts of every sample", || {
        (0..index.sample_count()).for_each(|sample| index.parts(&dataset, sample, &mut parts));
        Ok(())
    })
}

/// CPU time of the positions of an epoch of a billion samples, in both directions.
fn block_shuffle() -> Result<(), Box<dyn Error>> {
    const PLACES: u64 = 10_000_000;
    let (block, window) = (BlockShuffle::BLOCK_SAMPLES, BlockShuffle::WINDOW_BLOCKS);
    let order = BlockShuffle::new(1_000_000_007, block, window, 1234)?.epoch(0);
    for (what, forward) in [("sample at a position", true), ("position of a sample", false)] {
        let cpu = cpu_seconds()?;
        let at = |place| if forward { order.sample(place) } else { order.position(place) };
        let sum = (0..PLACES).map(at).fold(0, u64::wrapping_add);
        let rate = PLACES as f64 / (cpu_seconds()? - cpu) / 1e6;
        println!("{rate:8.1} million a second  {what}, block shuffle (sum {sum})");
    }
    Ok(())
}

fn config(seq_len: u64) -> GptIndexConfig {
    GptIndexConfig {
        dataset_path: "a".to_owned(),
        split: Some("1".to_owned()),
        seq_len,
        seed: 1234,
        num_samples: None,
        add_extra_token: true,
        drop_last_partial_valid: true,
        tokenizer: serde_json::Value::Null,
    }
}

/// As `peers/helpers.py`, with the same last line.
fn build_once(folder: &str, documents: u64, seq_len: u64) -> Result<(), Box<dyn Error>> {
    let store = storage::open_url(folder)?;
    let prefix = Key::new("a")?;
    if store.open(&prefix.with_suffix(".idx")?).is_err() {
        lay_out(Path::new(folder), documents)?;
    }
    let dataset = IndexedDataset::open(&store, &prefix)?;
    let (start, cpu) = (Instant::now(), cpu_seconds()?);
    let index = GptIndex::build(&dataset, Split::Train, &config(seq_len))?;
    let (wall_s, cpu_s) = (start.elapsed().as_secs_f64(), cpu_seconds()? - cpu);
    let arrays = [index.document_index(), index.sample_index(), index.shuffle_index()];
    let sums = arrays.map(|array| {
        let sum = Md5::digest(array.data());
        sum.iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    });
    println!("{}", serde_json::json!({ "wall_s": wall_s, "cpu_s": cpu_s, "md5": sums }));
    Ok(())
}

/// User and system time of this process, in seconds.
fn cpu_seconds() -> Result<f64, Box<dyn Error>> {
    const TICKS_A_SECOND: f64 = 100.0;
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let after_name = stat.rsplit_once(')').ok_or("no name in /proc/self/stat")?.1;
    let ticks = after_name.split_whitespace().skip(11).take(2);
    Ok(ticks.map(|text| text.parse::<f64>().unwrap_or(0.0)).sum::<f64>() / TICKS_A_SECOND)
}

/// Document, sample and shuffle index separately, as numpy and Megatron's C++ are measured.
fn stages(documents: u32, seq_len: u64) -> Result<(), Box<dyn Error>> {
    let tokens = lengths().take(documents as usize).map(u64::from).sum();
    let lengths: Vec<[u8; 4]> = lengths().take(documents as usize).map(u32::to_le_bytes).collect();
    let mut rng = RandomState::new(1234);
    let order = time("document index", || {
        let mut order: Vec<u32> = (0..documents).collect();
        rng.shuffle(&mut order);
        Ok(order)
    })?;
    let order: Vec<[u8; 4]> = order.iter().map(|seq| seq.to_le_bytes()).collect();
    let rule = SampleRule { seq_len, add_extra_token: true, keep_last_partial: false };
    let samples =
        time("sample index", || Ok(build_sample_index::<i32>(&lengths, &order, tokens, &rule)?))?;
    time("shuffle index", || {
        let mut order: Vec<u32> = (0..samples.shape()[0] as u32 - 1).collect();
        rng.shuffle(&mut order);
        Ok(())
    })
}

fn write(store: &Arc<dyn Storage>, prefix: &Key, documents: u64) -> Result<(), Box<dyn Error>> {
    let mut builder = Builder::create(store, prefix, Dtype::U8)?;
    let zeros = [0; 1001];
    for len in lengths().take(documents as usize) {
        builder.add_encoded(&zeros[..len as usize], &[len])?;
        builder.end_document()?;
    }
    builder.finish()?;
    Ok(())
}

/// A dataset of one sequence per document, with a `.bin` that takes no space.
fn lay_out(folder: &Path, documents: u64) -> Result<(), Box<dyn Error>> {
    let mut idx = BufWriter::new(File::create(folder.join("a.idx"))?);
    idx.write_all(b"MMIDIDX\0\0\x01\0\0\0\0\0\0\0\x01")?;
    idx.write_all(&documents.to_le_bytes())?;
    idx.write_all(&(documents + 1).to_le_bytes())?;
    let lengths = || lengths().take(documents as usize);
    for len in lengths() {
        idx.write_all(&len.to_le_bytes())?;
    }
    let mut end = 0_u64;
    for len in lengths() {
        idx.write_all(&end.to_le_bytes())?;
        end += u64::from(len);
    }
    for document in 0..=documents {
        idx.write_all(&document.to_le_bytes())?;
    }
    idx.flush()?;
    Ok(File::create(folder.join("a.bin"))?.set_len(end)?)
}

/// 1 to 1,000 tokens each, by a multiplicative generator that is simple in any language.
fn lengths() -> impl Iterator<Item = u32> {
    let next = |x: &u64| Some(x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
    std::iter::successors(Some(1), next).map(|x: u64| 1 + (x >> 33) as u32 % 1000)
}

fn time<T>(
    what: &str,
    run: impl FnOnce() -> Result<T, Box<dyn Error>>,
) -> Result<T, Box<dyn Error>> {
    let start = Instant::now();
    let result = run()?;
    println!("{:8.3} s  {what}", start.elapsed().as_secs_f64());
    Ok(result)
}
