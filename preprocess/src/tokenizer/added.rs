//! Added tokens, which are cut out of the text before the model encodes the rest.
//!
//! Some are searched in the original text, the others in the normalized rest. Of several matches at
//! one position the longest counts, and matches do not overlap.

use aho_corasick::{AhoCorasick, MatchKind};
use serde::Deserialize;

/// A token that is cut out, as files describe it.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
pub(super) struct AddedToken {
    pub(super) id: u32,
    pub(super) content: String,
    /// Not within a word.
    #[serde(default)]
    pub(super) single_word: bool,
    /// Takes the white space before it.
    #[serde(default)]
    pub(super) lstrip: bool,
    /// Takes the white space after it.
    #[serde(default)]
    pub(super) rstrip: bool,
    /// Searched in the normalized text.
    #[serde(default)]
    pub(super) normalized: bool,
}

impl AddedToken {
    /// A token that is searched anywhere in the original text.
    pub(super) fn special(id: u32, content: &str) -> Self {
        AddedToken {
            id,
            content: content.to_owned(),
            single_word: false,
            lstrip: false,
            rstrip: false,
            normalized: false,
        }
    }
}

/// A part of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TextPart<'a> {
    /// An added token, by its id.
    Token(u32),
    /// Text between them; never empty.
    Text(&'a str),
}

/// One of the two sets of added tokens; empty, it finds nothing.
#[derive(Debug, Default)]
pub(super) struct Added {
    finder: Option<AhoCorasick>,
    rules: Vec<MatchRule>,
}

/// How a match is handled.
#[derive(Clone, Copy, Debug)]
struct MatchRule {
    id: u32,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
}

impl Added {
    /// From tokens and their spellings in the text that is searched.
    pub(super) fn new<'a>(
        tokens: impl IntoIterator<Item = (&'a AddedToken, String)>,
    ) -> Result<Self, aho_corasick::BuildError> {
        let (mut rules, mut spelled) = (Vec::new(), Vec::new());
        for (token, spelling) in tokens {
            let AddedToken { id, single_word, lstrip, rstrip, .. } = *token;
            rules.push(MatchRule { id, single_word, lstrip, rstrip });
            spelled.push(spelling);
        }
        if rules.is_empty() {
            return Ok(Added::default());
        }
        let finder =
            AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(&spelled)?;
        Ok(Added { finder: Some(finder), rules })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Calls `each` with the parts of a text, in order.
    #[inline]
    pub(super) fn split<'a>(&self, text: &'a str, mut each: impl FnMut(TextPart<'a>)) {
        let mut done = 0;
        if let Some(finder) = &self.finder {
            for found in finder.find_iter(text) {
                let rule = self.rules[found.pattern().as_usize()];
                let (mut start, mut end) = (found.start(), found.end());
                if rule.single_word && within_word(text, start, end) {
                    continue;
                }
                if rule.lstrip {
                    start = text[..start].trim_end().len().max(done);
                }
                if rule.rstrip {
                    end = text.len() - text[end..].trim_start().len();
                }
                if done < start {
                    each(TextPart::Text(&text[done..start]));
                }
                each(TextPart::Token(rule.id));
                done = end;
            }
        }
        if done < text.len() {
            each(TextPart::Text(&text[done..]));
        }
    }

    /// Appends the ids of a text: those of the tokens, and those of `encode` for the text between.
    #[inline]
    pub(super) fn encode(
        &self,
        text: &str,
        ids: &mut Vec<u32>,
        mut encode: impl FnMut(&str, &mut Vec<u32>),
    ) {
        self.split(text, |part| match part {
            TextPart::Token(id) => ids.push(id),
            TextPart::Text(text) => encode(text, ids),
        });
    }

    /// Whether the parts of a text are those of its two halves: no token, with the white space that
    /// it takes, crosses the cut.
    pub(super) fn may_cut(&self, text: &str, at: usize) -> bool {
        let Some(finder) = &self.finder else { return true };
        if self.rules.iter().any(|rule| rule.single_word || rule.lstrip || rule.rstrip) {
            return false;
        }
        let reach = finder.max_pattern_len();
        let near = &text.as_bytes()[..at.saturating_add(reach).min(text.len())];
        // A token that crosses begins at one of the few positions before the cut.
        (at.saturating_sub(reach)..at).all(|start| {
            let found = finder.find(&near[start..]);
            found.is_none_or(|found| found.start() > 0 || start + found.end() <= at)
        })
    }
}

/// Whether there is a word character before or after.
fn within_word(text: &str, start: usize, end: usize) -> bool {
    let word = |char| {
        regex_syntax::try_is_word_character(char)
            .expect("its tables are compiled in, see Cargo.toml")
    };
    text[..start].chars().next_back().is_some_and(word)
        || text[end..].chars().next().is_some_and(word)
}
