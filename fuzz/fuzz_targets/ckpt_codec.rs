//! Packed tensors: arbitrary packed bytes, and bytes that are packed and unpacked again.

#![no_main]

use ckpt::{Codec, Dtype};
use libfuzzer_sys::fuzz_target;

const DTYPES: [Dtype; 20] = Dtype::ALL;

fuzz_target!(|input: &[u8]| {
    let Some(([kind, low, high], bytes)) = input.split_first_chunk() else { return };
    let dtype = DTYPES[usize::from(*kind) % DTYPES.len()];
    let width = dtype.item_bytes() as usize;
    let items = usize::from(u16::from_le_bytes([*low, *high]));
    let mut into = vec![0; items * width];
    if Codec::Planes.unpack(dtype, bytes, &mut into).is_ok() {
        // Packing the same elements again and unpacking them gives the same bytes.
        let packed = Codec::Planes.pack(dtype, &into);
        let mut again = vec![1; into.len()];
        Codec::Planes.unpack(dtype, &packed, &mut again).expect("bytes just packed");
        assert!(again == into);
    }
    let whole = &bytes[..bytes.len() / width * width];
    let packed = Codec::Planes.pack(dtype, whole);
    assert!(packed.len() <= whole.len() + 4 * width, "{} of {}", packed.len(), whole.len());
    let mut back = vec![1; whole.len()];
    Codec::Planes.unpack(dtype, &packed, &mut back).expect("bytes just packed");
    assert!(back == whole);
});
