//! What the manifest says of tensors and blobs, and everything that must hold of it before a byte
//! is read by it.

use serde::{Deserialize, Serialize};
use std::collections::HashMap;

use crate::plan::SavePlan;
use crate::region::{self, Region, Span};
use crate::spec::{PAD_PREFIX, TensorSpec};
use crate::tile::{Part, tile};
use crate::{Dtype, Error, Group, Result, hex};
use storage::{FileEntry, Key, Manifest, crc64_join};

/// `format` of our manifests.
pub(crate) const FORMAT: &str = "feedline-ckpt";

/// `version` of our manifests; a reader refuses all others.
pub(crate) const VERSION: u32 = 1;

/// A checksum covers at least a page and at most what a reader can hold as scratch space.
pub(crate) const BLOCK_BYTES_MIN: u64 = 4 << 10;
pub(crate) const BLOCK_BYTES_MAX: u64 = 64 << 20;

/// Blocks are pages, so that none cuts an element or begins within a device's sector.
pub(crate) fn is_block_size(bytes: u64) -> bool {
    bytes.is_multiple_of(BLOCK_BYTES_MIN) && (BLOCK_BYTES_MIN..=BLOCK_BYTES_MAX).contains(&bytes)
}

/// 200,000 chunks take 60 MB of manifest and one second of a reader.
pub(crate) const CHUNKS_MAX: usize = 200_000;

/// A tensor of the checkpoint, whole and without ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// The parameter's name.
    pub name: String,
    /// What the tensor is to the parameter.
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

    /// How a message names it.
    pub(crate) fn label(&self) -> String {
        format!("{} '{}'", self.group, self.name)
    }
}

/// A region of a tensor that lies in one piece in one file.
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
    /// Which box of the tensor this is: one span an axis, row-major.
    #[serde(rename = "box")]
    pub spans: Vec<Span>,
    /// Which of the box's elements, in row-major order; all of them if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flat: Option<Span>,
}

impl Chunk {
    /// Which part of the tensor this is.
    #[must_use]
    pub fn region(&self) -> Region {
        let flat = self.flat.map(|flat| flat.start..flat.start.saturating_add(flat.len));
        Region { spans: self.spans.clone(), flat }
    }
}

/// Bytes that belong to no tensor, whole in a file of their own.
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
    pub(crate) user: serde_json::Value,
}

/// A manifest that has been checked: every chunk lies in a listed file, no two share a byte, and
/// the boxes of every tensor tile its shape.
#[derive(Debug)]
pub(crate) struct Catalog {
    pub(crate) meta: Meta,
    pub(crate) files: Vec<FileEntry>,
    file_places: HashMap<String, usize>,
    tensor_places: HashMap<(Group, String), usize>,
}

impl Catalog {
    /// Checks a manifest. `what` names it in messages.
    pub(crate) fn new(manifest: Manifest, what: &str) -> Result<Self> {
        let bad = Refusal { what };
        if manifest.format != FORMAT {
            return bad.of("format", &manifest.format, FORMAT);
        }
        if manifest.version != VERSION {
            let got = manifest.version.to_string();
            return bad.of("version", &got, "1, the only one that this reader knows");
        }
        let meta: Meta = serde_json::from_value(manifest.meta).or_else(|error| {
            bad.of("meta", &error.to_string(), "the fields that FORMAT.md lists and no others")
        })?;
        if !is_block_size(meta.block_bytes) {
            let due = format!("a multiple of {BLOCK_BYTES_MIN}, at most {BLOCK_BYTES_MAX}");
            return bad.of("block_bytes", &meta.block_bytes.to_string(), &due);
        }
        let mut file_places = HashMap::new();
        for (place, file) in manifest.files.iter().enumerate() {
            Key::new(&file.path)?;
            if file_places.insert(file.path.clone(), place).is_some() {
                return bad.of("files", &format!("'{}' twice", file.path), "each file once");
            }
        }
        let chunks: usize = meta.tensors.iter().map(|tensor| tensor.chunks.len()).sum();
        if chunks > CHUNKS_MAX {
            return bad.of(
                "tensors",
                &format!("{chunks} chunks"),
                &format!("at most {CHUNKS_MAX}"),
            );
        }
        let mut tensor_places = HashMap::new();
        for (place, tensor) in meta.tensors.iter().enumerate() {
            check_tensor(tensor, meta.block_bytes, &bad)?;
            if tensor_places.insert((tensor.group, tensor.name.clone()), place).is_some() {
                return bad.of(&tensor.label(), "it twice", "each tensor once");
            }
        }
        let catalog = Catalog { meta, files: manifest.files, file_places, tensor_places };
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

    /// The place of one of the tensors in the manifest.
    pub(crate) fn place(&self, tensor: &TensorEntry) -> usize {
        self.tensor_places[&(tensor.group, tensor.name.clone())]
    }

    /// Every chunk as (tensor, number in the tensor, chunk), file after file, in the order in which
    /// they lie there. Files without chunks are left out.
    pub(crate) fn by_file(&self) -> Vec<(&FileEntry, Vec<Placed<'_>>)> {
        let mut placed: Vec<Vec<Placed<'_>>> = self.files.iter().map(|_| Vec::new()).collect();
        for tensor in &self.meta.tensors {
            for (k, chunk) in tensor.chunks.iter().enumerate() {
                placed[self.file_places[&chunk.file]].push(Placed { tensor, k, chunk });
            }
        }
        // An empty chunk shares its offset with what follows, and comes before it.
        for chunks in &mut placed {
            chunks.sort_by_key(|placed| (placed.chunk.offset, placed.chunk.bytes));
        }
        self.files.iter().zip(placed).filter(|(_, chunks)| !chunks.is_empty()).collect()
    }

    fn check_ranges(&self, bad: &Refusal<'_>) -> Result<()> {
        for chunk in self.meta.tensors.iter().flat_map(|tensor| &tensor.chunks) {
            if !self.file_places.contains_key(&chunk.file) {
                return bad.of("tensors", &format!("a chunk in '{}'", chunk.file), "a listed file");
            }
        }
        for (file, chunks) in self.by_file() {
            let mut end = 0;
            for Placed { tensor, chunk, .. } in chunks {
                let next = chunk.offset.checked_add(chunk.bytes).filter(|&end| end <= file.bytes);
                let Some(next) = next.filter(|_| chunk.offset >= end) else {
                    let got = format!("{} bytes at {} of {}", chunk.bytes, chunk.offset, file.path);
                    let due = format!("bytes of its own, at {end} to {}", file.bytes);
                    return bad.of(&tensor.label(), &got, &due);
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

/// A chunk, whose it is, and which one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed<'a> {
    pub(crate) tensor: &'a TensorEntry,
    pub(crate) k: usize,
    pub(crate) chunk: &'a Chunk,
}

/// How many blocks of their own checksum a chunk has; none if it is a single block itself.
pub(crate) fn block_count(chunk_bytes: u64, block_bytes: u64) -> u64 {
    if chunk_bytes <= block_bytes { 0 } else { chunk_bytes.div_ceil(block_bytes) }
}

/// The checksum of blocks laid end to end, all `block_bytes` long but the last.
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
        let got = format!("{} axes", tensor.shape.len());
        return bad.of(&place, &got, &format!("at most {}", region::RANK_MAX));
    }
    if tensor.name.starts_with(PAD_PREFIX) {
        return bad.of(&place, "a name of the gaps in a file", "that of a tensor");
    }
    let item_bytes = tensor.dtype.item_bytes();
    let bytes = region::elements(tensor.shape.iter().copied())
        .and_then(|count| count.checked_mul(item_bytes));
    if bytes.is_none() {
        return bad.of(&place, &format!("shape {:?}", tensor.shape), "fewer than 2^64 bytes");
    }
    for chunk in &tensor.chunks {
        check_chunk(tensor, chunk, block_bytes, bad)?;
    }
    let parts: Vec<Part<'_>> =
        tensor.chunks.iter().map(|chunk| (chunk.spans.as_slice(), chunk.flat)).collect();
    if !tile(&tensor.shape, &parts) {
        let got = format!("{} boxes that overlap or leave gaps", parts.len());
        return bad.of(&place, &got, &format!("disjoint boxes that cover {:?}", tensor.shape));
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
    let got = || {
        let pairs: Vec<_> = chunk.spans.iter().copied().map(<[u64; 2]>::from).collect();
        let flat = chunk.flat.map(<[u64; 2]>::from);
        flat.map_or_else(|| format!("box {pairs:?}"), |flat| format!("{flat:?} of box {pairs:?}"))
    };
    let region = chunk.region();
    if !region.is_within(&tensor.shape) {
        return bad.of(&place, &got(), &format!("a box within {:?}", tensor.shape));
    }
    // fits: within a shape whose bytes fit.
    let due = region.elements().map_or(0, |count| count * tensor.dtype.item_bytes());
    if chunk.bytes != due {
        let got = format!("{} bytes for {}", chunk.bytes, got());
        return bad.of(&place, &got, &format!("{due}"));
    }
    let due = block_count(chunk.bytes, block_bytes);
    if chunk.blocks.len() as u64 != due {
        let got = format!("{} block checksums", chunk.blocks.len());
        return bad.of(&place, &got, &format!("{due} for {} bytes", chunk.bytes));
    }
    Ok(())
}

/// What the writers of a plan wrote: for each the files, in the order of the plan, and the chunks
/// of each file.
pub(crate) type Parts = Vec<Vec<(FileEntry, Vec<Chunk>)>>;

/// What all writers wrote, as a manifest lists it. The parts may come from other processes, so they
/// are compared with the plan.
pub(crate) fn merge_parts(
    plan: &SavePlan,
    parts: Parts,
) -> Result<(Vec<FileEntry>, Vec<TensorEntry>)> {
    let bad = |writer: usize, got: String, due: String| {
        let why = format!("it wrote {got}, and {due} was planned");
        Err(Error::BadInput { what: format!("the part of writer {writer}"), why })
    };
    if parts.len() != plan.writers() {
        let got = format!("{} parts", parts.len());
        return bad(parts.len(), got, format!("one of each of {} writers", plan.writers()));
    }
    let mut files = Vec::new();
    let mut chunks: Vec<Vec<Option<Chunk>>> =
        (0..plan.specs().len()).map(|tensor| vec![None; plan.pieces(tensor)]).collect();
    for (writer, part) in parts.into_iter().enumerate() {
        let shards = plan.shards(writer);
        if part.len() != shards.len() {
            return bad(writer, format!("{} files", part.len()), format!("{}", shards.len()));
        }
        for (shard, (file, in_file)) in shards.iter().zip(part) {
            if (&file.path, file.bytes) != (&shard.file, shard.bytes()) {
                let got = format!("{} of {} bytes", file.path, file.bytes);
                return bad(writer, got, format!("{} of {}", shard.file, shard.bytes()));
            }
            if in_file.len() != shard.pieces.len() {
                let got = format!("{} chunks in {}", in_file.len(), file.path);
                return bad(writer, got, format!("{}", shard.pieces.len()));
            }
            for (piece, chunk) in shard.pieces.iter().zip(in_file) {
                let due = (&shard.file, piece.offset, piece.bytes.len() as u64);
                if (&chunk.file, chunk.offset, chunk.bytes) != due || chunk.region() != piece.region
                {
                    return bad(writer, format!("{chunk:?}"), format!("{piece:?}"));
                }
                chunks[piece.tensor][piece.k] = Some(chunk);
            }
            files.push(file);
        }
    }
    let entry = |(spec, chunks): (&TensorSpec, Vec<Option<Chunk>>)| TensorEntry {
        name: spec.name.clone(),
        group: spec.group,
        dtype: spec.dtype,
        shape: spec.shape.clone(),
        chunks: chunks.into_iter().flatten().collect(),
    };
    Ok((files, plan.specs().iter().zip(chunks).map(entry).collect()))
}

struct Refusal<'a> {
    what: &'a str,
}

impl Refusal<'_> {
    fn of<T>(&self, place: &str, got: &str, due: &str) -> Result<T> {
        Err(Error::BadManifest {
            what: self.what.to_owned(),
            place: place.to_owned(),
            got: got.to_owned(),
            due: due.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests;
