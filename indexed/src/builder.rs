//! Writing a pair of `.bin` and `.idx`, byte for byte as Megatron's writer does.

use std::sync::Arc;

use storage::{FileEntry, Key, Storage, Upload};

use crate::compact::Compact;
use crate::dataset::for_each_chunk;
use crate::{Dtype, Error, IndexedDataset, Result, idx};

/// Small documents are gathered to writes of this size.
const WRITE_BYTES: usize = 1 << 20;

/// A dataset being written.
///
/// Tokens stream into the `.bin`; of each sequence two or three bytes stay in memory until the
/// `.idx` is written at the end. Neither file is visible before [`Builder::finish`], and a builder
/// that is dropped leaves nothing behind.
#[derive(Debug)]
pub struct Builder {
    store: Arc<dyn Storage>,
    bin_key: Key,
    bin: Box<dyn Upload>,
    idx: Box<dyn Upload>,
    dtype: Dtype,
    /// Encoded tokens that wait for a write worth its while.
    pending: Vec<u8>,
    /// Tokens of each sequence.
    lengths: Compact,
    /// Sequences of each document.
    documents: Compact,
    /// The mode of each sequence, if the set has modes.
    modes: Option<Vec<i8>>,
    /// Sequences that ended documents hold.
    sequences_ended: u64,
    tokens: u64,
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
            storage::Error::Exists { what } => Error::Orphan { file: what },
            other => Error::Storage(other),
        })?;
        Ok(Builder {
            store: Arc::clone(store),
            bin_key,
            bin,
            idx,
            dtype,
            pending: Vec::new(),
            lengths: Compact::default(),
            documents: Compact::default(),
            modes: None,
            sequences_ended: 0,
            tokens: 0,
        })
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
        self.push_sequence(ids.len() as u64, 0);
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
            self.push_sequence(u64::from(len), 0);
        }
        Ok(())
    }

    /// Ends the current document. One without a sequence is an entry too, as Megatron's are.
    ///
    /// # Errors
    /// None today; it is fallible as its sisters are.
    pub fn end_document(&mut self) -> Result<()> {
        self.documents.push(self.lengths.count() - self.sequences_ended);
        self.sequences_ended = self.lengths.count();
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
        for (seq, len) in tables.lengths.iter().enumerate() {
            let mode = tables.modes.get(seq).map_or(0, |&mode| i8::from_le_bytes([mode]));
            self.push_sequence(u64::from(u32::from_le_bytes(*len)), mode);
        }
        for document in 0..dataset.document_count() {
            let sequences = dataset.document(document);
            self.documents.push(sequences.end - sequences.start);
        }
        self.sequences_ended = self.lengths.count();
        Ok(())
    }

    /// Writes the `.idx`, then makes both files visible, the `.idx` last. When it has returned,
    /// both are durable.
    ///
    /// # Errors
    /// [`Error::UnendedDocument`], [`Error::Storage`]: neither file exists then, unless it is
    /// [`Error::LeftBehind`], which names the one that does. Only a crash between the two can leave
    /// a `.bin` alone, which [`Builder::create`] then refuses by that name.
    pub fn finish(self) -> Result<Built> {
        self.check_ended()?;
        self.publish()
    }

    /// As [`Builder::finish`], for sequences that are of no document: the table of documents then
    /// holds its first entry alone, as CPM-2's and Yuan's writers leave it. Megatron refuses such
    /// files.
    ///
    /// # Errors
    /// As [`Builder::finish`].
    ///
    /// # Panics
    /// If a document was ended.
    pub fn finish_without_documents(self) -> Result<Built> {
        assert_eq!(self.documents.count(), 0, "documents of a set without documents");
        self.publish()
    }

    fn publish(mut self) -> Result<Built> {
        self.flush_at(1)?;
        self.write_idx()?;
        // Both are whole by now: what can still fail is to make them durable and visible.
        let bin = self.bin.finish()?;
        let idx = match self.idx.finish() {
            Ok(idx) => idx,
            Err(source) => {
                return Err(match self.store.delete(&self.bin_key) {
                    Ok(()) => Error::Storage(source),
                    Err(cleanup) => {
                        let file = self.store.display(&self.bin_key);
                        let (source, cleanup) = (Box::new(source), Box::new(cleanup));
                        Error::LeftBehind { file, source, cleanup }
                    }
                });
            }
        };
        let (sequences, documents) = (self.lengths.count(), self.documents.count());
        Ok(Built { bin, idx, sequences, documents, tokens: self.tokens })
    }

    fn write_idx(&mut self) -> Result<()> {
        let upload = self.idx.as_mut();
        upload.write(&idx::header(self.dtype, self.lengths.count(), self.documents.count() + 1))?;
        idx::write_table(upload, self.lengths.iter().map(|len| (len as u32).to_le_bytes()))?;
        let item_bytes = self.dtype.item_bytes();
        let pointers = running_sum(self.lengths.iter().map(|len| len * item_bytes));
        idx::write_table(upload, pointers.map(u64::to_le_bytes))?;
        let documents = running_sum(self.documents.iter()).chain([self.sequences_ended]);
        idx::write_table(upload, documents.map(u64::to_le_bytes))?;
        idx::write_table(upload, self.modes.iter().flatten().map(|mode| mode.to_le_bytes()))
    }

    fn push_sequence(&mut self, tokens: u64, mode: i8) {
        self.lengths.push(tokens);
        self.tokens += tokens;
        if let Some(modes) = &mut self.modes {
            modes.push(mode);
        }
    }

    fn write_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        if bytes.len() < WRITE_BYTES {
            self.pending.extend_from_slice(bytes);
            return self.flush_at(WRITE_BYTES);
        }
        self.flush_at(1)?;
        Ok(self.bin.write(bytes)?)
    }

    fn flush_at(&mut self, pending_bytes: usize) -> Result<()> {
        if self.pending.len() >= pending_bytes {
            self.bin.write(&self.pending)?;
            self.pending.clear();
        }
        Ok(())
    }

    fn check_len(&self, tokens: u64) -> Result<()> {
        if i32::try_from(tokens).is_err() {
            return Err(Error::SequenceTooLong { file: self.file(), tokens });
        }
        Ok(())
    }

    fn check_ended(&self) -> Result<()> {
        match self.lengths.count() - self.sequences_ended {
            0 => Ok(()),
            sequences => Err(Error::UnendedDocument { file: self.file(), sequences }),
        }
    }

    fn check_mergeable(&self, dataset: &IndexedDataset) -> Result<()> {
        let words = |dtype: Dtype, has_modes: bool| {
            format!("{dtype} with{} modes", if has_modes { "" } else { "out" })
        };
        let got = words(dataset.dtype(), dataset.has_modes());
        let due = words(self.dtype, self.modes.is_some());
        // A dataset without sequences looks the same with modes and without.
        let same_modes = dataset.has_modes() == self.modes.is_some();
        if dataset.dtype() == self.dtype && (same_modes || dataset.sequence_count() == 0) {
            return Ok(());
        }
        Err(Error::CannotMerge { file: dataset.display(), into: self.file(), got, due })
    }

    fn file(&self) -> String {
        self.store.display(&self.bin_key)
    }
}

/// The sum before each item.
fn running_sum(items: impl Iterator<Item = u64>) -> impl Iterator<Item = u64> {
    items.scan(0, |sum, item| {
        let before = *sum;
        *sum += item;
        Some(before)
    })
}
