//! Where a run starts: from the newest checkpoint that can be read, or from new weights.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ckpt::{Checkpoint, Checkpoints, Lease};
use serde_json::Value;
use storage::{Key, Storage};

use crate::config::{Config, Load, Part};
use crate::crew::Crew;
use crate::state::{self, Parts, Progress};
use crate::step::Trainer;
use crate::{Error, Result};

/// After a run that an agent saved for: what it had copied when it died may still be written.
const AGENT_MAX: Duration = Duration::from_secs(300);

/// The folder of a run's checkpoints.
pub(crate) struct Place {
    store: Arc<dyn Storage>,
    pub(crate) checkpoints: Arc<Checkpoints>,
    /// Where they are copied to.
    far: Option<Checkpoints>,
}

/// Of what a run is that is to begin.
#[derive(Clone, Copy)]
pub(crate) struct Start<'a> {
    pub(crate) config: &'a Config,
    pub(crate) parts: &'a Parts,
    /// The fingerprint of the corpus.
    pub(crate) data: &'a Value,
}

impl Place {
    pub(crate) fn open(config: &Config) -> Result<Self> {
        let store = storage::open_url(&config.checkpoint_dir())?;
        let checkpoints = Arc::new(Checkpoints::open(Arc::clone(&store), Key::root()));
        let far = config.checkpoint.drain_to.as_deref().map(storage::open_url).transpose()?;
        let far = far.map(|store| Checkpoints::open(store, Key::root()));
        Ok(Place { store, checkpoints, far })
    }

    /// Keeps other runs out, and removes what a killed one has left.
    pub(crate) fn claim(&self, config: &Config) -> Result<Lease> {
        let begun = Instant::now();
        let lease = loop {
            match self.checkpoints.lock() {
                Err(error @ ckpt::Error::Held { .. })
                    if config.checkpoint.agent && begun.elapsed() < AGENT_MAX =>
                {
                    log::info!("checkpoint: waiting for the last save of the run before: {error}");
                    std::thread::sleep(Duration::from_secs(1));
                }
                lease => break lease?,
            }
        };
        self.checkpoints.sweep()?;
        Ok(lease)
    }

    /// Fills the trainer as `checkpoint.load` says, and gives how far the run has come.
    pub(crate) fn start(
        &self,
        start: &Start<'_>,
        _crew: &Crew,
        trainer: &mut Trainer,
    ) -> Result<Progress> {
        let config = start.config;
        let is_branch = !config.checkpoint.load_parts.contains(&Part::Data);
        let given = match &config.checkpoint.load {
            Load::Auto => return self.newest_good(start, trainer),
            // It has begun already, and goes on with its own.
            Load::Path(_) if is_branch && self.has_steps()? => {
                return self.newest_good(start, trainer);
            }
            Load::None => None,
            Load::Path(folder) => Some(state::open_folder(folder)?),
        };
        let from = given.as_ref().filter(|_| !is_branch);
        self.refuse_newer(config, from.map(Checkpoint::step))?;
        let Some(checkpoint) = &given else { return Ok(anew(config)) };
        if is_branch {
            let progress = state::load(checkpoint, start.parts, trainer, &[Part::Model])?;
            trainer.loaded()?;
            log::info!("checkpoint: starting with the weights of {}", checkpoint.display());
            return Ok(progress);
        }
        load(checkpoint, start, trainer)
    }

    fn has_steps(&self) -> Result<bool> {
        let far =
            self.far.as_ref().map_or(Ok(false), |far| far.newest().map(|one| one.is_some()))?;
        Ok(far || self.checkpoints.newest()?.is_some())
    }

    /// The newest checkpoint whose every byte passes its checksum, wherever it is. Damaged ones
    /// that are newer are set aside, for the run will save those steps again. If there are only
    /// damaged ones, a person must decide.
    fn newest_good(&self, start: &Start<'_>, trainer: &mut Trainer) -> Result<Progress> {
        let (mut damaged, mut bad) = (Vec::new(), Vec::new());
        for (step, is_near, from) in self.candidates()? {
            let loaded = from
                .open_step(step)
                .map_err(Error::from)
                .and_then(|checkpoint| load(&checkpoint, start, trainer));
            match loaded {
                Err(error) if is_damage(&error) => {
                    log::warn!("step {step} is damaged and is passed over: {error}");
                    damaged.extend(is_near.then_some(step));
                    bad.push(format!("step {step} is damaged"));
                }
                Err(error) => return Err(error),
                Ok(progress) => {
                    self.set_aside(&damaged)?;
                    return Ok(progress);
                }
            }
        }
        let names = self.store.names(&Key::root())?.into_iter();
        let named = names.filter(|name| name.starts_with("step-"));
        bad.extend(named.map(|name| format!("{name} is damaged")));
        if bad.is_empty() {
            return Ok(anew(start.config));
        }
        Err(Error::Mismatch {
            doing: format!("look for a checkpoint in {}", start.config.checkpoint_dir()),
            details: bad,
            hint: "restore one, or move them away to start anew",
        })
    }

    /// The complete steps, the newest first; of those that are in both stores the near one first.
    fn candidates(&self) -> Result<Vec<(u64, bool, &Checkpoints)>> {
        let near = self.checkpoints.steps()?.into_iter();
        let mut all: Vec<_> = near.map(|step| (step, true, &*self.checkpoints)).collect();
        if let Some(far) = &self.far {
            all.extend(far.steps()?.into_iter().map(|step| (step, false, far)));
        }
        all.sort_by_key(|&(step, is_near, _)| Reverse((step, is_near)));
        Ok(all)
    }

    fn set_aside(&self, steps: &[u64]) -> Result<()> {
        for step in steps {
            let name = format!("step-{step:012}");
            let aside = Key::new(format!(".damaged-{name}-{}", std::process::id()))?;
            log::warn!("{name} moves to {}", self.store.display(&aside));
            self.store.publish(&Key::new(name)?, &aside)?;
        }
        Ok(())
    }

    /// Refuses to write over steps beyond the one that the config starts from.
    fn refuse_newer(&self, config: &Config, start: Option<u64>) -> Result<()> {
        let newest = self.checkpoints.newest()?;
        match newest.filter(|newest| start.is_none_or(|start| newest.step() > start)) {
            None => Ok(()),
            Some(newest) => Err(Error::Mismatch {
                doing: format!("start with checkpoint.load = \"{}\"", config.checkpoint.load),
                details: vec![format!("{} is there, and is not overwritten", newest.display())],
                hint: "checkpoint.load = \"auto\" goes on from it; another run.dir starts afresh",
            }),
        }
    }
}

fn load(checkpoint: &Checkpoint, start: &Start<'_>, trainer: &mut Trainer) -> Result<Progress> {
    state::check_same_run(checkpoint, start.config, start.data)?;
    let progress = state::load(checkpoint, start.parts, trainer, &Part::ALL)?;
    trainer.loaded()?;
    log::info!("checkpoint: going on from {}", checkpoint.display());
    Ok(progress)
}

fn anew(config: &Config) -> Progress {
    log::info!("checkpoint: none, starting anew with seed {}", config.run.seed);
    Progress::default()
}

/// Whether the bytes are not those that were saved, rather than that they could not be read.
fn is_damage(error: &Error) -> bool {
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
