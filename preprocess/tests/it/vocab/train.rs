//! Tokenizers trained on the demo's corpus: the same files for any number of workers, and the same
//! ids from both files.
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use preprocess::train::{ModelType, TrainOptions, TrainProgress, TrainedTokenizer, train};
use preprocess::{Error, Result, Tokenizer, TokenizerSpec, open_tokenizer};
use serde_json::{Value, json};

use crate::common::{Random, print_seed};

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../demo");

/// Difficult texts: spaces, names of bytes and of special tokens, runs, rare characters.
const TEXTS: [&str; 14] = [
    "",
    " ",
    "   ",
    " a  b   c ",
    "\u{2581}a\u{2581}\u{2581}b",
    "line\n\nline\r\n\tindented",
    "<0x41><0x0A> <0x",
    "------------------------------- ====== ......",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "1234567890 3.14159 0xFFFF",
    "床前明月光，疑是地上霜。",
    "mixed 明月 and \u{1f980} crab\u{301}",
    "\u{0}\u{1}\u{7f}\u{feff}",
    "I'd've thought: (that) \"quotes\" aren't words...",
];

fn options(model_type: ModelType, vocab_size: u64) -> TrainOptions {
    let corpus = format!("{DEMO}/data/corpus.jsonl.zst");
    TrainOptions { workers: 2, ..TrainOptions::new(vec![corpus], model_type, vocab_size) }
}

fn trained(options: &TrainOptions) -> Result<TrainedTokenizer> {
    train(options, &AtomicBool::new(false), &mut |_| {})
}

fn save(trained: &TrainedTokenizer, folder: &Path) {
    for (name, bytes) in &trained.files {
        fs::write(folder.join(name), bytes).unwrap();
    }
}

fn open(kind: &str, file: &Path) -> Arc<dyn Tokenizer> {
    let model = Some(file.to_str().unwrap().to_owned());
    open_tokenizer(&TokenizerSpec { kind: kind.to_owned(), model, ..TokenizerSpec::default() })
        .unwrap()
}

fn encode(tokenizer: &dyn Tokenizer, text: &str) -> Vec<u32> {
    let mut ids = Vec::new();
    tokenizer.encode(text, &mut ids);
    ids
}

/// Texts of the corpus, the difficult texts, and random texts.
fn texts() -> Vec<String> {
    let mut random = Random::new(print_seed("train", 7));
    let corpus = fs::read(format!("{DEMO}/data/corpus.jsonl.zst")).unwrap();
    let corpus = String::from_utf8(zstd::decode_all(&corpus[..]).unwrap()).unwrap();
    let text = |line: &str| serde_json::from_str::<Value>(line).unwrap()["text"].clone();
    let text = |line| text(line).as_str().unwrap().to_owned();
    let mut texts: Vec<String> = corpus.lines().step_by(4).map(text).collect();
    texts.extend(TEXTS.map(str::to_owned));
    texts.extend((0..300).map(|_| random.soup(40)));
    texts
}

#[test]
fn both_files_give_the_same_ids_for_any_number_of_workers() {
    for model_type in [ModelType::Bpe, ModelType::Unigram] {
        let options = options(model_type, 6000);
        let first = trained(&options).unwrap();
        for workers in [1, 3] {
            let again = trained(&TrainOptions { workers, ..options.clone() }).unwrap();
            assert!(again.files == first.files, "{model_type:?}, {workers} workers");
        }
        let folder = tempfile::tempdir().unwrap();
        save(&first, folder.path());
        let json = open("hf", &folder.path().join("tokenizer.json"));
        let model = open("sentencepiece", &folder.path().join("tokenizer.model"));
        assert_eq!((json.vocab_size(), model.vocab_size()), (6000, 6000));
        assert_eq!(model.eod(), Some(2));
        for text in texts() {
            let ids = encode(model.as_ref(), &text);
            assert_eq!(encode(json.as_ref(), &text), ids, "{model_type:?}: {text:?}");
            let mut decoded = Vec::new();
            model.decode(&ids, &mut decoded).unwrap();
            assert_eq!(String::from_utf8(decoded).unwrap(), text.replace('\u{2581}', " "));
        }
    }
}

/// The demo's tokenizer was trained by the Python package `tokenizers`.
#[test]
fn byte_merges_match_hugging_face() {
    let folder = tempfile::tempdir().unwrap();
    let corpus = fs::read(format!("{DEMO}/data/corpus.jsonl.zst")).unwrap();
    let english = folder.path().join("english.jsonl");
    let lines = String::from_utf8(zstd::decode_all(&corpus[..]).unwrap()).unwrap();
    let is_english = |line: &&str| !line.contains("poetry");
    let lines: Vec<&str> = lines.lines().filter(is_english).collect();
    assert_eq!(lines.len(), 379);
    fs::write(&english, lines.join("\n")).unwrap();
    let mut options = options(ModelType::ByteBpe, 2048);
    options.inputs = vec![english.to_str().unwrap().to_owned()];
    let ours = trained(&options).unwrap();
    let model = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap()["model"].clone();
    let theirs = model(&fs::read(format!("{DEMO}/tokenizer.json")).unwrap());
    let ours = model(&ours.files[0].1);
    assert_eq!(ours["vocab"], theirs["vocab"]);
    assert_eq!(ours["merges"], theirs["merges"]);
}

#[test]
fn wordpiece_writes_files_for_bert() {
    let mut options = options(ModelType::WordPiece, 6000);
    options.lowercase = true;
    options.special_tokens = vec!["[SPECIAL]".to_owned()];
    let first = trained(&options).unwrap();
    let again = trained(&TrainOptions { workers: 1, ..options }).unwrap();
    assert!(again.files == first.files);
    let folder = tempfile::tempdir().unwrap();
    save(&first, folder.path());
    let vocab = fs::read_to_string(folder.path().join("vocab.txt")).unwrap();
    let tokens: Vec<&str> = vocab.lines().collect();
    assert_eq!(tokens.len(), 6000);
    assert_eq!(tokens[..6], ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[SPECIAL]"]);
    let tokenizer = open("hf", &folder.path().join("tokenizer.json"));
    let ids = encode(tokenizer.as_ref(), "The REFERENCE, reference");
    let names: Vec<&str> = ids.iter().map(|&id| tokens[id as usize]).collect();
    assert_eq!(names, ["the", "reference", ",", "reference"]);
}

#[test]
fn split_digits_makes_each_digit_a_token() {
    for model_type in [ModelType::Bpe, ModelType::Unigram, ModelType::ByteBpe] {
        let mut options = options(model_type, 5000);
        options.split_digits = true;
        let folder = tempfile::tempdir().unwrap();
        save(&trained(&options).unwrap(), folder.path());
        let tokenizer = open("hf", &folder.path().join("tokenizer.json"));
        let ids = encode(tokenizer.as_ref(), "2024");
        let digits = ids.iter().filter(|&&id| {
            let mut text = Vec::new();
            tokenizer.decode(&[id], &mut text).unwrap();
            text.iter().any(u8::is_ascii_digit)
        });
        assert_eq!(digits.count(), 4, "{model_type:?}: {ids:?}");
    }
}

/// The sample is bounded, depends on the seed, and covers more than the start of the corpus.
#[test]
fn a_sample_is_drawn_from_the_whole_corpus() {
    let mut options = options(ModelType::ByteBpe, 600);
    options.sample_bytes = 200_000;
    let (mut reads, mut trainings) = (0, 0);
    let first = train(&options, &AtomicBool::new(false), &mut |progress| match progress {
        TrainProgress::Reading(_) => reads += 1,
        _ => trainings += 1,
    })
    .unwrap();
    assert!(reads > 0 && trainings == 1);
    assert_eq!((first.documents, first.text_bytes), (1535, 2_316_052));
    assert!((100_000..=200_000).contains(&first.sample_bytes), "{}", first.sample_bytes);
    let texts = texts();
    let places: Vec<usize> =
        texts.iter().enumerate().filter(|(_, t)| first.texts.contains(t)).map(|(n, _)| n).collect();
    assert!(places.len() > 5 && places.iter().any(|&nth| nth > 300), "{places:?}");
    let other = trained(&TrainOptions { seed: 5, ..options }).unwrap();
    assert_ne!(other.texts, first.texts);
}

/// A special token that is also a word of the corpus has one id.
#[test]
fn special_tokens_are_not_also_pieces() {
    for model_type in [ModelType::Bpe, ModelType::Unigram] {
        let mut options = options(model_type, 6000);
        options.special_tokens = vec!["the".to_owned(), "\u{2581}of".to_owned()];
        let folder = tempfile::tempdir().unwrap();
        save(&trained(&options).unwrap(), folder.path());
        let json = open("hf", &folder.path().join("tokenizer.json"));
        let model = open("sentencepiece", &folder.path().join("tokenizer.model"));
        assert_eq!((json.vocab_size(), model.vocab_size()), (6000, 6000), "{model_type:?}");
        let [text, spelled] = ["a pointer to memory", "the end"];
        assert_eq!(encode(json.as_ref(), text), encode(model.as_ref(), text));
        assert!(encode(json.as_ref(), spelled).contains(&3), "{model_type:?}");
        assert!(!encode(model.as_ref(), spelled).contains(&3), "{model_type:?}");
    }
}

/// Texts from TFRecord files are trained on as those from JSON lines are.
#[test]
fn tfrecord_texts_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/tfrecord/text.tfrecord");
    let mut options = options(ModelType::ByteBpe, 258);
    options.inputs = vec![golden.to_owned()];
    let first = trained(&options).unwrap();
    let lines: String =
        first.texts.iter().map(|text| format!("{}\n", json!({ "text": text }))).collect();
    let jsonl = folder.path().join("text.jsonl");
    fs::write(&jsonl, lines).unwrap();
    options.inputs = vec![jsonl.to_str().unwrap().to_owned()];
    let again = trained(&options).unwrap();
    assert!(first.text_bytes > 20 && again.files == first.files, "{:?}", first.texts);
}

#[test]
fn invalid_corpora_and_options_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let small = folder.path().join("small.jsonl");
    fs::write(&small, "{\"text\": \"a small text, a small text\"}\n").unwrap();
    let bad = folder.path().join("bad.jsonl");
    fs::write(&bad, "{\"text\": \"good\"}\n\n{\"text\": 5}\n").unwrap();
    let from = |file: &Path, model_type, vocab_size| {
        let mut options = options(model_type, vocab_size);
        options.inputs = vec![file.to_str().unwrap().to_owned()];
        trained(&options).unwrap_err().to_string()
    };
    for model_type in [ModelType::Bpe, ModelType::Unigram, ModelType::ByteBpe] {
        let error = from(&small, model_type, 5000);
        assert!(error.contains("at most ") && error.contains("5000"), "{error}");
    }
    let error = from(&small, ModelType::Bpe, 270);
    assert!(error.contains("at least 354"), "{error}");
    let error = from(&small, ModelType::WordPiece, 3);
    assert!(error.contains("at least 6"), "{error}");
    let error = from(&bad, ModelType::Bpe, 400);
    assert!(error.contains("bad.jsonl") && error.contains('3'), "{error}");
    assert!(from(&folder.path().join("none"), ModelType::Bpe, 400).contains("none"));
    let stopped = train(&options(ModelType::Bpe, 5000), &AtomicBool::new(true), &mut |_| {});
    assert!(matches!(stopped, Err(Error::Stopped)));
    for token in ["<s>", "a", "", "<0x0A>"] {
        let special_tokens = vec![token.to_owned()];
        let options = TrainOptions { special_tokens, ..options(ModelType::Bpe, 5000) };
        let error = trained(&options).unwrap_err().to_string();
        assert!(error.contains(&format!("'{token}'")), "{error}");
    }
}
