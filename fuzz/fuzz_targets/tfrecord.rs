//! A TFRecord file, and an example in a record with correct checksums, which mutations would break.
//! If it is accepted, it converts to a valid pair with the same counts.

#![no_main]

use fuzz::{converted, store_with};
use indexed::Format;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    converted(&store_with(&[("a", bytes)]), Format::TfRecord);
    let length = (bytes.len() as u64).to_le_bytes();
    let record = [&length, &masked(&length)[..], bytes, &masked(bytes)].concat();
    converted(&store_with(&[("a", &record.repeat(2))]), Format::TfRecord);
});

fn masked(bytes: &[u8]) -> [u8; 4] {
    storage::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}
