//! What travels round the pipeline: whole lines of an input on the way out, their tokens on the way
//! back. A parcel is filled again when it returns, so that after the first round nothing is
//! allocated.

use std::mem;

use memchr::memrchr;

use crate::documents::Documents;
use crate::input::{Input, Source};
use crate::json::Fault;
use crate::{Error, Result};

/// Whole lines of one input, and what became of them.
#[derive(Debug, Default)]
pub(crate) struct Parcel {
    /// Its place in the order of the run.
    pub(crate) seq: u64,
    /// Which input.
    pub(crate) input_idx: usize,
    /// Where its bytes begin in the input, decompressed.
    pub(crate) offset: u64,
    pub(crate) decompressed: bool,
    /// Bytes taken from the input when these were cut, as it is stored.
    pub(crate) stored_bytes: u64,
    /// Lines, each but perhaps the last with its newline.
    pub(crate) bytes: Vec<u8>,
    pub(crate) documents: Documents,
    /// Why the run must end after these documents.
    pub(crate) stop: Option<Stop>,
}

#[derive(Debug)]
pub(crate) enum Stop {
    /// A bad line; it begins `offset` bytes into the parcel, after [`Documents::lines`] good ones.
    Line { offset: usize, fault: Fault },
    /// The input could not be read on.
    Input(Error),
}

/// Buffers keep up to this between parcels, twice what a block gives at worst; more was for an
/// uncommonly long line.
pub(crate) const BUFFER_BYTES_KEPT_MAX: usize = 8 << 20;

impl Parcel {
    /// Empties it for its next round.
    pub(crate) fn reset(&mut self) {
        self.bytes.clear();
        self.bytes.shrink_to(BUFFER_BYTES_KEPT_MAX);
        self.documents.reset();
        let (bytes, documents) = (mem::take(&mut self.bytes), mem::take(&mut self.documents));
        *self = Parcel { bytes, documents, ..Parcel::default() };
    }
}

/// Cuts the inputs, one after another, into parcels of whole lines.
#[derive(Debug)]
pub(crate) struct Cutter {
    inputs: Vec<Input>,
    block_bytes: usize,
    line_bytes_max: usize,
    input_idx: usize,
    source: Option<Source>,
    /// The begin of a line whose end has not been read yet.
    rest: Vec<u8>,
    /// Where `rest` begins in its input, decompressed.
    offset: u64,
    skip: u64,
    seq: u64,
}

impl Cutter {
    pub(crate) fn new(inputs: Vec<Input>, block_bytes: usize, line_bytes_max: usize) -> Self {
        Cutter {
            inputs,
            block_bytes,
            line_bytes_max,
            input_idx: 0,
            source: None,
            rest: Vec::new(),
            offset: 0,
            skip: 0,
            seq: 0,
        }
    }

    /// Begins at a place that an earlier run has come to.
    pub(crate) fn start_at(mut self, input_idx: usize, offset: u64) -> Self {
        (self.input_idx, self.skip) = (input_idx, offset);
        self
    }

    /// Fills an empty parcel. False: there is nothing more. A parcel that comes back with
    /// [`Parcel::stop`] set is the last.
    pub(crate) fn fill(&mut self, parcel: &mut Parcel) -> bool {
        while self.input_idx < self.inputs.len() {
            match self.fill_from_input(parcel) {
                Ok(true) => return true,
                Ok(false) => {
                    self.input_idx += 1;
                    self.source = None;
                    self.offset = 0;
                }
                Err(error) => {
                    parcel.stop = Some(Stop::Input(error));
                    self.label(parcel);
                    return true;
                }
            }
        }
        false
    }

    /// False: this input has ended.
    fn fill_from_input(&mut self, parcel: &mut Parcel) -> Result<bool> {
        let source = match &mut self.source {
            Some(source) => source,
            empty => empty.insert(self.inputs[self.input_idx].open()?),
        };
        let bytes = &mut parcel.bytes;
        while self.offset < self.skip {
            let left = (self.skip - self.offset).min(self.block_bytes as u64) as usize;
            match source.read(bytes, left)? {
                Some(read) => self.offset += read as u64,
                None => break,
            }
            bytes.clear();
        }
        self.skip = 0;
        bytes.append(&mut self.rest);
        loop {
            let searched = bytes.len();
            if source.read(bytes, self.block_bytes)?.is_none() {
                if bytes.is_empty() {
                    return Ok(false);
                }
                break;
            }
            if let Some(last) = memrchr(b'\n', &bytes[searched..]) {
                let end = searched + last + 1;
                self.rest.extend_from_slice(&bytes[end..]);
                bytes.truncate(end);
                break;
            }
            if bytes.len() > self.line_bytes_max {
                let fault = too_long(self.line_bytes_max);
                parcel.stop = Some(Stop::Line { offset: 0, fault });
                break;
            }
        }
        parcel.decompressed = source.decompressed;
        parcel.stored_bytes = source.stored_bytes();
        self.label(parcel);
        Ok(true)
    }

    fn label(&mut self, parcel: &mut Parcel) {
        parcel.seq = self.seq;
        parcel.input_idx = self.input_idx;
        parcel.offset = self.offset;
        self.seq += 1;
        self.offset += parcel.bytes.len() as u64;
    }
}

/// What is wrong with a line that is longer than it may be.
pub(crate) fn too_long(line_bytes_max: usize) -> Fault {
    Fault {
        column: line_bytes_max,
        got: "no end of the line yet".to_owned(),
        due: format!("lines of at most {}", storage::ByteSize(line_bytes_max as u64)),
        hint: Some("lines end with \\n; or raise --line-max, at the cost of memory"),
    }
}
