//! File systems: their operations, how they are detected, and where they place data.

pub(crate) mod detect;
pub(crate) mod filesystem;
pub mod lustre;
pub(crate) mod mount;
pub(crate) mod os_filesystem;
pub(crate) mod placement;
mod stripe_advice;
mod stripe_policy;
