//! The engine of byte-level BPE: cut a text into pieces, and merge the bytes of each.

use super::Encoder;
use super::by_char::{CharMergeBuffers, CharMerger};
use super::cache::{CacheSlot, IDS_MAX, KEY_BYTES_MAX, Key, PieceCache};
use super::long_cache::{self, LongCache};
use super::merge::{Merge, MergeBuffers, Merger};
use super::ranks::{self, Ids, Unfit};
use super::split::{Ends, Pattern, Splitter};

/// How many pieces are looked up together.
const PIECES_AHEAD: usize = 64;

/// From text to ids, for any vocabulary of the kind.
///
/// [`Bpe::new`] is for lists of merges (`merges.txt`, the `BPE` model of `tokenizer.json`), with
/// [`Bpe::with_whole_pieces`] where the model sets `ignore_merges`; [`Bpe::from_ranks`] is for
/// tiktoken's files. Tokenizers hold one and add names, decoding and special tokens, none of which
/// the engine knows.
#[derive(Debug)]
pub(crate) struct Bpe {
    merger: Merger,
    by_char: CharMerger,
    splitter: Splitter,
    pattern: Pattern,
    /// Pieces that are one token, whether or not merges make it; none if merges alone count.
    whole: Option<Whole>,
}

/// Tokens that a piece may be.
#[derive(Debug)]
struct Whole {
    ids: Ids,
    bytes_max: usize,
}

/// Encodes one text after another; holds 17 MiB of pieces.
#[derive(Debug)]
pub(crate) struct BpeEncoder<'a> {
    bpe: &'a Bpe,
    cache: PieceCache,
    long_cache: LongCache,
    scratch: MergeBuffers,
    /// From the first piece that is merged by characters.
    memory: Option<CharMergeBuffers>,
    ends: Ends,
}

#[allow(dead_code, reason = "some kinds of vocabulary have no reader yet")]
impl Bpe {
    /// The id of each byte, and the merges in rank order, the lowest first, no pair twice, at most
    /// [`RANK_LIMIT`](super::merge::RANK_LIMIT), all ids below
    /// [`ID_LIMIT`](super::merge::ID_LIMIT). As in Hugging Face's, a piece that is in the
    /// vocabulary is a token only if merges produce it.
    pub(crate) fn new(byte_ids: [u32; 256], merges: &[Merge], pattern: Pattern) -> Self {
        Bpe::with_merger(Merger::new(byte_ids, merges), pattern, None)
    }

    /// From tokens, their bytes and ids, without special tokens. An id is a rank: a piece that is a
    /// token becomes that token, and in others the two neighbours are merged that make the token of
    /// lowest rank.
    ///
    /// # Errors
    /// What is wrong, for a message: a byte without a token, bytes or an id twice, or too long.
    pub(crate) fn from_ranks<'a>(
        tokens: impl IntoIterator<Item = (&'a [u8], u32)>,
        pattern: Pattern,
    ) -> Result<Self, Unfit> {
        let ids = ranks::ids_of(tokens)?;
        let merger = ranks::merger(&ids)?;
        Ok(Bpe::with_merger(merger, pattern, Some(Whole::new(ids))))
    }

    fn with_merger(merger: Merger, pattern: Pattern, whole: Option<Whole>) -> Self {
        let by_char = CharMerger::new(&merger);
        Bpe { merger, by_char, splitter: Splitter::new(), pattern, whole }
    }

    /// Lets a piece that is one of these tokens be that token, as `ignore_merges` does.
    ///
    /// # Errors
    /// As [`Bpe::from_ranks`].
    pub(crate) fn with_whole_pieces<'a>(
        self,
        tokens: impl IntoIterator<Item = (&'a [u8], u32)>,
    ) -> Result<Self, Unfit> {
        Ok(Bpe { whole: Some(Whole::new(ranks::ids_of(tokens)?)), ..self })
    }

    /// Appends the ids of a text.
    pub(crate) fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        let (mut scratch, mut memory) = (MergeBuffers::default(), None);
        let bytes = text.as_bytes();
        let mut start = 0;
        while start < bytes.len() {
            let end = self.splitter.piece_end(self.pattern, bytes, start);
            self.merge(&bytes[start..end], (&mut scratch, &mut memory), ids);
            start = end;
        }
    }

    /// An encoder for many texts, one for each thread.
    pub(crate) fn encoder(&self) -> BpeEncoder<'_> {
        BpeEncoder {
            bpe: self,
            cache: PieceCache::new(),
            long_cache: LongCache::new(),
            scratch: MergeBuffers::default(),
            memory: None,
            ends: Ends::new(),
        }
    }

    /// As [`Tokenizer::cut_after`](super::Tokenizer::cut_after).
    pub(crate) fn cut_after(&self, text: &str, at: usize) -> Option<usize> {
        self.splitter.cut_after(self.pattern, text.as_bytes(), at)
    }

    /// Appends the ids of a piece.
    fn merge(
        &self,
        piece: &[u8],
        (scratch, memory): (&mut MergeBuffers, &mut Option<CharMergeBuffers>),
        ids: &mut Vec<u32>,
    ) {
        if let Some(id) = self.whole.as_ref().and_then(|whole| whole.id(piece)) {
            ids.push(id);
            return;
        }
        if CharMerger::is_for(piece) {
            let memory = memory.get_or_insert_with(CharMergeBuffers::new);
            if self.by_char.merge(&self.merger, piece, (&mut *scratch, memory), ids) {
                return;
            }
        }
        self.merger.merge(piece, scratch, ids);
    }
}

impl Whole {
    fn new(ids: Ids) -> Self {
        let bytes_max = ids.keys().map(|token| token.len()).max().unwrap_or(0);
        Whole { ids, bytes_max }
    }

    fn id(&self, piece: &[u8]) -> Option<u32> {
        if piece.len() > self.bytes_max { None } else { self.ids.get(piece).copied() }
    }
}

impl Encoder for BpeEncoder<'_> {
    fn encode(&mut self, text: &str, ids: &mut Vec<u32>) {
        let bytes = text.as_bytes();
        let mut at = 0;
        while at < bytes.len() {
            self.bpe.splitter.ends(self.bpe.pattern, bytes, at, &mut self.ends);
            at = self.encode_pieces(bytes, at, ids);
        }
    }
}

impl BpeEncoder<'_> {
    /// Appends the ids of the pieces whose ends are known, the first of which starts at `start`,
    /// and returns the end of the last.
    fn encode_pieces(&mut self, bytes: &[u8], mut start: usize, ids: &mut Vec<u32>) -> usize {
        let BpeEncoder { bpe, cache, long_cache, scratch, memory, ends } = self;
        let mut merge = |piece: &[u8], ids: &mut Vec<u32>| {
            bpe.merge(piece, (&mut *scratch, &mut *memory), ids);
        };
        let mut cache = cache.sets();
        let mut len = ids.len();
        for ends in ends.as_slice().chunks(PIECES_AHEAD) {
            // All cache lines are prefetched before the first is used.
            let mut places = [CacheSlot::default(); PIECES_AHEAD];
            let mut from = start;
            for (place, &end) in places.iter_mut().zip(ends) {
                *place = cache.find(Key::at(bytes, from, end));
                from = end;
            }
            // Four ids are written for every piece, and as many kept as it has: the only branch is
            // for cache misses.
            ids.resize(len + ends.len() * IDS_MAX, 0);
            for (i, (&place, &end)) in places.iter().zip(ends).enumerate() {
                if let Some((found, count)) = cache.get(place) {
                    ids[len..][..IDS_MAX].copy_from_slice(&found);
                    len += count;
                } else {
                    let piece = &bytes[start..end];
                    ids.truncate(len);
                    if piece.len() <= KEY_BYTES_MAX {
                        merge(piece, ids);
                        cache.put(place, &ids[len..]);
                    } else if piece.len() > long_cache::BYTES_MAX || CharMerger::is_for(piece) {
                        merge(piece, ids);
                    } else if let Some(found) = long_cache.get(piece) {
                        ids.extend_from_slice(found);
                    } else {
                        merge(piece, ids);
                        long_cache.put(piece, &ids[len..]);
                    }
                    len = ids.len();
                    ids.resize(len + (ends.len() - i) * IDS_MAX, 0);
                }
                start = end;
            }
        }
        ids.truncate(len);
        start
    }
}

#[cfg(test)]
mod tests;
