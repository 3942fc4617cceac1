//! Checks whether the files of a cached index are the index of this dataset.
//!
//! The name of a cache depends neither on the data nor on all settings, so old files may have the
//! right name. The counts, the types, and every row of the sample index are known from the
//! dataset's lengths and the document index; the two shuffled tables must be permutations, which is
//! checked by their range and sum. The check is about half the work of building.

use crate::cache::npy::{Descr, Npy};
use crate::order::gpt_counts::Plan;
use crate::order::sample_index::walk;
use crate::{GptIndex, Lengths};

/// The fault of an index with the right shapes, if it has one.
pub(crate) fn verify(index: &GptIndex, lengths: &Lengths, plan: &Plan) -> Result<(), String> {
    let samples = plan.sample_count;
    let (start, end) = (plan.sequences.start.into(), plan.sequences.end.into());
    is_permutation("document_index", index.document_index(), start, end, plan.epochs)?;
    // fits: as many samples are in the file.
    is_permutation("shuffle_index", index.shuffle_index(), 0, samples as i64, 1)?;
    rows_match(index, lengths, plan)
}

/// The fault in the types and shapes of the arrays, if there is one.
pub(crate) fn shapes_fit(index: &GptIndex, plan: &Plan) -> Result<(), String> {
    let (samples, documents) = (plan.sample_count, plan.document_index_len());
    shape_is("document_index", index.document_index(), Descr::I32, &[documents])?;
    shape_is("sample_index", index.sample_index(), plan.sample_descr(), &[samples + 1, 2])?;
    shape_is("shuffle_index", index.shuffle_index(), plan.shuffle_descr(), &[samples])
}

pub(crate) fn shape_is(name: &str, array: &Npy, descr: Descr, shape: &[u64]) -> Result<(), String> {
    if array.descr() == descr && array.shape() == shape {
        return Ok(());
    }
    let (found, expected) = (array.descr().name(), descr.name());
    let found_shape = array.shape();
    Err(format!("expected {expected} {shape:?} in {name}, found {found} {found_shape:?}"))
}

fn is_permutation(name: &str, array: &Npy, start: i64, end: i64, times: u64) -> Result<(), String> {
    let (mut low, mut high, mut sum) = (start, end - 1, 0_i64);
    let mut observe = |value: i64| {
        (low, high) = (low.min(value), high.max(value));
        sum = sum.wrapping_add(value);
    };
    let data = array.data();
    match array.descr() {
        Descr::I32 => {
            data.as_chunks().0.iter().for_each(|item| observe(i32::from_le_bytes(*item).into()));
        }
        Descr::U32 => {
            data.as_chunks().0.iter().for_each(|item| observe(u32::from_le_bytes(*item).into()));
        }
        _ => data.as_chunks().0.iter().for_each(|item| observe(i64::from_le_bytes(*item))),
    }
    if low < start || high >= end {
        let outside = |&place: &u64| !(start..end).contains(&array.at(place));
        let place = (0..array.shape()[0])
            .find(outside)
            .expect("an entry is out of range, as checked above");
        let found = array.at(place);
        let expected = format!("numbers in {start}..{end} in {name}");
        return Err(format!("expected {expected}, found {found} in entry {place}"));
    }
    let expected =
        i128::from(times) * (i128::from(start) + i128::from(end) - 1) * i128::from(end - start) / 2;
    if sum != expected as i64 {
        return Err(format!(
            "expected a permutation with sum {expected} in {name}, found sum {sum}"
        ));
    }
    Ok(())
}

fn rows_match(index: &GptIndex, lengths: &Lengths, plan: &Plan) -> Result<(), String> {
    let (rows, documents) = (index.sample_index(), index.document_index().data().as_chunks().0);
    let (mut place, mut bad) = (0, None);
    let missing = walk(lengths, documents, &plan.rule, plan.sample_count, |document, token| {
        if bad.is_none() && (rows.at(place), rows.at(place + 1)) != (document, token) {
            bad = Some((place / 2, document, token));
        }
        place += 2;
    });
    if missing > 0 {
        let samples = plan.sample_count;
        return Err(format!("expected {samples} samples in document_index, found {missing} fewer"));
    }
    bad.map_or(Ok(()), |(row, document, token)| {
        let (expected, found) = ((document, token), (rows.at(2 * row), rows.at(2 * row + 1)));
        Err(format!("expected {expected:?} in row {row} of sample_index, found {found:?}"))
    })
}
