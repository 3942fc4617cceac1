//! Normalizes a text before it is cut into pieces.

use std::borrow::Cow;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;
use unicode_normalization_alignments::char::is_combining_mark;

use super::super::base64;
use super::super::spm::charsmap::Charsmap;
use super::forms::{self, NormalForm};
use super::precompiled;

/// The steps of a normalizer, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Normalizer(pub(super) Vec<NormalizeStep>);

/// One of the normalizers that language models come with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NormalizeStep {
    Form(NormalForm),
    /// Before a text that is not empty.
    Prepend(String),
    Replace {
        pattern: String,
        content: String,
    },
    /// Two spaces and more become this.
    Spaces(String),
    /// White space at the ends is removed.
    Strip(Ends),
    /// Combining marks are removed.
    StripAccents,
    Lowercase,
    Precompiled(Arc<Charsmap>),
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
pub(super) struct Ends {
    strip_left: bool,
    strip_right: bool,
}

#[derive(Deserialize)]
#[serde(tag = "type")]
enum NormalizerJson {
    Sequence {
        normalizers: Vec<NormalizerJson>,
    },
    #[serde(rename = "NFC")]
    Nfc,
    #[serde(rename = "NFD")]
    Nfd,
    #[serde(rename = "NFKC")]
    Nfkc,
    #[serde(rename = "NFKD")]
    Nfkd,
    Strip(Ends),
    StripAccents,
    Lowercase,
    Precompiled {
        precompiled_charsmap: String,
    },
    Prepend {
        prepend: String,
    },
    Replace {
        pattern: Pattern,
        content: String,
    },
}

#[derive(Deserialize)]
enum Pattern {
    String(String),
    Regex(String),
}

/// The one regular expression that normalizers come with.
const SPACES: &str = " {2,}";

impl NormalizeStep {
    /// A space becomes the sign for one.
    pub(super) fn is_meta(&self) -> bool {
        let NormalizeStep::Replace { pattern, content } = self else { return false };
        pattern == " " && content == "▁"
    }
}

impl Normalizer {
    /// None for a normalizer that is not supported here.
    pub(super) fn new(given: &Value) -> Option<Self> {
        let mut steps = Vec::new();
        if !given.is_null() {
            collect(NormalizerJson::deserialize(given).ok()?, &mut steps)?;
        }
        let empty = |step: &NormalizeStep| match step {
            NormalizeStep::Replace { pattern, .. } => pattern.is_empty(),
            _ => false,
        };
        (!steps.iter().any(empty)).then_some(Normalizer(steps))
    }

    /// The normalized text, borrowed where nothing changes.
    #[inline]
    pub(super) fn apply<'a>(&self, text: &'a str) -> Cow<'a, str> {
        self.0.iter().fold(Cow::Borrowed(text), |text, step| match step {
            NormalizeStep::Form(form) => forms::apply(*form, text),
            NormalizeStep::Prepend(_) if text.is_empty() => text,
            NormalizeStep::Prepend(prefix) => Cow::Owned(format!("{prefix}{text}")),
            NormalizeStep::Replace { pattern, content } if text.contains(pattern) => {
                Cow::Owned(text.replace(pattern, content))
            }
            NormalizeStep::Replace { .. } => text,
            NormalizeStep::Spaces(content) => spaces(text, content),
            NormalizeStep::Strip(ends) => strip(text, *ends),
            NormalizeStep::StripAccents if text.is_ascii() => text,
            NormalizeStep::StripAccents => {
                text.chars().filter(|&char| !is_combining_mark(char)).collect::<String>().into()
            }
            // Not `str::to_lowercase`, which depends on the letters beside a sigma.
            NormalizeStep::Lowercase => {
                text.chars().flat_map(char::to_lowercase).collect::<String>().into()
            }
            NormalizeStep::Precompiled(charsmap) => precompiled::apply(charsmap, text),
        })
    }

    /// Whether the beginning of a text may be removed.
    pub(super) fn may_drop_first(&self) -> bool {
        self.0.iter().any(|step| {
            matches!(
                step,
                NormalizeStep::Strip(_)
                    | NormalizeStep::StripAccents
                    | NormalizeStep::Precompiled(_)
            ) || matches!(step, NormalizeStep::Replace { content, .. } if content.is_empty())
                || matches!(step, NormalizeStep::Spaces(content) if content.is_empty())
        })
    }

    /// Whether the normalized text is that of its two halves, concatenated.
    pub(super) fn may_cut(&self, text: &str, at: usize) -> bool {
        self.0.iter().all(|step| match step {
            NormalizeStep::Form(form) => {
                let inert = |char| forms::inert(*form, char);
                let before = text[..at].chars().next_back();
                before.is_none_or(inert) && text[at..].chars().next().is_none_or(inert)
            }
            NormalizeStep::StripAccents | NormalizeStep::Lowercase => true,
            NormalizeStep::Prepend(_)
            | NormalizeStep::Spaces(_)
            | NormalizeStep::Strip(_)
            | NormalizeStep::Precompiled(_) => false,
            NormalizeStep::Replace { pattern, .. } => pattern.len() == 1,
        })
    }
}

/// None for a step that is not supported here.
fn collect(given: NormalizerJson, steps: &mut Vec<NormalizeStep>) -> Option<()> {
    steps.push(match given {
        NormalizerJson::Sequence { normalizers } => {
            return normalizers.into_iter().try_for_each(|one| collect(one, steps));
        }
        NormalizerJson::Nfc => NormalizeStep::Form(NormalForm::C),
        NormalizerJson::Nfd => NormalizeStep::Form(NormalForm::D),
        NormalizerJson::Nfkc => NormalizeStep::Form(NormalForm::Kc),
        NormalizerJson::Nfkd => NormalizeStep::Form(NormalForm::Kd),
        NormalizerJson::Strip(ends) => NormalizeStep::Strip(ends),
        NormalizerJson::StripAccents => NormalizeStep::StripAccents,
        NormalizerJson::Lowercase => NormalizeStep::Lowercase,
        NormalizerJson::Prepend { prepend } => NormalizeStep::Prepend(prepend),
        NormalizerJson::Replace { pattern: Pattern::String(pattern), content } => {
            NormalizeStep::Replace { pattern, content }
        }
        NormalizerJson::Replace { pattern: Pattern::Regex(regex), content } if regex == SPACES => {
            NormalizeStep::Spaces(content)
        }
        NormalizerJson::Replace { .. } => return None,
        NormalizerJson::Precompiled { precompiled_charsmap } => {
            let bytes = base64::decode(&precompiled_charsmap)?;
            NormalizeStep::Precompiled(Arc::new(Charsmap::new("", &bytes).ok()?))
        }
    });
    Some(())
}

fn spaces<'a>(text: Cow<'a, str>, content: &str) -> Cow<'a, str> {
    if !text.contains("  ") {
        return text;
    }
    let mut left = String::with_capacity(text.len());
    let mut rest = &*text;
    while let Some(at) = rest.find("  ") {
        left.push_str(&rest[..at]);
        left.push_str(content);
        rest = rest[at..].trim_start_matches(' ');
    }
    left.push_str(rest);
    Cow::Owned(left)
}

fn strip(text: Cow<'_, str>, ends: Ends) -> Cow<'_, str> {
    let mut left = &*text;
    if ends.strip_left {
        left = left.trim_start();
    }
    if ends.strip_right {
        left = left.trim_end();
    }
    if left.len() == text.len() { text } else { Cow::Owned(left.to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_normalizers_are_rejected() {
        let given = |text: &str| Normalizer::new(&serde_json::from_str(text).unwrap());
        assert_eq!(given("null"), Some(Normalizer::default()));
        assert!(given(r#"{"type": "Sequence", "normalizers": [{"type": "NFC"}]}"#).is_some());
        assert_eq!(given(r#"{"type": "Nmt"}"#), None);
        assert_eq!(given(r#"{"type": "Replace", "pattern": {"Regex": "a"}, "content": ""}"#), None);
        assert_eq!(given(r#"{"type": "Replace", "pattern": {"String": ""}, "content": ""}"#), None);
    }

    #[test]
    fn steps_are_those_of_the_library() {
        let check = |steps: &str, text: &str, expected: &str| {
            let given = format!(r#"{{"type": "Sequence", "normalizers": [{steps}]}}"#);
            let normalizer = Normalizer::new(&serde_json::from_str(&given).unwrap()).unwrap();
            assert_eq!(normalizer.apply(text), expected, "{steps} of {text:?}");
        };
        let spaces = r#"{"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "_"}"#;
        check(spaces, "a  b c   d    ", "a_b c_d_");
        let strip = |ends: [bool; 2]| {
            format!(r#"{{"type": "Strip", "strip_left": {}, "strip_right": {}}}"#, ends[0], ends[1])
        };
        check(&strip([true, false]), " \u{a0}a ", "a ");
        check(&strip([false, true]), " a\n\u{3000}", " a");
        let bare = r#"{"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}"#;
        check(bare, "Éa ﬁ Ĳ ΑΣ", "ea fi ij ας".replace('ς', "σ").as_str());
    }
}
