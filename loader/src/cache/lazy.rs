use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use storage::Storage;

use super::{CacheOptions, NodeCache, open};
use crate::{SampleCache, SampleOrder};

/// A cache that is opened at the first lookup: of the ranks that share a node reader, only the rank
/// that reads makes lookups.
#[derive(Debug)]
pub struct LazyCache {
    folder: Arc<dyn Storage>,
    order: Arc<dyn SampleOrder>,
    options: CacheOptions,
    /// `None` inside if it could not be opened, which was logged.
    cache: OnceLock<Option<NodeCache>>,
    checkpointed: AtomicU64,
}

impl LazyCache {
    /// The cache of an order in a folder, which is not touched yet.
    #[must_use]
    pub fn new(
        folder: Arc<dyn Storage>,
        order: Arc<dyn SampleOrder>,
        options: CacheOptions,
    ) -> Self {
        let (cache, checkpointed) = (OnceLock::new(), AtomicU64::new(0));
        LazyCache { folder, order, options, cache, checkpointed }
    }

    /// As [`NodeCache::checkpointed`].
    pub fn checkpointed(&self, samples_consumed: u64) {
        self.checkpointed.fetch_max(samples_consumed, Relaxed);
        if let Some(Some(cache)) = self.cache.get() {
            cache.checkpointed(samples_consumed);
        }
    }

    fn open(&self) -> Option<NodeCache> {
        let opened = open(&self.folder, &self.order, self.options);
        opened.inspect_err(|error| log::warn!("cache: {error}")).ok()
    }

    fn opened(&self) -> Option<&dyn SampleCache> {
        match self.cache.get()?.as_ref()? {
            NodeCache::Files(files) => Some(files.as_ref()),
            NodeCache::Log(log) => Some(log.as_ref()),
        }
    }
}

impl SampleCache for LazyCache {
    fn find(&self, sample: u64, into: &mut [u8]) -> bool {
        if self.cache.get().is_none() {
            let cache = self.cache.get_or_init(|| self.open());
            // Forward a checkpoint that was reported while the cache was being opened.
            let checkpointed = self.checkpointed.load(Relaxed);
            cache.iter().for_each(|cache| cache.checkpointed(checkpointed));
        }
        self.opened().is_some_and(|cache| cache.find(sample, into))
    }

    fn keep(&self, sample: u64, bytes: &[u8]) {
        if let Some(cache) = self.opened() {
            cache.keep(sample, bytes);
        }
    }

    fn consumed(&self, samples: u64) {
        if let Some(cache) = self.opened() {
            cache.consumed(samples);
        }
    }
}
