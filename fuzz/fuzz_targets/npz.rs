//! An `.npz` of Paddle, a ZIP archive: the index of a separate array of ids, and both in one
//! archive. If it is accepted, it converts to a valid pair.

#![no_main]

use fuzz::{converted, store_with};
use indexed::Format;
use libfuzzer_sys::fuzz_target;

/// The array that the index of the seeds belongs to.
const IDS: &[u8] = include_bytes!("../../tests/golden/legacy/paddle_ids.npy");

fuzz_target!(|file: &[u8]| {
    converted(&store_with(&[("a_ids.npy", IDS), ("a_idx.npz", file)]), Format::Paddle);
    converted(&store_with(&[("a_ids.npz", file)]), Format::Paddle);
});
