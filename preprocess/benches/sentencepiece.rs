//! Seconds to encode the texts of a file with a SentencePiece model on one core, and their ids.
//!
//! `cargo bench -p preprocess --bench sentencepiece -- MODEL JSONL [IDS]` prints the result as
//! JSON. For each text it writes the number of its ids and the ids to IDS, as little-endian u32.
//! `benches/peers/sentencepiece_encode.py` runs this and the C++ library in turn, compares the ids
//! and prints the ratio.
#![expect(clippy::print_stdout, reason = "a benchmark prints what it measured")]

use std::time::Instant;

use preprocess::{TokenizerSpec, open_tokenizer};

fn main() {
    // cargo passes `--bench`.
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let [model, jsonl, rest @ ..] = args.as_slice() else {
        println!("SKIPPED sentencepiece: it takes MODEL JSONL [IDS]");
        return;
    };
    let lines = std::fs::read_to_string(jsonl).expect("a file of JSON lines");
    let text_of = |line: &str| -> String {
        let value: serde_json::Value = serde_json::from_str(line).expect("a JSON line");
        value["text"].as_str().expect("a text").to_owned()
    };
    let texts: Vec<String> = lines.lines().map(text_of).collect();
    let kind = "sentencepiece".to_owned();
    let spec = TokenizerSpec { kind, model: Some(model.clone()), ..Default::default() };
    let tokenizer = open_tokenizer(&spec).expect("a model");
    let mut encoder = tokenizer.encoder();
    let (mut ids, mut counts) = (Vec::new(), Vec::new());
    let start = Instant::now();
    for text in &texts {
        encoder.encode(text, &mut ids);
        counts.push(ids.len());
    }
    let seconds = start.elapsed().as_secs_f64();
    let bytes: usize = texts.iter().map(String::len).sum();
    println!(
        "{{\"seconds\": {seconds}, \"text_bytes\": {bytes}, \"documents\": {}, \"ids\": {}}}",
        texts.len(),
        ids.len()
    );
    if let Some(file) = rest.first() {
        let mut out = Vec::with_capacity(4 * (ids.len() + counts.len()));
        let mut from = 0;
        for to in counts {
            out.extend_from_slice(&u32::try_from(to - from).expect("fewer ids").to_le_bytes());
            out.extend(ids[from..to].iter().flat_map(|id| id.to_le_bytes()));
            from = to;
        }
        std::fs::write(file, out).expect("a place to write to");
    }
}
