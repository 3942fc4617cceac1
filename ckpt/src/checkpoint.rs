use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use crate::catalog::Catalog;
use crate::fetch::{Block, Target};
use crate::{Chunk, Error, Group, Region, Result, Span, TensorEntry, Want};
use storage::{Key, Manifest, Object, Storage, crc64, read_all};

/// The commit record of a step.
pub(crate) const MANIFEST: &str = "MANIFEST.json";

/// The length of every object below a folder. Links are not followed by a listing, so what a link
/// points to is not in it.
pub(crate) type Listing = HashMap<Key, u64>;

/// A complete step, opened for reading. Every byte that it gives has passed its checksum.
pub struct Checkpoint {
    pub(crate) store: Arc<dyn Storage>,
    pub(crate) folder: Key,
    pub(crate) catalog: Catalog,
    pub(crate) threads: usize,
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Checkpoint({}, {} tensors)", self.display(), self.tensors().len())
    }
}

/// A wish: fill `into` with a whole tensor.
#[derive(Debug)]
pub struct TensorRead<'a> {
    /// The parameter's name.
    pub name: &'a str,
    /// Which of its tensors.
    pub group: Group,
    /// What to fill: [`TensorEntry::bytes`] long.
    pub into: &'a mut [u8],
}

impl Checkpoint {
    /// Opens the folder of a step: reads its manifest, and looks whether every file is there and as
    /// long as listed. `there` has the length of every object.
    pub(crate) fn open(
        store: &Arc<dyn Storage>,
        folder: Key,
        step: u64,
        there: &Listing,
        threads: usize,
    ) -> Result<Self> {
        let key = folder.join(MANIFEST)?;
        let what = store.display(&key);
        let bad = |place: &str, got: String, due: String| {
            Err(Error::BadManifest { what: what.clone(), place: place.to_owned(), got, due })
        };
        if !there.contains_key(&key) {
            let due = "a file in a folder of its own; links are not followed".to_owned();
            return bad("the record of its commit", "none".to_owned(), due);
        }
        let catalog = Catalog::new(Manifest::read(&**store, &key)?, &what)?;
        if catalog.meta.step != step {
            let due = format!("{step}, the step that its folder is named for");
            return bad("meta", format!("step {}", catalog.meta.step), due);
        }
        for file in &catalog.files {
            let key = folder.join(&file.path)?;
            let what = store.display(&key);
            match there.get(&key) {
                None => return Err(storage::Error::NotFound { what }.into()),
                Some(&bytes) if bytes != file.bytes => return Err(wrong_length(what, bytes, file)),
                Some(_) => {}
            }
        }
        Ok(Checkpoint { store: Arc::clone(store), folder, catalog, threads })
    }

    /// The training step.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.catalog.meta.step
    }

    /// What the caller of [`Checkpoints::save`](crate::Checkpoints::save) gave with it.
    #[must_use]
    pub fn meta(&self) -> &serde_json::Value {
        &self.catalog.meta.user
    }

    /// All tensors, in the order in which they were given.
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
    /// [`Error::NoTensor`], which tells what there is instead.
    pub fn tensor(&self, name: &str, group: Group) -> Result<&TensorEntry> {
        self.catalog.tensor(name, group).ok_or_else(|| Error::NoTensor {
            what: self.display(),
            name: name.to_owned(),
            group,
            near: nearest(self.tensors(), name, group),
        })
    }

    /// Reads a blob.
    ///
    /// # Errors
    /// [`Error::NoBlob`], [`Error::Corrupt`], or what the store says.
    pub fn blob(&self, name: &str) -> Result<Vec<u8>> {
        let found = self.catalog.meta.blobs.iter().find(|blob| blob.name == name);
        let blob = found.ok_or_else(|| Error::NoBlob {
            what: self.display(),
            name: name.to_owned(),
            near: self.blobs().map(str::to_owned).collect(),
        })?;
        let file = self.catalog.file(&blob.file);
        let key = self.folder.join(&file.path)?;
        self.open_file(&file.path)?;
        let bytes = read_all(&*self.store, &key)?;
        let got = crc64(&bytes);
        if got != file.crc64 {
            return Err(Error::Corrupt {
                what: self.store.display(&key),
                offset: 0,
                got: format!("CRC-64 {got:016x} of {} bytes", bytes.len()),
                due: format!("{:016x} by the manifest", file.crc64),
            });
        }
        Ok(bytes)
    }

    /// Reads a whole tensor, row-major, into a buffer of [`TensorEntry::bytes`].
    ///
    /// # Errors
    /// [`Error::NoTensor`], [`Error::BadRequest`] for a buffer of another length,
    /// [`Error::Corrupt`] with file and offset, or what the store says. The buffer's contents are
    /// then unspecified.
    pub fn read_tensor(&self, name: &str, group: Group, into: &mut [u8]) -> Result<()> {
        self.read_tensors(vec![TensorRead { name, group, into }])
    }

    /// Reads many whole tensors at once, in the order in which they lie in the files, straight into
    /// the buffers.
    ///
    /// # Errors
    /// As [`Checkpoint::read_tensor`].
    pub fn read_tensors(&self, reads: Vec<TensorRead<'_>>) -> Result<()> {
        let mut wants = Vec::with_capacity(reads.len());
        for TensorRead { name, group, into } in reads {
            let region = Region::whole(&self.tensor(name, group)?.shape);
            wants.push(Want { name, group, region, into });
        }
        self.read(wants)?;
        Ok(())
    }

    /// Reads a box of a tensor, one span an axis, row-major, into a buffer of the box's bytes. Only
    /// the blocks that the box touches are read, and all of them are checked.
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
        self.read(vec![Want { name, group, region: Region::of_box(wanted.to_vec()), into }])?;
        Ok(())
    }

    /// Opens a listed file, which may have been cut since its step was opened.
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

/// The blocks of a chunk, with the place that each goes to.
pub(crate) fn chunk_blocks<'a>(
    object: &'a dyn Object,
    chunk: &'a Chunk,
    parts: impl Iterator<Item = Target<'a>>,
) -> impl Iterator<Item = Block<'a>> {
    let mut offset = chunk.offset;
    parts.enumerate().map(move |(place, into)| {
        let block = Block { object, offset, crc64: block_crc64(chunk, place), into };
        offset += block.into.len() as u64;
        block
    })
}

/// The checksum of a block; a chunk that is no longer than one block is that block.
pub(crate) fn block_crc64(chunk: &Chunk, place: usize) -> u64 {
    if chunk.blocks.is_empty() { chunk.crc64 } else { chunk.blocks[place] }
}

fn wrong_length(what: String, got: u64, file: &storage::FileEntry) -> Error {
    let due = format!("{} by the manifest", file.bytes);
    Error::Corrupt { what, offset: got.min(file.bytes), got: format!("{got} bytes"), due }
}

/// The three tensors most like the one asked for: the same name in other groups first, then names
/// by how much they share with it at both ends, as `layers.3.mlp` and `layers.4.mlp` do.
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
