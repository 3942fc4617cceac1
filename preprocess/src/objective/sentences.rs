//! Splits documents into sentences, each of which becomes a sequence of its own.

use std::ops::Range;

use super::chinese;
use super::punkt::{Newlines, Nltk, Punkt, is_python_space};
use crate::{Error, Result};

/// Megatron passes this many characters at a time to Punkt, and so cuts a sentence there.
const SLICE_CHARS: usize = 1_000_000;

/// How to split. The default is Megatron's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SentenceSpec {
    /// The languages of Punkt by their names, of which `english`, the default, is built in and the
    /// others need `params`; `chinese`; or `newline`, in which each line is a sentence, as in
    /// Paddle's tools with `--chinese`.
    pub lang: Option<String>,
    /// What separates sentences in the text, as with Yuan's `--sentence_splitter`; then there is no
    /// language.
    pub separator: Option<String>,
    /// Whether white space between sentences is dropped, as by default, or kept.
    pub newlines: Newlines,
    /// A folder of NLTK's `punkt_tab`, in place of the built-in parameters.
    pub params: Option<String>,
    /// The version of NLTK whose rules Punkt follows.
    pub nltk: Nltk,
}

/// Splits texts into sentences; one serves all threads.
#[derive(Debug)]
pub struct Splitter {
    rule: SentenceRule,
}

#[derive(Debug)]
enum SentenceRule {
    Punkt(Box<Punkt>),
    Chinese(Newlines),
    Separator(String),
}

impl Splitter {
    /// Makes the splitter of a specification.
    ///
    /// # Errors
    /// [`Error::BadOption`] for a language without parameters, or contradictory settings;
    /// [`Error::BadVocab`] for invalid parameters, [`Error::Storage`].
    pub fn open(spec: &SentenceSpec) -> Result<Self> {
        let SentenceSpec { newlines, nltk, .. } = *spec;
        let lang = spec.lang.as_deref().unwrap_or("english");
        if let Some(separator) = &spec.separator {
            return Splitter::at(separator, spec);
        }
        let rule = match (lang, &spec.params) {
            ("newline", None) => return Splitter::at("\n", spec),
            ("chinese", None) => SentenceRule::Chinese(newlines),
            ("chinese" | "newline", Some(_)) => {
                return Err(bad(
                    "punkt-params",
                    "a folder".to_owned(),
                    &format!("none with --lang {lang}"),
                ));
            }
            (_, Some(folder)) => {
                SentenceRule::Punkt(Box::new(Punkt::from_folder(folder, nltk, newlines)?))
            }
            ("english", None) => SentenceRule::Punkt(Box::new(Punkt::english(nltk, newlines)?)),
            (other, None) => {
                return Err(bad("lang", format!("'{other}'"), "english, chinese or newline")
                    .with_hint("--punkt-params FOLDER adds another language"));
            }
        };
        Ok(Splitter { rule })
    }

    fn at(separator: &str, spec: &SentenceSpec) -> Result<Self> {
        if separator.is_empty() {
            return Err(bad("sentence-splitter", "an empty string".to_owned(), "some text"));
        }
        if spec.newlines == Newlines::Keep {
            let found = "a separator, which is dropped".to_owned();
            return Err(bad("keep-newlines", found, "sentences split by a language"));
        }
        Ok(Splitter { rule: SentenceRule::Separator(separator.to_owned()) })
    }

    /// Clears `out` and fills it with the sentences of a text, none of them empty, as byte ranges
    /// in their order.
    pub fn split(&self, text: &str, out: &mut Vec<Range<usize>>) {
        out.clear();
        match &self.rule {
            SentenceRule::Punkt(punkt) => {
                let mut base = 0;
                while base < text.len() {
                    let slice = first_chars(&text[base..], SLICE_CHARS);
                    punkt.split(slice, base, out);
                    base += slice.len();
                }
            }
            SentenceRule::Chinese(newlines) => chinese::split(text, *newlines, out),
            SentenceRule::Separator(separator) => {
                let mut base = 0;
                for part in text.split(separator.as_str()) {
                    let bare = part.trim_start_matches(is_python_space);
                    let start = base + part.len() - bare.len();
                    let len = bare.trim_end_matches(is_python_space).len();
                    out.extend((len > 0).then_some(start..start + len));
                    base += part.len() + separator.len();
                }
            }
        }
    }
}

/// The first `chars` characters of a text.
fn first_chars(text: &str, chars: usize) -> &str {
    // A text of so few bytes has no more characters.
    if text.len() <= chars {
        return text;
    }
    let end = text.char_indices().nth(chars).map_or(text.len(), |(at, _)| at);
    &text[..end]
}

fn bad(name: &'static str, found: String, expected: &str) -> Error {
    Error::BadOption { name, found, expected: expected.to_owned(), hint: None }
}
