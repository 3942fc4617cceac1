//! Allocates ranges in anonymous files.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::format::safetensors::ALIGN_BYTES;
use crate::offload::Folder;
use crate::{Error, Result};
use storage::{InPlaceFile, RangeRead, crc64};

/// Size of the first file. Each later one is as large as all before it together, so that there are
/// few, and at most half of the space is unused.
const FILE_BYTES_MIN: u64 = 1 << 20;

/// Larger files are not created: 25 of this size are 100 GiB.
const FILE_BYTES_MAX: u64 = 4 << 30;

/// The space used in one folder. It grows with the bytes that are spilled at once, and is freed at
/// the end.
#[derive(Debug)]
pub(super) struct SpaceMap {
    folder: Folder,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    /// The last file, and the offset of its unused part.
    last: Option<(Arc<dyn InPlaceFile>, u64)>,
    /// Bytes of all files.
    bytes: u64,
    /// Free ranges that were used before, by length. Inputs of layers have few lengths, so ranges
    /// are never split or joined.
    free: HashMap<u64, Vec<FileRange>>,
}

/// A range of a file that belongs to one extent.
#[derive(Clone, Debug)]
pub(super) struct FileRange {
    file: Arc<dyn InPlaceFile>,
    offset: u64,
    len: u64,
    disk: usize,
}

impl SpaceMap {
    /// Removes orphans of killed processes in the folder, and creates the first file.
    pub(super) fn open(folder: Folder) -> Result<Self> {
        folder.store.remove_orphans(&folder.key)?;
        let file = folder.store.create_anonymous(&folder.key, FILE_BYTES_MIN)?;
        let taken = Taken { last: Some((file, 0)), bytes: FILE_BYTES_MIN, ..Taken::default() };
        Ok(SpaceMap { folder, taken: Mutex::new(taken) })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.lock().bytes
    }

    pub(super) fn name(&self) -> String {
        self.folder.to_string()
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A range of `len` bytes, whole pages, on the disk with this number.
    pub(super) fn take(&self, disk: usize, len: u64) -> Result<FileRange> {
        let mut taken = self.lock();
        if let Some(place) = taken.free.get_mut(&len).and_then(Vec::pop) {
            return Ok(place);
        }
        let has_room = |(file, rest): &(Arc<dyn InPlaceFile>, u64)| file.len_bytes() - rest >= len;
        let (file, offset) = match taken.last.take().filter(has_room) {
            Some(last) => last,
            None => {
                let file = self.grow(taken.bytes.clamp(FILE_BYTES_MIN, FILE_BYTES_MAX), len)?;
                taken.bytes += file.len_bytes();
                (file, 0)
            }
        };
        taken.last = Some((Arc::clone(&file), offset + len));
        Ok(FileRange { file, offset, len, disk })
    }

    /// A new file of `bytes` bytes, or of as many as fit on the disk, but at least `least`.
    fn grow(&self, bytes: u64, least: u64) -> Result<Arc<dyn InPlaceFile>> {
        let Folder { store, key } = &self.folder;
        let mut bytes = bytes.max(least);
        loop {
            match store.create_anonymous(key, bytes) {
                Err(storage::Error::NoSpace { .. }) if bytes > least => {
                    bytes = (bytes / 2).next_multiple_of(ALIGN_BYTES).max(least);
                }
                file => return Ok(file?),
            }
        }
    }

    pub(super) fn give(&self, place: FileRange) {
        self.lock().free.entry(place.len).or_default().push(place);
    }
}

impl FileRange {
    pub(super) fn disk(&self) -> usize {
        self.disk
    }

    /// Writes the whole range.
    pub(super) fn write(&self, bytes: &[u8]) -> Result<()> {
        Ok(self.file.write_at(self.offset, bytes)?)
    }

    /// Fills `into`, which may extend to the end of the last page, and compares the first `len`
    /// bytes of it with their checksum.
    pub(super) fn read(&self, into: &mut [u8], len: usize, expected: u64) -> Result<()> {
        let offset = self.offset;
        self.file.read_many(&mut [RangeRead { offset, buf: into }])?;
        let found = crc64(&into[..len]);
        if found == expected {
            return Ok(());
        }
        Err(Error::Corrupt {
            object: self.file.display(),
            offset,
            found: format!("CRC-64 {found:016x} of {len} bytes"),
            expected: format!("CRC-64 {expected:016x} as written"),
        })
    }
}
