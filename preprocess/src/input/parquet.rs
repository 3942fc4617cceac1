//! Reads one column of a Parquet file, row after row.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use bytes::Bytes;
use parquet::basic::{Compression, Type};
use parquet::column::reader::{ColumnReaderImpl, get_typed_column_reader};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::errors::ParquetError;
use parquet::file::metadata::RowGroupMetaData;
use parquet::file::reader::{ChunkReader, FileReader as _, Length, SerializedFileReader};
use storage::Object;

use super::chunker::Filled;
use super::records::NO_TEXT;
use super::stream::ObjectRead;
use super::{Input, bad_input};
use crate::batch::document_batch::DocumentBatch;
use crate::{Error, Result};

/// Rows that are decoded at a time.
const ROWS: usize = 64;

/// Headers of pages are read in pieces of this size.
const HEADER_BYTES: usize = 4096;

/// A file of Parquet, being read.
pub(super) struct RowReader {
    name: String,
    file: SerializedFileReader<Chunks>,
    column: usize,
    /// A row may have no value.
    max_def_level: i16,
    /// The next group of rows.
    group: usize,
    /// The row at which the groups before it end.
    group_end: u64,
    pages: Option<ColumnReaderImpl<ByteArrayType>>,
    /// The next row, from 0.
    row: u64,
    rows: u64,
    stored_bytes: u64,
}

impl std::fmt::Debug for RowReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RowReader({}, row {} of {})", self.name, self.row, self.rows)
    }
}

impl RowReader {
    /// Opens a file at one of its rows.
    ///
    /// # Errors
    /// [`Error::BadInput`] if it is not Parquet, or has no such column of texts.
    pub(super) fn open(input: &Input, column: &str, row: u64) -> Result<Self> {
        guard(&input.name, 0, || RowReader::open_file(input, column, row))
    }

    fn open_file(input: &Input, column: &str, row: u64) -> Result<Self> {
        let object = input.object()?;
        let stored_bytes = object.len_bytes();
        let failed = |error| read_error(&input.name, 0, error);
        let file = SerializedFileReader::new(Chunks(object)).map_err(failed)?;
        let schema = file.metadata().file_metadata().schema_descr();
        let names: Vec<String> = schema.columns().iter().map(|c| c.path().string()).collect();
        let Some(at) = names.iter().position(|name| name == column) else {
            let found = format!("only columns {}", names.join(", "));
            return Err(bad_input(&input.name, found, format!("column '{column}'")));
        };
        let descriptor = schema.column(at);
        if descriptor.physical_type() != Type::BYTE_ARRAY || descriptor.max_rep_level() > 0 {
            let found = format!("values of {}", descriptor.physical_type());
            return Err(bad_input(&input.name, found, format!("strings in column '{column}'")));
        }
        let groups = file.metadata().row_groups();
        for group in groups {
            check_compression(&input.name, group.column(at).compression())?;
        }
        let rows = groups.iter().map(group_rows).sum();
        let mut reader = RowReader {
            name: input.name.clone(),
            max_def_level: descriptor.max_def_level(),
            file,
            column: at,
            group: 0,
            group_end: 0,
            pages: None,
            row: 0,
            rows,
            stored_bytes,
        };
        reader.seek(row)?;
        Ok(reader)
    }

    /// The next row, from 0.
    pub(super) fn row(&self) -> u64 {
        self.row
    }

    fn seek(&mut self, row: u64) -> Result<()> {
        let groups = self.file.metadata().row_groups();
        for group in groups {
            let rows = group_rows(group);
            if self.row + rows > row {
                break;
            }
            self.row += rows;
            self.group += 1;
        }
        self.group_end = self.row;
        let within = row.saturating_sub(self.row);
        if within > 0 && self.next_group()? {
            let name = &self.name;
            let failed = |error| read_error(name, row, error);
            let pages = self.pages.as_mut().expect("just opened");
            // fits: a row of a group, of which a usize can count the rows.
            self.row += pages.skip_records(within as usize).map_err(failed)? as u64;
        }
        if self.row == row {
            return Ok(());
        }
        Err(bad_input(
            &self.name,
            format!("{} rows", self.row),
            format!("at least the {row} read before"),
        ))
    }

    /// False: there are no more.
    fn next_group(&mut self) -> Result<bool> {
        if self.group == self.file.num_row_groups() {
            return Ok(false);
        }
        let failed = |error| read_error(&self.name, self.row, error);
        let group = self.file.get_row_group(self.group).map_err(failed)?;
        let column = group.get_column_reader(self.column).map_err(failed)?;
        self.pages = Some(get_typed_column_reader(column));
        self.group_end += group_rows(group.metadata());
        self.group += 1;
        Ok(true)
    }

    /// Appends rows until the batch has `block_bytes`.
    ///
    /// # Errors
    /// [`Error::BadInput`] for invalid Parquet; nothing more can be read then.
    pub(super) fn fill(&mut self, batch: &mut DocumentBatch, block_bytes: usize) -> Result<Filled> {
        let (name, row) = (self.name.clone(), self.row);
        guard(&name, row, || self.fill_block(batch, block_bytes))
    }

    fn fill_block(&mut self, batch: &mut DocumentBatch, block_bytes: usize) -> Result<Filled> {
        let (mut levels, mut values) = (Vec::new(), Vec::new());
        while batch.bytes.len() < block_bytes {
            if self.pages.is_none() && !self.next_group()? {
                break;
            }
            levels.clear();
            values.clear();
            let pages = self.pages.as_mut().expect("opened above");
            let nullable = (self.max_def_level > 0).then_some(&mut levels);
            let read = pages.read_records(ROWS, nullable, None, &mut values);
            let (rows, ..) = read.map_err(|error| read_error(&self.name, self.row, error))?;
            if rows == 0 {
                self.end_group()?;
            }
            let mut texts = values.iter();
            for row in 0..rows {
                let is_null = levels.get(row).is_some_and(|&level| level < self.max_def_level);
                let text = if is_null { None } else { texts.next() };
                self.push(batch, text.map(ByteArray::data))?;
            }
            self.row += rows as u64;
        }
        batch.decompressed = true;
        // Estimated by rows: the pages of a row are not contiguous in the file.
        let stored = u128::from(self.stored_bytes) * u128::from(self.row);
        batch.stored_bytes = (stored / u128::from(self.rows.max(1))) as u64; // fits: a share of it
        Ok(if batch.spans.is_empty() { Filled::Nothing } else { Filled::Some })
    }

    /// A group whose pages end early would lose rows.
    fn end_group(&mut self) -> Result<()> {
        self.pages = None;
        if self.row == self.group_end {
            return Ok(());
        }
        let found = format!("{} rows", self.row);
        let expected = format!("the {} of its groups up to here", self.group_end);
        Err(bad_input(&self.name, found, expected).with_hint(DAMAGED))
    }

    fn push(&self, batch: &mut DocumentBatch, text: Option<&[u8]>) -> Result<()> {
        let Some(text) = text else {
            batch.spans.push(NO_TEXT);
            return Ok(());
        };
        let start = batch.bytes.len();
        batch.bytes.try_reserve(text.len()).map_err(|_| Error::NoMemory {
            input: self.name.clone(),
            offset: self.row,
            bytes: text.len() as u64,
        })?;
        batch.bytes.extend_from_slice(text);
        batch.spans.push(start..batch.bytes.len());
        Ok(())
    }
}

/// Parquet's reader panics on some invalid files. Its state is not used after a panic, because
/// nothing is read after an error.
fn guard<T>(name: &str, row: u64, read: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|_| {
        Err(read_error(
            name,
            row,
            ParquetError::General("cannot decode contents that contradict the header".to_owned()),
        ))
    })
}

/// The error of Parquet's reader, or of the store that it reads from.
fn read_error(name: &str, row: u64, error: ParquetError) -> Error {
    let error = match error {
        ParquetError::External(error) => match error.downcast::<storage::Error>() {
            Ok(error) => return Error::Storage(*error),
            Err(error) => ParquetError::External(error),
        },
        other => other,
    };
    let hint = match &error {
        ParquetError::NYI(_) => WRITE_AGAIN,
        ParquetError::EOF(_) | ParquetError::NeedMoreData(_) => "the file may be truncated",
        _ => DAMAGED,
    };
    let found = format!("an error after {row} rows: {error}");
    bad_input(name, found, "valid Parquet").with_hint(hint)
}

const WRITE_AGAIN: &str =
    "write it again with another library or setting: pyarrow's defaults are read";

const DAMAGED: &str =
    "the file may be truncated, or was damaged after it was written: copy it again";

/// Refuses a compression of pages that this build has no decoder for, before anything is read.
pub(super) fn check_compression(name: &str, compression: Compression) -> Result<()> {
    let found = match compression {
        Compression::UNCOMPRESSED
        | Compression::SNAPPY
        | Compression::GZIP(_)
        | Compression::ZSTD(_)
        | Compression::LZ4
        | Compression::LZ4_RAW => return Ok(()),
        Compression::BROTLI(_) => "brotli",
        Compression::LZO => "LZO",
    };
    let expected = "Parquet with pages in snappy, gzip, zstd or lz4, or uncompressed";
    Err(bad_input(name, format!("pages in {found}"), expected).with_hint(
        "write it again: pyarrow.parquet.write_table(pyarrow.parquet.read_table(FILE), NEW)",
    ))
}

fn group_rows(group: &RowGroupMetaData) -> u64 {
    u64::try_from(group.num_rows()).unwrap_or(0)
}

/// An object, adapted to Parquet's reader.
struct Chunks(Arc<dyn Object>);

impl Length for Chunks {
    fn len(&self) -> u64 {
        self.0.len_bytes()
    }
}

impl ChunkReader for Chunks {
    type T = io::BufReader<ObjectRead>;

    fn get_read(&self, start: u64) -> parquet::errors::Result<Self::T> {
        let object = ObjectRead::new(Arc::clone(&self.0), start);
        Ok(io::BufReader::with_capacity(HEADER_BYTES, object))
    }

    fn get_bytes(&self, start: u64, length: usize) -> parquet::errors::Result<Bytes> {
        // A file may contain any length: it is checked before memory is allocated.
        let end = start.checked_add(length as u64).filter(|&end| end <= self.len());
        let Some(_) = end else {
            let message = format!("{length} bytes requested at byte {start} of {}", self.len());
            return Err(ParquetError::EOF(message));
        };
        let mut buf = vec![0; length];
        let read = self.0.read_many(&mut [storage::RangeRead { offset: start, buf: &mut buf }]);
        read.map_err(|error| ParquetError::External(Box::new(error)))?;
        Ok(buf.into())
    }
}
