//! MB of text per second on one core, ours and tiktoken's, on English and Chinese.
//!
//! `cargo bench -p preprocess [-- FILE...]`; a FILE is text to measure too.
#![expect(clippy::print_stdout, reason = "a benchmark prints what it measured")]

use std::time::{Duration, Instant};

use preprocess::{TokenizerSpec, open_tokenizer};

#[path = "../tests/common/mod.rs"]
mod common;

/// Long enough to leave the noise of starting behind.
const BYTES: usize = 8 << 20;

/// The best is the least disturbed.
const ROUNDS: usize = 5;

fn main() {
    let mut random = common::Random::new(1);
    let mut texts = vec![
        ("English-like".to_owned(), random.english(BYTES)),
        ("Chinese-like".to_owned(), random.chinese(BYTES / 3)),
    ];
    // cargo hands `--bench` on.
    for file in std::env::args().skip(1).filter(|arg| !arg.starts_with('-')) {
        let text = std::fs::read_to_string(&file).expect("a text in UTF-8");
        texts.push((file, text));
    }
    let spec = TokenizerSpec { kind: "gpt2".to_owned(), ..Default::default() };
    let ours = open_tokenizer(&spec).expect("it is built in");
    let theirs = tiktoken_rs::r50k_base().expect("it is built in");
    println!("| text | bytes/token | ours, first pass | ours | tiktoken-rs |");
    println!("|---|---|---|---|---|");
    for (name, text) in &texts {
        // Documents of a few thousand bytes, as corpora have.
        let documents: Vec<&str> = text.split_inclusive('\n').collect();
        let mut ids = Vec::new();
        let mut encoder = ours.encoder();
        let mut pass = || {
            ids.clear();
            for document in &documents {
                encoder.encode(document, &mut ids);
            }
        };
        let first = time(&mut pass);
        let again = best(&mut pass);
        let mut count = 0;
        let tiktoken = best(&mut || {
            count = documents.iter().map(|document| theirs.encode_ordinary(document).len()).sum();
        });
        assert_eq!(ids.len(), count, "both give as many tokens");
        let rate =
            |time: Duration| format!("{:.1} MB/s", text.len() as f64 / 1e6 / time.as_secs_f64());
        let per_token = text.len() as f64 / ids.len() as f64;
        println!(
            "| {name} | {per_token:.2} | {} | {} | {} |",
            rate(first),
            rate(again),
            rate(tiktoken)
        );
    }
}

fn best(pass: &mut dyn FnMut()) -> Duration {
    (0..ROUNDS).map(|_| time(pass)).min().unwrap_or_default()
}

fn time(pass: &mut dyn FnMut()) -> Duration {
    let start = Instant::now();
    pass();
    start.elapsed()
}
