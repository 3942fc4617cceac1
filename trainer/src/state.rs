//! A trainer to a checkpoint and back.
//!
//! A checkpoint holds every weight and both its moments in f32, whatever the run computes in: the
//! bf16 copies follow from the weights. So its `model` files are what Hugging Face opens, a run can
//! change its precision, and the rest of the state is one number, the samples consumed. Everything
//! else is in the resolved config, which is a blob of the checkpoint, and in its `meta`:
//!
//! ```text
//! {"step":120,"samples_consumed":1920,"libtorch":"2.11.0","data":{"tokens":..}}
//! ```

use bridge::runtime::torch_version;
use ckpt::{Blob, Checkpoint, Checkpoints, Dtype, Group, SaveReport, TensorData, TensorRead};
use serde_json::{Value, json};
use storage::Key;

use crate::config::{Config, Effect};
use crate::model::ParamSpec;
use crate::step::Trainer;
use crate::{Error, Result};

/// The blob with the resolved config.
const CONFIG: &str = "config.toml";

/// The groups of [`Trainer::state`].
const GROUPS: [Group; 3] = [Group::Model, Group::ExpAvg, Group::ExpAvgSq];

// Tensors are lent to the checkpoint as they lie in memory, and it keeps little-endian numbers.
const _: () = assert!(cfg!(target_endian = "little"));

/// How far a run has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Optimizer steps done.
    pub step: u64,
    /// Samples consumed.
    pub samples: u64,
}

/// Saves a trainer. `data` is the corpus's fingerprint.
///
/// # Errors
/// [`Error::Ckpt`], or [`Error::Bridge`] if a graph still holds a weight.
pub fn save(
    checkpoints: &Checkpoints,
    trainer: &Trainer,
    progress: Progress,
    config: &Config,
    data: &Value,
) -> Result<SaveReport> {
    let shapes: Vec<Vec<u64>> = trainer.specs().iter().map(ParamSpec::shape_u64).collect();
    let mut tensors = Vec::new();
    for (group, list) in GROUPS.into_iter().zip(trainer.state()) {
        for ((spec, shape), tensor) in trainer.specs().iter().zip(&shapes).zip(list) {
            // Padding comes last, and is not kept.
            let bytes = &bridge::bytes(tensor)?[..4 * spec.numel()];
            tensors.push(TensorData { name: &spec.name, group, dtype: Dtype::F32, shape, bytes });
        }
    }
    let text = config.resolved().to_toml();
    let blob = Blob { name: CONFIG, bytes: text.as_bytes() };
    let meta = json!({
        "step": progress.step,
        "samples_consumed": progress.samples,
        "libtorch": torch_version(),
        "data": data,
    });
    Ok(checkpoints.save(progress.step, &tensors, &[blob], meta)?)
}

/// Fills a trainer from a checkpoint. The caller has checked their configs ([`check_same_run`]).
///
/// # Errors
/// [`Error::Ckpt`]; [`Error::Mismatch`] if a tensor is absent or of another kind.
pub fn load(checkpoint: &Checkpoint, trainer: &mut Trainer) -> Result<Progress> {
    let specs = trainer.specs().to_vec();
    for (group, list) in GROUPS.into_iter().zip(trainer.state_mut()) {
        load_group(checkpoint, group, &specs, list)?;
    }
    let number = |key: &str| {
        checkpoint.meta()[key].as_u64().ok_or_else(|| Error::Mismatch {
            doing: format!("load {}", checkpoint.display()),
            details: vec![format!("its meta has no number '{key}'")],
            hint: "it was not saved by this trainer; `feedline inspect` tells what is in it",
        })
    };
    Ok(Progress { step: number("step")?, samples: number("samples_consumed")? })
}

/// Fills tensors with one group of a checkpoint.
///
/// # Errors
/// As [`load`].
pub fn load_group(
    checkpoint: &Checkpoint,
    group: Group,
    specs: &[ParamSpec],
    into: &mut [tch::Tensor],
) -> Result<()> {
    let mut details = Vec::new();
    for spec in specs {
        let due = spec.shape_u64();
        match checkpoint.tensor(&spec.name, group) {
            Ok(entry) if entry.dtype == Dtype::F32 && entry.shape == due => {}
            Ok(entry) => details.push(format!(
                "{}: got {:?} {:?}, due {:?} {due:?}",
                spec.name,
                entry.dtype,
                entry.shape,
                Dtype::F32
            )),
            Err(error) => details.push(error.to_string()),
        }
    }
    if !details.is_empty() {
        let doing = format!("load {}", checkpoint.display());
        let hint = "the checkpoint is of another model, or was not saved by this trainer";
        return Err(Error::Mismatch { doing, details, hint });
    }
    let reads = specs.iter().zip(into).map(|(spec, tensor)| {
        let into = &mut bridge::bytes_mut(tensor)?[..4 * spec.numel()];
        Ok(TensorRead { name: &spec.name, group, into })
    });
    Ok(checkpoint.read_tensors(reads.collect::<Result<Vec<_>>>()?)?)
}

/// The resolved config of the run that saved a checkpoint.
///
/// # Errors
/// [`Error::Ckpt`] if there is none, [`Error::Config`] if this trainer cannot read it.
pub fn config_of(checkpoint: &Checkpoint) -> Result<Config> {
    let bytes = checkpoint.blob(CONFIG)?;
    let name = format!("{}/{CONFIG}", checkpoint.display());
    Ok(Config::from_toml(&name, &String::from_utf8_lossy(&bytes))?)
}

/// Refuses a checkpoint of another run, naming every key that differs; warns of what keeps the
/// resumed run from ending in the bits of an uninterrupted one. `data` is the fingerprint of the
/// corpus at hand.
///
/// # Errors
/// [`Error::Mismatch`], or as [`config_of`].
pub fn check_same_run(checkpoint: &Checkpoint, config: &Config, data: &Value) -> Result<()> {
    let mut details = Vec::new();
    for difference in config.differences(&config_of(checkpoint)?) {
        let (key, there, here) = (&difference.key, &difference.there, &difference.here);
        let text = format!("{key}: {there} in the checkpoint, {here} in the config");
        match difference.effect {
            Effect::OtherRun => details.push(text),
            Effect::OtherBits => log::warn!("resume: not bit for bit: {text}"),
        }
    }
    let (there, here) = (&checkpoint.meta()["data"], data);
    if there != here {
        details.push(format!("corpus: {there} in the checkpoint, {here} here"));
    }
    let (there, here) = (&checkpoint.meta()["libtorch"], torch_version());
    if there.as_str() != Some(&here) {
        log::warn!("resume: not bit for bit: libtorch {there} in the checkpoint, {here} here");
    }
    if details.is_empty() {
        return Ok(());
    }
    Err(Error::Mismatch {
        doing: format!("resume from {}", checkpoint.display()),
        details,
        hint: "take the config of that run, or another run.dir for a new one",
    })
}

/// Opens one checkpoint by the name of its folder, `.../step-000000120`.
///
/// # Errors
/// [`Error::Mismatch`] for another kind of name, [`Error::Ckpt`] if it is absent or damaged.
pub fn open_folder(folder: &str) -> Result<Checkpoint> {
    let (store, key) = storage::locate(folder.trim_end_matches('/'))?;
    let step = key.name().strip_prefix("step-").and_then(|digits| digits.parse().ok());
    let step = step.ok_or_else(|| Error::Mismatch {
        doing: format!("open the checkpoint {folder}"),
        details: vec![format!("got a folder '{}', due one step-000000120", key.name())],
        hint: "name one step, as `ls` of the checkpoints' folder shows them",
    })?;
    Ok(Checkpoints::open(store, Key::root()).open_step(step)?)
}
