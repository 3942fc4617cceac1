//! datatrove's `X.ds`, bare tokens of 16 or 32 bits, and `X.ds.index`, where each document ends:
//! u64 in tokens. A mask of losses (`X.ds.loss`) is not read.

use std::sync::Arc;

use storage::{Key, Storage};

use super::boundaries::Boundaries;
use super::column::{Column, ColumnType};
use super::source::{TokenRun, TokenSource};
use super::{Format, ReadOptions, whole_tokens};
use crate::mmididx::idx::{END_OF_FILE, malformed};
use crate::{Dtype, FormatRule, Result};

pub(super) fn open(
    store: &Arc<dyn Storage>,
    prefix: &Key,
    options: &ReadOptions,
) -> Result<TokenSource> {
    let object = store.open(&prefix.with_suffix(".ds")?)?;
    let index = match store.open(&prefix.with_suffix(".ds.index")?) {
        Err(storage::Error::NotFound { .. }) => None,
        found => Some(found?),
    };
    let bytes = object.len_bytes();
    let (dtype, marks) = match index {
        // Written without an index, it is a stream.
        None => (options.dtype.unwrap_or(Dtype::U16), Boundaries::After(options.eod)),
        Some(index) => {
            let len = index.len_bytes();
            if !len.is_multiple_of(8) {
                let (fault, expected) = (FormatRule::TooShort, "a multiple of 8 bytes");
                let file = index.display();
                return Err(malformed(&file, len as usize, fault, END_OF_FILE, expected));
            }
            let ends = Column::new(&index, 0, len / 8, ColumnType::I64)?;
            let tokens = if ends.count() == 0 { 0 } else { ends.get(ends.count() - 1)? };
            let file = object.display();
            (of_size(&file, bytes, tokens, options.dtype)?, Boundaries::Ends(ends))
        }
    };
    whole_tokens(&object.display(), bytes, dtype)?;
    Ok(TokenSource {
        format: Format::Datatrove,
        display: store.display(prefix),
        dtype,
        runs: vec![TokenRun { object, bytes: 0..bytes }],
        marks,
        has_modes: false,
    })
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
