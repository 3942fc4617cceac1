//! Saves behind the training step: the state is copied, and written while training goes on.
//!
//! There is one piece of memory for the copy, filled once a save and used again, and one thread
//! that writes from it. Memory and right to write go together: [`Background::save`] has them while
//! it copies, the thread while it writes, so that a copy is never touched by a later update, and a
//! second save waits or is left out, but never takes a second copy.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::agent::Agent;
use crate::control::Control;
use crate::snapshot::Snapshot;
use crate::ticket::Ticket;
use crate::{Blob, Checkpoints, Error, Result, SaveHandle, SaveReport, TensorData, rescue, save};
use storage::shared::Arena;

/// Of the time that a process has to end: for removing what a cancelled save has written.
const ABANDON_MAX: Duration = Duration::from_secs(5);

/// How saves go on behind the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackgroundOptions {
    /// Memory for the copy. A state that does not fit is refused; only as much is taken as the
    /// state has. Default: 64 GiB.
    pub staging_bytes_max: u64,
    /// Threads that copy. Default: one a core, at most 8: by then memory is the limit.
    pub copy_threads: usize,
    /// What a save does that comes while another is being written. Default: [`WhenBusy::Wait`].
    pub when_busy: WhenBusy,
}

impl Default for BackgroundOptions {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        BackgroundOptions {
            staging_bytes_max: 64 << 30,
            copy_threads: cores.min(8),
            when_busy: WhenBusy::Wait,
        }
    }
}

/// What to do while the memory for the copy is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenBusy {
    /// Wait until it is written.
    Wait,
    /// Save nothing this time.
    Skip,
}

/// What became of a call of [`Background::save`].
#[derive(Debug)]
#[must_use = "an earlier save may have failed"]
pub struct Begun {
    /// The save that was begun; `None` if it was left out, for another is being written.
    pub save: Option<SaveHandle>,
    /// An earlier save that failed since it was last asked, and why. Its step is not there; older
    /// ones are as they were.
    pub failed: Option<(u64, Error)>,
}

/// What [`Background::finish_within`] decided and what came of it. Its text is a line for a log.
#[derive(Debug)]
pub enum Finish {
    /// Nothing was being written, and nothing is lost.
    Idle,
    /// The save in flight is committed.
    Committed(SaveReport),
    /// It was cancelled, for it would have taken too long, or did.
    Cancelled {
        /// The step that is not there.
        step: u64,
        /// What it would still have taken, by its rate.
        need: Duration,
        /// What it was given.
        grace: Duration,
    },
    /// It failed.
    Failed(u64, Error),
    /// It was cancelled, and does not end: the store does not answer. A process that ends now
    /// leaves what was written to the next sweep; one that drops the [`Background`] first waits.
    Stuck {
        /// The step, which may still come to be there.
        step: u64,
        /// What it was given.
        grace: Duration,
    },
}

impl fmt::Display for Finish {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Finish::Idle => f.write_str("no save was in flight"),
            Finish::Committed(report) => write!(f, "finished in time: {report}"),
            Finish::Cancelled { step, need, grace } => write!(
                f,
                "step {step} cancelled: it would have taken {:.1} s more, of {:.1} s given; the \
                 last commit stays",
                need.as_secs_f64(),
                grace.as_secs_f64()
            ),
            Finish::Failed(step, error) => write!(f, "step {step} failed: {error}"),
            Finish::Stuck { step, grace } => write!(
                f,
                "step {step} was cancelled and does not end within {:.1} s; hint: does the store \
                 answer? The last commit stays",
                grace.as_secs_f64()
            ),
        }
    }
}

/// Saves that go on behind the run. Dropped, it waits for the one in flight.
#[derive(Debug)]
pub struct Background {
    steps: Arc<Checkpoints>,
    options: BackgroundOptions,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What a save needs, and there is one of.
#[derive(Debug, Default)]
pub(crate) struct Kit {
    arena: Option<Arena>,
    agent: Option<Agent>,
}

/// The kit while a caller has it. Dropped, by a panic too, it goes home: without it nobody could
/// ever save again, and the run would wait for it.
struct Lent<'a> {
    shared: &'a Shared,
    /// `None` once it is passed on.
    kit: Option<Kit>,
}

impl Lent<'_> {
    fn kit(&mut self) -> &mut Kit {
        self.kit.as_mut().expect("it is passed on at the very end")
    }

    fn pass_on(mut self) -> Kit {
        self.kit.take().expect("it is passed on once")
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        if let Some(kit) = self.kit.take() {
            self.shared.lock().kit = Some(kit);
            self.shared.changed.notify_all();
        }
    }
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// At home while nothing is copied or written.
    kit: Option<Kit>,
    /// Copied, and to be written.
    job: Option<(Kit, Snapshot, Arc<Ticket>)>,
    /// The latest save.
    latest: Option<Arc<Ticket>>,
    /// The latest that was committed.
    last: Option<SaveReport>,
    end: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps while `is_so`, until the time is up if there is one.
    fn wait_while(
        &self,
        until: Option<Instant>,
        is_so: impl Fn(&State) -> bool,
    ) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        while is_so(&state) {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            state = match left {
                Some(left) if left.is_zero() => break,
                Some(left) => {
                    let waited = self.changed.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
        state
    }
}

impl Background {
    /// Saves into `steps` from now on, by a thread of this process.
    ///
    /// # Errors
    /// [`storage::Error::Io`] within [`Error::Storage`] if the system gives no thread.
    pub fn new(steps: Arc<Checkpoints>, options: BackgroundOptions) -> Result<Self> {
        Self::start(steps, options, None)
    }

    /// Saves by a process of its own, which goes on with what was copied if this one dies. If it is
    /// the agent that dies, the save is done here, and so are all later ones.
    ///
    /// # Errors
    /// As [`Background::new`].
    pub fn with_agent(
        steps: Arc<Checkpoints>,
        options: BackgroundOptions,
        agent: Agent,
    ) -> Result<Self> {
        steps.admit(agent.owner());
        Self::start(steps, options, Some(agent))
    }

    fn start(
        steps: Arc<Checkpoints>,
        options: BackgroundOptions,
        agent: Option<Agent>,
    ) -> Result<Self> {
        let kit = Some(Kit { arena: None, agent });
        let state = Mutex::new(State { kit, ..State::default() });
        let shared = Arc::new(Shared { state, changed: Condvar::new() });
        let own = (Arc::clone(&steps), Arc::clone(&shared));
        let thread = std::thread::Builder::new().name("ckpt-save".to_owned());
        let thread = thread
            .spawn(move || work(&own.0, &own.1))
            .map_err(|e| storage::Error::from_io("start", "the thread that saves", e))?;
        Ok(Background { steps, options, shared, thread: Some(thread) })
    }

    /// Has the memory for a state of so many bytes given by the system now, rather than by the
    /// first save, of which that would be the longest part.
    ///
    /// # Errors
    /// [`Error::BadInput`] for more than the options allow; what the system says.
    pub fn reserve(&self, bytes: u64) -> Result<()> {
        self.make_room(self.take_kit().kit(), bytes)
    }

    /// Copies the state and returns; the copy is written behind the run. The arguments are those of
    /// [`Checkpoints::save`], and may change as soon as this returns.
    ///
    /// # Errors
    /// [`Error::BadInput`] for what cannot be saved, or does not fit; what the system says of the
    /// memory. Nothing is saved then. What goes wrong later is told by the handle, or by the next
    /// call.
    pub fn save(
        &self,
        step: u64,
        tensors: &[TensorData<'_>],
        blobs: &[Blob<'_>],
        meta: serde_json::Value,
    ) -> Result<Begun> {
        self.steps.check_options(step)?;
        let plan = self.steps.plan_whole(tensors)?;
        plan.check_held(0, &tensors.iter().map(|tensor| tensor.bytes).collect::<Vec<_>>())?;
        save::check_blobs(blobs)?;
        let is_busy = self.shared.lock().kit.is_none();
        if is_busy && self.options.when_busy == WhenBusy::Skip {
            return Ok(Begun { save: None, failed: None });
        }
        let mut kit = self.take_kit();
        let failed = self.take_failure();
        let snapshot = Snapshot::new(step, tensors, blobs, meta);
        let begun = Instant::now();
        let staged = self.stage(kit.kit(), &snapshot, tensors, blobs);
        if let Err(error) = staged {
            drop(kit);
            // The earlier failure is not to be lost for this one.
            if let Some((step, earlier)) = failed {
                log::error!("step {step} was not saved: {earlier}");
            }
            return Err(error);
        }
        let ticket = Arc::new(Ticket::new(step, snapshot.bytes(), begun.elapsed()));
        let kit = kit.pass_on();
        let mut state = self.shared.lock();
        state.latest = Some(Arc::clone(&ticket));
        state.job = Some((kit, snapshot, Arc::clone(&ticket)));
        self.shared.changed.notify_all();
        Ok(Begun { save: Some(SaveHandle::new(ticket)), failed })
    }

    /// Waits for the save in flight. Gives the report of the latest that was committed.
    ///
    /// # Errors
    /// What went wrong with the latest, if that was not told before.
    pub fn wait(&self) -> Result<Option<SaveReport>> {
        let state = self.shared.wait_while(None, |state| state.kit.is_none());
        let last = state.last;
        drop(state);
        match self.take_failure() {
            Some((_, error)) => Err(error),
            None => Ok(last),
        }
    }

    /// For a process that is told to end: finishes the save in flight if that fits into the time,
    /// and cancels it if not, by the rate at which it goes. A part of the time is kept for removing
    /// what a cancelled save has written. The text of the outcome says what was decided and done.
    pub fn finish_within(&self, grace: Duration) -> Finish {
        // Without end, if there is no such moment.
        let until = Instant::now().checked_add(grace);
        let last_call = until.map(|until| until - (grace / 2).min(ABANDON_MAX));
        let (ticket, last) = {
            let state = self.shared.lock();
            match (&state.kit, &state.latest) {
                (None, Some(ticket)) => (Arc::clone(ticket), state.last),
                _ => return Finish::Idle,
            }
        };
        let need = ticket.need(last.as_ref());
        if need.is_some_and(|need| need > grace) {
            ticket.control.cancel();
        }
        drop(self.shared.wait_while(last_call, |state| state.kit.is_none()));
        let late = ticket.need(last.as_ref()).or(need).unwrap_or_default();
        ticket.control.cancel();
        if self.shared.wait_while(until, |state| state.kit.is_none()).kit.is_none() {
            return Finish::Stuck { step: ticket.step, grace };
        }
        match ticket.wait() {
            Ok(report) => Finish::Committed(report),
            Err(Error::Cancelled) => {
                let need = need.filter(|need| *need > grace).unwrap_or(grace + late);
                Finish::Cancelled { step: ticket.step, need, grace }
            }
            Err(error) => Finish::Failed(ticket.step, error),
        }
    }

    fn stage(
        &self,
        kit: &mut Kit,
        snapshot: &Snapshot,
        tensors: &[TensorData<'_>],
        blobs: &[Blob<'_>],
    ) -> Result<()> {
        // An agent reads its orders behind the copy.
        let orders = match &kit.agent {
            Some(_) => serde_json::to_vec(snapshot)
                .expect("strings, numbers and lists always serialize, and all keys are strings"),
            None => Vec::new(),
        };
        self.make_room(kit, snapshot.arena_bytes + orders.len() as u64)?;
        let arena = kit.arena.as_mut().expect("room was made above");
        snapshot.fill(arena, tensors, blobs, self.options.copy_threads)?;
        let start = snapshot.arena_bytes as usize; // fits: the arena has room for it
        arena[start..start + orders.len()].copy_from_slice(&orders);
        // Told before the caller goes on: from here on the agent saves whatever happens here.
        let told = match &mut kit.agent {
            Some(agent) => agent.begin(arena, start, orders.len()),
            None => Ok(()),
        };
        if let Err(error) = told {
            log::error!("saves go on without an agent: {error}");
            kit.agent = None;
        }
        Ok(())
    }

    fn make_room(&self, kit: &mut Kit, bytes: u64) -> Result<()> {
        let max = self.options.staging_bytes_max;
        let len = usize::try_from(bytes).ok().filter(|_| bytes <= max);
        let len = len.ok_or_else(|| Error::BadInput {
            what: format!("{bytes} bytes behind the run"),
            why: format!("there is room for {max}; hint: raise staging_bytes_max"),
        })?;
        if kit.arena.as_ref().is_some_and(|arena| arena.len() >= len) {
            return Ok(());
        }
        // The old one first: there are never two.
        kit.arena = None;
        if let Some(agent) = &mut kit.agent {
            agent.forget();
        }
        let mut arena = if kit.agent.is_some() { Arena::new_shared(len) } else { Arena::new(len) }?;
        arena.populate(self.options.copy_threads)?;
        kit.arena = Some(arena);
        Ok(())
    }

    fn take_kit(&self) -> Lent<'_> {
        let mut state = self.shared.wait_while(None, |state| state.kit.is_none());
        let kit = state.kit.take();
        Lent { shared: &self.shared, kit }
    }

    fn take_failure(&self) -> Option<(u64, Error)> {
        let latest = self.shared.lock().latest.clone()?;
        Some((latest.step, latest.take_failure()?))
    }
}

impl Drop for Background {
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

fn work(steps: &Checkpoints, shared: &Shared) {
    loop {
        let mut state = shared.wait_while(None, |state| state.job.is_none() && !state.end);
        let Some((mut kit, snapshot, ticket)) = state.job.take() else { return };
        drop(state);
        let attempt = || write(steps, &mut kit, &snapshot, &ticket.control);
        // Without its memory nobody could ever save again, and the run would wait for it.
        let outcome = catch_unwind(AssertUnwindSafe(attempt));
        let outcome = outcome.unwrap_or_else(|_| {
            // Nobody knows what it has still to say.
            kit.agent = None;
            let why = "the thread that writes it panicked".to_owned();
            Err(Error::BadInput { what: format!("step {}", snapshot.step), why })
        });
        match &outcome {
            Ok(report) => log::info!("{report}"),
            Err(Error::Cancelled) => log::info!("step {} was cancelled", snapshot.step),
            Err(error) => log::error!("step {} was not saved: {error}", snapshot.step),
        }
        let mut state = shared.lock();
        if let Ok(report) = &outcome {
            state.last = Some(*report);
        }
        ticket.finish(outcome);
        state.kit = Some(kit);
        shared.changed.notify_all();
    }
}

fn write(
    steps: &Checkpoints,
    kit: &mut Kit,
    snapshot: &Snapshot,
    control: &Control,
) -> Result<SaveReport> {
    let mut is_orphaned = false;
    if let Some(agent) = &mut kit.agent {
        match agent.finish(control) {
            Ok(outcome) => return outcome,
            Err(error) => {
                log::error!("the agent is gone, and this process saves from now on: {error}");
                kit.agent = None;
                is_orphaned = true;
            }
        }
    }
    let arena = kit.arena.as_deref().unwrap_or_default();
    let (tensors, blobs) = (snapshot.tensors(arena)?, snapshot.blobs(arena)?);
    if is_orphaned {
        return rescue::save(steps, snapshot, &tensors, &blobs, control);
    }
    steps.save_watched(snapshot.step, &tensors, &blobs, snapshot.meta.clone(), control)
}
