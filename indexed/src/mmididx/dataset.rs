//! Reads a pair of `.bin` and `.idx`.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use storage::{Crc64, Key, Map, Object, RangeRead, Storage};

use crate::checksums::table::{BlockChecksums, File};
use crate::checksums::verified::verified;
use crate::mmididx::idx::{HEADER_BYTES, I32Le, Layout, Tables, end_at, malformed};
use crate::mmididx::similar::no_dataset;
use crate::mmididx::sparse_table::Sparse;
use crate::{Dtype, Error, FormatRule, Result};

/// 8 MiB reads keep every device busy and cost one buffer.
pub(crate) const READ_BYTES: u64 = 8 << 20;

/// A dataset of Megatron: sequences of tokens in a `.bin`, and in an `.idx` where they and the
/// documents start.
///
/// The index is mapped, so it takes no memory beyond the page cache; the tokens are read through
/// [`Object::read_many`], never mapped.
#[derive(Debug)]
pub struct IndexedDataset {
    store: Arc<dyn Storage>,
    prefix: Key,
    display: String,
    /// Verified as it is read, if there are checksums.
    bin: Arc<dyn Object>,
    checksums: Option<Arc<BlockChecksums>>,
    idx_object: Arc<dyn Object>,
    idx: Map,
    sparse: Sparse,
    layout: Layout,
    bin_bytes: u64,
    /// Set once every entry of the index was checked.
    checked: OnceLock<()>,
}

/// Counts and checksums of a dataset that [`IndexedDataset::check`] has read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckReport {
    /// Sequences.
    pub sequences: u64,
    /// Sequences without a token.
    pub sequences_empty: u64,
    /// Tokens of the longest sequence.
    pub sequence_len_max: u32,
    /// Documents.
    pub documents: u64,
    /// Documents without a sequence.
    pub documents_empty: u64,
    /// Tokens.
    pub tokens: u64,
    /// The smallest and the largest id, if there are tokens and they are integers.
    pub token_range: Option<(i64, i64)>,
    /// Bytes of the `.bin`.
    pub bin_bytes: u64,
    /// CRC-64/NVME of the `.bin`.
    pub bin_crc64: u64,
    /// Bytes of the `.idx`.
    pub idx_bytes: u64,
    /// CRC-64/NVME of the `.idx`.
    pub idx_crc64: u64,
}

impl IndexedDataset {
    /// Opens `prefix.bin` and `prefix.idx`, and checks every entry of the index in one pass, so
    /// that no later call can reach outside the files.
    ///
    /// # Errors
    /// [`Error::NoDataset`] with similar prefixes that have a dataset; [`Error::Malformed`] with
    /// the [`FormatRule`], the file and the byte; [`Error::Storage`].
    pub fn open(store: &Arc<dyn Storage>, prefix: &Key) -> Result<Self> {
        let dataset = Self::open_files(store, prefix)?;
        let bin_bytes = dataset.check_all_tables()?;
        Ok(IndexedDataset { bin_bytes, checked: OnceLock::from(()), ..dataset })
    }

    /// As [`Self::open`], of elements that are read as ids.
    ///
    /// # Errors
    /// Also [`Error::OtherKind`] and [`Error::NotTokens`] for floating-point elements.
    pub fn open_tokens(store: &Arc<dyn Storage>, prefix: &Key) -> Result<Self> {
        let dataset = Self::open(store, prefix)?;
        dataset.dtype().expect_ids(&dataset.idx_object.display())?;
        Ok(dataset)
    }

    /// Opens both files and reads only the header of the index and the ends of its tables: a
    /// hundred million documents are open in a millisecond. [`Self::check_tables`] checks the other
    /// entries. The indexes of this crate call it unless the seal of their cache matches this file.
    /// Until then, what this type returns for single sequences is unchecked.
    ///
    /// # Errors
    /// As [`Self::open_tokens`], for what is read.
    pub fn open_ready(store: &Arc<dyn Storage>, prefix: &Key) -> Result<Self> {
        let dataset = Self::open_files(store, prefix)?;
        let file = dataset.idx_object.display();
        dataset.dtype().expect_ids(&file)?;
        let bin_bytes = dataset.tables().check_ends(dataset.dtype().item_bytes(), &file)?;
        check_bin_len(dataset.bin.as_ref(), bin_bytes, &file)?;
        dataset.check_lengths()?;
        dataset.sparse.set(true);
        Ok(IndexedDataset { bin_bytes, ..dataset })
    }

    /// Opens both files and reads the header.
    fn open_files(store: &Arc<dyn Storage>, prefix: &Key) -> Result<Self> {
        let open = |suffix| match store.open(&prefix.with_suffix(suffix)?) {
            Err(storage::Error::NotFound { .. }) => Err(no_dataset(&**store, prefix)),
            opened => Ok(opened?),
        };
        let (idx_object, bin) = (open(".idx")?, open(".bin")?);
        // An empty file cannot be mapped, and is too short for a header.
        let is_empty = idx_object.len_bytes() == 0;
        let idx = if is_empty { Map::owned(Vec::new()) } else { idx_object.map()? };
        idx.expect_random_reads();
        let mut layout = Layout::parse(&idx, &idx_object.display())?;
        layout.dtype = dtype_of(&layout, &layout.tables(&idx), bin.as_ref(), &*idx_object)?;
        let checksums = BlockChecksums::open(store.as_ref(), prefix)?;
        let (prefix, display) = (prefix.clone(), store.display(prefix));
        Ok(IndexedDataset {
            store: Arc::clone(store),
            prefix,
            display,
            bin_bytes: bin.len_bytes(),
            bin: verified(&bin, File::Bin, checksums.as_ref()),
            checksums,
            sparse: Sparse::of(&idx_object),
            idx_object,
            idx,
            layout,
            checked: OnceLock::new(),
        })
    }

    /// Checks every entry of the index in one pass, the first time it is called.
    ///
    /// # Errors
    /// [`Error::Malformed`] with the [`FormatRule`], the file and the byte.
    pub fn check_tables(&self) -> Result<()> {
        if self.checked.get().is_none() {
            self.check_all_tables()?;
            // Another thread that was faster has the same result.
            _ = self.checked.set(());
        }
        Ok(())
    }

    fn check_all_tables(&self) -> Result<u64> {
        let file = self.idx_object.display();
        self.idx.expect_sequential_reads();
        self.sparse.set(false);
        let item_bytes = self.dtype().item_bytes();
        // A broken rule is a better message than a checksum, so a wrong checksum is reported last.
        let damage = RefCell::new(Ok(()));
        let bin_bytes = self.tables().check(item_bytes, &file, |bytes| {
            let mut damage = damage.borrow_mut();
            if damage.is_ok() {
                *damage = self.verify_idx(&bytes);
            }
            self.idx.forget(bytes);
        })?;
        self.idx.expect_random_reads();
        check_bin_len(self.bin.as_ref(), bin_bytes, &file)?;
        self.check_lengths()?;
        damage.into_inner()?;
        let modes_at = self.idx.len() - self.tables().modes.len();
        self.verify_idx(&(modes_at..self.idx.len()))?;
        Ok(bin_bytes)
    }

    /// Compares the blocks of a range of the `.idx` with their checksums, if there are any.
    fn verify_idx(&self, range: &Range<usize>) -> Result<()> {
        let len = self.idx.len() as u64;
        let Some(checksums) = self.checksums.as_ref().filter(|it| it.len_of(File::Idx) == len)
        else {
            return Ok(());
        };
        let extent = checksums.extent_in(File::Idx, range.start as u64..range.end as u64);
        let bytes = &self.idx[extent.start as usize..extent.end as usize]; // fits: it is mapped
        Ok(checksums.verify(File::Idx, &self.idx_object.display(), extent.start, bytes)?)
    }

    fn check_lengths(&self) -> Result<()> {
        match &self.checksums {
            Some(checksums) => checksums.check_lengths(&*self.bin, &*self.idx_object),
            None => Ok(()),
        }
    }

    /// The type of its tokens.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.layout.dtype
    }

    /// How many sequences it has.
    #[must_use]
    pub fn sequence_count(&self) -> u64 {
        self.layout.sequences as u64
    }

    /// How many documents it has.
    #[must_use]
    pub fn document_count(&self) -> u64 {
        self.layout.document_index_len as u64 - 1
    }

    /// How many tokens it has.
    #[must_use]
    pub fn token_count(&self) -> u64 {
        self.bin_bytes / self.layout.dtype.item_bytes()
    }

    /// Tokens of a sequence.
    ///
    /// # Panics
    /// If there is no such sequence.
    #[must_use]
    pub fn sequence_len(&self, seq: u64) -> u32 {
        u32::from_le_bytes(self.tables().lengths[seq as usize]) // fits: 64 bits
    }

    /// Where a sequence starts in the `.bin`, and its tokens, from the pointers alone. A range
    /// outside the `.bin` is an error, which cannot happen once the tables are checked.
    ///
    /// # Errors
    /// [`Error::BadPlace`]; [`Error::Storage`] if the table cannot be read.
    ///
    /// # Panics
    /// If there is no such sequence.
    #[inline]
    pub(crate) fn span(&self, seq: u64) -> Result<(u64, u64)> {
        let pointers = self.tables().pointers;
        let place = seq as usize; // fits: 64 bits
        let count = (pointers.len() - place).min(2); // one, if it is the last
        let mut buf = [[0; 8]; 2];
        let at = self.layout.pointers_at() + 8 * seq;
        let pair = match self.sparse.read(at, buf[..count].as_flattened_mut())? {
            true => &buf[..count],
            false => &pointers[place..place + count],
        };
        let start = u64::from_le_bytes(pair[0]);
        let end = pair.get(1).map_or(self.bin_bytes, |end| u64::from_le_bytes(*end));
        let item_bytes = self.layout.dtype.item_bytes();
        if start > end || end > self.bin_bytes || (end - start) >> 31 > item_bytes {
            let table = "table of the .idx";
            return Err(Error::BadPlace {
                file: self.display(),
                table,
                place: seq,
                found: start as i64,
            });
        }
        Ok((start, (end - start) / item_bytes))
    }

    /// Where a sequence starts in the `.bin`.
    ///
    /// # Panics
    /// If there is no such sequence.
    #[must_use]
    pub fn sequence_offset_bytes(&self, seq: u64) -> u64 {
        u64::from_le_bytes(self.tables().pointers[seq as usize]) // fits: 64 bits
    }

    /// The sequences of a document; none if it is empty.
    ///
    /// # Panics
    /// If there is no such document.
    #[must_use]
    pub fn document(&self, document: u64) -> Range<u64> {
        let documents = self.tables().documents;
        let at = document as usize; // fits: 64 bits
        u64::from_le_bytes(documents[at])..u64::from_le_bytes(documents[at + 1])
    }

    /// The checksums of its blocks, if it has any.
    #[must_use]
    pub fn checksums(&self) -> Option<&Arc<BlockChecksums>> {
        self.checksums.as_ref()
    }

    /// The `.bin`. If there are checksums, its reads are verified.
    #[must_use]
    pub fn bin(&self) -> &Arc<dyn Object> {
        &self.bin
    }

    /// The store that both files are in.
    #[must_use]
    pub fn store(&self) -> &Arc<dyn Storage> {
        &self.store
    }

    /// The key of both files without their suffix.
    #[must_use]
    pub fn prefix(&self) -> &Key {
        &self.prefix
    }

    /// The name of this dataset in messages: the full path or URL of its prefix.
    #[must_use]
    pub fn display(&self) -> String {
        self.display.clone()
    }

    /// Whether each sequence has a mode, as in multimodal sets.
    #[must_use]
    pub fn has_modes(&self) -> bool {
        self.layout.has_modes
    }

    /// The mode of a sequence, 0 for text and 1 for an image; `None` if the set has no modes.
    ///
    /// # Panics
    /// If it has modes, but there is no such sequence.
    #[must_use]
    pub fn sequence_mode(&self, seq: u64) -> Option<i8> {
        let modes = self.tables().modes;
        self.has_modes().then(|| i8::from_le_bytes([modes[seq as usize]])) // fits: 64 bits
    }

    /// The tokens of a sequence, read in one request.
    ///
    /// # Errors
    /// [`Error::NotTokens`] for floating-point elements; [`Error::Storage`].
    ///
    /// # Panics
    /// If there is no such sequence.
    pub fn read_sequence(&self, seq: u64) -> Result<Vec<i64>> {
        let dtype = self.dtype();
        if !dtype.is_integer() {
            return Err(Error::NotTokens { file: self.display(), dtype });
        }
        let len = self.sequence_len(seq) as usize; // fits: 32 bits
        let mut bytes = vec![0; len * dtype.item_bytes() as usize]; // bounded by the `.bin`
        let offset = self.sequence_offset_bytes(seq);
        self.bin.read_many(&mut [RangeRead { offset, buf: &mut bytes }])?;
        let mut tokens = vec![0; len];
        dtype.decode_i64(&bytes, &mut tokens);
        Ok(tokens)
    }

    /// Reads everything: computes the checksums of both files and the range of the ids. Everything
    /// that [`Self::open`] checks is checked first.
    ///
    /// # Errors
    /// [`Error::Storage`] if a byte cannot be read.
    pub fn check(&self) -> Result<CheckReport> {
        let (bin_crc64, token_range) = self.scan_bin()?;
        let tables = self.tables();
        let lengths = || tables.lengths.iter().map(|len| u32::from_le_bytes(*len));
        let pairs = tables.documents.iter().zip(&tables.documents[1..]);
        Ok(CheckReport {
            sequences: self.sequence_count(),
            sequences_empty: lengths().filter(|&len| len == 0).count() as u64,
            sequence_len_max: lengths().max().unwrap_or(0),
            documents: self.document_count(),
            documents_empty: pairs.filter(|(start, end)| start == end).count() as u64,
            tokens: self.token_count(),
            token_range,
            bin_bytes: self.bin_bytes,
            bin_crc64,
            idx_bytes: self.idx.len() as u64,
            idx_crc64: storage::crc64(&self.idx),
        })
    }

    fn scan_bin(&self) -> Result<(u64, Option<(i64, i64)>)> {
        let mut sum = Crc64::new();
        let mut range: Option<(i64, i64)> = None;
        let mut tokens = Vec::new();
        for_each_chunk(self.bin.as_ref(), |bytes| {
            sum.update(bytes);
            if self.dtype().is_integer() {
                tokens.resize(bytes.len() / self.dtype().item_bytes() as usize, 0);
                self.dtype().decode_i64(bytes, &mut tokens);
                let (low, high) = range.unwrap_or((i64::MAX, i64::MIN));
                let ends = |(low, high): (i64, i64), &id: &i64| (low.min(id), high.max(id));
                range = Some(tokens.iter().fold((low, high), ends));
            }
            Ok(())
        })?;
        Ok((sum.value(), range))
    }

    /// The `.idx`.
    pub(crate) fn idx(&self) -> &dyn Object {
        self.idx_object.as_ref()
    }

    pub(crate) fn tables(&self) -> Tables<'_> {
        self.layout.tables(&self.idx)
    }

    /// Calls `visit` with the lengths of all sequences in order, this many at a time, and holds
    /// only those in memory.
    pub(crate) fn for_lengths(&self, at_once: usize, mut visit: impl FnMut(&[I32Le])) {
        let mut at = HEADER_BYTES as usize;
        for lengths in self.tables().lengths.chunks(at_once) {
            visit(lengths);
            self.idx.forget(at..at + 4 * lengths.len());
            at += 4 * lengths.len();
        }
    }

    /// Tokens of consecutive sequences, from the pointers alone.
    pub(crate) fn tokens_in(&self, sequences: &Range<u64>) -> u64 {
        let offset = |seq| {
            if seq == self.sequence_count() {
                self.bin_bytes
            } else {
                self.sequence_offset_bytes(seq)
            }
        };
        // Before the tables are checked, pointers may decrease.
        offset(sequences.end).saturating_sub(offset(sequences.start)) / self.dtype().item_bytes()
    }
}

/// Reads an object from front to back.
pub(crate) fn for_each_chunk(
    object: &dyn Object,
    mut visit: impl FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let len = object.len_bytes();
    let mut buf = vec![0; len.min(READ_BYTES) as usize]; // fits: 8 MiB at most
    let mut offset = 0;
    while offset < len {
        let chunk = &mut buf[..(len - offset).min(READ_BYTES) as usize]; // fits: as above
        object.read_many(&mut [RangeRead { offset, buf: chunk }])?;
        visit(chunk)?;
        offset += chunk.len() as u64;
    }
    Ok(())
}

/// The type of the elements. Of DeepSpeed's types, Megatron does not have uint64.
fn dtype_of(
    layout: &Layout,
    tables: &Tables<'_>,
    bin: &dyn Object,
    idx: &dyn Object,
) -> Result<Dtype> {
    let entries =
        tables.lengths.iter().zip(tables.pointers).map(|(len, pointer)| {
            Ok((i32::from_le_bytes(*len).into(), i64::from_le_bytes(*pointer)))
        });
    let dtype = layout.dtype.of_items(entries, bin.len_bytes())?;
    if dtype.is_megatron() {
        return Ok(dtype);
    }
    Err(Error::OtherKind {
        file: idx.display(),
        expected: "elements of Megatron's types".to_owned(),
        found: format!("type code 8 with 8 bytes per element, DeepSpeed's {dtype}"),
        hint: "`feedline convert` writes them as int32",
    })
}

/// Checks the length of a `.bin` against its `.idx`.
pub(crate) fn check_bin_len(bin: &dyn Object, expected: u64, idx_file: &str) -> Result<()> {
    let found = bin.len_bytes();
    let fault = match found.cmp(&expected) {
        std::cmp::Ordering::Equal => return Ok(()),
        std::cmp::Ordering::Less => FormatRule::BinTooShort,
        std::cmp::Ordering::Greater => FormatRule::BinTooLong,
    };
    let expected_text = format!("{expected} bytes as in {idx_file}");
    let at = found.min(expected) as usize; // an offset in a message
    Err(malformed(&bin.display(), at, fault, end_at(found.into(), expected.into()), expected_text))
}
