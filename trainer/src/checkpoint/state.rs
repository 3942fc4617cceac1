//! A trainer to a checkpoint and back.
//!
//! A checkpoint holds every weight and both its moments in f32, whatever the run computes in: the
//! bf16 copies derive from the weights. So its `model` files are what Hugging Face opens, a run can
//! change its precision, and the rest of the state is one number, the samples consumed. Everything
//! else is in the resolved config, which is a blob of the checkpoint, and in its `meta`:
//!
//! ```text
//! {"step":120,"samples_consumed":1920,"loss_scale":null,"libtorch":"2.11.0","data":{"tokens":..}}
//! ```

use std::sync::Arc;

use bridge::runtime::torch_version;
use ckpt::{
    Checkpoint, Checkpoints, Dtype, Group, RegionRequest, SavePlan, TensorRead, TensorSpec,
};
use recipe::Incompatible;
use recipe::scaler::Scaler;
use serde::Deserialize as _;
use serde_json::{Value, json};
use storage::Key;
use tch::Tensor;

use crate::config::{self, Config, ResumeEffect};
use crate::device::to_host;
use crate::model::ParamSpec;
use crate::parallel::setup::GROUPS;
use crate::step::Trainer;
use crate::step::local_tensors::{ITEM_BYTES, LocalTensor, LocalTensorMut, cut, range};
use crate::{Error, Result};

/// The blob with the resolved config.
pub(crate) const CONFIG: &str = "config.toml";

// Tensors are passed to the checkpoint as they are in memory, and it stores little-endian numbers.
const _: () = assert!(cfg!(target_endian = "little"));

/// The progress of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrainingProgress {
    /// Steps done.
    pub step: u64,
    /// Samples consumed.
    pub samples: u64,
}

/// The save plan of all ranks of a run, and which of them this one is.
#[derive(Clone, Debug)]
pub struct JointSaveParts {
    plan: Arc<SavePlan>,
    rank: usize,
}

impl JointSaveParts {
    /// Plans what each rank writes. `checkpoints` has the limits of file sizes.
    ///
    /// # Errors
    /// [`Error::Ckpt`] if they hold what cannot be saved.
    pub fn new(checkpoints: &Checkpoints, trainer: &Trainer) -> Result<Self> {
        let (layout, limits) = (trainer.layout(), checkpoints.plan_limits());
        let plan = match &trainer.offloaded {
            Some(offloaded) => Arc::clone(&offloaded.plan),
            None => Arc::new(SavePlan::new(layout.specs(), &layout.held(), limits)?),
        };
        Ok(JointSaveParts { plan, rank: trainer.comm().rank })
    }

    /// What each rank writes.
    #[must_use]
    pub fn plan(&self) -> &Arc<SavePlan> {
        &self.plan
    }

    /// Which of the plan's writers this is.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The bytes that this rank holds, in place; tensors on a GPU are copied to `copies`, which is
    /// empty before.
    ///
    /// # Errors
    /// [`Error::Bridge`] if a graph still holds a weight.
    pub fn held<'a>(
        &self,
        trainer: &'a Trainer,
        copies: &'a mut Vec<Tensor>,
    ) -> Result<Vec<&'a [u8]>> {
        if let Some(offloaded) = &trainer.offloaded {
            return Ok(offloaded.held().unwrap_or_default());
        }
        let (mut held, is_away) = (Vec::new(), trainer.comm().device.is_cuda());
        for LocalTensor { tensor, .. } in trainer.parts().into_iter().filter(|_| is_away) {
            copies.push(to_host(tensor)?);
        }
        let copies: &[Tensor] = copies;
        for (at, LocalTensor { parts, tensor }) in trainer.parts().into_iter().enumerate() {
            let bytes = bridge::bytes(copies.get(at).unwrap_or(tensor))?;
            held.extend(parts.iter().map(|part| &bytes[range(part, ITEM_BYTES)]));
        }
        Ok(held)
    }

    /// The regions of some groups that this rank reads from a checkpoint.
    fn requests<'a>(
        &'a self,
        trainer: &'a mut Trainer,
        groups: &[Group],
    ) -> Result<Vec<RegionRequest<'a>>> {
        let mut requests = Vec::new();
        for LocalTensorMut { parts, tensor } in trainer.parts_mut() {
            let memory = cut(bridge::bytes_mut(tensor)?, &parts, ITEM_BYTES);
            for (part, into) in parts.iter().zip(memory) {
                let TensorSpec { name, group, .. } = &self.plan.specs()[part.tensor];
                if groups.contains(group) {
                    let region = part.region.clone();
                    requests.push(RegionRequest { name, group: *group, region, into });
                }
            }
        }
        Ok(requests)
    }
}

/// The metadata of a checkpoint. `data` is the corpus's fingerprint.
#[must_use]
pub fn meta(trainer: &Trainer, progress: TrainingProgress, data: &Value) -> Value {
    json!({
        "step": progress.step,
        "samples_consumed": progress.samples,
        "loss_scale": trainer.scaler(),
        "libtorch": torch_version(),
        "data": data,
    })
}

/// Fills this rank's parts of a state from a checkpoint of any layout: it reads only the bytes
/// of those parts. The caller has checked their configs ([`check_same_run`]), and calls
/// [`Trainer::loaded`] when all ranks have theirs.
///
/// # Errors
/// [`Error::Ckpt`], for example if the model differs; [`Error::Mismatch`] if it lacks its progress.
pub fn load(
    checkpoint: &Checkpoint,
    parts: &JointSaveParts,
    trainer: &mut Trainer,
    wanted: &[config::Part],
) -> Result<TrainingProgress> {
    let is_wanted = |part: config::Part| wanted.contains(&part);
    let groups = if is_wanted(config::Part::Optim) { &GROUPS[..] } else { &GROUPS[..1] };
    let specs = parts.plan.specs().iter().filter(|spec| groups.contains(&spec.group));
    checkpoint.check_against(&specs.cloned().collect::<Vec<_>>())?;
    match &mut trainer.offloaded {
        Some(offloaded) => offloaded.load(checkpoint, groups)?,
        None => _ = checkpoint.read(parts.requests(trainer, groups)?)?,
    }
    if !is_wanted(config::Part::Data) {
        return Ok(TrainingProgress::default());
    }
    let bad = |detail: String| {
        Error::Mismatch(Incompatible::new(
            format!("cannot load {}", checkpoint.display()),
            detail,
            "`feedline inspect` shows what it contains",
        ))
    };
    let meta = checkpoint.meta();
    if let Some(scale) = meta.get("loss_scale").filter(|scale| !scale.is_null()) {
        let scaler = Scaler::deserialize(scale);
        trainer.set_scaler(scaler.map_err(|e| bad(format!("loss scale {scale}: {e}")))?);
    }
    let number = |key: &str| {
        meta[key].as_u64().ok_or_else(|| bad(format!("expected a number '{key}' in its meta")))
    };
    Ok(TrainingProgress { step: number("step")?, samples: number("samples_consumed")? })
}

/// Fills tensors with one group of a checkpoint.
///
/// # Errors
/// As [`load`].
pub fn load_group(
    checkpoint: &Checkpoint,
    group: Group,
    specs: &[ParamSpec],
    into: &mut [Tensor],
) -> Result<()> {
    let mut details = Vec::new();
    for spec in specs {
        let shape = spec.shape_u64();
        match checkpoint.tensor(&spec.name, group) {
            Ok(entry) if entry.dtype == Dtype::F32 && entry.shape == shape => {}
            Ok(entry) => details.push(format!(
                "{}: expected {:?} {shape:?}, found {:?} {:?}",
                spec.name,
                Dtype::F32,
                entry.dtype,
                entry.shape
            )),
            Err(error) => details.push(error.to_string()),
        }
    }
    if !details.is_empty() {
        let operation = format!("cannot load {}", checkpoint.display());
        let hint = "use a checkpoint that this trainer saved for this model";
        return Err(Error::Mismatch(Incompatible { operation, details, hint }));
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

/// Refuses a checkpoint of another run, naming every key that differs; warns of what prevents a
/// resumed run from being bit-identical to an uninterrupted one. `data` is the fingerprint of the
/// run's corpus.
///
/// # Errors
/// [`Error::Mismatch`], or as [`config_of`].
pub fn check_same_run(checkpoint: &Checkpoint, config: &Config, data: &Value) -> Result<()> {
    let mut details = Vec::new();
    for difference in config.differences(&config_of(checkpoint)?) {
        let (key, there, here) = (&difference.key, &difference.there, &difference.here);
        let text = format!("{key}: {there} in the checkpoint, {here} in the config");
        match difference.effect {
            ResumeEffect::OtherRun => details.push(text),
            ResumeEffect::OtherBits => log::warn!("resume: not bit-identical: {text}"),
        }
    }
    let (there, here) = (&checkpoint.meta()["data"], data);
    if there != here {
        details.push(format!("corpus: {there} in the checkpoint, {here} here"));
    }
    let (there, here) = (&checkpoint.meta()["libtorch"], torch_version());
    if there.as_str() != Some(&here) {
        log::warn!("resume: not bit-identical: libtorch {there} in the checkpoint, {here} here");
    }
    if details.is_empty() {
        return Ok(());
    }
    Err(Error::Mismatch(Incompatible {
        operation: format!("cannot resume from {}", checkpoint.display()),
        details,
        hint: "use that run's config, or a new run.dir with checkpoint.load_parts = [\"model\"]",
    }))
}

/// Opens one checkpoint by the name of its folder, `.../step-000000120`.
///
/// # Errors
/// [`Error::Mismatch`] for another kind of name, [`Error::Ckpt`] if it is absent or damaged.
pub fn open_folder(folder: &str) -> Result<Checkpoint> {
    let (store, key) = storage::locate(folder)?;
    let step = key.name().strip_prefix("step-").and_then(|digits| digits.parse().ok());
    let step = step.ok_or_else(|| {
        Error::Mismatch(Incompatible::new(
            format!("cannot open checkpoint {folder}"),
            format!("expected a folder such as step-000000000120, found '{}'", key.name()),
            "name the folder of one step",
        ))
    })?;
    Ok(Checkpoints::open(store, Key::root()).open_step(step)?)
}
