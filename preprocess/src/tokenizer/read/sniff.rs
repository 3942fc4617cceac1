//! Detects the kind of a tokenizer file, for the message about a file of an unexpected kind.

use serde_json::Value;

use super::super::base64;
use super::super::worded::CPM1;
use super::super::{TokenizerSpec, hf, spm, tiktoken};
use super::{bad, read_bytes};
use crate::Error;

/// A kind of file, and the flags that read it.
struct FileKind {
    name: &'static str,
    /// Whether a kind of tokenizer reads such files.
    is_of: fn(&str) -> bool,
    flags: &'static str,
}

const TOKENIZER_JSON: FileKind = FileKind {
    name: "a Hugging Face tokenizer.json",
    is_of: |kind| hf::KINDS.contains(&kind),
    flags: "use --tokenizer hf --tokenizer-model FILE",
};
const TEKKEN: FileKind = FileKind {
    name: "Mistral's published tekken.json",
    is_of: |_| false,
    flags: "write its list \"vocab\" to a file for --tokenizer tiktoken, and use \
            config.default_vocab_size as --vocab-size",
};
const MEGATRON_LIST: FileKind = FileKind {
    name: "Megatron's form of tekken.json, a list of ranks and bytes",
    is_of: |kind| tiktoken::KINDS.contains(&kind),
    flags: "use --tokenizer tiktoken --tokenizer-model FILE",
};
const TIKTOKEN: FileKind = FileKind {
    name: "a tiktoken vocabulary",
    is_of: |kind| tiktoken::KINDS.contains(&kind),
    flags: "use --tokenizer tiktoken --tokenizer-model FILE",
};
const SENTENCEPIECE: FileKind = FileKind {
    name: "a SentencePiece model",
    is_of: |kind| spm::KINDS.contains(&kind) || CPM1.contains(&kind),
    flags: "use --tokenizer sentencepiece --tokenizer-model FILE",
};
const VOCAB_JSON: FileKind = FileKind {
    name: "a vocab.json of tokens and ids",
    // GPT-2's, and those of words.
    is_of: |kind| {
        ![&hf::KINDS[..], &tiktoken::KINDS, &spm::KINDS, &CPM1].iter().any(|it| it.contains(&kind))
    },
    flags: "use it as --vocab-file, and its merges.txt as --merge-file",
};

/// The error with the kind of the file, if that is not the requested one.
pub(in super::super) fn explained(spec: &TokenizerSpec, error: Error) -> Error {
    if !matches!(error, Error::BadVocab { .. } | Error::Storage(_)) {
        return error;
    }
    let file = spec.model.as_deref().or(spec.vocab_file.as_deref());
    let Some((file, found)) = file.and_then(|file| Some((file, kind_of(&read_bytes(file).ok()?)?)))
    else {
        return error;
    };
    if (found.is_of)(&spec.kind) {
        return error;
    }
    let expected = format!("a file for --tokenizer {}", spec.kind);
    bad(file, found.name, &expected).with_hint(found.flags)
}

fn kind_of(bytes: &[u8]) -> Option<FileKind> {
    match bytes.trim_ascii_start().first()? {
        b'{' | b'[' => kind_of_json(&serde_json::from_slice(bytes).ok()?),
        // The first field of the message is a piece, a message with a text.
        _ if bytes.len() > 3 && bytes[0] == 0x0a && bytes[2] == 0x0a => Some(SENTENCEPIECE),
        _ => {
            let line = bytes.split(|&byte| byte == b'\n').next()?;
            let (token, rank) = std::str::from_utf8(line).ok()?.trim_end().split_once(' ')?;
            let is_ranked = rank.parse::<u32>().is_ok() && base64::decode(token).is_some();
            is_ranked.then_some(TIKTOKEN)
        }
    }
}

fn kind_of_json(json: &Value) -> Option<FileKind> {
    match json {
        Value::Array(items) => items.first()?.get("token_bytes").map(|_| MEGATRON_LIST),
        Value::Object(keys) if keys.get("model").is_some_and(Value::is_object) => {
            Some(TOKENIZER_JSON)
        }
        Value::Object(keys) if keys.contains_key("config") && keys.contains_key("vocab") => {
            Some(TEKKEN)
        }
        Value::Object(keys) => keys.values().all(Value::is_u64).then_some(VOCAB_JSON),
        _ => None,
    }
}
