//! How the command `trainer` ends, as a number.

/// All is done.
pub const DONE: u8 = 0;
/// The answer is no.
pub const NO: u8 = 1;
/// It could not be done.
pub const FAILED: u8 = 2;
/// Another rank is lost, or said that it cannot go on. Start all of them again.
pub const PEER_LOST: u8 = 3;
/// Done and saved, but a save on the way, or a copy to the second store, had failed.
pub const GAPS: u8 = 4;
/// Saved, submit again: `EX_TEMPFAIL` of sysexits.h, which batch systems can be told to requeue on.
pub const SAVED: u8 = 75;
