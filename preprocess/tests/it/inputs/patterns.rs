//! The pre-tokenizers compared with the patterns that their authors published.
use crate::common::{Random, print_seed};
use fancy_regex::Regex;
use preprocess::{Pattern, pieces};

/// Each pattern as its authors wrote it. DeepSeek's three are applied one after the other.
const PUBLISHED: &[(Pattern, &[&str])] = &[
    (
        Pattern::Gpt2,
        &[r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"],
    ),
    (
        Pattern::Cl100k,
        &[concat!(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+|",
            r" ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
        )],
    ),
    (
        Pattern::O200k,
        &[concat!(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
            r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )],
    ),
    (
        Pattern::Llama3,
        &[concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )],
    ),
    (
        Pattern::Qwen2,
        &[concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )],
    ),
    (
        Pattern::TekkenV1,
        &[concat!(
            r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|",
            r"\s*[\r\n]|\s+(?!\S)|\s+",
        )],
    ),
    (
        Pattern::TekkenV2,
        &[concat!(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|",
            r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )],
    ),
    (
        Pattern::Qwen35,
        &[concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|",
            r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )],
    ),
    (
        Pattern::DeepSeekV3,
        &[
            r"\p{N}{1,3}",
            r"[一-龥\u{3040}-ゟ゠-ヿ]+",
            concat!(
                r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"##,
                r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|",
                r"\s*[\r\n]+|\s+(?!\S)|\s+",
            ),
        ],
    ),
    (Pattern::Whole, &[r"(?s).+"]),
];

/// The matches of a pattern and the texts between them.
fn cut<'a>(pattern: &Regex, text: &'a str) -> Vec<&'a str> {
    let mut parts = Vec::new();
    let mut end = 0;
    for found in pattern.find_iter(text).map(Result::unwrap) {
        parts.extend([&text[end..found.start()], found.as_str()]);
        end = found.end();
    }
    parts.push(&text[end..]);
    parts.retain(|part| !part.is_empty());
    parts
}

/// Every pattern, compiled.
fn all() -> Vec<(Pattern, Vec<Regex>)> {
    let compile = |pattern: &&str| Regex::new(pattern).unwrap();
    PUBLISHED.iter().map(|(ours, theirs)| (*ours, theirs.iter().map(compile).collect())).collect()
}

#[track_caller]
fn check(pattern: Pattern, published: &[Regex], text: &str) {
    let mut expected = vec![text];
    for one in published {
        expected = expected.into_iter().flat_map(|part| cut(one, part)).collect();
    }
    if text.is_empty() {
        expected.clear();
    }
    assert_eq!(pattern.pieces(text).collect::<Vec<_>>(), expected, "{pattern:?} on {text:?}");
}

/// Every text of four of these characters, one of each kind that some pattern distinguishes.
#[test]
fn every_short_text() {
    const FEW: [&str; 14] =
        [" ", "a", "S", "'", "s", "\n", "1", ".", "/", "中", "\u{301}", "ſ", "\u{3000}", "\u{1}"];
    let all = all();
    for n in 0..FEW.len().pow(4) {
        let text: String = (0..4).map(|i| FEW[n / FEW.len().pow(i) % FEW.len()]).collect();
        for (pattern, published) in &all {
            check(*pattern, published, &text);
        }
    }
}

#[test]
fn every_character() {
    let chars: Vec<char> = (0..0x11_0000).filter_map(char::from_u32).collect();
    let texts: Vec<String> = chars
        .chunks(200)
        .map(|chars| {
            chars.iter().flat_map(|char| ['a', *char, ' ', *char, '1', *char, '.', 'B']).collect()
        })
        .collect();
    for (pattern, published) in all() {
        for text in &texts {
            check(pattern, &published, text);
        }
    }
}

#[test]
fn random_texts() {
    let mut random = Random::new(print_seed("random_texts", 0x5eed_0008));
    let few: Vec<char> = "aaB Cst'' \n\r\t12.,/!-中，。あー・ゝéÉʰǅß\u{301}\
         \u{489}\u{17f}\u{212a}\u{a0}\u{3000}\u{85}\u{200d}\u{1}½😀"
        .chars()
        .collect();
    let all = all();
    for _ in 0..3000 {
        let dense: String = (0..random.below(60)).map(|_| *random.pick(&few)).collect();
        for text in [dense, random.soup(120)] {
            for (pattern, published) in &all {
                check(*pattern, published, &text);
            }
        }
    }
    assert_eq!(pieces("it's  a").collect::<Vec<_>>(), ["it", "'s", " ", " a"]);
}
