//! Dolma's `part-*.npy`, bare tokens in spite of the name, and beside each a `.csv.gz` with a line
//! for every document: start and end in tokens, then its id, source and position. OLMo-core reads
//! such an `.npy` alone; its type is then an option, as no file has it.

use std::io::{self, BufRead, BufReader};
use std::sync::Arc;

use storage::{Key, Object, Storage};

use super::boundaries::Boundaries;
use super::datatrove::of_size;
use super::header::check_asked;
use super::members::GzipReader;
use super::source::{TokenRun, TokenSource};
use super::tfrecord::FromStart;
use super::{Format, ReadOptions, raw, unsupported};
use crate::mmididx::idx::malformed;
use crate::{Error, FormatRule, Result};

/// Compressed bytes of one read.
const READ_BYTES: usize = 256 << 10;
/// The longest line that is accepted: ids and paths are far shorter.
const LINE_BYTES_MAX: u64 = 1 << 20;

/// The table of one part.
#[derive(Debug)]
pub(super) struct Spans {
    csv: Arc<dyn Object>,
}

pub(super) fn open(
    store: &Arc<dyn Storage>,
    key: &Key,
    options: &ReadOptions,
) -> Result<TokenSource> {
    let mut parts = Vec::new();
    match store.open(&key.with_suffix(".npy")?) {
        Ok(object) if is_alone(store, key)? => {
            // OLMo-core reads the same files without their tables, and with a type of its config.
            return raw::stream(&object, store.display(key), Format::Dolma, options, None);
        }
        Ok(_) => parts.push(key.clone()),
        Err(storage::Error::NotFound { .. }) => {
            let names = store.list_names(key)?;
            for stem in names.iter().filter_map(|name| name.strip_suffix(".npy")) {
                parts.push(key.join(stem)?);
            }
        }
        Err(error) => return Err(error.into()),
    }
    let mut runs = Vec::new();
    let mut spans = Vec::new();
    let mut dtype = None;
    for part in &parts {
        let object = store.open(&part.with_suffix(".npy")?)?;
        let table = Spans { csv: store.open(&part.with_suffix(".csv.gz")?)? };
        let bytes = object.len_bytes();
        let mut tokens = 0_u64;
        for len in table.lens()? {
            tokens = tokens.saturating_add(len?);
        }
        let tokens = i64::try_from(tokens).unwrap_or(i64::MAX);
        // A part without tokens fits any type.
        if bytes > 0 || tokens > 0 {
            let asked = options.dtype.or(dtype);
            let found = of_size(&object.display(), bytes, tokens, asked)?;
            check_asked(&object.display(), found, options.dtype)?;
            if dtype.is_some_and(|dtype| dtype != found) {
                let found = format!("{found} in {}", object.display());
                return Err(unsupported("dtype", found, "the same type in all parts"));
            }
            dtype = Some(found);
        }
        runs.push(TokenRun { object, bytes: 0..bytes });
        spans.push(table);
    }
    Ok(TokenSource {
        format: Format::Dolma,
        display: store.display(key),
        dtype: dtype.or(options.dtype).unwrap_or(crate::Dtype::U16),
        runs,
        marks: Boundaries::Spans(spans),
        has_modes: false,
    })
}

/// Whether a part has no table.
fn is_alone(store: &Arc<dyn Storage>, part: &Key) -> Result<bool> {
    match store.open(&part.with_suffix(".csv.gz")?) {
        Err(storage::Error::NotFound { .. }) => Ok(true),
        found => Ok(found.map(|_| false)?),
    }
}

impl Spans {
    /// The tokens of each document, in order and without gaps.
    pub(super) fn lens(&self) -> Result<impl Iterator<Item = Result<u64>> + 'static> {
        let file = self.csv.display();
        let from = FromStart { object: Arc::clone(&self.csv), offset: 0 };
        let text = BufReader::new(GzipReader::new(BufReader::with_capacity(READ_BYTES, from)));
        Ok(Lens { text, file, line: Vec::new(), number: 0, end: 0, done: false })
    }
}

/// The lines of a table as lengths.
struct Lens<R> {
    text: R,
    file: String,
    line: Vec<u8>,
    number: u64,
    /// Where the last document ended.
    end: u64,
    done: bool,
}

impl<R: BufRead> Iterator for Lens<R> {
    type Item = Result<u64>;

    fn next(&mut self) -> Option<Result<u64>> {
        if self.done {
            return None;
        }
        let len = self.advance();
        self.done = !matches!(len, Ok(Some(_)));
        len.transpose()
    }
}

impl<R: BufRead> Lens<R> {
    fn advance(&mut self) -> Result<Option<u64>> {
        if !self.read_record()? {
            return Ok(None);
        }
        let text = String::from_utf8_lossy(&self.line);
        let mut fields = text.split(',').map(|field| field.trim().parse::<u64>().ok());
        let (Some(Some(start)), Some(Some(end))) = (fields.next(), fields.next()) else {
            let shown: String = text.trim_end().chars().take(80).collect();
            return Err(self.bad(&format!("{shown:?}"), "`start,end,...` in tokens".to_owned()));
        };
        if start != self.end || end < start {
            let found = format!("a document from {start} to {end}");
            let expected = format!("a document from {}, the end of the one before it", self.end);
            return Err(self.bad(&found, expected));
        }
        self.end = end;
        Ok(Some(end - start))
    }

    /// One record: a line, or several where a quoted field has breaks in it.
    fn read_record(&mut self) -> Result<bool> {
        self.line.clear();
        loop {
            let room = LINE_BYTES_MAX - self.line.len() as u64;
            let read = io::Read::take(&mut self.text, room).read_until(b'\n', &mut self.line);
            let count = read.map_err(|error| {
                self.bad(&error.to_string(), "a complete gzip stream".to_owned())
            })?;
            let quotes = self.line.iter().filter(|&&byte| byte == b'"').count();
            self.number += u64::from(count > 0);
            if self.line.len() as u64 >= LINE_BYTES_MAX {
                let expected = format!("a record of less than {LINE_BYTES_MAX} bytes");
                return Err(self.bad("a longer record", expected));
            }
            if count == 0 && quotes % 2 == 1 {
                return Err(self.bad("end of file", "a closing quote".to_owned()));
            }
            if count == 0 || quotes % 2 == 0 {
                return Ok(!self.line.is_empty());
            }
        }
    }

    fn bad(&self, found: &str, expected: String) -> Error {
        let found = format!("{found} at line {}", self.number);
        malformed(&self.file, 0, FormatRule::Spans, found, expected)
    }
}
