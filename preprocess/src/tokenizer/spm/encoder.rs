//! Encodes a text: normalizes it, cuts it into parts, and looks them up or segments them.

use std::ops::Range;

use super::super::merge::windows::{WINDOW_BYTES, merge_in_windows};
use super::bpe::Merged;
use super::cache::{PADDING, PartCache};
use super::joins::char_at;
use super::long_part::LongPart;
use super::model::SPACE;
use super::normalizer::each_spelled;
use super::parts::{UnigramSegmenter, key};
use super::trie::Trie;
use super::unigram::Unigram;
use super::{SentencePiece, SpmEngine};

/// Scratch for longer texts than this is freed after each text.
const SCRATCH_BYTES_KEPT_MAX: usize = 4 << 20;

/// Encodes one text after another; holds 2 MiB of words.
#[derive(Debug)]
pub(crate) struct SentencePieceEncoder<'a> {
    model: &'a SentencePiece,
    parts: UnigramSegmenter<f32>,
    /// The normalised text.
    text: Vec<u8>,
    merged: Merged,
    /// The ids of one part.
    pub(super) part_ids: Vec<u32>,
}

/// State carried from one part to the next.
#[derive(Clone, Copy, Debug, Default)]
struct PartState {
    /// The sum of all scores so far.
    sum: f32,
    /// The last id is the unknown's: another that follows becomes one with it.
    after_unknown: bool,
}

impl<'a> SentencePieceEncoder<'a> {
    pub(crate) fn new(model: &'a SentencePiece) -> Self {
        let parts = UnigramSegmenter::new(Some(PartCache::new()));
        SentencePieceEncoder { parts, ..SentencePieceEncoder::without_memory(model) }
    }

    pub(super) fn without_memory(model: &'a SentencePiece) -> Self {
        SentencePieceEncoder {
            model,
            parts: UnigramSegmenter::new(None),
            text: Vec::new(),
            merged: Merged::default(),
            part_ids: Vec::new(),
        }
    }

    /// Appends the ids of a text.
    pub(crate) fn encode(&mut self, text: &str, ids: &mut Vec<u32>) {
        let mut normalized = std::mem::take(&mut self.text);
        self.model.normalizer.normalize(text, &mut normalized);
        let len = normalized.len();
        normalized.resize(len + PADDING, 0);
        let mut carried = PartState::default();
        match &self.model.engine {
            SpmEngine::Word(words) => self.encode_words(words, &normalized[..len], ids),
            SpmEngine::Char(all, first) => {
                self.encode_chars(all, first, &normalized[..len], ids);
            }
            SpmEngine::Unigram(unigram) => {
                let mut start = 0;
                while start < len {
                    let end = self.part_end(&normalized[..len], start);
                    self.unigram_part(unigram, &normalized, start..end, &mut carried, ids);
                    start = end;
                }
            }
            SpmEngine::Bpe(_) => {
                let mut start = 0;
                while start < len {
                    let end = self.part_end(&normalized[..len], start);
                    self.bpe_part(&normalized, start..end, &mut carried, ids);
                    start = end;
                }
            }
        }
        self.text = normalized;
        if self.text.capacity() > SCRATCH_BYTES_KEPT_MAX {
            let parts = UnigramSegmenter::new(self.parts.cache.take());
            *self =
                SentencePieceEncoder { parts, ..SentencePieceEncoder::without_memory(self.model) };
        }
    }

    #[inline]
    fn part_end(&self, text: &[u8], start: usize) -> usize {
        self.model.joins.as_ref().map_or(text.len(), |joins| joins.part_end(text, start))
    }

    #[inline]
    fn unigram_part(
        &mut self,
        unigram: &Unigram<f32>,
        text: &[u8],
        part: Range<usize>,
        carried: &mut PartState,
        ids: &mut Vec<u32>,
    ) {
        if let Some(known) = self.parts.known(unigram, text, &part, &mut carried.sum) {
            carried.after_unknown = false;
            ids.extend_from_slice(known);
            return;
        }
        for (id, range) in self.parts.segment(unigram, text, &part, &mut carried.sum) {
            let piece = &text[part.clone()][range.start as usize..range.end as usize];
            self.model.write(*id, piece, &mut carried.after_unknown, ids);
        }
    }

    #[inline]
    fn bpe_part(
        &mut self,
        text: &[u8],
        part: Range<usize>,
        carried: &mut PartState,
        ids: &mut Vec<u32>,
    ) {
        let key = key(text, &part);
        if let (Some(key), Some(cache)) = (key, &self.parts.cache)
            && let Some(entry) = cache.get(key)
        {
            return self.model.append(entry.ids(), carried, ids);
        }
        self.merge_part(&text[part], WINDOW_BYTES);
        if let (Some(key), Some(cache)) = (key, &mut self.parts.cache) {
            cache.put(key, &self.part_ids, f32::INFINITY);
        }
        self.model.append(&self.part_ids, carried, ids);
    }

    /// Leaves the ids of a part in `part_ids`. Parts longer than a window are merged in windows.
    pub(super) fn merge_part(&mut self, part: &[u8], window_bytes: usize) {
        let SpmEngine::Bpe(bpe) = &self.model.engine else { return };
        self.part_ids.clear();
        // Unused pieces are split again by the merges of the whole text.
        if part.len() > window_bytes && self.model.joins.is_some() {
            let (model, merged, ids) = (self.model, &mut self.merged, &mut self.part_ids);
            let mut long = LongPart { model, bpe, part, merged, after_unknown: false, ids };
            return merge_in_windows(part.len(), window_bytes, &mut long);
        }
        bpe.merge(part, &mut self.merged);
        let mut after_unknown = false;
        for (id, range) in &self.merged.pieces {
            let piece = &part[range.clone()];
            self.model.write(*id, piece, &mut after_unknown, &mut self.part_ids);
        }
    }

    /// A word begins at every space.
    fn encode_words(&self, words: &Trie, text: &[u8], ids: &mut Vec<u32>) {
        let escaped = self.model.normalizer.options.escape_whitespaces;
        let space = if escaped { " " } else { SPACE }.as_bytes();
        let mut after_unknown = false;
        let mut start = 0;
        while start < text.len() {
            let rest = &text[start..];
            let mut len = char_at(rest, 0).1;
            while len < rest.len() && !rest[len..].starts_with(space) {
                len = char_at(rest, len).1;
            }
            let id = words.exact(&rest[..len]).unwrap_or(self.model.unk);
            self.model.write(id, &rest[..len], &mut after_unknown, ids);
            start += len;
        }
    }

    fn encode_chars(&self, all: &Trie, first: &Trie, text: &[u8], ids: &mut Vec<u32>) {
        let mut after_unknown = false;
        let mut start = 0;
        while start < text.len() {
            let rest = &text[start..];
            let len = first.longest(rest).map_or_else(|| char_at(rest, 0).1, |(len, _)| len);
            let id = all.exact(&rest[..len]).unwrap_or(self.model.unk);
            self.model.write(id, &rest[..len], &mut after_unknown, ids);
            start += len;
        }
    }
}

impl SentencePiece {
    /// Writes a piece: its id, or those of its bytes, or nothing if it is unknown after unknown.
    #[inline]
    pub(super) fn write(
        &self,
        id: u32,
        piece: &[u8],
        after_unknown: &mut bool,
        ids: &mut Vec<u32>,
    ) {
        if id != self.unk {
            ids.push(id);
            *after_unknown = false;
            return;
        }
        if let Some(byte_ids) = &self.byte_ids {
            let escaped = self.normalizer.options.escape_whitespaces;
            each_spelled(piece, escaped, |byte| ids.push(byte_ids[usize::from(byte)]));
        } else if !*after_unknown {
            ids.push(id);
        }
        *after_unknown = true;
    }

    /// Appends the ids of a part, in which unknown after unknown is one already.
    #[inline]
    fn append(&self, part_ids: &[u32], carried: &mut PartState, ids: &mut Vec<u32>) {
        let again = carried.after_unknown && part_ids.first() == Some(&self.unk);
        ids.extend_from_slice(&part_ids[usize::from(again)..]);
        carried.after_unknown = part_ids.last() == Some(&self.unk);
    }
}
