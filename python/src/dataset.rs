//! Samples of a run's order by number: what a map-style dataset is.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::thread::JoinHandle;
use std::time::Duration;

use feed::{AnyAssemble, AnyBatch, OrderKind, Samples, SamplesOptions, with_special};
use indexed::Split;
use loader::{CallOrder, LoaderOptions, RandomReader, Recycler};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use recipe::config::Config;

use crate::arrays::{Positions, arrays_of};
use crate::errors::OrRaise as _;
use crate::wait::{HomeProcess, SIGNALS_EVERY, abandonable, panicked, until_ready};

type Ahead = loader::Loader<AnyAssemble>;

/// Samples in a run's order, read by number. See `feedline.Dataset`.
#[pyclass(frozen, module = "feedline._feedline")]
#[derive(Debug)]
pub(crate) struct Dataset {
    pub(crate) samples: Samples,
    /// Those that were asked for: the epochs of an order may have more.
    pub(crate) count: u64,
    pub(crate) config: Config,
    /// What tells these samples from others, as JSON.
    identity: String,
    window_bytes: u64,
    home: HomeProcess,
    reads: Mutex<Reads>,
    positions: Mutex<Option<Positions>>,
}

/// Reads that were made, and what follows from them.
#[derive(Debug, Default)]
struct Reads {
    /// A thread that reads, and is not in use.
    idle: Option<ReadThread>,
    /// The samples of the last call.
    last: Vec<u64>,
    strides: StrideWatch,
    ahead: Option<ReadAhead>,
    /// Calls that found their samples read ahead.
    hits: u64,
}

/// A batch, and the recycler of its memory.
type HeldBatch = (AnyBatch, Option<Recycler<AnyBatch>>);

/// A thread that reads one batch at a time, so that Ctrl-C can abandon a read that hangs. Dropping
/// it waits for the thread, unless that is reading.
#[derive(Debug)]
struct ReadThread {
    requests: Option<SyncSender<Vec<u64>>>,
    results: Receiver<loader::Result<AnyBatch>>,
    thread: Option<JoinHandle<()>>,
    is_reading: bool,
}

impl ReadThread {
    fn start(mut reader: RandomReader<AnyAssemble>) -> std::io::Result<Self> {
        let (requests, of_caller) = sync_channel::<Vec<u64>>(1);
        let (for_caller, results) = sync_channel(1);
        let run = move || {
            for samples in of_caller {
                if for_caller.send(reader.read(&samples)).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("feedline-read".to_owned()).spawn(run)?;
        let (requests, thread) = (Some(requests), Some(thread));
        Ok(ReadThread { requests, results, thread, is_reading: false })
    }

    fn begin(mut self, samples: &[u64]) -> Self {
        // A thread that has panicked is noticed by the poll.
        self.is_reading = match &self.requests {
            Some(requests) => requests.send(samples.to_vec()).is_ok(),
            None => false,
        };
        self
    }

    fn poll(&mut self, wait: Duration) -> PyResult<Poll<loader::Result<AnyBatch>>> {
        match self.results.recv_timeout(wait) {
            Ok(result) => {
                self.is_reading = false;
                Ok(Poll::Ready(result))
            }
            Err(RecvTimeoutError::Timeout) => Ok(Poll::Pending),
            Err(RecvTimeoutError::Disconnected) => Err(panicked()),
        }
    }
}

impl Drop for ReadThread {
    fn drop(&mut self) {
        self.requests = None;
        if let Some(thread) = self.thread.take().filter(|_| !self.is_reading) {
            thread.join().ok();
        }
    }
}

/// A caller that asks in equal strides, and what it will ask for next.
#[derive(Debug)]
struct ReadAhead {
    loader: Ahead,
    next: Vec<u64>,
    step: u64,
    hits: u64,
}

/// Hits that a loader must have to be worth its start: it takes milliseconds, a read of one sample
/// from memory 0.1 ms.
const HITS_MIN: u64 = 64;
/// After this many loaders in vain, 64 equal steps are asked for, not more.
const DOUBLINGS_MAX: u32 = 6;

/// Decides from the steps between calls whether to read ahead. A caller that reads several corpora
/// in turns, as a blend of Megatron does, shows steps that do not last; each loader in vain doubles
/// how many equal steps the next one needs.
#[derive(Debug, Default)]
struct StrideWatch {
    step: Option<u64>,
    /// Calls in a row that were this step apart.
    equal: u32,
    /// Loaders in a row that had fewer than [`HITS_MIN`] hits.
    in_vain: u32,
}

impl StrideWatch {
    /// Adds the step to a call that was not read ahead. Returns whether to read ahead from there.
    fn add(&mut self, step: Option<u64>) -> bool {
        self.equal = match step {
            Some(_) if step == self.step => self.equal.saturating_add(1),
            Some(_) => 1,
            None => 0,
        };
        self.step = step;
        self.equal >= 1 << self.in_vain.min(DOUBLINGS_MAX)
    }

    /// Adds what a loader was good for.
    fn judge(&mut self, hits: u64) {
        self.in_vain = if hits < HITS_MIN { self.in_vain.saturating_add(1) } else { 0 };
    }
}

#[pymethods]
impl Dataset {
    /// Opens the samples of a config: TOML text, or a file with overrides of its keys.
    #[new]
    #[expect(clippy::too_many_arguments, reason = "the one caller is feedline.open")]
    fn new(
        py: Python<'_>,
        text: Option<String>,
        file: Option<String>,
        sets: Vec<String>,
        index_split: &str,
        num_samples: Option<u64>,
        order: &str,
        cached: bool,
        identifiers: Option<String>,
        prefetch_bytes: u64,
    ) -> PyResult<Self> {
        let which = Split::ALL.into_iter().find(|split| split.name() == index_split);
        let which = which.ok_or_else(|| bad("index_split", "train, valid or test", index_split))?;
        let mut options = SamplesOptions::new(which, num_samples);
        options.order = match order {
            "megatron" => OrderKind::Megatron,
            "blocks" => OrderKind::Blocks,
            "file" => OrderKind::File,
            other => return Err(bad("order", "megatron, blocks or file", other)),
        };
        options.cached = cached;
        options.identifiers = match identifiers.map(|text| serde_json::from_str(&text)) {
            Some(Ok(value)) => Some(value),
            Some(Err(why)) => return Err(bad("tokenizer", "JSON of identifiers", why)),
            None => None,
        };
        abandonable(py, move || {
            let config = match (&text, &file) {
                (Some(text), _) => Config::from_toml("the arguments of open", text).or_raise()?,
                (None, Some(file)) => Config::load(file, &sets).or_raise()?,
                (None, None) => return Err(bad("source", "a prefix, a blend or a TOML", "none")),
            };
            let config = with_special(config).or_raise()?;
            if file.is_some() && options.count.is_none() {
                options.count = count_of(&config, which);
            }
            let (samples, corpora) = Samples::open(&config, &options).or_raise()?;
            let identity = samples.identity(&config, &corpora, &options).or_raise()?.to_string();
            let count = options.count.map_or(samples.count(), |wanted| wanted.min(samples.count()));
            Ok(Dataset {
                samples,
                count,
                config,
                identity,
                window_bytes: prefetch_bytes,
                home: HomeProcess::here(),
                reads: Mutex::default(),
                positions: Mutex::default(),
            })
        })?
    }

    fn __len__(&self) -> usize {
        self.count as usize // fits: 64 bits
    }

    /// The config as TOML, all defaults filled in.
    #[getter]
    fn config(&self) -> String {
        self.config.to_toml()
    }

    /// What tells these samples from others, as JSON.
    #[getter]
    fn identity(&self) -> &str {
        &self.identity
    }

    /// `seq_len` of the model.
    #[getter]
    fn sequence_length(&self) -> u64 {
        self.config.model.seq_len
    }

    /// Calls of `read` that found their samples read ahead.
    #[getter]
    fn hits(&self, py: Python<'_>) -> u64 {
        py.detach(|| lock(&self.reads).hits)
    }

    /// A batch of these samples, one a row, as a dict of arrays.
    fn read<'py>(&self, py: Python<'py>, samples: Vec<u64>) -> PyResult<Bound<'py, PyDict>> {
        self.home.check("dataset")?;
        let mut reading = None;
        let (batch, home) = until_ready(py, || self.poll(&samples, &mut reading))?;
        // This lock may be waited for with the GIL: its holder never waits for anything.
        let mut positions = self.positions.lock().unwrap_or_else(PoisonError::into_inner);
        arrays_of(py, batch, home, &mut positions)
    }

    /// Ends the threads that read ahead.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.home.check("dataset")?;
        py.detach(|| {
            let mut reads = lock(&self.reads);
            *reads = Reads { hits: reads.hits, ..Reads::default() };
        });
        Ok(())
    }
}

impl Dataset {
    /// `reading` is the thread that reads for this call, once it has a request.
    fn poll(&self, samples: &[u64], reading: &mut Option<ReadThread>) -> PyResult<Poll<HeldBatch>> {
        let thread = match reading {
            Some(thread) => thread,
            None => {
                let mut reads = lock(&self.reads);
                match self.poll_ahead(&mut reads, samples)? {
                    Poll::Ready(Some(held)) => return Ok(Poll::Ready(held)),
                    Poll::Ready(None) => {}
                    Poll::Pending => return Ok(Poll::Pending),
                }
                let idle = reads.idle.take();
                drop(reads);
                let thread = idle.map_or_else(|| self.start_thread(), Ok)?;
                reading.insert(thread.begin(samples))
            }
        };
        let Poll::Ready(batch) = thread.poll(SIGNALS_EVERY)? else { return Ok(Poll::Pending) };
        let mut reads = lock(&self.reads);
        // Another call may have returned its thread first.
        let spare = if reads.idle.is_none() {
            reads.idle = reading.take();
            None
        } else {
            reading.take()
        };
        let batch = batch.or_raise()?;
        let ended = reads.ahead.take();
        if let Some(ended) = &ended {
            reads.strides.judge(ended.hits);
        }
        let step = step_between(&reads.last, samples);
        let is_steady = reads.strides.add(step);
        if let Some(step) = step.filter(|_| is_steady) {
            reads.ahead = self.read_ahead(samples, step).unwrap_or_else(|error| {
                log::warn!("samples are not read ahead: {error}");
                None
            });
        }
        samples.clone_into(&mut reads.last);
        drop(reads);
        drop((spare, ended));
        Ok(Poll::Ready((batch, None)))
    }

    /// The samples, if they are read ahead; `Ready(None)` if they are not.
    fn poll_ahead(&self, reads: &mut Reads, samples: &[u64]) -> PyResult<Poll<Option<HeldBatch>>> {
        let ahead = reads.ahead.as_mut().filter(|ahead| ahead.next == samples);
        let Some(ahead) = ahead else { return Ok(Poll::Ready(None)) };
        let batch = match ahead.loader.poll_batch(SIGNALS_EVERY) {
            Ok(Poll::Pending) => return Ok(Poll::Pending),
            Ok(Poll::Ready(batch)) => batch,
            Err(error @ loader::Error::Late { .. }) => return Err(error).or_raise(),
            Err(error) => {
                // The error may be transient, so the samples are read again.
                log::warn!("samples are no longer read ahead: {error}");
                reads.ahead = None;
                None
            }
        };
        let (Some(batch), Some(ahead)) = (batch, &mut reads.ahead) else {
            return Ok(Poll::Ready(None));
        };
        let step = ahead.step;
        ahead.next.iter_mut().for_each(|next| *next += step);
        let home = ahead.loader.recycler();
        ahead.hits += 1;
        reads.hits += 1;
        samples.clone_into(&mut reads.last);
        Ok(Poll::Ready(Some((batch, Some(home)))))
    }

    fn start_thread(&self) -> PyResult<ReadThread> {
        let reader = self.samples.reader(self.config.data.verify).or_raise()?;
        Ok(ReadThread::start(reader)?)
    }

    /// Starts to read what follows `samples` in this stride, unless the order ends there.
    fn read_ahead(&self, samples: &[u64], step: u64) -> feed::Result<Option<ReadAhead>> {
        let next: Vec<u64> = samples.iter().map(|sample| sample + step).collect();
        if next.iter().any(|&sample| sample >= self.samples.count()) {
            return Ok(None);
        }
        let inner = Arc::clone(self.samples.order());
        let order = Arc::new(CallOrder::new(inner, next.clone(), step)?);
        let samples = 0..loader::SampleOrder::sample_count(&*order);
        let mut options = LoaderOptions::new(next.len(), samples);
        options.verify = self.config.data.verify;
        options.window_bytes = self.window_bytes;
        let loader = self.samples.load_as(order, options)?;
        Ok(Some(ReadAhead { loader, next, step, hits: 0 }))
    }
}

impl Drop for Dataset {
    fn drop(&mut self) {
        let reads = std::mem::take(self.reads.get_mut().unwrap_or_else(PoisonError::into_inner));
        self.home.end(reads);
    }
}

/// How far the samples of two calls are apart, if it is the same upwards for all of them.
fn step_between(last: &[u64], samples: &[u64]) -> Option<u64> {
    let step = samples.first()?.checked_sub(*last.first()?).filter(|&step| step > 0)?;
    let is_equal = last.len() == samples.len()
        && last.iter().zip(samples).all(|(last, sample)| sample.checked_sub(*last) == Some(step));
    is_equal.then_some(step)
}

/// Samples of a part that a run reads. A test part is read whole.
fn count_of(config: &Config, which: Split) -> Option<u64> {
    match which {
        Split::Train => Some(config.samples_total()),
        Split::Valid => Some(config.eval_samples()).filter(|&samples| samples > 0),
        Split::Test => None,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn bad(name: &str, expected: &str, found: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(format!("cannot use {name}: expected {expected}, found {found}"))
}
