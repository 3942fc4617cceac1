//! Refuses by name what is not bare tokens: files that another magic number marks, and tokens of
//! another width or type than 16-bit integers.
//!
//! A bare file has no mark of its own, so any first tokens are possible. A magic of two bytes
//! therefore counts only if the bytes after it agree. What a file only resembles, `--source-dtype`
//! overrides; a magic it does not.

use storage::{Object, RangeRead};

use super::header::{u32_at, u64_at};
use crate::{Error, Result};

const DECOMPRESS: &str = "decompress it first";
const NOT_TOKENS: &str = "it has no tokens of a corpus";
const TABLE: &str = "write its column of ids as a file of bare tokens";
const INDEX: &str = "rename the index to .idx, beside its .bin";
const CHECKPOINT: &str = "`feedline ckpt import` reads checkpoints";

/// Starts of files, what they are, and what to do.
const MAGICS: [(&[u8], &str, &str); 24] = [
    (b"\x28\xb5\x2f\xfd", "zstd data", DECOMPRESS),
    (b"\xfd7zXZ\0", "xz data", DECOMPRESS),
    (b"\x04\x22\x4d\x18", "lz4 data", DECOMPRESS),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", DECOMPRESS),
    (b"PK\x03\x04", "a ZIP archive", "extract it first"),
    (b"PK\x05\x06", "an empty ZIP archive", NOT_TOKENS),
    (b"PAR1", "a Parquet file", TABLE),
    (b"PARE", "an encrypted Parquet file", TABLE),
    (b"ARROW1\0\0", "an Arrow file", TABLE),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", TABLE),
    (b"SQLite format 3\0", "an SQLite database", TABLE),
    (b"Obj\x01", "an Avro file", TABLE),
    (b"ORC\x08", "an ORC file", TABLE),
    (b"GGUF", "a GGUF model", NOT_TOKENS),
    (b"\x7fELF", "a program", NOT_TOKENS),
    (b"\x93NUMPY", "an array of numpy", "rename it to .npy"),
    (b"MMIDIDX\0\0", "an MMIDIDX index", INDEX),
    (b"TNTIDX\0\0", "a TNTIDX index", INDEX),
    (&20_240_326_u32.to_le_bytes(), "a model of llm.c", NOT_TOKENS),
    (&20_240_327_u32.to_le_bytes(), "a debug state of llm.c", NOT_TOKENS),
    (&20_240_328_u32.to_le_bytes(), "a tokenizer of llm.c", NOT_TOKENS),
    (&20_240_522_u32.to_le_bytes(), "an evaluation set of llm.c", NOT_TOKENS),
    (&20_240_527_u32.to_le_bytes(), "a training state of llm.c", NOT_TOKENS),
    (&20_240_803_u32.to_le_bytes(), "a Llama 3 model of llm.c", NOT_TOKENS),
];

/// Whether the first bytes of a file of this length are those of a kind.
type Test = fn(&[u8], u64) -> bool;

/// Kinds that take more than a constant to recognize. The first that matches names the file.
const SHAPES: [(Test, &str, &str); 12] = [
    (is_torch_zip, "a file of torch.save", CHECKPOINT),
    (is_npz, "an .npz of numpy", "extract it, and name its array .npy"),
    (is_gzip, "gzip data", DECOMPRESS),
    (is_bzip2, "bzip2 data", DECOMPRESS),
    (is_skippable_zstd, "zstd data", DECOMPRESS),
    (is_safetensors, "a safetensors file", CHECKPOINT),
    (is_torch_legacy, "a file of torch.save", CHECKPOINT),
    (is_pickle, "a Python pickle", NOT_TOKENS),
    (is_arrow_stream, "an Arrow stream", TABLE),
    (is_tar, "a tar archive", "extract it first"),
    (is_git_lfs, "a pointer of Git LFS", "`git lfs pull` fetches the file"),
    (is_text, "text", "`preprocess` makes tokens of text"),
];

/// Bytes at each end of a file that are searched for signs of another width.
const SAMPLE_BYTES: u64 = 64 << 10;
/// The upper halves of 32-bit ids are below this for vocabularies of up to a million.
const UPPER_END: u16 = 16;
/// The numbers of an unknown header from here to 1,024 bytes are zeros.
const UNKNOWN_HEADER_BYTES: usize = 16;

/// Refuses a file that starts as one of another kind.
pub(super) fn refuse_known(object: &dyn Object, start: &[u8]) -> Result<()> {
    match known(start, object.len_bytes()) {
        Some((name, hint)) => Err(not_bare(&object.display(), name, hint)),
        None if is_chunk(object, start)? => {
            let name = "a chunk of litdata or a shard of MosaicML's streaming";
            Err(not_bare(&object.display(), name, TABLE))
        }
        None => Ok(()),
    }
}

/// The kind that the first bytes of a file show, and what to do.
fn known(start: &[u8], len: u64) -> Option<(&'static str, &'static str)> {
    let shape = SHAPES.iter().find(|(test, ..)| test(start, len));
    let magic = || MAGICS.iter().find(|(magic, ..)| start.starts_with(magic));
    let shape = shape.map(|&(_, name, hint)| (name, hint));
    shape.or_else(|| magic().map(|&(_, name, hint)| (name, hint)))
}

/// Refuses a file that resembles a header and tokens, floating-point numbers, or wider tokens.
pub(super) fn refuse_other_widths(object: &dyn Object, start: &[u8]) -> Result<()> {
    let (file, len) = (object.display(), object.len_bytes());
    if let Some(header) = start.get(..1024)
        && header[UNKNOWN_HEADER_BYTES..].iter().all(|&byte| byte == 0)
        && let Some(magic) = u32_at(header, 0).filter(|&magic| magic > u16::MAX.into())
    {
        let found = format!("an unknown header of 1024 bytes that starts with {magic}");
        let hint = "remove the header; --source-dtype uint16 reads it as tokens";
        return Err(not_bare(&file, &found, hint));
    }
    let mut sample = vec![0; len.min(2 * SAMPLE_BYTES) as usize]; // fits: 128 KiB at most
    if len <= 2 * SAMPLE_BYTES {
        object.read_many(&mut [RangeRead { offset: 0, buf: &mut sample }])?;
    } else {
        let (first, last) = sample.split_at_mut(SAMPLE_BYTES as usize);
        // A multiple of the widest token, so that the end has the phase of the start.
        let offset = (len - SAMPLE_BYTES) / 8 * 8;
        object.read_many(&mut [
            RangeRead { offset: 0, buf: first },
            RangeRead { offset, buf: last },
        ])?;
    }
    match resembled(&sample, len) {
        Some((found, hint)) => Err(not_bare(&file, found, hint)),
        None => Ok(()),
    }
}

/// The error for bare tokens whose width no file gives.
pub(super) fn unknown_width(file: &str) -> Error {
    Error::OtherKind {
        file: file.to_owned(),
        expected: "an index or metadata that give the bytes per token".to_owned(),
        found: "neither".to_owned(),
        hint: "--source-dtype uint16 or uint32 gives the type, --eod the token that ends documents",
    }
}

fn not_bare(file: &str, found: &str, hint: &'static str) -> Error {
    let (file, found) = (file.to_owned(), found.to_owned());
    Error::OtherKind { file, expected: "bare 16-bit tokens".to_owned(), found, hint }
}

/// What all numbers of a sample look like if not like 16-bit tokens, and how to read them.
fn resembled(sample: &[u8], len: u64) -> Option<(&'static str, &'static str)> {
    let float_hint = "ids are integers; --source-dtype uint16 reads them as 16-bit tokens";
    if sample.len() < 4 || !len.is_multiple_of(4) {
        return None;
    }
    let items = sample.as_chunks::<2>().0;
    let (lower, upper) = (|| items.iter().step_by(2), || items.iter().skip(1).step_by(2));
    let is_zero = |item: &[u8; 2]| *item == [0, 0];
    let (lower_zero, upper_zero) = (lower().all(is_zero), upper().all(is_zero));
    let is_wide = len.is_multiple_of(8);
    if !(lower_zero && upper_zero) {
        let mut f64s = sample.as_chunks().0.iter().map(|item| f64::from_le_bytes(*item));
        if is_wide && f64s.all(|number| is_id(number, 1 << 32)) {
            return Some(("64-bit floating-point numbers", float_hint));
        }
        let mut f32s = sample.as_chunks().0.iter().map(|item| f32::from_le_bytes(*item));
        if f32s.all(|number| is_id(number.into(), 1 << 24)) {
            return Some(("32-bit floating-point numbers", float_hint));
        }
    }
    let below_end = |item: &[u8; 2]| u16::from_le_bytes(*item) < UPPER_END;
    if upper_zero || (upper().all(below_end) && !lower().all(below_end)) {
        let quads = sample.as_chunks::<8>().0;
        if is_wide && quads.iter().all(|quad| quad[4..] == [0; 4]) {
            return Some((
                "numbers that all fit 64-bit tokens: of each four the last two are zero",
                "--source-dtype int64 reads 64-bit tokens, uint32 and uint16 narrower ones",
            ));
        }
        return Some((
            "numbers that all fit 32-bit tokens: every second one is zero or small",
            "--source-dtype uint32 reads 32-bit tokens, uint16 16-bit ones",
        ));
    }
    lower_zero.then_some((
        "numbers that all fit big-endian 32-bit tokens: every second one is zero",
        "swap the bytes; --source-dtype uint16 reads 16-bit tokens as they are",
    ))
}

/// Whether a float could be an id that was converted.
fn is_id(number: f64, end: u64) -> bool {
    number.fract() == 0.0 && (0.0..end as f64).contains(&number)
}

/// RFC 1952: deflate, and no reserved flag.
fn is_gzip(start: &[u8], _: u64) -> bool {
    start.starts_with(b"\x1f\x8b\x08") && start.get(3).is_some_and(|flags| flags & 0xe0 == 0)
}

/// The size, then the magic of a block or of the end of the stream.
fn is_bzip2(start: &[u8], _: u64) -> bool {
    let magics = [&b"\x31\x41\x59\x26\x53\x59"[..], b"\x17\x72\x45\x38\x50\x90"];
    start.starts_with(b"BZh") && start.get(4..10).is_some_and(|block| magics.contains(&block))
}

fn is_skippable_zstd(start: &[u8], len: u64) -> bool {
    let magic = u32_at(start, 0).is_some_and(|magic| magic & !0xf == 0x184d_2a50);
    magic && u32_at(start, 4).is_some_and(|bytes| 8 + u64::from(bytes) <= len)
}

/// The name of the first member of a ZIP archive.
fn first_member(start: &[u8]) -> Option<&[u8]> {
    let len = u32_at(start, 26)? as usize & 0xffff; // fits: 16 bits
    start.get(30..30 + len).filter(|_| start.starts_with(b"PK\x03\x04"))
}

fn is_torch_zip(start: &[u8], _: u64) -> bool {
    first_member(start).is_some_and(|name| name.ends_with(b"/data.pkl"))
}

fn is_npz(start: &[u8], _: u64) -> bool {
    first_member(start).is_some_and(|name| name.ends_with(b".npy"))
}

/// The bytes of a JSON object, then the object.
fn is_safetensors(start: &[u8], len: u64) -> bool {
    let json = u64_at(start, 0).filter(|&json| json >= 2 && json <= len.saturating_sub(8));
    json.is_some() && (start[8..].starts_with(b"{\"") || start[8..].starts_with(b"{}"))
}

/// The number with which torch.save started before it wrote ZIP archives.
fn is_torch_legacy(start: &[u8], _: u64) -> bool {
    start.starts_with(b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e")
}

/// Protocol 4 and later have a frame within the file; 2 and 3 start with a container or a global.
fn is_pickle(start: &[u8], len: u64) -> bool {
    match start {
        [0x80, 4 | 5, 0x95, ..] => {
            u64_at(start, 3).is_some_and(|frame| frame > 0 && frame <= len.saturating_sub(11))
        }
        [0x80, 2 | 3, b'}' | b']' | b'(', b'q', 0, ..] => true,
        [0x80, 2 | 3, b'c', name @ ..] => {
            let name = name.split(|&byte| byte == b'\n').next().unwrap_or(&[]);
            name.len() > 2 && name.iter().all(|&byte| byte.is_ascii_graphic())
        }
        _ => false,
    }
}

/// A continuation, the bytes of a message, and the place of its root table.
fn is_arrow_stream(start: &[u8], len: u64) -> bool {
    let message = u32_at(start, 4).filter(|&bytes| bytes > 0 && bytes % 8 == 0);
    u32_at(start, 0) == Some(u32::MAX)
        && message.is_some_and(|bytes| 8 + u64::from(bytes) <= len)
        && u32_at(start, 8).is_some_and(|root| (4..64).contains(&root))
}

fn is_tar(start: &[u8], _: u64) -> bool {
    start.get(257..262).is_some_and(|magic| magic == b"ustar")
}

fn is_git_lfs(start: &[u8], _: u64) -> bool {
    start.starts_with(b"version https://git-lfs")
}

/// Printable ASCII for at least as long as 8 tokens.
fn is_text(start: &[u8], _: u64) -> bool {
    let printable = |byte: &u8| byte.is_ascii_graphic() || b" \t\r\n".contains(byte);
    start.len() >= 16 && start.iter().all(printable)
}

/// A count n, then n + 1 places of 32 bits, the last of which is the end of the file.
fn is_chunk(object: &dyn Object, start: &[u8]) -> Result<bool> {
    let (Some(count), Some(first)) = (u32_at(start, 0), u32_at(start, 4)) else { return Ok(false) };
    let (len, tables) = (object.len_bytes(), 8 + 4 * u64::from(count));
    if count == 0 || tables > len || u64::from(first) < tables {
        return Ok(false);
    }
    let mut last = [0; 4];
    object.read_many(&mut [RangeRead { offset: tables - 4, buf: &mut last }])?;
    Ok(u64::from(u32::from_le_bytes(last)) == len)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids16(ids: &[u16]) -> Vec<u8> {
        ids.iter().flat_map(|id| id.to_le_bytes()).collect()
    }

    fn check(bytes: &[u8], expected: Option<&str>) {
        let found = resembled(bytes, bytes.len() as u64).map(|(found, _)| found);
        match (found, expected) {
            (None, None) => {}
            (Some(found), Some(expected)) => assert!(found.contains(expected), "{found}"),
            _ => panic!("{found:?}, expected {expected:?}"),
        }
    }

    /// The nearest files that are, and are not, 16-bit tokens.
    #[test]
    fn widths_are_told_apart() {
        let of = |bytes: fn(u32) -> Vec<u8>| -> Vec<u8> {
            [50_256, 11, 318, 128_000, 9, 100_257].into_iter().flat_map(bytes).collect()
        };
        check(&of(|id| id.to_le_bytes().to_vec()), Some(" 32-bit tokens: every"));
        check(&of(|id| u64::from(id).to_le_bytes().to_vec()), Some("64-bit tokens"));
        check(&of(|id| (id as f32).to_le_bytes().to_vec()), Some("32-bit floating"));
        check(&of(|id| f64::from(id).to_le_bytes().to_vec()), Some("64-bit floating"));
        check(&of(|id| (id & 0xffff).swap_bytes().to_le_bytes().to_vec()), Some("big-endian"));
        check(&ids16(&[70, 0, 71, 0]), Some("32-bit tokens: every"));
        check(&ids16(&[0; 6]), Some("32-bit tokens"));
        check(&ids16(&[50_256, 11, 318, 16, 9, 0]), None);
        check(&ids16(&[50_256, 11, 318, 1, 9]), None); // six bytes are no 32-bit tokens
        check(&ids16(&[0, 3, 2, 1, 1, 2, 3, 0]), None); // a vocabulary of four letters
        check(&ids16(&[5, 0x4000, 6, 0x4000]), None); // 2.0000012 and 2.0000014
        check(&[], None);
    }

    /// Two bytes of a magic are two bytes of a token, unless the rest agrees.
    #[test]
    fn short_magics_need_the_bytes_after_them() {
        for (start, expected) in [
            (&b"\x1f\x8b\x08\0\0\0"[..], Some("gzip data")),
            (b"\x1f\x8b\x09\0\0\0", None),
            (b"\x1f\x8b\x08\xff\0\0", None),
            (b"BZh91AY&SY", Some("bzip2 data")),
            (b"BZh91AY&SX", None),
            (b"\x80\x04\x95\x10\0\0\0\0\0\0\0", Some("a Python pickle")),
            (b"\x80\x04\x95\x10\0\0\0\0\0\0\x01", None),
            (b"\x80\x02}q\0", Some("a Python pickle")),
            (b"\x80\x02ctorch._utils\n_rebuild", Some("a Python pickle")),
            (b"\x80\x02\x07\0", None),
            (b"\x10\0\0\0\0\0\0\0{\"a\":1}", Some("a safetensors file")),
            (b"\x10\0\0\0\0\0\0\x01{\"a\":1}", None),
            (b"\x10\0\0\0\0\0\0\0{a", None),
            (b"\xff\xff\xff\xff\x10\0\0\0\x10\0\0\0", Some("an Arrow stream")),
            (b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", None),
            (b"\x50\x2a\x4d\x18\x04\0\0\0", Some("zstd data")),
            (b"\x28\xb5\x2f\xfd", Some("zstd data")),
            (b"{\"text\": \"a line\"}\n", Some("text")),
            (b"{\"text\": \"a l", None),
            (b"PAR1", Some("a Parquet file")),
        ] {
            assert_eq!(
                known(start, 4096).map(|(name, _)| name),
                expected,
                "{}",
                start.escape_ascii()
            );
        }
    }
}
