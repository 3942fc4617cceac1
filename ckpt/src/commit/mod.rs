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

pub(crate) use meeting::Part;
pub(crate) use place::{DAMAGED, Place, STAGING};
pub use pulse::Patience;
pub(crate) use pulse::{Pulse, forget, maker_of};
pub use together::Together;
