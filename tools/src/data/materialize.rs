//! `feedline materialize`: writes the samples of a run, in their order, as a separate dataset.
//!
//! The order is known in advance, so the samples can be written once: training then reads one file
//! sequentially, in requests of 1 MiB, on any store. The source is read in windows of samples,
//! sorted by offset, so that its reads ascend. A killed run is resumed: see `materialize_resume`.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use indexed::{Builder, Format, GptIndex, GptIndexConfig, IndexedDataset, Split};
use serde::Serialize;
use serde_json::{Value, json};
use storage::{ByteSize, Key, Location, RangeRead, rate_text};

use crate::data::index::tokenizer_of;
use crate::data::materialize_resume::{MaterializeResume, kept_text};
use crate::ui::inspect_target::PAIR_SUFFIXES;
use crate::ui::job::{CancellableJob, CountedBytes};
use crate::ui::output::{Output, TOOL, no_manifest_yet, verified_manifest, write_manifest_only};
use crate::ui::terminal::{FactTable, thousands};

/// Arguments of `feedline materialize`.
#[derive(Debug, Args)]
pub struct Materialize {
    /// Prefix of the dataset to read.
    #[arg(value_name = "PREFIX")]
    pub source: String,
    /// Prefix of the output.
    #[arg(short = 'o', long = "out", alias = "output-prefix", value_name = "OUT")]
    #[arg(help_heading = "Output")]
    pub output_prefix: String,
    /// Tokens per sample; one more is written, the label of the last token.
    #[arg(long, value_name = "TOKENS", help_heading = "Samples")]
    pub seq_length: u64,
    /// Samples to write [default: one epoch]
    #[arg(long, value_name = "N", help_heading = "Samples")]
    pub samples: Option<u64>,
    /// Seed of the order.
    #[arg(long, value_name = "N", default_value_t = 1234, help_heading = "Samples")]
    pub seed: u32,
    /// Shares of training, validation and test.
    #[arg(long, value_name = "SHARES", default_value = "1,0,0", help_heading = "Samples")]
    pub split: String,
    /// Part to write: train, valid or test.
    #[arg(long, value_parser = part, default_value = "train", help_heading = "Samples")]
    pub part: Split,
    /// Folder of the index files [default: PREFIX/cache/GPTDataset_indices]
    #[arg(long, value_name = "FOLDER", help_heading = "Samples")]
    pub data_cache_path: Option<String>,
    /// A description.txt or a JSON file of the tokenizer, as for `feedline index build`.
    #[arg(long, value_name = "FILE", help_heading = "Samples")]
    pub tokenizer_from: Option<String>,
    /// Memory for samples; at least one sample. With less, the source is read more often.
    #[arg(long, value_name = "SIZE", default_value = "1GiB", help_heading = "Limits")]
    pub memory: ByteSize,
    /// Bytes written between two commits: the maximum that a kill loses.
    ///
    /// Each commit waits for the disk, so small values are slow.
    #[arg(long, value_name = "SIZE", default_value = "4GiB", help_heading = "Limits")]
    pub commit_every: ByteSize,
    /// Discard the committed samples of an interrupted run [default: resume it]
    ///
    /// Resuming with other settings is an error: use --restart.
    #[arg(long, help_heading = "Output")]
    pub restart: bool,
    /// Print JSON, with units in the keys.
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

/// The output of `feedline materialize`; `--json` prints it as it is.
#[derive(Debug, Serialize)]
pub struct Materialized {
    /// The dataset that was read.
    pub source: String,
    /// Samples, each a sequence and a document.
    pub samples: u64,
    /// Of these, the samples that an interrupted run had written.
    pub samples_before: u64,
    /// Tokens, of which each sample but the last shares one with the next.
    pub tokens: u64,
    /// Bytes of the source that were read by this run.
    pub read_bytes: u64,
    /// The time that it took.
    pub elapsed_s: f64,
    /// The files.
    pub outputs: Vec<Output>,
}

/// Reads with a smaller gap are coalesced: reading the gap costs less than another request.
const GAP_BYTES_MAX: u64 = 64 << 10;

/// Bytes read at a time; 64 MiB of requests keep any store busy.
const STAGE_BYTES_MAX: u64 = 64 << 20;

/// A range of the source, and its position in the window.
#[derive(Clone, Copy, Debug)]
struct CopyPiece {
    offset: u64,
    len: usize,
    place: usize,
}

/// Writes the samples of a part in their order, or resumes an interrupted run of the same settings.
/// If it fails before the first commit, nothing remains.
///
/// # Errors
/// If the source is damaged, an output exists, or the settings give no order.
pub fn materialize(args: &Materialize, work: &Arc<CancellableJob>) -> Result<Materialized> {
    let start = Instant::now();
    let source = Location::new(&args.source).without_suffix(&PAIR_SUFFIXES).to_string();
    let name = source.as_str();
    let (store, prefix) = work.locate(name)?;
    let dataset = IndexedDataset::open_ready(&store, &prefix)?;
    let (out, out_key) = work.locate(&args.output_prefix)?;
    if args.restart {
        MaterializeResume::discard(out.as_ref(), &out_key)?;
    }
    if let Err(error) = no_manifest_yet(out.as_ref(), &out_key) {
        // The output is complete, so that unfinished files of a killed run are not needed.
        if matches!(error, storage::Error::Exists { .. }) {
            MaterializeResume::discard_or_warn(out.as_ref(), &out_key);
        }
        return Err(error.into());
    }
    let manifest = verified_manifest(store.as_ref(), &prefix, Format::Mmididx, work)?;
    let (index, config, kept_in) = order_of(args, work, (name, &dataset), (&store, &prefix))?;
    work.check()?;
    let samples = args.samples.unwrap_or(index.sample_count());
    ensure!(samples > 0, "cannot materialize {name}: the {} split has no samples", args.part);
    let order = config.description(args.part)?;
    let mut run = order.clone();
    (run["samples"], run["tokens"]) = (samples.into(), dataset.token_count().into());
    run["files"] = json!(manifest.as_ref().map(|manifest| &manifest.files));
    let mut unfinished =
        MaterializeResume::begin(&out, &out_key, dataset.dtype(), run, args.seq_length)?;
    let tokens = |sample| tokens_of(&dataset, &index, sample);
    unfinished.add_present_samples(samples, tokens)?;
    let samples_before = unfinished.samples();
    let sample_bytes = (args.seq_length + 1) * dataset.dtype().item_bytes();
    let bytes = sample_bytes.saturating_mul(samples - samples_before.min(samples));
    work.begin("materialize", CountedBytes::Written, Some(bytes));
    let read_bytes = match write(args, &dataset, &index, samples, &mut unfinished) {
        Ok(read_bytes) => read_bytes,
        Err(error) => {
            let is_all = unfinished.samples() == 0 && work.check().is_err();
            let error = unfinished.fail(error);
            let order = format!("cannot complete {} (order kept in {kept_in})", args.output_prefix);
            return Err(if is_all { error.context(order) } else { error });
        }
    };
    let kept = || kept_text(&out.display(&out_key), samples);
    let built = unfinished.finish().with_context(kept)?;
    let mut meta = manifest.map_or(json!({}), |old| old.meta);
    meta["tool"] = TOOL.into();
    meta["documents"] = built.documents.into();
    meta["sequences"] = built.sequences.into();
    meta["tokens"] = built.tokens.into();
    meta["materialized"] = json!({
        "source": name,
        "part": args.part.name(),
        "samples": samples,
        "order": order,
    });
    if let Value::Object(meta) = &mut meta {
        // The input that a sample is from is no longer known.
        meta.remove("inputs");
    }
    // If the manifest cannot be written, the files remain, and the same command resumes.
    let files = built.files();
    let outputs = write_manifest_only(out.as_ref(), &out_key, &files, meta).with_context(kept)?;
    MaterializeResume::discard_or_warn(out.as_ref(), &out_key);
    let elapsed_s = start.elapsed().as_secs_f64();
    Ok(Materialized {
        source: name.to_owned(),
        samples,
        samples_before,
        tokens: built.tokens,
        read_bytes,
        elapsed_s,
        outputs,
    })
}

/// Writes the missing samples; returns the bytes that were read for them.
fn write(
    args: &Materialize,
    dataset: &IndexedDataset,
    index: &GptIndex,
    samples: u64,
    into: &mut MaterializeResume,
) -> Result<u64> {
    let mut window = Window::default();
    let sample_bytes = (args.seq_length + 1) * dataset.dtype().item_bytes();
    // fits: at most --memory
    let window_samples = (args.memory.0 / sample_bytes).clamp(1, samples);
    let (mut first, mut read_bytes) = (into.samples(), 0);
    while first < samples {
        let end = (first + window_samples).min(samples);
        read_bytes += window.fill(dataset, index, first..end)?;
        window.write(dataset, into.builder())?;
        into.commit_if_large(args.commit_every.0)?;
        first = end;
    }
    into.commit_all(samples)?;
    Ok(read_bytes)
}

fn tokens_of(dataset: &IndexedDataset, index: &GptIndex, sample: u64) -> Result<u64> {
    let mut tokens = 0;
    index.for_each_part(dataset, sample, |part, _| tokens += part.token_count)?;
    Ok(tokens)
}

/// The order, its config, and the folder of its files.
fn order_of(
    args: &Materialize,
    work: &Arc<CancellableJob>,
    (name, dataset): (&str, &IndexedDataset),
    (store, prefix): (&Arc<dyn storage::Storage>, &Key),
) -> Result<(GptIndex, GptIndexConfig, String)> {
    work.begin("order", CountedBytes::Any, None);
    // The copy gets new checksums, so the entire index is verified, even if it is sealed.
    dataset.check_tables()?;
    let tokenizer = args.tokenizer_from.as_deref().map(tokenizer_of).transpose()?;
    let config = GptIndexConfig {
        dataset_path: name.to_owned(),
        split: Some(args.split.clone()),
        seq_len: args.seq_length,
        seed: args.seed,
        num_samples: args.samples,
        add_extra_token: true,
        drop_last_partial_valid: true,
        tokenizer: tokenizer.unwrap_or(Value::Null),
    };
    let (cache, folder) = match &args.data_cache_path {
        Some(folder) => work.locate(folder)?,
        None => (Arc::clone(store), indexed::default_cache_folder(prefix)?),
    };
    let index = if args.data_cache_path.is_some() {
        GptIndex::load_or_keep(dataset, args.part, &config, cache.as_ref(), &folder)?
    } else {
        // If the folder of the source cannot be written, the order is not stored.
        GptIndex::load_or_build(dataset, args.part, &config, cache.as_ref(), &folder)?
    };
    Ok((index, config, cache.display(&folder)))
}

/// Consecutive samples in memory.
#[derive(Debug, Default)]
struct Window {
    bytes: Vec<u8>,
    /// Tokens of each sample.
    lengths: Vec<u32>,
    pieces: Vec<CopyPiece>,
    stage: Vec<u8>,
}

impl Window {
    /// Reads samples; returns the bytes that were read for them.
    fn fill(
        &mut self,
        dataset: &IndexedDataset,
        index: &GptIndex,
        samples: std::ops::Range<u64>,
    ) -> Result<u64> {
        let item_bytes = dataset.dtype().item_bytes();
        self.lengths.clear();
        self.pieces.clear();
        let mut place = 0;
        for sample in samples {
            let before = place;
            index.for_each_part(dataset, sample, |part, offset| {
                let len = (part.token_count * item_bytes) as usize; // fits: of one sample
                self.pieces.push(CopyPiece { offset, len, place });
                place += len;
            })?;
            // fits: a sample has at most 2^31 tokens, as the index refuses more
            self.lengths.push(((place - before) as u64 / item_bytes) as u32);
        }
        self.bytes.resize(place, 0);
        self.pieces.sort_unstable_by_key(|piece| (piece.offset, piece.place));
        let (mut from, mut read_bytes) = (0, 0);
        while from < self.pieces.len() {
            let to = stage_end(&self.pieces, from);
            read_bytes += self.read_stage(dataset, from..to)?;
            from = to;
        }
        Ok(read_bytes)
    }

    /// Reads some pieces, coalesced where they are near, and copies them to their positions.
    fn read_stage(
        &mut self,
        dataset: &IndexedDataset,
        range: std::ops::Range<usize>,
    ) -> Result<u64> {
        let pieces = &self.pieces[range];
        let mut extents: Vec<(u64, u64)> = Vec::new();
        for piece in pieces {
            let end = piece.offset + piece.len as u64;
            match extents.last_mut() {
                Some((_, last)) if piece.offset <= *last + GAP_BYTES_MAX => *last = end.max(*last),
                _ => extents.push((piece.offset, end)),
            }
        }
        let total: u64 = extents.iter().map(|(start, end)| end - start).sum();
        self.stage.resize(total as usize, 0); // fits: 64 MiB and a sample's part
        let (mut reads, mut rest) = (Vec::with_capacity(extents.len()), self.stage.as_mut_slice());
        for &(offset, end) in &extents {
            let (buf, after) = rest.split_at_mut((end - offset) as usize); // fits: as above
            reads.push(RangeRead { offset, buf });
            rest = after;
        }
        dataset.bin().read_many(&mut reads)?;
        let (mut extent, mut start) = (0, 0);
        for piece in pieces {
            while piece.offset >= extents[extent].1 {
                start += extents[extent].1 - extents[extent].0;
                extent += 1;
            }
            let at = (start + piece.offset - extents[extent].0) as usize; // fits: in the stage
            self.bytes[piece.place..piece.place + piece.len]
                .copy_from_slice(&self.stage[at..at + piece.len]);
        }
        Ok(total)
    }

    fn write(&self, dataset: &IndexedDataset, builder: &mut Builder) -> Result<()> {
        let item_bytes = dataset.dtype().item_bytes() as usize;
        let mut rest = self.bytes.as_slice();
        for &tokens in &self.lengths {
            let (sample, after) = rest.split_at(tokens as usize * item_bytes);
            builder.add_encoded(sample, &[tokens])?;
            builder.end_document()?;
            rest = after;
        }
        Ok(())
    }
}

/// The end of the pieces that are read at a time, at least one, from `from` on.
fn stage_end(pieces: &[CopyPiece], from: usize) -> usize {
    let (mut end, mut total) = (0, 0);
    for (nth, piece) in pieces.iter().enumerate().skip(from) {
        let piece_end = piece.offset + piece.len as u64;
        let is_near = nth > from && piece.offset <= end + GAP_BYTES_MAX;
        total += if is_near { piece_end.saturating_sub(end) } else { piece.len as u64 };
        end = piece_end.max(end);
        if total > STAGE_BYTES_MAX && nth > from {
            return nth;
        }
    }
    pieces.len()
}

fn part(name: &str) -> std::result::Result<Split, String> {
    let is = |which: &Split| which.name() == name;
    Split::ALL.into_iter().find(is).ok_or_else(|| "expected train, valid or test".to_owned())
}

impl Materialized {
    /// Text for the terminal.
    #[must_use]
    pub fn text(&self) -> String {
        let written: u64 = self.outputs.iter().map(|output| output.bytes).sum();
        let mut facts = FactTable::default();
        facts.add("samples", thousands(self.samples));
        if self.samples_before > 0 {
            facts.add("resumed samples", thousands(self.samples_before));
        }
        facts.add("tokens", thousands(self.tokens));
        facts.add("read", ByteSize(self.read_bytes));
        facts.add("written", ByteSize(written));
        facts.add("rate", rate_text(written, std::time::Duration::from_secs_f64(self.elapsed_s)));
        for output in &self.outputs {
            facts.add("file", &output.name);
        }
        format!("materialized {}\n{}", self.source, facts.text())
    }
}
