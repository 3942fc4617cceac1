//! Steps of a folder: saved from and read into memory that Python owns.

use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ckpt::{
    Blob, Check, CheckpointOptions, Drain, DrainOptions, Group, HeldRegion, JointSaveOptions,
    PlanCache, Region, RegionRequest, Retention, SaveControl, SavePlan, Span, TensorEntry,
    TensorSpec,
};
use numpy::{PyReadonlyArray1, PyReadwriteArray1};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use storage::{Key, Location, ProcessIdentity, Storage, copy_past_cache};
use tools::ui::job::CancellableJob;
use tools::ui::step_folder::{check_has_steps, check_two_folders};

use crate::errors::{IntoPython as _, OrRaise as _};
use crate::wait::{HomeProcess, RunningCall, SharedStop, beside, beside_with, reporting};

/// The tensors of a state and the regions that each writer has of them, as JSON of `feedline.dcp`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Recipe {
    specs: Vec<TensorSpec>,
    held: Vec<Vec<HeldRegion>>,
}

/// How and as whom a step is saved, as JSON.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Part {
    step: u64,
    writer: usize,
    token: String,
    deadline_s: f64,
    /// The processes of all writers, by their identities.
    members: Vec<String>,
}

/// Plans are the same from step to step, and each step has a writer of its own in Python.
static PLANS: Mutex<Option<PlanCache>> = Mutex::new(None);

/// A folder of steps. See `feedline.ckpt`.
#[pyclass(frozen, module = "feedline._feedline")]
#[derive(Debug)]
pub(crate) struct Checkpoints {
    /// For work that Ctrl-C ends.
    inner: Arc<ckpt::Checkpoints>,
    /// The lease, which Ctrl-C in another call must not lose.
    base: Arc<ckpt::Checkpoints>,
    store: Arc<dyn Storage>,
    stop: Arc<SharedStop>,
    job: Arc<CancellableJob>,
    home: HomeProcess,
}

#[pymethods]
impl Checkpoints {
    #[new]
    fn new(py: Python<'_>, folder: &str) -> PyResult<Self> {
        let store = py.detach(|| storage::open_url(folder)).or_raise()?;
        let base = Arc::new(ckpt::Checkpoints::open(Arc::clone(&store), Key::root()));
        Ok(Checkpoints::sharing(store, base, CheckpointOptions::default(), HomeProcess::here()))
    }

    /// The same folder, with the same lease, for steps that are saved with other options: JSON of
    /// some of `shard_bytes_max`, `block_bytes` and `threads`.
    fn with_options(&self, options: &str) -> PyResult<Self> {
        let mut all = serde_json::to_value(CheckpointOptions::default()).map_err(bad_json)?;
        let given: serde_json::Map<_, _> = parse(options)?;
        for (key, value) in given {
            all[key] = value;
        }
        let options: CheckpointOptions = serde_json::from_value(all).map_err(bad_json)?;
        let (store, base) = (Arc::clone(&self.store), Arc::clone(&self.base));
        Ok(Checkpoints::sharing(store, base, options, self.home))
    }

    /// Fails if a step exists already, or if there is no room for this many bytes of tensors in so
    /// many chunks.
    fn check_room(&self, py: Python<'_>, step: u64, bytes: u64, chunks: u64) -> PyResult<()> {
        self.run(py, |steps| steps.check_room(step, bytes, chunks))
    }

    /// Saves what one writer has of a step, together with the other writers. `held` are the bytes
    /// of its regions in the order of the recipe. Returns the report as JSON.
    #[expect(clippy::too_many_arguments, reason = "the one caller is feedline.dcp")]
    fn save(
        &self,
        py: Python<'_>,
        recipe: &[u8],
        part: &str,
        held: Vec<PyReadonlyArray1<'_, u8>>,
        blobs: Vec<(String, Vec<u8>)>,
        meta: &str,
        progress: Option<Bound<'_, PyAny>>,
    ) -> PyResult<String> {
        let _call = self.begin()?;
        let part: Part = parse(part)?;
        let meta: serde_json::Value = parse(meta)?;
        let deadline = Duration::try_from_secs_f64(part.deadline_s)
            .map_err(|why| PyValueError::new_err(format!("cannot use timeout: {why}")))?;
        let members: Option<Vec<_>> =
            part.members.iter().map(|text| ProcessIdentity::parse(text)).collect();
        let members = members
            .ok_or_else(|| PyValueError::new_err("cannot use members: expected identities"))?;
        let held = held.iter().map(PyReadonlyArray1::as_slice).collect::<Result<Vec<_>, _>>()?;
        let blobs: Vec<_> = blobs.iter().map(|(name, bytes)| Blob { name, bytes }).collect();
        let control = SaveControl::default();
        let save = || -> PyResult<_> {
            let plan = plan_of(&self.inner, recipe)?;
            let together = JointSaveOptions { token: &part.token, writer: part.writer, deadline };
            let saved = self
                .inner
                .save_watched(part.step, &plan, &held, &blobs, meta, &together, &members, &control);
            saved.or_raise()
        };
        let look = reporting(progress.as_ref(), || control.bytes());
        let report = beside_with(py, || control.cancel(), save, look)??;
        serde_json::to_string(&report).map_err(bad_json)
    }

    /// Ends the save of all writers, because this one cannot take part in it.
    fn decline(&self, py: Python<'_>, recipe: &[u8], part: &str, reason: &str) -> PyResult<()> {
        let part: Part = parse(part)?;
        let deadline = Duration::ZERO;
        let decline = |steps: &ckpt::Checkpoints| {
            let plan = plan_of(steps, recipe)?;
            let together = JointSaveOptions { token: &part.token, writer: part.writer, deadline };
            steps.decline_save(part.step, &plan, &together, reason).or_raise()
        };
        let _call = self.begin()?;
        beside(py, || self.stop.signal.set(), || decline(&self.inner))?
    }

    /// The complete steps, oldest first.
    fn steps(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        self.run(py, ckpt::Checkpoints::steps)
    }

    /// Opens a step, or the newest complete one; `None` if there is none.
    fn open(&self, py: Python<'_>, step: Option<u64>) -> PyResult<Option<Checkpoint>> {
        let inner = self.run(py, |steps| match step {
            Some(step) => steps.open_step(step).map(Some),
            None => steps.newest(),
        })?;
        let (stop, job, home) = (Arc::clone(&self.stop), Arc::clone(&self.job), self.home);
        Ok(inner.map(|inner| Checkpoint { inner, stop, job, home }))
    }

    /// Deletes all complete steps except the newest and those that `drain_to` lacks; returns the
    /// deleted ones.
    fn retain(
        &self,
        py: Python<'_>,
        keep_last: usize,
        keep_every: Option<NonZeroU64>,
        drain_to: Option<PyRef<'_, Checkpoints>>,
    ) -> PyResult<Vec<u64>> {
        let policy = Retention { keep_last, keep_every, check: Check::Lengths };
        let drain_to = drain_to.as_deref();
        let retain = || -> PyResult<_> {
            check_has_steps(&*self.store, "delete old steps of").or_raise()?;
            let names = ("delete steps of", "that are in");
            let drain = drain_to.map(|to| self.drain_of(names, to)).transpose()?;
            let undrained = drain.map(|drain| drain.pending()).transpose().or_raise()?;
            let plan = self.inner.retain_by(&policy, &undrained.unwrap_or_default());
            Ok(plan.or_raise()?.delete)
        };
        let _call = self.begin()?;
        beside(py, || self.stop.signal.set(), retain)?
    }

    /// Copies the steps that a second folder lacks; returns those that were copied. Raises the
    /// first failure, with a note of all steps that failed. `progress` gets the bytes read and
    /// written.
    fn drain(
        &self,
        py: Python<'_>,
        to: PyRef<'_, Checkpoints>,
        progress: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Vec<u64>> {
        let to = &*to;
        let _call = self.begin()?;
        let before = self.job.moved_bytes();
        let look = reporting(progress.as_ref(), || self.job.moved_bytes() - before);
        let drain = || {
            check_has_steps(&*self.store, "drain").or_raise()?;
            self.drain_of(("drain", "into"), to)?.run().or_raise()
        };
        let pass = beside_with(py, || self.stop.signal.set(), drain, look)??;
        let numbers: Vec<_> = pass.failed.iter().map(|(step, _)| step.to_string()).collect();
        let Some((_, first)) = pass.failed.into_iter().next() else {
            return Ok(pass.drained.iter().map(|report| report.step).collect());
        };
        let target = to.store.display(&Key::root());
        let note = format!("steps that were not copied to {target}: {}", numbers.join(", "));
        let raised = first.into_python();
        raised.value(py).call_method1("add_note", (note,))?;
        Err(raised)
    }
}

impl Checkpoints {
    fn sharing(
        store: Arc<dyn Storage>,
        base: Arc<ckpt::Checkpoints>,
        options: CheckpointOptions,
        home: HomeProcess,
    ) -> Self {
        let stop = Arc::<SharedStop>::default();
        let job = CancellableJob::until(stop.signal.clone());
        let inner = Arc::new(base.sharing_lease(job.watch(Arc::clone(&store)), options));
        Checkpoints { inner, base, store, stop, job, home }
    }

    /// Copies to a second folder, in which nothing is deleted.
    fn drain_of(&self, names: (&str, &str), to: &Checkpoints) -> PyResult<Drain> {
        check_two_folders(names, &*self.store, &*to.store).or_raise()?;
        let watched = self.job.watch(Arc::clone(&to.store));
        let to = Arc::new(to.base.sharing_lease(watched, CheckpointOptions::default()));
        let retention = Retention { keep_last: usize::MAX, ..Retention::default() };
        let options = DrainOptions { retention, ..DrainOptions::default() };
        Ok(Drain::new(Arc::clone(&self.inner), to, options))
    }

    fn begin(&self) -> PyResult<RunningCall> {
        self.home.check("folder of checkpoints")?;
        Ok(self.stop.begin())
    }

    fn run<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&ckpt::Checkpoints) -> ckpt::Result<T> + Send,
    ) -> PyResult<T> {
        let _call = self.begin()?;
        beside(py, || self.stop.signal.set(), || work(&self.inner))?.or_raise()
    }
}

/// A region of a tensor to be read: name, group, box (the whole tensor if absent), and memory.
type Want<'py> = (String, String, Option<Vec<[u64; 2]>>, PyReadwriteArray1<'py, u8>);

/// A complete step. See `feedline.ckpt`.
#[pyclass(frozen, module = "feedline._feedline")]
#[derive(Debug)]
pub(crate) struct Checkpoint {
    inner: ckpt::Checkpoint,
    stop: Arc<SharedStop>,
    job: Arc<CancellableJob>,
    home: HomeProcess,
}

#[pymethods]
impl Checkpoint {
    #[getter]
    fn step(&self) -> u64 {
        self.inner.step()
    }

    /// The folder of the step.
    #[getter]
    fn folder(&self) -> String {
        self.inner.display()
    }

    /// What the writer stored beside the tensors, as JSON.
    fn meta(&self) -> String {
        self.inner.meta().to_string()
    }

    /// Name, group, dtype and shape of each tensor.
    fn tensors(&self) -> Vec<(&str, &'static str, &'static str, Vec<u64>)> {
        let tensors = self.inner.tensors().iter();
        tensors.map(entry_of).collect()
    }

    /// Raises `KeyError` with similar names, if there is no such tensor.
    fn tensor(&self, name: &str, group: &str) -> PyResult<()> {
        self.inner.tensor(name, group_of(group)?).or_raise().map(|_| ())
    }

    /// The names of all blobs.
    fn blobs(&self) -> Vec<&str> {
        self.inner.blobs().collect()
    }

    /// The bytes of a blob.
    fn blob<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = self.run(py, || self.inner.blob(name))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Reads regions, each into its memory, and verifies every block that it reads. Returns the
    /// bytes of these blocks. `progress` gets the bytes read.
    fn read(
        &self,
        py: Python<'_>,
        wants: Vec<Want<'_>>,
        progress: Option<Bound<'_, PyAny>>,
    ) -> PyResult<u64> {
        let _call = self.begin()?;
        let mut wants = wants;
        let mut requests = Vec::with_capacity(wants.len());
        for (name, group, spans, into) in &mut wants {
            let group = group_of(group)?;
            let region = match spans {
                Some(spans) => Region::of_box(spans.iter().map(|&pair| Span::from(pair)).collect()),
                None => Region::whole(&self.inner.tensor(name, group).or_raise()?.shape),
            };
            requests.push(RegionRequest { name, group, region, into: into.as_slice_mut()? });
        }
        let before = self.job.moved_bytes();
        let look = reporting(progress.as_ref(), || self.job.moved_bytes() - before);
        let read = || self.inner.read(requests);
        let report = beside_with(py, || self.stop.signal.set(), read, look)?;
        Ok(report.or_raise()?.block_bytes)
    }
}

impl Checkpoint {
    fn begin(&self) -> PyResult<RunningCall> {
        self.home.check("checkpoint")?;
        Ok(self.stop.begin())
    }

    fn run<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce() -> ckpt::Result<T> + Send,
    ) -> PyResult<T> {
        let _call = self.begin()?;
        beside(py, || self.stop.signal.set(), work)?.or_raise()
    }
}

/// The plan of a recipe, made only once for the steps of a run.
fn plan_of(steps: &ckpt::Checkpoints, recipe: &[u8]) -> PyResult<Arc<SavePlan>> {
    let Recipe { specs, held } = serde_json::from_slice(recipe).map_err(bad_json)?;
    let mut plans = PLANS.lock().unwrap_or_else(PoisonError::into_inner);
    plans.get_or_insert_default().plan(&specs, &held, steps.plan_limits()).or_raise()
}

/// What names this process among all processes of all machines.
#[pyfunction]
pub(crate) fn process_identity() -> String {
    ProcessIdentity::new().to_string()
}

fn entry_of(tensor: &TensorEntry) -> (&str, &'static str, &'static str, Vec<u64>) {
    (&tensor.name, tensor.group.name(), tensor.dtype.name(), tensor.shape.clone())
}

/// The step in the last component of a name, `.../step-000000001000`, and the folder before it.
#[pyfunction]
pub(crate) fn split_step(name: &str) -> Option<(String, u64)> {
    let place = Location::new(name);
    ckpt::step_of(place.file_name()).map(|step| (place.parent().to_string(), step))
}

/// The location of a name below a folder, before the options of its URL.
#[pyfunction]
pub(crate) fn join_url(folder: &str, name: &str) -> String {
    Location::new(folder).join(name).to_string()
}

/// The last component of a location, without the options of its URL.
#[pyfunction]
pub(crate) fn file_name(url: &str) -> String {
    Location::new(url).file_name().to_owned()
}

/// The path of a location in the file system; `None` if it is in a bucket.
#[pyfunction]
pub(crate) fn local_path(url: &str) -> Option<String> {
    Location::new(url).local_path().and_then(|path| path.to_str()).map(str::to_owned)
}

fn group_of(name: &str) -> PyResult<Group> {
    Group::ALL.into_iter().find(|group| group.name() == name).ok_or_else(|| {
        let all = Group::ALL.map(Group::name).join(", ");
        PyValueError::new_err(format!("cannot use group '{name}': expected one of {all}"))
    })
}

fn parse<T: DeserializeOwned>(text: &str) -> PyResult<T> {
    serde_json::from_str(text).map_err(bad_json)
}

fn bad_json(why: serde_json::Error) -> PyErr {
    PyValueError::new_err(format!("cannot use settings: {why}"))
}

/// Unit of work of a thread that copies.
const COPY_BYTES: usize = 16 << 20;

/// Copies arrays into memory, each to its place, on several threads. The places are ascending and
/// apart.
#[pyfunction]
pub(crate) fn copy_all(
    py: Python<'_>,
    mut arena: PyReadwriteArray1<'_, u8>,
    parts: Vec<(usize, PyReadonlyArray1<'_, u8>)>,
    threads: usize,
) -> PyResult<()> {
    let mut rest = arena.as_slice_mut()?;
    let (mut work, mut end) = (Vec::new(), 0);
    for (place, from) in &parts {
        let from = from.as_slice()?;
        let gap = place.checked_sub(end).filter(|gap| gap + from.len() <= rest.len());
        let gap = gap.ok_or_else(|| PyValueError::new_err("cannot copy: places overlap"))?;
        let (_, after) = rest.split_at_mut(gap);
        let (into, after) = after.split_at_mut(from.len());
        (rest, end) = (after, place + from.len());
        work.extend(into.chunks_mut(COPY_BYTES).zip(from.chunks(COPY_BYTES)));
    }
    let work = Mutex::new(work);
    let copy = || {
        loop {
            let next = work.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let Some((into, from)) = next else { return };
            copy_past_cache(into, from);
        }
    };
    py.detach(|| {
        std::thread::scope(|scope| {
            for _ in 1..threads {
                scope.spawn(copy);
            }
            copy();
        });
    });
    Ok(())
}
