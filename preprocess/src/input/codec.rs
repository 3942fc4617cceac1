//! What is in a file, by its first bytes.

use std::io::{self, BufRead};

use super::bad_input;
use crate::Result;

/// Frames of `zstd --long=31`, as some public corpora have, need a window of 2 GiB. The decoder
/// takes only as much as the frame says.
const ZSTD_WINDOW_LOG_MAX: u32 = 31;

/// Bytes that are enough to tell.
pub(super) const HEAD_BYTES: usize = 8;

const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
const PARQUET_MAGIC: [u8; 4] = *b"PAR1";

/// What files begin with that are none of ours.
const FOREIGN: [(&[u8], &str, &str); 7] = [
    (b"BZh", "bzip2", "decompress it, or pipe it: bzcat FILE | preprocess --json-in -"),
    (&[0xfd, b'7', b'z', b'X', b'Z'], "xz", "decompress it, or pipe it: xzcat FILE | ..."),
    (b"PK\x03\x04", "zip", "unpack it first"),
    (&[0x04, 0x22, 0x4d, 0x18], "lz4", "decompress it, or pipe it: lz4cat FILE | ..."),
    (b"Obj\x01", "Avro", "write it as JSON lines first"),
    (&[0xff, 0xfe], "UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 FILE"),
    (&[0xfe, 0xff], "UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 FILE"),
];

/// What compressed files are called.
const ENDINGS: [(&str, Codec); 4] =
    [(".zst", Codec::Zstd), (".zstd", Codec::Zstd), (".gz", Codec::Gzip), (".bgz", Codec::Gzip)];

/// How an input is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Codec {
    Plain,
    Gzip,
    Zstd,
    Parquet,
}

impl Codec {
    /// Content decides, for names lie; but a `.zst` that is none is refused, because what was meant
    /// to be compressed and is not has likely been cut or overwritten.
    pub(super) fn detect(name: &str, head: &[u8]) -> Result<Codec> {
        if is_zstd(head) {
            return Ok(Codec::Zstd);
        }
        if head.starts_with(&GZIP_MAGIC) {
            return Ok(Codec::Gzip);
        }
        if head.starts_with(&PARQUET_MAGIC) {
            return Ok(Codec::Parquet);
        }
        for (magic, what, hint) in FOREIGN {
            if head.starts_with(magic) {
                let due = format!("JSON lines, plain, .zst or .gz; hint: {hint}");
                return Err(bad_input(name, what, due));
            }
        }
        let due = "what its name says";
        if head.is_empty() && matches!(split_ending(name).1, Codec::Zstd | Codec::Gzip) {
            return Err(bad_input(name, "an empty file", due));
        }
        match split_ending(name).1 {
            Codec::Zstd => Err(bad_input(name, "a file that is not Zstandard inside", due)),
            Codec::Gzip => Err(bad_input(name, "a file that is not gzip inside", due)),
            Codec::Plain | Codec::Parquet => Ok(Codec::Plain),
        }
    }

    /// What is inside, from one end to the other, however many frames or members there are.
    pub(super) fn decoder<'a>(
        self,
        compressed: impl BufRead + Send + 'a,
    ) -> io::Result<Box<dyn io::Read + Send + 'a>> {
        Ok(match self {
            Codec::Plain | Codec::Parquet => Box::new(compressed),
            Codec::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(compressed)),
            Codec::Zstd => {
                let mut decoder = zstd::Decoder::with_buffer(compressed)?;
                decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
                Box::new(decoder)
            }
        })
    }

    pub(super) fn is_compressed(self) -> bool {
        matches!(self, Codec::Gzip | Codec::Zstd)
    }
}

/// A skippable frame may come first: its magic ends in any of 16 digits.
pub(super) fn is_zstd(head: &[u8]) -> bool {
    head.starts_with(&ZSTD_MAGIC) || matches!(head, [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..])
}

/// A name without the ending that says how it is compressed.
pub(super) fn split_ending(name: &str) -> (&str, Codec) {
    for (ending, codec) in ENDINGS {
        if let Some(stem) = name.strip_suffix(ending) {
            return (stem, codec);
        }
    }
    (name, Codec::Plain)
}
