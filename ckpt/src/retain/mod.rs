//! Retention of steps, pins that prevent deletion, and removal of orphans.

pub(crate) mod pin;
pub(crate) mod retention;
pub(crate) mod sweep;
