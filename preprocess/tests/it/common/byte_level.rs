//! A `tokenizer.json` that is generated.

use serde_json::{Map, Value, json};

/// A byte-level tokenizer in which byte `n` is id `n`, and 256 ends documents.
pub fn tokenizer_json() -> Value {
    let mut vocab = Map::new();
    let mut next = 256;
    for byte in 0..=255_u32 {
        let is_printed = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let char = char::from_u32(if is_printed { byte } else { next }).expect("a character");
        next += u32::from(!is_printed);
        vocab.insert(char.to_string(), byte.into());
    }
    json!({
        "added_tokens": [{
            "id": 256, "content": "<|endoftext|>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true,
        }],
        "normalizer": null,
        "pre_tokenizer": {
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true,
        },
        "post_processor": null,
        "decoder": {
            "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true,
        },
        "model": { "type": "BPE", "vocab": vocab, "merges": [] },
    })
}
