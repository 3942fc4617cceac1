use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::Result;
use storage::{Key, Storage, crc64, open_url, read_all, write_all};

/// The best rates of a device, as measured by `feedline ckpt bench`, so that a save can report its
/// share of them. Stored per mount in the user's cache folder, for reports only: if missing or
/// broken, it is ignored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeakRate {
    /// Sequential direct writes, until durable.
    pub write_bytes_per_s: u64,
    /// Sequential direct reads.
    pub read_bytes_per_s: u64,
    /// The machine, file system and mount measured.
    pub place: String,
}

impl PeakRate {
    /// The last measurement for the mount of this store.
    #[must_use]
    pub fn of(store: &dyn Storage) -> Option<Self> {
        let place = place_of(store)?;
        let folder = open_url(folder()?.to_str()?).ok()?;
        let text = read_all(&*folder, &key_of(&place)?).ok()?;
        PeakRate::parse(&text, &place)
    }

    /// A stored measurement, if it is one of this place.
    fn parse(text: &[u8], place: &str) -> Option<Self> {
        let peak: PeakRate = serde_json::from_slice(text).ok()?;
        (peak.place == place && peak.write_bytes_per_s > 0).then_some(peak)
    }

    /// Stores a measurement for later saves, replacing an older one. Returns `None` if there is no
    /// cache folder, or the store is on no mount.
    ///
    /// # Errors
    /// Errors of the cache folder's store.
    pub fn keep(
        store: &dyn Storage,
        write_bytes_per_s: u64,
        read_bytes_per_s: u64,
    ) -> Result<Option<Self>> {
        let wanted = || {
            let place = place_of(store)?;
            Some((folder()?.to_str()?.to_owned(), key_of(&place)?, place))
        };
        let Some((folder, key, place)) = wanted() else { return Ok(None) };
        let peak = PeakRate { write_bytes_per_s, read_bytes_per_s, place };
        let text = serde_json::to_vec(&peak).expect("numbers and a string always serialize");
        let folder = open_url(&folder)?;
        match folder.delete(&key) {
            Ok(()) | Err(storage::Error::NotFound { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        write_all(&*folder, &key, &text)?;
        Ok(Some(peak))
    }
}

/// Includes the machine: home folders are shared by machines, disks are not.
fn place_of(store: &dyn Storage) -> Option<String> {
    let profile = store.profile();
    let machine = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    let (machine, kind, point) = (machine.trim(), &profile.file_system, &profile.mount_point);
    (!point.is_empty()).then(|| format!("{machine}: {kind} at {point}"))
}

fn folder() -> Option<PathBuf> {
    let of = |variable| std::env::var_os(variable).filter(|value| !value.is_empty());
    let cache = of("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(of("HOME")?).join(".cache")))?;
    Some(cache.join("feedline").join("peaks"))
}

fn key_of(place: &str) -> Option<Key> {
    Key::new(format!("{:016x}.json", crc64(place.as_bytes()))).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_measurement_of_another_place_is_ignored() {
        let text = r#"{"write_bytes_per_s": 5, "read_bytes_per_s": 6, "place": "a: ext4 at /"}"#;
        let parse = |text: &str, place| PeakRate::parse(text.as_bytes(), place);
        assert_eq!(parse(text, "a: ext4 at /").unwrap().read_bytes_per_s, 6);
        assert_eq!(parse(text, "b: ext4 at /"), None);
        for bad in ["", "{", "[5]", &text[..40], &text.replace('5', "0"), &text.replace('5', "-5")]
        {
            assert_eq!(parse(bad, "a: ext4 at /"), None, "{bad}");
        }
    }
}
