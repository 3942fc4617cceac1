//! The unigram model as Hugging Face's library runs it: T5, XLM-RoBERTa, ALBERT and similar ones.
//!
//! The engine is SentencePiece's ([`super::super::spm::unigram`]) with sums of 64 bits. The library
//! differs in this: every token of the vocabulary is matched, `<s>` and `<unk>` among them;
//! a run of unknown characters becomes one string, which is looked up again; and where the
//! pre-tokenizer cuts words, the sums of each begin at 0.

use std::ops::Range;

use memchr::{memchr, memchr_iter};

use super::super::spm::unigram::Unigram;
use super::super::spm::{PADDING, PieceBoundaries, UnigramSegmenter, long_unigram_part};
use super::super::{EncodeError, Encoder};
use super::chars::{META, Space, Words};
use super::file::{ModelJson, Vocab};
use super::own::Supported;
use super::patterns::EnginePlan;

/// Scratch for longer texts than this is freed after each text.
const SCRATCH_BYTES_KEPT_MAX: usize = 4 << 20;

/// The engine.
#[derive(Debug)]
pub(super) struct UnigramEngine {
    unigram: Unigram<f64>,
    joins: PieceBoundaries,
    unk: u32,
    /// Ids of bytes for unknown characters, used if all of their bytes have one.
    byte_ids: Option<Box<[Option<u32>; 256]>>,
    cut: UnigramInput,
}

/// The unit of text that the model is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UnigramInput {
    /// All of the text.
    Whole(Space),
    /// From each [`META`], for which spaces are taken, to the next.
    Meta,
    /// The same after white space was removed, and [`META`] put before each word.
    Whitespace,
}

/// Encodes one text after another.
#[derive(Debug)]
pub(super) struct PiecesEncoder<'a> {
    pieces: &'a UnigramEngine,
    parts: UnigramSegmenter<f64>,
    text: Vec<u8>,
}

impl UnigramEngine {
    /// # Errors
    /// Why the model is not of the kind.
    pub(super) fn new(model: &ModelJson, plan: &EnginePlan) -> Supported<Self> {
        let cut = match plan {
            EnginePlan::Words => UnigramInput::Whitespace,
            EnginePlan::Chars { words: Words::Apart, .. } => UnigramInput::Meta,
            EnginePlan::Chars { words: Words::Joined, space, .. } => UnigramInput::Whole(*space),
            EnginePlan::Bytes { .. } => return Err("a byte-level pre-tokenizer".to_owned()),
        };
        let Vocab::Scores(vocab) = &model.vocab else {
            return Err("a vocabulary without scores".to_owned());
        };
        let unk = model.unk_id.filter(|&id| id < vocab.len());
        let unk = unk.ok_or("no unknown token")? as u32; // fits: checked with the ids
        let tokens = || vocab.iter().map(|(token, _)| token.as_str()).filter(|it| !it.is_empty());
        let pieces = vocab.iter().map(|(token, _)| token.as_bytes()).zip(0..);
        let pieces = pieces.filter(|(token, _)| !token.is_empty()).collect();
        let scores: Vec<f64> = vocab.iter().map(|(_, score)| as_read(*score)).collect();
        let score_min = scores.iter().copied().fold(f64::INFINITY, f64::min);
        let unigram = Unigram::new(pieces, scores, unk, score_min);
        let byte_ids = (model.byte_fallback == Some(true)).then(|| {
            let id = |byte| unigram.id_of(format!("<0x{byte:02X}>").as_bytes());
            Box::new(std::array::from_fn(id))
        });
        Ok(UnigramEngine { joins: PieceBoundaries::new(tokens()), unigram, unk, byte_ids, cut })
    }

    /// The part of a text that is too long, if there is one.
    pub(super) fn refused(&self, text: &str) -> Option<EncodeError> {
        long_unigram_part(&self.joins, text)
    }

    pub(super) fn encoder(&self) -> PiecesEncoder<'_> {
        PiecesEncoder { pieces: self, parts: UnigramSegmenter::with_memory(), text: Vec::new() }
    }

    pub(super) fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        let parts = UnigramSegmenter::without_memory();
        PiecesEncoder { pieces: self, parts, text: Vec::new() }.encode(text, ids);
    }

    /// Writes the text that the model is given.
    fn spell(&self, text: &str, out: &mut Vec<u8>) {
        match self.cut {
            UnigramInput::Whole(Space::AsItIs) => out.extend_from_slice(text.as_bytes()),
            UnigramInput::Whole(Space::Meta) | UnigramInput::Meta => {
                let mut done = 0;
                for at in memchr_iter(b' ', text.as_bytes()) {
                    out.extend_from_slice(&text.as_bytes()[done..at]);
                    out.extend_from_slice(&META_BYTES);
                    done = at + 1;
                }
                out.extend_from_slice(&text.as_bytes()[done..]);
            }
            UnigramInput::Whitespace => text.split_whitespace().for_each(|word| {
                if !word.starts_with(META) {
                    out.extend_from_slice(&META_BYTES);
                }
                out.extend_from_slice(word.as_bytes());
            }),
        }
    }

    /// Where the word ends that begins at `start`.
    #[inline]
    fn word_end(&self, text: &[u8], start: usize) -> usize {
        if let UnigramInput::Whole(_) = self.cut {
            return text.len();
        }
        let mut at = start + 1;
        while let Some(found) = text.get(at..).and_then(|rest| memchr(META_BYTES[0], rest)) {
            at += found;
            if text[at..].starts_with(&META_BYTES) {
                return at;
            }
            at += 1;
        }
        text.len()
    }

    /// Writes a run of unknown characters.
    fn write_unknown(&self, run: &[u8], ids: &mut Vec<u32>) {
        if let Some(id) = self.unigram.id_of(run) {
            return ids.push(id);
        }
        let from = ids.len();
        if let Some(byte_ids) = &self.byte_ids {
            ids.extend(run.iter().map_while(|&byte| byte_ids[usize::from(byte)]));
        }
        if ids.len() - from < run.len() {
            ids.truncate(from);
            ids.push(self.unk);
        }
    }
}

/// The library reads the digits of a score as one whole number, and divides it by a power of ten:
/// rounded twice, one score in four is the next float. That decides between ways whose true sums
/// are equal, in lines of a thousand equal signs.
fn as_read(score: f64) -> f64 {
    let digits = score.abs().to_string();
    let Some((whole, fraction)) = digits.split_once('.') else { return score };
    match format!("{whole}{fraction}").parse::<u64>() {
        // Up to 10^22, powers of ten are exact.
        Ok(number) if fraction.len() <= 22 => {
            let power = (0..fraction.len()).fold(1.0, |power, _| power * 10.0);
            (number as f64 / power).copysign(score)
        }
        _ => score,
    }
}

/// [`META`].
const META_BYTES: [u8; 3] = *b"\xe2\x96\x81";

impl PiecesEncoder<'_> {
    fn encode_word(&mut self, text: &[u8], word: Range<usize>, ids: &mut Vec<u32>) {
        let pieces = self.pieces;
        let whole = &text[..word.end];
        let (mut sum, mut start) = (0.0, word.start);
        // The start of a run of unknown characters, which may continue in the next part.
        let mut unknown: Option<usize> = None;
        while start < word.end {
            let part = start..pieces.joins.part_end(whole, start);
            start = part.end;
            if let Some(known) = self.parts.known(&pieces.unigram, text, &part, &mut sum) {
                if let Some(from) = unknown.take() {
                    pieces.write_unknown(&text[from..part.start], ids);
                }
                ids.extend_from_slice(known);
                continue;
            }
            for (id, range) in self.parts.segment(&pieces.unigram, text, &part, &mut sum) {
                let at = part.start + range.start as usize;
                if *id == pieces.unk {
                    unknown.get_or_insert(at);
                    continue;
                }
                if let Some(from) = unknown.take() {
                    pieces.write_unknown(&text[from..at], ids);
                }
                ids.push(*id);
            }
        }
        if let Some(from) = unknown {
            pieces.write_unknown(&text[from..word.end], ids);
        }
    }
}

impl Encoder for PiecesEncoder<'_> {
    fn encode(&mut self, text: &str, ids: &mut Vec<u32>) {
        let mut spelled = std::mem::take(&mut self.text);
        spelled.clear();
        self.pieces.spell(text, &mut spelled);
        let len = spelled.len();
        spelled.resize(len + PADDING, 0);
        let mut start = 0;
        while start < len {
            let end = self.pieces.word_end(&spelled[..len], start);
            self.encode_word(&spelled, start..end, ids);
            start = end;
        }
        if spelled.capacity() <= SCRATCH_BYTES_KEPT_MAX {
            self.text = spelled;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::as_read;

    /// As `serde_json` without `float_roundtrip` reads them.
    #[test]
    fn scores_are_those_that_the_library_reads() {
        for (score, expected) in CASES {
            assert_eq!(as_read(score), expected, "{score}");
        }
        assert_eq!(as_read(-13.475805282592773_f64).to_bits() >> 63, 1, "the sign stays");
    }

    const CASES: [(f64, f64); 5] = [
        (0.0, 0.0),
        (-3.0, -3.0),
        (-0.5, -0.5),
        (-3.7157633304595947, -3.7157633304595943),
        (-7.4979448318481445, -7.497944831848144),
    ];
}
