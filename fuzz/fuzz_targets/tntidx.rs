//! A `.idx` of fairseq's, beside a `.bin` as long as its first two bytes say.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((len, idx)) = data.split_first_chunk() else { return };
    let len = usize::from(u16::from_le_bytes(*len));
    fuzz::file("x.idx", idx);
    fuzz::file("x.bin", &vec![1; len]);
    fuzz::read_tokens("x", indexed::Format::Tntidx);
});
