//! Trains byte-pair encoding and WordPiece with the trainer of the `tokenizers` crate, and a
//! unigram model with `unigram`.

use std::collections::HashSet;

use ahash::AHashMap;
use compact_str::CompactString;
use tokenizers::AddedToken;
use tokenizers::models::bpe::{BPE, BpeTrainer};

use super::options::bad;
use super::words::{SPACE, byte_character, is_always_covered};
use super::{ModelType, TrainOptions, unigram};
use crate::Result;

/// Characters of the longest piece, as in SentencePiece.
pub(super) const PIECE_CHARS_MAX: usize = 16;

/// A pair that occurs once is not merged.
const PAIR_COUNT_MIN: u64 = 2;

/// Scores are multiples of this, so that sums of them are exact in single precision, with which
/// SentencePiece adds, and in double precision, with which `tokenizers` does. Both then find the
/// same best path, up to a sum of 2^20: about 100,000 tokens of one text.
const SCORE_UNIT: f64 = 1.0 / 16.0;

/// The role of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PieceKind {
    Unknown,
    Special,
    Byte,
    Normal,
}

/// A token.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Piece {
    pub(super) text: String,
    /// Logarithm of a probability (unigram), or minus the place in the order of the merges.
    pub(super) score: f32,
    pub(super) kind: PieceKind,
}

/// The result of a trainer.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Vocabulary {
    /// In the order of their ids.
    pub(super) pieces: Vec<Piece>,
    /// Pairs to merge, first one first; only of byte-pair encoding.
    pub(super) merges: Vec<(String, String)>,
}

/// Trains on the counted words.
pub(super) fn train(options: &TrainOptions, words: Vec<(String, u64)>) -> Result<Vocabulary> {
    let vocabulary = match options.model_type {
        ModelType::Unigram => unigram(options, &words)?,
        ModelType::Bpe | ModelType::ByteBpe | ModelType::WordPiece => bpe(options, words)?,
    };
    let found = vocabulary.pieces.len() as u64;
    if found < options.vocab_size {
        return bad(
            "vocab-size",
            options.vocab_size.to_string(),
            &format!("at most {found}, the number of pieces in the sample"),
        );
    }
    Ok(vocabulary)
}

/// Special tokens and bytes, which have the first ids.
fn fixed(options: &TrainOptions) -> Vec<Piece> {
    let kind = |token: &str| match (options.model_type, token) {
        (ModelType::Bpe | ModelType::Unigram, "<unk>") => PieceKind::Unknown,
        _ => PieceKind::Special,
    };
    let piece = |text: String, kind| Piece { text, score: 0.0, kind };
    let special = options.special_tokens().into_iter();
    let mut pieces: Vec<Piece> = special
        .map(|token| {
            let kind = kind(&token);
            piece(token, kind)
        })
        .collect();
    if options.model_type.has_byte_tokens() {
        let bytes = 0..=u8::MAX;
        pieces.extend(bytes.map(|byte| piece(format!("<0x{byte:02X}>"), PieceKind::Byte)));
    }
    pieces
}

fn added(tokens: impl Iterator<Item = String>) -> Vec<AddedToken> {
    tokens.map(|token| AddedToken::from(token, true)).collect()
}

/// Characters that have a token, in the order of their code points.
fn alphabet(options: &TrainOptions, words: &[(String, u64)]) -> Vec<char> {
    let mut found: HashSet<char> = words.iter().flat_map(|(word, _)| word.chars()).collect();
    match options.model_type {
        ModelType::ByteBpe => found.extend((0..=u8::MAX).map(byte_character)),
        ModelType::WordPiece => {}
        ModelType::Bpe | ModelType::Unigram => {
            found.extend((0..=u8::MAX).map(char::from).filter(|c| is_always_covered(*c)));
            found.insert(SPACE);
        }
    }
    let mut found: Vec<char> = found.into_iter().collect();
    found.sort_unstable();
    found
}

fn bpe(options: &TrainOptions, words: Vec<(String, u64)>) -> Result<Vocabulary> {
    let mut pieces = fixed(options);
    let mut first: Vec<String> = pieces.iter().map(|piece| piece.text.clone()).collect();
    let characters = alphabet(options, &words);
    first.extend(characters.iter().map(char::to_string));
    let mut trainer = BpeTrainer::builder()
        .show_progress(false)
        .vocab_size(options.vocab_size as usize) // fits: at most 2^20
        .min_frequency(PAIR_COUNT_MIN);
    match options.model_type {
        ModelType::WordPiece => {
            // The trainer would number these in the order of a hash table.
            let inner: HashSet<char> =
                words.iter().flat_map(|(word, _)| word.chars().skip(1)).collect();
            let inner = characters.iter().filter(|c| inner.contains(c));
            first.extend(inner.map(|c| format!("##{c}")));
            trainer = trainer.continuing_subword_prefix("##".to_owned());
        }
        ModelType::Bpe => trainer = trainer.max_token_length(Some(PIECE_CHARS_MAX)),
        ModelType::ByteBpe | ModelType::Unigram => {}
    }
    if first.len() as u64 > options.vocab_size {
        return too_few(options, first.len());
    }
    let merges_start = first.len();
    let trainer = trainer.special_tokens(added(first.into_iter())).build();
    let counts: AHashMap<CompactString, u64> =
        words.into_iter().map(|(word, times)| (CompactString::from(word), times)).collect();
    let mut model = BPE::default();
    trainer.do_train(&counts, &mut model).expect("this trainer has no errors");
    let mut texts: Vec<(u32, String)> =
        model.get_vocab().into_iter().map(|(text, id)| (id, text)).collect();
    texts.sort_unstable();
    for (id, (_, text)) in texts.into_iter().enumerate().skip(pieces.len()) {
        // Characters have no place in the order of the merges; they come last.
        let place = if id < merges_start { id + options.vocab_size as usize } else { id };
        let score = -((place - merges_start) as f32);
        pieces.push(Piece { text, score, kind: PieceKind::Normal });
    }
    let merges = match options.model_type {
        ModelType::Bpe => all_merges(&pieces),
        ModelType::ByteBpe => own_merges(&model),
        ModelType::WordPiece | ModelType::Unigram => Vec::new(),
    };
    Ok(Vocabulary { pieces, merges })
}

/// The merges as the trainer found them; the library has them only in its serialized form.
fn own_merges(model: &BPE) -> Vec<(String, String)> {
    let file = serde_json::to_value(model).expect("strings and numbers only");
    serde_json::from_value(file["merges"].clone()).expect("pairs of strings")
}

/// Every way to make a piece of two others, in the order of the pieces: SentencePiece merges any
/// two neighbours that make a piece together.
fn all_merges(pieces: &[Piece]) -> Vec<(String, String)> {
    let normal = || pieces.iter().filter(|piece| piece.kind == PieceKind::Normal);
    let known: HashSet<&str> = normal().map(|piece| piece.text.as_str()).collect();
    let mut merges = Vec::new();
    for piece in normal() {
        for (at, _) in piece.text.char_indices().skip(1) {
            let (left, right) = piece.text.split_at(at);
            if known.contains(left) && known.contains(right) {
                merges.push((left.to_owned(), right.to_owned()));
            }
        }
    }
    merges
}

fn unigram(options: &TrainOptions, words: &[(String, u64)]) -> Result<Vocabulary> {
    let mut pieces = fixed(options);
    let characters = alphabet(options, words);
    if (pieces.len() + characters.len()) as u64 > options.vocab_size {
        return too_few(options, pieces.len() + characters.len());
    }
    let wanted = options.vocab_size as usize - pieces.len(); // fits: at most 2^20
    let scored =
        unigram::train(words, &characters, &options.special_tokens, wanted, options.workers)?;
    let units = |(text, score): (String, f64)| ((score / SCORE_UNIT).round() as i64, text);
    let mut scored: Vec<(i64, String)> = scored.into_iter().map(units).collect();
    scored.sort_unstable_by(|a, b| (b.0, &a.1).cmp(&(a.0, &b.1)));
    pieces.extend(scored.into_iter().map(|(units, text)| Piece {
        text,
        score: (units as f64 * SCORE_UNIT) as f32,
        kind: PieceKind::Normal,
    }));
    Ok(Vocabulary { pieces, merges: Vec::new() })
}

fn too_few<T>(options: &TrainOptions, least: usize) -> Result<T> {
    bad(
        "vocab-size",
        options.vocab_size.to_string(),
        &format!("at least {least}: special tokens, bytes and the characters of the sample"),
    )
}
