//! A cache of repeated pieces that are too long for the other one: indents, lines of dashes, names.

/// 8,192 entries of 128 bytes are 1 MiB a worker.
const ENTRY_COUNT: usize = 1 << 13;

/// Longer pieces are too rare to be cached.
pub(super) const BYTES_MAX: usize = 64;

const IDS_MAX: usize = 15;

/// A bounded cache of pieces of ASCII: each is in the one place that its hash selects.
#[derive(Debug)]
pub(super) struct LongCache(Box<[LongCacheEntry; ENTRY_COUNT]>);

#[derive(Clone, Copy, Debug)]
struct LongCacheEntry {
    bytes: [u8; BYTES_MAX],
    ids: [u32; IDS_MAX],
    len: u16,
    count: u16,
}

const _: () = assert!(size_of::<LongCacheEntry>() == 128, "an entry is two cache lines");

impl LongCache {
    pub(super) fn new() -> Self {
        let empty = LongCacheEntry { bytes: [0; BYTES_MAX], ids: [0; IDS_MAX], len: 0, count: 0 };
        let entries = vec![empty; ENTRY_COUNT].into_boxed_slice();
        LongCache(entries.try_into().expect("so many were made"))
    }

    /// The ids of a piece, if it is here.
    pub(super) fn get(&self, piece: &[u8]) -> Option<&[u32]> {
        let entry = &self.0[place(piece)];
        let found = entry.bytes.get(..usize::from(entry.len))?;
        (found == piece).then(|| &entry.ids[..usize::from(entry.count)])
    }

    /// Caches a piece, if it fits.
    pub(super) fn put(&mut self, piece: &[u8], piece_ids: &[u32]) {
        if piece.len() > BYTES_MAX || piece_ids.len() > IDS_MAX {
            return;
        }
        let entry = &mut self.0[place(piece)];
        entry.bytes[..piece.len()].copy_from_slice(piece);
        entry.ids[..piece_ids.len()].copy_from_slice(piece_ids);
        // fits: both are below 65
        (entry.len, entry.count) = (piece.len() as u16, piece_ids.len() as u16);
    }
}

/// By eight bytes at a time, the last of which may overlap those before.
fn place(piece: &[u8]) -> usize {
    const MIX: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |sum: u64, word: &[u8; 8]| {
        (sum ^ u64::from_le_bytes(*word)).wrapping_mul(MIX).rotate_left(29)
    };
    let words = piece.as_chunks::<8>().0.iter().chain(piece.last_chunk());
    let sum = words.fold(piece.len() as u64, mix);
    (sum.wrapping_mul(MIX) >> (u64::BITS - ENTRY_COUNT.trailing_zeros())) as usize % ENTRY_COUNT
}
