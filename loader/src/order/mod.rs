//! Which samples come when.

pub(crate) mod encdec;
pub(crate) mod file;
pub(crate) mod masked;
pub(crate) mod rank_schedule;
pub(crate) mod sample_order;
