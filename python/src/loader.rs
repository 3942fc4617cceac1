//! Batches of one rank, read ahead of the training loop.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use feed::{AnyAssemble, Samples};
use loader::{LoaderOptions, Ranks};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrays::{Positions, arrays_of};
use crate::dataset::Dataset;
use crate::errors::{ClosedError, OrRaise as _};
use crate::wait::{HomeProcess, SIGNALS_EVERY, until_ready};

/// Batches of one rank in the order of their samples. See `feedline.Loader`.
#[pyclass(frozen, module = "feedline._feedline")]
#[derive(Debug)]
pub(crate) struct Loader {
    samples: Samples,
    count: u64,
    options: LoaderOptions,
    home: HomeProcess,
    state: Mutex<State>,
    positions: Mutex<Option<Positions>>,
}

#[derive(Debug)]
struct State {
    /// Samples that all ranks together have consumed.
    consumed: u64,
    /// Started by the first batch.
    loader: Option<loader::Loader<AnyAssemble>>,
    is_closed: bool,
}

#[pymethods]
impl Loader {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "the one caller is feedline.Loader")]
    fn new(
        dataset: &Dataset,
        micro_batch_size: usize,
        rank: u32,
        ranks: u32,
        samples_consumed: u64,
        prefetch_seconds: f64,
        prefetch_bytes: u64,
        timeout: f64,
    ) -> PyResult<Self> {
        if micro_batch_size == 0 || rank >= ranks {
            return Err(PyValueError::new_err(format!(
                "cannot load batches: expected micro_batch_size >= 1 and data_parallel_rank below \
                 data_parallel_size, found {micro_batch_size}, {rank} and {ranks}"
            )));
        }
        let seconds = |name, value: f64| {
            Duration::try_from_secs_f64(value).map_err(|_| {
                let text = format!("cannot use {name}: expected seconds, found {value}");
                PyValueError::new_err(text)
            })
        };
        let mut options = LoaderOptions::new(micro_batch_size, 0..0);
        options.ranks = Ranks::one(rank, ranks);
        options.window = seconds("prefetch_seconds", prefetch_seconds)?;
        options.window_bytes = prefetch_bytes;
        options.timeout = seconds("timeout", timeout)?;
        options.verify = dataset.config.data.verify;
        let loader = Loader {
            samples: dataset.samples.clone(),
            count: dataset.count,
            options,
            home: HomeProcess::here(),
            state: Mutex::new(State { consumed: 0, loader: None, is_closed: false }),
            positions: Mutex::default(),
        };
        loader.check_place(samples_consumed)?;
        loader.lock().consumed = samples_consumed;
        Ok(loader)
    }

    /// Batches of the whole run.
    fn __len__(&self) -> usize {
        (self.count / self.step_samples()) as usize // fits: 64 bits
    }

    /// The next batch as a dict of arrays, or `None` after the last.
    fn next_batch<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        self.home.check("loader")?;
        let Some((batch, home)) = until_ready(py, || self.poll())? else { return Ok(None) };
        let mut positions = self.positions.lock().unwrap_or_else(PoisonError::into_inner);
        arrays_of(py, batch, Some(home), &mut positions).map(Some)
    }

    /// Samples that all ranks together have consumed.
    #[getter]
    fn samples_consumed(&self, py: Python<'_>) -> PyResult<u64> {
        self.home.check("loader")?;
        Ok(py.detach(|| self.lock().consumed))
    }

    /// Continues after this many samples.
    #[setter]
    fn set_samples_consumed(&self, py: Python<'_>, samples: u64) -> PyResult<()> {
        self.home.check("loader")?;
        self.check_place(samples)?;
        py.detach(|| {
            let mut state = self.lock();
            (state.consumed, state.loader) = (samples, None);
        });
        Ok(())
    }

    /// Counters since the first batch, as JSON.
    fn metrics(&self, py: Python<'_>) -> PyResult<String> {
        self.home.check("loader")?;
        let metrics = py.detach(|| self.lock().loader.as_ref().map(loader::Loader::metrics));
        Ok(serde_json::json!(metrics.unwrap_or_default()).to_string())
    }

    /// Ends the threads and frees the memory, also in a loop that has not ended.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.home.check("loader")?;
        py.detach(|| {
            let mut state = self.lock();
            (state.is_closed, state.loader) = (true, None);
        });
        Ok(())
    }
}

type Recycled = (feed::AnyBatch, loader::Recycler<feed::AnyBatch>);

impl Loader {
    fn poll(&self) -> PyResult<Poll<Option<Recycled>>> {
        let mut state = self.lock();
        if state.is_closed {
            return Err(ClosedError::new_err("cannot load batch: the loader is closed"));
        }
        if state.loader.is_none() {
            let left = (self.count - state.consumed) / self.step_samples();
            let end = state.consumed + left * self.step_samples();
            let mut options = self.options.clone();
            options.samples = state.consumed..end;
            state.loader = Some(self.samples.load(options).or_raise()?);
        }
        let loader = state.loader.as_mut().expect("it was started just now");
        let came = match loader.poll_batch(SIGNALS_EVERY) {
            Ok(came) => came,
            Err(error) => {
                // A loader ends with its first error; the next call tries this batch again.
                if !matches!(error, loader::Error::Late { .. }) {
                    state.loader = None;
                }
                return Err(error).or_raise();
            }
        };
        let (consumed, home) = (loader.samples_consumed(), loader.recycler());
        Ok(came.map(|batch| {
            state.consumed = consumed;
            batch.map(|batch| (batch, home))
        }))
    }

    /// Samples of one batch of every rank.
    fn step_samples(&self) -> u64 {
        self.options.micro_batch as u64 * u64::from(self.options.ranks.of)
    }

    fn check_place(&self, samples: u64) -> PyResult<()> {
        let count = self.count;
        if samples <= count {
            return Ok(());
        }
        Err(PyValueError::new_err(format!(
            "cannot load batches: expected samples_consumed at most {count}, found {samples} \
             (hint: open the dataset with a larger num_samples)"
        )))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.home.end(state.loader.take());
    }
}
