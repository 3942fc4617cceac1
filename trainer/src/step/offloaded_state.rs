//! Offloaded f32 weights and moments: in host memory, or in files on disks.
//!
//! The trainer keeps the weights in the dtype of the computation. An update takes the gradients and
//! returns the new weights, rounded; checkpoints save the offloaded state from where it is.

use std::sync::Arc;

use ckpt::layout::{Layout, LocalRegion};
use ckpt::offload::{AdamW, Folder, Offload as State, OffloadOptions, Update, WeightsOut};
use ckpt::{Checkpoint, Dtype, Group, SavePlan};
use serde_json::Value;
use storage::{Key, Location};
use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::checkpoint::resume::is_damage;
use crate::config::{Config, Offload, OptimConfig};
use crate::device::host_copy;
use crate::launch::comm::Comm;
use crate::step::Trainer;
use crate::step::local_tensors::{ITEM_BYTES, cut, range};
use crate::step::optim::StepSize;

/// The state of a rank's optimizer.
#[derive(Debug)]
pub(crate) struct OffloadedState {
    state: State,
    /// Which rank saves what of it.
    pub(crate) plan: Arc<SavePlan>,
    /// Of each of the rank's tensors: the parts that the state has, and whether they decay.
    tensors: Vec<(Vec<LocalRegion>, bool)>,
    /// The dtype of the computation.
    kind: Kind,
    /// Page-locked memory for the new weights of a GPU; empty before the first update, and on the
    /// CPU, where an update writes the weights in place.
    staging: Vec<Tensor>,
    /// Whether the initial weights are still in the trainer.
    is_empty: bool,
}

impl Trainer {
    /// Opens the state at the place that the config names. It stays empty until the first
    /// [`Trainer::loaded`], because a checkpoint that is loaded before then replaces the initial
    /// weights.
    pub(crate) fn offload(&mut self, config: &Config) -> Result<()> {
        if config.optim.offload == Offload::None {
            return Ok(());
        }
        let mut parts = self.parts_by_place();
        let tensors = self.setup.params.iter().enumerate().map(|(at, param)| {
            (parts.remove(&at).unwrap_or_default(), self.model.params()[*param].decays())
        });
        let (tensors, kind) = (tensors.collect(), self.setup.kind);
        let state = OffloadedState::open(config, &self.setup.layout, &self.comm, tensors, kind)?;
        self.offloaded = Some(state);
        Ok(())
    }
}

impl OffloadedState {
    fn open(
        config: &Config,
        layout: &Layout,
        comm: &Comm,
        tensors: Vec<(Vec<LocalRegion>, bool)>,
        kind: Kind,
    ) -> Result<Self> {
        let offload = &config.optim.offload;
        let folders = offload.folders(comm.local_rank);
        let plan = ckpt::offload::plan_over(layout, folders.len().max(1))?;
        let mut options = OffloadOptions::default();
        if config.run.threads > 0 {
            options.threads = config.run.threads as usize; // fits: at most 1024
        }
        let rank = comm.rank as u64;
        let state = if matches!(offload, Offload::Nvme(_)) {
            let owner = owner(config)?;
            // Other nodes, and those that the run had before, have folders of these names as well.
            log::info!("offload: state is in {offload}; `feedline offload ls` lists leftovers");
            sweep(offload, &owner, comm.mesh.ranks());
            let key = Key::new(format!("rank-{rank:05}"))?;
            let open = |url: &String| Folder::open(url, &key);
            let folders = folders.iter().map(open).collect::<ckpt::Result<Vec<_>>>()?;
            let open = || -> Result<State> {
                let (folders, plan) = (folders.clone(), Arc::clone(&plan));
                Ok(State::on_disks(folders, &owner, plan, layout, rank, options)?)
            };
            match open() {
                // A run resumes from its checkpoints, whatever their layout.
                Err(error) if is_damage(&error) => {
                    log::warn!("offload: {}; starting from scratch", storage::one_line(&error));
                    for Folder { store, key } in &folders {
                        store.delete_folder(key)?;
                    }
                    open()?
                }
                state => state?,
            }
        } else {
            State::in_memory(Arc::clone(&plan), layout, rank, options)?
        };
        Ok(OffloadedState { state, plan, tensors, kind, staging: Vec::new(), is_empty: true })
    }

    /// The dtype of the computation, as the state names it, and its bytes.
    fn dtype(&self) -> (Dtype, u64) {
        match self.kind {
            Kind::BFloat16 => (Dtype::BF16, 2),
            Kind::Half => (Dtype::F16, 2),
            _ => (Dtype::F32, ITEM_BYTES),
        }
    }

    fn fill(&mut self, params: &[Tensor]) -> Result<()> {
        let mut weights = Vec::new();
        for (param, (parts, _)) in params.iter().zip(&self.tensors) {
            let bytes = bridge::bytes(param)?;
            weights.extend(parts.iter().map(|part| &bytes[range(part, ITEM_BYTES)]));
        }
        Ok(self.state.fill(&weights, 0, Value::Null)?)
    }

    /// Takes all of it from a checkpoint of any layout; moments that are not among the groups are
    /// zeros.
    pub(crate) fn load(&mut self, checkpoint: &Checkpoint, groups: &[Group]) -> Result<()> {
        self.state.load(checkpoint, groups, Value::Null)?;
        self.is_empty = false;
        Ok(())
    }

    /// Writes the weights into the tensors of the computation. An empty state takes them from there
    /// first, with moments of zero.
    pub(crate) fn weights(&mut self, params: &mut [Tensor]) -> Result<()> {
        if std::mem::take(&mut self.is_empty) {
            self.fill(params)?;
        }
        for param in params.iter_mut().filter(|param| param.kind() != self.kind) {
            // Padding is 0 and stays so.
            *param = Tensor::f_zeros(param.size(), (self.kind, Device::Cpu))?;
        }
        let (dtype, item_bytes) = self.dtype();
        let mut into = Vec::new();
        for (param, (parts, _)) in params.iter_mut().zip(&self.tensors) {
            let parts = cut(bridge::bytes_mut(param)?, parts, item_bytes);
            into.extend(parts.map(|bytes| WeightsOut { dtype, bytes }));
        }
        Ok(self.state.weights(&mut into)?)
    }

    /// As [`crate::step::optim::AdamW::update`]; gradients are not changed.
    pub(crate) fn update(
        &mut self,
        config: &OptimConfig,
        params: &mut [Tensor],
        grads: Vec<Tensor>,
        step: &StepSize,
    ) -> Result<()> {
        let StepSize { step, lr, grad_divisor } = *step;
        let ([beta1, beta2], eps) = (config.betas, config.eps);
        let adamw = AdamW { step, lr, beta1, beta2, eps, grad_divisor };
        let (dtype, item_bytes) = self.dtype();
        let grads = grads.into_iter().map(alone).collect::<Result<Vec<Tensor>>>()?;
        let is_away = params.iter().any(|param| param.device().is_cuda());
        if is_away && self.staging.is_empty() {
            // With the padding, which no part of the state has.
            self.staging = params.iter().map(host_copy).collect::<Result<_>>()?;
        }
        let here = if is_away { &mut self.staging[..] } else { &mut *params };
        let mut updates = Vec::new();
        for ((param, grad), (parts, decays)) in here.iter_mut().zip(&grads).zip(&self.tensors) {
            let grad = bridge::bytes(grad)?;
            let weight_decay = if *decays { config.weight_decay } else { 0.0 };
            let weights = cut(bridge::bytes_mut(param)?, parts, item_bytes);
            updates.extend(parts.iter().zip(weights).map(|(part, bytes)| Update {
                grad: &grad[range(part, ITEM_BYTES)],
                grad_dtype: Dtype::F32,
                weight_decay,
                weights: WeightsOut { dtype, bytes },
            }));
        }
        self.state.step(&adamw, updates, Value::Null)?;
        for (param, staged) in params.iter_mut().zip(&self.staging) {
            param.f_copy_(staged)?;
        }
        Ok(())
    }

    /// The bytes of the plan that this rank has, in place; `None` on a disk.
    pub(crate) fn held(&self) -> Option<Vec<&[u8]>> {
        self.state.held()
    }

    /// The state if it is on a disk, where its files become those of a checkpoint.
    pub(crate) fn on_disk(&mut self) -> Option<&mut State> {
        Some(&mut self.state).filter(|state| state.held().is_none())
    }
}

/// The owner of a state: the one run that saves to this folder of checkpoints.
fn owner(config: &Config) -> Result<String> {
    let dir = config.checkpoint_dir();
    let location = Location::new(&dir);
    let Some(path) = location.local_path() else { return Ok(dir) };
    let failed = |e| storage::Error::from_io("resolve", &dir, e);
    Ok(std::path::absolute(path).map_err(failed)?.display().to_string())
}

/// Ranks of a node whose folders are searched.
const LOCAL_RANKS_MAX: usize = 64;

/// Removes the state of ranks that this run no longer has after it resumed in another layout.
fn sweep(offload: &Offload, owner: &str, ranks: usize) {
    let mut places: Vec<String> = (0..LOCAL_RANKS_MAX).flat_map(|at| offload.folders(at)).collect();
    places.sort_unstable();
    places.dedup();
    for place in places {
        let swept = storage::open_url(&place).map_err(ckpt::Error::from);
        match swept.and_then(|store| ckpt::offload::sweep(&store, owner, ranks)) {
            Ok(removed) => removed.iter().for_each(|folder| {
                log::info!("offload: removed {folder}, of an earlier layout");
            }),
            Err(error) => log::warn!("offload: cannot remove orphaned state in {place}: {error}"),
        }
    }
}

/// A tensor on the CPU that shares its memory with no other: slices are views of the rows in which
/// they were received.
fn alone(grad: Tensor) -> Result<Tensor> {
    if grad.device() == Device::Cpu && bridge::bytes(&grad).is_ok() {
        return Ok(grad);
    }
    host_copy(&grad)
}
