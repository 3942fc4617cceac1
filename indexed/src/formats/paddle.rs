//! Paddle's `P_ids.npy` and `P_idx.npz`, or the older `P_ids.npz` with both in it.
//!
//! The ids are one array. `lens` has the tokens of each sentence, int32; `docs`, int64, the running
//! count of sentences from 0 on. Documents without a token are left out.

use std::sync::Arc;

use storage::{Key, Object, RangeRead, Storage};

use super::boundaries::{Boundaries, Lengths};
use super::column::{Column, ColumnType};
use super::source::{TokenRun, TokenSource};
use super::zip::{self, Member};
use super::{Format, raw};
use crate::cache::npy::{Descr, Shape};
use crate::mmididx::idx::malformed;
use crate::{FormatRule, Result};

pub(super) fn open(store: &Arc<dyn Storage>, prefix: &Key) -> Result<TokenSource> {
    let ids = match store.open(&prefix.with_suffix("_ids.npy")?) {
        Err(storage::Error::NotFound { .. }) => None,
        found => Some(found?),
    };
    // The older form is one file.
    let index = prefix.with_suffix(if ids.is_some() { "_idx.npz" } else { "_ids.npz" })?;
    let index = store.open(&index)?;
    let members = zip::members(&index)?;
    let find = |name: &str| members.iter().find(|member| member.name == name);
    let lens = find("lens.npy").ok_or_else(|| missing(&index, "lens"))?;
    let lengths = column(&index, lens)?;
    let documents = find("docs.npy").map(|docs| column(&index, docs)).transpose()?;
    let tokens = match (ids, find("ids.npy")) {
        (Some(ids), _) => array(&ids, 0, ids.len_bytes())?,
        (None, Some(ids)) => {
            zip::verify(&index, ids)?;
            array(&index, ids.offset, ids.bytes)?
        }
        (None, None) => return Err(missing(&index, "ids")),
    };
    let dtype = raw::dtype_of(&tokens.0, tokens.1)?;
    Ok(TokenSource {
        format: Format::Paddle,
        display: store.display(prefix),
        dtype,
        runs: vec![tokens.0],
        marks: Boundaries::Lengths(Lengths { lengths, starts: None, documents, modes: None }),
        has_modes: false,
    })
}

fn missing(index: &Arc<dyn Object>, name: &str) -> crate::Error {
    let (found, expected) = ("a ZIP file without it", format!("member {name}.npy"));
    malformed(&index.display(), 0, FormatRule::Zip, found, expected)
}

/// A member that is a table, with its checksum verified.
fn column(object: &Arc<dyn Object>, member: &Member) -> Result<Column> {
    zip::verify(object, member)?;
    let (run, descr) = array(object, member.offset, member.bytes)?;
    let entry = match descr {
        Descr::I32 => ColumnType::I32,
        Descr::I64 | Descr::U64 => ColumnType::I64,
        other => {
            let found = format!("{} in member {}", other.name(), member.name);
            let (at, expected) = (member.offset as usize, "elements of <i4 or <i8");
            return Err(malformed(&object.display(), at, FormatRule::Npy, found, expected));
        }
    };
    let count = (run.bytes.end - run.bytes.start) / entry.bytes();
    Column::new(object, run.bytes.start, count, entry)
}

/// An array of one axis in a range of a file.
pub(super) fn array(
    object: &Arc<dyn Object>,
    offset: u64,
    bytes: u64,
) -> Result<(TokenRun, Descr)> {
    let (run, descr, axes) = any_array(object, offset, bytes)?;
    if axes.len() != 1 {
        let found = format!("an array of shape {axes:?}");
        return Err(malformed(
            &object.display(),
            offset as usize,
            FormatRule::Npy,
            found,
            "an array of one axis",
        ));
    }
    Ok((run, descr))
}

/// The same with one axis or two, and its shape.
pub(super) fn any_array(
    object: &Arc<dyn Object>,
    offset: u64,
    bytes: u64,
) -> Result<(TokenRun, Descr, Vec<u64>)> {
    let mut start = vec![0; bytes.min(Shape::READ_BYTES) as usize]; // fits: a header at most
    object.read_many(&mut [RangeRead { offset, buf: &mut start }])?;
    let Shape { descr, shape, data_at } = Shape::parse(&start, bytes, &object.display())?;
    let run = TokenRun { object: Arc::clone(object), bytes: offset + data_at..offset + bytes };
    Ok((run, descr, shape))
}
