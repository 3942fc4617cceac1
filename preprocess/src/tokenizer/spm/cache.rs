//! A cache of recent parts of texts and their ids.

/// 2^14 sets of two entries of 64 bytes are 2 MiB a worker, about a core's second-level cache.
const SETS_LOG: u32 = 14;

/// The last byte of a key is the part's length.
pub(super) const PART_BYTES_MAX: usize = 31;

/// A key is read at once, so a text must have this many bytes from the start of each part.
pub(crate) const PADDING: usize = 32;

/// With the key, this many ids and a bound fill a cache line.
pub(super) const IDS_MAX: usize = 7;

/// No id. Where there are fewer ids than [`IDS_MAX`] the rest are this.
const NONE: u32 = u32::MAX;

/// A part as one word.
pub(super) type Key = [u128; 2];

/// A bounded cache of parts: each set holds its two most recent ones.
#[derive(Debug)]
pub(super) struct PartCache {
    sets: Vec<[PartCacheEntry; 2]>,
}

/// An entry that was never filled has key 0, which is no part: a part has a length.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
pub(super) struct PartCacheEntry {
    key: Key,
    ids: [u32; IDS_MAX],
    /// The entry holds after sums that are no further from 0.
    pub(super) start_max: f32,
}

const _: () = assert!(size_of::<PartCacheEntry>() == 64, "an entry is one cache line");

impl PartCacheEntry {
    #[inline]
    pub(super) fn ids(&self) -> &[u32] {
        let count = self.ids.iter().position(|&id| id == NONE).unwrap_or(IDS_MAX);
        &self.ids[..count]
    }
}

/// The key of a part of at most [`PART_BYTES_MAX`] bytes, followed by anything up to [`PADDING`]
/// bytes.
#[inline]
pub(super) fn key_of(padded: &[u8; PADDING], len: usize) -> Key {
    let (low, high) = padded.split_at(16);
    let word = |half: &[u8]| u128::from_le_bytes(half.try_into().expect("half of the bytes"));
    let mask = |len: usize| if len == 16 { u128::MAX } else { (1 << (8 * len)) - 1 };
    let len_byte = (len as u128) << 120;
    [word(low) & mask(len.min(16)), word(high) & mask(len.saturating_sub(16)) | len_byte]
}

impl PartCache {
    pub(super) fn new() -> Self {
        PartCache { sets: vec![[PartCacheEntry::default(); 2]; 1 << SETS_LOG] }
    }

    #[inline]
    pub(super) fn get(&self, key: Key) -> Option<&PartCacheEntry> {
        self.sets[set_of(key)].iter().find(|entry| entry.key == key)
    }

    /// Caches a part in place of the older of its set.
    #[inline]
    pub(super) fn put(&mut self, key: Key, ids: &[u32], start_max: f32) {
        let mut entry = PartCacheEntry { key, ids: [NONE; IDS_MAX], start_max };
        let Some(place) = entry.ids.get_mut(..ids.len()) else { return };
        place.copy_from_slice(ids);
        let set = &mut self.sets[set_of(key)];
        if set[0].key != key {
            set[1] = set[0];
        }
        set[0] = entry;
    }
}

/// Multiplications mix all of the key into the top bits.
#[inline]
fn set_of(key: Key) -> usize {
    let [low, high] = key;
    let words = [low as u64, (low >> 64) as u64, high as u64, (high >> 64) as u64];
    let odd = [
        0x9e37_79b9_7f4a_7c15_u64,
        0xc2b2_ae3d_27d4_eb4f,
        0x1656_67b1_9e37_79f9,
        0x27d4_eb2f_1656_67c5,
    ];
    let mixed = words.iter().zip(odd).fold(0, |mixed, (word, odd)| mixed ^ word.wrapping_mul(odd));
    let mixed = (mixed ^ (mixed >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    (mixed >> (u64::BITS - SETS_LOG)) as usize
}
