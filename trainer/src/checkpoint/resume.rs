//! Where a run starts: from the newest checkpoint that can be read, or from new weights.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ckpt::{Checkpoint, Checkpoints, Lease};
use recipe::Incompatible;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use storage::{Key, Storage};

use crate::checkpoint::state::{self, JointSaveParts, TrainingProgress};
use crate::config::{Config, LoadFrom, Part};
use crate::launch::rank_group::{self, RankGroup};
use crate::step::Trainer;
use crate::{Error, Result};

/// How long the agent of a killed run may still write what the run had copied.
const AGENT_MAX: Duration = Duration::from_secs(300);

/// The folder of a run's checkpoints.
pub(crate) struct CheckpointFolder {
    store: Arc<dyn Storage>,
    pub(crate) checkpoints: Arc<Checkpoints>,
    /// The second store, to which steps are copied.
    second: Option<Checkpoints>,
}

/// The inputs of a start.
#[derive(Clone, Copy)]
pub(crate) struct Start<'a> {
    pub(crate) config: &'a Config,
    pub(crate) parts: &'a JointSaveParts,
    /// The fingerprint of the corpus.
    pub(crate) data: &'a Value,
    /// On the first rank.
    pub(crate) lease: Option<&'a Lease>,
}

/// Where a run starts, as the first rank decided.
#[derive(Debug, Serialize, Deserialize)]
enum ResumePoint {
    Scratch,
    /// From the first of these steps that is intact; `true` for those in the first store.
    Newest(Vec<(u64, bool)>),
    /// From these parts of the checkpoint that the config names.
    Given(Vec<Part>),
}

impl CheckpointFolder {
    pub(crate) fn open(config: &Config) -> Result<Self> {
        let store = storage::open_url(&config.checkpoint_dir())?;
        let checkpoints = Arc::new(Checkpoints::open(Arc::clone(&store), Key::root()));
        let second = config.checkpoint.drain_to.as_deref().map(storage::open_url).transpose()?;
        let second = second.map(|store| Checkpoints::open(store, Key::root()));
        Ok(CheckpointFolder { store, checkpoints, second })
    }

    /// Takes the lease, and removes the orphans of a killed run.
    pub(crate) fn claim(&self, config: &Config) -> Result<Lease> {
        let started = Instant::now();
        let lease = loop {
            match self.checkpoints.lock() {
                Err(error @ ckpt::Error::Held { .. })
                    if config.checkpoint.agent && started.elapsed() < AGENT_MAX =>
                {
                    log::info!("checkpoint: waiting for a save of the previous run: {error}");
                    std::thread::sleep(Duration::from_secs(1));
                }
                lease => break lease?,
            }
        };
        self.checkpoints.sweep()?;
        Ok(lease)
    }

    /// Fills the trainer as `checkpoint.load` says, and returns the progress of the run. Only the
    /// first rank lists the steps: some nodes see a new folder later than others.
    pub(crate) fn start(
        &self,
        start: &Start<'_>,
        group: &RankGroup,
        trainer: &mut Trainer,
    ) -> Result<TrainingProgress> {
        let (_, json) = group.broadcast("begin", || {
            let chosen = self.choose(start.config)?;
            Ok(((), serde_json::to_string(&chosen).expect("numbers and words have a JSON form")))
        })?;
        let chosen: ResumePoint = serde_json::from_str(&json).map_err(|error| {
            Error::Mismatch(Incompatible::new(
                "cannot read the resume point from rank 0",
                error.to_string(),
                "start all ranks with the same version of this program",
            ))
        })?;
        match (chosen, &start.config.checkpoint.load) {
            (ResumePoint::Newest(steps), _) => self.newest_good(start, group, trainer, &steps),
            (ResumePoint::Given(wanted), LoadFrom::Path(folder)) => {
                let checkpoint = state::open_folder(folder);
                let loaded =
                    checkpoint.and_then(|it| Ok((load(&it, start, group, trainer, &wanted)?, it)));
                let (progress, checkpoint) =
                    agreed(loaded, trainer)?.map_err(|own| own.unwrap_or_else(failed_elsewhere))?;
                let what = if wanted.contains(&Part::Data) {
                    "resuming from"
                } else {
                    "starting with the weights of"
                };
                note(group, || format!("checkpoint: {what} {}", checkpoint.display()));
                Ok(progress)
            }
            (ResumePoint::Given(_) | ResumePoint::Scratch, _) => init(start.config, group, trainer),
        }
    }

    /// Decides where to start.
    fn choose(&self, config: &Config) -> Result<ResumePoint> {
        let wanted = &config.checkpoint.load_parts;
        let is_branch = !wanted.contains(&Part::Data);
        let folder = match &config.checkpoint.load {
            LoadFrom::Auto => return Ok(ResumePoint::Newest(self.candidates()?)),
            LoadFrom::None => None,
            LoadFrom::Path(folder) => Some(folder),
        };
        if is_branch && folder.is_some() {
            let own = self.candidates()?;
            // The run has checkpoints of its own already, and resumes from them.
            return Ok(if own.is_empty() {
                ResumePoint::Given(wanted.clone())
            } else {
                ResumePoint::Newest(own)
            });
        }
        let from = folder.map(|folder| state::open_folder(folder)).transpose()?;
        self.refuse_newer(config, from.as_ref().map(Checkpoint::step))?;
        Ok(from.map_or(ResumePoint::Scratch, |_| ResumePoint::Given(wanted.clone())))
    }

    /// Loads the newest checkpoint of both stores of which every byte read passes its checksum.
    /// Renames newer corrupt ones, because the run will save those steps again. Fails if all are
    /// corrupt: a person must decide.
    fn newest_good(
        &self,
        start: &Start<'_>,
        group: &RankGroup,
        trainer: &mut Trainer,
        steps: &[(u64, bool)],
    ) -> Result<TrainingProgress> {
        let (mut damaged, mut bad) = (Vec::new(), Vec::new());
        for &(step, is_in_first) in steps {
            let from = if is_in_first { Some(&*self.checkpoints) } else { self.second.as_ref() };
            let Some(from) = from else { continue };
            let checkpoint = from.open_step(step).map_err(Error::from);
            let loaded =
                checkpoint.and_then(|it| Ok((load(&it, start, group, trainer, &Part::ALL)?, it)));
            match agreed(loaded, trainer)? {
                Err(own) => {
                    if let Some(error) = own {
                        log::warn!("checkpoint: step {step} is corrupt and skipped: {error}");
                    }
                    damaged.extend(is_in_first.then_some(step));
                    bad.push(format!("step {step} is corrupt"));
                }
                Ok((progress, checkpoint)) => {
                    note(group, || format!("checkpoint: resuming from {}", checkpoint.display()));
                    if group.is_first() {
                        self.set_aside(&damaged, start.lease)?;
                    }
                    return Ok(progress);
                }
            }
        }
        let names = self.store.list_names(&Key::root())?.into_iter();
        let named = names.filter(|name| name.starts_with("step-"));
        bad.extend(named.map(|name| format!("{name} is corrupt")));
        if bad.is_empty() {
            return init(start.config, group, trainer);
        }
        Err(Error::Mismatch(Incompatible {
            operation: format!("cannot load a step of {}", start.config.checkpoint_dir()),
            details: bad,
            hint: "restore one, or move them away to start from scratch",
        }))
    }

    /// The complete steps, each with whether it is in the first store; the newest first, and of
    /// those in both stores that of the first store before the other.
    fn candidates(&self) -> Result<Vec<(u64, bool)>> {
        let first = self.checkpoints.steps()?.into_iter();
        let mut all: Vec<_> = first.map(|step| (step, true)).collect();
        if let Some(second) = &self.second {
            all.extend(second.steps()?.into_iter().map(|step| (step, false)));
        }
        all.sort_unstable_by_key(|&one| Reverse(one));
        Ok(all)
    }

    fn set_aside(&self, steps: &[u64], lease: Option<&Lease>) -> Result<()> {
        let confirm = || lease.map_or(Ok(()), Lease::confirm);
        for step in steps {
            let name = format!("step-{step:012}");
            let aside = Key::new(format!(".damaged-{name}-{}", std::process::id()))?;
            log::warn!("checkpoint: {name} is renamed to {}", self.store.display(&aside));
            confirm()?;
            let name = Key::new(name)?;
            self.store.publish(&name, &aside)?;
            // It may have been a step of the next holder of the lease.
            confirm().or_else(|lost| {
                self.store.publish(&aside, &name).map_err(Error::from).and(Err(lost.into()))
            })?;
        }
        Ok(())
    }

    /// Refuses to write over steps beyond the one that the config starts from.
    fn refuse_newer(&self, config: &Config, start: Option<u64>) -> Result<()> {
        let newest = self.checkpoints.newest()?;
        match newest.filter(|newest| start.is_none_or(|start| newest.step() > start)) {
            None => Ok(()),
            Some(newest) => Err(Error::Mismatch(Incompatible::new(
                format!("cannot start with checkpoint.load = \"{}\"", config.checkpoint.load),
                format!("{} exists, and is not overwritten", newest.display()),
                "checkpoint.load = \"auto\" resumes from it; or set another run.dir",
            ))),
        }
    }
}

/// Fills this rank's part.
fn load(
    checkpoint: &Checkpoint,
    start: &Start<'_>,
    group: &RankGroup,
    trainer: &mut Trainer,
    wanted: &[Part],
) -> Result<TrainingProgress> {
    // Its result is the same on all ranks.
    if wanted.contains(&Part::Data) && group.is_first() {
        state::check_same_run(checkpoint, start.config, start.data)?;
    }
    state::load(checkpoint, start.parts, trainer, wanted)
}

/// Combines the results of loading on all ranks: loaded on all of them, or corrupt on one of them,
/// which has the error, or failed for another reason.
fn agreed<T>(
    loaded: Result<T>,
    trainer: &mut Trainer,
) -> Result<std::result::Result<T, Option<Error>>> {
    let is_damaged = matches!(&loaded, Err(error) if is_damage(error));
    let is_failed = loaded.is_err() && !is_damaged;
    let [any_damaged, any_failed] = rank_group::any(trainer.comm(), [is_damaged, is_failed])?;
    match loaded {
        Err(error) if is_failed => Err(error),
        _ if any_failed => Err(failed_elsewhere()),
        Err(error) => Ok(Err(Some(error))),
        Ok(_) if any_damaged => Ok(Err(None)),
        Ok(done) => {
            trainer.loaded()?;
            Ok(Ok(done))
        }
    }
}

fn failed_elsewhere() -> Error {
    let (operation, text) = ("load the checkpoint".to_owned(), "another rank failed".to_owned());
    Error::Bridge(bridge::Error::Peer { operation, text })
}

fn note(group: &RankGroup, text: impl FnOnce() -> String) {
    if group.is_first() {
        log::info!("{}", text());
    }
}

fn init(config: &Config, group: &RankGroup, trainer: &mut Trainer) -> Result<TrainingProgress> {
    note(group, || format!("checkpoint: none; starting from scratch, seed {}", config.run.seed));
    trainer.init_weights(config.run.seed)?;
    Ok(TrainingProgress::default())
}

/// Whether the bytes are not those that were saved, rather than that they could not be read.
pub(crate) fn is_damage(error: &Error) -> bool {
    use storage::Error as Store;
    match error {
        Error::Ckpt(ckpt::Error::Corrupt { .. } | ckpt::Error::BadManifest { .. }) => true,
        Error::Ckpt(ckpt::Error::Storage(error)) => {
            matches!(
                error,
                Store::NotFound { .. } | Store::Corrupt { .. } | Store::ShortRead { .. }
            )
        }
        _ => false,
    }
}
