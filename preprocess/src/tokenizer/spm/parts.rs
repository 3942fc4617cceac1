//! Segments the parts of a text with the unigram model, or takes recent ones from a cache.

use std::ops::Range;

use super::cache::{IDS_MAX, Key, PART_BYTES_MAX, PartCache, key_of};
use super::unigram::{BestPath, Sum, Unigram};

/// Cuts one part after another. Texts are followed by [`super::PADDING`] bytes of anything.
#[derive(Debug)]
pub(crate) struct UnigramSegmenter<S> {
    /// None: every part is segmented again.
    pub(super) cache: Option<PartCache>,
    best: BestPath<S>,
    ids: Vec<u32>,
}

impl<S: Sum> UnigramSegmenter<S> {
    pub(super) fn new(cache: Option<PartCache>) -> Self {
        UnigramSegmenter { cache, best: BestPath::default(), ids: Vec::new() }
    }

    /// With a cache of 2 MiB.
    pub(crate) fn with_memory() -> Self {
        UnigramSegmenter::new(Some(PartCache::new()))
    }

    pub(crate) fn without_memory() -> Self {
        UnigramSegmenter::new(None)
    }

    /// The ids of a part after `sum`, none of them the unknown's, if they are cached.
    #[inline]
    pub(crate) fn known(
        &self,
        unigram: &Unigram<S>,
        text: &[u8],
        part: &Range<usize>,
        sum: &mut S,
    ) -> Option<&[u32]> {
        let entry = self.cache.as_ref()?.get(key(text, part)?)?;
        if sum.wide().abs() > f64::from(entry.start_max) {
            return None;
        }
        let known = entry.ids();
        *sum = known.iter().fold(*sum, |sum, &id| unigram.add(sum, id));
        Some(known)
    }

    /// Segments a part after `sum`, and caches it: ids, and the bytes of the part that they take.
    pub(crate) fn segment(
        &mut self,
        unigram: &Unigram<S>,
        text: &[u8],
        part: &Range<usize>,
        sum: &mut S,
    ) -> &[(u32, Range<u32>)] {
        let best = &mut self.best;
        unigram.best_path(&text[part.clone()], *sum, best);
        *sum = best.sum;
        if let (Some(key), Some(cache)) = (key(text, part), &mut self.cache)
            && best.start_max >= 0.0
            && best.pieces.len() <= IDS_MAX
            // Their scores could not be added again, because one id may represent several.
            && best.pieces.iter().all(|&(id, _)| id != unigram.unk())
        {
            self.ids.clear();
            self.ids.extend(best.pieces.iter().map(|&(id, _)| id));
            cache.put(key, &self.ids, best.start_max);
        }
        &best.pieces
    }
}

/// None for a part that is too long to be cached.
#[inline]
pub(super) fn key(text: &[u8], part: &Range<usize>) -> Option<Key> {
    let padded = text[part.start..].first_chunk().expect("the text is padded");
    (part.len() <= PART_BYTES_MAX).then(|| key_of(padded, part.len()))
}
