//! Synthetic state for benchmarks, and parts of a save that can be measured separately.

use std::cmp::Reverse;
use std::time::{Duration, Instant};

use crate::base::save_control::SaveControl;
use crate::write::shard_writer::{Checksums, FileJob, ShardWriter};
use crate::{
    Checkpoints, Dtype, Group, HeldRegion, Region, Result, SavePlan, TensorData, TensorRead,
    TensorSpec,
};
use storage::{ProcessIdentity, Zeros};

/// The tensors of a GPT and of its Adam state, with the sizes of a training run.
#[derive(Debug)]
pub struct SyntheticState {
    tensors: Vec<Tensor>,
    memory: Zeros,
    bytes: u64,
}

#[derive(Debug)]
struct Tensor {
    name: String,
    group: Group,
    dtype: Dtype,
    shape: Vec<u64>,
    bytes: usize,
}

/// The vocabulary of GPT-2, padded as Megatron pads it.
const VOCABULARY: u64 = 50_304;

/// Tensors begin 64 bytes after a multiple of this, as in libtorch's allocator.
const PAGE_BYTES: usize = 4096;
const PHASE_BYTES: usize = 64;

impl SyntheticState {
    /// A state of about `bytes_about` bytes, within half a layer: bf16 weights, and fp32 masters
    /// and moments. Its contents are incompressible.
    #[must_use]
    pub fn gpt(bytes_about: u64) -> Self {
        Self::of(shapes(bytes_about))
    }

    /// The part of one of several processes: whole tensors, about as many bytes as the others.
    ///
    /// # Panics
    /// If `part` is not below `parts`.
    #[must_use]
    pub fn part_of_gpt(bytes_about: u64, part: usize, parts: usize) -> Self {
        assert!(part < parts, "part {part} of {parts}");
        let mut order = shapes(bytes_about);
        order.sort_by_key(|tensor| Reverse(tensor.bytes));
        let mut loads = vec![0; parts];
        let is_own = |tensor: &Tensor| {
            let least =
                (0..parts).min_by_key(|&part| loads[part]).expect("parts > 0, asserted above");
            loads[least] += tensor.bytes;
            least == part
        };
        order.retain(is_own);
        Self::of(order)
    }

    fn of(tensors: Vec<Tensor>) -> Self {
        let mut memory = Zeros::new(tensors.iter().map(|tensor| room(tensor.bytes)).sum());
        let mut word = 1_u64;
        for place in memory.chunks_exact_mut(8) {
            word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            place.copy_from_slice(&word.to_le_bytes());
        }
        let bytes = tensors.iter().map(|tensor| tensor.bytes as u64).sum();
        SyntheticState { tensors, memory, bytes }
    }

    /// Bytes of all tensors.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The tensors, for a save.
    #[must_use]
    pub fn tensors(&self) -> Vec<TensorData<'_>> {
        let mut rest: &[u8] = &self.memory;
        let data = |tensor: &'_ Tensor| {
            let (now, later) = rest.split_at(room(tensor.bytes));
            rest = later;
            &now[PHASE_BYTES..PHASE_BYTES + tensor.bytes]
        };
        let all: Vec<&[u8]> = self.tensors.iter().map(data).collect();
        let tensors = self.tensors.iter().zip(all);
        let tensors = tensors.map(|(Tensor { name, group, dtype, shape, .. }, bytes)| TensorData {
            name,
            group: *group,
            dtype: *dtype,
            shape,
            bytes,
        });
        tensors.collect()
    }

    /// Requests that load all tensors, and overwrite the contents.
    #[must_use]
    pub fn reads(&mut self) -> Vec<TensorRead<'_>> {
        let mut rest: &mut [u8] = &mut self.memory;
        let mut reads = Vec::with_capacity(self.tensors.len());
        for Tensor { name, group, bytes, .. } in &self.tensors {
            let (now, later) = rest.split_at_mut(room(*bytes));
            rest = later;
            let into = &mut now[PHASE_BYTES..PHASE_BYTES + bytes];
            reads.push(TensorRead { name, group: *group, into });
        }
        reads
    }
}

/// The tensors of a GPT and its Adam state, about `bytes_about` bytes.
fn shapes(bytes_about: u64) -> Vec<Tensor> {
    let width: u64 = match bytes_about >> 20 {
        4096.. => 2048,
        1024.. => 1024,
        _ => 256,
    };
    let per_parameter: u64 =
        Group::OF_PARAMETERS.iter().map(|group| dtype_of(*group).item_bytes()).sum();
    let layer_bytes = 12 * width * width * per_parameter;
    let vocabulary_bytes = VOCABULARY * width * per_parameter;
    let layers = (bytes_about.saturating_sub(vocabulary_bytes) + layer_bytes / 2) / layer_bytes;
    let mut shapes = vec![("embedding.weight".to_owned(), vec![VOCABULARY, width])];
    for layer in 0..layers.max(1) {
        for (part, shape) in [
            ("input_norm.weight", vec![width]),
            ("input_norm.bias", vec![width]),
            ("attention.qkv.weight", vec![3 * width, width]),
            ("attention.qkv.bias", vec![3 * width]),
            ("attention.proj.weight", vec![width, width]),
            ("attention.proj.bias", vec![width]),
            ("mlp_norm.weight", vec![width]),
            ("mlp_norm.bias", vec![width]),
            ("mlp.up.weight", vec![4 * width, width]),
            ("mlp.up.bias", vec![4 * width]),
            ("mlp.down.weight", vec![width, 4 * width]),
            ("mlp.down.bias", vec![width]),
        ] {
            shapes.push((format!("layers.{layer}.{part}"), shape));
        }
    }
    let tensor = |group: Group| {
        move |(name, shape): &(String, Vec<u64>)| {
            let dtype = dtype_of(group);
            let bytes = (shape.iter().product::<u64>() * dtype.item_bytes()) as usize; // fits
            Tensor { name: name.clone(), group, dtype, shape: shape.clone(), bytes }
        }
    };
    Group::OF_PARAMETERS.iter().flat_map(|group| shapes.iter().map(tensor(*group))).collect()
}

fn dtype_of(group: Group) -> Dtype {
    if group == Group::Model { Dtype::BF16 } else { Dtype::F32 }
}

/// Memory that a tensor takes, with the gap before it.
fn room(bytes: usize) -> usize {
    (PHASE_BYTES + bytes).next_multiple_of(PAGE_BYTES)
}

/// Time to write the files of a save durably, with or without the checksums of their blocks. The
/// files are removed afterwards.
///
/// # Errors
/// As [`Checkpoints::save`].
pub fn time_of_files(
    steps: &Checkpoints,
    tensors: &[TensorData<'_>],
    with_sums: bool,
) -> Result<Duration> {
    let options = steps.options;
    let specs: Vec<TensorSpec> = tensors.iter().map(TensorData::spec).collect();
    let region = |data: &TensorData<'_>| Region::whole(data.shape);
    let tensor = |(tensor, data)| HeldRegion { tensor, region: region(data) };
    let plan = SavePlan::new(
        &specs,
        &[tensors.iter().enumerate().map(tensor).collect()],
        steps.plan_limits(),
    )?;
    let held: Vec<&[u8]> = tensors.iter().map(|tensor| tensor.bytes).collect();
    let pieces = plan.pieces_held(0, &held)?;
    let jobs = FileJob::of_shards(plan.shards(0), &specs, &pieces, None);
    let folder = steps.folder.join(&format!(".tmp-bench-{}", ProcessIdentity::new()))?;
    let summing = if with_sums { Checksums::On } else { Checksums::Off };
    let started = Instant::now();
    let (store, control) = (&*steps.store, &SaveControl::default());
    let engine = ShardWriter { store, folder: &folder, options, summing, control };
    let written = engine.write(&jobs).map(drop);
    let elapsed_time = started.elapsed();
    steps.store.delete_folder(&folder)?;
    written.map(|()| elapsed_time)
}
