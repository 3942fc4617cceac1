//! Files of bare tokens: nanoGPT's `.bin`, and a plain `.npy` as in Yuan's corpus.

use std::sync::Arc;

use storage::{Key, Storage};

use super::boundaries::Boundaries;
use super::source::{TokenRun, TokenSource};
use super::{Format, ReadOptions, paddle, whole_tokens};
use crate::cache::npy::Descr;
use crate::mmididx::idx::malformed;
use crate::{Dtype, FormatRule, Result};

pub(super) fn open_nanogpt(
    store: &Arc<dyn Storage>,
    prefix: &Key,
    options: &ReadOptions,
) -> Result<TokenSource> {
    let object = store.open(&prefix.with_suffix(".bin")?)?;
    let dtype = options.dtype.unwrap_or(Dtype::U16);
    whole_tokens(&object.display(), object.len_bytes(), dtype)?;
    Ok(TokenSource {
        format: Format::NanoGpt,
        display: store.display(prefix),
        dtype,
        runs: vec![TokenRun { bytes: 0..object.len_bytes(), object }],
        marks: Boundaries::After(options.eod),
        has_modes: false,
    })
}

/// With two axes each row is a document. One axis is a stream, which may be divided by a token.
pub(super) fn open_yuan(
    store: &Arc<dyn Storage>,
    prefix: &Key,
    options: &ReadOptions,
) -> Result<TokenSource> {
    let object = store.open(&prefix.with_suffix(".npy")?)?;
    let (run, descr, axes) = paddle::any_array(&object, 0, object.len_bytes())?;
    let dtype = dtype_of(&run, descr)?;
    let marks = match axes[..] {
        [rows, tokens] => Boundaries::Rows { rows, tokens },
        _ => Boundaries::After(options.eod),
    };
    let display = store.display(prefix);
    Ok(TokenSource {
        format: Format::Yuan,
        display,
        dtype,
        runs: vec![run],
        marks,
        has_modes: false,
    })
}

/// The token type of an array.
pub(super) fn dtype_of(run: &TokenRun, descr: Descr) -> Result<Dtype> {
    match descr {
        Descr::U8 => Ok(Dtype::U8),
        Descr::I16 => Ok(Dtype::I16),
        Descr::U16 => Ok(Dtype::U16),
        Descr::I32 => Ok(Dtype::I32),
        Descr::U32 => Ok(Dtype::U32),
        Descr::I64 => Ok(Dtype::I64),
        Descr::U64 => {
            let found = format!("tokens of {}", descr.name());
            let expected = "tokens of at most 63 bits";
            Err(malformed(&run.object.display(), 0, FormatRule::Npy, found, expected))
        }
    }
}
