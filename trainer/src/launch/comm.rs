//! The process groups of one rank.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bridge::dist::{Group, GroupOptions, Store};
use logbook::Trace;
use tch::Device;

use crate::Result;
use crate::mesh::{DeviceMesh, MeshRank, RankCoords};

/// A rank's place in the mesh and its groups. A group of one rank is `None`.
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
    /// The ranks that share each matrix.
    pub tp: Option<Group>,
    /// The ranks that have the same parameters, for other samples.
    pub dp: Option<Group>,
    /// The ranks that have the other stages, for the same samples.
    pub pp: Option<Group>,
    /// What the rank is doing, for the watchdog and the trace.
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

    /// Connects a rank to the others of its groups. All ranks call it. Pipeline messages go through
    /// the memory of the host: they may overtake each other, which NCCL does not allow.
    ///
    /// # Errors
    /// [`crate::Error::Bridge`] with the missing ranks.
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
            let (is_nccl, name) = (device.is_cuda() && name != "pp", format!("{name}[{number}]"));
            Ok(Some(if is_nccl {
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

/// A text about what a rank is doing, written by it and read by a watchdog.
#[derive(Clone, Default)]
pub struct RankActivity(Arc<Mutex<Activity>>);

#[derive(Default)]
struct Activity {
    last: String,
    trace: Option<Trace>,
}

impl RankActivity {
    /// Replaces the text.
    pub fn set(&self, text: impl FnOnce() -> String) {
        let mut current = self.lock();
        current.last = text();
        if let Some(trace) = &current.trace {
            trace.doing(&current.last);
        }
    }

    /// Also writes every later text to a trace.
    pub fn record(&self, trace: Trace) {
        self.lock().trace = Some(trace);
    }

    /// The last text; empty before the first step.
    #[must_use]
    pub fn get(&self) -> String {
        self.lock().last.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Activity> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for RankActivity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RankActivity").field(&self.get()).finish()
    }
}
