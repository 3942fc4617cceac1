use ckpt::{Checkpoint, Checkpoints, Group};
use recipe::Incompatible;
use storage::{Key, Location};
use tch::{Device, Kind, Tensor};

use crate::checkpoint::state;
use crate::config::{Config, Family};
use crate::model::{Micro, Model, Stage, Tp};
use crate::{Error, Result, device};

/// A trained model for inference: whole, on one rank, in f32, whatever the dtype and the number of
/// ranks of its training.
#[derive(Debug)]
pub struct Trained {
    config: Config,
    pub(super) stage: Stage,
    pub(super) leaves: Vec<Tensor>,
    device: Device,
    step: u64,
}

impl Trained {
    /// Loads the weights of a checkpoint: `place` is the folder of one step, of a run's
    /// checkpoints, or of a run, whose newest complete checkpoint is taken. One that was not saved
    /// by this trainer has no config; `config` is used in its place, if it is given.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if there is none or its model differs, [`Error::Ckpt`] if it cannot
    /// be read.
    pub fn open(place: &str, config: Option<Config>) -> Result<Self> {
        let checkpoint = find(place)?;
        let config = match config {
            Some(config) => config,
            None => state::config_of(&checkpoint)?,
        };
        let model = Model::new(&config.model, 1);
        let stage = model.stage(0..model.units(), &Tp::alone(), |_| false);
        let zeros = |at| {
            let options = (Kind::Float, Device::Cpu);
            Ok(Tensor::f_zeros(stage.local_shape(at), options)?)
        };
        let mut params = (0..model.params().len()).map(zeros).collect::<Result<Vec<Tensor>>>()?;
        state::load_group(&checkpoint, Group::Model, model.params(), &mut params)?;
        let device = device::choose(&config, 0)?;
        let params = params.iter().map(|param| Ok(param.f_to_device(device)?));
        let leaves = stage.leaves(&params.collect::<Result<Vec<Tensor>>>()?, Kind::Float)?;
        Ok(Trained { config, stage, leaves, device, step: checkpoint.step() })
    }

    /// The config of the run.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The device of the computation.
    #[must_use]
    pub fn device(&self) -> Device {
        self.device
    }

    /// The step of the checkpoint.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The input of the head of a decoder: `[rows x len, hidden]`.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for a model that is not only a decoder, [`Error::Torch`].
    pub fn hidden(&self, micro: &Micro) -> Result<Tensor> {
        if self.config.model.family != Family::Gpt {
            return Err(Error::Mismatch(Incompatible::new(
                "cannot compute the probability of a text",
                format!("expected model.family gpt, found {:?}", self.config.model.family),
                "`eval.every` logs the loss of other families",
            )));
        }
        Ok(self.stage.infer(&self.leaves, micro, Vec::new())?.swap_remove(0))
    }

    /// Logits of the vocabulary, `[tokens, vocab]`, for inputs of the head, `[tokens, hidden]`.
    ///
    /// # Errors
    /// [`Error::Torch`].
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        self.stage.logits(&self.leaves, hidden)
    }

    /// Refuses tokens that are not of this vocabulary.
    ///
    /// # Errors
    /// [`Error::Mismatch`].
    pub fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        let vocab = self.config.model.vocab;
        match tokens.iter().find(|token| u64::from(**token) >= vocab) {
            None => Ok(()),
            Some(token) => Err(Error::Mismatch(Incompatible::new(
                "cannot read tokens",
                format!("expected ids below {vocab}, found token {token}"),
                "use the tokenizer of the model",
            ))),
        }
    }
}

/// The checkpoint that a path on the command line names.
fn find(place: &str) -> Result<Checkpoint> {
    let place = Location::new(place);
    if place.file_name().starts_with("step-") {
        return state::open_folder(&place.to_string());
    }
    let below = place.join("ckpt");
    for folder in [&below, &place] {
        let checkpoints = Checkpoints::open(folder.open()?, Key::root());
        if let Some(checkpoint) = checkpoints.newest()? {
            return Ok(checkpoint);
        }
    }
    Err(Error::Mismatch(Incompatible::new(
        format!("cannot find a checkpoint in {place}"),
        format!("no complete step-* there or in {below}"),
        "name the folder of a run, of its checkpoints, or of one step",
    )))
}
