//! Sample orders: which bytes each sample consists of, and which rank reads it.

pub(crate) mod calls;
pub(crate) mod encdec;
pub(crate) mod file;
pub(crate) mod masked;
pub(crate) mod rank_schedule;
pub(crate) mod sample_order;
