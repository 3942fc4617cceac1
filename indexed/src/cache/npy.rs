//! Arrays in numpy's `.npy`, version 1.0, byte for byte as numpy writes them.

use std::fmt;
use std::marker::PhantomData;

use storage::{Key, Map, Storage, Upload, Zeros};

use crate::mmididx::idx::{END_OF_FILE, malformed};
use crate::mmididx::sparse_table::Sparse;
use crate::{Error, FormatRule, Result};

const MAGIC: [u8; 8] = *b"\x93NUMPY\x01\x00";
/// The header and all before it. numpy leaves room for the first axis to grow to 21 digits and then
/// fills up to a multiple of 64, which for one or two axes is always 128.
const DATA_AT: usize = 128;
/// A header of an array of this crate is far shorter; a longer one is refused.
const HEADER_BYTES_MAX: usize = 4096;

/// An element of an array.
pub trait Element: Copy + fmt::Debug + PartialEq {
    /// numpy's name of the type.
    const DESCR: Descr;

    /// Converts a number that is known to fit.
    fn from_i64(value: i64) -> Self;

    /// Writes the number little-endian into a slice of exactly its size.
    fn write_to(self, out: &mut [u8]);
}

/// numpy's name of an element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Descr {
    /// `<i2`
    I16,
    /// `<i4`
    I32,
    /// `<u4`
    U32,
    /// `<i8`
    I64,
    /// `<u8`
    U64,
    /// `<u2`
    U16,
    /// `|u1`
    U8,
}

const DESCRS: [(&str, Descr, usize); 7] = [
    ("<i2", Descr::I16, 2),
    ("<i4", Descr::I32, 4),
    ("<u4", Descr::U32, 4),
    ("<i8", Descr::I64, 8),
    ("<u8", Descr::U64, 8),
    ("<u2", Descr::U16, 2),
    ("|u1", Descr::U8, 1),
];

/// One array, as the bytes of its file: built in memory or mapped from a store.
#[derive(Debug)]
pub struct Npy {
    file: Map,
    sparse: Sparse,
    data_at: usize,
    descr: Descr,
    /// Rows, and the numbers in a row.
    shape: Vec<u64>,
}

impl Npy {
    /// Maps an array and checks its header against the length of the file.
    ///
    /// # Errors
    /// [`Error::Malformed`] with [`FormatRule::Npy`]; [`Error::Storage`].
    pub fn open(store: &dyn Storage, key: &Key) -> Result<Self> {
        let object = store.open(key)?;
        let file = if object.len_bytes() == 0 { Map::owned(Vec::new()) } else { object.map()? };
        Ok(Npy { sparse: Sparse::of(&object), ..Npy::parse(file, &object.display())? })
    }

    fn parse(file: Map, name: &str) -> Result<Self> {
        let Shape { descr, shape, data_at } = Shape::parse(&file, file.len() as u64, name)?;
        let data_at = data_at as usize; // fits: within the file
        Ok(Npy { file, sparse: Sparse::none(), data_at, descr, shape })
    }

    /// Writes the file.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub fn write(&self, store: &dyn Storage, key: &Key) -> Result<()> {
        let mut upload: Box<dyn Upload> = store.create(key, self.file.len() as u64)?;
        upload.write(&self.file)?;
        upload.finish()?;
        Ok(())
    }

    /// Announces reads of single numbers at random places.
    pub(crate) fn advise_random(&self) {
        self.file.expect_random_reads();
        self.sparse.set(true);
    }

    /// The element type.
    #[must_use]
    pub fn descr(&self) -> Descr {
        self.descr
    }

    /// Rows, and the numbers in a row if there are two axes.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// The whole file.
    #[must_use]
    pub fn file(&self) -> &[u8] {
        &self.file
    }

    /// The elements alone, little-endian.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        &self.file[self.data_at..]
    }

    /// The number at a place in row-major order; unsigned ones of 64 bits are given modulo 2^64.
    ///
    /// # Panics
    /// If there is no such place.
    #[must_use]
    pub fn at(&self, place: u64) -> i64 {
        self.descr.number(self.data(), place as usize) // fits: 64 bits
    }

    /// Fills `into` with the numbers from a place on, at most [`RUN_MAX`].
    ///
    /// # Errors
    /// [`Error::Storage`] if they are not in memory, and cannot be read.
    ///
    /// # Panics
    /// If there are fewer numbers.
    #[inline]
    pub(crate) fn numbers(&self, place: u64, into: &mut [i64]) -> Result<()> {
        let (item_bytes, first) = (self.descr.item_bytes(), place as usize); // fits: 64 bits
        let run_bytes = into.len() * item_bytes;
        let at = self.data_at + first * item_bytes;
        assert!(at + run_bytes <= self.file.len(), "numbers {place} to {} of a table", into.len());
        let mut buf = [0; 8 * RUN_MAX];
        let bytes = match self.sparse.read(at as u64, &mut buf[..run_bytes])? {
            true => &buf[..run_bytes],
            false => &self.file[at..at + run_bytes],
        };
        for (nth, number) in into.iter_mut().enumerate() {
            *number = self.descr.number(bytes, nth);
        }
        Ok(())
    }
}

/// Numbers of one read, at most.
pub(crate) const RUN_MAX: usize = 16;

/// The header of an `.npy`.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub descr: Descr,
    pub shape: Vec<u64>,
    /// Offset of the elements.
    pub data_at: u64,
}

impl Shape {
    /// Bytes from the start of a file that always include the header.
    pub(crate) const READ_BYTES: u64 = HEADER_BYTES_MAX as u64 + 10;

    /// Reads the header and checks it against the length of the file.
    pub(crate) fn parse(start: &[u8], file_bytes: u64, name: &str) -> Result<Self> {
        let bad = |at: usize, found: String, expected: &str| {
            malformed(name, at, FormatRule::Npy, found, expected)
        };
        let (magic, rest) = start.split_at_checked(8).unwrap_or((start, &[]));
        if magic != MAGIC {
            let found = format!("\"{}\"", magic.escape_ascii());
            return Err(bad(0, found, "the magic of an .npy file of version 1.0"));
        }
        let len = rest.first_chunk().map_or(0, |len| usize::from(u16::from_le_bytes(*len)));
        let header = rest.get(2..2 + len).filter(|_| (1..=HEADER_BYTES_MAX).contains(&len));
        let text = header.and_then(|header| std::str::from_utf8(header).ok()).ok_or_else(|| {
            bad(8, format!("a header of {len} bytes"), "a text header within the file")
        })?;
        let (descr, shape) = parse_header(text)
            .ok_or_else(|| bad(10, format!("{:?}", text.trim_end()), "integers in C order"))?;
        let data_at = 10 + len as u64;
        let expected = shape
            .iter()
            .try_fold(descr.item_bytes() as u64, |bytes, &axis| bytes.checked_mul(axis))
            .and_then(|bytes| bytes.checked_add(data_at));
        if expected != Some(file_bytes) {
            let expected =
                format!("{data_at} bytes and an array of shape {shape:?} of {}", descr.name());
            let at = file_bytes as usize; // a place in a message
            return Err(bad(at, END_OF_FILE.to_owned(), &expected));
        }
        Ok(Shape { descr, shape, data_at })
    }
}

/// An array being filled. It has the layout of its file from the start, so that its hundreds of
/// megabytes are never copied, and is in huge pages, because it will be shuffled.
#[derive(Debug)]
pub(crate) struct NpyBuilder<T> {
    file: Zeros,
    /// Bytes filled so far.
    filled: usize,
    shape: Vec<u64>,
    element: PhantomData<T>,
}

impl<T: Element> NpyBuilder<T> {
    /// Allocates memory for all elements. `object` names the array in errors.
    pub(crate) fn new(object: &'static str, shape: &[u64]) -> Result<Self> {
        let items = shape.iter().map(|&axis| u128::from(axis)).product::<u128>();
        let bytes = items.saturating_mul(size_of::<T>() as u128).saturating_add(DATA_AT as u128);
        let memory = usize::try_from(bytes).ok().and_then(|len| Zeros::try_new(len).ok());
        let mut file = memory.ok_or(Error::OutOfMemory { object, bytes })?;
        file[..DATA_AT].copy_from_slice(&header(T::DESCR, shape));
        Ok(NpyBuilder { file, filled: DATA_AT, shape: shape.to_vec(), element: PhantomData })
    }

    /// Appends a number that is known to fit.
    pub(crate) fn push(&mut self, value: i64) {
        let end = self.filled + size_of::<T>();
        T::from_i64(value).write_to(&mut self.file[self.filled..end]);
        self.filled = end;
    }

    /// The elements, little-endian; zeros where none was appended yet.
    pub(crate) fn data_mut(&mut self) -> &mut [u8] {
        &mut self.file[DATA_AT..]
    }

    /// The array, which is full.
    pub(crate) fn finish(self) -> Npy {
        assert_eq!(self.filled, self.file.len(), "an array of shape {:?}", self.shape);
        let (file, sparse) = (Map::from(self.file), Sparse::none());
        Npy { file, sparse, data_at: DATA_AT, descr: T::DESCR, shape: self.shape }
    }
}

impl Descr {
    /// The shape as written in a header.
    #[must_use]
    pub fn name(self) -> &'static str {
        DESCRS[self as usize].0
    }

    /// Bytes of one element.
    #[must_use]
    pub fn item_bytes(self) -> usize {
        DESCRS[self as usize].2
    }

    #[inline]
    fn number(self, data: &[u8], place: usize) -> i64 {
        match self {
            Descr::I16 => i64::from(i16::from_le_bytes(data.as_chunks().0[place])),
            Descr::I32 => i64::from(i32::from_le_bytes(data.as_chunks().0[place])),
            Descr::U32 => i64::from(u32::from_le_bytes(data.as_chunks().0[place])),
            Descr::I64 | Descr::U64 => i64::from_le_bytes(data.as_chunks().0[place]),
            Descr::U16 => i64::from(u16::from_le_bytes(data.as_chunks().0[place])),
            Descr::U8 => i64::from(data[place]),
        }
    }
}

/// All bytes before the elements.
pub(crate) fn header(descr: Descr, shape: &[u64]) -> [u8; DATA_AT] {
    let axes = match shape {
        [rows] => format!("{rows},"),
        _ => shape.iter().map(u64::to_string).collect::<Vec<_>>().join(", "),
    };
    let descr = descr.name();
    let text = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({axes}), }}");
    let mut header = [b' '; DATA_AT];
    header[..8].copy_from_slice(&MAGIC);
    header[8..10].copy_from_slice(&(DATA_AT as u16 - 10).to_le_bytes());
    header[10..10 + text.len()].copy_from_slice(text.as_bytes());
    header[DATA_AT - 1] = b'\n';
    header
}

/// The Python dictionary that numpy writes, and only that: its keys in its order.
fn parse_header(text: &str) -> Option<(Descr, Vec<u64>)> {
    let rest = text.trim_end().strip_prefix("{'descr': '")?;
    let (descr, rest) = rest.split_once('\'')?;
    let descr = DESCRS.iter().find(|(name, ..)| *name == descr)?.1;
    let axes = rest.strip_prefix(", 'fortran_order': False, 'shape': (")?.strip_suffix("), }")?;
    let axes = axes.strip_suffix(',').unwrap_or(axes);
    let shape: Vec<u64> = axes.split(", ").map(|axis| axis.parse().ok()).collect::<Option<_>>()?;
    matches!(shape.len(), 1 | 2).then_some((descr, shape))
}

macro_rules! element {
    ($type:ty, $descr:expr) => {
        impl Element for $type {
            const DESCR: Descr = $descr;

            fn from_i64(value: i64) -> Self {
                value as $type
            }

            fn write_to(self, out: &mut [u8]) {
                out.copy_from_slice(&self.to_le_bytes());
            }
        }
    };
}

element!(i16, Descr::I16);
element!(i32, Descr::I32);
element!(u32, Descr::U32);
element!(i64, Descr::I64);
element!(u64, Descr::U64);

impl From<&Npy> for Vec<i64> {
    fn from(array: &Npy) -> Self {
        (0..array.shape.iter().product()).map(|place| array.at(place)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(bytes: &[u8]) -> Result<Npy> {
        Npy::parse(Map::owned(bytes.to_vec()), "a.npy")
    }

    fn array<T: Element>(shape: &[u64], items: &[i64]) -> Npy {
        let mut array = NpyBuilder::<T>::new("array", shape).unwrap();
        items.iter().for_each(|&item| array.push(item));
        array.finish()
    }

    #[test]
    fn arrays_round_trip() {
        let array = array::<i32>(&[3, 2], &[1, -2, 3, 4, 5, 6]);
        let back = parse(array.file()).unwrap();
        assert_eq!((back.descr(), back.shape()), (Descr::I32, &[3, 2][..]));
        assert_eq!(Vec::from(&back), [1, -2, 3, 4, 5, 6]);
    }

    #[test]
    fn the_table_of_types_is_in_the_order_of_the_enum() {
        for (place, (name, descr, item_bytes)) in DESCRS.into_iter().enumerate() {
            assert_eq!(descr as usize, place);
            assert_eq!((descr.name(), descr.item_bytes()), (name, item_bytes));
        }
    }

    #[test]
    fn an_array_may_be_empty() {
        assert_eq!(parse(array::<u32>(&[0], &[]).file()).unwrap().shape(), [0]);
    }

    #[test]
    fn an_array_beyond_memory_is_an_error() {
        for rows in [1 << 61, u64::MAX] {
            let error = NpyBuilder::<i64>::new("array", &[rows, 2]).unwrap_err();
            assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
        }
    }

    #[test]
    fn the_largest_shape_fits_the_header() {
        let header = header(Descr::I64, &[u64::MAX, 3]);
        assert_eq!(header.len(), DATA_AT);
        let expected =
            b"{'descr': '<i8', 'fortran_order': False, 'shape': (18446744073709551615, 3), }";
        assert_eq!(&header[10..10 + expected.len()], expected);
    }

    #[test]
    fn refuses_what_numpy_did_not_write() {
        const HEADER: &str = "{'descr': '<u4', 'fortran_order': False, 'shape': (3,), }";
        let good = array::<u32>(&[3], &[7, 8, 9]).file().to_vec();
        for len in 0..good.len() {
            assert!(parse(&good[..len]).is_err(), "cut to {len} bytes");
        }
        let described = |text: &str| {
            let mut file = good.clone();
            file[10..127].fill(b' ');
            file[10..10 + text.len()].copy_from_slice(text.as_bytes());
            file
        };
        assert!(parse(&described(HEADER)).is_ok());
        for (from, to) in [
            ("<u4", ">u4"),
            ("<u4", "|O"),
            ("<u4", "<u8"),
            ("False", "True"),
            ("(3,)", "(4,)"),
            ("(3,)", "(-3,)"),
            ("(3,)", "()"),
            ("(3,)", "(3, 1, 1)"),
            ("(3,)", "(3, 4611686018427387904)"),
            ("(3,)", "(4611686018427387907,)"),
            ("(3,)", "(99999999999999999999,)"),
            ("}", ""),
        ] {
            let text = HEADER.replace(from, to);
            assert!(text != HEADER && parse(&described(&text)).is_err(), "{text}");
        }
        let mut long = good.clone();
        long.push(0);
        assert!(parse(&long).is_err(), "one byte more");
        let mut version = good.clone();
        version[6] = 2;
        assert!(parse(&version).is_err(), "version 2");
        let mut header_len = good;
        header_len[8..10].copy_from_slice(&u16::MAX.to_le_bytes());
        assert!(parse(&header_len).is_err(), "a header past the end");
    }
}
