//! Safetensors files: read by several threads, and written so that they appear whole.

use std::sync::Arc;

use numpy::{PyReadonlyArray1, PyReadwriteArray1};
use pyo3::prelude::*;
use storage::Key;
use tools::ui::job::CancellableJob;
use tools::ui::timeout::StopSignal;

use crate::errors::OrRaise as _;
use crate::wait::{HomeProcess, SharedStop, beside};

/// Files read or written by so many threads, as checkpoints are by default.
const THREADS: usize = 2;

/// An open safetensors file. See `feedline.safetensors`.
#[pyclass(frozen, module = "feedline._feedline")]
#[derive(Debug)]
pub(crate) struct TensorFile {
    inner: ckpt::TensorFile,
    stop: Arc<SharedStop>,
    home: HomeProcess,
}

/// Name, type and shape as in the header, first byte, and the byte after the last.
type Entry<'a> = (&'a str, &'a str, &'a [u64], u64, u64);

#[pymethods]
impl TensorFile {
    #[new]
    fn new(py: Python<'_>, url: &str) -> PyResult<Self> {
        let (stop, home) = (Arc::<SharedStop>::default(), HomeProcess::here());
        let job = CancellableJob::until(stop.signal.clone());
        let open = || -> PyResult<_> {
            let (store, key) = job.locate(url).or_raise()?;
            ckpt::TensorFile::open(&*store, &key).or_raise()
        };
        let inner = beside(py, || stop.signal.set(), open)??;
        Ok(TensorFile { inner, stop, home })
    }

    /// The name of the file.
    #[getter]
    fn file(&self) -> String {
        self.inner.display()
    }

    fn tensors(&self) -> Vec<Entry<'_>> {
        self.inner.tensors().iter().map(entry_of).collect()
    }

    fn metadata(&self) -> Vec<(&str, &str)> {
        self.inner.metadata().iter().map(|(key, value)| (key.as_str(), value.as_str())).collect()
    }

    /// Fills each array from its offset in the file.
    fn read(
        &self,
        py: Python<'_>,
        mut wants: Vec<(u64, PyReadwriteArray1<'_, u8>)>,
    ) -> PyResult<()> {
        self.home.check("file of tensors")?;
        let _call = self.stop.begin();
        let mut reads = Vec::with_capacity(wants.len());
        for (offset, into) in &mut wants {
            reads.push((*offset, into.as_slice_mut()?));
        }
        beside(py, || self.stop.signal.set(), || self.inner.read(reads, THREADS))?.or_raise()
    }
}

fn entry_of(tensor: &ckpt::FileTensor) -> Entry<'_> {
    let ckpt::FileTensor { name, dtype, shape, bytes } = tensor;
    (name, dtype, shape, bytes.start, bytes.end)
}

/// Writes a file of a header and parts, durably. It appears under its name when it is complete, and
/// replaces no other.
#[pyfunction]
pub(crate) fn write_file(
    py: Python<'_>,
    url: &str,
    header: &[u8],
    parts: Vec<PyReadonlyArray1<'_, u8>>,
) -> PyResult<()> {
    let stop = StopSignal::default();
    let job = CancellableJob::until(stop.clone());
    let parts = parts.iter().map(PyReadonlyArray1::as_slice).collect::<Result<Vec<_>, _>>()?;
    let write = || write_parts(&job, url, header, &parts);
    beside(py, || stop.set(), write)?.or_raise()
}

fn write_parts(
    job: &Arc<CancellableJob>,
    url: &str,
    header: &[u8],
    parts: &[&[u8]],
) -> storage::Result<()> {
    let (store, key): (_, Key) = job.locate(url)?;
    let bytes = header.len() as u64 + parts.iter().map(|part| part.len() as u64).sum::<u64>();
    let mut upload = store.create(&key, bytes)?;
    upload.write(header)?;
    for part in parts {
        upload.write(part)?;
    }
    upload.finish().map(|_| ())
}

/// The CRC-64/NVME of each array.
#[pyfunction]
pub(crate) fn crc64_all(
    py: Python<'_>,
    arrays: Vec<PyReadonlyArray1<'_, u8>>,
) -> PyResult<Vec<u64>> {
    let slices = arrays.iter().map(PyReadonlyArray1::as_slice).collect::<Result<Vec<_>, _>>()?;
    Ok(py.detach(|| slices.iter().map(|bytes| storage::crc64(bytes)).collect()))
}
