//! Several processes become one run.
//!
//! [`World::find`] says which rank this process is: torchrun's variables, Slurm's, or those that
//! `trainer launch` ([`local`]) sets. [`Session`] brings the ranks together in named stages, each
//! with a time-out that names who is missing, and apart again. [`Watchdog`] tells, when somebody
//! waits too long, what each rank does. What ends a rank ends all: a rank that fails says so, and
//! one that cannot is missed by the others.

pub mod comm;
pub mod local;
pub(crate) mod rank_group;
mod session;
mod watchdog;

pub use recipe::world::{StoreHost, World};
pub use session::{Session, StartupStage};
pub use watchdog::Watchdog;
