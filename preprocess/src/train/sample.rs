//! A random sample of the documents of a corpus, in bounded memory.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::slice;
use std::sync::atomic::AtomicBool;

use indexed::{Example, RECORD_HEADER_BYTES};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::TrainOptions;
use crate::batch::document_batch::{BatchEnd, DocumentBatch, too_long};
use crate::input::{Input, InputChunker, RecordFormat, Records, expand};
use crate::json::scanner::{LineFault, TextFinder, Value};
use crate::pipeline::{PipelineItem, pump};
use crate::tfrecord::write_json;
use crate::tokens::worker::not_utf8;
use crate::{BadLine, Error, Result};

/// Longer texts are divided into parts, which are sampled separately.
const PART_BYTES_MAX: usize = 1 << 20;

/// Bytes read and cut at a time. The sample does not depend on it.
const BLOCK_BYTES: usize = 1 << 20;

/// How much has been read.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct SampleProgress {
    /// Bytes of the inputs, as stored.
    pub stored_bytes: u64,
    /// All of them, if no input is a stream.
    pub stored_bytes_all: Option<u64>,
    /// Documents.
    pub documents: u64,
}

/// The documents that were drawn.
#[derive(Debug)]
pub(super) struct DrawnTexts {
    /// In the order of their draw.
    pub(super) texts: Vec<String>,
    pub(super) documents: u64,
    pub(super) text_bytes: u64,
    pub(super) sample_bytes: u64,
}

/// A text and the number that decides whether it stays in the sample.
#[derive(Debug)]
struct Drawn {
    number: u64,
    text: String,
}

impl PartialEq for Drawn {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Drawn {}

impl PartialOrd for Drawn {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Drawn {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.number, &self.text).cmp(&(other.number, &other.text))
    }
}

/// A batch and its texts.
#[derive(Debug, Default)]
struct TextBatch {
    document_batch: DocumentBatch,
    texts: Vec<Drawn>,
    documents: u64,
    lines: u64,
}

impl PipelineItem for TextBatch {
    fn document_batch(&mut self) -> &mut DocumentBatch {
        &mut self.document_batch
    }

    fn reset(&mut self) {
        self.document_batch.reset();
        self.texts.clear();
        (self.documents, self.lines) = (0, 0);
    }
}

/// Reads all inputs and keeps the texts with the smallest numbers. The number of a text is a hash
/// of its place, so that the sample depends on neither threads nor blocks.
pub(super) fn draw(
    options: &TrainOptions,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(SampleProgress),
) -> Result<DrawnTexts> {
    let inputs = expand(&options.inputs, &options.input, &options.key)?;
    let stored_bytes_all: Option<u64> = inputs.iter().map(Input::part_bytes).sum();
    let line_bytes_max = options.line_bytes_max as usize; // fits: at most 1 GiB
    let chunker =
        InputChunker::new(inputs.clone(), BLOCK_BYTES, line_bytes_max).ahead(options.workers);
    let mut kept = BinaryHeap::new();
    let mut sample = DrawnTexts { texts: Vec::new(), documents: 0, text_bytes: 0, sample_bytes: 0 };
    let mut lines = Lines::default();
    let worker = || {
        let mut finder = TextFinder::new(&options.key);
        move |batch: &mut TextBatch| read(batch, &mut finder, options)
    };
    let mut take = |batch: &mut TextBatch| {
        lines.add(&inputs, batch)?;
        sample.documents += batch.documents;
        for drawn in batch.texts.drain(..) {
            sample.text_bytes += drawn.text.len() as u64;
            sample.sample_bytes += drawn.text.len() as u64;
            kept.push(drawn);
        }
        // One text always stays: it is at most one part.
        while sample.sample_bytes > options.sample_bytes && kept.len() > 1 {
            let Some(last) = kept.pop() else { break };
            sample.sample_bytes -= last.text.len() as u64;
        }
        let (stored_bytes, documents) = (lines.stored_bytes, sample.documents);
        progress(SampleProgress { stored_bytes, stored_bytes_all, documents });
        Ok(())
    };
    pump(chunker, options.workers, stop, worker, &mut take)?;
    sample.texts = kept.into_sorted_vec().into_iter().map(|drawn| drawn.text).collect();
    Ok(sample)
}

/// Counts lines, for errors, and bytes.
#[derive(Debug, Default)]
struct Lines {
    input_idx: usize,
    lines: u64,
    stored_bytes: u64,
    stored_bytes_before: u64,
}

impl Lines {
    fn add(&mut self, inputs: &[Input], batch: &mut TextBatch) -> Result<()> {
        let document_batch = &mut batch.document_batch;
        if document_batch.input_idx != self.input_idx {
            self.stored_bytes_before = self.stored_bytes;
            (self.input_idx, self.lines) = (document_batch.input_idx, 0);
        }
        self.stored_bytes = self.stored_bytes_before + document_batch.stored_bytes;
        match document_batch.stop.take() {
            None => {}
            Some(BatchEnd::Input(error)) => return Err(error),
            Some(BatchEnd::Line { offset, fault }) => {
                let line = Some(self.lines + batch.lines + 1);
                let name = &inputs[document_batch.input_idx].name;
                let bad_line: BadLine = document_batch.bad_line(name, line, offset, fault);
                return Err(Error::BadLine(Box::new(bad_line)));
            }
        }
        self.lines += batch.lines;
        Ok(())
    }
}

/// Finds the texts of a batch, up to the first bad line.
fn read(batch: &mut TextBatch, finder: &mut TextFinder, options: &TrainOptions) {
    let TextBatch { document_batch, texts, documents, lines } = batch;
    let DocumentBatch { input_idx, shape, bytes, spans, stop, offset, .. } = document_batch;
    let (mut scratch, mut json) = (String::new(), String::new());
    let mut records = Records::new(shape, bytes, spans, *offset);
    while let Some(record) = records.next() {
        *lines = records.lines_before();
        if record.is_blank {
            continue;
        }
        let place = Place { input: *input_idx, offset: *offset + record.start as u64 };
        let found = (|| {
            if record.bytes.len() as u64 > options.line_bytes_max {
                return Err(too_long(options.line_bytes_max as usize)); // fits: at most 1 GiB
            }
            let utf8 = if matches!(shape, RecordFormat::TfRecord) {
                json.clear();
                let example = Example::parse(record.bytes, RECORD_HEADER_BYTES)?;
                write_json(&example, slice::from_ref(&options.key), &mut json)?;
                &json
            } else {
                std::str::from_utf8(record.bytes)
                    .map_err(|error| not_utf8(record.bytes, error.valid_up_to()))?
            };
            let value = match shape.is_json() {
                true => finder.value(utf8)?,
                false => Value::Text(shape.text(utf8, &mut scratch)),
            };
            place.draw(value, options.seed, texts)
        })();
        if let Err(fault) = found {
            *stop = Some(BatchEnd::Line { offset: record.start, fault });
            return;
        }
        *documents += 1;
    }
    *lines = records.lines_before();
}

/// Where a document begins.
struct Place {
    input: usize,
    offset: u64,
}

impl Place {
    /// Adds each part of a document with its number.
    fn draw(
        &self,
        value: Value<'_>,
        seed: u64,
        texts: &mut Vec<Drawn>,
    ) -> std::result::Result<(), LineFault> {
        let mut nth = 0_u64;
        let mut push = |text: &str| {
            for part in parts(text) {
                let place = [self.input as u64, self.offset, nth].map(u64::to_le_bytes);
                let number = xxh3_64_with_seed(place.as_flattened(), seed);
                texts.push(Drawn { number, text: part.to_owned() });
                nth += 1;
            }
        };
        match value {
            Value::Text(text) => push(text),
            Value::Texts(mut list) => {
                while let Some(text) = list.next_text() {
                    push(text?);
                }
            }
        }
        Ok(())
    }
}

/// A text in parts of at most [`PART_BYTES_MAX`], cut after a line end where there is one.
fn parts(mut text: &str) -> impl Iterator<Item = &str> {
    std::iter::from_fn(move || {
        if text.is_empty() {
            return None;
        }
        let end = match text.len() > PART_BYTES_MAX {
            false => text.len(),
            true => {
                let most = text.floor_char_boundary(PART_BYTES_MAX);
                text[..most].rfind('\n').map_or(most, |at| at + 1)
            }
        };
        let (part, rest) = text.split_at(end);
        text = rest;
        Some(part)
    })
}
