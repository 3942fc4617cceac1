//! Heartbeats of the processes of a save, and the lease that keeps a second writer out.

pub(crate) mod heartbeat;
pub(crate) mod lease;
pub(crate) mod tracker;
