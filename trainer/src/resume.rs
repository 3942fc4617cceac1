//! Where a run starts: from the newest checkpoint that can be read, or from new weights.

use std::sync::Arc;

use ckpt::{Checkpoint, Checkpoints};
use serde_json::Value;
use storage::{Key, Storage};

use crate::config::{Config, Load};
use crate::state::{self, Progress};
use crate::step::Trainer;
use crate::{Error, Result};

/// The folder of a run's checkpoints.
pub(crate) struct Place {
    pub(crate) store: Arc<dyn Storage>,
    pub(crate) checkpoints: Checkpoints,
}

impl Place {
    pub(crate) fn open(config: &Config) -> Result<Self> {
        let store = storage::open_url(&config.checkpoint_dir())?;
        let checkpoints = Checkpoints::open(Arc::clone(&store), Key::root());
        Ok(Place { store, checkpoints })
    }

    /// Fills the trainer as `checkpoint.load` says, and gives how far the run has come. `data` is
    /// the fingerprint of the corpus.
    pub(crate) fn start(
        &self,
        config: &Config,
        trainer: &mut Trainer,
        data: &Value,
    ) -> Result<Progress> {
        let given = match &config.checkpoint.load {
            Load::Auto => return self.newest_good(config, trainer, data),
            Load::None => None,
            Load::Path(folder) => Some(state::open_folder(folder)?),
        };
        self.refuse_newer(config, given.as_ref().map(Checkpoint::step))?;
        match &given {
            Some(checkpoint) => load(checkpoint, config, trainer, data),
            None => Ok(anew(config)),
        }
    }

    /// The newest checkpoint whose every byte passes its checksum. Damaged ones that are newer are
    /// set aside, for the run will save those steps again. If there are only damaged ones, a person
    /// must decide.
    fn newest_good(
        &self,
        config: &Config,
        trainer: &mut Trainer,
        data: &Value,
    ) -> Result<Progress> {
        let mut damaged = Vec::new();
        for step in self.checkpoints.steps()?.into_iter().rev() {
            let loaded = self
                .checkpoints
                .open_step(step)
                .map_err(Error::from)
                .and_then(|checkpoint| load(&checkpoint, config, trainer, data));
            match loaded {
                Err(error) if is_damage(&error) => {
                    log::warn!("step {step} is damaged and is passed over: {error}");
                    damaged.push(step);
                }
                Err(error) => return Err(error),
                Ok(progress) => {
                    self.set_aside(&damaged)?;
                    return Ok(progress);
                }
            }
        }
        let names = self.store.names(&Key::root())?;
        let steps: Vec<String> =
            names.into_iter().filter(|name| name.starts_with("step-")).collect();
        if steps.is_empty() {
            return Ok(anew(config));
        }
        Err(Error::Mismatch {
            doing: format!("look for a checkpoint in {}", config.checkpoint_dir()),
            details: steps.into_iter().map(|name| format!("{name} is damaged")).collect(),
            hint: "restore one, or move them away to start anew",
        })
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

fn load(
    checkpoint: &Checkpoint,
    config: &Config,
    trainer: &mut Trainer,
    data: &Value,
) -> Result<Progress> {
    state::check_same_run(checkpoint, config, data)?;
    let progress = state::load(checkpoint, trainer)?;
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
