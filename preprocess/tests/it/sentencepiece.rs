//! SentencePiece models compared with the C++ library's ids and texts, and invalid models.
use crate::common;
use std::sync::Arc;

use preprocess::{Error, Result, Tokenizer, TokenizerSpec, open_tokenizer};
use serde_json::Value;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/sentencepiece");

fn open(kind: &str, model: &str) -> Result<Arc<dyn Tokenizer>> {
    open_tokenizer(&TokenizerSpec {
        kind: kind.to_owned(),
        model: Some(model.to_owned()),
        ..TokenizerSpec::default()
    })
}

fn golden(model: &str) -> Arc<dyn Tokenizer> {
    open("sentencepiece", &format!("{GOLDEN}/{model}.model")).unwrap()
}

fn cases() -> Value {
    serde_json::from_slice(&std::fs::read(format!("{GOLDEN}/cases.json")).unwrap()).unwrap()
}

fn encode(tokenizer: &dyn Tokenizer, text: &str) -> Vec<u32> {
    let mut ids = Vec::new();
    tokenizer.encode(text, &mut ids);
    ids
}

fn decode(tokenizer: &dyn Tokenizer, ids: &[u32]) -> String {
    let mut bytes = Vec::new();
    tokenizer.decode(ids, &mut bytes).unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn ids_and_texts_match_the_library() {
    let cases = cases();
    let texts: Vec<&str> =
        cases["texts"].as_array().unwrap().iter().map(|it| it.as_str().unwrap()).collect();
    let models = cases["models"].as_object().unwrap();
    assert!(models.len() > 15 && texts.len() > 40, "too few cases");
    for (file, case) in models {
        let tokenizer = open("sentencepiece", &format!("{GOLDEN}/{file}")).unwrap();
        assert_eq!(u64::from(tokenizer.vocab_size()), case["size"].as_u64().unwrap(), "{file}");
        assert_eq!(tokenizer.eod().map_or(-1, i64::from), case["eos"].as_i64().unwrap(), "{file}");
        let mut encoder = tokenizer.encoder();
        // Twice, since the cache must change nothing.
        for round in 0..2 {
            for (at, text) in texts.iter().enumerate() {
                let expected: Vec<u32> = serde_json::from_value(case["ids"][at].clone()).unwrap();
                assert_eq!(encode(tokenizer.as_ref(), text), expected, "{file}: {text:?}");
                let mut ids = Vec::new();
                encoder.encode(text, &mut ids);
                assert_eq!(ids, expected, "{file}, round {round}: {text:?}");
                let decoded = decode(tokenizer.as_ref(), &expected);
                assert_eq!(decoded, case["decoded"][at].as_str().unwrap(), "{file}: {text:?}");
            }
        }
        for (id, expected) in (0..).zip(case["each_decoded"].as_array().unwrap()) {
            assert_eq!(
                decode(tokenizer.as_ref(), &[id]),
                expected.as_str().unwrap(),
                "{file}: {id}"
            );
        }
        let error = tokenizer.decode(&[tokenizer.vocab_size()], &mut Vec::new()).unwrap_err();
        assert!(matches!(error, Error::UnknownToken { .. }), "{error}");
    }
}

/// Neither the cache nor the cuts before lookup change ids: encoding without them gives the same.
#[test]
fn the_cache_does_not_change_ids() {
    let mut random = common::Random::new(common::print_seed("remembered", 0x5eed));
    for model in ["unigram", "unigram_bytes", "bpe", "bpe_bytes", "bpe_spaces", "bpe_across"] {
        let tokenizer = golden(model);
        let mut encoder = tokenizer.encoder();
        for _ in 0..40 {
            let text = random.english(3000) + &random.soup(400) + &random.chinese(100);
            let mut ids = Vec::new();
            encoder.encode(&text, &mut ids);
            assert!(ids == encode(tokenizer.as_ref(), &text), "{model}: {text:?}");
        }
    }
}

#[test]
fn cut_texts_have_the_same_ids() {
    let mut random = common::Random::new(common::print_seed("cut", 0xc07));
    let mut cuts = 0;
    for model in ["bpe", "bpe_named", "bpe_bytes", "bpe_across", "unigram", "word"] {
        let tokenizer = golden(model);
        for _ in 0..100 {
            let text = random.english(400) + &random.soup(40) + &random.english(400);
            let at = random.below(text.len() as u64) as usize;
            let Some(cut) = tokenizer.cut_after(&text, at) else { continue };
            assert!(cut >= at);
            let (left, right) = text.split_at(cut);
            let mut ids = encode(tokenizer.as_ref(), left);
            tokenizer.encode(right, &mut ids);
            assert_eq!(ids, encode(tokenizer.as_ref(), &text), "{model}, {cut}: {text:?}");
            cuts += 1;
        }
    }
    assert!(cuts > 100, "{cuts} cuts");
}

/// A text without spaces is one part, and takes the code path for long parts.
#[test]
fn long_words_are_encoded() {
    for model in ["unigram", "bpe", "bpe_across", "bpe_unused"] {
        let tokenizer = golden(model);
        let text = "ab".repeat(200_000);
        assert_eq!(decode(tokenizer.as_ref(), &encode(tokenizer.as_ref(), &text)), text, "{model}");
    }
}

#[test]
fn megatrons_older_tokenizers() {
    let legacy = |kind: &str, extra: u32| {
        open_tokenizer(&TokenizerSpec {
            kind: kind.to_owned(),
            model: Some(format!("{GOLDEN}/bpe.model")),
            legacy: true,
            vocab_extra_ids: extra,
            ..TokenizerSpec::default()
        })
        .unwrap()
    };
    let core = golden("bpe");
    let text = "the text of a model";
    let plain = encode(core.as_ref(), text);
    assert_eq!(encode(legacy("GPTSentencePieceTokenizer", 0).as_ref(), text), plain);
    // <unk> 0, <s> 1, </s> 2.
    assert_eq!(encode(legacy("Llama2Tokenizer", 0).as_ref(), text), [&[1], &plain[..]].concat());
    let old = legacy("SentencePieceTokenizer", 2);
    let size = core.vocab_size();
    // <CLS> <SEP> <EOD> <MASK> <PAD> and two extra ids; <s> and </s> are the model's.
    assert_eq!((old.vocab_size(), old.eod()), (size + 7, Some(size + 2)));
    let expected = [&plain[..], &[size + 6], &plain[..], &[2], &[size + 2]].concat();
    let text = format!("{text}<extra_id_1>{text}</s><EOD>");
    assert_eq!(encode(old.as_ref(), &text), expected);
    assert_eq!(decode(old.as_ref(), &[size + 6, 2]), "<extra_id_1></s>");
    assert_ne!(old.fingerprint(), core.fingerprint());
    assert_eq!(core.identifiers()["legacy"], "False");
    assert_eq!(old.identifiers()["vocab_extra_ids"], "2");
}

/// A field of a protocol buffer that holds bytes.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    [&[number << 3 | 2, u8::try_from(bytes.len()).unwrap()], bytes].concat()
}

fn piece(text: &str, score: f32, kind: u8) -> Vec<u8> {
    let inner = [&field(1, text.as_bytes())[..], &[0x15], &score.to_le_bytes(), &[0x18, kind]];
    field(1, &inner.concat())
}

#[track_caller]
fn refused(model: &[u8], words: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.model");
    std::fs::write(&path, model).unwrap();
    let message = open("sentencepiece", path.to_str().unwrap()).unwrap_err().to_string();
    for word in words.iter().chain(&["m.model"]) {
        assert!(message.contains(word), "without '{word}': {message}");
    }
}

#[test]
fn invalid_models_are_refused() {
    let unk = piece("<unk>", 0.0, 2);
    let with = |rest: &[u8]| [&unk[..], rest].concat();
    refused(b"", &["none in 0 pieces", "an unknown piece of type 2"]);
    refused(b"not a model", &["byte 0"]);
    refused(&with(b"\x0a\x7f"), &["127 bytes", "a value of at most 0 bytes"]);
    refused(&with(b"\xff"), &["found a truncated one"]);
    refused(&with(&[0xff; 11]), &["a number of at most 10 bytes, found a longer one"]);
    refused(&with(&unk), &["'<unk>' as piece 0 and as piece 1"]);
    refused(&with(&piece("<u>", 0.0, 2)), &["expected one unknown piece, found pieces 0 and 1"]);
    refused(&with(&piece("", 0.0, 1)), &["expected a piece of 1", "found 0 bytes"]);
    refused(&with(&piece("a", f32::NAN, 1)), &["score NaN of 'a'"]);
    refused(&with(&piece("a", f32::NEG_INFINITY, 1)), &["score -inf of 'a'"]);
    refused(&with(&piece("a", 0.0, 7)), &["piece type 7"]);
    refused(&with(&[piece("a", 0.0, 1), piece("a", 1.0, 5)].concat()), &["'a' as piece 1"]);
    refused(&with(&field(1, &field(1, b"\xff"))), &["invalid UTF-8 at byte 18"]);
    refused(&with(&field(1, b"\x08\x05")), &["in field 1, found another type"]);
    refused(
        &with(&piece("<0x41>", 0.0, 6)),
        &["expected byte fallback, found byte piece '<0x41>' without it"],
    );
    refused(
        &with(&field(2, &[0x98, 2, 1])),
        &["byte pieces for byte fallback, found none for byte 0x00"],
    );
    refused(&with(&field(2, &[0x18, 9])), &["model type 9"]);
    let charsmap = |bytes: &[u8]| with(&field(3, &field(2, bytes)));
    refused(&charsmap(&[1, 0]), &["2 bytes"]);
    refused(&charsmap(&[9, 0, 0, 0, 0, 0, 0, 0]), &["found 9 bytes", "multiple of 4"]);
    refused(&charsmap(&[4, 0, 0, 0, 0, 1, 0, 0, 0]), &["a rule for the empty string"]);
    // A cycle: a unit is its own grandchild.
    let circle = [&[16, 0, 0, 0][..], &[0, 4, 0, 0, 1, 8, 0, 0, 2, 4, 0, 0, 3, 4, 0, 0, 0]];
    let _ = open_bytes(&charsmap(&circle.concat()));
    let message = open("Llama2Tokenizer", "/nowhere/m.model").unwrap_err().to_string();
    assert!(message.contains("/nowhere/m.model"), "{message}");
    let none = TokenizerSpec { kind: "sentencepiece".to_owned(), ..TokenizerSpec::default() };
    let message = open_tokenizer(&none).unwrap_err().to_string();
    assert!(
        message.contains("--tokenizer-model: expected") && message.contains("found none"),
        "{message}"
    );
}

fn open_bytes(model: &[u8]) -> Result<Arc<dyn Tokenizer>> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.model");
    std::fs::write(&path, model).unwrap();
    open("sentencepiece", path.to_str().unwrap())
}

/// Where the sum of scores exceeds 100000, the library resets it to 0 and splits the words after it
/// as if the text started there.
#[test]
fn score_sums_are_reset_as_in_the_library() {
    let scores = [("x", -30000.0), ("a", -0.5), ("b", -0.5001), ("ab", -1.001), ("xa", -30000.5)];
    let pieces = scores.iter().map(|&(text, score)| piece(text, score, 1));
    let mut model = [piece("<unk>", 0.0, 2), piece("\u{2581}", -1.0, 1)].concat();
    model.extend(pieces.chain([piece("y", 50000.0, 1)]).flatten());
    let tokenizer = open_bytes(&model).unwrap();
    let mut encoder = tokenizer.encoder();
    let cases: [(&str, &[u32]); 7] = [
        ("ab", &[1, 3, 4]),
        ("xxxab", &[1, 2, 2, 2, 5]),
        ("xxxxab", &[1, 2, 2, 2, 6, 4]),
        ("yyyab", &[1, 7, 7, 7, 3, 4]),
        ("xabxabxabxabxabxab", &[1, 6, 4, 2, 5, 2, 5, 6, 4, 6, 4, 2, 5]),
        (
            "x ab x ab x ab x ab x ab",
            &[1, 2, 1, 3, 4, 1, 2, 1, 5, 1, 2, 1, 5, 1, 2, 1, 3, 4, 1, 2, 1, 3, 4],
        ),
        ("ab zzz ab zzz ab zzz ab", &[1, 3, 4, 1, 0, 1, 5, 1, 0, 1, 5, 1, 0, 1, 3, 4]),
    ];
    // Twice, since the cache must change nothing.
    for (text, expected) in cases.iter().chain(&cases) {
        let mut ids = Vec::new();
        encoder.encode(text, &mut ids);
        assert_eq!(ids, *expected, "{text:?}");
    }
}

/// A damaged model is refused or encodes, without a panic.
#[test]
fn damaged_models_never_panic() {
    let mut random = common::Random::new(common::print_seed("damaged", 0xdead));
    let (mut good, mut bad) = (0, 0);
    for model in ["unigram_named", "bpe", "bpe_bytes", "char_named", "word"] {
        let intact = std::fs::read(format!("{GOLDEN}/{model}.model")).unwrap();
        for _ in 0..150 {
            let mut bytes = intact.clone();
            for _ in 0..=random.below(3) {
                let at = random.below(bytes.len() as u64) as usize;
                match random.below(4) {
                    0 => bytes.truncate(at),
                    1 => bytes[at] ^= 1 << random.below(8),
                    2 => bytes[at] = random.below(256) as u8,
                    _ => bytes.insert(at, random.below(256) as u8),
                }
                if bytes.is_empty() {
                    break;
                }
            }
            let Ok(tokenizer) = open_bytes(&bytes) else {
                bad += 1;
                continue;
            };
            good += 1;
            let ids = encode(tokenizer.as_ref(), "The \u{fb01}le of ab\u{2581}c 数据 \u{1f600}");
            assert!(ids.iter().all(|&id| id < tokenizer.vocab_size()));
            decode(tokenizer.as_ref(), &ids);
        }
    }
    assert!(good > 20 && bad > 20, "{good} opened, {bad} refused");
}
