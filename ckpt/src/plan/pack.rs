//! The files of each writer.

use std::cmp::Reverse;

use super::assign::{HeldTensor, WriterShare};
use super::{PlanLimits, PlannedChunk, Shard};
use crate::format::safetensors::{self, Unplaced};
use crate::spec::TensorSpec;
use crate::{Group, Result};

/// A file that is being filled.
#[derive(Debug, Default)]
struct OpenShard {
    folder: usize,
    pieces: Vec<PlannedChunk>,
    data_bytes: u64,
    header_bytes: u64,
}

/// The files of one writer, by family.
type WriterShards = [Vec<OpenShard>; FAMILIES.len()];

/// The files of every writer, and the number of pieces of every tensor.
pub(crate) fn pack(
    specs: &[TensorSpec],
    sources: Vec<HeldTensor>,
    cuts: Vec<Vec<WriterShare>>,
    writers: usize,
    limits: PlanLimits,
) -> Result<(Vec<Vec<Shard>>, Vec<usize>)> {
    let mut chunks = vec![0; specs.len()];
    let mut pieces: Vec<Vec<PlannedChunk>> = (0..writers).map(|_| Vec::new()).collect();
    let mut order: Vec<(HeldTensor, Vec<WriterShare>)> = sources.into_iter().zip(cuts).collect();
    // Stable: tensor after tensor within a group.
    order.sort_by_key(|(source, _)| specs[source.tensor].group);
    for (source, cuts) in &order {
        let count = source.region.count();
        for (number, cut) in cuts.iter().enumerate() {
            let end = cuts.get(number + 1).map_or(count, |next| next.start);
            let (writer, holding) = source.holders[cut.holder];
            for range in cut_rows(source, cut.start..end, limits.shard_bytes_max) {
                let item_bytes = source.item_bytes;
                let region = source.region.slice(range.clone());
                // fits: within memory that the writer holds.
                let bytes = (range.start * item_bytes) as usize..(range.end * item_bytes) as usize;
                let holding = holding as usize;
                let k = chunks[source.tensor];
                chunks[source.tensor] += 1;
                let piece =
                    PlannedChunk { tensor: source.tensor, k, region, holding, bytes, offset: 0 };
                pieces[writer as usize].push(piece);
            }
        }
    }
    let files = pieces.into_iter().map(|pieces| fill(specs, pieces, limits)).collect();
    Ok((seal_all(specs, files, &chunks, limits.align_all)?, chunks))
}

/// The files of the pieces of one writer, which are in the order of their groups.
fn fill(specs: &[TensorSpec], pieces: Vec<PlannedChunk>, limits: PlanLimits) -> WriterShards {
    let group = |piece: &PlannedChunk| specs[piece.tensor].group;
    let mut folders = Vec::with_capacity(pieces.len());
    for same in pieces.chunk_by(|a, b| group(a) == group(b)) {
        let bytes: Vec<usize> = same.iter().map(|piece| piece.bytes.len()).collect();
        folders.extend(spread(&bytes, limits.folders as usize));
    }
    let mut files = FAMILIES.map(|_| Vec::new());
    for (piece, folder) in pieces.into_iter().zip(folders) {
        let spec = &specs[piece.tensor];
        put(&mut files[family(spec.group)], folder, piece, header_bytes(spec), limits);
    }
    files
}

/// Assigns items of these sizes to folders, so that all have about as many bytes: the largest
/// first, each to the folder with the least. Equal inputs give equal results.
pub(crate) fn spread(bytes: &[usize], folders: usize) -> Vec<usize> {
    if folders <= 1 {
        return vec![0; bytes.len()];
    }
    let mut order: Vec<usize> = (0..bytes.len()).collect();
    order.sort_by_key(|at| Reverse(bytes[*at]));
    let mut loads = vec![0; folders];
    let mut all = vec![0; bytes.len()];
    for at in order {
        let least = (0..loads.len()).min_by_key(|folder| loads[*folder]);
        all[at] = least.expect("checked above: more than one folder");
        loads[all[at]] += bytes[at];
    }
    all
}

/// Prefixes of file names.
pub(crate) const FAMILIES: [&str; 3] = ["model", "optim", "other"];

/// Index in [`FAMILIES`] of a group's tensors.
pub(crate) fn family(group: Group) -> usize {
    match group {
        Group::Model => 0,
        Group::Master | Group::ExpAvg | Group::ExpAvgSq => 1,
        Group::Other => 2,
    }
}

/// Puts a piece into the last file of a folder, or into a new one if it does not fit.
fn put(
    files: &mut Vec<OpenShard>,
    folder: usize,
    piece: PlannedChunk,
    header_bytes: u64,
    limits: PlanLimits,
) {
    let data_bytes = piece.bytes.len() as u64;
    let fits = |file: &OpenShard| {
        file.data_bytes + data_bytes <= limits.shard_bytes_max
            && file.header_bytes + header_bytes <= limits.header_bytes_max
    };
    let last = files.iter().rposition(|file| file.folder == folder);
    let place = last.filter(|last| fits(&files[*last])).unwrap_or(files.len());
    if place == files.len() {
        files.push(OpenShard { folder, ..OpenShard::default() });
    }
    let file = &mut files[place];
    file.pieces.push(piece);
    file.data_bytes += data_bytes;
    file.header_bytes += header_bytes;
}

/// A range of elements in as few parts as the limit allows, cut between rows if there are any.
fn cut_rows(
    source: &HeldTensor,
    range: std::ops::Range<u64>,
    bytes_max: u64,
) -> impl Iterator<Item = std::ops::Range<u64>> {
    let HeldTensor { region, item_bytes, .. } = source;
    let row: u64 = match region.flat {
        None => region.spans.iter().skip(1).map(|span| span.len).product(),
        Some(_) => 1,
    };
    let count = range.end - range.start;
    let step = if count * item_bytes <= bytes_max {
        count.max(1)
    } else {
        (bytes_max / item_bytes / row.max(1)).max(1) * row.max(1)
    };
    let mut start = range.start;
    let mut is_first = true;
    std::iter::from_fn(move || {
        // A tensor without elements is one part.
        if start == range.end && !is_first {
            return None;
        }
        is_first = false;
        let end = ((start / row.max(1) * row.max(1)).saturating_add(step)).min(range.end);
        let part = start..end;
        start = end;
        Some(part)
    })
}

/// Numbers the files over all writers, and writes their headers.
fn seal_all(
    specs: &[TensorSpec],
    mut writers: Vec<WriterShards>,
    chunks: &[usize],
    align_all: bool,
) -> Result<Vec<Vec<Shard>>> {
    let mut shards: Vec<Vec<Shard>> = writers.iter().map(|_| Vec::new()).collect();
    for (at, family) in FAMILIES.into_iter().enumerate() {
        let count: usize = writers.iter().map(|files| files[at].len()).sum();
        let mut number = 0;
        for (files, shards) in writers.iter_mut().zip(&mut shards) {
            for file in std::mem::take(&mut files[at]) {
                number += 1;
                let name = format!("{family}-{number:05}-of-{count:05}.safetensors");
                shards.push(seal(name, file, specs, chunks, align_all)?);
            }
        }
    }
    Ok(shards)
}

/// Assigns offsets to the pieces, and writes the header.
fn seal(
    file: String,
    OpenShard { folder, mut pieces, .. }: OpenShard,
    specs: &[TensorSpec],
    chunks: &[usize],
    align_all: bool,
) -> Result<Shard> {
    let (header, offsets) = safetensors::arrange(&mut pieces, align_all, |piece| {
        let spec = &specs[piece.tensor];
        let k = (chunks[piece.tensor] > 1).then_some(piece.k);
        Unplaced {
            name: spec.group.entry_name(&spec.name, k),
            group: spec.group,
            dtype: spec.dtype,
            shape: safetensors::entry_shape(&piece.region.spans, piece.region.flat_span()),
        }
    })?;
    for (piece, offset) in pieces.iter_mut().zip(offsets) {
        piece.offset = offset;
    }
    Ok(Shard { file, folder, header, pieces })
}

/// Upper bound of an entry in the header, with a pad before it: a name whose bytes may all need an
/// escape, the keys, and 20 digits per number.
fn header_bytes(spec: &TensorSpec) -> u64 {
    6 * spec.name.len() as u64 + 280 + 21 * spec.shape.len() as u64
}
