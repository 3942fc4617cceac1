//! The saves of a run: when they start, what follows a commit, and how the remaining time is used
//! when the run is asked to end.
//!
//! A failed save does not end the run: it is logged and counted. Earlier commits stay, and the next
//! save tries again.

use std::num::NonZeroU64;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ckpt::{
    Agent, AsyncSaveOptions, AsyncSaver, Blob, Check, CheckpointOptions, Checkpoints, Drain,
    DrainOptions, DrainTask, Finish, JointSaveOptions, LivenessTimeouts, Retention, SaveReport,
};
use loader::cache::LazyCache;
use serde_json::Value;
use storage::Key;

use crate::Result;
use crate::checkpoint::state::{self, JointSaveParts, TrainingProgress};
use crate::config::{BatchConfig, Config, Offload};
use crate::step::Trainer;
use crate::step::offloaded_state::OffloadedState;

/// A tenth of the rate of a slow store. A joint save times out after a minute and the time that the
/// bytes of the rank take at this rate.
const SLOW_BYTES_PER_S: u64 = 10 << 20;

/// At the end of a run: the time between two checks of an unfinished drain.
const DRAIN_POLL: Duration = Duration::from_secs(10);

/// How long a save that lost a writer may take to find that it was complete.
const LAST_CHECK: Duration = Duration::from_secs(2);

/// Saves the state of a run.
#[derive(Debug)]
pub(crate) struct CheckpointManager {
    mode: SaveMode,
    steps: Arc<Checkpoints>,
    parts: JointSaveParts,
    after: Arc<PostCommit>,
    /// Distinguishes the tries of this process from those of others.
    token: String,
    tries: u64,
    failures: u64,
    /// Why the last save failed, if the run waited for it.
    failure: Option<ckpt::Error>,
}

#[derive(Debug)]
enum SaveMode {
    /// The state is copied, and written while the run continues.
    Background(AsyncSaver),
    /// The state is written from its own memory, and the run waits.
    Blocking,
    /// The store does not answer; later saves fail at once.
    Stuck,
}

/// What follows a commit.
#[derive(Debug)]
struct PostCommit {
    steps: Arc<Checkpoints>,
    keep: Retention,
    drain: Option<(Drain, DrainTask)>,
    rank: usize,
    /// The local cache, which may drop samples before a checkpoint.
    local: Option<Arc<LazyCache>>,
    batch: BatchConfig,
    /// The last committed step; 0 before the first.
    step: AtomicU64,
}

impl CheckpointManager {
    /// Starts nothing yet except copying to the second store, if the run has one.
    pub(crate) fn new(
        config: &Config,
        steps: Arc<Checkpoints>,
        parts: JointSaveParts,
        start: TrainingProgress,
        token: String,
        agent: Option<Command>,
        local: Option<Arc<LazyCache>>,
    ) -> Result<Self> {
        let after = PostCommit::new(config, Arc::clone(&steps), parts.rank(), start.step, local)?;
        let after = Arc::new(after);
        // State on a disk is saved by links, for which the run can wait.
        let is_on_disk = matches!(config.optim.offload, Offload::Nvme(_));
        let mode = if config.checkpoint.background && !is_on_disk {
            let options = AsyncSaveOptions::default();
            let steps = Arc::clone(&steps);
            let background = match agent.filter(|_| config.checkpoint.agent) {
                Some(command) => {
                    let (url, limits) = (config.checkpoint_dir(), CheckpointOptions::default());
                    let agent =
                        Agent::start(command, &url, "", limits, LivenessTimeouts::default())?;
                    log::info!("checkpoint: process {} writes the checkpoints", agent.pid());
                    AsyncSaver::with_agent(steps, options, agent)?
                }
                None => AsyncSaver::new(steps, options)?,
            };
            let follow = Arc::clone(&after);
            background.after_commit(move |report, _| follow.committed(report));
            SaveMode::Background(background)
        } else {
            SaveMode::Blocking
        };
        Ok(CheckpointManager {
            mode,
            steps,
            parts,
            after,
            token,
            tries: 0,
            failures: 0,
            failure: None,
        })
    }

    /// Saves that are known to have failed so far.
    pub(crate) fn failures(&self) -> u64 {
        self.failures
    }

    /// The step from which the run would resume now; 0 for its start.
    pub(crate) fn step(&self) -> u64 {
        self.after.step.load(Ordering::Relaxed)
    }

    /// Starts a save. The trainer may continue when this returns.
    ///
    /// # Errors
    /// [`crate::Error::Bridge`] if a graph still holds a weight. A failed save is logged and
    /// counted.
    pub(crate) fn save(
        &mut self,
        trainer: &mut Trainer,
        progress: TrainingProgress,
        config: &Config,
        data: &Value,
    ) -> Result<()> {
        self.tries += 1;
        let (plan, writer) = (Arc::clone(self.parts.plan()), self.parts.rank());
        let token = format!("{}-{}", self.token, self.tries);
        let seconds = 60 + plan.bytes(writer) / SLOW_BYTES_PER_S;
        let together =
            JointSaveOptions { token: &token, writer, deadline: Duration::from_secs(seconds) };
        let (step, meta) = (progress.step, state::meta(trainer, progress, data));
        let text = config.resolved().to_toml();
        // A blob is unique in its step, so one rank writes it.
        let blobs = [Blob { name: state::CONFIG, bytes: text.as_bytes() }];
        let blobs = if writer == 0 { &blobs[..] } else { &[] };
        self.failure = None;
        let mut copies = Vec::new();
        let outcome =
            match (&self.mode, trainer.offloaded.as_mut().and_then(OffloadedState::on_disk)) {
                (SaveMode::Stuck, _) => Err(ckpt::Error::Cancelled),
                (_, Some(state)) => {
                    let together = (plan.writers() > 1).then_some(&together);
                    let saved = self.steps.save_offloaded(step, state, blobs, meta, together);
                    saved.map(|(report, _)| self.saved(&report))
                }
                (SaveMode::Background(background), None) => {
                    let held = self.parts.held(trainer, &mut copies)?;
                    let started = background.save_part(step, &plan, &held, blobs, meta, &together);
                    // The saver logged the reason when it failed.
                    started.map(|start| self.failures += u64::from(start.failed.is_some()))
                }
                (SaveMode::Blocking, None) => {
                    let held = self.parts.held(trainer, &mut copies)?;
                    let saved = match plan.writers() {
                        1 => self.steps.save_plan(step, &plan, &[held], blobs, meta),
                        _ => self.steps.save_together(step, &plan, &held, blobs, meta, &together),
                    };
                    saved.map(|report| self.saved(&report))
                }
            };
        if let Err(error) = outcome {
            log::error!("step {step} was not saved: {error}");
            self.failures += 1;
            self.failure = Some(error);
        }
        Ok(())
    }

    /// Does what follows a save that the run has waited for.
    fn saved(&self, report: &SaveReport) {
        if self.parts.rank() == 0 {
            log::info!("{report}");
        }
        self.after.committed(report);
    }

    /// Waits until the last save has ended, and all commits are in the second store.
    ///
    /// # Errors
    /// The error of the last save.
    pub(crate) fn finish(&mut self) -> Result<()> {
        if let SaveMode::Background(background) = &self.mode {
            background.wait().inspect_err(|_| self.failures += 1)?;
        }
        if let Some(error) = self.failure.take() {
            return Err(error.into());
        }
        let Some((_, draining)) = &self.after.drain else { return Ok(()) };
        // The hook of the last commit runs after the save has ended, and maybe not before this.
        draining.wake();
        let mut status = draining.wait_idle(DRAIN_POLL);
        while status.busy && status.failure.is_none() {
            log::info!("drain: waiting for the second store");
            status = draining.wait_idle(DRAIN_POLL);
        }
        if let Some(failure) = status.failure {
            self.failures += 1;
            log::error!("drain: copy to the second store failed: {failure}");
        }
        Ok(())
    }

    /// Ends the save in flight after a rank was lost: it can commit only if that rank's share is
    /// stored already, and would otherwise wait for it.
    pub(crate) fn give_up(&mut self) {
        if let Err(error) = self.finish_until(Some(Instant::now() + LAST_CHECK)) {
            log::warn!("checkpoint: {}", storage::one_line(&error));
        }
    }

    /// For a run that is asked to end: waits for the save in flight, if there is one, at most
    /// until `until`. Returns whether there is time for another.
    ///
    /// # Errors
    /// The error of that save.
    pub(crate) fn finish_until(&mut self, until: Option<Instant>) -> Result<bool> {
        if let Some(error) = self.failure.take() {
            return Err(error.into());
        }
        let SaveMode::Background(background) = &self.mode else {
            return Ok(!matches!(self.mode, SaveMode::Stuck));
        };
        let left = |until: Instant| until.saturating_duration_since(Instant::now());
        let finish = background.finish_within(until.map_or(Duration::MAX, left));
        let text = finish.to_string();
        match finish {
            Finish::Idle => return Ok(true),
            Finish::Committed(_) => {
                log::info!("checkpoint: {text}");
                return Ok(true);
            }
            Finish::Cancelled { .. } => log::warn!("checkpoint: {text}"),
            Finish::Failed(_, error) => {
                self.failures += 1;
                return Err(error.into());
            }
            Finish::Stuck { .. } => {
                log::error!("checkpoint: {text}");
                // Dropping it would wait for the store. The next start sweeps its orphans.
                std::mem::forget(std::mem::replace(&mut self.mode, SaveMode::Stuck));
            }
        }
        Ok(false)
    }
}

impl PostCommit {
    fn new(
        config: &Config,
        steps: Arc<Checkpoints>,
        rank: usize,
        start: u64,
        local: Option<Arc<LazyCache>>,
    ) -> Result<Self> {
        let (config, batch) = (&config.checkpoint, config.batch.clone());
        let keep = Retention {
            keep_last: usize::try_from(config.keep.last).unwrap_or(usize::MAX),
            keep_every: config.keep.every.and_then(NonZeroU64::new),
            // Each save was checksummed as it was written, and a drain reads it again; reading all
            // of it here would take bandwidth of the store from the run.
            check: Check::Lengths,
        };
        let drain = match config.drain_to.as_deref().filter(|_| rank == 0) {
            Some(url) => {
                let to = Arc::new(Checkpoints::open(storage::open_url(url)?, Key::root()));
                let options = DrainOptions { retention: keep, ..DrainOptions::default() };
                let drain = || Drain::new(Arc::clone(&steps), Arc::clone(&to), options);
                Some((drain(), drain().start()?))
            }
            None => None,
        };
        Ok(PostCommit { steps, keep, drain, rank, local, batch, step: AtomicU64::new(start) })
    }

    /// Called by the thread that saves. The first rank applies the retention for all.
    fn committed(&self, report: &SaveReport) {
        self.step.store(report.step, Ordering::Relaxed);
        if let Some(local) = &self.local {
            local.checkpointed(self.batch.samples_after(report.step));
        }
        if self.rank > 0 {
            return;
        }
        let undrained = match &self.drain {
            Some((drain, draining)) => {
                draining.wake();
                drain.pending()
            }
            None => Ok(Vec::new()),
        };
        let kept = undrained.and_then(|undrained| self.steps.retain_by(&self.keep, &undrained));
        match kept {
            Ok(plan) if plan.delete.is_empty() => {}
            Ok(plan) => log::debug!("checkpoint: deleted steps {:?}", plan.delete),
            Err(error) => log::warn!("checkpoint: older steps are not deleted: {error}"),
        }
    }
}
