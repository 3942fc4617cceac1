//! Copies of samples on the node's own disk.
//!
//! After a crash a run goes back to its last checkpoint and wants the samples that it had already
//! fetched; [`OrderLog`] has kept them, in the order of their use. Whole files are kept by
//! [`StagedFiles`], if they fit; [`open`] chooses. Both implement [`SampleCache`]: what they have
//! is whole and its sum is right, anything else is fetched from afar as if there were no cache. So
//! their folder may be deleted at any moment, while it is in use too, and shared by all jobs of a
//! node: files appear under their final names complete or not at all, and no lock is needed to be
//! right.

mod lazy;
mod recent_samples;
mod segment;
mod staged_files;

pub use lazy::LazyCache;
pub use recent_samples::{LogOptions, OrderLog};
pub use staged_files::{StageOptions, StagedFiles};

use std::sync::Arc;

use storage::{Crc64, Key, Storage};

use crate::{DataFile, Result, SampleCache, SampleOrder};

/// What a cache may hold of one order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheOptions {
    /// The most bytes that it may take. Less are taken if the disk has not so many to spare: a
    /// twentieth of what would be free without the cache stays free.
    pub limit_bytes: u64,
    /// The seed of the order, and what else tells this order from others of the same files. Which
    /// version of the data it is, their manifests tell.
    pub salt: u64,
}

/// A cache on one node: the files if they fit, else the samples since the last checkpoint.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum NodeCache {
    /// All files fit.
    Files(Arc<StagedFiles>),
    /// They do not.
    Log(Arc<OrderLog>),
}

/// A log of fewer files would lose too much of itself with one: to a crash, or to make room.
const LOG_FILES_MIN: u64 = 16;
const SEGMENT_BYTES_MIN: u64 = 64 << 10;

/// Opens the cache of an order in a folder, with what is in it by now.
///
/// # Errors
/// If no thread can be started. What is wrong with the folder is never an error: the cache is then
/// of no use, and says so in the log.
pub fn open(
    folder: &Arc<dyn Storage>,
    order: &Arc<dyn SampleOrder>,
    options: CacheOptions,
) -> Result<NodeCache> {
    let need: u64 = order.sources().iter().map(|source| source.len_bytes).sum();
    let CacheOptions { limit_bytes, salt } = options;
    let kept: u64 = staged_files::kept_bytes(folder.as_ref(), order.as_ref(), salt);
    if need <= limit_bytes && need.saturating_sub(kept) <= room(folder.as_ref(), kept) {
        let options = StageOptions { salt, ..StageOptions::default() };
        return Ok(NodeCache::Files(Arc::new(StagedFiles::open(folder, order, options)?)));
    }
    let usual = LogOptions::default();
    // fits: at most the usual
    let segment_bytes =
        (limit_bytes / LOG_FILES_MIN).clamp(SEGMENT_BYTES_MIN, usual.segment_bytes as u64) as usize;
    let options = LogOptions { limit_bytes, salt, segment_bytes };
    Ok(NodeCache::Log(Arc::new(OrderLog::open(folder, order.as_ref(), options)?)))
}

impl NodeCache {
    /// As the loader wants it.
    #[must_use]
    pub fn near(&self) -> Arc<dyn SampleCache> {
        match self {
            NodeCache::Files(files) => Arc::clone(files) as Arc<dyn SampleCache>,
            NodeCache::Log(log) => Arc::clone(log) as Arc<dyn SampleCache>,
        }
    }

    /// Tells that the run will never go back behind so many samples: a checkpoint of that state is
    /// durable.
    pub fn checkpointed(&self, samples_consumed: u64) {
        if let NodeCache::Log(log) = self {
            log.checkpointed(samples_consumed);
        }
    }
}

/// What tells an order from others, wherever its files are mounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    crc64: u64,
    samples: u64,
    bytes: u64,
}

/// Samples whose pieces are part of an order's identity, spread over all.
const PROBES: u64 = 256;

impl Identity {
    fn of(order: &dyn SampleOrder, salt: u64) -> Self {
        let mut sum = Crc64::new();
        let mut number = |number: u64| sum.update(&number.to_le_bytes());
        number(salt);
        let (samples, sources) = (order.sample_count(), order.sources());
        number(samples);
        let mut bytes: u64 = 0;
        for source in sources {
            number(source.len_bytes);
            number(storage::crc64(source.key.name().as_bytes()));
            number(version(source));
            bytes = bytes.saturating_add(source.len_bytes);
        }
        let mut pieces = Vec::new();
        for probe in 0..PROBES.min(samples) {
            // An index that is wrong here is an error where the sample is wanted.
            let sample = (u128::from(probe) * u128::from(samples) / u128::from(PROBES)) as u64;
            let _ = order.pieces(sample, &mut pieces);
        }
        for piece in pieces {
            number(u64::from(piece.file));
            number(piece.offset_bytes);
            number(piece.len_bytes);
        }
        Identity { crc64: sum.value(), samples, bytes }
    }

    /// Where what is of this order lies.
    fn folder(&self, kind: &str) -> Key {
        let Identity { crc64, samples, bytes } = self;
        Key::new(format!("{kind}-{crc64:016x}-{samples:x}-{bytes:x}"))
            .expect("letters, digits and dashes")
    }
}

/// The longest manifest that is read for that; ours have one line a file.
const MANIFEST_BYTES_MAX: u64 = 1 << 20;

/// Tells the data from others of the same names and lengths: the sum of their manifest, which has
/// the sums of the files; 0 for data without one.
fn version(source: &DataFile) -> u64 {
    let name = source.key.as_str();
    let prefix = Key::new(name.strip_suffix(".bin").unwrap_or(name));
    let read = prefix.and_then(|prefix| {
        let manifest = prefix.with_suffix(".manifest.json")?;
        let len_bytes = source.store.open(&manifest)?.len_bytes();
        if len_bytes > MANIFEST_BYTES_MAX {
            return Ok(len_bytes);
        }
        Ok(storage::crc64(&storage::read_all(source.store.as_ref(), &manifest)?))
    });
    read.unwrap_or_else(|error| {
        if !matches!(error, storage::Error::NotFound { .. }) {
            log::warn!("cache: {}: no version: {error}", source.store.display(&source.key));
        }
        0
    })
}

/// What may still be written beside what the cache has taken: a twentieth of both stays free. Of
/// what is free alone it would be less with every file, and nothing in the end.
fn room(store: &dyn Storage, taken: u64) -> u64 {
    match store.free_bytes() {
        Ok(Some(free)) => free.saturating_sub(free.saturating_add(taken) / 20),
        Ok(None) => u64::MAX,
        Err(_) => 0,
    }
}
