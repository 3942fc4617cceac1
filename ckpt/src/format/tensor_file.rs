//! Any safetensors file: its tensors, and their bytes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use serde::Deserialize;

use crate::base::parallel_io;
use crate::format::safetensors::{self, ForeignEntry, HeaderEntry};
use crate::{Error, Result};
use storage::{Key, Object, RangeRead, Storage};

/// Unit of work of a thread that reads.
const READ_BYTES: usize = 16 << 20;

/// A tensor of a safetensors file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileTensor {
    /// Its name.
    pub name: String,
    /// The name of its type in the header. It may be one that no [`crate::Dtype`] has.
    pub dtype: String,
    /// Elements along each axis, as in the header; empty for a scalar. Row-major.
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
    /// [`Error::Corrupt`] for a file that violates the format, and errors of the store. A type that
    /// is not known is not an error: only the size of that tensor is not checked.
    pub fn open(store: &dyn Storage, key: &Key) -> Result<Self> {
        let object = store.open(key)?;
        let header = safetensors::read_header(&*object)?;
        header.check_coverage(&*object)?;
        let corrupt = |found: String, expected: String| {
            let (object, offset) = (object.display(), 8);
            Err(Error::Corrupt { object, offset, found, expected })
        };
        let Metadata { metadata } = match serde_json::from_slice(&header.bytes[8..]) {
            Ok(found) => found,
            Err(error) => return corrupt(error.to_string(), "strings as metadata".to_owned()),
        };
        let start = header.bytes.len() as u64;
        let mut tensors = Vec::with_capacity(header.entries.len() + header.foreign.len());
        for HeaderEntry { name, dtype, mut shape, data_offsets: [begin, end] } in header.entries {
            let expected = crate::region::elements(shape.iter().copied())
                .and_then(|count| count.checked_mul(dtype.item_bytes()));
            if let Some(last) = shape.last_mut() {
                *last *= dtype.header_items(); // no overflow: as it was in the header
            }
            if expected != Some(end - begin) {
                let found = format!("{} bytes of '{name:.80}'", end - begin);
                return corrupt(found, format!("those of {} {shape:?}", dtype.header_name()));
            }
            let (dtype, bytes) = (dtype.header_name().to_owned(), start + begin..start + end);
            tensors.push(FileTensor { name, dtype, shape, bytes });
        }
        for ForeignEntry { name, dtype, shape, data_offsets: [begin, end] } in header.foreign {
            tensors.push(FileTensor { name, dtype, shape, bytes: start + begin..start + end });
        }
        tensors.sort_by_key(|tensor| (tensor.bytes.start, tensor.bytes.end));
        Ok(TensorFile { object, tensors, metadata })
    }

    /// All tensors, in the order of their bytes.
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

    /// A tensor of a type that is not known does not make the others unreadable.
    #[test]
    fn types_are_those_of_the_header() {
        let header = r#"{"z":{"dtype":"F4","shape":[2,4],"data_offsets":[0,4]},
            "odd":{"dtype":"F4","shape":[2,1],"data_offsets":[11,12]},
            "y":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[4,7]},
            "x":{"dtype":"F4_X2","shape":[4],"data_offsets":[7,11]},
            "c":{"dtype":"C64","shape":[1],"data_offsets":[12,20]}}"#;
        let (_folder, file) = file_of(header, &[0; 20]);
        let file = file.unwrap();
        let found: Vec<_> =
            file.tensors().iter().map(|it| (it.name.as_str(), it.dtype.as_str())).collect();
        let expected = [("z", "F4"), ("y", "F6_E2M3"), ("x", "F4_X2"), ("odd", "F4"), ("c", "C64")];
        assert_eq!(found, expected);
        assert_eq!(file.tensors()[0].shape, [2, 4]);
        assert_eq!(file.tensors()[3].shape, [2, 1]);
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
            (r#"{"x":{"dtype":"C64","shape":[1],"data_offsets":[0,7]}}"#, &[0; 7], "those of C64"),
            (r#"{"x":{"dtype":"F4","shape":[2,6],"data_offsets":[0,5]}}"#, &[0; 5], "F4 [2, 6]"),
            (r#"{"x":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,4]}}"#, &[0; 3], "3 bytes"),
            (r#"{"__metadata__":{"a":1}}"#, &[], "strings as metadata"),
        ] {
            let (_folder, file) = file_of(header, data);
            let error = file.unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
    }
}
