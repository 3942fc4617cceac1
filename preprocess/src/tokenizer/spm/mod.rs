//! SentencePiece's `.model` files, with an engine of our own: the ids are those of the C++ library.
//!
//! In reading order: `wire` and `model` parse the file, `charsmap` and `normalizer` normalize a
//! text, `joins` finds where it may be cut, `unigram` and `bpe` are the two algorithms, `trie`
//! finds pieces for both, `cache` has recent parts, `parts` is the unigram algorithm with that
//! cache, `long_part` merges long words in windows, `encoder` runs all of them, `cut` finds where a
//! long text may be divided, `decode` converts ids to text, and `megatron` has Megatron's variants.

mod bpe;
mod cache;
pub(crate) mod charsmap;
mod cut;
mod decode;
mod encoder;
mod joins;
mod long_part;
mod megatron;
mod model;
mod normalizer;
mod parts;
mod trie;
pub(crate) mod unigram;
mod wire;

use storage::Crc64;

pub(crate) use cache::PADDING;
pub(crate) use encoder::SentencePieceEncoder;
pub(crate) use joins::{PieceBoundaries, long_unigram_part};
pub(crate) use megatron::{KINDS, open};
pub(crate) use parts::UnigramSegmenter;

use self::bpe::{Bpe, BpePiece};
use self::decode::Decoder;
use self::model::{Algorithm, PieceKind, SpmModel};
use self::normalizer::{Normalizer, spell_piece};
pub(crate) use self::trie::Trie;
use self::unigram::Unigram;
use super::EncodeError;
use crate::{Error, Result};

/// The models in use are up to 5 MB.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// A model, ready to encode and decode.
#[derive(Debug)]
pub(crate) struct SentencePiece {
    normalizer: Normalizer,
    engine: SpmEngine,
    /// None: parts of a text depend on each other, and it is never cut before it is segmented.
    joins: Option<PieceBoundaries>,
    decoder: Decoder,
    unk: u32,
    /// The ids of bytes, by which a character without a piece is written.
    byte_ids: Option<[u32; 256]>,
    /// Control pieces that begin and end a text, and fill up a batch.
    pub(crate) bos: Option<u32>,
    pub(crate) eos: Option<u32>,
    pub(crate) pad: Option<u32>,
    checksum: u64,
}

#[derive(Debug)]
enum SpmEngine {
    Unigram(Unigram<f32>),
    Bpe(Bpe),
    /// The ids of whole words.
    Word(Trie),
    /// The ids of characters and user-defined pieces; and the latter alone, which come first.
    Char(Trie, Trie),
}

/// A piece that texts are matched with, as they are spelled once normalised.
#[derive(Debug)]
struct Matched {
    text: String,
    id: u32,
}

impl SentencePiece {
    /// Reads a `.model` file.
    ///
    /// # Errors
    /// [`Error::BadVocab`] with what is wrong and where, [`Error::Storage`].
    pub(crate) fn open(path: &str) -> Result<Self> {
        let (store, key) = storage::locate(path)?;
        let len_bytes = store.open(&key)?.len_bytes();
        if len_bytes > FILE_BYTES_MAX {
            return Err(Error::BadVocab {
                file: path.to_owned(),
                line: None,
                found: format!("{len_bytes} bytes"),
                expected: "a model of at most 256 MiB".to_owned(),
                hint: None,
            });
        }
        SentencePiece::from_bytes(path, &storage::read_all(store.as_ref(), &key)?)
    }

    /// As [`SentencePiece::open`], of a file that was read; its name is for messages.
    ///
    /// # Errors
    /// [`Error::BadVocab`].
    pub(crate) fn from_bytes(file: &str, bytes: &[u8]) -> Result<Self> {
        let model = SpmModel::parse(file, bytes)?;
        let of_kind = |kind: PieceKind| model.pieces.iter().filter(move |it| it.kind == kind);
        let user_defined: Vec<&str> =
            of_kind(PieceKind::UserDefined).map(|piece| piece.text.as_str()).collect();
        let suffix = model.whitespace_as_suffix;
        let normalizer = Normalizer::new(file, &model.normalizer, &user_defined, suffix)?;
        let escape = model.normalizer.escape_whitespaces;
        let matched = model.pieces.iter().zip(0..).filter(|(piece, _)| {
            use PieceKind::{Normal, Unused, UserDefined};
            matches!(piece.kind, Normal | Unused | UserDefined)
        });
        let matched: Vec<Matched> = matched
            .filter_map(|(piece, id)| Some(Matched { text: spell_piece(&piece.text, escape)?, id }))
            .collect();
        let alone = model.algorithm == Algorithm::Bpe
            && matched.iter().any(|it| model.pieces[it.id as usize].kind == PieceKind::Unused);
        let joins =
            (!alone).then(|| PieceBoundaries::new(matched.iter().map(|it| it.text.as_str())));
        let mut checksum = Crc64::new();
        checksum.update(bytes);
        Ok(SentencePiece {
            engine: SpmEngine::new(&model, &matched),
            normalizer,
            joins,
            decoder: Decoder::new(file, &model)?,
            unk: model.unk,
            byte_ids: model.byte_fallback.then_some(model.byte_ids),
            bos: model.bos,
            eos: model.eos,
            pad: model.pad,
            checksum: checksum.value(),
        })
    }

    /// Appends the ids of a text. For many texts use a [`SentencePieceEncoder`], which caches
    /// words.
    pub(crate) fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        SentencePieceEncoder::without_memory(self).encode(text, ids);
    }

    /// The part of a text that is too long for the model, if there is one.
    pub(crate) fn refused(&self, text: &str) -> Option<EncodeError> {
        match (&self.engine, &self.joins) {
            (SpmEngine::Unigram(_), Some(joins)) => long_unigram_part(joins, text),
            _ => None,
        }
    }

    /// Appends the bytes of the ids.
    ///
    /// # Errors
    /// [`Error::UnknownToken`] for an id that no piece has.
    pub(crate) fn decode(&self, ids: &[u32], out: &mut Vec<u8>) -> Result<()> {
        self.decoder.decode(ids, out)
    }

    /// How many pieces there are.
    pub(crate) fn size(&self) -> u32 {
        self.decoder.size()
    }

    /// The text of a piece.
    pub(crate) fn piece(&self, id: u32) -> Option<&str> {
        self.decoder.piece(id)
    }

    /// The id of a piece.
    pub(crate) fn id_of(&self, piece: &str) -> Option<u32> {
        (0..self.size()).find(|&id| self.piece(id) == Some(piece))
    }

    /// A checksum of the file.
    pub(crate) fn checksum(&self) -> u64 {
        self.checksum
    }
}

impl SpmEngine {
    fn new(model: &SpmModel<'_>, matched: &[Matched]) -> Self {
        match model.algorithm {
            Algorithm::Unigram => SpmEngine::Unigram(unigram(model, matched)),
            Algorithm::Bpe => SpmEngine::Bpe(bpe(model, matched)),
            Algorithm::Word => SpmEngine::Word(lookup(matched.iter())),
            Algorithm::Char => {
                let first = matched
                    .iter()
                    .filter(|it| model.pieces[it.id as usize].kind == PieceKind::UserDefined);
                SpmEngine::Char(lookup(matched.iter()), lookup(first))
            }
        }
    }
}

fn lookup<'a>(matched: impl Iterator<Item = &'a Matched>) -> Trie {
    Trie::new(matched.map(|it| (it.text.as_bytes(), it.id)).collect())
}

/// Unused pieces are left out. To the library a user-defined piece scores a tenth for each byte
/// after its first, whatever the file says, which is more than any piece in use. All scores are
/// 32-bit floats.
fn unigram(model: &SpmModel<'_>, matched: &[Matched]) -> Unigram<f32> {
    let normal = model.pieces.iter().filter(|piece| piece.kind == PieceKind::Normal);
    let score_min = normal.map(|piece| piece.score).fold(f32::MAX, f32::min);
    let scores = model.pieces.iter().map(|piece| match piece.kind {
        PieceKind::UserDefined => f64::from((0.1 * (piece.text.len() as f64 - 1.0)) as f32),
        _ => f64::from(piece.score),
    });
    let used = matched.iter().filter(|it| model.pieces[it.id as usize].kind != PieceKind::Unused);
    let pieces = used.map(|it| (it.text.as_bytes(), it.id)).collect();
    Unigram::new(pieces, scores.collect(), model.unk, f64::from(score_min))
}

fn bpe(model: &SpmModel<'_>, matched: &[Matched]) -> Bpe {
    let pieces: Vec<BpePiece<'_>> = matched
        .iter()
        .map(|Matched { text, id }| {
            let piece = &model.pieces[*id as usize];
            BpePiece {
                text,
                id: *id,
                score: piece.score,
                user_defined: piece.kind == PieceKind::UserDefined,
                unused: piece.kind == PieceKind::Unused,
            }
        })
        .collect();
    Bpe::new(&pieces, model.pieces.len() as u32, model.unk) // fits: limited
}
