//! The element types of a token file.

use std::fmt;

use crate::{Error, Result};

/// The type of one token in a `.bin`, by its code in the `.idx`.
///
/// Codes 1 to 5 mean the same in every program. Codes 6 and 7 are read as Megatron core does;
/// gpt-neox swaps them, and fairseq's descendants call both 64 bits wide. DeepSpeed's writer means
/// uint16, uint32 and uint64 by 6, 7 and 8: the bytes of an element tell all but uint32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// Unsigned, 8 bits.
    U8,
    /// Signed, 8 bits.
    I8,
    /// Signed, 16 bits.
    I16,
    /// Signed, 32 bits.
    I32,
    /// Signed, 64 bits.
    I64,
    /// Floating point, 64 bits.
    F64,
    /// Floating point, 32 bits.
    F32,
    /// Unsigned, 16 bits.
    U16,
    /// Unsigned, 32 bits: of PaddleNLP, datatrove and dolma. Megatron refuses it.
    U32,
    /// Unsigned, 64 bits: of PaddleNLP. Megatron refuses it.
    U64,
}

/// In the order of their codes, which begin at 1.
const BY_CODE: [Dtype; 10] = [
    Dtype::U8,
    Dtype::I8,
    Dtype::I16,
    Dtype::I32,
    Dtype::I64,
    Dtype::F64,
    Dtype::F32,
    Dtype::U16,
    Dtype::U32,
    Dtype::U64,
];

/// The codes from here on are PaddleNLP's own.
const CODE_PADDLE_MIN: u8 = 9;

/// Below this many ids Megatron's writer uses 16 bits. Its margin under 65,536 is in every file
/// that it has written, so the same limit is needed to write the same bytes.
const VOCAB_U16_END: u64 = 65_500;

impl Dtype {
    /// The type of a code in the header, if Megatron knows it.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        Self::from_code_of_any(code).filter(|dtype| dtype.is_megatron())
    }

    /// The type of a code in the header, including the codes that PaddleNLP adds.
    #[must_use]
    pub fn from_code_of_any(code: u8) -> Option<Self> {
        BY_CODE.get(usize::from(code).checked_sub(1)?).copied()
    }

    /// The type of a name, such as `uint16`.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        BY_CODE.into_iter().find(|dtype| dtype.to_string() == name)
    }

    /// Whether Megatron reads files of this type.
    #[must_use]
    pub fn is_megatron(self) -> bool {
        self.code() < CODE_PADDLE_MIN
    }

    /// Its code in the header.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Dtype::U8 => 1,
            Dtype::I8 => 2,
            Dtype::I16 => 3,
            Dtype::I32 => 4,
            Dtype::I64 => 5,
            Dtype::F64 => 6,
            Dtype::F32 => 7,
            Dtype::U16 => 8,
            Dtype::U32 => CODE_PADDLE_MIN,
            Dtype::U64 => 10,
        }
    }

    /// The type that a code means in a file whose elements have this many bytes.
    pub(crate) fn of_item_bytes(self, item_bytes: u64) -> Dtype {
        match (self, item_bytes) {
            (Dtype::F64, 2) => Dtype::U16,
            (Dtype::U16, 8) => Dtype::U64,
            _ => self,
        }
    }

    /// The same, with the bytes taken from an index: those of the first sequence that has tokens,
    /// up to the next sequence or to the end of the `.bin`. `sequences` gives lengths and pointers.
    pub(crate) fn of_items(
        self,
        sequences: impl IntoIterator<Item = Result<(i64, i64)>>,
        bin_bytes: u64,
    ) -> Result<Dtype> {
        if !matches!(self, Dtype::F64 | Dtype::U16) {
            return Ok(self);
        }
        let (mut first, mut end) = (None, bin_bytes as i64); // fits: the length of a file
        for sequence in sequences {
            let (len, start) = sequence?;
            if first.is_some() {
                end = start;
                break;
            }
            first = (len != 0).then_some((len, start));
        }
        let Some((len, start)) = first.filter(|&(len, _)| len > 0) else { return Ok(self) };
        let bytes = end.checked_sub(start);
        let fits = |item_bytes: &u64| bytes == len.checked_mul(*item_bytes as i64); // fits: 8
        Ok([2, 8].into_iter().find(fits).map_or(self, |item_bytes| self.of_item_bytes(item_bytes)))
    }

    /// Refuses floating-point elements where ids are expected.
    pub(crate) fn expect_ids(self, file: &str) -> Result<()> {
        let file = file.to_owned();
        match self {
            Dtype::F32 => Err(Error::OtherKind {
                file,
                expected: "ids".to_owned(),
                found: "type code 7, float32 in Megatron and uint32 in DeepSpeed".to_owned(),
                hint: "if DeepSpeed wrote it, `feedline convert` with --source-dtype uint32",
            }),
            Dtype::F64 => Err(Error::NotTokens { file, dtype: self }),
            _ => Ok(()),
        }
    }

    /// Bytes of one token.
    #[must_use]
    pub fn item_bytes(self) -> u64 {
        match self {
            Dtype::U8 | Dtype::I8 => 1,
            Dtype::I16 | Dtype::U16 => 2,
            Dtype::I32 | Dtype::U32 | Dtype::F32 => 4,
            Dtype::I64 | Dtype::U64 | Dtype::F64 => 8,
        }
    }

    /// The type that Megatron's writer uses for this vocabulary size; `None`: size unknown.
    #[must_use]
    pub fn for_vocab(vocab_size: Option<u64>) -> Self {
        match vocab_size {
            Some(size) if size < VOCAB_U16_END => Dtype::U16,
            _ => Dtype::I32,
        }
    }

    /// Whether a token is an integer, as ids are.
    #[must_use]
    pub fn is_integer(self) -> bool {
        !matches!(self, Dtype::F32 | Dtype::F64)
    }

    /// The largest id that a token can hold exactly.
    #[must_use]
    pub fn token_max(self) -> u32 {
        match self {
            Dtype::U8 => u32::from(u8::MAX),
            Dtype::I8 => i8::MAX as u32,
            Dtype::I16 => i16::MAX as u32,
            Dtype::U16 => u32::from(u16::MAX),
            Dtype::I32 => i32::MAX as u32,
            Dtype::U32 | Dtype::I64 | Dtype::U64 | Dtype::F64 => u32::MAX,
            Dtype::F32 => 1 << 24, // the last of the consecutive integers
        }
    }

    /// Widens little-endian tokens.
    ///
    /// # Panics
    /// If the type is not an integer type, or `bytes` are not `out.len()` tokens.
    pub fn decode_i64(self, bytes: &[u8], out: &mut [i64]) {
        assert_eq!(bytes.len() as u64, out.len() as u64 * self.item_bytes(), "bytes of the tokens");
        match self {
            Dtype::U8 => widen(bytes, out, |[byte]| i64::from(byte)),
            Dtype::I8 => widen(bytes, out, |item| i64::from(i8::from_le_bytes(item))),
            Dtype::I16 => widen(bytes, out, |item| i64::from(i16::from_le_bytes(item))),
            Dtype::U16 => widen(bytes, out, |item| i64::from(u16::from_le_bytes(item))),
            Dtype::I32 => widen(bytes, out, |item| i64::from(i32::from_le_bytes(item))),
            Dtype::U32 => widen(bytes, out, |item| i64::from(u32::from_le_bytes(item))),
            // Values above 2^63 become negative; ids are neither.
            Dtype::I64 | Dtype::U64 => widen(bytes, out, i64::from_le_bytes),
            Dtype::F32 | Dtype::F64 => panic!("{self} tokens are no integers"),
        }
    }

    /// Appends ids, little-endian; those above [`Dtype::token_max`] would be truncated, so the
    /// caller checks first.
    pub(crate) fn encode(self, ids: &[u32], out: &mut Vec<u8>) {
        match self {
            Dtype::U8 | Dtype::I8 => out.extend(ids.iter().map(|&id| id as u8)),
            Dtype::I16 | Dtype::U16 => narrow(ids, out, |id| (id as u16).to_le_bytes()),
            Dtype::I32 | Dtype::U32 => narrow(ids, out, u32::to_le_bytes),
            Dtype::I64 | Dtype::U64 => narrow(ids, out, |id| i64::from(id).to_le_bytes()),
            Dtype::F32 => narrow(ids, out, |id| (id as f32).to_le_bytes()),
            Dtype::F64 => narrow(ids, out, |id| f64::from(id).to_le_bytes()),
        }
    }
}

fn widen<const N: usize>(bytes: &[u8], out: &mut [i64], value: impl Fn([u8; N]) -> i64) {
    for (to, item) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *to = value(*item);
    }
}

fn narrow<const N: usize>(ids: &[u32], out: &mut Vec<u8>, item: impl Fn(u32) -> [u8; N]) {
    let start = out.len();
    out.resize(start + ids.len() * N, 0);
    for (to, &id) in out[start..].as_chunks_mut::<N>().0.iter_mut().zip(ids) {
        *to = item(id);
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Dtype::U8 => "uint8",
            Dtype::I8 => "int8",
            Dtype::I16 => "int16",
            Dtype::I32 => "int32",
            Dtype::I64 => "int64",
            Dtype::F64 => "float64",
            Dtype::F32 => "float32",
            Dtype::U16 => "uint16",
            Dtype::U32 => "uint32",
            Dtype::U64 => "uint64",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_1_to_8_are_megatrons_and_9_and_10_are_paddles() {
        for code in 0..=u8::MAX {
            match Dtype::from_code_of_any(code) {
                Some(dtype) => {
                    assert_eq!(dtype.code(), code);
                    assert_eq!(Dtype::from_name(&dtype.to_string()), Some(dtype));
                    assert_eq!(Dtype::from_code(code).is_some(), code <= 8, "code {code}");
                }
                None => assert!(!(1..=10).contains(&code), "code {code}"),
            }
        }
    }

    /// Codes 6 and 8 are DeepSpeed's only if the first sequence with tokens has its bytes.
    #[test]
    fn bytes_of_an_element_tell_the_writer() {
        for (code, sequences, bin_bytes, expected) in [
            (6, &[(0, 0), (4, 0), (2, 8)][..], 12, Dtype::U16),
            (6, &[(4, 0), (2, 32)], 48, Dtype::F64),
            (6, &[(4, 0)], 8, Dtype::U16),
            (6, &[(4, 0)], 9, Dtype::F64),
            (6, &[], 0, Dtype::F64),
            (6, &[(-4, 0), (1, -8)], 9, Dtype::F64),
            (6, &[(4, i64::MIN)], 8, Dtype::F64),
            (7, &[(4, 0), (2, 8)], 12, Dtype::F32),
            (8, &[(4, 0), (2, 8)], 12, Dtype::U16),
            (8, &[(4, 0), (2, 32)], 48, Dtype::U64),
            (8, &[(4, 0), (0, 16)], 16, Dtype::U16),
            (4, &[(4, 0), (2, 8)], 12, Dtype::I32),
        ] {
            let dtype = Dtype::from_code(code).unwrap();
            let found = dtype.of_items(sequences.iter().map(|&entry| Ok(entry)), bin_bytes);
            assert_eq!(found.unwrap(), expected, "code {code}, {sequences:?}");
        }
    }

    #[test]
    fn vocab_size_selects_the_type() {
        for (vocab_size, expected) in [
            (None, Dtype::I32),
            (Some(0), Dtype::U16),
            (Some(50_257), Dtype::U16),
            (Some(65_499), Dtype::U16),
            (Some(65_500), Dtype::I32),
            (Some(65_536), Dtype::I32),
        ] {
            assert_eq!(Dtype::for_vocab(vocab_size), expected, "{vocab_size:?}");
        }
    }

    #[test]
    fn encode_and_decode_round_trip() {
        for code in 1..=10 {
            let dtype = Dtype::from_code_of_any(code).unwrap();
            if !dtype.is_integer() {
                continue;
            }
            let ids = [0, 1, 77, dtype.token_max()];
            let mut bytes = Vec::new();
            dtype.encode(&ids, &mut bytes);
            let mut back = [0; 4];
            dtype.decode_i64(&bytes, &mut back);
            assert_eq!(back, ids.map(i64::from), "{dtype}");
            dtype.decode_i64(&vec![0xff; bytes.len()], &mut back);
            let ones = if matches!(dtype, Dtype::U8 | Dtype::U16 | Dtype::U32) {
                i64::from(dtype.token_max())
            } else {
                -1
            };
            assert_eq!(back, [ones; 4], "{dtype}");
        }
    }
}
