//! Code that the tests of samples share with the programs that generated their golden files.

use std::collections::BTreeMap;

use serde_json::Value;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/samples");

/// The generator of both programs.
pub struct Random(pub u64);

impl Random {
    /// Less than `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % limit
    }
}

/// FNV-1a of 64 bits over all values of each field, so that a small golden file covers
/// thousands of samples.
#[derive(Default)]
pub struct Folded(BTreeMap<&'static str, u64>);

impl Folded {
    /// Continues the hash of a field.
    pub fn add<T: Copy>(&mut self, field: &'static str, values: &[T], as_i64: impl Fn(T) -> i64) {
        let folded = self.0.entry(field).or_insert(0xcbf2_9ce4_8422_2325);
        for &value in values {
            *folded = (*folded ^ as_i64(value) as u64).wrapping_mul(0x0100_0000_01b3);
        }
    }

    /// Compares the hashes with those of a case.
    pub fn check(&self, case: &Value) {
        for (field, expected) in case["folded"].as_object().unwrap() {
            let found = format!("{:016x}", self.0[field.as_str()]);
            assert_eq!(
                found,
                expected.as_str().unwrap(),
                "{field} of all samples, {}",
                case["settings"]
            );
        }
    }
}

/// The results of the original program for each setting.
pub fn cases(file: &str, objective: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(format!("{GOLDEN}/{file}")).unwrap();
    let golden: Value = serde_json::from_str(&text).unwrap();
    golden[objective].as_array().unwrap().clone()
}

/// A setting that is on or off.
pub fn flag(settings: &Value, name: &str) -> bool {
    settings[name].as_bool().unwrap()
}

/// A setting that is a number.
pub fn number(settings: &Value, name: &str) -> i64 {
    settings[name].as_i64().unwrap()
}
