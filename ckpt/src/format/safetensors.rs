//! The header of a safetensors file: 8 bytes of length, JSON, and spaces up to a page boundary.
//!
//! Besides the rules of the format (at most 100 MB of header, every byte belongs to a tensor,
//! unique names), the first tensor begins at a multiple of 4096, so that whole files and single
//! tensors can be read and written with direct I/O. Large optimizer tensors are aligned as well:
//! the zeros before them are an entry `__pad__.N` of the header.

use std::cmp::Reverse;
use std::fmt;
use std::io::Write as _;

use serde::Deserialize;
use serde::de::{self, Deserializer, IgnoredAny, MapAccess, Visitor};

use crate::region::{self, Span};
use crate::spec::PAD_PREFIX;
use crate::{Dtype, Error, Group, Result};
use storage::{Object, RangeRead};

/// Alignment of the first tensor: the memory page and the device block.
pub(crate) const ALIGN_BYTES: u64 = 4096;

/// Stock readers reject a longer header.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// The length prefix.
const PREFIX_BYTES: usize = 8;

/// The key of the header entry that is not a tensor.
const METADATA: &str = "__metadata__";

/// One tensor in a header. Type and shape are those of a step: see [`Dtype::F4X2`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HeaderEntry {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    /// First byte, and the byte after the last, relative to the end of the header.
    pub(crate) data_offsets: [u64; 2],
}

/// An entry with an element type that this crate does not support, such as `F6_E2M3`, or with half
/// a byte of `F4` at the end of a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ForeignEntry {
    pub(crate) name: String,
    /// The name of the type in the header.
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    /// As [`HeaderEntry::data_offsets`].
    pub(crate) data_offsets: [u64; 2],
}

impl ForeignEntry {
    /// The type in messages, with what makes a known one unusable.
    pub(crate) fn type_label(&self) -> String {
        let shape = &self.shape;
        match self.dtype.as_str() {
            "F4" => format!("F4 and shape {shape:?}, which needs a last axis of even length"),
            name => format!("{name:.80}"),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// Type and shape of an entry in a step; `None` if a step cannot have them.
fn known(dtype: &str, shape: &[u64]) -> Option<(Dtype, Vec<u64>)> {
    let dtype = Dtype::ALL.into_iter().find(|known| known.header_name() == dtype)?;
    let mut shape = shape.to_vec();
    if dtype.header_items() > 1 {
        let last = shape.last_mut()?;
        if !last.is_multiple_of(dtype.header_items()) {
            return None;
        }
        *last /= dtype.header_items();
    }
    Some((dtype, shape))
}

/// The shape of an entry: a range of elements has one axis.
pub(crate) fn entry_shape(spans: &[Span], flat: Option<Span>) -> Vec<u64> {
    flat.map_or_else(|| spans.iter().map(|span| span.len).collect(), |flat| vec![flat.len])
}

/// The entry of padding between two tensors, the `number`-th of a file.
pub(crate) fn pad(number: usize, begin: u64, end: u64) -> HeaderEntry {
    HeaderEntry {
        name: format!("{PAD_PREFIX}.{number}"),
        dtype: Dtype::U8,
        shape: vec![end - begin],
        data_offsets: [begin, end],
    }
}

/// A tensor, or a piece of one, that has no offset yet.
#[derive(Debug)]
pub(crate) struct Unplaced {
    pub(crate) name: String,
    pub(crate) group: Group,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
}

/// Optimizer pieces of at least this size begin at a page of their file, so that direct I/O can
/// read them into their destination. The padding is on average at most a 500th of their bytes.
const ALIGNED_BYTES_MIN: u64 = 1 << 20;

impl Unplaced {
    fn bytes(&self) -> u64 {
        let items = region::elements(self.shape.iter().copied());
        items.expect("checked with the tensor's shape") * self.dtype.item_bytes()
    }

    fn is_aligned(&self) -> bool {
        self.group != Group::Model && self.bytes() >= ALIGNED_BYTES_MIN
    }
}

/// Sorts the items of a file into file order, and returns the header and the offset of each item.
pub(crate) fn arrange<T>(
    items: &mut Vec<T>,
    align_all: bool,
    describe: impl Fn(&T) -> Unplaced,
) -> Result<(Vec<u8>, Vec<u64>)> {
    let mut order: Vec<(Unplaced, T)> =
        items.drain(..).map(|item| (describe(&item), item)).collect();
    // By decreasing element size, so that each begins at a multiple of its element size.
    let is_aligned = |it: &Unplaced| align_all || it.is_aligned();
    order.sort_by_key(|(it, _)| (!is_aligned(it), Reverse(it.dtype.item_bytes())));
    let (mut entries, mut offsets) = (Vec::with_capacity(order.len()), Vec::new());
    let (mut end, mut pads) = (0_u64, 0);
    for (it, item) in order {
        let unit = if is_aligned(&it) { ALIGN_BYTES } else { it.dtype.item_bytes() };
        let begin = end.next_multiple_of(unit);
        if begin > end {
            entries.push(pad(pads, end, begin));
            pads += 1;
        }
        end = begin + it.bytes();
        offsets.push(begin);
        let Unplaced { name, dtype, shape, .. } = it;
        entries.push(HeaderEntry { name, dtype, shape, data_offsets: [begin, end] });
        items.push(item);
    }
    let header = header(&entries)?;
    offsets.iter_mut().for_each(|offset| *offset += header.len() as u64);
    Ok((header, offsets))
}

/// The bytes before the first tensor.
fn header(entries: &[HeaderEntry]) -> Result<Vec<u8>> {
    // The JSON is written directly, without a tree of values: a plan has a hundred thousand
    // entries. `transformers` requires `format`.
    let mut bytes = Vec::with_capacity(entries.len() * ENTRY_BYTES + ALIGN_BYTES as usize);
    bytes.extend([0; PREFIX_BYTES]);
    let written = write_entries(&mut bytes, entries);
    written.expect("writes to a vector do not fail, and a name is a string");
    let total = bytes.len().next_multiple_of(ALIGN_BYTES as usize); // fits: a page
    let len = (total - PREFIX_BYTES) as u64;
    if len > HEADER_BYTES_MAX {
        let reason = format!("expected a header of at most {HEADER_BYTES_MAX} bytes, found {len}");
        return Err(Error::BadInput { object: "a safetensors file".to_owned(), reason });
    }
    bytes.resize(total, b' ');
    bytes[..PREFIX_BYTES].copy_from_slice(&len.to_le_bytes());
    Ok(bytes)
}

/// Estimated length of an entry.
const ENTRY_BYTES: usize = 160;

fn write_entries(to: &mut Vec<u8>, entries: &[HeaderEntry]) -> std::io::Result<()> {
    write!(to, "{{\"{METADATA}\":{{\"format\":\"pt\"}}")?;
    for HeaderEntry { name, dtype, shape, data_offsets: [begin, end] } in entries {
        to.push(b',');
        serde_json::to_writer(&mut *to, name)?;
        write!(to, ":{{\"dtype\":\"{}\",\"shape\":[", dtype.header_name())?;
        for (axis, len) in shape.iter().enumerate() {
            let comma = if axis == 0 { "" } else { "," };
            let items = if axis + 1 == shape.len() { dtype.header_items() } else { 1 };
            write!(to, "{comma}{}", len * items)?;
        }
        write!(to, "],\"data_offsets\":[{begin},{end}]}}")?;
    }
    to.push(b'}');
    Ok(())
}

/// A parsed header.
#[derive(Debug)]
pub(crate) struct Header {
    /// All bytes before the first tensor.
    pub(crate) bytes: Vec<u8>,
    /// The tensors, in the order of the JSON.
    pub(crate) entries: Vec<HeaderEntry>,
    /// Entries with unsupported element types.
    pub(crate) foreign: Vec<ForeignEntry>,
}

impl Header {
    /// Checks that each byte after the header belongs to exactly one tensor, as the format
    /// requires.
    pub(crate) fn check_coverage(&self, object: &dyn Object) -> Result<()> {
        let known = self.entries.iter().map(|entry| (entry.data_offsets, entry.name.as_str()));
        let foreign = self.foreign.iter().map(|entry| (entry.data_offsets, entry.name.as_str()));
        let data_bytes = object.len_bytes() - self.bytes.len() as u64;
        check_coverage(known.chain(foreign).collect(), data_bytes).map_err(|(found, expected)| {
            let (object, offset) = (object.display(), PREFIX_BYTES as u64);
            Error::Corrupt { object, offset, found, expected }
        })
    }
}

/// Reads the header of a file. The caller checks its ranges, against a manifest or by
/// [`Header::check_coverage`].
pub(crate) fn read_header(object: &dyn Object) -> Result<Header> {
    let corrupt = |offset: usize, found: String, expected: String| Error::Corrupt {
        object: object.display(),
        offset: offset as u64,
        found,
        expected,
    };
    let mut prefix = [0; PREFIX_BYTES];
    object.read_many(&mut [RangeRead { offset: 0, buf: &mut prefix }])?;
    let len = u64::from_le_bytes(prefix);
    let len_max = HEADER_BYTES_MAX.min(object.len_bytes().saturating_sub(PREFIX_BYTES as u64));
    if len > len_max {
        return Err(corrupt(
            0,
            format!("a header of {len} bytes"),
            format!("at most {len_max} bytes"),
        ));
    }
    // fits: at most 100 MB, and no more than the file has.
    let mut bytes = vec![0; PREFIX_BYTES + len as usize];
    object.read_many(&mut [RangeRead { offset: 0, buf: &mut bytes }])?;
    let json = &bytes[PREFIX_BYTES..];
    let expected = "the JSON of a safetensors header".to_owned();
    if json.first() != Some(&b'{') {
        return Err(corrupt(PREFIX_BYTES, "no '{'".to_owned(), expected));
    }
    let pairs: HeaderPairs = serde_json::from_slice(json)
        .map_err(|error| corrupt(PREFIX_BYTES, error.to_string(), expected))?;
    let (mut entries, mut foreign) = (Vec::with_capacity(pairs.0.len()), Vec::new());
    for (name, value) in pairs.0 {
        let Some(Fields { dtype, shape, data_offsets }) = value else { continue };
        match known(&dtype, &shape) {
            Some((dtype, shape)) => {
                entries.push(HeaderEntry { name, dtype, shape, data_offsets });
            }
            None => foreign.push(ForeignEntry { name, dtype, shape, data_offsets }),
        }
    }
    Ok(Header { bytes, entries, foreign })
}

/// Checks that ranges neither overlap nor leave gaps. Returns what was found and expected.
fn check_coverage(
    mut ranges: Vec<([u64; 2], &str)>,
    data_bytes: u64,
) -> std::result::Result<(), (String, String)> {
    ranges.sort_unstable();
    let mut covered_bytes = 0;
    for ([begin, end], name) in ranges {
        if begin != covered_bytes || end < begin {
            let found = format!("data_offsets [{begin}, {end}] of '{name:.80}'");
            let expected = format!("a range from {covered_bytes}, the end of the previous tensor");
            return Err((found, expected));
        }
        covered_bytes = end;
    }
    if covered_bytes != data_bytes {
        let found = format!("tensors of {covered_bytes} bytes");
        return Err((found, format!("{data_bytes} bytes, all after the header")));
    }
    Ok(())
}

/// The names and tensors of a header as a list, so that duplicate keys are detected, also within a
/// tensor. An entry that is not a tensor is `None`.
struct HeaderPairs(Vec<(String, Option<Fields>)>);

impl<'de> Deserialize<'de> for HeaderPairs {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        struct Collect;

        impl<'de> Visitor<'de> for Collect {
            type Value = HeaderPairs;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> std::result::Result<HeaderPairs, A::Error> {
                let mut seen = std::collections::HashSet::new();
                let mut pairs = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if !seen.insert(name.clone()) {
                        let reason = format!("duplicate name '{name}'");
                        return Err(de::Error::custom(reason));
                    }
                    let value = if name == METADATA {
                        map.next_value::<IgnoredAny>()?;
                        None
                    } else {
                        let named = |e| de::Error::custom(format!("{e} in '{name:.80}'"));
                        Some(map.next_value::<Fields>().map_err(named)?)
                    };
                    pairs.push((name, value));
                }
                Ok(HeaderPairs(pairs))
            }
        }

        from.deserialize_map(Collect)
    }
}
