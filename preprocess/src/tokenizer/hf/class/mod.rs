//! The rule of the class that a folder of Hugging Face names.
//!
//! `AutoTokenizer` of transformers 5 takes the vocabulary and the merges of `tokenizer.json` for
//! some classes, and the rule of the class for all else: how a text is normalized and cut, which
//! special tokens there are, and which are put around a text. [`names`] finds the class, [`table`]
//! has the rules, [`parts`] are what a rule consists of, and [`compare`] finds where the rule of a
//! class differs from that of the file.

mod compare;
mod names;
mod parts;
mod table;

use serde_json::{Value, json};

use self::compare::{ModelFields, Rule};
use self::parts::{AroundText, Given, ModelRule, Parts};
use self::table::Class;
use super::super::added::AddedToken;
use super::super::read::bad;
use super::bert::{around, sequence};
use super::file::{TokenizerJson, Vocab};
use super::folder::Folder;
use super::neighbours::{CONFIG, ClassTokens, Neighbours};
use super::{add_neighbours, id_of};
use crate::{Error, Result};

/// The two values of the option.
const FILE: &str = "file";
const CLASS: &str = "class";

const HINT: &str = "the model was most likely trained with the rule of tokenizer.json: \
    --tokenizer-rule file takes that, --tokenizer-rule class takes that of the class, as \
    AutoTokenizer of transformers 5 does; in Python tokenizer_rule, in data.tokenizer \
    \"hf:FOLDER,rule=file\"";

const HINT_UNFOLLOWED: &str = "--tokenizer-rule file takes the rule of tokenizer.json; \
    --tokenizer-rule class is not supported for this class; in Python tokenizer_rule, in \
    data.tokenizer \"hf:FOLDER,rule=file\"";

/// Which rule encodes, where the two may differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RuleChoice {
    /// Either, if both are the same.
    Same,
    File,
    Class,
}

/// A folder whose rule was decided.
#[derive(Debug, Default)]
pub(super) struct FolderRule {
    /// Tokens that were added to those of the file, or changed.
    pub(super) more: Vec<AddedToken>,
    /// The name of the rule, for the log and the manifest.
    pub(super) name: Option<String>,
    /// The text of a `tokenizer.json` with the rule of the class, without added tokens, if that is
    /// not the one of the folder.
    #[cfg_attr(not(feature = "general"), expect(dead_code, reason = "the library parses it"))]
    pub(super) text: Option<String>,
}

impl RuleChoice {
    /// # Errors
    /// [`Error::BadOption`] for another text.
    pub(super) fn of(text: Option<&str>) -> Result<Self> {
        match text {
            None => Ok(RuleChoice::Same),
            Some(FILE) => Ok(RuleChoice::File),
            Some(CLASS) => Ok(RuleChoice::Class),
            Some(other) => Err(bad_choice(other, "file or class")),
        }
    }
}

pub(super) fn bad_choice(found: &str, expected: &str) -> Error {
    Error::BadOption {
        name: "tokenizer-rule",
        found: format!("'{found}'"),
        expected: expected.to_owned(),
        hint: None,
    }
}

/// Gives a tokenizer the tokens of the files beside it and, if that is the choice, the rule of its
/// class. `text` is that of the file.
///
/// # Errors
/// [`Error::BadVocab`] for a file that cannot be followed, and for a class with another rule where
/// none was chosen.
pub(super) fn follow(
    folder: &Folder,
    neighbours: &Neighbours,
    choice: RuleChoice,
    file: &mut TokenizerJson,
    text: &str,
    with_specials: bool,
) -> Result<FolderRule> {
    let model = folder.read_neighbour("config.json")?;
    let is_byte_level = text.contains("\"ByteLevel\"");
    let name = names::class_of(&model, &neighbours.config, is_byte_level);
    let class = name.and_then(table::followed);
    let source = match neighbours.config["tokenizer_class"].is_string() {
        true => folder.file(CONFIG),
        false => folder.file("config.json"),
    };
    if let Some(name) = name.filter(|name| table::is_unfollowed(name) && choice != RuleChoice::File)
    {
        let expected = "a class that reads tokenizer.json, or one whose rule is supported";
        return Err(bad(&source, format!("class {name}"), expected).with_hint(HINT_UNFOLLOWED));
    }
    let of_class = match class.filter(|_| choice != RuleChoice::File) {
        Some(class) => Some(rebuilt(class, neighbours, folder, file, &source)?),
        None => None,
    };
    let tokens = neighbours.tokens(folder, &ClassTokens::default())?;
    let more = add_neighbours(file, tokens);
    let read = name.map_or(String::new(), |name| format!(", class {name}"));
    let of_file = |more, same: &str| FolderRule {
        more,
        name: Some(format!("tokenizer.json{read}{same}")),
        text: None,
    };
    let Some((class, mut rule, class_more)) = of_class else {
        return Ok(of_file(more, ""));
    };
    let differences = rule.differences(file, with_specials);
    if differences.is_empty() {
        return Ok(of_file(more, ", which is the same"));
    }
    if choice != RuleChoice::Class {
        let found = format!("class {} with {}", class.name, differences.join(", "));
        return Err(bad(&source, found, "a class with the rule of tokenizer.json").with_hint(HINT));
    }
    rule.swap(file);
    Ok(FolderRule {
        more: class_more,
        name: Some(format!("class {}", class.name)),
        text: Some(text_of(text, file)?),
    })
}

type Rebuilt = (&'static Class, Rule, Vec<AddedToken>);

/// The rule of a class for a file, which is left as it was, and the added tokens.
fn rebuilt(
    class: &'static Class,
    neighbours: &Neighbours,
    folder: &Folder,
    file: &mut TokenizerJson,
    source: &str,
) -> Result<Rebuilt> {
    let given = Given {
        config: &neighbours.config,
        neighbours,
        tokens: class.tokens,
        vocab: &file.model.vocab,
        normalizer: &file.normalizer,
    };
    let Parts { normalizer, pre_tokenizer, decoder, model, around, extra } = (class.parts)(&given);
    let around = around_tokens(around, &given);
    check_kind(class, &model, file, source)?;
    let tokens = neighbours.tokens(
        folder,
        &ClassTokens {
            named: class.tokens,
            mask_strips: class.mask_strips,
            resets_flags: class.resets_flags,
            extra: &extra,
            of_file: &file.added_tokens,
        },
    )?;
    let post_processor = file.post_processor.clone();
    let mut rule = Rule {
        normalizer,
        pre_tokenizer,
        post_processor,
        decoder,
        added_tokens: Vec::new(),
        model: ModelFields::of(&model),
    };
    rule.swap(file);
    let more = add_neighbours(file, tokens);
    let template = around.map(|around| around.template(file)).transpose();
    rule.swap(file);
    match template {
        Ok(template) => rule.post_processor = template.unwrap_or(rule.post_processor),
        Err(token) => {
            let expected = format!("the tokens that class {} puts around a text", class.name);
            return Err(bad(source, format!("no {token}"), &expected));
        }
    }
    Ok((class, rule, more))
}

/// The class takes its own type of model, whatever the file says.
fn check_kind(class: &Class, model: &ModelRule, file: &TokenizerJson, source: &str) -> Result<()> {
    let has_scores = matches!(file.model.vocab, Vocab::Scores(_));
    let fits = file.model.kind.as_deref().is_none_or(|kind| kind == model.kind)
        && has_scores == (model.kind == "Unigram");
    if fits {
        return Ok(());
    }
    let found = format!("class {}", class.name);
    let kind = file.model.kind.as_deref().unwrap_or("another");
    let expected = format!("a class of models of type {kind}, as that of tokenizer.json is");
    Err(bad(source, found, &expected).with_hint(HINT_UNFOLLOWED))
}

/// The tokens around a text, by their spelling or their ids.
enum AroundTokens {
    Tokens([Vec<Option<String>>; 2]),
    Ids([&'static [u32]; 2]),
}

fn around_tokens(around: AroundText, given: &Given<'_>) -> Option<AroundTokens> {
    let tokens = |keys: &[&str]| keys.iter().map(|key| given.token(key)).collect();
    match around {
        AroundText::OfFile => None,
        AroundText::Keys(before, after) => {
            Some(AroundTokens::Tokens([tokens(before), tokens(after)]))
        }
        AroundText::Ids(before, after) => Some(AroundTokens::Ids([before, after])),
    }
}

impl AroundTokens {
    /// A post-processor, or the token that the tokenizer lacks.
    fn template(self, file: &TokenizerJson) -> std::result::Result<Value, String> {
        let id = |token: Option<String>| {
            let token = token.ok_or("special token")?;
            let id = id_of(file, &token).ok_or_else(|| format!("token '{token}'"))?;
            Ok::<_, String>((token, id))
        };
        let [before, after]: [Vec<(String, u32)>; 2] = match self {
            AroundTokens::Ids(sides) => {
                sides.map(|ids| ids.iter().map(|id| (id.to_string(), *id)).collect())
            }
            AroundTokens::Tokens([before, after]) => [
                before.into_iter().map(id).collect::<std::result::Result<_, _>>()?,
                after.into_iter().map(id).collect::<std::result::Result<_, _>>()?,
            ],
        };
        let mut single: Vec<Value> = before.iter().map(|(token, _)| around(token, 0)).collect();
        single.push(sequence("A", 0));
        single.extend(after.iter().map(|(token, _)| around(token, 0)));
        let tokens = before.iter().chain(&after);
        let special = tokens.map(|(token, id)| {
            (token.clone(), json!({ "id": token, "ids": [id], "tokens": [token] }))
        });
        Ok(json!({
            "type": "TemplateProcessing",
            "single": single,
            "pair": [sequence("A", 0)],
            "special_tokens": special.collect::<Value>(),
        }))
    }
}

/// The file's text with the rule that it now has, and without added tokens.
fn text_of(text: &str, file: &TokenizerJson) -> Result<String> {
    let mut json: Value = serde_json::from_str(text)
        .map_err(|error| bad("tokenizer.json", error.to_string(), "a JSON object"))?;
    json["added_tokens"] = json!([]);
    json["normalizer"].clone_from(&file.normalizer);
    json["pre_tokenizer"].clone_from(&file.pre_tokenizer);
    json["post_processor"].clone_from(&file.post_processor);
    json["decoder"].clone_from(&file.decoder);
    let (model, fields) = (json["model"].take(), &file.model);
    json["model"] = match fields.kind.as_deref() {
        Some("WordPiece") => json!({
            "type": fields.kind, "unk_token": fields.unk_token,
            "continuing_subword_prefix": fields.continuing_subword_prefix,
            "max_input_chars_per_word": fields.max_input_chars_per_word, "vocab": model["vocab"],
        }),
        Some("Unigram") => json!({
            "type": fields.kind, "unk_id": fields.unk_id, "vocab": model["vocab"],
            "byte_fallback": fields.byte_fallback,
        }),
        _ => json!({
            "type": fields.kind, "dropout": null, "unk_token": fields.unk_token,
            "continuing_subword_prefix": fields.continuing_subword_prefix,
            "end_of_word_suffix": fields.end_of_word_suffix, "fuse_unk": fields.fuse_unk,
            "byte_fallback": fields.byte_fallback, "ignore_merges": false,
            "vocab": model["vocab"], "merges": model["merges"],
        }),
    };
    Ok(json.to_string())
}

impl ModelFields {
    fn of(rule: &ModelRule) -> Self {
        let is_bpe = rule.kind == "BPE";
        ModelFields {
            kind: Some(rule.kind.to_owned()),
            unk_token: rule.unk_token.clone(),
            unk_id: rule.unk_id,
            continuing_subword_prefix: rule.continuing_subword_prefix.map(str::to_owned),
            end_of_word_suffix: rule.end_of_word_suffix.map(str::to_owned),
            fuse_unk: Some(rule.fuse_unk).filter(|_| is_bpe),
            byte_fallback: Some(rule.byte_fallback),
            ignore_merges: None,
            max_input_chars_per_word: rule.word_chars_max,
        }
    }
}
