//! Concatenates datasets and parts of datasets into a new one. Merging and splitting are cases of
//! it.
//!
//! The tables of the sources are read, and those of the result written, from front to back. Tokens
//! are verified as they are read; those of a whole dataset are copied by [`Upload::write_from`],
//! with their known checksums. So memory does not grow with the tokens, the sequences or the
//! sources, and only one source is open at a time.

use std::ops::Range;
use std::sync::Arc;

use storage::{Crc64, Key, Object, RangeRead, Storage, Upload};

use crate::checksums::writer::{ChecksumWriter, IdxSums};
use crate::formats::{Column, Pair, finish_all};
use crate::mmididx::dataset::READ_BYTES;
use crate::mmididx::idx;
use crate::{Built, Dtype, Error, Result};

/// Documents of a dataset.
#[derive(Clone, Debug)]
pub struct DocumentRange {
    /// Where the dataset is.
    pub store: Arc<dyn Storage>,
    /// Its prefix.
    pub prefix: Key,
    /// Which of its documents; `None`: all.
    pub documents: Option<Range<u64>>,
    /// CRC-64/NVME of its whole `.bin`, from a manifest that is trusted. The tokens of a whole
    /// dataset with block checksums are then copied unread, where the file system can do so.
    pub bin_crc64: Option<u64>,
}

/// A checked part.
struct CheckedRange {
    documents: Range<u64>,
    sequences: Range<u64>,
    bytes: Range<u64>,
}

/// Counts and format of the result.
struct ConcatPlan {
    dtype: Dtype,
    has_modes: bool,
    extents: Vec<CheckedRange>,
    sequences: u64,
    documents: u64,
    bytes: u64,
}

/// Writes the documents of all parts as one dataset, byte for byte as Megatron's writer does.
///
/// # Errors
/// [`Error::CannotMerge`] if the parts are of different types, or some have modes;
/// [`Error::Malformed`] for a part that breaks the format, every entry of which is read before
/// anything is written; [`Error::BadSetting`] for documents that do not exist; [`Error::Orphan`];
/// [`Error::Storage`]. No file remains then, except after [`Error::LeftBehind`].
///
/// # Panics
/// If there are no parts.
pub fn splice(store: &Arc<dyn Storage>, prefix: &Key, parts: &[DocumentRange]) -> Result<Built> {
    assert!(!parts.is_empty(), "a dataset of no parts has no type");
    let (bin_key, idx_key) = (prefix.with_suffix(".bin")?, prefix.with_suffix(".idx")?);
    let mut idx = store.create(&idx_key, 0)?;
    let mut bin = store.create(&bin_key, 0).map_err(|error| match error {
        storage::Error::Exists { object } => Error::Orphan { file: object },
        other => Error::Storage(other),
    })?;
    let mut checksums = ChecksumWriter::begin(store.as_ref(), prefix)?;
    let plan = plan(parts, &store.display(prefix))?;
    let idx_sums = write_idx(idx.as_mut(), parts, &plan)?;
    for (part, extent) in parts.iter().zip(&plan.extents) {
        let pair = Pair::open(&part.store, &part.prefix)?;
        let whole = extent.bytes == (0..pair.bin.len_bytes());
        let crc64 = part.bin_crc64.filter(|_| whole);
        match (&pair.checksums, crc64) {
            (Some(known), Some(_)) => {
                known.verify_self()?;
                bin.write_from(pair.bin.as_ref(), extent.bytes.clone(), crc64)?;
                checksums.carry(known)?;
            }
            _ => copy(&pair.bin, extent.bytes.clone(), crc64, bin.as_mut(), &mut checksums)?,
        }
    }
    let crc = checksums.end(idx_sums)?;
    let files = finish_all(store.as_ref(), vec![(bin_key, bin), crc, (idx_key, idx)])?;
    let [bin, crc, idx] = <[_; 3]>::try_from(files).expect("three were finished");
    let (sequences, documents) = (plan.sequences, plan.documents);
    let tokens = plan.bytes / plan.dtype.item_bytes();
    Ok(Built { bin, idx, crc, sequences, documents, tokens })
}

/// Copies tokens through memory and computes the checksums of their blocks.
pub(super) fn copy(
    from: &Arc<dyn Object>,
    range: Range<u64>,
    crc64: Option<u64>,
    bin: &mut dyn Upload,
    checksums: &mut ChecksumWriter,
) -> Result<()> {
    checksums.begin_segment();
    let mut buf = vec![0; (range.end - range.start).min(READ_BYTES) as usize]; // fits: 8 MiB
    let (mut offset, mut sum) = (range.start, Crc64::new());
    while offset < range.end {
        let chunk = &mut buf[..(range.end - offset).min(READ_BYTES) as usize]; // fits: as above
        from.read_many(&mut [RangeRead { offset, buf: chunk }])?;
        sum.update(chunk);
        bin.write(chunk)?;
        checksums.bin(chunk)?;
        offset += chunk.len() as u64;
    }
    match crc64.filter(|&expected| expected != sum.value()) {
        None => Ok(()),
        Some(expected) => Err(Error::Storage(storage::Error::Corrupt {
            object: from.display(),
            offset: range.start,
            found: format!("CRC-64 {:016x} of {} bytes", sum.value(), range.end - range.start),
            expected: format!("CRC-64 {expected:016x} as in its manifest"),
        })),
    }
}

/// Checks every entry of every part.
fn plan(parts: &[DocumentRange], into: &str) -> Result<ConcatPlan> {
    let mut plan: Option<ConcatPlan> = None;
    for part in parts {
        let pair = Pair::open(&part.store, &part.prefix)?;
        let (dtype, has_modes) = (pair.layout.dtype, pair.layout.has_modes);
        let plan = plan.get_or_insert(ConcatPlan {
            dtype,
            has_modes,
            extents: Vec::new(),
            sequences: 0,
            documents: 0,
            bytes: 0,
        });
        // A dataset without sequences has the same bytes with and without modes.
        let (none_here, none_yet) = (pair.lengths.count() == 0, plan.sequences == 0);
        if dtype != plan.dtype || (has_modes != plan.has_modes && !none_here && !none_yet) {
            let words = |dtype: Dtype, has_modes| {
                format!("{dtype} with{} modes", if has_modes { "" } else { "out" })
            };
            return Err(Error::CannotMerge {
                file: pair.display,
                into: into.to_owned(),
                found: words(dtype, has_modes),
                expected: words(plan.dtype, plan.has_modes),
            });
        }
        pair.check()?;
        plan.has_modes |= has_modes;
        let all = pair.documents.count() - 1;
        let documents = part.documents.clone().unwrap_or(0..all);
        if documents.start > documents.end || documents.end > all {
            let (name, found) = ("documents", format!("{documents:?}"));
            return Err(Error::BadSetting {
                name,
                found,
                expected: format!("a range within 0..{all}"),
            });
        }
        let (sequences, bytes) = pair.extent(&documents)?;
        plan.sequences += sequences.end - sequences.start;
        plan.documents += documents.end - documents.start;
        plan.bytes += bytes.end - bytes.start;
        plan.extents.push(CheckedRange { documents, sequences, bytes });
    }
    Ok(plan.expect("there is a part"))
}

fn write_idx(idx: &mut dyn Upload, parts: &[DocumentRange], plan: &ConcatPlan) -> Result<IdxSums> {
    let mut table = idx::Table::default();
    table.push(idx::header(plan.dtype, plan.sequences, plan.documents + 1), idx)?;
    each(parts, plan, |pair, extent| {
        lengths(pair, extent).iter().try_for_each(|len| {
            table.push((len? as i32).to_le_bytes(), idx) // fits: read as 32 bits
        })
    })?;
    let mut pointer = 0_u64;
    each(parts, plan, |pair, extent| {
        lengths(pair, extent).iter().try_for_each(|len| {
            table.push(pointer.to_le_bytes(), idx)?;
            pointer += len? as u64 * plan.dtype.item_bytes();
            Ok(())
        })
    })?;
    table.push(0_u64.to_le_bytes(), idx)?;
    let mut base = 0_i64;
    each(parts, plan, |pair, extent| {
        let first = extent.sequences.start as i64;
        let ends = pair.documents.part(extent.documents.start + 1..extent.documents.end + 1);
        ends.iter().try_for_each(|end| table.push((base + end? - first).to_le_bytes(), idx))?;
        base += extent.sequences.end as i64 - first;
        Ok(())
    })?;
    each(parts, plan, |pair, extent| {
        let modes = pair.modes.as_ref().map(|modes| modes.part(extent.sequences.clone()));
        modes.iter().flat_map(Column::iter).try_for_each(|mode| {
            table.push((mode? as i8).to_le_bytes(), idx) // fits: read as 8 bits
        })
    })?;
    table.end(idx)?;
    Ok(table.sums)
}

fn lengths(pair: &Pair, extent: &CheckedRange) -> Column {
    pair.lengths.part(extent.sequences.clone())
}

fn each(
    parts: &[DocumentRange],
    plan: &ConcatPlan,
    mut visit: impl FnMut(&Pair, &CheckedRange) -> Result<()>,
) -> Result<()> {
    for (part, extent) in parts.iter().zip(&plan.extents) {
        visit(&Pair::open(&part.store, &part.prefix)?, extent)?;
    }
    Ok(())
}
