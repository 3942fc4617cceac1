//! Reads a pair of `.bin` and `.idx` (MMIDIDX) without mapping it: memory does not grow with the
//! index.

use std::ops::Range;
use std::sync::Arc;

use storage::{Key, Object, RangeRead, Storage};

use super::boundaries::{Boundaries, Boundary, Lengths};
use super::column::{Column, ColumnType};
use super::source::{TokenRun, TokenSource};
use super::{Format, MissingDocumentEnds, ReadOptions, header};
use crate::checksums::table::{BlockChecksums, File};
use crate::checksums::verified::verified;
use crate::mmididx::dataset::check_bin_len;
use crate::mmididx::idx::{END_OF_FILE, HEADER_BYTES, Layout, malformed};
use crate::{Dtype, FormatRule, Result};

/// The files of a pair, with the header read.
#[derive(Debug)]
pub(crate) struct Pair {
    pub display: String,
    /// Verified as it is read, if there are checksums.
    pub bin: Arc<dyn Object>,
    pub checksums: Option<Arc<BlockChecksums>>,
    idx: Arc<dyn Object>,
    pub layout: Layout,
    pub lengths: Column,
    pub pointers: Column,
    pub documents: Column,
    pub modes: Option<Column>,
}

impl Pair {
    /// Opens both. The counts are checked against the length of the `.idx`; its entries are not
    /// read.
    pub(crate) fn open(store: &Arc<dyn Storage>, prefix: &Key) -> Result<Self> {
        let idx = store.open(&prefix.with_suffix(".idx")?)?;
        let bin = store.open(&prefix.with_suffix(".bin")?)?;
        // Not verified yet: a broken rule of the header is a better message than a checksum.
        let mut layout =
            Layout::parse_any(&start_of(idx.as_ref())?, idx.len_bytes(), &idx.display())?;
        let checksums = BlockChecksums::open(store.as_ref(), prefix)?;
        let idx = verified(&idx, File::Idx, checksums.as_ref());
        start_of(idx.as_ref())?; // the header, verified
        let bin = verified(&bin, File::Bin, checksums.as_ref());
        let (sequences, documents) = (layout.sequences as u64, layout.document_index_len as u64);
        let at = |entries: u64| HEADER_BYTES + entries;
        let modes = layout.has_modes.then(|| {
            Column::new(&idx, at(12 * sequences + 8 * documents), sequences, ColumnType::I8)
        });
        let lengths = Column::new(&idx, at(0), sequences, ColumnType::I32)?;
        let pointers = Column::new(&idx, at(4 * sequences), sequences, ColumnType::I64)?;
        let entries = lengths.iter().zip(pointers.iter());
        let entries = entries.map(|(len, pointer)| Ok((len?, pointer?)));
        layout.dtype = layout.dtype.of_items(entries, bin.len_bytes())?;
        Ok(Pair {
            display: store.display(prefix),
            bin,
            checksums,
            lengths,
            pointers,
            documents: Column::new(&idx, at(12 * sequences), documents, ColumnType::I64)?,
            modes: modes.transpose()?,
            idx,
            layout,
        })
    }

    /// Whether no document was ended, as in the files of CPM-2 and Yuan.
    pub(crate) fn is_unended(&self) -> bool {
        self.documents.count() == 1 && self.lengths.count() > 0
    }

    /// Reads every entry of the index and checks the length of the `.bin` against them.
    pub(crate) fn check(&self) -> Result<()> {
        let mut bytes = 0_u64;
        for mark in self.marks(MissingDocumentEnds::Refused).iter() {
            if let Boundary::Sequence { len, .. } = mark? {
                // fits: the pointers, which are these sums, were checked to be positive
                bytes += len * self.layout.dtype.item_bytes();
            }
        }
        check_bin_len(self.bin.as_ref(), bytes, &self.lengths.file())?;
        self.check_lengths()
    }

    /// Refuses checksums of other files.
    fn check_lengths(&self) -> Result<()> {
        match &self.checksums {
            Some(checksums) => checksums.check_lengths(self.bin.as_ref(), self.idx.as_ref()),
            None => Ok(()),
        }
    }

    /// The sequences of some documents, and their bytes in the `.bin`.
    ///
    /// # Panics
    /// If there are no such documents. The index must have been checked.
    pub(crate) fn extent(&self, documents: &Range<u64>) -> Result<(Range<u64>, Range<u64>)> {
        let sequence = |document| Ok::<u64, crate::Error>(self.documents.get(document)? as u64);
        let sequences = sequence(documents.start)?..sequence(documents.end)?;
        let place = |sequence: u64| match sequence == self.lengths.count() {
            true => Ok(self.bin.len_bytes()),
            false => self.pointers.get(sequence).map(|pointer| pointer as u64),
        };
        let bytes = place(sequences.start)?..place(sequences.end)?;
        Ok((sequences, bytes))
    }

    /// Its boundaries. If no document was ended and that is allowed, each sequence is a document.
    pub(super) fn marks(&self, unended: MissingDocumentEnds) -> Lengths {
        let each = unended == MissingDocumentEnds::EachSequence && self.is_unended();
        Lengths {
            lengths: self.lengths.clone(),
            starts: Some((self.pointers.clone(), self.layout.dtype.item_bytes())),
            documents: (!each).then(|| self.documents.clone()),
            modes: self.modes.clone(),
        }
    }

    pub(super) fn run(&self) -> TokenRun {
        TokenRun { object: Arc::clone(&self.bin), bytes: 0..self.bin.len_bytes() }
    }

    /// # Errors
    /// [`crate::Error::OtherKind`] and [`crate::Error::NotTokens`] for elements that are no ids.
    pub(super) fn into_source(self, options: &ReadOptions) -> Result<TokenSource> {
        let dtype = ids_of(self.layout.dtype, options.dtype, &self.lengths.file())?;
        self.check_lengths()?;
        let item_bytes = dtype.item_bytes();
        let len = self.bin.len_bytes();
        if !len.is_multiple_of(item_bytes) {
            let expected = format!("a multiple of {item_bytes} bytes for {dtype} tokens");
            let (file, fault) = (self.bin.display(), FormatRule::BinTooShort);
            return Err(malformed(&file, len as usize, fault, END_OF_FILE, expected));
        }
        Ok(TokenSource {
            format: Format::Mmididx,
            dtype,
            runs: vec![self.run()],
            marks: Boundaries::Lengths(self.marks(options.unended)),
            has_modes: self.layout.has_modes,
            display: self.display,
        })
    }
}

/// The type of ids with this recorded type. Code 7 is uint32 only if the caller says so.
pub(super) fn ids_of(recorded: Dtype, asked: Option<Dtype>, file: &str) -> Result<Dtype> {
    match asked {
        Some(Dtype::U32 | Dtype::I32) if recorded == Dtype::F32 => Ok(asked.unwrap_or(recorded)),
        _ => {
            recorded.expect_ids(file)?;
            header::check_asked(file, recorded, asked)?;
            Ok(recorded)
        }
    }
}

/// The bytes that hold the header, or the whole file if it is shorter.
pub(crate) fn start_of(object: &dyn Object) -> Result<Vec<u8>> {
    /// TNTIDX has the longest header, of 56 bytes.
    const START_BYTES: u64 = 64;
    let mut bytes = vec![0; object.len_bytes().min(START_BYTES) as usize]; // fits: 64 at most
    object.read_many(&mut [RangeRead { offset: 0, buf: &mut bytes }])?;
    Ok(bytes)
}
