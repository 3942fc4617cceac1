//! The ids of every document of a file of JSON lines, for comparison with other programs:
//! `ids KIND MODEL FILE.jsonl OUT [PATTERN]` writes for each document how many ids it has and the
//! ids, as little-endian 32-bit numbers. `tests/readers/compare_ids.py` reads them.

#![expect(clippy::print_stderr, reason = "a program tells how fast it was")]

use std::fs::File;
use std::io::{BufRead as _, BufReader, BufWriter, Write as _};
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use preprocess::{TokenizerSpec, open_tokenizer};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [kind, model, input, out, rest @ ..] = arguments.as_slice() else {
        bail!("usage: ids KIND MODEL FILE.jsonl OUT [PATTERN]");
    };
    let spec = TokenizerSpec {
        kind: kind.clone(),
        model: Some(model.clone()),
        tiktoken_pattern: rest.first().cloned(),
        ..TokenizerSpec::default()
    };
    let tokenizer = open_tokenizer(&spec)?;
    let mut encoder = tokenizer.encoder();
    let mut out = BufWriter::new(File::create(out)?);
    let (mut ids, mut decoded) = (Vec::new(), Vec::new());
    let (mut text_bytes, mut seconds, mut changed) = (0_usize, 0.0, 0_usize);
    for line in BufReader::new(File::open(input)?).lines() {
        let document: serde_json::Value = serde_json::from_str(&line?)?;
        let text = document["text"].as_str().context("a document without text")?;
        let begun = Instant::now();
        ids.clear();
        encoder.encode(text, &mut ids);
        seconds += begun.elapsed().as_secs_f64();
        text_bytes += text.len();
        decoded.clear();
        tokenizer.decode(&ids, &mut decoded)?;
        changed += usize::from(!decoded.ends_with(text.as_bytes()));
        for number in std::iter::once(ids.len() as u32).chain(ids.iter().copied()) {
            out.write_all(&number.to_le_bytes())?;
        }
    }
    out.flush()?;
    let rate = text_bytes as f64 / 1e6 / seconds;
    let name = tokenizer.name();
    eprintln!("{name}: {text_bytes} bytes of text, {rate:.1} MB/s, {changed} decoded otherwise");
    Ok(())
}
