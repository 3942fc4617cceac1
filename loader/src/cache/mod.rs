//! Copies of samples on the node's own disk.
//!
//! After a crash a run resumes from its last checkpoint and needs samples that it had already read;
//! [`OrderLog`] keeps them, in the order of their use. [`StagedFiles`] keeps complete files, if
//! they fit; [`open`] chooses. Both implement [`SampleCache`]: the samples that they return are
//! complete and match their checksum, all others are read from the store as without a cache. So
//! their folder may be deleted at any moment, also while in use, and shared by all jobs of a node:
//! files appear under their final names complete or not at all, so no lock is needed.

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

/// Options of the cache of one order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheOptions {
    /// The most bytes that it may take. It takes less on a full disk: a twentieth of what would be
    /// free without the cache stays free.
    pub limit_bytes: u64,
    /// The seed of the order, and anything else that distinguishes this order from others of the
    /// same files. The version of the data is taken from their manifests.
    pub salt: u64,
}

/// A cache on one node: the files if they fit, else the samples since the last checkpoint.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum NodeCache {
    /// All files fit.
    Files(Arc<StagedFiles>),
    /// They do not fit.
    Log(Arc<OrderLog>),
}

/// With fewer files a log would lose too large a share with each file, in a crash or to make room.
const LOG_FILES_MIN: u64 = 16;
const SEGMENT_BYTES_MIN: u64 = 64 << 10;

/// Opens the cache of an order in a folder, with its existing content.
///
/// # Errors
/// If no thread can be started. A problem of the folder is never an error: it is logged, and the
/// cache stays empty.
pub fn open(
    folder: &Arc<dyn Storage>,
    order: &Arc<dyn SampleOrder>,
    options: CacheOptions,
) -> Result<NodeCache> {
    let need: u64 = order.sources().iter().map(|source| source.len_bytes).sum();
    let CacheOptions { limit_bytes, salt } = options;
    let copied: u64 = staged_files::copied_bytes(folder.as_ref(), order.as_ref(), salt);
    if need <= limit_bytes && need.saturating_sub(copied) <= room(folder.as_ref(), copied) {
        let options = StageOptions { salt, ..StageOptions::default() };
        return Ok(NodeCache::Files(Arc::new(StagedFiles::open(folder, order, options)?)));
    }
    let defaults = LogOptions::default();
    // fits: at most the default
    let segment_bytes = (limit_bytes / LOG_FILES_MIN)
        .clamp(SEGMENT_BYTES_MIN, defaults.segment_bytes as u64) as usize;
    let options = LogOptions { limit_bytes, salt, segment_bytes };
    Ok(NodeCache::Log(Arc::new(OrderLog::open(folder, order.as_ref(), options)?)))
}

impl NodeCache {
    /// The cache as [`LoaderOptions::sample_cache`](crate::LoaderOptions::sample_cache) takes it.
    #[must_use]
    pub fn sample_cache(&self) -> Arc<dyn SampleCache> {
        match self {
            NodeCache::Files(files) => Arc::clone(files) as Arc<dyn SampleCache>,
            NodeCache::Log(log) => Arc::clone(log) as Arc<dyn SampleCache>,
        }
    }

    /// Reports a durable checkpoint: the run will never need earlier samples again.
    pub fn checkpointed(&self, samples_consumed: u64) {
        if let NodeCache::Log(log) = self {
            log.checkpointed(samples_consumed);
        }
    }
}

/// The identity of an order, wherever its files are mounted.
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
        let mut checksum = Crc64::new();
        let mut number = |number: u64| checksum.update(&number.to_le_bytes());
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
            // An error of the index here is reported when the sample is read.
            let sample = (u128::from(probe) * u128::from(samples) / u128::from(PROBES)) as u64;
            let _ = order.pieces(sample, &mut pieces);
        }
        for piece in pieces {
            number(u64::from(piece.file));
            number(piece.offset_bytes);
            number(piece.len_bytes);
        }
        Identity { crc64: checksum.value(), samples, bytes }
    }

    /// The folder of this order.
    fn folder(&self, kind: &str) -> Key {
        let Identity { crc64, samples, bytes } = self;
        Key::new(format!("{kind}-{crc64:016x}-{samples:x}-{bytes:x}"))
            .expect("letters, digits and dashes")
    }
}

/// The longest manifest to read for [`version`]; Feedline's have one line per file.
const MANIFEST_BYTES_MAX: u64 = 1 << 20;

/// Distinguishes the data from other data of the same names and lengths: the checksum of its
/// manifest, which has the checksums of the files; 0 for data without a manifest.
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
            log::warn!("cache: {}: unknown version: {error}", source.store.display(&source.key));
        }
        0
    })
}

/// Bytes that may still be written: a twentieth of the free space and the cache together stays
/// free. A twentieth of the free space alone would shrink with every file.
fn room(store: &dyn Storage, taken: u64) -> u64 {
    match store.free_bytes() {
        Ok(Some(free)) => free.saturating_sub(free.saturating_add(taken) / 20),
        Ok(None) => u64::MAX,
        Err(_) => 0,
    }
}
