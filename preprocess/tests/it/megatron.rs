//! Other inputs of Megatron's `preprocess_data.py`: lists of sentences, texts of token ids, and
//! additional special tokens.
use std::fs;
use std::process::{Command, Output};

use preprocess::{TokenizerSpec, open_tokenizer};

/// Runs on these lines. Returns the `.bin` in words of `ITEM` bytes, the lengths of sequences and
/// the document index.
fn run<const ITEM: usize>(lines: &str, more: &[&str]) -> Result<Written, Output> {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("in.jsonl"), lines).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_preprocess"));
    command.arg("--input").arg(at("in.jsonl")).arg("--output-prefix").arg(at("out"));
    let output = command.arg("--quiet").args(more).output().unwrap();
    if !output.status.success() {
        let entries: Vec<_> = fs::read_dir(folder.path()).unwrap().collect();
        assert_eq!(entries.len(), 1, "{entries:?}");
        return Err(output);
    }
    let bin = fs::read(at("out_text_document.bin")).unwrap();
    let idx = fs::read(at("out_text_document.idx")).unwrap();
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |all, &byte| (all << 8) | u64::from(byte));
    let words = |bytes: &[u8], len: usize| bytes.chunks(len).map(word).collect();
    let [sequences, documents] = [18, 26].map(|at| word(&idx[at..at + 8]) as usize);
    let (lens, rest) = idx[34..].split_at(4 * sequences);
    assert_eq!(rest.len(), 8 * (sequences + documents));
    Ok(Written {
        ids: words(&bin, ITEM),
        lens: words(lens, 4),
        documents: words(&rest[8 * sequences..], 8),
    })
}

#[derive(Debug)]
struct Written {
    ids: Vec<u64>,
    lens: Vec<u64>,
    documents: Vec<u64>,
}

fn error_message(run: Result<Written, Output>) -> String {
    let output = run.unwrap_err();
    assert_eq!(output.status.code(), Some(2));
    String::from_utf8(output.stderr).unwrap()
}

/// As `Encoder.encode` of `preprocess_data.py`: each string of a list is a sequence unless it is
/// empty, and the end token is part of the last. "Hello world" is 15496 995, "!" is 0 and the end
/// 50256.
#[test]
fn a_list_is_a_document_of_sentences() {
    let lines = r#"{"text": ["Hello world", "", "\u0021"]}
{"text": "!"}
{"text": [ ]}
{"n": [1, ["text"]], "text" : [ "!" ,"Hello world" ] }
"#;
    let written = run::<2>(lines, &["--append-eod"]).unwrap();
    assert_eq!(written.ids, [15496, 995, 0, 50256, 0, 50256, 0, 15496, 995, 50256]);
    assert_eq!(written.lens, [2, 2, 2, 1, 3]);
    assert_eq!(written.documents, [0, 2, 3, 3, 5]);
    let written = run::<2>(lines, &["--append-eod", "--empty-docs", "sequence"]).unwrap();
    assert_eq!(written.lens, [2, 2, 2, 1, 1, 3]);
    assert_eq!(written.documents, [0, 2, 3, 4, 6]);
}

#[test]
fn a_list_of_something_else_is_a_bad_line() {
    let bad = error_message(run::<2>("{\"text\":\"a\"}\n{\"text\":[\"a\", 1]}\n", &[]));
    assert!(bad.contains("line 2") && bad.contains("at byte 14 of the line"), "{bad}");
    assert!(bad.contains("found a number in the list under the key 'text'"), "{bad}");
    let half = error_message(run::<2>("{\"text\":[\"a\",\"\\ud800\"]}\n", &[]));
    assert!(half.contains("half of a surrogate pair"), "{half}");
    let skipped = run::<2>("{\"text\":[\"!\",{}]}\n{\"text\":\"!\"}\n", &["--on-error", "skip"]);
    assert_eq!(skipped.unwrap().lens, [1], "nothing of a bad line is written");
    let split = error_message(run::<2>("{\"text\":[\"a\"]}\n", &["--split-sentences"]));
    assert!(split.contains("remove --split-sentences"), "{split}");
    let spans = error_message(run::<2>("{\"text\":[\"a\"]}\n", &["--objective", "cpm2"]));
    assert!(spans.contains("expected a string, found a list under the key 'text'"), "{spans}");
}

/// `NullTokenizer`: `int` of each word between spaces.
#[test]
fn null_tokenizer_reads_texts_as_ids() {
    let flags = ["--tokenizer-type", "NullTokenizer", "--append-eod", "--vocab-size"];
    let lines = "{\"text\": \"3 99 0\"}\n{\"text\": \"\"}\n{\"text\": [\" 7\\n\", \"+8\"]}\n";
    let written = run::<2>(lines, &[&flags[..], &["100"]].concat()).unwrap();
    assert_eq!(written.ids, [3, 99, 0, 99, 7, 8, 99]);
    assert_eq!((written.lens, written.documents), (vec![4, 1, 2], vec![0, 1, 1, 3]));
    let more = ["65500", "--null-tokenizer-eod-id", "1", "--null-tokenizer-pad-id", "-1"];
    let written = run::<4>(lines, &[&flags[..], &more].concat()).unwrap();
    assert_eq!(written.ids, [3, 99, 0, 1, 7, 8, 1]);

    let bad = error_message(run::<2>("{\"text\":\"1 100\"}\n", &[&flags[..], &["100"]].concat()));
    assert!(bad.contains("expected ids below 100, separated by spaces, found '100'"), "{bad}");
    for word in ["-1", "1.0", "a", "1_0", "99999999999"] {
        let line = format!("{{\"text\":\"5 {word} 6\"}}\n");
        let bad = error_message(run::<2>(&line, &[&flags[..], &["100"]].concat()));
        assert!(bad.contains(&format!("'{word}'")), "{bad}");
    }
    let none = error_message(run::<2>(lines, &flags[..3]));
    assert!(none.contains("--vocab-size: expected") && none.contains("found none"), "{none}");
    let beyond = ["9", "--null-tokenizer-eod-id", "9"];
    let beyond = error_message(run::<2>(lines, &[&flags[..], &beyond].concat()));
    assert!(
        beyond.contains("--null-tokenizer-eod-id: expected") && beyond.contains("found 9"),
        "{beyond}"
    );
}

/// A long document of ids is encoded in parts by several threads, to the same ids.
#[test]
fn many_ids_are_the_same_in_parts() {
    let ids: Vec<u64> = (0..700_000).map(|at| at * 7919 % 60_000).collect();
    let text: Vec<_> = ids.iter().map(u64::to_string).collect();
    let lines = format!("{{\"text\":\"{}\"}}\n", text.join(" "));
    let flags = ["--tokenizer", "null", "--vocab-size", "60000", "--workers", "3"];
    assert_eq!(run::<2>(&lines, &flags).unwrap().ids, ids);
}

/// Ids as `tokenizers` 0.23 assigns them when the same tokens are added to GPT-2's vocabulary: a
/// token that is in the vocabulary keeps its id.
#[test]
fn more_special_tokens_of_gpt2() {
    let special_tokens = ["<a>", "<|endoftext|>", "<a> b"].map(str::to_owned).to_vec();
    let spec = TokenizerSpec { kind: "gpt2".to_owned(), special_tokens, ..Default::default() };
    let tokenizer = open_tokenizer(&spec).unwrap();
    let plain = TokenizerSpec { special_tokens: Vec::new(), ..spec };
    let plain = open_tokenizer(&plain).unwrap();
    assert_eq!((tokenizer.vocab_size(), tokenizer.eod()), (50_259, Some(50_256)));
    assert_ne!(tokenizer.fingerprint(), plain.fingerprint());
    let mut ids = Vec::new();
    tokenizer.encode("Hello world<a> b!<a><|endoftext|>Hello", &mut ids);
    assert_eq!(ids, [15496, 995, 50_258, 0, 50_257, 50_256, 15496]);
    let mut again = Vec::new();
    tokenizer.encoder().encode("Hello world<a> b!<a><|endoftext|>Hello", &mut again);
    assert_eq!(again, ids);
    let mut text = Vec::new();
    tokenizer.decode(&ids, &mut text).unwrap();
    assert_eq!(text, b"Hello world<a> b!<a><|endoftext|>Hello");
    assert!(tokenizer.decode(&[50_259], &mut text).is_err());
}

/// Otherwise they would be ignored silently.
#[test]
fn special_tokens_are_refused_by_sentencepiece() {
    let refused = error_message(run::<2>(
        "{\"text\":\"a\"}\n",
        &["--tokenizer-special-tokens", "<a>", "--tokenizer", "sentencepiece"],
    ));
    assert!(
        refused.contains("--tokenizer-special-tokens: expected") && refused.contains("found <a>"),
        "{refused}"
    );
}
