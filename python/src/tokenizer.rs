//! Texts to token ids and back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use numpy::{IntoPyArray as _, PyArray1};
use preprocess::TokenizerSpec;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::errors::OrRaise as _;
use crate::wait::beside;

/// Texts that are encoded without a thread and without looking for signals: 1 MiB takes some ten
/// milliseconds.
const SHORT_BYTES: usize = 1 << 20;

/// A vocabulary and its rules. See `feedline.Tokenizer`.
#[pyclass(frozen, module = "feedline._feedline")]
#[derive(Debug)]
pub(crate) struct Tokenizer {
    inner: Arc<dyn preprocess::Tokenizer>,
}

/// The ids of many texts, and where each text starts and the last ends.
type Encoded<'py> = (Bound<'py, PyArray1<u32>>, Bound<'py, PyArray1<i64>>);

#[pymethods]
impl Tokenizer {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "the one caller is feedline.Tokenizer")]
    fn new(
        py: Python<'_>,
        kind: String,
        model: Option<String>,
        vocab_file: Option<String>,
        merge_file: Option<String>,
        tokenizer_rule: Option<String>,
        vocab_size: Option<u32>,
        special_tokens: Vec<String>,
        add_special_tokens: bool,
    ) -> PyResult<Self> {
        let spec = TokenizerSpec {
            kind,
            model,
            vocab_file,
            merge_file,
            tokenizer_rule,
            vocab_size,
            special_tokens,
            without_special_tokens: !add_special_tokens,
            ..Default::default()
        };
        let inner = py.detach(|| preprocess::open_tokenizer(&spec)).or_raise()?;
        Ok(Tokenizer { inner })
    }

    #[getter]
    fn vocab_size(&self) -> u32 {
        self.inner.vocab_size()
    }

    #[getter]
    fn eod(&self) -> Option<u32> {
        self.inner.eod()
    }

    #[getter]
    fn name(&self) -> &str {
        self.inner.name()
    }

    #[getter]
    fn fingerprint(&self, py: Python<'_>) -> String {
        py.detach(|| self.inner.fingerprint())
    }

    /// What Megatron writes of it into the description of a cached order, as JSON.
    #[getter]
    fn identifiers(&self) -> String {
        self.inner.identifiers().to_string()
    }

    fn encode(&self, text: &str) -> PyResult<Vec<u32>> {
        let encoded = preprocess::encode_batch(&*self.inner, &[text], 1, &AtomicBool::new(false));
        encoded.or_raise().map(|batch| batch.ids)
    }

    /// The ids of all texts and their offsets, encoded on `threads` threads.
    fn encode_batch<'py>(
        &self,
        py: Python<'py>,
        texts: &Bound<'py, PyList>,
        threads: usize,
    ) -> PyResult<Encoded<'py>> {
        // A list of its own, so that no text is freed by another thread meanwhile.
        let texts = texts.as_sequence().to_list()?;
        let items: Vec<_> = texts.iter().collect();
        let views = items.iter().map(PyAnyMethods::extract);
        let views = views.collect::<Result<Vec<&str>, _>>()?;
        let tokenizer = &*self.inner;
        let stop = AtomicBool::new(false);
        let encode = || preprocess::encode_batch(tokenizer, &views, threads, &stop);
        let batch = if views.iter().map(|text| text.len()).sum::<usize>() <= SHORT_BYTES {
            py.detach(encode)
        } else {
            beside(py, || stop.store(true, Ordering::Relaxed), encode)?
        };
        let preprocess::TokenBatch { ids, offsets } = batch.or_raise()?;
        Ok((ids.into_pyarray(py), offsets.into_pyarray(py)))
    }

    /// The bytes that ids stand for.
    fn decode_bytes(&self, py: Python<'_>, ids: Vec<u32>) -> PyResult<Vec<u8>> {
        let mut out = Vec::new();
        py.detach(|| self.inner.decode(&ids, &mut out)).or_raise()?;
        Ok(out)
    }
}
