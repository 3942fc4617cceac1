//! Selects a tokenizer with a vocabulary of words by its name and files.

use std::path::Path;
use std::sync::Arc;

use storage::Location;

use super::cpm1::Cpm1;
use super::encdec::{EncDec, EncDecKind, EncDecSpaces};
use super::jieba::Jieba;
use super::keywords::Keywords;
use super::wordpiece::{WordPiece, WordPieceCase, WordPieceRules};
use super::words::JiebaWords;
use super::{Tokenizer, TokenizerSpec};
use crate::{Error, Result};

/// The tokenizer of CPM-1: words of jieba, and a model of SentencePiece.
pub(super) const CPM1: [&str; 2] = ["cpm1", "GPTChineseTokenizer"];

/// The file in a folder of a CPM tokenizer.
const VOCAB: &str = "vocab.txt";

/// None: the name is of another family.
pub(super) fn open(spec: &TokenizerSpec) -> Result<Option<Arc<dyn Tokenizer>>> {
    let encdec = |kind| -> Result<Option<Arc<dyn Tokenizer>>> {
        let spaces =
            if spec.cpm_spaces_meant { EncDecSpaces::Meant } else { EncDecSpaces::Published };
        Ok(Some(Arc::new(EncDec::open(kind, &vocab_file(spec)?, spaces, jieba(spec)?)?)))
    };
    let wordpiece = |case, rules| -> Result<Option<Arc<dyn Tokenizer>>> {
        let wordpiece = WordPiece::open(&vocab_file(spec)?, case, rules)?;
        Ok(Some(Arc::new(wordpiece.with_keywords(Keywords::of(spec)))))
    };
    match spec.kind.as_str() {
        "encdec" | "cpm2" | "EncDecTokenizer" => encdec(EncDecKind::Cpm2),
        "yuan" => encdec(EncDecKind::Yuan),
        "cpm-t5" => encdec(EncDecKind::CpmT5),
        kind if CPM1.contains(&kind) => {
            let model = spec.model.as_ref().or(spec.vocab_file.as_ref());
            let model = model.ok_or_else(|| missing(spec, "tokenizer-model"))?;
            Ok(Some(Arc::new(Cpm1::open(model, jieba(spec)?)?)))
        }
        "jieba" | "JiebaTokenizer" => {
            Ok(Some(Arc::new(JiebaWords::open(&vocab_file(spec)?, jieba(spec)?)?)))
        }
        kind => match wordpiece_rules(kind) {
            Some((case, rules)) => wordpiece(case, rules),
            None => Ok(None),
        },
    }
}

/// The rules for a name of BERT's tokenizer; `None` for another name.
pub(super) fn wordpiece_rules(kind: &str) -> Option<(WordPieceCase, WordPieceRules)> {
    use WordPieceCase::{Kept, Lower};
    match kind {
        "bert-uncased" | "wordpiece" => Some((Lower, WordPieceRules::HuggingFace)),
        "bert-cased" => Some((Kept, WordPieceRules::HuggingFace)),
        "BertWordPieceLowerCase" => Some((Lower, WordPieceRules::FullTokenizer)),
        "BertWordPieceCase" => Some((Kept, WordPieceRules::FullTokenizer)),
        _ => None,
    }
}

/// The vocabulary, or the one in the folder that was given: a name without an extension is one.
pub(super) fn vocab_file(spec: &TokenizerSpec) -> Result<String> {
    let given = spec.vocab_file.as_ref().or(spec.model.as_ref());
    let given = given.ok_or_else(|| missing(spec, "vocab-file"))?;
    let place = Location::new(given);
    let is_folder = Path::new(place.file_name()).extension().is_none();
    Ok(if is_folder { place.join(VOCAB).to_string() } else { given.clone() })
}

fn missing(spec: &TokenizerSpec, name: &'static str) -> Error {
    let expected = format!("a vocabulary for the tokenizer '{}'", spec.kind);
    Error::BadOption { name, found: "none".to_owned(), expected, hint: None }
}

fn jieba(spec: &TokenizerSpec) -> Result<Arc<Jieba>> {
    match (&spec.jieba_dict, &spec.user_dict) {
        (None, None) => Ok(Jieba::built_in()),
        (dict, user) => Ok(Arc::new(Jieba::open(dict.as_deref(), user.as_deref())?)),
    }
}
