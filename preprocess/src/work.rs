//! What a worker does: lines to documents of tokens.

use std::time::Instant;

use indexed::Dtype;
use memchr::memchr;

use crate::documents::{Bad, Documents, Encoded};
use crate::json::{Fault, TextFinder};
use crate::objective::{self, Dropped, SpanConfig, Triple};
use crate::parcel::{BUFFER_BYTES_KEPT_MAX, Parcel, Stop, too_long};
use crate::{EmptyDocuments, Encode, OnBadLine, Tokenizer, long};

/// One line in so many is timed: reading the clock for each would take longer than the shortest.
const TIMED_EVERY: u64 = 16;

/// What all workers of a run do alike.
#[derive(Clone, Debug)]
pub(crate) struct Work {
    pub(crate) keys: Vec<String>,
    /// Appended to every document that has tokens.
    pub(crate) eod: Option<u32>,
    pub(crate) empty_documents: EmptyDocuments,
    /// Of the datasets that are written: as many as keys, or three for each.
    pub(crate) dtypes: Vec<Dtype>,
    pub(crate) spans: Option<SpanConfig>,
    pub(crate) on_bad_line: OnBadLine,
    pub(crate) line_bytes_max: usize,
    /// Threads for one long text.
    pub(crate) workers: usize,
}

/// One worker's memory.
#[derive(Debug)]
pub(crate) struct Worker<'a> {
    work: &'a Work,
    tokenizer: &'a dyn Tokenizer,
    encoder: Box<dyn Encode + 'a>,
    finders: Vec<TextFinder>,
    ids: Vec<u32>,
    triple: Triple,
    places: Vec<[usize; 3]>,
    /// Lines so far, to time some of them.
    lines: u64,
}

/// How a line of a known place is worked on.
#[derive(Clone, Copy, Debug)]
struct Line<'a> {
    bytes: &'a [u8],
    /// A number that no other document has, and this one in every run.
    document: u64,
}

impl<'a> Worker<'a> {
    pub(crate) fn new(work: &'a Work, tokenizer: &'a dyn Tokenizer) -> Self {
        Worker {
            work,
            tokenizer,
            encoder: tokenizer.encoder(),
            finders: work.keys.iter().map(|key| TextFinder::new(key)).collect(),
            ids: Vec::new(),
            triple: Triple::default(),
            places: Vec::new(),
            lines: 0,
        }
    }

    /// Encodes the lines of a parcel, up to the first bad one that may not be left out.
    pub(crate) fn encode(&mut self, parcel: &mut Parcel) {
        parcel.documents.outputs.resize_with(self.work.dtypes.len(), Encoded::default);
        let mut offset = 0;
        while offset < parcel.bytes.len() {
            let rest = &parcel.bytes[offset..];
            let bytes = &rest[..memchr(b'\n', rest).unwrap_or(rest.len())];
            let document = document_number(parcel.input_idx, parcel.offset + offset as u64);
            let (next, documents) = (offset + bytes.len() + 1, &mut parcel.documents);
            if let Err(fault) = self.encode_line(Line { bytes, document }, documents) {
                if self.work.on_bad_line == OnBadLine::Fail {
                    parcel.stop = Some(Stop::Line { offset, fault });
                    return;
                }
                documents.rewind(&self.places);
                documents.tally.skipped.bad_lines += 1;
                documents.bad.push(Bad { line: documents.lines, offset, fault });
            }
            documents.lines += 1;
            offset = next;
        }
        for finder in &mut self.finders {
            finder.shrink_to(BUFFER_BYTES_KEPT_MAX);
        }
        self.ids.clear();
        self.ids.shrink_to(BUFFER_BYTES_KEPT_MAX / size_of::<u32>());
    }

    fn encode_line(&mut self, line: Line<'_>, documents: &mut Documents) -> Result<(), Fault> {
        documents.place(&mut self.places);
        let Line { bytes, .. } = line;
        if bytes.len() > self.work.line_bytes_max {
            return Err(too_long(self.work.line_bytes_max));
        }
        if bytes.iter().all(|byte| matches!(byte, b' ' | b'\t' | b'\r')) {
            documents.tally.blank_lines += 1;
            return Ok(());
        }
        let text = std::str::from_utf8(bytes).map_err(|e| not_utf8(bytes, e.valid_up_to()))?;
        let mut tally = documents.tally;
        self.lines += 1;
        let timed = self.lines.is_multiple_of(TIMED_EVERY);
        for key in 0..self.finders.len() {
            let start = timed.then(Instant::now);
            let found = self.finders[key].find(text)?;
            tally.text_bytes += found.len() as u64;
            let parsed = timed.then(Instant::now);
            self.ids.clear();
            if !long::encode(self.tokenizer, found, self.work.workers, &mut self.ids) {
                self.encoder.encode(found, &mut self.ids);
            }
            if let (Some(start), Some(parsed)) = (start, parsed) {
                documents.parse_ns += (parsed - start).as_nanos() as u64 * TIMED_EVERY;
                documents.tokenize_ns += parsed.elapsed().as_nanos() as u64 * TIMED_EVERY;
            }
            if let Some(config) = &self.work.spans {
                let characters = found.chars().count() as u64 + 1;
                if let Some(cause) = Dropped::of(characters, self.ids.len() as u64) {
                    match cause {
                        Dropped::LongLine => tally.skipped.long_lines += 1,
                        Dropped::FewTokens => tally.skipped.few_tokens += 1,
                    }
                    continue;
                }
                self.ids.extend(self.work.eod);
                objective::corrupt(&self.ids, line.document, config, &mut self.triple).map_err(
                    |error| Fault {
                        column: 0,
                        got: error.got,
                        due: error.due,
                        hint: Some(error.hint),
                    },
                )?;
                let Triple { context, target, offsets } = &self.triple;
                for (part, ids) in [context, target, offsets].into_iter().enumerate() {
                    let output = 3 * key + part;
                    documents.outputs[output].push(ids, self.work.dtypes[output]);
                }
            } else {
                self.write_document(&mut documents.outputs[key], self.work.dtypes[key], &mut tally);
            }
        }
        tally.documents += 1;
        documents.tally = tally;
        Ok(())
    }

    fn write_document(
        &mut self,
        output: &mut Encoded,
        dtype: Dtype,
        tally: &mut crate::documents::Tally,
    ) {
        if self.ids.is_empty() {
            match self.work.empty_documents {
                EmptyDocuments::Megatron => {
                    tally.empty += 1;
                    output.sequences.push(0);
                    return;
                }
                EmptyDocuments::Skip => {
                    tally.skipped.empty += 1;
                    return;
                }
                EmptyDocuments::Sequence => tally.empty += 1,
            }
        }
        self.ids.extend(self.work.eod);
        output.push(&self.ids, dtype);
    }
}

impl Encoded {
    /// Appends a document of one sequence.
    fn push(&mut self, ids: &[u32], dtype: Dtype) {
        write_ids(ids, dtype, &mut self.bytes);
        // fits: a line, and so its tokens, are bounded by `Options::line_bytes_max`, below 2^31.
        self.lens.push(ids.len() as u32);
        self.sequences.push(1);
    }
}

/// Where a document begins is the same in every run, for every number of workers and of shards.
fn document_number(input_idx: usize, offset: u64) -> u64 {
    (input_idx as u64) << 44 ^ offset
}

pub(crate) fn not_utf8(line: &[u8], at: usize) -> Fault {
    Fault {
        column: at,
        got: format!("the byte {:#04x}, which is no UTF-8", line[at]),
        due: "JSON in UTF-8".to_owned(),
        hint: Some("if the file is GBK or Latin-1, convert it: iconv -f GB18030 -t UTF-8 FILE"),
    }
}

/// Appends ids as they stand in a `.bin`. All are below the vocabulary size that chose the type.
fn write_ids(ids: &[u32], dtype: Dtype, bytes: &mut Vec<u8>) {
    let start = bytes.len();
    if dtype == Dtype::U16 {
        bytes.resize(start + ids.len() * 2, 0);
        for (item, &id) in bytes[start..].as_chunks_mut().0.iter_mut().zip(ids) {
            *item = (id as u16).to_le_bytes(); // fits: the vocabulary is below 65,536
        }
    } else {
        bytes.resize(start + ids.len() * 4, 0);
        for (item, &id) in bytes[start..].as_chunks_mut().0.iter_mut().zip(ids) {
            *item = id.to_le_bytes();
        }
    }
}
