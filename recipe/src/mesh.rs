//! The device mesh of a run: the coordinates of each rank, its groups, and its share of the
//! samples.
//!
//! Ranks are numbered as in Megatron and in `ckpt::layout::DeviceMesh`: the ranks of one tensor
//! parallel group are consecutive, so that they are on one node; then follow replicas, then
//! pipeline stages, which have the least traffic.

/// How the processes of a run are arranged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMesh {
    /// Tensor parallel ranks.
    pub tp: usize,
    /// Pipeline ranks.
    pub pp: usize,
    /// Stages of each pipeline rank: of `stages()`, rank `r` has `r`, `r + pp`, and so on.
    pub virtual_stages: usize,
    /// Data parallel replicas.
    pub dp: usize,
}

/// The coordinates of a rank in the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankCoords {
    /// Its tensor parallel rank.
    pub tp: usize,
    /// Its replica.
    pub dp: usize,
    /// Its pipeline rank.
    pub pp: usize,
}

/// One rank of a mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeshRank {
    /// How the ranks are arranged.
    pub mesh: DeviceMesh,
    /// The rank.
    pub rank: usize,
}

impl MeshRank {
    /// The only rank.
    pub const ALONE: MeshRank = MeshRank { mesh: DeviceMesh::ALONE, rank: 0 };

    /// The coordinates of the rank.
    #[must_use]
    pub fn place(&self) -> RankCoords {
        self.mesh.place(self.rank)
    }
}

/// Which micro-batches of a step one replica computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MicroBatchShare {
    /// Consecutive ones. Gradients are summed on the replica first, then over replicas.
    Run,
    /// Every `dp`-th. The gradient of each is summed over replicas at once, so that no rank holds a
    /// whole gradient.
    Stride,
}

impl DeviceMesh {
    /// A mesh of one process.
    pub const ALONE: DeviceMesh = DeviceMesh { tp: 1, pp: 1, virtual_stages: 1, dp: 1 };

    /// Number of processes.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.tp * self.pp * self.dp
    }

    /// The coordinates of a rank.
    #[must_use]
    pub fn place(&self, rank: usize) -> RankCoords {
        RankCoords {
            tp: rank % self.tp,
            dp: rank / self.tp % self.dp,
            pp: rank / self.tp / self.dp,
        }
    }

    /// The rank at these coordinates.
    #[must_use]
    pub fn rank(&self, place: RankCoords) -> usize {
        (place.pp * self.dp + place.dp) * self.tp + place.tp
    }

    /// The tensor parallel group of these coordinates: global ranks, in order.
    #[must_use]
    pub fn tp_group(&self, of: RankCoords) -> Vec<usize> {
        (0..self.tp).map(|tp| self.rank(RankCoords { tp, ..of })).collect()
    }

    /// The data parallel group of these coordinates.
    #[must_use]
    pub fn dp_group(&self, of: RankCoords) -> Vec<usize> {
        (0..self.dp).map(|dp| self.rank(RankCoords { dp, ..of })).collect()
    }

    /// The pipeline of these coordinates. Ranks that share a tied weight are in it.
    #[must_use]
    pub fn pp_group(&self, of: RankCoords) -> Vec<usize> {
        (0..self.pp).map(|pp| self.rank(RankCoords { pp, ..of })).collect()
    }

    /// Number of stages.
    #[must_use]
    pub fn stages(&self) -> usize {
        self.pp * self.virtual_stages
    }

    /// The stage of chunk `chunk` of a pipeline rank.
    #[must_use]
    pub fn stage(&self, pp: usize, chunk: usize) -> usize {
        chunk * self.pp + pp
    }

    /// The micro-batches of a step that a replica computes, in order.
    ///
    /// # Panics
    /// If their number is not divisible by the number of replicas.
    #[must_use]
    pub fn share(
        &self,
        share: MicroBatchShare,
        replica: usize,
        micro_batches: usize,
    ) -> Vec<usize> {
        assert!(micro_batches.is_multiple_of(self.dp), "{micro_batches} among {}", self.dp);
        let each = micro_batches / self.dp;
        match share {
            MicroBatchShare::Run => (replica * each..(replica + 1) * each).collect(),
            MicroBatchShare::Stride => (0..each).map(|i| i * self.dp + replica).collect(),
        }
    }
}
