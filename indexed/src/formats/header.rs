//! Files of tokens without an index: bare tokens, or tokens behind a header that gives their type
//! and count.
//!
//! | starts with | writer | tokens |
//! |---|---|---|
//! | u32 20240520, version 1 | llm.c, modded-nanogpt | uint16 from byte 1,024 |
//! | u32 20240801, version 7 | llm.c for Llama 3 | uint32 from byte 1,024 |
//! | u32 278895051, version 1 | NeMo Automodel | of 2 or 4 bytes, the fourth number; byte 1,024 |
//! | `LITPKDS`, u64 version 1, u8 type code, u64 count | lit-gpt, TinyLlama | from byte 24 |
//!
//! The first three have 256 numbers of 32 bits: magic, version, count of tokens, then zeros. Every
//! count is compared with the length of the file. `kind` refuses all other known starts, and bare
//! tokens that look wider than 16 bits.

use std::sync::Arc;

use storage::{Object, RangeRead};

use super::source::TokenRun;
use super::{kind, whole_tokens};
use crate::mmididx::idx::{END_OF_FILE, end_at, malformed};
use crate::{Dtype, Error, FormatRule, Result};

/// Bytes that are read to recognize a file.
const START_BYTES: u64 = 4096;
/// 256 numbers of 32 bits.
const NUMBERS_BYTES: usize = 1024;

/// A header of 256 numbers.
struct Numbers {
    magic: u32,
    version: u32,
    writer: &'static str,
    /// `None`: the fourth number has its bytes.
    dtype: Option<Dtype>,
}

const NUMBERS: [Numbers; 3] = [
    Numbers { magic: 20_240_520, version: 1, writer: "llm.c", dtype: Some(Dtype::U16) },
    Numbers { magic: 20_240_801, version: 7, writer: "llm.c", dtype: Some(Dtype::U32) },
    Numbers { magic: 278_895_051, version: 1, writer: "NeMo Automodel", dtype: None },
];

const LITPKDS: &[u8] = b"LITPKDS";
const LITPKDS_BYTES: usize = 24;

/// What a header gives.
struct Header {
    writer: &'static str,
    bytes: usize,
    dtype: Dtype,
    tokens: u64,
}

/// The tokens of a file without an index, and their type: that of a header, else `asked`, else
/// `default`. Without any of them the width is unknown.
///
/// # Errors
/// [`Error::OtherKind`] for another kind of file, and for bare tokens of unknown width;
/// [`Error::Malformed`] for a header that contradicts the file; [`Error::BadSetting`] if `asked`
/// is not the recorded type; [`Error::Storage`].
pub(super) fn open(
    object: &Arc<dyn Object>,
    asked: Option<Dtype>,
    default: Option<Dtype>,
) -> Result<(TokenRun, Dtype)> {
    let (file, len) = (object.display(), object.len_bytes());
    let start = start_of(object.as_ref())?;
    if let Some(header) = Header::parse(&start, &file)? {
        header.check_len(&file, len)?;
        check_asked(&file, header.dtype, asked)?;
        let bytes = header.bytes as u64..len;
        return Ok((TokenRun { object: Arc::clone(object), bytes }, header.dtype));
    }
    kind::refuse_known(object.as_ref(), &start)?;
    let dtype = match asked {
        Some(dtype) => dtype,
        None => {
            kind::refuse_other_widths(object.as_ref(), &start)?;
            default.ok_or_else(|| kind::unknown_width(&file))?
        }
    };
    whole_tokens(&file, len, dtype)?;
    Ok((TokenRun { object: Arc::clone(object), bytes: 0..len }, dtype))
}

/// The first bytes of a file, all of a shorter one.
pub(super) fn start_of(object: &dyn Object) -> Result<Vec<u8>> {
    let mut start = vec![0; object.len_bytes().min(START_BYTES) as usize]; // fits: 4 KiB at most
    object.read_many(&mut [RangeRead { offset: 0, buf: &mut start }])?;
    Ok(start)
}

/// Refuses another type than the one that a file records.
pub(super) fn check_asked(file: &str, dtype: Dtype, asked: Option<Dtype>) -> Result<()> {
    match asked {
        Some(asked) if asked != dtype => Err(Error::BadSetting {
            name: "--source-dtype",
            found: asked.to_string(),
            expected: format!("{dtype}, the type of {file}"),
        }),
        _ => Ok(()),
    }
}

impl Header {
    fn parse(start: &[u8], file: &str) -> Result<Option<Header>> {
        if start.starts_with(LITPKDS) {
            return Header::of_litpkds(start, file).map(Some);
        }
        let magic = u32_at(start, 0);
        let known = NUMBERS.iter().find(|known| Some(known.magic) == magic);
        known.map(|known| Header::of_numbers(known, start, file)).transpose()
    }

    fn of_numbers(known: &Numbers, start: &[u8], file: &str) -> Result<Header> {
        let writer = known.writer;
        let number = |nth: usize| {
            let number = start.get(..NUMBERS_BYTES).and_then(|start| u32_at(start, 4 * nth));
            number.ok_or_else(|| too_short(start, NUMBERS_BYTES, writer, file))
        };
        let version = number(1)?;
        if version != known.version {
            let expected = format!("version {} of {writer}'s header", known.version);
            let found = format!("version {version}");
            return Err(malformed(file, 4, FormatRule::Header, found, expected));
        }
        let dtype = match (known.dtype, number(3)?) {
            (Some(dtype), _) => dtype,
            (None, 2) => Dtype::U16,
            (None, 4) => Dtype::U32,
            (None, bytes) => {
                let found = format!("{bytes} bytes per token");
                let expected = "2 or 4 bytes per token";
                return Err(malformed(file, 12, FormatRule::Header, found, expected));
            }
        };
        Ok(Header { writer, bytes: NUMBERS_BYTES, dtype, tokens: number(2)?.into() })
    }

    /// Its type codes are Megatron's, except that 6 is float32 and 7 is float64.
    fn of_litpkds(start: &[u8], file: &str) -> Result<Header> {
        let writer = "lit-gpt";
        let (Some(version), Some(&code), Some(tokens)) =
            (u64_at(start, 7), start.get(15), u64_at(start, 16))
        else {
            return Err(too_short(start, LITPKDS_BYTES, writer, file));
        };
        if version != 1 {
            let found = format!("version {version}");
            let expected = "version 1 of lit-gpt's header";
            return Err(malformed(file, 7, FormatRule::Header, found, expected));
        }
        match code {
            6 => Err(Error::NotTokens { file: file.to_owned(), dtype: Dtype::F32 }),
            7 => Err(Error::NotTokens { file: file.to_owned(), dtype: Dtype::F64 }),
            _ => match Dtype::from_code(code) {
                Some(dtype) => Ok(Header { writer, bytes: LITPKDS_BYTES, dtype, tokens }),
                None => {
                    let found = format!("type code {code}");
                    Err(malformed(file, 15, FormatRule::Header, found, "type code 1 to 8"))
                }
            },
        }
    }

    /// The count must be that of the file, which may be truncated or preallocated.
    fn check_len(&self, file: &str, len: u64) -> Result<()> {
        let Header { writer, bytes, dtype, tokens } = self;
        let expected = *bytes as u128 + u128::from(*tokens) * u128::from(dtype.item_bytes());
        if expected == u128::from(len) {
            return Ok(());
        }
        let at = expected.min(len.into()) as usize; // fits: at most the length of a file
        let found = end_at(len.into(), expected);
        let expected =
            format!("{expected} bytes for {tokens} tokens of {dtype} by {writer}'s header");
        Err(malformed(file, at, FormatRule::Header, found, expected))
    }
}

fn too_short(start: &[u8], bytes: usize, writer: &str, file: &str) -> Error {
    let expected = format!("{writer}'s header of {bytes} bytes");
    malformed(file, start.len(), FormatRule::Header, END_OF_FILE, expected)
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|number| u32::from_le_bytes(*number))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().map(|number| u64::from_le_bytes(*number))
}
