//! A worker: encodes lines into documents of tokens.

use std::ops::Range;
use std::time::Instant;

use indexed::{BertExample, Dtype, Example, RECORD_HEADER_BYTES};

use crate::batch::document_batch::{BUFFER_BYTES_KEPT_MAX, BatchEnd, DocumentBatch, too_long};
use crate::batch::encoded::{Encoded, EncodedDocuments, LineCounts, SkippedLine};
use crate::input::{Record, RecordFormat, Records};
use crate::json::scanner::{LineFault, TextFinder, Texts, Value};
use crate::objective::{self, Dropped, SpanConfig, SpanError, Splitter, Triple};
use crate::tfrecord::{fault, write_json};
use crate::tokens::long_text;
use crate::{EmptyDocuments, EncodeError, Encoder, Lists, OnBadLine, Tokenizer};

/// One in this many lines is timed: reading the clock for each would take longer than the shortest.
const TIMED_EVERY: u64 = 16;

const SPLIT_ALREADY: &str = "a list is already split into sentences; remove --split-sentences";

/// Settings shared by all workers of a run.
#[derive(Debug)]
pub(crate) struct WorkerSettings {
    pub(crate) keys: Vec<String>,
    /// Appended to every document that has tokens.
    pub(crate) eod: Option<u32>,
    pub(crate) lists: Lists,
    pub(crate) empty_documents: EmptyDocuments,
    /// Of the datasets that are written: one per key, or three per key.
    pub(crate) dtypes: Vec<Dtype>,
    pub(crate) task: Task,
    pub(crate) on_bad_line: OnBadLine,
    /// A repeated text key makes its line a bad one.
    pub(crate) keys_once: bool,
    pub(crate) line_bytes_max: usize,
    /// Threads that may help with long texts, over all workers.
    pub(crate) helpers: long_text::Helpers,
}

/// How a text becomes tokens.
#[derive(Debug)]
pub(crate) enum Task {
    Documents,
    Sentences(Splitter),
    Spans(SpanConfig),
}

/// State of one worker.
#[derive(Debug)]
pub(crate) struct TokenizeWorker<'a> {
    work: &'a WorkerSettings,
    tokenizer: &'a dyn Tokenizer,
    encoder: Box<dyn Encoder + 'a>,
    finders: Vec<TextFinder>,
    /// A text that differs from its form in the input.
    scratch: String,
    /// A record of TFRecord as JSON.
    json: String,
    bert: BertExample,
    ids: Vec<u32>,
    triple: Triple,
    sentences: Vec<Range<usize>>,
    places: Vec<[usize; 3]>,
    /// Lines so far, to select those that are timed.
    lines: u64,
}

/// How a line is processed.
#[derive(Clone, Copy, Debug)]
struct LineContext<'a> {
    shape: &'a RecordFormat,
    record: Record<'a>,
    /// A unique number of the document, the same in every run.
    document: u64,
}

impl<'a> TokenizeWorker<'a> {
    pub(crate) fn new(work: &'a WorkerSettings, tokenizer: &'a dyn Tokenizer) -> Self {
        TokenizeWorker {
            work,
            tokenizer,
            encoder: tokenizer.encoder(),
            finders: work
                .keys
                .iter()
                .map(|key| TextFinder::new(key).once(work.keys_once))
                .collect(),
            scratch: String::new(),
            json: String::new(),
            bert: BertExample::default(),
            ids: Vec::new(),
            triple: Triple::default(),
            sentences: Vec::new(),
            places: Vec::new(),
            lines: 0,
        }
    }

    /// Encodes the lines of a batch, up to the first bad one that may not be skipped.
    pub(crate) fn encode(&mut self, batch: &mut DocumentBatch) {
        batch.documents.outputs.resize_with(self.work.dtypes.len(), Encoded::default);
        let DocumentBatch { input_idx, shape, bytes, spans, documents, stop, .. } = batch;
        let mut records = Records::new(shape, bytes, spans, batch.offset);
        while let Some(record) = records.next() {
            let offset = record.start;
            let document = document_number(*input_idx, batch.offset + offset as u64);
            documents.lines = records.lines_before();
            // Whether a line that is too long gets here depends on the block size.
            let is_long = record.bytes.len() > self.work.line_bytes_max;
            if let Err(fault) = self.encode_line(LineContext { shape, record, document }, documents)
            {
                documents.rewind(&self.places);
                if is_long || self.work.on_bad_line == OnBadLine::Fail {
                    *stop = Some(BatchEnd::Line { offset, fault });
                    return;
                }
                documents.tally.skipped.bad_lines += 1;
                documents.bad.push(SkippedLine { line: documents.lines, offset, fault });
            }
        }
        documents.lines = records.lines_before();
        documents.source_crc64 = storage::crc64(bytes);
        self.scratch.clear();
        self.scratch.shrink_to(BUFFER_BYTES_KEPT_MAX);
        self.json.shrink_to(BUFFER_BYTES_KEPT_MAX);
        for finder in &mut self.finders {
            finder.shrink_to(BUFFER_BYTES_KEPT_MAX);
        }
        self.ids.clear();
        self.ids.shrink_to(BUFFER_BYTES_KEPT_MAX / size_of::<u32>());
    }

    fn encode_line(
        &mut self,
        line: LineContext<'_>,
        documents: &mut EncodedDocuments,
    ) -> Result<(), LineFault> {
        documents.place(&mut self.places);
        let LineContext { shape, record: Record { bytes, is_blank, .. }, .. } = line;
        if bytes.len() > self.work.line_bytes_max {
            return Err(too_long(self.work.line_bytes_max));
        }
        if is_blank {
            documents.tally.blank_lines += 1;
            return Ok(());
        }
        if matches!(shape, RecordFormat::TfRecord) {
            return self.encode_example(line, documents);
        }
        let utf8 = std::str::from_utf8(bytes).map_err(|e| not_utf8(bytes, e.valid_up_to()))?;
        self.encode_document(line, utf8, documents)
    }

    /// An example has texts, as a line of JSON has, or ids.
    fn encode_example(
        &mut self,
        line: LineContext<'_>,
        documents: &mut EncodedDocuments,
    ) -> Result<(), LineFault> {
        let example = Example::parse(line.record.bytes, RECORD_HEADER_BYTES)?;
        let keys = &self.work.keys;
        if BertExample::is_one(&example) && !keys.iter().any(|key| example.has(key)) {
            return self.encode_ids(&example, documents);
        }
        let mut json = std::mem::take(&mut self.json);
        json.clear();
        let written = write_json(&example, keys, &mut json);
        let done = written.and_then(|()| self.encode_document(line, &json, documents));
        self.json = json;
        // An offset in that JSON is none in the file.
        done.map_err(|fault| LineFault { column: RECORD_HEADER_BYTES, ..fault })
    }

    /// An example of BERT is two sentences of one document, or two documents.
    fn encode_ids(
        &mut self,
        example: &Example<'_>,
        documents: &mut EncodedDocuments,
    ) -> Result<(), LineFault> {
        let WorkerSettings { keys, dtypes, task, eod, .. } = self.work;
        if !matches!(task, Task::Documents) || keys.len() > 1 {
            let hint = Some("ids take no --split-sentences, no --objective and one key");
            let found = "the token ids of BERT's create_pretraining_data.py";
            return Err(LineFault { hint, ..fault(found, "features of text") });
        }
        self.bert.read(example)?;
        let (segments, vocab_size) =
            ([self.bert.first(), self.bert.second()], self.tokenizer.vocab_size());
        if let Some(id) = segments.into_iter().flatten().find(|&&id| id >= vocab_size) {
            let hint = Some("choose the tokenizer of the file");
            let expected = format!("ids below the {vocab_size} of the tokenizer");
            return Err(LineFault { hint, ..fault(format!("id {id}"), expected) });
        }
        let (output, dtype) = (&mut documents.outputs[0], dtypes[0]);
        let is_random_next = self.bert.is_random_next;
        for (idx, segment) in segments.into_iter().enumerate() {
            self.ids.clear();
            self.ids.extend(segment);
            if idx == 1 || is_random_next {
                self.ids.extend(*eod);
                output.sequences.push(if is_random_next { 1 } else { 2 });
            }
            output.push(&self.ids, dtype);
        }
        documents.tally.documents += 1 + u64::from(is_random_next);
        Ok(())
    }

    fn encode_document(
        &mut self,
        line: LineContext<'_>,
        utf8: &str,
        documents: &mut EncodedDocuments,
    ) -> Result<(), LineFault> {
        let shape = line.shape;
        // Counted once the whole line is valid.
        let mut tally = documents.tally;
        self.lines += 1;
        let timed = self.lines.is_multiple_of(TIMED_EVERY);
        let mut finders = std::mem::take(&mut self.finders);
        let mut scratch = std::mem::take(&mut self.scratch);
        for (key, finder) in finders.iter_mut().enumerate() {
            let start = timed.then(Instant::now);
            let value = match shape.is_json() {
                true => finder.value(utf8),
                false => Ok(Value::Text(shape.text(utf8, &mut scratch))),
            };
            let parsed = timed.then(Instant::now);
            let done = value.and_then(|value| match value {
                Value::Text(text) => {
                    tally.text_bytes += text.len() as u64;
                    self.encode_text(text, key, line.document, documents, &mut tally)
                }
                Value::Texts(texts) if self.work.lists == Lists::Joined => {
                    let joined = joined(texts)?;
                    tally.text_bytes += joined.len() as u64;
                    self.encode_text(&joined, key, line.document, documents, &mut tally)
                }
                Value::Texts(texts) => self.encode_list(texts, key, documents, &mut tally),
            });
            if let Err(fault) = done {
                self.finders = finders;
                return Err(fault);
            }
            if let (Some(start), Some(parsed)) = (start, parsed) {
                documents.parse_ns += (parsed - start).as_nanos() as u64 * TIMED_EVERY;
                documents.tokenize_ns += parsed.elapsed().as_nanos() as u64 * TIMED_EVERY;
            }
        }
        self.finders = finders;
        self.scratch = scratch;
        tally.documents += 1;
        documents.tally = tally;
        Ok(())
    }

    fn encode_text(
        &mut self,
        text: &str,
        key: usize,
        document: u64,
        documents: &mut EncodedDocuments,
        tally: &mut LineCounts,
    ) -> Result<(), LineFault> {
        let WorkerSettings { dtypes, task, .. } = self.work;
        match task {
            Task::Documents => {
                self.tokenize(text)?;
                let output = &mut documents.outputs[key];
                if self.ids.is_empty() {
                    self.push_empty(output, dtypes[key], tally);
                } else {
                    self.ids.extend(self.work.eod);
                    output.push(&self.ids, dtypes[key]);
                    output.sequences.push(1);
                }
                Ok(())
            }
            Task::Sentences(splitter) => {
                let mut sentences = std::mem::take(&mut self.sentences);
                splitter.split(text, &mut sentences);
                let (output, dtype) = (&mut documents.outputs[key], dtypes[key]);
                let first = output.lens.len();
                let mut each = sentences.iter();
                let done =
                    each.try_for_each(|it| self.push_sentence(&text[it.clone()], output, dtype));
                self.sentences = sentences;
                done?;
                self.end_sentences(first, output, dtype, tally);
                Ok(())
            }
            Task::Spans(config) => {
                let outputs = &mut documents.outputs[3 * key..3 * key + 3];
                self.encode_spans(text, document, config, outputs, tally)
            }
        }
    }

    /// A list is a document with known sentences, as in Megatron's program.
    fn encode_list(
        &mut self,
        mut texts: Texts<'_>,
        key: usize,
        documents: &mut EncodedDocuments,
        tally: &mut LineCounts,
    ) -> Result<(), LineFault> {
        match &self.work.task {
            Task::Documents => {}
            Task::Sentences(_) => return Err(texts.refused(SPLIT_ALREADY)),
            Task::Spans(_) => {
                return Err(texts.refused("--objective cpm2 takes one text per document"));
            }
        }
        let (output, dtype) = (&mut documents.outputs[key], self.work.dtypes[key]);
        let first = output.lens.len();
        while let Some(text) = texts.next_text() {
            let text = text?;
            tally.text_bytes += text.len() as u64;
            self.push_sentence(text, output, dtype)?;
        }
        self.end_sentences(first, output, dtype, tally);
        Ok(())
    }

    /// Writes to [`TokenizeWorker::ids`].
    fn tokenize(&mut self, text: &str) -> Result<(), LineFault> {
        if let Some(EncodeError { found, expected, hint }) = self.tokenizer.refused(text) {
            return Err(LineFault { column: 0, found, expected, hint });
        }
        self.ids.clear();
        if !long_text::encode(self.tokenizer, text, &self.work.helpers, &mut self.ids) {
            self.encoder.encode(text, &mut self.ids);
        }
        Ok(())
    }

    /// A sentence without tokens is no sequence.
    fn push_sentence(
        &mut self,
        sentence: &str,
        output: &mut Encoded,
        dtype: Dtype,
    ) -> Result<(), LineFault> {
        self.tokenize(sentence)?;
        if !self.ids.is_empty() {
            output.push(&self.ids, dtype);
        }
        Ok(())
    }

    /// Ends a document of the sentences from `first` on; its end token goes to the last.
    fn end_sentences(
        &self,
        first: usize,
        output: &mut Encoded,
        dtype: Dtype,
        tally: &mut LineCounts,
    ) {
        let Some(last) = output.lens[first..].last_mut() else {
            return self.push_empty(output, dtype, tally);
        };
        if let Some(eod) = self.work.eod {
            *last += 1;
            write_ids(&[eod], dtype, &mut output.bytes);
        }
        // fits: sentences of one line, which is below 2^31 bytes
        output.sequences.push((output.lens.len() - first) as u32);
    }

    fn encode_spans(
        &mut self,
        text: &str,
        document: u64,
        config: &SpanConfig,
        outputs: &mut [Encoded],
        tally: &mut LineCounts,
    ) -> Result<(), LineFault> {
        self.tokenize(text)?;
        // As the original counts them, with the newline that ended its line.
        let characters = text.chars().count() as u64 + 1;
        match Dropped::of(characters, self.ids.len() as u64) {
            Some(Dropped::LongLine) => tally.skipped.long_lines += 1,
            Some(Dropped::FewTokens) => tally.skipped.few_tokens += 1,
            None => {
                self.ids.extend(self.work.eod);
                objective::corrupt(&self.ids, document, config, &mut self.triple).map_err(
                    |SpanError { found, expected, hint }| LineFault {
                        column: 0,
                        found,
                        expected,
                        hint: Some(hint),
                    },
                )?;
                let Triple { context, target, offsets } = &self.triple;
                let dtypes = [config.ids, config.ids, config.offsets];
                for ((output, ids), dtype) in
                    outputs.iter_mut().zip([context, target, offsets]).zip(dtypes)
                {
                    output.push(ids, dtype);
                    output.sequences.push(1);
                }
            }
        }
        Ok(())
    }

    fn push_empty(&self, output: &mut Encoded, dtype: Dtype, tally: &mut LineCounts) {
        match self.work.empty_documents {
            EmptyDocuments::Megatron => {
                tally.empty += 1;
                output.sequences.push(0);
            }
            EmptyDocuments::Skip => tally.skipped.empty += 1,
            EmptyDocuments::Sequence => {
                tally.empty += 1;
                output.push(self.work.eod.as_slice(), dtype);
                output.sequences.push(1);
            }
        }
    }
}

/// The texts of a list as one, with a blank line between two.
fn joined(mut texts: Texts<'_>) -> Result<String, LineFault> {
    let mut joined = String::new();
    let mut is_first = true;
    while let Some(text) = texts.next_text() {
        if !std::mem::take(&mut is_first) {
            joined.push_str("\n\n");
        }
        joined.push_str(text?);
    }
    Ok(joined)
}

impl Encoded {
    /// Appends a sequence.
    fn push(&mut self, ids: &[u32], dtype: Dtype) {
        write_ids(ids, dtype, &mut self.bytes);
        // fits: a line, and so its tokens, are bounded by `PreprocessOptions::line_bytes_max`,
        // below 2^31.
        self.lens.push(ids.len() as u32);
    }
}

/// Identifies a document by its start, which does not depend on the number of workers and shards.
fn document_number(input_idx: usize, offset: u64) -> u64 {
    (input_idx as u64) << 44 ^ offset
}

pub(crate) fn not_utf8(line: &[u8], at: usize) -> LineFault {
    LineFault {
        column: at,
        found: format!("byte {:#04x}, which is not UTF-8", line[at]),
        expected: "JSON in UTF-8".to_owned(),
        hint: Some("if the file is GBK or Latin-1, convert it: iconv -f GB18030 -t UTF-8 FILE"),
    }
}

/// Appends ids in the format of a `.bin`. All are below the vocabulary size that chose the type.
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
