//! TNTIDX, the index of fairseq and of Megatron before MMIDIDX ("lazy" and "cached"), read only.
//!
//! | offset | type | field |
//! |---|---|---|
//! | 0 | 8 bytes | `TNTIDX` and two NULs |
//! | 8 | u64 | version, 1 |
//! | 16 | u64 | dtype code |
//! | 24 | u64 | bytes of an element |
//! | 32 | u64 | n, the items |
//! | 40 | u64 | s, the sizes |
//! | 48 | u64 | D, the length of the document index; absent from fairseq's own |
//! | | i64 x (n + 1) | where the sizes of each item begin: 0, 1, 2, ..., n |
//! | | i64 x (n + 1) | where each item begins in the `.bin`, in elements |
//! | | i64 x s, by PaddleNLP i32 x s | sizes |
//! | | i64 x D | document index |
//!
//! No field gives which of the four shapes a file has; it follows from the length.

use std::sync::Arc;

use storage::{Key, Object, Storage};

use super::boundaries::{Boundaries, Lengths};
use super::column::{Column, ColumnType};
use super::source::{TokenRun, TokenSource};
use super::{Format, ReadOptions, pair, whole_tokens};
use crate::mmididx::idx::{END_OF_FILE, malformed};
use crate::{Dtype, FormatRule, Result};

const MAGIC: [u8; 8] = *b"TNTIDX\0\0";
const HEADER_BYTES: u64 = 56;
/// Header of fairseq's own files, which have no document index.
const HEADER_BYTES_FAIRSEQ: u64 = 48;

/// What the header and the length of the file give.
struct Header {
    dtype: Dtype,
    items: u64,
    /// `None` in fairseq's own files.
    documents: Option<u64>,
    sizes: ColumnType,
}

pub(super) fn open(
    store: &Arc<dyn Storage>,
    prefix: &Key,
    options: &ReadOptions,
) -> Result<TokenSource> {
    let idx = store.open(&prefix.with_suffix(".idx")?)?;
    let bin = store.open(&prefix.with_suffix(".bin")?)?;
    let Header { dtype, items, documents, sizes } = header(idx.as_ref())?;
    let dtype = pair::ids_of(dtype, options.dtype, &idx.display())?;
    whole_tokens(&bin.display(), bin.len_bytes(), dtype)?;
    let dims_at = if documents.is_some() { HEADER_BYTES } else { HEADER_BYTES_FAIRSEQ };
    let dims = Column::new(&idx, dims_at, items + 1, ColumnType::I64)?;
    let starts_at = dims_at + 8 * (items + 1);
    let starts = Column::new(&idx, starts_at, items, ColumnType::I64)?;
    let sizes_at = starts_at + 8 * (items + 1);
    let lengths = Column::new(&idx, sizes_at, items, sizes)?;
    let documents_at = sizes_at + sizes.bytes() * items;
    let documents = documents
        .filter(|&len| len > 1 || items == 0)
        .map(|len| Column::new(&idx, documents_at, len, ColumnType::I64))
        .transpose()?;
    one_axis(&dims)?;
    Ok(TokenSource {
        format: Format::Tntidx,
        display: store.display(prefix),
        dtype,
        runs: vec![TokenRun { bytes: 0..bin.len_bytes(), object: bin }],
        marks: Boundaries::Lengths(Lengths {
            lengths,
            starts: Some((starts, 1)),
            documents,
            modes: None,
        }),
        has_modes: false,
    })
}

fn header(idx: &dyn Object) -> Result<Header> {
    let file = idx.display();
    let bytes = pair::start_of(idx)?;
    let len = idx.len_bytes();
    let short = |expected: u64| {
        let expected = format!("a header of {expected} bytes");
        malformed(&file, len as usize, FormatRule::TooShort, END_OF_FILE, expected)
    };
    let field = |at: u64| {
        let field = bytes.get(at as usize..).and_then(<[u8]>::first_chunk); // fits: below 64
        field.map(|field| u64::from_le_bytes(*field)).ok_or_else(|| short(HEADER_BYTES))
    };
    if bytes[..bytes.len().min(8)] != MAGIC {
        let found = format!("\"{}\"", bytes[..bytes.len().min(8)].escape_ascii());
        return Err(malformed(&file, 0, FormatRule::Magic, found, "\"TNTIDX\\x00\\x00\""));
    }
    let (version, code) = (field(8)?, field(16)?);
    if version != 1 {
        return Err(malformed(
            &file,
            8,
            FormatRule::Version,
            format!("version {version}"),
            "version 1",
        ));
    }
    let dtype = u8::try_from(code).ok().and_then(Dtype::from_code_of_any);
    let dtype = dtype.ok_or_else(|| {
        malformed(&file, 16, FormatRule::Dtype, format!("dtype code {code}"), "dtype code 1 to 10")
    })?;
    let (item_bytes, items, sizes) = (field(24)?, field(32)?, field(40)?);
    let dtype = dtype.of_item_bytes(item_bytes);
    if item_bytes != dtype.item_bytes() {
        let (found, expected) = (format!("elements of {item_bytes} bytes"), dtype.item_bytes());
        let expected = format!("elements of {expected} bytes for {dtype}");
        return Err(malformed(&file, 24, FormatRule::Dtype, found, expected));
    }
    if sizes != items {
        let found = format!("{sizes} sizes for {items} items");
        return Err(malformed(
            &file,
            40,
            FormatRule::SequenceLength,
            found,
            "one size for each item",
        ));
    }
    // The document index starts with 0, so its length is at least 1. A 0 in its place is the first
    // of fairseq's dimension offsets.
    let documents = Some(field(48)?).filter(|&len| len > 0);
    let tables = |size_bytes: u64| {
        let header = if documents.is_some() { HEADER_BYTES } else { HEADER_BYTES_FAIRSEQ };
        u128::from(header)
            + 16 * (u128::from(items) + 1)
            + u128::from(size_bytes) * u128::from(items)
            + 8 * u128::from(documents.unwrap_or(0))
    };
    let entry =
        [ColumnType::I64, ColumnType::I32].into_iter().find(|e| tables(e.bytes()) == len.into());
    let Some(sizes) = entry else {
        let counts = format!("{items} items and a document index of {}", documents.unwrap_or(0));
        let expected = format!("{} or {} bytes for {counts}", tables(8), tables(4));
        let fault = if tables(4) > len.into() { FormatRule::TooShort } else { FormatRule::TooLong };
        return Err(malformed(&file, len as usize, fault, END_OF_FILE, expected));
    };
    Ok(Header { dtype, items, documents, sizes })
}

/// An item of tokens has one axis, so the sizes of item i start at i.
fn one_axis(dims: &Column) -> Result<()> {
    for (item, dim) in dims.iter().enumerate() {
        let dim = dim?;
        if dim != item as i64 {
            let found = format!("dimension offset {dim} of item {item}");
            let expected = format!("dimension offset {item} for items of one axis");
            let at = dims.place(item as u64) as usize;
            return Err(malformed(&dims.file(), at, FormatRule::SequenceLength, found, expected));
        }
    }
    Ok(())
}
