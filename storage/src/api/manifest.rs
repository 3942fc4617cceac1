//! The commit record of a folder: its files, their lengths and their checksums.
//!
//! A folder is complete if and only if its manifest exists and every file in it has the listed
//! length and checksum. The manifest is written last, and has its own checksum: it is a JSON object
//! whose last line is `"manifest_crc64"`, the CRC-64/NVME, in 16 hexadecimal digits, of every byte
//! before that line. So it can be read by anything that reads JSON, and checked by a dozen lines.

use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::{Crc64, Error, Key, RangeRead, Result, Storage, crc64, read_all, write_all};

/// One file of a folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Its path below the folder of the manifest; from an upload, the last component of its key.
    pub path: String,
    /// Its length.
    pub bytes: u64,
    /// CRC-64/NVME of all its bytes, in 16 hexadecimal digits.
    #[serde(with = "hex")]
    pub crc64: u64,
}

/// The files of a complete folder, and metadata of the type `M`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Manifest<M = Value> {
    /// What the folder is, such as `feedline-tokens` or `feedline-ckpt`.
    pub format: String,
    /// The version of that format. A reader refuses one that it does not know.
    pub version: u32,
    /// Every file but the manifest itself.
    pub files: Vec<FileEntry>,
    /// Metadata of the format.
    pub meta: M,
}

/// A manifest as it is stored.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Sealed<M> {
    format: String,
    version: u32,
    files: Vec<FileEntry>,
    meta: M,
    #[serde(rename = "manifest_crc64")]
    _crc64: IgnoredAny,
}

/// The result of [`Manifest::verify`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VerifyReport {
    /// Files that are as listed.
    pub files: usize,
    /// Their bytes, all of which were read and checksummed.
    pub bytes: u64,
}

/// The line that closes the JSON object, after which nothing may follow.
const SEAL: &str = "\n  \"manifest_crc64\": \"";

/// The longest manifest; it is read into memory. 1 GiB is two to four million chunks.
const MANIFEST_BYTES_MAX: u64 = 1 << 30;

/// 4 MiB reads keep every device busy and cost two buffers.
const VERIFY_READ_BYTES: usize = 4 << 20;

impl<M: Serialize> Manifest<M> {
    /// Writes the manifest, which commits the folder it is in. All files must be durable by then.
    ///
    /// # Errors
    /// As [`write_all`], and [`Error::Unsupported`] for a manifest that is too long to read.
    pub fn write(&self, store: &dyn Storage, key: &Key) -> Result<FileEntry> {
        let text = self.to_text();
        if text.len() as u64 > MANIFEST_BYTES_MAX {
            let operation = "write a manifest of more than 1 GiB to";
            return Err(Error::Unsupported { operation, object: store.display(key) });
        }
        write_all(store, key, text.as_bytes())
    }

    fn to_text(&self) -> String {
        let mut text =
            serde_json::to_string_pretty(self).expect("strings and numbers always serialize");
        let unsealed =
            text.strip_suffix("\n}").expect("a pretty-printed object ends with this").len();
        text.truncate(unsealed);
        text.push(',');
        let crc = crc64(text.as_bytes());
        text.push_str(&format!("{SEAL}{crc:016x}\"\n}}\n"));
        text
    }
}

impl<M: DeserializeOwned> Manifest<M> {
    /// As [`Manifest::read_summed`], for metadata of a known type. Without a [`Value`] in between
    /// a long manifest takes a fraction of the memory and the time. A field of `M` that is a
    /// `Value` needs [`unique_json`].
    ///
    /// # Errors
    /// As [`Manifest::read`], also if the metadata is of another type.
    pub fn read_typed(store: &dyn Storage, key: &Key) -> Result<(Self, u64)> {
        let object = store.display(key);
        let len_bytes = store.open(key)?.len_bytes();
        if len_bytes > MANIFEST_BYTES_MAX {
            let found = format!("{len_bytes} bytes");
            let expected = format!("a manifest of at most {MANIFEST_BYTES_MAX} bytes");
            return Err(Error::Corrupt { object, offset: 0, found, expected });
        }
        Self::from_bytes(&read_all(store, key)?, &object)
    }

    fn from_bytes(bytes: &[u8], object: &str) -> Result<(Self, u64)> {
        let corrupt = |offset: usize, found: String, expected: &str| Error::Corrupt {
            object: object.to_owned(),
            offset: offset as u64,
            found,
            expected: expected.to_owned(),
        };
        let text = std::str::from_utf8(bytes).map_err(|e| {
            corrupt(e.valid_up_to(), "a byte that is not UTF-8".to_owned(), "UTF-8 text")
        })?;
        let seal = text.rfind(SEAL).ok_or_else(|| {
            corrupt(text.len(), "no checksum".to_owned(), "a last line \"manifest_crc64\"")
        })?;
        let digits = text[seal + SEAL.len()..]
            .strip_suffix("\"\n}\n")
            .and_then(|digits| u64::from_str_radix(digits, 16).ok())
            .ok_or_else(|| {
                corrupt(seal, "a truncated last line".to_owned(), "16 hexadecimal digits")
            })?;
        let crc = crc64(&bytes[..seal]);
        if crc != digits {
            return Err(corrupt(
                seal,
                format!("manifest_crc64 {digits:016x}"),
                &format!("manifest_crc64 {crc:016x}, the checksum of the text before it"),
            ));
        }
        let Sealed { format, version, files, meta, .. } = serde_json::from_str(text)
            .map_err(|e| corrupt(0, e.to_string(), "exactly the fields of a manifest"))?;
        Ok((Manifest { format, version, files, meta }, crc))
    }
}

impl Manifest {
    /// Reads a manifest and verifies its own checksum.
    ///
    /// # Errors
    /// [`Error::NotFound`], or [`Error::Corrupt`] for anything that [`Manifest::write`] did not
    /// write.
    pub fn read(store: &dyn Storage, key: &Key) -> Result<Self> {
        Ok(Self::read_summed(store, key)?.0)
    }

    /// As [`Manifest::read`], with the checksum, which identifies this manifest.
    ///
    /// # Errors
    /// As [`Manifest::read`].
    pub fn read_summed(store: &dyn Storage, key: &Key) -> Result<(Self, u64)> {
        let (Manifest { format, version, files, meta: UniqueJson(meta) }, crc) =
            Manifest::<UniqueJson>::read_typed(store, key)?;
        Ok((Manifest { format, version, files, meta }, crc))
    }

    /// Reads every file that the manifest lists below `folder` and compares its length and
    /// checksum.
    ///
    /// # Errors
    /// The first file that is absent ([`Error::NotFound`]) or not as listed ([`Error::Corrupt`]).
    pub fn verify(&self, store: &dyn Storage, folder: &Key) -> Result<VerifyReport> {
        let mut report = VerifyReport::default();
        for file in &self.files {
            file.verify(store, folder)?;
            report.files += 1;
            report.bytes += file.bytes;
        }
        Ok(report)
    }
}

impl FileEntry {
    /// Reads the file below `folder` and compares its length and checksum.
    ///
    /// # Errors
    /// [`Error::NotFound`] or [`Error::Corrupt`].
    pub fn verify(&self, store: &dyn Storage, folder: &Key) -> Result<()> {
        let key = folder.join(&self.path)?;
        let object = store.open(&key)?;
        let corrupt = |found: String, expected: String| {
            Err(Error::Corrupt { object: store.display(&key), offset: 0, found, expected })
        };
        if object.len_bytes() != self.bytes {
            let found = format!("{} bytes", object.len_bytes());
            return corrupt(found, format!("{} bytes as listed in the manifest", self.bytes));
        }
        let mut crc = Crc64::new();
        let mut buf = vec![
            0;
            VERIFY_READ_BYTES
                .min(usize::try_from(self.bytes).unwrap_or(VERIFY_READ_BYTES))
        ];
        let mut offset = 0;
        while offset < self.bytes {
            // fits: at most the buffer
            let len = (self.bytes - offset).min(buf.len() as u64) as usize;
            object.read_many(&mut [RangeRead { offset, buf: &mut buf[..len] }])?;
            crc.update(&buf[..len]);
            offset += len as u64;
        }
        if crc.value() != self.crc64 {
            let found = format!("CRC-64 {:016x} of {} bytes", crc.value(), self.bytes);
            return corrupt(found, format!("CRC-64 {:016x} as listed in the manifest", self.crc64));
        }
        Ok(())
    }
}

/// Deserializes a JSON value and refuses duplicate names in an object: for
/// `#[serde(deserialize_with)]`.
///
/// # Errors
/// Those of the deserializer, and a duplicate name.
pub fn unique_json<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<Value, D::Error> {
    once::deserialize(from)
}

#[derive(Deserialize)]
struct UniqueJson(#[serde(deserialize_with = "unique_json")] Value);

/// A JSON value without duplicate names in an object: for duplicates, some parsers take the first
/// value and some the last.
mod once {
    use std::fmt;

    use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
    use serde_json::{Map, Number, Value};

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Value, D::Error> {
        Once.deserialize(from)
    }

    struct Once;

    impl<'de> DeserializeSeed<'de> for Once {
        type Value = Value;

        fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Value, D::Error> {
            from.deserialize_any(self)
        }
    }

    impl<'de> Visitor<'de> for Once {
        type Value = Value;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a JSON value")
        }

        fn visit_unit<E: Error>(self) -> Result<Value, E> {
            Ok(Value::Null)
        }

        fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
            Ok(value.into())
        }

        fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
            Ok(value.into())
        }

        fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
            Ok(value.into())
        }

        fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
            Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
        }

        fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
            Ok(value.into())
        }

        fn visit_string<E: Error>(self, value: String) -> Result<Value, E> {
            Ok(value.into())
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
            let mut list = Vec::new();
            while let Some(value) = from.next_element_seed(Once)? {
                list.push(value);
            }
            Ok(Value::Array(list))
        }

        fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
            let mut map = Map::new();
            while let Some(name) = from.next_key::<String>()? {
                if map.contains_key(&name) {
                    let reason = format!("duplicate key '{name:.80}'");
                    return Err(A::Error::custom(reason));
                }
                map.insert(name, from.next_value_seed(Once)?);
            }
            Ok(Value::Object(map))
        }
    }
}

mod hex {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(value: &u64, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&format!("{value:016x}"))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
        let text = String::deserialize(from)?;
        if text.len() != 16 {
            return Err(D::Error::custom(format!(
                "expected 16 hexadecimal digits, found '{text}'"
            )));
        }
        u64::from_str_radix(&text, 16).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Manifest {
        let file = FileEntry { path: "a.bin".to_owned(), bytes: 3, crc64: 7 };
        let meta = serde_json::json!({ "step": 5, "note": "\n  \"manifest_crc64\": \"0\"" });
        Manifest { format: "test".to_owned(), version: 1, files: vec![file], meta }
    }

    #[test]
    fn round_trip_through_json() {
        let text = sample().to_text();
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["files"][0]["crc64"], "0000000000000007");
        assert_eq!(Manifest::<Value>::from_bytes(text.as_bytes(), "m").unwrap().0, sample());
    }

    /// `meta` is parsed as by `serde_json`, but duplicate names are refused.
    #[test]
    fn duplicate_names_are_refused() {
        let read = |meta: &str| {
            let unsealed = sample().to_text();
            let (head, _) = unsealed.split_once("  \"meta\"").unwrap();
            let unsealed = format!("{head}  \"meta\": {meta},");
            let text = format!("{unsealed}{SEAL}{:016x}\"\n}}\n", crc64(unsealed.as_bytes()));
            Manifest::<UniqueJson>::from_bytes(text.as_bytes(), "m").map(|(m, _)| m.meta.0)
        };
        for meta in [
            "null",
            "{}",
            "[1, -2, 3.25, 1e300, 18446744073709551615, -0.0, true, false, null, \"\\u00e4\"]",
            "{\"a\": {\"b\": [{\"c\": 1}, {\"c\": 2}]}, \"b\": 3}",
        ] {
            let expected: Value = serde_json::from_str(meta).unwrap();
            assert_eq!(read(meta).unwrap(), expected, "{meta}");
        }
        for meta in ["{\"a\": 1, \"a\": 1}", "[{\"b\": {\"c\": 1, \"d\": 2, \"\\u0063\": 3}}]"] {
            let text = read(meta).unwrap_err().to_string();
            assert!(text.contains("duplicate key"), "{text}");
        }
        assert!(read(&format!("{}{}", "[".repeat(500), "]".repeat(500))).is_err());
    }

    #[test]
    fn every_changed_byte_is_detected() {
        let text = sample().to_text().into_bytes();
        for position in 0..text.len() {
            for bit in 0..8 {
                let mut bad = text.clone();
                bad[position] ^= 1 << bit;
                // Only the case of a hexadecimal digit of the checksum may differ.
                let same = bad.eq_ignore_ascii_case(&text) && position > text.len() - 22;
                let read = Manifest::<Value>::from_bytes(&bad, "m");
                assert!(read.is_err() || same, "bit {bit} of byte {position} was not detected");
            }
        }
        for len in 0..text.len() {
            assert!(
                Manifest::<Value>::from_bytes(&text[..len], "m").is_err(),
                "cut to {len} bytes"
            );
        }
    }
}
