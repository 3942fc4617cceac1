//! Checksums in JSON: 16 lower-case hexadecimal digits.

use serde::{Deserialize, Deserializer, Serializer, de::Error};

pub(crate) fn serialize<S: Serializer>(value: &u64, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&format!("{value:016x}"))
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    parse(&String::deserialize(from)?).map_err(D::Error::custom)
}

fn parse(digits: &str) -> Result<u64, String> {
    let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    match u64::from_str_radix(digits, 16) {
        Ok(value) if digits.len() == 16 && digits.bytes().all(is_hex) => Ok(value),
        _ => Err(format!("'{digits:.20}' instead of 16 hexadecimal digits of a CRC-64")),
    }
}

/// Stored blocks in one string, end to end: 8 digits of length and 16 of checksum.
pub(crate) mod stored {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use std::fmt::Write as _;

    use crate::format::catalog::StoredBlock;

    const DIGITS: usize = 24;

    pub(crate) fn serialize<S: Serializer>(
        blocks: &[StoredBlock],
        to: S,
    ) -> Result<S::Ok, S::Error> {
        let mut text = String::with_capacity(blocks.len() * DIGITS);
        for StoredBlock { bytes, crc64 } in blocks {
            write!(text, "{bytes:08x}{crc64:016x}").expect("writes to a string do not fail");
        }
        to.serialize_str(&text)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Vec<StoredBlock>, D::Error> {
        let text = String::deserialize(from)?;
        if !text.is_ascii() || !text.len().is_multiple_of(DIGITS) {
            let len = text.len();
            return Err(D::Error::custom(format!(
                "{len} bytes of packed blocks instead of {DIGITS} hexadecimal digits each"
            )));
        }
        let block = |at: usize| {
            let (bytes, crc64) = text[at..at + DIGITS].split_at(8);
            let bytes = super::parse(&format!("00000000{bytes}"))? as u32; // fits: 8 digits
            Ok(StoredBlock { bytes, crc64: super::parse(crc64)? })
        };
        (0..text.len())
            .step_by(DIGITS)
            .map(block)
            .collect::<Result<_, String>>()
            .map_err(D::Error::custom)
    }
}

/// Many checksums in one string, end to end: one line per chunk, not per block.
pub(crate) mod list {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use std::fmt::Write as _;

    pub(crate) fn serialize<S: Serializer>(values: &[u64], to: S) -> Result<S::Ok, S::Error> {
        let mut text = String::with_capacity(values.len() * 16);
        for value in values {
            write!(text, "{value:016x}").expect("writes to a string do not fail");
        }
        to.serialize_str(&text)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u64>, D::Error> {
        let text = String::deserialize(from)?;
        if !text.is_ascii() || !text.len().is_multiple_of(16) {
            let len = text.len();
            return Err(D::Error::custom(format!(
                "{len} bytes of block checksums instead of 16 hexadecimal digits each"
            )));
        }
        let digits = (0..text.len()).step_by(16).map(|at| &text[at..at + 16]);
        digits.map(|digits| super::parse(digits).map_err(D::Error::custom)).collect()
    }
}
