//! Rules that drop or rewrite a document on its own, without comparing it with others.

mod char_set;
pub(super) mod fix;
mod urls;

use std::collections::{HashMap, HashSet};

use serde::Serialize;

use super::filter::char_set::CharSet;
use super::filter::urls::UrlList;
use super::{Filters, Reject};
use crate::tokenizer::Encoder;
use crate::{Error, Result, Tokenizer};

/// Most characters per token, averaged over a text: as Megatron's `cleanup_dataset.py` assumes.
const CHARS_PER_TOKEN_MAX: u64 = 8;

/// Why a document is dropped: the first cause that applies, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum DropReason {
    /// Its URL is on the list.
    Url,
    /// It has too few characters.
    FewChars,
    /// It has too many characters.
    ManyChars,
    /// It contains words that it may not.
    RejectedWords,
    /// Too few of its characters are letters.
    FewLetters,
    /// Too many of its characters are U+FFFD, the replacement of undecodable ones.
    Replacement,
    /// One character has too large a share.
    OneChar,
    /// Repeated lines have too large a share.
    RepeatedLines,
    /// Too few of its letters are of the script.
    Script,
    /// It has too few tokens.
    FewTokens,
    /// It is an exact duplicate.
    ExactDuplicate,
    /// It is a near-duplicate.
    NearDuplicate,
}

impl DropReason {
    /// Its name in files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            DropReason::Url => "url",
            DropReason::FewChars => "few-chars",
            DropReason::ManyChars => "many-chars",
            DropReason::RejectedWords => "rejected-words",
            DropReason::FewLetters => "few-letters",
            DropReason::Replacement => "replacement",
            DropReason::OneChar => "one-char",
            DropReason::RepeatedLines => "repeated-lines",
            DropReason::Script => "script",
            DropReason::FewTokens => "few-tokens",
            DropReason::ExactDuplicate => "exact-duplicate",
            DropReason::NearDuplicate => "near-duplicate",
        }
    }
}

/// [`Filters`] with the resources that they name loaded.
#[derive(Debug)]
pub(super) struct FilterRules {
    filters: Filters,
    rejects: Vec<Reject>,
    scripts: Vec<(CharSet, f64)>,
    tokenizer: Option<std::sync::Arc<dyn Tokenizer>>,
    pub(super) urls: Option<UrlList>,
}

impl FilterRules {
    /// # Errors
    /// [`Error::BadOption`] for a script that is not in Unicode; the errors of the tokenizer and
    /// of the list of URLs.
    pub(super) fn new(filters: &Filters) -> Result<Self> {
        let with_share = |min: &super::ScriptMin| Ok((script(&min.script)?, min.share));
        let lower = |reject: &Reject| Reject { words: reject.words.to_lowercase(), ..*reject };
        let spec = filters.tokens_min.as_ref().map(|min| &min.tokenizer);
        Ok(FilterRules {
            filters: filters.clone(),
            rejects: filters.rejects.iter().map(lower).collect(),
            scripts: filters.scripts_min.iter().map(with_share).collect::<Result<_>>()?,
            tokenizer: spec.map(crate::open_tokenizer).transpose()?,
            urls: filters.urls.as_ref().map(UrlList::read).transpose()?,
        })
    }

    pub(super) fn worker(&self) -> FilterWorker<'_> {
        let encoder = self.tokenizer.as_ref().map(|tokenizer| tokenizer.encoder());
        FilterWorker { rules: self, encoder, ids: Vec::new(), counts: Counts::default() }
    }
}

/// One worker's state of the rules.
#[derive(Debug)]
pub(super) struct FilterWorker<'a> {
    rules: &'a FilterRules,
    encoder: Option<Box<dyn Encoder + 'a>>,
    ids: Vec<u32>,
    counts: Counts,
}

impl FilterWorker<'_> {
    /// The first cause to drop a text, except those that depend on other documents.
    pub(super) fn cause(&mut self, text: &str, url: Option<&str>) -> Option<DropReason> {
        let FilterRules { filters, rejects, scripts, urls, .. } = self.rules;
        if let (Some(list), Some(url)) = (urls, url)
            && list.has(url)
        {
            return Some(DropReason::Url);
        }
        let chars = self.rules.counts_chars().then(|| text.chars().count() as u64);
        let chars = chars.unwrap_or(0);
        if filters.chars_min.is_some_and(|min| chars < min) {
            return Some(DropReason::FewChars);
        }
        if filters.chars_max.is_some_and(|max| chars > max) {
            return Some(DropReason::ManyChars);
        }
        let applies = |reject: &Reject| reject.below_chars.is_none_or(|below| chars < below);
        if rejects.iter().any(applies) {
            let lower = text.to_lowercase();
            let found = |reject: &Reject| applies(reject) && lower.contains(&reject.words);
            if rejects.iter().any(found) {
                return Some(DropReason::RejectedWords);
            }
        }
        if self.rules.weighs_chars() {
            self.counts.count(text, filters.one_char_max.is_some());
            if let Some(cause) = self.counts.cause(filters) {
                return Some(cause);
            }
        }
        if filters.repeated_lines_max.is_some_and(|max| repeated_lines(text) > max) {
            return Some(DropReason::RepeatedLines);
        }
        let too_few = |(script, min): &(CharSet, f64)| script_share(script, text) < *min;
        if scripts.iter().any(too_few) {
            return Some(DropReason::Script);
        }
        self.has_few_tokens(text, chars).then_some(DropReason::FewTokens)
    }

    fn has_few_tokens(&mut self, text: &str, chars: u64) -> bool {
        let min = self.rules.filters.tokens_min.as_ref().map_or(0, |min| min.tokens);
        let Some(encoder) = &mut self.encoder else { return false };
        if chars >= min.saturating_mul(CHARS_PER_TOKEN_MAX) {
            return false;
        }
        self.ids.clear();
        encoder.encode(text, &mut self.ids);
        (self.ids.len() as u64) < min
    }
}

impl FilterRules {
    fn counts_chars(&self) -> bool {
        let Filters { chars_min, chars_max, tokens_min, rejects, .. } = &self.filters;
        let rejects = rejects.iter().any(|reject| reject.below_chars.is_some());
        chars_min.is_some() || chars_max.is_some() || tokens_min.is_some() || rejects
    }

    fn weighs_chars(&self) -> bool {
        let Filters { letters_min, replacement_max, one_char_max, .. } = &self.filters;
        letters_min.is_some() || replacement_max.is_some() || one_char_max.is_some()
    }
}

/// Counts of the characters of a text, without white space.
#[derive(Debug)]
struct Counts {
    chars: u64,
    letters: u64,
    replacement: u64,
    ascii: [u64; 128],
    beyond: HashMap<char, u64>,
}

impl Default for Counts {
    fn default() -> Self {
        Counts { chars: 0, letters: 0, replacement: 0, ascii: [0; 128], beyond: HashMap::new() }
    }
}

impl Counts {
    fn count(&mut self, text: &str, each_char: bool) {
        self.beyond.clear();
        (self.chars, self.letters, self.replacement, self.ascii) = (0, 0, 0, [0; 128]);
        for char in text.chars().filter(|char| !char.is_whitespace()) {
            self.chars += 1;
            self.letters += u64::from(char.is_alphabetic());
            self.replacement += u64::from(char == char::REPLACEMENT_CHARACTER);
            if char.is_ascii() {
                self.ascii[char as usize] += 1;
            } else if each_char {
                *self.beyond.entry(char).or_default() += 1;
            }
        }
    }

    fn cause(&self, filters: &Filters) -> Option<DropReason> {
        // Counts are exact in an f64: a line has below 2^31 characters.
        let all = self.chars as f64;
        let most = self.ascii.iter().chain(self.beyond.values()).max();
        let most = most.copied().unwrap_or(0) as f64;
        if filters.letters_min.is_some_and(|min| (self.letters as f64) < min * all) {
            return Some(DropReason::FewLetters);
        }
        if filters.replacement_max.is_some_and(|max| self.replacement as f64 > max * all) {
            return Some(DropReason::Replacement);
        }
        filters.one_char_max.is_some_and(|max| most > max * all).then_some(DropReason::OneChar)
    }
}

/// The share of a text in lines that repeat an earlier line. Lines are trimmed, and weighted by
/// their characters that are not white space.
fn repeated_lines(text: &str) -> f64 {
    let mut seen = HashSet::new();
    let (mut all, mut repeated) = (0_u64, 0_u64);
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let chars = line.chars().filter(|char| !char.is_whitespace()).count() as u64;
        all += chars;
        repeated += if seen.insert(line) { 0 } else { chars };
    }
    if all == 0 { 0.0 } else { repeated as f64 / all as f64 }
}

/// The characters of a script, such as `han`.
fn script(name: &str) -> Result<CharSet> {
    let plain = name.chars().all(|char| char.is_ascii_alphabetic() || char == '_');
    // Without the prefix, `L` would be all letters, which is no script.
    let set = plain.then(|| CharSet::new(&format!(r"\p{{script={name}}}"))).flatten();
    set.ok_or_else(|| Error::BadOption {
        name: "min-script",
        found: format!("'{name}'"),
        expected: "a Unicode script, such as han, latin or cyrillic".to_owned(),
        hint: None,
    })
}

/// The share of a script among the letters of a text; 1 if it has none.
fn script_share(script: &CharSet, text: &str) -> f64 {
    let (mut letters, mut own) = (0_u64, 0_u64);
    for char in text.chars().filter(|char| char.is_alphabetic()) {
        letters += 1;
        own += u64::from(script.has(char));
    }
    if letters == 0 { 1.0 } else { own as f64 / letters as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clean::ScriptMin;

    fn check(filters: &Filters, kept: &[&str], dropped: &[&str], cause: DropReason) {
        let rules = FilterRules::new(filters).unwrap();
        let mut worker = rules.worker();
        for text in kept {
            assert_eq!(worker.cause(text, None), None, "{text:?}");
        }
        for text in dropped {
            assert_eq!(worker.cause(text, None), Some(cause), "{text:?}");
        }
    }

    #[test]
    fn lengths_count_characters() {
        let filters = Filters { chars_min: Some(3), ..Filters::default() };
        check(&filters, &["abc", "春風又"], &["", "ab", "春風"], DropReason::FewChars);
        let filters = Filters { chars_max: Some(3), ..Filters::default() };
        check(&filters, &["", "春風又"], &["abcd"], DropReason::ManyChars);
    }

    #[test]
    fn shares_ignore_white_space() {
        let filters = Filters { letters_min: Some(0.5), ..Filters::default() };
        check(
            &filters,
            &["", " \n", "a 1", "春1"],
            &["a 1 2", "...", "a12"],
            DropReason::FewLetters,
        );
        let filters = Filters { replacement_max: Some(0.25), ..Filters::default() };
        check(
            &filters,
            &["", "abc\u{fffd}"],
            &["ab \u{fffd}", "\u{fffd}"],
            DropReason::Replacement,
        );
        let filters = Filters { one_char_max: Some(0.5), ..Filters::default() };
        check(&filters, &["ab", "春風", ""], &["aab", "== =", "春春風"], DropReason::OneChar);
        let filters = Filters { repeated_lines_max: Some(0.5), ..Filters::default() };
        let dropped = ["ab\nab \n\nab", "x\ny\nx\ny\nx"];
        check(&filters, &["ab\nab", "ab\n\ncd", ""], &dropped, DropReason::RepeatedLines);
    }

    #[test]
    fn words_are_found_in_any_case() {
        let reject = "JavaScript=20".parse().unwrap();
        let filters = Filters { rejects: vec![reject], ..Filters::default() };
        let kept = ["java script", "enable javascript, please"];
        check(&filters, &kept, &["JAVASCRIPT", "xjavascriptx"], DropReason::RejectedWords);
        let filters = Filters { rejects: vec!["a=b".parse().unwrap()], ..Filters::default() };
        check(&filters, &["a = b"], &["xA=Bx"], DropReason::RejectedWords);
    }

    #[test]
    fn scripts_are_those_of_unicode() {
        let min = |text: &str| vec![text.parse::<ScriptMin>().unwrap()];
        let filters = Filters { scripts_min: min("han=0.5"), ..Filters::default() };
        check(&filters, &["春a", "123", "𠀀々"], &["春ab", "かな", "abc"], DropReason::Script);
        let filters = Filters { scripts_min: min("Latin=0.9"), ..Filters::default() };
        check(&filters, &["naïve, 12", ""], &["春眠 ab"], DropReason::Script);
        for unknown in ["L=0.1", "nothing=0.1", "han}|[=0.1", "=0.1"] {
            let filters = Filters { scripts_min: min(unknown), ..Filters::default() };
            let error = FilterRules::new(&filters).unwrap_err().to_string();
            let starts = "cannot use --min-script: expected a Unicode script";
            assert!(error.starts_with(starts) && error.contains("found '"), "{error}");
        }
    }

    #[test]
    fn tokens_are_counted_where_characters_do_not_decide() {
        let tokenizer = crate::PreprocessOptions::new(Vec::new(), "").tokenizer;
        let min = super::super::TokensMin { tokens: 3, tokenizer };
        let filters = Filters { tokens_min: Some(min), ..Filters::default() };
        let long = "a".repeat(24);
        check(&filters, &["one two three", &long], &["one two", ""], DropReason::FewTokens);
    }
}
