//! The ids that a post-processor puts around those of a text.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::Value;

/// Ids before and after those of every text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PostProcessor {
    pub(super) before: Vec<u32>,
    pub(super) after: Vec<u32>,
}

#[derive(Deserialize)]
#[serde(tag = "type")]
enum PostProcessorJson {
    /// Only moves offsets.
    ByteLevel {},
    Sequence {
        processors: Vec<PostProcessorJson>,
    },
    TemplateProcessing {
        single: Vec<TemplateItem>,
        special_tokens: HashMap<String, Special>,
    },
    RobertaProcessing {
        sep: (String, u32),
        cls: (String, u32),
    },
    BertProcessing {
        sep: (String, u32),
        cls: (String, u32),
    },
}

#[derive(Deserialize)]
enum TemplateItem {
    Sequence { id: String },
    SpecialToken { id: String },
}

#[derive(Deserialize)]
struct Special {
    ids: Vec<u32>,
}

impl PostProcessor {
    /// None for a post-processor that is not supported here.
    pub(super) fn new(given: &Value) -> Option<Self> {
        let mut around = PostProcessor::default();
        if !given.is_null() {
            around.wrap(PostProcessorJson::deserialize(given).ok()?)?;
        }
        Some(around)
    }

    fn wrap(&mut self, given: PostProcessorJson) -> Option<()> {
        match given {
            PostProcessorJson::ByteLevel {} => {}
            PostProcessorJson::Sequence { processors } => {
                processors.into_iter().try_for_each(|one| self.wrap(one))?;
            }
            PostProcessorJson::RobertaProcessing { sep, cls }
            | PostProcessorJson::BertProcessing { sep, cls } => {
                self.before.insert(0, cls.1);
                self.after.push(sep.1);
            }
            PostProcessorJson::TemplateProcessing { single, special_tokens } => {
                let place = |item: &TemplateItem| match item {
                    TemplateItem::Sequence { id } => id == "A",
                    TemplateItem::SpecialToken { .. } => false,
                };
                let at = single.iter().position(place)?;
                let ids = |pieces: &[TemplateItem]| {
                    let ids_of = |piece: &TemplateItem| match piece {
                        TemplateItem::Sequence { .. } => None,
                        TemplateItem::SpecialToken { id } => {
                            Some(special_tokens.get(id)?.ids.clone())
                        }
                    };
                    pieces.iter().map(ids_of).collect::<Option<Vec<_>>>()
                };
                self.before.splice(0..0, ids(&single[..at])?.concat());
                self.after.extend(ids(&single[at + 1..])?.concat());
            }
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(given: &str, expected: Option<(&[u32], &[u32])>) {
        let around = PostProcessor::new(&serde_json::from_str(given).unwrap());
        let expected = expected
            .map(|(before, after)| PostProcessor { before: before.into(), after: after.into() });
        assert_eq!(around, expected, "{given}");
    }

    #[test]
    fn surrounding_ids_are_read() {
        check("null", Some((&[], &[])));
        check(r#"{"type": "ByteLevel", "trim_offsets": true}"#, Some((&[], &[])));
        check(r#"{"type": "BertProcessing", "sep": ["b", 2], "cls": ["a", 1]}"#, {
            Some((&[1], &[2]))
        });
        let template = r#"{"type": "TemplateProcessing", "pair": [], "special_tokens":
            {"<s>": {"id": "<s>", "ids": [1, 7], "tokens": ["<s>"]}}, "single": PIECES}"#;
        let bos = r#"{"SpecialToken": {"id": "<s>", "type_id": 0}}"#;
        let text = r#"{"Sequence": {"id": "A", "type_id": 0}}"#;
        let of = |pieces: &str| template.replace("PIECES", pieces);
        check(&of(&format!("[{bos}, {text}]")), Some((&[1, 7], &[])));
        check(&of(&format!("[{text}, {bos}]")), Some((&[], &[1, 7])));
        check(&of(&format!("[{text}, {text}]")), None);
        check(&of(&format!("[{bos}]")), None);
        check(&of(&format!("[{}, {text}]", bos.replace("<s>", "x"))), None);
        check(r#"{"type": "New"}"#, None);
    }
}
