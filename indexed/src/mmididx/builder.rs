//! Writes a pair of `.bin` and `.idx`, byte for byte as Megatron's writer does. `drafts` has the
//! builders that survive a kill of their process.

use std::sync::Arc;

use storage::{Crc64, FileEntry, Key, ResumableUpload, Storage, Upload};

use crate::checksums;
use crate::checksums::writer::{ChecksumWriter, IdxSums};
use crate::formats::finish_all;
use crate::mmididx::dataset::for_each_chunk;
pub use crate::mmididx::drafts::BuilderMark;
use crate::mmididx::idx;
use crate::mmididx::length_log::{Counts, Event, LengthLog};
use crate::{Dtype, Error, IndexedDataset, Result};

/// Size of the writes.
const WRITE_BYTES: usize = 1 << 20;

/// The suffix of the length log from which the `.idx` is made.
pub(super) const OUTLINE: &str = ".outline";

/// A dataset being written.
///
/// Tokens stream into the `.bin`. Two or three bytes of each sequence are retained until the `.idx`
/// is written at the end, in memory while they are few. Neither file is visible before
/// [`Builder::finish`]. A dropped builder leaves no file, unless it has drafts: these can be
/// resumed from the last sync.
#[derive(Debug)]
pub struct Builder {
    pub(super) store: Arc<dyn Storage>,
    pub(super) prefix: Key,
    pub(super) bin: Bin,
    /// Created at the start, or at the end if the builder has drafts.
    pub(super) idx: Option<Box<dyn Upload>>,
    /// Checksums of the blocks. `None` in a resumed builder, which reads its `.bin` at the end.
    pub(super) checksums: Option<ChecksumWriter>,
    pub(super) dtype: Dtype,
    /// Encoded tokens that are not written yet.
    pub(super) pending: Vec<u8>,
    /// Bytes at the end of the `.bin` that an earlier process wrote and that belong to no sequence
    /// yet.
    pub(super) present_bytes: u64,
    pub(super) length_log: LengthLog,
    /// The mode of each sequence, if the set has modes.
    pub(super) modes: Option<Vec<i8>>,
}

#[derive(Debug)]
pub(super) enum Bin {
    Upload(Box<dyn Upload>),
    Draft(Box<dyn ResumableUpload>),
    /// A `.bin` that an earlier process has finished.
    Finished(FileEntry),
}

/// A finished dataset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Built {
    /// The `.bin`.
    pub bin: FileEntry,
    /// The `.idx`.
    pub idx: FileEntry,
    /// The `.crc`: checksums of both by block.
    pub crc: FileEntry,
    /// Number of sequences.
    pub sequences: u64,
    /// Number of documents.
    pub documents: u64,
    /// Number of tokens.
    pub tokens: u64,
}

impl Built {
    /// All files, in the order in which a manifest lists them.
    #[must_use]
    pub fn files(&self) -> [FileEntry; 3] {
        [&self.bin, &self.idx, &self.crc].map(FileEntry::clone)
    }
}

impl Builder {
    /// Creates `prefix.bin`, `prefix.idx` and `prefix.crc`.
    ///
    /// # Errors
    /// [`Error::Storage`] if one of them exists or cannot be created; [`Error::Orphan`] if it is a
    /// `.bin` without its `.idx`.
    pub fn create(store: &Arc<dyn Storage>, prefix: &Key, dtype: Dtype) -> Result<Self> {
        let (bin_key, idx_key) = (prefix.with_suffix(".bin")?, prefix.with_suffix(".idx")?);
        // All are created now, so that an existing name is refused before the work, not after it.
        let idx = store.create(&idx_key, 0)?;
        let bin = store.create(&bin_key, 0).map_err(|error| match error {
            storage::Error::Exists { object } => Error::Orphan { file: object },
            other => Error::Storage(other),
        })?;
        let checksums = ChecksumWriter::begin(store.as_ref(), prefix)?;
        let length_log = LengthLog::new(store, prefix.with_suffix(OUTLINE)?);
        let builder = Builder::new(store, prefix, dtype, Bin::Upload(bin), length_log);
        Ok(Builder { idx: Some(idx), checksums: Some(checksums), ..builder })
    }

    /// The type of its tokens.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Tokens so far, including those of earlier processes.
    #[must_use]
    pub fn token_count(&self) -> u64 {
        self.length_log.counts().tokens
    }

    pub(super) fn new(
        store: &Arc<dyn Storage>,
        prefix: &Key,
        dtype: Dtype,
        bin: Bin,
        length_log: LengthLog,
    ) -> Self {
        let (store, prefix) = (Arc::clone(store), prefix.clone());
        Builder {
            store,
            prefix,
            bin,
            idx: None,
            checksums: None,
            dtype,
            pending: Vec::new(),
            present_bytes: 0,
            length_log,
            modes: None,
        }
    }

    /// Creates a multimodal dataset, in which each sequence has a mode.
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

    /// Appends sequences of encoded tokens to the current document: little-endian, in the builder's
    /// type, back to back. `sequence_lens` are in tokens.
    ///
    /// # Errors
    /// [`Error::SequenceTooLong`], [`Error::Storage`].
    ///
    /// # Panics
    /// If the number of bytes does not match the lengths.
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

    /// Appends encoded tokens of a part of a sequence, so that a long one need not be in memory.
    pub(crate) fn add_part(&mut self, bytes: &[u8]) -> Result<()> {
        self.write_bytes(bytes)
    }

    /// Ends a sequence that was added in parts; its mode is ignored if the set has no modes.
    pub(crate) fn end_parts(&mut self, tokens: u64, mode: i8) -> Result<()> {
        self.check_len(tokens)?;
        self.push_sequence(tokens, mode)
    }

    /// Ends the current document. A document without a sequence is an entry too, as in Megatron.
    ///
    /// # Errors
    /// None today; it is fallible like the other methods.
    pub fn end_document(&mut self) -> Result<()> {
        self.length_log.end_document();
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
            // fits: indexes of tables in memory
            for seq in sequences.start as usize..sequences.end as usize {
                let len = u64::from(u32::from_le_bytes(tables.lengths[seq]));
                let mode = tables.modes.get(seq).map_or(0, |&mode| i8::from_le_bytes([mode]));
                self.push_sequence(len, mode)?;
            }
            self.length_log.end_document();
        }
        Ok(())
    }

    /// Writes the `.idx` and the `.crc`, then makes all files visible, the `.idx` last. When it
    /// returns, all are durable. A builder with drafts leaves what a resume needs until
    /// [`Builder::discard_drafts`].
    ///
    /// # Errors
    /// [`Error::UnendedDocument`], [`Error::Storage`]: no file exists then, unless it is
    /// [`Error::LeftBehind`], which names the file that does. Only a crash between them can leave a
    /// `.bin` alone, which [`Builder::create`] then refuses by name. Synced data of a builder with
    /// drafts is never rolled back: its `.bin` remains, and [`Builder::resume`] continues it.
    pub fn finish(self) -> Result<Built> {
        self.check_ended()?;
        self.finish_with(Documents::AsEnded)
    }

    /// The same for sequences in no document, as in the files of CPM-2 and Yuan: the document index
    /// is a single 0.
    ///
    /// # Errors
    /// As [`Builder::finish`].
    ///
    /// # Panics
    /// If a document was ended.
    pub fn finish_without_documents(self) -> Result<Built> {
        assert_eq!(self.length_log.counts().documents, 0, "no document was ended");
        self.finish_with(Documents::None)
    }

    fn finish_with(mut self, documents: Documents) -> Result<Built> {
        self.flush_at(1)?;
        let is_finished = matches!(self.bin, Bin::Finished(_));
        let (store, prefix) = (Arc::clone(&self.store), self.prefix.clone());
        let idx_key = prefix.with_suffix(".idx")?;
        let mut idx = match self.idx.take() {
            Some(idx) => idx,
            None => begin(&*store, &idx_key, is_finished, || Ok(store.create(&idx_key, 0)?))?,
        };
        let idx_sums = self.write_idx(idx.as_mut(), documents)?;
        let Counts { sequences, documents, tokens, .. } = self.length_log.counts();
        let crc = match self.checksums.take() {
            Some(checksums) => Ok(checksums.end(idx_sums)?),
            None => Err(idx_sums),
        };
        // All are complete now; only making them durable and visible can still fail.
        let (bin, can_resume) = match self.bin {
            Bin::Upload(upload) => (upload.finish()?, false),
            Bin::Draft(draft) => (draft.finish()?, true),
            Bin::Finished(entry) => (entry, true),
        };
        let crc = crc.or_else(|idx_sums| {
            let key = prefix.with_suffix(checksums::SUFFIX)?;
            let again = || sum_again(&*store, &prefix, &bin);
            begin(&*store, &key, is_finished, again)?.end(idx_sums)
        });
        let others = match crc.and_then(|crc| finish_all(&*store, vec![crc, (idx_key, idx)])) {
            Ok(others) => others,
            Err(error) if can_resume => return Err(error),
            Err(error) => return Err(take_back(&*store, &prefix.with_suffix(".bin")?, error)),
        };
        let [crc, idx] = <[_; 2]>::try_from(others).expect("two were finished");
        Ok(Built { bin, idx, crc, sequences, documents, tokens })
    }

    fn write_idx(&mut self, upload: &mut dyn Upload, documents: Documents) -> Result<IdxSums> {
        let counts = self.length_log.counts();
        let item_bytes = self.dtype.item_bytes();
        let mut table = idx::Table::default();
        table.push(idx::header(self.dtype, counts.sequences, counts.documents + 1), upload)?;
        let mut reader = self.length_log.reader()?;
        while let Some(event) = reader.next()? {
            if let Event::Sequence(tokens, _) = event {
                table.push((tokens as u32).to_le_bytes(), upload)?; // fits: checked on add
            }
        }
        let mut reader = self.length_log.reader()?;
        let mut pointer = 0;
        while let Some(event) = reader.next()? {
            if let Event::Sequence(tokens, _) = event {
                table.push(u64::to_le_bytes(pointer), upload)?;
                pointer += tokens * item_bytes;
            }
        }
        table.push(0_u64.to_le_bytes(), upload)?;
        if documents == Documents::AsEnded {
            let mut reader = self.length_log.reader()?;
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
        for mode in self.modes.iter().flatten() {
            table.push(mode.to_le_bytes(), upload)?;
        }
        table.end(upload)?;
        Ok(table.sums)
    }

    pub(super) fn push_sequence(&mut self, tokens: u64, mode: i8) -> Result<()> {
        if let Some(modes) = &mut self.modes {
            modes.push(mode);
        }
        self.length_log.push_sequence(tokens)
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

    /// Writes the bytes that an earlier process has not written.
    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        let there = self.present_bytes.min(bytes.len() as u64);
        self.present_bytes -= there;
        let rest = &bytes[there as usize..]; // fits: at most their length
        if rest.is_empty() {
            return Ok(());
        }
        self.bin.write(rest)?;
        self.checksums.as_mut().map_or(Ok(()), |checksums| checksums.bin(rest))
    }

    pub(super) fn check_len(&self, tokens: u64) -> Result<()> {
        if i32::try_from(tokens).is_err() {
            return Err(Error::SequenceTooLong { file: self.file(), tokens });
        }
        Ok(())
    }

    fn check_ended(&self) -> Result<()> {
        let counts = self.length_log.counts();
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
        // A dataset without sequences has the same bytes with and without modes.
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
            Bin::Finished(entry) => panic!("{} is finished and takes no more data", entry.path),
        }
    }
}

/// Deletes a `.bin` whose `.crc` or `.idx` failed.
fn take_back(store: &dyn Storage, bin_key: &Key, error: Error) -> Error {
    let Err(cleanup) = store.delete(bin_key) else { return error };
    let source = match error {
        Error::Storage(source) => Box::new(source),
        Error::LeftBehind { source, .. } => source,
        other => return other,
    };
    Error::LeftBehind { file: store.display(bin_key), source, cleanup: Box::new(cleanup) }
}

/// Creates a file beside a `.bin`. An earlier process that finished the `.bin` may have finished
/// this file too before it was killed; the file is then deleted and written again.
fn begin<T>(
    store: &dyn Storage,
    key: &Key,
    is_finished: bool,
    create: impl Fn() -> Result<T>,
) -> Result<T> {
    match create() {
        Err(Error::Storage(storage::Error::Exists { .. })) if is_finished => {
            store.delete(key)?;
            create()
        }
        outcome => outcome,
    }
}

/// The checksums of a finished `.bin` that several processes have written, from its bytes. These
/// must be the bytes that were written, because a draft may have been damaged since.
fn sum_again(store: &dyn Storage, prefix: &Key, bin: &FileEntry) -> Result<ChecksumWriter> {
    let mut checksums = ChecksumWriter::begin(store, prefix)?;
    let object = store.open(&prefix.with_suffix(".bin")?)?;
    let mut sum = Crc64::new();
    for_each_chunk(object.as_ref(), |bytes| {
        sum.update(bytes);
        checksums.bin(bytes)
    })?;
    if sum.value() != bin.crc64 {
        return Err(Error::Storage(storage::Error::Corrupt {
            object: object.display(),
            offset: 0,
            found: format!("CRC-64 {:016x} of {} bytes", sum.value(), object.len_bytes()),
            expected: format!(
                "CRC-64 {:016x} as written (hint: it was corrupted after the run was \
                 interrupted; delete it and start from scratch)",
                bin.crc64
            ),
        }));
    }
    Ok(checksums)
}

/// The content of the document index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Documents {
    AsEnded,
    None,
}
