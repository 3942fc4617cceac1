use std::path::PathBuf;
use std::str::FromStr;

use super::dedup::minhash::PLACES_MAX;
use super::dedup::shingle::SHINGLE_UNITS_MAX;
use crate::{Error, Result, TokenizerSpec};

/// Options of a cleaning run. Start from [`CleanOptions::new`], which drops nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct CleanOptions {
    /// Files of JSON lines, plain or compressed, in order. `-` is standard input.
    pub inputs: Vec<String>,
    /// Output of retained lines: a prefix, to which `.jsonl` is added, or a name that ends in
    /// `.jsonl`, `.json` or either with `.zst`, which compresses.
    pub out: String,
    /// The key that holds the text. Default: `text`.
    pub key: String,
    /// Filters by the properties of a document. Default: none.
    pub filters: Filters,
    /// Drop exact duplicates of earlier texts. Default: no.
    pub exact: bool,
    /// Drop near-duplicates of earlier documents. Default: no.
    pub near: Option<NearOptions>,
    /// Texts are compared in lower case and without white space. Default: as they are.
    pub fold: bool,
    /// Collapse runs of spaces and join broken lines, as Megatron's `general_cleaning` does; such
    /// lines are rewritten. Default: no.
    pub fix_spaces: bool,
    /// Split the retained lines into three files. Default: one file.
    pub split: Option<SplitOptions>,
    /// Output of dropped lines, each with its cause. Default: none.
    pub dropped: Option<String>,
    /// Threads that filter, at most 1024. Default: one for every core.
    pub workers: usize,
    /// A longer line is rejected. Default and maximum: 1 GiB.
    pub line_bytes_max: u64,
    /// Bytes read and cut at a time. The outputs do not depend on it. Default: 1 MiB.
    pub block_bytes: usize,
}

/// Filters by the properties of a document. A share is from 0 to 1, of the characters that are not
/// white space; a text that has none passes every share.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Filters {
    /// Drop a text of fewer characters.
    pub chars_min: Option<u64>,
    /// Drop a text of more characters.
    pub chars_max: Option<u64>,
    /// Drop a text of fewer tokens.
    pub tokens_min: Option<TokensMin>,
    /// Drop a text of a smaller share of letters.
    pub letters_min: Option<f64>,
    /// Drop a text with a larger share of U+FFFD, the replacement of undecodable characters.
    pub replacement_max: Option<f64>,
    /// Drop a text in which one character has a larger share.
    pub one_char_max: Option<f64>,
    /// Drop a text in which repeated lines have a larger share.
    pub repeated_lines_max: Option<f64>,
    /// Drop a text with a smaller share of letters of this script.
    pub scripts_min: Vec<ScriptMin>,
    /// Drop a text that contains this.
    pub rejects: Vec<Reject>,
    /// Drop a document whose URL is on a list.
    pub urls: Option<UrlOptions>,
}

/// The fewest tokens a text may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokensMin {
    /// The minimum. A text with eight characters per token is assumed to reach it, as in Megatron.
    pub tokens: u64,
    /// The tokenizer that counts them.
    pub tokenizer: TokenizerSpec,
}

/// The smallest share of a script among the letters of a text, as `han=0.3`.
#[derive(Clone, Debug, PartialEq)]
pub struct ScriptMin {
    /// As Unicode calls it, such as `Han` or `Latin`.
    pub script: String,
    /// From 0 to 1.
    pub share: f64,
}

/// Words that a text may not contain, in whatever case, as `javascript=256`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reject {
    /// The words.
    pub words: String,
    /// Only in texts of fewer characters.
    pub below_chars: Option<u64>,
}

/// A list of URLs, and the key of a document's URL.
///
/// A line of the list is a domain (`example.com`, which matches `www.example.com` too), a name
/// without a dot (`example`, which matches `example.com` and `www.example.co.uk`), an ending
/// (`.jpg`), or an address with a path (`example.com/a`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UrlOptions {
    /// The list, one per line; blank lines and those that begin with `#` are ignored.
    pub file: String,
    /// The key of the URL. Documents without one are retained, and counted.
    pub key: String,
}

/// How near-duplicates are found.
#[derive(Clone, Debug, PartialEq)]
pub struct NearOptions {
    /// Smallest share of common shingles of a near-duplicate. Default: 0.7.
    pub jaccard: f64,
    /// The denominator of the share. Default: the union.
    pub measure: Measure,
    /// The units of shingles. Default: characters.
    pub unit: ShingleUnit,
    /// Units per shingle. Default: 5.
    pub shingle: usize,
    /// The number of bands; documents that agree in one band are compared. Default: 20.
    pub bands: usize,
    /// Places of a sketch per band. Default: 5.
    pub rows: usize,
    /// Read the inputs twice: first to find the bands that documents share, so that the second time
    /// only those are held in memory. Default: no.
    pub two_passes: bool,
    /// The folder of an anonymous temporary file. Default: that of the system.
    pub scratch: Option<PathBuf>,
}

/// The denominator of the share of common shingles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Measure {
    /// All shingles of both: the Jaccard index.
    #[default]
    Union,
    /// Those of the smaller set: how much of it the larger contains.
    Min,
    /// Those of the larger set.
    Max,
}

/// The unit of shingles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ShingleUnit {
    /// Characters.
    #[default]
    Char,
    /// Runs of letters and digits; in scripts without spaces, characters.
    Word,
}

/// How retained documents are split.
#[derive(Clone, Debug, PartialEq)]
pub struct SplitOptions {
    /// Weights of `_train`, `_valid` and `_test`; a file of weight 0 is not written.
    pub weights: [f64; 3],
    /// Seed of the split.
    pub seed: u64,
}

impl CleanOptions {
    /// The defaults.
    #[must_use]
    pub fn new(inputs: Vec<String>, out: impl Into<String>) -> Self {
        CleanOptions {
            inputs,
            out: out.into(),
            key: "text".to_owned(),
            filters: Filters::default(),
            exact: false,
            near: None,
            fold: false,
            fix_spaces: false,
            split: None,
            dropped: None,
            workers: std::thread::available_parallelism().map_or(1, usize::from),
            line_bytes_max: 1 << 30,
            block_bytes: 1 << 20,
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        if self.inputs.is_empty() {
            return bad("json-in", "none", "at least one input");
        }
        let streams = self.inputs.iter().filter(|name| *name == "-").count();
        if streams > 1 {
            return bad("json-in", "it twice", "'-' (standard input) at most once");
        }
        if streams > 0 && self.near.as_ref().is_some_and(|near| near.two_passes) {
            return bad("two-passes", "standard input", "files, which can be read twice");
        }
        if self.key.is_empty() {
            return bad("json-key", "''", "a key name");
        }
        within("workers", self.workers, 1, 1024)?;
        within("line-max", self.line_bytes_max, 1, 1 << 30)?;
        within("block-bytes", self.block_bytes, 1, 1 << 30)?;
        self.filters.check()?;
        if let Some(split) = &self.split {
            split.check()?;
        }
        self.near.as_ref().map_or(Ok(()), NearOptions::check)
    }
}

impl Filters {
    fn check(&self) -> Result<()> {
        share("min-letters", self.letters_min)?;
        share("max-replacement", self.replacement_max)?;
        share("max-one-char", self.one_char_max)?;
        share("max-repeated-lines", self.repeated_lines_max)?;
        self.scripts_min.iter().try_for_each(|min| share("min-script", Some(min.share)))?;
        match self.rejects.iter().find(|reject| reject.words.is_empty()) {
            Some(_) => bad("reject", "''", "words that a text must not contain"),
            None => Ok(()),
        }
    }
}

impl Default for NearOptions {
    fn default() -> Self {
        NearOptions {
            jaccard: 0.7,
            measure: Measure::Union,
            unit: ShingleUnit::Char,
            shingle: 5,
            bands: 20,
            rows: 5,
            two_passes: false,
            scratch: None,
        }
    }
}

impl NearOptions {
    /// The chance that two texts of this Jaccard index agree in a band, and so are compared.
    #[must_use]
    pub fn recall(&self, jaccard: f64) -> f64 {
        // fits: checked to be below 2048 before it is of use
        let band = jaccard.powi(self.rows as i32);
        1.0 - (1.0 - band).powi(self.bands as i32)
    }

    fn check(&self) -> Result<()> {
        share("jaccard", Some(self.jaccard))?;
        within("shingle", self.shingle, 1, SHINGLE_UNITS_MAX)?;
        within("bands", self.bands, 1, PLACES_MAX)?;
        within("rows", self.rows, 1, PLACES_MAX)?;
        within("bands times --rows", self.bands * self.rows, 1, PLACES_MAX)
    }
}

impl SplitOptions {
    fn check(&self) -> Result<()> {
        let is_valid = self.weights.iter().all(|weight| weight.is_finite() && *weight >= 0.0);
        let sum: f64 = self.weights.iter().sum();
        if is_valid && sum > 0.0 && sum.is_finite() {
            return Ok(());
        }
        bad("split", &format!("{:?}", self.weights), "three weights, at least one above 0")
    }
}

fn bad<T>(name: &'static str, found: &str, expected: &str) -> Result<T> {
    Err(Error::BadOption {
        name,
        found: found.to_owned(),
        expected: expected.to_owned(),
        hint: None,
    })
}

fn share(name: &'static str, share: Option<f64>) -> Result<()> {
    match share {
        Some(share) if !(0.0..=1.0).contains(&share) => {
            bad(name, &share.to_string(), "a fraction from 0 to 1")
        }
        _ => Ok(()),
    }
}

fn within<N: PartialOrd + ToString + Copy>(
    name: &'static str,
    found: N,
    least: N,
    most: N,
) -> Result<()> {
    if (&least..=&most).contains(&&found) {
        return Ok(());
    }
    let expected = format!("at least {} and at most {}", least.to_string(), most.to_string());
    bad(name, &found.to_string(), &expected)
}

/// Result of parsing an option; clap shows the error text.
type Parsed<T> = std::result::Result<T, String>;

impl FromStr for SplitOptions {
    type Err = String;

    /// Reads `949,50,1`, as Megatron's `--split`; the seed is 1234, as Megatron's.
    fn from_str(text: &str) -> Parsed<Self> {
        let refuse = || "expected three weights, such as 949,50,1".to_owned();
        let weights: Option<Vec<f64>> =
            text.split(',').map(|weight| weight.trim().parse().ok()).collect();
        let weights = weights.and_then(|weights| weights.try_into().ok()).ok_or_else(refuse)?;
        let split = SplitOptions { weights, seed: 1234 };
        split.check().map_err(|_| refuse())?;
        Ok(split)
    }
}

impl FromStr for ScriptMin {
    type Err = String;

    fn from_str(text: &str) -> Parsed<Self> {
        let refuse = || "expected SCRIPT=FRACTION, such as han=0.3".to_owned();
        let (script, share) = text.split_once('=').ok_or_else(refuse)?;
        let share = share.parse().map_err(|_| refuse())?;
        Ok(ScriptMin { script: script.to_owned(), share })
    }
}

impl FromStr for Reject {
    type Err = String;

    fn from_str(text: &str) -> Parsed<Self> {
        if let Some((words, chars)) = text.rsplit_once('=')
            && let Ok(chars) = chars.parse()
        {
            return Ok(Reject { words: words.to_owned(), below_chars: Some(chars) });
        }
        Ok(Reject { words: text.to_owned(), below_chars: None })
    }
}

impl FromStr for Measure {
    type Err = String;

    fn from_str(text: &str) -> Parsed<Self> {
        match text {
            "union" => Ok(Measure::Union),
            "min" => Ok(Measure::Min),
            "max" => Ok(Measure::Max),
            _ => Err("expected union, min or max".to_owned()),
        }
    }
}

impl FromStr for ShingleUnit {
    type Err = String;

    fn from_str(text: &str) -> Parsed<Self> {
        match text {
            "char" => Ok(ShingleUnit::Char),
            "word" => Ok(ShingleUnit::Word),
            _ => Err("expected char or word".to_owned()),
        }
    }
}
