//! `tf.Example`, the message in most TFRecord files: named lists of values.
//!
//! ```text
//! Example  { Features features = 1; }
//! Features { map<string, Feature> feature = 1; }     an entry: key = 1, value = 2
//! Feature  { oneof { BytesList = 1; FloatList = 2; Int64List = 3; } }
//! a list   { repeated value = 1; }                   numbers packed or not
//! ```
//!
//! Source: `tensorflow/core/example/{example,feature}.proto`, and protobuf's page on its encoding.

use super::tfrecord::RecordFault;

type Result<T> = std::result::Result<T, RecordFault>;

/// Maximum of features in an example, and of values in a list of numbers: 16 times what the longest
/// sequences need. Costs 8 MiB a list.
const VALUES_MAX: usize = 1 << 20;

/// The features of one record.
#[derive(Debug)]
pub struct Example<'a> {
    features: Vec<(&'a [u8], Message<'a>)>,
}

impl<'a> Example<'a> {
    /// Reads the names of the features; their values are read on request. `at` is the offset of the
    /// data in its record.
    ///
    /// # Errors
    /// [`RecordFault`] for data that is not such a message.
    pub fn parse(data: &'a [u8], at: usize) -> Result<Self> {
        let mut features = Vec::new();
        let mut example = Message { bytes: data, at };
        while let Some(field) = example.next()? {
            let (1, mut map) = (field.number, field.message("features")?) else { continue };
            while let Some(entry) = map.next()? {
                let (1, mut entry) = (entry.number, entry.message("a feature")?) else { continue };
                let (mut key, mut value) = (&[][..], Message { bytes: &[], at: entry.at });
                while let Some(part) = entry.next()? {
                    match part.number {
                        1 => key = part.message("a name")?.bytes,
                        2 => value = part.message("a feature")?,
                        _ => {}
                    }
                }
                if features.len() == VALUES_MAX {
                    let expected = format!("at most {VALUES_MAX} features");
                    return Err(RecordFault::new(entry.at, "more", expected));
                }
                features.push((key, value));
            }
        }
        Ok(Example { features })
    }

    /// Whether there is a feature of this name.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// The names of the features, as a message lists them.
    #[must_use]
    pub fn names(&self) -> String {
        let names = self.features.iter().take(20).map(|(name, _)| name.escape_ascii().to_string());
        let names: Vec<_> = names.collect();
        if names.is_empty() { "no features".to_owned() } else { names.join(", ") }
    }

    /// Of several features of a name the last counts, as in every map of protobuf.
    fn find(&self, name: &str) -> Option<Message<'a>> {
        self.features
            .iter()
            .rev()
            .find(|(of, _)| *of == name.as_bytes())
            .map(|(_, feature)| *feature)
    }

    /// The values of a list of bytes. `None` if there is no such feature, or it holds numbers.
    ///
    /// # Errors
    /// [`RecordFault`] for a malformed list.
    pub fn bytes(&self, name: &str) -> Result<Option<Vec<&'a [u8]>>> {
        let Some(mut list) = self.list(name, 1)? else { return Ok(None) };
        let mut values = Vec::new();
        while let Some(field) = list.next()? {
            if field.number == 1 {
                values.push(field.message("bytes")?.bytes);
            }
        }
        Ok(Some(values))
    }

    /// Reads a list of integers into `values`.
    ///
    /// # Errors
    /// [`RecordFault`] if it is missing, of another type, or malformed.
    pub fn ints(&self, name: &str, values: &mut Vec<i64>) -> Result<()> {
        let list = self.required(name, 3, "integers")?;
        // Negative numbers are written as 64 bits in two's complement.
        numbers(list, 0, values, |message| message.varint().map(u64::cast_signed))
    }

    /// Reads a list of floats into `values`.
    ///
    /// # Errors
    /// As [`Example::ints`].
    pub fn floats(&self, name: &str, values: &mut Vec<f32>) -> Result<()> {
        let list = self.required(name, 2, "floats")?;
        numbers(list, 5, values, |message| {
            let bytes = message.take(4)?;
            Ok(f32::from_le_bytes(bytes.try_into().expect("took 4")))
        })
    }

    fn required(&self, name: &str, kind: u64, of: &str) -> Result<Message<'a>> {
        let at = self.features.first().map_or(0, |(_, feature)| feature.at);
        self.list(name, kind)?.ok_or_else(|| {
            let found = match self.has(name) {
                true => "a list of another type".to_owned(),
                false => self.names(),
            };
            RecordFault::new(at, found, format!("a feature '{name}' of {of}"))
        })
    }

    /// The list of a feature, if it is of this kind. A writer sets one kind; the last counts.
    fn list(&self, name: &str, kind: u64) -> Result<Option<Message<'a>>> {
        let Some(mut feature) = self.find(name) else { return Ok(None) };
        let mut list = None;
        while let Some(field) = feature.next()? {
            if (1..=3).contains(&field.number) {
                list = (field.number == kind).then(|| field.message("a list")).transpose()?;
            }
        }
        Ok(list)
    }
}

/// Reads repeated numbers of a wire type, packed or one by one.
fn numbers<'a, T>(
    mut list: Message<'a>,
    wire_type: u8,
    values: &mut Vec<T>,
    read: impl Fn(&mut Message<'a>) -> Result<T>,
) -> Result<()> {
    values.clear();
    while let Some(field) = list.next()? {
        if field.number != 1 {
            continue;
        }
        let mut packed = field.value;
        if field.wire_type != wire_type && field.wire_type != 2 {
            return Err(field.wrong("a number"));
        }
        while !packed.bytes.is_empty() {
            if values.len() == VALUES_MAX {
                let expected = format!("a list of at most {VALUES_MAX} numbers");
                return Err(RecordFault::new(packed.at, "more", expected));
            }
            values.push(read(&mut packed)?);
        }
    }
    Ok(())
}

/// A message, or the rest of one.
#[derive(Clone, Copy, Debug)]
struct Message<'a> {
    bytes: &'a [u8],
    /// Offset in bytes from the start of the record.
    at: usize,
}

/// A field, whose value may be a message.
#[derive(Clone, Copy, Debug)]
struct Field<'a> {
    number: u64,
    wire_type: u8,
    value: Message<'a>,
}

impl<'a> Message<'a> {
    fn next(&mut self) -> Result<Option<Field<'a>>> {
        if self.bytes.is_empty() {
            return Ok(None);
        }
        let at = self.at;
        let tag = self.varint()?;
        let (number, wire_type) = (tag >> 3, (tag & 7) as u8); // fits: three bits
        if number == 0 {
            return Err(RecordFault::new(at, format!("tag {tag}"), "a field of tf.Example"));
        }
        let start = self.at;
        let bytes = match wire_type {
            0 => {
                let rest = self.bytes;
                self.varint()?;
                &rest[..self.at - start]
            }
            1 => self.take(8)?,
            2 => {
                let len = self.varint()?;
                self.take(len)?
            }
            5 => self.take(4)?,
            _ => {
                let found = format!("wire type {wire_type}");
                return Err(RecordFault::new(at, found, "wire type 0, 1, 2 or 5 of tf.Example"));
            }
        };
        let value = Message { bytes, at: self.at - bytes.len() };
        Ok(Some(Field { number, wire_type, value }))
    }

    fn varint(&mut self) -> Result<u64> {
        let mut value = 0;
        for (idx, &byte) in self.bytes.iter().take(10).enumerate() {
            value |= u64::from(byte & 0x7f) << (7 * idx);
            if byte < 0x80 {
                self.take(idx as u64 + 1)?;
                return Ok(value);
            }
        }
        let found = if self.bytes.len() < 10 { "its end" } else { "more than 10 bytes" };
        Err(RecordFault::new(self.at, found, "a number in a message of tf.Example"))
    }

    fn take(&mut self, len: u64) -> Result<&'a [u8]> {
        let rest = self.bytes.len();
        let Some(len) = usize::try_from(len).ok().filter(|&len| len <= rest) else {
            let found = format!("a length of {len} bytes");
            return Err(RecordFault::new(self.at, found, format!("at most {rest} bytes")));
        };
        let (taken, rest) = self.bytes.split_at(len);
        self.bytes = rest;
        self.at += len;
        Ok(taken)
    }
}

impl<'a> Field<'a> {
    fn message(&self, of: &str) -> Result<Message<'a>> {
        if self.wire_type == 2 { Ok(self.value) } else { Err(self.wrong(of)) }
    }

    fn wrong(&self, expected: &str) -> RecordFault {
        let found = format!("wire type {} in field {}", self.wire_type, self.number);
        RecordFault::new(self.value.at, found, format!("{expected} of tf.Example"))
    }
}
