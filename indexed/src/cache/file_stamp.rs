//! Detects whether a file has changed since it was checked, without reading all of it again.

use std::time::UNIX_EPOCH;

use serde_json::{Value, json};
use storage::{Crc64, Object, RangeRead, Storage};

use crate::mmididx::dataset::for_each_chunk;
use crate::{IndexedDataset, Result};

/// Number of pieces of 4 KiB that are read of a file, spread evenly, including the first and the
/// last of the file. The pointers of an `.idx` are running sums, so those at the end depend on
/// every length before them.
const PIECES: u64 = 16;
const PIECE_BYTES: u64 = 4096;

/// Distinguishes versions of a file: its length, its modification time, and a checksum of some of
/// its bytes; of all of them in a store without modification times.
pub(crate) fn stamp(object: &dyn Object) -> Result<Value> {
    let modified = object.file().and_then(|file| file.metadata().ok()?.modified().ok());
    let modified = modified.and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    let sum = if modified.is_some() { sum_of_pieces(object)? } else { sum_of_all(object)? };
    Ok(json!({
        "bytes": object.len_bytes(),
        "modified_ns": modified.map(|since| since.as_nanos().to_string()),
        "sum": format!("{sum:016x}"),
    }))
}

/// The stamps of the files of a dataset.
pub(crate) fn dataset_stamp(dataset: &IndexedDataset, store: &dyn Storage) -> Result<Value> {
    let manifest = dataset.prefix().with_suffix(".manifest.json")?;
    let manifest = match store.open(&manifest) {
        Ok(object) => stamp(object.as_ref())?,
        Err(storage::Error::NotFound { .. }) => Value::Null,
        Err(error) => return Err(error.into()),
    };
    Ok(json!({
        "dataset": dataset.display(),
        "bin_bytes": dataset.bin().len_bytes(),
        "idx": stamp(dataset.idx())?,
        "manifest": manifest,
    }))
}

fn sum_of_pieces(object: &dyn Object) -> Result<u64> {
    let len = object.len_bytes();
    if len <= PIECES * PIECE_BYTES {
        return sum_of_all(object);
    }
    let pages = (len - PIECE_BYTES).div_ceil(PIECE_BYTES);
    let mut bytes = vec![0; (PIECES * PIECE_BYTES) as usize]; // fits: 64 KiB
    let mut reads = Vec::new();
    for (nth, buf) in (0..PIECES).zip(bytes.chunks_mut(PIECE_BYTES as usize)) {
        // Aligned pages, except the last, which ends with the file.
        let page = u128::from(pages) * u128::from(nth) / u128::from(PIECES - 1);
        let offset = (page as u64 * PIECE_BYTES).min(len - PIECE_BYTES); // fits: within the file
        reads.push(RangeRead { offset, buf });
    }
    object.read_many(&mut reads)?;
    Ok(storage::crc64(&bytes))
}

fn sum_of_all(object: &dyn Object) -> Result<u64> {
    let mut sum = Crc64::new();
    for_each_chunk(object, |bytes| {
        sum.update(bytes);
        Ok(())
    })?;
    Ok(sum.value())
}

#[cfg(test)]
mod tests {
    use std::io::{Seek as _, SeekFrom, Write as _};

    use storage::Key;

    use super::*;

    /// A change of the length, or of the first or last page, is detected whatever the clock says.
    #[test]
    fn a_changed_file_has_another_stamp() {
        let folder = tempfile::tempdir().unwrap();
        let store = storage::open_url(folder.path().to_str().unwrap()).unwrap();
        let key = Key::new("a").unwrap();
        let sum_now = || stamp(store.open(&key).unwrap().as_ref()).unwrap()["sum"].take();
        for len in [0, 1, 4096, 65_536, 65_537, 200_000] {
            let path = folder.path().join("a");
            std::fs::write(&path, vec![7; len]).unwrap();
            let before = sum_now();
            assert_eq!(sum_now(), before, "{len} bytes");
            for place in [0, 4095, len.saturating_sub(1)].into_iter().filter(|&at| at < len) {
                let mut file = std::fs::File::options().write(true).open(&path).unwrap();
                for byte in [8, 7] {
                    file.seek(SeekFrom::Start(place as u64)).unwrap();
                    file.write_all(&[byte]).unwrap();
                    assert_eq!(sum_now() == before, byte == 7, "{len} bytes, at {place}");
                }
            }
        }
    }
}
