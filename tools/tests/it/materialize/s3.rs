//! `feedline materialize` to a bucket is killed, or a request is refused, and then resumed: it
//! gives the bytes of an undisturbed run to a disk, and leaves nothing else in the bucket.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use indexed::{Builder, Dtype};
use serde_json::Value;
use storage::s3_server::{Fault, FaultRule, S3Server};
use storage::{Key, open_url, read_all};

/// Longest wait for a run.
const PATIENCE: Duration = Duration::from_secs(60);

const NAMES: [&str; 4] = ["out.bin", "out.crc", "out.idx", "out.manifest.json"];

/// A corpus whose samples fill more than one part, and its output files on a disk.
fn corpus() -> (tempfile::TempDir, [Vec<u8>; 4]) {
    let folder = tempfile::tempdir().unwrap();
    let store = open_url(folder.path().to_str().unwrap()).unwrap();
    let mut builder = Builder::create(&store, &Key::new("corpus").unwrap(), Dtype::U16).unwrap();
    let tokens: Vec<u32> = (0..20_000_u32).map(|at| at * 7919 % 50_000).collect();
    for document in 0..1000 {
        builder.add_sequence(&tokens[document..document + 9000 + document % 400]).unwrap();
        builder.end_document().unwrap();
    }
    builder.finish().unwrap();
    let output = materialize(folder.path(), "out").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let files = NAMES.map(|name| fs::read(folder.path().join(name)).unwrap());
    assert!(files[0].len() > 17 << 20, "{} bytes are one part", files[0].len());
    (folder, files)
}

/// Windows of few samples, each of which is committed.
fn materialize(folder: &Path, out: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_feedline"));
    let args = "materialize corpus --seq-length 2047 --memory 1MiB --commit-every 1MiB \
                --data-cache-path cache --json --out";
    command.current_dir(folder).args(args.split_whitespace()).arg(out);
    command
}

fn url(server: &S3Server, place: &str) -> String {
    server.url(&format!("{place}/out")) + "&tries=2"
}

/// Runs the command to its end, and checks that only its files remain; returns the report.
fn finish(server: &S3Server, folder: &Path, place: &str, expected: &[Vec<u8>; 4]) -> Value {
    let output = materialize(folder, &url(server, place)).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    // The earlier run may have completed the output before it failed.
    let was_done = stderr.contains("out.manifest.json: already exists");
    assert!(was_done || output.status.success(), "{place}: {stderr}");
    let store = open_url(&server.url(place)).unwrap();
    assert_eq!(store.list_names(&Key::root()).unwrap(), NAMES, "{place}");
    for (name, expected) in NAMES.iter().zip(expected) {
        let found = read_all(&*store, &Key::new(*name).unwrap()).unwrap();
        assert!(found == *expected, "{place}: {name} has other bytes");
    }
    assert!(store.open(&Key::new(".out.bin.draft").unwrap()).is_err(), "{place}: a state is left");
    serde_json::from_slice(&output.stdout).unwrap_or_default()
}

fn done(output: &Output) -> bool {
    let stderr = String::from_utf8_lossy(&output.stderr);
    // An error of the command, or none: no panic.
    assert!(matches!(output.status.code(), Some(0 | 2)), "{stderr}");
    output.status.success()
}

#[test]
fn resume_after_a_refused_request_gives_the_same_bytes() {
    let (folder, expected) = corpus();
    let server = S3Server::start().unwrap();
    let first = server.request_count();
    finish(&server, folder.path(), "whole", &expected);
    let requests = server.request_count() - first;
    println!("{requests} requests");
    let mut resumed = 0;
    for nth in (1..requests).step_by(3) {
        let place = format!("refused-{nth}");
        server.inject(FaultRule::nth(nth, Fault::Denied).to(&place));
        let output = materialize(folder.path(), &url(&server, &place)).output().unwrap();
        server.heal();
        if !done(&output) {
            let report = finish(&server, folder.path(), &place, &expected);
            resumed += u64::from(report["samples_before"].as_u64() > Some(0));
        }
    }
    assert!(resumed > 2, "only {resumed} of {requests} resumed");
    assert_eq!(server.upload_count(), 0, "parts are left");
}

#[test]
fn killed_run_gives_the_same_bytes() {
    let (folder, expected) = corpus();
    let server = S3Server::start().unwrap();
    let (mut killed, mut resumed) = (0, 0);
    for requests in [8, 24, 32, 38, 42, 46, 50, 54, 58] {
        let place = format!("killed-{requests}");
        let first = server.request_count();
        let mut command = materialize(folder.path(), &url(&server, &place));
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let started = Instant::now();
        while server.request_count() - first < requests && child.try_wait().unwrap().is_none() {
            if started.elapsed() > PATIENCE {
                panic!("waited for {PATIENCE:?}");
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        child.kill().unwrap();
        if child.wait().unwrap().success() {
            continue;
        }
        killed += 1;
        let report = finish(&server, folder.path(), &place, &expected);
        resumed += u64::from(report["samples_before"].as_u64() > Some(0));
        // An upload whose name the process had not noted yet has no parts.
        assert!(server.upload_count() <= killed, "{} uploads are left", server.upload_count());
    }
    println!("{killed} were killed, {resumed} resumed");
    assert!(killed >= 3 && resumed >= 1, "{killed} were killed, {resumed} resumed");
}

/// All parts were uploaded when the run failed: none is uploaded twice.
#[test]
fn uploaded_parts_are_not_uploaded_again() {
    let (folder, expected) = corpus();
    let server = S3Server::start().unwrap();
    let place = "ready";
    server.inject(FaultRule::every(1, Fault::Denied).of("POST").to("uploadId"));
    let output = materialize(folder.path(), &url(&server, place)).output().unwrap();
    assert!(!done(&output), "it was completed");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(stderr.contains("status 403 AccessDenied"), "{stderr}");
    server.heal();
    server.inject(FaultRule::every(1, Fault::Denied).of("PUT").to("partNumber"));
    let report = finish(&server, folder.path(), place, &expected);
    assert_eq!(report["samples_before"], report["samples"]);
    assert_eq!(report["read_bytes"], 0);
    // With --restart, no upload of an earlier run stays.
    server.heal();
    let again = "again";
    server.inject(FaultRule::every(1, Fault::Denied).of("POST").to("uploadId"));
    done(&materialize(folder.path(), &url(&server, again)).output().unwrap());
    assert_eq!(server.upload_count(), 1);
    server.heal();
    let mut command = materialize(folder.path(), &url(&server, again));
    let output = command.args(["--restart", "--samples", "1"]).output().unwrap();
    assert!(done(&output), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(server.upload_count(), 0);
}
