use serde::{Deserialize, Serialize};
use storage::{Object, RangeRead};

use crate::checksum::Checksum;

/// Bytes at either end of an input that are part of its identity. Discovery reads the first of them
/// in any case, so this costs no further request.
const END_BYTES: u64 = 64 << 10;

/// Distinguishes an input from another of the same name. Two files of equal length and ends can
/// still differ between them; only an equal version, or a checksum of the content, excludes that.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InputIdentity {
    /// Its length as stored.
    pub(crate) bytes: u64,
    /// [`Object::version`]. The modification time is not part of it: programs set that at will.
    pub(crate) version: Option<String>,
    /// The checksum of its first and last 64 KiB.
    pub(crate) ends_crc64: Checksum,
}

impl InputIdentity {
    /// The identity of an object, and its first bytes.
    pub(crate) fn read(object: &dyn Object) -> storage::Result<(Self, Vec<u8>)> {
        let bytes = object.len_bytes();
        let version = object.version();
        let head_len = bytes.min(END_BYTES);
        let tail_len = (bytes - head_len).min(END_BYTES);
        let mut ends = vec![0; (head_len + tail_len) as usize]; // fits: at most 128 KiB
        let (head, tail) = ends.split_at_mut(head_len as usize); // fits: as above
        object.read_many(&mut [
            RangeRead { offset: 0, buf: head },
            RangeRead { offset: bytes - tail_len, buf: tail },
        ])?;
        let ends_crc64 = Checksum(storage::crc64(&ends));
        ends.truncate(head_len as usize); // fits: as above
        Ok((InputIdentity { bytes, version, ends_crc64 }, ends))
    }

    /// Whether the store shows that nothing was written since `earlier` was read.
    pub(crate) fn is_unchanged_since(&self, earlier: &Self) -> bool {
        self.version.is_some() && self == earlier
    }
}
