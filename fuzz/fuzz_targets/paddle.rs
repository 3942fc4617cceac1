//! Paddle's pair: an archive of two arrays, beside tokens that are sound.

#![no_main]

use libfuzzer_sys::fuzz_target;

/// 64 tokens of 16 bits, as numpy writes them.
fn ids() -> Vec<u8> {
    let mut header = b"{'descr': '<u2', 'fortran_order': False, 'shape': (64,), }".to_vec();
    header.resize(117, b' ');
    header.push(b'\n');
    [b"\x93NUMPY\x01\x00\x76\x00", &header[..], &[1; 128]].concat()
}

fuzz_target!(|data: &[u8]| {
    fuzz::file("x_ids.npy", &ids());
    fuzz::file("x_idx.npz", data);
    fuzz::read_tokens("x", indexed::Format::Paddle);
});
