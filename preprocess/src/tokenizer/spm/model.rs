//! The contents of a `.model`: pieces, how they were trained, and how a text is normalised.

use std::collections::HashMap;

use super::wire::{Field, Fields};
use crate::{Error, Result};

/// The character that represents a space in pieces.
pub(super) const SPACE: &str = "\u{2581}";

/// Ids, and those that characters get, are packed into 24 bits. The largest vocabularies have
/// a million.
const PIECES_MAX: usize = 1 << 22;

/// The longest piece in bytes; trainers make them of 16 characters.
const PIECE_BYTES_MAX: usize = 1 << 16;

/// The role of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PieceKind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

#[derive(Clone, Debug)]
pub(super) struct VocabPiece {
    pub(super) text: String,
    pub(super) score: f32,
    pub(super) kind: PieceKind,
}

/// How a normalised text is cut into pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Algorithm {
    Unigram,
    Bpe,
    Word,
    Char,
}

/// A normalizer as the file describes it.
#[derive(Clone, Debug)]
pub(super) struct NormalizerSpec<'a> {
    pub(super) charsmap: &'a [u8],
    pub(super) add_dummy_prefix: bool,
    pub(super) remove_extra_whitespaces: bool,
    pub(super) escape_whitespaces: bool,
}

/// A whole file, with what the library checks when it loads one checked.
#[derive(Clone, Debug)]
pub(super) struct SpmModel<'a> {
    pub(super) pieces: Vec<VocabPiece>,
    pub(super) algorithm: Algorithm,
    pub(super) whitespace_as_suffix: bool,
    pub(super) byte_fallback: bool,
    pub(super) unk_surface: String,
    pub(super) normalizer: NormalizerSpec<'a>,
    pub(super) denormalizer: Option<NormalizerSpec<'a>>,
    pub(super) unk: u32,
    /// The ids of control pieces, where there are such.
    pub(super) bos: Option<u32>,
    pub(super) eos: Option<u32>,
    pub(super) pad: Option<u32>,
    /// Unless byte fallback is on, zeros.
    pub(super) byte_ids: [u32; 256],
}

#[derive(Debug)]
struct Trainer<'a> {
    algorithm: Algorithm,
    whitespace_as_suffix: bool,
    byte_fallback: bool,
    unk_surface: &'a str,
    names: [&'a str; 3],
}

impl<'a> NormalizerSpec<'a> {
    fn new() -> Self {
        NormalizerSpec {
            charsmap: &[],
            add_dummy_prefix: true,
            remove_extra_whitespaces: true,
            escape_whitespaces: true,
        }
    }

    /// Of a repeated field the last value counts, as everywhere in this format.
    fn read(&mut self, mut fields: Fields<'a>) -> Result<()> {
        while let Some(field) = fields.next()? {
            match field.number {
                2 => self.charsmap = field.bytes()?,
                3 => self.add_dummy_prefix = field.flag()?,
                4 => self.remove_extra_whitespaces = field.flag()?,
                5 => self.escape_whitespaces = field.flag()?,
                _ => {}
            }
        }
        Ok(())
    }
}

impl<'a> SpmModel<'a> {
    /// Reads a file.
    ///
    /// # Errors
    /// [`Error::BadVocab`] with the byte where the fault is.
    pub(super) fn parse(file: &'a str, bytes: &'a [u8]) -> Result<Self> {
        let mut pieces = Vec::new();
        let mut trainer = Trainer::new();
        let mut normalizer = NormalizerSpec::new();
        let mut denormalizer = None;
        let mut fields = Fields::new(file, bytes);
        while let Some(field) = fields.next()? {
            match field.number {
                1 if pieces.len() == PIECES_MAX => {
                    return Err(field.bad("more", &format!("at most {PIECES_MAX} pieces")));
                }
                1 => pieces.push(read_piece(&field)?),
                2 => trainer.read(field.message()?)?,
                3 => normalizer.read(field.message()?)?,
                5 => denormalizer.get_or_insert_with(NormalizerSpec::new).read(field.message()?)?,
                _ => {}
            }
        }
        let bad = |found: String, expected: &str| Error::BadVocab {
            file: file.to_owned(),
            line: None,
            found,
            expected: expected.to_owned(),
            hint: None,
        };
        let (unk, reserved) = index(&pieces, &bad)?;
        let byte_ids = byte_ids(&pieces, trainer.byte_fallback, &bad)?;
        let control = |name: &str| {
            let id = reserved.get(name).copied();
            id.filter(|&id| pieces[id as usize].kind == PieceKind::Control)
        };
        let [bos, eos, pad] = trainer.names.map(control);
        Ok(SpmModel {
            algorithm: trainer.algorithm,
            whitespace_as_suffix: trainer.whitespace_as_suffix,
            byte_fallback: trainer.byte_fallback,
            unk_surface: trainer.unk_surface.to_owned(),
            normalizer,
            denormalizer: denormalizer.filter(|spec| !spec.charsmap.is_empty()),
            unk,
            bos,
            eos,
            pad,
            byte_ids,
            pieces,
        })
    }
}

impl<'a> Trainer<'a> {
    fn new() -> Self {
        Trainer {
            algorithm: Algorithm::Unigram,
            whitespace_as_suffix: false,
            byte_fallback: false,
            unk_surface: " \u{2047} ",
            names: ["<s>", "</s>", "<pad>"],
        }
    }

    fn read(&mut self, mut fields: Fields<'a>) -> Result<()> {
        while let Some(field) = fields.next()? {
            match field.number {
                3 => {
                    self.algorithm = match field.varint()? {
                        1 => Algorithm::Unigram,
                        2 => Algorithm::Bpe,
                        3 => Algorithm::Word,
                        4 => Algorithm::Char,
                        other => {
                            let expected = "model type 1 (unigram), 2 (bpe), 3 (word) or 4 (char)";
                            return Err(field.bad(&format!("model type {other}"), expected));
                        }
                    }
                }
                24 => self.whitespace_as_suffix = field.flag()?,
                35 => self.byte_fallback = field.flag()?,
                44 => self.unk_surface = field.text()?,
                46 => set_name(&mut self.names[0], &field)?,
                47 => set_name(&mut self.names[1], &field)?,
                48 => set_name(&mut self.names[2], &field)?,
                _ => {}
            }
        }
        Ok(())
    }
}

/// An empty name is the default.
fn set_name<'a>(name: &mut &'a str, field: &Field<'a>) -> Result<()> {
    let text = field.text()?;
    if !text.is_empty() {
        *name = text;
    }
    Ok(())
}

fn read_piece(field: &Field<'_>) -> Result<VocabPiece> {
    let mut piece = VocabPiece { text: String::new(), score: 0.0, kind: PieceKind::Normal };
    let mut fields = field.message()?;
    while let Some(part) = fields.next()? {
        match part.number {
            1 => part.text()?.clone_into(&mut piece.text),
            2 => piece.score = part.float()?,
            3 => {
                piece.kind = match part.varint()? {
                    1 => PieceKind::Normal,
                    2 => PieceKind::Unknown,
                    3 => PieceKind::Control,
                    4 => PieceKind::UserDefined,
                    5 => PieceKind::Unused,
                    6 => PieceKind::Byte,
                    other => {
                        return Err(part.bad(&format!("piece type {other}"), "piece type 1 to 6"));
                    }
                }
            }
            _ => {}
        }
    }
    if piece.text.is_empty() || piece.text.len() > PIECE_BYTES_MAX {
        let found = format!("{} bytes", piece.text.len());
        return Err(field.bad(&found, &format!("a piece of 1 to {PIECE_BYTES_MAX} bytes")));
    }
    if !piece.score.is_finite() {
        return Err(
            field.bad(&format!("score {} of '{}'", piece.score, piece.text), "a finite score")
        );
    }
    Ok(piece)
}

/// The unknown piece, and the pieces that no text is matched with. No piece is there twice.
fn index(
    pieces: &[VocabPiece],
    bad: &impl Fn(String, &str) -> Error,
) -> Result<(u32, HashMap<String, u32>)> {
    let mut unk = None;
    let mut matched = HashMap::new();
    let mut reserved = HashMap::new();
    for (piece, id) in pieces.iter().zip(0..) {
        let VocabPiece { text, kind, .. } = piece;
        let known = match kind {
            PieceKind::Normal | PieceKind::UserDefined | PieceKind::Unused => {
                matched.insert(text.as_str(), id)
            }
            _ => reserved.insert(text.clone(), id),
        };
        if let Some(first) = known {
            let found = format!("'{text}' as piece {first} and as piece {id}");
            return Err(bad(found, "every piece once"));
        }
        if *kind == PieceKind::Unknown
            && let Some(first) = unk.replace(id)
        {
            return Err(bad(format!("pieces {first} and {id}"), "one unknown piece"));
        }
    }
    let unk = unk.ok_or_else(|| {
        bad(format!("none in {} pieces", pieces.len()), "an unknown piece of type 2")
    })?;
    Ok((unk, reserved))
}

fn byte_ids(
    pieces: &[VocabPiece],
    byte_fallback: bool,
    bad: &impl Fn(String, &str) -> Error,
) -> Result<[u32; 256]> {
    let mut ids = [None; 256];
    for (piece, id) in pieces.iter().zip(0..).filter(|(piece, _)| piece.kind == PieceKind::Byte) {
        if !byte_fallback {
            let found = format!("byte piece '{}' without it", piece.text);
            return Err(bad(found, "byte fallback"));
        }
        let byte = byte_of(&piece.text);
        let byte =
            byte.ok_or_else(|| bad(format!("'{}'", piece.text), "a byte piece such as '<0xAB>'"))?;
        ids[usize::from(byte)] = Some(id);
    }
    if !byte_fallback {
        return Ok([0; 256]);
    }
    let mut found = [0; 256];
    for ((byte, id), found) in (0_u8..=255).zip(ids).zip(&mut found) {
        let missing = || format!("none for byte {byte:#04x}");
        *found = id.ok_or_else(|| bad(missing(), "256 byte pieces for byte fallback"))?;
    }
    Ok(found)
}

/// The byte of a piece such as `<0xAB>`.
pub(super) fn byte_of(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    let upper = |byte: u8| byte.is_ascii_digit() || (b'A'..=b'F').contains(&byte);
    if digits.len() != 2 || !digits.bytes().all(upper) {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}
