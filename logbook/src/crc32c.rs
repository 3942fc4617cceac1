//! CRC-32C (Castagnoli) for TensorBoard's records. They have a few hundred bytes a step, so a table
//! lookup for each byte is fast enough.

/// 0x1EDC6F41 with its bits reversed, because the least significant bit is first.
const POLYNOMIAL: u32 = 0x82F6_3B78;

const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = (crc >> 1) ^ (POLYNOMIAL * (crc & 1));
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

/// The checksum of some bytes.
pub(super) fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| {
        // fits: the low byte of the sum is the index.
        (crc >> 8) ^ TABLE[usize::from(crc as u8 ^ byte)]
    })
}

/// The checksum as stored in records. A CRC of bytes that contain their own CRC is weak, so
/// TensorFlow rotates it by 15 bits and adds a constant.
pub(super) fn masked_crc32c(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xA282_EAD8)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 3720, appendix B.4, and the check value of the CRC catalogue.
    #[test]
    fn checksums_equal_published_values() {
        let up: Vec<u8> = (0..32).collect();
        let down: Vec<u8> = (0..32).rev().collect();
        for (bytes, crc) in [
            (&[0; 32][..], 0x8A91_36AA),
            (&[0xFF; 32], 0x62A8_AB43),
            (&up, 0x46DD_794E),
            (&down, 0x113F_DB5C),
            (b"123456789", 0xE306_9283),
            (b"", 0),
        ] {
            assert_eq!(crc32c(bytes), crc, "{bytes:?}");
        }
    }

    /// The values of LevelDB, which introduced the mask: unmasking must return the CRC.
    #[test]
    fn mask_is_reversible() {
        let masked = masked_crc32c(b"foo");
        assert_ne!(masked, crc32c(b"foo"));
        assert_eq!(masked.wrapping_sub(0xA282_EAD8).rotate_left(15), crc32c(b"foo"));
    }
}
