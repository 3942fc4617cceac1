//! Helpers of the tests of this crate.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use serde_json::Value;
use storage::testing::fault_store::HookLayer;
use storage::{Key, Storage};

/// A folder of goldens.
pub fn golden(folder: &str) -> Arc<dyn Storage> {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/");
    storage::open_url(&format!("{root}{folder}")).unwrap()
}

/// A JSON file of goldens.
pub fn manifest(folder: &str, name: &str) -> Value {
    serde_json::from_slice(&read(golden(folder).as_ref(), name)).unwrap()
}

pub fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

pub fn read(store: &dyn Storage, name: &str) -> Vec<u8> {
    storage::read_all(store, &key(name)).unwrap()
}

/// A store in a folder that is deleted with the guard.
pub fn temp_store() -> (tempfile::TempDir, Arc<dyn Storage>) {
    let folder = tempfile::tempdir().unwrap();
    let store = storage::open_url(folder.path().to_str().unwrap()).unwrap();
    (folder, store)
}

/// The numbers of a JSON array.
pub fn numbers<T: TryFrom<i64, Error: fmt::Debug>>(value: &Value) -> Vec<T> {
    let items = value.as_array().unwrap().iter();
    items.map(|item| T::try_from(item.as_i64().unwrap()).unwrap()).collect()
}

/// SplitMix64: random numbers for tests, from a seed.
#[derive(Debug)]
pub struct Dice(pub u64);

impl Dice {
    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }
}

/// The calls that changed a store, in order, such as `finish a.bin`.
pub type Calls = Arc<Mutex<Vec<String>>>;

/// A store that records the calls that change it, and fails those with these numbers, counted from
/// 0.
pub fn failing(inner: &Arc<dyn Storage>, fail: Range<usize>) -> (Arc<dyn Storage>, Calls) {
    let calls = Calls::default();
    let heard = Arc::clone(&calls);
    let store = HookLayer::new(Arc::clone(inner), move |_, call, key| {
        if !["create", "write", "finish", "delete"].contains(&call) {
            return Ok(());
        }
        let mut heard = heard.lock().unwrap();
        heard.push(format!("{call} {key}"));
        if fail.contains(&(heard.len() - 1)) {
            let source = std::io::Error::other("as the test wants it");
            return Err(storage::Error::from_io("reach", key.to_string(), source));
        }
        Ok(())
    });
    (store, calls)
}
