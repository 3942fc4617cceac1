//! CRC-64/NVME, the checksum that S3 checks too: streaming, and combinable from parts. And the
//! CRC-32 of ZIP files, for those of others.

use crc_fast::{CrcAlgorithm, Digest};

/// A running CRC-64/NVME.
#[derive(Debug)]
pub struct Crc64(Digest);

impl Crc64 {
    /// Of no bytes yet.
    #[must_use]
    pub fn new() -> Self {
        Crc64(Digest::new(CrcAlgorithm::Crc64Nvme))
    }

    /// Goes on with more bytes.
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

/// A running CRC-32 as ZIP and gzip have it (ISO-HDLC).
#[derive(Debug)]
pub struct Crc32(Digest);

impl Crc32 {
    /// Of no bytes yet.
    #[must_use]
    pub fn new() -> Self {
        Crc32(Digest::new(CrcAlgorithm::Crc32IsoHdlc))
    }

    /// Goes on with more bytes.
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

/// The CRC-64/NVME of a slice.
#[must_use]
pub fn crc64(bytes: &[u8]) -> u64 {
    crc_fast::checksum(CrcAlgorithm::Crc64Nvme, bytes)
}

/// The checksum of `a` followed by `b`, from theirs alone.
#[must_use]
pub fn crc64_join(crc_a: u64, crc_b: u64, len_b_bytes: u64) -> u64 {
    crc_fast::checksum_combine(CrcAlgorithm::Crc64Nvme, crc_a, crc_b, len_b_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The check values in the catalogue of parametrised CRC algorithms.
    #[test]
    fn check_value() {
        assert_eq!(crc64(b"123456789"), 0xae8b_1486_0a79_9888);
        let mut sum = Crc32::new();
        sum.update(b"123456789");
        assert_eq!(sum.value(), 0xcbf4_3926);
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
}
