//! Writes token files of every format that is not read only.

use std::sync::Arc;

use storage::{FileEntry, Key, Storage, Upload};

use super::datatrove::metadata_text;
use super::source::{Sink, TokenSource};
use super::zip::ZipWriter;
use super::{Census, Format, unsupported};
use crate::cache::npy::{self, Descr};
use crate::mmididx::length_log::{Event, LengthLog};
use crate::{Builder, Dtype, Error, Result};

/// Size of the writes.
const WRITE_BYTES: usize = 1 << 20;

/// Settings of a writer.
#[derive(Clone, Copy, Debug, Default)]
pub struct WriteOptions {
    /// The type of tokens. Default: that of the source, or the nearest type of the format.
    pub dtype: Option<Dtype>,
}

/// Files and counts of the output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WriteReport {
    /// The files. The last one makes the others complete.
    pub files: Vec<FileEntry>,
    /// The type of their tokens.
    pub dtype: Dtype,
    /// Documents in them.
    pub documents: u64,
    /// Documents without a token, which the format cannot represent.
    pub documents_dropped: u64,
    /// Sequences in them.
    pub sequences: u64,
    /// Tokens in them.
    pub tokens: u64,
}

/// Token files being written: a [`Sink`] in the type of its source. No file is visible before
/// [`Writer::finish`], and a dropped writer leaves no file.
#[derive(Debug)]
pub struct Writer {
    store: Arc<dyn Storage>,
    recode: Recode,
    out: Out,
    counts: Counts,
}

/// Counts so far.
#[derive(Debug, Default)]
struct Counts {
    documents: u64,
    documents_dropped: u64,
    sequences: u64,
    tokens: u64,
    sequence_tokens: u64,
    document_tokens: u64,
}

#[derive(Debug)]
enum Out {
    Pair(Box<Builder>),
    Flat {
        tokens: Stream,
        /// Where each document ends.
        ends: Option<Stream>,
        /// The bytes of a token and the token count, for datatrove.
        metadata: Option<Stream>,
        /// The token count in the header.
        tokens_expected: Option<u64>,
    },
    Paddle {
        tokens: Stream,
        tokens_expected: u64,
        index: Stream,
        /// Tokens of each sentence, and where documents end.
        length_log: Box<LengthLog>,
    },
}

impl Writer {
    /// Creates files of a format for the content of a source.
    ///
    /// # Errors
    /// [`Error::BadSetting`] for a read-only format, or a type that it lacks; [`Error::NotTokens`];
    /// [`Error::Storage`], also if a file exists.
    pub fn create(
        store: &Arc<dyn Storage>,
        prefix: &Key,
        format: Format,
        source: &TokenSource,
        options: &WriteOptions,
    ) -> Result<Self> {
        let from = source.dtype();
        let to = dtype_for(format, from, options.dtype)?;
        if from != to && !from.is_integer() {
            return Err(Error::NotTokens { file: source.display().to_owned(), dtype: from });
        }
        let begin = |suffix: &str| Stream::begin(store, &prefix.with_suffix(suffix)?);
        let out = match format {
            Format::Mmididx => {
                let builder = match source.has_modes() {
                    true => Builder::create_multimodal(store, prefix, to)?,
                    false => Builder::create(store, prefix, to)?,
                };
                Out::Pair(Box::new(builder))
            }
            Format::NanoGpt => {
                let tokens = begin(".bin")?;
                Out::Flat { tokens, ends: None, metadata: None, tokens_expected: None }
            }
            Format::Datatrove => {
                let (ends, metadata) = (begin(".ds.index")?, begin(".ds.metadata")?);
                let (ends, metadata) = (Some(ends), Some(metadata));
                Out::Flat { tokens: begin(".ds")?, ends, metadata, tokens_expected: None }
            }
            Format::Yuan => {
                let (tokens, expected) = npy_stream(begin(".npy")?, source, to)?;
                let tokens_expected = Some(expected);
                Out::Flat { tokens, ends: None, metadata: None, tokens_expected }
            }
            Format::Paddle => {
                let index = begin("_idx.npz")?;
                let (tokens, tokens_expected) = npy_stream(begin("_ids.npy")?, source, to)?;
                let length_log = LengthLog::new(store, prefix.with_suffix("_idx.npz.outline")?);
                Out::Paddle { tokens, tokens_expected, index, length_log: Box::new(length_log) }
            }
            Format::Tntidx | Format::Dolma | Format::Cpm2 | Format::TfRecord => {
                return Err(unsupported("--to", format.name(), "a format that can be written"));
            }
        };
        let recode = Recode { from, to, file: store.display(prefix), ..Recode::default() };
        Ok(Writer { store: Arc::clone(store), recode, out, counts: Counts::default() })
    }

    /// Makes all files durable and visible.
    ///
    /// # Errors
    /// [`Error::Storage`]: no file exists then, unless it is [`Error::LeftBehind`].
    pub fn finish(self) -> Result<WriteReport> {
        let Writer { store, recode, out, counts } = self;
        let files = match out {
            Out::Pair(builder) => {
                let built = builder.finish()?;
                built.files().to_vec()
            }
            Out::Flat { tokens, ends, mut metadata, tokens_expected } => {
                check_token_count(&recode.file, tokens_expected, counts.tokens)?;
                if let Some(metadata) = &mut metadata {
                    metadata.write(metadata_text(recode.to, counts.tokens).as_bytes())?;
                }
                let streams = [Some(tokens), ends, metadata].into_iter().flatten();
                finish_all(store.as_ref(), streams.map(Stream::flush).collect::<Result<_>>()?)?
            }
            Out::Paddle { tokens, tokens_expected, mut index, mut length_log } => {
                check_token_count(&recode.file, Some(tokens_expected), counts.tokens)?;
                write_paddle_index(&mut index, &mut length_log)?;
                finish_all(store.as_ref(), vec![tokens.flush()?, index.flush()?])?
            }
        };
        Ok(WriteReport {
            files,
            dtype: recode.to,
            documents: counts.documents,
            documents_dropped: counts.documents_dropped,
            sequences: counts.sequences,
            tokens: counts.tokens,
        })
    }
}

impl Sink for Writer {
    fn tokens(&mut self, bytes: &[u8]) -> Result<()> {
        let item_bytes = self.recode.to.item_bytes();
        let bytes = self.recode.apply(bytes)?;
        let tokens = bytes.len() as u64 / item_bytes;
        self.counts.sequence_tokens += tokens;
        match &mut self.out {
            Out::Pair(builder) => builder.add_part(bytes)?,
            Out::Flat { tokens, .. } | Out::Paddle { tokens, .. } => tokens.write(bytes)?,
        }
        Ok(())
    }

    fn end_sequence(&mut self, mode: i8) -> Result<()> {
        let len = std::mem::take(&mut self.counts.sequence_tokens);
        match &mut self.out {
            Out::Pair(builder) => builder.end_parts(len, mode)?,
            Out::Flat { .. } => {}
            Out::Paddle { .. } if len == 0 => return Ok(()),
            Out::Paddle { length_log, .. } => {
                if i32::try_from(len).is_err() {
                    let file = self.recode.file.clone();
                    return Err(Error::SequenceTooLong { file, tokens: len });
                }
                length_log.push_sequence(len)?;
            }
        }
        self.counts.sequences += 1;
        self.counts.tokens += len;
        self.counts.document_tokens += len;
        Ok(())
    }

    fn end_document(&mut self) -> Result<()> {
        let tokens = std::mem::take(&mut self.counts.document_tokens);
        match &mut self.out {
            Out::Pair(builder) => builder.end_document()?,
            Out::Flat { ends: Some(ends), .. } => ends.write(&self.counts.tokens.to_le_bytes())?,
            Out::Flat { ends: None, .. } => {}
            Out::Paddle { .. } if tokens == 0 => {
                self.counts.documents_dropped += 1;
                return Ok(());
            }
            Out::Paddle { length_log, .. } => length_log.end_document(),
        }
        self.counts.documents += 1;
        Ok(())
    }
}

/// Converts tokens from one type to another.
#[derive(Debug)]
struct Recode {
    from: Dtype,
    to: Dtype,
    /// The output in messages.
    file: String,
    wide: Vec<i64>,
    ids: Vec<u32>,
    out: Vec<u8>,
}

impl Default for Recode {
    fn default() -> Self {
        let (wide, ids, out) = (Vec::new(), Vec::new(), Vec::new());
        Recode { from: Dtype::U16, to: Dtype::U16, file: String::new(), wide, ids, out }
    }
}

impl Recode {
    fn apply<'a>(&'a mut self, bytes: &'a [u8]) -> Result<&'a [u8]> {
        if self.from == self.to {
            return Ok(bytes);
        }
        self.wide.resize(bytes.len() / self.from.item_bytes() as usize, 0); // fits: at most 8
        self.from.decode_i64(bytes, &mut self.wide);
        self.ids.clear();
        let max = self.to.token_max();
        for &id in &self.wide {
            let fits = u32::try_from(id).ok().filter(|&id| id <= max);
            self.ids.push(fits.ok_or_else(|| Error::IdOutside {
                file: self.file.clone(),
                id,
                dtype: self.to,
            })?);
        }
        self.out.clear();
        self.to.encode(&self.ids, &mut self.out);
        Ok(&self.out)
    }
}

/// The token type in which a format is written.
fn dtype_for(format: Format, from: Dtype, asked: Option<Dtype>) -> Result<Dtype> {
    let has: &[Dtype] = match format {
        Format::Mmididx => &[
            Dtype::U8,
            Dtype::I8,
            Dtype::I16,
            Dtype::I32,
            Dtype::I64,
            Dtype::F64,
            Dtype::F32,
            Dtype::U16,
        ],
        Format::Datatrove => &[Dtype::U16, Dtype::U32],
        Format::NanoGpt => &[Dtype::U16],
        _ => &[Dtype::U16, Dtype::I32],
    };
    let wide = *has.iter().find(|dtype| dtype.item_bytes() == 4).unwrap_or(&Dtype::U16);
    let near = match from {
        from if has.contains(&from) => from,
        Dtype::U8 | Dtype::I8 | Dtype::I16 => Dtype::U16,
        _ => wide,
    };
    let dtype = asked.unwrap_or(near);
    if has.contains(&dtype) {
        return Ok(dtype);
    }
    let names: Vec<String> = has.iter().map(Dtype::to_string).collect();
    Err(unsupported("dtype", dtype.to_string(), format!("{} for {format}", names.join(" or "))))
}

/// An array. Its header has the token count before the tokens.
fn npy_stream(mut stream: Stream, source: &TokenSource, dtype: Dtype) -> Result<(Stream, u64)> {
    let tokens = match source.token_count() {
        Some(tokens) => tokens,
        None => Census::take(source, None)?.tokens,
    };
    let descr = if dtype == Dtype::U16 { Descr::U16 } else { Descr::I32 };
    stream.write(&npy::header(descr, &[tokens]))?;
    Ok((stream, tokens))
}

fn check_token_count(file: &str, expected: Option<u64>, found: u64) -> Result<()> {
    match expected {
        Some(expected) if expected != found => {
            let expected = format!("{expected} as in the files of {file}");
            Err(unsupported("token count", found.to_string(), expected))
        }
        _ => Ok(()),
    }
}

fn write_paddle_index(index: &mut Stream, length_log: &mut LengthLog) -> Result<()> {
    let counts = length_log.counts();
    let (lens, docs) = (counts.sequences, counts.documents + 1);
    let mut zip = ZipWriter::default();
    let lens_npy = npy::header(Descr::I32, &[lens]);
    let docs_npy = npy::header(Descr::I64, &[docs]);
    zip.member(index, "lens.npy", lens_npy.len() as u64 + 4 * lens, |out| {
        out.write(&lens_npy)?;
        let mut reader = length_log.reader()?;
        while let Some(event) = reader.next()? {
            if let Event::Sequence(tokens, _) = event {
                out.write(&(tokens as u32).to_le_bytes())?; // fits: an i32, as was checked
            }
        }
        Ok(())
    })?;
    zip.member(index, "docs.npy", docs_npy.len() as u64 + 8 * docs, |out| {
        out.write(&docs_npy)?;
        out.write(&0_u64.to_le_bytes())?;
        let mut reader = length_log.reader()?;
        let mut sentences = 0_u64;
        while let Some(event) = reader.next()? {
            sentences += u64::from(matches!(event, Event::Sequence(..)));
            if matches!(event, Event::DocumentEnd | Event::Sequence(_, true)) {
                out.write(&sentences.to_le_bytes())?;
            }
        }
        Ok(())
    })?;
    zip.end(index)
}

/// A destination of bytes.
pub(super) trait Write {
    fn write(&mut self, bytes: &[u8]) -> Result<()>;
}

/// A buffered upload.
#[derive(Debug)]
pub(super) struct Stream {
    key: Key,
    upload: Box<dyn Upload>,
    pending: Vec<u8>,
}

impl Stream {
    fn begin(store: &Arc<dyn Storage>, key: &Key) -> Result<Self> {
        let upload = store.create(key, 0)?;
        Ok(Stream { key: key.clone(), upload, pending: Vec::new() })
    }

    fn flush(mut self) -> Result<(Key, Box<dyn Upload>)> {
        self.upload.write(&self.pending)?;
        Ok((self.key, self.upload))
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        if bytes.len() >= WRITE_BYTES && self.pending.is_empty() {
            return Ok(self.upload.write(bytes)?);
        }
        self.pending.extend_from_slice(bytes);
        if self.pending.len() >= WRITE_BYTES {
            self.upload.write(&self.pending)?;
            self.pending.clear();
        }
        Ok(())
    }
}

/// Finishes all uploads; if one fails, deletes those that were finished before it.
pub(crate) fn finish_all(
    store: &dyn Storage,
    uploads: Vec<(Key, Box<dyn Upload>)>,
) -> Result<Vec<FileEntry>> {
    let mut files = Vec::new();
    let mut keys: Vec<Key> = Vec::new();
    for (key, upload) in uploads {
        match upload.finish() {
            Ok(file) => files.push(file),
            Err(source) => {
                for key in &keys {
                    if let Err(cleanup) = store.delete(key) {
                        let (source, cleanup) = (Box::new(source), Box::new(cleanup));
                        let file = store.display(key);
                        return Err(Error::LeftBehind { file, source, cleanup });
                    }
                }
                return Err(source.into());
            }
        }
        keys.push(key);
    }
    Ok(files)
}
