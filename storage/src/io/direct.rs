//! Direct reads straight into the memory of the caller.
//!
//! Direct I/O transfers whole blocks to aligned memory. If the destination has the same alignment
//! as the bytes have in their block, all but the two ends can be read in place: nothing is copied,
//! and one call can keep as much in flight as the device needs. A network drive or an NVMe needs
//! memory aligned to 4 bytes, which every tensor's is; others need 512.

use std::fs::File;
use std::ops::Range;

use crate::RangeRead;
use crate::io::batch::BatchEngine;
use crate::io::transfer::{PIECE_BYTES, Transfer, TransferError};
use crate::sys::aligned_buffer::{ALIGN_BYTES, AlignedBuffer, BUF_BYTES};

/// Reads of one call: each may need two blocks of the buffer for its ends.
pub(crate) const READS_MAX: usize = BUF_BYTES / ALIGN_BYTES / 2;

/// Whether the inner blocks of a read can be read in place.
pub(crate) fn fits(read: &RangeRead<'_>, memory_align: usize) -> bool {
    let phase = |value: usize| value % memory_align;
    // fits: less than ALIGN_BYTES
    phase(read.buf.as_ptr() as usize) == phase((read.offset % ALIGN_BYTES as u64) as usize)
}

/// Completes up to [`READS_MAX`] reads that [`fits`] has allowed.
pub(crate) fn read(
    engine: &BatchEngine,
    file: &File,
    reads: &mut [&mut RangeRead<'_>],
) -> Result<(), TransferError> {
    let mut bounce = AlignedBuffer::take();
    let mut blocks = bounce.chunks_exact_mut(ALIGN_BYTES).enumerate();
    let mut pieces = Vec::new();
    let mut ends: Vec<(Range<usize>, &mut [u8])> = Vec::new();
    for read in reads {
        let skip = (read.offset % ALIGN_BYTES as u64) as usize; // fits: less than ALIGN_BYTES
        let head_len = (skip.next_multiple_of(ALIGN_BYTES) - skip).min(read.buf.len());
        let (head, rest) = read.buf.split_at_mut(head_len);
        let (inner, tail) = rest.split_at_mut(rest.len() / ALIGN_BYTES * ALIGN_BYTES);
        let inner_offset = read.offset + head_len as u64;
        let tail_offset = inner_offset + inner.len() as u64;
        for (offset, skip, end) in [(read.offset, skip, head), (tail_offset, 0, tail)] {
            if end.is_empty() {
                continue;
            }
            let (index, block) = blocks.next().expect("two blocks for each of READS_MAX");
            let needed = skip + end.len();
            pieces.push(Transfer::read(offset - skip as u64, block).direct(ALIGN_BYTES, needed));
            let from = index * ALIGN_BYTES + skip;
            ends.push((from..from + end.len(), end));
        }
        pieces.extend(inner.chunks_mut(PIECE_BYTES).enumerate().map(|(i, chunk)| {
            let needed = chunk.len();
            Transfer::read(inner_offset + (i * PIECE_BYTES) as u64, chunk)
                .direct(ALIGN_BYTES, needed)
        }));
    }
    engine.transfer(file, &mut pieces)?;
    drop(pieces);
    for (from, end) in ends {
        end.copy_from_slice(&bounce[from]);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;
    use crate::IoEngine;
    use crate::io::uring_batch::SubmitMode;

    /// Every phase of both ends, also reads within one block, and at the file's end.
    #[test]
    fn all_bytes_are_read_to_their_place() {
        let bytes: Vec<u8> = (0..3_000_001_u32).map(|i| (i * 31 % 251) as u8).collect();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&bytes).unwrap();
        let engine = BatchEngine::new(IoEngine::Pread, SubmitMode::Inline, 1);
        let mut memory = vec![0; bytes.len() + 2 * ALIGN_BYTES];
        let aligned = memory.as_ptr().align_offset(ALIGN_BYTES);
        let memory = &mut memory[aligned..];
        for (start, end) in [
            (0, bytes.len()),
            (0, ALIGN_BYTES),
            (1, 2),
            (512, 4095),
            (4095, 4097),
            (4096, 8192),
            (5000, 2_500_000),
            (2_990_000, bytes.len()),
        ] {
            let phase = start % ALIGN_BYTES;
            let buf = &mut memory[phase..phase + (end - start)];
            buf.fill(0);
            let mut wanted = RangeRead { offset: start as u64, buf };
            assert!(fits(&wanted, ALIGN_BYTES) && fits(&wanted, 4));
            read(&engine, &file, &mut [&mut wanted]).unwrap();
            assert!(wanted.buf == &bytes[start..end], "{start}..{end}");
        }
        let odd = RangeRead { offset: 512, buf: &mut memory[4..1000] };
        assert!(fits(&odd, 4) && !fits(&odd, 512));
        let mut past = RangeRead { offset: 2_999_000, buf: &mut memory[728..9000] };
        assert!(read(&engine, &file, &mut [&mut past]).is_err(), "past the end");
    }
}
