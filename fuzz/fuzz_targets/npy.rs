//! An `.npy`: its shape and type account for every byte, every element is read, and it is written
//! again to the same bytes.

#![no_main]

use fuzz::{bytes_of, key, store_with};
use indexed::{Census, Format, Npy, ReadOptions, TokenSource};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|file: &[u8]| {
    let store = store_with(&[("a.npy", file)]);
    let array = Npy::open(store.as_ref(), &key("a.npy"));
    let source = TokenSource::open(&store, &key("a"), Format::Yuan, &ReadOptions::default());
    let tokens = source.and_then(|source| Census::take(&source, None));
    let Ok(array) = array else {
        assert!(tokens.is_err(), "{tokens:?}");
        return;
    };
    let items: u64 = array.shape().iter().product();
    assert_eq!(array.data().len() as u64, items * array.descr().item_bytes() as u64);
    assert_eq!(Vec::from(&array).len() as u64, items);
    if let Ok(census) = tokens {
        assert_eq!(census.tokens, items);
    }
    array.write(store.as_ref(), &key("b.npy")).expect("room in memory");
    assert!(bytes_of(&store, "b.npy") == file);
});
