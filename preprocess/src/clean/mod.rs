//! Filters and deduplicates JSON lines for training.
//!
//! [`clean`] drops documents by their properties (length, characters, script, words, URL), exact
//! duplicates, and near-duplicates, as Megatron's `tools/openwebtext` does in half a dozen scripts
//! with all texts in memory. Lines are retained byte for byte, in input order, and the outputs are
//! the same for every number of workers. Of a cluster the first document is retained.
//!
//! In reading order: `options`; `line_batch`, the unit that threads exchange; `worker`, which
//! applies the rules of `filter` to a line and computes its shingles and MinHash signature;
//! `writer`, which decides about each line in input order with the duplicate indexes of `dedup` and
//! writes it by `output`; and `report`.

mod dedup;
mod filter;
mod line_batch;
mod options;
mod output;
mod report;
mod worker;
mod writer;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

pub use filter::DropReason;
pub use options::{
    CleanOptions, Filters, Measure, NearOptions, Reject, ScriptMin, ShingleUnit, SplitOptions,
    TokensMin, UrlOptions,
};
pub use report::{CleanProgress, CleanReport, CleanedInput, Clusters, Dropped, Example, Index};

use crate::input::{Format, InputChunker, InputOptions, expand};
use crate::pipeline::pump;
use crate::{Error, Result};
use filter::FilterRules;
use line_batch::LineBatch;
use worker::{CleanSettings, CleanWorker};
use writer::{BandCollector, CleanWriter, Tally};

/// Copies the lines that pass, and reports the others.
///
/// All options, inputs and outputs are checked before any work. `progress` is called after every
/// megabyte. If standard input is an input and the run fails, a thread that waits for it may
/// outlive the call.
///
/// # Errors
/// The first bad line in input order as [`Error::BadLine`]; [`Error::BadOption`],
/// [`Error::BadInput`], [`Error::BadVocab`], [`Error::Stream`], and [`Error::Storage`], also for
/// outputs that exist. No file is left under the outputs' names, unless the error is
/// [`Error::LeftBehind`].
///
/// [`Error::BadLine`]: crate::Error::BadLine
/// [`Error::BadOption`]: crate::Error::BadOption
/// [`Error::BadInput`]: crate::Error::BadInput
/// [`Error::BadVocab`]: crate::Error::BadVocab
/// [`Error::Stream`]: crate::Error::Stream
/// [`Error::Storage`]: crate::Error::Storage
/// [`Error::LeftBehind`]: crate::Error::LeftBehind
pub fn clean(
    options: &CleanOptions,
    progress: &mut dyn FnMut(&CleanProgress),
) -> Result<CleanReport> {
    clean_until(options, &AtomicBool::new(false), progress)
}

/// The same, until `stop` is true.
///
/// # Errors
/// As [`clean`]; [`Error::Stopped`] if it was stopped: no file is left, and it cannot be resumed.
///
/// [`Error::Stopped`]: crate::Error::Stopped
pub fn clean_until(
    options: &CleanOptions,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(&CleanProgress),
) -> Result<CleanReport> {
    let start = Instant::now();
    options.check()?;
    let rules = FilterRules::new(&options.filters)?;
    // Retained lines are copied, so that all inputs must be JSON lines.
    let lines = InputOptions { format: Format::JsonLines, ..InputOptions::default() };
    let inputs = expand(&options.inputs, &lines, "")?;
    let work = CleanSettings { options, rules: &rules };
    // fits: checked to be at most 1 GiB
    let line_bytes_max = options.line_bytes_max as usize;
    let chunker = || {
        InputChunker::new(inputs.clone(), options.block_bytes, line_bytes_max)
            .ahead(options.workers)
    };
    let two_passes = options.near.as_ref().filter(|near| near.two_passes);
    let passes = if two_passes.is_some() { 2 } else { 1 };
    // Created before the first pass, so that an existing name is detected before the work.
    let mut writer = CleanWriter::create(options, Tally::new(&inputs, passes, passes))?;
    let mut scratch_bytes = 0;
    let mut twice = None;
    if let Some(near) = two_passes {
        let mut collector = BandCollector::new(options, near, Tally::new(&inputs, 1, passes))?;
        filter_batches(chunker(), &work, stop, &mut |block| {
            collector.take(block)?;
            progress(&collector.tally.progress());
            Ok(())
        })?;
        let found;
        (found, scratch_bytes) = collector.finish()?;
        twice = Some(found);
    }
    if let Some(near) = &options.near {
        writer.find_near_duplicates(near, twice)?;
    }
    filter_batches(chunker(), &work, stop, &mut |block| {
        writer.take(block)?;
        progress(&writer.tally.progress());
        Ok(())
    })?;
    writer.finish(start, scratch_bytes)
}

/// Filters the batches on all workers and passes them to `take`, in order.
fn filter_batches(
    chunker: InputChunker,
    work: &CleanSettings<'_>,
    stop: &AtomicBool,
    take: &mut dyn FnMut(&mut LineBatch) -> Result<()>,
) -> Result<()> {
    let worker = || {
        let mut worker = CleanWorker::new(work);
        move |block: &mut LineBatch| worker.filter(&mut block.document_batch, &mut block.filtered)
    };
    let mut take = |block: &mut LineBatch| {
        if stop.load(Ordering::Relaxed) { Err(Error::Stopped) } else { take(block) }
    };
    pump(chunker, work.options.workers, stop, worker, &mut take)
}
