//! A run from its inputs to its files.
//!
//! Everything is checked first; then [`crate::pipeline`] reads, parses and tokenizes the inputs,
//! and the results are committed in input order.

#[cfg(test)]
mod faults;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use storage::Location;

use crate::batch::document_batch::DocumentBatch;
use crate::input::{Input, InputChunker, Position, Share, expand, share_out};
use crate::objective::{SpanConfig, Splitter};
use crate::pipeline::pump;
use crate::tokens::long_text;
use crate::tokens::outputs::Outputs;
use crate::tokens::worker::{Task, TokenizeWorker, WorkerSettings};
use crate::tokens::writer::OutputWriter;
use crate::{
    Error, Objective, PreprocessOptions, PreprocessProgress, Report, Result, Tokenizer,
    open_tokenizer,
};

/// Largest document batch: one or two milliseconds of work, so that handing it over costs nothing,
/// and with its texts and tokens it fits the second-level cache of a core. With 2 MiB, a run takes
/// 5 % more CPU time and twice the memory.
const BLOCK_BYTES_MAX: usize = 256 << 10;

/// Smallest document batch: small inputs are cut finer, so that all workers have some.
const BLOCK_BYTES_MIN: usize = 64 << 10;

/// More than any machine has cores; their batches ([`crate::pipeline`]) take 2.3 GiB at worst with
/// 16-bit ids.
const WORKERS_MAX: usize = 1024;

/// A line's tokens must be counted in an i32.
pub(crate) const LINE_BYTES_MAX: u64 = 1 << 30;

/// Turns JSON lines into token datasets: `PREFIX_KEY_document.bin`, `.idx` and `.manifest.json`.
///
/// Documents are written in input order, and the files have the same bytes for every number of
/// workers, however often the run was interrupted and resumed. All options, inputs and outputs are
/// checked before any work. `progress` is called once before, and then after every few megabytes.
/// If standard input is an input and the run fails, a thread that waits for it may outlive the
/// call.
///
/// # Errors
/// The first bad line in input order as [`Error::BadLine`]; [`Error::BadOption`],
/// [`Error::BadInput`], [`Error::BadVocab`], [`Error::Stream`], [`Error::Indexed`], and
/// [`Error::Storage`], also for outputs that exist; [`Error::WasInterrupted`], [`Error::OtherRun`],
/// [`Error::Changed`] and [`Error::Complete`] for the state of an earlier run. A run that fails
/// after a commit returns [`Error::CanResume`]; one that fails before leaves no files.
pub fn run(
    options: &PreprocessOptions,
    progress: &mut dyn FnMut(&PreprocessProgress),
) -> Result<Report> {
    run_until(options, &AtomicBool::new(false), progress)
}

/// As [`run`], but it stops when `stop` is true, after committing the finished part.
///
/// # Errors
/// As [`run`]; [`Error::Stopped`] if it was stopped.
pub fn run_until(
    options: &PreprocessOptions,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(&PreprocessProgress),
) -> Result<Report> {
    let start = Instant::now();
    run_prepared(options, prepare(options)?, start, stop, progress)
}

fn run_prepared(
    options: &PreprocessOptions,
    prepared: Prepared,
    start: Instant,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(&PreprocessProgress),
) -> Result<Report> {
    let Prepared { mut inputs, outputs, work, tokenizer, block_bytes } = prepared;
    let mut writer = OutputWriter::begin(options, outputs, tokenizer.as_ref(), &inputs, stop)?;
    progress(&writer.progress());
    let (input_idx, offset) = writer.place();
    if let Some(input) = inputs.get_mut(input_idx) {
        input.skipped_crc64 = writer.content_crc64(input_idx);
    }
    let chunker = InputChunker::new(inputs, block_bytes, work.line_bytes_max)
        .ahead(options.workers)
        .start_at(Position { input_idx, offset });
    let mut add = |batch: &mut DocumentBatch| {
        writer.add(batch, start)?;
        progress(&writer.progress());
        if stop.load(Ordering::Relaxed) { Err(Error::Stopped) } else { Ok(()) }
    };
    let encoded = encode(chunker, &work, tokenizer.as_ref(), options.workers, stop, &mut add);
    let encoded = match encoded {
        Err(Error::Stopped) => writer.commit(start).and(Err(Error::Stopped)),
        other => other,
    };
    let finished = encoded.and_then(|()| writer.finish(options, tokenizer.as_ref(), start));
    match finished {
        Ok(report) => Ok(report),
        Err(error) => match (writer.give_up(), error) {
            (true, error @ Error::Stopped) | (false, error) => Err(error),
            (true, source) => Err(Error::CanResume { source: Box::new(source) }),
        },
    }
}

/// A validated run, before its first byte is read.
pub(crate) struct Prepared {
    pub(crate) inputs: Vec<Input>,
    pub(crate) outputs: Outputs,
    pub(crate) work: WorkerSettings,
    pub(crate) tokenizer: Arc<dyn Tokenizer>,
    pub(crate) block_bytes: usize,
}

/// Checks all options and inputs.
pub(crate) fn prepare(options: &PreprocessOptions) -> Result<Prepared> {
    check(options)?;
    let tokenizer = open_tokenizer(&options.tokenizer)?;
    let eod = eod(options, tokenizer.as_ref())?;
    let inputs = inputs(options)?;
    let outputs = Outputs::plan(options, tokenizer.as_ref())?;
    let work = WorkerSettings {
        keys: options.keys.clone(),
        eod,
        lists: options.lists,
        empty_documents: options.empty_documents,
        dtypes: outputs.plans.iter().map(|plan| plan.dtype).collect(),
        task: task(options, tokenizer.as_ref(), &outputs)?,
        on_bad_line: options.on_bad_line,
        keys_once: !options.last_of_duplicate_keys,
        line_bytes_max: options.line_bytes_max as usize, // fits: at most 1 GiB
        helpers: long_text::Helpers::new(options.workers),
    };
    let block_bytes = options.block_bytes.unwrap_or_else(|| block_bytes(&inputs, options.workers));
    Ok(Prepared { inputs, outputs, work, tokenizer, block_bytes })
}

fn check(options: &PreprocessOptions) -> Result<()> {
    let bad = |name: &'static str, found: String, expected: &str| {
        Err(Error::BadOption { name, found, expected: expected.to_owned(), hint: None })
    };
    if options.inputs.is_empty() {
        return bad("json-in", "none".to_owned(), "at least one input");
    }
    if !(1..=WORKERS_MAX).contains(&options.workers) {
        return bad("workers", options.workers.to_string(), "at least 1 and at most 1024");
    }
    if options.keys.is_empty() {
        return bad("json-key", "none".to_owned(), "at least one key");
    }
    for (number, key) in options.keys.iter().enumerate() {
        if key.is_empty() || key.contains('/') {
            return bad("json-key", format!("'{key}'"), "a non-empty key without '/'");
        }
        if options.keys[..number].contains(key) {
            return bad("json-key", format!("'{key}' twice"), "every key once");
        }
    }
    let out = Location::new(&options.out_prefix);
    if out.is_named_as_folder() {
        let expected = "a prefix for file names, such as data/corpus";
        return bad("out", format!("the folder '{}'", options.out_prefix), expected);
    }
    if out.is_s3() {
        return Err(Error::BadOption {
            name: "out",
            found: out.to_string(),
            expected: "a path in a file system".to_owned(),
            hint: Some("write to a disk, then copy the finished files".to_owned()),
        });
    }
    if options.block_bytes == Some(0) {
        return bad("block-bytes", "0".to_owned(), "at least 1");
    }
    if !(1..=LINE_BYTES_MAX).contains(&options.line_bytes_max) {
        let found = storage::ByteSize(options.line_bytes_max).to_string();
        return bad("line-max", found, "at least 1B and at most 1GiB");
    }
    Ok(())
}

/// All inputs, or this shard's part of them.
fn inputs(options: &PreprocessOptions) -> Result<Vec<Input>> {
    let mut inputs = expand(&options.inputs, &options.input, &options.keys[0])?;
    if let Some(input) = inputs.iter().find(|input| !input.is_json())
        && options.keys.len() > 1
    {
        let found = format!("{} keys", options.keys.len());
        let expected = format!("one key, because documents of {} have no keys", input.name);
        return Err(Error::BadOption { name: "json-key", found, expected, hint: None });
    }
    if let Some(shard) = options.shard {
        share_out(&mut inputs, Share::new(shard.index.into(), shard.count.into())?)?;
    }
    Ok(inputs)
}

fn eod(options: &PreprocessOptions, tokenizer: &dyn Tokenizer) -> Result<Option<u32>> {
    // CPM-2 ends every document in which it masks spans.
    let spans = matches!(options.objective, Objective::Spans(_));
    if !options.append_eod && !spans {
        return Ok(None);
    }
    let eod = tokenizer.eod().ok_or_else(|| Error::BadOption {
        name: if spans { "objective" } else { "append-eod" },
        found: format!("none in the vocabulary of {}", tokenizer.name()),
        expected: "an end-of-document token such as <|endoftext|> or <eod>".to_owned(),
        hint: None,
    })?;
    Ok(Some(eod))
}

fn task(options: &PreprocessOptions, tokenizer: &dyn Tokenizer, outputs: &Outputs) -> Result<Task> {
    let spans = match &options.objective {
        Objective::Documents => return Ok(Task::Documents),
        Objective::Sentences(spec) => return Ok(Task::Sentences(Splitter::open(spec)?)),
        Objective::Spans(spans) => spans,
    };
    let config = SpanConfig {
        density: spans.density,
        mean_len: spans.mean_len,
        seed: spans.seed,
        ids: outputs.plans[0].dtype,
        offsets: outputs.plans[2].dtype,
        ..SpanConfig::new(tokenizer.vocab_size())
    };
    config.check()?;
    Ok(Task::Spans(config))
}

fn block_bytes(inputs: &[Input], workers: usize) -> usize {
    let all: Option<u64> = inputs.iter().map(Input::part_bytes).sum();
    let share = all.map_or(u64::MAX, |all| all / (workers as u64 * 8));
    share.clamp(BLOCK_BYTES_MIN as u64, BLOCK_BYTES_MAX as u64) as usize // fits: clamped
}

/// Tokenizes the batches on all workers and passes them to `take`, in order.
pub(crate) fn encode(
    chunker: InputChunker,
    work: &WorkerSettings,
    tokenizer: &dyn Tokenizer,
    workers: usize,
    stop: &AtomicBool,
    take: &mut dyn FnMut(&mut DocumentBatch) -> Result<()>,
) -> Result<()> {
    let worker = || {
        let mut worker = TokenizeWorker::new(work, tokenizer);
        move |batch: &mut DocumentBatch| worker.encode(batch)
    };
    pump(chunker, workers, stop, worker, take)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Encoder;

    /// A tokenizer that panics when it is used, as an internal error would.
    #[derive(Debug)]
    struct Broken;

    impl Encoder for Broken {
        fn encode(&mut self, _text: &str, _ids: &mut Vec<u32>) {
            panic!("as planned");
        }
    }

    impl Tokenizer for Broken {
        fn encode(&self, _text: &str, _ids: &mut Vec<u32>) {}

        fn encoder(&self) -> Box<dyn Encoder + '_> {
            Box::new(Broken)
        }

        fn decode(&self, _ids: &[u32], _out: &mut Vec<u8>) -> Result<()> {
            Ok(())
        }

        fn vocab_size(&self) -> u32 {
            1
        }

        fn eod(&self) -> Option<u32> {
            None
        }

        fn name(&self) -> &str {
            "broken"
        }

        fn fingerprint(&self) -> String {
            String::new()
        }

        fn identifiers(&self) -> serde_json::Value {
            serde_json::Value::Null
        }
    }

    /// The writer must not wait for the batch of a worker that panicked.
    #[test]
    #[should_panic(expected = "a thread of the pipeline panicked")]
    fn a_panic_ends_the_run() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("in.jsonl");
        std::fs::write(&path, "{\"text\":\"a\"}\n".repeat(1000)).unwrap();
        let inputs = vec![Input::check(path.to_str().unwrap()).unwrap()];
        let dtype = indexed::Dtype::U16;
        let work = WorkerSettings {
            keys: vec!["text".to_owned()],
            eod: None,
            lists: crate::Lists::Sequences,
            empty_documents: crate::EmptyDocuments::Megatron,
            dtypes: vec![dtype],
            task: Task::Documents,
            on_bad_line: crate::OnBadLine::Fail,
            keys_once: true,
            line_bytes_max: 1 << 20,
            helpers: long_text::Helpers::new(1),
        };
        let chunker = InputChunker::new(inputs, 100, 1 << 20);
        let _ = encode(chunker, &work, &Broken, 3, &AtomicBool::new(false), &mut |_| Ok(()));
    }
}
