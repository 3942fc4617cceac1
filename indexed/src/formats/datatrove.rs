//! datatrove's `X.ds`, bare tokens of 16 or 32 bits, with `X.ds.index`, where each document ends:
//! u64 in tokens; and with `X.ds.metadata`, text of three lines: the tokenizer, `|` and the bytes
//! of a token; the count of tokens; that count for people. Its shuffler writes no index. A mask of
//! losses (`X.ds.loss`) is not read.

use std::sync::Arc;

use storage::{Key, Object, Storage};

use super::boundaries::Boundaries;
use super::column::{Column, ColumnType};
use super::header::check_asked;
use super::source::{TokenRun, TokenSource};
use super::{Format, ReadOptions, raw, whole_tokens};
use crate::mmididx::idx::{END_OF_FILE, malformed};
use crate::{Dtype, FormatRule, Result};

/// Far more than the three lines have.
const METADATA_BYTES_MAX: u64 = 64 << 10;

/// What `X.ds.metadata` has.
struct Metadata {
    file: String,
    /// Bytes of a token; older versions do not write them.
    item_bytes: Option<u64>,
    tokens: i64,
}

pub(super) fn open(
    store: &Arc<dyn Storage>,
    prefix: &Key,
    options: &ReadOptions,
) -> Result<TokenSource> {
    let object = store.open(&prefix.with_suffix(".ds")?)?;
    let index = if_there(store, &prefix.with_suffix(".ds.index")?)?;
    let metadata = if_there(store, &prefix.with_suffix(".ds.metadata")?)?;
    let metadata = metadata.map(|object| Metadata::read(&*object)).transpose()?;
    let (tokens, marks) = match (index, &metadata) {
        (Some(index), _) => {
            let ends = ends(&index)?;
            let tokens = if ends.count() == 0 { 0 } else { ends.get(ends.count() - 1)? };
            (tokens, Boundaries::Ends(ends))
        }
        // Written without an index, it is a stream.
        (None, Some(metadata)) => (metadata.tokens, Boundaries::After(options.eod)),
        (None, None) => {
            return raw::stream(&object, store.display(prefix), Format::Datatrove, options, None);
        }
    };
    let (file, bytes) = (object.display(), object.len_bytes());
    let recorded = metadata.as_ref().and_then(Metadata::dtype);
    let dtype = of_size(&file, bytes, tokens, options.dtype.or(recorded))?;
    if let Some(metadata) = &metadata {
        metadata.check(&file, dtype, tokens)?;
    }
    check_asked(&file, dtype, options.dtype)?;
    whole_tokens(&file, bytes, dtype)?;
    Ok(TokenSource {
        format: Format::Datatrove,
        display: store.display(prefix),
        dtype,
        runs: vec![TokenRun { object, bytes: 0..bytes }],
        marks,
        has_modes: false,
    })
}

fn if_there(store: &Arc<dyn Storage>, key: &Key) -> Result<Option<Arc<dyn Object>>> {
    match store.open(key) {
        Err(storage::Error::NotFound { .. }) => Ok(None),
        found => Ok(Some(found?)),
    }
}

fn ends(index: &Arc<dyn Object>) -> Result<Column> {
    let len = index.len_bytes();
    if !len.is_multiple_of(8) {
        let (fault, expected) = (FormatRule::TooShort, "a multiple of 8 bytes");
        return Err(malformed(&index.display(), len as usize, fault, END_OF_FILE, expected));
    }
    Column::new(index, 0, len / 8, ColumnType::I64)
}

impl Metadata {
    fn read(object: &dyn Object) -> Result<Self> {
        let (file, len) = (object.display(), object.len_bytes());
        let bad = |found: String, expected: &str| {
            malformed(&file, 0, FormatRule::Header, found, expected)
        };
        if len > METADATA_BYTES_MAX {
            return Err(bad(format!("{len} bytes"), "three lines of text"));
        }
        let mut bytes = vec![0; len as usize]; // fits: 64 KiB at most
        object.read_many(&mut [storage::RangeRead { offset: 0, buf: &mut bytes }])?;
        let text = String::from_utf8_lossy(&bytes);
        let (tokenizer, rest) = text.split_once('\n').unwrap_or((&text, ""));
        let count = rest.lines().next().unwrap_or("");
        let tokens = count.trim().parse().ok().filter(|&tokens: &i64| tokens >= 0);
        let tokens =
            tokens.ok_or_else(|| bad(format!("{count:?}"), "a count in its second line"))?;
        let item_bytes = match tokenizer.rsplit_once('|') {
            None => None,
            Some((_, width)) => Some(match width.trim() {
                "2" => 2,
                "4" => 4,
                other => return Err(bad(format!("{other:?}"), "2 or 4 bytes per token")),
            }),
        };
        Ok(Metadata { file, item_bytes, tokens })
    }

    fn dtype(&self) -> Option<Dtype> {
        self.item_bytes.map(|bytes| if bytes == 4 { Dtype::U32 } else { Dtype::U16 })
    }

    /// Refuses metadata of other tokens than those of the file and its index.
    fn check(&self, file: &str, dtype: Dtype, tokens: i64) -> Result<()> {
        let item_bytes = self.item_bytes.unwrap_or(dtype.item_bytes());
        if (item_bytes, self.tokens) == (dtype.item_bytes(), tokens) {
            return Ok(());
        }
        let found = format!("{} tokens of {item_bytes} bytes", self.tokens);
        let expected = format!("{tokens} tokens of {} bytes as in {file}", dtype.item_bytes());
        Err(malformed(&self.file, 0, FormatRule::Header, found, expected))
    }
}

/// The count and the bytes of a token, as datatrove's merger reads them.
pub(super) fn metadata_text(dtype: Dtype, tokens: u64) -> String {
    format!("unknown|{}\n{tokens}\n{tokens} T", dtype.item_bytes())
}

/// No field gives the width of a token; it follows from the bytes and the number of tokens.
pub(super) fn of_size(file: &str, bytes: u64, tokens: i64, asked: Option<Dtype>) -> Result<Dtype> {
    let fits =
        |dtype: &Dtype| i128::from(bytes) == i128::from(tokens) * i128::from(dtype.item_bytes());
    let mut candidates = asked.into_iter().chain([Dtype::U16, Dtype::U32]);
    candidates.find(fits).ok_or_else(|| {
        let expected = format!("{tokens} tokens of 2 or 4 bytes as in its index");
        malformed(file, bytes as usize, FormatRule::BinTooShort, END_OF_FILE, expected)
    })
}
