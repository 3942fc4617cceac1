//! Where sequences and documents end, in each format.

use super::bert::BertRecords;
use super::column::{Column, Entries};
use super::cpm2::Triple;
use super::dolma::Spans;
use crate::mmididx::idx::malformed;
use crate::{FormatRule, Result};

/// How a format marks its sequences and documents.
#[derive(Debug)]
pub(super) enum Boundaries {
    /// A table of lengths, checked against a table of starts, and the first sequence of every
    /// document.
    Lengths(Lengths),
    /// Where each document ends, in tokens; each is one sequence.
    Ends(Column),
    /// From the tables of Dolma.
    Spans(Vec<Spans>),
    /// Documents of one length.
    Rows { rows: u64, tokens: u64 },
    /// After each token of this id; without an id all is one document.
    After(Option<u32>),
    /// The three files of CPM-2 together hold one document each.
    Triple(Box<Triple>),
    /// Each example of BERT is one or two documents.
    Bert(BertRecords),
}

/// The end of a sequence or a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Boundary {
    Sequence { len: u64, mode: i8 },
    Document,
}

/// Tables of lengths.
#[derive(Debug)]
pub(super) struct Lengths {
    /// Tokens of each sequence.
    pub lengths: Column,
    /// Where each starts, and the units per token: its bytes, or 1.
    pub starts: Option<(Column, u64)>,
    /// The first sequence of each document, and the number of sequences; none if each sequence is a
    /// document.
    pub documents: Option<Column>,
    pub modes: Option<Column>,
}

impl Boundaries {
    /// All boundaries in order; none if the tokens contain them.
    pub(super) fn iter(&self) -> Result<Box<dyn Iterator<Item = Result<Boundary>> + '_>> {
        Ok(match self {
            Boundaries::Lengths(lengths) => Box::new(lengths.iter()),
            Boundaries::Ends(ends) => Box::new(of_ends(ends)),
            Boundaries::Spans(parts) => {
                let marks = parts.iter().flat_map(|part| match part.lens() {
                    Ok(lens) => Box::new(lens) as Box<dyn Iterator<Item = Result<u64>>>,
                    Err(error) => Box::new(std::iter::once(Err(error))),
                });
                Box::new(documents(marks))
            }
            &Boundaries::Rows { rows, tokens } => {
                Box::new(documents((0..rows).map(move |_| Ok(tokens))))
            }
            Boundaries::After(_) | Boundaries::Triple(_) | Boundaries::Bert(_) => {
                Box::new(std::iter::empty())
            }
        })
    }
}

/// Documents of one sequence each.
fn documents(lens: impl Iterator<Item = Result<u64>>) -> impl Iterator<Item = Result<Boundary>> {
    lens.flat_map(|len| match len {
        Ok(len) => [Some(Ok(Boundary::Sequence { len, mode: 0 })), Some(Ok(Boundary::Document))],
        Err(error) => [Some(Err(error)), None],
    })
    .flatten()
}

fn of_ends(ends: &Column) -> impl Iterator<Item = Result<Boundary>> {
    let column = ends.clone();
    let mut last = 0;
    let lens = ends.iter().enumerate().map(move |(nth, end)| {
        let end = end?;
        if end < last {
            let found = format!("end {end} of document {nth}");
            let expected = format!("an end of {last} or more, the end of the document before it");
            let at = column.place(nth as u64) as usize;
            return Err(malformed(&column.file(), at, FormatRule::DocumentOrder, found, expected));
        }
        let len = (end - last) as u64; // fits: ends do not decrease
        last = end;
        Ok(len)
    });
    documents(lens)
}

impl Lengths {
    pub(super) fn iter(&self) -> LengthMarks<'_> {
        LengthMarks {
            tables: self,
            lengths: self.lengths.iter(),
            starts: self.starts.as_ref().map(|(column, _)| column.iter()),
            documents: self.documents.as_ref().map(Column::iter),
            modes: self.modes.as_ref().map(Column::iter),
            sequence: 0,
            sequence_end: 0,
            entry: 0,
            in_document: false,
            start: 0,
            done: false,
        }
    }
}

/// The boundaries of [`Lengths`], each entry checked as it is read.
#[derive(Debug)]
pub(super) struct LengthMarks<'a> {
    tables: &'a Lengths,
    lengths: Entries,
    starts: Option<Entries>,
    documents: Option<Entries>,
    modes: Option<Entries>,
    /// Sequences so far.
    sequence: u64,
    /// The first sequence after the current document.
    sequence_end: u64,
    /// Entries of the document index so far.
    entry: u64,
    in_document: bool,
    /// Where the next sequence must start.
    start: i64,
    done: bool,
}

impl Iterator for LengthMarks<'_> {
    type Item = Result<Boundary>;

    fn next(&mut self) -> Option<Result<Boundary>> {
        if self.done {
            return None;
        }
        let mark = self.advance();
        self.done = !matches!(mark, Ok(Some(_)));
        mark.transpose()
    }
}

impl LengthMarks<'_> {
    fn advance(&mut self) -> Result<Option<Boundary>> {
        if self.entry == 0 {
            self.begin()?;
        }
        loop {
            if self.sequence < self.sequence_end {
                return self.next_sequence().map(Some);
            }
            if self.in_document {
                self.in_document = false;
                return Ok(Some(Boundary::Document));
            }
            if !self.next_document()? {
                return Ok(None);
            }
            self.in_document = true;
        }
    }

    /// The document index starts with 0.
    fn begin(&mut self) -> Result<()> {
        self.entry = 1;
        let Some(documents) = &mut self.documents else { return Ok(()) };
        let first = documents.next().transpose()?;
        if first != Some(0) {
            let found = format!("sequence {}", first.unwrap_or(-1));
            let expected = "first document at sequence 0".to_owned();
            return Err(self.bad_document(0, FormatRule::DocumentStart, found, expected));
        }
        let sequences = self.tables.lengths.count();
        if self.tables.documents.as_ref().is_some_and(|column| column.count() == 1) && sequences > 0
        {
            let found = format!("the single entry 0 for {sequences} sequences");
            let expected = format!("a document index that ends with {sequences}");
            return Err(self.bad_document(0, FormatRule::NoDocumentEnds, found, expected));
        }
        Ok(())
    }

    fn next_document(&mut self) -> Result<bool> {
        let sequences = self.tables.lengths.count();
        let Some(documents) = &mut self.documents else {
            self.sequence_end += u64::from(self.sequence < sequences);
            return Ok(self.sequence < sequences);
        };
        let Some(next) = documents.next().transpose()? else {
            if self.sequence == sequences {
                return Ok(false);
            }
            let found = format!("{} in its last entry", self.sequence);
            let expected =
                format!("a document index that ends with {sequences}, the sequence count");
            return Err(self.bad_document(
                self.entry - 1,
                FormatRule::DocumentEnd,
                found,
                expected,
            ));
        };
        let found = || format!("{next} in entry {} of the document index", self.entry);
        if next < self.sequence_end as i64 {
            let expected =
                format!("{} or more, the value of the entry before it", self.sequence_end);
            return Err(self.bad_document(
                self.entry,
                FormatRule::DocumentOrder,
                found(),
                expected,
            ));
        }
        if next as u64 > sequences {
            let expected = format!("at most {sequences}, the sequence count");
            return Err(self.bad_document(self.entry, FormatRule::DocumentEnd, found(), expected));
        }
        self.sequence_end = next as u64;
        self.entry += 1;
        Ok(true)
    }

    fn next_sequence(&mut self) -> Result<Boundary> {
        let sequence = self.sequence;
        let checked = "no more sequences than entries, as was checked";
        let len = self.lengths.next().expect(checked)?;
        if len < 0 {
            let lengths = &self.tables.lengths;
            let (at, found) =
                (lengths.place(sequence), format!("length {len} of sequence {sequence}"));
            let fault = FormatRule::SequenceLength;
            let expected = "a length of 0 or more";
            return Err(malformed(&lengths.file(), at as usize, fault, found, expected));
        }
        if let (Some(starts), Some((column, unit))) = (&mut self.starts, &self.tables.starts) {
            let (found, expected) = (starts.next().expect(checked)?, self.start);
            let next = len.checked_mul(*unit as i64).and_then(|bytes| expected.checked_add(bytes));
            self.start = match next {
                Some(next) if found == expected => next,
                _ => {
                    let found = format!("pointer {found} of sequence {sequence}, of {len} tokens");
                    let expected = format!("pointer {expected}, the sum of the lengths before it");
                    let at = column.place(sequence) as usize;
                    return Err(malformed(
                        &column.file(),
                        at,
                        FormatRule::Pointer,
                        found,
                        expected,
                    ));
                }
            };
        }
        let mode = self.modes.as_mut().and_then(Iterator::next).transpose()?.unwrap_or(0);
        self.sequence += 1;
        Ok(Boundary::Sequence { len: len as u64, mode: mode as i8 }) // fits: an entry of one byte
    }

    fn bad_document(
        &self,
        entry: u64,
        fault: FormatRule,
        found: String,
        expected: String,
    ) -> crate::Error {
        let column = self.tables.documents.as_ref().expect("called only with a document table");
        malformed(&column.file(), column.place(entry) as usize, fault, found, expected)
    }
}
