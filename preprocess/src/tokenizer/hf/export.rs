//! The files with which `transformers` opens a tokenizer with the same ids.
//!
//! They name its generic class, which follows the `tokenizer.json` beside it, or the model of
//! SentencePiece. The classes of one model would set up a pre-tokenizer of their own.

use serde_json::{Map, Value, json};

use super::super::gpt2::Gpt2;
use super::super::lexicon::Lexicon;
use super::super::read::{bad, parse_error, read_bytes};
use super::super::spm::SentencePiece;
use super::super::wordpiece::{WordPieceCase, WordPieceRules};
use super::super::{Tokenizer, TokenizerSpec, open_gpt2, spm, worded};
use super::bert::{self, BertNormalizer};
use super::class::{RuleChoice, bad_choice};
use super::folder::Folder;
use super::neighbours::{ADDED, CONFIG, SPECIALS};
use super::{KINDS, TOKENIZER};
use crate::{Error, Result};

/// The generic class, under the name that both `transformers` 4 and 5 know.
const CLASS: &str = "PreTrainedTokenizerFast";

/// SentencePiece's file, as the generic class looks for it.
const MODEL: &str = "tokenizer.model";

/// Files beside a `tokenizer.json` that decide ids or prompts.
const BESIDE: [&str; 3] = [SPECIALS, ADDED, "chat_template.jinja"];

/// The model's settings for its tokens.
#[derive(Clone, Debug, Default)]
pub struct ModelTokens {
    /// Ids of special tokens, each with its key in `tokenizer_config.json`, such as `eos_token`.
    pub special: Vec<(&'static str, u32)>,
    /// Tokens of a text, at most, if that is known.
    pub tokens_max: Option<u64>,
    /// Whether the model takes token types. GPT-2 would add an embedding for them to each token.
    pub takes_types: bool,
}

/// Files for `transformers`.
#[derive(Clone, Debug, Default)]
pub struct ExportedTokenizer {
    /// Name and contents of each.
    pub files: Vec<(String, Vec<u8>)>,
    /// The texts for which its ids may differ from those of this crate.
    pub differences: Option<&'static str>,
}

impl ExportedTokenizer {
    /// Makes the files of a tokenizer.
    ///
    /// # Errors
    /// [`Error::BadOption`] for a kind that `transformers` has no form for, and those of
    /// [`open_tokenizer`](crate::open_tokenizer).
    pub fn new(spec: &TokenizerSpec, model: &ModelTokens) -> Result<Self> {
        let kind = spec.kind.as_str();
        if KINDS.contains(&kind) {
            if RuleChoice::of(spec.tokenizer_rule.as_deref())? == RuleChoice::Class {
                return Err(bad_choice("class", "file, whose rule the exported folder has"));
            }
            return of_folder(&Folder::of(spec)?, model);
        }
        if spm::KINDS.contains(&kind) {
            return of_sentencepiece(spec, model);
        }
        if let Some((case, rules)) = worded::wordpiece_rules(kind) {
            return of_wordpiece(&worded::vocab_file(spec)?, case, rules, model);
        }
        if ["gpt2", "GPT2BPETokenizer"].contains(&kind) {
            return Ok(of_gpt2(&open_gpt2(spec)?, model));
        }
        Err(Error::BadOption {
            name: "tokenizer",
            found: format!("'{kind}'"),
            expected: "gpt2, hf, sentencepiece or wordpiece, which transformers can open"
                .to_owned(),
            hint: None,
        })
    }

    fn add(&mut self, name: &str, bytes: impl Into<Vec<u8>>) {
        self.files.push((name.to_owned(), bytes.into()));
    }

    fn add_json(&mut self, name: &str, value: &Value) {
        self.add(name, format!("{value:#}\n"));
    }
}

/// A `tokenizer_config.json`. `spelled` has the text of an id that is a special token to the
/// tokenizer: naming another would change the ids of texts that spell it.
fn config(model: &ModelTokens, spelled: impl Fn(u32) -> Option<String>) -> Map<String, Value> {
    let mut config = Map::new();
    config.insert("clean_up_tokenization_spaces".to_owned(), false.into());
    config.extend(model.tokens_max.map(|max| ("model_max_length".to_owned(), max.into())));
    let tokens = model.special.iter().filter_map(|(key, id)| Some((*key, spelled(*id)?)));
    config.extend(tokens.map(|(key, token)| (key.to_owned(), token.into())));
    complete(&mut config, model);
    config
}

/// Adds what any `tokenizer_config.json` needs.
fn complete(config: &mut Map<String, Value>, model: &ModelTokens) {
    config.insert("tokenizer_class".to_owned(), CLASS.into());
    let inputs = match model.takes_types {
        true => json!(["input_ids", "token_type_ids", "attention_mask"]),
        false => json!(["input_ids", "attention_mask"]),
    };
    config.insert("model_input_names".to_owned(), inputs);
}

/// A `tokenizer.json` as it is, and its neighbours if the folder was named: only then they decide
/// ids here too.
fn of_folder(folder: &Folder, model: &ModelTokens) -> Result<ExportedTokenizer> {
    let (name, text) = folder.read_tokenizer()?;
    let tokenizer: Value = serde_json::from_str(&text)
        .map_err(|e| bad(&name, parse_error(e), "a tokenizer in Hugging Face's format"))?;
    let added: &[Value] = tokenizer["added_tokens"].as_array().map_or(&[], Vec::as_slice);
    let spelled = |id: u32| {
        let is_it = |token: &&Value| token["id"] == id && token["special"] == true;
        Some(added.iter().find(is_it)?["content"].as_str()?.to_owned())
    };
    let mut config = config(model, spelled);
    let mut exported = ExportedTokenizer::default();
    exported.add(TOKENIZER, text);
    if folder.is_complete() {
        if let Value::Object(given) = folder.neighbours()?.config {
            config = given;
            // Custom code and a custom pre-tokenizer did not make the ids.
            config.remove("auto_map");
            complete(&mut config, model);
        }
        for name in BESIDE {
            match read_bytes(&folder.file(name)) {
                Ok(bytes) => exported.add(name, bytes),
                Err(Error::Storage(storage::Error::NotFound { .. })) => {}
                Err(error) => return Err(error),
            }
        }
    }
    exported.add_json(CONFIG, &config.into());
    Ok(exported)
}

/// SentencePiece's own file: `transformers` 5 makes a tokenizer of it by the model's settings.
fn of_sentencepiece(spec: &TokenizerSpec, model: &ModelTokens) -> Result<ExportedTokenizer> {
    let file = spec.model.as_deref().unwrap_or_default();
    spm::open(spec)?;
    let bytes = read_bytes(file)?;
    let pieces = SentencePiece::from_bytes(file, &bytes)?;
    let is_control = |id: &u32| [pieces.bos, pieces.eos, pieces.pad].contains(&Some(*id));
    let spelled = |id: u32| Some(id).filter(is_control).and_then(|id| pieces.piece(id));
    let config = config(model, |id| spelled(id).map(str::to_owned));
    let mut exported = ExportedTokenizer::default();
    exported.add(MODEL, bytes);
    exported.add_json(CONFIG, &config.into());
    Ok(exported)
}

fn of_wordpiece(
    file: &str,
    case: WordPieceCase,
    rules: WordPieceRules,
    model: &ModelTokens,
) -> Result<ExportedTokenizer> {
    let lexicon = Lexicon::read(file)?;
    let normalizer = BertNormalizer {
        lowercase: case == WordPieceCase::Lower,
        handle_chinese_chars: true,
        strip_accents: Value::Null,
        word_chars_max: rules.word_chars_max(),
    };
    let mut tokenizer = bert::wordpiece_json(&lexicon, &normalizer);
    tokenizer["post_processor"]["pair"] = bert::pair();
    if ["[CLS]", "[SEP]"].iter().any(|token| lexicon.id(token).is_none()) {
        tokenizer["post_processor"] = Value::Null;
    }
    let token = |id: u32| lexicon.tokens().get(id as usize).filter(|token| bert::is_special(token));
    let mut config = config(model, |id| token(id).cloned());
    config.insert("unk_token".to_owned(), "[UNK]".into());
    let mut exported = ExportedTokenizer {
        files: Vec::new(),
        differences: (rules == WordPieceRules::FullTokenizer).then_some(
            "texts with characters of private use or newer than Unicode 8, or a capital sigma at \
             the end of a word",
        ),
    };
    exported.add_json(TOKENIZER, &tokenizer);
    exported.add(bert::VOCAB, lexicon.tokens().join("\n") + "\n");
    exported.add_json(CONFIG, &config.into());
    Ok(exported)
}

fn of_gpt2(gpt2: &Gpt2, model: &ModelTokens) -> ExportedTokenizer {
    let (vocab, merges) = (gpt2.vocab_json(), gpt2.merges_txt());
    let end = gpt2.eod().and_then(|id| Some((id, spelling(gpt2, id)?)));
    let added = end.iter().map(|(id, token)| bert::added_token(token, *id));
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": added.collect::<Value>(),
        "normalizer": null,
        "pre_tokenizer": {
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": true,
        },
        "post_processor": null,
        "decoder": {
            "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true,
        },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": serde_json::from_str::<Value>(&vocab).expect("a JSON object of our own"),
            // After the line with the version.
            "merges": merges.lines().skip(1).collect::<Value>(),
        },
    });
    let token = |id: u32| end.as_ref().filter(|end| end.0 == id).map(|end| end.1.clone());
    let config = config(model, token);
    let mut exported = ExportedTokenizer::default();
    exported.add(TOKENIZER, tokenizer.to_string());
    exported.add("vocab.json", vocab);
    exported.add("merges.txt", merges);
    exported.add_json(CONFIG, &config.into());
    exported
}

fn spelling(tokenizer: &dyn Tokenizer, id: u32) -> Option<String> {
    let mut bytes = Vec::new();
    tokenizer.decode(&[id], &mut bytes).ok()?;
    String::from_utf8(bytes).ok()
}
