use std::collections::BTreeMap;

use serde::Serialize;

use super::DropReason;
use crate::Output;

/// Progress of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct CleanProgress {
    /// The current pass over the inputs, from 1.
    pub pass: u32,
    /// The number of passes.
    pub passes: u32,
    /// Bytes taken from the inputs in this pass, as they are stored.
    pub stored_bytes: u64,
    /// The bytes of all inputs, unless one is a stream.
    pub stored_bytes_all: Option<u64>,
    /// Bytes of JSON in this pass, decompressed.
    pub json_bytes: u64,
    /// Documents in this pass.
    pub documents: u64,
    /// Of these, kept.
    pub kept: u64,
}

/// What a run did. It serializes with units in the keys.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CleanReport {
    /// Threads that filtered.
    pub workers: usize,
    /// Documents in the inputs.
    pub documents: u64,
    /// Documents in the outputs.
    pub kept: u64,
    /// Bytes of the inputs, decompressed.
    pub json_bytes: u64,
    /// Bytes of the retained lines, unchanged, without their newlines.
    pub kept_bytes: u64,
    /// Lines that were rewritten.
    pub rewritten: u64,
    /// Blank lines that were skipped.
    pub blank_lines: u64,
    /// Documents without the key of the URL, if URLs were checked.
    pub without_url: u64,
    /// Dropped documents, by cause.
    pub dropped: BTreeMap<DropReason, Dropped>,
    /// Clusters of duplicates, if they were searched for.
    pub clusters: Option<Clusters>,
    /// Cost of the search for duplicates.
    pub index: Option<Index>,
    /// Wall-clock time from the first check to the last file.
    pub elapsed_s: f64,
    /// `json_bytes` in MB (10^6 bytes) per second.
    pub json_mb_per_s: f64,
    /// The inputs, in order.
    pub inputs: Vec<CleanedInput>,
    /// The outputs.
    pub outputs: Vec<Output>,
}

/// Documents dropped for one cause.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Dropped {
    /// Documents.
    pub documents: u64,
    /// Bytes of their lines, without newlines.
    pub bytes: u64,
    /// The first of them.
    pub examples: Vec<Example>,
}

/// A document that was dropped.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Example {
    /// The input.
    pub file: String,
    /// The line, counted from 1.
    pub line: u64,
    /// Its number among all documents, from 0.
    pub document: u64,
    /// The earlier document that it resembles.
    pub of: Option<u64>,
    /// The similarity.
    pub jaccard: Option<f64>,
    /// The start of its line.
    pub begin: String,
}

/// What one input held.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct CleanedInput {
    /// As it was given.
    pub name: String,
    /// Its bytes, as they are stored.
    pub stored_bytes: u64,
    /// Its bytes of JSON, decompressed.
    pub json_bytes: u64,
    /// Its lines, blank ones included.
    pub lines: u64,
    /// Its documents.
    pub documents: u64,
    /// Of these, kept.
    pub kept: u64,
    /// Of these, dropped, by cause.
    pub dropped: BTreeMap<DropReason, u64>,
}

/// Clusters: documents of which one was retained and the others dropped as its duplicates.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Clusters {
    /// How many there are.
    pub count: u64,
    /// Documents of the largest, including the retained one.
    pub largest: u64,
    /// Number of clusters by size: 2, 3, then up to the next power of two, under its name.
    pub sizes: BTreeMap<u64, u64>,
}

impl Clusters {
    /// From the number of documents dropped in each cluster.
    pub(super) fn new(dropped: impl Iterator<Item = u64>) -> Self {
        let mut clusters = Clusters::default();
        for size in dropped.map(|dropped| dropped + 1) {
            clusters.count += 1;
            clusters.largest = clusters.largest.max(size);
            let name = if size <= 3 { size } else { size.next_power_of_two() };
            *clusters.sizes.entry(name).or_default() += 1;
        }
        clusters
    }
}

/// Cost of the search for duplicates.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Index {
    /// Pairs whose shingles were compared.
    pub compared_pairs: u64,
    /// Memory of the tables at the end.
    pub table_bytes: u64,
    /// Bytes of temporary files.
    pub scratch_bytes: u64,
}
