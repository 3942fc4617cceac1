//! An array of numpy's, as the caches of sample orders are and as Yuan's tokens are.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    fuzz::file("x.npy", data);
    fuzz::read_tokens("x", indexed::Format::Yuan);
    let (store, key) = fuzz::place("x.npy");
    if let Ok(npy) = indexed::Npy::open(store.as_ref(), &key) {
        assert!(npy.data().len() <= data.len(), "more data than the file has");
    }
});
