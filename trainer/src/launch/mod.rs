//! Starts and ends a run of several processes.
//!
//! [`World::find`] reads which rank this process is from the variables of torchrun, of Slurm, or of
//! `trainer launch` ([`local`]). [`Session`] takes the ranks through named startup stages, each
//! with a timeout that names the missing ranks, and through the end of the run. [`Watchdog`] logs
//! what each rank does when one has waited too long. The end of one rank ends all: a rank that
//! fails reports it, and the others time out on one that cannot.

pub mod comm;
pub mod local;
pub(crate) mod rank_group;
mod session;
mod watchdog;

pub use recipe::world::{StoreHost, World};
pub use session::{Session, StartupStage};
pub use watchdog::Watchdog;
