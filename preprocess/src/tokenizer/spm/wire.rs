//! The wire format of protocol buffers: fields, one after another, each a number and a value.

use crate::{Error, Result};

/// Reads the fields of one message.
#[derive(Clone, Debug)]
pub(super) struct Fields<'a> {
    file: &'a str,
    bytes: &'a [u8],
    at: usize,
    end: usize,
}

/// A field: its value, and its position in the file.
#[derive(Clone, Debug)]
pub(super) struct Field<'a> {
    pub(super) number: u32,
    pub(super) at: usize,
    value: Value<'a>,
    file: &'a str,
}

#[derive(Clone, Debug)]
enum Value<'a> {
    Varint(u64),
    Fixed32([u8; 4]),
    Fixed64,
    Bytes(Fields<'a>),
}

impl<'a> Fields<'a> {
    pub(super) fn new(file: &'a str, bytes: &'a [u8]) -> Self {
        Fields { file, bytes, at: 0, end: bytes.len() }
    }

    /// The next field, if there is one.
    pub(super) fn next(&mut self) -> Result<Option<Field<'a>>> {
        if self.at == self.end {
            return Ok(None);
        }
        let at = self.at;
        let tag = self.varint()?;
        let number = u32::try_from(tag >> 3).ok().filter(|&number| number > 0);
        let number = number.ok_or_else(|| self.bad(at, &format!("tag {tag}"), "a valid field"))?;
        let value = match tag & 7 {
            0 => Value::Varint(self.varint()?),
            1 => {
                self.take(8)?;
                Value::Fixed64
            }
            2 => {
                let len = self.varint()?;
                let start = self.at;
                self.take(len)?;
                Value::Bytes(Fields { at: start, end: self.at, ..*self })
            }
            5 => {
                let start = self.at;
                self.take(4)?;
                Value::Fixed32(self.bytes[start..self.at].try_into().expect("four bytes"))
            }
            other => {
                return Err(self.bad(at, &format!("wire type {other}"), "wire type 0, 1, 2 or 5"));
            }
        };
        Ok(Some(Field { number, at, value, file: self.file }))
    }

    fn varint(&mut self) -> Result<u64> {
        let start = self.at;
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let Some(&byte) = self.bytes[..self.end].get(self.at) else {
                return Err(self.bad(start, "a truncated one", "a complete number"));
            };
            self.at += 1;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(self.bad(start, "a longer one", "a number of at most 10 bytes"))
    }

    fn take(&mut self, len: u64) -> Result<()> {
        let rest = self.end - self.at;
        match usize::try_from(len).ok().filter(|&len| len <= rest) {
            Some(len) => self.at += len,
            None => {
                let found = format!("{len} bytes");
                return Err(self.bad(self.at, &found, &format!("a value of at most {rest} bytes")));
            }
        }
        Ok(())
    }

    fn bad(&self, at: usize, found: &str, expected: &str) -> Error {
        bad(self.file, at, found, expected)
    }
}

impl<'a> Field<'a> {
    pub(super) fn message(&self) -> Result<Fields<'a>> {
        match &self.value {
            Value::Bytes(fields) => Ok(fields.clone()),
            _ => Err(self.wrong("bytes")),
        }
    }

    pub(super) fn bytes(&self) -> Result<&'a [u8]> {
        let fields = self.message()?;
        Ok(&fields.bytes[fields.at..fields.end])
    }

    pub(super) fn text(&self) -> Result<&'a str> {
        let bytes = self.bytes()?;
        std::str::from_utf8(bytes).map_err(|_| self.bad("invalid UTF-8", "UTF-8 text"))
    }

    pub(super) fn float(&self) -> Result<f32> {
        match self.value {
            Value::Fixed32(bytes) => Ok(f32::from_le_bytes(bytes)),
            _ => Err(self.wrong("a float")),
        }
    }

    pub(super) fn varint(&self) -> Result<u64> {
        match self.value {
            Value::Varint(value) => Ok(value),
            _ => Err(self.wrong("a number")),
        }
    }

    pub(super) fn flag(&self) -> Result<bool> {
        Ok(self.varint()? != 0)
    }

    pub(super) fn bad(&self, found: &str, expected: &str) -> Error {
        bad(self.file, self.at, found, expected)
    }

    fn wrong(&self, expected: &str) -> Error {
        self.bad("another type", &format!("{expected} in field {}", self.number))
    }
}

fn bad(file: &str, at: usize, found: &str, expected: &str) -> Error {
    let (file, found) = (file.to_owned(), format!("{found} at byte {at}"));
    Error::BadVocab { file, line: None, found, expected: expected.to_owned(), hint: None }
}
