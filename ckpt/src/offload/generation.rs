//! The record of a generation: its files and their checksums. It is a manifest, written when they
//! are durable on all disks, under a name that no other generation has.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Generation;
use super::folders::Folder;
use super::form::{FileForm, ITEM_BYTES, ROLES, Segment, StateLayout, Tile};
use super::slot::{GenerationFiles, slot_name};
use crate::base::hex;
use crate::format::catalog::{block_count, join_blocks};
use crate::format::chunk_writer;
use crate::{Chunk, Error, Result};
use storage::{FileEntry, Manifest, crc64, crc64_join};

const FORMAT: &str = "feedline-offload";
const VERSION: u32 = 1;

/// Prefix of the name of a record; the number of its generation follows, with this many digits.
const RECORD: &str = "generation-";
const DIGITS: usize = 12;

/// The checksum of every block of every array, by parameter and role.
pub(super) type Sums = Vec<[Vec<u64>; ROLES]>;

/// A complete generation.
#[derive(Debug)]
pub(super) struct CompleteGeneration {
    pub(super) generation: Generation,
    pub(super) slot: GenerationFiles,
    pub(super) sums: Sums,
}

/// `meta` of a record.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Meta {
    number: u64,
    step: u64,
    rank: usize,
    /// Of the plan.
    #[serde(with = "hex")]
    fingerprint: u64,
    block_bytes: u64,
    slot: u64,
    /// The chunks of each file, in the order of their bytes.
    chunks: Vec<Vec<Chunk>>,
    user: Value,
}

/// The name of a record.
pub(super) fn record_name(number: u64) -> String {
    format!("{RECORD}{number:0DIGITS$}")
}

/// The number of the generation in the name of a record; `None` for any other name.
pub(super) fn number_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(RECORD)?;
    if digits.len() < DIGITS { None } else { digits.parse().ok() }
}

impl CompleteGeneration {
    /// Writes the record of files that are durable.
    pub(super) fn commit(
        &self,
        Folder { store, key }: &Folder,
        form: &StateLayout,
        block_bytes: u64,
    ) -> Result<()> {
        let Generation { number, step, meta } = &self.generation;
        let own = slot_name(self.slot.number);
        let all = form.files.iter().map(|file| entry(form, file, &self.sums, block_bytes));
        let (mut files, chunks): (Vec<_>, Vec<_>) = all.unzip();
        files.iter_mut().for_each(|file| file.path = format!("{own}/{}", file.path));
        let meta = Meta {
            number: *number,
            step: *step,
            rank: form.rank,
            fingerprint: form.plan.fingerprint(),
            block_bytes,
            slot: self.slot.number,
            chunks,
            user: meta.clone(),
        };
        let meta = serde_json::to_value(meta)
            .expect("strings, numbers and lists always serialize, and all keys are strings");
        let record = Manifest { format: FORMAT.to_owned(), version: VERSION, files, meta };
        record.write(&**store, &key.join(&record_name(*number))?)?;
        Ok(())
    }

    /// Reads a record, and opens the files that it lists.
    pub(super) fn open(
        folders: &[Folder],
        form: &StateLayout,
        number: u64,
        block_bytes: u64,
    ) -> Result<Self> {
        let Folder { store, key } = &folders[0];
        let key = key.join(&record_name(number))?;
        let object = store.display(&key);
        let bad = |place: &str, found: String, expected: String| Error::BadManifest {
            object: object.clone(),
            place: place.to_owned(),
            found,
            expected,
        };
        let Manifest { format, version, files, meta } = Manifest::read(&**store, &key)?;
        if (format.as_str(), version) != (FORMAT, VERSION) {
            let expected = format!("{FORMAT} {VERSION}");
            return Err(bad("format and version", format!("{format} {version}"), expected));
        }
        let meta: Meta = serde_json::from_value(meta).map_err(|e| {
            bad("meta", e.to_string(), "the fields of this version and no others".to_owned())
        })?;
        let of = (meta.number, meta.rank, meta.fingerprint, meta.block_bytes);
        let expected = (number, form.rank, form.plan.fingerprint(), block_bytes);
        if of != expected {
            let text = |(number, rank, plan, block): (u64, usize, u64, u64)| {
                format!(
                    "generation {number} of rank {rank}, plan {plan:016x}, blocks of {block} bytes"
                )
            };
            return Err(bad("meta", text(of), text(expected)));
        }
        let slot = meta.slot;
        let mut sums = form.params.iter().map(|_| Default::default()).collect();
        let mut expected_files = Vec::with_capacity(files.len());
        for (file, chunks) in form.files.iter().zip(&meta.chunks) {
            take_sums(form, file, chunks, &mut sums, block_bytes).ok_or_else(|| {
                bad(&file.name, format!("{chunks:?}"), "the arrays of the plan".to_owned())
            })?;
            let (entry, _) = entry(form, file, &sums, block_bytes);
            expected_files
                .push(FileEntry { path: format!("{}/{}", slot_name(slot), entry.path), ..entry });
        }
        if expected_files != files || meta.chunks.len() != form.files.len() {
            return Err(bad("files", format!("{files:?}"), format!("{expected_files:?}")));
        }
        let slot = GenerationFiles::open(folders, form, slot)?;
        for (file, form) in slot.files.iter().zip(&form.files) {
            if file.len_bytes() != form.bytes {
                let (found, expected) = (file.len_bytes(), form.bytes);
                return Err(bad(&form.name, format!("{found} bytes"), format!("{expected} bytes")));
            }
        }
        let generation = Generation { number, step: meta.step, meta: meta.user };
        Ok(CompleteGeneration { generation, slot, sums })
    }
}

impl CompleteGeneration {
    /// Rejects bytes that differ from those written, by the checksums of a segment in the first
    /// roles.
    pub(super) fn check(&self, tile: &Tile, segment: &Segment, sums: &[u64]) -> Result<()> {
        for (role, &found) in sums.iter().enumerate() {
            let expected = self.sums[segment.param][role][segment.block];
            if found != expected {
                let place = tile.places[role];
                return Err(Error::Corrupt {
                    object: self.slot.files[place.file].display(),
                    offset: place.offset + segment.tile_offset as u64,
                    found: format!("CRC-64 {found:016x} of {} bytes", segment.len),
                    expected: format!("CRC-64 {expected:016x} as written"),
                });
            }
        }
        Ok(())
    }
}

/// The manifest entries of a file, with its name as path, and of the arrays in it.
pub(super) fn entry(
    form: &StateLayout,
    file: &FileForm,
    sums: &Sums,
    block_bytes: u64,
) -> (FileEntry, Vec<Chunk>) {
    let mut sum = crc64(&file.header);
    let mut end = file.header.len() as u64;
    let mut chunks = Vec::with_capacity(file.arrays.len());
    for &(param, role) in &file.arrays {
        let offset = form.places[param][role].offset;
        sum = join_zeros(sum, offset - end);
        let part = array_sums(form, (param, role), &sums[param][role], block_bytes);
        sum = crc64_join(sum, part.crc64, part.bytes);
        end = offset + part.bytes;
        chunks.push(part.chunk(&file.name, &form.params[param].region.normal()));
    }
    let crc64 = join_zeros(sum, file.bytes - end);
    (FileEntry { path: file.name.clone(), bytes: file.bytes, crc64 }, chunks)
}

/// Extends a checksum over the zeros that follow, fewer than a page or two.
fn join_zeros(sum: u64, len: u64) -> u64 {
    const ZEROS: [u8; 8192] = [0; 8192];
    crc64_join(sum, crc64(&ZEROS[..len as usize]), len) // fits: less than two pages
}

fn array_sums(
    form: &StateLayout,
    (param, role): (usize, usize),
    sums: &[u64],
    block_bytes: u64,
) -> chunk_writer::ChunkSums {
    let bytes = (form.params[param].elements * ITEM_BYTES) as u64;
    let crc64 = join_blocks(sums, bytes, block_bytes);
    let offset = form.places[param][role].offset;
    let blocks = if block_count(bytes, block_bytes) > 0 { sums.to_vec() } else { Vec::new() };
    chunk_writer::ChunkSums { offset, bytes, crc64, blocks, packed: None }
}

/// The checksums of a file's arrays, from its chunks; `None` if the chunks are not those of the
/// arrays.
fn take_sums(
    form: &StateLayout,
    file: &FileForm,
    chunks: &[Chunk],
    sums: &mut Sums,
    block_bytes: u64,
) -> Option<()> {
    if chunks.len() != file.arrays.len() {
        return None;
    }
    for (&(param, role), chunk) in file.arrays.iter().zip(chunks) {
        let bytes = (form.params[param].elements * ITEM_BYTES) as u64;
        let expected = bytes.div_ceil(block_bytes) as usize; // fits: of arrays of this machine
        let blocks = match chunk.blocks.as_slice() {
            [] => vec![chunk.crc64; expected],
            blocks => blocks.to_vec(),
        };
        if blocks.len() != expected {
            return None;
        }
        let own = array_sums(form, (param, role), &blocks, block_bytes);
        if *chunk != own.chunk(&file.name, &form.params[param].region.normal()) {
            return None;
        }
        sums[param][role] = blocks;
    }
    Some(())
}
