//! Heartbeats of the processes of a save, the lease that excludes a second writer, and the fence
//! that excludes a writer that lost its lease.

pub(crate) mod fence;
pub(crate) mod heartbeat;
pub(crate) mod lease;
pub(crate) mod tracker;
