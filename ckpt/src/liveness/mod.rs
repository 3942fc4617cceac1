//! Heartbeats of the processes of a save, the lease that keeps a second writer out, and the fence
//! that keeps out one that lost it.

pub(crate) mod fence;
pub(crate) mod heartbeat;
pub(crate) mod lease;
pub(crate) mod tracker;
