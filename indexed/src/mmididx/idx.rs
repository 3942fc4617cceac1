//! The layout of an `.idx`: one header, then tables without padding.
//!
//! `FORMAT.md` has the table. All integers are little-endian. The tables start at byte 34, so they
//! have no alignment: they are read as arrays of bytes and decoded one by one, which costs nothing.

use std::ops::Range;

use storage::Upload;

use crate::checksums::writer::IdxSums;
use crate::{Dtype, Error, FormatRule, Result};

/// "MMIDIDX" and two NULs.
const MAGIC: [u8; 9] = *b"MMIDIDX\0\0";
const VERSION: u64 = 1;
/// Where the tables start.
pub(crate) const HEADER_BYTES: u64 = 34;

/// Four bytes of a table, as in the file.
pub(crate) type I32Le = [u8; 4];
/// Eight bytes of a table, as in the file.
pub(crate) type I64Le = [u8; 8];

/// The header, checked against the length of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub dtype: Dtype,
    /// S.
    pub sequences: usize,
    /// N.
    pub document_index_len: usize,
    pub has_modes: bool,
}

/// The tables of an `.idx`, as slices of the file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tables<'a> {
    pub lengths: &'a [I32Le],
    pub pointers: &'a [I64Le],
    pub documents: &'a [I64Le],
    pub modes: &'a [u8],
}

impl Layout {
    /// Reads the header. Every count is checked against the length of the file before it is used.
    pub(crate) fn parse(bytes: &[u8], file: &str) -> Result<Self> {
        let layout = Self::parse_any(bytes, bytes.len() as u64, file)?;
        if !layout.dtype.is_megatron() {
            let found = format!("dtype code {}", layout.dtype.code());
            return Err(malformed(file, 17, FormatRule::Dtype, found, "dtype code 1 to 8"));
        }
        Ok(layout)
    }

    /// The same from the first bytes of a file alone, also if its type is one of PaddleNLP's.
    pub(crate) fn parse_any(bytes: &[u8], file_bytes: u64, file: &str) -> Result<Self> {
        let len = file_bytes as usize; // fits: 64 bits
        let (dtype, sequences, documents) = header_fields(bytes, file)?;
        if documents == 0 {
            let expected = "a document index of at least 1 entry";
            let found = "a document index of length 0";
            return Err(malformed(file, 26, FormatRule::DocumentStart, found, expected));
        }
        let expected =
            u128::from(HEADER_BYTES) + 12 * u128::from(sequences) + 8 * u128::from(documents);
        let has_modes = len as u128 == expected + u128::from(sequences) && sequences > 0;
        if len as u128 != expected && !has_modes {
            let counts = format!("{sequences} sequences and a document index of {documents}");
            let too_short = (len as u128) < expected;
            let fault = if too_short { FormatRule::TooShort } else { FormatRule::TooLong };
            let offset = if too_short { len as u128 } else { expected };
            let found = end_at(len as u128, expected);
            let expected = format!("{expected} bytes for {counts}");
            return Err(malformed(file, offset as usize, fault, found, expected));
        }
        // fits: both tables lie within the file, which is in memory.
        let (sequences, document_index_len) = (sequences as usize, documents as usize);
        Ok(Layout { dtype, sequences, document_index_len, has_modes })
    }

    /// Where the table of pointers starts.
    pub(crate) fn pointers_at(&self) -> u64 {
        HEADER_BYTES + 4 * self.sequences as u64
    }

    /// The tables of the file that this header was read from.
    pub(crate) fn tables<'a>(&self, bytes: &'a [u8]) -> Tables<'a> {
        let (lengths, rest) = bytes[HEADER_BYTES as usize..].split_at(4 * self.sequences);
        let (pointers, rest) = rest.split_at(8 * self.sequences);
        let (documents, modes) = rest.split_at(8 * self.document_index_len);
        Tables {
            lengths: lengths.as_chunks().0,
            pointers: pointers.as_chunks().0,
            documents: documents.as_chunks().0,
            modes,
        }
    }
}

/// Entries of a table that are checked before their pages are released: 64 MiB of pointers.
const ENTRIES_AT_ONCE: usize = 8 << 20;

impl Tables<'_> {
    /// Where the table of pointers starts.
    fn pointers_at(&self) -> usize {
        HEADER_BYTES as usize + 4 * self.lengths.len()
    }

    /// Checks only the first and the last entries, and returns the bytes that the `.bin` must have
    /// if all others are right.
    pub(crate) fn check_ends(&self, item_bytes: u64, file: &str) -> Result<u64> {
        let value = |entry: usize| i64::from_le_bytes(self.documents[entry]) as u64;
        let (sequences, last) = (self.lengths.len(), self.documents.len() - 1);
        if value(0) != 0 || value(last) != sequences as u64 {
            self.check_documents(file, &|_| ())?;
        }
        let Some(last) = sequences.checked_sub(1) else { return Ok(0) };
        let pointer = u64::from_le_bytes(self.pointers[last]);
        let length = i32::from_le_bytes(self.lengths[last]);
        let first = u64::from_le_bytes(self.pointers[0]);
        if first != 0 || length < 0 || pointer >> 62 != 0 {
            self.check_sequences(item_bytes, file, &|_| ())?;
        }
        Ok(pointer + u64::from(length.unsigned_abs()) * item_bytes)
    }

    /// Checks every entry of every table in one pass, and returns the bytes that the `.bin` must
    /// have. `seen` is called with the bytes of the file that will not be read again.
    pub(crate) fn check(
        &self,
        item_bytes: u64,
        file: &str,
        seen: impl Fn(Range<usize>),
    ) -> Result<u64> {
        let bin_bytes = self.check_sequences(item_bytes, file, &seen)?;
        self.check_documents(file, &seen)?;
        Ok(bin_bytes)
    }

    fn check_sequences(
        &self,
        item_bytes: u64,
        file: &str,
        seen: &dyn Fn(Range<usize>),
    ) -> Result<u64> {
        // All faults of the table are collected in one word, so that the loop has no exits; if
        // there is a fault, a second pass finds its position.
        let (mut sum, mut bad) = (0_u64, 0_u64);
        let (mut lengths_at, mut pointers_at) = (HEADER_BYTES as usize, self.pointers_at());
        let chunks = self.lengths.chunks(ENTRIES_AT_ONCE);
        for (lengths, pointers) in chunks.zip(self.pointers.chunks(ENTRIES_AT_ONCE)) {
            for (len, pointer) in lengths.iter().zip(pointers) {
                let len = i64::from(i32::from_le_bytes(*len)) as u64; // negative: above 2^63
                // A sum grows by at most 2^34 at a time, so it reaches bit 62 before it wraps.
                bad |= (u64::from_le_bytes(*pointer) ^ sum) | (len >> 63) | (sum >> 62);
                sum = sum.wrapping_add(len.wrapping_mul(item_bytes));
            }
            let ends = (lengths_at + 4 * lengths.len(), pointers_at + 8 * pointers.len());
            seen(lengths_at..ends.0);
            seen(pointers_at..ends.1);
            (lengths_at, pointers_at) = ends;
        }
        if bad == 0 { Ok(sum) } else { Err(self.first_bad_sequence(item_bytes, file)) }
    }

    #[cold]
    fn first_bad_sequence(&self, item_bytes: u64, file: &str) -> Error {
        let mut sum = 0_u64;
        for (seq, (len, pointer)) in self.lengths.iter().zip(self.pointers).enumerate() {
            let (len, pointer) = (i32::from_le_bytes(*len), i64::from_le_bytes(*pointer));
            if len < 0 {
                let offset = HEADER_BYTES as usize + 4 * seq;
                let found = format!("length {len} of sequence {seq}");
                let expected = "a length of 0 or more";
                return malformed(file, offset, FormatRule::SequenceLength, found, expected);
            }
            if pointer as u64 != sum || sum >> 62 != 0 {
                let offset = HEADER_BYTES as usize + 4 * self.lengths.len() + 8 * seq;
                let found = format!("pointer {pointer} of sequence {seq}");
                let expected = format!("pointer {sum}, the byte count of the sequences before it");
                return malformed(file, offset, FormatRule::Pointer, found, expected);
            }
            sum += len as u64 * item_bytes;
        }
        unreachable!("called for a table with a fault")
    }

    fn check_documents(&self, file: &str, seen: &dyn Fn(Range<usize>)) -> Result<()> {
        let at = |entry: usize| HEADER_BYTES as usize + 12 * self.lengths.len() + 8 * entry;
        let value = |entry: usize| i64::from_le_bytes(self.documents[entry]);
        let (sequences, last) = (self.lengths.len(), self.documents.len() - 1);
        if value(0) != 0 {
            let (found, expected) =
                (format!("sequence {}", value(0)), "first document at sequence 0");
            return Err(malformed(file, at(0), FormatRule::DocumentStart, found, expected));
        }
        if last == 0 && sequences > 0 {
            let found = format!("the single entry 0 for {sequences} sequences");
            let expected = format!("a document index that ends with {sequences}");
            return Err(malformed(file, at(0), FormatRule::NoDocumentEnds, found, expected));
        }
        let (mut before, mut ascends, mut entry) = (0, true, 0);
        for documents in self.documents.chunks(ENTRIES_AT_ONCE) {
            for document in documents {
                let document = i64::from_le_bytes(*document);
                ascends &= before <= document;
                before = document;
            }
            seen(at(entry)..at(entry + documents.len()));
            entry += documents.len();
        }
        if !ascends {
            let decreases = |&entry: &usize| value(entry) < value(entry - 1);
            let entry = (1..=last).find(decreases).expect("an entry decreases, as checked above");
            let found = format!("{} in entry {entry} of the document index", value(entry));
            let expected =
                format!("{} or more, the value of the entry before it", value(entry - 1));
            return Err(malformed(file, at(entry), FormatRule::DocumentOrder, found, expected));
        }
        if value(last) as u64 != sequences as u64 {
            let found = format!("{} in its last entry", value(last));
            let expected =
                format!("a document index that ends with {sequences}, the sequence count");
            return Err(malformed(file, at(last), FormatRule::DocumentEnd, found, expected));
        }
        Ok(())
    }
}

/// Type and counts of an unchecked header, from the first bytes of a file.
pub(crate) fn header_fields(bytes: &[u8], file: &str) -> Result<(Dtype, u64, u64)> {
    let len = bytes.len();
    let Some(header) = bytes.first_chunk::<{ HEADER_BYTES as usize }>() else {
        // For a short file with another magic, the magic is the better message.
        let start = len.min(MAGIC.len());
        check_magic(&bytes[..start], &MAGIC[..start], file)?;
        let expected = format!("a header of {HEADER_BYTES} bytes");
        return Err(malformed(file, len, FormatRule::TooShort, END_OF_FILE, expected));
    };
    check_magic(&header[..9], &MAGIC, file)?;
    let version = u64_at(header, 9);
    if version != VERSION {
        let expected = format!("version {VERSION}");
        return Err(malformed(
            file,
            9,
            FormatRule::Version,
            format!("version {version}"),
            expected,
        ));
    }
    let code = header[17];
    let dtype = Dtype::from_code_of_any(code).ok_or_else(|| {
        malformed(file, 17, FormatRule::Dtype, format!("dtype code {code}"), "dtype code 1 to 8")
    })?;
    Ok((dtype, u64_at(header, 18), u64_at(header, 26)))
}

/// The first 34 bytes.
pub(crate) fn header(dtype: Dtype, sequences: u64, document_index_len: u64) -> [u8; 34] {
    let mut bytes = [0; HEADER_BYTES as usize];
    bytes[..9].copy_from_slice(&MAGIC);
    bytes[9..17].copy_from_slice(&VERSION.to_le_bytes());
    bytes[17] = dtype.code();
    bytes[18..26].copy_from_slice(&sequences.to_le_bytes());
    bytes[26..34].copy_from_slice(&document_index_len.to_le_bytes());
    bytes
}

/// Buffers the header and the items of tables, and computes the checksums of what is written.
#[derive(Debug, Default)]
pub(crate) struct Table {
    pending: Vec<u8>,
    /// CRC of the whole file.
    pub(crate) sums: IdxSums,
}

impl Table {
    /// Large enough that the cost of the call is negligible.
    const CHUNK_BYTES: usize = 1 << 16;

    pub(crate) fn push<const N: usize>(
        &mut self,
        item: [u8; N],
        upload: &mut dyn Upload,
    ) -> Result<()> {
        self.pending.extend_from_slice(&item);
        if self.pending.len() >= Self::CHUNK_BYTES { self.end(upload) } else { Ok(()) }
    }

    pub(crate) fn end(&mut self, upload: &mut dyn Upload) -> Result<()> {
        self.sums.update(&self.pending);
        upload.write(&self.pending)?;
        self.pending.clear();
        Ok(())
    }
}

pub(crate) fn malformed(
    file: &str,
    offset: usize,
    fault: FormatRule,
    found: impl Into<String>,
    expected: impl Into<String>,
) -> Error {
    let (file, offset) = (file.to_owned(), offset as u64);
    Error::Malformed { file, offset, fault, found: found.into(), expected: expected.into() }
}

fn check_magic(found: &[u8], expected: &[u8], file: &str) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    let (found, expected) =
        (format!("\"{}\"", found.escape_ascii()), format!("\"{}\"", expected.escape_ascii()));
    Err(malformed(file, 0, FormatRule::Magic, found, expected))
}

/// The found text of a message for a truncated file.
pub(crate) const END_OF_FILE: &str = "end of file";

/// The found text of a message at the first byte where a file of `len` bytes and one of `expected`
/// bytes differ.
pub(crate) fn end_at(len: u128, expected: u128) -> String {
    match len.checked_sub(expected) {
        None | Some(0) => END_OF_FILE.to_owned(),
        Some(_) => format!("a file of {len} bytes, which continues"),
    }
}

fn u64_at(header: &[u8; HEADER_BYTES as usize], at: usize) -> u64 {
    let field = header[at..].first_chunk().expect("every field ends within the header");
    u64::from_le_bytes(*field)
}
