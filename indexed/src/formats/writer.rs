//! Writing token files of any format that is written.

use std::sync::Arc;

use storage::{FileEntry, Key, Storage, Upload};

use super::source::{Sink, TokenSource};
use super::zip::ZipWriter;
use super::{Census, Format, unfit};
use crate::cache::npy::{self, Descr};
use crate::mmididx::length_log::{Event, LengthLog};
use crate::{Builder, Dtype, Error, Result};

/// Small pieces are gathered to writes of this size.
const WRITE_BYTES: usize = 1 << 20;

/// How to write.
#[derive(Clone, Copy, Debug, Default)]
pub struct WriteOptions {
    /// The type of tokens. Default: the source's, or the nearest that the format has.
    pub dtype: Option<Dtype>,
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WriteReport {
    /// The files, the one that makes them complete last.
    pub files: Vec<FileEntry>,
    /// The type of their tokens.
    pub dtype: Dtype,
    /// Documents in them.
    pub documents: u64,
    /// Documents that the format has no place for, as they hold no token.
    pub documents_dropped: u64,
    /// Sequences in them.
    pub sequences: u64,
    /// Tokens in them.
    pub tokens: u64,
}

/// Token files being written: a [`Sink`] in the type of its source. None is visible before
/// [`Writer::finish`], and a writer that is dropped leaves nothing behind.
#[derive(Debug)]
pub struct Writer {
    store: Arc<dyn Storage>,
    recode: Recode,
    out: Out,
    counts: Counts,
}

/// What came so far.
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
        /// What the header promised.
        tokens_due: Option<u64>,
    },
    Paddle {
        tokens: Stream,
        tokens_due: u64,
        index: Stream,
        /// Tokens of each sentence, and where documents end.
        outline: Box<LengthLog>,
    },
}

impl Writer {
    /// Begins files of a format for all that a source has.
    ///
    /// # Errors
    /// [`Error::BadSetting`] for a format that is not written, or a type that it has not;
    /// [`Error::NotTokens`]; [`Error::Storage`], also if a file exists.
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
            Format::NanoGpt => Out::Flat { tokens: begin(".bin")?, ends: None, tokens_due: None },
            Format::Datatrove => {
                let ends = Some(begin(".ds.index")?);
                Out::Flat { tokens: begin(".ds")?, ends, tokens_due: None }
            }
            Format::Yuan => {
                let (tokens, due) = npy_stream(begin(".npy")?, source, to)?;
                Out::Flat { tokens, ends: None, tokens_due: Some(due) }
            }
            Format::Paddle => {
                let index = begin("_idx.npz")?;
                let (tokens, tokens_due) = npy_stream(begin("_ids.npy")?, source, to)?;
                let outline = LengthLog::new(store, prefix.with_suffix("_idx.npz.outline")?);
                Out::Paddle { tokens, tokens_due, index, outline: Box::new(outline) }
            }
            Format::Tntidx | Format::Dolma | Format::Cpm2 | Format::TfRecord => {
                return Err(unfit("--to", format.name(), "a format that can be written"));
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
            Out::Flat { tokens, ends, tokens_due } => {
                check_due(&recode.file, tokens_due, counts.tokens)?;
                let streams = [Some(tokens), ends].into_iter().flatten();
                finish_all(store.as_ref(), streams.map(Stream::flush).collect::<Result<_>>()?)?
            }
            Out::Paddle { tokens, tokens_due, mut index, mut outline } => {
                check_due(&recode.file, Some(tokens_due), counts.tokens)?;
                write_paddle_index(&mut index, &mut outline)?;
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
            Out::Paddle { outline, .. } => {
                if i32::try_from(len).is_err() {
                    let file = self.recode.file.clone();
                    return Err(Error::SequenceTooLong { file, tokens: len });
                }
                outline.push_sequence(len)?;
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
            Out::Paddle { outline, .. } => outline.end_document(),
        }
        self.counts.documents += 1;
        Ok(())
    }
}

/// Tokens of one type to another.
#[derive(Debug)]
struct Recode {
    from: Dtype,
    to: Dtype,
    /// As messages name the output.
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

/// The type that a format is written in.
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
    Err(unfit("dtype", dtype.to_string(), format!("{} for {format}", names.join(" or "))))
}

/// An array whose header says at the start how many tokens will come.
fn npy_stream(mut stream: Stream, source: &TokenSource, dtype: Dtype) -> Result<(Stream, u64)> {
    let tokens = match source.token_count() {
        Some(tokens) => tokens,
        None => Census::take(source, None)?.tokens,
    };
    let descr = if dtype == Dtype::U16 { Descr::U16 } else { Descr::I32 };
    stream.write(&npy::header(descr, &[tokens]))?;
    Ok((stream, tokens))
}

fn check_due(file: &str, expected: Option<u64>, found: u64) -> Result<()> {
    match expected {
        Some(expected) if expected != found => {
            let expected = format!("{expected} as in the files of {file}");
            Err(unfit("token count", found.to_string(), expected))
        }
        _ => Ok(()),
    }
}

fn write_paddle_index(index: &mut Stream, outline: &mut LengthLog) -> Result<()> {
    let counts = outline.counts();
    let (lens, docs) = (counts.sequences, counts.documents + 1);
    let mut zip = ZipWriter::default();
    let lens_npy = npy::header(Descr::I32, &[lens]);
    let docs_npy = npy::header(Descr::I64, &[docs]);
    zip.member(index, "lens.npy", lens_npy.len() as u64 + 4 * lens, |out| {
        out.write(&lens_npy)?;
        let mut reader = outline.reader()?;
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
        let mut reader = outline.reader()?;
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

/// Where bytes go.
pub(super) trait Write {
    fn write(&mut self, bytes: &[u8]) -> Result<()>;
}

/// An upload with a buffer before it.
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

/// Finishes all, or takes back those that were finished before the one that failed.
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
