//! Writing a pair of `.bin` and `.idx`, byte for byte as Megatron's writer does. `drafts` is about
//! builders whose process may be killed.

use std::sync::Arc;

use storage::{FileEntry, Key, ResumableUpload, Storage, Upload};

use crate::mmididx::dataset::for_each_chunk;
pub use crate::mmididx::drafts::BuilderMark;
use crate::mmididx::idx;
use crate::mmididx::length_log::{Counts, Event, LengthLog};
use crate::{Dtype, Error, IndexedDataset, Result};

/// Small documents are gathered to writes of this size.
const WRITE_BYTES: usize = 1 << 20;

/// The name of what the `.idx` is made from, after the prefix.
pub(super) const OUTLINE: &str = ".outline";

/// A dataset being written.
///
/// Tokens stream into the `.bin`; of each sequence two or three bytes are put by until the `.idx`
/// is written at the end, in memory while they are few. Neither file is visible before
/// [`Builder::finish`]. A builder that is dropped leaves nothing behind, unless it is one of
/// drafts: then what was synced can be gone on with.
#[derive(Debug)]
pub struct Builder {
    pub(super) store: Arc<dyn Storage>,
    pub(super) prefix: Key,
    pub(super) bin: Bin,
    /// Begun at once, or at the end if it is a builder of drafts.
    pub(super) idx: Option<Box<dyn Upload>>,
    pub(super) dtype: Dtype,
    /// Encoded tokens that wait for a write worth its while.
    pub(super) pending: Vec<u8>,
    /// Bytes of the `.bin`, after those that sequences were told of, that are there already.
    pub(super) present_bytes: u64,
    pub(super) outline: LengthLog,
    /// The mode of each sequence, if the set has modes.
    pub(super) modes: Option<Vec<i8>>,
}

#[derive(Debug)]
pub(super) enum Bin {
    Upload(Box<dyn Upload>),
    Draft(Box<dyn ResumableUpload>),
    /// An earlier process had finished it.
    Finished(FileEntry),
}

/// A finished dataset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Built {
    /// The `.bin`.
    pub bin: FileEntry,
    /// The `.idx`.
    pub idx: FileEntry,
    /// How many sequences they hold.
    pub sequences: u64,
    /// How many documents.
    pub documents: u64,
    /// How many tokens.
    pub tokens: u64,
}

impl Builder {
    /// Begins `prefix.bin` and `prefix.idx`.
    ///
    /// # Errors
    /// [`Error::Storage`] if either exists or cannot be begun; [`Error::Orphan`] if it is a `.bin`
    /// without its `.idx`.
    pub fn create(store: &Arc<dyn Storage>, prefix: &Key, dtype: Dtype) -> Result<Self> {
        let (bin_key, idx_key) = (prefix.with_suffix(".bin")?, prefix.with_suffix(".idx")?);
        // Both are begun now, so that a name that is taken shows before the work, not after it.
        let idx = store.create(&idx_key, 0)?;
        let bin = store.create(&bin_key, 0).map_err(|error| match error {
            storage::Error::Exists { object } => Error::Orphan { file: object },
            other => Error::Storage(other),
        })?;
        let outline = LengthLog::new(store, prefix.with_suffix(OUTLINE)?);
        let builder = Builder::new(store, prefix, dtype, Bin::Upload(bin), outline);
        Ok(Builder { idx: Some(idx), ..builder })
    }

    /// The type of its tokens.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Tokens so far, those of earlier processes among them.
    #[must_use]
    pub fn token_count(&self) -> u64 {
        self.outline.counts().tokens
    }

    pub(super) fn new(
        store: &Arc<dyn Storage>,
        prefix: &Key,
        dtype: Dtype,
        bin: Bin,
        outline: LengthLog,
    ) -> Self {
        let (store, prefix) = (Arc::clone(store), prefix.clone());
        let (idx, pending, present_bytes, modes) = (None, Vec::new(), 0, None);
        Builder { store, prefix, bin, idx, dtype, pending, present_bytes, outline, modes }
    }

    /// Begins a multimodal dataset, in which each sequence has a mode.
    ///
    /// # Errors
    /// As [`Builder::create`].
    pub fn create_multimodal(store: &Arc<dyn Storage>, prefix: &Key, dtype: Dtype) -> Result<Self> {
        let builder = Builder::create(store, prefix, dtype)?;
        Ok(Builder { modes: Some(Vec::new()), ..builder })
    }

    /// Appends one sequence to the current document; its mode, if the set has modes, is 0.
    ///
    /// # Errors
    /// [`Error::TokenTooBig`], [`Error::SequenceTooLong`], [`Error::Storage`].
    pub fn add_sequence(&mut self, ids: &[u32]) -> Result<()> {
        let max = self.dtype.token_max();
        if let Some(&token) = ids.iter().find(|&&id| id > max) {
            return Err(Error::TokenTooBig { file: self.file(), token, dtype: self.dtype });
        }
        self.check_len(ids.len() as u64)?;
        self.dtype.encode(ids, &mut self.pending);
        self.push_sequence(ids.len() as u64, 0)?;
        self.flush_at(WRITE_BYTES)
    }

    /// Appends one sequence with its mode, 0 for text and 1 for an image.
    ///
    /// # Errors
    /// As [`Builder::add_sequence`].
    ///
    /// # Panics
    /// If the builder is not of [`Builder::create_multimodal`].
    pub fn add_sequence_with_mode(&mut self, ids: &[u32], mode: i8) -> Result<()> {
        assert!(self.modes.is_some(), "a builder of a multimodal dataset");
        self.add_sequence(ids)?;
        if let Some(last) = self.modes.as_mut().and_then(|modes| modes.last_mut()) {
            *last = mode;
        }
        Ok(())
    }

    /// Appends sequences to the current document, tokens encoded already: little-endian, in the
    /// builder's type, back to back. `sequence_lens` are in tokens.
    ///
    /// # Errors
    /// [`Error::SequenceTooLong`], [`Error::Storage`].
    ///
    /// # Panics
    /// If the bytes are not as many as the lengths say.
    pub fn add_encoded(&mut self, bytes: &[u8], sequence_lens: &[u32]) -> Result<()> {
        let tokens: u64 = sequence_lens.iter().map(|&len| u64::from(len)).sum();
        assert_eq!(bytes.len() as u64, tokens * self.dtype.item_bytes(), "bytes of the sequences");
        for &len in sequence_lens {
            self.check_len(u64::from(len))?;
        }
        self.write_bytes(bytes)?;
        for &len in sequence_lens {
            self.push_sequence(u64::from(len), 0)?;
        }
        Ok(())
    }

    /// Appends some tokens of a sequence, encoded already, so that a long one need not be in
    /// memory.
    pub(crate) fn add_part(&mut self, bytes: &[u8]) -> Result<()> {
        self.write_bytes(bytes)
    }

    /// Ends a sequence that came in parts; its mode is dropped if the set has none.
    pub(crate) fn end_parts(&mut self, tokens: u64, mode: i8) -> Result<()> {
        self.check_len(tokens)?;
        self.push_sequence(tokens, mode)
    }

    /// Ends the current document. One without a sequence is an entry too, as Megatron's are.
    ///
    /// # Errors
    /// None today; it is fallible as its sisters are.
    pub fn end_document(&mut self) -> Result<()> {
        self.outline.end_document();
        Ok(())
    }

    /// Appends all documents of another dataset.
    ///
    /// # Errors
    /// [`Error::CannotMerge`] if its type differs, or only one of the two has modes;
    /// [`Error::UnendedDocument`] if the current document has sequences; [`Error::Storage`].
    pub fn add_dataset(&mut self, dataset: &IndexedDataset) -> Result<()> {
        self.check_ended()?;
        self.check_mergeable(dataset)?;
        for_each_chunk(dataset.bin().as_ref(), |bytes| self.write_bytes(bytes))?;
        let tables = dataset.tables();
        for document in 0..dataset.document_count() {
            let sequences = dataset.document(document);
            // fits: places in tables that are in memory
            for seq in sequences.start as usize..sequences.end as usize {
                let len = u64::from(u32::from_le_bytes(tables.lengths[seq]));
                let mode = tables.modes.get(seq).map_or(0, |&mode| i8::from_le_bytes([mode]));
                self.push_sequence(len, mode)?;
            }
            self.outline.end_document();
        }
        Ok(())
    }

    /// Writes the `.idx`, then makes both files visible, the `.idx` last. When it has returned,
    /// both are durable. A builder of drafts leaves the little that another needs to resume, until
    /// [`Builder::discard_drafts`].
    ///
    /// # Errors
    /// [`Error::UnendedDocument`], [`Error::Storage`]: neither file exists then, unless it is
    /// [`Error::LeftBehind`], which names the one that does. Only a crash between the two can leave
    /// a `.bin` alone, which [`Builder::create`] then refuses by that name. What a builder of
    /// drafts was synced with is never taken back: its `.bin` stays, and [`Builder::resume`] takes
    /// it up.
    pub fn finish(self) -> Result<Built> {
        self.check_ended()?;
        self.finish_with(Documents::AsEnded)
    }

    /// The same for sequences that are in no document, as the writers of CPM-2 and Yuan leave them:
    /// the document index is a single 0.
    ///
    /// # Errors
    /// As [`Builder::finish`].
    ///
    /// # Panics
    /// If a document was ended.
    pub fn finish_without_documents(self) -> Result<Built> {
        assert_eq!(self.outline.counts().documents, 0, "no document was ended");
        self.finish_with(Documents::None)
    }

    fn finish_with(mut self, documents: Documents) -> Result<Built> {
        self.flush_at(1)?;
        let mut idx = match self.idx.take() {
            Some(idx) => idx,
            None => self.begin_idx()?,
        };
        self.write_idx(idx.as_mut(), documents)?;
        // Both are whole by now: what can still fail is to make them durable and visible.
        let (bin, can_resume) = match self.bin {
            Bin::Upload(upload) => (upload.finish()?, false),
            Bin::Draft(draft) => (draft.finish()?, true),
            Bin::Finished(entry) => (entry, true),
        };
        let idx = match idx.finish() {
            Ok(idx) => idx,
            Err(source) if can_resume => return Err(source.into()),
            Err(source) => {
                let bin_key = self.prefix.with_suffix(".bin")?;
                return Err(match self.store.delete(&bin_key) {
                    Ok(()) => Error::Storage(source),
                    Err(cleanup) => {
                        let file = self.store.display(&bin_key);
                        let (source, cleanup) = (Box::new(source), Box::new(cleanup));
                        Error::LeftBehind { file, source, cleanup }
                    }
                });
            }
        };
        let Counts { sequences, documents, tokens, .. } = self.outline.counts();
        Ok(Built { bin, idx, sequences, documents, tokens })
    }

    /// Of a process that finished both and was killed before it could say so, the `.idx` is made
    /// again: it follows from the outline.
    fn begin_idx(&self) -> Result<Box<dyn Upload>> {
        let key = self.prefix.with_suffix(".idx")?;
        match self.store.create(&key, 0) {
            Err(storage::Error::Exists { .. }) if matches!(self.bin, Bin::Finished(_)) => {
                self.store.delete(&key)?;
                Ok(self.store.create(&key, 0)?)
            }
            outcome => Ok(outcome?),
        }
    }

    fn write_idx(&mut self, upload: &mut dyn Upload, documents: Documents) -> Result<()> {
        let counts = self.outline.counts();
        let item_bytes = self.dtype.item_bytes();
        upload.write(&idx::header(self.dtype, counts.sequences, counts.documents + 1))?;
        let mut table = idx::Table::default();
        let mut reader = self.outline.reader()?;
        while let Some(event) = reader.next()? {
            if let Event::Sequence(tokens, _) = event {
                table.push((tokens as u32).to_le_bytes(), upload)?; // fits: checked when it came
            }
        }
        table.end(upload)?;
        let mut reader = self.outline.reader()?;
        let mut pointer = 0;
        while let Some(event) = reader.next()? {
            if let Event::Sequence(tokens, _) = event {
                table.push(u64::to_le_bytes(pointer), upload)?;
                pointer += tokens * item_bytes;
            }
        }
        table.push(0_u64.to_le_bytes(), upload)?;
        if documents == Documents::AsEnded {
            let mut reader = self.outline.reader()?;
            let mut sequences = 0_u64;
            while let Some(event) = reader.next()? {
                if let Event::Sequence(..) = event {
                    sequences += 1;
                }
                if matches!(event, Event::DocumentEnd | Event::Sequence(_, true)) {
                    table.push(sequences.to_le_bytes(), upload)?;
                }
            }
        }
        table.end(upload)?;
        for mode in self.modes.iter().flatten() {
            table.push(mode.to_le_bytes(), upload)?;
        }
        table.end(upload)
    }

    pub(super) fn push_sequence(&mut self, tokens: u64, mode: i8) -> Result<()> {
        if let Some(modes) = &mut self.modes {
            modes.push(mode);
        }
        self.outline.push_sequence(tokens)
    }

    fn write_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        if bytes.len() < WRITE_BYTES {
            self.pending.extend_from_slice(bytes);
            return self.flush_at(WRITE_BYTES);
        }
        self.flush_at(1)?;
        self.put(bytes)
    }

    pub(super) fn flush_at(&mut self, pending_bytes: usize) -> Result<()> {
        if self.pending.len() >= pending_bytes {
            let mut pending = std::mem::take(&mut self.pending);
            self.put(&pending)?;
            pending.clear();
            self.pending = pending;
        }
        Ok(())
    }

    /// Writes what is not there already.
    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        let there = self.present_bytes.min(bytes.len() as u64);
        self.present_bytes -= there;
        let rest = &bytes[there as usize..]; // fits: at most their length
        if rest.is_empty() { Ok(()) } else { self.bin.write(rest) }
    }

    pub(super) fn check_len(&self, tokens: u64) -> Result<()> {
        if i32::try_from(tokens).is_err() {
            return Err(Error::SequenceTooLong { file: self.file(), tokens });
        }
        Ok(())
    }

    fn check_ended(&self) -> Result<()> {
        let counts = self.outline.counts();
        match counts.sequences - counts.sequences_ended {
            0 => Ok(()),
            sequences => Err(Error::UnendedDocument { file: self.file(), sequences }),
        }
    }

    fn check_mergeable(&self, dataset: &IndexedDataset) -> Result<()> {
        let words = |dtype: Dtype, has_modes: bool| {
            format!("{dtype} with{} modes", if has_modes { "" } else { "out" })
        };
        let found = words(dataset.dtype(), dataset.has_modes());
        let expected = words(self.dtype, self.modes.is_some());
        // A dataset without sequences looks the same with modes and without.
        let same_modes = dataset.has_modes() == self.modes.is_some();
        if dataset.dtype() == self.dtype && (same_modes || dataset.sequence_count() == 0) {
            return Ok(());
        }
        Err(Error::CannotMerge { file: dataset.display(), into: self.file(), found, expected })
    }

    fn file(&self) -> String {
        format!("{}.bin", self.store.display(&self.prefix))
    }
}

impl Bin {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match self {
            Bin::Upload(upload) => Ok(upload.write(bytes)?),
            Bin::Draft(draft) => Ok(draft.write(bytes)?),
            Bin::Finished(entry) => panic!("{} is finished, so that nothing may come", entry.path),
        }
    }
}

/// What the document index says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Documents {
    AsEnded,
    None,
}
