//! `feedline materialize` is killed time and again, and ends in the bytes of a run that never was.

mod s3;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use indexed::{Builder, Dtype};
use serde_json::Value;
use storage::Key;

/// Longest that a run is waited for.
const PATIENCE: Duration = Duration::from_secs(60);
const KILLS: u64 = 6;

/// Where a disk is quick or the machine busy a run may be done before it is killed: then another
/// is begun, so often at most.
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

/// Samples that the record of an unfinished run has.
fn certain(folder: &Path) -> u64 {
    let text = fs::read(folder.join("out.unfinished.json")).unwrap_or_default();
    serde_json::from_slice::<Value>(&text).map_or(0, |record| record["samples"].as_u64().unwrap())
}

/// Kills a run when so many samples are certain and a moment has passed. False if it was done.
fn kill(folder: &Path, samples: u64, moment: Duration) -> bool {
    let mut command = materialize(folder, &[]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let begun = Instant::now();
    while certain(folder) < samples {
        if begun.elapsed() > PATIENCE {
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
fn kills_change_no_byte() {
    let due = corpus();
    let samples = done(&materialize(due.path(), &[]).output().unwrap())["samples"].clone();
    let samples = samples.as_u64().unwrap();
    let seed = std::env::var("FEEDLINE_SEED").ok().and_then(|text| text.parse().ok());
    let mut state: u64 = seed.unwrap_or(20_261_121);
    println!("FEEDLINE_SEED={state}");
    let mut random = |below: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % below
    };
    let mut killed = || {
        let (got, mut inside) = (corpus(), 0);
        for nth in 0..KILLS {
            let at = 1 + (nth * samples + random(samples)) / (KILLS + 1);
            let moment = Duration::from_micros(random(3000));
            let was_killed = kill(got.path(), at, moment);
            println!("kill {nth} at {at} of {samples} samples: {was_killed}");
            inside += u64::from(was_killed && certain(got.path()) > 0);
        }
        (inside >= KILLS / 2).then_some(got)
    };
    let got = (0..TRIES).find_map(|_| killed()).expect("the kills came too late to try anything");
    if got.path().join("out.manifest.json").exists() {
        return; // the last of them came when it was done
    }
    let told = done(&materialize(got.path(), &[]).output().unwrap());
    assert!(told["samples_before"].as_u64().unwrap() > 0, "it has begun anew");
    let (got, due) = (files(got.path()), files(due.path()));
    let names = got.keys();
    assert!(got == due, "other bytes, or something is left: {names:?}");
}

#[test]
fn other_settings_are_not_mixed_in() {
    let is_killed =
        |at: &tempfile::TempDir| kill(at.path(), 1, Duration::ZERO) && certain(at.path()) > 0;
    let folder = (0..TRIES).map(|_| corpus()).find(is_killed);
    let folder = folder.expect("it was done before it was killed");
    // What the kill left half-written is swept by whoever comes next.
    let lasting = || {
        let mut files = files(folder.path());
        files.retain(|name, _| !name.contains(".tmp-"));
        files
    };
    let before = lasting();
    let other = materialize(folder.path(), &["--seed", "7"]).output().unwrap();
    let told = String::from_utf8_lossy(&other.stderr);
    assert_eq!(other.status.code(), Some(2), "{told}");
    assert!(told.contains("random_seed") && told.contains("--restart"), "{told}");
    assert!(lasting() == before, "what was refused has changed something");
    let anew = done(&materialize(folder.path(), &["--seed", "7", "--restart"]).output().unwrap());
    assert_eq!(anew["samples_before"], 0);
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
