//! CRC-64/NVME, which S3 verifies too: streaming, and combinable from parts. Also CRC-32C, for the
//! blocks of a dataset, and the CRC-32 of foreign ZIP files.

use crc_fast::{CrcAlgorithm, Digest};

/// A running CRC-64/NVME.
#[derive(Debug)]
pub struct Crc64(Digest);

impl Crc64 {
    /// The checksum of no bytes.
    #[must_use]
    pub fn new() -> Self {
        Crc64(Digest::new(CrcAlgorithm::Crc64Nvme))
    }

    /// Appends bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of all bytes so far.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.0.finalize()
    }
}

impl Default for Crc64 {
    fn default() -> Self {
        Self::new()
    }
}

/// A running CRC-32 of ZIP and gzip (ISO-HDLC).
#[derive(Debug)]
pub struct Crc32(Digest);

impl Crc32 {
    /// The checksum of no bytes.
    #[must_use]
    pub fn new() -> Self {
        Crc32(Digest::new(CrcAlgorithm::Crc32IsoHdlc))
    }

    /// Appends bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of all bytes so far.
    #[must_use]
    pub fn value(&self) -> u32 {
        self.0.finalize() as u32 // fits: 32 bits are all it has
    }
}

impl Default for Crc32 {
    fn default() -> Self {
        Self::new()
    }
}

/// A running CRC-32C (Castagnoli, RFC 3720).
#[derive(Debug)]
pub struct Crc32c(Digest);

impl Crc32c {
    /// The checksum of no bytes.
    #[must_use]
    pub fn new() -> Self {
        Crc32c(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }

    /// Appends bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of all bytes so far.
    #[must_use]
    pub fn value(&self) -> u32 {
        self.0.finalize() as u32 // fits: 32 bits are all it has
    }
}

impl Default for Crc32c {
    fn default() -> Self {
        Self::new()
    }
}

/// The CRC-32C of a slice.
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32 // fits: as above
}

/// The CRC-64/NVME of a slice.
#[must_use]
pub fn crc64(bytes: &[u8]) -> u64 {
    crc_fast::checksum(CrcAlgorithm::Crc64Nvme, bytes)
}

/// The checksum of `a` followed by `b`, from their checksums alone.
///
/// The checksum of `a` is shifted by a multiplication with `x^(8 * len_b_bytes)`, whose powers of
/// two are constants: a tenth of a microsecond for the length of a block, where the general method
/// of the checksum crate takes fifty. A checkpoint joins a hundred thousand checksums.
#[must_use]
pub fn crc64_join(crc_a: u64, crc_b: u64, len_b_bytes: u64) -> u64 {
    let mut shifted = crc_a;
    let mut remaining = len_b_bytes;
    while remaining > 0 {
        // Plus 3: a byte has eight bits.
        shifted = multiply(shifted, POWERS[remaining.trailing_zeros() as usize + 3]);
        remaining &= remaining - 1;
    }
    shifted ^ crc_b
}

/// The polynomial of CRC-64/NVME with the bits in reverse, as the checksum has them: the highest
/// bit of a number is the coefficient of `x^0`.
const POLYNOMIAL: u64 = 0x9a6c_9329_ac4b_c9b5;

/// `x^(2^n)` modulo the polynomial, for `n` up to three more than the bits of a length.
const POWERS: [u64; 67] = {
    let mut powers = [1 << 62; 67];
    let mut n = 1;
    while n < powers.len() {
        powers[n] = multiply(powers[n - 1], powers[n - 1]);
        n += 1;
    }
    powers
};

/// The product of two polynomials modulo the polynomial of the checksum.
const fn multiply(mut a: u64, mut b: u64) -> u64 {
    let mut product = 0;
    while a != 0 {
        // The coefficient of the lowest remaining power.
        if a >> 63 == 1 {
            product ^= b;
        }
        a <<= 1;
        b = (b >> 1) ^ if b & 1 == 1 { POLYNOMIAL } else { 0 };
    }
    product
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The check values in the catalogue of parametrised CRC algorithms.
    #[test]
    fn check_value() {
        assert_eq!(crc64(b"123456789"), 0xae8b_1486_0a79_9888);
        let mut crc = Crc32::new();
        crc.update(b"123456789");
        assert_eq!(crc.value(), 0xcbf4_3926);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        let mut crc = Crc32c::new();
        [&b"1234"[..], b"56789"].iter().for_each(|part| crc.update(part));
        assert_eq!(crc.value(), 0xe306_9283);
    }

    #[test]
    fn streams_and_joins() {
        let bytes: Vec<u8> = (0..10_000_u32).map(|i| (i * 31 % 251) as u8).collect();
        for split in [0, 1, 7, 4096, 9_999, 10_000] {
            let (a, b) = bytes.split_at(split);
            let mut running = Crc64::new();
            running.update(a);
            running.update(b);
            assert_eq!(running.value(), crc64(&bytes), "streamed, split at {split}");
            let joined = crc64_join(crc64(a), crc64(b), b.len() as u64);
            assert_eq!(joined, crc64(&bytes), "joined at {split}");
        }
    }

    /// Compares with the checksum crate, for lengths too large to compute in a test.
    #[test]
    fn joins_any_lengths() {
        let (a, b) = (crc64(b"a"), crc64(b"b"));
        let lengths = (0..64).flat_map(|bit| [1 << bit, (1 << bit) - 1, (1_u64 << bit) ^ 0x55]);
        for len in lengths.filter(|&len: &u64| len <= u64::MAX / 8) {
            let expected = crc_fast::checksum_combine(CrcAlgorithm::Crc64Nvme, a, b, len);
            assert_eq!(crc64_join(a, b, len), expected, "{len}");
        }
    }
}
