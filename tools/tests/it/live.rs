//! Folders of checkpoints that a run writes to, and deletes from, while they are read.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use ckpt::{Checkpoints, Dtype, Group, TensorData};
use serde_json::{Value, json};
use storage::testing::fault_store::HookLayer;
use storage::{Key, Storage};
use tools::ckpt::{ls, verify};
use tools::data::check::check;
use tools::ui::inspect_target::InspectTarget;
use tools::ui::job::CancellableJob;
use tools::ui::output::FormatHints;

fn steps(folder: &Path, all: impl IntoIterator<Item = u64>) -> Arc<dyn Storage> {
    let store = storage::open_url(folder.to_str().unwrap()).unwrap();
    let checkpoints = Checkpoints::open(Arc::clone(&store), Key::root());
    let bytes = [7; 24];
    let (dtype, group) = (Dtype::F32, Group::Model);
    for step in all {
        let tensor = TensorData { name: "w", group, dtype, shape: &[2, 3], bytes: &bytes };
        checkpoints.save(step, &[tensor], &[], json!({})).unwrap();
    }
    store
}

/// A store that deletes step 20 when this file of it is opened, after all steps were listed.
fn deleting(store: Arc<dyn Storage>, file: &str) -> Arc<dyn Storage> {
    let step = Key::new("step-000000000020").unwrap();
    let file = step.join(file).unwrap();
    HookLayer::new(store, move |inner, call, key| {
        if call == "open" && *key == file { inner.delete_folder(&step) } else { Ok(()) }
    })
}

/// Retention deletes old steps while they are verified one after the other.
#[test]
fn step_deleted_during_a_check_is_not_damage() {
    for file in ["MANIFEST.json", "model-00001-of-00001.safetensors"] {
        let watched = |deletes: bool| {
            let folder = tempfile::tempdir().unwrap();
            let mut store = steps(folder.path(), [10, 20, 30]);
            if deletes {
                store = deleting(store, file);
            } else {
                let shard = "step-000000000020/model-00001-of-00001.safetensors";
                std::fs::write(folder.path().join(shard), b"short").unwrap();
            }
            (InspectTarget::Checkpoints { store }, folder)
        };
        for deletes in [true, false] {
            let (target, _folder) = watched(deletes);
            let work = CancellableJob::of_reading();
            let checked = check(&target, &FormatHints::default(), &work).unwrap();
            let skipped: &[u64] = if deletes { &[20] } else { &[] };
            assert_eq!((checked.ok(), &*checked.skipped), (deletes, skipped), "{file}");
            assert_eq!(checked.text().contains("removed meanwhile"), deletes, "{}", checked.text());

            let (target, _folder) = watched(deletes);
            let verified = verify::verify(&target, |_, open| Ok(open.verify()?.bytes)).unwrap();
            let report = serde_json::to_value(&verified).unwrap();
            let ok: Vec<&Value> =
                report["steps"].as_array().unwrap().iter().map(|step| &step["ok"]).collect();
            let all: &[bool] = if deletes { &[true, true] } else { &[true, false, true] };
            assert_eq!(ok, all, "{file}: {report}");
            assert_eq!(report.get("skipped").is_some(), deletes, "{report}");
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let store = deleting(steps(folder.path(), [10, 20, 30]), "MANIFEST.json");
    let report = serde_json::to_value(ls::list(&store).unwrap()).unwrap();
    let listed: Vec<&Value> =
        report["steps"].as_array().unwrap().iter().map(|step| &step["step"]).collect();
    assert_eq!(listed, [10, 30], "{report}");
}

/// Nothing was verified, which is no success.
#[test]
fn deletion_of_the_only_step_is_not_success() {
    let folder = tempfile::tempdir().unwrap();
    let store = deleting(steps(folder.path(), [20]), "MANIFEST.json");
    let target = InspectTarget::Checkpoints { store };
    let refused = verify::verify(&target, |_, open| Ok(open.verify()?.bytes)).unwrap_err();
    assert!(refused.to_string().contains("removed meanwhile"), "{refused}");
}

/// A listing of a folder costs one read a step: listing the folder for each step again took minutes
/// for some ten thousand steps.
#[test]
fn folder_is_listed_once_for_all_steps() {
    const STEPS: u64 = 30;
    let folder = tempfile::tempdir().unwrap();
    let calls = Arc::new(Mutex::new(BTreeMap::<String, u64>::new()));
    let counted = Arc::clone(&calls);
    let store = HookLayer::new(steps(folder.path(), 1..=STEPS), move |_, call, _| {
        *counted.lock().unwrap().entry(call.to_owned()).or_default() += 1;
        Ok(())
    });
    let count = |work: &dyn Fn()| {
        calls.lock().unwrap().clear();
        work();
        let calls = calls.lock().unwrap();
        ["list", "names", "open"].map(|call| calls.get(call).copied().unwrap_or(0))
    };
    // The names are listed for the steps and for the other files; a manifest is opened for its
    // length, and to be read.
    assert_eq!(count(&|| drop(ls::list(&store).unwrap())), [1, 2, 2 * STEPS]);
    let target = InspectTarget::Checkpoints { store: Arc::clone(&store) };
    let quick = || drop(verify::verify(&target, |_, _| Ok(0)).unwrap());
    assert_eq!(count(&quick), [1, 1, 2 * STEPS]);
}
