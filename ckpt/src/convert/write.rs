//! Writes derived tensors to safetensors files, a band at a time.

use super::made::{DeriveBuffers, DerivedTensor};
use super::source::TensorSource;
use crate::base::parallel_io;
use crate::format::catalog::{PACKED_MAGIC, packed_path};
use crate::format::chunk_writer::ChunkWriter;
use crate::format::safetensors::{self, Unplaced};
use crate::spec::{TensorSpec, check_specs};
use crate::write::shard_writer::Checksums;
use crate::{Chunk, Codec, Error, Region, Result, bands};
use storage::{FileEntry, Key, Storage, crc64_join};

/// Limits on the memory and files of a conversion.
#[derive(Clone, Copy, Debug)]
pub struct ConvertLimits {
    /// Bytes of tensors in one file; a larger tensor gets a separate file. Default: 4 GiB.
    pub shard_bytes_max: u64,
    /// Memory limit of all buffers together. A matrix that is transposed and larger than a
    /// quarter of a thread's share is read more than once. Default: 1 GiB. Minimum: 1 MiB.
    pub memory_bytes: u64,
    /// Files written at the same time. Default: 2.
    pub threads: usize,
}

impl Default for ConvertLimits {
    fn default() -> Self {
        ConvertLimits { shard_bytes_max: 4 << 30, memory_bytes: 1 << 30, threads: 2 }
    }
}

/// Callback with the number of bytes written since its last call. Several threads call it.
pub type ProgressFn<'a> = &'a (dyn Fn(u64) + Sync);

/// Bands of tensors that are not transposed; larger ones would not be faster.
const BAND_BYTES: u64 = 16 << 20;

/// Buffers that a tensor passes through: as read, transposed, cast, as a band.
const BUFFERS: u64 = 4;

/// One safetensors file to be written.
#[derive(Debug)]
pub(crate) struct OutFile {
    pub(crate) name: String,
    header: Vec<u8>,
    /// Its tensors, in the order of their bytes.
    pub(crate) members: Vec<usize>,
    /// The offset of each.
    offsets: Vec<u64>,
}

impl OutFile {
    /// Its length.
    pub(crate) fn bytes(&self, made: &[DerivedTensor]) -> u64 {
        let last = self.members.last().zip(self.offsets.last());
        last.map_or(self.header.len() as u64, |(&place, offset)| offset + made[place].bytes())
    }
}

/// Rejects descriptions from which no step or folder of files can be written.
pub(crate) fn check(made: &[DerivedTensor], source: &TensorSource) -> Result<()> {
    let spec = |made: &DerivedTensor| TensorSpec {
        name: made.name.clone(),
        group: made.group,
        dtype: made.dtype,
        shape: made.shape.clone(),
    };
    check_specs(&made.iter().map(spec).collect::<Vec<_>>())?;
    made.iter().try_for_each(|made| made.check(source))
}

/// Divides tensors among files in their order, as many as fit, and writes the headers. `name` has
/// the number of a file, from 1, and of all files.
pub(crate) fn lay_out(
    made: &[DerivedTensor],
    members: impl Iterator<Item = usize>,
    shard_bytes_max: u64,
    name: impl Fn(usize, usize) -> String,
) -> Result<Vec<OutFile>> {
    let mut files: Vec<Vec<usize>> = Vec::new();
    let mut data = 0;
    for place in members {
        let bytes = made[place].bytes();
        if files.is_empty() || data + bytes > shard_bytes_max && data > 0 {
            files.push(Vec::new());
            data = 0;
        }
        files.last_mut().expect("pushed above if there was none").push(place);
        data += bytes;
    }
    let count = files.len();
    let seal = |(number, members)| seal(name(number, count), members, made);
    (1..).zip(files).map(seal).collect()
}

fn seal(name: String, mut members: Vec<usize>, made: &[DerivedTensor]) -> Result<OutFile> {
    let (header, offsets) = safetensors::arrange(&mut members, false, |&place| {
        let DerivedTensor { name, group, dtype, shape, .. } = &made[place];
        let (group, dtype, shape) = (*group, *dtype, shape.clone());
        Unplaced { name: group.entry_name(name, None), group, dtype, shape }
    })?;
    Ok(OutFile { name, header, members, offsets })
}

/// Destination and source of the files.
pub(crate) struct WriteJob<'a> {
    pub(crate) store: &'a dyn Storage,
    pub(crate) folder: &'a Key,
    pub(crate) source: &'a TensorSource,
    pub(crate) made: &'a [DerivedTensor],
    pub(crate) block_bytes: u64,
    pub(crate) codec: Option<Codec>,
    pub(crate) bounds: ConvertLimits,
    pub(crate) progress: ProgressFn<'a>,
}

impl WriteJob<'_> {
    /// Writes all files, and makes them durable. Returns each with its chunks, in the order of
    /// members.
    pub(crate) fn write(&self, files: &[OutFile]) -> Result<Vec<(FileEntry, Vec<Chunk>)>> {
        let jobs: Vec<&OutFile> = files.iter().collect();
        parallel_io::each(jobs, self.bounds.threads.max(1), |file, _| self.write_file(file))
    }

    fn write_file(&self, file: &OutFile) -> Result<(FileEntry, Vec<Chunk>)> {
        let (path, header): (_, &[u8]) = match self.codec {
            None => (file.name.clone(), &file.header),
            Some(_) => (packed_path(&file.name), PACKED_MAGIC),
        };
        let key = self.folder.join(&path)?;
        let mut upload = self.store.create(&key, self.file_bytes_max(file))?;
        let mut sum = upload.write_with_crc(header)?;
        let (mut band_bytes, mut scratch) = (Vec::new(), DeriveBuffers::default());
        let mut chunks = Vec::with_capacity(file.members.len());
        let mut writer = ChunkWriter::new(self.block_bytes, self.codec, Checksums::On);
        for (&place, offset) in file.members.iter().zip(&file.offsets) {
            let made = &self.made[place];
            if self.codec.is_none() {
                // fits: less than a page
                let gap = vec![0; (offset - upload.len_bytes()) as usize];
                sum = crc64_join(sum, upload.write_with_crc(&gap)?, gap.len() as u64);
            }
            writer.begin(&*upload);
            for band in bands(&made.shape, made.dtype.item_bytes(), self.band_bytes_max(made)) {
                let items: u64 = band.iter().map(|span| span.len).product();
                // fits: a part of the memory that buffers may take
                band_bytes.resize((items * made.dtype.item_bytes()) as usize, 0);
                made.read(self.source, &band, &mut band_bytes, &mut scratch)?;
                writer.write(&mut *upload, made.dtype, &band_bytes)?;
                (self.progress)(band_bytes.len() as u64);
            }
            let sums = writer.end(&mut *upload, made.dtype)?;
            let (stored_bytes, stored_crc64) = sums.stored();
            sum = crc64_join(sum, stored_crc64, stored_bytes);
            chunks.push(sums.chunk(&path, &Region::whole(&made.shape)));
        }
        let expected = (upload.len_bytes(), sum);
        let entry = upload.finish()?;
        if (entry.bytes, entry.crc64) != expected {
            return Err(Error::Corrupt {
                object: self.store.display(&key),
                offset: 0,
                found: format!("CRC-64 {:016x} of {} bytes", entry.crc64, entry.bytes),
                expected: format!("CRC-64 {:016x} of {} bytes as written", expected.1, expected.0),
            });
        }
        Ok((FileEntry { path, ..entry }, chunks))
    }

    fn file_bytes_max(&self, file: &OutFile) -> u64 {
        let Some(codec) = self.codec else { return file.bytes(self.made) };
        let most = |&place: &usize| {
            let made: &DerivedTensor = &self.made[place];
            codec.bytes_max(made.dtype, made.bytes(), self.block_bytes)
        };
        PACKED_MAGIC.len() as u64 + file.members.iter().map(most).sum::<u64>()
    }

    fn band_bytes_max(&self, made: &DerivedTensor) -> u64 {
        let share = self.bounds.memory_bytes / self.bounds.threads.max(1) as u64 / BUFFERS;
        // The length of a band is that of its output; the elements of its source may be wider.
        let (to, from) = (made.dtype.item_bytes(), made.item_bytes_max(self.source));
        let share = share.max(1 << 16) / from.div_ceil(to).max(1);
        if made.is_transposed() { share } else { share.min(BAND_BYTES) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use storage::testing::fault_store::{FaultPlan, FaultStore};

    use super::*;
    use crate::convert::source::FileExtent;
    use crate::{Dtype, Group};

    /// Elements that are cast to narrower ones need larger buffers than the result.
    #[test]
    fn bands_are_limited_by_the_widest_element() {
        let store: Arc<dyn Storage> = Arc::new(FaultStore::new(1, FaultPlan::default()));
        let mut source = TensorSource::of_files(&store, String::new());
        let file = source.add_file(Key::root(), 64);
        let extents = vec![FileExtent { file, offset: 0, bytes: 64 }];
        let tensor = source.add("w".to_owned(), Group::Model, Dtype::F64, vec![2, 4], extents);
        let mut made = DerivedTensor::same(&source, tensor.unwrap()).transpose().unwrap();
        let job = WriteJob {
            store: &*store,
            folder: &Key::root(),
            source: &source,
            made: &[],
            block_bytes: 4096,
            codec: None,
            bounds: ConvertLimits {
                memory_bytes: 64 << 20,
                threads: 2,
                ..ConvertLimits::default()
            },
            progress: &|_| (),
        };
        for (dtype, expected) in
            [(Dtype::F64, 8 << 20), (Dtype::F32, 4 << 20), (Dtype::BF16, 2 << 20)]
        {
            made.dtype = dtype;
            assert_eq!(job.band_bytes_max(&made), expected, "{dtype}");
        }
    }
}
