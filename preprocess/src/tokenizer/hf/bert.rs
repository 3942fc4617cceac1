//! The `tokenizer.json` that `transformers` makes of a folder with BERT's `vocab.txt` and none of
//! its own: special tokens are one id each where a text spells them, and `[CLS]` and `[SEP]` stand
//! around it. Megatron core means this by its names of BERT's tokenizer; the program before it,
//! whose tokenizer is [`WordPiece`](super::super::WordPiece), has neither.

use serde_json::{Map, Value, json};

use super::super::lexicon::Lexicon;
use super::super::read::bad;
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
pub(super) fn tokenizer_json(prefix: &str, config: &Value) -> Result<String> {
    let file = format!("{prefix}{VOCAB}");
    if let Some(class) = config["tokenizer_class"].as_str().filter(|it| !CLASSES.contains(it)) {
        let expected = "BertTokenizer, the only class supported without a tokenizer.json";
        return Err(bad(&format!("{prefix}{CONFIG}"), format!("class {class}"), expected));
    }
    let lexicon = Lexicon::read(&file)?;
    let mut added = Vec::new();
    for token in SPECIALS {
        let id = lexicon.id(token).ok_or_else(|| {
            let expected = "[PAD], [UNK], [CLS], [SEP] and [MASK], because the folder has no \
                            tokenizer.json";
            bad(&file, format!("no '{token}'"), expected)
        })?;
        added.push(json!({
            "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        }));
    }
    let vocab: Map<String, Value> =
        lexicon.tokens().iter().cloned().zip((0..lexicon.size()).map(Value::from)).collect();
    let flag = |key: &str| config[key].as_bool().unwrap_or(true);
    let around = |token: &str| json!({ "SpecialToken": { "id": token, "type_id": 0 } });
    let special = |token: &str| json!({ "id": token, "ids": [vocab[token]], "tokens": [token] });
    let template = json!({
        "type": "TemplateProcessing",
        "single": [around("[CLS]"), { "Sequence": { "id": "A", "type_id": 0 } }, around("[SEP]")],
        "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }],
        "special_tokens": { "[CLS]": special("[CLS]"), "[SEP]": special("[SEP]") },
    });
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {
            "type": "BertNormalizer", "clean_text": true, "lowercase": flag("do_lower_case"),
            "handle_chinese_chars": flag("tokenize_chinese_chars"),
            "strip_accents": config["strip_accents"],
        },
        "pre_tokenizer": { "type": "BertPreTokenizer" },
        "post_processor": template,
        "decoder": { "type": "WordPiece", "prefix": "##", "cleanup": true },
        "model": {
            "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": vocab,
        },
    });
    Ok(tokenizer.to_string())
}
