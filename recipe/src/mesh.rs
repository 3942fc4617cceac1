//! Which process of a run is which: its place among tensor parallel ranks, replicas and pipeline
//! stages, who it works with, and what share of the samples is its.
//!
//! Ranks are counted as Megatron and `ckpt::layout::DeviceMesh` count them: those of one tensor
//! parallel group follow one another, so that they are of one node, then replicas, then pipeline
//! stages, whose traffic is the least.

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

/// One rank's place in the mesh.
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
    /// Which of them it is.
    pub rank: usize,
}

impl MeshRank {
    /// The only rank.
    pub const ALONE: MeshRank = MeshRank { mesh: DeviceMesh::ALONE, rank: 0 };

    /// Where it is.
    #[must_use]
    pub fn place(&self) -> RankCoords {
        self.mesh.place(self.rank)
    }
}

/// Which micro-batches of a step one replica computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MicroBatchShare {
    /// A run of them. They are summed at home first, then among replicas.
    Run,
    /// Every `dp`-th. Each is summed among replicas at once, so nobody keeps a whole gradient.
    Stride,
}

impl DeviceMesh {
    /// One process that does everything.
    pub const ALONE: DeviceMesh = DeviceMesh { tp: 1, pp: 1, virtual_stages: 1, dp: 1 };

    /// How many processes it has.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.tp * self.pp * self.dp
    }

    /// Where a rank is.
    #[must_use]
    pub fn place(&self, rank: usize) -> RankCoords {
        RankCoords {
            tp: rank % self.tp,
            dp: rank / self.tp % self.dp,
            pp: rank / self.tp / self.dp,
        }
    }

    /// Who is there.
    #[must_use]
    pub fn rank(&self, place: RankCoords) -> usize {
        (place.pp * self.dp + place.dp) * self.tp + place.tp
    }

    /// The tensor parallel group of a place: global ranks, in order.
    #[must_use]
    pub fn tp_group(&self, of: RankCoords) -> Vec<usize> {
        (0..self.tp).map(|tp| self.rank(RankCoords { tp, ..of })).collect()
    }

    /// The replicas of a place.
    #[must_use]
    pub fn dp_group(&self, of: RankCoords) -> Vec<usize> {
        (0..self.dp).map(|dp| self.rank(RankCoords { dp, ..of })).collect()
    }

    /// The pipeline that a place is in. Those who share a tied weight are members of it.
    #[must_use]
    pub fn pp_group(&self, of: RankCoords) -> Vec<usize> {
        (0..self.pp).map(|pp| self.rank(RankCoords { pp, ..of })).collect()
    }

    /// Stages that the layers are divided into.
    #[must_use]
    pub fn stages(&self) -> usize {
        self.pp * self.virtual_stages
    }

    /// The stage that a pipeline rank has as its chunk number `chunk`.
    #[must_use]
    pub fn stage(&self, pp: usize, chunk: usize) -> usize {
        chunk * self.pp + pp
    }

    /// Which of the micro-batches of a step a replica computes, in its order.
    ///
    /// # Panics
    /// If the replicas do not divide them.
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
