//! Batches as numpy arrays: the arrays are views of the batch's own memory.
//!
//! The last array that is dropped returns the memory to the loader, which assembles a later batch
//! in it. So a caller may keep as many batches as it likes, and nothing is copied.

#![allow(unsafe_code, reason = "numpy's view of foreign memory takes a promise about its owner")]

use feed::AnyBatch;
use loader::Recycler;
use numpy::ndarray::ArrayView;
use numpy::{Element, IntoPyArray as _, PyArray, PyArrayMethods as _};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::wait::HomeProcess;

/// The memory of a batch, which arrays keep alive.
#[pyclass(frozen, module = "feedline._feedline")]
#[derive(Debug)]
pub(crate) struct BatchMemory {
    batch: AnyBatch,
    home: Option<Recycler<AnyBatch>>,
    process: HomeProcess,
}

impl Drop for BatchMemory {
    fn drop(&mut self) {
        let Some(home) = self.home.take() else { return };
        if self.process.is_here() {
            home.recycle(std::mem::take(&mut self.batch));
        } else {
            // A thread that did not cross the fork may hold the lock of the queue, for ever.
            std::mem::forget(home);
        }
    }
}

/// The arrays of a batch by their names, in the words of Megatron's datasets. `positions` are the
/// position ids of a batch that has none of its own.
pub(crate) fn arrays_of<'py>(
    py: Python<'py>,
    batch: AnyBatch,
    home: Option<Recycler<AnyBatch>>,
    positions: &mut Option<Positions>,
) -> PyResult<Bound<'py, PyDict>> {
    let owner = Bound::new(py, BatchMemory { batch, home, process: HomeProcess::here() })?;
    let out = Arrays { owner: &owner, dict: PyDict::new(py), rows: owner.get().batch.rows() };
    match &owner.get().batch {
        AnyBatch::Lm(batch) => {
            out.rows("tokens", &batch.tokens, batch.seq_len)?;
            out.rows("labels", &batch.labels, batch.seq_len)?;
            out.rows("loss_mask", &batch.loss_mask, batch.seq_len)?;
            if batch.position_ids.is_empty() {
                let shared = Positions::of(positions, py, batch.rows, batch.seq_len)?;
                out.dict.set_item("position_ids", shared)?;
            } else {
                out.rows("position_ids", &batch.position_ids, batch.seq_len)?;
            }
            if !batch.bounds.offsets().is_empty() {
                out.flat("cu_seqlens", batch.bounds.offsets())?;
            }
        }
        AnyBatch::Spans(batch) => {
            out.rows("text_enc", &batch.encoder_tokens, batch.encoder_len)?;
            out.rows("text_dec", &batch.decoder_tokens, batch.decoder_len)?;
            out.rows("labels", &batch.labels, batch.decoder_len)?;
            out.rows("loss_mask", &batch.loss_mask, batch.decoder_len)?;
            out.rows("enc_mask", &batch.encoder_mask, batch.encoder_len)?;
            out.rows("dec_mask", &batch.decoder_mask, batch.decoder_len)?;
            out.flat("truncated", &batch.truncated)?;
        }
        AnyBatch::Triple(batch) => {
            out.rows("text_enc", &batch.encoder_tokens, batch.encoder_len)?;
            out.rows("text_dec", &batch.decoder_tokens, batch.decoder_len)?;
            out.rows("labels", &batch.labels, batch.decoder_len)?;
            out.rows("loss_mask", &batch.loss_mask, batch.decoder_len)?;
            out.rows("ctx_eod_mask", &batch.encoder_eod, batch.encoder_len)?;
            if !batch.encoder_position_ids.is_empty() {
                out.rows("enc_position_ids", &batch.encoder_position_ids, batch.encoder_len)?;
                out.rows("dec_position_ids", &batch.decoder_position_ids, batch.decoder_len)?;
            }
            if !batch.encoder_bounds.offsets().is_empty() {
                out.flat("enc_cu_seqlens", batch.encoder_bounds.offsets())?;
                out.flat("dec_cu_seqlens", batch.decoder_bounds.offsets())?;
            }
            out.flat("truncated", &batch.truncated)?;
        }
        AnyBatch::Masked(batch) => {
            out.rows("text", &batch.tokens, batch.seq_len)?;
            out.rows("types", &batch.types, batch.seq_len)?;
            out.rows("labels", &batch.labels, batch.seq_len)?;
            out.rows("loss_mask", &batch.loss_mask, batch.seq_len)?;
            out.rows("padding_mask", &batch.padding_mask, batch.seq_len)?;
            out.flat("is_random", &batch.is_random)?;
            out.flat("truncated", &batch.truncated)?;
        }
    }
    Ok(out.dict)
}

/// The arrays of one batch.
struct Arrays<'a, 'py> {
    owner: &'a Bound<'py, BatchMemory>,
    dict: Bound<'py, PyDict>,
    rows: usize,
}

impl Arrays<'_, '_> {
    /// Adds what is of each token, of the shape `[rows, len]`.
    fn rows<T: Element>(&self, name: &str, values: &[T], len: usize) -> PyResult<()> {
        let view = ArrayView::from_shape((self.rows, len), values)
            .expect("a batch has as many values as its rows have");
        self.add(name, &view)
    }

    /// Adds what is of each sample, or of the batch.
    fn flat<T: Element>(&self, name: &str, values: &[T]) -> PyResult<()> {
        self.add(name, &ArrayView::from(values))
    }

    fn add<T: Element, D: numpy::ndarray::Dimension>(
        &self,
        name: &str,
        view: &ArrayView<'_, T, D>,
    ) -> PyResult<()> {
        // SAFETY: the memory is that of `owner`, which never changes it, and frees or reuses it
        // only when the array, which keeps `owner` alive, is gone.
        let array = unsafe { PyArray::borrow_from_array(view, self.owner.clone().into_any()) };
        self.dict.set_item(name, array)
    }
}

/// The position ids 0 to `seq_len - 1` in each row: one array for all batches of a loader.
#[derive(Debug)]
pub(crate) struct Positions {
    shape: (usize, usize),
    array: Py<PyArray<i64, numpy::Ix2>>,
}

impl Positions {
    fn of<'py>(
        kept: &mut Option<Self>,
        py: Python<'py>,
        rows: usize,
        seq_len: usize,
    ) -> PyResult<Bound<'py, PyArray<i64, numpy::Ix2>>> {
        let shape = (rows, seq_len);
        if let Some(kept) = kept.as_ref().filter(|kept| kept.shape == shape) {
            return Ok(kept.array.bind(py).clone());
        }
        let row = 0..seq_len as i64; // fits: it is in memory
        let values: Vec<i64> = (0..rows).flat_map(|_| row.clone()).collect();
        let array = values.into_pyarray(py).reshape([rows, seq_len])?;
        *kept = Some(Positions { shape, array: array.clone().unbind() });
        Ok(array)
    }
}
