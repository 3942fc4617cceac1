//! The end of a run: decides which documents are retained or dropped, writes and reports them.

use std::collections::HashMap;
use std::time::Instant;

use serde::Serialize;

use super::dedup::duplicate_bands::{Bands, DuplicateBands};
use super::dedup::exact::ExactDuplicateIndex;
use super::dedup::hash::fold;
use super::dedup::near::NearDuplicateIndex;
use super::filter::DropReason;
use super::line_batch::LineBatch;
use super::output::{self, KeptOutputs, LineWriter};
use super::report::{CleanProgress, CleanReport, CleanedInput, Clusters, Example, Index};
use super::worker::{FilteredBatch, FilteredDocument};
use super::{CleanOptions, NearOptions};
use crate::batch::document_batch::{BatchEnd, DocumentBatch};
use crate::input::Input;
use crate::{Error, Result};

/// Examples of each cause in a report.
const EXAMPLES_MAX: usize = 5;

/// Length of each example.
const EXAMPLE_CHARS_MAX: usize = 200;

/// Why a document is dropped, and the earlier one that it duplicates.
#[derive(Clone, Copy, Debug)]
struct DropDecision {
    cause: DropReason,
    of: Option<u32>,
    jaccard: Option<f64>,
}

/// The record of a dropped document.
#[derive(Serialize)]
struct DroppedLine<'a> {
    cause: DropReason,
    file: &'a str,
    line: u64,
    document: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    of: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    jaccard: Option<f64>,
}

/// Contents of the inputs so far.
pub(super) struct Tally {
    pub(super) inputs: Vec<CleanedInput>,
    stored_bytes_all: Option<u64>,
    documents: u64,
    kept: u64,
    pass: u32,
    passes: u32,
}

impl Tally {
    pub(super) fn new(inputs: &[Input], pass: u32, passes: u32) -> Self {
        let named = |input: &Input| CleanedInput { name: input.name.clone(), ..Default::default() };
        Tally {
            inputs: inputs.iter().map(named).collect(),
            stored_bytes_all: inputs.iter().map(|input| input.stored_bytes).sum(),
            documents: 0,
            kept: 0,
            pass,
            passes,
        }
    }

    pub(super) fn progress(&self) -> CleanProgress {
        CleanProgress {
            pass: self.pass,
            passes: self.passes,
            stored_bytes: self.inputs.iter().map(|input| input.stored_bytes).sum(),
            stored_bytes_all: self.stored_bytes_all,
            json_bytes: self.inputs.iter().map(|input| input.json_bytes).sum(),
            documents: self.documents,
            kept: self.kept,
        }
    }

    /// Counts a batch whose documents were processed, or returns its error.
    fn end_block(
        &mut self,
        document_batch: &mut DocumentBatch,
        filtered: &FilteredBatch,
    ) -> Result<()> {
        let input = &mut self.inputs[document_batch.input_idx];
        input.lines += filtered.line_count;
        input.documents += filtered.lines.len() as u64;
        input.json_bytes += document_batch.bytes.len() as u64;
        input.stored_bytes = document_batch.stored_bytes;
        match document_batch.stop.take() {
            None => Ok(()),
            Some(BatchEnd::Input(error)) => Err(error),
            Some(BatchEnd::Line { offset, fault }) => {
                let line = Some(input.lines + 1);
                let bad_line = document_batch.bad_line(&input.name, line, offset, fault);
                Err(Error::BadLine(Box::new(bad_line)))
            }
        }
    }
}

/// The index of a document in the tables of duplicates.
fn document_index(document: u64, input: &str) -> Result<u32> {
    u32::try_from(document).map_err(|_| Error::BadInput {
        input: input.to_owned(),
        found: "more".to_owned(),
        expected: "at most 4294967295 documents for deduplication".to_owned(),
        hint: None,
    })
}

/// The first of two passes: collects bands.
pub(super) struct BandCollector {
    pub(super) tally: Tally,
    exact: Option<ExactDuplicateIndex>,
    bands: Bands,
    band_count: usize,
}

impl BandCollector {
    pub(super) fn new(options: &CleanOptions, near: &NearOptions, tally: Tally) -> Result<Self> {
        let exact = options.exact.then(ExactDuplicateIndex::default);
        let bands = Bands::create(near.bands, near.scratch.as_deref())?;
        Ok(BandCollector { tally, exact, bands, band_count: near.bands })
    }

    pub(super) fn take(&mut self, block: &mut LineBatch) -> Result<()> {
        let LineBatch { document_batch, filtered } = block;
        let mut bands = filtered.bands.chunks_exact(self.band_count);
        for line in &filtered.lines {
            let hashes = line.has_bands.then(|| bands.next()).flatten();
            let document = document_index(
                self.tally.documents,
                &self.tally.inputs[document_batch.input_idx].name,
            )?;
            self.tally.documents += 1;
            let passed = line.cause.is_none();
            let first = |exact: &mut ExactDuplicateIndex| {
                exact.find_or_insert(line.hash, document).is_none()
            };
            if passed
                && self.exact.as_mut().is_none_or(first)
                && let Some(hashes) = hashes
            {
                self.bands.add(hashes)?;
            }
        }
        self.tally.end_block(document_batch, filtered)
    }

    pub(super) fn finish(self) -> Result<(DuplicateBands, u64)> {
        let scratch_bytes = self.bands.scratch_bytes();
        Ok((self.bands.find()?, scratch_bytes))
    }
}

/// The outputs of a run, being written.
pub(super) struct CleanWriter {
    pub(super) tally: Tally,
    exact: Option<ExactDuplicateIndex>,
    near: Option<NearDuplicateIndex>,
    band_count: usize,
    kept: KeptOutputs,
    dropped: Option<LineWriter>,
    report: CleanReport,
    /// Near-duplicates, with the documents retained instead.
    retained_of: HashMap<u32, u32>,
    /// How many were dropped per retained document.
    dropped_for: HashMap<u32, u64>,
    rows: u64,
    sum: u64,
    /// The number and hash of the documents of the first pass.
    seen: Option<(u64, u64)>,
}

impl CleanWriter {
    pub(super) fn create(options: &CleanOptions, tally: Tally) -> Result<Self> {
        Ok(CleanWriter {
            tally,
            exact: options.exact.then(ExactDuplicateIndex::default),
            near: None,
            band_count: options.near.as_ref().map_or(1, |near| near.bands),
            kept: KeptOutputs::create(options)?,
            dropped: options.dropped.as_deref().map(LineWriter::create_named).transpose()?,
            report: CleanReport { workers: options.workers, ..CleanReport::default() },
            retained_of: HashMap::new(),
            dropped_for: HashMap::new(),
            rows: 0,
            sum: 0,
            seen: None,
        })
    }

    /// Enables the search for near-duplicates, among the candidates of an earlier pass if there was
    /// one.
    pub(super) fn find_near_duplicates(
        &mut self,
        options: &NearOptions,
        twice: Option<DuplicateBands>,
    ) -> Result<()> {
        self.seen = twice.as_ref().map(|twice| (twice.rows, twice.sum));
        self.near = Some(NearDuplicateIndex::new(options, twice)?);
        Ok(())
    }

    pub(super) fn take(&mut self, block: &mut LineBatch) -> Result<()> {
        let LineBatch { document_batch, filtered } = block;
        let mut bands = filtered.bands.chunks_exact(self.band_count);
        for line in &filtered.lines {
            let hashes = line.has_bands.then(|| bands.next()).flatten();
            let decision = self.decide(line, hashes, filtered, document_batch.input_idx)?;
            let bytes = &document_batch.bytes[line.bytes.clone()];
            match decision {
                None => self.keep(line, bytes, filtered, document_batch.input_idx)?,
                Some(decision) => self.drop(decision, line, bytes, document_batch.input_idx)?,
            }
            self.tally.documents += 1;
        }
        self.report.blank_lines += filtered.blank_lines;
        self.report.without_url += filtered.without_url;
        self.tally.end_block(document_batch, filtered)
    }

    fn decide(
        &mut self,
        line: &FilteredDocument,
        hashes: Option<&[u64]>,
        filtered: &FilteredBatch,
        input_idx: usize,
    ) -> Result<Option<DropDecision>> {
        if let Some(cause) = line.cause {
            return Ok(Some(DropDecision { cause, of: None, jaccard: None }));
        }
        if self.exact.is_none() && self.near.is_none() {
            return Ok(None);
        }
        let document = document_index(self.tally.documents, &self.tally.inputs[input_idx].name)?;
        let first = self.exact.as_mut().and_then(|all| all.find_or_insert(line.hash, document));
        if let Some(first) = first {
            let kept = self.retained_of.get(&first).copied().unwrap_or(first);
            *self.dropped_for.entry(kept).or_default() += 1;
            let cause = DropReason::ExactDuplicate;
            return Ok(Some(DropDecision { cause, of: Some(first), jaccard: None }));
        }
        let (Some(near), Some(hashes)) = (&mut self.near, hashes) else { return Ok(None) };
        let text = &filtered.texts[line.text.clone()];
        let alike = near.find_or_insert(document, self.rows, text, hashes)?;
        self.rows += 1;
        self.sum = fold(self.sum, hashes[0]);
        Ok(alike.map(|alike| {
            self.retained_of.insert(document, alike.document);
            *self.dropped_for.entry(alike.document).or_default() += 1;
            let (of, jaccard) = (Some(alike.document), Some(alike.jaccard));
            DropDecision { cause: DropReason::NearDuplicate, of, jaccard }
        }))
    }

    fn keep(
        &mut self,
        line: &FilteredDocument,
        bytes: &[u8],
        filtered: &FilteredBatch,
        input_idx: usize,
    ) -> Result<()> {
        self.tally.kept += 1;
        self.tally.inputs[input_idx].kept += 1;
        self.report.kept_bytes += bytes.len() as u64;
        let rewritten = line.rewritten.clone().map(|span| &filtered.rewritten[span]);
        self.report.rewritten += u64::from(rewritten.is_some());
        self.kept.sink_of(line.hash).write_line(rewritten.unwrap_or(bytes))
    }

    fn drop(
        &mut self,
        decision: DropDecision,
        line: &FilteredDocument,
        bytes: &[u8],
        input_idx: usize,
    ) -> Result<()> {
        let DropDecision { cause, of, jaccard } = decision;
        let input = &mut self.tally.inputs[input_idx];
        *input.dropped.entry(cause).or_default() += 1;
        let dropped = self.report.dropped.entry(cause).or_default();
        dropped.documents += 1;
        dropped.bytes += bytes.len() as u64;
        let (document, number) = (self.tally.documents, input.lines + line.nth + 1);
        if dropped.examples.len() < EXAMPLES_MAX {
            let begin = &bytes[..bytes.len().min(EXAMPLE_CHARS_MAX * 4)];
            let begin = String::from_utf8_lossy(begin).chars().take(EXAMPLE_CHARS_MAX).collect();
            let (file, of) = (input.name.clone(), of.map(u64::from));
            let example = Example { file, line: number, document, of, jaccard, begin };
            dropped.examples.push(example);
        }
        let Some(sink) = &mut self.dropped else { return Ok(()) };
        let label = DroppedLine { cause, file: &input.name, line: number, document, of, jaccard };
        let label = serde_json::to_string(&label).expect("strings and numbers serialize");
        // The unchanged line, so that a user can extract it again.
        sink.write(label.trim_end_matches('}').as_bytes())?;
        sink.write(b",\"dropped\":")?;
        sink.write(bytes)?;
        sink.write_line(b"}")
    }

    /// Makes the outputs durable and visible.
    pub(super) fn finish(self, start: Instant, scratch_bytes: u64) -> Result<CleanReport> {
        let seen = (self.rows, self.sum);
        if self.seen.is_some_and(|before| before != seen) {
            let names: Vec<&str> = self.tally.inputs.iter().map(|i| i.name.as_str()).collect();
            return Err(Error::BadInput {
                input: names.join(", "),
                found: "different documents in the second pass".to_owned(),
                expected: "the documents of the first pass".to_owned(),
                hint: Some("run again while no process writes these files".to_owned()),
            });
        }
        let progress = self.tally.progress();
        let mut report = self.report;
        report.documents = progress.documents;
        report.kept = progress.kept;
        report.json_bytes = progress.json_bytes;
        if self.exact.is_some() || self.near.is_some() {
            report.clusters = Some(Clusters::new(self.dropped_for.into_values()));
            let exact = self.exact.as_ref().map_or(0, ExactDuplicateIndex::table_bytes);
            let near = self.near.as_ref();
            report.index = Some(Index {
                compared_pairs: near.map_or(0, |near| near.compared),
                table_bytes: exact + near.map_or(0, NearDuplicateIndex::table_bytes),
                scratch_bytes: scratch_bytes + near.map_or(0, NearDuplicateIndex::scratch_bytes),
            });
        }
        report.inputs = self.tally.inputs;
        report.outputs = output::finish(self.kept.sinks.into_iter().chain(self.dropped).collect())?;
        report.elapsed_s = start.elapsed().as_secs_f64();
        report.json_mb_per_s = progress.json_bytes as f64 / 1e6 / report.elapsed_s.max(1e-9);
        Ok(report)
    }
}
