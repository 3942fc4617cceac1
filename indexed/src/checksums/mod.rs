//! Checksums of a pair by block, in a file `PREFIX.crc` beside it, so that a reader of any part of
//! the pair can verify what it reads. `FORMAT.md` has the layout.
//!
//! A block is 512 bytes, the alignment of direct reads on most disks: a verified read of a piece of
//! a sample moves no more bytes than an unverified one. The blocks of a `.bin` are counted from the
//! starts of its segments: a merged dataset has one segment for each source, whose checksums are
//! copied without reading the tokens.
//!
//! `writer` makes the file, `table` reads it, `run_sum` combines checksums of blocks in a row, and
//! `verified` is an object that verifies its reads.

mod run_sum;
pub(crate) mod table;
pub(crate) mod verified;
pub(crate) mod writer;

/// The suffix of the file.
pub(crate) const SUFFIX: &str = ".crc";

/// Bytes of a block, except the last of a segment.
pub(crate) const BLOCK_BYTES: u64 = 512;

/// The first bytes of the footer.
const MAGIC: [u8; 8] = *b"FLBLKCRC";
const VERSION: u32 = 1;
const FOOTER_BYTES: usize = 56;

/// The fixed-size end of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Footer {
    bin_bytes: u64,
    idx_bytes: u64,
    segments: u64,
    /// CRC-64/NVME of all checksums of blocks.
    sums_crc64: u64,
}

impl Footer {
    /// `segment_bytes` is the table before the footer; the checksum of the footer covers it too.
    fn encode(&self, segment_bytes: &[u8]) -> [u8; FOOTER_BYTES] {
        let mut bytes = [0; FOOTER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(BLOCK_BYTES as u32).to_le_bytes()); // fits: 512
        let fields = [self.bin_bytes, self.idx_bytes, self.segments, self.sums_crc64];
        for (field, to) in fields.iter().zip(bytes[16..48].chunks_exact_mut(8)) {
            to.copy_from_slice(&field.to_le_bytes());
        }
        let crc64 = footer_crc64(segment_bytes, &bytes);
        bytes[48..].copy_from_slice(&crc64.to_le_bytes());
        bytes
    }
}

fn footer_crc64(segment_bytes: &[u8], footer: &[u8; FOOTER_BYTES]) -> u64 {
    let mut crc64 = storage::Crc64::new();
    crc64.update(segment_bytes);
    crc64.update(&footer[..48]);
    crc64.value()
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(*bytes[at..].first_chunk().expect("the caller has checked the length"))
}
