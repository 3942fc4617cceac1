//! MB of text per second of CPU time of the tokenizers that split text into words: jieba's words
//! alone, then the ids of a tokenizer. The implementations to compare with are in `peers/`.
//!
//! `cargo bench -p preprocess --bench words -- CORPUS.jsonl [KIND VOCAB [OUT]]`
//!
//! With OUT it writes the ids as one JSON list per line, as the peers do. With KIND `words` and any
//! VOCAB it writes jieba's words.
#![expect(clippy::print_stdout, reason = "a benchmark prints what it measured")]

use std::io::{BufRead as _, BufReader, BufWriter, Write as _};

use preprocess::{Jieba, TokenizerSpec, open_tokenizer};

/// The median of an odd number.
const ROUNDS: usize = 5;

fn main() {
    // cargo passes `--bench`.
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let Some(corpus) = args.first() else { return println!("give a corpus of JSON lines") };
    let lines = BufReader::new(std::fs::File::open(corpus).expect("a corpus")).lines();
    let texts: Vec<String> = lines.map(|line| text(&line.expect("UTF-8"))).collect();
    let bytes: usize = texts.iter().map(String::len).sum();
    println!("{corpus}: {} documents, {:.1} MB of text", texts.len(), bytes as f64 / 1e6);

    let start = cpu_seconds();
    let jieba = Jieba::built_in();
    println!("jieba's dictionary built in {:.3} s", cpu_seconds() - start);
    let mut words = 0;
    let rate = median(bytes, || words = texts.iter().map(|text| jieba.cut(text).len()).sum());
    println!("jieba: {words} words, {rate:.1} MB/s");

    let [kind, vocab] = [1, 2].map(|at| args.get(at).cloned());
    let Some(kind) = kind else { return };
    let mut out = args.get(3).map(|out| BufWriter::new(std::fs::File::create(out).expect("OUT")));
    let mut write = |list: serde_json::Value| {
        if let Some(out) = &mut out {
            writeln!(out, "{list}").expect("room for it");
        }
    };
    if kind == "words" {
        return texts.iter().for_each(|text| write(jieba.cut(text).into()));
    }
    let spec = TokenizerSpec { kind, vocab_file: vocab, ..TokenizerSpec::default() };
    let tokenizer = open_tokenizer(&spec).expect("a tokenizer");
    let mut encoder = tokenizer.encoder();
    let mut ids = Vec::new();
    let mut count = 0;
    let rate = median(bytes, || {
        count = 0;
        for text in &texts {
            ids.clear();
            encoder.encode(text, &mut ids);
            count += ids.len();
        }
    });
    println!("{}: {count} ids, {rate:.1} MB/s", tokenizer.name());
    for text in &texts {
        ids.clear();
        encoder.encode(text, &mut ids);
        write(ids.clone().into());
    }
}

fn text(line: &str) -> String {
    let document: serde_json::Value = serde_json::from_str(line).expect("JSON");
    document["text"].as_str().expect("a text").to_owned()
}

/// MB per second of this thread's CPU time, since other processes may use the core.
fn median(bytes: usize, mut pass: impl FnMut()) -> f64 {
    let mut rates: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start = cpu_seconds();
            pass();
            bytes as f64 / 1e6 / (cpu_seconds() - start)
        })
        .collect();
    rates.sort_by(f64::total_cmp);
    rates[ROUNDS / 2]
}

/// CPU time of this thread.
fn cpu_seconds() -> f64 {
    let times = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux");
    let nanoseconds = times.split(' ').next().and_then(|first| first.parse::<f64>().ok());
    nanoseconds.expect("the first field is CPU time") / 1e9
}
