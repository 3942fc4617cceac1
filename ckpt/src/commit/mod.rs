//! How a step comes into being, on stores of every kind.
//!
//! `place` is where files are written and what makes them the step; `pulse` tells which processes
//! live; `latest` is the note for people and other tools.

mod latest;
mod place;
mod pulse;

pub(crate) use place::{DAMAGED, Place, STAGING};
pub use pulse::Patience;
pub(crate) use pulse::{Pulse, forget, maker_of};
