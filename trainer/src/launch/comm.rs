//! The other ranks of a run, as one of them reaches them.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bridge::dist::{Group, GroupOptions, Store};
use logbook::Trace;
use tch::Device;

use crate::Result;
use crate::mesh::{DeviceMesh, MeshRank, RankCoords};

/// A rank's place in the mesh and its groups. A group of one is absent: there is nobody to talk to.
#[derive(Clone, Debug)]
pub struct Comm {
    /// How the ranks are arranged.
    pub mesh: DeviceMesh,
    /// This rank.
    pub rank: usize,
    /// Its number among those of its node.
    pub local_rank: usize,
    /// What it computes on.
    pub device: Device,
    /// Who shares each matrix.
    pub tp: Option<Group>,
    /// Who has the same parameters, for other samples.
    pub dp: Option<Group>,
    /// Who has the other stages, for the same samples.
    pub pp: Option<Group>,
    /// What the rank is doing, for whoever watches it.
    pub activity: RankActivity,
}

impl Comm {
    /// The only rank.
    #[must_use]
    pub fn alone(device: Device) -> Self {
        let activity = RankActivity::default();
        let mesh = DeviceMesh::ALONE;
        Comm { mesh, rank: 0, local_rank: 0, device, tp: None, dp: None, pp: None, activity }
    }

    /// Connects a rank to the others of its groups. All ranks call it. What a pipeline sends goes
    /// through the memory of the host: its messages pass each other, which NCCL's must not.
    ///
    /// # Errors
    /// [`crate::Error::Bridge`] with those that do not come.
    pub fn connect(
        store: &Store,
        mesh: DeviceMesh,
        rank: usize,
        device: Device,
        options: &GroupOptions,
    ) -> Result<Self> {
        let place = mesh.place(rank);
        let group = |name: &str, number: usize, members: Vec<usize>| -> Result<Option<Group>> {
            if members.len() == 1 {
                return Ok(None);
            }
            let own = members.iter().position(|member| *member == rank);
            let own = own.expect("a rank is in its own groups");
            let (at, name) = (device.is_cuda() && name != "pp", format!("{name}[{number}]"));
            Ok(Some(if at {
                Group::nccl(store, &name, own, &members, device, options)?
            } else {
                Group::gloo(store, &name, own, &members, options)?
            }))
        };
        let RankCoords { tp, dp, pp } = place;
        Ok(Comm {
            mesh,
            rank,
            local_rank: 0,
            device,
            tp: group("tp", pp * mesh.dp + dp, mesh.tp_group(place))?,
            dp: group("dp", pp * mesh.tp + tp, mesh.dp_group(place))?,
            pp: group("pp", dp * mesh.tp + tp, mesh.pp_group(place))?,
            activity: RankActivity::default(),
        })
    }

    /// This rank of the mesh.
    #[must_use]
    pub fn seat(&self) -> MeshRank {
        MeshRank { mesh: self.mesh, rank: self.rank }
    }

    /// Where it is.
    #[must_use]
    pub fn place(&self) -> RankCoords {
        self.seat().place()
    }
}

/// What a rank is doing, in words, written by it and read by a watchdog.
#[derive(Clone, Default)]
pub struct RankActivity(Arc<Mutex<Said>>);

#[derive(Default)]
struct Said {
    last: String,
    trace: Option<Trace>,
}

impl RankActivity {
    /// Says it anew.
    pub fn set(&self, text: impl FnOnce() -> String) {
        let mut said = self.said();
        said.last = text();
        if let Some(trace) = &said.trace {
            trace.doing(&said.last);
        }
    }

    /// Everything that is said from here on goes into a trace too.
    pub fn record(&self, trace: Trace) {
        self.said().trace = Some(trace);
    }

    /// What was said last; empty before the first step.
    #[must_use]
    pub fn get(&self) -> String {
        self.said().last.clone()
    }

    fn said(&self) -> MutexGuard<'_, Said> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for RankActivity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RankActivity").field(&self.get()).finish()
    }
}
