//! The `tokenizer.json` that `transformers` makes of a folder with BERT's `vocab.txt` and none of
//! its own: special tokens are one id each where a text spells them, and `[CLS]` and `[SEP]` are
//! put around it. Megatron core's names of BERT's tokenizer refer to this; the older program, whose
//! tokenizer is [`WordPiece`](super::super::WordPiece), has neither.

use serde_json::{Map, Value, json};

use super::super::lexicon::Lexicon;
use super::super::read::bad;
use super::folder::Folder;
use super::neighbours::CONFIG;
use crate::Result;

/// The vocabulary in the folder.
pub(super) const VOCAB: &str = "vocab.txt";

const SPECIALS: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];
const CLASSES: [&str; 2] = ["BertTokenizer", "BertTokenizerFast"];

/// The text of a `tokenizer.json`. `config` is the `tokenizer_config.json` beside the vocabulary,
/// or null.
///
/// # Errors
/// [`crate::Error::BadVocab`] for another class of tokenizer, or a vocabulary that is not BERT's;
/// [`crate::Error::Storage`].
pub(super) fn tokenizer_json(folder: &Folder, config: &Value) -> Result<String> {
    let file = folder.file(VOCAB);
    if let Some(class) = config["tokenizer_class"].as_str().filter(|it| !CLASSES.contains(it)) {
        let expected = "BertTokenizer, the only class supported without a tokenizer.json";
        return Err(bad(&folder.file(CONFIG), format!("class {class}"), expected));
    }
    let lexicon = Lexicon::read(&file)?;
    for token in SPECIALS {
        if lexicon.id(token).is_none() {
            let expected = "[PAD], [UNK], [CLS], [SEP] and [MASK], because the folder has no \
                            tokenizer.json";
            return Err(bad(&file, format!("no '{token}'"), expected));
        }
    }
    let flag = |key: &str| config[key].as_bool().unwrap_or(true);
    let normalizer = BertNormalizer {
        lowercase: flag("do_lower_case"),
        handle_chinese_chars: flag("tokenize_chinese_chars"),
        strip_accents: config["strip_accents"].clone(),
        word_chars_max: 100,
    };
    Ok(wordpiece_json(&lexicon, &normalizer).to_string())
}

/// How a text is normalized before it is cut.
#[derive(Clone, Debug)]
pub(super) struct BertNormalizer {
    pub(super) lowercase: bool,
    pub(super) handle_chinese_chars: bool,
    /// Null: if letters are lower-cased.
    pub(super) strip_accents: Value,
    /// A longer word is one unknown token.
    pub(super) word_chars_max: usize,
}

/// A `tokenizer.json` of a vocabulary. The special tokens that it has are one id each.
pub(super) fn wordpiece_json(lexicon: &Lexicon, normalizer: &BertNormalizer) -> Value {
    let specials = SPECIALS.iter().filter_map(|token| Some((token, lexicon.id(token)?)));
    let added: Value = specials.map(|(token, id)| added_token(token, id)).collect();
    let vocab: Map<String, Value> =
        lexicon.tokens().iter().cloned().zip((0..lexicon.size()).map(Value::from)).collect();
    let special =
        |token: &str| json!({ "id": token, "ids": [vocab.get(token)], "tokens": [token] });
    let template = json!({
        "type": "TemplateProcessing",
        "single": [around("[CLS]", 0), sequence("A", 0), around("[SEP]", 0)],
        "pair": [sequence("A", 0)],
        "special_tokens": { "[CLS]": special("[CLS]"), "[SEP]": special("[SEP]") },
    });
    json!({
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {
            "type": "BertNormalizer", "clean_text": true, "lowercase": normalizer.lowercase,
            "handle_chinese_chars": normalizer.handle_chinese_chars,
            "strip_accents": normalizer.strip_accents,
        },
        "pre_tokenizer": { "type": "BertPreTokenizer" },
        "post_processor": template,
        "decoder": { "type": "WordPiece", "prefix": "##", "cleanup": true },
        "model": {
            "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": normalizer.word_chars_max, "vocab": vocab,
        },
    })
}

/// The tokens that BERT puts around two texts.
pub(super) fn pair() -> Value {
    let first = [around("[CLS]", 0), sequence("A", 0), around("[SEP]", 0)];
    first.into_iter().chain([sequence("B", 1), around("[SEP]", 1)]).collect()
}

/// Whether BERT takes a token as special.
pub(super) fn is_special(token: &str) -> bool {
    SPECIALS.contains(&token)
}

/// A special token of a `tokenizer.json`.
pub(super) fn added_token(token: &str, id: u32) -> Value {
    json!({
        "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true,
    })
}

pub(super) fn around(token: &str, types: u64) -> Value {
    json!({ "SpecialToken": { "id": token, "type_id": types } })
}

pub(super) fn sequence(text: &str, types: u64) -> Value {
    json!({ "Sequence": { "id": text, "type_id": types } })
}
