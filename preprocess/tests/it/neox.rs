//! Inputs as GPT-NeoX's `preprocess_data.py` reads them, with its flags.

use std::fs;
use std::process::Command;

use indexed::IndexedDataset;

use crate::common::byte_level::tokenizer_json;

/// A list is one text with blank lines between its items, an empty text is no document, and a file
/// of plain text is one document.
#[test]
fn lists_empty_texts_and_plain_text_match_gpt_neox() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    fs::write(at("tokenizer.json"), tokenizer_json().to_string()).unwrap();
    let lines = "{\"text\":[\"ab\",\"c\\u0064\",\"\"]}\n{\"text\":\"\"}\n{\"text\":[]}\n\
                 {\"text\":\"ef\"}\n";
    fs::write(at("a.jsonl"), lines).unwrap();
    fs::write(at("b.txt"), "g\n\nh\n").unwrap();
    let run = |inputs: String, prefix: &str, more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_preprocess"));
        command.args(["--input", &inputs, "--output-prefix", &at(prefix), "--workers", "2"]);
        command.args(["--tokenizer-model", &at("tokenizer.json"), "--append-eod"]);
        let output = command.args(more).output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{message}");
        let (store, key) = storage::locate(&at(&format!("{prefix}_text_document"))).unwrap();
        let dataset = IndexedDataset::open(&store, &key).unwrap();
        let documents = (0..dataset.document_count()).map(|document| dataset.document(document));
        let documents: Vec<_> = documents.map(|range| (range.start, range.end)).collect();
        let sequences = (0..dataset.sequence_count()).map(|seq| dataset.read_sequence(seq));
        let sequences: Vec<Vec<i64>> = sequences.map(Result::unwrap).collect();
        (sequences, documents, message)
    };
    let both = format!("{},{}", at("a.jsonl"), at("b.txt"));
    let neox = ["--tokenizer-type", "HFTokenizer", "--dataset-impl", "mmap"];
    let (sequences, documents, message) = run(both, "neox", &neox);
    let expected = [
        &[97, 98, 10, 10, 99, 100, 10, 10, 256][..],
        &[101, 102, 256],
        &[103, 10, 10, 104, 10, 256],
    ];
    assert_eq!(sequences, expected);
    assert_eq!(documents, [(0, 1), (1, 2), (2, 3)]);
    assert!(message.contains("--lists joined --empty-docs skip --txt-separator file"), "{message}");
    // The same with Megatron's flags.
    let megatron = ["--tokenizer-type", "HuggingFaceTokenizer"];
    let (sequences, documents, _) = run(at("a.jsonl"), "megatron", &megatron);
    assert_eq!(sequences, [&[97, 98][..], &[99, 100, 256], &[101, 102, 256]]);
    assert_eq!(documents, [(0, 2), (2, 2), (2, 2), (2, 3)]);
}
