use std::time::Duration;

use crate::ffi::Call;

/// `feedline::Op` of `shim/dist.h`, in its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Op {
    AllReduce,
    Broadcast,
    Reduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Gather,
    Scatter,
    Send,
    Recv,
    Barrier,
}

/// Names of [`Op`], in its order.
const NAMES: [&str; 11] = [
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "send",
    "recv",
    "barrier",
];

impl Op {
    pub(crate) fn name(self) -> &'static str {
        NAMES[self as usize]
    }

    /// Without a reduction, a peer or a tag.
    pub(crate) fn call(self) -> Call {
        Call { op: self as i32, reduce: 0, peer: -1, tag: 0 }
    }

    pub(crate) fn reducing(self, how: Reduce) -> Call {
        Call { reduce: how as i32, ..self.call() }
    }

    /// With a root, a source or a destination.
    pub(crate) fn with(self, peer: usize) -> Call {
        // A rank that does not fit `i32` is in no group, and c10d refuses it.
        Call { peer: i32::try_from(peer).unwrap_or(i32::MAX), ..self.call() }
    }
}

/// How the elements of several ranks are reduced to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Reduce {
    /// Their sum, in an order that the number of ranks and elements decides.
    Sum,
    /// The largest.
    Max,
    /// The smallest.
    Min,
}

/// `feedline::LastLost` of `shim/shim.cpp`: an operation that failed because of another rank.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct LostPeer {
    pub(crate) group: u64,
    op: i32,
    /// The other side, in the group; -1 if that is all of it.
    peer: i32,
    pub(crate) number: u64,
    pub(crate) seconds: f64,
}

impl LostPeer {
    pub(crate) fn op(&self) -> &'static str {
        usize::try_from(self.op).ok().and_then(|op| NAMES.get(op)).unwrap_or(&"an operation")
    }

    pub(crate) fn peer(&self) -> Option<usize> {
        usize::try_from(self.peer).ok()
    }
}

/// What a rank waits for on one of its groups.
#[derive(Clone, Debug, PartialEq)]
pub struct Wait {
    /// The operation, such as `all_reduce`.
    pub op: &'static str,
    /// The group's name.
    pub group: String,
    /// The group's ranks in the world.
    pub members: Vec<usize>,
    /// The other side of a `send` or a `recv`, as its rank in the world.
    pub peer: Option<usize>,
    /// Counts the collectives of the group, the same on all its ranks.
    pub number: u64,
    /// How long the rank has waited.
    pub age: Duration,
}
