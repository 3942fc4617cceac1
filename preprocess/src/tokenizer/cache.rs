//! The pieces seen lately and their ids. Nine pieces of ten are one token, and the same words come
//! again: a look here is many times cheaper than merging.

/// 65,536 entries of 32 bytes are 2 MiB a worker, about a core's second-level cache.
const SET_COUNT: usize = 1 << 15;

/// A key is one word of 16 bytes: the piece, and its length in the last.
const KEY_BYTES_MAX: usize = 15;

/// Most pieces of so few bytes are no more ids.
const IDS_MAX: usize = 4;

/// No id. Where there are fewer ids than [`IDS_MAX`] the rest are this.
const NONE: u32 = u32::MAX;

/// A bounded memory of pieces: each set holds the two pieces that were seen in it last.
#[derive(Debug)]
pub(super) struct Cache {
    sets: Vec<Set>,
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct Set([Entry; 2]);

/// An entry that was never filled has key 0, which is no piece: a piece has a length.
#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    key: u128,
    ids: [u32; IDS_MAX],
}

const _: () = assert!(size_of::<Set>() == 64, "a set is one cache line");

/// The name of a piece in the cache, if it may be there.
#[inline]
pub(super) fn key_of(text: &[u8], start: usize, end: usize) -> Option<u128> {
    let len = end - start;
    if len > KEY_BYTES_MAX {
        return None;
    }
    // Away from the end of the text, 16 bytes are loaded at once and the rest are masked off.
    let bytes = match text[start..].first_chunk() {
        Some(bytes) => u128::from_le_bytes(*bytes) & ((1 << (8 * len)) - 1),
        None => {
            let mut bytes = [0; 16];
            bytes[..len].copy_from_slice(&text[start..end]);
            u128::from_le_bytes(bytes)
        }
    };
    Some(bytes | ((len as u128) << 120))
}

impl Cache {
    pub(super) fn new() -> Self {
        Cache { sets: vec![Set::default(); SET_COUNT] }
    }

    /// Appends the ids of a piece, or says that it is not here.
    #[inline]
    pub(super) fn get(&self, key: u128, ids: &mut Vec<u32>) -> bool {
        let Set(entries) = &self.sets[set_of(key)];
        let Some(entry) = entries.iter().find(|entry| entry.key == key) else { return false };
        if entry.ids[1] == NONE {
            ids.push(entry.ids[0]);
        } else {
            let count = entry.ids.iter().take_while(|&&id| id != NONE).count();
            ids.extend_from_slice(&entry.ids[..count]);
        }
        true
    }

    /// Remembers a piece, in the place of the older of its set.
    #[inline]
    pub(super) fn put(&mut self, key: u128, piece_ids: &[u32]) {
        if piece_ids.len() > IDS_MAX {
            return;
        }
        let mut ids = [NONE; IDS_MAX];
        ids[..piece_ids.len()].copy_from_slice(piece_ids);
        let Set(entries) = &mut self.sets[set_of(key)];
        entries[1] = entries[0];
        entries[0] = Entry { key, ids };
    }
}

/// Two multiplications mix both halves of the key into the top bits.
#[inline]
fn set_of(key: u128) -> usize {
    let (low, high) = (key as u64, (key >> 64) as u64);
    let mixed = low.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ high.wrapping_mul(0xc2b2_ae3d_27d4_eb4f);
    let mixed = (mixed ^ (mixed >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    (mixed >> (u64::BITS - SET_COUNT.trailing_zeros())) as usize
}
