//! How a step comes into being, for one process or several, on stores of every kind.
//!
//! `place` is where files are written and what makes them the step; `together` is the save of
//! several processes, which come to a `meeting`; `pulse` gives signs of life, `roll` watches those
//! of others; `latest` is the note for people and other tools.

mod latest;
mod meeting;
mod place;
mod pulse;
mod roll;
mod together;

pub(crate) use meeting::WriterOutput;
pub(crate) use place::{CommitTarget, DAMAGED, STAGING};
pub use pulse::LivenessTimeouts;
pub(crate) use pulse::{Heartbeat, forget, maker_of};
pub use together::JointSaveOptions;
