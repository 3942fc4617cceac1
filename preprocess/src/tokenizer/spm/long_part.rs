//! Merging of long parts in windows, so that the memory for it does not grow with the part.
//!
//! [`super::super::merge::windows`] says why the ids are the same. Here merging starts from
//! characters and user-defined pieces. A window starts where one of these symbols does, because a
//! token ended there. It may end within one; the tokens that this could change are not taken.

use std::ops::Range;

use super::super::merge::windows::{RowToken, WindowedMerge};
use super::SentencePiece;
use super::bpe::{Bpe, Merged};

/// A part without unused pieces, and where its ids go.
pub(super) struct LongPart<'a> {
    pub(super) model: &'a SentencePiece,
    pub(super) bpe: &'a Bpe,
    pub(super) part: &'a [u8],
    pub(super) merged: &'a mut Merged,
    /// The last id is the unknown's: another that follows becomes one with it.
    pub(super) after_unknown: bool,
    pub(super) ids: &'a mut Vec<u32>,
}

impl WindowedMerge for LongPart<'_> {
    type Mark = (usize, bool);

    fn symbol_bytes_max(&self) -> usize {
        self.bpe.symbol_bytes_max
    }

    fn merge(&mut self, bytes: Range<usize>, row: &mut Vec<RowToken>) {
        self.bpe.merge(&self.part[bytes.clone()], self.merged);
        row.clear();
        row.extend(self.merged.pieces.iter().map(|(id, range)| {
            let bytes = bytes.start + range.start..bytes.start + range.end;
            RowToken { id: *id, bytes }
        }));
    }

    fn mark(&self) -> (usize, bool) {
        (self.ids.len(), self.after_unknown)
    }

    fn rewind(&mut self, (len, after_unknown): (usize, bool)) {
        self.ids.truncate(len);
        self.after_unknown = after_unknown;
    }

    fn push(&mut self, token: &RowToken) {
        let piece = &self.part[token.bytes.clone()];
        self.model.write(token.id, piece, &mut self.after_unknown, self.ids);
    }
}

#[cfg(test)]
mod tests {
    use super::super::encoder::SentencePieceEncoder;
    use super::*;
    use crate::tokenizer::merge::windows::WINDOW_BYTES;

    const NORMAL: u8 = 1;
    const UNKNOWN: u8 = 2;
    const USER_DEFINED: u8 = 4;
    const BYTE: u8 = 6;

    struct Random(u64);

    impl Random {
        fn below(&mut self, limit: usize) -> usize {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (self.0 >> 33) as usize % limit
        }

        fn one_of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
            &all[self.below(all.len())]
        }

        fn text(&mut self, chars: &[char], len: usize) -> String {
            (0..len).map(|_| *self.one_of(chars)).collect()
        }
    }

    /// A model of BPE, as a protocol buffer: pieces with scores and types.
    fn model(pieces: &[(String, f32, u8)], has_bytes: bool) -> SentencePiece {
        let field = |number: u8, bytes: &[u8]| {
            [&[number << 3 | 2, u8::try_from(bytes.len()).unwrap()], bytes].concat()
        };
        let piece = |(text, score, kind): &(String, f32, u8)| {
            let score = score.to_le_bytes();
            field(1, &[&field(1, text.as_bytes())[..], &[0x15], &score, &[0x18, *kind]].concat())
        };
        let mut file: Vec<u8> = pieces.iter().flat_map(piece).collect();
        if has_bytes {
            let bytes = (0..256).map(|byte| (format!("<0x{byte:02X}>"), 0.0, BYTE));
            file.extend(bytes.flat_map(|one| piece(&one)));
        }
        // BPE; with 35, characters without a piece are written by their bytes.
        file.extend(field(2, &[0x18, 2, 0x98, 2, u8::from(has_bytes)]));
        SentencePiece::from_bytes("random", &file).unwrap()
    }

    /// Pieces of a few characters with few different scores, so that merges tie, overlap and make
    /// each other in any order. The last character is part of no piece, or of few.
    fn pieces(random: &mut Random) -> Vec<(String, f32, u8)> {
        let mut pieces = vec![("<unk>".to_owned(), 0.0, UNKNOWN)];
        for _ in 0..2 + random.below(40) {
            let len = 1 + random.below(6);
            let text = random.text(&['a', 'b', 'é', '中', 'a', 'b', 'x'], len);
            let score = -(random.below(12) as f32);
            let kind = if random.below(8) == 0 { USER_DEFINED } else { NORMAL };
            if !pieces.iter().any(|piece| piece.0 == text) {
                pieces.push((text, score, kind));
            }
        }
        pieces
    }

    #[track_caller]
    fn check(model: &SentencePiece, text: &str, window_bytes: &[usize], context: &str) {
        let mut encoder = SentencePieceEncoder::without_memory(model);
        encoder.merge_part(text.as_bytes(), usize::MAX);
        let expected = encoder.part_ids.clone();
        for &window_bytes in window_bytes {
            encoder.merge_part(text.as_bytes(), window_bytes);
            assert!(
                encoder.part_ids == expected,
                "windows of {window_bytes}: {context} {text:.200}"
            );
        }
    }

    #[test]
    fn windows_change_no_id() {
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        for _ in 0..400 {
            let pieces = pieces(&mut random);
            let model = model(&pieces, random.below(2) == 0);
            for len in [1, 2, 7, 30, 41, 60, 200] {
                let unit_chars = 1 + random.below(5);
                let unit = random.text(&['a', 'b', 'é', 'x'], unit_chars);
                let text = random.text(&['a', 'b', 'é', '中', 'x', 'z'], len);
                let changed = format!("{}{text}{}", "a".repeat(len), "ab".repeat(len));
                for text in [text, changed, "a".repeat(len), unit.repeat(len)] {
                    check(&model, &text, &[1, 2, 3, 5, 8, 21, 64, 100], &format!("{pieces:?}"));
                }
            }
        }
    }

    /// A window that ends within a user-defined piece does not see it.
    #[test]
    fn windows_may_end_within_user_defined_pieces() {
        let long = "ab".repeat(50);
        let piece = |text: &str, score, kind| (text.to_owned(), score, kind);
        let pieces = [
            piece("<unk>", 0.0, UNKNOWN),
            piece("a", -1.0, NORMAL),
            piece("b", -1.0, NORMAL),
            piece("ca", -2.0, NORMAL),
            piece("ba", -3.0, NORMAL),
            piece("baba", -4.0, NORMAL),
            piece(&long, 0.0, USER_DEFINED),
        ];
        let model = model(&pieces, false);
        for before in 0..40 {
            let text = format!("{}{long}c{long}{long}b", "c".repeat(before)).repeat(3);
            check(&model, &text, &[1, 8, 16, 40, 99, 100, 101, 200, 400], "");
        }
    }

    #[test]
    fn windows_of_the_size_in_use_change_no_id() {
        let mut random = Random(5);
        let doubled = (0..10).map(|power| ("a".repeat(1 << power), -(power as f32), NORMAL));
        // Pieces of up to 127 bytes fit the fields of the file above.
        let doubled = doubled.filter(|(text, ..)| text.len() < 100);
        let mut pieces: Vec<_> = std::iter::once(("<unk>".to_owned(), 0.0, UNKNOWN))
            .chain(doubled)
            .chain([("ab".to_owned(), -2.5, NORMAL), ("ba".to_owned(), -2.5, NORMAL)])
            .collect();
        pieces.push(("aaa".to_owned(), -1.5, NORMAL));
        let model = model(&pieces, false);
        let len = 3 * WINDOW_BYTES + 12_345;
        let random_text = random.text(&['a', 'a', 'a', 'b', 'z'], len);
        for text in ["a".repeat(len), "ab".repeat(len / 2), "aab".repeat(len / 3), random_text] {
            check(&model, &text, &[WINDOW_BYTES], "");
        }
    }
}
