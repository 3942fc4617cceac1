//! Commands are killed, or lose power, at every operation on the disk: the same command then gives
//! the files of an undisturbed run, and no others.
//!
//! Before, a kill left temporary files that nothing removed, or a `.bin` and an `.idx` without a
//! manifest, over which the same command refused to write.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use indexed::{Builder, Dtype, Format};
use serde_json::Value;
use storage::testing::fault_store::{FaultPlan, FaultStore, HookLayer};
use storage::{Key, Liveness, ProcessIdentity, Storage};
use tools::data::convert::{ConvertRequest, convert};
use tools::data::merge::{MergeRequest, PrefixOrder, merge};
use tools::data::repair::{RepairRequest, repair};
use tools::data::split::{SplitRequest, split};
use tools::ui::job::CancellableJob;
use tools::ui::output_claim::Takeover;

/// A command that writes below `out`.
type Verb = fn(Arc<dyn Storage>, Takeover) -> anyhow::Result<()>;

fn run_merge(store: Arc<dyn Storage>, takeover: Takeover) -> anyhow::Result<()> {
    let inputs = vec!["a".to_owned(), "b".to_owned()];
    let (out, order) = ("out/m".to_owned(), PrefixOrder::Name);
    let (multimodal, partial, verify) = (false, false, false);
    let request = MergeRequest { inputs, out, order, multimodal, partial, verify, takeover };
    merge(&request, &CancellableJob::in_store(store)).map(drop)
}

fn run_split(store: Arc<dyn Storage>, takeover: Takeover) -> anyhow::Result<()> {
    let (source, split_by, out) = ("a".to_owned(), "50,25,25".to_owned(), "out/s".to_owned());
    let request = SplitRequest { source, split: split_by, out, takeover };
    split(&request, &CancellableJob::in_store(store)).map(drop)
}

fn run_repair(store: Arc<dyn Storage>, takeover: Takeover) -> anyhow::Result<()> {
    let request = RepairRequest { source: "short".to_owned(), out: "out/r".to_owned(), takeover };
    repair(&request, &CancellableJob::in_store(store)).map(drop)
}

fn run_convert(to: Format, store: Arc<dyn Storage>, takeover: Takeover) -> anyhow::Result<()> {
    let request = ConvertRequest {
        source: "a".to_owned(),
        out: "out/c".to_owned(),
        from: None,
        to,
        dtype: None,
        source_dtype: None,
        eod: None,
        takeover,
    };
    convert(&request, &CancellableJob::in_store(store)).map(drop)
}

const CONVERSIONS: [(Format, Verb); 5] = [
    (Format::Mmididx, |store, takeover| run_convert(Format::Mmididx, store, takeover)),
    (Format::NanoGpt, |store, takeover| run_convert(Format::NanoGpt, store, takeover)),
    (Format::Paddle, |store, takeover| run_convert(Format::Paddle, store, takeover)),
    (Format::Yuan, |store, takeover| run_convert(Format::Yuan, store, takeover)),
    (Format::Datatrove, |store, takeover| run_convert(Format::Datatrove, store, takeover)),
];

fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

/// Two datasets, and one whose `.bin` is too short.
fn sources() -> FaultStore {
    let store = FaultStore::new(5, FaultPlan::default());
    let shared: Arc<dyn Storage> = Arc::new(store.clone());
    for (name, documents) in [("a", 8), ("b", 3)] {
        let mut builder = Builder::create(&shared, &key(name), Dtype::U16).unwrap();
        for document in 0..documents {
            builder.add_sequence(&vec![document; 5 + document as usize]).unwrap();
            builder.end_document().unwrap();
        }
        builder.finish().unwrap();
    }
    let read = |name: &str| storage::read_all(&store, &key(name)).unwrap();
    let bin = read("a.bin");
    storage::write_all(&store, &key("short.bin"), &bin[..bin.len() - 7]).unwrap();
    storage::write_all(&store, &key("short.idx"), &read("a.idx")).unwrap();
    store
}

/// Everything below `out`, hidden files too.
fn outputs(store: &FaultStore) -> BTreeMap<String, Vec<u8>> {
    let below = |path: &String| path.starts_with("out/");
    let paths = store.raw_paths().into_iter().filter(below);
    paths.map(|path| (path.clone(), storage::read_all(store, &key(&path)).unwrap())).collect()
}

/// Changes the owner of markers: in this process, the killed one would be alive.
fn set_owner(store: &FaultStore, owner: &str) {
    for name in store.list_names(&key("out")).unwrap() {
        if !name.contains(".writing-") {
            continue;
        }
        let key = key("out").join(&name).unwrap();
        let mut record: Value =
            serde_json::from_slice(&storage::read_all(store, &key).unwrap()).unwrap();
        record["owner"] = owner.into();
        store.delete(&key).unwrap();
        storage::write_all(store, &key, record.to_string().as_bytes()).unwrap();
    }
}

/// A process that had the pid of this one before it; `None` where no process is known to be dead.
#[expect(clippy::print_stderr, reason = "a skipped test must be seen")]
pub fn dead() -> Option<String> {
    let here = ProcessIdentity::new().to_string();
    let (rest, number) = here.rsplit_once('.').unwrap();
    let (rest, started) = rest.rsplit_once('.').unwrap();
    let dead = format!("{rest}.{}.{number}", started.parse::<u64>().unwrap() + 1);
    let is_known = ProcessIdentity::parse(&dead).unwrap().life() == Liveness::Dead;
    if !is_known {
        eprintln!("SKIPPED: /proc hides processes, so that none is known to be dead");
    }
    is_known.then_some(dead)
}

fn run(verb: Verb, store: &FaultStore) -> anyhow::Result<()> {
    verb(Arc::new(store.clone()), Takeover::Dead)
}

/// Runs a verb after a crash. If all manifests were visible the run was complete, so it is refused
/// as after an undisturbed run.
fn check_rerun(verb: Verb, left: &FaultStore, expected: &BTreeMap<String, Vec<u8>>, what: &str) {
    let before = outputs(left);
    let mut manifests = expected.keys().filter(|name| name.ends_with(".manifest.json"));
    let is_complete = manifests.all(|name| before.contains_key(name));
    match run(verb, left) {
        Err(error) if is_complete => {
            assert!(error.to_string().contains("already exists"), "{what}: {error}");
        }
        outcome => outcome.unwrap_or_else(|error| panic!("{what}: {error:#}")),
    }
    let after = outputs(left);
    let names = |of: &BTreeMap<String, Vec<u8>>| of.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&after), names(expected), "{what}, which left {:?}", names(&before));
    assert!(after == *expected, "{what}: other bytes");
}

fn check_every_crash(verb: Verb) {
    let Some(dead) = dead() else { return };
    let store = sources();
    let first = store.op_count();
    run(verb, &store).unwrap();
    let expected = outputs(&store);
    assert!(expected.len() > 1, "{:?}", expected.keys());
    for op in first..=store.op_count() {
        for seed in 0..3 {
            let left = store.crash_at(op, seed);
            set_owner(&left, &dead);
            check_rerun(verb, &left, &expected, &format!("operation {op}, seed {seed}"));
        }
    }
}

#[test]
fn a_killed_merge_is_repeated() {
    check_every_crash(run_merge);
}

#[test]
fn a_killed_split_is_repeated() {
    check_every_crash(run_split);
}

#[test]
fn a_killed_repair_is_repeated() {
    check_every_crash(run_repair);
}

#[test]
fn a_killed_conversion_is_repeated() {
    for (_, verb) in CONVERSIONS {
        check_every_crash(verb);
    }
}

/// A claim may delete exactly what the writer creates.
#[test]
fn suffixes_match_the_written_files() {
    for (format, verb) in CONVERSIONS {
        let store = sources();
        run(verb, &store).unwrap();
        for name in outputs(&store).keys() {
            let suffix = name.strip_prefix("out/c").unwrap();
            let is_known = format.written_suffixes().contains(&suffix);
            assert!(is_known || suffix == ".manifest.json", "{format}: {suffix}");
        }
    }
}

/// The run that removes the debris of a killed one is itself killed.
#[test]
fn run_that_removes_debris_can_be_killed_too() {
    let Some(dead) = dead() else { return };
    let store = sources();
    let first = store.op_count();
    run(run_split, &store).unwrap();
    let expected = outputs(&store);
    for part in 1..6 {
        let op = first + (store.op_count() - first) * part / 6;
        let left = store.crash_at(op, 1);
        set_owner(&left, &dead);
        let again = left.op_count();
        run(run_split, &left).unwrap();
        for next in again..=left.op_count() {
            let left = left.crash_at(next, 2);
            set_owner(&left, &dead);
            check_rerun(run_split, &left, &expected, &format!("operation {op}, then {next}"));
        }
    }
}

/// A store whose first `call` of an object starts a second run and reports its outcome.
fn with_second_run(
    store: &FaultStore,
    verb: Verb,
    call: &'static str,
    name: &'static str,
    check: fn(anyhow::Result<()>),
) -> Arc<dyn Storage> {
    let inner: Arc<dyn Storage> = Arc::new(store.clone());
    let (is_done, second) = (AtomicBool::new(false), Arc::clone(&inner));
    HookLayer::new(inner, move |_, what, key| {
        if what == call && key.as_str() == name && !is_done.swap(true, Ordering::Relaxed) {
            check(verb(Arc::clone(&second), Takeover::DeadOrUnknown));
        }
        Ok(())
    })
}

#[test]
fn one_of_two_concurrent_runs_wins() {
    let store = sources();
    run(run_merge, &store).unwrap();
    let expected = outputs(&store);

    // The second starts while the first writes, at its start and at its end.
    for (call, name) in [("create", "out/m.idx"), ("finish", "out/m.manifest.json")] {
        let store = sources();
        let refused = |outcome: anyhow::Result<()>| {
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("expected one writer") && error.contains("at work"), "{error}");
        };
        let first = with_second_run(&store, run_merge, call, name, refused);
        run_merge(first, Takeover::Dead).unwrap();
        assert!(outputs(&store) == expected, "{call} {name}");
    }

    // The second starts and ends between the check of the first and its marker.
    let store = sources();
    let first = with_second_run(&store, run_merge, "create", "out/.m.writing-0", Result::unwrap);
    let error = run_merge(first, Takeover::Dead).unwrap_err().to_string();
    assert!(error.contains("already exists"), "{error}");
    assert!(outputs(&store) == expected, "the loser deletes nothing");
}

/// Without a marker the owner of a file is unknown, and a manifest makes it a dataset.
#[test]
fn files_of_other_programs_are_retained() {
    let Some(dead) = dead() else { return };
    for name in ["out/m.bin", "out/m.idx", "out/m.manifest.json"] {
        let store = sources();
        storage::write_all(&store, &key(name), b"of another program").unwrap();
        let before = outputs(&store);
        let error = run(run_merge, &store).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("already exists"), "{error}");
        assert_eq!(outputs(&store), before);
    }
    // After a kill another program wrote there: the markers do not name what it wrote.
    let store = sources();
    let first = store.op_count();
    run_convert(Format::NanoGpt, Arc::new(store.clone()), Takeover::Dead).unwrap();
    for (marker, foreign, rerun) in [
        ("out/.c.writing-0", "out/c.bin", Format::NanoGpt),
        ("out/.c.writing-0", "out/c.npy", Format::Yuan),
        ("out/.c.writing-1", "out/c.npy", Format::Yuan),
    ] {
        let is_marked = |op: &usize| outputs(&store.crash_at(*op, 0)).contains_key(marker);
        let op = (first..store.op_count()).find(is_marked).unwrap();
        let left = store.crash_at(op, 0);
        set_owner(&left, &dead);
        storage::write_all(&left, &key(foreign), b"of another program").unwrap();
        let outcome = run_convert(rerun, Arc::new(left.clone()), Takeover::Dead);
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains(foreign) && error.contains("already exists"), "{error}");
        assert_eq!(outputs(&left)[foreign], b"of another program");
    }
}

/// A run that finds files of another program at its end fails, and does not replace them.
#[test]
fn files_that_appear_during_a_run_are_retained() {
    let store = sources();
    let other = store.clone();
    let first = HookLayer::new(Arc::new(store.clone()), move |_, what, key| {
        if what == "finish" && key.as_str() == "out/m.bin" {
            storage::write_all(&other, key, b"of another program")?;
        }
        Ok(())
    });
    let error = run_merge(first, Takeover::Dead).unwrap_err().to_string();
    assert!(error.contains("already exists"), "{error}");
    let after = outputs(&store);
    assert_eq!(after.keys().collect::<Vec<_>>(), ["out/m.bin"]);
    assert_eq!(after["out/m.bin"], b"of another program");
}

/// A process of another machine may still run: only `--restart` takes its outputs over.
#[test]
fn outputs_of_an_unknown_owner_are_retained() {
    let store = sources();
    let first = store.op_count();
    run(run_merge, &store).unwrap();
    let expected = outputs(&store);
    let has_bin = |op: &usize| {
        let names = outputs(&store.crash_at(*op, 0));
        names.contains_key("out/m.bin") && !names.contains_key("out/m.manifest.json")
    };
    let op = (first..store.op_count()).find(has_bin).unwrap();
    let left = store.crash_at(op, 0);
    let here = ProcessIdentity::new().to_string();
    set_owner(&left, &format!("elsewhere.{here}"));
    let before = outputs(&left);
    let error = run(run_merge, &left).unwrap_err().to_string();
    for part in ["elsewhere", "--restart", "out/.m.writing-0"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    let objects = |of: &BTreeMap<String, Vec<u8>>| {
        let mut names: Vec<String> = of.keys().cloned().collect();
        names.retain(|name| !name.contains(".tmp-"));
        names
    };
    assert_eq!(objects(&outputs(&left)), objects(&before));
    run_merge(Arc::new(left.clone()), Takeover::DeadOrUnknown).unwrap();
    assert!(outputs(&left) == expected);
}

/// As a user runs it after a container was killed: the next container has another name.
#[test]
fn restart_removes_outputs_of_another_container() {
    let folder = tempfile::tempdir().unwrap();
    let owner = format!("elsewhere.{}", ProcessIdentity::new());
    let record = format!(
        r#"{{"owner": "{owner}", "command": "convert", "suffixes": [".bin", ".idx", ".crc"],
            "drafts": [".outline"], "manifests": ["out.manifest.json"]}}"#
    );
    let temporary = format!(".out.idx.tmp-{owner}");
    for (name, text) in
        [(".out.writing-0", record.as_str()), ("out.bin", ""), (temporary.as_str(), "")]
    {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    let names = || {
        let entries = std::fs::read_dir(folder.path()).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let before = names();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/legacy/tntidx_i32");
    let convert = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_feedline"));
        command.args(["convert", source, "out"]).args(more).current_dir(folder.path());
        command.output().unwrap()
    };
    let refused = convert(&[]);
    let stderr = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("--restart") && stderr.contains(".out.writing-0"), "{stderr}");
    assert_eq!(names(), before);
    let done = convert(&["--restart"]);
    assert_eq!(done.status.code(), Some(0), "{}", String::from_utf8_lossy(&done.stderr));
    let is_output = |name: &OsString| name.to_str().unwrap().starts_with("out.");
    assert!(names().iter().all(is_output), "{:?}", names());
}
