//! Exact duplicates of earlier texts.

use crate::clean::dedup::hash::{HashKey, HashTable, table_bytes};

/// The hash of every text so far, and the document that had it first. A text costs its hash of 16
/// bytes, its number of 4 and a byte of the table, of which a half to seven eighths are in use: 24
/// to 48 bytes.
#[derive(Debug, Default)]
pub(in crate::clean) struct ExactDuplicateIndex {
    first_with: HashTable<4, u32>,
}

impl ExactDuplicateIndex {
    /// The document that had this text first, if it is not this one.
    pub(in crate::clean) fn find_or_insert(&mut self, hash: u128, document: u32) -> Option<u32> {
        use std::collections::hash_map::Entry;
        match self.first_with.entry(HashKey::of_128(hash)) {
            Entry::Occupied(entry) => Some(*entry.get()),
            Entry::Vacant(entry) => {
                entry.insert(document);
                None
            }
        }
    }

    pub(in crate::clean) fn table_bytes(&self) -> u64 {
        table_bytes(&self.first_with)
    }
}
