//! Any safetensors file: its tensors, and their bytes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use serde::Deserialize;

use crate::base::parallel_io;
use crate::format::safetensors::{self, HeaderEntry};
use crate::{Dtype, Error, Result};
use storage::{Key, Object, RangeRead, Storage};

/// Unit of work of a thread that reads.
const READ_BYTES: usize = 16 << 20;

/// A tensor of a safetensors file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileTensor {
    /// Its name.
    pub name: String,
    /// Its elements.
    pub dtype: Dtype,
    /// Elements along each axis; empty for a scalar. Row-major.
    pub shape: Vec<u64>,
    /// Its bytes in the file.
    pub bytes: Range<u64>,
}

/// An open safetensors file, of this or another program. Unlike a step it has no checksums.
#[derive(Debug)]
pub struct TensorFile {
    object: Arc<dyn Object>,
    tensors: Vec<FileTensor>,
    metadata: BTreeMap<String, String>,
}

/// The metadata of a header.
#[derive(Deserialize)]
struct Metadata {
    #[serde(default, rename = "__metadata__")]
    metadata: BTreeMap<String, String>,
}

impl TensorFile {
    /// Opens a file and checks its header: every byte after it belongs to one tensor.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for a file that violates the format, [`Error::Unfit`] for a tensor of an
    /// unsupported type, and errors of the store.
    pub fn open(store: &dyn Storage, key: &Key) -> Result<Self> {
        let object = store.open(key)?;
        let header = safetensors::read_header(&*object)?;
        header.check_coverage(&*object)?;
        if let Some(entry) = header.foreign.first() {
            return Err(Error::Unfit {
                object: object.display(),
                found: format!("'{:.80}' of type {:.80}", entry.name, entry.dtype),
                expected: "a supported tensor type".to_owned(),
            });
        }
        let corrupt = |found: String, expected: String| {
            let (object, offset) = (object.display(), 8);
            Err(Error::Corrupt { object, offset, found, expected })
        };
        let Metadata { metadata } = match serde_json::from_slice(&header.bytes[8..]) {
            Ok(found) => found,
            Err(error) => return corrupt(error.to_string(), "strings as metadata".to_owned()),
        };
        let start = header.bytes.len() as u64;
        let mut tensors = Vec::with_capacity(header.entries.len());
        for HeaderEntry { name, dtype, shape, data_offsets: [begin, end] } in header.entries {
            let expected = crate::region::elements(shape.iter().copied())
                .and_then(|count| count.checked_mul(dtype.item_bytes()));
            if expected != Some(end - begin) {
                let found = format!("{} bytes of '{name:.80}'", end - begin);
                return corrupt(found, format!("those of {dtype} {shape:?}"));
            }
            let bytes = start + begin..start + end;
            tensors.push(FileTensor { name, dtype, shape, bytes });
        }
        Ok(TensorFile { object, tensors, metadata })
    }

    /// All tensors, in the order of the header.
    #[must_use]
    pub fn tensors(&self) -> &[FileTensor] {
        &self.tensors
    }

    /// The strings that the writer stored with them.
    #[must_use]
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// How a message names the file.
    #[must_use]
    pub fn display(&self) -> String {
        self.object.display()
    }

    /// Fills each buffer from its offset in the file, by several threads.
    ///
    /// # Errors
    /// Errors of the store. The buffers' contents are then unspecified.
    pub fn read(&self, reads: Vec<(u64, &mut [u8])>, threads: usize) -> Result<()> {
        let mut parts: Vec<Vec<RangeRead<'_>>> = Vec::new();
        let mut left = 0;
        for (mut offset, buf) in reads {
            for buf in buf.chunks_mut(READ_BYTES) {
                let len = buf.len();
                // Small tensors share a unit of work.
                if left < len {
                    parts.push(Vec::new());
                    left = READ_BYTES;
                }
                left -= len;
                let part = parts.last_mut().expect("one was pushed if there was none");
                part.push(RangeRead { offset, buf });
                offset += len as u64;
            }
        }
        parallel_io::each(parts, threads, |mut part, _| Ok(self.object.read_many(&mut part)?))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use storage::{open_url, write_all};

    fn file_of(header: &str, data: &[u8]) -> (tempfile::TempDir, Result<TensorFile>) {
        let folder = tempfile::tempdir().unwrap();
        let store = open_url(folder.path().to_str().unwrap()).unwrap();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(data);
        let key = Key::new("a.safetensors").unwrap();
        write_all(&*store, &key, &bytes).unwrap();
        let opened = TensorFile::open(&*store, &key);
        (folder, opened)
    }

    #[test]
    fn tensors_and_metadata_are_read() {
        let header = r#"{"__metadata__":{"a":"b"},
            "x":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},
            "y":{"dtype":"F32","shape":[],"data_offsets":[3,7]}}"#;
        let (_folder, file) = file_of(header, &[1, 2, 3, 0, 0, 128, 63]);
        let file = file.unwrap();
        assert_eq!(file.metadata()["a"], "b");
        let [x, y] = file.tensors() else { panic!("two tensors") };
        let (mut of_x, mut of_y) = ([0; 3], [0; 4]);
        let reads = vec![(x.bytes.start, &mut of_x[..]), (y.bytes.start, &mut of_y[..])];
        file.read(reads, 2).unwrap();
        assert_eq!((of_x, f32::from_le_bytes(of_y)), ([1, 2, 3], 1.0));
    }

    #[test]
    fn invalid_headers_are_rejected() {
        for (header, data, text) in [
            (
                r#"{"x":{"dtype":"U8","shape":[3],"data_offsets":[0,2]}}"#,
                &[0; 2][..],
                "those of U8",
            ),
            (r#"{"x":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}"#, &[0; 4], "4 bytes, all"),
            (r#"{"x":{"dtype":"C64","shape":[1],"data_offsets":[0,8]}}"#, &[0; 8], "of type C64"),
            (r#"{"__metadata__":{"a":1}}"#, &[], "strings as metadata"),
        ] {
            let (_folder, file) = file_of(header, data);
            let error = file.unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
    }
}
