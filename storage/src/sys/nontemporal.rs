//! Copies with non-temporal stores, for data that will not be read again soon.
//!
//! `memcpy` reads the lines that it is about to overwrite, and leaves the copy in the cache in
//! place of the program's working set. glibc avoids that for copies of three eighths of a cache
//! that all cores share, 99 MiB on the machine below, which single tensors do not reach. Here lines
//! are written past the cache from 64 KiB on, and four pages at a time, so that four rows of the
//! memory are open at once. One core of a Sapphire Rapids, tensors of 8 MiB: 8.4 GB/s where
//! `memcpy` has 5.0 (2026-11, `cargo bench -p ckpt --bench background`).

/// Below this a copy stays in the cache of the core anyway.
#[cfg(target_arch = "x86_64")]
const STREAM_BYTES_MIN: usize = 64 << 10;

/// Copies all bytes.
///
/// # Panics
/// If the lengths differ.
pub fn copy_past_cache(into: &mut [u8], from: &[u8]) {
    assert_eq!(into.len(), from.len(), "a copy has the length of what is copied");
    #[cfg(target_arch = "x86_64")]
    if from.len() >= STREAM_BYTES_MIN && std::is_x86_feature_detected!("avx") {
        let (head, blocks, tail) = wide::split(into);
        let (from_head, rest) = from.split_at(head.len());
        let (from_blocks, from_tail) = rest.split_at(blocks.len());
        head.copy_from_slice(from_head);
        tail.copy_from_slice(from_tail);
        // SAFETY: this processor has AVX, as was just checked.
        unsafe { wide::copy(blocks, from_blocks) };
        return;
    }
    into.copy_from_slice(from);
}

#[cfg(target_arch = "x86_64")]
mod wide {
    use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};

    const PAGE_BYTES: usize = 4096;
    const LINE_BYTES: usize = 64;

    /// Pages that are written side by side.
    const PAGES: usize = 4;
    const BLOCK_BYTES: usize = PAGES * PAGE_BYTES;

    /// The part before the first page boundary, whole blocks, and the rest.
    pub(super) fn split(into: &mut [u8]) -> (&mut [u8], &mut [u8], &mut [u8]) {
        let head = into.as_ptr().align_offset(PAGE_BYTES).min(into.len());
        let (head, rest) = into.split_at_mut(head);
        let whole = rest.len() / BLOCK_BYTES * BLOCK_BYTES;
        let (blocks, tail) = rest.split_at_mut(whole);
        (head, blocks, tail)
    }

    /// Copies whole blocks to a page boundary.
    #[target_feature(enable = "avx")]
    pub(super) fn copy(into: &mut [u8], from: &[u8]) {
        let blocks = into.chunks_exact_mut(BLOCK_BYTES).zip(from.chunks_exact(BLOCK_BYTES));
        for (into, from) in blocks {
            for line in (0..PAGE_BYTES).step_by(LINE_BYTES) {
                for page in 0..PAGES {
                    let at = page * PAGE_BYTES + line;
                    copy_line(&mut into[at..at + LINE_BYTES], &from[at..at + LINE_BYTES]);
                }
            }
        }
        // Fence: non-temporal stores are visible to other threads in order from here on.
        _mm_sfence();
    }

    /// Copies one aligned cache line.
    #[target_feature(enable = "avx")]
    #[inline]
    fn copy_line(into: &mut [u8], from: &[u8]) {
        let (into, from) = (into.as_mut_ptr().cast::<__m256i>(), from.as_ptr().cast::<__m256i>());
        // SAFETY: the line has 64 bytes; the load requires no alignment.
        let low = unsafe { _mm256_loadu_si256(from) };
        // SAFETY: the second half of the same line.
        let upper = unsafe { from.add(1) };
        // SAFETY: as for the first half.
        let high = unsafe { _mm256_loadu_si256(upper) };
        // SAFETY: the line has 64 bytes and starts at a multiple of 64, which `split` ensures.
        unsafe { _mm256_stream_si256(into, low) };
        // SAFETY: the second half of the same line.
        let upper = unsafe { into.add(1) };
        // SAFETY: as for the first half.
        unsafe { _mm256_stream_si256(upper, high) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For any length and offsets: all bytes are copied, and no others are written.
    #[test]
    fn copies_are_exact() {
        let from: Vec<u8> =
            (0..300_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        for len in [0, 1, 4095, STREAM_BYTES_MIN - 1, STREAM_BYTES_MIN, 70_001, 131_072, 250_000] {
            for (to, at) in [(0, 0), (1, 0), (0, 1), (63, 7), (4095, 4097), (4096, 64)] {
                let mut into = vec![0xee; len + 10_000];
                copy_past_cache(&mut into[to..to + len], &from[at..at + len]);
                assert!(into[to..to + len] == from[at..at + len], "{len} bytes from {at} to {to}");
                let rest = into[..to].iter().chain(&into[to + len..]);
                assert!(rest.copied().all(|byte| byte == 0xee), "{len} bytes from {at} to {to}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "has the length")]
    fn lengths_must_agree() {
        copy_past_cache(&mut [0; 3], &[0; 4]);
    }
}
