//! Near-duplicates: texts similar to an earlier one.
//!
//! A document is compared with the earlier, retained documents that were the first with one of its
//! bands (locality-sensitive hashing), by their sets of shingles and not by an estimate: every
//! dropped document is as similar to a retained one as requested. No document is dropped for
//! similarity to a dropped one, so that chains of small steps do not lead from one text to quite
//! another.

use std::collections::VecDeque;

use crate::Result;
use crate::clean::dedup::duplicate_bands::DuplicateBands;
use crate::clean::dedup::hash::{HashKey, HashTable, table_bytes};
use crate::clean::dedup::shingle::Shingler;
use crate::clean::dedup::text_spool::TextSpool;
use crate::clean::{Measure, NearOptions};

/// Cached sets of shingles for the next comparison: a document copied a thousand times is read
/// once. Six for the longest texts.
const CACHE_BYTES_MAX: usize = 256 << 20;

/// Of longer texts only a part of the shingles is compared, selected by hash and so the same part
/// of both: with a million, the index is off by 0.001 in one of 20 texts. 40 MiB a set at most.
const SET_BYTES_LOG2_MAX: u32 = 20;

/// A retained document, and where its text is.
#[derive(Clone, Copy, Debug)]
struct IndexedDocument {
    document: u32,
    place: u64,
    text_bytes: u32,
}

/// Index of all retained documents by their bands. A document costs an entry of 12 bytes and one of
/// control in the table of every band, a half to seven eighths of which are in use, and its place:
/// 20 bands take 320 to 610 bytes. With two passes, only bands shared with another document count.
#[derive(Debug)]
pub(in crate::clean) struct NearDuplicateIndex {
    jaccard: f64,
    measure: Measure,
    shingler: Shingler,
    bands: Vec<HashTable<2, u32>>,
    kept: Vec<IndexedDocument>,
    scratch: TextSpool,
    cache: ShingleSetCache,
    /// The shared bands, if they were counted before.
    twice: Option<DuplicateBands>,
    text: Vec<u8>,
    candidates: Vec<u32>,
    pub(in crate::clean) compared: u64,
}

/// An earlier document, and its similarity.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::clean) struct NearMatch {
    pub(in crate::clean) document: u32,
    pub(in crate::clean) jaccard: f64,
}

impl NearDuplicateIndex {
    pub(in crate::clean) fn new(
        options: &NearOptions,
        twice: Option<DuplicateBands>,
    ) -> Result<Self> {
        Ok(NearDuplicateIndex {
            jaccard: options.jaccard,
            measure: options.measure,
            shingler: Shingler::new(options.unit, options.shingle),
            bands: (0..options.bands).map(|_| HashTable::default()).collect(),
            kept: Vec::new(),
            scratch: TextSpool::create(options.scratch.as_deref())?,
            cache: ShingleSetCache::default(),
            twice,
            text: Vec::new(),
            candidates: Vec::new(),
            compared: 0,
        })
    }

    /// The retained document that this one resembles; if there is none, this one is retained. `row`
    /// is its place among all documents that have bands.
    pub(in crate::clean) fn find_or_insert(
        &mut self,
        document: u32,
        row: u64,
        text: &str,
        hashes: &[u64],
    ) -> Result<Option<NearMatch>> {
        let counts = |band: usize| self.twice.as_ref().is_none_or(|twice| twice.has(row, band));
        self.candidates.clear();
        let mut new = 0;
        for (nth, (band, &hash)) in self.bands.iter().zip(hashes).enumerate() {
            if !counts(nth) {
                continue;
            }
            match band.get(&HashKey::of_64(hash)) {
                Some(kept) if self.candidates.contains(kept) => {}
                Some(kept) => self.candidates.push(*kept),
                None => new += 1,
            }
        }
        if let Some(alike) = self.compare(text)? {
            return Ok(Some(alike));
        }
        if new == 0 {
            return Ok(None);
        }
        let place = self.scratch.append(text.as_bytes())?;
        let nth_kept = self.kept.len() as u32; // fits: there are fewer than documents
        let text_bytes = text.len() as u32; // fits: a line is at most 1 GiB
        self.kept.push(IndexedDocument { document, place, text_bytes });
        for (nth, (band, &hash)) in self.bands.iter_mut().zip(hashes).enumerate() {
            if self.twice.as_ref().is_none_or(|twice| twice.has(row, nth)) {
                band.entry(HashKey::of_64(hash)).or_insert(nth_kept);
            }
        }
        Ok(None)
    }

    fn compare(&mut self, text: &str) -> Result<Option<NearMatch>> {
        if self.candidates.is_empty() {
            return Ok(None);
        }
        let own = Set::new(&self.shingler, text);
        for &nth in &self.candidates {
            let kept = self.kept[nth as usize];
            if self.cache.get(nth).is_none() {
                self.scratch.read(kept.place, kept.text_bytes as usize, &mut self.text)?;
                let text = std::str::from_utf8(&self.text).expect("it was written from a text");
                self.cache.put(nth, Set::new(&self.shingler, text));
            }
            let other = self.cache.get(nth).expect("put there above");
            self.compared += 1;
            let jaccard = own.similarity(other, self.measure);
            if jaccard >= self.jaccard {
                return Ok(Some(NearMatch { document: kept.document, jaccard }));
            }
        }
        Ok(None)
    }

    pub(in crate::clean) fn table_bytes(&self) -> u64 {
        let bands: u64 = self.bands.iter().map(table_bytes).sum();
        let marks = self.twice.as_ref().map_or(0, DuplicateBands::table_bytes);
        bands + marks + (self.kept.capacity() * size_of::<IndexedDocument>()) as u64
    }

    pub(in crate::clean) fn scratch_bytes(&self) -> u64 {
        self.scratch.len_bytes()
    }
}

/// The shingles of a text, without repeats.
#[derive(Debug)]
struct Set {
    hashes: Vec<u64>,
    /// The same, each at or after the place of its low bits; [`FREE`] where there is none. Half of
    /// the places at least are free.
    table: Vec<u64>,
    /// Only hashes below 2^(64 - `zeros`) are there.
    zeros: u32,
}

/// A free place of a table. The hash 0 is replaced by 1, which affects one of 2^64 shingles.
const FREE: u64 = 0;

impl Set {
    fn new(shingler: &Shingler, text: &str) -> Set {
        let len_log2 = usize::BITS - text.len().leading_zeros();
        let zeros = len_log2.saturating_sub(SET_BYTES_LOG2_MAX);
        // A shingle takes at least a byte of the text. How many hashes are selected is random, so
        // the table can grow.
        let mut set = Set { hashes: Vec::new(), table: vec![FREE; 64], zeros };
        set.grow(text.len() >> zeros);
        shingler.for_each(text, |hash| {
            if hash.leading_zeros() >= zeros {
                set.insert(hash.max(1));
            }
        });
        set
    }

    #[inline]
    fn insert(&mut self, hash: u64) {
        let (found, place) = self.find(hash);
        if found {
            return;
        }
        self.table[place] = hash;
        self.hashes.push(hash);
        if self.hashes.len() * 2 > self.table.len() {
            self.grow(self.table.len());
        }
    }

    /// Makes room for `count` hashes.
    #[cold]
    fn grow(&mut self, count: usize) {
        self.table = vec![FREE; (count * 2).next_power_of_two().max(64)];
        for &hash in &self.hashes {
            let place = self.find(hash).1;
            self.table[place] = hash;
        }
    }

    /// Whether a hash is there, and where it is or would be.
    #[inline]
    fn find(&self, hash: u64) -> (bool, usize) {
        let mask = self.table.len() - 1;
        let mut place = hash as usize & mask; // fits: masked
        loop {
            match self.table[place] {
                FREE => return (false, place),
                other if other == hash => return (true, place),
                _ => place = (place + 1) & mask,
            }
        }
    }

    /// The number of common shingles, divided as `measure` says.
    fn similarity(&self, other: &Set, measure: Measure) -> f64 {
        let zeros = self.zeros.max(other.zeros);
        let (own, others) = (self.count_below(zeros), other.count_below(zeros));
        let (small, large) = if own < others { (self, other) } else { (other, self) };
        let is_common = |hash: &&u64| hash.leading_zeros() >= zeros && large.find(**hash).0;
        let common = small.hashes.iter().filter(is_common).count();
        let whole = match measure {
            Measure::Union => own + others - common,
            Measure::Min => own.min(others),
            Measure::Max => own.max(others),
        };
        if whole == 0 { 0.0 } else { common as f64 / whole as f64 }
    }

    fn count_below(&self, zeros: u32) -> usize {
        if self.zeros == zeros {
            return self.hashes.len();
        }
        self.hashes.iter().filter(|hash| hash.leading_zeros() >= zeros).count()
    }

    fn bytes(&self) -> usize {
        (self.hashes.capacity() + self.table.len()) * size_of::<u64>()
    }
}

/// The most recently compared sets.
#[derive(Debug, Default)]
struct ShingleSetCache {
    sets: VecDeque<(u32, Set)>,
    bytes: usize,
}

/// Searching more would take as long as building them.
const CACHE_SETS_MAX: usize = 64;

impl ShingleSetCache {
    fn get(&self, nth: u32) -> Option<&Set> {
        self.sets.iter().find(|(of, _)| *of == nth).map(|(_, set)| set)
    }

    fn put(&mut self, nth: u32, set: Set) {
        self.bytes += set.bytes();
        self.sets.push_front((nth, set));
        while self.sets.len() > CACHE_SETS_MAX
            || (self.bytes > CACHE_BYTES_MAX && self.sets.len() > 1)
        {
            self.bytes -= self.sets.pop_back().map_or(0, |(_, set)| set.bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(options: &NearOptions) -> NearDuplicateIndex {
        NearDuplicateIndex::new(options, None).unwrap()
    }

    fn add(
        near: &mut NearDuplicateIndex,
        options: &NearOptions,
        document: u32,
        text: &str,
    ) -> Option<NearMatch> {
        let shingler = Shingler::new(options.unit, options.shingle);
        let mut sketcher =
            crate::clean::dedup::minhash::MinHasher::new(shingler, options.bands, options.rows);
        let mut hashes = Vec::new();
        assert!(sketcher.bands(text, &mut hashes));
        near.find_or_insert(document, u64::from(document), text, &hashes).unwrap()
    }

    /// Numbers that a person can check: sets of 3 and 4 letters with 2 in common.
    #[test]
    fn measures_have_different_denominators() {
        let shingler = Shingler::new(crate::clean::ShingleUnit::Char, 1);
        let (first, second) = (Set::new(&shingler, "aabbc"), Set::new(&shingler, "bcdec"));
        assert_eq!(first.similarity(&second, Measure::Union), 2.0 / 5.0);
        assert_eq!(first.similarity(&second, Measure::Min), 2.0 / 3.0);
        assert_eq!(first.similarity(&second, Measure::Max), 2.0 / 4.0);
    }

    /// No document is dropped for similarity to a dropped one.
    #[test]
    fn chains_end_at_retained_documents() {
        let options = NearOptions { jaccard: 0.5, bands: 100, rows: 1, ..NearOptions::default() };
        let words: Vec<String> = (0..200).map(|nth| format!("word{nth}xyz")).collect();
        let text = |from: usize| words[from..from + 100].join(" ");
        let mut index = near(&options);
        assert_eq!(add(&mut index, &options, 0, &text(0)), None);
        assert_eq!(add(&mut index, &options, 1, &text(30)).unwrap().document, 0);
        // Similar to document 1, which was dropped, but not to document 0.
        assert_eq!(add(&mut index, &options, 2, &text(60)), None);
        assert_eq!(add(&mut index, &options, 3, &text(90)).unwrap().document, 2);
    }

    #[test]
    fn long_texts_are_compared_by_a_sample() {
        let shingler = Shingler::new(crate::clean::ShingleUnit::Word, 1);
        let text = |from: u32, to: u32| (from..to).map(|nth| format!("{nth} ")).collect::<String>();
        let (long, short) = (text(0, 1_500_000), text(900_000, 1_400_000));
        let (first, second) = (Set::new(&shingler, &long), Set::new(&shingler, &short));
        assert!(first.zeros > 0 && first.zeros > second.zeros, "{} {}", first.zeros, second.zeros);
        let jaccard = first.similarity(&second, Measure::Union);
        assert!((jaccard - 1.0 / 3.0).abs() < 0.01, "{jaccard}");
    }
}
