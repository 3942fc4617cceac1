//! Samples by number, read on demand.

use std::sync::Arc;
use std::time::Duration;

use storage::{Object, RangeRead};

use crate::plan::round::{Extent, Limits, PlanContext, PrefetchRound, ReadFile, StoreReads};
use crate::prefetch::files::{DataFiles, Opening};
use crate::prefetch::loader::stores_of;
use crate::{Assemble, Error, Result, SampleOrder};

/// Timeout for the opening of a file.
const OPEN_TIMEOUT: Duration = Duration::from_secs(300);

/// Reads any samples of an order on the thread of the caller. A [`Loader`](crate::Loader) is many
/// times as fast where the order is known in advance.
#[derive(Debug)]
pub struct RandomReader<A> {
    order: Arc<dyn SampleOrder>,
    assemble: A,
    store_of: Vec<usize>,
    limits: Vec<Limits>,
    verify: bool,
    files: DataFiles,
    opening: Opening,
    round: PrefetchRound,
    /// Rounds so far.
    number: u64,
}

impl<A: Assemble> RandomReader<A> {
    /// Opens no file yet. With `verify`, the bytes read are compared with the checksums of their
    /// blocks.
    #[must_use]
    pub fn new(order: Arc<dyn SampleOrder>, assemble: A, verify: bool) -> Self {
        let (stores, store_of) = stores_of(order.as_ref());
        let limits = stores.iter().map(|store| Limits::of(store.profile())).collect();
        let files = DataFiles::new(order.sources().len());
        let (opening, round, number) = (Opening::default(), PrefetchRound::default(), 0);
        RandomReader { order, assemble, store_of, limits, verify, files, opening, round, number }
    }

    /// A batch of these samples, one a row.
    ///
    /// # Errors
    /// [`Error::TooFewSamples`] for a number beyond the order; the error of a read, of a checksum,
    /// or of a sample that is invalid.
    pub fn read(&mut self, samples: &[u64]) -> Result<A::Batch> {
        let found = self.order.sample_count();
        if let Some(beyond) = samples.iter().find(|&&sample| sample >= found) {
            let (dataset, expected) = (self.order.name(), beyond.saturating_add(1));
            return Err(Error::TooFewSamples { dataset, expected, found });
        }
        let context = PlanContext {
            order: self.order.as_ref(),
            store_of: &self.store_of,
            limits: &self.limits,
            sample_cache: None,
            verify: self.verify,
        };
        self.round.fill(&context, samples.iter().map(|&sample| sample..sample + 1))?;
        self.number += 1;
        for reads in self.round.store_reads.iter_mut().flatten() {
            for file in reads.files().collect::<Vec<_>>() {
                let (sources, opening) = (self.order.sources(), &self.opening);
                let object = self.files.get(sources, file, self.number, opening, OPEN_TIMEOUT)?;
                let checksums = context.checksums(file).cloned();
                reads.read_files.push(ReadFile { number: file, object, checksums });
            }
            read_all(reads)?;
        }
        let mut batch = A::Batch::default();
        let mut scratch = Vec::new();
        self.assemble.begin(&mut batch, samples.first().copied().unwrap_or(0), samples.len());
        for row in 0..samples.len() {
            let sample = self.round.sample(row, 0, &mut scratch);
            self.assemble.set_row(&mut batch, row, &sample)?;
        }
        self.assemble.finish(&mut batch)?;
        Ok(batch)
    }
}

/// Reads the extents of one store, file by file.
fn read_all(reads: &mut StoreReads) -> Result<()> {
    let mut first = 0;
    while let Some(extent) = reads.extents.get(first) {
        let file = extent.file;
        let rest = &reads.extents[first..];
        let count = rest.partition_point(|extent| extent.file <= file);
        let mut buffers = read_extents(&*reads.file(file).object, &rest[..count])?;
        for (nth, bytes) in buffers.iter_mut().enumerate() {
            reads.verify_or_reread(first + nth, bytes)?;
            reads.scatter(first + nth, bytes);
        }
        first += count;
    }
    Ok(())
}

fn read_extents(object: &dyn Object, extents: &[Extent]) -> storage::Result<Vec<Vec<u8>>> {
    // fits: an extent is at most a few MiB
    let buffer = |extent: &Extent| vec![0; extent.len_bytes as usize];
    let mut buffers: Vec<_> = extents.iter().map(buffer).collect();
    let mut reads: Vec<_> = extents
        .iter()
        .zip(&mut buffers)
        .map(|(extent, buf)| RangeRead { offset: extent.offset_bytes, buf })
        .collect();
    object.read_many(&mut reads)?;
    Ok(buffers)
}
