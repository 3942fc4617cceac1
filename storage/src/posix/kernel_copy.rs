//! Copies between files within the kernel.

use std::fs::File;
use std::io;
use std::ops::Range;

use crate::sys::syscalls;
use crate::{Crc64, Error, Object, Profile, RangeRead, Result, Upload};

/// Large enough for direct I/O, and for the full rate of every device.
const READ_BYTES: u64 = 8 << 20;

/// Bytes per kernel request: a copy can be cancelled between two requests. A disk of 500 MB/s takes
/// half a second for one. The kernel copies 2 GiB at most; a power of two keeps the offsets
/// aligned, so that a file system that shares blocks continues to share them.
const REQUEST_BYTES: u64 = 256 << 20;

/// Interrupted calls in a row, with nothing copied between them, before the copy fails.
const RETRIES_MAX: u32 = 32;

/// Whether the kernel may copy faster than reads and writes do. A copy through the page cache is
/// not faster: on ext4 a direct copy of 2 GiB, read by one thread and written by another, took 2.5
/// to 3.5 s where `copy_file_range` took 5 to 9 s, and 0.1 s of CPU time instead of 1.3 to 2.6 s
/// (two cores, 2026-11).
pub(crate) fn may_share(profile: &Profile) -> bool {
    !(profile.direct && matches!(profile.file_system.as_str(), "ext4" | "f2fs" | "lustre"))
}

/// Copies a range of a file to a place in another within the kernel. If both are on a file system
/// that shares blocks (XFS, btrfs) and the offsets are aligned to its blocks, nothing is copied at
/// all; network file systems copy on their servers. Returns the bytes copied, from the front: fewer
/// than requested, or none, if the two files or this kernel do not support it, or if
/// `may_continue`, which is called with the bytes of each request, returns false.
///
/// # Errors
/// Errors of the system on read or write.
pub(crate) fn copy_range(
    from: &File,
    range: &Range<u64>,
    to: &File,
    to_offset: u64,
    may_continue: &dyn Fn(u64) -> bool,
) -> io::Result<u64> {
    // Without read-ahead, which is off for sample files, the copy would wait for every page.
    syscalls::advise_sequential(from);
    let outcome = copy_advised(from, range, to, to_offset, may_continue);
    syscalls::advise_random(from);
    outcome
}

fn copy_advised(
    from: &File,
    range: &Range<u64>,
    to: &File,
    to_offset: u64,
    may_continue: &dyn Fn(u64) -> bool,
) -> io::Result<u64> {
    let len = range.end - range.start;
    let (mut done, mut retries) = (0, 0);
    while done < len {
        let count = (len - done).min(REQUEST_BYTES) as usize; // fits: 256 MiB at most
        match syscalls::copy_file_range(from, range.start + done, to, to_offset + done, count) {
            // The file ends early: the fallback that reads it reports that.
            Ok(0) => break,
            Ok(count) => {
                (done, retries) = (done + count as u64, 0);
                if !may_continue(count as u64) {
                    break;
                }
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted && retries < RETRIES_MAX => {
                retries += 1;
            }
            Err(e) if is_unsupported(&e) => {
                log::debug!("copy_file_range not used; copied by reading and writing: {e}");
                break;
            }
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}

/// Whether an error means another file system, an old kernel, a missing feature, or a sandbox.
fn is_unsupported(e: &io::Error) -> bool {
    let errnos = [libc::EXDEV, libc::ENOSYS, libc::EOPNOTSUPP, libc::EINVAL, libc::EPERM];
    e.raw_os_error().is_some_and(|errno| errnos.contains(&errno))
}

/// Appends a range of an object by reading it. Two buffers of an upload and this one are in use, so
/// that the device reads while it writes.
pub(crate) fn read_and_write<U: Upload + ?Sized>(
    upload: &mut U,
    object: &dyn Object,
    range: &Range<u64>,
    crc64_expected: Option<u64>,
) -> Result<()> {
    let len = range.end.checked_sub(range.start).expect("a range that ends after its start");
    let mut buf = vec![0; len.min(READ_BYTES) as usize]; // fits: 8 MiB at most
    let mut crc = Crc64::new();
    let mut offset = range.start;
    while offset < range.end {
        let chunk = &mut buf[..(range.end - offset).min(READ_BYTES) as usize]; // fits: as above
        object.read_many(&mut [RangeRead { offset, buf: chunk }])?;
        crc.update(chunk);
        upload.write(chunk)?;
        offset += chunk.len() as u64;
    }
    match crc64_expected {
        Some(recorded) if recorded != crc.value() => Err(Error::Corrupt {
            object: object.display(),
            offset: range.start,
            found: format!("CRC-64 {:016x} of {len} bytes", crc.value()),
            expected: format!("the recorded CRC-64 {recorded:016x}"),
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read as _, Seek as _, Write as _};

    #[test]
    fn copies_a_range_to_its_offset() {
        let mut from = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..100_000_u32).map(|i| (i * 31 % 251) as u8).collect();
        from.write_all(&bytes).unwrap();
        for (range, at) in [(0..100_000, 0), (7..60_001, 3), (4096..8192, 4096), (5..5, 9)] {
            let mut to = tempfile::tempfile().unwrap();
            let done = copy_range(&from, &range, &to, at, &|_| true).unwrap();
            // A file system without support is fine; one with support must copy everything.
            assert!(done == range.end - range.start || done == 0, "{done} of {range:?}");
            let mut found = Vec::new();
            to.rewind().unwrap();
            to.read_to_end(&mut found).unwrap();
            let expected = &bytes[range.start as usize..range.end as usize];
            assert!(done == 0 || found[at as usize..] == *expected, "{range:?} to {at}");
        }
        let past = copy_range(&from, &(100_000..100_001), &from, 200_000, &|_| true);
        assert_eq!(past.unwrap(), 0, "past it");
    }
}
