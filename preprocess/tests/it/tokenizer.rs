//! The tokenizer against tiktoken's.
use std::sync::{Arc, OnceLock};

use crate::common::{Random, print_seed};
use preprocess::{Tokenizer, TokenizerSpec, open_tokenizer};
use tiktoken_rs::CoreBPE;

/// Texts that have broken tokenizers before, or that the pattern distinguishes.
const CORNERS: &[&str] = &[
    "",
    " ",
    "  ",
    "a",
    " a",
    "  a",
    "   a  b ",
    "Hello, world!",
    "\n",
    "\n\n a",
    "\n \n\t a\r\n",
    " \n",
    "a \n",
    "a\n ",
    "tab\tseparated\t\tvalues",
    "'s't're've'm'll'd",
    "it's they're I've I'm we'll he'd can't",
    "IT'S THEY'RE I'VE",
    "'S 'T 'x ''s '''s",
    " 's ' s 'r 'v 'l 're 'ree 'llama 'd1",
    "'",
    " '",
    "' ",
    "'l",
    "’s ‘re ’ve",
    "123 456 7 1234567890 3.14 1,000 ½ ² Ⅷ ٣ १२३",
    "x1y2z3 4a 5 b6",
    "_snake_case camelCase kebab-case",
    "!!! ??? ... --- === ###",
    "a.b,c;d:e",
    "<|endoftext|>",
    "a<|endoftext|>b <|endoftext|>",
    "https://example.com/a?b=c&d=%20#e",
    "fn main() { println!(\"{}\", x); }\n    let y = 5;\n",
    "\u{0}\u{1}\u{7f}",
    "\u{a0}a\u{a0}\u{a0}b",
    "a\u{a0} b \u{a0}c",
    "\u{2003}\u{2003}x\u{3000}y \u{3000} z",
    "\u{85}a\u{85}\u{85}b",
    "a\u{1c}b\u{1d} \u{1e}c\u{1f}",
    "\u{200b}zero\u{200d}width\u{feff}",
    "\u{2028}line\u{2029}paragraph",
    "naïve café Ångström straße",
    "e\u{301}te\u{301} a\u{308}\u{301}",
    "Ελληνικά Русский язык עברית العربية हिन्दी ไทย 한국어 日本語",
    "中文文本，没有空格。第二句！",
    "床前明月光，疑是地上霜。",
    "中 文 1 个 abc中文def",
    "😀😃 👨‍👩‍👧‍👦 🇨🇳 👍🏽",
    "𝕳𝖊𝖑𝖑𝖔 𝟙𝟚𝟛 𠀀𠀁",
    "\u{fffd}\u{10ffff}\u{e000}",
    "ſ K Å ﬁ ª º ʰ",
    "ᄀ가힣 ㆍ ・",
    " \u{301}a",
    "1\u{301}2",
];

fn ours() -> &'static Arc<dyn Tokenizer> {
    static OURS: OnceLock<Arc<dyn Tokenizer>> = OnceLock::new();
    let spec = TokenizerSpec { kind: "gpt2".to_owned(), ..Default::default() };
    OURS.get_or_init(|| open_tokenizer(&spec).unwrap())
}

fn theirs() -> &'static CoreBPE {
    static THEIRS: OnceLock<CoreBPE> = OnceLock::new();
    THEIRS.get_or_init(|| tiktoken_rs::r50k_base().unwrap())
}

/// Both ways of encoding, and decoding, against tiktoken.
fn check_all<'a>(texts: impl Iterator<Item = &'a str>) {
    let (ours, theirs) = (ours(), theirs());
    let mut encoder = ours.encoder();
    let (mut ids, mut plain_ids, mut back) = (Vec::new(), Vec::new(), Vec::new());
    for text in texts {
        let expected = theirs.encode_ordinary(text);
        ids.clear();
        plain_ids.clear();
        back.clear();
        encoder.encode(text, &mut ids);
        ours.encode(text, &mut plain_ids);
        let head: String = text.chars().take(200).collect();
        assert!(ids == expected, "with a cache, on {head:?}");
        assert!(plain_ids == expected, "without a cache, on {head:?}");
        ours.decode(&ids, &mut back).unwrap();
        assert!(back == text.as_bytes(), "decoded, on {head:?}");
    }
}

#[test]
fn corners() {
    check_all(CORNERS.iter().copied());
    // All pairs, since the end of a piece depends on what follows it.
    let joined: Vec<_> =
        CORNERS.iter().flat_map(|a| CORNERS.iter().map(move |b| format!("{a}{b}"))).collect();
    check_all(joined.iter().map(String::as_str));
}

#[test]
fn every_character() {
    let all: Vec<_> = (0..0x11_0000)
        .filter_map(char::from_u32)
        .collect::<Vec<_>>()
        .chunks(500)
        .map(|chars| chars.iter().flat_map(|char| ['a', *char, ' ', *char, '1']).collect())
        .collect::<Vec<String>>();
    check_all(all.iter().map(String::as_str));
}

#[test]
fn unicode_soup() {
    let mut random = Random::new(print_seed("unicode_soup", 0x5eed_0001));
    let texts: Vec<_> = (0..3000).map(|_| random.soup(400)).collect();
    let bytes: usize = texts.iter().map(String::len).sum();
    assert!(bytes > 1_000_000, "{bytes} bytes are too few");
    check_all(texts.iter().map(String::as_str));
}

#[test]
fn english_like_words() {
    let mut random = Random::new(print_seed("english_like_words", 0x5eed_0002));
    let text = random.english(2_000_000);
    check_all(std::iter::once(text.as_str()));
}

#[test]
fn chinese() {
    let mut random = Random::new(print_seed("chinese", 0x5eed_0003));
    let texts: Vec<_> = (0..200).map(|_| random.chinese(1000)).collect();
    check_all(texts.iter().map(String::as_str));
}

#[test]
fn random_bytes_made_valid() {
    let mut random = Random::new(print_seed("random_bytes_made_valid", 0x5eed_0004));
    for _ in 0..500 {
        let bytes: Vec<u8> = (0..1000).map(|_| random.next() as u8).collect();
        check_all(std::iter::once(String::from_utf8_lossy(&bytes).as_ref()));
    }
}

/// Lengths around the bounds between merge algorithms, and runs that take long if merging does.
#[test]
fn long_runs() {
    for unit in ["a", " ", "\n", "-", "é", "中", "=-", "ab", "aA", "1", "\u{3000}", "的", "!"] {
        for count in (1..40).chain([47, 48, 49, 63, 64, 65, 66, 99, 100, 127, 128, 129, 1000]) {
            check_all(
                [unit.repeat(count), format!("x {} y", unit.repeat(count))]
                    .iter()
                    .map(String::as_str),
            );
        }
        check_all(std::iter::once(unit.repeat(100_000).as_str()));
    }
    let mut random = Random::new(print_seed("long_runs", 0x5eed_0005));
    let letters: String = (0..100_000).map(|_| char::from(b'a' + random.below(26) as u8)).collect();
    check_all(std::iter::once(letters.as_str()));
}

#[test]
fn every_token_decodes_as_tiktoken_does() {
    let (ours, theirs) = (ours(), theirs());
    assert_eq!((ours.vocab_size(), ours.eod(), ours.name()), (50_257, Some(50_256), "gpt2"));
    for id in 0..50_257 {
        let mut bytes = Vec::new();
        ours.decode(&[id], &mut bytes).unwrap();
        assert_eq!(bytes, theirs.decode_bytes(&[id]).unwrap(), "token {id}");
    }
    let error = ours.decode(&[50_257], &mut Vec::new()).unwrap_err().to_string();
    assert!(error.contains("50257"), "{error}");
}
