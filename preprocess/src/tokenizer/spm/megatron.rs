//! Megatron's tokenizers of a model: today's, and those of `--legacy-tokenizer`.

use serde_json::json;

use super::super::{EncodeError, Encoder, Tokenizer, TokenizerSpec};
use super::trie::Trie;
use super::{SentencePiece, SentencePieceEncoder};
use crate::{Error, Result};

/// Which of Megatron's tokenizers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flavor {
    /// All names in Megatron core since 0.15: the library's ids; the end is the model's.
    Core,
    /// The older `GPTSentencePieceTokenizer`, which is the same.
    OldGpt,
    /// The older `Llama2Tokenizer`: every text begins with the model's beginning.
    OldLlama2,
    /// The older `SentencePieceTokenizer`: pieces of its own after those of the model, all of
    /// which are recognised in a text.
    Old {
        /// How many `<extra_id_0>`, `<extra_id_1>` ... there are.
        extra_ids: u32,
    },
}

/// Its names on the command line: our own, and Megatron's.
pub(crate) const KINDS: [&str; 4] =
    ["sentencepiece", "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"];

/// Makes the tokenizer of one of [`KINDS`].
///
/// # Errors
/// As [`SentencePiece::open`], and [`Error::BadOption`].
pub(crate) fn open(spec: &TokenizerSpec) -> Result<Megatron> {
    let bad = |name, found: String, expected: &str| Error::BadOption {
        name,
        found,
        expected: expected.to_owned(),
        hint: None,
    };
    let model = spec.model.as_ref();
    let model = model.ok_or_else(|| {
        bad("tokenizer-model", "none".to_owned(), "a .model file of SentencePiece")
    })?;
    let flavor = match (spec.legacy, spec.kind.as_str()) {
        (true, "SentencePieceTokenizer") => Flavor::Old { extra_ids: spec.vocab_extra_ids },
        _ if spec.vocab_extra_ids > 0 => {
            let found = spec.vocab_extra_ids.to_string();
            let expected = "0 without --tokenizer SentencePieceTokenizer --legacy-tokenizer";
            return Err(bad("vocab-extra-ids", found, expected));
        }
        (true, "GPTSentencePieceTokenizer") => Flavor::OldGpt,
        (true, "Llama2Tokenizer") => Flavor::OldLlama2,
        _ => Flavor::Core,
    };
    Megatron::open(model, flavor)
}

/// A model as Megatron uses it.
#[derive(Debug)]
pub(crate) struct Megatron {
    model: SentencePiece,
    path: String,
    flavor: Flavor,
    /// Of the older `SentencePieceTokenizer`: the recognised tokens and their ids, in its order.
    specials: Vec<(String, u32)>,
    /// To the place of a special piece in that order.
    special_trie: Trie,
    vocab_size: u32,
    eod: Option<u32>,
}

#[derive(Debug)]
struct MegatronEncoder<'a> {
    tokenizer: &'a Megatron,
    encoder: SentencePieceEncoder<'a>,
}

/// T5 has 100.
const EXTRA_IDS_MAX: u32 = 1 << 16;

impl Megatron {
    /// Reads a model.
    ///
    /// # Errors
    /// As [`SentencePiece::open`], and [`Error::BadOption`] if the older `Llama2Tokenizer` is asked
    /// of a model without a beginning, or too many extra ids.
    pub(crate) fn open(path: &str, flavor: Flavor) -> Result<Self> {
        let model = SentencePiece::open(path)?;
        let bad = |name, found: String, expected: &str| Error::BadOption {
            name,
            found,
            expected: expected.to_owned(),
            hint: None,
        };
        let mut specials = Vec::new();
        let mut vocab_size = model.size();
        let mut eod = model.eos;
        match flavor {
            Flavor::Core | Flavor::OldGpt => {}
            Flavor::OldLlama2 if model.bos.is_some() => {}
            Flavor::OldLlama2 => {
                let found = format!("none in {path}");
                return Err(bad(
                    "tokenizer-model",
                    found,
                    "a model with the beginning-of-text token <s>",
                ));
            }
            Flavor::Old { extra_ids } if extra_ids > EXTRA_IDS_MAX => {
                return Err(bad("vocab-extra-ids", extra_ids.to_string(), "at most 65536"));
            }
            Flavor::Old { extra_ids } => {
                specials = old_specials(&model, extra_ids);
                let ids = specials.iter().map(|(_, id)| id + 1);
                vocab_size = ids.fold(vocab_size, u32::max);
                eod = specials.iter().find(|(text, _)| text == "<EOD>").map(|(_, id)| *id);
            }
        }
        let named = || ["<eod>", "<EOD>"].iter().find_map(|name| model.id_of(name));
        let eod = eod.or_else(named);
        let entries = specials.iter().map(|(text, _)| text.as_bytes()).zip(0..).collect();
        let special_trie = Trie::new(entries);
        let path = path.to_owned();
        Ok(Megatron { model, path, flavor, specials, special_trie, vocab_size, eod })
    }

    /// The first of the special pieces in a text: where it is, and which. Of two at one place the
    /// first in their order.
    fn find_special(&self, text: &str) -> Option<(usize, &(String, u32))> {
        if self.specials.is_empty() {
            return None;
        }
        let order = |at: usize| self.special_trie.values(&text.as_bytes()[at..]).min();
        let found = (0..text.len()).find_map(|at| Some((at, order(at)?)));
        found.map(|(at, order)| (at, &self.specials[order as usize]))
    }

    fn encode_with(&self, encoder: &mut SentencePieceEncoder<'_>, text: &str, ids: &mut Vec<u32>) {
        if self.flavor == Flavor::OldLlama2 {
            ids.extend(self.model.bos);
        }
        let mut rest = text;
        while let Some((at, (special, id))) = self.find_special(rest) {
            encoder.encode(&rest[..at], ids);
            ids.push(*id);
            rest = &rest[at + special.len()..];
        }
        encoder.encode(rest, ids);
    }
}

/// Its own pieces, then the model's filler, beginning and end, then the extra ids. Those that are
/// pieces of the model keep their ids; the others follow, one after another.
fn old_specials(model: &SentencePiece, extra_ids: u32) -> Vec<(String, u32)> {
    let control = |id: Option<u32>, name: &str| -> String {
        id.and_then(|id| model.piece(id)).unwrap_or(name).to_owned()
    };
    let own = ["<CLS>", "<SEP>", "<EOD>", "<MASK>"].map(str::to_owned).into_iter();
    let of_model = [(model.pad, "<PAD>"), (model.bos, "<BOS>"), (model.eos, "<EOS>")];
    let of_model = of_model.map(|(id, name)| control(id, name)).into_iter();
    let extra = (0..extra_ids).map(|at| format!("<extra_id_{at}>"));
    let mut known: std::collections::HashMap<String, u32> =
        (0..model.size()).filter_map(|id| Some((model.piece(id)?.to_owned(), id))).collect();
    let mut next = model.size();
    let mut specials: Vec<(String, u32)> = Vec::new();
    let mut seen = std::collections::HashSet::new();
    for special in own.chain(of_model).chain(extra) {
        let id = *known.entry(special.clone()).or_insert_with(|| {
            next += 1;
            next - 1
        });
        if seen.insert(id) {
            specials.push((special, id));
        }
    }
    specials
}

impl Tokenizer for Megatron {
    fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        self.encode_with(&mut SentencePieceEncoder::without_memory(&self.model), text, ids);
    }

    fn encoder(&self) -> Box<dyn Encoder + '_> {
        Box::new(MegatronEncoder {
            tokenizer: self,
            encoder: SentencePieceEncoder::new(&self.model),
        })
    }

    fn refused(&self, text: &str) -> Option<EncodeError> {
        self.model.refused(text)
    }

    fn decode(&self, ids: &[u32], out: &mut Vec<u8>) -> Result<()> {
        let mut rest = ids;
        let special = |id: u32| self.specials.iter().find(|it| it.1 == id);
        while let Some(at) = rest.iter().position(|&id| special(id).is_some()) {
            self.model.decode(&rest[..at], out)?;
            out.extend(special(rest[at]).iter().flat_map(|it| it.0.bytes()));
            rest = &rest[at + 1..];
        }
        self.model.decode(rest, out)
    }

    fn cut_after(&self, text: &str, at: usize) -> Option<usize> {
        let plain = matches!(self.flavor, Flavor::Core | Flavor::OldGpt);
        plain.then(|| self.model.cut_after(text, at)).flatten()
    }

    fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    fn eod(&self) -> Option<u32> {
        self.eod
    }

    fn name(&self) -> &str {
        "sentencepiece"
    }

    fn fingerprint(&self) -> String {
        let mut sum = storage::Crc64::new();
        sum.update(&self.model.checksum().to_le_bytes());
        if self.flavor == Flavor::OldLlama2 {
            sum.update(b"with a beginning");
        }
        for (text, id) in &self.specials {
            sum.update(&id.to_le_bytes());
            sum.update(text.as_bytes());
        }
        format!("{:016x}", sum.value())
    }

    /// As Megatron core 0.16 writes it for its three names of SentencePiece, which are one, and no
    /// other tokenizer flags. The older tokenizers wrote the class and their two arguments.
    fn identifiers(&self) -> serde_json::Value {
        let (class, extra_ids) = match self.flavor {
            Flavor::Core => {
                return json!({
                    "class":
                        concat!(
                            "megatron.core.tokenizers.text.models.default_tokenizer.",
                            "DefaultTokenizerText"
                        ),
                    "tokenizer_path": self.path,
                    "legacy": "False",
                    "special_tokens": "None",
                });
            }
            Flavor::OldGpt => ("_GPTSentencePieceTokenizer", 0),
            Flavor::OldLlama2 => ("_Llama2Tokenizer", 0),
            Flavor::Old { extra_ids } => ("_SentencePieceTokenizer", extra_ids),
        };
        json!({
            "class": class,
            "tokenizer_path": [self.path],
            "vocab_extra_ids": extra_ids.to_string(),
        })
    }
}

impl Encoder for MegatronEncoder<'_> {
    fn encode(&mut self, text: &str, ids: &mut Vec<u32>) {
        self.tokenizer.encode_with(&mut self.encoder, text, ids);
    }
}
