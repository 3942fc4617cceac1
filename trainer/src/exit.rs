//! How the command `trainer` ends, as a number.

/// All is done.
pub const DONE: u8 = 0;
/// Checked, and the answer is no.
pub const NO: u8 = 1;
/// It failed.
pub const FAILED: u8 = 2;
/// Another rank is lost, or reported a failure. Start all ranks again.
pub const PEER_LOST: u8 = 3;
/// Done and saved, but an earlier save, or a copy to the second store, failed.
pub const GAPS: u8 = 4;
/// Saved, submit again: `EX_TEMPFAIL` of sysexits.h, on which batch systems can requeue.
pub const SAVED: u8 = 75;
