//! Which steps go, and which stay.

pub(crate) mod pin;
pub(crate) mod retention;
pub(crate) mod sweep;
