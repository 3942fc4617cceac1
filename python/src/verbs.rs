//! What the programs do, as calls: the values are those that `--json` prints.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use preprocess::{
    Objective, OnBadLine, PreprocessOptions, PreprocessProgress, ResumePolicy, SpanOptions,
    TokenizerSpec,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde_json::{Value, json};
use tools::ckpt::{diff, ls, open_target, verify};
use tools::data::{check, inspect};
use tools::ui::inspect_target::InspectTarget;
use tools::ui::job::CancellableJob;
use tools::ui::output::FormatHints;
use tools::ui::step_folder::existing;
use tools::ui::timeout::StopSignal;

use crate::errors::OrRaise as _;
use crate::wait::{beside_with, reporting};

/// How `preprocess` is to run, as JSON of `feedline.preprocess`.
fn options_of(
    settings: &Value,
    inputs: Vec<String>,
    out_prefix: String,
) -> PyResult<PreprocessOptions> {
    let text = |key: &str| settings[key].as_str().map(str::to_owned);
    let texts = |key: &str| -> Vec<String> {
        let list = settings[key].as_array().into_iter().flatten();
        list.filter_map(|item| item.as_str().map(str::to_owned)).collect()
    };
    let mut options = PreprocessOptions::new(inputs, out_prefix);
    options.keys = texts("json_keys");
    options.append_eod =
        settings["append_eod"].as_bool().ok_or_else(|| unknown(settings, "append_eod"))?;
    options.tokenizer = TokenizerSpec {
        kind: text("kind").unwrap_or_default(),
        model: text("model"),
        vocab_file: text("vocab_file"),
        merge_file: text("merge_file"),
        tokenizer_rule: text("tokenizer_rule"),
        special_tokens: texts("special_tokens"),
        vocab_size: settings["vocab_size"].as_u64().and_then(|size| size.try_into().ok()),
        without_special_tokens: settings["add_special_tokens"] == false,
        ..Default::default()
    };
    if let Some(workers) = settings["workers"].as_u64() {
        options.workers = workers as usize; // fits: 64 bits
    }
    options.on_bad_line = match settings["on_bad_line"].as_str() {
        Some("fail") => OnBadLine::Fail,
        Some("skip") => OnBadLine::Skip,
        _ => return Err(unknown(settings, "on_bad_line")),
    };
    options.interrupted = match settings["interrupted"].as_str() {
        Some("resume") => ResumePolicy::Resume,
        Some("restart") => ResumePolicy::Restart,
        Some("refuse") => ResumePolicy::Refuse,
        _ => return Err(unknown(settings, "interrupted")),
    };
    options.objective = match settings["objective"].as_str() {
        Some("cpm2") => Objective::Spans(SpanOptions::default()),
        Some("sentences") => Objective::Sentences(Default::default()),
        Some("documents") => Objective::Documents,
        _ => return Err(unknown(settings, "objective")),
    };
    if let Some(shard) = text("shard") {
        let bad = |why| PyValueError::new_err(format!("cannot use shard: {why}"));
        options.shard = Some(shard.parse().map_err(bad)?);
    }
    Ok(options)
}

/// The error of a setting that has no such value. The package has checked what its caller passed.
fn unknown(settings: &Value, key: &str) -> PyErr {
    let found = &settings[key];
    PyValueError::new_err(format!("cannot use settings: {key} has no value {found}"))
}

/// Tokenizes files; returns the report as JSON. `progress` is called with counts.
#[pyfunction]
#[pyo3(name = "preprocess")]
pub(crate) fn run_preprocess(
    py: Python<'_>,
    inputs: Vec<String>,
    out_prefix: String,
    settings: &str,
    progress: Option<Bound<'_, PyAny>>,
) -> PyResult<String> {
    let settings: Value = serde_json::from_str(settings)
        .map_err(|why| PyValueError::new_err(format!("cannot use settings: {why}")))?;
    let options = options_of(&settings, inputs, out_prefix)?;
    let now = Mutex::new(PreprocessProgress::default());
    let stop = AtomicBool::new(false);
    let work = || {
        preprocess::run_until(&options, &stop, &mut |progress| {
            *now.lock().unwrap_or_else(PoisonError::into_inner) = *progress;
        })
    };
    let look = |_: Python<'_>| {
        let Some(progress) = &progress else { return Ok(()) };
        let now = *now.lock().unwrap_or_else(PoisonError::into_inner);
        progress
            .call1((now.documents, now.tokens, now.stored_bytes, now.stored_bytes_all))
            .map(|_| ())
    };
    let halt = || stop.store(true, Ordering::Relaxed);
    let report = beside_with(py, halt, work, look)?.or_raise()?;
    Ok(json!(report).to_string())
}

/// Reads everything that a name stands for and compares it with all checksums and rules there are;
/// returns the verdict as JSON.
#[pyfunction]
#[pyo3(name = "check")]
pub(crate) fn run_check(
    py: Python<'_>,
    name: String,
    progress: Option<Bound<'_, PyAny>>,
) -> PyResult<String> {
    verb(py, progress.as_ref(), |job| {
        let target = InspectTarget::find(&name)?.watched(job);
        let verdict = job.end(check::check(&target, &FormatHints::default(), job))?;
        Ok(json!({ "ok": verdict.ok(), "verdict": verdict }))
    })
}

/// Sizes and counts of what a name stands for, as JSON.
#[pyfunction]
#[pyo3(name = "inspect")]
pub(crate) fn run_inspect(py: Python<'_>, name: String) -> PyResult<String> {
    verb(py, None, |job| {
        let target = InspectTarget::find(&name)?.watched(job);
        let found = job.end(inspect::inspect(&target, &FormatHints::default(), job))?;
        Ok(json!(found))
    })
}

/// The steps of a folder, as JSON.
#[pyfunction]
pub(crate) fn ckpt_ls(py: Python<'_>, folder: String) -> PyResult<String> {
    verb(py, None, |job| {
        let listed = ls::list(&job.watch(existing(&folder, "list")?))?;
        Ok(json!(listed))
    })
}

/// Reads every byte of the steps that a name stands for; returns the verdicts as JSON.
#[pyfunction]
pub(crate) fn ckpt_verify(
    py: Python<'_>,
    name: String,
    progress: Option<Bound<'_, PyAny>>,
) -> PyResult<String> {
    verb(py, progress.as_ref(), |job| {
        let target = InspectTarget::find(&name)?.watched(job);
        let verified = verify::verify(&target, |steps, open| {
            let report = open.verify()?;
            steps.note_verified(open);
            Ok(report.bytes)
        });
        let verified = job.end(verified)?;
        let ok = verified.ok();
        let mut value = json!({ "ok": ok, "skipped": [] });
        value.as_object_mut().into_iter().for_each(|all| {
            all.extend(json!(verified).as_object().cloned().unwrap_or_default());
        });
        Ok(value)
    })
}

/// The differences of two steps, as JSON.
#[pyfunction]
pub(crate) fn ckpt_diff(
    py: Python<'_>,
    a: String,
    b: String,
    read: bool,
    progress: Option<Bound<'_, PyAny>>,
) -> PyResult<String> {
    verb(py, progress.as_ref(), |job| {
        let open = |name| open_target(&InspectTarget::find(name)?.watched(job), name);
        let differences = diff::compare_steps(&open(&a)?, &open(&b)?, read, &mut |_| ());
        Ok(json!(job.end(differences)?))
    })
}

/// Runs a verb beside the interpreter; Ctrl-C stops its stores.
fn verb(
    py: Python<'_>,
    progress: Option<&Bound<'_, PyAny>>,
    run: impl FnOnce(&Arc<CancellableJob>) -> anyhow::Result<Value> + Send,
) -> PyResult<String> {
    let stop = StopSignal::default();
    let job = CancellableJob::until(stop.clone());
    let look = reporting(progress, || job.moved_bytes());
    let value = beside_with(py, || stop.set(), || run(&job), look)?;
    value.or_raise().map(|value| value.to_string())
}
