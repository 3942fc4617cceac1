//! Mutations of JSON that keep it valid: mutated bytes rarely pass the parser.

use libfuzzer_sys::fuzzer_mutate;
use serde_json::{Value, json};

/// A mutator for `fuzz_mutator!`.
pub fn mutate(data: &mut [u8], size: usize, size_max: usize, seed: u32) -> usize {
    let mut chance = Chance(u64::from(seed) | 1 << 32);
    let tree = (chance.below(4) > 0).then(|| serde_json::from_slice::<Value>(&data[..size]).ok());
    let Some(mut tree) = tree.flatten() else {
        return fuzzer_mutate(data, size, size_max);
    };
    for _ in 0..=chance.below(3) {
        let other = pick(&mut tree, &mut chance).clone();
        let one = pick(&mut tree, &mut chance);
        change(one, other, &mut chance);
    }
    let text = tree.to_string();
    if text.len() > size_max {
        return fuzzer_mutate(data, size, size_max);
    }
    data[..text.len()].copy_from_slice(text.as_bytes());
    text.len()
}

/// A value anywhere in the tree: as likely near the root as in a table of thousands.
fn pick<'a>(tree: &'a mut Value, chance: &mut Chance) -> &'a mut Value {
    let children = match tree {
        Value::Array(items) => items.len(),
        Value::Object(members) => members.len(),
        _ => 0,
    };
    if children == 0 || chance.below(5) == 0 {
        return tree;
    }
    let place = chance.below(children);
    let child = match tree {
        Value::Array(items) => items.get_mut(place),
        Value::Object(members) => members.values_mut().nth(place),
        _ => None,
    };
    pick(child.expect("a place below the count"), chance)
}

fn change(one: &mut Value, other: Value, chance: &mut Chance) {
    match one {
        Value::String(text) if chance.below(2) == 0 => {
            let mut bytes = text.clone().into_bytes();
            let (size, size_max) = (bytes.len(), bytes.len() + 16);
            bytes.resize(size_max, 0);
            let size = fuzzer_mutate(&mut bytes, size, size_max);
            bytes.truncate(size);
            *text = String::from_utf8_lossy(&bytes).into_owned();
        }
        Value::Array(items) if chance.below(4) > 0 => {
            let place = chance.below(items.len() + 1);
            match chance.below(3) {
                0 if place < items.len() => drop(items.remove(place)),
                1 if place < items.len() => items.swap(0, place),
                _ => items.insert(place, other),
            }
        }
        Value::Object(members) if !members.is_empty() && chance.below(4) > 0 => {
            let name = members.keys().nth(chance.below(members.len())).cloned();
            let name = name.expect("a place below the count");
            match (chance.below(3), other) {
                (0, _) => drop(members.remove(&name)),
                (1, Value::String(new)) => drop(members.insert(new, json!(0))),
                (_, other) => drop(members.insert(name, other)),
            }
        }
        Value::Number(_) if chance.below(2) == 0 => {
            let numbers = [0, 1, 2, 255, 256, 65535, 1 << 22, (1 << 24) - 2, u32::MAX, 7, 300, 260];
            *one = json!(numbers[chance.below(numbers.len())]);
        }
        Value::Bool(flag) => *flag = !*flag,
        _ => {
            let plain = [Value::Null, json!(true), json!(""), json!(" "), json!([]), json!({})];
            let place = chance.below(plain.len() * 2);
            *one = plain.get(place).cloned().unwrap_or(other);
        }
    }
}

/// Random numbers from a seed, by Marsaglia's xorshift.
struct Chance(u64);

impl Chance {
    fn below(&mut self, count: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % count as u64) as usize // fits: below the count
    }
}
