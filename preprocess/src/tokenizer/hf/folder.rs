//! The files beside a `tokenizer.json`, and the end-of-document token that they name.

use std::io;

use serde_json::Value;
use storage::Location;

use super::super::TokenizerSpec;
use super::super::read::{bad, parse_error, read_text, read_text_if_any};
use super::neighbours::{ADDED, CONFIG, Neighbours, SPECIALS, token_in};
use super::{TOKENIZER, bert};
use crate::{Error, Result};

/// Tokens that end documents, if no file names one: the most common first.
const USUAL: [&str; 8] = [
    "<|endoftext|>",
    "</s>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "<|im_end|>",
    "<eos>",
    "<|eot_id|>",
    "[SEP]",
];

/// A folder with a tokenizer in it.
#[derive(Debug)]
pub(super) struct Folder {
    /// As it was named: the folder, or its tokenizer.json.
    model: String,
    is_file: bool,
}

impl Folder {
    pub(super) fn of(spec: &TokenizerSpec) -> Result<Self> {
        let model = spec.model.clone().ok_or_else(|| Error::BadOption {
            name: "tokenizer-model",
            found: "none".to_owned(),
            expected: "a tokenizer.json, or the folder that holds it".to_owned(),
            hint: None,
        })?;
        let is_file = Location::new(&model).file_name().ends_with(".json");
        Ok(Folder { model, is_file })
    }

    pub(super) fn model(&self) -> &str {
        &self.model
    }

    /// The name of the tokenizer's file, and its text.
    pub(super) fn read_tokenizer(&self) -> Result<(String, String)> {
        if self.is_file {
            return Ok((self.model.clone(), read_text(&self.model)?));
        }
        let file = self.file(TOKENIZER);
        let text = match read_text_if_any(&file) {
            Err(Error::Storage(storage::Error::Io { source, .. }))
                if source.kind() == io::ErrorKind::NotADirectory =>
            {
                let expected = "a folder with a tokenizer.json, or a file named *.json";
                return Err(bad(&self.model, "another file", expected));
            }
            read => read?,
        };
        if let Some(text) = text {
            return Ok((file, text));
        }
        let vocab = self.file(bert::VOCAB);
        if read_text_if_any(&vocab)?.is_some() {
            let text = bert::tokenizer_json(self, &self.read_neighbour(CONFIG)?)?;
            return Ok((vocab, text));
        }
        // `gpt2` and `meta-llama/Llama-3.1-8B` are names of a hub as well as of folders.
        let is_hub_name = !self.model.starts_with(['/', '.', '~'])
            && !Location::new(&self.model).is_url()
            && self.model.split('/').filter(|part| !part.is_empty()).count() <= 2;
        let hint = if is_hub_name {
            "download the model's folder, without its weights: hf download NAME --exclude \
             '*.safetensors' '*.bin' --local-dir FOLDER"
        } else {
            "use --tokenizer sentencepiece for a folder with only tokenizer.model, and \
             --vocab-file and --merge-file for vocab.json and merges.txt"
        };
        let expected = "a folder with a tokenizer.json, or BERT's vocab.txt";
        Err(bad(&self.model, "neither", expected).with_hint(hint))
    }

    /// The id that ends a document: of `asked`, or as the neighbours name it, or of a usual name.
    pub(super) fn eod(
        &self,
        asked: Option<&str>,
        neighbours: &Neighbours,
        id_of: impl Fn(&str) -> Option<u32>,
    ) -> Result<Option<u32>> {
        if let Some(token) = asked {
            let id = id_of(token).ok_or_else(|| Error::BadOption {
                name: "eod-token",
                found: format!("'{token}'"),
                expected: format!("a token of {}", self.model),
                hint: None,
            })?;
            return Ok(Some(id));
        }
        // Megatron takes the one for the other as well.
        let keys = ["eos_token", "sep_token"];
        let named = keys.iter().map(|key| (key, neighbours.special(key)));
        let named = named.chain(keys.iter().map(|key| (key, &neighbours.specials[*key])));
        let mut named = named.filter_map(|(key, value)| Some((key, token_in(value)?)));
        if let Some((key, token)) = named.next() {
            let id = id_of(token).ok_or_else(|| {
                let expected = format!("a token of {}", self.model);
                bad(&self.file(CONFIG), format!("{key} '{token}'"), &expected)
                    .with_hint("set another with --eod-token")
            })?;
            return Ok(Some(id));
        }
        for neighbour in ["generation_config.json", "config.json"] {
            let config = self.read_neighbour(neighbour)?;
            let ids = &config["eos_token_id"];
            let id = ids.as_u64().or_else(|| ids.get(0)?.as_u64());
            if let Some(id) = id.and_then(|id| u32::try_from(id).ok()) {
                return Ok(Some(id));
            }
        }
        Ok(USUAL.iter().find_map(|token| id_of(token)))
    }

    /// Whether the folder was named, and not its tokenizer.json: then the files beside it decide
    /// ids too.
    pub(super) fn is_complete(&self) -> bool {
        !self.is_file
    }

    /// The name of a file beside the tokenizer.
    pub(super) fn file(&self, name: &str) -> String {
        let model = Location::new(&self.model);
        if self.is_file { model.beside(name) } else { model.join(name) }.to_string()
    }

    pub(super) fn neighbours(&self) -> Result<Neighbours> {
        Ok(Neighbours {
            config: self.read_neighbour(CONFIG)?,
            specials: self.read_neighbour(SPECIALS)?,
            added: self.read_neighbour(ADDED)?,
        })
    }

    /// A file beside the tokenizer, or null.
    pub(super) fn read_neighbour(&self, name: &str) -> Result<Value> {
        let file = self.file(name);
        let Some(text) = read_text_if_any(&file)? else { return Ok(Value::Null) };
        serde_json::from_str(&text).map_err(|e| bad(&file, parse_error(e), "a JSON object"))
    }
}
