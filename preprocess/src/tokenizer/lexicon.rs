//! Vocabularies of whole words, a token a line or one JSON object, and the longest token at the
//! beginning of a text. They are those of BERT, CPM and jieba: an id is the number of a line.

use std::collections::HashMap;

use storage::{Crc64, Location};

use super::double_array::{Base, Trie, Unit, VALUES_MAX};
use super::read::parse_error;
use super::vocab::read_text;
use crate::{Error, Result};

/// Begins a token that continues a word, in vocabularies of BERT's kind.
pub(super) const INNER: &str = "##";

/// The first labels of all keys in the trie.
const WHOLE: u16 = 1;
const INNER_ONLY: u16 = 2;

/// Tokens and their ids.
#[derive(Debug)]
pub(super) struct Lexicon {
    tokens: Vec<String>,
    labels: Labels,
    trie: Trie,
    whole: Base,
    inner: Base,
}

/// Numbers for the characters that tokens have. 0: it is in no token.
#[derive(Debug)]
struct Labels {
    basic: Vec<u16>,
    others: HashMap<char, u16>,
}

impl Labels {
    #[inline]
    fn of(&self, char: char) -> u16 {
        match self.basic.get(char as usize) {
            Some(&label) => label,
            None => self.others.get(&char).copied().unwrap_or(0),
        }
    }

    fn set(&mut self, char: char, label: u16) {
        match self.basic.get_mut(char as usize) {
            Some(place) => *place = label,
            None => drop(self.others.insert(char, label)),
        }
    }
}

impl Lexicon {
    /// A file of one token a line, or of one JSON object from token to id.
    pub(super) fn read(file: &str) -> Result<Self> {
        let text = read_text(file)?;
        let json = text.trim_start().starts_with('{')
            && Location::new(file).file_name().ends_with(".json");
        Lexicon::new(if json { json_tokens(&text, file)? } else { line_tokens(&text, file)? }, file)
    }

    fn new(tokens: Vec<String>, file: &str) -> Result<Self> {
        let mut labels = Labels { basic: vec![0; 1 << 16], others: HashMap::new() };
        let mut count = 0_u32;
        let mut keys = Vec::with_capacity(tokens.len());
        for (token, id) in tokens.iter().zip(0..) {
            for char in token.chars() {
                if labels.of(char) == 0 {
                    count += 1;
                    labels.set(char, u16::try_from(count).unwrap_or(u16::MAX));
                }
            }
            let key = |first, token: &str| -> (Vec<u16>, u32) {
                (
                    std::iter::once(first).chain(token.chars().map(|c| labels.of(c))).collect(),
                    id + 1,
                )
            };
            keys.push(key(WHOLE, token));
            keys.extend(token.strip_prefix(INNER).map(|rest| key(INNER_ONLY, rest)));
        }
        let bad = |found: String, expected: &str| bad(file, None, found, expected);
        if count > u32::from(u16::MAX) {
            return Err(bad(count.to_string(), "at most 65535 different characters"));
        }
        keys.retain(|(key, _)| key.len() > 1);
        keys.sort();
        let trie = Trie::new(keys.iter().map(|(key, value)| (key.as_slice(), *value)));
        let trie = trie.ok_or_else(|| {
            let bytes: usize = tokens.iter().map(String::len).sum();
            bad(format!("{bytes} bytes of tokens"), "tokens with fewer than 2^24 prefixes in total")
        })?;
        let below = |first| trie.child(trie.root(), first).map(Unit::children);
        let (whole, inner) =
            (below(WHOLE).unwrap_or_default(), below(INNER_ONLY).unwrap_or_default());
        Ok(Lexicon { tokens, labels, trie, whole, inner })
    }

    /// From now on a character of a text is treated as another.
    pub(super) fn treat_as(&mut self, char: char, other: char) {
        self.labels.set(char, self.labels.of(other));
    }

    pub(super) fn size(&self) -> u32 {
        self.tokens.len() as u32 // fits: below VALUES_MAX
    }

    pub(super) fn token(&self, id: u32) -> Option<&str> {
        self.tokens.get(id as usize).map(String::as_str)
    }

    pub(super) fn tokens(&self) -> &[String] {
        &self.tokens
    }

    pub(super) fn id(&self, token: &str) -> Option<u32> {
        let (len, id) = self.longest(token, |_| true)?;
        (len == token.len()).then_some(id)
    }

    /// The longest token at the beginning of a text: its bytes and its id. `end` is called with
    /// every character passed, and a token can end only after one for which it is true.
    #[inline]
    pub(super) fn longest(
        &self,
        text: &str,
        end: impl FnMut(char) -> bool,
    ) -> Option<(usize, u32)> {
        self.walk(text, self.whole, end)
    }

    /// As [`Lexicon::longest`], of the tokens that begin with [`INNER`], which does not count.
    #[inline]
    pub(super) fn longest_inner(
        &self,
        text: &str,
        end: impl FnMut(char) -> bool,
    ) -> Option<(usize, u32)> {
        self.walk(text, self.inner, end)
    }

    #[inline]
    fn walk(
        &self,
        text: &str,
        mut children: Base,
        mut end: impl FnMut(char) -> bool,
    ) -> Option<(usize, u32)> {
        let mut longest = None;
        for (at, char) in text.char_indices() {
            let label = self.labels.of(char);
            // Free units have label 0.
            let Some(unit) = self.trie.child(children, label).filter(|_| label != 0) else { break };
            let ends = end(char);
            if let Some(value) = unit.value().filter(|_| ends) {
                longest = Some((at + char.len_utf8(), value - 1));
            }
            children = unit.children();
        }
        longest
    }

    pub(super) fn add_to_checksum(&self, sum: &mut Crc64) {
        for token in &self.tokens {
            sum.update(&(token.len() as u64).to_le_bytes());
            sum.update(token.as_bytes());
        }
    }
}

/// The lines as Python reads them: `\r`, `\n` and `\r\n` end one, and the white space around a
/// token does not belong to it.
fn line_tokens(text: &str, file: &str) -> Result<Vec<String>> {
    let text = text.replace("\r\n", "\n").replace('\r', "\n");
    let text = text.strip_suffix('\n').unwrap_or(&text);
    let mut lines = HashMap::new();
    let mut tokens = Vec::new();
    for (line, number) in text.split('\n').zip(1..) {
        let token = line.trim_matches(is_python_space);
        if let Some(first) = lines.insert(token.to_owned(), number) {
            let found = format!("'{token}' again after line {first}");
            return Err(bad(
                file,
                Some(number),
                found,
                "every token once, because its line is its id",
            ));
        }
        tokens.push(token.to_owned());
    }
    checked(tokens, file)
}

fn json_tokens(text: &str, file: &str) -> Result<Vec<String>> {
    let ids: serde_json::Map<String, serde_json::Value> = serde_json::from_str(text)
        .map_err(|e| bad(file, None, parse_error(e), "a JSON object from token to id"))?;
    let mut tokens = vec![None; ids.len()];
    let count = tokens.len();
    for (token, id) in ids {
        let place = id.as_u64().and_then(|id| tokens.get_mut(usize::try_from(id).ok()?));
        let place = place.filter(|place| place.is_none()).ok_or_else(|| {
            let expected =
                format!("each id from 0 to {} once for {count} tokens", count.saturating_sub(1));
            bad(file, None, format!("id {id} for '{token}'"), &expected)
        })?;
        *place = Some(token);
    }
    checked(tokens.into_iter().flatten().collect(), file)
}

fn checked(tokens: Vec<String>, file: &str) -> Result<Vec<String>> {
    match tokens.len() {
        0 => Err(bad(file, None, "none".to_owned(), "at least one token")),
        VALUES_MAX.. => {
            Err(bad(file, None, format!("{} tokens", tokens.len()), "fewer than 16777216 tokens"))
        }
        _ => Ok(tokens),
    }
}

/// As Python's `str.isspace`.
pub(super) fn is_python_space(char: char) -> bool {
    char.is_whitespace() || matches!(char, '\x1c'..='\x1f')
}

fn bad(file: &str, line: Option<u64>, found: String, expected: &str) -> Error {
    Error::BadVocab {
        file: file.to_owned(),
        line,
        found,
        expected: expected.to_owned(),
        hint: None,
    }
}
