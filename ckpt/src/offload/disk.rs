//! A state on disks: two alternating generations of files, and a record of the complete one.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use serde_json::Value;

use super::adamw::AdamWRow;
use super::folders::{Folder, claim};
use super::form::{ITEM_BYTES, ROLES, Segment, StateLayout, StateParam, Tile};
use super::generation::{CompleteGeneration, Sums, number_of, record_name};
use super::pass::{Buffers, Parts, SegmentInputs, TilePipeline, sums, update};
use super::slot::{GenerationFiles, remove, slot_of};
use super::{AdamW, Generation, OffloadOptions, StepReport, Update, WeightsOut, not_initialized};
use crate::format::catalog::{BLOCK_BYTES_MAX, BLOCK_BYTES_MIN, is_block_size};
use crate::{Checkpoint, Dtype, Error, Group, RegionRequest, Result};
use storage::{InPlaceFile, Width, crc64};

/// Tiles in flight on each disk: the first steps try each value, then the fastest is used. With 16,
/// or 192 MiB, a device of 7 GB/s has 27 ms of work.
const DEPTHS: [usize; 4] = [8, 12, 4, 16];

/// A rank's state in folders.
#[derive(Debug)]
pub(super) struct DiskState {
    /// One per disk. The first has the records.
    folders: Arc<[Folder]>,
    form: Arc<StateLayout>,
    block_bytes: usize,
    width: Width,
    _locks: Vec<Arc<dyn InPlaceFile>>,
    /// The current generation, durable or being made durable.
    last: Option<Arc<CompleteGeneration>>,
    /// Files of the generation before it.
    spare: Option<GenerationFiles>,
    next_slot: u64,
    /// The generation that is being written.
    writing: Option<Writing>,
    /// Makes `last` durable.
    settling: Option<JoinHandle<Result<()>>>,
    /// The error after which all calls fail.
    failed: Option<String>,
    buffers: Buffers,
    depths: DepthTuner,
}

/// The next generation, while it is written.
#[derive(Debug)]
struct Writing {
    slot: GenerationFiles,
    sums: Sums,
    is_new: bool,
}

/// Depths, in the order in which they are tried, and the average time of a step with each.
#[derive(Debug)]
struct DepthTuner(Vec<(usize, Option<Duration>)>);

impl DepthTuner {
    /// The first depth that was not measured, else the fastest.
    fn best(&self) -> usize {
        let best = self.0.iter().min_by_key(|(_, time)| time);
        best.map_or(1, |(tiles, _)| *tiles)
    }

    /// Records a step's time. One fast step may be an outlier: a depth
    /// stays the best only while its average time is the lowest.
    fn record(&mut self, tiles: usize, time: Duration) {
        for (_, own) in self.0.iter_mut().filter(|(own, _)| *own == tiles) {
            *own = Some(own.map_or(time, |before| (before + time) / 2));
        }
    }
}

impl DiskState {
    /// Opens the last complete generation, and removes orphans of crashes.
    pub(super) fn open(
        folders: Vec<Folder>,
        owner: &str,
        form: Arc<StateLayout>,
        options: OffloadOptions,
    ) -> Result<Self> {
        if !is_block_size(options.block_bytes) {
            let reason = format!(
                "expected block_bytes to be a multiple of {BLOCK_BYTES_MIN} and at most \
                 {BLOCK_BYTES_MAX}, found {}",
                options.block_bytes
            );
            let object = "optimizer state on disk".to_owned();
            return Err(Error::BadState { operation: "open", object, reason });
        }
        let locks = claim(&folders, owner, &form)?;
        let last = last(&folders, &form, options.block_bytes)?;
        let slots = remove_other_slots(&folders, last.as_ref().map(|last| last.slot.number))?;
        let block_bytes = options.block_bytes as usize; // fits: at most 64 MiB
        let depths = depths(options, folders.len());
        Ok(DiskState {
            next_slot: slots.into_iter().max().map_or(0, |slot| slot + 1),
            folders: folders.into(),
            form,
            block_bytes,
            width: options.width,
            _locks: locks,
            last: last.map(Arc::new),
            spare: None,
            writing: None,
            settling: None,
            failed: None,
            buffers: Buffers::new(block_bytes),
            depths: DepthTuner(depths.into_iter().map(|tiles| (tiles, None)).collect()),
        })
    }

    pub(super) fn generation(&self) -> Option<&Generation> {
        self.last.as_ref().map(|last| &last.generation)
    }

    /// The current generation, once it is durable.
    pub(super) fn settled(&mut self) -> Result<Option<Arc<CompleteGeneration>>> {
        self.settle()?;
        Ok(self.last.clone())
    }

    pub(super) fn form(&self) -> &Arc<StateLayout> {
        &self.form
    }

    pub(super) fn block_bytes(&self) -> u64 {
        self.block_bytes as u64
    }

    /// Waits until the last generation is durable.
    pub(super) fn settle(&mut self) -> Result<()> {
        if let Some(first) = &self.failed {
            let (object, first) = (self.folders[0].to_string(), first.clone());
            return Err(storage::Error::Poisoned { object, first }.into());
        }
        let Some(settling) = self.settling.take() else { return Ok(()) };
        let settled = settling.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        settled.inspect_err(|error| self.failed = Some(error.to_string()))
    }

    /// Prepares the files that the next generation is written into.
    pub(super) fn begin(&mut self) -> Result<()> {
        self.discard_unfinished();
        self.settle()?;
        if let Some(last) = &self.last {
            last.slot.check_there()?;
        }
        let free = match self.spare.take() {
            Some(spare) if spare.is_free()? => Some(spare),
            Some(spare) => {
                remove(&self.folders, spare.number);
                None
            }
            None => None,
        };
        let is_new = free.is_none();
        let slot = match free {
            Some(slot) => slot,
            None => {
                let number = self.next_slot;
                self.next_slot += 1;
                GenerationFiles::create(&self.folders, &self.form, number)?
            }
        };
        let sums = self.empty_sums();
        self.writing = Some(Writing { slot, sums, is_new });
        Ok(())
    }

    /// Removes the files of a generation that will not be completed.
    fn discard_unfinished(&mut self) {
        if let Some(Writing { slot, .. }) = self.writing.take() {
            remove(&self.folders, slot.number);
        }
    }

    pub(super) fn fill(&mut self, weights: &[&[u8]], step: u64, meta: Value) -> Result<()> {
        self.begin()?;
        self.write(self.tiles(), false, |tile, mut parts, ()| {
            for (Segment { param, start, len, .. }, part) in tile.segments.iter().zip(&mut parts) {
                let [into, exp_avgs, exp_avg_sqs] = part;
                into.copy_from_slice(&weights[*param][*start..start + len]);
                exp_avgs.fill(0);
                exp_avg_sqs.fill(0);
            }
            Ok(sums(&parts))
        })?;
        self.end(step, meta).map(drop)
    }

    pub(super) fn load(
        &mut self,
        checkpoint: &Checkpoint,
        groups: &[Group],
        meta: Value,
    ) -> Result<()> {
        self.begin()?;
        let form = Arc::clone(&self.form);
        self.write(self.tiles(), false, |tile, mut parts, ()| {
            let mut requests = Vec::new();
            for (Segment { param, start, len, .. }, part) in tile.segments.iter().zip(&mut parts) {
                let StateParam { name, region, .. } = &form.params[*param];
                let [first, end] = [*start, start + len].map(|at| (at / ITEM_BYTES) as u64);
                for (role, into) in part.iter_mut().enumerate() {
                    let group = form.group(*param, role);
                    if groups.contains(&group) {
                        requests.push(RegionRequest {
                            name,
                            group,
                            region: region.slice(first..end),
                            into,
                        });
                    } else {
                        into.fill(0);
                    }
                }
            }
            checkpoint.read(requests)?;
            Ok(sums(&parts))
        })?;
        self.end(checkpoint.step(), meta).map(drop)
    }

    pub(super) fn weights(&mut self, into: &mut [WeightsOut<'_>]) -> Result<()> {
        self.settle()?;
        let Some(last) = &self.last else {
            return Err(not_initialized("read"));
        };
        last.slot.check_there()?;
        let block = self.block_bytes / ITEM_BYTES;
        let mut copies: Vec<_> = into
            .iter_mut()
            .map(|WeightsOut { dtype, bytes }| {
                let item_bytes = dtype.item_bytes() as usize; // fits: 2 or 4
                (*dtype, bytes.chunks_mut(block * item_bytes))
            })
            .collect();
        let mut own = |segment: &Segment| {
            let (dtype, copies) = &mut copies[segment.param];
            (*dtype, copies.next().unwrap_or_default())
        };
        let tiles = self.form.tiles(0..self.form.params.len(), self.block_bytes);
        let tiles = tiles.into_iter().map(|tile| {
            let own = tile.segments.iter().map(&mut own).collect::<Vec<_>>();
            (tile, own)
        });
        let pass = TilePipeline {
            form: &self.form,
            from: Some(last),
            roles: 1,
            into: None,
            buffers: &self.buffers,
            depth: self.depths.best(),
        };
        let width = self.width;
        pass.run(tiles.collect(), &mut self.empty_sums(), |tile, parts, own| {
            for ((segment, [weights, ..]), (dtype, copy)) in
                tile.segments.iter().zip(parts).zip(own)
            {
                last.check(tile, segment, &[crc64(weights)])?;
                if !copy.is_empty() {
                    AdamWRow::copy(weights, copy, dtype, width);
                }
            }
            Ok(Vec::new())
        })
    }

    pub(super) fn update(
        &mut self,
        adamw: &AdamW,
        first: usize,
        updates: Vec<Update<'_>>,
    ) -> Result<()> {
        let block = self.block_bytes / ITEM_BYTES;
        let tiles = self.form.tiles(first..first + updates.len(), self.block_bytes);
        // fits: 2 or 4
        let block_bytes = |dtype: Dtype| block * dtype.item_bytes() as usize;
        let mut updates: Vec<_> = updates
            .into_iter()
            .map(
                |Update {
                     grad,
                     grad_dtype,
                     weight_decay,
                     weights: WeightsOut { dtype, bytes },
                 }| {
                    let grads = (grad_dtype, grad.chunks(block_bytes(grad_dtype)));
                    let copies = (dtype, bytes.chunks_mut(block_bytes(dtype)));
                    (adamw.factors(weight_decay), grads, copies)
                },
            )
            .collect();
        let mut inputs = |segment: &Segment| {
            let (factors, (grad_dtype, grads), (copy_dtype, copies)) =
                &mut updates[segment.param - first];
            let grads = grads.next().expect("a gradient has as many blocks as its array");
            let copy = copies.next().unwrap_or_default();
            let (grad_dtype, copy_dtype, factors) = (*grad_dtype, *copy_dtype, *factors);
            SegmentInputs { grads, grad_dtype, copy, copy_dtype, factors }
        };
        let tiles = tiles.into_iter().map(|tile| {
            let inputs = tile.segments.iter().map(&mut inputs).collect::<Vec<_>>();
            (tile, inputs)
        });
        let last = self.last.clone().expect("an update was started, which needs a state");
        let width = self.width;
        self.write(tiles.collect(), true, |tile, parts, inputs| {
            let mut sums = Vec::with_capacity(parts.len());
            for ((segment, state), inputs) in tile.segments.iter().zip(parts).zip(inputs) {
                let [before, after] = update(state, inputs, width);
                last.check(tile, segment, &before)?;
                sums.push(after);
            }
            Ok(sums)
        })
    }

    /// Ends an update that took `time`.
    pub(super) fn finish(&mut self, step: u64, meta: Value, time: Duration) -> Result<StepReport> {
        let depth = self.depths.best();
        let is_in_new_files = self.end(step, meta)?;
        // The time to create new files does not depend on the depth.
        if !is_in_new_files {
            self.depths.record(depth, time);
        }
        let bytes = self.form.state_bytes();
        Ok(StepReport { read_bytes: bytes, write_bytes: bytes, time, depth, is_in_new_files })
    }

    /// Makes the written generation the current state, and starts to make it durable. Returns
    /// whether it is in new files.
    fn end(&mut self, step: u64, meta: Value) -> Result<bool> {
        let Writing { slot, sums, is_new } = self.writing.take().expect("an update was started");
        if let Err(error) = slot.check_there() {
            remove(&self.folders, slot.number);
            return Err(error);
        }
        let number = self.generation().map_or(0, |last| last.number + 1);
        let generation = Generation { number, step, meta };
        let current = Arc::new(CompleteGeneration { generation, slot, sums });
        let before = self.last.replace(Arc::clone(&current));
        self.spare = before.as_ref().map(|before| before.slot.clone());
        let (folders, form) = (Arc::clone(&self.folders), Arc::clone(&self.form));
        let block_bytes = self.block_bytes as u64;
        let settle = move || {
            // On all disks, before the record is on the first.
            current.slot.sync()?;
            current.commit(&folders[0], &form, block_bytes)?;
            let Some(before) = before else { return Ok(()) };
            let Folder { store, key } = &folders[0];
            Ok(store.delete(&key.join(&record_name(before.generation.number))?)?)
        };
        let thread = thread::Builder::new().name("ckpt-offload".to_owned()).spawn(settle);
        let thread = thread.map_err(|e| {
            storage::Error::from_io("start", "the fsync thread of the optimizer state", e)
        });
        self.settling = Some(thread.inspect_err(|error| self.failed = Some(error.to_string()))?);
        Ok(is_new)
    }

    /// All tiles.
    fn tiles(&self) -> Vec<(Tile, ())> {
        let tiles = self.form.tiles(0..self.form.params.len(), self.block_bytes);
        tiles.into_iter().map(|tile| (tile, ())).collect()
    }

    fn empty_sums(&self) -> Sums {
        self.form.params.iter().map(|_| Default::default()).collect()
    }

    /// Processes tiles and writes them, after reading them if needed.
    fn write<T: Send>(
        &mut self,
        tiles: Vec<(Tile, T)>,
        reads: bool,
        work: impl Fn(&Tile, Parts<'_>, T) -> Result<Vec<[u64; ROLES]>> + Sync,
    ) -> Result<()> {
        let depth = self.depths.best();
        let Writing { slot, sums, .. } = self.writing.as_mut().expect("an update was started");
        let pass = TilePipeline {
            form: &self.form,
            from: self.last.as_deref().filter(|_| reads),
            roles: ROLES,
            into: Some(slot),
            buffers: &self.buffers,
            depth,
        };
        let written = pass.run(tiles, sums, work);
        written.inspect_err(|_| self.discard_unfinished())
    }
}

impl Drop for DiskState {
    fn drop(&mut self) {
        self.discard_unfinished();
        if let Err(error) = self.settle() {
            log::error!("the last generation of the optimizer state is not durable: {error}");
        }
    }
}

/// The last complete generation. Records of older ones are removed.
fn last(
    folders: &[Folder],
    form: &StateLayout,
    block_bytes: u64,
) -> Result<Option<CompleteGeneration>> {
    let Folder { store, key } = &folders[0];
    let names = store.list_names(key)?;
    let mut records: Vec<u64> = names.iter().filter_map(|name| number_of(name)).collect();
    records.sort_unstable();
    let Some(newest) = records.pop() else { return Ok(None) };
    let last = CompleteGeneration::open(folders, form, newest, block_bytes)?;
    // The one before it exists if a crash came before its deletion.
    for number in records.iter().rev() {
        store.delete(&key.join(&record_name(*number))?)?;
    }
    Ok(Some(last))
}

/// Removes all files except those of this slot. Returns the numbers of all that existed.
fn remove_other_slots(folders: &[Folder], own: Option<u64>) -> Result<BTreeSet<u64>> {
    let mut slots = BTreeSet::new();
    for Folder { store, key } in folders {
        // Leftovers of a process that was killed while it removed a slot.
        store.remove_orphans(key)?;
        slots.extend(store.list_names(key)?.iter().filter_map(|name| slot_of(name)));
    }
    slots.iter().filter(|slot| Some(**slot) != own).for_each(|slot| remove(folders, *slot));
    Ok(slots)
}

/// Numbers of tiles in flight, in the order in which they are tried.
fn depths(options: OffloadOptions, disks: usize) -> Vec<usize> {
    let tile_bytes = Buffers::new(options.block_bytes as usize).tile_bytes(); // fits: <= 64 MiB
    let most = (options.buffer_bytes_max / tile_bytes as u64).max(2) as usize; // fits: of memory
    let mut depths: Vec<usize> = Vec::with_capacity(DEPTHS.len());
    for depth in DEPTHS.map(|depth| (depth * disks).min(most)) {
        if !depths.contains(&depth) {
            depths.push(depth);
        }
    }
    depths
}

/// The most memory that tiles take.
pub(super) fn buffer_bytes(options: OffloadOptions, disks: usize) -> u64 {
    let tile_bytes = Buffers::new(options.block_bytes as usize).tile_bytes(); // fits: <= 64 MiB
    let most = depths(options, disks).into_iter().max().unwrap_or(0);
    most as u64 * tile_bytes as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depth_that_becomes_slower_is_replaced() {
        let mut depths = DepthTuner(vec![(8, None), (12, None), (4, None)]);
        for (expected, millis) in [(8, 100), (12, 90), (4, 80), (4, 120), (12, 94), (12, 90)] {
            assert_eq!(depths.best(), expected);
            depths.record(expected, Duration::from_millis(millis));
        }
        assert_eq!(depths.best(), 12);
    }
}
