//! Trains byte-pair encoding and WordPiece with `merges`, and a unigram model with `unigram`.

use std::collections::HashSet;

use super::merges::{self, MergeRules, Merges};
use super::options::bad;
use super::threads::Threads;
use super::words::{SPACE, byte_character, is_always_covered};
use super::{ModelType, TrainOptions, unigram};
use crate::Result;

/// Characters of the longest piece, as in SentencePiece.
pub(super) const PIECE_CHARS_MAX: usize = 16;

/// What WordPiece writes before a piece that does not begin a word.
const INNER_PREFIX: &str = "##";

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
pub(super) fn train(
    options: &TrainOptions,
    words: &[(String, u64)],
    threads: Threads<'_>,
) -> Result<Vocabulary> {
    let vocabulary = match options.model_type {
        ModelType::Unigram => unigram(options, words, threads)?,
        ModelType::Bpe | ModelType::ByteBpe | ModelType::WordPiece => bpe(options, words, threads)?,
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

fn bpe(
    options: &TrainOptions,
    words: &[(String, u64)],
    threads: Threads<'_>,
) -> Result<Vocabulary> {
    let mut pieces = fixed(options);
    let mut first: Vec<String> = pieces.iter().map(|piece| piece.text.clone()).collect();
    let characters = alphabet(options, words);
    first.extend(characters.iter().map(char::to_string));
    let vocab_size = options.vocab_size as usize; // fits: at most 2^20
    let mut rules = MergeRules { vocab_size, inner_prefix: "", chars_end: usize::MAX };
    match options.model_type {
        ModelType::WordPiece => {
            let inner: HashSet<char> =
                words.iter().flat_map(|(word, _)| word.chars().skip(1)).collect();
            let inner = characters.iter().filter(|c| inner.contains(c));
            first.extend(inner.map(|c| format!("{INNER_PREFIX}{c}")));
            rules.inner_prefix = INNER_PREFIX;
        }
        ModelType::Bpe => rules.chars_end = PIECE_CHARS_MAX,
        ModelType::ByteBpe | ModelType::Unigram => {}
    }
    if first.len() as u64 > options.vocab_size {
        return too_few(options, first.len());
    }
    let merges_start = first.len();
    let Merges { texts, pairs } = merges::learn(first, words, rules, threads)?;
    let merges = match options.model_type {
        ModelType::ByteBpe => {
            let text = |id: u32| texts[id as usize].clone(); // fits: an index
            pairs.into_iter().map(|(left, right)| (text(left), text(right))).collect()
        }
        ModelType::Bpe | ModelType::WordPiece | ModelType::Unigram => Vec::new(),
    };
    for (id, text) in texts.into_iter().enumerate().skip(pieces.len()) {
        // Characters have no place in the order of the merges; they come last.
        let place = if id < merges_start { id + vocab_size } else { id };
        let score = -((place - merges_start) as f32);
        pieces.push(Piece { text, score, kind: PieceKind::Normal });
    }
    let merges = if options.model_type == ModelType::Bpe { all_merges(&pieces) } else { merges };
    Ok(Vocabulary { pieces, merges })
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

fn unigram(
    options: &TrainOptions,
    words: &[(String, u64)],
    threads: Threads<'_>,
) -> Result<Vocabulary> {
    let mut pieces = fixed(options);
    let characters = alphabet(options, words);
    if (pieces.len() + characters.len()) as u64 > options.vocab_size {
        return too_few(options, pieces.len() + characters.len());
    }
    let wanted = options.vocab_size as usize - pieces.len(); // fits: at most 2^20
    let scored = unigram::train(words, &characters, &options.special_tokens, wanted, threads)?;
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
