use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crate::format::catalog::Catalog;
use crate::read::block_reader::{BlockDestination, ChecksumBlock, PackedBlock};
use crate::{Chunk, Dtype, Error, Group, Region, RegionRequest, Result, Span, TensorEntry};
use storage::{Key, Object, Storage, crc64, read_all};

/// The manifest of a step.
pub(crate) const MANIFEST: &str = "MANIFEST.json";

/// The length of every object below a folder. Links are not followed by a listing, so what a link
/// points to is not in it.
pub(crate) type Listing = BTreeMap<Key, u64>;

/// A complete step, opened for reading. Every byte that it returns has passed its checksum.
pub struct Checkpoint {
    pub(crate) store: Arc<dyn Storage>,
    pub(crate) folder: Key,
    pub(crate) catalog: Catalog,
    /// The checksum of its manifest, and so of all its contents.
    pub(crate) manifest_crc64: u64,
    pub(crate) threads: usize,
    /// Bytes read so far.
    pub(crate) read_bytes: Arc<AtomicU64>,
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Checkpoint({}, {} tensors)", self.display(), self.tensors().len())
    }
}

/// A request to read a whole tensor into `into`.
#[derive(Debug)]
pub struct TensorRead<'a> {
    /// The parameter's name.
    pub name: &'a str,
    /// The group of the tensor.
    pub group: Group,
    /// What to fill: [`TensorEntry::bytes`] long.
    pub into: &'a mut [u8],
}

impl Checkpoint {
    /// Opens the folder of a step: reads its manifest, and checks that every file exists with the
    /// listed length. `there` has the length of every object.
    pub(crate) fn open(
        store: &Arc<dyn Storage>,
        folder: Key,
        step: u64,
        there: &Listing,
        threads: usize,
    ) -> Result<Self> {
        let key = folder.join(MANIFEST)?;
        let object = store.display(&key);
        let bad = |place: &str, found: String, expected: String| {
            Err(Error::BadManifest {
                object: object.clone(),
                place: place.to_owned(),
                found,
                expected,
            })
        };
        if !there.contains_key(&key) {
            let expected = "a file in the folder of the step (links are not followed)".to_owned();
            return bad("commit record", "none".to_owned(), expected);
        }
        let (catalog, manifest_crc64) = Catalog::read(&**store, &key)?;
        if catalog.meta.step != step {
            let expected = format!("step {step} as in the folder name");
            return bad("meta", format!("step {}", catalog.meta.step), expected);
        }
        for file in &catalog.files {
            let key = folder.join(&file.path)?;
            let object = store.display(&key);
            match there.get(&key) {
                None => return Err(storage::Error::NotFound { object }.into()),
                Some(&bytes) if bytes != file.bytes => {
                    return Err(wrong_length(object, bytes, file));
                }
                Some(_) => {}
            }
        }
        let store = Arc::clone(store);
        let read_bytes = Arc::default();
        Ok(Checkpoint { store, folder, catalog, manifest_crc64, threads, read_bytes })
    }

    /// Counts its reads: `counter` is incremented by the verified bytes, as they are read.
    #[must_use]
    pub fn counted(self, counter: &Arc<AtomicU64>) -> Self {
        Checkpoint { read_bytes: Arc::clone(counter), ..self }
    }

    /// The training step.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.catalog.meta.step
    }

    /// The `meta` passed to [`Checkpoints::save`](crate::Checkpoints::save).
    #[must_use]
    pub fn meta(&self) -> &serde_json::Value {
        &self.catalog.meta.user
    }

    /// All tensors, in the order of the save.
    #[must_use]
    pub fn tensors(&self) -> &[TensorEntry] {
        &self.catalog.meta.tensors
    }

    /// The names of all blobs.
    pub fn blobs(&self) -> impl Iterator<Item = &str> {
        self.catalog.meta.blobs.iter().map(|blob| blob.name.as_str())
    }

    /// Files and bytes of the step, without its manifest.
    #[must_use]
    pub fn size(&self) -> (usize, u64) {
        (self.catalog.files.len(), self.catalog.files.iter().map(|file| file.bytes).sum())
    }

    /// How a message names the step's folder.
    #[must_use]
    pub fn display(&self) -> String {
        self.store.display(&self.folder)
    }

    /// The tensor of that name and group.
    ///
    /// # Errors
    /// [`Error::NoTensor`], with similar tensors.
    pub fn tensor(&self, name: &str, group: Group) -> Result<&TensorEntry> {
        self.catalog.tensor(name, group).ok_or_else(|| Error::NoTensor {
            object: self.display(),
            name: name.to_owned(),
            group,
            similar: nearest(self.tensors(), name, group),
        })
    }

    /// Reads a blob.
    ///
    /// # Errors
    /// [`Error::NoBlob`], [`Error::Corrupt`], or errors of the store.
    pub fn blob(&self, name: &str) -> Result<Vec<u8>> {
        let found = self.catalog.meta.blobs.iter().find(|blob| blob.name == name);
        let blob = found.ok_or_else(|| Error::NoBlob {
            object: self.display(),
            name: name.to_owned(),
            similar: self.blobs().map(str::to_owned).collect(),
        })?;
        let file = self.catalog.file(&blob.file);
        let key = self.folder.join(&file.path)?;
        self.open_file(&file.path)?;
        let bytes = read_all(&*self.store, &key)?;
        let found = crc64(&bytes);
        if found != file.crc64 {
            return Err(Error::Corrupt {
                object: self.store.display(&key),
                offset: 0,
                found: format!("CRC-64 {found:016x} of {} bytes", bytes.len()),
                expected: format!("CRC-64 {:016x} as in the manifest", file.crc64),
            });
        }
        Ok(bytes)
    }

    /// Reads a whole tensor, row-major, into a buffer of [`TensorEntry::bytes`].
    ///
    /// # Errors
    /// [`Error::NoTensor`], [`Error::BadRequest`] for a buffer of another length,
    /// [`Error::Corrupt`] with file and offset, or errors of the store. The buffer's contents are
    /// then unspecified.
    pub fn read_tensor(&self, name: &str, group: Group, into: &mut [u8]) -> Result<()> {
        self.read_tensors(vec![TensorRead { name, group, into }])
    }

    /// Reads many whole tensors at once, in file order, directly into the buffers.
    ///
    /// # Errors
    /// As [`Checkpoint::read_tensor`].
    pub fn read_tensors(&self, reads: Vec<TensorRead<'_>>) -> Result<()> {
        let mut requests = Vec::with_capacity(reads.len());
        for TensorRead { name, group, into } in reads {
            let region = Region::whole(&self.tensor(name, group)?.shape);
            requests.push(RegionRequest { name, group, region, into });
        }
        self.read(requests)?;
        Ok(())
    }

    /// Reads a box of a tensor, one span per axis, row-major, into a buffer of the box's bytes.
    /// Only the blocks that the box touches are read, and all of them are verified.
    ///
    /// # Errors
    /// [`Error::BadRequest`] for a box that is not within the tensor, else as
    /// [`Checkpoint::read_tensor`].
    pub fn read_box(
        &self,
        name: &str,
        group: Group,
        wanted: &[Span],
        into: &mut [u8],
    ) -> Result<()> {
        self.read(vec![RegionRequest {
            name,
            group,
            region: Region::of_box(wanted.to_vec()),
            into,
        }])?;
        Ok(())
    }

    /// Opens a listed file, which may have been truncated since its step was opened.
    pub(crate) fn open_file(&self, path: &str) -> Result<Arc<dyn Object>> {
        let file = self.catalog.file(path);
        let object = self.store.open(&self.folder.join(path)?)?;
        if object.len_bytes() != file.bytes {
            return Err(wrong_length(object.display(), object.len_bytes(), file));
        }
        Ok(object)
    }

    pub(crate) fn block_bytes(&self) -> usize {
        self.catalog.meta.block_bytes as usize // fits: at most 64 MiB
    }
}

/// A block of a chunk, without its destination.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockSource {
    offset: u64,
    /// Its unpacked length.
    pub(crate) bytes: u64,
    crc64: u64,
    packed: Option<PackedBlock>,
}

impl BlockSource {
    pub(crate) fn stored_bytes(&self) -> u64 {
        self.packed.map_or(self.bytes, |packed| packed.bytes as u64)
    }

    pub(crate) fn read<'a>(
        self,
        object: &'a dyn Object,
        into: BlockDestination<'a>,
    ) -> ChecksumBlock<'a> {
        let BlockSource { offset, crc64, packed, .. } = self;
        ChecksumBlock { object, offset, crc64, into, packed }
    }
}

/// The blocks of a chunk.
pub(crate) fn blocks_of(
    chunk: &Chunk,
    dtype: Dtype,
    block_bytes: u64,
) -> impl Iterator<Item = BlockSource> {
    let mut offset = chunk.offset;
    // fits: as many checksums are in memory.
    (0..chunk.bytes.div_ceil(block_bytes) as usize).map(move |place| {
        let packed = chunk.packed.as_ref().map(|packed| packed.blocks[place]);
        let source = BlockSource {
            offset,
            bytes: block_bytes.min(chunk.bytes - place as u64 * block_bytes),
            // A chunk that is no longer than one block is that block.
            crc64: chunk.blocks.get(place).copied().unwrap_or(chunk.crc64),
            packed: packed.map(|stored| PackedBlock {
                dtype,
                bytes: stored.bytes as usize, // fits: at most 64 MiB and a few bytes
                crc64: stored.crc64,
            }),
        };
        offset += source.stored_bytes();
        source
    })
}

fn wrong_length(object: String, bytes: u64, file: &storage::FileEntry) -> Error {
    let (found, expected) = (format!("{bytes} bytes"), format!("{} bytes", file.bytes));
    let expected = format!("{expected} as in the manifest");
    Error::Corrupt { object, offset: bytes.min(file.bytes), found, expected }
}

/// The three tensors most similar to the requested one: the same name in other groups first, then
/// by the length of the common prefix and suffix of names, as `layers.3.mlp` and `layers.4.mlp`
/// have.
fn nearest(tensors: &[TensorEntry], name: &str, group: Group) -> Vec<String> {
    let shared = |a: &str, b: &str| {
        let front = a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count();
        let back = a.bytes().rev().zip(b.bytes().rev()).take_while(|(a, b)| a == b).count();
        front + back
    };
    let mut ranked: Vec<&TensorEntry> = tensors.iter().collect();
    ranked.sort_by_cached_key(|tensor| {
        let likeness = (tensor.name == name, shared(&tensor.name, name), tensor.group == group);
        (std::cmp::Reverse(likeness), tensor.group)
    });
    ranked.into_iter().take(3).map(TensorEntry::label).collect()
}
