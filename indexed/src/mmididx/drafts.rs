//! Builders that outlive their process: of drafts, which another one goes on with from where they
//! were synced. Either both files are drafts, or the tokens alone and whoever goes on can tell the
//! sequences again.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use storage::{FileEntry, Key, Storage, SyncPoint};

use crate::checksums::writer::ChecksumWriter;
use crate::mmididx::builder::{Bin, Builder, OUTLINE};
use crate::mmididx::idx::END_OF_FILE;
use crate::mmididx::length_log::{Counts, LengthLog};
use crate::{Dtype, Error, Result};

/// Where a builder of drafts was synced.
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
    /// Begins a pair of which a process that is killed loses no more than was written since
    /// [`Builder::sync`].
    ///
    /// # Errors
    /// As [`Builder::create`]; [`storage::Error::Exists`] too if there are drafts already.
    pub fn create_draft(store: &Arc<dyn Storage>, prefix: &Key, dtype: Dtype) -> Result<Self> {
        let (bin_key, idx_key) = (prefix.with_suffix(".bin")?, prefix.with_suffix(".idx")?);
        drop(store.create(&idx_key, 0)?);
        let outline_key = prefix.with_suffix(OUTLINE)?;
        let bin = store.create_resumable(&bin_key)?;
        // An outline without its tokens is what a run left that was killed when it was done.
        let cleared = store.discard(&outline_key).map_err(Error::from);
        let begun = cleared.and_then(|()| {
            let checksums = Some(ChecksumWriter::begin(store.as_ref(), prefix)?);
            Ok((LengthLog::create(store, outline_key)?, checksums))
        });
        match begun {
            Ok((outline, checksums)) => {
                let builder = Builder::new(store, prefix, dtype, Bin::Draft(bin), outline);
                Ok(Builder { checksums, ..builder })
            }
            Err(error) => {
                drop(bin);
                store.discard(&bin_key)?;
                Err(error)
            }
        }
    }

    /// Goes on from where a builder of drafts was synced.
    ///
    /// # Errors
    /// [`Error::Storage`] if the drafts are not there, or are shorter than they were, or if another
    /// process writes them.
    pub fn resume(
        store: &Arc<dyn Storage>,
        prefix: &Key,
        dtype: Dtype,
        from: &BuilderMark,
    ) -> Result<Self> {
        let BuilderMark { bin, outline, counts } = *from;
        let bin = resume_bin(store, prefix, bin)?;
        let outline = LengthLog::resume(store, prefix.with_suffix(OUTLINE)?, outline, counts)?;
        Ok(Builder::new(store, prefix, dtype, bin, outline))
    }

    /// Begins a pair of which only the tokens are kept when its process is killed: who goes on by
    /// [`Builder::resume_tokens`] can tell the sequences again. It works too where drafts cannot be
    /// read, as on object stores.
    ///
    /// # Errors
    /// As [`Builder::create_draft`].
    pub fn create_tokens(store: &Arc<dyn Storage>, prefix: &Key, dtype: Dtype) -> Result<Self> {
        drop(store.create(&prefix.with_suffix(".idx")?, 0)?);
        let checksums = Some(ChecksumWriter::begin(store.as_ref(), prefix)?);
        let bin = Bin::Draft(store.create_resumable(&prefix.with_suffix(".bin")?)?);
        let outline = LengthLog::new(store, prefix.with_suffix(OUTLINE)?);
        let builder = Builder::new(store, prefix, dtype, bin, outline);
        Ok(Builder { checksums, ..builder })
    }

    /// Goes on from where [`Builder::sync_tokens`] was. What is added from then on is what was
    /// added before: of that, sequences are told by [`Builder::add_present`], and tokens that are
    /// there are passed over.
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
        let outline = LengthLog::new(store, prefix.with_suffix(OUTLINE)?);
        let builder = Builder::new(store, prefix, dtype, bin, outline);
        Ok(Builder { present_bytes: from.bytes, ..builder })
    }

    /// Removes what builders of drafts have left of this prefix: after an end without success, and
    /// after one with success when nobody needs to resume any more.
    ///
    /// # Errors
    /// [`Error::Storage`]; [`storage::Error::Locked`] if another process writes them.
    pub fn discard_drafts(store: &dyn Storage, prefix: &Key) -> Result<()> {
        let bin_key = prefix.with_suffix(".bin")?;
        // Held until both are gone.
        let _bin = match store.resume(&bin_key, SyncPoint::default()) {
            Err(storage::Error::NotFound { .. }) => None,
            outcome => Some(outcome?),
        };
        store.discard(&bin_key)?;
        Ok(store.discard(&prefix.with_suffix(OUTLINE)?)?)
    }

    /// Whether an earlier process had finished its `.bin`, so that nothing may be added.
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
    /// If it is not a builder of drafts.
    pub fn sync(&mut self) -> Result<BuilderMark> {
        let bin = self.sync_tokens()?;
        Ok(BuilderMark { bin, outline: self.outline.sync()?, counts: self.outline.counts() })
    }

    /// Makes tokens so far durable, and says up to where: on object stores that are whole parts.
    ///
    /// # Errors
    /// [`Error::Storage`].
    ///
    /// # Panics
    /// If it is not a builder of drafts.
    pub fn sync_tokens(&mut self) -> Result<SyncPoint> {
        self.flush_at(1)?;
        match &mut self.bin {
            Bin::Draft(draft) => Ok(draft.sync()?),
            Bin::Finished(entry) => Ok(SyncPoint { bytes: entry.bytes, crc64: entry.crc64 }),
            Bin::Upload(_) => panic!("a builder that is synced is one of drafts"),
        }
    }

    /// Makes all tokens durable, after the last of them.
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

    /// Bytes of the `.bin` that are there and not told of yet.
    #[must_use]
    pub fn present_bytes(&self) -> u64 {
        self.present_bytes
    }

    /// Tells of a sequence whose tokens are all there.
    ///
    /// # Errors
    /// [`Error::SequenceTooLong`].
    ///
    /// # Panics
    /// If they are not.
    pub fn add_present(&mut self, tokens: u64) -> Result<()> {
        self.check_len(tokens)?;
        let bytes = tokens * self.dtype.item_bytes();
        assert!(bytes <= self.present_bytes, "tokens of the sequence are there");
        self.present_bytes -= bytes;
        self.push_sequence(tokens, 0)
    }
}

/// The `.bin` of a builder of drafts, from where it was synced.
fn resume_bin(store: &Arc<dyn Storage>, prefix: &Key, from: SyncPoint) -> Result<Bin> {
    let key = prefix.with_suffix(".bin")?;
    match store.resume(&key, from) {
        Ok(draft) => return Ok(Bin::Draft(draft)),
        // A process that was about to finish has come that far.
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
