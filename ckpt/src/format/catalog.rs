//! The tensors and blobs of a manifest, and its validation before any byte is read.

use serde::{Deserialize, Serialize};
use std::collections::HashMap;

pub(crate) use crate::plan::merge::merge_parts;

use crate::base::hex;
use crate::region::{self, Region, Span};
use crate::spec::PAD_PREFIX;
use crate::tile::{TileBox, tile};
use crate::{Codec, Dtype, Error, Group, Result};
use storage::{FileEntry, Key, Manifest, Storage, crc64_join};

/// `format` of our manifests.
pub(crate) const FORMAT: &str = "feedline-ckpt";

/// The lowest `version` that supports these tensors: version 2 added [`Group::Other`]. A reader
/// rejects versions that it does not know, so a step is written with the lowest that describes it.
pub(crate) fn version_of(tensors: &[TensorEntry]) -> u32 {
    if tensors.iter().any(|tensor| tensor.group == Group::Other) { 2 } else { 1 }
}

/// A checksum covers at least a page, and at most what a reader can hold in scratch space.
pub(crate) const BLOCK_BYTES_MIN: u64 = 4 << 10;
pub(crate) const BLOCK_BYTES_MAX: u64 = 64 << 20;

/// Blocks are pages, so that none cuts an element or begins within a device's sector.
pub(crate) fn is_block_size(bytes: u64) -> bool {
    bytes.is_multiple_of(BLOCK_BYTES_MIN) && (BLOCK_BYTES_MIN..=BLOCK_BYTES_MAX).contains(&bytes)
}

/// The weights and moments of 300 parameters, sharded over 1,024 ranks: a manifest of 360 MB.
pub(crate) const CHUNKS_MAX: usize = 1_000_000;

/// Suffix of the names of files with packed chunks, and of no others.
pub(crate) const PACKED_SUFFIX: &str = ".planes";

/// The first bytes of such a file. As the length of a safetensors header they are far beyond the
/// limit, so that no reader confuses the formats.
pub(crate) const PACKED_MAGIC: &[u8; 16] = b"feedline planes\n";

/// The path of the packed form of a file.
pub(crate) fn packed_path(path: &str) -> String {
    format!("{}{PACKED_SUFFIX}", path.strip_suffix(".safetensors").unwrap_or(path))
}

/// A tensor of the checkpoint, whole and without ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// The parameter's name.
    pub name: String,
    /// The role of the tensor for the parameter.
    pub group: Group,
    /// Its elements.
    pub dtype: Dtype,
    /// Elements along each axis; empty for a scalar. Row-major.
    pub shape: Vec<u64>,
    /// Where its bytes are: disjoint regions that cover the shape.
    pub chunks: Vec<Chunk>,
}

impl TensorEntry {
    /// Bytes of the whole tensor.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.bytes).sum()
    }

    /// Its name inside a safetensors file, as the `k`-th of its chunks.
    pub(crate) fn entry_name(&self, k: usize) -> String {
        self.group.entry_name(&self.name, (self.chunks.len() > 1).then_some(k))
    }

    /// Its name in messages.
    pub(crate) fn label(&self) -> String {
        format!("{} '{}'", self.group, self.name)
    }
}

/// A region of a tensor, stored contiguously in one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chunk {
    /// The file, below the step's folder.
    pub file: String,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes of the region.
    pub bytes: u64,
    /// CRC-64/NVME of these bytes.
    #[serde(with = "hex")]
    pub crc64: u64,
    /// CRC-64/NVME of each block of the chunk, if it is longer than one, so that a part of the
    /// chunk can be read and checked without the rest.
    #[serde(default, skip_serializing_if = "Vec::is_empty", with = "hex::list")]
    pub blocks: Vec<u64>,
    /// The box of the tensor: one span per axis, row-major.
    #[serde(rename = "box")]
    pub spans: Vec<Span>,
    /// The range of the box's elements, in row-major order; all of them if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flat: Option<Span>,
    /// How its blocks are packed; absent if they are not. The checksums above are those of the
    /// unpacked bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packed: Option<Packed>,
}

/// The blocks of a chunk as they are stored, end to end from its offset on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Packed {
    /// The codec.
    pub codec: Codec,
    /// All blocks, also if there is only one.
    #[serde(with = "hex::stored")]
    pub blocks: Vec<StoredBlock>,
}

/// A packed block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredBlock {
    /// Its length.
    pub bytes: u32,
    /// CRC-64/NVME of these bytes.
    pub crc64: u64,
}

impl Packed {
    /// Bytes of all blocks, and their CRC-64/NVME.
    pub(crate) fn sum(&self) -> (u64, u64) {
        self.blocks.iter().fold((0, 0), |(bytes, sum), block| {
            let len = u64::from(block.bytes);
            (bytes + len, crc64_join(sum, block.crc64, len))
        })
    }
}

impl Chunk {
    /// Bytes that it takes in its file.
    #[must_use]
    pub fn stored_bytes(&self) -> u64 {
        let sum = |packed: &Packed| packed.blocks.iter().map(|block| u64::from(block.bytes)).sum();
        self.packed.as_ref().map_or(self.bytes, sum)
    }

    /// Which part of the tensor this is.
    #[must_use]
    pub fn region(&self) -> Region {
        let flat = self.flat.map(|flat| flat.start..flat.start.saturating_add(flat.len));
        Region { spans: self.spans.clone(), flat }
    }
}

/// Bytes that belong to no tensor, in a separate file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BlobEntry {
    pub(crate) name: String,
    pub(crate) file: String,
}

/// `meta` of the manifest.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Meta {
    pub(crate) step: u64,
    pub(crate) block_bytes: u64,
    pub(crate) tensors: Vec<TensorEntry>,
    pub(crate) blobs: Vec<BlobEntry>,
    #[serde(deserialize_with = "storage::unique_json")]
    pub(crate) user: serde_json::Value,
}

fn check_version(format: &str, version: u32, object: &str) -> Result<()> {
    let bad = Refusal { object };
    if format != FORMAT {
        return bad.of("format", format, FORMAT);
    }
    if !(1..=2).contains(&version) {
        return bad.of("version", &version.to_string(), "1 or 2, the supported versions");
    }
    Ok(())
}

/// A manifest that has been checked: every chunk is in a listed file, no two share a byte, and
/// the boxes of every tensor tile its shape.
#[derive(Debug)]
pub(crate) struct Catalog {
    pub(crate) meta: Meta,
    pub(crate) files: Vec<FileEntry>,
    file_places: HashMap<String, usize>,
    tensor_places: HashMap<(Group, String), usize>,
}

impl Catalog {
    /// Reads and checks a manifest. Returns its checksum too, which identifies it.
    pub(crate) fn read(store: &dyn Storage, key: &Key) -> Result<(Self, u64)> {
        let object = store.display(key);
        match Manifest::read_typed(store, key) {
            Ok((manifest, sum)) => Ok((Self::of_typed(manifest, &object)?, sum)),
            // The JSON of another version is intact too. `new` names the field that is wrong.
            Err(storage::Error::Corrupt { .. }) => {
                let (manifest, sum) = Manifest::read_summed(store, key)?;
                Ok((Self::new(manifest, &object)?, sum))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Checks a manifest. `object` names it in messages.
    pub(crate) fn new(manifest: Manifest, object: &str) -> Result<Self> {
        let Manifest { format, version, files, meta } = manifest;
        check_version(&format, version, object)?;
        let meta = serde_json::from_value(meta).or_else(|error| {
            let expected = "the fields listed in FORMAT.md and no others";
            Refusal { object }.of("meta", &error.to_string(), expected)
        })?;
        Self::of_typed(Manifest { format, version, files, meta }, object)
    }

    fn of_typed(manifest: Manifest<Meta>, object: &str) -> Result<Self> {
        let Manifest { format, version, files, meta } = manifest;
        check_version(&format, version, object)?;
        if version_of(&meta.tensors) > version {
            let found = "1 with tensors of the group 'other'";
            return Refusal { object }.of("version", found, "2 for that group");
        }
        Self::of(meta, files, object)
    }

    /// Checks the contents of a manifest that was read or is to be written.
    pub(crate) fn of(meta: Meta, files: Vec<FileEntry>, object: &str) -> Result<Self> {
        let bad = Refusal { object };
        if !is_block_size(meta.block_bytes) {
            let expected = format!("a multiple of {BLOCK_BYTES_MIN}, at most {BLOCK_BYTES_MAX}");
            return bad.of("block_bytes", &meta.block_bytes.to_string(), &expected);
        }
        let mut file_places = HashMap::new();
        for (place, file) in files.iter().enumerate() {
            Key::new(&file.path)?;
            if file_places.insert(file.path.clone(), place).is_some() {
                return bad.of("files", &format!("'{}' twice", file.path), "each file once");
            }
        }
        let chunks: usize = meta.tensors.iter().map(|tensor| tensor.chunks.len()).sum();
        if chunks > CHUNKS_MAX {
            return bad.of("tensors", &chunks.to_string(), &format!("at most {CHUNKS_MAX} chunks"));
        }
        let mut tensor_places = HashMap::new();
        for (place, tensor) in meta.tensors.iter().enumerate() {
            check_tensor(tensor, meta.block_bytes, &bad)?;
            if tensor_places.insert((tensor.group, tensor.name.clone()), place).is_some() {
                return bad.of(&tensor.label(), "two", "one entry of this name");
            }
        }
        let catalog = Catalog { meta, files, file_places, tensor_places };
        catalog.check_ranges(&bad)?;
        catalog.check_blobs(&bad)?;
        Ok(catalog)
    }

    /// The listed file of that name; every file that a chunk or blob names is listed.
    pub(crate) fn file(&self, path: &str) -> &FileEntry {
        &self.files[self.file_places[path]]
    }

    pub(crate) fn tensor(&self, name: &str, group: Group) -> Option<&TensorEntry> {
        let place = self.tensor_places.get(&(group, name.to_owned()))?;
        Some(&self.meta.tensors[*place])
    }

    /// The index of a tensor in the manifest.
    pub(crate) fn place(&self, tensor: &TensorEntry) -> usize {
        self.tensor_places[&(tensor.group, tensor.name.clone())]
    }

    /// Every chunk as (tensor, number in the tensor, chunk), file after file, in the order of
    /// their offsets. Files without chunks are skipped.
    pub(crate) fn by_file(&self) -> Vec<(&FileEntry, Vec<Placed<'_>>)> {
        let mut placed: Vec<Vec<Placed<'_>>> = self.files.iter().map(|_| Vec::new()).collect();
        for tensor in &self.meta.tensors {
            for (k, chunk) in tensor.chunks.iter().enumerate() {
                placed[self.file_places[&chunk.file]].push(Placed { tensor, k, chunk });
            }
        }
        // An empty chunk has the offset of the next one, and sorts before it.
        for chunks in &mut placed {
            chunks.sort_by_key(|placed| (placed.chunk.offset, placed.chunk.stored_bytes()));
        }
        self.files.iter().zip(placed).filter(|(_, chunks)| !chunks.is_empty()).collect()
    }

    /// Whether another has the same tensors, in the same chunks, and the same blobs, packed or not.
    pub(crate) fn has_same(&self, other: &Catalog) -> bool {
        let tensors = self.meta.tensors.len() == other.meta.tensors.len()
            && self.meta.tensors.iter().zip(&other.meta.tensors).all(|(a, b)| {
                (&a.name, a.group, a.dtype, &a.shape) == (&b.name, b.group, b.dtype, &b.shape)
                    && a.chunks.len() == b.chunks.len()
                    && a.chunks
                        .iter()
                        .zip(&b.chunks)
                        .all(|(a, b)| (a.crc64, &a.spans, a.flat) == (b.crc64, &b.spans, b.flat))
            });
        let sum = |catalog: &Catalog, blob: &BlobEntry| {
            let FileEntry { bytes, crc64, .. } = *catalog.file(&blob.file);
            (blob.name.clone(), bytes, crc64)
        };
        let blobs = |catalog: &Catalog| -> Vec<_> {
            catalog.meta.blobs.iter().map(|blob| sum(catalog, blob)).collect()
        };
        tensors && blobs(self) == blobs(other) && self.meta.user == other.meta.user
    }

    fn check_ranges(&self, bad: &Refusal<'_>) -> Result<()> {
        for chunk in self.meta.tensors.iter().flat_map(|tensor| &tensor.chunks) {
            if !self.file_places.contains_key(&chunk.file) {
                return bad.of("tensors", &format!("a chunk in '{}'", chunk.file), "a listed file");
            }
        }
        for (file, chunks) in self.by_file() {
            let mut end = 0;
            let is_packed = file.path.ends_with(PACKED_SUFFIX);
            for Placed { tensor, chunk, .. } in chunks {
                let bytes = chunk.stored_bytes();
                if chunk.packed.is_some() != is_packed {
                    let kind = if is_packed { "an unpacked" } else { "a packed" };
                    let found = format!("{kind} chunk in {}", file.path);
                    let expected = format!("packed chunks in *{PACKED_SUFFIX} and nowhere else");
                    return bad.of(&tensor.label(), &found, &expected);
                }
                let next = chunk.offset.checked_add(bytes).filter(|&end| end <= file.bytes);
                let Some(next) = next.filter(|_| chunk.offset >= end) else {
                    let found = format!("{bytes} bytes at byte {} of {}", chunk.offset, file.path);
                    let expected = format!("a range of its own in bytes {end} to {}", file.bytes);
                    return bad.of(&tensor.label(), &found, &expected);
                };
                end = next;
            }
        }
        Ok(())
    }

    fn check_blobs(&self, bad: &Refusal<'_>) -> Result<()> {
        let mut names = std::collections::HashSet::new();
        for blob in &self.meta.blobs {
            if !names.insert(&blob.name) {
                return bad.of("blobs", &format!("'{}' twice", blob.name), "each blob once");
            }
            if !self.file_places.contains_key(&blob.file) {
                return bad.of(
                    "blobs",
                    &format!("'{}' in '{}'", blob.name, blob.file),
                    "a listed file",
                );
            }
        }
        Ok(())
    }
}

/// A chunk, its tensor, and its number in the tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed<'a> {
    pub(crate) tensor: &'a TensorEntry,
    pub(crate) k: usize,
    pub(crate) chunk: &'a Chunk,
}

/// The number of blocks of a chunk with separate checksums; 0 if it is a single block.
pub(crate) fn block_count(chunk_bytes: u64, block_bytes: u64) -> u64 {
    if chunk_bytes <= block_bytes { 0 } else { chunk_bytes.div_ceil(block_bytes) }
}

/// The checksum of blocks end to end, all `block_bytes` long except the last.
pub(crate) fn join_blocks(blocks: &[u64], chunk_bytes: u64, block_bytes: u64) -> u64 {
    let mut left = chunk_bytes;
    blocks.iter().fold(0, |sum, &block| {
        let len = left.min(block_bytes);
        left -= len;
        crc64_join(sum, block, len)
    })
}

fn check_tensor(tensor: &TensorEntry, block_bytes: u64, bad: &Refusal<'_>) -> Result<()> {
    let place = tensor.label();
    if tensor.shape.len() > region::RANK_MAX {
        let found = tensor.shape.len().to_string();
        return bad.of(&place, &found, &format!("at most {} axes", region::RANK_MAX));
    }
    if tensor.name.starts_with(PAD_PREFIX) {
        return bad.of(&place, "one reserved for padding", "a tensor name");
    }
    let item_bytes = tensor.dtype.item_bytes();
    let bytes = region::elements(tensor.shape.iter().copied())
        .and_then(|count| count.checked_mul(item_bytes));
    if bytes.is_none() {
        return bad.of(&place, &format!("shape {:?}", tensor.shape), "fewer than 2^64 bytes");
    }
    if !tensor.dtype.fits_header(&tensor.shape) {
        let found = format!("{} of shape {:?}", tensor.dtype, tensor.shape);
        return bad.of(&place, &found, "at least one axis, of fewer than 2^63");
    }
    for chunk in &tensor.chunks {
        check_chunk(tensor, chunk, block_bytes, bad)?;
    }
    let parts: Vec<TileBox<'_>> =
        tensor.chunks.iter().map(|chunk| (chunk.spans.as_slice(), chunk.flat)).collect();
    if !tile(&tensor.shape, &parts) {
        let found = format!("{} boxes that overlap or leave gaps", parts.len());
        return bad.of(&place, &found, &format!("disjoint boxes that cover {:?}", tensor.shape));
    }
    Ok(())
}

fn check_chunk(
    tensor: &TensorEntry,
    chunk: &Chunk,
    block_bytes: u64,
    bad: &Refusal<'_>,
) -> Result<()> {
    let place = tensor.label();
    let found = || {
        let pairs: Vec<_> = chunk.spans.iter().copied().map(<[u64; 2]>::from).collect();
        let flat = chunk.flat.map(<[u64; 2]>::from);
        flat.map_or_else(|| format!("box {pairs:?}"), |flat| format!("{flat:?} of box {pairs:?}"))
    };
    let region = chunk.region();
    if !region.is_within(&tensor.shape) {
        return bad.of(&place, &found(), &format!("a box within {:?}", tensor.shape));
    }
    // fits: within a shape whose bytes fit.
    let expected = region.elements().map_or(0, |count| count * tensor.dtype.item_bytes());
    if chunk.bytes != expected {
        let found = format!("{} bytes for {}", chunk.bytes, found());
        return bad.of(&place, &found, &format!("{expected} bytes"));
    }
    let expected = block_count(chunk.bytes, block_bytes);
    if chunk.blocks.len() as u64 != expected {
        let expected = format!("{expected} block checksums for {} bytes", chunk.bytes);
        return bad.of(&place, &chunk.blocks.len().to_string(), &expected);
    }
    let Some(Packed { codec, blocks }) = &chunk.packed else { return Ok(()) };
    let expected = chunk.bytes.div_ceil(block_bytes);
    if blocks.len() as u64 != expected {
        let expected = format!("{expected} packed blocks for {} bytes", chunk.bytes);
        return bad.of(&place, &blocks.len().to_string(), &expected);
    }
    // So no block takes more memory than an unpacked one.
    let most = codec.bytes_max(tensor.dtype, block_bytes.min(chunk.bytes), block_bytes);
    match blocks.iter().find(|block| u64::from(block.bytes) > most) {
        None => Ok(()),
        Some(block) => bad.of(
            &place,
            &format!("a packed block of {} bytes", block.bytes),
            &format!("at most {most} bytes"),
        ),
    }
}

struct Refusal<'a> {
    object: &'a str,
}

impl Refusal<'_> {
    fn of<T>(&self, place: &str, found: &str, expected: &str) -> Result<T> {
        Err(Error::BadManifest {
            object: self.object.to_owned(),
            place: place.to_owned(),
            found: found.to_owned(),
            expected: expected.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests;
