//! SentencePiece's `.model`: a `ModelProto` of `sentencepiece_model.proto`.

use super::pieces::{PieceKind, Vocabulary};
use super::{ModelType, TrainOptions};

/// Writes fields of a protocol buffer.
#[derive(Default)]
struct FieldWriter(Vec<u8>);

impl FieldWriter {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn number(&mut self, field: u64, value: u64) {
        self.varint(field << 3);
        self.varint(value);
    }

    fn float(&mut self, field: u64, value: f32) {
        self.varint(field << 3 | 5);
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, value: &[u8]) {
        self.varint(field << 3 | 2);
        self.varint(value.len() as u64);
        self.0.extend_from_slice(value);
    }
}

/// The file.
pub(super) fn sentencepiece(options: &TrainOptions, vocabulary: &Vocabulary) -> Vec<u8> {
    let mut model = FieldWriter::default();
    for piece in &vocabulary.pieces {
        let mut message = FieldWriter::default();
        message.bytes(1, piece.text.as_bytes());
        message.float(2, piece.score);
        let kind = match piece.kind {
            PieceKind::Normal => 1,
            PieceKind::Unknown => 2,
            PieceKind::Special => 3,
            PieceKind::Byte => 6,
        };
        message.number(3, kind);
        model.bytes(1, &message.0);
    }
    let mut trainer = FieldWriter::default();
    trainer.number(3, if options.model_type == ModelType::Unigram { 1 } else { 2 }); // model_type
    trainer.number(4, vocabulary.pieces.len() as u64); // vocab_size
    trainer.float(10, options.character_coverage as f32);
    trainer.number(25, u64::from(options.split_digits));
    trainer.number(35, 1); // byte_fallback
    trainer.number(40, 0); // unk_id
    trainer.number(41, 1); // bos_id
    trainer.number(42, 2); // eos_id
    model.bytes(2, &trainer.0);
    // Texts are not normalized; a space is put in front, and spaces are kept as they are.
    let mut normalizer = FieldWriter::default();
    normalizer.bytes(1, b"identity");
    normalizer.number(3, 1); // add_dummy_prefix
    normalizer.number(4, 0); // remove_extra_whitespaces
    normalizer.number(5, 1); // escape_whitespaces
    model.bytes(3, &normalizer.0);
    model.0
}
