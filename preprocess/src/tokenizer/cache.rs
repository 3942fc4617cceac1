//! A cache of recent pieces and their ids. Nine pieces of ten are one token, and words repeat: a
//! lookup is many times cheaper than merging.

use storage::Zeros;

/// 524,288 entries of 32 bytes are 16 MiB a worker. The common ones stay in a core's second-level
/// cache; even from memory a lookup takes a fifth of the time of merging.
const SET_COUNT: usize = 1 << 18;

/// A key is 16 bytes: the piece, and its length in the last.
pub(super) const KEY_BYTES_MAX: usize = 15;

/// Most pieces of so few bytes have at most this many ids.
pub(super) const IDS_MAX: usize = 4;

/// An id has 21 bits; above them the first of an entry holds how many there are.
const COUNT_SHIFT: u32 = 24;

/// A bounded cache of pieces: each set holds its two most recent pieces.
#[derive(Debug)]
pub(super) struct PieceCache(Zeros);

/// The same, as an array of sets.
#[derive(Debug)]
pub(super) struct Sets<'a>(&'a mut [Set; SET_COUNT]);

/// A cache line of two entries: 16 bytes of key and as many of ids. One that was never filled has
/// key 0, which is no piece: a piece has a length.
type Set = [[[u8; 16]; 2]; 2];

const _: () = assert!(size_of::<Set>() == 64, "a set is one cache line");

/// The key of a piece. The key of a piece that is too long for the cache equals none in it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Key {
    low: u64,
    high: u64,
}

/// The set where a piece would be.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CacheSlot {
    key: Key,
    set: u32,
}

/// The bits of 16 bytes that belong to a piece of each length.
const MASKS: [[u64; 2]; 32] = {
    let mut masks = [[0; 2]; 32];
    let mut len = 0;
    while len <= KEY_BYTES_MAX {
        let mask = (1_u128 << (8 * len)) - 1;
        masks[len] = [mask as u64, (mask >> 64) as u64];
        len += 1;
    }
    masks
};

impl Key {
    /// The key of a piece: the first `len` of these bytes.
    #[inline]
    pub(super) fn new(bytes: &[u8; 16], len: usize) -> Self {
        let len = len.min(KEY_BYTES_MAX + 1);
        let [low, high] = MASKS[len & 31];
        let word = u128::from_le_bytes(*bytes);
        Key { low: word as u64 & low, high: ((word >> 64) as u64 & high) | ((len as u64) << 56) }
    }

    /// The key of a piece within a text, which may end in fewer than 16 bytes.
    #[inline]
    pub(super) fn at(text: &[u8], start: usize, end: usize) -> Self {
        match text[start..].first_chunk() {
            Some(bytes) => Key::new(bytes, end - start),
            None => {
                let mut bytes = [0; 16];
                bytes[..end - start].copy_from_slice(&text[start..end]);
                Key::new(&bytes, end - start)
            }
        }
    }

    #[inline]
    fn of(bytes: &[u8; 16]) -> Self {
        let word = u128::from_le_bytes(*bytes);
        Key { low: word as u64, high: (word >> 64) as u64 }
    }

    #[inline]
    fn to_bytes(self) -> [u8; 16] {
        (u128::from(self.low) | (u128::from(self.high) << 64)).to_le_bytes()
    }

    /// Without a branch between the halves.
    #[inline]
    fn is(self, other: Key) -> bool {
        (self.low ^ other.low) | (self.high ^ other.high) == 0
    }

    /// One wide product mixes both halves.
    #[inline]
    fn set_idx(self) -> usize {
        let product = u128::from(self.low ^ 0x9e37_79b9_7f4a_7c15)
            * u128::from(self.high ^ 0xc2b2_ae3d_27d4_eb4f);
        let mixed = (product as u64) ^ ((product >> 64) as u64);
        (mixed >> (u64::BITS - SET_COUNT.trailing_zeros())) as usize
    }
}

impl PieceCache {
    pub(super) fn new() -> Self {
        PieceCache(Zeros::new(SET_COUNT * size_of::<Set>()))
    }

    #[inline]
    pub(super) fn sets(&mut self) -> Sets<'_> {
        let halves = self.0.as_chunks_mut().0;
        let sets = halves.as_chunks_mut().0.as_chunks_mut().0.first_chunk_mut();
        Sets(sets.expect("so many were made"))
    }
}

impl Sets<'_> {
    /// The set where a piece would be; prefetches it.
    #[inline]
    pub(super) fn find(&self, key: Key) -> CacheSlot {
        let set = key.set_idx() % SET_COUNT;
        storage::prefetch(&self.0[set]);
        CacheSlot { key, set: set as u32 } // fits: there are fewer sets
    }

    /// The ids of a piece, and how many of them count; none if it is not cached.
    #[inline]
    pub(super) fn get(&self, place: CacheSlot) -> Option<([u32; IDS_MAX], usize)> {
        let set = &self.0[place.set as usize % SET_COUNT];
        let [found, ids] = &set[usize::from(Key::of(&set[1][0]).is(place.key))];
        let words = u128::from_le_bytes(*ids);
        let mut ids = [0, 32, 64, 96].map(|shift| (words >> shift) as u32); // fits: 32 bits of it
        let count = ids[0] >> COUNT_SHIFT;
        ids[0] &= (1 << COUNT_SHIFT) - 1;
        Key::of(found).is(place.key).then_some((ids, count as usize))
    }

    /// Caches a piece in place of the older of its set, if its length and ids fit.
    #[inline]
    pub(super) fn put(&mut self, CacheSlot { key, set }: CacheSlot, piece_ids: &[u32]) {
        let len = key.high >> 56;
        if piece_ids.len() > IDS_MAX || len > KEY_BYTES_MAX as u64 {
            return;
        }
        let ids = piece_ids.iter().rev().fold(0_u128, |ids, &id| (ids << 32) | u128::from(id));
        let ids = ids | ((piece_ids.len() as u128) << COUNT_SHIFT);
        let entries = &mut self.0[set as usize % SET_COUNT];
        entries[1] = entries[0];
        entries[0] = [key.to_bytes(), ids.to_le_bytes()];
    }
}
