//! Lossless compression, for stores that are slower than the codec.
//!
//! The exponents of a trained tensor's elements have few values, and all other bits look random. So
//! elements are split into byte planes, and each plane is packed separately: the plane of the
//! exponents shrinks to a third, and the others are stored unchanged. Planes are packed by zstd's
//! Huffman coder alone: repetitions are rare in a plane, and searching for them would take most of
//! the time. The unit is a block, as for checksums, so that a part of a tensor can be read as if it
//! were not packed.

use serde::{Deserialize, Serialize};
use zstd::bulk::{Compressor, Decompressor};
use zstd::zstd_safe::{CParameter, Strategy};

use crate::Dtype;

/// How bytes of tensors are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Codec {
    /// Byte planes, each stored unchanged or as a zstd frame.
    #[serde(rename = "planes-zstd")]
    Planes,
}

/// Size of the length of a plane; the lengths precede the planes of a block.
const LEN_BYTES: usize = 4;

/// Elements that are split at a time: they stay in the L1 cache from plane to plane.
const STRIPE_ITEMS: usize = 2 << 10;

/// Bytes of a plane that are sampled before it is packed.
const SAMPLE_BYTES: usize = 16 << 10;

impl Codec {
    /// The name in the manifest.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Codec::Planes => "planes-zstd",
        }
    }

    /// The version of the compression library.
    pub(crate) fn release() -> u32 {
        zstd::zstd_safe::version_number()
    }

    /// Upper bound of the packed length of `bytes` bytes in blocks of at most `block_bytes`.
    pub(crate) fn bytes_max(self, dtype: Dtype, bytes: u64, block_bytes: u64) -> u64 {
        bytes + bytes.div_ceil(block_bytes) * LEN_BYTES as u64 * dtype.item_bytes()
    }

    /// Packs whole elements. The result is deterministic for one build of this crate.
    ///
    /// # Panics
    /// If the bytes are not a whole number of elements, or 4 GiB or more.
    #[must_use]
    pub fn pack(self, dtype: Dtype, bytes: &[u8]) -> Vec<u8> {
        let mut packed = Vec::new();
        Packer::default().pack(dtype, bytes, &mut packed);
        packed
    }

    /// Unpacks elements into a buffer of their exact length.
    ///
    /// # Errors
    /// A description of the defect, if the packed bytes are invalid.
    ///
    /// # Panics
    /// If `into` is not a whole number of elements.
    pub fn unpack(self, dtype: Dtype, packed: &[u8], into: &mut [u8]) -> Result<(), String> {
        Unpacker::default().unpack(dtype, packed, into)
    }
}

/// Packs block after block.
#[derive(Default)]
pub(crate) struct Packer {
    context: Option<Compressor<'static>>,
    planes: Vec<u8>,
}

impl Packer {
    /// Replaces the contents of `packed`.
    pub(crate) fn pack(&mut self, dtype: Dtype, bytes: &[u8], packed: &mut Vec<u8>) {
        let width = item_bytes(dtype);
        let items = bytes.len() / width;
        assert_eq!(items * width, bytes.len(), "whole elements");
        assert!(u32::try_from(bytes.len()).is_ok(), "less than 4 GiB");
        self.planes.resize(bytes.len(), 0);
        split(dtype, bytes, &mut self.planes);
        packed.clear();
        packed.resize(LEN_BYTES * width, 0);
        for (number, plane) in self.planes.chunks_exact(items.max(1)).enumerate() {
            let begin = packed.len();
            if !compress(&mut self.context, plane, packed) {
                packed.extend_from_slice(plane);
            }
            let len = packed.len() - begin;
            let at = number * LEN_BYTES;
            // fits: less than 4 GiB, as was asserted.
            packed[at..at + LEN_BYTES].copy_from_slice(&(len as u32).to_le_bytes());
        }
    }
}

/// Appends the zstd frame of a plane. Returns false, without a change, if it is not shorter.
fn compress(context: &mut Option<Compressor<'static>>, plane: &[u8], packed: &mut Vec<u8>) -> bool {
    if looks_random(plane) {
        return false;
    }
    if context.is_none() {
        *context = compressor();
    }
    let Some(context) = context else { return false };
    let begin = packed.len();
    packed.resize(begin + plane.len(), 0);
    // A frame that does not fit is not shorter.
    let len = context.compress_to_buffer(plane, &mut packed[begin..]).ok();
    let len = len.filter(|len| *len < plane.len());
    packed.truncate(begin + len.unwrap_or(0));
    len.is_some()
}

/// A compressor that hardly searches for repetitions: it stores 64 positions, compares seven bytes,
/// and lengthens its steps while it finds no match.
fn compressor() -> Option<Compressor<'static>> {
    let mut compressor = Compressor::new(1).ok()?;
    for parameter in [
        CParameter::Strategy(Strategy::ZSTD_fast),
        CParameter::HashLog(6),
        CParameter::MinMatch(7),
        CParameter::TargetLength(0),
        CParameter::WindowLog(17),
    ] {
        compressor.set_parameter(parameter).ok()?;
    }
    Some(compressor)
}

/// Whether no order-0 code shortens a plane by more than 2 %. With the squares of the frequencies
/// of its bytes summing up to `r / 256`, its entropy is at least `8 - log2 r` bits, so for `r` of
/// 1.1 a code gains 1.7 % at most. For a sample of random bytes, `r` is 1.016.
fn looks_random(plane: &[u8]) -> bool {
    if plane.len() < SAMPLE_BYTES {
        return false;
    }
    let mut counts = [0_u64; 256];
    let step = plane.len() / SAMPLE_BYTES;
    for &byte in plane.iter().step_by(step) {
        counts[usize::from(byte)] += 1;
    }
    let all: u64 = counts.iter().sum();
    let squares: u64 = counts.iter().map(|count| count * count).sum();
    squares * 2560 < all * all * 11
}

/// Unpacks block after block.
#[derive(Default)]
pub(crate) struct Unpacker {
    context: Option<Decompressor<'static>>,
    planes: Vec<u8>,
}

impl Unpacker {
    pub(crate) fn unpack(
        &mut self,
        dtype: Dtype,
        packed: &[u8],
        into: &mut [u8],
    ) -> Result<(), String> {
        let width = item_bytes(dtype);
        let items = into.len() / width;
        assert_eq!(items * width, into.len(), "whole elements");
        let (lens, mut rest) = packed.split_at_checked(LEN_BYTES * width).ok_or_else(|| {
            format!("{} bytes, too few for the lengths of {width} planes", packed.len())
        })?;
        self.planes.resize(into.len(), 0);
        let planes = self.planes.chunks_exact_mut(items.max(1));
        for (number, (len, plane)) in lens.chunks_exact(LEN_BYTES).zip(planes).enumerate() {
            let len = len.iter().rev().fold(0, |len, &byte| (len << 8) | usize::from(byte));
            let (stored, after) =
                rest.split_at_checked(len).filter(|_| len <= items).ok_or_else(|| {
                    format!("plane {number} of {len} bytes instead of at most {items}")
                })?;
            rest = after;
            if len == items {
                plane.copy_from_slice(stored);
            } else {
                decompress(&mut self.context, stored, plane)
                    .map_err(|found| format!("plane {number}: {found} instead of {items} bytes"))?;
            }
        }
        if !rest.is_empty() {
            return Err(format!("{} bytes after the last plane", rest.len()));
        }
        join(dtype, &self.planes, into);
        Ok(())
    }
}

/// Decompresses a frame into a plane. A frame cannot write beyond the plane, whatever its header.
fn decompress(
    context: &mut Option<Decompressor<'static>>,
    frame: &[u8],
    plane: &mut [u8],
) -> Result<(), String> {
    if context.is_none() {
        *context = Some(Decompressor::new().map_err(|error| error.to_string())?);
    }
    let context = context.as_mut().expect("made above if there was none");
    match context.decompress_to_buffer(frame, plane) {
        Ok(len) if len == plane.len() => Ok(()),
        Ok(len) => Err(format!("a frame of {len} bytes")),
        Err(error) => Err(error.to_string()),
    }
}

fn item_bytes(dtype: Dtype) -> usize {
    dtype.item_bytes() as usize // fits: at most 8
}

/// Whether the first bit is a sign, followed by an exponent.
fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32 | Dtype::F64)
}

/// Splits elements into planes: plane 0 has the most significant byte of each. Floats are rotated
/// left by one bit first, so that one byte has the exponent alone and the sign is the lowest bit.
fn split(dtype: Dtype, bytes: &[u8], planes: &mut [u8]) {
    // The rotation is a constant, so that the compiler vectorizes the loop.
    macro_rules! split_as {
        ($word:ty, $turn:literal) => {{
            const WIDTH: usize = size_of::<$word>();
            let items = bytes.len() / WIDTH;
            let words = bytes.as_chunks::<WIDTH>().0;
            let mut turned = [0 as $word; STRIPE_ITEMS];
            for (number, words) in words.chunks(STRIPE_ITEMS).enumerate() {
                let turned = &mut turned[..words.len()];
                for (into, word) in turned.iter_mut().zip(words) {
                    *into = <$word>::from_le_bytes(*word).rotate_left($turn);
                }
                for plane in 0..WIDTH {
                    let shift = 8 * (WIDTH - 1 - plane);
                    let begin = plane * items + number * STRIPE_ITEMS;
                    let into = &mut planes[begin..begin + turned.len()];
                    for (into, word) in into.iter_mut().zip(&*turned) {
                        *into = (word >> shift) as u8; // fits: only the low byte is used
                    }
                }
            }
        }};
    }
    match (item_bytes(dtype), is_float(dtype)) {
        (1, _) => planes.copy_from_slice(bytes),
        (2, true) => split_as!(u16, 1),
        (2, false) => split_as!(u16, 0),
        (4, true) => split_as!(u32, 1),
        (4, false) => split_as!(u32, 0),
        (_, true) => split_as!(u64, 1),
        (_, false) => split_as!(u64, 0),
    }
}

/// Joins elements from the planes of [`split`].
fn join(dtype: Dtype, planes: &[u8], bytes: &mut [u8]) {
    macro_rules! join_as {
        ($word:ty, $turn:literal) => {{
            const WIDTH: usize = size_of::<$word>();
            let items = bytes.len() / WIDTH;
            let planes: [&[u8]; WIDTH] = std::array::from_fn(|n| &planes[n * items..][..items]);
            let words = bytes.as_chunks_mut::<WIDTH>().0;
            for (place, into) in words.iter_mut().enumerate() {
                let byte = |word: $word, plane: &&[u8]| (word << 8) | <$word>::from(plane[place]);
                *into = planes.iter().fold(0, byte).rotate_right($turn).to_le_bytes();
            }
        }};
    }
    match (item_bytes(dtype), is_float(dtype)) {
        (1, _) => bytes.copy_from_slice(planes),
        (2, true) => join_as!(u16, 1),
        (2, false) => join_as!(u16, 0),
        (4, true) => join_as!(u32, 1),
        (4, false) => join_as!(u32, 0),
        (_, true) => join_as!(u64, 1),
        (_, false) => join_as!(u64, 0),
    }
}
