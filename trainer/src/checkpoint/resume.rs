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

/// After a run that an agent saved for: what it had copied when it died may still be written.
const AGENT_MAX: Duration = Duration::from_secs(300);

/// The folder of a run's checkpoints.
pub(crate) struct CheckpointFolder {
    store: Arc<dyn Storage>,
    pub(crate) checkpoints: Arc<Checkpoints>,
    /// Where they are copied to.
    far: Option<Checkpoints>,
}

/// Of what a run is that is to begin.
#[derive(Clone, Copy)]
pub(crate) struct Start<'a> {
    pub(crate) config: &'a Config,
    pub(crate) parts: &'a JointSaveParts,
    /// The fingerprint of the corpus.
    pub(crate) data: &'a Value,
    /// The first rank's.
    pub(crate) lease: Option<&'a Lease>,
}

/// Where a run begins, as the first rank found.
#[derive(Debug, Serialize, Deserialize)]
enum ResumePoint {
    Anew,
    /// With the first of these steps that is good; `true` for those of the first store.
    Newest(Vec<(u64, bool)>),
    /// With these parts of the checkpoint that the config names.
    Given(Vec<Part>),
}

impl CheckpointFolder {
    pub(crate) fn open(config: &Config) -> Result<Self> {
        let store = storage::open_url(&config.checkpoint_dir())?;
        let checkpoints = Arc::new(Checkpoints::open(Arc::clone(&store), Key::root()));
        let far = config.checkpoint.drain_to.as_deref().map(storage::open_url).transpose()?;
        let far = far.map(|store| Checkpoints::open(store, Key::root()));
        Ok(CheckpointFolder { store, checkpoints, far })
    }

    /// Keeps other runs out, and removes what a killed one has left.
    pub(crate) fn claim(&self, config: &Config) -> Result<Lease> {
        let begun = Instant::now();
        let lease = loop {
            match self.checkpoints.lock() {
                Err(error @ ckpt::Error::Held { .. })
                    if config.checkpoint.agent && begun.elapsed() < AGENT_MAX =>
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

    /// Fills the trainer as `checkpoint.load` says, and gives how far the run has come. The first
    /// rank looks for what there is: file systems show a new folder to some sooner than to others.
    pub(crate) fn start(
        &self,
        start: &Start<'_>,
        crew: &RankGroup,
        trainer: &mut Trainer,
    ) -> Result<TrainingProgress> {
        let (_, told) = crew.told("begin", || {
            let begin = self.choose(start.config)?;
            Ok(((), serde_json::to_string(&begin).expect("numbers and words have a JSON form")))
        })?;
        let begin: ResumePoint = serde_json::from_str(&told).map_err(|error| {
            Error::Mismatch(Incompatible::new(
                "cannot read the resume point from rank 0",
                error.to_string(),
                "start all ranks with the same version of this program",
            ))
        })?;
        match (begin, &start.config.checkpoint.load) {
            (ResumePoint::Newest(steps), _) => self.newest_good(start, crew, trainer, &steps),
            (ResumePoint::Given(wanted), LoadFrom::Path(folder)) => {
                let checkpoint = state::open_folder(folder);
                let loaded =
                    checkpoint.and_then(|it| Ok((load(&it, start, crew, trainer, &wanted)?, it)));
                let (progress, checkpoint) =
                    agreed(loaded, trainer)?.map_err(|own| own.unwrap_or_else(elsewhere))?;
                let what = if wanted.contains(&Part::Data) {
                    "resuming from"
                } else {
                    "starting with the weights of"
                };
                tell(crew, || format!("checkpoint: {what} {}", checkpoint.display()));
                Ok(progress)
            }
            (ResumePoint::Given(_) | ResumePoint::Anew, _) => anew(start.config, crew, trainer),
        }
    }

    /// Where to begin.
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
            // It has begun already, and goes on with its own.
            return Ok(if own.is_empty() {
                ResumePoint::Given(wanted.clone())
            } else {
                ResumePoint::Newest(own)
            });
        }
        let from = folder.map(|folder| state::open_folder(folder)).transpose()?;
        self.refuse_newer(config, from.as_ref().map(Checkpoint::step))?;
        Ok(from.map_or(ResumePoint::Anew, |_| ResumePoint::Given(wanted.clone())))
    }

    /// The newest checkpoint whose every byte that is wanted passes its checksum, wherever it is.
    /// Damaged ones that are newer are set aside, for the run will save those steps again. If there
    /// are only damaged ones, a person must decide.
    fn newest_good(
        &self,
        start: &Start<'_>,
        crew: &RankGroup,
        trainer: &mut Trainer,
        steps: &[(u64, bool)],
    ) -> Result<TrainingProgress> {
        let (mut damaged, mut bad) = (Vec::new(), Vec::new());
        for &(step, is_near) in steps {
            let from = if is_near { Some(&*self.checkpoints) } else { self.far.as_ref() };
            let Some(from) = from else { continue };
            let checkpoint = from.open_step(step).map_err(Error::from);
            let loaded =
                checkpoint.and_then(|it| Ok((load(&it, start, crew, trainer, &Part::ALL)?, it)));
            match agreed(loaded, trainer)? {
                Err(own) => {
                    if let Some(error) = own {
                        log::warn!("checkpoint: step {step} is corrupt and skipped: {error}");
                    }
                    damaged.extend(is_near.then_some(step));
                    bad.push(format!("step {step} is corrupt"));
                }
                Ok((progress, checkpoint)) => {
                    tell(crew, || format!("checkpoint: resuming from {}", checkpoint.display()));
                    if crew.is_first() {
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
            return anew(start.config, crew, trainer);
        }
        Err(Error::Mismatch(Incompatible {
            operation: format!("cannot load a step of {}", start.config.checkpoint_dir()),
            details: bad,
            hint: "restore one, or move them away to start from scratch",
        }))
    }

    /// The complete steps, and whether they are in the first store; the newest first, and of those
    /// that are in both the near one.
    fn candidates(&self) -> Result<Vec<(u64, bool)>> {
        let near = self.checkpoints.steps()?.into_iter();
        let mut all: Vec<_> = near.map(|step| (step, true)).collect();
        if let Some(far) = &self.far {
            all.extend(far.steps()?.into_iter().map(|step| (step, false)));
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
            // It may have been a successor's.
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

/// Fills one rank's part.
fn load(
    checkpoint: &Checkpoint,
    start: &Start<'_>,
    crew: &RankGroup,
    trainer: &mut Trainer,
    wanted: &[Part],
) -> Result<TrainingProgress> {
    // What it says is the same for all ranks.
    if wanted.contains(&Part::Data) && crew.is_first() {
        state::check_same_run(checkpoint, start.config, start.data)?;
    }
    state::load(checkpoint, start.parts, trainer, wanted)
}

/// Brings together what loading came to on all ranks: done on all of them, or the step is damaged
/// for one of them, which has seen the error, or something else is wrong.
fn agreed<T>(
    loaded: Result<T>,
    trainer: &mut Trainer,
) -> Result<std::result::Result<T, Option<Error>>> {
    let is_damaged = matches!(&loaded, Err(error) if is_damage(error));
    let is_failed = loaded.is_err() && !is_damaged;
    let [any_damaged, any_failed] = rank_group::any(trainer.comm(), [is_damaged, is_failed])?;
    match loaded {
        Err(error) if is_failed => Err(error),
        _ if any_failed => Err(elsewhere()),
        Err(error) => Ok(Err(Some(error))),
        Ok(_) if any_damaged => Ok(Err(None)),
        Ok(done) => {
            trainer.loaded()?;
            Ok(Ok(done))
        }
    }
}

fn elsewhere() -> Error {
    let (operation, text) = ("load the checkpoint".to_owned(), "another rank failed".to_owned());
    Error::Bridge(bridge::Error::Peer { operation, text })
}

fn tell(crew: &RankGroup, text: impl FnOnce() -> String) {
    if crew.is_first() {
        log::info!("{}", text());
    }
}

fn anew(config: &Config, crew: &RankGroup, trainer: &mut Trainer) -> Result<TrainingProgress> {
    tell(crew, || format!("checkpoint: none; starting from scratch, seed {}", config.run.seed));
    trainer.begin_anew(config.run.seed)?;
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
