//! The tokenizers of CPM-2, Yuan and CPM-T5 compared with the published algorithm in Python: the
//! cases that `benches/peers/encdec_python.py` writes.
use preprocess::{Tokenizer, TokenizerSpec, open_tokenizer};
use serde::Deserialize;
use std::sync::Arc;

use crate::common::{Random, print_seed};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden");

#[derive(Deserialize)]
struct Case {
    text: String,
    ids: Vec<u32>,
}

fn spec(kind: &str, vocab: &str) -> TokenizerSpec {
    let (kind, vocab_file) = (kind.to_owned(), Some(vocab.to_owned()));
    TokenizerSpec { kind, vocab_file, ..TokenizerSpec::default() }
}

fn open(kind: &str, vocab: &str) -> Arc<dyn Tokenizer> {
    open_tokenizer(&spec(kind, &format!("{GOLDEN}/encdec/{vocab}.txt"))).unwrap()
}

fn ids(tokenizer: &dyn Tokenizer, text: &str) -> Vec<u32> {
    let mut ids = Vec::new();
    tokenizer.encode(text, &mut ids);
    ids
}

fn tokens(tokenizer: &dyn Tokenizer, text: &str) -> Vec<String> {
    let spell = |id| {
        let mut bytes = Vec::new();
        tokenizer.decode(&[id], &mut bytes).unwrap();
        String::from_utf8(bytes).unwrap()
    };
    ids(tokenizer, text).into_iter().map(spell).collect()
}

#[test]
fn ids_as_published() {
    for vocab in ["vocab", "vocab_comma"] {
        for (kind, name) in [
            ("cpm2", "encdec"),
            ("yuan", "yuan"),
            ("cpm-t5", "cpm-t5"),
            ("cpm2", "EncDecTokenizer"),
        ] {
            let cases = std::fs::read_to_string(format!("{GOLDEN}/encdec/{vocab}.{kind}.json"));
            let cases: Vec<Case> = serde_json::from_str(&cases.unwrap()).unwrap();
            assert!(cases.len() > 200, "{} cases", cases.len());
            let tokenizer = open(name, vocab);
            let mut encoder = tokenizer.encoder();
            for case in cases {
                let mut again = vec![7];
                encoder.encode(&case.text, &mut again);
                assert_eq!(again[1..], case.ids, "{vocab} {kind} {:?}", case.text);
                assert_eq!(ids(tokenizer.as_ref(), &case.text), case.ids);
            }
        }
    }
}

/// The space is id 10 in one vocabulary, and the comma in the other.
#[test]
fn spaces_as_published_or_as_meant() {
    let meant = |vocab: &str| {
        let mut spec = spec("encdec", &format!("{GOLDEN}/encdec/{vocab}.txt"));
        spec.cpm_spaces_meant = true;
        open_tokenizer(&spec).unwrap()
    };
    let (good, comma) = (open("encdec", "vocab"), open("encdec", "vocab_comma"));
    assert_eq!(tokens(good.as_ref(), "a , b"), ["a", ",", "b"]);
    assert_eq!(tokens(comma.as_ref(), "a , b"), ["a", " ", " ", "b"]);
    for vocab in ["vocab", "vocab_comma"] {
        let meant = meant(vocab);
        assert_eq!(tokens(meant.as_ref(), "a , b"), ["a", ",", "b"]);
        assert_eq!(tokens(meant.as_ref(), "中 a"), ["中", " ", "a"]);
        assert_eq!(ids(meant.as_ref(), "中").len(), 1, "one token has one id");
        assert_eq!(ids(meant.as_ref(), "").len(), 0);
    }
    assert_eq!(ids(good.as_ref(), "中").len(), 2, "as published");
    assert_eq!(ids(good.as_ref(), "").len(), 0, "the published one raises an error");
    assert_ne!(meant("vocab").fingerprint(), good.fingerprint());
}

#[test]
fn vocab_size_eod_and_fingerprint() {
    let tokenizer = open("encdec", "vocab");
    let lines = std::fs::read_to_string(format!("{GOLDEN}/encdec/vocab.txt")).unwrap();
    assert_eq!(tokenizer.vocab_size() as usize, lines.lines().count());
    assert_eq!(tokenizer.eod(), Some(7));
    let mut text = Vec::new();
    tokenizer.decode(&[7, 10, 3], &mut text).unwrap();
    assert_eq!(String::from_utf8(text).unwrap(), "<eod>   \n", "a space between those without Han");
    let size = tokenizer.vocab_size();
    assert!(tokenizer.decode(&[size], &mut Vec::new()).is_err());
    let prints =
        [("encdec", "vocab"), ("yuan", "vocab"), ("cpm-t5", "vocab"), ("yuan", "vocab_comma")]
            .map(|(kind, vocab)| open(kind, vocab).fingerprint());
    assert_eq!(std::collections::HashSet::from(prints.clone()).len(), prints.len());
}

/// The ids of the parts are those of the whole text, wherever `cut_after` allows a cut.
#[test]
fn cut_texts_have_the_same_ids() {
    let mut random = Random::new(print_seed("cut_texts_have_the_same_ids", 0x32));
    let folder = tempfile::tempdir().unwrap();
    let words = folder.path().join("words.json");
    std::fs::write(&words, r#"{"<unk>":0,"\n":1,"中":2,"一个":3,"a":4," ":5}"#).unwrap();
    let words = open_tokenizer(&spec("jieba", words.to_str().unwrap())).unwrap();
    let tokenizers =
        [open("encdec", "vocab"), open("yuan", "vocab_comma"), open("cpm-t5", "vocab"), words];
    let mut cuts = 0;
    for round in 0..300 {
        let mut text = String::new();
        while text.len() < 400 {
            let line = match random.below(3) {
                0 => random.soup(12),
                1 => random.chinese(9),
                _ => random.english(9),
            };
            text.push_str(&line);
            text.push_str(random.pick::<&str>(&["\n", "\r\n", "\n\n", " \n", " ", ",", "一"]));
        }
        let tokenizer = &tokenizers[round % tokenizers.len()];
        let mut parts = Vec::new();
        let (mut start, mut at) = (0, random.below(100) as usize);
        while let Some(cut) = tokenizer.cut_after(&text, at) {
            assert!(cut > at && text.is_char_boundary(cut), "{cut} after {at}");
            tokenizer.encode(&text[start..cut], &mut parts);
            (start, at) = (cut, cut + random.below(100) as usize);
            cuts += 1;
        }
        tokenizer.encode(&text[start..], &mut parts);
        assert_eq!(parts, ids(tokenizer.as_ref(), &text), "{text:?}");
    }
    assert!(cuts > 100, "{cuts} cuts");
}

#[track_caller]
fn refused(name: &str, vocab: &str, words: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, vocab).unwrap();
    let message = open_tokenizer(&spec("encdec", path.to_str().unwrap())).unwrap_err().to_string();
    for word in words {
        assert!(message.contains(word), "without '{word}': {message}");
    }
}

#[test]
fn invalid_vocabularies_are_refused() {
    refused("v.txt", "", &["v.txt", "expected the unknown token '<unk>', found none"]);
    refused("v.txt", "<unk>\na\nb\na\n", &["v.txt, line 4", "'a' again after line 2"]);
    refused("v.txt", "a\nb\n", &["v.txt", "expected the unknown token '<unk>', found none"]);
    refused(
        "v.json",
        "{\"<unk>\":0,\"a\":2}",
        &["v.json", "id 2 for 'a'", "each id from 0 to 1 once"],
    );
    refused("v.json", "{\"<unk>\":0,\"a\":0}", &["v.json", "id 0 for 'a'"]);
    refused("v.json", "{\"<unk>\":0.5}", &["v.json", "each id from 0 to 0 once"]);
    refused("v.json", "{", &["v.json", "a JSON object from token to id"]);
    let every: String = ('\u{1}'..='\u{2ffff}')
        .filter(|c| !c.is_whitespace() && !c.is_control())
        .map(|c| format!("{c}\n"))
        .collect();
    refused("v.txt", &format!("<unk>\n{every}"), &["at most 65535 different characters"]);
    let message = open_tokenizer(&spec("encdec", "/nowhere/v.txt")).unwrap_err().to_string();
    assert!(message.contains("/nowhere/v.txt"), "{message}");
    let none = TokenizerSpec { kind: "yuan".to_owned(), ..TokenizerSpec::default() };
    let message = open_tokenizer(&none).unwrap_err().to_string();
    assert!(message.contains("--vocab-file") && message.contains("'yuan'"), "{message}");
}

/// As in Python: carriage returns end lines, and white space around a token is not part of it.
#[test]
fn lines_as_python_reads_them() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("vocab.txt"), "<unk>\r\n 中\u{1c}\ra\u{3000}\n\u{2582}")
        .unwrap();
    let folder = TokenizerSpec {
        kind: "cpm-t5".to_owned(),
        model: Some(folder.path().to_str().unwrap().to_owned()),
        ..TokenizerSpec::default()
    };
    let tokenizer = open_tokenizer(&folder).unwrap();
    assert_eq!(tokenizer.vocab_size(), 4);
    assert_eq!(ids(tokenizer.as_ref(), "a 中b"), [2, 3, 1, 0]);
}
