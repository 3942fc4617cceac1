//! MB of text per second on one core, by Feedline and by tiktoken, on English and Chinese.
//!
//! `cargo bench -p preprocess [-- [--alone] FILE...]`; `--alone` runs without tiktoken. A FILE is
//! measured, too: each line of a text, or the text under the key `text` of each line if its name
//! ends in `.jsonl`, is a document. Run it under `taskset -c 0`, and then
//! `benches/peers/gigatoken_encode.py` on the same JSON lines.
#![expect(clippy::print_stdout, reason = "a benchmark prints what it measured")]

use std::time::{Duration, Instant};

use preprocess::{TokenizerSpec, open_tokenizer};

#[path = "../tests/it/common/mod.rs"]
mod common;

/// Enough text that startup does not matter.
const BYTES: usize = 8 << 20;

/// The best round is the least disturbed.
const ROUNDS: usize = 5;

fn main() {
    let mut random = common::Random::new(1);
    let mut texts = vec![
        ("English-like".to_owned(), lines(&random.english(BYTES))),
        ("Chinese-like".to_owned(), lines(&random.chinese(BYTES / 3))),
    ];
    let alone = std::env::args().any(|arg| arg == "--alone");
    // cargo passes `--bench`.
    for file in std::env::args().skip(1).filter(|arg| !arg.starts_with('-')) {
        let text = std::fs::read_to_string(&file).expect("a text in UTF-8");
        let documents = if file.ends_with(".jsonl") {
            text.lines().map(text_of).collect()
        } else {
            lines(&text)
        };
        texts.push((file, documents));
    }
    let spec = TokenizerSpec { kind: "gpt2".to_owned(), ..Default::default() };
    let ours = open_tokenizer(&spec).expect("it is built in");
    let theirs = tiktoken_rs::r50k_base().expect("it is built in");
    println!("| text | bytes/token | ours, first pass | ours | tiktoken-rs |");
    println!("|---|---|---|---|---|");
    for (name, documents) in &texts {
        let bytes: usize = documents.iter().map(String::len).sum();
        let mut ids = Vec::new();
        let mut encoder = ours.encoder();
        let mut pass = || {
            ids.clear();
            for document in documents {
                encoder.encode(document, &mut ids);
            }
        };
        let first = time(&mut pass);
        let again = best(&mut pass);
        let tiktoken = (!alone).then(|| {
            let mut count = 0;
            let time = best(&mut || {
                count =
                    documents.iter().map(|document| theirs.encode_ordinary(document).len()).sum();
            });
            assert_eq!(ids.len(), count, "token counts differ");
            time
        });
        let rate = |time: Duration| format!("{:.1} MB/s", bytes as f64 / 1e6 / time.as_secs_f64());
        let per_token = bytes as f64 / ids.len() as f64;
        println!(
            "| {name} | {per_token:.2} | {} | {} | {} |",
            rate(first),
            rate(again),
            tiktoken.map_or_else(String::new, rate)
        );
    }
}

fn lines(text: &str) -> Vec<String> {
    text.split_inclusive('\n').map(str::to_owned).collect()
}

fn text_of(line: &str) -> String {
    let mut object: serde_json::Value = serde_json::from_str(line).expect("a line of JSON");
    match object["text"].take() {
        serde_json::Value::String(text) => text,
        other => panic!("a string under the key 'text', not {other}"),
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
