//! The work of a rank, derived from the config, the model and its place in the mesh.

use std::ops::Range;

use ckpt::layout::{Layout, Param, Slices, Zero};
use ckpt::{Dtype, Group};
use tch::Kind;

use super::exchange::{Buffer, ReduceOrder};
use super::grads::{Bucket, GradPolicy};
use super::schedule_run::{PipelineChunk, UnitRange};
use super::tied::SharedParams;
use crate::Result;
use crate::config::{self, Config};
use crate::dtype::kind;
use crate::launch::comm::Comm;
use crate::mesh::DeviceMesh;
use crate::model::{ActivationStore, Model, Stage, Tp};
use recipe::schedule::{Pipeline, Schedule};

/// The groups of a checkpoint that training changes.
pub const GROUPS: [Group; 3] = [Group::Model, Group::ExpAvg, Group::ExpAvgSq];

/// The part of a run that one rank does. It does not change from step to step.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The order of its passes.
    pub schedule: Schedule,
    /// The ranks of its pipeline.
    pub shape: Pipeline,
    /// The dtype of the computation.
    pub kind: Kind,
    /// How gradients are summed and sent.
    pub rules: GradPolicy,
    /// Whether weights are gathered for each use.
    pub gathers: bool,
    /// Its stages.
    pub chunks: Vec<PipelineChunk>,
    /// What they are made of.
    pub pieces: Vec<UnitRange>,
    /// Units whose gradients are sent together.
    pub buckets: Vec<Bucket>,
    /// Which rank uses which parameter.
    pub uses: SharedParams,
    /// The parameters that it has, as places in the model's, ascending.
    pub params: Vec<usize>,
    /// Their shapes here, padding included.
    pub shapes: Vec<Vec<i64>>,
    /// Runs of them that are gathered together, if replicas have slices.
    pub runs: Vec<Range<usize>>,
    /// What all ranks hold of the state.
    pub layout: Layout,
}

impl Setup {
    /// For a checked config that the mesh divides.
    ///
    /// # Errors
    /// [`crate::Error::Ckpt`] if a parameter cannot be divided in this way; those of
    /// [`ActivationStore::new`].
    pub fn new(config: &Config, model: &Model, tp: &Tp, comm: &Comm) -> Result<Self> {
        let parallel = &config.parallel;
        let (mesh, place) = (comm.mesh, comm.place());
        // A single replica shares with no other.
        let zero = if mesh.dp > 1 { parallel.zero } else { 0 };
        let stages = config.pieces();
        let rank_of = |unit: usize| {
            let stage = stages.iter().position(|units| units.contains(&unit));
            stage.expect("the stages have every unit")
        };
        let all = model.uses().to_vec();
        let ranks = all.iter().map(|it| rank_of(it.unit) % mesh.pp).collect();
        let mut uses = SharedParams { all, ranks, own: Vec::new() };

        let keep = ActivationStore::new(config, comm)?;
        let make = |units: Range<usize>| {
            let recomputes = |unit| zero == 3 || parallel.recomputes(unit as u64);
            model.stage(units, tp, recomputes).keeping(&keep)
        };
        let (mut chunks, mut pieces) = (Vec::new(), Vec::<UnitRange>::new());
        for chunk in 0..mesh.virtual_stages {
            let stage = mesh.stage(place.pp, chunk);
            let units = stages[stage].clone();
            let runs = if zero == 3 { each(units) } else { vec![units] };
            let first = pieces.len();
            pieces.extend(runs.into_iter().map(|units| UnitRange::new(make(units), &mut uses.own)));
            let next = stages.get(stage + 1).map(|units| make(units.clone()));
            chunks.push(PipelineChunk { pieces: (first..pieces.len()).collect(), next });
        }
        let mut params: Vec<usize> = uses.own.iter().map(|at| uses.all[*at].param).collect();
        params.sort_unstable();
        params.dedup();
        for piece in &mut pieces {
            let at = |param: &usize| params.binary_search(param).expect("it is the rank's");
            piece.params = piece.stage.params().iter().map(at).collect();
        }
        let shapes: Vec<Vec<i64>> =
            params.iter().map(|param| model.params()[*param].local_shape(tp.size)).collect();
        let limit = if mesh.dp > 1 { parallel.bucket_mib << 20 } else { u64::MAX };
        let elements = |use_at: usize| {
            let param = uses.all[uses.own[use_at]].param;
            shapes[params.binary_search(&param).expect("it is the rank's")].iter().product()
        };
        let buckets = buckets(&chunks, &mut pieces, limit, elements);

        let unit_stages: Vec<u64> = (0..model.units()).map(|unit| rank_of(unit) as u64).collect();
        let layout = layout(model.layout(&unit_stages), mesh, zero)?;
        let rules = GradPolicy {
            order: match parallel.reduce {
                config::Reduce::Tree => ReduceOrder::Tree,
                config::Reduce::Ring => ReduceOrder::Any,
            },
            share: config.share(mesh.dp),
            sliced: zero > 0,
            kind: match config.precision.reduce_dtype {
                config::ReduceDtype::Fp32 => Kind::Float,
                config::ReduceDtype::Bf16 => Kind::BFloat16,
            },
        };
        Ok(Setup {
            schedule: parallel.schedule,
            shape: Pipeline { ranks: mesh.pp, chunks: mesh.virtual_stages },
            kind: kind(config.precision.dtype),
            rules,
            gathers: zero == 3,
            chunks,
            pieces,
            buckets,
            uses,
            runs: runs(&shapes, limit),
            params,
            shapes,
            layout,
        })
    }

    /// Elements of a parameter of the rank, padding included.
    #[must_use]
    pub fn elements(&self, at: usize) -> i64 {
        self.shapes[at].iter().product()
    }

    /// The buffers of gathers: of each piece if weights are gathered per use, else of each run.
    #[must_use]
    pub fn buffers(&self, replicas: usize) -> Vec<Buffer> {
        let of = |params: &mut dyn Iterator<Item = usize>| {
            Buffer::new(params.map(|at| self.elements(at)), replicas)
        };
        if self.gathers {
            self.pieces.iter().map(|piece| of(&mut piece.params.iter().copied())).collect()
        } else {
            self.runs.iter().map(|run| of(&mut run.clone())).collect()
        }
    }
}

/// What all ranks hold.
fn layout(params: Vec<Param>, mesh: DeviceMesh, zero: u64) -> Result<Layout> {
    let mesh = ckpt::layout::DeviceMesh {
        tp: mesh.tp as u64,
        pp: mesh.pp as u64,
        vpp: mesh.virtual_stages as u64,
        dp: mesh.dp as u64,
        // The f32 weights are sliced from ZeRO stage 1 on.
        zero: if zero > 0 { Zero::Three } else { Zero::Off },
        slices: Slices::Blocks,
    };
    Ok(Layout::new(mesh, params, &GROUPS.map(|group| (group, Dtype::F32)))?)
}

impl UnitRange {
    fn new(stage: Stage, own: &mut Vec<usize>) -> Self {
        let first = own.len();
        own.extend_from_slice(stage.uses());
        let buckets = vec![0; stage.units().len()];
        UnitRange { stage, uses: (first..own.len()).collect(), params: Vec::new(), buckets }
    }
}

fn each(units: Range<usize>) -> Vec<Range<usize>> {
    units.map(|unit| unit..unit + 1).collect()
}

/// Runs of parameters of about `bytes_max` bytes.
fn runs(shapes: &[Vec<i64>], bytes_max: u64) -> Vec<Range<usize>> {
    let (mut runs, mut bytes) = (Vec::new(), 0);
    let mut first = 0;
    for (at, shape) in shapes.iter().enumerate() {
        bytes += 4 * shape.iter().product::<i64>() as u64; // fits: of memory
        if bytes >= bytes_max || at + 1 == shapes.len() {
            runs.push(first..at + 1);
            (first, bytes) = (at + 1, 0);
        }
    }
    runs
}

/// Groups the units of each chunk, its last first, into buckets of about `bytes_max` bytes.
fn buckets(
    chunks: &[PipelineChunk],
    pieces: &mut [UnitRange],
    bytes_max: u64,
    elements: impl Fn(usize) -> i64,
) -> Vec<Bucket> {
    let mut buckets = Vec::new();
    for chunk in chunks {
        let mut bucket = Bucket { uses: Vec::new(), elements: Vec::new(), units: 0 };
        for &piece in chunk.pieces.iter().rev() {
            let piece = &mut pieces[piece];
            for unit in piece.stage.units().rev() {
                piece.buckets[unit - piece.stage.units().start] = buckets.len();
                for (at, use_at) in piece.stage.uses().iter().zip(&piece.uses) {
                    if piece.stage.model().uses()[*at].unit == unit {
                        bucket.uses.push(*use_at);
                        bucket.elements.push(elements(*use_at));
                    }
                }
                bucket.units += 1;
                let bytes = 4 * bucket.elements.iter().sum::<i64>() as u64; // fits: of memory
                if bytes >= bytes_max {
                    let empty = Bucket { uses: Vec::new(), elements: Vec::new(), units: 0 };
                    buckets.push(std::mem::replace(&mut bucket, empty));
                }
            }
        }
        if bucket.units > 0 {
            buckets.push(bucket);
        }
    }
    buckets
}
