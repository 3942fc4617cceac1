//! Optimizer state outside the device: in host memory, or on disks in files that already have the
//! form of a checkpoint's.
//!
//! A device that computes in bf16 needs 2 of the 14 bytes that a parameter has with Adam. The other
//! 12 are the weights in f32 and two moments, all read and written by each step. Here they stay
//! outside the device: gradients are copied in, and rounded weights out.
//!
//! On a disk the state is a *generation*: the files that a [`SavePlan`] assigns to this rank, in
//! which every array begins at a page, the checksums of their blocks, and a record that names them.
//! A step reads one generation and writes the next into other files, so that a crash leaves a
//! complete one. The record becomes durable in the background, while the run computes the next
//! gradients, and before a file of the previous generation is rewritten: a crash can lose only the
//! step in flight and the one before it.
//!
//! Several disks hold about as many bytes each: some parameters, and parts of large ones; tiles
//! alternate among them. The record is on the first, written once the files on all of them are
//! durable.
//!
//! So a checkpoint is a hard link for each file and a manifest of known checksums
//! ([`Checkpoints::save_offloaded`](crate::Checkpoints::save_offloaded)). A linked file is never
//! rewritten: the next step but one writes new files.
//!
//! `adamw` is the arithmetic; `form` is the layout of a rank's state and `parts` its partition over
//! several disks; `memory` and `disk` hold the state, `pass` moves a step through buffers;
//! `folders`, `slot` and `generation` are its folders, its files and their record; `save` makes a
//! checkpoint of them. `spill` holds activations for the duration of a step.

mod adamw;
pub mod bench;
mod disk;
mod folders;
mod form;
mod generation;
mod memory;
mod parts;
mod pass;
mod save;
mod slot;
mod spill;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::layout::Layout;
use crate::{Checkpoint, Dtype, Error, Group, Result, SavePlan};
use disk::DiskState;
use form::{ITEM_BYTES, StateLayout};
use memory::MemoryState;
use storage::{Key, Storage, Width};

pub use adamw::AdamW;
pub use folders::{Folder, OwnedFolder, marked, sweep};
pub use form::{StateParam, plan, plan_over};
pub use spill::{Spill, SpillHandle, SpillOptions, SpillReport};

/// Options of an offloaded state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffloadOptions {
    /// Threads that compute. Default: one per processor.
    pub threads: usize,
    /// Memory for transfers to and from the disks. Default: 256 MiB. Minimum: two tiles of 12 MiB
    /// each; less counts as that.
    pub buffer_bytes_max: u64,
    /// Bytes under one checksum of a file, as
    /// [`CheckpointOptions::block_bytes`](crate::CheckpointOptions::block_bytes) of the checkpoints
    /// that it is to be part of. Default: 4 MiB.
    pub block_bytes: u64,
    /// Preferred method to publish files in a checkpoint. Default: [`PublishMethod::Link`].
    pub prefer: PublishMethod,
    /// Vector width, which changes the time and no bit. Default: the widest available.
    pub width: Width,
}

impl OffloadOptions {
    /// The memory limit of a state on `disks` disks, which does not depend on its size.
    #[must_use]
    pub fn memory_bytes(self, disks: usize) -> u64 {
        disk::buffer_bytes(self, disks)
    }
}

impl Default for OffloadOptions {
    fn default() -> Self {
        OffloadOptions {
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            buffer_bytes_max: 256 << 20,
            block_bytes: crate::CheckpointOptions::default().block_bytes,
            prefer: PublishMethod::Link,
            width: Width::widest(),
        }
    }
}

/// How files of a state become those of a checkpoint, the cheapest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PublishMethod {
    /// By a hard link. The state continues in other files, which take as much space again.
    Link,
    /// By a reflink, where the file system supports it. Shared blocks are copied when the state
    /// changes.
    Clone,
    /// By a copy.
    Copy,
}

impl fmt::Display for PublishMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PublishMethod::Link => "hard link",
            PublishMethod::Clone => "clone",
            PublishMethod::Copy => "copy",
        })
    }
}

/// One parameter's part of an update.
#[derive(Debug)]
pub struct Update<'a> {
    /// Its gradient, row-major, little-endian. It is not changed.
    pub grad: &'a [u8],
    /// F32 or BF16.
    pub grad_dtype: Dtype,
    /// Weight decay; zero for none.
    pub weight_decay: f64,
    /// Destination of its new weights.
    pub weights: WeightsOut<'a>,
}

/// Memory for weights. Rounded to nearest even.
#[derive(Debug)]
pub struct WeightsOut<'a> {
    /// F32, BF16 or F16.
    pub dtype: Dtype,
    /// As many elements as the parameter has, or none: then the weights are not returned.
    pub bytes: &'a mut [u8],
}

/// Which step a state belongs to.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// The number of generations before it.
    pub number: u64,
    /// The step after which the state is this.
    pub step: u64,
    /// The caller's metadata.
    pub meta: Value,
}

/// What a step transferred, and how long it took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepReport {
    /// Bytes read from the disk.
    pub read_bytes: u64,
    /// Bytes written to it.
    pub write_bytes: u64,
    /// Time in the update calls.
    pub time: Duration,
    /// Tiles in flight at once.
    pub depth: usize,
    /// Whether new files were created for it: by the first step, and by the one after a checkpoint
    /// by hard link.
    pub is_in_new_files: bool,
}

/// A rank's optimizer state, outside the device.
#[derive(Debug)]
pub struct Offload {
    form: Arc<StateLayout>,
    options: OffloadOptions,
    backing: StateBacking,
    /// The update in progress.
    pending: Option<PendingUpdate>,
}

#[derive(Debug)]
enum StateBacking {
    Memory(MemoryState, Option<Generation>),
    Disk(Box<DiskState>),
}

#[derive(Debug)]
struct PendingUpdate {
    adamw: AdamW,
    /// Which parameters are done.
    done: Vec<bool>,
    time: Duration,
}

impl Offload {
    /// In host memory: zeros until [`Offload::fill`] or [`Offload::load`]. `plan` is [`plan`] of
    /// the layout.
    ///
    /// # Errors
    /// [`Error::BadLayout`] for another plan; [`storage::Error::Io`] within [`Error::Storage`] if
    /// there is no memory.
    pub fn in_memory(
        plan: Arc<SavePlan>,
        layout: &Layout,
        rank: u64,
        options: OffloadOptions,
    ) -> Result<Self> {
        let form = Arc::new(StateLayout::new(plan, layout, rank)?);
        let backing = StateBacking::Memory(MemoryState::new(&form)?, None);
        Ok(Offload { form, options, backing, pending: None })
    }

    /// In files of a folder that no other process or rank uses. Resumes from the last complete
    /// generation, if there is one: see [`Offload::generation`].
    ///
    /// # Errors
    /// As [`Offload::on_disks`].
    pub fn on_disk(
        store: Arc<dyn Storage>,
        folder: Key,
        plan: Arc<SavePlan>,
        layout: &Layout,
        rank: u64,
        options: OffloadOptions,
    ) -> Result<Self> {
        let folder = Folder { store, key: folder };
        Self::on_disks(vec![folder], "", plan, layout, rank, options)
    }

    /// The same in one folder on each of several disks, by [`plan_over`] for as many. Their order
    /// must be the same every time. `owner` is recorded in them; [`sweep`] recognizes them by it.
    ///
    /// # Errors
    /// [`Error::BadState`] for another number of folders than the plan has; [`Error::BadManifest`]
    /// if the folders belong to another owner, rank, order of disks or plan;
    /// [`storage::Error::Locked`] within [`Error::Storage`] if another process uses them;
    /// [`storage::Error::Corrupt`] there if they are damaged; errors of the store.
    pub fn on_disks(
        folders: Vec<Folder>,
        owner: &str,
        plan: Arc<SavePlan>,
        layout: &Layout,
        rank: u64,
        options: OffloadOptions,
    ) -> Result<Self> {
        let form = Arc::new(StateLayout::new(plan, layout, rank)?);
        let disk = DiskState::open(folders, owner, Arc::clone(&form), options)?;
        Ok(Offload { form, options, backing: StateBacking::Disk(Box::new(disk)), pending: None })
    }

    /// The rank's parameters: one for each part of the weights in its layout, in that order.
    #[must_use]
    pub fn params(&self) -> &[StateParam] {
        self.form.whole.as_slice()
    }

    /// Bytes of all arrays: 12 per element.
    #[must_use]
    pub fn state_bytes(&self) -> u64 {
        self.form.state_bytes()
    }

    /// The current generation; `None` before the first [`Offload::fill`] or [`Offload::load`].
    #[must_use]
    pub fn generation(&self) -> Option<&Generation> {
        match &self.backing {
            StateBacking::Memory(_, generation) => generation.as_ref(),
            StateBacking::Disk(disk) => disk.generation(),
        }
    }

    /// Initializes the state with these weights, in f32, one slice per parameter, and moments of
    /// zero.
    ///
    /// # Errors
    /// [`Error::BadRequest`] for a slice of another length; errors of the store.
    pub fn fill(&mut self, weights: &[&[u8]], step: u64, meta: Value) -> Result<()> {
        self.check_count("fill", weights.len())?;
        for (param, weights) in weights.iter().enumerate() {
            self.check_bytes("fill", param, "weights", weights.len(), ITEM_BYTES)?;
        }
        self.pending = None;
        let form = &self.form;
        let parts = weights.iter().enumerate();
        let parts: Vec<&[u8]> =
            parts.flat_map(|(param, weights)| form.bytes(param, weights, ITEM_BYTES)).collect();
        match &mut self.backing {
            StateBacking::Memory(memory, generation) => {
                memory.fill(form, &parts);
                *generation = Some(after(generation.as_ref(), step, meta));
                Ok(())
            }
            StateBacking::Disk(disk) => disk.fill(&parts, step, meta),
        }
    }

    /// Loads the state and its step from a checkpoint of any layout. Groups that are not in
    /// `groups` become zeros.
    ///
    /// # Errors
    /// [`Error::OtherModel`]; as [`Checkpoint::read`]; errors of the store.
    pub fn load(&mut self, checkpoint: &Checkpoint, groups: &[Group], meta: Value) -> Result<()> {
        let specs = self.form.plan.specs().iter().filter(|spec| groups.contains(&spec.group));
        checkpoint.check_against(&specs.cloned().collect::<Vec<_>>())?;
        self.pending = None;
        match &mut self.backing {
            StateBacking::Memory(memory, generation) => {
                memory.load(&self.form, checkpoint, groups)?;
                *generation = Some(after(generation.as_ref(), checkpoint.step(), meta));
                Ok(())
            }
            StateBacking::Disk(disk) => disk.load(checkpoint, groups, meta),
        }
    }

    /// Copies the current weights, one entry per parameter.
    ///
    /// # Errors
    /// [`Error::BadRequest`] for memory that does not fit; [`Error::Corrupt`] if the disk returns
    /// other bytes than were written; errors of the store.
    pub fn weights(&mut self, into: &mut [WeightsOut<'_>]) -> Result<()> {
        self.check_count("read", into.len())?;
        for (param, into) in into.iter().enumerate() {
            self.check_copy("read", param, into)?;
        }
        let form = &self.form;
        let mut parts = Vec::with_capacity(form.params.len());
        for (param, WeightsOut { dtype, bytes }) in into.iter_mut().enumerate() {
            parts.extend(form.weights(param, WeightsOut { dtype: *dtype, bytes }));
        }
        match &mut self.backing {
            StateBacking::Memory(memory, _) => memory.weights(form, &mut parts, self.options),
            StateBacking::Disk(disk) => disk.weights(&mut parts),
        }
    }

    /// One update of all parameters, with one entry of `updates` for each. `meta` is stored with
    /// the state.
    ///
    /// # Errors
    /// As [`Offload::update`] and [`Offload::finish`].
    pub fn step(
        &mut self,
        adamw: &AdamW,
        updates: Vec<Update<'_>>,
        meta: Value,
    ) -> Result<StepReport> {
        self.check_count("update", updates.len())?;
        self.begin(adamw)?;
        self.update(0, updates)?;
        self.finish(meta)
    }

    /// Starts an update, whose gradients may arrive in parts. An unfinished earlier update is
    /// discarded.
    ///
    /// # Errors
    /// [`Error::BadState`] if the state is not initialized; [`storage::Error::NoSpace`] within
    /// [`Error::Storage`] if there is no space for the next generation; errors of the store,
    /// including those of the last generation.
    pub fn begin(&mut self, adamw: &AdamW) -> Result<()> {
        self.pending = None;
        if self.generation().is_none() {
            return Err(not_initialized("update"));
        }
        if let StateBacking::Disk(disk) = &mut self.backing {
            disk.begin()?;
        }
        let done = vec![false; self.form.whole.len()];
        self.pending = Some(PendingUpdate { adamw: *adamw, done, time: Duration::ZERO });
        Ok(())
    }

    /// Updates the parameters from `first` on. Returns once their new weights are written.
    ///
    /// # Errors
    /// [`Error::BadRequest`] for memory that does not fit, or a parameter that was updated already;
    /// [`Error::Corrupt`] if the disk returns other bytes than were written; errors of the store.
    /// The update is then discarded, and the weights written so far must not be used. The state on
    /// a disk is unchanged; in memory a part of it is updated.
    ///
    /// # Panics
    /// If no update was started.
    pub fn update(&mut self, first: usize, updates: Vec<Update<'_>>) -> Result<()> {
        let mut pending = self.pending.take().expect("an update was started");
        let end = first.saturating_add(updates.len());
        if end > self.form.whole.len() {
            let found = format!("{} from index {first}", updates.len());
            return Err(self.wrong_count("update", found));
        }
        for (param, update) in (first..).zip(&updates) {
            self.check_update(param, update)?;
            if std::mem::replace(&mut pending.done[param], true) {
                return Err(self.bad_request("update", param, "a second update", "one per step"));
            }
        }
        let started = Instant::now();
        let form = &self.form;
        let updates = (first..).zip(updates);
        let updates = updates.flat_map(|(param, update)| form.updates(param, update)).collect();
        let first = form.first_part(first);
        match &mut self.backing {
            StateBacking::Memory(memory, _) => {
                memory.update(form, &pending.adamw, first, updates, self.options)?;
            }
            StateBacking::Disk(disk) => disk.update(&pending.adamw, first, updates)?,
        }
        pending.time += started.elapsed();
        self.pending = Some(pending);
        Ok(())
    }

    /// Ends the update: the state is now that of the step. On a disk it becomes durable in the
    /// background; [`Offload::settle`] waits for that.
    ///
    /// # Errors
    /// [`Error::BadRequest`] if a parameter was not updated; errors of the store.
    ///
    /// # Panics
    /// If no update was started.
    pub fn finish(&mut self, meta: Value) -> Result<StepReport> {
        let PendingUpdate { adamw, done, time } =
            self.pending.take().expect("an update was started");
        if let Some(param) = done.iter().position(|done| !done) {
            return Err(self.bad_request("update", param, "no update", "one per step"));
        }
        match &mut self.backing {
            StateBacking::Memory(_, generation) => {
                *generation = Some(after(generation.as_ref(), adamw.step, meta));
                Ok(StepReport { time, ..StepReport::default() })
            }
            StateBacking::Disk(disk) => disk.finish(adamw.step, meta, time),
        }
    }

    /// In memory: the regions that this rank holds, for [`Checkpoints::save_plan`] and similar
    /// calls. `None` on a disk.
    ///
    /// [`Checkpoints::save_plan`]: crate::Checkpoints::save_plan
    #[must_use]
    pub fn held(&self) -> Option<Vec<&[u8]>> {
        let StateBacking::Memory(memory, _) = &self.backing else { return None };
        let held = self.form.saved.iter();
        Some(held.map(|(param, role)| memory.array(&self.form, *param, *role)).collect())
    }

    /// Waits until the state is durable, if it is on a disk.
    ///
    /// # Errors
    /// Errors of the store. The previous state is intact, and this one cannot be used any more.
    pub fn settle(&mut self) -> Result<()> {
        match &mut self.backing {
            StateBacking::Memory(..) => Ok(()),
            StateBacking::Disk(disk) => disk.settle(),
        }
    }
}

/// The operation, as the verb of an error message.
type Verb = &'static str;

/// The name of the state in messages.
const OBJECT: &str = "optimizer state";

fn not_initialized(operation: Verb) -> Error {
    let reason = "not initialized (hint: fill or load it first)".to_owned();
    Error::BadState { operation, object: OBJECT.to_owned(), reason }
}

/// Validation of arguments.
impl Offload {
    fn bad_request(&self, operation: Verb, param: usize, found: &str, expected: &str) -> Error {
        let object = format!("'{}'", self.form.whole[param].name);
        let (found, expected) = (found.to_owned(), expected.to_owned());
        Error::BadRequest { operation, object, found, expected }
    }

    fn wrong_count(&self, operation: Verb, found: String) -> Error {
        let expected = format!("{} parameters", self.form.whole.len());
        Error::BadRequest { operation, object: OBJECT.to_owned(), found, expected }
    }

    fn check_count(&self, operation: Verb, found: usize) -> Result<()> {
        if found == self.form.whole.len() {
            return Ok(());
        }
        Err(self.wrong_count(operation, found.to_string()))
    }

    fn check_bytes(
        &self,
        operation: Verb,
        param: usize,
        what: &str,
        found: usize,
        item_bytes: usize,
    ) -> Result<()> {
        let expected = self.form.whole[param].elements * item_bytes;
        if found == expected {
            return Ok(());
        }
        let (found, expected) = (format!("{found} bytes of {what}"), format!("{expected} bytes"));
        Err(self.bad_request(operation, param, &found, &expected))
    }

    fn check_copy(&self, operation: Verb, param: usize, weights: &WeightsOut<'_>) -> Result<()> {
        let WeightsOut { dtype, bytes } = weights;
        if !adamw::is_copy(*dtype) {
            let found = format!("weights in {dtype}");
            return Err(self.bad_request(operation, param, &found, "F32, BF16 or F16"));
        }
        let item_bytes = dtype.item_bytes() as usize; // fits: 2 or 4
        if bytes.is_empty() {
            Ok(())
        } else {
            self.check_bytes(operation, param, "weights", bytes.len(), item_bytes)
        }
    }

    fn check_update(&self, param: usize, update: &Update<'_>) -> Result<()> {
        let Update { grad, grad_dtype, weights, .. } = update;
        if !adamw::is_grad(*grad_dtype) {
            let found = format!("a gradient in {grad_dtype}");
            return Err(self.bad_request("update", param, &found, "F32 or BF16"));
        }
        let item_bytes = grad_dtype.item_bytes() as usize; // fits: 2 or 4
        self.check_bytes("update", param, "gradient", grad.len(), item_bytes)?;
        self.check_copy("update", param, weights)
    }
}

fn after(last: Option<&Generation>, step: u64, meta: Value) -> Generation {
    Generation { number: last.map_or(0, |last| last.number + 1), step, meta }
}
