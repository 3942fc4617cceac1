//! Other packages compared with Feedline's engines, in turn; medians of five rounds.
//!
//! ```text
//! cd preprocess/benches/peers/packages && cargo run --release -- WHAT CORPUS.jsonl
//! ```
//!
//! `jieba` splits the texts into words with jieba-rs and with [`Jieba`], on one core.
//! `rayon` writes a dataset of GPT-2 tokens from lines in memory: `par_iter` encodes batches
//! of 8 MiB, which are written in order, on one thread and on two. It is compared with
//! `preprocess --workers 1` and `2` in PATH on the same file.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use indexed::{Builder, Dtype};
use preprocess::{Encoder, Jieba, TokenizerSpec, open_tokenizer};
use rayon::prelude::*;

/// The median of an odd number.
const ROUNDS: usize = 5;

/// Fewest lines that a thread takes at a time.
const LINES_MIN: usize = 16;

/// Bytes of lines in a batch, after which rayon's threads wait for one another.
const BATCH_BYTES: usize = 8 << 20;

thread_local! {
    /// Caches the ids of words, as each worker of `preprocess` does.
    static ENCODER: RefCell<Option<Box<dyn Encoder>>> = const { RefCell::new(None) };
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match &args[..] {
        [what, corpus] if what == "jieba" => jieba(corpus),
        [what, corpus] if what == "rayon" => rayon(corpus),
        _ => println!("give jieba or rayon, and a corpus of JSON lines"),
    }
}

fn jieba(corpus: &str) {
    let lines = fs::read_to_string(corpus).expect("a corpus in UTF-8");
    let texts: Vec<String> = lines.lines().map(text).collect();
    let bytes: usize = texts.iter().map(String::len).sum();
    let ours = Jieba::built_in();
    let peer = jieba_rs::Jieba::new();
    let (mut rates, mut words) = ([const { Vec::new() }; 2], [0, 0]);
    for _ in 0..ROUNDS {
        let start = Instant::now();
        words[0] = texts.iter().map(|text| ours.cut(text).len()).sum();
        rates[0].push(bytes as f64 / 1e6 / start.elapsed().as_secs_f64());
        let start = Instant::now();
        words[1] = texts.iter().map(|text| peer.cut(text, true).len()).sum();
        rates[1].push(bytes as f64 / 1e6 / start.elapsed().as_secs_f64());
    }
    let same = texts.iter().filter(|text| ours.cut(text) == peer.cut(text, true)).count();
    let [ours, peer] = rates.map(median);
    println!(
        "{:.1} MB: ours {ours:.1} MB/s, {} words; jieba-rs {peer:.1} MB/s, {} words; ratio {:.2}; \
         {same} of {} texts are split alike",
        bytes as f64 / 1e6,
        words[0],
        words[1],
        ours / peer,
        texts.len()
    );
}

fn rayon(corpus: &str) {
    let bytes = fs::metadata(corpus).expect("a corpus").len() as f64 / 1e6;
    let folder = std::env::temp_dir().join(format!("packages-{}", std::process::id()));
    let mut rates = [const { Vec::new() }; 4];
    for _ in 0..ROUNDS {
        for threads in [1, 2] {
            let seconds = time_preprocess(corpus, &folder, threads);
            rates[threads - 1].push(bytes / seconds);
            let seconds = time_rayon(corpus, &folder, threads);
            rates[threads + 1].push(bytes / seconds);
        }
    }
    let [ours, ours_2, peer, peer_2] = rates.map(median);
    println!(
        "{bytes:.1} MB: ours {ours:.0} MB/s, on two threads {ours_2:.0} ({:.2}); rayon {peer:.0}, \
         {peer_2:.0} ({:.2}); ratio {:.2}, {:.2}",
        ours_2 / ours,
        peer_2 / peer,
        ours / peer,
        ours_2 / peer_2
    );
}

/// Seconds from the start of the process until all files are written.
fn time_preprocess(corpus: &str, folder: &Path, threads: usize) -> f64 {
    let start = Instant::now();
    let done = Command::new("preprocess")
        .args(["--json-in", corpus, "--tokenizer", "gpt2", "--out"])
        .arg(folder.join("ours"))
        .args(["--workers", &threads.to_string()])
        .output()
        .expect("preprocess is in PATH");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let seconds = start.elapsed().as_secs_f64();
    fs::remove_dir_all(folder).expect("it was created above");
    seconds
}

fn time_rayon(corpus: &str, folder: &Path, threads: usize) -> f64 {
    let start = Instant::now();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
    let spec = TokenizerSpec { kind: "gpt2".to_owned(), ..TokenizerSpec::default() };
    // Leaked, because the encoders of the threads borrow it.
    let tokenizer = Box::leak(Box::new(open_tokenizer(&spec).expect("it is built in")));
    fs::create_dir_all(folder).expect("a temporary folder");
    let (store, key) = storage::locate(folder.join("peer").to_str().unwrap()).expect("a path");
    let mut builder = Builder::create(&store, &key, Dtype::U16).expect("room");
    let bytes = fs::read_to_string(corpus).expect("a corpus in UTF-8");
    let lines: Vec<&str> = bytes.lines().collect();
    let mut rest = &lines[..];
    while !rest.is_empty() {
        let mut size = 0;
        let fits = rest.iter().take_while(|line| {
            size += line.len();
            size <= BATCH_BYTES
        });
        let (batch, after) = rest.split_at(fits.count().max(1));
        rest = after;
        let encoded: Vec<Vec<u32>> = pool.install(|| {
            let encode = |line: &&str| {
                ENCODER.with_borrow_mut(|encoder| {
                    let encoder = encoder.get_or_insert_with(|| tokenizer.encoder());
                    let mut ids = Vec::new();
                    encoder.encode(&text(line), &mut ids);
                    ids
                })
            };
            batch.par_iter().with_min_len(LINES_MIN).map(encode).collect()
        });
        for ids in encoded {
            builder.add_sequence(&ids).expect("room");
            builder.end_document().expect("room");
        }
    }
    builder.finish().expect("room");
    let seconds = start.elapsed().as_secs_f64();
    fs::remove_dir_all(folder).expect("it was created above");
    seconds
}

fn text(line: &str) -> String {
    let mut document: serde_json::Value = serde_json::from_str(line).expect("JSON");
    match document["text"].take() {
        serde_json::Value::String(text) => text,
        other => panic!("expected a text, found {other}"),
    }
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}
