use crate::format::catalog::{PACKED_MAGIC, Placed, join_blocks};
use crate::format::safetensors::{self, ALIGN_BYTES, HeaderEntry};
use crate::read::block_reader::{BlockDestination, ChecksumBlock, fetch};
use crate::read::checkpoint::{Checkpoint, blocks_of};
use crate::{Error, Packed, Result};
use std::collections::HashSet;
use storage::{FileEntry, Object, RangeRead, crc64, crc64_join};

/// What [`Checkpoint::verify`] read and verified.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VerifyReport {
    /// Files, without the manifest.
    pub files: usize,
    /// Their bytes, all of which were read and checksummed.
    pub bytes: u64,
    /// Tensors.
    pub tensors: usize,
}

impl Checkpoint {
    /// Reads everything once, and verifies every byte against its checksum, every safetensors
    /// header against the manifest, the zeros between tensors, and the checksums of blocks, chunks
    /// and files against each other.
    ///
    /// # Errors
    /// The first difference from what was saved: [`Error::Corrupt`] or [`Error::BadManifest`],
    /// [`storage::Error::NotFound`] within [`Error::Storage`], or errors of the store.
    pub fn verify(&self) -> Result<VerifyReport> {
        self.verify_with(&mut |_| ())
    }

    /// As [`Checkpoint::verify`]; after every 64 MiB or file, `progress` gets the number of
    /// verified bytes. It may block, which limits the rate.
    ///
    /// # Errors
    /// As there.
    pub fn verify_with(&self, progress: &mut dyn FnMut(u64)) -> Result<VerifyReport> {
        let mut done = 0;
        let mut advance = |bytes: u64| {
            done += bytes;
            progress(done);
        };
        let shards = self.catalog.by_file();
        let in_shards: HashSet<&str> = shards.iter().map(|(file, _)| file.path.as_str()).collect();
        for (file, chunks) in &shards {
            self.verify_shard(file, chunks, &mut advance)?;
        }
        for file in &self.catalog.files {
            if !in_shards.contains(file.path.as_str()) {
                file.verify(&*self.store, &self.folder)?;
                advance(file.bytes);
            }
        }
        let (files, bytes) = self.size();
        Ok(VerifyReport { files, bytes, tensors: self.tensors().len() })
    }

    fn verify_shard(
        &self,
        file: &FileEntry,
        chunks: &[Placed<'_>],
        advance: &mut dyn FnMut(u64),
    ) -> Result<()> {
        let object = self.open_file(&file.path)?;
        let (head, gaps) = check_head(&*object, chunks)?;
        let data_start = head.len() as u64;

        let sums_disagree = |place: String, computed: u64, found: u64| Error::BadManifest {
            object: self.display(),
            place,
            found: format!("CRC-64 {found:016x}"),
            expected: format!("CRC-64 {computed:016x} as computed from its blocks"),
        };
        let block_bytes = self.catalog.meta.block_bytes;
        let mut end = data_start;
        let mut sum = crc64(&head);
        let mut blocks = Vec::new();
        let mut gaps = gaps.into_iter().peekable();
        for Placed { tensor, chunk, .. } in chunks {
            if let Some([begin, end]) = gaps.next_if(|[_, end]| *end == chunk.offset) {
                let len = (end - begin) as usize; // fits: less than a page
                let zeros = crc64(&vec![0; len]);
                let into = BlockDestination::Nowhere(len);
                let (object, packed) = (&*object, None);
                blocks.push(ChecksumBlock { object, offset: begin, crc64: zeros, into, packed });
                sum = crc64_join(sum, zeros, len as u64);
            }
            if !chunk.blocks.is_empty() {
                let joined = join_blocks(&chunk.blocks, chunk.bytes, block_bytes);
                if joined != chunk.crc64 {
                    return Err(sums_disagree(tensor.label(), joined, chunk.crc64));
                }
            }
            let (bytes, crc64) =
                chunk.packed.as_ref().map_or((chunk.bytes, chunk.crc64), Packed::sum);
            sum = crc64_join(sum, crc64, bytes);
            end = chunk.offset + bytes;
            for source in blocks_of(chunk, tensor.dtype, block_bytes) {
                let into = BlockDestination::Nowhere(source.bytes as usize); // fits: at most 64 MiB
                blocks.push(source.read(&*object, into));
            }
        }
        if end != file.bytes {
            return Err(Error::Corrupt {
                object: object.display(),
                offset: end,
                found: format!("{} bytes after the last tensor", file.bytes - end),
                expected: "the end of the file".to_owned(),
            });
        }
        advance(data_start);
        fetch_with_progress(blocks, self.threads, advance)?;
        if sum != file.crc64 {
            // The tensors are correct, so the header is damaged, or the manifest is inconsistent.
            return Err(Error::Corrupt {
                object: object.display(),
                offset: 0,
                found: format!("CRC-64 {sum:016x} of {} bytes", file.bytes),
                expected: format!("CRC-64 {:016x} as in the manifest", file.crc64),
            });
        }
        Ok(())
    }
}

/// Bytes read between two reports of progress: a second of a slow device.
const REPORT_BYTES: u64 = 64 << 20;

fn fetch_with_progress(
    blocks: Vec<ChecksumBlock<'_>>,
    threads: usize,
    advance: &mut dyn FnMut(u64),
) -> Result<()> {
    let mut blocks = blocks.into_iter().peekable();
    while blocks.peek().is_some() {
        let (mut part, mut bytes) = (Vec::new(), 0);
        while bytes < REPORT_BYTES
            && let Some(block) = blocks.next()
        {
            bytes += block.stored_bytes() as u64;
            part.push(block);
        }
        fetch(part, threads)?;
        advance(bytes);
    }
    Ok(())
}

/// Reads the bytes before the first tensor, and compares them with the manifest. Returns them, and
/// the gaps between tensors.
fn check_head(object: &dyn Object, chunks: &[Placed<'_>]) -> Result<(Vec<u8>, Vec<[u64; 2]>)> {
    let what = object.display();
    let corrupt = |offset, found, expected: &str| Error::Corrupt {
        object: what.clone(),
        offset,
        found,
        expected: expected.to_owned(),
    };
    if chunks.iter().all(|placed| placed.chunk.packed.is_none()) {
        let header = safetensors::read_header(object)?;
        let start = header.bytes.len() as u64;
        if !start.is_multiple_of(ALIGN_BYTES) {
            return Err(corrupt(
                0,
                format!("tensors from byte {start}"),
                "tensors from a multiple of 4096",
            ));
        }
        if let Some(entry) = header.foreign.first() {
            let found = format!("'{:.80}' of type {}", entry.name, entry.type_label());
            return Err(corrupt(8, found, "a type of the manifest"));
        }
        let gaps = find_gaps(&what, start, chunks)?;
        check_entries(&what, start, header.entries, chunks, &gaps)?;
        return Ok((header.bytes, gaps));
    }
    // Shorter ones have no room for it.
    let mut magic = PACKED_MAGIC.to_vec();
    let len = object.len_bytes().min(magic.len() as u64) as usize; // fits: 16
    object.read_many(&mut [RangeRead { offset: 0, buf: &mut magic[..len] }])?;
    if magic != PACKED_MAGIC || len < magic.len() {
        let found = format!("'{}'", magic[..len].escape_ascii());
        return Err(corrupt(0, found, "'feedline planes' at the start of packed tensors"));
    }
    let gaps = find_gaps(&what, magic.len() as u64, chunks)?;
    match gaps.first() {
        None => Ok((magic, gaps)),
        Some([from, to]) => Err(corrupt(
            *from,
            format!("{} unused bytes", to - from),
            "packed tensors without gaps",
        )),
    }
}

/// The gaps in a file, before each chunk that has one.
fn find_gaps(object: &str, data_start: u64, chunks: &[Placed<'_>]) -> Result<Vec<[u64; 2]>> {
    let mut gaps = Vec::new();
    let mut end = data_start;
    for Placed { tensor, k, chunk } in chunks {
        let Some(gap) = chunk.offset.checked_sub(end).filter(|&gap| gap < ALIGN_BYTES) else {
            return Err(Error::Corrupt {
                object: object.to_owned(),
                offset: end,
                found: format!("{} at byte {}", tensor.entry_name(*k), chunk.offset),
                expected: format!("a tensor within {ALIGN_BYTES} bytes"),
            });
        };
        if gap > 0 {
            gaps.push([end, chunk.offset]);
        }
        end = chunk.offset + chunk.stored_bytes();
    }
    Ok(gaps)
}

/// Checks that a file's own header agrees with the manifest.
fn check_entries(
    object: &str,
    data_start: u64,
    mut found: Vec<HeaderEntry>,
    chunks: &[Placed<'_>],
    gaps: &[[u64; 2]],
) -> Result<()> {
    let entry = |Placed { tensor, k, chunk }: &Placed<'_>| {
        let begin = chunk.offset - data_start;
        HeaderEntry {
            name: tensor.entry_name(*k),
            dtype: tensor.dtype,
            shape: safetensors::entry_shape(&chunk.spans, chunk.flat),
            data_offsets: [begin, begin + chunk.bytes],
        }
    };
    let corrupt = |found: String, expected: String| {
        Err(Error::Corrupt { object: object.to_owned(), offset: 8, found, expected })
    };
    let pads = gaps.iter().enumerate();
    let pads = pads.map(|(n, [from, to])| safetensors::pad(n, from - data_start, to - data_start));
    let mut expected: Vec<HeaderEntry> = chunks.iter().map(entry).chain(pads).collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    expected.sort_by(|a, b| a.name.cmp(&b.name));
    if let Some((found, expected)) =
        found.iter().zip(&expected).find(|(found, expected)| found != expected)
    {
        return corrupt(format!("{found:?}"), format!("{expected:?} as in the manifest"));
    }
    if found.len() != expected.len() {
        return corrupt(
            format!("{} tensors", found.len()),
            format!("{} tensors as in the manifest", expected.len()),
        );
    }
    Ok(())
}
