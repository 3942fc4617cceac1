//! Files of tokens alone: nanoGPT's `.bin`, bare or with a header of its descendants, and a plain
//! `.npy` as in Yuan's corpus.

use std::sync::Arc;

use storage::{Key, Object, Storage};

use super::boundaries::Boundaries;
use super::source::{TokenRun, TokenSource};
use super::{Format, ReadOptions, header, paddle};
use crate::cache::npy::Descr;
use crate::mmididx::idx::malformed;
use crate::{Dtype, FormatRule, Result};

/// The magic of numpy's arrays.
pub(super) const NPY: &[u8] = b"\x93NUMPY";

pub(super) fn open_nanogpt(
    store: &Arc<dyn Storage>,
    prefix: &Key,
    options: &ReadOptions,
) -> Result<TokenSource> {
    let object = store.open(&prefix.with_suffix(".bin")?)?;
    if header::start_of(&*object)?.starts_with(NPY) {
        return open_array(&object, store.display(prefix), Format::NanoGpt, options);
    }
    stream(&object, store.display(prefix), Format::NanoGpt, options, Some(Dtype::U16))
}

/// A file of tokens alone, which a token may divide into documents. Without a header, an option or
/// a `default` for its type, it is refused.
pub(super) fn stream(
    object: &Arc<dyn Object>,
    display: String,
    format: Format,
    options: &ReadOptions,
    default: Option<Dtype>,
) -> Result<TokenSource> {
    let (run, dtype) = header::open(object, options.dtype, default)?;
    let marks = Boundaries::After(options.eod);
    Ok(TokenSource { format, display, dtype, runs: vec![run], marks, has_modes: false })
}

pub(super) fn open_yuan(
    store: &Arc<dyn Storage>,
    prefix: &Key,
    options: &ReadOptions,
) -> Result<TokenSource> {
    let object = store.open(&prefix.with_suffix(".npy")?)?;
    open_array(&object, store.display(prefix), Format::Yuan, options)
}

/// With two axes each row is a document. One axis is a stream, which may be divided by a token.
fn open_array(
    object: &Arc<dyn Object>,
    display: String,
    format: Format,
    options: &ReadOptions,
) -> Result<TokenSource> {
    let (run, descr, axes) = paddle::any_array(object, 0, object.len_bytes())?;
    let dtype = dtype_of(&run, descr)?;
    header::check_asked(&object.display(), dtype, options.dtype)?;
    let marks = match axes[..] {
        [rows, tokens] => Boundaries::Rows { rows, tokens },
        _ => Boundaries::After(options.eod),
    };
    Ok(TokenSource { format, display, dtype, runs: vec![run], marks, has_modes: false })
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
