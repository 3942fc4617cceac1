//! Drain: copies steps from the fast store that saves go to into a second, lasting store.
//!
//! A copy is a separate commit, with the protocol of a save: files into a hidden folder, durable,
//! then the manifest, then the rename. The hidden folder is named after its contents, so any
//! process can resume an interrupted drain: a file that exists is complete, and was verified before
//! it became visible. Every byte is checked against its file's checksum on the way, so damage does
//! not spread.

mod copy;
pub(crate) mod task;

use std::fmt;
use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::base::rate_limit::RateLimiter;
use crate::base::save_control::SaveControl;
use crate::liveness::heartbeat::delete_if_exists;
use crate::read::checkpoint::{Checkpoint, MANIFEST};
use crate::retain::retention::{RetentionInputs, RetentionPlan};
use crate::{Checkpoints, Codec, Error, FolderListing, Result, Retention};
use storage::{Crc64, Manifest, rate_text};

/// Prefix of hidden folders of the second store that a drain fills. The step and a checksum of the
/// contents follow.
const DRAIN: &str = ".drain-";

/// How steps are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrainOptions {
    /// Limit in bytes per second, so that training keeps its share of the network. Default: no
    /// limit.
    pub bytes_per_s: Option<NonZeroU64>,
    /// Tries per step and pass. Default: 3. Minimum: 1.
    pub tries: u32,
    /// Backoff before the second try; it doubles with each try. Default: 1 s.
    pub pause: Duration,
    /// Retention of the second store. Only steps that it retains are copied, and every pass deletes
    /// the others. Default: the 3 newest.
    pub retention: Retention,
}

impl Default for DrainOptions {
    fn default() -> Self {
        let (tries, pause) = (3, Duration::from_secs(1));
        DrainOptions { bytes_per_s: None, tries, pause, retention: Retention::default() }
    }
}

/// What a step survives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Durability {
    /// A crash of this process and a power loss, but not the loss of the machine: the step is only
    /// in the first store.
    Local,
    /// The loss of the machine: the step is complete in the second store.
    Remote,
}

impl fmt::Display for Durability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Durability::Local => "local",
            Durability::Remote => "remote",
        })
    }
}

/// A copied step. Its `Display` is a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrainReport {
    /// The step.
    pub step: u64,
    /// Bytes of its files.
    pub bytes: u64,
    /// Of these, bytes copied by an earlier drain.
    pub resumed_bytes: u64,
    /// Time from the first try to the commit.
    pub time: Duration,
    /// Number of tries.
    pub tries: u32,
}

impl fmt::Display for DrainReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DrainReport { step, bytes, resumed_bytes, time, tries } = self;
        let size = storage::ByteSize(*bytes);
        write!(f, "step {step}: {size} drained, {}", rate_text(bytes - resumed_bytes, *time))?;
        if *resumed_bytes > 0 {
            write!(f, ", {} of them in earlier attempts", storage::ByteSize(*resumed_bytes))?;
        }
        if *tries > 1 { write!(f, ", {tries} attempts") } else { Ok(()) }
    }
}

/// What a pass over all steps did.
#[derive(Debug, Default)]
pub struct DrainPass {
    /// Copied steps, in that order.
    pub drained: Vec<DrainReport>,
    /// Steps that could not be copied, and why. They stay pending.
    pub failed: Vec<(u64, Error)>,
    /// Steps deleted from the second store by its retention.
    pub deleted: Vec<u64>,
}

/// Copies steps from one folder to another, usually in another store. Saves into the first continue
/// meanwhile, and are not blocked.
#[derive(Debug)]
pub struct Drain {
    from: Arc<Checkpoints>,
    to: Arc<Checkpoints>,
    options: DrainOptions,
    started: Instant,
    limiter: Mutex<Option<RateLimiter>>,
    pub(crate) control: Arc<SaveControl>,
}

impl Drain {
    pub(crate) fn pause(&self) -> Duration {
        self.options.pause
    }

    /// Creates a drain. Nothing is read or written yet.
    #[must_use]
    pub fn new(from: Arc<Checkpoints>, to: Arc<Checkpoints>, options: DrainOptions) -> Self {
        let limiter = Mutex::new(options.bytes_per_s.map(RateLimiter::new));
        Drain { from, to, options, started: Instant::now(), limiter, control: Arc::default() }
    }

    /// The complete steps of both stores, oldest first, with their durability.
    ///
    /// # Errors
    /// Errors of the stores.
    pub fn levels(&self) -> Result<Vec<(u64, Durability)>> {
        let there = Listings::of(self)?;
        let mut second = there.second_complete.clone();
        let mut levels = Vec::new();
        for &step in &there.first_complete {
            let is_in_second = second.contains(&step) && self.is_same(step, &there)?;
            levels.push((step, if is_in_second { Durability::Remote } else { Durability::Local }));
            second.retain(|there| *there != step);
        }
        levels.extend(second.into_iter().map(|step| (step, Durability::Remote)));
        levels.sort_unstable();
        Ok(levels)
    }

    /// Steps that the second store lacks and would retain, newest first. They are copied in this
    /// order, since the newest is worth most. A step of other contents under the same name counts
    /// as lacking.
    ///
    /// # Errors
    /// Errors of the stores.
    pub fn pending(&self) -> Result<Vec<u64>> {
        let there = Listings::of(self)?;
        let mut lacking = Vec::new();
        for &step in &there.first_complete {
            let is_in_second = there.second_complete.contains(&step);
            match is_in_second.then(|| self.is_same(step, &there)).transpose() {
                Ok(Some(true)) => {}
                Ok(_) => lacking.push(step),
                Err(Error::NoStep { object, .. }) => log_deleted_by_retention(&object),
                Err(error) => return Err(error),
            }
        }
        let deleted = self.deleted_of(there.second_complete, &lacking)?;
        lacking.retain(|step| !deleted.contains(step));
        lacking.reverse();
        Ok(lacking)
    }

    /// Steps that the second store lacks and would retain, and that are damaged in the first, with
    /// the damage, newest first: they cannot be copied. [`Drain::pending`] does not count them.
    ///
    /// # Errors
    /// Errors of the stores.
    pub fn damaged(&self) -> Result<Vec<(u64, Error)>> {
        let there = Listings::of(self)?;
        let mut damaged = Vec::new();
        for &step in there.first.steps() {
            if !there.second_complete.contains(&step)
                && !there.first_complete.contains(&step)
                && let Err(error) = self.from.open_listed(&there.first, step)
                && error.is_damage()
            {
                damaged.push((step, error));
            }
        }
        let steps: Vec<u64> = damaged.iter().map(|(step, _)| *step).collect();
        let remaining = self.from.still_there(&steps)?;
        damaged.retain(|(step, _)| remaining.contains(step));
        let all: Vec<u64> = there.first_complete.iter().chain(&remaining).copied().collect();
        let deleted = self.deleted_of(there.second_complete, &all)?;
        damaged.retain(|(step, _)| !deleted.contains(step));
        damaged.reverse();
        Ok(damaged)
    }

    /// Which of these steps the retention of the second store would delete, if it had all of them.
    fn deleted_of(&self, mut all: Vec<u64>, more: &[u64]) -> Result<Vec<u64>> {
        all.extend(more);
        all.sort_unstable();
        all.dedup();
        let pinned = self.to.pins()?;
        let facts =
            RetentionInputs { steps: &all, verified: None, pinned: &pinned, undrained: &[] };
        Ok(RetentionPlan::new(&self.options.retention, facts).delete)
    }

    /// Whether both stores have the step with the same contents.
    fn is_same(&self, step: u64, there: &Listings) -> Result<bool> {
        let open = |of: &Checkpoints, listing| match of.open_listed(listing, step) {
            // It may have been deleted after the listing.
            Err(error) if error.is_damage() => of.open_step(step),
            opened => opened,
        };
        let (first, second) = (open(&self.from, &there.first)?, open(&self.to, &there.second)?);
        Ok(first.catalog.has_same(&second.catalog))
    }

    /// Copies every pending step, then applies the retention of the second store. A step that fails
    /// is retried as the options say. If it then fails for damage in the first store or other
    /// contents in the second, the pass continues with the others; otherwise it ends.
    ///
    /// # Errors
    /// Errors of the stores before the first copy, and [`Error::Cancelled`].
    pub fn run(&self) -> Result<DrainPass> {
        self.from.check_lease()?;
        // All processes make the same copies, so that another one may have made some meanwhile.
        self.to.lease.fence().clear_loss();
        let mut pass = DrainPass::default();
        let pending = self.pending()?;
        self.remove_leftovers(&pending)?;
        for step in pending {
            match self.step(step) {
                Ok(report) => pass.drained.push(report),
                Err(Error::Cancelled) => return Err(Error::Cancelled),
                Err(Error::NoStep { object, .. }) => log_deleted_by_retention(&object),
                Err(error) => {
                    let is_own = error.is_damage() || matches!(error, Error::Differs { .. });
                    pass.failed.push((step, error));
                    if !is_own {
                        return Ok(pass);
                    }
                }
            }
        }
        self.from.check_lease()?;
        pass.deleted = self.to.retain_by(&self.options.retention, &[])?.delete;
        Ok(pass)
    }

    /// Copies one step, whether or not it is pending.
    ///
    /// # Errors
    /// [`Error::NoStep`]; [`Error::Differs`] if the second store has other contents under its name;
    /// [`Error::Corrupt`] if a file differs from what was saved; [`Error::Held`] if another process
    /// writes there; errors of the stores, after all tries.
    pub fn step(&self, step: u64) -> Result<DrainReport> {
        let started = Instant::now();
        let mut pause = self.options.pause;
        let mut tries = 1;
        loop {
            match self.try_step(step) {
                Ok((bytes, resumed_bytes)) => {
                    let time = started.elapsed();
                    return Ok(DrainReport { step, bytes, resumed_bytes, time, tries });
                }
                Err(error) if tries >= self.options.tries || !is_transient(&error) => {
                    return Err(error);
                }
                Err(error) => log::warn!("drain of step {step}: attempt {tries} failed: {error}"),
            }
            self.sleep_unless_cancelled(pause)?;
            pause = pause.saturating_mul(2);
            tries += 1;
        }
    }

    fn try_step(&self, step: u64) -> Result<(u64, u64)> {
        self.control.check()?;
        // Keeps the first store's retention from deleting it meanwhile.
        let _pin = self.from.pin(step)?;
        let source = self.from.open_step(step)?;
        let (_, bytes) = source.size();
        self.to.change(|| {
            let place = match self.to.find_place_for(step, DRAIN, &self.contents(&source)) {
                Err(Error::StepExists { object: other }) => {
                    let is_same = self.to.open_step(step)?.catalog.has_same(&source.catalog);
                    let object = source.display();
                    return if is_same {
                        Ok((bytes, bytes))
                    } else {
                        Err(Error::Differs { object, other })
                    };
                }
                place => place?,
            };
            let mut manifest = Manifest::read(&*self.from.store, &source.folder.join(MANIFEST)?)?;
            let resumed = self.copy_files(&source, &place.data, &mut manifest)?;
            self.control.check()?;
            let key = place.data.join(MANIFEST)?;
            // A process that lost the lease of the first store changes nothing in the second.
            self.from.check_lease()?;
            self.to.check_lease()?;
            // A leftover of an interrupted drain.
            delete_if_exists(&*self.to.store, &key)?;
            let manifest = manifest.write(&*self.to.store, &key)?;
            self.from.check_lease()?;
            self.to.check_lease()?;
            self.to.set_aside(&place)?;
            self.to.publish(&place, &manifest)?;
            self.to.note_latest(step, place.files());
            Ok((bytes, resumed))
        })
    }

    /// Removes leftovers of drains for steps that are no longer pending.
    fn remove_leftovers(&self, pending: &[u64]) -> Result<()> {
        let mut pending_marks = Vec::new();
        for &step in pending {
            match self.from.open_step(step) {
                Ok(source) => pending_marks.push((step, self.contents(&source))),
                Err(Error::NoStep { object, .. }) => log_deleted_by_retention(&object),
                Err(error) => return Err(error),
            }
        }
        let _alone = self.to.begin_change()?;
        self.from.check_lease()?;
        for (step, mark, folder) in self.to.unfinished(DRAIN)? {
            if !pending_marks.contains(&(step, mark)) {
                self.to.check_lease()?;
                self.to.store.delete_folder(&folder)?;
            }
        }
        Ok(())
    }

    /// A checksum over the names, lengths and checksums of all files. For packed files it includes
    /// the codec and its release, since another release packs them into other bytes.
    fn contents(&self, source: &Checkpoint) -> String {
        let mut sum = Crc64::new();
        for file in &source.catalog.files {
            sum.update(format!("{} {} {:016x}\n", file.path, file.bytes, file.crc64).as_bytes());
        }
        if let Some(codec) = self.to.options.codec {
            sum.update(format!("{} {}\n", codec.name(), Codec::release()).as_bytes());
        }
        format!("{:016x}", sum.value())
    }

    fn wait_for_rate_limit(&self, bytes: u64) -> Result<()> {
        let wait = {
            let mut limiter = self.limiter.lock().unwrap_or_else(PoisonError::into_inner);
            limiter
                .as_mut()
                .map_or(Duration::ZERO, |limiter| limiter.pay(self.started.elapsed(), bytes))
        };
        self.sleep_unless_cancelled(wait)
    }

    /// Sleeps in short intervals, so that cancellation takes effect soon.
    fn sleep_unless_cancelled(&self, time: Duration) -> Result<()> {
        let end = Instant::now() + time;
        loop {
            self.control.check()?;
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(left.min(Duration::from_millis(50)));
        }
    }
}

/// What both folders hold: each is listed once, however many steps are compared.
struct Listings {
    first: FolderListing,
    second: FolderListing,
    first_complete: Vec<u64>,
    second_complete: Vec<u64>,
}

impl Listings {
    fn of(drain: &Drain) -> Result<Self> {
        let (first, second) = (drain.from.list_folder()?, drain.to.list_folder()?);
        let first_complete = drain.from.complete_in(&first)?;
        let second_complete = drain.to.complete_in(&second)?;
        Ok(Listings { first, second, first_complete, second_complete })
    }
}

/// Whether another try may succeed.
fn is_transient(error: &Error) -> bool {
    match error {
        Error::Storage(error) => {
            !matches!(error, storage::Error::Denied { .. } | storage::Error::Interrupted)
        }
        Error::Held { .. } => true,
        _ => false,
    }
}

/// The retention of the first store may delete a step between the listing and the pin.
fn log_deleted_by_retention(what: &str) {
    log::info!("drain: {what} was deleted by retention meanwhile; skipped");
}
