//! `tokenizer.json` and `tokenizer_config.json` of Hugging Face.

use serde_json::{Map, Value, json};

use super::pieces::{Piece, PieceKind, Vocabulary};
use super::words::SPACE;
use super::{ModelType, TrainOptions};

/// Below the score of any path of characters, so that text such as `<0x41>` is no byte token.
const BYTE_SCORE: f64 = -1e6;

/// `tokenizer.json`.
pub(super) fn tokenizer(options: &TrainOptions, vocabulary: &Vocabulary) -> Vec<u8> {
    let special = |(id, content): (usize, String)| {
        json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        })
    };
    let added: Vec<Value> = options.special_tokens().into_iter().enumerate().map(special).collect();
    let (normalizer, pre_tokenizer, decoder) = pipeline(options);
    let file = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": null,
        "decoder": decoder,
        "model": model(options, vocabulary),
    });
    bytes(&file)
}

/// The normalizer, pre-tokenizer and decoder.
fn pipeline(options: &TrainOptions) -> (Value, Value, Value) {
    let byte_level = || {
        json!({ "type": "ByteLevel", "add_prefix_space": false,
                                "trim_offsets": true, "use_regex": true })
    };
    match options.model_type {
        ModelType::Bpe | ModelType::Unigram => {
            let space = SPACE.to_string();
            let normalizer = json!({ "type": "Sequence", "normalizers": [
                { "type": "Prepend", "prepend": space },
                { "type": "Replace", "pattern": { "String": " " }, "content": space },
            ]});
            let pre_tokenizer = json!({ "type": "Split", "pattern": { "String": space },
                                        "behavior": "MergedWithNext", "invert": false });
            let decoder = json!({ "type": "Sequence", "decoders": [
                { "type": "Replace", "pattern": { "String": space }, "content": " " },
                { "type": "ByteFallback" },
                { "type": "Fuse" },
                { "type": "Strip", "content": " ", "start": 1, "stop": 0 },
            ]});
            (normalizer, pre_tokenizer, decoder)
        }
        ModelType::ByteBpe if options.split_digits => {
            let digits = json!({ "type": "Digits", "individual_digits": true });
            let pre = json!({ "type": "Sequence", "pretokenizers": [digits, byte_level()] });
            (Value::Null, pre, byte_level())
        }
        ModelType::ByteBpe => (Value::Null, byte_level(), byte_level()),
        ModelType::WordPiece => (
            json!({ "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                    "strip_accents": null, "lowercase": options.lowercase }),
            json!({ "type": "BertPreTokenizer" }),
            json!({ "type": "WordPiece", "prefix": "##", "cleanup": true }),
        ),
    }
}

fn model(options: &TrainOptions, vocabulary: &Vocabulary) -> Value {
    let Vocabulary { pieces, merges } = vocabulary;
    let ids = || {
        let entry = |(id, piece): (usize, &Piece)| (piece.text.clone(), json!(id));
        pieces.iter().enumerate().map(entry).collect::<Map<String, Value>>()
    };
    match options.model_type {
        ModelType::Bpe | ModelType::ByteBpe => {
            let has_bytes = options.model_type.has_byte_tokens();
            json!({
                "type": "BPE", "dropout": null,
                "unk_token": has_bytes.then_some("<unk>"),
                "continuing_subword_prefix": null, "end_of_word_suffix": null,
                "fuse_unk": has_bytes, "byte_fallback": has_bytes, "ignore_merges": false,
                "vocab": ids(), "merges": merges,
            })
        }
        ModelType::Unigram => {
            let entry = |piece: &Piece| match piece.kind {
                PieceKind::Byte => json!([piece.text, BYTE_SCORE]),
                _ => json!([piece.text, f64::from(piece.score)]),
            };
            let vocab: Vec<Value> = pieces.iter().map(entry).collect();
            json!({ "type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": true })
        }
        ModelType::WordPiece => json!({
            "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": ids(),
        }),
    }
}

/// `tokenizer_config.json`, with which `AutoTokenizer` opens the folder.
pub(super) fn config(options: &TrainOptions) -> Vec<u8> {
    let mut config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": false,
    });
    let named: &[(&str, &str)] = match options.model_type {
        ModelType::Bpe | ModelType::Unigram => {
            &[("unk_token", "<unk>"), ("bos_token", "<s>"), ("eos_token", "</s>")]
        }
        ModelType::ByteBpe => &[("bos_token", "<|endoftext|>"), ("eos_token", "<|endoftext|>")],
        ModelType::WordPiece => &[
            ("pad_token", "[PAD]"),
            ("unk_token", "[UNK]"),
            ("cls_token", "[CLS]"),
            ("sep_token", "[SEP]"),
            ("mask_token", "[MASK]"),
        ],
    };
    for (name, token) in named {
        config[name] = json!(token);
    }
    bytes(&config)
}

fn bytes(file: &Value) -> Vec<u8> {
    format!("{file:#}\n").into_bytes()
}
