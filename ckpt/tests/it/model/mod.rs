//! Reference implementation of layouts: random models on random meshes, and the memory of each
//! rank. Whole tensors are padded, reordered, cut and sliced as lists of element indices.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use ckpt::layout::{
    DeviceMesh, FusedOrder, Layout, Param, Slices, TensorSplit, Zero, block_elements,
};
use ckpt::{Dtype, Group, Region};

use crate::common::Random;

/// Sizes of a model. All cuts by up to 4 tensor parallel ranks are even, and a stack has at least
/// one layer for each of up to 6 stages.
#[derive(Clone, Debug)]
pub struct Sizes {
    pub hidden: u64,
    pub ffn: u64,
    pub vocab: u64,
    pub layers: u64,
    /// Rows of keys, and of values, per row of queries: 1 in `queries_per_key`.
    pub queries_per_key: u64,
    pub is_gated: bool,
    pub is_tied: bool,
    pub is_t5: bool,
}

impl Sizes {
    pub fn random(random: &mut Random) -> Self {
        Sizes {
            hidden: 8 * (1 + random.below(3)),
            ffn: 4 * (1 + random.below(12)),
            vocab: 20 + random.below(80),
            layers: 6 + random.below(3),
            queries_per_key: 1 + random.below(2),
            is_gated: random.below(2) == 0,
            is_tied: random.below(2) == 0,
            is_t5: random.below(2) == 0,
        }
    }

    /// The parameters, with the splits and stages for a mesh.
    pub fn params(&self, mesh: &DeviceMesh, order: bool) -> Vec<Param> {
        let stages = mesh.pp * mesh.vpp;
        let mut list = List { sizes: self.clone(), tp: mesh.tp, by_groups: order, params: vec![] };
        let last = stages - 1;
        if !self.is_t5 {
            list.embed("embed.weight", if self.is_tied { vec![0, last] } else { vec![0] });
            list.stack("decoder", 0, stages, false);
            list.push("norm.weight", &[self.hidden], TensorSplit::Replicate, last);
            if !self.is_tied {
                list.embed("lm_head.weight", vec![last]);
            }
            return list.params;
        }
        // The encoder has the first half of the stages; with one stage both share it.
        let (encoder, decoder) = if stages == 1 {
            ((0, 1), (0, 1))
        } else {
            ((0, stages / 2), (stages / 2, stages - stages / 2))
        };
        list.embed("shared.weight", vec![0, decoder.0, last]);
        list.stack("encoder", encoder.0, encoder.1, false);
        list.push("encoder.relative", &[32, 4], TensorSplit::Axis(1), 0);
        list.stack("decoder", decoder.0, decoder.1, true);
        list.push("scale", &[], TensorSplit::Replicate, last);
        list.params
    }
}

struct List {
    sizes: Sizes,
    tp: u64,
    by_groups: bool,
    params: Vec<Param>,
}

impl List {
    fn push(&mut self, name: &str, shape: &[u64], split: TensorSplit, stage: u64) {
        let (name, shape, stages) = (name.to_owned(), shape.to_vec(), vec![stage]);
        self.params.push(Param { name, shape, split, stages });
    }

    fn embed(&mut self, name: &str, stages: Vec<u64>) {
        let Sizes { vocab, hidden, .. } = self.sizes;
        let split = TensorSplit::Padded { rows: (vocab + 5).next_multiple_of(16 * self.tp) };
        let (name, shape) = (name.to_owned(), vec![vocab, hidden]);
        self.params.push(Param { name, shape, split, stages });
    }

    fn fused(&self, axis: usize, blocks: &[u64]) -> TensorSplit {
        let order = if self.by_groups { FusedOrder::Groups(4) } else { FusedOrder::Blocks };
        TensorSplit::Fused { axis, blocks: blocks.to_vec(), order }
    }

    fn stack(&mut self, stack: &str, first: u64, count: u64, has_cross: bool) {
        let Sizes { hidden, ffn, layers, queries_per_key, is_gated, .. } = self.sizes;
        let keys = hidden / queries_per_key;
        for layer in 0..layers {
            let stage = DeviceMesh::stage_of_layer(first, count, layer, layers);
            let name = |what: &str| format!("{stack}.{layer}.{what}");
            self.push(&name("norm.weight"), &[hidden], TensorSplit::Replicate, stage);
            let blocks = [hidden, keys, keys];
            let rows = hidden + 2 * keys;
            self.push(&name("qkv.weight"), &[rows, hidden], self.fused(0, &blocks), stage);
            self.push(&name("qkv.bias"), &[rows], self.fused(0, &blocks), stage);
            self.push(&name("out.weight"), &[hidden, hidden], TensorSplit::Axis(1), stage);
            if has_cross {
                // As in GPT-2, whose matrices have inputs as rows.
                let split = self.fused(1, &[keys, keys]);
                self.push(&name("cross.kv.weight"), &[hidden, 2 * keys], split, stage);
            }
            if is_gated {
                let split = TensorSplit::fused(&[ffn, ffn]);
                self.push(&name("gate_up.weight"), &[2 * ffn, hidden], split, stage);
            } else {
                self.push(&name("up.weight"), &[ffn, hidden], TensorSplit::Axis(0), stage);
            }
            self.push(&name("down.weight"), &[hidden, ffn], TensorSplit::Axis(1), stage);
        }
    }
}

pub fn random_mesh(random: &mut Random) -> DeviceMesh {
    let pick = |random: &mut Random, from: &[u64]| from[random.below(from.len() as u64) as usize];
    DeviceMesh {
        tp: pick(random, &[1, 2, 4]),
        pp: pick(random, &[1, 2, 3]),
        vpp: pick(random, &[1, 2]),
        dp: pick(random, &[1, 2, 3]),
        zero: [Zero::Off, Zero::One, Zero::Two, Zero::Three][random.below(4) as usize],
        slices: match random.below(4) {
            0 => Slices::Param,
            1 => Slices::Blocks,
            2 => Slices::Buffer { align: 1 },
            _ => Slices::Buffer { align: 32 },
        },
    }
}

/// Memory of a rank: the tensor and the element at each index; `None` is padding.
pub type Memory = Vec<Option<(usize, u64)>>;

/// The memory of a rank: a buffer for each of its tensors, and the tensors in it. Tensors that are
/// sliced as one buffer share it.
pub fn memories(
    layout: &Layout,
    params: &[Param],
    groups: &[Group],
    rank: u64,
) -> Vec<(Vec<usize>, Memory)> {
    let mesh = *layout.mesh();
    let place = mesh.place(rank);
    let mut all = Vec::new();
    for (number, group) in groups.iter().enumerate() {
        let needs = if *group == Group::Model { Zero::Three } else { Zero::One };
        let is_sliced = mesh.zero >= needs;
        let slice = |memory: &Memory, align: u64| -> Memory {
            let each = (memory.len() as u64).div_ceil(mesh.dp).next_multiple_of(align);
            let begin = memory.len().min((place.dp * each) as usize);
            let end = memory.len().min(((place.dp + 1) * each) as usize);
            memory[begin..end].to_vec()
        };
        let mut buffer = Memory::new();
        let mut in_buffer = Vec::new();
        for (at, param) in params.iter().enumerate() {
            if !param.stages.iter().any(|stage| stage % mesh.pp == place.pp) {
                continue;
            }
            let tensor = number * params.len() + at;
            let local = local(param, &mesh, place.tp);
            let local: Memory = local.into_iter().map(|id| id.map(|id| (tensor, id))).collect();
            match mesh.slices {
                _ if !is_sliced => all.push((vec![tensor], local)),
                Slices::Param => all.push((vec![tensor], slice(&local, 1))),
                Slices::Blocks => {
                    let block = block_elements(local.len() as u64);
                    all.push((vec![tensor], slice(&local, block)));
                }
                Slices::Buffer { .. } => {
                    buffer.extend(local);
                    in_buffer.push(tensor);
                }
            }
        }
        if let (true, Slices::Buffer { align }) = (is_sliced, mesh.slices) {
            all.push((in_buffer, slice(&buffer, align)));
        }
    }
    all
}

/// The elements of a rank's tensor parallel part, in the order of its memory.
fn local(param: &Param, mesh: &DeviceMesh, tp: u64) -> Vec<Option<u64>> {
    let count: u64 = param.shape.iter().product();
    let row: u64 = param.shape.iter().skip(1).product();
    match &param.split {
        TensorSplit::Replicate => (0..count).map(Some).collect(),
        TensorSplit::Axis(axis) => {
            let inner: u64 = param.shape[axis + 1..].iter().product();
            let each = param.shape[*axis] / mesh.tp;
            let is_mine = |id: &u64| id / inner % param.shape[*axis] / each == tp;
            (0..count).filter(is_mine).map(Some).collect()
        }
        TensorSplit::Padded { rows } => {
            let padded: Vec<Option<u64>> =
                (0..rows * row).map(|id| (id < count).then_some(id)).collect();
            let each = padded.len() / mesh.tp as usize;
            padded[tp as usize * each..(tp as usize + 1) * each].to_vec()
        }
        TensorSplit::Fused { order: FusedOrder::Blocks, .. } if mesh.tp == 1 => {
            (0..count).map(Some).collect()
        }
        TensorSplit::Fused { axis, blocks, order } => {
            // Cut into groups in order; a rank has an equal range of groups. With
            // blocks in their order a rank is one group.
            let groups = match order {
                FusedOrder::Blocks => mesh.tp,
                FusedOrder::Groups(groups) => *groups,
            };
            let mine = groups / mesh.tp;
            let inner: u64 = param.shape[axis + 1..].iter().product();
            let mut ids = Vec::new();
            for group in tp * mine..(tp + 1) * mine {
                let mut first = 0;
                for block in blocks {
                    let each = block / groups;
                    let places = first + group * each..first + (group + 1) * each;
                    let is_mine = |id: &u64| places.contains(&(id / inner % param.shape[*axis]));
                    ids.extend((0..count).filter(is_mine).map(Some));
                    first += block;
                }
            }
            ids
        }
    }
}

/// The element indices of a region, in its order.
pub fn elements(region: &Region, shape: &[u64]) -> Vec<u64> {
    let mut ids = vec![0];
    for (span, len) in region.spans.iter().zip(shape) {
        let along = |id: u64| (span.start..span.start + span.len).map(move |at| id * len + at);
        ids = ids.into_iter().flat_map(along).collect();
    }
    let flat = region.flat.clone().unwrap_or(0..ids.len() as u64);
    ids[flat.start as usize..flat.end as usize].to_vec()
}

/// The tensors of a model with random contents: the bytes of each.
pub fn contents(layout: &Layout, random: &mut Random) -> Vec<Vec<u8>> {
    layout.specs().iter().map(|spec| random.bytes(spec.bytes().unwrap() as usize)).collect()
}

/// All groups of state that a run may have, or some of them.
pub fn random_groups(random: &mut Random) -> Vec<(Group, Dtype)> {
    let weights = if random.below(2) == 0 { Dtype::BF16 } else { Dtype::F32 };
    let mut groups = vec![(Group::Model, weights)];
    if random.below(4) > 0 {
        groups.extend([Group::Master, Group::ExpAvg, Group::ExpAvgSq].map(|g| (g, Dtype::F32)));
    }
    groups
}
