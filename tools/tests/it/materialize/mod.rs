//! `feedline materialize` is killed repeatedly, and gives the bytes of an undisturbed run.

mod s3;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use indexed::{Builder, Dtype};
use serde_json::Value;
use storage::Key;

/// Longest wait for a run.
const PATIENCE: Duration = Duration::from_secs(60);
const KILLS: u64 = 6;

/// On a fast disk or a busy machine a run may end before it is killed: then another one is started,
/// at most this often.
const TRIES: usize = 20;

/// A corpus of a megabyte, the same in every folder.
fn corpus() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let store = storage::open_url(folder.path().to_str().unwrap()).unwrap();
    let mut builder = Builder::create(&store, &Key::new("corpus").unwrap(), Dtype::U16).unwrap();
    let tokens: Vec<u32> = (0..3000_u32).map(|at| at * 7919 % 50_000).collect();
    for document in 0..1000 {
        builder.add_sequence(&tokens[document..document + 300 + document % 400]).unwrap();
        builder.end_document().unwrap();
    }
    builder.finish().unwrap();
    folder
}

/// Windows of few samples, each of which is committed.
fn materialize(folder: &Path, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_feedline"));
    let args = "materialize corpus --out out --seq-length 64 --memory 32KiB \
                --commit-every 1B --data-cache-path cache --json";
    command.current_dir(folder).args(args.split_whitespace()).args(more);
    command
}

fn done(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// All files of a folder, hidden ones among them.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let files = entries.filter(|entry| entry.file_type().unwrap().is_file());
    let named = files
        .map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap()));
    named.collect()
}

/// Committed samples, from the record of an unfinished run.
fn committed(folder: &Path) -> u64 {
    let text = fs::read(folder.join("out.unfinished.json")).unwrap_or_default();
    serde_json::from_slice::<Value>(&text).map_or(0, |record| record["samples"].as_u64().unwrap())
}

/// Kills a run after `samples` are committed and a moment has passed. Returns false if the run
/// ended first.
fn kill(folder: &Path, samples: u64, moment: Duration) -> bool {
    let mut command = materialize(folder, &[]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let started = Instant::now();
    while committed(folder) < samples {
        if started.elapsed() > PATIENCE {
            panic!("waited for {PATIENCE:?}");
        }
        if child.try_wait().unwrap().is_some() {
            return false;
        }
    }
    std::thread::sleep(moment);
    child.kill().unwrap();
    child.wait().unwrap();
    true
}

#[test]
fn killed_run_gives_the_same_bytes() {
    let expected = corpus();
    let samples = done(&materialize(expected.path(), &[]).output().unwrap())["samples"].clone();
    let samples = samples.as_u64().unwrap();
    let seed = std::env::var("FEEDLINE_SEED").ok().and_then(|text| text.parse().ok());
    let mut state: u64 = seed.unwrap_or(20_261_121);
    println!("FEEDLINE_SEED={state}");
    let mut random = |below: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % below
    };
    let mut killed = || {
        let (found, mut inside) = (corpus(), 0);
        for nth in 0..KILLS {
            let at = 1 + (nth * samples + random(samples)) / (KILLS + 1);
            let moment = Duration::from_micros(random(3000));
            let was_killed = kill(found.path(), at, moment);
            println!("kill {nth} at {at} of {samples} samples: {was_killed}");
            inside += u64::from(was_killed && committed(found.path()) > 0);
        }
        (inside >= KILLS / 2).then_some(found)
    };
    let found = (0..TRIES).find_map(|_| killed()).expect("all kills came too late");
    if found.path().join("out.manifest.json").exists() {
        return; // the run ended before the last kill
    }
    let report = done(&materialize(found.path(), &[]).output().unwrap());
    assert!(report["samples_before"].as_u64().unwrap() > 0, "it started from scratch");
    let (found, expected) = (files(found.path()), files(expected.path()));
    let names = found.keys();
    assert!(found == expected, "other bytes, or something is left: {names:?}");
}

#[test]
fn other_settings_are_refused() {
    let is_killed =
        |at: &tempfile::TempDir| kill(at.path(), 1, Duration::ZERO) && committed(at.path()) > 0;
    let folder = (0..TRIES).map(|_| corpus()).find(is_killed);
    let folder = folder.expect("it was done before it was killed");
    // The next run removes the temporary files of the killed one.
    let lasting = || {
        let mut files = files(folder.path());
        files.retain(|name, _| !name.contains(".tmp-"));
        files
    };
    let before = lasting();
    let other = materialize(folder.path(), &["--seed", "7"]).output().unwrap();
    let stderr = String::from_utf8_lossy(&other.stderr);
    assert_eq!(other.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("random_seed") && stderr.contains("--restart"), "{stderr}");
    assert!(lasting() == before, "what was refused has changed something");
    let restarted =
        done(&materialize(folder.path(), &["--seed", "7", "--restart"]).output().unwrap());
    assert_eq!(restarted["samples_before"], 0);
    let names: Vec<String> = files(folder.path()).into_keys().collect();
    assert_eq!(
        names,
        [
            "corpus.bin",
            "corpus.crc",
            "corpus.idx",
            "out.bin",
            "out.crc",
            "out.idx",
            "out.manifest.json"
        ]
    );
}
