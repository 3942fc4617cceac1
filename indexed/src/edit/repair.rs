//! Writes the recoverable part of a pair that breaks its format as a new pair.
//!
//! The lengths are trusted as far as the `.bin` has tokens for them; everything else follows. The
//! pointers are their sums. A valid document index is retained. Otherwise each sequence becomes a
//! document, which is what CPM-2 and Yuan mean by their files, whose documents were never ended.

use std::sync::Arc;

use storage::{Key, Object, Storage};

use crate::checksums::table::{BlockChecksums, File};
use crate::checksums::verified::verified;
use crate::checksums::writer::ChecksumWriter;
use crate::edit::concat::copy;
use crate::formats::{Column, ColumnType, finish_all, start_of};
use crate::mmididx::idx::{self, HEADER_BYTES};
use crate::{Built, Dtype, Result};

/// An examined pair.
#[derive(Debug)]
pub struct Repair {
    dtype: Dtype,
    bin: Arc<dyn Object>,
    checksums: Option<Arc<BlockChecksums>>,
    lengths: Column,
    /// `None`: each sequence becomes a document.
    documents: Option<Column>,
    modes: Option<Column>,
    /// What is retained.
    sequences_retained: u64,
    documents_retained: u64,
    bytes_retained: u64,
    report: RepairReport,
}

/// The faults of a pair, and what a repair loses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RepairReport {
    /// Each fault and how it is repaired. Empty if the pair is valid.
    pub faults: Vec<String>,
    /// Sequences that the header counts and that cannot be retained.
    pub sequences_lost: u64,
    /// Bytes of the `.bin` that belong to no retained document.
    pub bytes_lost: u64,
}

impl Repair {
    /// Examines a pair. Its header must be valid, because everything else depends on it.
    ///
    /// # Errors
    /// [`crate::Error::Malformed`] for the header; [`crate::Error::Storage`].
    pub fn examine(store: &Arc<dyn Storage>, prefix: &Key) -> Result<Self> {
        let idx = store.open(&prefix.with_suffix(".idx")?)?;
        let bin = store.open(&prefix.with_suffix(".bin")?)?;
        let (dtype, sequences, documents) = idx::header_fields(&start_of(&*idx)?, &idx.display())?;
        // Tokens cannot be repaired, and damaged ones must not get new checksums.
        let checksums = BlockChecksums::open(store.as_ref(), prefix)?;
        let bin = verified(&bin, File::Bin, checksums.as_ref());
        let mut faults = Vec::new();
        // As many lengths as the file has room for, whatever the header counts.
        let room = idx.len_bytes().saturating_sub(HEADER_BYTES) / 4;
        let lengths = Column::new(&idx, HEADER_BYTES, sequences.min(room), ColumnType::I32)?;
        let tables = Tables::find(&idx, sequences, documents, &mut faults)?;
        let pointers = tables.pointers.iter().flat_map(Column::iter);
        let entries = lengths.iter().zip(pointers).map(|(len, pointer)| Ok((len?, pointer?)));
        let dtype = dtype.of_items(entries, bin.len_bytes())?;
        let mut repair = Repair {
            dtype,
            bin,
            checksums,
            lengths,
            documents: None,
            modes: tables.modes,
            sequences_retained: 0,
            documents_retained: 0,
            bytes_retained: 0,
            report: RepairReport::default(),
        };
        repair.retain_sequences(tables.pointers.as_ref(), &mut faults)?;
        match tables.documents {
            Some(documents) => repair.retain_documents(documents, sequences, &mut faults)?,
            None => repair.documents_retained = repair.sequences_retained,
        }
        let bytes_lost = repair.bin.len_bytes() - repair.bytes_retained;
        if bytes_lost > 0 {
            faults.push(format!(
                "{bytes_lost} bytes of the .bin are outside complete documents; dropped"
            ));
        }
        let sequences_lost = sequences - repair.sequences_retained;
        repair.report = RepairReport { faults, sequences_lost, bytes_lost };
        Ok(repair)
    }

    /// The faults and the losses.
    #[must_use]
    pub fn report(&self) -> &RepairReport {
        &self.report
    }

    /// Whether each sequence becomes a document.
    #[must_use]
    pub fn each_sequence_is_a_document(&self) -> bool {
        self.documents.is_none()
    }

    /// Writes the retained part under another name.
    ///
    /// # Errors
    /// [`crate::Error::Storage`], also if the name exists; [`crate::Error::LeftBehind`].
    pub fn write(&self, store: &Arc<dyn Storage>, prefix: &Key) -> Result<Built> {
        let (bin_key, idx_key) = (prefix.with_suffix(".bin")?, prefix.with_suffix(".idx")?);
        let mut idx = store.create(&idx_key, 0)?;
        let mut bin = store.create(&bin_key, 0)?;
        let mut checksums = ChecksumWriter::begin(store.as_ref(), prefix)?;
        let (sequences, documents) = (self.sequences_retained, self.documents_retained);
        let mut table = idx::Table::default();
        table.push(idx::header(self.dtype, sequences, documents + 1), idx.as_mut())?;
        let lengths = self.lengths.part(0..sequences);
        for len in lengths.iter() {
            table.push((len? as i32).to_le_bytes(), idx.as_mut())?; // fits: read as 32 bits
        }
        let mut pointer = 0_u64;
        for len in lengths.iter() {
            table.push(pointer.to_le_bytes(), idx.as_mut())?;
            pointer += len? as u64 * self.dtype.item_bytes();
        }
        match &self.documents {
            Some(column) => {
                for entry in column.part(0..documents + 1).iter() {
                    table.push(entry?.to_le_bytes(), idx.as_mut())?;
                }
            }
            None => {
                for entry in 0..=documents {
                    table.push(entry.to_le_bytes(), idx.as_mut())?;
                }
            }
        }
        for mode in self.modes.iter().flat_map(|modes| modes.part(0..sequences).iter()) {
            table.push((mode? as i8).to_le_bytes(), idx.as_mut())?; // fits: read as 8 bits
        }
        table.end(idx.as_mut())?;
        if let Some(known) = &self.checksums
            && known.bin_bytes() != self.bin.len_bytes()
        {
            known.verify_before(self.bin.as_ref(), self.bytes_retained)?;
        }
        copy(&self.bin, 0..self.bytes_retained, None, bin.as_mut(), &mut checksums)?;
        let crc = checksums.end(table.sums)?;
        let files = finish_all(store.as_ref(), vec![(bin_key, bin), crc, (idx_key, idx)])?;
        let [bin, crc, idx] = <[_; 3]>::try_from(files).expect("three were finished");
        let tokens = self.bytes_retained / self.dtype.item_bytes();
        Ok(Built { bin, idx, crc, sequences, documents, tokens })
    }

    /// Retains the sequences with a valid length and tokens in the `.bin`.
    fn retain_sequences(
        &mut self,
        pointers: Option<&Column>,
        faults: &mut Vec<String>,
    ) -> Result<()> {
        let (item_bytes, bin_bytes) = (self.dtype.item_bytes(), self.bin.len_bytes());
        let mut pointers = pointers.map(Column::iter);
        let mut pointers_wrong = 0_u64;
        for len in self.lengths.iter() {
            let (len, pointer) = (len?, pointers.as_mut().and_then(Iterator::next).transpose()?);
            if len < 0 {
                let index = self.sequences_retained;
                faults.push(format!(
                    "sequence {index} has length {len}; it and all later sequences are dropped"
                ));
                break;
            }
            let end = self.bytes_retained + len as u64 * item_bytes; // fits: below 2^34 more
            if end > bin_bytes {
                let index = self.sequences_retained;
                faults.push(format!(
                    "the .bin ends at byte {bin_bytes}, within sequence {index}, which ends at \
                     byte {end}; it and all later sequences are dropped"
                ));
                break;
            }
            pointers_wrong += u64::from(pointer.is_some_and(|at| at as u64 != self.bytes_retained));
            self.bytes_retained = end;
            self.sequences_retained += 1;
        }
        if pointers_wrong > 0 {
            faults.push(format!(
                "{pointers_wrong} pointers differ from the sums of the lengths; recomputed"
            ));
        }
        Ok(())
    }

    /// Retains the complete documents, if the document index is valid.
    fn retain_documents(
        &mut self,
        column: Column,
        sequences: u64,
        faults: &mut Vec<String>,
    ) -> Result<()> {
        let (mut last, mut retained, mut retained_end) = (0, 0, 0);
        let mut good = true;
        for (nth, entry) in column.iter().enumerate() {
            let entry = entry?;
            good &= entry >= last && (nth > 0 || entry == 0);
            last = entry;
            if good && entry as u64 <= self.sequences_retained {
                (retained, retained_end) = (nth as u64, entry as u64);
            }
        }
        if !good || last as u64 != sequences {
            let what = match column.count() {
                1 => "no document was ended".to_owned(),
                entries => format!(
                    "the {entries} entries of the document index do not ascend from 0 to \
                     {sequences}"
                ),
            };
            faults.push(format!("{what}; each sequence becomes a document"));
            self.documents_retained = self.sequences_retained;
            return Ok(());
        }
        // Sequences of an incomplete document are dropped with it.
        for len in self.lengths.part(retained_end..self.sequences_retained).iter() {
            self.bytes_retained -= len? as u64 * self.dtype.item_bytes();
        }
        (self.sequences_retained, self.documents_retained) = (retained_end, retained);
        self.documents = Some(column);
        Ok(())
    }
}

/// The tables after the lengths, as far as the file has the expected length.
struct Tables {
    pointers: Option<Column>,
    documents: Option<Column>,
    modes: Option<Column>,
}

impl Tables {
    fn find(
        idx: &Arc<dyn Object>,
        sequences: u64,
        documents: u64,
        faults: &mut Vec<String>,
    ) -> Result<Self> {
        let len = u128::from(idx.len_bytes());
        let documents_at = u128::from(HEADER_BYTES) + 12 * u128::from(sequences);
        let end = documents_at + 8 * u128::from(documents);
        let has_modes = sequences > 0 && len == end + u128::from(sequences);
        if len != end && !has_modes {
            let is = if len < end { "truncated" } else { "too long" };
            let effect = if len < end { "; the document index is lost" } else { "" };
            faults
                .push(format!("the .idx is {is}: expected {end} bytes, found {len} bytes{effect}"));
        }
        let at = |end: u128, start: u64, count, entry| {
            (len >= end).then(|| Column::new(idx, start, count, entry)).transpose()
        };
        // fits: each place is within the file where it is used
        let pointers = at(
            documents_at,
            HEADER_BYTES + 4 * sequences.min(1 << 60),
            sequences,
            ColumnType::I64,
        )?;
        let index = at(end, documents_at as u64, documents, ColumnType::I64)?;
        // Without its leading 0 it is not a document index.
        let index = index.filter(|index| index.count() > 0);
        let modes = has_modes.then(|| Column::new(idx, end as u64, sequences, ColumnType::I8));
        Ok(Tables { pointers, documents: index, modes: modes.transpose()? })
    }
}
