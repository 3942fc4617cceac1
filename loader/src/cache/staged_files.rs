//! Complete files on the node's own disk, a block at a time.
//!
//! A block of a file is one file here, `FILE-BLOCK` in hexadecimal, written once and complete:
//!
//! | offset | type | what |
//! |---|---|---|
//! | 0 | 8 bytes | `FEEDBLK` and 1, the version |
//! | 8 | u64 x 3 | the identity of the order: checksum, samples, bytes |
//! | 32 | u64 x 3 | which file of the order, which block of the file, its length |
//! | 56 | u64 | CRC-64/NVME of the 56 bytes above and of the table |
//! | 64 | u64 x n | CRC-64/NVME of each 16 KiB |
//! | | | the bytes of the block |
//!
//! Little-endian throughout. A sample has some KiB at a random offset: checksums of 16 KiB let it
//! be verified without reading the block.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use storage::{Crc64, Key, Object, RangeRead, Storage, crc64};

use super::{Identity, room};
use crate::{PieceRef, Result, SampleCache, SampleOrder};

/// Options of [`StagedFiles`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageOptions {
    /// As [`CacheOptions::salt`](super::CacheOptions::salt). Default: 0.
    pub salt: u64,
    /// The most bytes to copy per second, so that training is not slowed down. Default: 256 MiB.
    pub bytes_per_s: u64,
    /// Bytes of a block, a multiple of 16 KiB. Default: 16 MiB, for few files and few seeks on the
    /// store.
    pub block_bytes: u64,
}

impl Default for StageOptions {
    fn default() -> Self {
        StageOptions { salt: 0, bytes_per_s: 256 << 20, block_bytes: 16 << 20 }
    }
}

const MAGIC: [u8; 8] = *b"FEEDBLK\x01";
const HEADER_BYTES: u64 = 64;
const CHUNK_BYTES: u64 = 16 << 10;

/// Blocks kept open, with their checksums: 8 KiB of memory and a file descriptor each.
const OPEN_MAX: usize = 256;

/// Consecutive failed blocks after which staging is aborted.
const FAILURES_MAX: u32 = 8;

/// All files of an order, copied to this node front to back during the run.
///
/// A sample is read from the copy once all of its bytes are copied. Several processes that share
/// the folder start at different blocks and skip those that others have copied by then.
#[derive(Debug)]
pub struct StagedFiles {
    shared: Arc<StagingShared>,
    stager: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct StagingShared {
    store: Arc<dyn Storage>,
    order: Arc<dyn SampleOrder>,
    identity: Identity,
    folder: Key,
    options: StageOptions,
    state: Mutex<StagingState>,
    stop: Condvar,
}

#[derive(Debug, Default)]
struct StagingState {
    copied: BTreeSet<(u32, u64)>,
    open: BTreeMap<(u32, u64), StagedBlock>,
    pieces: Vec<PieceRef>,
    chunks: Vec<u8>,
    is_stopping: bool,
}

#[derive(Debug)]
struct StagedBlock {
    object: Arc<dyn Object>,
    checksums: Vec<u64>,
    len: u64,
}

/// Bytes of the files of an order that are copied so far.
pub(super) fn copied_bytes(store: &dyn Storage, order: &dyn SampleOrder, salt: u64) -> u64 {
    let folder = Identity::of(order, salt).folder("files");
    store.list(&folder).map_or(0, |entries| entries.iter().map(|entry| entry.bytes).sum())
}

impl StagedFiles {
    /// Continues copying the files of an order.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn open(
        store: &Arc<dyn Storage>,
        order: &Arc<dyn SampleOrder>,
        options: StageOptions,
    ) -> Result<Self> {
        assert!(options.block_bytes > 0, "block_bytes must not be 0");
        assert!(
            options.block_bytes.is_multiple_of(CHUNK_BYTES),
            "block_bytes must be a multiple of a chunk"
        );
        let identity = Identity::of(order.as_ref(), options.salt);
        let folder = identity.folder("files");
        let shared = Arc::new(StagingShared {
            store: Arc::clone(store),
            order: Arc::clone(order),
            identity,
            folder,
            options,
            state: Mutex::default(),
            stop: Condvar::new(),
        });
        if let Err(error) = store.remove_orphans(&shared.folder) {
            log::warn!("cache: {error}");
        }
        let stager = Arc::clone(&shared);
        let stager = std::thread::Builder::new()
            .name("stage".to_owned())
            .spawn(move || stager.stage())
            .map_err(|error| storage::Error::from_io("start", "a thread for the cache", error))?;
        Ok(StagedFiles { shared, stager: Some(stager) })
    }

    /// Blocks copied so far, and all blocks.
    #[must_use]
    pub fn progress(&self) -> (u64, u64) {
        (self.shared.lock().copied.len() as u64, self.shared.blocks().count() as u64)
    }
}

impl SampleCache for StagedFiles {
    fn find(&self, sample: u64, into: &mut [u8]) -> bool {
        self.shared.find(sample, into)
    }

    fn keep(&self, _sample: u64, _bytes: &[u8]) {}

    fn consumed(&self, _samples: u64) {}
}

impl Drop for StagedFiles {
    fn drop(&mut self) {
        self.shared.lock().is_stopping = true;
        self.shared.stop.notify_all();
        if let Some(stager) = self.stager.take() {
            let _ = stager.join();
        }
    }
}

impl StagingShared {
    fn lock(&self) -> MutexGuard<'_, StagingState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All blocks of all files, in their order.
    fn blocks(&self) -> impl Iterator<Item = (u32, u64)> {
        let block_bytes = self.options.block_bytes;
        let sources = self.order.sources();
        (0..).zip(sources).flat_map(move |(file, source)| {
            (0..source.len_bytes.div_ceil(block_bytes)).map(move |block| (file, block))
        })
    }

    fn key(&self, (file, block): (u32, u64)) -> Option<Key> {
        self.folder.join(&format!("{file:08x}-{block:08x}")).ok()
    }

    /// The stager's thread.
    fn stage(&self) {
        let count = self.blocks().count();
        // Processes that share the folder start at different blocks, so that they share the work.
        let first = if count == 0 { 0 } else { std::process::id() as usize * 7919 % count };
        let start = Instant::now();
        let (mut copied_bytes, mut failures) = (0_u64, 0);
        let mut buf = Vec::new();
        let mut open: Option<(u32, Arc<dyn Object>)> = None;
        for (nth, at) in self.blocks().skip(first).chain(self.blocks().take(first)).enumerate() {
            if nth % 64 == 0 {
                self.scan();
            }
            if self.lock().copied.contains(&at) {
                continue;
            }
            match self.copy(at, &mut buf, &mut open) {
                Ok(0) => return log::info!("cache: no space for more blocks; staging stopped"),
                Ok(bytes) => (copied_bytes, failures) = (copied_bytes + bytes, 0),
                Err(error) => {
                    log::warn!("cache: {error}");
                    failures += 1;
                }
            }
            let planned =
                Duration::from_secs_f64(copied_bytes as f64 / self.options.bytes_per_s as f64);
            let pause = planned.saturating_sub(start.elapsed());
            let state = self.lock();
            let stop = self.stop.wait_timeout_while(state, pause, |state| !state.is_stopping);
            if stop.unwrap_or_else(PoisonError::into_inner).0.is_stopping || failures > FAILURES_MAX
            {
                return;
            }
        }
        log::info!("cache: all files of {} are staged", self.order.name());
    }

    /// Finds the blocks copied by any process.
    fn scan(&self) {
        let entries = match self.store.list(&self.folder) {
            Ok(entries) => entries,
            Err(error) => return log::warn!("cache: {error}"),
        };
        let number = |text: &str| u64::from_str_radix(text, 16).ok();
        self.lock().copied = entries
            .iter()
            .filter_map(|entry| {
                let (file, block) = entry.key.name().split_once('-')?;
                Some((u32::try_from(number(file)?).ok()?, number(block)?))
            })
            .collect();
    }

    /// Copies one block; 0 if there is no room for it.
    fn copy(
        &self,
        (file, block): (u32, u64),
        buf: &mut Vec<u8>,
        open: &mut Option<(u32, Arc<dyn Object>)>,
    ) -> storage::Result<u64> {
        let source = &self.order.sources()[file as usize];
        let object = match open {
            Some((of, object)) if *of == file => object,
            _ => &mut open.insert((file, source.store.open(&source.key)?)).1,
        };
        let offset = block * self.options.block_bytes;
        let len = self.options.block_bytes.min(source.len_bytes - offset);
        let taken = self.lock().copied.len() as u64 * self.options.block_bytes;
        if room(self.store.as_ref(), taken) < len + len / CHUNK_BYTES * 8 + HEADER_BYTES {
            return Ok(0);
        }
        buf.resize(len as usize, 0); // fits: a block
        object.read_many(&mut [RangeRead { offset, buf: &mut *buf }])?;
        let head = self.head((file, block), len, buf.chunks(CHUNK_BYTES as usize).map(crc64));
        let Some(key) = self.key((file, block)) else { return Ok(len) };
        match self.store.create(&key, head.len() as u64 + len) {
            Ok(mut upload) => {
                upload.write(&head)?;
                upload.write(buf)?;
                upload.finish()?;
            }
            Err(storage::Error::Exists { .. }) => {} // another process was faster
            Err(error) => return Err(error),
        }
        self.lock().copied.insert((file, block));
        Ok(len)
    }

    /// Header and table of a block.
    fn head(
        &self,
        (file, block): (u32, u64),
        len: u64,
        checksums: impl Iterator<Item = u64>,
    ) -> Vec<u8> {
        let Identity { crc64, samples, bytes } = self.identity;
        let mut head = MAGIC.to_vec();
        for number in [crc64, samples, bytes, u64::from(file), block, len, 0] {
            head.extend_from_slice(&number.to_le_bytes());
        }
        checksums.for_each(|checksum| head.extend_from_slice(&checksum.to_le_bytes()));
        let checksum = head_checksum(&head);
        head[HEADER_BYTES as usize - 8..HEADER_BYTES as usize]
            .copy_from_slice(&checksum.to_le_bytes());
        head
    }

    /// Opens a block; `None` if it is absent or invalid.
    fn block(&self, at: (u32, u64)) -> Option<StagedBlock> {
        let source = self.order.sources().get(at.0 as usize)?;
        let offset = at.1.checked_mul(self.options.block_bytes)?;
        let len = self.options.block_bytes.min(source.len_bytes.checked_sub(offset)?);
        let object = self.store.open(&self.key(at)?).ok()?;
        let count = len.div_ceil(CHUNK_BYTES);
        let mut head = vec![0; (HEADER_BYTES + 8 * count) as usize]; // fits: checksums of a block
        object.read_many(&mut [RangeRead { offset: 0, buf: &mut head }]).ok()?;
        let numbers: &[[u8; 8]] = head[HEADER_BYTES as usize..].as_chunks().0;
        let checksums: Vec<u64> =
            numbers.iter().map(|checksum| u64::from_le_bytes(*checksum)).collect();
        let is_valid = head == self.head(at, len, checksums.iter().copied());
        is_valid.then_some(StagedBlock { object, checksums, len })
    }

    fn find(&self, sample: u64, into: &mut [u8]) -> bool {
        let mut state = self.lock();
        let mut pieces = std::mem::take(&mut state.pieces);
        pieces.clear();
        let known = self.order.pieces(sample, &mut pieces).is_ok();
        let len: u64 = pieces.iter().map(|piece| piece.len_bytes).sum();
        let found = known
            && len == into.len() as u64
            && pieces.iter().all(|piece| self.has(&state, piece))
            && self.read(&mut state, &pieces, into);
        state.pieces = pieces;
        found
    }

    fn has(&self, state: &StagingState, piece: &PieceRef) -> bool {
        let block_bytes = self.options.block_bytes;
        let end = piece.offset_bytes.saturating_add(piece.len_bytes);
        let blocks = piece.offset_bytes / block_bytes..end.div_ceil(block_bytes);
        piece.len_bytes == 0
            || blocks.into_iter().all(|block| state.copied.contains(&(piece.file, block)))
    }

    fn read(&self, state: &mut StagingState, pieces: &[PieceRef], mut into: &mut [u8]) -> bool {
        let block_bytes = self.options.block_bytes;
        for piece in pieces {
            let (mut at, end) = (piece.offset_bytes, piece.offset_bytes + piece.len_bytes);
            while at < end {
                let block = (piece.file, at / block_bytes);
                let stop = end.min((block.1 + 1) * block_bytes);
                let (part, rest) = into.split_at_mut((stop - at) as usize); // fits: part of `into`
                if !self.read_part(state, block, at % block_bytes, part) {
                    state.copied.remove(&block);
                    state.open.remove(&block);
                    if let Some(key) = self.key(block) {
                        let _ = self.store.delete(&key); // the next run copies it again
                    }
                    return false;
                }
                (at, into) = (stop, rest);
            }
        }
        true
    }

    /// Reads part of one block, and verifies the chunks that it is in.
    fn read_part(
        &self,
        state: &mut StagingState,
        at: (u32, u64),
        offset: u64,
        into: &mut [u8],
    ) -> bool {
        if !state.open.contains_key(&at) {
            if state.open.len() >= OPEN_MAX {
                state.open.clear(); // access is random: no block is likelier to be read again
            }
            let Some(block) = self.block(at) else { return false };
            state.open.insert(at, block);
        }
        let (StagingState { open, chunks, .. }, end) = (state, offset + into.len() as u64);
        let Some(StagedBlock { object, checksums, len }) = open.get(&at) else { return false };
        let (first, last) = (offset / CHUNK_BYTES, end.div_ceil(CHUNK_BYTES));
        let begin = first * CHUNK_BYTES;
        chunks.resize(((last * CHUNK_BYTES).min(*len) - begin) as usize, 0); // fits: some chunks
        let place = HEADER_BYTES + 8 * checksums.len() as u64 + begin;
        if object.read_many(&mut [RangeRead { offset: place, buf: chunks }]).is_err() {
            return false;
        }
        let checksums = &checksums[first as usize..last as usize];
        if !chunks.chunks(CHUNK_BYTES as usize).map(crc64).eq(checksums.iter().copied()) {
            return false;
        }
        let start = (offset - begin) as usize;
        into.copy_from_slice(&chunks[start..start + into.len()]);
        true
    }
}

/// The checksum of a header and its table, without the checksum field.
fn head_checksum(head: &[u8]) -> u64 {
    let mut checksum = Crc64::new();
    checksum.update(&head[..HEADER_BYTES as usize - 8]);
    checksum.update(&head[HEADER_BYTES as usize..]);
    checksum.value()
}
