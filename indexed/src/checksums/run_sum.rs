//! Combines the checksums of consecutive blocks into one.

use std::sync::LazyLock;

use crate::checksums::BLOCK_BYTES;

/// The polynomial of CRC-32C with its bits reversed, as RFC 3720 uses it.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// For each byte of a checksum and each value of it, its contribution to the checksum of the same
/// bytes with a block of zeros appended: appending zeros is linear over the bits of a checksum.
static BEFORE_ZEROS: LazyLock<[[u32; 256]; 4]> = LazyLock::new(|| {
    let behind_a_zero_bit = |crc: u32, _| (crc >> 1) ^ if crc & 1 == 1 { POLYNOMIAL } else { 0 };
    let bits: [u32; 32] =
        std::array::from_fn(|bit| (0..8 * BLOCK_BYTES).fold(1 << bit, behind_a_zero_bit));
    std::array::from_fn(|byte| {
        std::array::from_fn(|value| {
            let is_set = |bit: &usize| value >> bit & 1 == 1;
            (0..8).filter(is_set).fold(0, |crc, bit| crc ^ bits[8 * byte + bit])
        })
    })
});

/// The CRC-32C of the bytes of consecutive blocks, from the checksums of each in the layout of the
/// file. That of `AB` is that of `A0`, with as many zeros as `B` has bytes, added to that of `B`.
pub(super) fn sum_of_run(sums: &[[u8; 4]]) -> u32 {
    let table = &*BEFORE_ZEROS;
    sums.iter().fold(0, |crc: u32, sum| {
        let bytes = crc.to_le_bytes().into_iter().zip(table);
        let before_zeros = bytes.fold(0, |crc, (byte, values)| crc ^ values[usize::from(byte)]);
        before_zeros ^ u32::from_le_bytes(*sum)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_has_the_checksum_of_its_bytes() {
        let bytes: Vec<u8> = (0..8 * BLOCK_BYTES).map(|at| (at.pow(2) >> 3) as u8).collect();
        let sums: Vec<[u8; 4]> = bytes
            .chunks(BLOCK_BYTES as usize)
            .map(|block| storage::crc32c(block).to_le_bytes())
            .collect();
        for end in 0..=sums.len() {
            let of_bytes = storage::crc32c(&bytes[..end * BLOCK_BYTES as usize]);
            assert_eq!(sum_of_run(&sums[..end]), of_bytes, "{end} blocks");
        }
    }
}
