//! The pre-tokenizers that the native engines support.

use serde::Deserialize;
use serde_json::Value;

use super::super::split::Pattern;
use super::chars::{META, Space, Words};
use super::normalize::{NormalizeStep, Normalizer};

/// Which engine, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EnginePlan {
    Bytes {
        pattern: Pattern,
        prefix: Prefix,
    },
    Chars {
        space: Space,
        words: Words,
        prefix: Prefix,
    },
    /// Words between white space, each with the sign for a space before it.
    Words,
}

impl EnginePlan {
    pub(super) fn prefix(self) -> Prefix {
        match self {
            EnginePlan::Bytes { prefix, .. } | EnginePlan::Chars { prefix, .. } => prefix,
            EnginePlan::Words => Prefix::Never,
        }
    }
}

/// The prefix of a text between added tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Prefix {
    Never,
    /// A space, unless there is one.
    Space,
    /// The sign for a space, unless there is one.
    Meta,
    /// The same, at the beginning of a document only.
    MetaFirst,
}

impl Prefix {
    #[inline]
    pub(super) fn applies_to(self, text: &str, first: bool) -> bool {
        match self {
            Prefix::Never => false,
            Prefix::Space => !text.starts_with(' '),
            Prefix::Meta => !text.starts_with([' ', META]),
            Prefix::MetaFirst => first && !text.starts_with([' ', META]),
        }
    }

    pub(super) fn text(self) -> &'static str {
        match self {
            Prefix::Never => "",
            Prefix::Space => " ",
            Prefix::Meta | Prefix::MetaFirst => "▁",
        }
    }
}

#[derive(Deserialize)]
#[serde(tag = "type")]
enum PreTokenizerJson {
    Sequence {
        pretokenizers: Vec<PreTokenizerJson>,
    },
    Split {
        pattern: SplitPattern,
        behavior: Behavior,
        #[serde(default)]
        invert: bool,
    },
    ByteLevel {
        add_prefix_space: bool,
        #[serde(default = "yes")]
        use_regex: bool,
    },
    Metaspace {
        replacement: char,
        prepend_scheme: Option<Scheme>,
        add_prefix_space: Option<bool>,
        split: Option<bool>,
    },
    WhitespaceSplit {},
}

#[derive(Deserialize)]
enum SplitPattern {
    String(String),
    Regex(String),
}

#[derive(Clone, Copy, Deserialize, PartialEq, Eq)]
enum Behavior {
    Isolated,
    Removed,
    MergedWithPrevious,
    MergedWithNext,
    Contiguous,
}

#[derive(Clone, Copy, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
enum Scheme {
    First,
    Never,
    Always,
}

fn yes() -> bool {
    true
}

/// None for a pre-tokenizer that is not supported here.
pub(super) fn plan(given: &Value, normalizer: &Normalizer) -> Option<EnginePlan> {
    let whole =
        EnginePlan::Chars { space: Space::AsItIs, words: Words::Joined, prefix: Prefix::Never };
    if given.is_null() {
        return Some(whole);
    }
    let mut steps = Vec::new();
    flatten(PreTokenizerJson::deserialize(given).ok()?, &mut steps);
    match steps.as_slice() {
        [] => Some(whole),
        [PreTokenizerJson::Split { pattern: SplitPattern::String(space), .. }]
            if space == " " && normalizer.0.last().is_some_and(NormalizeStep::is_meta) =>
        {
            Some(whole) // no space is left to split at
        }
        [
            PreTokenizerJson::Metaspace {
                replacement: META,
                prepend_scheme,
                add_prefix_space,
                split,
            },
        ] => {
            // The library refuses a scheme that contradicts the older flag.
            let prefix = match (prepend_scheme.unwrap_or(Scheme::Always), add_prefix_space) {
                (Scheme::Never, _) => Prefix::Never,
                (_, Some(false)) => return None,
                (Scheme::First, _) => Prefix::MetaFirst,
                (Scheme::Always, _) => Prefix::Meta,
            };
            let words = if split.unwrap_or(true) { Words::Apart } else { Words::Joined };
            Some(EnginePlan::Chars { space: Space::Meta, words, prefix })
        }
        [
            PreTokenizerJson::WhitespaceSplit {},
            PreTokenizerJson::Metaspace {
                replacement: META,
                prepend_scheme: None | Some(Scheme::Always),
                add_prefix_space: None | Some(true),
                split: None | Some(true),
            },
        ] => Some(EnginePlan::Words),
        [PreTokenizerJson::ByteLevel { add_prefix_space, use_regex }] => {
            let pattern = if *use_regex { Pattern::Gpt2 } else { Pattern::Whole };
            let prefix = if *add_prefix_space { Prefix::Space } else { Prefix::Never };
            Some(EnginePlan::Bytes { pattern, prefix })
        }
        [
            splits @ ..,
            PreTokenizerJson::ByteLevel { add_prefix_space: false, use_regex: false },
        ] => Some(EnginePlan::Bytes { pattern: pattern(splits)?, prefix: Prefix::Never }),
        _ => None,
    }
}

fn flatten(given: PreTokenizerJson, steps: &mut Vec<PreTokenizerJson>) {
    match given {
        PreTokenizerJson::Sequence { pretokenizers } => {
            pretokenizers.into_iter().for_each(|one| flatten(one, steps));
        }
        step => steps.push(step),
    }
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const GPT2_SHORT: &str = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
pub(super) const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
pub(super) const QWEN35: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
const O200K: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

/// Patterns that match every part of a text, as they are written in files. cl100k's own spelling,
/// with its `\s++$`, is not here: in the library's dialect `$` is the end of a line.
const COMPLETE: [(&str, Pattern); 6] = [
    (GPT2, Pattern::Gpt2),
    (GPT2_SHORT, Pattern::Gpt2),
    (LLAMA3, Pattern::Llama3),
    (QWEN2, Pattern::Qwen2),
    (QWEN35, Pattern::Qwen35),
    (O200K, Pattern::O200k),
];

/// DeepSeek's three, each of which cuts the parts that the one before left.
const DEEPSEEK_V3: [&str; 3] = [
    r"\p{N}{1,3}",
    "[一-龥\u{3040}-ゟ゠-ヿ]+",
    concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"##,
        "[^\r\n",
        r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[",
        "\r\n",
        r"]*|\s*[",
        "\r\n",
        r"]+|\s+(?!\S)|\s+",
    ),
];

fn pattern(splits: &[PreTokenizerJson]) -> Option<Pattern> {
    let regex = |given: &PreTokenizerJson| match given {
        PreTokenizerJson::Split { pattern: SplitPattern::Regex(regex), behavior, invert } => {
            Some((regex.clone(), *behavior, *invert))
        }
        _ => None,
    };
    let splits = splits.iter().map(regex).collect::<Option<Vec<_>>>()?;
    match splits.as_slice() {
        [] => Some(Pattern::Whole),
        [(regex, Behavior::Isolated, _) | (regex, Behavior::Removed, true)] => {
            let known = COMPLETE.iter().find(|(complete, _)| complete == regex);
            known.map(|&(_, pattern)| pattern)
        }
        [one, two, three] => {
            let same = [one, two, three].iter().zip(DEEPSEEK_V3).all(
                |((regex, behavior, invert), expected)| {
                    regex == expected && *behavior == Behavior::Isolated && !invert
                },
            );
            same.then_some(Pattern::DeepSeekV3)
        }
        _ => None,
    }
}
