//! Indexes files of `torch.save`: the location of each tensor in the file. No code of the pickle is
//! executed, and no tensor is read before it is requested.

use std::cell::Cell;
use std::collections::HashMap;

use super::pickle::{Bad, Id, Pickle, PickleNode};
use super::source::{ElementType, FileExtent, TensorSource};
use super::zip::{self, Member};
use crate::{Dtype, Error, Result};
use storage::{Key, Object, RangeRead, Storage};

/// A pickle of tensor locations takes some hundred bytes per tensor.
const PICKLE_BYTES_MAX: u64 = 1 << 30;

/// Limit of nested dicts; only a cycle is deeper.
const DEPTH_MAX: usize = 32;

/// Runs of all tensors of a file that are not contiguous.
const RUNS_MAX: u64 = 4 << 20;

/// Bytes of all names that are copied out of a pickle.
const NAMES_BYTES_MAX: usize = 256 << 20;

/// Overhead of a name, however short.
const NAME_BYTES: usize = 128;

/// Limits the names that are copied out of a pickle. Its memo can refer to one name any number of
/// times, and to nested dicts repeatedly: 32 levels of two references are 4 billion names.
#[derive(Debug)]
pub(crate) struct Names(Cell<usize>);

impl Names {
    pub(crate) fn new() -> Self {
        Names(Cell::new(NAMES_BYTES_MAX))
    }

    /// Counts a name; `what` is the object that contains it.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if there are too many.
    pub(crate) fn count(&self, name: &str, what: &str) -> Result<()> {
        let expected = "fewer names, and no object that contains itself";
        let left = self.0.get().checked_sub(NAME_BYTES + name.len());
        self.0.set(left.ok_or_else(|| corrupt_name(what, name, expected))?);
        Ok(())
    }
}

/// A file of `torch.save`.
#[derive(Debug)]
pub(crate) struct TorchFile {
    pub(crate) pickle: Pickle,
    object: String,
    file: usize,
    /// The location of each storage, by its key in the file.
    storages: HashMap<String, Member>,
    /// How many more runs its tensors may use.
    runs_left: Cell<u64>,
    names: Names,
}

/// A tensor in a file. One of a foreign type has no extents.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) dtype: ElementType,
    pub(crate) shape: Vec<u64>,
    pub(crate) extents: Vec<FileExtent>,
}

impl TorchFile {
    /// Reads the pickle of a file, and adds the file to the source.
    pub(crate) fn open(source: &mut TensorSource, store: &dyn Storage, key: &Key) -> Result<Self> {
        let object = store.open(key)?;
        let file = source.add_file(key.clone(), object.len_bytes());
        let whole = Member::new(0, object.len_bytes());
        Self::read(source, &*object, whole, file)
    }

    /// Reads an archive that is a part of a file, as those of distributed checkpoints are.
    /// Its storages are verified when the source reads from them.
    pub(crate) fn read(
        source: &mut TensorSource,
        object: &dyn Object,
        within: Member,
        file: usize,
    ) -> Result<Self> {
        let part = MemberObject { object, within };
        if zip::is_zip(&part)? {
            let archive = Self::from_zip(&part, file)?;
            source.add_members(file, archive.storages.values());
            Ok(archive)
        } else {
            Self::from_stream(&part, file)
        }
    }

    fn new(pickle: Pickle, object: String, file: usize, storages: HashMap<String, Member>) -> Self {
        let (runs_left, names) = (Cell::new(RUNS_MAX), Names::new());
        TorchFile { pickle, object, file, storages, runs_left, names }
    }

    /// A text of the pickle, counted as a name.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if it is not a text, or there are too many names.
    pub(crate) fn name(&self, id: Id) -> Result<&str> {
        let name = self.pickle.text(id);
        let name = name.ok_or_else(|| Error::Corrupt {
            object: self.object.clone(),
            offset: 0,
            found: "another object".to_owned(),
            expected: "a name".to_owned(),
        })?;
        self.names.count(name, &self.object)?;
        Ok(name)
    }

    /// The format of torch since 1.6.
    fn from_zip(part: &MemberObject<'_>, file: usize) -> Result<Self> {
        let members = zip::members(part)?;
        let data = members.iter().find(|(name, _)| name.ends_with("/data.pkl"));
        let Some((name, data)) = data else {
            return Err(corrupt(part, 0, "no data.pkl in the archive", "a file of torch.save"));
        };
        let root = name.trim_end_matches("data.pkl");
        if let Some(order) = members.get(&format!("{root}byteorder")) {
            let order = read_member(part, *order)?;
            if order != b"little" {
                let found = String::from_utf8_lossy(&order);
                return Err(corrupt(part, 0, &format!("'{found}'"), "byte order 'little'"));
            }
        }
        let bytes = read_member(part, *data)?;
        let (pickle, _) =
            Pickle::read(&bytes).map_err(|bad| not_a_pickle(part, data.offset, &bad))?;
        let prefix = format!("{root}data/");
        let storages = members
            .into_iter()
            .filter_map(|(name, member)| {
                let offset = part.within.offset + member.offset;
                Some((name.strip_prefix(&prefix)?.to_owned(), Member { offset, ..member }))
            })
            .collect();
        Ok(Self::new(pickle, part.display(), file, storages))
    }

    /// The format of torch before 1.6: pickles of a magic number, a version, the machine, the
    /// object and the storages' keys, then for each storage its number of elements and its bytes.
    fn from_stream(part: &MemberObject<'_>, file: usize) -> Result<Self> {
        let mut len = 1 << 16;
        let (pickles, start) = loop {
            let now = part.len_bytes().min(len).min(PICKLE_BYTES_MAX);
            let bytes = read_member(part, Member::new(0, now))?;
            match read_five_pickles(&bytes) {
                Ok(found) => break found,
                Err(bad) if bad.is_short && now < part.len_bytes().min(PICKLE_BYTES_MAX) => {
                    len *= 8;
                }
                Err(bad) => return Err(not_a_pickle(part, 0, &bad)),
            }
        };
        let [magic, _, _, pickle, keys] = pickles;
        if !matches!(magic.node(magic.root), PickleNode::Bytes(bytes) if bytes[..] == MAGIC) {
            return Err(corrupt(part, 0, "another magic number", "a file of torch.save"));
        }
        let item_bytes = storage_types(&pickle);
        let mut offset = start as u64;
        let mut storages = HashMap::new();
        for &key in keys.items(keys.root).unwrap_or_default() {
            let name = keys.text(key).unwrap_or_default();
            let mut count = [0; 8];
            part.read_many(&mut [RangeRead { offset, buf: &mut count }])?;
            let count = u64::from_le_bytes(count);
            let item = match item_bytes.get(name) {
                Some((_, Some(item))) => *item,
                // The offsets of storages after one of unknown length are unknown.
                Some((class, None)) => {
                    let found = format!("elements of {class:.80}");
                    return Err(corrupt(part, offset, &found, "a torch type of known size"));
                }
                None => 1,
            };
            let bytes = count.checked_mul(item).filter(|bytes| *bytes <= part.len_bytes());
            let Some(bytes) = bytes else {
                let found = format!("{count} elements");
                return Err(corrupt(part, offset, &found, "a storage within the file"));
            };
            offset += 8;
            let at = part.within.offset + offset;
            storages.insert(name.to_owned(), Member::new(at, bytes));
            offset += bytes;
        }
        Ok(Self::new(pickle, part.display(), file, storages))
    }

    /// The tensor at a node; `None` if the node is not a tensor. A tensor that is more than its
    /// elements (sparse, quantized) is of a foreign type.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if it is an invalid tensor.
    pub(crate) fn tensor(&self, id: Id) -> Result<Option<Tensor>> {
        let Some((module, name, args)) = self.pickle.call(id) else { return Ok(None) };
        if !(module == "torch" || module.starts_with("torch.")) || !name.starts_with("_rebuild") {
            return Ok(None);
        }
        let tensor = self.rebuilt(name, args, 0)?;
        Ok(tensor.or_else(|| {
            let dtype = ElementType::Foreign(format!("{name:.80} (not dense)"));
            Some(Tensor { dtype, shape: Vec::new(), extents: Vec::new() })
        }))
    }

    /// The tensor that a function of torch returns for these arguments; `None` if it is not dense.
    fn rebuilt(&self, name: &str, args: &[Id], depth: usize) -> Result<Option<Tensor>> {
        match (name, args) {
            _ if depth > 4 => Ok(None),
            ("_rebuild_parameter" | "_rebuild_parameter_with_state", [data, ..]) => {
                let Some((_, name, args)) = self.pickle.call(*data) else { return Ok(None) };
                self.rebuilt(name, args, depth + 1)
            }
            // A subclass, or a tensor with attributes: the function, the class, its arguments.
            ("_rebuild_from_type" | "_rebuild_from_type_v2", [function, _, args, ..]) => {
                let (PickleNode::Global(_, name), Some(args)) =
                    (self.pickle.node(*function), self.pickle.items(*args))
                else {
                    return Ok(None);
                };
                self.rebuilt(name, args, depth + 1)
            }
            (
                "_rebuild_tensor" | "_rebuild_tensor_v2",
                [storage, offset, size, stride, rest @ ..],
            ) => self.strided(*storage, [*offset, *size, *stride], None, rest.get(2)).map(Some),
            ("_rebuild_tensor_v3", [storage, offset, size, stride, _, _, dtype, rest @ ..]) => {
                let PickleNode::Global(_, dtype) = self.pickle.node(*dtype) else {
                    return Ok(None);
                };
                let place = [*offset, *size, *stride];
                self.strided(*storage, place, Some(dtype), rest.first()).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// A tensor that is a view of a storage. `dtype` names its type if the storage does not;
    /// `metadata` is a dict of operations that torch has not carried out yet.
    fn strided(
        &self,
        storage: Id,
        [offset, size, stride]: [Id; 3],
        dtype: Option<&str>,
        metadata: Option<&Id>,
    ) -> Result<Tensor> {
        let bad = |found: String, expected: &str| Error::Corrupt {
            object: self.object.clone(),
            offset: 0,
            found,
            expected: expected.to_owned(),
        };
        let pickle = &self.pickle;
        let named = persistent(pickle, storage);
        let Some((class, key)) = named else {
            return Err(bad("a tensor without it".to_owned(), "a storage for each tensor"));
        };
        let dtype_name = dtype.unwrap_or(class);
        let foreign = |name: String| {
            let (dtype, shape) = (ElementType::Foreign(name), pickle.sizes(size));
            Ok(Tensor { dtype, shape: shape.unwrap_or_default(), extents: Vec::new() })
        };
        let Some(dtype) = dtype_of(dtype_name) else { return foreign(dtype_name.to_owned()) };
        if metadata.is_some_and(|id| !self.is_empty(*id)) {
            return foreign(format!("{dtype}, conjugated or negated lazily"));
        }
        let (Some(first), Some(shape), Some(strides), Some(&member)) =
            (pickle.size(offset), pickle.sizes(size), pickle.sizes(stride), self.storages.get(key))
        else {
            let found = format!("a tensor in storage '{key}' without them");
            return Err(bad(found, "size, stride and storage"));
        };
        let runs = runs(&shape, &strides, first, self.runs_left.get());
        let Some(runs) = runs.filter(|_| shape.len() == strides.len()) else {
            let found = format!("shape {shape:?} with strides {strides:?}");
            let expected = "contiguous tensors, or fewer than 4 million runs in a file";
            return Err(bad(found, expected));
        };
        self.runs_left.set(self.runs_left.get() - runs.len() as u64);
        let item = dtype.item_bytes();
        let mut extents = Vec::with_capacity(runs.len());
        for (start, len) in runs {
            let ends = start.checked_add(len).and_then(|end| end.checked_mul(item));
            if ends.is_none_or(|end| end > member.bytes) {
                let found = format!("elements {start} to {} of storage '{key}'", start + len);
                return Err(bad(found, &format!("elements within {} bytes", member.bytes)));
            }
            let (offset, bytes) = (member.offset + start * item, len * item);
            extents.push(FileExtent { file: self.file, offset, bytes });
        }
        Ok(Tensor { dtype: dtype.into(), shape, extents })
    }

    fn is_empty(&self, dict: Id) -> bool {
        matches!(self.pickle.node(dict), PickleNode::None)
            || self.pickle.pairs(dict).is_some_and(<[_]>::is_empty)
    }

    /// The weights: the tensors under the first of `model`, `module`, `state_dict` and
    /// `model_state_dict` that is a dict with tensors in it, else all tensors of the file. Any of
    /// these names may be another object: `model` is often the name of the architecture.
    pub(crate) fn state_dict(&self) -> Result<Vec<(String, Tensor)>> {
        let pickle = &self.pickle;
        let inner = ["model", "module", "state_dict", "model_state_dict"]
            .iter()
            .filter_map(|name| pickle.get(pickle.root, name))
            .filter(|&inner| pickle.pairs(inner).is_some());
        for inner in inner {
            let found = self.leaves(inner)?;
            if !found.is_empty() {
                return Ok(found);
            }
        }
        self.leaves(pickle.root)
    }

    /// All tensors below a node of dicts and lists, by their keys with dots between.
    pub(crate) fn leaves(&self, id: Id) -> Result<Vec<(String, Tensor)>> {
        let mut found = Vec::new();
        self.walk(id, String::new(), 0, &mut found)?;
        Ok(found)
    }

    fn walk(
        &self,
        id: Id,
        name: String,
        depth: usize,
        found: &mut Vec<(String, Tensor)>,
    ) -> Result<()> {
        self.names.count(&name, &self.object)?;
        if depth > DEPTH_MAX {
            return Err(corrupt_name(&self.object, &name, "at most 32 levels of dicts"));
        }
        if let Some(tensor) = self.tensor(id)? {
            found.push((name, tensor));
            return Ok(());
        }
        let below =
            |key: &str| if name.is_empty() { key.to_owned() } else { format!("{name}.{key}") };
        if let Some(pairs) = self.pickle.pairs(id) {
            for &(key, value) in pairs {
                let key = match self.pickle.node(key) {
                    PickleNode::Text(text) => below(text),
                    PickleNode::Int(number) => below(&number.to_string()),
                    _ => continue,
                };
                self.walk(value, key, depth + 1, found)?;
            }
        } else if let PickleNode::List(items) | PickleNode::Tuple(items) = self.pickle.node(id) {
            for (place, &item) in items.iter().enumerate() {
                self.walk(item, below(&place.to_string()), depth + 1, found)?;
            }
        }
        Ok(())
    }
}

/// The integer at the start of old files, as pickled.
const MAGIC: [u8; 10] = [0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19];

fn read_five_pickles(bytes: &[u8]) -> std::result::Result<([Pickle; 5], usize), Bad> {
    let mut at = 0;
    let mut next = || {
        let (pickle, len) = Pickle::read(&bytes[at..])?;
        at += len;
        Ok::<_, Bad>(pickle)
    };
    let pickles = [next()?, next()?, next()?, next()?, next()?];
    Ok((pickles, at))
}

/// The class of each storage that a pickle names, and the bytes of an element if they are known.
fn storage_types(pickle: &Pickle) -> HashMap<String, (&str, Option<u64>)> {
    let mut types = HashMap::new();
    for id in pickle.ids() {
        if let Some((class, key)) = persistent(pickle, id) {
            types.insert(key.to_owned(), (class, item_bytes_of(class)));
        }
    }
    types
}

/// Bytes of an element of a storage class, also of those whose elements cannot be read.
fn item_bytes_of(class: &str) -> Option<u64> {
    Some(match class {
        "ComplexDoubleStorage" => 16,
        "ComplexHalfStorage" | "QInt32Storage" => 4,
        "UntypedStorage" | "QInt8Storage" | "QUInt8Storage" | "QUInt4x2Storage"
        | "QUInt2x4Storage" => 1,
        _ => dtype_of(class)?.item_bytes(),
    })
}

/// Class and key of a storage.
fn persistent(pickle: &Pickle, id: Id) -> Option<(&str, &str)> {
    let PickleNode::Persistent(name) = pickle.node(id) else { return None };
    let parts = pickle.items(*name)?;
    let PickleNode::Global(_, class) = pickle.node(*parts.get(1)?) else { return None };
    Some((class, pickle.text(*parts.get(2)?)?))
}

/// The type of a storage class, or of the name of a `torch.dtype`.
pub(crate) fn dtype_of(name: &str) -> Option<Dtype> {
    Some(match name {
        "FloatStorage" | "float32" => Dtype::F32,
        "HalfStorage" | "float16" => Dtype::F16,
        "BFloat16Storage" | "bfloat16" => Dtype::BF16,
        "DoubleStorage" | "float64" => Dtype::F64,
        "LongStorage" | "int64" => Dtype::I64,
        "IntStorage" | "int32" => Dtype::I32,
        "ShortStorage" | "int16" => Dtype::I16,
        "CharStorage" | "int8" => Dtype::I8,
        "ByteStorage" | "uint8" => Dtype::U8,
        "BoolStorage" | "bool" => Dtype::Bool,
        "uint16" => Dtype::U16,
        "uint32" => Dtype::U32,
        "uint64" => Dtype::U64,
        "float8_e4m3fn" => Dtype::F8E4M3,
        "float8_e5m2" => Dtype::F8E5M2,
        "float8_e4m3fnuz" => Dtype::F8E4M3Fnuz,
        "float8_e5m2fnuz" => Dtype::F8E5M2Fnuz,
        "float8_e8m0fnu" => Dtype::F8E8M0,
        "float4_e2m1fn_x2" => Dtype::F4X2,
        "ComplexFloatStorage" | "complex64" => Dtype::C64,
        _ => return None,
    })
}

/// The elements of a strided tensor as runs of its storage, in row-major order; `None` if they are
/// too many or overflow.
fn runs(shape: &[u64], strides: &[u64], first: u64, max: u64) -> Option<Vec<(u64, u64)>> {
    if shape.contains(&0) {
        return Some(Vec::new());
    }
    let mut inner = 1_u64;
    let mut outer = shape.len();
    while outer > 0 && (shape[outer - 1] == 1 || *strides.get(outer - 1)? == inner) {
        inner = inner.checked_mul(shape[outer - 1])?;
        outer -= 1;
    }
    let count = shape[..outer].iter().try_fold(1_u64, |all, &len| all.checked_mul(len))?;
    if count > max {
        return None;
    }
    let mut runs = Vec::with_capacity(count as usize); // fits: at most RUNS_MAX
    for mut place in 0..count {
        let mut start = first;
        for axis in (0..outer).rev() {
            start = start.checked_add((place % shape[axis]).checked_mul(strides[axis])?)?;
            place /= shape[axis];
        }
        start.checked_add(inner)?;
        runs.push((start, inner));
    }
    Some(runs)
}

fn read_member(part: &MemberObject<'_>, member: Member) -> Result<Vec<u8>> {
    if member.bytes > PICKLE_BYTES_MAX {
        let found = format!("{} bytes", member.bytes);
        return Err(corrupt(part, member.offset, &found, "a pickle of at most 1 GiB"));
    }
    member.verify(part)?;
    let mut bytes = vec![0; member.bytes as usize]; // fits: at most 1 GiB
    part.read_many(&mut [RangeRead { offset: member.offset, buf: &mut bytes }])?;
    Ok(bytes)
}

fn not_a_pickle(part: &MemberObject<'_>, start: u64, bad: &Bad) -> Error {
    corrupt(part, start + bad.offset as u64, &bad.reason, "a pickle of torch.save")
}

fn corrupt(object: &dyn Object, offset: u64, found: &str, expected: &str) -> Error {
    Error::Corrupt {
        object: object.display(),
        offset,
        found: found.to_owned(),
        expected: expected.to_owned(),
    }
}

fn corrupt_name(object: &str, name: &str, expected: &str) -> Error {
    let (object, expected) = (object.to_owned(), expected.to_owned());
    Error::Corrupt { object, offset: 0, found: format!("'{name:.80}'"), expected }
}

/// A part of an object, which is itself an object.
#[derive(Debug)]
struct MemberObject<'a> {
    object: &'a dyn Object,
    within: Member,
}

impl Object for MemberObject<'_> {
    fn len_bytes(&self) -> u64 {
        self.within.bytes
    }

    fn read_many(&self, reads: &mut [RangeRead<'_>]) -> storage::Result<()> {
        for read in &mut *reads {
            let end = read.offset.checked_add(read.buf.len() as u64);
            if end.is_none_or(|end| end > self.within.bytes) {
                return Err(storage::Error::ShortRead {
                    object: self.object.display(),
                    offset: self.within.offset.saturating_add(read.offset),
                    found: self.within.bytes.saturating_sub(read.offset),
                    expected: read.buf.len() as u64,
                    len_bytes: self.within.bytes,
                });
            }
            read.offset += self.within.offset;
        }
        self.object.read_many(reads)
    }

    fn map(&self) -> storage::Result<storage::Map> {
        let mut bytes = vec![0; self.within.bytes as usize]; // fits: what is mapped is addressable
        self.read_many(&mut [RangeRead { offset: 0, buf: &mut bytes }])?;
        Ok(storage::Map::owned(bytes))
    }

    fn display(&self) -> String {
        self.object.display()
    }
}
