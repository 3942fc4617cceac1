//! MinHash sketches: the share of equal numbers in two sketches estimates that of common shingles.
//!
//! Fast similarity sketching (Dahlgaard, Knudsen, Thorup, FOCS 2017): a round assigns every shingle
//! to one of the places, and a place keeps its smallest. Long texts fill all places in the first
//! round, so that a shingle is hashed once and not a hundred times; short ones take more rounds,
//! and a place keeps the value of an earlier round. The expected share of equal places is the
//! Jaccard index of the two sets, with no more variance than independent permutations.

use crate::clean::dedup::hash::{fold, scatter};
use crate::clean::dedup::shingle::Shingler;

/// The value of a place is its round in 12 bits and a hash in 52.
const HASH_BITS: u32 = 52;

/// There are at most two rounds for every place.
pub(in crate::clean) const PLACES_MAX: usize = 1 << (64 - HASH_BITS - 1);

/// Computes the sketch of one text after another, and divides it into bands.
#[derive(Debug)]
pub(in crate::clean) struct MinHasher {
    shingler: Shingler,
    bands: usize,
    places: Vec<u64>,
}

impl MinHasher {
    /// `bands * rows` is at most [`PLACES_MAX`].
    pub(in crate::clean) fn new(shingler: Shingler, bands: usize, rows: usize) -> Self {
        assert!((1..=PLACES_MAX).contains(&(bands * rows)), "checked with the options");
        MinHasher { shingler, bands, places: vec![0; bands * rows] }
    }

    /// Appends a hash of every band. False: the text has no shingles, and nothing was appended.
    pub(in crate::clean) fn bands(&mut self, text: &str, hashes: &mut Vec<u64>) -> bool {
        if !self.sketch(text) {
            return false;
        }
        let rows = self.places.len() / self.bands;
        hashes.extend(
            self.places.chunks_exact(rows).map(|band| {
                scatter(band.iter().fold(rows as u64, |hash, &place| fold(place, hash)))
            }),
        );
        true
    }

    fn sketch(&mut self, text: &str) -> bool {
        let places = self.places.as_mut_slice();
        let count = places.len();
        places.fill(u64::MAX);
        // In round `count + i` all shingles go to place i, so that it is filled.
        for round in 0..2 * count {
            let (seed, stamp) = (scatter(round as u64), (round as u64) << HASH_BITS);
            let mut any = false;
            self.shingler.for_each(text, |shingle| {
                any = true;
                let hash = fold(shingle, seed);
                let place = match round.checked_sub(count) {
                    // fits: below `count`
                    None => (((hash >> 32) * count as u64) >> 32) as usize,
                    Some(place) => place,
                };
                let value = stamp | hash & ((1 << HASH_BITS) - 1);
                if value < places[place] {
                    places[place] = value;
                }
            });
            if !any {
                return false;
            }
            if !places.contains(&u64::MAX) {
                break;
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clean::ShingleUnit;

    /// Sets of words with a known Jaccard index, large and small: the share of equal places is
    /// within six standard deviations of a hundred sketches of 128 independent places.
    #[test]
    fn equal_places_estimate_the_jaccard_index() {
        let shingler = Shingler::new(ShingleUnit::Word, 1);
        for (common, own) in [(4, 1), (8, 4), (100, 25), (100, 100), (3000, 500), (1, 0), (2, 20)] {
            let jaccard = f64::from(common) / f64::from(common + 2 * own);
            let mut equal = 0;
            for run in 0..100 {
                let text = |which: u32| {
                    let shared = (0..common).map(|nth| format!("c{run}x{nth}"));
                    let alone = (0..own).map(|nth| format!("o{which}x{run}x{nth}"));
                    shared.chain(alone).collect::<Vec<_>>().join(" ")
                };
                let mut first = MinHasher::new(shingler, 1, 128);
                let mut second = MinHasher::new(shingler, 1, 128);
                assert!(first.sketch(&text(1)) && second.sketch(&text(2)));
                equal += first.places.iter().zip(&second.places).filter(|(a, b)| a == b).count();
            }
            let estimate = equal as f64 / 12_800.0;
            let deviation = (jaccard * (1.0 - jaccard) / 12_800.0).sqrt();
            assert!(
                (estimate - jaccard).abs() <= 6.0 * deviation,
                "{common}+{own}: {estimate}, {jaccard}"
            );
        }
    }

    #[test]
    fn every_place_is_filled_and_equal_texts_are_equal() {
        let shingler = Shingler::new(ShingleUnit::Char, 5);
        let mut sketcher = MinHasher::new(shingler, 20, 5);
        for text in ["a", "abcdef", "0123456789", &"long text ".repeat(1000)] {
            let mut hashes = Vec::new();
            assert!(sketcher.bands(text, &mut hashes) && sketcher.bands(text, &mut hashes));
            assert!(!sketcher.places.contains(&u64::MAX));
            assert_eq!((hashes.len(), &hashes[..20]), (40, &hashes[20..]));
        }
        assert!(!sketcher.bands("", &mut Vec::new()));
    }
}
