//! A file of a pair whose reads are verified.

use std::sync::Arc;

use storage::{Map, Object, RangeRead};

use crate::checksums::table::{BlockChecksums, File};

/// Reads whole blocks, compares them with their checksums, and returns the requested bytes.
#[derive(Debug)]
pub(crate) struct VerifiedObject {
    inner: Arc<dyn Object>,
    file: File,
    checksums: Arc<BlockChecksums>,
}

/// The object, verified if there are checksums for an object of its length. Another length is
/// refused when the pair is checked, with the exact rule that it breaks.
pub(crate) fn verified(
    inner: &Arc<dyn Object>,
    file: File,
    checksums: Option<&Arc<BlockChecksums>>,
) -> Arc<dyn Object> {
    let inner = Arc::clone(inner);
    match checksums.filter(|checksums| checksums.len_of(file) == inner.len_bytes()) {
        Some(checksums) => {
            Arc::new(VerifiedObject { inner, file, checksums: Arc::clone(checksums) })
        }
        None => inner,
    }
}

impl VerifiedObject {
    fn verify(&self, offset: u64, bytes: &[u8]) -> storage::Result<()> {
        self.checksums.verify(self.file, &self.inner.display(), offset, bytes)
    }
}

impl Object for VerifiedObject {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read_many(&self, reads: &mut [RangeRead<'_>]) -> storage::Result<()> {
        let len = self.inner.len_bytes();
        let range = |read: &RangeRead<'_>| read.offset..read.offset + read.buf.len() as u64;
        // The inner object refuses reads beyond its end.
        if reads.iter().any(|read| range(read).end > len) {
            return self.inner.read_many(reads);
        }
        let extents: Vec<_> =
            reads.iter().map(|read| self.checksums.extent_in(self.file, range(read))).collect();
        // Whole blocks are read in place, partial blocks into a separate buffer.
        let mut beside: Vec<Vec<u8>> = (reads.iter().zip(&extents))
            .map(|(read, extent)| match range(read) == *extent {
                true => Vec::new(),
                false => vec![0; (extent.end - extent.start) as usize], // fits: two blocks more
            })
            .collect();
        let mut whole: Vec<RangeRead<'_>> = (reads.iter_mut().zip(&mut beside).zip(&extents))
            .map(|((read, beside), extent)| {
                let buf = if beside.is_empty() { &mut *read.buf } else { beside.as_mut_slice() };
                RangeRead { offset: extent.start, buf }
            })
            .collect();
        self.inner.read_many(&mut whole)?;
        for read in &mut whole {
            if self.verify(read.offset, read.buf).is_err() {
                // The error may be in memory or in the network: it is read once more.
                let (offset, buf) = (read.offset, &mut *read.buf);
                self.inner.read_many(&mut [RangeRead { offset, buf }])?;
                self.verify(read.offset, read.buf)?;
            }
        }
        for ((read, beside), extent) in reads.iter_mut().zip(&beside).zip(&extents) {
            if !beside.is_empty() {
                let from = (read.offset - extent.start) as usize; // fits: less than a block
                read.buf.copy_from_slice(&beside[from..from + read.buf.len()]);
            }
        }
        Ok(())
    }

    fn map(&self) -> storage::Result<Map> {
        self.inner.map()
    }

    fn display(&self) -> String {
        self.inner.display()
    }

    fn advise_random(&self) {
        self.inner.advise_random();
    }

    fn memory_align(&self) -> usize {
        self.inner.memory_align()
    }

    fn file(&self) -> Option<&std::fs::File> {
        self.inner.file()
    }

    fn version(&self) -> Option<String> {
        self.inner.version()
    }

    fn copied(&self, bytes: u64) -> bool {
        self.inner.copied(bytes)
    }
}
