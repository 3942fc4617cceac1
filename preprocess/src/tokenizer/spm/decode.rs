//! From ids back to text.

use super::model::{PieceKind, SPACE, SpmModel, VocabPiece, byte_of};
use super::normalizer::Normalizer;
use crate::{Error, Result};

/// The pieces as they are written.
#[derive(Debug)]
pub(super) struct Decoder {
    pieces: Vec<VocabPiece>,
    unk_surface: String,
    /// A space at the start of a text was added by the normalizer, or may be dropped.
    drops_first_space: bool,
    /// So were all that follow it.
    drops_leading_spaces: bool,
    denormalizer: Option<Normalizer>,
}

impl Decoder {
    pub(super) fn new(file: &str, model: &SpmModel<'_>) -> Result<Self> {
        let spec = model.denormalizer.as_ref();
        let denormalizer = spec.map(|spec| Normalizer::new(file, spec, &[], false)).transpose()?;
        Ok(Decoder {
            pieces: model.pieces.clone(),
            unk_surface: model.unk_surface.clone(),
            drops_first_space: model.normalizer.add_dummy_prefix
                || model.normalizer.remove_extra_whitespaces,
            drops_leading_spaces: model.normalizer.remove_extra_whitespaces,
            denormalizer,
        })
    }

    pub(super) fn size(&self) -> u32 {
        self.pieces.len() as u32 // fits: limited
    }

    pub(super) fn piece(&self, id: u32) -> Option<&str> {
        Some(&self.pieces.get(id as usize)?.text)
    }

    /// Byte pieces are their bytes, whether or not these are whole characters.
    pub(super) fn decode(&self, ids: &[u32], out: &mut Vec<u8>) -> Result<()> {
        let vocab_size = self.size();
        let begin = out.len();
        let mut at_start = true;
        for &id in ids {
            let piece = self.pieces.get(id as usize);
            let VocabPiece { text, kind, .. } =
                piece.ok_or(Error::UnknownToken { id, vocab_size })?;
            let mut first_space = false;
            match kind {
                PieceKind::Control => {}
                PieceKind::Unknown => out.extend_from_slice(self.unk_surface.as_bytes()),
                PieceKind::Byte => out.extend(byte_of(text)),
                PieceKind::Normal | PieceKind::UserDefined | PieceKind::Unused => {
                    let mut text = text.as_str();
                    if at_start
                        && self.drops_first_space
                        && let Some(rest) = text.strip_prefix(SPACE)
                    {
                        text = rest;
                        first_space = !self.drops_leading_spaces;
                    }
                    out.extend_from_slice(text.replace(SPACE, " ").as_bytes());
                }
            }
            at_start = at_start && !first_space && out.len() == begin;
        }
        if let Some(denormalizer) = &self.denormalizer
            && let Ok(text) = std::str::from_utf8(&out[begin..])
        {
            let mut normal = Vec::new();
            denormalizer.normalize(text, &mut normal);
            out.truncate(begin);
            out.append(&mut normal);
        }
        Ok(())
    }
}
