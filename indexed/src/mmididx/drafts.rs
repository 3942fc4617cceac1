//! Builders that survive their process. They write drafts, and another process resumes them from
//! the last sync. Either both files are drafts, or only the tokens, if the resuming process can add
//! the sequences again.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use storage::{FileEntry, Key, Storage, SyncPoint};

use crate::checksums::writer::ChecksumWriter;
use crate::mmididx::builder::{Bin, Builder, OUTLINE};
use crate::mmididx::idx::END_OF_FILE;
use crate::mmididx::length_log::{Counts, LengthLog};
use crate::{Dtype, Error, Result};

/// The sync point of a builder with drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuilderMark {
    bin: SyncPoint,
    outline: SyncPoint,
    counts: Counts,
}

impl BuilderMark {
    /// The sync points of the two drafts, each with the suffix of its name.
    #[must_use]
    pub fn sync_points(&self) -> [(&'static str, SyncPoint); 2] {
        [(".bin", self.bin), (OUTLINE, self.outline)]
    }
}

impl Builder {
    /// Creates a pair. A killed process loses only what was written since [`Builder::sync`].
    ///
    /// # Errors
    /// As [`Builder::create`]; [`storage::Error::Exists`] too if there are drafts already.
    pub fn create_draft(store: &Arc<dyn Storage>, prefix: &Key, dtype: Dtype) -> Result<Self> {
        let (bin_key, idx_key) = (prefix.with_suffix(".bin")?, prefix.with_suffix(".idx")?);
        drop(store.create(&idx_key, 0)?);
        let length_log_key = prefix.with_suffix(OUTLINE)?;
        let bin = store.create_resumable(&bin_key)?;
        // A length log without its tokens is left by a run that was killed after it had finished.
        let cleared = store.discard(&length_log_key).map_err(Error::from);
        let created = cleared.and_then(|()| {
            let checksums = Some(ChecksumWriter::begin(store.as_ref(), prefix)?);
            Ok((LengthLog::create(store, length_log_key)?, checksums))
        });
        match created {
            Ok((length_log, checksums)) => {
                let builder = Builder::new(store, prefix, dtype, Bin::Draft(bin), length_log);
                Ok(Builder { checksums, ..builder })
            }
            Err(error) => {
                drop(bin);
                store.discard(&bin_key)?;
                Err(error)
            }
        }
    }

    /// Resumes a builder with drafts from a sync point.
    ///
    /// # Errors
    /// [`Error::Storage`] if the drafts are missing, or shorter than at the sync, or if another
    /// process writes them.
    pub fn resume(
        store: &Arc<dyn Storage>,
        prefix: &Key,
        dtype: Dtype,
        from: &BuilderMark,
    ) -> Result<Self> {
        let BuilderMark { bin, outline, counts } = *from;
        let bin = resume_bin(store, prefix, bin)?;
        let length_log = LengthLog::resume(store, prefix.with_suffix(OUTLINE)?, outline, counts)?;
        Ok(Builder::new(store, prefix, dtype, bin, length_log))
    }

    /// Creates a pair of which only the tokens survive a kill of the process: the caller of
    /// [`Builder::resume_tokens`] adds the sequences again. This also works where drafts cannot be
    /// read, as on object stores.
    ///
    /// # Errors
    /// As [`Builder::create_draft`].
    pub fn create_tokens(store: &Arc<dyn Storage>, prefix: &Key, dtype: Dtype) -> Result<Self> {
        drop(store.create(&prefix.with_suffix(".idx")?, 0)?);
        let checksums = Some(ChecksumWriter::begin(store.as_ref(), prefix)?);
        let bin = Bin::Draft(store.create_resumable(&prefix.with_suffix(".bin")?)?);
        let length_log = LengthLog::new(store, prefix.with_suffix(OUTLINE)?);
        let builder = Builder::new(store, prefix, dtype, bin, length_log);
        Ok(Builder { checksums, ..builder })
    }

    /// Resumes from the sync point of [`Builder::sync_tokens`]. The caller adds the same data
    /// again: sequences with [`Builder::add_present`], and tokens that were already written are
    /// skipped.
    ///
    /// # Errors
    /// As [`Builder::resume`].
    pub fn resume_tokens(
        store: &Arc<dyn Storage>,
        prefix: &Key,
        dtype: Dtype,
        from: SyncPoint,
    ) -> Result<Self> {
        let bin = resume_bin(store, prefix, from)?;
        let length_log = LengthLog::new(store, prefix.with_suffix(OUTLINE)?);
        let builder = Builder::new(store, prefix, dtype, bin, length_log);
        Ok(Builder { present_bytes: from.bytes, ..builder })
    }

    /// Removes the drafts of this prefix: after a failure, or after a success when no process needs
    /// to resume any more.
    ///
    /// # Errors
    /// [`Error::Storage`]; [`storage::Error::Locked`] if another process writes them.
    pub fn discard_drafts(store: &dyn Storage, prefix: &Key) -> Result<()> {
        let bin_key = prefix.with_suffix(".bin")?;
        // Locked until both are deleted.
        let _bin = match store.resume(&bin_key, SyncPoint::default()) {
            Err(storage::Error::NotFound { .. }) => None,
            outcome => Some(outcome?),
        };
        store.discard(&bin_key)?;
        Ok(store.discard(&prefix.with_suffix(OUTLINE)?)?)
    }

    /// Whether an earlier process has finished its `.bin`, so that nothing may be added.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        matches!(self.bin, Bin::Finished(_))
    }

    /// Makes all documents so far durable. They are still invisible.
    ///
    /// # Errors
    /// [`Error::Storage`].
    ///
    /// # Panics
    /// If the builder has no drafts.
    pub fn sync(&mut self) -> Result<BuilderMark> {
        let bin = self.sync_tokens()?;
        Ok(BuilderMark { bin, outline: self.length_log.sync()?, counts: self.length_log.counts() })
    }

    /// Makes the tokens so far durable and returns the sync point: on object stores at a multiple
    /// of the part size.
    ///
    /// # Errors
    /// [`Error::Storage`].
    ///
    /// # Panics
    /// If the builder has no drafts.
    pub fn sync_tokens(&mut self) -> Result<SyncPoint> {
        self.flush_at(1)?;
        match &mut self.bin {
            Bin::Draft(draft) => Ok(draft.sync()?),
            Bin::Finished(entry) => Ok(SyncPoint { bytes: entry.bytes, crc64: entry.crc64 }),
            Bin::Upload(_) => panic!("only a builder with drafts is synced"),
        }
    }

    /// Makes all tokens durable, after the last was added.
    ///
    /// # Errors
    /// As [`Builder::sync_tokens`].
    ///
    /// # Panics
    /// As there.
    pub fn sync_all_tokens(&mut self) -> Result<SyncPoint> {
        self.flush_at(1)?;
        if let Bin::Draft(draft) = &mut self.bin {
            draft.flush()?;
        }
        self.sync_tokens()
    }

    /// Bytes of the `.bin` that exist and belong to no sequence yet.
    #[must_use]
    pub fn present_bytes(&self) -> u64 {
        self.present_bytes
    }

    /// Adds a sequence whose tokens are all in the `.bin`.
    ///
    /// # Errors
    /// [`Error::SequenceTooLong`].
    ///
    /// # Panics
    /// If the tokens are not there.
    pub fn add_present(&mut self, tokens: u64) -> Result<()> {
        self.check_len(tokens)?;
        let bytes = tokens * self.dtype.item_bytes();
        assert!(bytes <= self.present_bytes, "tokens of the sequence are there");
        self.present_bytes -= bytes;
        self.push_sequence(tokens, 0)
    }
}

/// The `.bin` of a builder with drafts, from its sync point.
fn resume_bin(store: &Arc<dyn Storage>, prefix: &Key, from: SyncPoint) -> Result<Bin> {
    let key = prefix.with_suffix(".bin")?;
    match store.resume(&key, from) {
        Ok(draft) => return Ok(Bin::Draft(draft)),
        // A process that was killed in `finish` may have published it.
        Err(storage::Error::NotFound { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    let object = store.open(&key)?;
    if object.len_bytes() != from.bytes {
        return Err(storage::Error::Corrupt {
            object: object.display(),
            offset: object.len_bytes(),
            found: END_OF_FILE.to_owned(),
            expected: format!("{} bytes as of its sync point", from.bytes),
        }
        .into());
    }
    let path = key.name().to_owned();
    Ok(Bin::Finished(FileEntry { path, bytes: from.bytes, crc64: from.crc64 }))
}
