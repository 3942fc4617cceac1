//! Signs of life of those who save, and the lease.

pub(crate) mod heartbeat;
pub(crate) mod lease;
pub(crate) mod tracker;
