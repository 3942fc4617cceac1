//! A small model with offloaded optimizer state. Its gradients are functions of the step, so that
//! every rank of every layout can compute its own.

use std::sync::Arc;

use ckpt::layout::{DeviceMesh, Layout, Param, Slices, TensorSplit, Zero};
use ckpt::offload::{self, AdamW, Folder, Offload, OffloadOptions, StepReport, Update, WeightsOut};
use ckpt::{Checkpoint, Dtype, Group, Region, Result, SavePlan, TensorRead};
use serde_json::json;
use storage::{Key, Storage};

use super::Random;

pub const GROUPS: [Group; 3] = [Group::Model, Group::ExpAvg, Group::ExpAvgSq];

/// Rows and columns: several blocks, a part of a block, one element, no element.
const SHAPES: [(&str, &[u64], &[u64]); 6] = [
    ("embed.weight", &[50, 61], &[0, 1]),
    ("layers.0.up.weight", &[64, 48], &[0]),
    ("layers.0.up.bias", &[64], &[0]),
    ("layers.1.down.weight", &[33, 7], &[1]),
    ("scale", &[], &[1]),
    ("nothing", &[0, 3], &[1]),
];

/// Small blocks, so that there are many.
pub const SMALL: OffloadOptions = OffloadOptions {
    threads: 2,
    buffer_bytes_max: 1 << 20,
    block_bytes: 4096,
    prefer: offload::PublishMethod::Link,
    width: storage::Width::Avx512,
};

/// Meshes for it: one rank, replicas with and without ZeRO, stages that share a weight.
pub fn meshes() -> Vec<DeviceMesh> {
    let one = DeviceMesh { slices: Slices::Blocks, ..DeviceMesh::default() };
    vec![
        one,
        DeviceMesh { dp: 2, zero: Zero::Three, ..one },
        DeviceMesh { dp: 2, ..one },
        DeviceMesh { pp: 2, dp: 3, zero: Zero::Three, ..one },
    ]
}

pub fn layout(mesh: DeviceMesh) -> Layout {
    let stage = |stage: &u64| (*stage).min(mesh.pp - 1);
    let param = |(name, shape, stages): &(&str, &[u64], &[u64])| {
        let mut stages: Vec<u64> = stages.iter().map(stage).collect();
        stages.dedup();
        Param {
            name: (*name).to_owned(),
            shape: shape.to_vec(),
            split: TensorSplit::Replicate,
            stages,
        }
    };
    let params = SHAPES.iter().map(param).collect();
    Layout::new(mesh, params, &GROUPS.map(|group| (group, Dtype::F32))).unwrap()
}

/// Values of a whole parameter, near one and far from it; a function of the seed.
fn numbers(name: &str, seed: u64) -> Vec<f32> {
    let (_, shape, _) = SHAPES.iter().find(|(other, ..)| *other == name).unwrap();
    let salt = name.bytes().fold(seed, |salt, byte| salt.wrapping_mul(31) + u64::from(byte));
    let mut random = Random(salt);
    let number = |_| {
        let bits = random.next();
        let size = (bits >> 40) as f32 / (1 << 23) as f32 - 1.0;
        size * 2_f32.powi((bits % 24) as i32 - 16)
    };
    (0..shape.iter().product()).map(number).collect()
}

/// The contiguous elements of a region of a parameter.
fn part(name: &str, region: &Region, seed: u64) -> Vec<f32> {
    let (_, shape, _) = SHAPES.iter().find(|(other, ..)| *other == name).unwrap();
    let row = |axis: usize| shape[axis + 1..].iter().product::<u64>();
    let first: u64 = region.spans.iter().enumerate().map(|(axis, s)| s.start * row(axis)).sum();
    let first = first + region.flat.as_ref().map_or(0, |flat| flat.start);
    let count = region.elements().unwrap() as usize;
    numbers(name, seed)[first as usize..first as usize + count].to_vec()
}

fn bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// The upper halves of the values, as bf16.
fn halves(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| ((number.to_bits() >> 16) as u16).to_le_bytes()).collect()
}

/// One rank, and the weights on its device.
pub struct Rank {
    pub state: Offload,
    pub weights: Vec<Vec<u8>>,
}

pub fn plan_of(mesh: DeviceMesh) -> (Layout, Arc<SavePlan>) {
    let layout = layout(mesh);
    let plan = offload::plan(&layout).unwrap();
    (layout, plan)
}

impl Rank {
    pub fn in_memory(mesh: DeviceMesh, rank: u64, options: OffloadOptions) -> Self {
        let (layout, plan) = plan_of(mesh);
        Self::of(Offload::in_memory(plan, &layout, rank, options).unwrap())
    }

    pub fn on_disk(
        store: Arc<dyn Storage>,
        mesh: DeviceMesh,
        rank: u64,
        options: OffloadOptions,
    ) -> Result<Self> {
        let (layout, plan) = plan_of(mesh);
        let folder = Key::new(format!("state-{rank}")).unwrap();
        Ok(Self::of(Offload::on_disk(store, folder, plan, &layout, rank, options)?))
    }

    /// In a folder on each of several disks.
    pub fn on_disks(
        folders: Vec<Folder>,
        owner: &str,
        mesh: DeviceMesh,
        rank: u64,
        options: OffloadOptions,
    ) -> Result<Self> {
        let layout = layout(mesh);
        let plan = offload::plan_over(&layout, folders.len()).unwrap();
        Ok(Self::of(Offload::on_disks(folders, owner, plan, &layout, rank, options)?))
    }

    fn of(state: Offload) -> Self {
        let weights = state.params().iter().map(|param| vec![0; 4 * param.elements]).collect();
        Rank { state, weights }
    }

    /// Fills the state with the initial weights.
    pub fn fill(&mut self) -> Result<()> {
        let parts = self.state.params().iter().map(|p| bytes(&part(&p.name, &p.region, 1)));
        let parts: Vec<_> = parts.collect();
        let slices: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        self.state.fill(&slices, 0, json!({ "samples": 0 }))
    }

    /// The weights in the state, in f32.
    pub fn state_weights(&mut self) -> Result<Vec<Vec<u8>>> {
        let mut weights: Vec<Vec<u8>> = self.weights.iter().map(|w| vec![0; w.len()]).collect();
        let mut into: Vec<_> =
            weights.iter_mut().map(|bytes| WeightsOut { dtype: Dtype::F32, bytes }).collect();
        self.state.weights(&mut into)?;
        Ok(weights)
    }

    /// Update number `step`. Every second parameter has a gradient in bf16.
    pub fn step(&mut self, step: u64) -> Result<StepReport> {
        let grads = self.grads(step);
        let updates = updates(&mut self.weights, &grads);
        self.state.step(&adamw(step), updates, json!({ "samples": 8 * step }))
    }

    /// The same in two parts, the last parameters first, without `finish`.
    pub fn half_step(&mut self, step: u64) -> Result<()> {
        let grads = self.grads(step);
        let mut updates = updates(&mut self.weights, &grads);
        let last = updates.split_off(updates.len() / 2);
        let first = updates.len();
        self.state.begin(&adamw(step))?;
        self.state.update(first, last)?;
        self.state.update(0, updates)
    }

    fn grads(&self, step: u64) -> Vec<(Dtype, Vec<u8>)> {
        let grad = |param: &offload::StateParam| {
            let numbers = part(&param.name, &param.region, 1000 + step);
            match SHAPES.iter().position(|(name, ..)| *name == param.name).unwrap() % 2 {
                0 => (Dtype::F32, bytes(&numbers)),
                _ => (Dtype::BF16, halves(&numbers)),
            }
        };
        self.state.params().iter().map(grad).collect()
    }
}

fn updates<'a>(weights: &'a mut [Vec<u8>], grads: &'a [(Dtype, Vec<u8>)]) -> Vec<Update<'a>> {
    let update = |((grad_dtype, grad), bytes): (&'a (Dtype, Vec<u8>), &'a mut Vec<u8>)| {
        let weights = WeightsOut { dtype: Dtype::F32, bytes };
        Update { grad, grad_dtype: *grad_dtype, weight_decay: 0.1, weights }
    };
    grads.iter().zip(weights).map(update).collect()
}

pub fn adamw(step: u64) -> AdamW {
    let lr = 1e-3 / step as f64;
    AdamW { step, lr, beta1: 0.9, beta2: 0.95, eps: 1e-8, grad_divisor: 1.5 }
}

/// All tensors of a checkpoint.
pub fn contents(checkpoint: &Checkpoint) -> Vec<(String, Vec<u8>)> {
    let tensors = checkpoint.tensors();
    let mut all: Vec<(String, Vec<u8>)> = tensors
        .iter()
        .map(|it| (format!("{} {}", it.group, it.name), vec![0; it.bytes() as usize]))
        .collect();
    let reads = tensors.iter().zip(&mut all);
    let reads = reads.map(|(it, (_, into))| TensorRead { name: &it.name, group: it.group, into });
    checkpoint.read_tensors(reads.collect()).unwrap();
    all.sort();
    all
}
