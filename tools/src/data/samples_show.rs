//! `feedline samples RUN.toml --show`: prints the samples of a step.

use std::fmt::Write as _;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use indexed::IndexedDataset;
use loader::{PieceRef, SampleOrder};
use preprocess::Tokenizer;
use recipe::config::Config;
use serde::Serialize;
use storage::{Key, RangeRead};

use crate::data::samples::SamplesArgs;
use crate::ui::terminal::thousands;

/// Maximum number of samples that are shown at once.
const SHOWN_MAX: u64 = 1 << 16;
/// Characters of a part that are printed.
const TEXT_CHARS: usize = 160;

/// Samples of a run and their positions; `--json` prints it as it is.
#[derive(Debug, Serialize)]
pub struct Shown {
    /// The config.
    pub config: String,
    /// The samples, in their order.
    pub samples: Vec<Sample>,
}

/// One sample.
#[derive(Debug, Serialize)]
pub struct Sample {
    /// Its index in the training order.
    pub sample: u64,
    /// Its parts.
    pub parts: Vec<SampleSpan>,
}

/// Consecutive tokens of one file.
#[derive(Debug, Serialize)]
pub struct SampleSpan {
    /// The token file.
    pub file: String,
    /// The sequence of the file in which the span starts: a document, unless it was split into
    /// sentences.
    pub sequence: u64,
    /// Index of the first token in that sequence.
    pub first_token: u64,
    /// Offset of the first byte in the file.
    pub offset_bytes: u64,
    /// Tokens.
    pub tokens: u64,
    /// Their text, if the run's tokenizer can be opened and knows them.
    pub text: Option<String>,
}

/// Looks up samples in the order that a config gives, and reads their tokens.
///
/// # Errors
/// If the config, the corpora, the index or a read fails.
pub fn show(args: &SamplesArgs) -> Result<Shown> {
    let config = Config::load(&args.prefix, &[])?;
    let order = feed::order_of(&config)?;
    let total = order.sample_count().min(config.samples_total());
    let count = args.samples.unwrap_or_else(|| config.batch.at(args.first));
    let end = args.first.saturating_add(count);
    ensure!(
        args.first < end && end <= total && count <= SHOWN_MAX,
        "cannot show --first {} --samples {count}: expected samples below {total}, the end of the \
         run, at most {SHOWN_MAX} at once",
        args.first
    );
    let files = order.sources().iter().map(|source| {
        let prefix = source.key.as_str().strip_suffix(".bin").unwrap_or(source.key.as_str());
        IndexedDataset::open_ready(&source.store, &Key::new(prefix)?)
    });
    let files = files.collect::<indexed::Result<Vec<_>>>()?;
    let tokenizer = feed::open_tokenizer(&config.data.tokenizer);
    if let Err(error) = &tokenizer {
        log::warn!("samples: shown without text: {}", storage::one_line(error));
    }
    let reader = SampleReader { order, files, tokenizer: tokenizer.ok() };
    let samples = (args.first..end).map(|sample| reader.sample(sample)).collect::<Result<_>>()?;
    Ok(Shown { config: args.prefix.clone(), samples })
}

/// Reads samples in an order.
struct SampleReader {
    order: Arc<dyn SampleOrder>,
    /// One for each source of the order.
    files: Vec<IndexedDataset>,
    tokenizer: Option<Arc<dyn Tokenizer>>,
}

impl SampleReader {
    fn sample(&self, sample: u64) -> Result<Sample> {
        let mut pieces = Vec::new();
        self.order.pieces(sample, &mut pieces)?;
        // Positions of CPM-2's answers are numbers, not tokens.
        let is_text = |piece: &&PieceRef| {
            !self.files[piece.file as usize].prefix().name().ends_with("_target_offset")
        };
        let parts = pieces.iter().filter(is_text).map(|piece| self.part(piece));
        let parts =
            parts.collect::<Result<_>>().with_context(|| format!("cannot read sample {sample}"))?;
        Ok(Sample { sample, parts })
    }

    fn part(&self, piece: &PieceRef) -> Result<SampleSpan> {
        let file = &self.files[piece.file as usize]; // fits: a place in a list
        let item_bytes = file.dtype().item_bytes();
        let mut bytes = vec![0; piece.len_bytes as usize]; // fits: a sample is in memory
        let offset = piece.offset_bytes;
        file.bin().read_many(&mut [RangeRead { offset, buf: &mut bytes }])?;
        let mut tokens = vec![0; bytes.len() / item_bytes as usize]; // fits: at most 8
        file.dtype().decode_i64(&bytes, &mut tokens);
        let sequence = last_at(file, offset);
        Ok(SampleSpan {
            file: file.display(),
            sequence,
            first_token: offset.saturating_sub(file.sequence_offset_bytes(sequence)) / item_bytes,
            offset_bytes: offset,
            tokens: tokens.len() as u64,
            text: self.text(&tokens),
        })
    }

    fn text(&self, tokens: &[i64]) -> Option<String> {
        let ids = tokens.iter().map(|&id| u32::try_from(id).ok()).collect::<Option<Vec<_>>>()?;
        let mut bytes = Vec::new();
        self.tokenizer.as_ref()?.decode(&ids, &mut bytes).ok()?;
        // A character may be cut where a sample begins or ends.
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// The last sequence that starts at or before an offset.
fn last_at(file: &IndexedDataset, offset_bytes: u64) -> u64 {
    let (mut low, mut high) = (0, file.sequence_count());
    while low + 1 < high {
        let middle = low.midpoint(high);
        if file.sequence_offset_bytes(middle) <= offset_bytes {
            low = middle;
        } else {
            high = middle;
        }
    }
    low
}

impl Shown {
    /// Text for the terminal.
    #[must_use]
    pub fn text(&self) -> String {
        let mut out = String::new();
        for Sample { sample, parts } in &self.samples {
            let tokens = parts.iter().map(|part| part.tokens).sum();
            writeln!(out, "sample {sample}, {} tokens", thousands(tokens)).expect("to memory");
            for part in parts {
                writeln!(out, "{}", part.line()).expect("to memory");
            }
        }
        out
    }
}

impl SampleSpan {
    fn line(&self) -> String {
        let SampleSpan { file, sequence, first_token, tokens, .. } = self;
        let place = format!("  {file}, sequence {sequence}, {tokens} tokens from {first_token}");
        let Some(text) = &self.text else { return place };
        let more = if text.chars().nth(TEXT_CHARS).is_some() { " ..." } else { "" };
        let text: String = text.chars().take(TEXT_CHARS).collect();
        format!("{place}\n    {text:?}{more}")
    }
}
