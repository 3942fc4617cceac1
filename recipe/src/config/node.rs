//! TOML values as serde reads them, with errors that name the key.
//!
//! The deserializer of `toml` names a key and its line, but only within one file, and a config is
//! merged from several files and `--set`. So this module walks the merged table. It reports unknown
//! and missing keys with their full name and the nearest known key.

use std::fmt;

use serde::de::value::StrDeserializer;
use serde::de::{
    self, DeserializeSeed, Deserializer, EnumAccess, Expected, IntoDeserializer, MapAccess,
    SeqAccess, Unexpected, VariantAccess, Visitor,
};
use serde::forward_to_deserialize_any;
use toml::Value;

use crate::import::keys::key_of_other_programs;

/// Why the value of one key is refused.
#[derive(Debug)]
pub(super) struct KeyError {
    /// Innermost first: the walk adds the parents on its way out.
    path: Vec<String>,
    pub problem: String,
    pub hint: Option<String>,
}

impl KeyError {
    pub(super) fn new(key: &str, problem: impl fmt::Display) -> Self {
        KeyError { path: vec![key.to_owned()], problem: problem.to_string(), hint: None }
    }

    pub(super) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// The full name, as `optim.lr.peak`.
    pub(super) fn key(&self) -> String {
        self.path.iter().rev().map(String::as_str).collect::<Vec<_>>().join(".")
    }

    fn within(mut self, parent: &str) -> Self {
        self.path.push(parent.to_owned());
        self
    }
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.key(), self.problem)
    }
}

impl std::error::Error for KeyError {}

impl de::Error for KeyError {
    fn custom<T: fmt::Display>(problem: T) -> Self {
        KeyError { path: Vec::new(), problem: problem.to_string(), hint: None }
    }

    fn unknown_field(key: &str, known: &'static [&'static str]) -> Self {
        let nearest = nearest(key, known);
        let hint = match key_of_other_programs(key) {
            Some(config_key) if !nearest.starts_with("did you mean") => {
                format!("'{key}' of other programs is called {config_key} here")
            }
            _ => nearest,
        };
        let problem = "unknown key";
        KeyError::new(key, problem).hint(hint)
    }

    fn missing_field(key: &'static str) -> Self {
        let problem = "required key is missing";
        KeyError::new(key, problem)
    }

    fn unknown_variant(value: &str, known: &'static [&'static str]) -> Self {
        KeyError::custom(format!("expected {}, found '{value}'", listed(known)))
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        let (expected, found) = (expected.to_string(), found_text(found));
        KeyError::custom(format!("expected {}, found {found}", expected_text(&expected)))
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::invalid_type(found, expected)
    }

    fn invalid_length(found: usize, expected: &dyn Expected) -> Self {
        KeyError::custom(format!("expected {expected}, found a list of {found}"))
    }
}

/// serde names types of Rust; a config has numbers, strings, lists and tables.
fn found_text(found: Unexpected<'_>) -> String {
    match found {
        Unexpected::Bool(value) => value.to_string(),
        Unexpected::Signed(value) => value.to_string(),
        Unexpected::Unsigned(value) => value.to_string(),
        Unexpected::Float(value) => value.to_string(),
        Unexpected::Str(text) => format!("the string '{text}'"),
        Unexpected::Seq => "a list".to_owned(),
        Unexpected::Map => "a table".to_owned(),
        other => other.to_string(),
    }
}

fn expected_text(expected: &str) -> &str {
    match expected {
        "u64" => "an integer of at least 0",
        "f64" => "a number",
        "a boolean" => "true or false",
        "a string" => "a string in quotes",
        _ if expected.starts_with("struct ") => "a table",
        _ => expected,
    }
}

/// `a, b or c`.
fn listed(words: &[&str]) -> String {
    match words {
        [first @ .., last] if !first.is_empty() => format!("{} or {last}", first.join(", ")),
        _ => words.join(", "),
    }
}

/// A hint with the known key that was most likely meant, or with all known keys.
#[must_use]
pub fn nearest(key: &str, known: &[&str]) -> String {
    let near = known.iter().map(|name| (edits(key, name), name)).min();
    match near {
        Some((distance, name)) if distance <= key.len().div_ceil(3) => {
            format!("did you mean '{name}'?")
        }
        _ => format!("known keys: {}", known.join(", ")),
    }
}

/// Levenshtein distance in bytes, computed with two rows of the table.
fn edits(from: &str, to: &str) -> usize {
    let mut above: Vec<usize> = (0..=to.len()).collect();
    for (row, a) in from.bytes().enumerate() {
        let mut here = vec![row + 1];
        for (column, b) in to.bytes().enumerate() {
            let replaced = above[column] + usize::from(a != b);
            here.push(replaced.min(above[column + 1] + 1).min(here[column] + 1));
        }
        above = here;
    }
    above[to.len()]
}

/// A value of the merged table.
pub(super) struct TomlNode(pub Value);

impl<'de> IntoDeserializer<'de, KeyError> for TomlNode {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for TomlNode {
    type Error = KeyError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, KeyError> {
        match self.0 {
            Value::String(text) => visitor.visit_string(text),
            Value::Integer(number) => visitor.visit_i64(number),
            Value::Float(number) => visitor.visit_f64(number),
            Value::Boolean(truth) => visitor.visit_bool(truth),
            Value::Datetime(time) => visitor.visit_string(time.to_string()),
            Value::Array(items) => visit_list(items, visitor),
            Value::Table(table) => {
                visitor.visit_map(Entries { entries: table.into_iter(), current: None })
            }
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, KeyError> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, KeyError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, KeyError> {
        let expected = || format!("exactly one of {}", variants.join(", "));
        match self.0 {
            Value::String(text) => visitor.visit_enum(text.into_deserializer()),
            Value::Table(table) if table.len() == 1 => {
                let one = table.into_iter().next().map(|(name, value)| OneKey { name, value });
                visitor.visit_enum(one.expect("its length is 1"))
            }
            Value::Table(table) => {
                let keys: Vec<&str> = table.keys().map(String::as_str).collect();
                let found = if keys.is_empty() { "none".to_owned() } else { keys.join(" and ") };
                Err(de::Error::custom(format!("expected {}, found {found}", expected())))
            }
            other => Err(de::Error::invalid_type(unexpected(&other), &expected().as_str())),
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

fn unexpected(value: &Value) -> Unexpected<'_> {
    match value {
        Value::String(text) => Unexpected::Str(text),
        Value::Integer(number) => Unexpected::Signed(*number),
        Value::Float(number) => Unexpected::Float(*number),
        Value::Boolean(truth) => Unexpected::Bool(*truth),
        Value::Datetime(_) => Unexpected::Other("a time"),
        Value::Array(_) => Unexpected::Seq,
        Value::Table(_) => Unexpected::Map,
    }
}

fn visit_list<'de, V: Visitor<'de>>(items: Vec<Value>, visitor: V) -> Result<V::Value, KeyError> {
    let count = items.len();
    let mut list = Items { items: items.into_iter(), taken: 0 };
    let value = visitor.visit_seq(&mut list)?;
    if list.taken == count {
        Ok(value)
    } else {
        let expected = format!("a list of {}", list.taken);
        Err(de::Error::invalid_length(count, &expected.as_str()))
    }
}

struct Items {
    items: std::vec::IntoIter<Value>,
    taken: usize,
}

impl<'de> SeqAccess<'de> for &mut Items {
    type Error = KeyError;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, KeyError> {
        let Some(item) = self.items.next() else { return Ok(None) };
        let place = self.taken.to_string();
        self.taken += 1;
        seed.deserialize(TomlNode(item)).map(Some).map_err(|refusal| refusal.within(&place))
    }
}

struct Entries {
    entries: toml::map::IntoIter<String, Value>,
    current: Option<(String, Value)>,
}

impl<'de> MapAccess<'de> for Entries {
    type Error = KeyError;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, KeyError> {
        self.current = self.entries.next();
        let Some((key, _)) = &self.current else { return Ok(None) };
        seed.deserialize(StrDeserializer::new(key)).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, KeyError> {
        let (key, value) = self.current.take().expect("serde asks for the key first");
        seed.deserialize(TomlNode(value)).map_err(|refusal| refusal.within(&key))
    }
}

/// A table of one key as an enum: the key is the variant, as in `{ steps = 800 }`.
struct OneKey {
    name: String,
    value: Value,
}

impl<'de> EnumAccess<'de> for OneKey {
    type Error = KeyError;
    type Variant = Self;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Self), KeyError> {
        let variant = seed.deserialize(StrDeserializer::<KeyError>::new(&self.name))?;
        Ok((variant, self))
    }
}

impl<'de> VariantAccess<'de> for OneKey {
    type Error = KeyError;

    fn unit_variant(self) -> Result<(), KeyError> {
        let expected = "a string in quotes";
        Err(de::Error::invalid_type(Unexpected::Map, &expected))
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, KeyError> {
        seed.deserialize(TomlNode(self.value)).map_err(|refusal| refusal.within(&self.name))
    }

    fn tuple_variant<V: Visitor<'de>>(self, _len: usize, visitor: V) -> Result<V::Value, KeyError> {
        TomlNode(self.value).deserialize_any(visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        _fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, KeyError> {
        TomlNode(self.value).deserialize_any(visitor)
    }
}
