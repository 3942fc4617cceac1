use std::fmt;

use serde::{Deserialize, Serialize};
use storage::crc64_join;

/// The CRC-64/NVME of bytes. JSON has it in 16 hexadecimal digits, as a manifest does: many readers
/// of JSON round a number that is this long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub(crate) struct Checksum(pub(crate) u64);

impl Checksum {
    /// The checksum of these bytes and `len_bytes` more, whose checksum is `crc64`.
    pub(crate) fn then(self, crc64: u64, len_bytes: u64) -> Self {
        Checksum(crc64_join(self.0, crc64, len_bytes))
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl From<Checksum> for String {
    fn from(checksum: Checksum) -> Self {
        checksum.to_string()
    }
}

impl TryFrom<String> for Checksum {
    type Error = std::num::ParseIntError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        u64::from_str_radix(&text, 16).map(Checksum)
    }
}
