//! Async saves: the state is copied, then written while training continues.
//!
//! There is one arena for the copy, allocated once and reused, and one thread that writes from it.
//! The arena and the right to save are passed on as one: [`AsyncSaver::save`] owns them while it
//! copies, the thread while it writes. So a later update never touches a copy, and a second save
//! waits or is skipped, but never makes a second copy.
//!
//! A process that is one of several writers copies only the pieces that the plan assigns to it, and
//! its thread joins those of the others by [`Checkpoints::save_together`].

mod resources;
pub(crate) mod save_handle;
mod shutdown;
mod takeover;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use shutdown::Finish;

use crate::agent::Agent;
use crate::background::save_handle::SaveStatus;
use crate::save::snapshot::{JointSaveInfo, Snapshot};
use crate::{
    Blob, Checkpoints, Error, JointSaveOptions, Result, SaveHandle, SavePlan, SaveReport,
    TensorData, save,
};
use resources::{CommitHook, PendingSave, ResourceGuard, SaveResources, SaverShared, SaverState};
use storage::ipc::Arena;

/// Longest part of the grace period reserved for removing what a cancelled save has written.
const ABANDON_MAX: Duration = Duration::from_secs(5);

/// Spare arena memory, so that longer metadata or a longer token needs no new arena.
const SPARE_BYTES: u64 = 64 << 10;

/// Options of async saves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AsyncSaveOptions {
    /// Largest arena for the copy. A larger state is rejected; only as much as the state needs is
    /// allocated. Default: 64 GiB.
    pub staging_bytes_max: u64,
    /// Threads that copy. Default: one per core, at most 8, which saturate the memory bandwidth.
    pub copy_threads: usize,
    /// What a save does while another is being written. Default: [`WhenBusy::Wait`].
    pub when_busy: WhenBusy,
}

impl Default for AsyncSaveOptions {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        AsyncSaveOptions {
            staging_bytes_max: 64 << 30,
            copy_threads: cores.min(8),
            when_busy: WhenBusy::Wait,
        }
    }
}

/// What to do while the arena is in use. A save of several writers always waits: a save skipped by
/// one must be skipped by all, so they check [`AsyncSaver::is_busy`] and agree on it first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenBusy {
    /// Wait until the save in progress is written.
    Wait,
    /// Skip this save.
    Skip,
}

/// Result of [`AsyncSaver::save`].
#[derive(Debug)]
#[must_use = "an earlier save may have failed"]
pub struct SaveStart {
    /// The save that was started; `None` if it was skipped because another is being written.
    pub save: Option<SaveHandle>,
    /// The step and error of an earlier failed save, if not reported before. That step does not
    /// exist; older ones are unchanged.
    pub failed: Option<(u64, Error)>,
}

/// Saves in the background. On drop, it waits for the save in progress.
#[derive(Debug)]
pub struct AsyncSaver {
    steps: Arc<Checkpoints>,
    options: AsyncSaveOptions,
    shared: Arc<SaverShared>,
    thread: Option<JoinHandle<()>>,
}

impl AsyncSaver {
    /// Saves into `steps` by a thread of this process.
    ///
    /// # Errors
    /// [`storage::Error::Io`] within [`Error::Storage`] if the thread cannot be created.
    pub fn new(steps: Arc<Checkpoints>, options: AsyncSaveOptions) -> Result<Self> {
        Self::start(steps, options, None)
    }

    /// Saves by a separate process, which completes a copied save even if this process dies. If the
    /// agent dies, this process does that save and all later ones.
    ///
    /// # Errors
    /// As [`AsyncSaver::new`].
    pub fn with_agent(
        steps: Arc<Checkpoints>,
        options: AsyncSaveOptions,
        agent: Agent,
    ) -> Result<Self> {
        steps.admit(agent.owner());
        Self::start(steps, options, Some(agent))
    }

    fn start(
        steps: Arc<Checkpoints>,
        options: AsyncSaveOptions,
        agent: Option<Agent>,
    ) -> Result<Self> {
        let resources = Some(SaveResources { arena: None, agent });
        let state = Mutex::new(SaverState { resources, ..SaverState::default() });
        let shared = Arc::new(SaverShared { state, changed: Condvar::new() });
        let own = (Arc::clone(&steps), Arc::clone(&shared));
        let thread = std::thread::Builder::new().name("ckpt-save".to_owned());
        let thread = thread
            .spawn(move || work(&own.0, &own.1))
            .map_err(|e| storage::Error::from_io("start", "the save thread", e))?;
        Ok(AsyncSaver { steps, options, shared, thread: Some(thread) })
    }

    /// Allocates the memory for a state of `bytes` bytes now. Otherwise the first save does, and
    /// spends most of its time on it.
    ///
    /// # Errors
    /// [`Error::BadInput`] for more than the options allow; errors of the operating system.
    pub fn reserve(&self, bytes: u64) -> Result<()> {
        self.make_room(self.take_resources().resources(), bytes)
    }

    /// Sets a hook that the save thread calls after each commit and before it writes the next save,
    /// for example for retention or to notify a cache. It also gets the `meta` of the save.
    pub fn after_commit(
        &self,
        hook: impl Fn(&SaveReport, &serde_json::Value) + Send + Sync + 'static,
    ) {
        self.shared.lock().hook = CommitHook(Some(Arc::new(hook)));
    }

    /// Whether a save would have to wait for another.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.shared.lock().resources.is_none()
    }

    /// Copies the state and returns; the copy is written in the background. The arguments are those
    /// of [`Checkpoints::save`], and may change as soon as this returns.
    ///
    /// # Errors
    /// [`Error::BadInput`] for a state that cannot be saved or does not fit; errors of the
    /// operating system when it allocates the memory. Nothing is saved then. Later errors are
    /// returned by the handle, or by the next call.
    pub fn save(
        &self,
        step: u64,
        tensors: &[TensorData<'_>],
        blobs: &[Blob<'_>],
        meta: serde_json::Value,
    ) -> Result<SaveStart> {
        self.steps.check_options(step)?;
        let plan = self.steps.plan_whole(tensors)?;
        let held: Vec<&[u8]> = tensors.iter().map(|tensor| tensor.bytes).collect();
        self.save_alone(step, &plan, &held, blobs, meta)
    }

    /// Copies this process's part of a plan and returns. The copy is written in the background and
    /// committed jointly with those of the other writers. The arguments are those of
    /// [`Checkpoints::save_together`], and may change as soon as this returns. The deadline counts
    /// from when this writer starts to write. If the plan has one writer, it saves alone.
    ///
    /// A failure of any writer or its agent fails the save for all writers, and each gets the cause
    /// once; so does [`SaveHandle::cancel`] by one. An agent that dies before its part exists fails
    /// this save; later ones are done by this process.
    ///
    /// # Errors
    /// As [`AsyncSaver::save`]; the error is also reported to the other writers.
    pub fn save_part(
        &self,
        step: u64,
        plan: &Arc<SavePlan>,
        held: &[&[u8]],
        blobs: &[Blob<'_>],
        meta: serde_json::Value,
        together: &JointSaveOptions<'_>,
    ) -> Result<SaveStart> {
        if plan.writers() == 1 && together.writer == 0 {
            self.steps.check_options(step)?;
            return self.save_alone(step, plan, held, blobs, meta);
        }
        let pieces = self.steps.check_part(step, plan, held, blobs, together)?;
        if together.writer == 0 {
            let checked = save::check_meta(&meta);
            checked.inspect_err(|error| self.steps.decline(step, plan, together, error))?;
        }
        let mut snapshot = Snapshot::new(step, plan, together.writer, blobs, meta);
        let (token, deadline) = (together.token.to_owned(), together.deadline);
        snapshot.party = Some(JointSaveInfo { token, deadline });
        let started = self.begin(snapshot, plan, &pieces, blobs);
        started.inspect_err(|error| self.steps.decline(step, plan, together, error))
    }

    fn save_alone(
        &self,
        step: u64,
        plan: &Arc<SavePlan>,
        held: &[&[u8]],
        blobs: &[Blob<'_>],
        meta: serde_json::Value,
    ) -> Result<SaveStart> {
        let pieces = plan.pieces_held(0, held)?;
        save::check_blobs(blobs)?;
        save::check_meta(&meta)?;
        if self.is_busy() && self.options.when_busy == WhenBusy::Skip {
            return Ok(SaveStart { save: None, failed: None });
        }
        self.begin(Snapshot::new(step, plan, 0, blobs, meta), plan, &pieces, blobs)
    }

    /// Copies the state and hands the copy to the save thread.
    fn begin(
        &self,
        snapshot: Snapshot,
        plan: &Arc<SavePlan>,
        pieces: &[&[u8]],
        blobs: &[Blob<'_>],
    ) -> Result<SaveStart> {
        let mut resources = self.take_resources();
        let failed = self.take_failure();
        let started = Instant::now();
        let staged = self.stage(resources.resources(), &snapshot, plan, pieces, blobs);
        if let Err(error) = staged {
            drop(resources);
            // The earlier failure would otherwise be lost.
            if let Some((step, earlier)) = failed {
                log::error!("step {step} was not saved: {earlier}");
            }
            return Err(error);
        }
        let status = Arc::new(SaveStatus::new(snapshot.step, snapshot.bytes, started.elapsed()));
        let (resources, plan) = (resources.pass_on(), Arc::clone(plan));
        let mut state = self.shared.lock();
        state.latest = Some(Arc::clone(&status));
        state.job = Some(PendingSave { resources, plan, snapshot, status: Arc::clone(&status) });
        self.shared.changed.notify_all();
        Ok(SaveStart { save: Some(SaveHandle::new(status)), failed })
    }

    /// Waits for the save in progress. Returns the report of the latest committed save.
    ///
    /// # Errors
    /// The error of the latest save, if not reported before.
    pub fn wait(&self) -> Result<Option<SaveReport>> {
        let state = self.shared.wait_while(None, |state| state.resources.is_none());
        let last = state.last;
        drop(state);
        match self.take_failure() {
            Some((_, error)) => Err(error),
            None => Ok(last),
        }
    }

    /// For a process that must exit: finishes the save in progress if, at its current rate, that
    /// fits into the grace period, and cancels it if not. A part of the period is reserved for
    /// removing what a cancelled save has written. The `Display` of the result states what was
    /// decided and done.
    pub fn finish_within(&self, grace: Duration) -> Finish {
        // `None`: the deadline is not representable, so there is none.
        let until = Instant::now().checked_add(grace);
        let last_call = until.map(|until| until - (grace / 2).min(ABANDON_MAX));
        let (status, last) = {
            let state = self.shared.lock();
            match (&state.resources, &state.latest) {
                (None, Some(status)) => (Arc::clone(status), state.last),
                _ => return Finish::Idle,
            }
        };
        let need = status.remaining_time(last.as_ref());
        if need.is_some_and(|need| need > grace) {
            status.control.cancel();
        }
        drop(self.shared.wait_while(last_call, |state| state.resources.is_none()));
        let late = status.remaining_time(last.as_ref()).or(need).unwrap_or_default();
        status.control.cancel();
        if self.shared.wait_while(until, |state| state.resources.is_none()).resources.is_none() {
            return Finish::Stuck { step: status.step, grace };
        }
        match status.wait() {
            Ok(report) => Finish::Committed(report),
            Err(Error::Cancelled) => {
                let need = need.filter(|need| *need > grace).unwrap_or(grace + late);
                Finish::Cancelled { step: status.step, need, grace }
            }
            Err(error) => Finish::Failed(status.step, error),
        }
    }

    fn stage(
        &self,
        resources: &mut SaveResources,
        snapshot: &Snapshot,
        plan: &SavePlan,
        pieces: &[&[u8]],
        blobs: &[Blob<'_>],
    ) -> Result<()> {
        // The agent's orders are stored after the copy.
        let orders = resources.agent.as_ref().map_or_else(Vec::new, |_| snapshot.orders(plan));
        self.make_room(resources, snapshot.arena_bytes + orders.len() as u64)?;
        let arena = resources.arena.as_mut().expect("room was made above");
        snapshot.fill(arena, plan, pieces, blobs, self.options.copy_threads)?;
        let start = snapshot.arena_bytes as usize; // fits: the arena has room for it
        arena[start..start + orders.len()].copy_from_slice(&orders);
        // Started before this returns: from here on the agent saves even if this process dies.
        let sent = match &mut resources.agent {
            Some(agent) => agent.begin(arena, start, orders.len()),
            None => Ok(()),
        };
        if let Err(error) = sent {
            log::error!("agent failed; saves continue without it: {error}");
            resources.agent = None;
        }
        Ok(())
    }

    fn make_room(&self, resources: &mut SaveResources, bytes: u64) -> Result<()> {
        let max = self.options.staging_bytes_max;
        let len = usize::try_from(bytes).ok().filter(|_| bytes <= max);
        let len = len.ok_or_else(|| Error::BadInput {
            object: format!("a snapshot of {bytes} bytes"),
            reason: format!("expected at most {max} bytes (hint: raise staging_bytes_max)"),
        })?;
        if resources.arena.as_ref().is_some_and(|arena| arena.len() >= len) {
            return Ok(());
        }
        let spare = (bytes.next_multiple_of(SPARE_BYTES) + SPARE_BYTES).min(max);
        let len = usize::try_from(spare).unwrap_or(len);
        // The old arena is freed first: there are never two.
        resources.arena = None;
        if let Some(agent) = &mut resources.agent {
            agent.forget();
        }
        let mut arena =
            if resources.agent.is_some() { Arena::new_shared(len) } else { Arena::new(len) }?;
        arena.populate(self.options.copy_threads)?;
        resources.arena = Some(arena);
        Ok(())
    }

    fn take_resources(&self) -> ResourceGuard<'_> {
        let mut state = self.shared.wait_while(None, |state| state.resources.is_none());
        let resources = state.resources.take();
        ResourceGuard { shared: &self.shared, resources }
    }

    fn take_failure(&self) -> Option<(u64, Error)> {
        let latest = self.shared.lock().latest.clone()?;
        Some((latest.step, latest.take_failure()?))
    }
}

impl Drop for AsyncSaver {
    fn drop(&mut self) {
        self.shared.lock().end = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported by the panic hook.
            let _ = thread.join();
        }
        if let Some((step, error)) = self.take_failure() {
            log::error!("step {step} was not saved: {error}");
        }
    }
}

fn work(steps: &Checkpoints, shared: &SaverShared) {
    loop {
        let mut state = shared.wait_while(None, |state| state.job.is_none() && !state.end);
        let Some(mut job) = state.job.take() else { return };
        drop(state);
        // Catches a panic: without the resources no later save could start, and the run would wait
        // forever.
        let outcome = catch_unwind(AssertUnwindSafe(|| write(steps, &mut job)));
        let outcome = outcome.unwrap_or_else(|_| {
            // The state of its connection is unknown.
            job.resources.agent = None;
            Err(Error::Panicked { object: format!("step {}", job.snapshot.step) })
        });
        log_outcome(&job.snapshot, &outcome);
        let report = outcome.as_ref().ok().copied();
        let PendingSave { resources, snapshot, status, .. } = job;
        let mut state = shared.lock();
        state.last = report.or(state.last);
        let hook = state.hook.clone();
        status.finish(outcome);
        state.resources = Some(resources);
        shared.changed.notify_all();
        drop(state);
        if let (Some(report), Some(hook)) = (report, hook.0) {
            // The panic hook has reported a panic, and the next save must still be written.
            let _ = catch_unwind(AssertUnwindSafe(|| hook(&report, &snapshot.meta)));
        }
    }
}

/// All writers get the same outcome: only writer 0 logs it above debug level.
fn log_outcome(snapshot: &Snapshot, outcome: &Result<SaveReport>) {
    let (step, is_first) = (snapshot.step, snapshot.writer == 0);
    let level = |level| if is_first { level } else { log::Level::Debug };
    match outcome {
        Ok(report) => log::log!(level(log::Level::Info), "{report}"),
        Err(Error::Cancelled) => log::log!(level(log::Level::Info), "step {step} was cancelled"),
        Err(error) => {
            log::log!(level(log::Level::Error), "step {step} was not saved: {error}");
        }
    }
}

fn write(steps: &Checkpoints, job: &mut PendingSave) -> Result<SaveReport> {
    let mut is_orphaned = false;
    if let Some(agent) = &mut job.resources.agent {
        match agent.finish(&job.status.control) {
            Ok(outcome) => return outcome,
            Err(error) => {
                log::error!("agent failed; this process saves from now on: {error}");
                job.resources.agent = None;
                is_orphaned = true;
            }
        }
    }
    let PendingSave { resources, plan, snapshot, status } = job;
    let arena = resources.arena.as_deref().unwrap_or_default();
    if is_orphaned {
        return takeover::save(steps, plan, snapshot, arena, &status.control);
    }
    snapshot.save(steps, plan, arena, &status.control)
}
