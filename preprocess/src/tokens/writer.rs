//! The end of the pipeline: writes documents to files and counts to a report.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use indexed::{Builder, BuilderMark, Built, Dtype};
use serde_json::{Value, json};
use storage::{FileEntry, Key, Manifest, Storage};

use crate::batch::document_batch::{BatchEnd, DocumentBatch};
use crate::batch::encoded::{LineCounts, SkippedLine};
use crate::batch::report::{Output, Stages};
use crate::checksum::Checksum;
use crate::input::Input;
use crate::json::scanner::LineFault;
use crate::tokens::cleanup::{MANIFEST, discard, discard_drafts, refuse_existing, roll_back};
use crate::tokens::journal::{Journal, Record, ResumeState};
use crate::tokens::outputs::{OutputPlan, Outputs};
use crate::tokens::resume_check::{check_drafts, check_inputs};
use crate::{
    BadLine, Error, InputReport, OnBadLine, PreprocessOptions, PreprocessProgress, Report, Result,
    ResumePolicy, Tokenizer, identity,
};

/// The `format` of a token dataset's manifest.
const FORMAT: &str = "feedline-tokens";
const FORMAT_VERSION: u32 = 1;

/// Bad lines that a report lists; all are counted.
const BAD_LINES_LISTED_MAX: usize = 100;

/// The outputs of a run, being written.
#[derive(Debug)]
pub(crate) struct OutputWriter {
    store: Arc<dyn Storage>,
    plans: Vec<OutputPlan>,
    builders: Vec<Builder>,
    journal: Journal,
    commit_every: Duration,
    /// The checksum of [`describe`].
    settings: String,
    shard_of_bytes: Option<u64>,
    committed: Instant,
    /// Time of earlier processes.
    elapsed_before_s: f64,
    /// Inputs of earlier processes that could not be compared.
    inputs_unverified: usize,
    stored_bytes_all: Option<u64>,
    inputs: Vec<InputReport>,
    /// The first input that has changed since the last record.
    input_changed: usize,
    place: (usize, u64),
    tally: LineCounts,
    tokens: u64,
    bad_lines: Vec<String>,
    stages: Stages,
}

impl OutputWriter {
    /// Creates the outputs, none of which may exist, or resumes them.
    pub(crate) fn begin(
        options: &PreprocessOptions,
        outputs: Outputs,
        tokenizer: &dyn Tokenizer,
        inputs: &[Input],
        stop: &AtomicBool,
    ) -> Result<Self> {
        let Outputs { store, plans } = outputs;
        // Temporary files of killed writers; large files are resumable uploads.
        for name in store.remove_orphans(&plans[0].prefix.parent())? {
            log::info!("{name}: removed; its writer no longer runs");
        }
        let journal_key = plans[0].prefix.with_suffix(".journal")?;
        let run = describe(options, &plans, tokenizer, inputs);
        let settings = format!("{:016x}", storage::crc64(run.to_string().as_bytes()));
        if options.interrupted == ResumePolicy::Restart {
            // Before anything is removed: finished outputs are not overwritten.
            refuse_existing(store.as_ref(), &plans, options.interrupted, &settings)?;
            discard(store.as_ref(), &plans, &journal_key)?;
        }
        let state = match options.interrupted {
            ResumePolicy::Resume => Journal::resume(&store, &journal_key, &run)?,
            ResumePolicy::Refuse | ResumePolicy::Restart => None,
        };
        if state.as_ref().is_none_or(|state| state.record.is_none()) {
            refuse_existing(store.as_ref(), &plans, options.interrupted, &settings)?;
        }
        let mut writer = match state {
            Some(ResumeState { journal, record: Some(record), marks }) => {
                journal.check(&record, plans.len(), inputs.len())?;
                let unverified = check_inputs(&record, inputs, options.workers, stop)?;
                let resumed = OutputWriter::resume(&store, plans, journal, record, &marks)?;
                OutputWriter { inputs_unverified: unverified, ..resumed }
            }
            Some(ResumeState { mut journal, record: None, .. }) => {
                // Held until all are removed.
                discard_drafts(store.as_ref(), &plans)?;
                journal.discard()?;
                drop(journal);
                OutputWriter::create(&store, plans, journal_key, &run)?
            }
            None => OutputWriter::create(&store, plans, journal_key, &run)?,
        };
        writer.add_inputs(inputs);
        writer.commit_every = options.commit_every;
        writer.settings = settings;
        writer.shard_of_bytes = shard_of_bytes(options, inputs);
        writer.stored_bytes_all = inputs.iter().map(Input::part_bytes).sum();
        Ok(writer)
    }

    fn create(
        store: &Arc<dyn Storage>,
        plans: Vec<OutputPlan>,
        journal: Key,
        run: &Value,
    ) -> Result<Self> {
        let journal = Journal::create(store, journal, run).map_err(|error| match error {
            Error::Storage(storage::Error::Exists { object }) => Error::WasInterrupted { object },
            other => other,
        })?;
        let mut builders = Vec::new();
        for OutputPlan { prefix, dtype, .. } in &plans {
            let error = match Builder::create_draft(store, prefix, *dtype) {
                Ok(builder) => {
                    builders.push(builder);
                    continue;
                }
                // Resumable uploads without our journal belong to a run with other keys.
                Err(indexed::Error::Storage(storage::Error::Exists { object })) => {
                    Error::WasInterrupted { object }
                }
                Err(error) => error.into(),
            };
            let created = &plans[..builders.len()];
            drop(builders);
            if let Err(error) = roll_back(store.as_ref(), created, journal) {
                log::warn!("a failed run was not rolled back: {error}");
            }
            return Err(error);
        }
        Ok(OutputWriter::new(store, plans, builders, journal))
    }

    fn resume(
        store: &Arc<dyn Storage>,
        plans: Vec<OutputPlan>,
        journal: Journal,
        record: Record,
        marks: &[Vec<BuilderMark>],
    ) -> Result<Self> {
        let resume = |(plan, mark): (&OutputPlan, _)| {
            Ok(Builder::resume(store, &plan.prefix, plan.dtype, mark)?)
        };
        let builders = plans.iter().zip(&record.builders).map(resume).collect::<Result<_>>()?;
        for (at, plan) in plans.iter().enumerate() {
            let marks: Vec<_> = marks.iter().filter_map(|marks| marks.get(at)).collect();
            check_drafts(store.as_ref(), &plan.prefix, &marks)?;
        }
        log::info!("resuming at byte {} of input {}", record.offset, record.input_idx);
        let mut writer = OutputWriter::new(store, plans, builders, journal);
        writer.tally = record.tally;
        writer.tokens = writer.builders.iter().map(Builder::token_count).sum();
        writer.place = (record.input_idx, record.offset);
        writer.input_changed = record.input_idx;
        writer.elapsed_before_s = record.elapsed_s;
        for (idx, report) in record.inputs {
            if writer.inputs.len() <= idx {
                writer.inputs.resize_with(idx + 1, InputReport::default);
            }
            writer.inputs[idx] = report;
        }
        Ok(writer)
    }

    /// Adds the inputs that no record has. The one in progress may have changed after the position
    /// that was reached; its rest is read from the new version.
    fn add_inputs(&mut self, inputs: &[Input]) {
        let known = self.inputs.len();
        self.inputs.extend(inputs.iter().skip(known).map(InputReport::new));
        let (input_idx, _) = self.place();
        if let Some(report) = self.inputs.get_mut(input_idx) {
            report.identity.clone_from(&inputs[input_idx].identity);
        }
    }

    fn new(
        store: &Arc<dyn Storage>,
        plans: Vec<OutputPlan>,
        builders: Vec<Builder>,
        journal: Journal,
    ) -> Self {
        OutputWriter {
            store: Arc::clone(store),
            plans,
            builders,
            journal,
            commit_every: Duration::ZERO,
            settings: String::new(),
            shard_of_bytes: None,
            committed: Instant::now(),
            elapsed_before_s: 0.0,
            inputs_unverified: 0,
            stored_bytes_all: None,
            inputs: Vec::new(),
            input_changed: 0,
            place: (0, 0),
            tally: LineCounts::default(),
            tokens: 0,
            bad_lines: Vec::new(),
            stages: Stages::default(),
        }
    }

    /// Where the first batch begins: an input, and a byte offset in it.
    pub(crate) fn place(&self) -> (usize, u64) {
        // A finished file has everything: data that an input has gained since then is ignored.
        match self.builders.iter().any(Builder::is_finished) {
            true => (self.inputs.len(), 0),
            false => self.place,
        }
    }

    /// The checksum of the part of an input that was read.
    pub(crate) fn content_crc64(&self, input_idx: usize) -> Option<Checksum> {
        self.inputs.get(input_idx)?.json_crc64
    }

    /// Writes the documents of the next batch, or returns its error.
    pub(crate) fn add(&mut self, batch: &mut DocumentBatch, start: Instant) -> Result<()> {
        let begin = Instant::now();
        let documents = &mut batch.documents;
        for (output, builder) in documents.outputs.iter().zip(&mut self.builders) {
            let ended = self.plans[0].has_documents;
            self.tokens += add_all(builder, output, ended)?;
        }
        self.tally.add(documents.tally);
        self.stages.parse_ns += documents.parse_ns;
        self.stages.tokenize_ns += documents.tokenize_ns;
        let bad = std::mem::take(&mut documents.bad);
        let (documents_new, source_crc64) = (documents.tally.documents, documents.source_crc64);
        for SkippedLine { line, offset, fault } in bad {
            let bad_line = self.bad_line(batch, line, offset, fault);
            if self.bad_lines.len() < BAD_LINES_LISTED_MAX {
                let bad_line = storage::printable_message(&bad_line.to_string());
                log::warn!("line skipped: {bad_line}");
                self.bad_lines.push(bad_line);
            }
        }
        let stop = batch.stop.take().map(|stop| match stop {
            BatchEnd::Input(error) => error,
            BatchEnd::Line { offset, fault } => {
                let line = batch.documents.lines;
                Error::BadLine(Box::new(self.bad_line(batch, line, offset, fault)))
            }
        });
        if let Some(error) = stop {
            return Err(error);
        }
        let input = &mut self.inputs[batch.input_idx];
        input.documents += documents_new;
        input.lines += batch.documents.lines;
        let bytes = batch.bytes.len() as u64;
        input.json_bytes += bytes;
        input.json_crc64 = input.json_crc64.map(|before| before.then(source_crc64, bytes));
        input.stored_bytes = batch.stored_bytes;
        self.place = (batch.next.input_idx, batch.next.offset);
        self.stages.write_ns += begin.elapsed().as_nanos() as u64;
        if self.committed.elapsed() >= self.commit_every {
            self.commit(start)?;
        }
        Ok(())
    }

    fn bad_line(
        &self,
        batch: &DocumentBatch,
        line: u64,
        offset: usize,
        fault: LineFault,
    ) -> BadLine {
        let input = &self.inputs[batch.input_idx];
        let line = batch.numbered.then_some(input.lines + line + 1);
        batch.bad_line(&input.name, line, offset, fault)
    }

    /// Commits everything so far: after a crash, a run resumes from here.
    pub(crate) fn commit(&mut self, start: Instant) -> Result<()> {
        let begin = Instant::now();
        let builders = self.builders.iter_mut().map(Builder::sync);
        let builders = builders.collect::<std::result::Result<_, _>>()?;
        let (input_idx, offset) = self.place;
        let changed = self.input_changed..(input_idx + 1).min(self.inputs.len());
        let inputs = changed.map(|idx| (idx, self.inputs[idx].clone())).collect();
        self.journal.commit(&Record {
            input_idx,
            offset,
            builders,
            tally: self.tally,
            elapsed_s: self.elapsed_before_s + start.elapsed().as_secs_f64(),
            inputs,
        })?;
        self.input_changed = input_idx;
        self.committed = Instant::now();
        self.stages.write_ns += begin.elapsed().as_nanos() as u64;
        Ok(())
    }

    /// After a failure: keeps what can be resumed, and removes everything else.
    pub(crate) fn give_up(self) -> bool {
        let OutputWriter { store, plans, builders, journal, .. } = self;
        drop(builders);
        let keep = journal.has_record;
        if !keep && let Err(error) = roll_back(store.as_ref(), &plans, journal) {
            log::warn!("a failed run was not rolled back: {error}");
        }
        keep
    }

    pub(crate) fn progress(&self) -> PreprocessProgress {
        PreprocessProgress {
            stored_bytes: self.inputs.iter().map(|input| input.stored_bytes).sum(),
            stored_bytes_all: self.stored_bytes_all,
            json_bytes: self.inputs.iter().map(|input| input.json_bytes).sum(),
            documents: self.tally.documents,
            tokens: self.tokens,
        }
    }

    /// Makes the outputs durable and visible, each manifest last. After an error, call
    /// [`OutputWriter::give_up`].
    pub(crate) fn finish(
        &mut self,
        options: &PreprocessOptions,
        tokenizer: &dyn Tokenizer,
        start: Instant,
    ) -> Result<Report> {
        // So that a failure or a kill from here on loses no work.
        self.commit(start)?;
        let mut outputs = Vec::new();
        let (mut sequences, mut tokens) = (0, 0);
        for (plan, builder) in self.plans.iter().zip(std::mem::take(&mut self.builders)) {
            let built = match plan.has_documents {
                true => builder.finish()?,
                false => builder.finish_without_documents()?,
            };
            sequences += built.sequences;
            tokens += built.tokens;
            let entry = self.write_manifest(plan, options, tokenizer, &built)?;
            let folder = plan.prefix.parent();
            for entry in built.files().iter().chain([&entry]) {
                let key = folder.join(&entry.path)?;
                outputs.push(Output::new(self.store.display(&key), entry));
            }
        }
        // The journal first: a record without its outlines could not be resumed.
        self.journal.discard()?;
        discard_drafts(self.store.as_ref(), &self.plans)?;
        Ok(self.report(options, tokenizer, start, outputs, [sequences, tokens]))
    }

    fn report(
        &mut self,
        options: &PreprocessOptions,
        tokenizer: &dyn Tokenizer,
        start: Instant,
        outputs: Vec<Output>,
        [sequences, tokens]: [u64; 2],
    ) -> Report {
        let progress = self.progress();
        let elapsed_s = self.elapsed_before_s + start.elapsed().as_secs_f64();
        let LineCounts { documents, empty, blank_lines, text_bytes, skipped } = self.tally;
        Report {
            tokenizer: tokenizer.name().to_owned(),
            vocab_size: tokenizer.vocab_size(),
            dtype: dtype_name(self.plans[0].dtype),
            workers: options.workers,
            documents,
            documents_empty: empty,
            skipped,
            bad_lines: std::mem::take(&mut self.bad_lines),
            sequences,
            tokens,
            blank_lines,
            stored_bytes: progress.stored_bytes,
            json_bytes: progress.json_bytes,
            text_bytes,
            resumed: self.elapsed_before_s > 0.0,
            inputs_unverified: self.inputs_unverified,
            elapsed_s,
            json_mb_per_s: ratio(progress.json_bytes as f64 / 1e6, elapsed_s),
            tokens_per_s: ratio(tokens as f64, elapsed_s),
            tokens_per_document: ratio(tokens as f64, documents as f64),
            text_bytes_per_token: ratio(text_bytes as f64, tokens as f64),
            stages: self.stages,
            inputs: std::mem::take(&mut self.inputs),
            outputs,
        }
    }

    fn write_manifest(
        &self,
        plan: &OutputPlan,
        options: &PreprocessOptions,
        tokenizer: &dyn Tokenizer,
        built: &Built,
    ) -> Result<FileEntry> {
        let mut described = json!({
            "name": tokenizer.name(),
            "fingerprint": tokenizer.fingerprint(),
            "vocab_size": tokenizer.vocab_size(),
            "eod_id": tokenizer.eod(),
            "identifiers": tokenizer.identifiers(),
        });
        if let Some(rule) = tokenizer.rule() {
            described["rule"] = rule.into();
        }
        let manifest = Manifest {
            format: FORMAT.to_owned(),
            version: FORMAT_VERSION,
            files: built.files().to_vec(),
            meta: json!({
                "tool": concat!("preprocess ", env!("CARGO_PKG_VERSION")),
                "tokenizer": described,
                "dtype": dtype_name(plan.dtype),
                "json_key": plan.key,
                "objective": plan.objective,
                "append_eod": options.append_eod,
                "shard": options.shard.map(|shard| format!("{}/{}", shard.index, shard.count)),
                "shard_of_bytes": self.shard_of_bytes,
                "settings": self.settings,
                "documents": built.documents,
                "sequences": built.sequences,
                "tokens": built.tokens,
                "skipped": self.tally.skipped,
                "inputs": self.inputs,
            }),
        };
        let key = plan.prefix.with_suffix(MANIFEST)?;
        match self.store.open(&key) {
            // From a process that was killed between this manifest and the end of its run.
            Ok(_) if self.journal.has_record => self.store.delete(&key)?,
            _ => {}
        }
        Ok(manifest.write(self.store.as_ref(), &key)?)
    }
}

fn add_all(
    builder: &mut Builder,
    encoded: &crate::batch::encoded::Encoded,
    ended: bool,
) -> Result<u64> {
    let item_bytes = builder.dtype().item_bytes() as usize; // fits: at most 8
    let (mut bytes, mut lens) = (encoded.bytes.as_slice(), encoded.lens.as_slice());
    let mut tokens = 0;
    for &sequences in &encoded.sequences {
        let document;
        (document, lens) = lens.split_at(sequences as usize);
        let sum: u64 = document.iter().map(|&len| u64::from(len)).sum();
        let of_document;
        (of_document, bytes) = bytes.split_at(sum as usize * item_bytes); // fits: they are there
        builder.add_encoded(of_document, document)?;
        if ended {
            builder.end_document()?;
        }
        tokens += sum;
    }
    assert!(bytes.is_empty(), "the lengths are those of the tokens");
    Ok(tokens)
}

/// All settings that determine the outputs. What inputs hold is not included: each record has what
/// was read of them, so that a bad line may be repaired before the run is resumed.
fn describe(
    options: &PreprocessOptions,
    plans: &[OutputPlan],
    tokenizer: &dyn Tokenizer,
    inputs: &[Input],
) -> Value {
    let names: Vec<_> = inputs.iter().map(|input| input.name.as_str()).collect();
    let outputs: Vec<_> = plans.iter().map(OutputPlan::describe).collect();
    let mut settings = json!({
        "version": FORMAT_VERSION,
        "tokenizer": tokenizer.fingerprint(),
        "outputs": outputs,
        "append_eod": options.append_eod,
        "eod_id": tokenizer.eod(),
        "empty_documents": identity::empty_documents(options.empty_documents),
        "bad_lines": identity::bad_lines(options.on_bad_line),
        "last_of_duplicate_keys": options.last_of_duplicate_keys,
        "objective": identity::objective(&options.objective),
        "input_format": identity::input_format(options.input.format),
        "text": identity::text_rules(&options.input.text),
        "shard_of_bytes": shard_of_bytes(options, inputs),
        "shard": options.shard.map(|shard| format!("{}/{}", shard.index, shard.count)),
        "inputs": names,
    });
    if let Some(lists) = identity::lists(options.lists) {
        settings["lists"] = lists.into();
    }
    // Earlier versions ended lines at `\n` alone. Lines of JSON with a lone `\r` were bad to them.
    let skips = options.on_bad_line == OnBadLine::Skip;
    if inputs.iter().any(|input| input.is_text_lines() || skips && input.is_json_lines()) {
        settings["line_ends"] = "Universal".into();
    }
    settings
}

/// The total that is divided into shards: if it changes, their bounds do too.
fn shard_of_bytes(options: &PreprocessOptions, inputs: &[Input]) -> Option<u64> {
    options.shard.and_then(|_| inputs.iter().map(|input| input.stored_bytes).sum())
}

fn dtype_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::U16 => "uint16",
        _ => "int32",
    }
}

/// Zero if there is nothing to divide by.
fn ratio(part: f64, whole: f64) -> f64 {
    if whole == 0.0 { 0.0 } else { part / whole }
}
