//! Tables of integers in a file, read from front to back in bounded memory.

use std::ops::Range;
use std::sync::Arc;

use storage::{Object, RangeRead};

use crate::mmididx::idx::{END_OF_FILE, malformed};
use crate::{FormatRule, Result};

/// Bytes of a read. The four tables of a merge take two megabytes.
const STEP_BYTES: u64 = 512 << 10;

/// The type of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ColumnType {
    I8,
    I32,
    I64,
}

impl ColumnType {
    pub(crate) fn bytes(self) -> u64 {
        match self {
            ColumnType::I8 => 1,
            ColumnType::I32 => 4,
            ColumnType::I64 => 8,
        }
    }
}

/// A table in an object. Unsigned ones of 64 bits are read as signed: above 2^63 they are negative,
/// and no count may be negative.
#[derive(Clone, Debug)]
pub(crate) struct Column {
    object: Arc<dyn Object>,
    offset: u64,
    count: u64,
    entry: ColumnType,
}

impl Column {
    /// Refuses a table that does not lie within its object.
    pub(crate) fn new(
        object: &Arc<dyn Object>,
        offset: u64,
        count: u64,
        entry: ColumnType,
    ) -> Result<Self> {
        let expected = u128::from(offset) + u128::from(count) * u128::from(entry.bytes());
        let len = object.len_bytes();
        if expected > u128::from(len) {
            let expected = format!("{expected} bytes for {count} entries from byte {offset} on");
            let (file, fault) = (object.display(), FormatRule::TooShort);
            return Err(malformed(&file, len as usize, fault, END_OF_FILE, expected));
        }
        Ok(Column { object: Arc::clone(object), offset, count, entry })
    }

    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    pub(crate) fn file(&self) -> String {
        self.object.display()
    }

    /// The offset of an entry in the file.
    pub(crate) fn place(&self, entry: u64) -> u64 {
        self.offset + entry * self.entry.bytes()
    }

    /// A range of its entries.
    ///
    /// # Panics
    /// If the range exceeds the table.
    pub(crate) fn part(&self, range: Range<u64>) -> Column {
        assert!(range.start <= range.end);
        assert!(range.end <= self.count);
        let (offset, count) = (self.place(range.start), range.end - range.start);
        Column { offset, count, ..self.clone() }
    }

    /// One entry, by a read of its own.
    pub(crate) fn get(&self, entry: u64) -> Result<i64> {
        self.part(entry..entry + 1).iter().next().unwrap_or(Ok(0))
    }

    pub(crate) fn iter(&self) -> Entries {
        Entries { column: self.clone(), next: 0, buf: Vec::new(), at: 0 }
    }
}

/// The entries of a [`Column`] in their order.
#[derive(Debug)]
pub(crate) struct Entries {
    column: Column,
    /// The first entry after the buffer.
    next: u64,
    buf: Vec<u8>,
    at: usize,
}

impl Entries {
    #[cold]
    fn refill(&mut self) -> Result<()> {
        let entry_bytes = self.column.entry.bytes();
        let count = (self.column.count - self.next).min(STEP_BYTES / entry_bytes);
        self.buf.resize((count * entry_bytes) as usize, 0); // fits: a step at most
        let offset = self.column.place(self.next);
        self.column.object.read_many(&mut [RangeRead { offset, buf: &mut self.buf }])?;
        self.next += count;
        self.at = 0;
        Ok(())
    }
}

impl Iterator for Entries {
    type Item = Result<i64>;

    fn next(&mut self) -> Option<Result<i64>> {
        if self.at == self.buf.len() {
            if self.next == self.column.count {
                return None;
            }
            if let Err(error) = self.refill() {
                self.next = self.column.count; // an error is reported once
                self.buf.clear();
                self.at = 0;
                return Some(Err(error));
            }
        }
        let rest = &self.buf[self.at..];
        let whole = "the buffer holds whole entries";
        let value = match self.column.entry {
            ColumnType::I8 => i64::from(i8::from_le_bytes([rest[0]])),
            ColumnType::I32 => i64::from(i32::from_le_bytes(*rest.first_chunk().expect(whole))),
            ColumnType::I64 => i64::from_le_bytes(*rest.first_chunk().expect(whole)),
        };
        self.at += self.column.entry.bytes() as usize; // fits: at most 8
        Some(Ok(value))
    }
}
