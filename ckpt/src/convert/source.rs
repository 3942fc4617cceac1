//! Readable tensors from any source: a step, or bytes of foreign files.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use super::zip::Member;
use crate::region::{self, Span};
use crate::runs;
use crate::{Checkpoint, Dtype, Error, Group, Result};
use storage::{Key, Object, RangeRead, Storage};

/// Runs with smaller gaps are read together, with the gaps: another request would cost more.
const GAP_BYTES_MAX: u64 = 64 << 10;

/// Longest read that includes gaps; it needs scratch space of this size.
const SPAN_BYTES_MAX: u64 = 16 << 20;

/// Reads in one batch.
const READS_MAX: usize = 256;

/// Extents of all tensors. Each takes 32 bytes of memory.
const EXTENTS_MAX: usize = 1 << 25;

/// Open files per source. A process may open 1,024 by default.
const FILES_OPEN_MAX: usize = 64;

/// Contiguous bytes of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileExtent {
    /// Index in the source's files.
    pub(crate) file: usize,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// The element type of a foreign tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ElementType {
    Known(Dtype),
    /// The name of a type that this crate cannot read. Such a tensor can only be dropped.
    Foreign(String),
}

impl From<Dtype> for ElementType {
    fn from(dtype: Dtype) -> Self {
        ElementType::Known(dtype)
    }
}

/// Location of a tensor's elements.
#[derive(Clone, Debug)]
enum TensorLocation {
    /// Row-major in extents, one after the other, and the number of bytes up to the end of each.
    Extents(Vec<FileExtent>, Vec<u64>),
    /// In the opened step, with this group and name.
    Step(Group, String),
    /// Elements of a type of this name, which cannot be read.
    Foreign(String),
}

/// A tensor of a [`TensorSource`].
#[derive(Clone, Debug)]
pub struct SourceTensor {
    /// Its name in the source.
    pub name: String,
    /// The role of the tensor for the parameter, as far as the source shows it.
    pub group: Group,
    /// Its element type. `U8` also represents a type that this crate cannot read: such a tensor can
    /// only be dropped, and an import that keeps it is rejected.
    pub dtype: Dtype,
    /// Elements along each axis. Row-major.
    pub shape: Vec<u64>,
    place: TensorLocation,
}

/// Tensors that can be read in any order and in parts.
pub struct TensorSource {
    object: String,
    tensors: Vec<SourceTensor>,
    store: Option<Arc<dyn Storage>>,
    files: Vec<(Key, u64)>,
    /// Parts of files with a checksum that are not verified yet, by their ends.
    members: Mutex<HashMap<usize, BTreeMap<u64, Member>>>,
    open: Mutex<HashMap<usize, Arc<dyn Object>>>,
    step: Option<Checkpoint>,
    blobs: Vec<(String, Vec<u8>)>,
    /// The number of extents of all tensors.
    extents: usize,
}

impl SourceTensor {
    /// Fails if its elements are of a type that cannot be read. `name` is its name for rules.
    pub(crate) fn check_readable(&self, object: &str, name: &str) -> Result<()> {
        let TensorLocation::Foreign(dtype) = &self.place else { return Ok(()) };
        Err(Error::Unfit {
            object: object.to_owned(),
            found: format!(
                "'{name}' of type {dtype:.120} (hint: `drop {name}` in the rules of --rename \
                 leaves it out)"
            ),
            expected: "a supported tensor type".to_owned(),
        })
    }
}

impl fmt::Debug for TensorSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Source({}, {} tensors)", self.object, self.tensors.len())
    }
}

impl TensorSource {
    /// The tensors of a step.
    #[must_use]
    pub fn of_step(step: Checkpoint) -> Self {
        let tensor = |entry: &crate::TensorEntry| SourceTensor {
            name: entry.name.clone(),
            group: entry.group,
            dtype: entry.dtype,
            shape: entry.shape.clone(),
            place: TensorLocation::Step(entry.group, entry.name.clone()),
        };
        let tensors = step.tensors().iter().map(tensor).collect();
        TensorSource {
            object: step.display(),
            tensors,
            step: Some(step),
            ..TensorSource::empty(None)
        }
    }

    /// The tensors of foreign files, which are added one by one.
    pub(crate) fn of_files(store: &Arc<dyn Storage>, object: String) -> Self {
        TensorSource { object, ..TensorSource::empty(Some(Arc::clone(store))) }
    }

    fn empty(store: Option<Arc<dyn Storage>>) -> Self {
        TensorSource {
            object: String::new(),
            tensors: Vec::new(),
            store,
            files: Vec::new(),
            members: Mutex::default(),
            open: Mutex::default(),
            step: None,
            blobs: Vec::new(),
            extents: 0,
        }
    }

    /// Its name in messages.
    #[must_use]
    pub fn display(&self) -> &str {
        &self.object
    }

    /// All tensors.
    #[must_use]
    pub fn tensors(&self) -> &[SourceTensor] {
        &self.tensors
    }

    /// Small files in the same folder as the tensors: configurations and tokenizers.
    #[must_use]
    pub fn blobs(&self) -> &[(String, Vec<u8>)] {
        &self.blobs
    }

    /// The step, if the source is one.
    #[must_use]
    pub fn step(&self) -> Option<&Checkpoint> {
        self.step.as_ref()
    }

    pub(crate) fn add_blob(&mut self, name: String, bytes: Vec<u8>) {
        self.blobs.push((name, bytes));
    }

    /// Adds a file; tensors refer to it by the number returned.
    pub(crate) fn add_file(&mut self, key: Key, len_bytes: u64) -> usize {
        self.files.push((key, len_bytes));
        self.files.len() - 1
    }

    /// Adds parts of a file that are verified before anything is read from them.
    pub(crate) fn add_members<'a>(
        &mut self,
        file: usize,
        members: impl Iterator<Item = &'a Member>,
    ) {
        let all = self.members.get_mut().unwrap_or_else(PoisonError::into_inner);
        let checked = members.filter(|member| member.crc32 != 0 && member.bytes > 0);
        let ends = checked.map(|member| (member.offset + member.bytes, *member));
        all.entry(file).or_default().extend(ends);
    }

    /// Verifies the parts of a file that contain these reads, each once.
    fn verify(&self, file: usize, object: &dyn Object, reads: &[RangeRead<'_>]) -> Result<()> {
        for read in reads {
            let mut at = read.offset;
            let end = at + read.buf.len() as u64;
            while at < end {
                let members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
                let next = members.get(&file).and_then(|it| it.range(at + 1..).next());
                let Some((&member_end, &member)) = next.filter(|(_, it)| it.offset < end) else {
                    break;
                };
                drop(members);
                member.verify(object)?;
                let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(of_file) = members.get_mut(&file) {
                    of_file.remove(&member_end);
                }
                at = member_end;
            }
        }
        Ok(())
    }

    /// Adds a tensor, after checking that its bytes exist and are as many as its shape requires.
    /// For a foreign type, only the name and the shape are stored.
    pub(crate) fn add(
        &mut self,
        name: String,
        group: Group,
        dtype: impl Into<ElementType>,
        shape: Vec<u64>,
        extents: Vec<FileExtent>,
    ) -> Result<usize> {
        let dtype = match dtype.into() {
            ElementType::Known(dtype) => dtype,
            ElementType::Foreign(name_of_type) => {
                if shape.len() > region::RANK_MAX
                    || region::elements(shape.iter().copied()).is_none()
                {
                    return Err(Error::Corrupt {
                        object: self.object.clone(),
                        offset: 0,
                        found: format!("'{name:.80}' of shape {shape:?}"),
                        expected: "a valid tensor shape".to_owned(),
                    });
                }
                let place = TensorLocation::Foreign(name_of_type);
                self.tensors.push(SourceTensor { name, group, dtype: Dtype::U8, shape, place });
                return Ok(self.tensors.len() - 1);
            }
        };
        let expected = region::elements(shape.iter().copied())
            .and_then(|count| count.checked_mul(dtype.item_bytes()));
        self.extents += extents.len();
        if self.extents > EXTENTS_MAX {
            let found = format!("more up to '{name:.80}' (hint: save contiguous tensors)");
            let expected = format!("at most {EXTENTS_MAX} runs of bytes");
            return Err(Error::Unfit { object: self.object.clone(), found, expected });
        }
        let mut ends = Vec::with_capacity(extents.len());
        let mut found = 0_u64;
        for extent in &extents {
            let (key, len) = &self.files[extent.file];
            let fits = extent.offset.checked_add(extent.bytes).is_some_and(|end| end <= *len);
            if !fits {
                return Err(Error::Corrupt {
                    object: self.file_name(key),
                    offset: extent.offset,
                    found: format!("{} bytes of '{name}' in a file of {len}", extent.bytes),
                    expected: "tensor data within the file".to_owned(),
                });
            }
            // fits: existing files, and no more extents than memory holds.
            found = found.saturating_add(extent.bytes);
            ends.push(found);
        }
        if shape.len() > region::RANK_MAX || expected != Some(found) {
            return Err(Error::Corrupt {
                object: self.object.clone(),
                offset: extents.first().map_or(0, |extent| extent.offset),
                found: format!("{found} bytes for '{name}'"),
                expected: format!("the bytes of {dtype} {shape:?}"),
            });
        }
        let place = TensorLocation::Extents(extents, ends);
        self.tensors.push(SourceTensor { name, group, dtype, shape, place });
        Ok(self.tensors.len() - 1)
    }

    /// Reads a box of a tensor, row-major, into a buffer of its bytes.
    ///
    /// # Errors
    /// [`Error::Corrupt`], or errors of the store.
    ///
    /// # Panics
    /// If the box is not within the tensor or the buffer has another length.
    pub(crate) fn read_box(&self, tensor: usize, spans: &[Span], into: &mut [u8]) -> Result<()> {
        let tensor = &self.tensors[tensor];
        assert!(region::is_within(&tensor.shape, spans), "{spans:?} in {:?}", tensor.shape);
        match &tensor.place {
            TensorLocation::Foreign(_) => tensor.check_readable(&self.object, &tensor.name),
            TensorLocation::Step(group, name) => {
                let step = self.step.as_ref().expect("a tensor of a step is in a step");
                step.read_box(name, *group, spans, into)
            }
            TensorLocation::Extents(extents, ends) => {
                let item_bytes = tensor.dtype.item_bytes();
                let mut runs = Vec::new();
                let visit = |run: runs::CopyRun| -> Result<()> {
                    runs.push((run.from * item_bytes, run.len * item_bytes));
                    Ok(())
                };
                runs::each_run_of_boxes(&region::whole(&tensor.shape), spans, visit)?;
                self.read_runs(extents, ends, &runs, into)
            }
        }
    }

    /// Reads ascending runs of a tensor's bytes end to end into the buffer.
    fn read_runs(
        &self,
        extents: &[FileExtent],
        ends: &[u64],
        runs: &[(u64, u64)],
        mut into: &mut [u8],
    ) -> Result<()> {
        let mut scratch = Vec::new();
        let mut direct: Vec<(usize, RangeRead<'_>)> = Vec::new();
        let mut rest = runs;
        while let Some(&(from, _)) = rest.first() {
            let count = coalesced(rest);
            let (group, after) = rest.split_at(count);
            rest = after;
            let bytes: u64 = group.iter().map(|(_, len)| len).sum();
            // fits: of a buffer
            let (part, behind) = std::mem::take(&mut into).split_at_mut(bytes as usize);
            into = behind;
            if let [(from, _)] = group {
                push_reads(extents, ends, *from, part, &mut direct);
                if direct.len() >= READS_MAX {
                    self.read_all(&mut direct)?;
                }
                continue;
            }
            let end = group.last().map_or(from, |(start, len)| start + len);
            scratch.resize((end - from) as usize, 0); // fits: at most 16 MiB
            let mut reads = Vec::new();
            push_reads(extents, ends, from, &mut scratch, &mut reads);
            self.read_all(&mut reads)?;
            let mut to = 0;
            for (start, len) in group {
                // fits: within the scratch
                let (at, len) = ((start - from) as usize, *len as usize);
                part[to..to + len].copy_from_slice(&scratch[at..at + len]);
                to += len;
            }
        }
        self.read_all(&mut direct)
    }

    fn read_all(&self, reads: &mut Vec<(usize, RangeRead<'_>)>) -> Result<()> {
        reads.sort_by_key(|(file, _)| *file);
        let mut reads = reads.drain(..).peekable();
        while let Some((file, read)) = reads.next() {
            let mut batch = vec![read];
            while let Some((_, read)) = reads.next_if(|(next, _)| *next == file) {
                batch.push(read);
            }
            let object = self.open(file)?;
            self.verify(file, &*object, &batch)?;
            object.read_many(&mut batch)?;
        }
        Ok(())
    }

    fn open(&self, file: usize) -> Result<Arc<dyn Object>> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(object) = open.get(&file) {
            return Ok(Arc::clone(object));
        }
        let (key, len) = &self.files[file];
        let object = self.store().open(key)?;
        if object.len_bytes() != *len {
            let (found, expected) =
                (format!("{} bytes", object.len_bytes()), format!("{len} bytes as before"));
            return Err(Error::Corrupt { object: object.display(), offset: *len, found, expected });
        }
        if open.len() >= FILES_OPEN_MAX {
            open.clear();
        }
        open.insert(file, Arc::clone(&object));
        Ok(object)
    }

    fn store(&self) -> &dyn Storage {
        &**self.store.as_ref().expect("a source of files has their store")
    }

    pub(crate) fn file_name(&self, key: &Key) -> String {
        self.store().display(key)
    }
}

/// How many of the first runs are read by one request.
fn coalesced(runs: &[(u64, u64)]) -> usize {
    let (from, _) = runs[0];
    let is_near = |pair: &&[(u64, u64)]| {
        let ((a, a_len), (b, b_len)) = (pair[0], pair[1]);
        b - (a + a_len) <= GAP_BYTES_MAX && b + b_len - from <= SPAN_BYTES_MAX
    };
    1 + runs.windows(2).take_while(is_near).count()
}

/// The reads that fill the buffer from byte `from` of the tensor.
fn push_reads<'a>(
    extents: &[FileExtent],
    ends: &[u64],
    mut from: u64,
    mut into: &'a mut [u8],
    reads: &mut Vec<(usize, RangeRead<'a>)>,
) {
    let mut place = ends.partition_point(|&end| end <= from);
    while !into.is_empty() {
        let extent = extents[place];
        let skip = from - (ends[place] - extent.bytes);
        let now = (extent.bytes - skip).min(into.len() as u64);
        let (buf, behind) = into.split_at_mut(now as usize); // fits: no longer than the buffer
        reads.push((extent.file, RangeRead { offset: extent.offset + skip, buf }));
        (into, from, place) = (behind, from + now, place + 1);
    }
}
