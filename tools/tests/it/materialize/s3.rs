//! `feedline materialize` to a bucket is killed, or refused a request, and goes on: it ends in the
//! bytes of a run to a disk that never was, and leaves nothing else in the bucket.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use indexed::{Builder, Dtype};
use serde_json::Value;
use storage::s3_server::{Fault, FaultRule, S3Server};
use storage::{Key, open_url, read_all};

/// Longest that a run is waited for.
const PATIENCE: Duration = Duration::from_secs(60);

const NAMES: [&str; 4] = ["out.bin", "out.crc", "out.idx", "out.manifest.json"];

/// A corpus whose samples fill a part and some of another one, and its files as a disk has them.
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

/// What a run that ends well says; nothing but the files is left.
fn finish(server: &S3Server, folder: &Path, place: &str, due: &[Vec<u8>; 4]) -> Value {
    let output = materialize(folder, &url(server, place)).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    // It may have been done but for saying so.
    let was_done = told.contains("out.manifest.json: exists already");
    assert!(was_done || output.status.success(), "{place}: {told}");
    let store = open_url(&server.url(place)).unwrap();
    assert_eq!(store.list_names(&Key::root()).unwrap(), NAMES, "{place}");
    for (name, due) in NAMES.iter().zip(due) {
        let got = read_all(&*store, &Key::new(*name).unwrap()).unwrap();
        assert!(got == *due, "{place}: {name} has other bytes");
    }
    assert!(store.open(&Key::new(".out.bin.draft").unwrap()).is_err(), "{place}: a state is left");
    serde_json::from_slice(&output.stdout).unwrap_or_default()
}

fn done(output: &Output) -> bool {
    let told = String::from_utf8_lossy(&output.stderr);
    // An error of ours, or none: no panic.
    assert!(matches!(output.status.code(), Some(0 | 2)), "{told}");
    output.status.success()
}

#[test]
fn a_request_that_is_refused_costs_no_byte() {
    let (folder, due) = corpus();
    let server = S3Server::start().unwrap();
    let first = server.request_count();
    finish(&server, folder.path(), "whole", &due);
    let requests = server.request_count() - first;
    println!("{requests} requests");
    let mut went_on = 0;
    for nth in (1..requests).step_by(3) {
        let place = format!("refused-{nth}");
        server.inject(FaultRule::nth(nth, Fault::Denied).to(&place));
        let output = materialize(folder.path(), &url(&server, &place)).output().unwrap();
        server.heal();
        if !done(&output) {
            let told = finish(&server, folder.path(), &place, &due);
            went_on += u64::from(told["samples_before"].as_u64() > Some(0));
        }
    }
    assert!(went_on > 2, "only {went_on} of {requests} went on with what was there");
    assert_eq!(server.upload_count(), 0, "parts are left");
}

#[test]
fn kills_change_no_byte() {
    let (folder, due) = corpus();
    let server = S3Server::start().unwrap();
    let (mut killed, mut went_on) = (0, 0);
    for requests in [8, 24, 32, 38, 42, 46, 50, 54, 58] {
        let place = format!("killed-{requests}");
        let first = server.request_count();
        let mut command = materialize(folder.path(), &url(&server, &place));
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let begun = Instant::now();
        while server.request_count() - first < requests && child.try_wait().unwrap().is_none() {
            if begun.elapsed() > PATIENCE {
                panic!("waited for {PATIENCE:?}");
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        child.kill().unwrap();
        if child.wait().unwrap().success() {
            continue;
        }
        killed += 1;
        let told = finish(&server, folder.path(), &place, &due);
        went_on += u64::from(told["samples_before"].as_u64() > Some(0));
        // An upload whose name the process had not noted yet has no parts.
        assert!(server.upload_count() <= killed, "{} uploads are left", server.upload_count());
    }
    println!("{killed} were killed, {went_on} went on");
    assert!(killed >= 3 && went_on >= 1, "{killed} were killed, {went_on} went on");
}

/// Parts of the whole output, each ready when it was killed: none is sent twice.
#[test]
fn what_is_there_is_not_sent_again() {
    let (folder, due) = corpus();
    let server = S3Server::start().unwrap();
    let place = "ready";
    server.inject(FaultRule::every(1, Fault::Denied).of("POST").to("uploadId"));
    let output = materialize(folder.path(), &url(&server, place)).output().unwrap();
    assert!(!done(&output), "it was completed");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(told.contains("status 403 AccessDenied"), "{told}");
    server.heal();
    server.inject(FaultRule::every(1, Fault::Denied).of("PUT").to("partNumber"));
    let told = finish(&server, folder.path(), place, &due);
    assert_eq!(told["samples_before"], told["samples"]);
    assert_eq!(told["read_bytes"], 0);
    // With --restart nothing is left of a run either.
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
