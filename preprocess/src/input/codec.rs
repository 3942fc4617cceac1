//! Detects the format of a file by its first bytes.

use std::io::{self, BufRead};

use indexed::{GzipReader, MemberDecoder, MemberReader, starts_record};
use liblzma::stream::{CONCATENATED, Stream};

use super::bad_input;
use crate::Result;

/// Frames of `zstd --long=31`, as some public corpora have, need a window of 2 GiB. The decoder
/// takes only as much as the frame says.
const ZSTD_WINDOW_LOG_MAX: u32 = 31;

/// `xz -9` needs 65 MiB, and a dictionary may have up to 1.5 GiB. The decoder takes only as much as
/// the file says.
const XZ_MEMORY_BYTES_MAX: u64 = 2 << 30;

/// First bytes that suffice for detection.
pub(super) const HEAD_BYTES: usize = 8;

const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
const XZ_MAGIC: [u8; 6] = *b"\xfd7zXZ\0";
const PARQUET_MAGIC: [u8; 4] = *b"PAR1";

/// First bytes, names and hints for formats that are not read.
const FOREIGN: [(&[u8], &str, &str); 5] = [
    (b"PK\x03\x04", "zip", "unpack it first"),
    (
        &[0x04, 0x22, 0x4d, 0x18],
        "lz4",
        "decompress it, or pipe it: lz4cat FILE | preprocess --json-in -",
    ),
    (b"Obj\x01", "Avro", "write it as JSON lines first"),
    (&[0xff, 0xfe], "UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 FILE"),
    (&[0xfe, 0xff], "UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 FILE"),
];

/// Name endings of compressed files.
const ENDINGS: [(&str, Codec); 6] = [
    (".zst", Codec::Zstd),
    (".zstd", Codec::Zstd),
    (".gz", Codec::Gzip),
    (".bgz", Codec::Gzip),
    (".bz2", Codec::Bzip2),
    (".xz", Codec::Xz),
];

/// Endings of compressed files and archives that are not read.
const ENDINGS_UNREAD: [&str; 12] =
    [".lz4", ".zip", ".br", ".7z", ".rar", ".lzma", ".lz", ".lzo", ".sz", ".snappy", ".z", ".tar"];

/// Name endings of files with documents, before the ending of a compressed one, in lower or upper
/// case. In a folder, these files are taken.
pub(super) const DOCUMENT_ENDINGS: [&str; 6] =
    [".jsonl", ".ndjson", ".json", ".txt", ".parquet", ".tfrecord"];

/// The formats that are read, for messages.
pub(super) const READABLE: &str = "JSON lines, plain or compressed as .zst, .gz, .bz2 or .xz";

/// How an input is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Codec {
    Plain,
    Gzip,
    Zstd,
    Bzip2,
    Xz,
    Parquet,
}

impl Codec {
    /// Content decides, because names can be wrong. But a `.zst` file that is not Zstandard is
    /// refused, because it was probably truncated or overwritten.
    pub(super) fn detect(name: &str, head: &[u8]) -> Result<Codec> {
        if is_zstd(head) {
            return Ok(Codec::Zstd);
        }
        if head.starts_with(&GZIP_MAGIC) {
            return Ok(Codec::Gzip);
        }
        if is_bzip2(head) {
            return Ok(Codec::Bzip2);
        }
        if head.starts_with(&XZ_MAGIC) {
            return Ok(Codec::Xz);
        }
        if head.starts_with(&PARQUET_MAGIC) {
            return Ok(Codec::Parquet);
        }
        for (magic, what, hint) in FOREIGN {
            if head.starts_with(magic) {
                return Err(bad_input(name, what, READABLE).with_hint(hint));
            }
        }
        let expected = match split_ending(name).1 {
            Codec::Plain | Codec::Parquet => return Ok(Codec::Plain),
            Codec::Zstd => "Zstandard",
            Codec::Gzip => "gzip",
            Codec::Bzip2 => "bzip2",
            Codec::Xz => "xz",
        };
        let found = if head.is_empty() { "an empty file" } else { "other data" };
        Err(bad_input(name, found, format!("{expected} data (by file name)")))
    }

    /// A reader of the decompressed data of all frames or members.
    pub(super) fn decoder<'a>(
        self,
        compressed: impl BufRead + Send + 'a,
    ) -> io::Result<Box<dyn io::Read + Send + 'a>> {
        Ok(match self {
            Codec::Plain | Codec::Parquet => Box::new(compressed),
            // The magic has been checked, and a group of bgzip's members may end in padding.
            Codec::Gzip => Box::new(GzipReader::between_members(compressed)),
            Codec::Bzip2 => Box::new(MemberReader::<Bzip2Stream<_>>::between_members(compressed)),
            Codec::Xz => {
                let stream = Stream::new_stream_decoder(XZ_MEMORY_BYTES_MAX, CONCATENATED);
                let stream = stream.map_err(io::Error::other)?;
                Box::new(liblzma::bufread::XzDecoder::new_stream(compressed, stream))
            }
            Codec::Zstd => {
                let mut decoder = zstd::Decoder::with_buffer(compressed)?;
                decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
                Box::new(decoder)
            }
        })
    }

    pub(super) fn is_compressed(self) -> bool {
        !matches!(self, Codec::Plain | Codec::Parquet)
    }
}

/// A skippable frame may come first: its magic ends in any of 16 digits.
pub(super) fn is_zstd(head: &[u8]) -> bool {
    head.starts_with(&ZSTD_MAGIC) || matches!(head, [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..])
}

/// The magic, the size of the blocks, and the magic of the first block or of the end.
fn is_bzip2(head: &[u8]) -> bool {
    let is_block = |rest: &[u8]| rest.starts_with(b"1AY&") || rest.starts_with(b"\x17rE8");
    matches!(head, [b'B', b'Z', b'h', b'1'..=b'9', rest @ ..] if is_block(rest))
}

/// The dictionary size of the first block of an xz file ("The .xz file format", 3.1), or
/// `u64::MAX` if the header is not as `xz` writes it without further filters.
pub(super) fn xz_dictionary(head: &[u8]) -> u64 {
    let dictionary = || {
        let (&flags, mut rest) = head.get(XZ_HEADER_BYTES + 1..)?.split_first()?;
        let sizes = (flags >> 6 & 1) + (flags >> 7);
        for _ in 0..sizes {
            let last = rest.iter().position(|byte| byte & 0x80 == 0)?;
            rest = &rest[last + 1..];
        }
        match (flags & 3, rest) {
            (0, [0x21, 1, bits @ 0..40, ..]) => Some(u64::from(2 | bits & 1) << (bits / 2 + 11)),
            _ => None,
        }
    };
    // A block whose header has no length is the index: there is no block.
    if head.get(XZ_HEADER_BYTES) == Some(&0) { 0 } else { dictionary().unwrap_or(u64::MAX) }
}

/// Magic, flags and their checksum.
const XZ_HEADER_BYTES: usize = 12;

/// Bytes that hold the headers of a stream of xz and of its first block, with one filter.
pub(super) const XZ_HEAD_BYTES: usize = 64;

/// A name without the ending of its compression, in lower or upper case.
pub(super) fn split_ending(name: &str) -> (&str, Codec) {
    for (ending, codec) in ENDINGS {
        if let Some(stem) = strip_ending(name, ending) {
            return (stem, codec);
        }
    }
    (name, Codec::Plain)
}

/// Whether a file is named like one with documents, compressed or not.
pub(super) fn is_document_name(name: &str) -> bool {
    let stem = split_ending(name).0;
    is_record_name(stem) || DOCUMENT_ENDINGS.iter().any(|ending| has_ending(stem, ending))
}

/// Part of the names of TFRecord files: `a.tfrecord`, `a.tfrecords-00000-of-00010`.
const RECORD_NAME: &str = ".tfrecord";

/// Whether a file is named like one with records, compressed or not.
pub(super) fn is_record_name(name: &str) -> bool {
    let stem = split_ending(name).0;
    let last = stem.rsplit('/').next().unwrap_or(stem);
    let Some((_, rest)) = last.rsplit_once(RECORD_NAME) else { return false };
    let rest = rest.strip_prefix('s').unwrap_or(rest);
    rest.is_empty() || rest.starts_with('-')
}

/// Whether a file with this name and these first bytes has records.
pub(super) fn has_records(name: &str, codec: Codec, head: &[u8]) -> bool {
    is_record_name(name) || codec == Codec::Plain && starts_record(head)
}

/// A name without the ending of a compressor or archive that is not read.
pub(super) fn strip_unread(name: &str) -> Option<&str> {
    ENDINGS_UNREAD.iter().find_map(|ending| strip_ending(name, ending))
}

/// As [`str::strip_suffix`], without regard to the case of ASCII letters.
fn strip_ending<'a>(name: &'a str, ending: &str) -> Option<&'a str> {
    let stem_bytes = name.len().checked_sub(ending.len())?;
    let found = name.get(stem_bytes..)?;
    found.eq_ignore_ascii_case(ending).then(|| &name[..stem_bytes])
}

/// Whether a name has an ending, without regard to the case of ASCII letters.
pub(super) fn has_ending(name: &str, ending: &str) -> bool {
    strip_ending(name, ending).is_some()
}

/// One stream of a file of bzip2.
struct Bzip2Stream<R>(bzip2::bufread::BzDecoder<R>);

impl<R: BufRead> io::Read for Bzip2Stream<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.0.read(buf)
    }
}

impl<R: BufRead> MemberDecoder for Bzip2Stream<R> {
    type Input = R;

    fn start(input: R) -> Self {
        Bzip2Stream(bzip2::bufread::BzDecoder::new(input))
    }

    fn into_input(self) -> R {
        self.0.into_inner()
    }
}
