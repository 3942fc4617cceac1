use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::decompress::Decompressor;
use super::frames::DecodePlan;
use super::json_array::{ArrayFault, ArrayScan};
use super::lines::{count_line_ends, line_end_known};
use super::stream::InputStream;
use super::text::Separator;
use super::{Input, RecordFormat};
use crate::batch::document_batch::{BatchEnd, DocumentBatch, too_long};
use crate::{Error, Result, tfrecord};

/// A position between two documents, at which a run may resume. The unit of its offset depends on
/// the input: decompressed bytes, or rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Position {
    pub(crate) input_idx: usize,
    pub(crate) offset: u64,
}

/// Cuts the inputs, one after another, into batches of whole documents.
#[derive(Debug)]
pub(crate) struct InputChunker {
    inputs: Vec<Input>,
    block_bytes: usize,
    line_bytes_max: usize,
    threads: usize,
    ahead: Option<Arc<Decompressor>>,
    input_idx: usize,
    open: Option<Open>,
    /// The start of a document whose end has not been read yet.
    rest: Vec<u8>,
    /// Offset of `rest` in its input, decompressed.
    offset: u64,
    seq: u64,
}

/// An input that is being read.
#[derive(Debug)]
enum Open {
    Bytes {
        source: InputStream,
        scan: ArrayScan,
    },
    #[cfg(feature = "parquet")]
    Rows(Box<super::parquet::RowReader>),
}

/// How far a batch was filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Filled {
    /// The input may have more.
    Some,
    /// The batch is the last of its input.
    Last,
    /// The input had ended.
    Nothing,
}

impl InputChunker {
    pub(crate) fn new(inputs: Vec<Input>, block_bytes: usize, line_bytes_max: usize) -> Self {
        InputChunker {
            inputs,
            block_bytes,
            line_bytes_max,
            threads: 1,
            ahead: None,
            input_idx: 0,
            open: None,
            rest: Vec::new(),
            offset: 0,
            seq: 0,
        }
    }

    /// Decompresses on `threads` additional threads.
    #[must_use]
    pub(crate) fn ahead(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }

    /// Resumes where an earlier run of the same inputs stopped: at [`DocumentBatch::next`] of its
    /// last batch.
    #[must_use]
    pub(crate) fn start_at(mut self, position: Position) -> Self {
        self.input_idx = position.input_idx;
        self.offset = position.offset;
        self
    }

    /// Fills an empty batch. False if there is no more input. A batch returned with
    /// [`DocumentBatch::stop`] set is the last.
    pub(crate) fn fill(&mut self, batch: &mut DocumentBatch) -> bool {
        while self.input_idx < self.inputs.len() {
            batch.input_idx = self.input_idx;
            batch.offset = self.offset;
            let filled = self.fill_from_input(batch);
            if matches!(filled, Ok(Filled::Last | Filled::Nothing)) {
                self.input_idx += 1;
                self.offset = 0;
                self.open = None;
                self.rest.clear();
            }
            match filled {
                Ok(Filled::Nothing) => continue,
                Ok(Filled::Some | Filled::Last) => {}
                Err(error) => batch.stop = Some(BatchEnd::Input(error)),
            }
            if let Some(BatchEnd::Line { offset, .. }) = batch.stop {
                // No worker gets this batch, so its lines are counted here.
                let before = offset.min(batch.bytes.len());
                batch.documents.lines = count_line_ends(&batch.bytes, before);
            }
            batch.next = Position { input_idx: self.input_idx, offset: self.offset };
            batch.seq = self.seq;
            self.seq += 1;
            return true;
        }
        false
    }

    fn fill_from_input(&mut self, batch: &mut DocumentBatch) -> Result<Filled> {
        if self.open.is_none() && !self.open_input()? {
            return Ok(Filled::Nothing);
        }
        let input = &self.inputs[self.input_idx];
        batch.offset = self.offset;
        batch.shape = input.shape.clone();
        batch.numbered = input.part.start == 0;
        match self.open.as_mut().expect("opened above") {
            Open::Bytes { source, scan } => {
                batch.bytes.append(&mut self.rest);
                let mut block = ChunkBuffer {
                    source,
                    scan,
                    rest: &mut self.rest,
                    // Documents that begin at or after it belong to another shard.
                    limit: input.part.end.saturating_sub(self.offset),
                    block_bytes: self.block_bytes,
                    line_bytes_max: self.line_bytes_max,
                };
                let filled = block.fill(batch)?;
                self.offset += batch.bytes.len() as u64;
                batch.decompressed = source.decompressed;
                batch.stored_bytes = match source.decompressed {
                    true => source.stored_bytes(),
                    false => self.offset - input.part.start.min(self.offset),
                };
                Ok(filled)
            }
            #[cfg(feature = "parquet")]
            Open::Rows(reader) => {
                let filled = reader.fill(batch, self.block_bytes)?;
                self.offset = reader.row();
                Ok(filled)
            }
        }
    }

    /// Opens the next input. False if this shard has no part of it.
    fn open_input(&mut self) -> Result<bool> {
        let input = &self.inputs[self.input_idx];
        let part = input.part.clone();
        if part.is_empty() {
            return Ok(false);
        }
        #[cfg(feature = "parquet")]
        if let RecordFormat::Rows(column) = &input.shape {
            let reader = super::parquet::RowReader::open(input, column, self.offset)?;
            self.open = Some(Open::Rows(Box::new(reader)));
            return Ok(true);
        }
        let mut source = if input.codec.is_compressed() {
            if self.ahead.is_none() {
                let started = Decompressor::start(self.decode_plan(), self.threads);
                self.ahead = Some(Arc::new(started.map_err(Error::no_thread)?));
            }
            let ahead = self.ahead.as_ref().expect("started above");
            InputStream::ahead(input, self.input_idx, ahead, self.offset)
        } else if part.start > 0 && self.offset == 0 {
            // A line belongs to the part that has its first byte. A line end before it shows where
            // that is.
            self.offset = part.start - 1;
            InputStream::open(input, self.offset)?
        } else {
            InputStream::open(input, self.offset)?
        };
        if part.start > self.offset && !self.skip_line(&mut source)? {
            return Ok(false);
        }
        let scan = ArrayScan::new(self.offset);
        self.open = Some(Open::Bytes { source, scan });
        Ok(true)
    }

    /// The compressed inputs from here on.
    fn decode_plan(&self) -> DecodePlan {
        let all = (0..).zip(&self.inputs).skip(self.input_idx);
        let compressed =
            all.filter(|(_, input)| input.codec.is_compressed() && !input.part.is_empty());
        let inputs = compressed.map(|(at, input)| (at, input.clone())).collect();
        DecodePlan::new(inputs, self.offset)
    }

    /// Skips to the start of the next line. False: the input has none.
    fn skip_line(&mut self, source: &mut InputStream) -> Result<bool> {
        self.rest.clear();
        while source.read(&mut self.rest, self.block_bytes)?.is_some() {
            let line = line_end_known(&self.rest);
            // A `\r` at the end stays, until it is known whether a `\n` follows.
            let pending = usize::from(self.rest.ends_with(b"\r"));
            let skipped = line.map_or(self.rest.len() - pending, |line| line.next);
            self.offset += skipped as u64;
            self.rest.drain(..skipped);
            if line.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// A batch being filled from a byte stream.
struct ChunkBuffer<'a> {
    source: &'a mut InputStream,
    scan: &'a mut ArrayScan,
    rest: &'a mut Vec<u8>,
    limit: u64,
    block_bytes: usize,
    line_bytes_max: usize,
}

impl ChunkBuffer<'_> {
    fn fill(&mut self, batch: &mut DocumentBatch) -> Result<Filled> {
        if self.limit == 0 {
            batch.bytes.clear();
            return Ok(Filled::Nothing);
        }
        let mut searched = 0;
        loop {
            let more = self.source.read(&mut batch.bytes, self.block_bytes)?.is_some();
            if let Some(end) = self.end_of_part(&batch.bytes) {
                batch.bytes.truncate(end);
                return Ok(Filled::Last);
            }
            if !more {
                return Ok(self.end_of_input(batch));
            }
            if let Some(end) = self.last_end(batch, searched) {
                self.rest.extend_from_slice(&batch.bytes[end..]);
                batch.bytes.truncate(end);
                return Ok(Filled::Some);
            }
            if batch.stop.is_some() {
                return Ok(Filled::Some);
            }
            if batch.bytes.len() > self.line_bytes_max {
                let fault = too_long(self.line_bytes_max);
                batch.stop = Some(BatchEnd::Line { offset: 0, fault });
                return Ok(Filled::Some);
            }
            searched = batch.bytes.len();
        }
    }

    /// End of the lines that begin in this part, if that has been read.
    fn end_of_part(&self, bytes: &[u8]) -> Option<usize> {
        let last = usize::try_from(self.limit).ok()?.checked_sub(1)?;
        Some(last + line_end_known(bytes.get(last..)?)?.next)
    }

    /// End of the last complete document.
    fn last_end(&mut self, batch: &mut DocumentBatch, searched: usize) -> Option<usize> {
        let DocumentBatch { shape, bytes, spans, stop, .. } = batch;
        match shape {
            RecordFormat::JsonLines => Separator::Line.last_end(bytes, searched),
            RecordFormat::Text(rules) => rules.separator.last_end(bytes, searched),
            RecordFormat::TfRecord => {
                let scanned = tfrecord::scan(bytes, spans);
                let fault = |fault| *stop = Some(BatchEnd::Line { offset: 0, fault });
                scanned.map_err(fault).ok().filter(|&end| end > 0)
            }
            _ => {
                let scanned = self.scan.scan(bytes, spans);
                let Some(last) = spans.last() else {
                    // An error after some elements is reported after those elements.
                    *stop = scanned.err().map(stop_at);
                    return None;
                };
                self.scan.cut();
                Some(last.end)
            }
        }
    }

    /// The rest is the last document, or the end of a list.
    fn end_of_input(&mut self, batch: &mut DocumentBatch) -> Filled {
        if matches!(batch.shape, RecordFormat::JsonArray) {
            let ended = self.scan.scan(&batch.bytes, &mut batch.spans);
            batch.stop = ended.and_then(|()| self.scan.end()).err().map(stop_at);
        }
        if matches!(batch.shape, RecordFormat::TfRecord) && !batch.bytes.is_empty() {
            let scanned = tfrecord::scan(&batch.bytes, &mut batch.spans);
            let fault = scanned.err().unwrap_or_else(|| tfrecord::truncated(&batch.bytes));
            batch.stop = Some(BatchEnd::Line { offset: 0, fault });
        }
        match batch.bytes.is_empty() && batch.stop.is_none() {
            true => Filled::Nothing,
            false => Filled::Last,
        }
    }
}

fn stop_at((offset, fault): ArrayFault) -> BatchEnd {
    BatchEnd::Line { offset, fault }
}
