//! Checkpoints behind the run: when they are begun, what follows a commit, and what is done with
//! the time that is left when the run is told to end.
//!
//! A save that fails ends nothing: it is told when it happens, and counted. What was committed
//! before stays, and the next save tries again.

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

/// The bytes of a rank at a tenth of the rate of a slow store, and a minute: when a save of several
/// ranks is given up for lost.
const SLOW_BYTES_PER_S: u64 = 10 << 20;

/// At the end of a run: between two looks at a drain that is not done.
const DRAIN_LOOK: Duration = Duration::from_secs(10);

/// How long a save of which a writer is gone may still find that it was whole.
const LAST_LOOK: Duration = Duration::from_secs(2);

/// What saves a run.
#[derive(Debug)]
pub(crate) struct CheckpointManager {
    way: SaveMode,
    steps: Arc<Checkpoints>,
    parts: JointSaveParts,
    after: Arc<PostCommit>,
    /// Tells the tries of this process from those of others.
    token: String,
    tries: u64,
    failures: u64,
    /// Why the last save failed, if the run waited for it.
    failure: Option<ckpt::Error>,
}

#[derive(Debug)]
enum SaveMode {
    /// The state is copied, and written while the run goes on.
    Behind(AsyncSaver),
    /// It is written from where it lies, and the run waits.
    Waiting,
    /// The store does not answer, and nothing is saved any more.
    Stuck,
}

/// What follows a commit.
#[derive(Debug)]
struct PostCommit {
    steps: Arc<Checkpoints>,
    keep: Retention,
    drain: Option<(Drain, DrainTask)>,
    rank: usize,
    /// Samples before a checkpoint need not be kept near.
    local: Option<Arc<LazyCache>>,
    batch: BatchConfig,
    /// The last that was committed; 0 before the first.
    step: AtomicU64,
}

impl CheckpointManager {
    /// Begins nothing yet but copying to the second store, if the run has one.
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
        // What is on a disk is saved by links, for which the run can wait.
        let is_on_disk = matches!(config.optim.offload, Offload::Nvme(_));
        let way = if config.checkpoint.background && !is_on_disk {
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
            SaveMode::Behind(background)
        } else {
            SaveMode::Waiting
        };
        Ok(CheckpointManager {
            way,
            steps,
            parts,
            after,
            token,
            tries: 0,
            failures: 0,
            failure: None,
        })
    }

    /// Saves that failed so far, as far as that is known.
    pub(crate) fn failures(&self) -> u64 {
        self.failures
    }

    /// The step to which the run would go back now; 0 for its start.
    pub(crate) fn step(&self) -> u64 {
        self.after.step.load(Ordering::Relaxed)
    }

    /// Begins a save. The trainer may go on when this returns.
    ///
    /// # Errors
    /// [`crate::Error::Bridge`] if a graph still holds a weight. A save that fails is told and
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
        // Names of blobs are of the whole step.
        let blobs = [Blob { name: state::CONFIG, bytes: text.as_bytes() }];
        let blobs = if writer == 0 { &blobs[..] } else { &[] };
        self.failure = None;
        let mut copies = Vec::new();
        let outcome =
            match (&self.way, trainer.offloaded.as_mut().and_then(OffloadedState::on_disk)) {
                (SaveMode::Stuck, _) => Err(ckpt::Error::Cancelled),
                (_, Some(state)) => {
                    let together = (plan.writers() > 1).then_some(&together);
                    let saved = self.steps.save_offloaded(step, state, blobs, meta, together);
                    saved.map(|(report, _)| self.saved(&report))
                }
                (SaveMode::Behind(background), None) => {
                    let held = self.parts.held(trainer, &mut copies)?;
                    let begun = background.save_part(step, &plan, &held, blobs, meta, &together);
                    // Why was told when it happened.
                    begun.map(|begun| self.failures += u64::from(begun.failed.is_some()))
                }
                (SaveMode::Waiting, None) => {
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

    /// What follows a save that the run has waited for.
    fn saved(&self, report: &SaveReport) {
        if self.parts.rank() == 0 {
            log::info!("{report}");
        }
        self.after.committed(report);
    }

    /// Waits until the last save is over, and what was committed is in the second store.
    ///
    /// # Errors
    /// What went wrong with the last save.
    pub(crate) fn finish(&mut self) -> Result<()> {
        if let SaveMode::Behind(background) = &self.way {
            background.wait().inspect_err(|_| self.failures += 1)?;
        }
        if let Some(error) = self.failure.take() {
            return Err(error.into());
        }
        let Some((_, draining)) = &self.after.drain else { return Ok(()) };
        loop {
            let status = draining.wait_idle(DRAIN_LOOK);
            if let Some(failure) = status.failure {
                self.failures += 1;
                log::error!("drain: copy to the second store failed: {failure}");
                return Ok(());
            }
            if !status.busy {
                return Ok(());
            }
            log::info!("drain: waiting for the second store");
        }
    }

    /// Ends what is under way after a rank was lost: it can commit only if that rank's share is
    /// there already, and would otherwise wait for it.
    pub(crate) fn give_up(&mut self) {
        if let Err(error) = self.finish_until(Some(Instant::now() + LAST_LOOK)) {
            log::warn!("checkpoint: {}", storage::one_line(&error));
        }
    }

    /// For a run that is told to end: gives the save in flight, if there is one, the time until
    /// then. Says whether there is time for another.
    ///
    /// # Errors
    /// What went wrong with it.
    pub(crate) fn finish_until(&mut self, until: Option<Instant>) -> Result<bool> {
        if let Some(error) = self.failure.take() {
            return Err(error.into());
        }
        let SaveMode::Behind(background) = &self.way else {
            return Ok(!matches!(self.way, SaveMode::Stuck));
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
                // Its end would wait for the store. What it has begun the next start sweeps.
                std::mem::forget(std::mem::replace(&mut self.way, SaveMode::Stuck));
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
            // Each save was summed as it was written, and a drain reads it again; to read all of it
            // here would take the store from the run.
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

    /// By the thread that saves. The first rank looks after the steps of all.
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
