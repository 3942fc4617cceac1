//! Where lines come from: files that [`storage`] opens, decompressed on the way if need be, and
//! standard input.

use std::io::{self, BufReader, Read as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use storage::Object;

use crate::{Error, Result};

/// Requests of 1 MiB, several at a time, keep disks and parallel file systems busy.
const REQUEST_BYTES: usize = 1 << 20;

/// A decoder takes compressed bytes in pieces of this size.
const COMPRESSED_BYTES: usize = 4 << 20;

/// Frames of `zstd --long=31`, as some public corpora have, need a window of 2 GiB. The decoder
/// takes only as much as the frame says.
const ZSTD_WINDOW_LOG_MAX: u32 = 31;

/// How an input is named on the command line when it is standard input.
const STDIN: &str = "-";

const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// What files begin with that are something else than lines of JSON.
const FOREIGN: [(&[u8], &str, &str); 6] = [
    (&[0x1f, 0x8b], "gzip", "decompress it, or pipe it: zcat FILE | preprocess --json-in -"),
    (b"BZh", "bzip2", "decompress it, or pipe it: bzcat FILE | preprocess --json-in -"),
    (&[0xfd, b'7', b'z', b'X', b'Z'], "xz", "decompress it, or pipe it: xzcat FILE | ..."),
    (b"PK\x03\x04", "zip", "unpack it first"),
    (b"PAR1", "Parquet", "write it as JSON lines first"),
    (&[0xff, 0xfe], "UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 FILE"),
];

/// One input, checked.
#[derive(Clone, Debug)]
pub(crate) struct Input {
    /// As it was given.
    pub(crate) name: String,
    /// Its length as stored, unless it is a stream.
    pub(crate) stored_bytes: Option<u64>,
    form: Form,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Stdin,
    Plain,
    Zstd,
}

impl Input {
    /// Looks whether an input is there, can be read, and is of a kind that we know.
    ///
    /// # Errors
    /// [`Error::BadInput`] for a folder or an unknown form, [`Error::Storage`].
    pub(crate) fn check(name: &str) -> Result<Input> {
        if name == STDIN {
            return Ok(Input { name: name.to_owned(), stored_bytes: None, form: Form::Stdin });
        }
        let object = open(name)?;
        let mut head = [0; 8];
        let len = object.len_bytes().min(head.len() as u64) as usize; // fits: at most 8
        object
            .read_many(&mut [storage::Read { offset: 0, buf: &mut head[..len] }])
            .map_err(|error| not_a_file(name, error))?;
        let form = form_of(name, &head[..len])?;
        Ok(Input { name: name.to_owned(), stored_bytes: Some(object.len_bytes()), form })
    }

    /// Begins to read.
    ///
    /// # Errors
    /// As [`Input::check`], if things have changed since.
    pub(crate) fn open(&self) -> Result<Source> {
        let stored = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&stored);
        let (bytes, decompressed) = match self.form {
            Form::Plain => (Bytes::Object { object: open(&self.name)?, at: 0 }, false),
            Form::Zstd => {
                let object = open(&self.name)?;
                (self.zstd(Counted { inner: ObjectRead { object, at: 0 }, count })?, true)
            }
            Form::Stdin => self.stdin(count)?,
        };
        Ok(Source { name: self.name.clone(), bytes, decompressed, stored, offset: 0 })
    }

    /// Standard input may be compressed too: its first bytes are read to know.
    fn stdin(&self, count: Arc<AtomicU64>) -> Result<(Bytes, bool)> {
        let mut stdin = io::stdin();
        let mut head = Vec::new();
        let read = stdin.by_ref().take(8).read_to_end(&mut head);
        read.map_err(|source| Error::Stream { input: self.name.clone(), offset: 0, source })?;
        let form = form_of(&self.name, &head)?;
        let whole = Counted { inner: io::Cursor::new(head).chain(stdin), count };
        if form == Form::Zstd {
            return Ok((self.zstd(whole)?, true));
        }
        Ok((Bytes::Stream(Box::new(whole)), false))
    }

    fn zstd(&self, compressed: impl io::Read + Send + 'static) -> Result<Bytes> {
        let failed = |source| Error::Stream { input: self.name.clone(), offset: 0, source };
        let buffered = BufReader::with_capacity(COMPRESSED_BYTES, compressed);
        let mut decoder = zstd::Decoder::with_buffer(buffered).map_err(failed)?;
        decoder.window_log_max(ZSTD_WINDOW_LOG_MAX).map_err(failed)?;
        Ok(Bytes::Stream(Box::new(decoder)))
    }
}

fn open(name: &str) -> Result<Arc<dyn Object>> {
    let (store, key) = storage::locate(name)?;
    store.open(&key).map_err(|error| not_a_file(name, error))
}

/// An input that is there, but is no file.
fn not_a_file(name: &str, error: storage::Error) -> Error {
    let storage::Error::Io { source, .. } = &error else { return error.into() };
    let (got, hint) = match source.kind() {
        io::ErrorKind::IsADirectory => ("a folder", "list the files in it"),
        io::ErrorKind::InvalidInput => {
            ("a device, socket or pipe", "use standard input: COMMAND | preprocess --json-in -")
        }
        _ => return error.into(),
    };
    let due = format!("a file of JSON lines; hint: {hint}");
    Error::BadInput { input: name.to_owned(), got: got.to_owned(), due }
}

/// What an input is. Content decides, for names lie; but a `.zst` that is none is refused, because
/// what was meant to be compressed and is not has likely been cut or overwritten.
fn form_of(name: &str, head: &[u8]) -> Result<Form> {
    let bad = |got: &str, due: &str| {
        let (got, due) = (got.to_owned(), due.to_owned());
        Err(Error::BadInput { input: name.to_owned(), got, due })
    };
    // A skippable frame of Zstandard may come first: its magic ends in any of 16 digits.
    let skippable = matches!(head, [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..]);
    if head.starts_with(&ZSTD_MAGIC) || skippable {
        return Ok(Form::Zstd);
    }
    for (magic, what, hint) in FOREIGN {
        if head.starts_with(magic) {
            return bad(what, &format!("JSON lines, plain or .zst; hint: {hint}"));
        }
    }
    if name.ends_with(".zst") {
        return bad("a file that is not Zstandard inside", "what its name says");
    }
    Ok(Form::Plain)
}

/// The bytes of one input, in order.
#[derive(Debug)]
pub(crate) struct Source {
    name: String,
    bytes: Bytes,
    pub(crate) decompressed: bool,
    /// Bytes taken from the input as it is stored.
    stored: Arc<AtomicU64>,
    /// Bytes given out.
    offset: u64,
}

enum Bytes {
    Object { object: Arc<dyn Object>, at: u64 },
    Stream(Box<dyn io::Read + Send>),
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Bytes::Object { object, .. } => object.fmt(f),
            Bytes::Stream(_) => f.write_str("Stream"),
        }
    }
}

impl Source {
    /// Appends up to `bytes_max` bytes. None: the input has ended.
    ///
    /// # Errors
    /// [`Error::Storage`], or [`Error::Stream`] for standard input and what cannot be decompressed.
    pub(crate) fn read(&mut self, buf: &mut Vec<u8>, bytes_max: usize) -> Result<Option<usize>> {
        let len = buf.len();
        buf.resize(len + bytes_max, 0);
        let read = match &mut self.bytes {
            Bytes::Object { object, at } => {
                let read = read_object(object.as_ref(), at, &mut buf[len..])?;
                self.stored.store(*at, Ordering::Relaxed);
                read
            }
            Bytes::Stream(stream) => {
                let failed = |source| stream_error(&self.name, self.offset, source);
                read_stream(stream.as_mut(), &mut buf[len..]).map_err(failed)?
            }
        };
        buf.truncate(len + read);
        self.offset += read as u64;
        Ok((read > 0).then_some(read))
    }

    /// Bytes taken from the input so far, as it is stored.
    pub(crate) fn stored_bytes(&self) -> u64 {
        self.stored.load(Ordering::Relaxed)
    }
}

/// Fills the buffer from an object, or what is left of it, in requests that may run side by side.
fn read_object(object: &dyn Object, at: &mut u64, buf: &mut [u8]) -> storage::Result<usize> {
    let len = (object.len_bytes() - *at).min(buf.len() as u64) as usize; // fits: at most the buffer
    let offsets = (*at..).step_by(REQUEST_BYTES);
    let chunks = buf[..len].chunks_mut(REQUEST_BYTES);
    let mut reads: Vec<_> =
        offsets.zip(chunks).map(|(offset, buf)| storage::Read { offset, buf }).collect();
    object.read_many(&mut reads)?;
    *at += len as u64;
    Ok(len)
}

/// Fills the buffer from a stream, or what is left of it.
fn read_stream(stream: &mut dyn io::Read, buf: &mut [u8]) -> io::Result<usize> {
    let mut len = 0;
    while len < buf.len() {
        match stream.read(&mut buf[len..]) {
            Ok(0) => break,
            Ok(read) => len += read,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(len)
}

/// A decoder hands on what its own input said, wrapped.
fn stream_error(input: &str, offset: u64, source: io::Error) -> Error {
    let input = input.to_owned();
    match source.downcast::<storage::Error>() {
        Ok(error) => Error::Storage(error),
        Err(source) => Error::Stream { input, offset, source },
    }
}

/// An object as the reader that decoders want.
struct ObjectRead {
    object: Arc<dyn Object>,
    at: u64,
}

impl io::Read for ObjectRead {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        read_object(self.object.as_ref(), &mut self.at, buf).map_err(io::Error::other)
    }
}

/// Counts what passes.
struct Counted<R> {
    inner: R,
    count: Arc<AtomicU64>,
}

impl<R: io::Read> io::Read for Counted<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buf)?;
        self.count.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}
