//! Estimates a run from a sample of its inputs.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use serde::Serialize;

use crate::batch::document_batch::{BatchEnd, DocumentBatch};
use crate::input::{Input, InputChunker};
use crate::tokens::outputs::Outputs;
use crate::tokens::run::{Prepared, encode, prepare};
use crate::{BadLine, Error, PreprocessOptions, Result};

/// Inputs that are sampled at most, evenly spaced.
const INPUTS_MAX: usize = 16;

/// Bytes of JSON that are sampled, over all inputs: a second or two.
const SAMPLE_BYTES: u64 = 64 << 20;

/// Estimate of a run. Serializes with units in the keys.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Estimate {
    /// Inputs.
    pub inputs: usize,
    /// Their bytes as stored, if none is a stream.
    pub stored_bytes: Option<u64>,
    /// Bytes of JSON in the sample.
    pub sampled_bytes: u64,
    /// Documents among them.
    pub sampled_documents: u64,
    /// Documents of all inputs.
    pub documents: Option<u64>,
    /// Tokens of all inputs.
    pub tokens: Option<u64>,
    /// Bytes of the `.bin` files.
    pub bin_bytes: Option<u64>,
    /// Bytes of the `.idx` files.
    pub idx_bytes: Option<u64>,
    /// Wall-clock time of the run on this machine.
    pub elapsed_s: Option<f64>,
    /// Free bytes in the store of the outputs.
    pub free_bytes: Option<u64>,
    /// Datasets that are written.
    pub outputs: Vec<String>,
}

/// Tokenizes a sample and writes nothing.
///
/// # Errors
/// As [`crate::run`], except those of writing.
pub fn estimate(options: &PreprocessOptions) -> Result<Estimate> {
    let Prepared { inputs, outputs, work, tokenizer, .. } = prepare(options)?;
    // The inputs that this shard has a part of.
    let inputs: Vec<_> = inputs.into_iter().filter(|i| i.part_bytes() != Some(0)).collect();
    let stored_bytes: Option<u64> = inputs.iter().map(Input::part_bytes).sum();
    let sampled: Vec<Input> = match stored_bytes {
        Some(_) => {
            inputs.iter().step_by(inputs.len().div_ceil(INPUTS_MAX).max(1)).cloned().collect()
        }
        None => Vec::new(),
    };
    let (start, mut sums) = (Instant::now(), Sums::default());
    for input in sampled.clone() {
        let share = SAMPLE_BYTES / sampled.len() as u64;
        let bytes_before = AtomicU64::new(0);
        let name = input.name.clone();
        let chunker = InputChunker::new(vec![input], 1 << 20, work.line_bytes_max);
        let mut take = |batch: &mut DocumentBatch| {
            if let Some(stop) = batch.stop.take() {
                return Err(stopped(&name, stop));
            }
            sums.stored_bytes += batch.stored_bytes - bytes_before.load(Ordering::Relaxed);
            bytes_before.store(batch.stored_bytes, Ordering::Relaxed);
            sums.json_bytes += batch.bytes.len() as u64;
            sums.documents += batch.documents.tally.documents;
            for output in &batch.documents.outputs {
                sums.bin_bytes += output.bytes.len() as u64;
                sums.sequences += output.lens.len() as u64;
                sums.tokens += output.lens.iter().map(|&len| u64::from(len)).sum::<u64>();
            }
            if sums.json_bytes >= share { Err(Error::Stopped) } else { Ok(()) }
        };
        let never = AtomicBool::new(false);
        let outcome =
            encode(chunker, &work, tokenizer.as_ref(), options.workers, &never, &mut take);
        match outcome {
            Ok(()) | Err(Error::Stopped) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(sums.extrapolate(&inputs, stored_bytes, &outputs, start.elapsed().as_secs_f64()))
}

/// Totals of the sample.
#[derive(Debug, Default)]
struct Sums {
    stored_bytes: u64,
    json_bytes: u64,
    documents: u64,
    tokens: u64,
    bin_bytes: u64,
    sequences: u64,
}

impl Sums {
    fn extrapolate(
        &self,
        inputs: &[Input],
        stored_bytes: Option<u64>,
        outputs: &Outputs,
        elapsed_s: f64,
    ) -> Estimate {
        let factor = stored_bytes
            .filter(|_| self.stored_bytes > 0)
            .map(|all| all as f64 / self.stored_bytes as f64);
        let scaled = |part: u64| factor.map(|factor| (part as f64 * factor) as u64);
        Estimate {
            inputs: inputs.len(),
            stored_bytes,
            sampled_bytes: self.json_bytes,
            sampled_documents: self.documents,
            documents: scaled(self.documents),
            tokens: scaled(self.tokens),
            bin_bytes: scaled(self.bin_bytes),
            // A length and a pointer a sequence, and an entry a document.
            idx_bytes: scaled(12 * self.sequences + 8 * self.documents),
            elapsed_s: factor.map(|factor| elapsed_s * factor),
            free_bytes: outputs.store.free_bytes().ok().flatten(),
            outputs: outputs.plans.iter().map(|plan| outputs.store.display(&plan.prefix)).collect(),
        }
    }
}

fn stopped(input: &str, stop: BatchEnd) -> Error {
    match stop {
        BatchEnd::Input(error) => error,
        BatchEnd::Line { offset, fault } => Error::BadLine(Box::new(BadLine {
            input: input.to_owned(),
            line: None,
            offset: offset as u64,
            column: fault.column as u64,
            decompressed: false,
            found: fault.found,
            expected: fault.expected,
            hint: fault.hint,
        })),
    }
}
