//! A worker: applies to each line the rules that need no other document.

use std::ops::Range;

use super::CleanOptions;
use super::dedup::hash;
use super::dedup::minhash::MinHasher;
use super::dedup::shingle::Shingler;
use super::filter::{DropReason, FilterRules, FilterWorker, fix};
use crate::batch::document_batch::{BUFFER_BYTES_KEPT_MAX, BatchEnd, DocumentBatch, too_long};
use crate::input::{is_blank, split_line};
use crate::json::scanner::{LineFault, TextFinder};

/// Settings shared by all workers of a run.
#[derive(Debug)]
pub(super) struct CleanSettings<'a> {
    pub(super) options: &'a CleanOptions,
    pub(super) rules: &'a FilterRules,
}

/// The filtered lines of a batch.
#[derive(Debug, Default)]
pub(super) struct FilteredBatch {
    pub(super) lines: Vec<FilteredDocument>,
    /// Lines processed so far, blank ones included.
    pub(super) line_count: u64,
    pub(super) blank_lines: u64,
    pub(super) without_url: u64,
    /// Rewritten lines, without newlines.
    pub(super) rewritten: Vec<u8>,
    /// The compared texts of the documents that passed, one after another.
    pub(super) texts: String,
    /// As many hashes as there are bands for each document that has them.
    pub(super) bands: Vec<u64>,
}

/// One document.
#[derive(Debug)]
pub(super) struct FilteredDocument {
    /// Its range in the batch, without its newline.
    pub(super) bytes: Range<usize>,
    /// Its line number in the batch.
    pub(super) nth: u64,
    /// Its range in [`FilteredBatch::rewritten`], if it was rewritten.
    pub(super) rewritten: Option<Range<usize>>,
    /// Its range in [`FilteredBatch::texts`].
    pub(super) text: Range<usize>,
    pub(super) cause: Option<DropReason>,
    pub(super) hash: u128,
    pub(super) has_bands: bool,
}

impl FilteredBatch {
    /// Clears it for reuse, and frees memory that an unusually long line needed.
    pub(super) fn reset(&mut self) {
        let FilteredBatch { mut lines, mut rewritten, mut texts, mut bands, .. } =
            std::mem::take(self);
        lines.clear();
        rewritten.clear();
        rewritten.shrink_to(BUFFER_BYTES_KEPT_MAX);
        texts.clear();
        texts.shrink_to(BUFFER_BYTES_KEPT_MAX);
        bands.clear();
        *self = FilteredBatch { lines, rewritten, texts, bands, ..FilteredBatch::default() };
    }
}

/// State of one worker.
#[derive(Debug)]
pub(super) struct CleanWorker<'a> {
    work: &'a CleanSettings<'a>,
    filter_worker: FilterWorker<'a>,
    sketcher: Option<MinHasher>,
    finder: TextFinder,
    url_finder: Option<TextFinder>,
    fixed: String,
    folded: String,
}

impl<'a> CleanWorker<'a> {
    pub(super) fn new(work: &'a CleanSettings<'a>) -> Self {
        let options = work.options;
        let sketcher = options.near.as_ref().map(|near| {
            let shingler = Shingler::new(near.unit, near.shingle);
            MinHasher::new(shingler, near.bands, near.rows)
        });
        CleanWorker {
            work,
            filter_worker: work.rules.worker(),
            sketcher,
            finder: TextFinder::new(&options.key),
            url_finder: options.filters.urls.as_ref().map(|urls| TextFinder::new(&urls.key)),
            fixed: String::new(),
            folded: String::new(),
        }
    }

    /// Filters the lines of a batch, up to the first bad one.
    pub(super) fn filter(&mut self, batch: &mut DocumentBatch, filtered: &mut FilteredBatch) {
        let mut offset = 0;
        while offset < batch.bytes.len() {
            let rest = &batch.bytes[offset..];
            let (line, next) = split_line(rest);
            if let Err(fault) = self.filter_line(line, offset, filtered) {
                batch.stop = Some(BatchEnd::Line { offset, fault });
                return;
            }
            filtered.line_count += 1;
            offset += next;
        }
        self.finder.shrink_to(BUFFER_BYTES_KEPT_MAX);
        for text in [&mut self.fixed, &mut self.folded] {
            text.clear();
            text.shrink_to(BUFFER_BYTES_KEPT_MAX);
        }
    }

    fn filter_line(
        &mut self,
        line: &[u8],
        offset: usize,
        filtered: &mut FilteredBatch,
    ) -> Result<(), LineFault> {
        let options = self.work.options;
        if line.len() as u64 > options.line_bytes_max {
            return Err(too_long(options.line_bytes_max as usize)); // fits: at most 1 GiB
        }
        if is_blank(line) {
            filtered.blank_lines += 1;
            return Ok(());
        }
        let bytes = offset..offset + line.len();
        let line = std::str::from_utf8(line)
            .map_err(|e| crate::tokens::worker::not_utf8(line, e.valid_up_to()))?;
        let (span, mut text) = self.finder.find_at(line)?;
        let url = match &mut self.url_finder {
            None => None,
            Some(finder) => {
                let url = finder.find(line).ok();
                filtered.without_url += u64::from(url.is_none());
                url
            }
        };
        let mut rewritten = None;
        if options.fix_spaces && fix::spaces(text, &mut self.fixed) {
            let start = filtered.rewritten.len();
            fix::rewrite(line, span, &self.fixed, &mut filtered.rewritten);
            rewritten = Some(start..filtered.rewritten.len());
            text = &self.fixed;
        }
        let cause = self.filter_worker.cause(text, url);
        let mut found = FilteredDocument {
            bytes,
            nth: filtered.line_count,
            rewritten,
            text: 0..0,
            cause,
            hash: 0,
            has_bands: false,
        };
        if cause.is_none() {
            if options.fold {
                fix::fold(text, &mut self.folded);
                text = &self.folded;
            }
            if options.exact || options.split.is_some() {
                found.hash = hash::of_text(text);
            }
            if let Some(sketcher) = &mut self.sketcher {
                found.has_bands = sketcher.bands(text, &mut filtered.bands);
                let start = filtered.texts.len();
                filtered.texts.push_str(text);
                found.text = start..filtered.texts.len();
            }
        }
        filtered.lines.push(found);
        Ok(())
    }
}
