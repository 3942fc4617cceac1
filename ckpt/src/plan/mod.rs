//! Save plan: which writer writes which bytes into which file. Pure: every process that knows the
//! regions held by all of them computes the same plan.
//!
//! `assign` divides replicated regions so that all writers write about as many bytes; `pack` fills
//! the files of each writer; `merge` joins the catalogs of the writers. Tensors keep the given
//! order, so that tensors of one layer stay adjacent.

mod assign;
mod pack;

use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use serde::{Deserialize, Serialize};

use crate::format::catalog::CHUNKS_MAX;
use crate::spec::{HeldRegion, TensorSpec, check_specs};
use crate::{Error, Region, Result};
use storage::Crc64;

pub(crate) use pack::{FAMILIES, family, spread};

/// Limits of a plan. All writers must use the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanLimits {
    /// Bytes of tensors in one file. A larger row gets a separate file. Default: 4 GiB.
    pub shard_bytes_max: u64,
    /// Replicated regions are not split into pieces smaller than about this. Smaller pieces spread
    /// the bytes more evenly, but cost more requests. Default: 1 MiB. Minimum: 1.
    pub cut_bytes_min: u64,
    /// Bytes of a header's JSON. Default: 50 MB, half of the limit of stock readers, so that
    /// errors of the estimate do not matter.
    pub header_bytes_max: u64,
    /// Every tensor begins at a page of its file, not only those of the optimizer of 1 MiB and
    /// more: for files that are written in place. Default: no.
    #[serde(default)]
    pub align_all: bool,
    /// Number of folders for the files of each writer, with about as many bytes each, for a state
    /// on several disks. Default: 1. Minimum: 1.
    #[serde(default = "one")]
    pub folders: u32,
}

fn one() -> u32 {
    1
}

impl Default for PlanLimits {
    fn default() -> Self {
        PlanLimits {
            shard_bytes_max: 4 << 30,
            cut_bytes_min: 1 << 20,
            header_bytes_max: 50_000_000,
            align_all: false,
            folders: one(),
        }
    }
}

/// Part of a tensor in one file: an entry of its header, and a chunk of the manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedChunk {
    /// Index of the tensor in the model.
    pub tensor: usize,
    /// Index of the piece in the tensor, in the order of their first elements.
    pub k: usize,
    /// The region of the tensor.
    pub region: Region,
    /// Index of the writer's held region that contains it.
    pub holding: usize,
    /// Its bytes, within those of the held region.
    pub bytes: Range<usize>,
    /// Its first byte in the file. Between the end of one piece and the next are zeros.
    pub offset: u64,
}

/// One safetensors file, all of one writer.
#[derive(Debug)]
pub struct Shard {
    /// Its name.
    pub file: String,
    /// Index of its writer's folder, counted from 0.
    pub folder: usize,
    /// Length prefix, JSON and padding: everything before the first tensor.
    pub header: Vec<u8>,
    /// The tensors, in the order of their bytes.
    pub pieces: Vec<PlannedChunk>,
}

impl Shard {
    /// The length of the file.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let end = |piece: &PlannedChunk| piece.offset + piece.bytes.len() as u64;
        self.pieces.last().map_or(self.header.len() as u64, end)
    }
}

/// The inputs of a plan: every process with the same inputs makes the same plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavePlanInputs {
    specs: Vec<TensorSpec>,
    held: Vec<Vec<HeldRegion>>,
    limits: PlanLimits,
}

/// The assignment of bytes to writers and files. It does not depend on the step, so it serves every
/// save of a run.
#[derive(Debug)]
pub struct SavePlan {
    inputs: SavePlanInputs,
    /// The inputs as text, once they are needed.
    text: OnceLock<Vec<u8>>,
    shards: Vec<Vec<Shard>>,
    /// Bytes of each held region of each writer.
    held_bytes: Vec<Vec<u64>>,
    /// Pieces of each tensor.
    chunks: Vec<usize>,
    fingerprint: u64,
}

impl SavePlan {
    /// Plans a save of the model's tensors by writers that each hold a part. Replicated regions are
    /// written once. The regions of a tensor that the writers hold must be equal or disjoint, and
    /// cover it; writers at the end of the list may hold it once more in other regions, as the last
    /// pipeline stage holds a tied embedding.
    ///
    /// # Errors
    /// [`Error::BadInput`] names the tensor that cannot be saved, and the writer.
    pub fn new(
        specs: &[TensorSpec],
        held: &[Vec<HeldRegion>],
        limits: PlanLimits,
    ) -> Result<SavePlan> {
        check_specs(specs)?;
        let sources = assign::sources(specs, held)?;
        let cuts = assign::share(&sources, held.len(), limits.cut_bytes_min.max(1));
        let (shards, chunks) = pack::pack(specs, sources, cuts, held.len(), limits)?;
        let total: usize = chunks.iter().sum();
        if total > CHUNKS_MAX {
            let why = format!("expected at most {CHUNKS_MAX} chunks in a manifest, found {total}");
            return bad(format!("{} tensors of {} writers", specs.len(), held.len()), why);
        }
        let bytes = |holding: &HeldRegion| {
            holding.region.count() * specs[holding.tensor].dtype.item_bytes()
        };
        let held_bytes = held.iter().map(|held| held.iter().map(bytes).collect()).collect();
        let fingerprint = fingerprint(specs, held, limits);
        let inputs = SavePlanInputs { specs: specs.to_vec(), held: held.to_vec(), limits };
        Ok(SavePlan { inputs, text: OnceLock::new(), shards, held_bytes, chunks, fingerprint })
    }

    /// The inputs in JSON, from which another process makes the same plan.
    pub(crate) fn inputs_json(&self) -> &[u8] {
        self.text.get_or_init(|| {
            serde_json::to_vec(&self.inputs).expect("strings, numbers and lists always serialize")
        })
    }

    /// The bytes of a writer's files, piece by piece in file order.
    ///
    /// # Errors
    /// As [`SavePlan::check_held`].
    ///
    /// # Panics
    /// As there.
    pub(crate) fn pieces_held<'a>(
        &self,
        writer: usize,
        held: &[&'a [u8]],
    ) -> Result<Vec<&'a [u8]>> {
        self.check_held(writer, held)?;
        let bytes = |piece: &PlannedChunk| &held[piece.holding][piece.bytes.clone()];
        Ok(self.pieces_of(writer).map(bytes).collect())
    }

    /// The pieces of all files of one writer, file after file.
    ///
    /// # Panics
    /// If there is no such writer.
    pub(crate) fn pieces_of(&self, writer: usize) -> impl Iterator<Item = &PlannedChunk> {
        self.shards[writer].iter().flat_map(|shard| &shard.pieces)
    }

    /// Rejects memory of another length than the writer's held regions.
    ///
    /// # Errors
    /// [`Error::BadInput`] names the held region.
    ///
    /// # Panics
    /// If there is no such writer.
    pub fn check_held(&self, writer: usize, held: &[&[u8]]) -> Result<()> {
        let expected = &self.held_bytes[writer];
        let what = || format!("the tensors of writer {writer}");
        if held.len() != expected.len() {
            let (expected, found) = (expected.len(), held.len());
            return bad(what(), format!("expected {expected} regions, found {found}"));
        }
        for (number, (found, expected)) in held.iter().zip(expected).enumerate() {
            let found = found.len() as u64;
            if found != *expected {
                let why = format!("expected {expected} bytes for region {number}, found {found}");
                return bad(what(), why);
            }
        }
        Ok(())
    }

    /// The tensors of the whole model.
    #[must_use]
    pub fn specs(&self) -> &[TensorSpec] {
        &self.inputs.specs
    }

    /// The number of writers.
    #[must_use]
    pub fn writers(&self) -> usize {
        self.shards.len()
    }

    /// The files of one writer.
    ///
    /// # Panics
    /// If there is no such writer.
    #[must_use]
    pub fn shards(&self, writer: usize) -> &[Shard] {
        &self.shards[writer]
    }

    /// All files, writer after writer.
    pub fn all_shards(&self) -> impl Iterator<Item = &Shard> {
        self.shards.iter().flatten()
    }

    /// Bytes of all files of one writer.
    ///
    /// # Panics
    /// If there is no such writer.
    #[must_use]
    pub fn bytes(&self, writer: usize) -> u64 {
        self.shards[writer].iter().map(Shard::bytes).sum()
    }

    /// The number of pieces of a tensor.
    ///
    /// # Panics
    /// If there is no such tensor.
    #[must_use]
    pub fn pieces(&self, tensor: usize) -> usize {
        self.chunks[tensor]
    }

    /// The number of all pieces.
    #[must_use]
    pub fn chunks(&self) -> usize {
        self.chunks.iter().sum()
    }

    /// Number of folders for the files of each writer.
    pub(crate) fn folders(&self) -> usize {
        self.inputs.limits.folders.max(1) as usize
    }

    /// A hash of the plan's inputs. Writers with the same hash have the same plan.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }
}

/// Caches the plan of the last save: the structure of a run does not change.
#[derive(Debug, Default)]
pub struct PlanCache {
    last: Mutex<Option<Arc<SavePlan>>>,
}

impl PlanCache {
    /// The plan of [`SavePlan::new`], computed only if the inputs differ from those of the last
    /// call.
    ///
    /// # Errors
    /// As there.
    pub fn plan(
        &self,
        specs: &[TensorSpec],
        held: &[Vec<HeldRegion>],
        limits: PlanLimits,
    ) -> Result<Arc<SavePlan>> {
        let fingerprint = fingerprint(specs, held, limits);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = &*last
            && plan.fingerprint == fingerprint
        {
            return Ok(Arc::clone(plan));
        }
        let plan = Arc::new(SavePlan::new(specs, held, limits)?);
        *last = Some(Arc::clone(&plan));
        Ok(plan)
    }

    /// The same for plan inputs.
    pub(crate) fn plan_of(&self, inputs: &SavePlanInputs) -> Result<Arc<SavePlan>> {
        self.plan(&inputs.specs, &inputs.held, inputs.limits)
    }
}

/// A hash of the plan inputs.
fn fingerprint(specs: &[TensorSpec], held: &[Vec<HeldRegion>], limits: PlanLimits) -> u64 {
    let mut bytes = Vec::new();
    let mut sum = Crc64::new();
    let PlanLimits { shard_bytes_max, cut_bytes_min, header_bytes_max, align_all, folders } =
        limits;
    put(&mut bytes, [shard_bytes_max, cut_bytes_min, header_bytes_max, u64::from(align_all)]);
    put(&mut bytes, [u64::from(folders)]);
    put(&mut bytes, [specs.len() as u64, held.len() as u64]);
    for spec in specs {
        put(&mut bytes, [spec.name.len() as u64, spec.shape.len() as u64]);
        bytes.extend(spec.name.as_bytes());
        bytes.extend(spec.group.name().as_bytes());
        bytes.extend(spec.dtype.name().as_bytes());
        put(&mut bytes, spec.shape.iter().copied());
    }
    for writer in held {
        put(&mut bytes, [writer.len() as u64]);
        for HeldRegion { tensor, region } in writer {
            put(&mut bytes, [*tensor as u64, region.spans.len() as u64]);
            put(&mut bytes, region.spans.iter().flat_map(|span| [span.start, span.len]));
            // Represents the absence of a range: no range ends before it begins.
            let flat = region.flat.clone().unwrap_or(Range { start: 1, end: 0 });
            put(&mut bytes, [flat.start, flat.end]);
        }
        sum.update(&bytes);
        bytes.clear();
    }
    sum.update(&bytes);
    sum.value()
}

fn put(bytes: &mut Vec<u8>, numbers: impl IntoIterator<Item = u64>) {
    for number in numbers {
        bytes.extend(number.to_le_bytes());
    }
}

/// The error for an invalid tensor or writer.
fn bad<T>(object: String, reason: String) -> Result<T> {
    Err(Error::BadInput { object, reason })
}

pub(crate) mod merge;
#[cfg(test)]
mod tests;
