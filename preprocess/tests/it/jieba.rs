//! Segmentations against Python's jieba 0.42.1: the cases in `tests/golden/jieba`.
use preprocess::{Jieba, TokenizerSpec, open_tokenizer};
use serde::Deserialize;

use crate::common::{Random, print_seed};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/jieba");

#[derive(Deserialize)]
struct Case {
    text: String,
    words: Vec<String>,
}

#[track_caller]
fn check(jieba: &Jieba, file: &str) {
    let cases = std::fs::read_to_string(format!("{GOLDEN}/{file}")).unwrap();
    let cases: Vec<Case> = serde_json::from_str(&cases).unwrap();
    assert!(cases.len() > 200, "{} cases", cases.len());
    for case in cases {
        assert_eq!(jieba.cut(&case.text), case.words, "of {:?}", case.text);
    }
}

#[test]
fn cuts_as_python_does() {
    check(&Jieba::built_in(), "cuts.json");
}

/// Words with frequency, without, with frequency 0, with spaces and with a tag alone.
#[test]
fn user_dictionary() {
    let user = format!("{GOLDEN}/user.txt");
    check(&Jieba::open(None, Some(&user)).unwrap(), "cuts_user.json");
}

#[test]
fn replaced_dictionary() {
    let small = format!("{GOLDEN}/small.txt");
    check(&Jieba::open(Some(&small), None).unwrap(), "cuts_small.json");
}

/// For any text, the words concatenate to the text, and none is empty.
#[test]
fn words_concatenate_to_the_text() {
    let mut random = Random::new(print_seed("words_concatenate_to_the_text", 0x31));
    let jieba = Jieba::built_in();
    for chars in 0..200 {
        for text in [random.soup(chars), random.chinese(chars)] {
            let words = jieba.cut(&text);
            assert_eq!(words.concat(), text);
            assert!(words.iter().all(|word| !word.is_empty()), "{text:?}");
        }
    }
    let long = "龘".repeat(100_000) + &"-a.5%".repeat(10_000);
    assert_eq!(jieba.cut(&long).concat(), long);
}

fn open(dict: Option<&str>, user: Option<&str>) -> preprocess::Result<Jieba> {
    let folder = tempfile::tempdir().unwrap();
    let [dict, user] = [("dict.txt", dict), ("user.txt", user)].map(|(name, text)| {
        let path = folder.path().join(name);
        std::fs::write(&path, text?).unwrap();
        Some(path.to_str().unwrap().to_owned())
    });
    Jieba::open(dict.as_deref(), user.as_deref())
}

#[track_caller]
fn refused(dict: Option<&str>, user: Option<&str>, words: &[&str]) {
    let message = open(dict, user).unwrap_err().to_string();
    for word in words {
        assert!(message.contains(word), "without '{word}': {message}");
    }
}

#[test]
fn invalid_dictionaries_are_refused() {
    refused(Some(""), None, &["dict.txt, line 1", "expected a word, a space and a frequency"]);
    refused(
        Some("中 0\n"),
        None,
        &["dict.txt", "expected at least one word with a frequency, found none"],
    );
    refused(Some("中国 5\n中\n"), None, &["dict.txt, line 2", "'中'"]);
    refused(Some("中国 5\n\n"), None, &["dict.txt, line 2"]);
    refused(Some("中 -5\n"), None, &["dict.txt, line 1", "'中 -5'"]);
    refused(Some("中 1_0\n"), None, &["dict.txt, line 1"]);
    refused(Some("中 9007199254740993\n"), None, &["line 1", "at most 2^53"]);
    refused(None, Some("中 99999999999999999999 n\n"), &["user.txt, line 1", "at most 2^53"]);
    refused(None, Some(&"中".repeat(5000)), &["user.txt, line 1", "at most 4096 characters"]);
    let message = Jieba::open(Some("/nowhere/d.txt"), None).unwrap_err().to_string();
    assert!(message.contains("/nowhere/d.txt"), "{message}");
}

/// An empty user dictionary is valid; blank lines and a byte order mark are skipped.
#[test]
fn a_user_dictionary_may_be_empty() {
    for user in ["", "\n", "\u{feff}\n\n", "  \r\n"] {
        let jieba = open(None, Some(user)).unwrap();
        assert_eq!(jieba.cut("来到北京"), ["来到", "北京"]);
    }
    let jieba = open(Some("中国 5 n\r\n中国 9\n人 3"), Some("\u{feff}国人")).unwrap();
    assert_eq!(jieba.cut("中国人"), ["中国", "人"]);
}

/// The tokenizers of words are given the files of one another and of others, and jieba's own
/// dictionary, whose words have no ids.
#[test]
fn vocabularies_of_other_tokenizers_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let dictionary = file("dict.txt", "中国 5 ns\n人 3 n\n");
    let bert = file("bert.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n");
    let cpm = file("cpm.txt", "<unk>\n<eod>\n中\n");
    let gpt2 = file("gpt2.json", r#"{"!": 0, "<|endoftext|>": 1}"#);
    let model = format!("{GOLDEN}/../sentencepiece/bpe.model");
    let json = format!("{GOLDEN}/../tokenizers/gpt2.json");
    let (of_hf, of_sentencepiece) = ("a Hugging Face tokenizer.json", "a SentencePiece model");
    let check = |kind: &str, vocab: &str, expected: &str| {
        let (kind, vocab_file) = (kind.to_owned(), Some(vocab.to_owned()));
        let spec = TokenizerSpec { kind, vocab_file, ..TokenizerSpec::default() };
        let found = open_tokenizer(&spec).unwrap_err().to_string();
        assert!(found.contains(vocab) && found.contains(expected), "{}: {found}", spec.kind);
    };
    for kind in ["encdec", "yuan", "cpm-t5"] {
        for vocab in [&dictionary, &bert, &gpt2] {
            check(kind, vocab, "the unknown token '<unk>', found none");
        }
    }
    for kind in ["wordpiece", "bert-cased"] {
        for vocab in [&dictionary, &cpm, &gpt2] {
            check(kind, vocab, "the unknown token '[UNK]', found none");
        }
    }
    for vocab in [&dictionary, &gpt2] {
        check("jieba", vocab, "the unknown token '<unk>' or '[UNK]', found neither");
    }
    for kind in ["encdec", "yuan", "cpm-t5", "wordpiece", "bert-cased", "jieba"] {
        check(kind, &json, of_hf);
        check(kind, &model, of_sentencepiece);
    }
    check("cpm1", &json, of_hf);
    for vocab in [&dictionary, &bert, &cpm, &gpt2] {
        check("cpm1", vocab, "");
    }
}
