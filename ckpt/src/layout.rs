//! Layout: the part of each tensor that each process of a run holds.
//!
//! A [`Layout`] is a [`DeviceMesh`] of processes and a list of [`Param`]s. Each defines how tensor
//! parallelism splits it and which pipeline stages have it; ZeRO then slices the result among data
//! parallel replicas. The layout returns every rank's parts of every tensor, for a
//! [`SavePlan`](crate::SavePlan) and for [`Checkpoint::read`](crate::Checkpoint::read) alike;
//! resharding means that the layouts of the two differ.
//!
//! Names, shapes and the order of rows are those of the model without parallelism. A matrix that is
//! several fused ones has all rows of the first, then all of the second, as Hugging Face's models
//! have query, key and value (`GPT-NeoX` aside) and the halves of a gated unit; rows of padding are
//! not stored; tied weights are one parameter of several stages.
//!
//! ```
//! use ckpt::layout::{DeviceMesh, Layout, Param, TensorSplit, Zero};
//! use ckpt::{Dtype, Group};
//! # fn main() -> ckpt::Result<()> {
//! let mesh = DeviceMesh { tp: 2, pp: 2, dp: 2, zero: Zero::One, ..DeviceMesh::default() };
//! let param = |name: &str, shape: &[u64], split, stages: &[u64]| Param {
//!     name: name.to_owned(), shape: shape.to_vec(), split, stages: stages.to_vec(),
//! };
//! let params = vec![
//!     // Stored as 50,257 rows, held as 25,152 by each rank; also the last stage's output layer.
//!     param("embed.weight", &[50_257, 64], TensorSplit::Padded { rows: 50_304 }, &[0, 1]),
//!     param("layers.0.qkv.weight", &[192, 64], TensorSplit::fused(&[64, 64, 64]), &[0]),
//!     param("layers.0.out.weight", &[64, 64], TensorSplit::Axis(1), &[0]),
//!     param("norm.weight", &[64], TensorSplit::Replicate, &[1]),
//! ];
//! let groups = [(Group::Model, Dtype::BF16), (Group::ExpAvg, Dtype::F32)];
//! let layout = Layout::new(mesh, params, &groups)?;
//! let plan = ckpt::SavePlan::new(layout.specs(), &layout.held(), Default::default())?;
//! assert_eq!(plan.writers(), 8);
//! # Ok(())
//! # }
//! ```

use std::ops::Range;

use crate::region::{Region, Span, whole};
use crate::spec::{HeldRegion, TensorSpec, check_specs};
use crate::{Dtype, Error, Group, Result};

/// How a run's processes are arranged. Ranks are ordered as in Megatron: tensor parallel ranks are
/// adjacent, then data parallel replicas, then pipeline stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMesh {
    /// Tensor parallel ranks. Default: 1.
    pub tp: u64,
    /// Pipeline parallel ranks. Default: 1.
    pub pp: u64,
    /// Stages that each pipeline rank has: of `pp * vpp` stages, rank `r` has `r`, `r + pp`, and so
    /// on. Default: 1.
    pub vpp: u64,
    /// Data parallel replicas. Default: 1.
    pub dp: u64,
    /// The ZeRO stage. Default: off.
    pub zero: Zero,
    /// How the state is sliced. Default: each parameter separately.
    pub slices: Slices,
}

impl Default for DeviceMesh {
    fn default() -> Self {
        DeviceMesh { tp: 1, pp: 1, vpp: 1, dp: 1, zero: Zero::Off, slices: Slices::Param }
    }
}

/// The ZeRO stage: what data parallel replicas share instead of replicating.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Zero {
    /// ZeRO is off.
    Off,
    /// The optimizer's state.
    One,
    /// Gradients too, of which a checkpoint has none.
    Two,
    /// The weights too.
    Three,
}

/// What ZeRO splits into one equal slice per replica; the last may be shorter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slices {
    /// Each parameter, in the memory order of the rank's tensor parallel part.
    Param,
    /// The same, in whole blocks of [`block_elements`], so that blockwise computations do not
    /// depend on the number of replicas.
    Blocks,
    /// All parameters of a rank, end to end in their order, as `DeepSpeed`'s flat groups and
    /// Megatron's buffers have them. A slice is a multiple of `align` elements.
    Buffer {
        /// At least 1.
        align: u64,
    },
}

/// The block size of a parameter with this many elements: a power of two from 16 to 16,384, with
/// more than 256 blocks per parameter if possible. So slices are even to within 1/256 for few
/// replicas, begin at multiples of the widest vectors, and a block fits into the L1 cache.
#[must_use]
pub fn block_elements(elements: u64) -> u64 {
    let block = (elements / 512).max(1).next_power_of_two();
    block.clamp(16, 1 << 14)
}

/// The elements of a parameter that one of `replicas` holds, of its `elements` before ZeRO. Empty
/// for the last replicas if the parameter is short.
///
/// # Panics
/// For [`Slices::Buffer`], where that depends on the other parameters.
#[must_use]
pub fn slice_of(slices: Slices, elements: u64, replicas: u64, replica: u64) -> Range<u64> {
    let each = match slices {
        Slices::Param => elements.div_ceil(replicas),
        Slices::Blocks => elements.div_ceil(replicas).next_multiple_of(block_elements(elements)),
        Slices::Buffer { .. } => panic!("slices of a buffer depend on all parameters"),
    };
    let limit = |replica: u64| replica.saturating_mul(each).min(elements);
    limit(replica)..limit(replica + 1)
}

/// One rank's coordinates in the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankCoords {
    /// Its tensor parallel rank.
    pub tp: u64,
    /// Its replica.
    pub dp: u64,
    /// Its pipeline rank.
    pub pp: u64,
}

impl DeviceMesh {
    /// The number of processes.
    #[must_use]
    pub fn ranks(&self) -> u64 {
        self.tp * self.pp * self.dp
    }

    /// The coordinates of a rank.
    #[must_use]
    pub fn place(&self, rank: u64) -> RankCoords {
        RankCoords {
            tp: rank % self.tp,
            dp: rank / self.tp % self.dp,
            pp: rank / self.tp / self.dp,
        }
    }

    /// The stage of a layer of a stack that has the stages `first..first + count`, as even as
    /// possible, with more in the earlier ones: for a decoder all stages of the mesh, for an
    /// encoder and a decoder one part each.
    ///
    /// # Panics
    /// If there are no stages, or the layer is not below the number of layers.
    #[must_use]
    pub fn stage_of_layer(first: u64, count: u64, layer: u64, layers: u64) -> u64 {
        assert!(count > 0, "a stack has a stage");
        assert!(layer < layers, "layer {layer} of {layers}");
        let (each, more) = (layers / count, layers % count);
        // The first `more` stages have one layer more.
        let long = more * (each + 1);
        let stage = if layer < long { layer / (each + 1) } else { more + (layer - long) / each };
        first + stage
    }
}

/// A parameter, and the stages that have it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Param {
    /// Its name in the checkpoint.
    pub name: String,
    /// Its shape in the model without parallelism and without padding.
    pub shape: Vec<u64>,
    /// How tensor parallelism splits it.
    pub split: TensorSplit,
    /// The stages that have it, of `0..pp * vpp`: one, or several if they share it.
    pub stages: Vec<u64>,
}

/// How tensor parallelism splits a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TensorSplit {
    /// Not split: each rank has all of it.
    Replicate,
    /// Into equal parts along an axis: 0 cuts the outputs of a matrix, 1 its inputs.
    Axis(usize),
    /// Into equal ranges of rows, after padding at the end to this many rows. A rank holds its
    /// padding too; the checkpoint does not.
    Padded {
        /// The number of rows with padding, a multiple of the ranks.
        rows: u64,
    },
    /// Several fused matrices; a rank has an equal part of each. It stores its parts one after the
    /// other, each a contiguous matrix; a rank that has all of the tensor stores it unchanged.
    Fused {
        /// The axis along which they are concatenated: 0 if each is some rows of the tensor, 1 if
        /// each is some columns.
        axis: usize,
        /// The length of each along the axis.
        blocks: Vec<u64>,
        /// The order in which a rank stores them in memory.
        order: FusedOrder,
    },
}

impl TensorSplit {
    /// Fused matrices with these numbers of rows, one after the other in a rank's memory too.
    #[must_use]
    pub fn fused(blocks: &[u64]) -> Self {
        TensorSplit::fused_along(0, blocks)
    }

    /// As [`TensorSplit::fused`], along any axis.
    #[must_use]
    pub fn fused_along(axis: usize, blocks: &[u64]) -> Self {
        TensorSplit::Fused { axis, blocks: blocks.to_vec(), order: FusedOrder::Blocks }
    }
}

/// Order in which a rank stores its parts of several fused matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FusedOrder {
    /// Its part of the first, then its part of the second.
    Blocks,
    /// Group after group, and in each group the part of the first, then that of the second, as
    /// Megatron stores query, key and value of each group of heads.
    Groups(u64),
}

/// A part of a tensor in a rank's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalRegion {
    /// Index in [`Layout::specs`].
    pub tensor: usize,
    /// The region of it. Its elements are contiguous, row-major.
    pub region: Region,
    /// Elements before it: in the rank's tensor parallel part of the parameter, padding included,
    /// or in its ZeRO slice, if that is sliced.
    pub offset: u64,
}

/// The regions that every process of a run holds.
#[derive(Clone, Debug)]
pub struct Layout {
    mesh: DeviceMesh,
    params: Vec<Param>,
    specs: Vec<TensorSpec>,
    groups: Vec<Group>,
}

impl Layout {
    /// Lays out a model. Every parameter has one tensor in each group, of the group's type.
    ///
    /// # Errors
    /// [`Error::BadLayout`] names the parameter that cannot be split this way; [`Error::BadInput`]
    /// one that cannot be saved.
    pub fn new(mesh: DeviceMesh, params: Vec<Param>, groups: &[(Group, Dtype)]) -> Result<Layout> {
        check_mesh(&mesh)?;
        let mut specs = Vec::new();
        for &(group, dtype) in groups {
            specs.extend(params.iter().map(|param| TensorSpec {
                name: param.name.clone(),
                group,
                dtype,
                shape: param.shape.clone(),
            }));
        }
        check_specs(&specs)?;
        for param in &params {
            check_param(&mesh, param)?;
        }
        let groups = groups.iter().map(|(group, _)| *group).collect();
        Ok(Layout { mesh, params, specs, groups })
    }

    /// The tensors of the whole model: all parameters of the first group, then of the next.
    #[must_use]
    pub fn specs(&self) -> &[TensorSpec] {
        &self.specs
    }

    /// The mesh.
    #[must_use]
    pub fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// The parts of a rank, in the order of the specs.
    #[must_use]
    pub fn parts(&self, rank: u64) -> Vec<LocalRegion> {
        let DeviceMesh { pp, dp, zero, slices, .. } = self.mesh;
        let place = self.mesh.place(rank);
        let mut parts = Vec::new();
        for (number, &group) in self.groups.iter().enumerate() {
            let is_sliced = zero >= if group == Group::Model { Zero::Three } else { Zero::One };
            let mine = self
                .params
                .iter()
                .enumerate()
                .filter(|(_, param)| param.stages.iter().any(|stage| stage % pp == place.pp));
            let locals: Vec<(usize, Local)> = mine
                .map(|(at, param)| {
                    (number * self.params.len() + at, local(param, &self.mesh, place.tp))
                })
                .collect();
            let buffer_elements: u64 = locals.iter().map(|(_, local)| local.elements).sum();
            let mut before = 0;
            for (tensor, local) in locals {
                // The slice, in elements from the start of this parameter's part.
                let (slice, base) = match slices {
                    _ if !is_sliced => (0..local.elements, 0),
                    Slices::Param | Slices::Blocks => {
                        (slice_of(slices, local.elements, dp, place.dp), 0)
                    }
                    Slices::Buffer { align } => {
                        let each = buffer_elements.div_ceil(dp).next_multiple_of(align);
                        let start = place.dp * each;
                        let slice =
                            start.saturating_sub(before)..(start + each).saturating_sub(before);
                        (slice, before.saturating_sub(start))
                    }
                };
                before += local.elements;
                for (at, region) in local.parts {
                    let count = region.count();
                    let start = slice.start.clamp(at, at + count);
                    let end = slice.end.clamp(at, at + count);
                    if start < end || count == 0 {
                        let region = region.slice(start - at..end - at);
                        let at = base + start - slice.start.min(start);
                        parts.push(LocalRegion { tensor, region, offset: at });
                    }
                }
            }
        }
        parts
    }

    /// The parts of a rank, for a [`SavePlan`](crate::SavePlan).
    #[must_use]
    pub fn holdings(&self, rank: u64) -> Vec<HeldRegion> {
        let holding =
            |LocalRegion { tensor, region, .. }: LocalRegion| HeldRegion { tensor, region };
        self.parts(rank).into_iter().map(holding).collect()
    }

    /// The held regions of all ranks.
    #[must_use]
    pub fn held(&self) -> Vec<Vec<HeldRegion>> {
        (0..self.mesh.ranks()).map(|rank| self.holdings(rank)).collect()
    }
}

/// A rank's tensor parallel part of a parameter.
struct Local {
    /// Elements, with padding.
    elements: u64,
    /// The first element, and the region of the parameter that begins there.
    parts: Vec<(u64, Region)>,
}

fn local(param: &Param, mesh: &DeviceMesh, rank: u64) -> Local {
    let tp = mesh.tp;
    let row: u64 = param.shape.iter().skip(1).product();
    let along = |axis: usize, span: Span| {
        let mut spans = whole(&param.shape);
        spans[axis] = span;
        Region::of_box(spans)
    };
    let one = |region: Region| Local { elements: region.count(), parts: vec![(0, region)] };
    match &param.split {
        TensorSplit::Replicate => one(Region::whole(&param.shape)),
        TensorSplit::Axis(axis) => {
            let len = param.shape[*axis] / tp;
            one(along(*axis, Span { start: rank * len, len }))
        }
        TensorSplit::Padded { rows } => {
            let len = rows / tp;
            let start = (rank * len).min(param.shape[0]);
            let end = ((rank + 1) * len).min(param.shape[0]);
            let part = along(0, Span { start, len: end - start });
            let parts = if start < end { vec![(0, part)] } else { Vec::new() };
            Local { elements: len * row, parts }
        }
        TensorSplit::Fused { order: FusedOrder::Blocks, .. } if tp == 1 => {
            one(Region::whole(&param.shape))
        }
        TensorSplit::Fused { axis, blocks, order } => {
            let groups = match order {
                FusedOrder::Blocks => 1,
                FusedOrder::Groups(groups) => groups / tp,
            };
            let mut parts = Vec::new();
            let mut at = 0;
            for group in 0..groups {
                let mut first = 0;
                for block in blocks {
                    let len = block / tp / groups;
                    let start = first + (rank * groups + group) * len;
                    let region = along(*axis, Span { start, len });
                    let count = region.count();
                    parts.push((at, region));
                    at += count;
                    first += block;
                }
            }
            Local { elements: at, parts }
        }
    }
}

fn check_mesh(mesh: &DeviceMesh) -> Result<()> {
    let DeviceMesh { tp, pp, vpp, dp, slices, .. } = *mesh;
    let ranks = [tp, pp, vpp, dp].into_iter().try_fold(1_u64, u64::checked_mul);
    if !ranks.is_some_and(|ranks| (1..=RANKS_MAX).contains(&ranks)) {
        let why = format!("expected sizes of at least 1 and at most {RANKS_MAX} ranks");
        return bad(format!("{mesh:?}"), why);
    }
    if matches!(slices, Slices::Buffer { align } if !(1..=ALIGN_MAX).contains(&align)) {
        return bad(format!("{mesh:?}"), format!("expected align of 1 to {ALIGN_MAX}"));
    }
    Ok(())
}

/// More processes than any run has; each of them computes the plan of all.
const RANKS_MAX: u64 = 1 << 24;

/// Larger than the alignment of any framework's buffers.
const ALIGN_MAX: u64 = 1 << 30;

fn check_param(mesh: &DeviceMesh, param: &Param) -> Result<()> {
    let what = || format!("'{}' of shape {:?}", param.name, param.shape);
    let stages = mesh.pp * mesh.vpp;
    if param.stages.is_empty() || param.stages.iter().any(|&stage| stage >= stages) {
        return bad(what(), format!("expected stages below {stages}, found {:?}", param.stages));
    }
    let tp = mesh.tp;
    let first = param.shape.first().copied();
    match &param.split {
        TensorSplit::Replicate => Ok(()),
        TensorSplit::Axis(axis) => match param.shape.get(*axis) {
            Some(len) if len.is_multiple_of(tp) => Ok(()),
            _ => bad(what(), format!("axis {axis} is not divisible by {tp} ranks")),
        },
        TensorSplit::Padded { rows } => match first {
            Some(len) if len <= *rows && rows.is_multiple_of(tp) => {
                let row = param.shape.iter().skip(1).product::<u64>();
                // Local sizes are computed without overflow checks.
                if rows.checked_mul(row).and_then(|all| all.checked_mul(8)).is_none() {
                    return bad(what(), format!("{rows} rows are more than 2^64 bytes"));
                }
                Ok(())
            }
            _ => {
                let why = format!("{rows} rows with padding are too few, or not divisible by {tp}");
                bad(what(), why)
            }
        },
        TensorSplit::Fused { axis, blocks, order } => {
            let len = param.shape.get(*axis).copied();
            let sum = blocks.iter().try_fold(0_u64, |sum, block| sum.checked_add(*block));
            if len.is_none() || sum != len {
                return bad(what(), format!("blocks {blocks:?} do not add up to axis {axis}"));
            }
            let unit = match order {
                FusedOrder::Blocks => tp,
                FusedOrder::Groups(groups) if *groups > 0 && groups.is_multiple_of(tp) => *groups,
                FusedOrder::Groups(groups) => {
                    return bad(what(), format!("{groups} groups are not divisible by {tp} ranks"));
                }
            };
            if blocks.iter().all(|block| block.is_multiple_of(unit)) {
                return Ok(());
            }
            bad(what(), format!("blocks {blocks:?} are not divisible by {unit}"))
        }
    }
}

fn bad<T>(object: String, reason: String) -> Result<T> {
    Err(Error::BadLayout { object, reason })
}
