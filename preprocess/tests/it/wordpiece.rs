//! BERT's tokenizer compared with Hugging Face's and the original: `tests/golden/wordpiece`.
use std::collections::HashMap;
use std::sync::Arc;

use preprocess::{Tokenizer, TokenizerSpec, open_tokenizer};
use serde::Deserialize;

use crate::common::{Random, print_seed};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/wordpiece");

#[derive(Deserialize)]
struct Case {
    text: String,
    ids: Vec<u32>,
}

fn open(kind: &str, vocab_file: &str) -> preprocess::Result<Arc<dyn Tokenizer>> {
    let (kind, vocab_file) = (kind.to_owned(), Some(vocab_file.to_owned()));
    open_tokenizer(&TokenizerSpec { kind, vocab_file, ..TokenizerSpec::default() })
}

fn golden(kind: &str, case: &str) -> Arc<dyn Tokenizer> {
    open(kind, &format!("{GOLDEN}/{case}.txt")).unwrap()
}

fn ids(tokenizer: &dyn Tokenizer, text: &str) -> Vec<u32> {
    let mut ids = Vec::new();
    tokenizer.encode(text, &mut ids);
    ids
}

#[test]
fn ids_match_hugging_face() {
    for (kind, case) in [("wordpiece", "lower"), ("bert-uncased", "lower"), ("bert-cased", "kept")]
    {
        let cases = std::fs::read_to_string(format!("{GOLDEN}/{case}.json")).unwrap();
        let cases: Vec<Case> = serde_json::from_str(&cases).unwrap();
        assert!(cases.len() > 400, "{} cases", cases.len());
        let tokenizer = golden(kind, case);
        let mut encoder = tokenizer.encoder();
        for case in cases {
            assert_eq!(ids(tokenizer.as_ref(), &case.text), case.ids, "{kind} {:?}", case.text);
            // Twice, since the cache must change nothing.
            for _ in 0..2 {
                let mut again = vec![7];
                encoder.encode(&case.text, &mut again);
                assert_eq!(again[1..], case.ids, "{kind} {:?}", case.text);
            }
        }
    }
}

/// Megatron's names mean the tokenizer of BERT's authors. Hugging Face's port differs in long
/// words, sigmas, and characters of private use or newer than Unicode 8.
#[test]
fn ids_match_full_tokenizer() {
    let cases = std::fs::read_to_string(format!("{GOLDEN}/full_tokenizer.json")).unwrap();
    let cases: HashMap<String, Vec<Case>> = serde_json::from_str(&cases).unwrap();
    for (kind, port, case) in [
        ("BertWordPieceLowerCase", "wordpiece", "lower"),
        ("BertWordPieceCase", "bert-cased", "kept"),
    ] {
        let (tokenizer, port) = (golden(kind, case), golden(port, case));
        assert_ne!(tokenizer.fingerprint(), port.fingerprint());
        let mut encoder = tokenizer.encoder();
        let mut differing = 0;
        for case in &cases[case] {
            assert_eq!(ids(tokenizer.as_ref(), &case.text), case.ids, "{kind} {:?}", case.text);
            for _ in 0..2 {
                let mut again = vec![7];
                encoder.encode(&case.text, &mut again);
                assert_eq!(again[1..], case.ids, "{kind} {:?}", case.text);
            }
            differing += usize::from(ids(port.as_ref(), &case.text) != case.ids);
        }
        assert!(cases[case].len() > 200 && differing > 10, "{kind}: {differing} differ");
    }
}

/// The ids of the parts are those of the whole text, wherever `cut_after` allows a cut.
#[test]
fn cut_texts_have_the_same_ids() {
    let mut random = Random::new(print_seed("cut_texts_have_the_same_ids", 0x33));
    let mut cuts = 0;
    for (kind, case) in
        [("bert-uncased", "lower"), ("bert-cased", "kept"), ("BertWordPieceLowerCase", "lower")]
    {
        let tokenizer = golden(kind, case);
        for _ in 0..100 {
            let text = random.soup(200);
            let at = random.below(100) as usize;
            let at = (at..).find(|&at| text.is_char_boundary(at)).unwrap();
            let Some(cut) = tokenizer.cut_after(&text, at) else { continue };
            assert!(cut > at, "{cut} after {at}");
            let mut parts = Vec::new();
            tokenizer.encode(&text[..cut], &mut parts);
            tokenizer.encode(&text[cut..], &mut parts);
            assert_eq!(parts, ids(tokenizer.as_ref(), &text), "{text:?}");
            cuts += 1;
        }
    }
    assert!(cuts > 100, "{cuts} cuts");
}

#[test]
fn vocab_size_eod_decode_and_fingerprint() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("v.txt");
    std::fs::write(&path, "[UNK]\nun\n##able\n##s\n,\n[EOD]\n").unwrap();
    let tokenizer = open("wordpiece", path.to_str().unwrap()).unwrap();
    assert_eq!((tokenizer.vocab_size(), tokenizer.eod()), (6, Some(5)));
    assert_eq!(ids(tokenizer.as_ref(), "Unable, uns unit ables"), [1, 2, 4, 1, 3, 0, 0]);
    let mut text = Vec::new();
    tokenizer.decode(&[1, 2, 4, 3], &mut text).unwrap();
    assert_eq!(text, b"unable ,s");
    assert!(tokenizer.decode(&[6], &mut Vec::new()).is_err());
    let cased = open("bert-cased", path.to_str().unwrap()).unwrap();
    assert_eq!(ids(cased.as_ref(), "Unable un"), [0, 1]);
    assert_ne!(cased.fingerprint(), tokenizer.fingerprint());
    std::fs::write(&path, "un\n").unwrap();
    let message = open("bert-cased", path.to_str().unwrap()).unwrap_err().to_string();
    assert!(
        message.contains("v.txt")
            && message.contains("expected the unknown token '[UNK]', found none"),
        "{message}"
    );
}
