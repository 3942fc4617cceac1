//! An interrupted `feedline doctor` leaves its target as it was, and reports the interruption.

use crate::signals;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use storage::s3_server::{Fault, FaultRule, S3Server};

fn start(target: &str) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_feedline"));
    command.args(["doctor", target]).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits for `has_started`, sends the signal, and returns the output.
fn interrupt(mut child: Child, signal: &str, has_started: &dyn Fn() -> bool) -> Output {
    let until = Instant::now() + Duration::from_secs(60);
    while !has_started() && child.try_wait().unwrap().is_none() && Instant::now() < until {
        thread::sleep(Duration::from_micros(200));
    }
    signals::send(&child, signal);
    child.wait_with_output().unwrap()
}

fn is_interrupted(output: &Output) -> bool {
    let err = String::from_utf8_lossy(&output.stderr);
    let is_it = output.status.code() == Some(2) && err.contains("error: interrupted");
    // A signal that comes too late is not a failure, but a death by the signal is.
    assert!(is_it || matches!(output.status.code(), Some(0 | 1)), "{:?}: {err}", output.status);
    assert!(!is_it || output.stdout.is_empty());
    is_it
}

fn is_empty(folder: &Path) -> bool {
    std::fs::read_dir(folder).unwrap().next().is_none()
}

#[test]
fn interrupted_check_leaves_the_folder_unchanged() {
    for signal in ["-INT", "-TERM"] {
        // On some file systems the check ends before a signal can be sent.
        let is_seen = (0..50).any(|_| {
            let folder = tempfile::tempdir().unwrap();
            let child = start(folder.path().to_str().unwrap());
            let output = interrupt(child, signal, &|| !is_empty(folder.path()));
            assert!(is_empty(folder.path()), "something is left by {signal}");
            is_interrupted(&output)
        });
        if !is_seen {
            eprintln!("SKIPPED: {signal} in the middle: the file system is too quick for it");
        }
    }
}

#[test]
fn interrupted_check_leaves_the_bucket_unchanged() {
    for signal in ["-INT", "-TERM"] {
        let server = S3Server::start().unwrap();
        // The delay keeps the check running for long enough.
        server.inject(FaultRule::every(1, Fault::Delay(Duration::from_secs(1))).of("GET"));
        let child = start(&server.url("run"));
        let output = interrupt(child, signal, &|| server.object_count() > 0);
        assert!(is_interrupted(&output), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!((server.object_count(), server.upload_count()), (0, 0));
    }
}

/// A check that is stuck on a server that does not respond ends at a second signal.
#[test]
fn second_signal_ends_a_stuck_check() {
    let server = S3Server::start().unwrap();
    server.inject(FaultRule::every(1, Fault::Stall).of("GET"));
    let url = server.url("run") + "&stall=600s";
    let mut child = start(&url);
    let until = Instant::now() + Duration::from_secs(60);
    while server.request_count() < 2 && Instant::now() < until {
        thread::sleep(Duration::from_millis(5));
    }
    for _ in 0..100 {
        signals::send(&child, "-INT");
        thread::sleep(Duration::from_millis(200));
        if child.try_wait().unwrap().is_some() {
            break;
        }
    }
    // The second signal kills the process, as the first would without a handler.
    assert!(!child.wait().unwrap().success());
}
