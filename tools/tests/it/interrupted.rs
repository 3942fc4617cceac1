//! Interrupted commands report the interruption, leave only files that the same command resumes,
//! and do not change their inputs.
//!
//! Their inputs are in a bucket that responds late, so that the moment of a signal is a number of
//! requests.

use crate::killed::dead;
use crate::signals;
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ckpt::{Checkpoints, Dtype as TensorDtype, Group, TensorData};
use indexed::{Builder, Dtype};
use storage::s3_server::{Fault, FaultRule, S3Server};
use storage::{Key, Storage, open_url};

/// Longest wait for the moment of a signal.
const PATIENCE: Duration = Duration::from_secs(60);

fn feedline(args: &[&str], folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_feedline"));
    command.args(args).current_dir(folder).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Starts a command, and signals it when its moment has arrived.
fn signal_at(mut command: Command, signal: &str, is_moment: &dyn Fn() -> bool) -> Output {
    let mut child = command.spawn().unwrap();
    let until = Instant::now() + PATIENCE;
    while !is_moment() && child.try_wait().unwrap().is_none() && Instant::now() < until {
        thread::sleep(Duration::from_millis(1));
    }
    // It may have ended.
    signals::send(&child, signal);
    child.wait_with_output().unwrap()
}

/// Delay of every response of the bucket.
const LATE: Duration = Duration::from_millis(20);

/// Delay from the moment of a signal on, so that the signal arrives before the response, however
/// busy this machine is.
const LATE_AT_SIGNAL: Duration = Duration::from_millis(500);

fn set_delay(server: &S3Server, late: Duration) {
    server.heal();
    server.inject(FaultRule::every(1, Fault::Delay(late)));
}

/// The same, after this number of requests to the bucket.
fn signal_after(server: &S3Server, requests: u64, command: Command, signal: &str) -> Output {
    let moment = server.request_count() + requests;
    let is_moment = || {
        let is_it = server.request_count() >= moment;
        if is_it {
            set_delay(server, LATE_AT_SIGNAL);
        }
        is_it
    };
    let output = signal_at(command, signal, &is_moment);
    set_delay(server, LATE);
    output
}

fn stderr_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Whether the signal was in time. A late signal is not a failure, but a death by the signal is.
fn is_interrupted(output: &Output) -> bool {
    let err = stderr_of(output);
    let is_it = output.status.code() == Some(2) && err.starts_with("error: interrupted");
    assert!(is_it || output.status.code() == Some(0), "{:?}: {err}", output.status);
    assert!(!is_it || output.stdout.is_empty());
    is_it
}

/// All files below a folder, hidden ones too.
fn files(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            found.push(path.display().to_string());
        }
    }
    found.sort();
    found
}

fn tokens(store: &Arc<dyn Storage>, name: &str) {
    let mut builder = Builder::create(store, &Key::new(name).unwrap(), Dtype::U16).unwrap();
    let ids: Vec<u32> = (0..40_000_u32).map(|at| at * 7919 % 50_000).collect();
    for document in 0..1500 {
        builder.add_sequence(&ids[document..document + 9000 + document % 400]).unwrap();
        builder.end_document().unwrap();
    }
    builder.finish().unwrap();
}

/// A bucket with two datasets, one of which is damaged, and a checkpoint; it responds late.
fn bucket() -> S3Server {
    let server = S3Server::start().unwrap();
    let store = open_url(&server.url("in")).unwrap();
    tokens(&store, "corpus");
    let bin = storage::read_all(&*store, &Key::new("corpus.bin").unwrap()).unwrap();
    storage::write_all(&*store, &Key::new("short.bin").unwrap(), &bin[..bin.len() - 7]).unwrap();
    let idx = storage::read_all(&*store, &Key::new("corpus.idx").unwrap()).unwrap();
    storage::write_all(&*store, &Key::new("short.idx").unwrap(), &idx).unwrap();
    let steps = Checkpoints::open(open_url(&server.url("steps")).unwrap(), Key::root());
    let bytes = vec![1; 1 << 20];
    let names: Vec<String> = (0..24).map(|layer| format!("h.{layer}.weight")).collect();
    let tensor = |name| TensorData {
        name,
        group: Group::Model,
        dtype: TensorDtype::F32,
        shape: &[512, 512],
        bytes: &bytes,
    };
    let tensors: Vec<_> = names.iter().map(|name| tensor(name)).collect();
    steps.save(3, &tensors, &[], ().into()).unwrap();
    set_delay(&server, LATE);
    server
}

/// Interrupts a command at several of its requests: its inputs stay, and nothing else.
fn check(server: &S3Server, verb: &[&str], place: &str, more: &[&str]) {
    let source = server.url(place);
    let args: Vec<&str> = [verb, &[source.as_str()], more].concat();
    let whole = tempfile::tempdir().unwrap();
    let (objects, first) = (server.object_count(), server.request_count());
    let output = feedline(&args, whole.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", stderr_of(&output));
    let requests = server.request_count() - first;
    let expected = files(whole.path()).iter().filter(|name| !name.contains("/.epoch-")).count();
    assert!(expected > 0, "{args:?} writes nothing");
    let mut seen = 0;
    for (nth, signal) in [(0, "-INT"), (1, "-TERM"), (2, "-INT"), (3, "-INT")] {
        let folder = tempfile::tempdir().unwrap();
        let moment = (requests * nth / 5).max(1);
        let output = signal_after(server, moment, feedline(&args, folder.path()), signal);
        let mut left = files(folder.path());
        // The file with the number of the last lease stays.
        left.retain(|name| !name.contains("/.epoch-"));
        if is_interrupted(&output) {
            seen += 1;
            assert_eq!(left, [""; 0], "{args:?} at {nth} of 5: {}", stderr_of(&output));
        } else {
            assert_eq!(left.len(), expected, "{args:?}: {left:?}");
        }
        assert_eq!((server.object_count(), server.upload_count()), (objects, 0), "{args:?}");
    }
    assert!(seen > 0, "{args:?}: {requests} requests, and every signal was too late");
}

#[test]
fn interrupted_merge_leaves_no_files() {
    let server = bucket();
    check(&server, &["merge", "--out", "out", "--input"], "in/corpus", &[]);
}

#[test]
fn interrupted_split_leaves_no_files() {
    let more = ["--split", "60,30,10", "--out", "out"];
    check(&bucket(), &["split"], "in/corpus", &more);
}

#[test]
fn interrupted_conversion_leaves_no_files() {
    let server = bucket();
    for format in ["nanogpt", "paddle"] {
        check(&server, &["convert", "--to", format], "in/corpus", &["out"]);
    }
}

/// Kills a command at several of its requests: the same command then gives the files of an
/// undisturbed run, and no others.
fn check_killed(server: &S3Server, verb: &[&str], more: &[&str]) {
    if dead().is_none() {
        return;
    }
    let source = server.url("in/corpus");
    let args: Vec<&str> = [verb, &[source.as_str()], more].concat();
    let whole = tempfile::tempdir().unwrap();
    let first = server.request_count();
    let output = feedline(&args, whole.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", stderr_of(&output));
    let requests = server.request_count() - first;
    let contents = |folder: &Path| -> Vec<(String, Vec<u8>)> {
        let name = |path: &String| Path::new(path).strip_prefix(folder).unwrap().to_owned();
        let names = files(folder);
        names.iter().map(|it| (name(it).display().to_string(), fs::read(it).unwrap())).collect()
    };
    let mut killed = 0;
    for nth in 1..4 {
        let folder = tempfile::tempdir().unwrap();
        let command = feedline(&args, folder.path());
        let output = signal_after(server, requests * nth / 4, command, "-KILL");
        if output.status.code().is_some() {
            continue;
        }
        killed += 1;
        assert_ne!(files(folder.path()), [""; 0], "{args:?} has written nothing");
        let output = feedline(&args, folder.path()).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", stderr_of(&output));
        let (again, expected) = (contents(folder.path()), contents(whole.path()));
        let names = |of: &[(String, Vec<u8>)]| -> Vec<String> {
            of.iter().map(|(name, _)| name.clone()).collect()
        };
        assert_eq!(names(&again), names(&expected), "{args:?} at {nth} of 4");
        assert!(again == expected, "{args:?} at {nth} of 4: other bytes");
    }
    assert!(killed > 0, "{args:?}: {requests} requests, and every signal was too late");
}

#[test]
fn a_killed_run_is_repeated() {
    let server = bucket();
    check_killed(&server, &["merge", "--out", "out", "--input"], &[]);
    let more = ["--split", "60,30,10", "--out", "out"];
    check_killed(&server, &["split"], &more);
    for format in ["mmididx", "paddle"] {
        check_killed(&server, &["convert", "--to", format], &["out"]);
    }
}

#[test]
fn interrupted_repair_leaves_no_files() {
    check(&bucket(), &["repair"], "in/short", &["-o", "out"]);
}

#[test]
fn interrupted_index_build_leaves_no_files() {
    let more = ["--seq-length", "127", "--split", "1,0,0", "--data-cache-path", "cache"];
    check(&bucket(), &["index", "build"], "in/corpus", &more);
}

#[test]
fn interrupted_reshard_and_export_leave_no_files() {
    let server = bucket();
    check(&server, &["ckpt", "reshard", "--max-shard", "3MiB"], "steps", &["out"]);
    check(&server, &["ckpt", "export", "--max-shard", "3MiB"], "steps", &["out"]);
}

/// The same with the output in a bucket: multipart uploads are aborted.
#[test]
fn interrupted_merge_leaves_the_bucket_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let store = open_url(folder.path().to_str().unwrap()).unwrap();
    tokens(&store, "corpus");
    let before = files(folder.path());
    let server = S3Server::start().unwrap();
    set_delay(&server, LATE);
    let out = server.url("out/corpus");
    let merge = ["merge", "--input", "corpus", "--out", &out];
    let mut seen = 0;
    for (nth, signal) in ["-INT", "-TERM", "-INT"].into_iter().enumerate() {
        let merge = feedline(&merge, folder.path());
        let output = signal_after(&server, 2 * nth as u64 + 3, merge, signal);
        if !is_interrupted(&output) {
            break;
        }
        seen += 1;
        assert_eq!(
            (server.object_count(), server.upload_count()),
            (0, 0),
            "{}",
            stderr_of(&output)
        );
    }
    assert!(seen > 0, "every signal was too late");
    assert_eq!(files(folder.path()), before);
}

/// Committed samples stay, which the message reports, and the same command gives the same bytes.
#[test]
fn interrupted_materialize_is_resumed() {
    let server = bucket();
    let source = server.url("in/corpus");
    let args = "--seq-length 127 --memory 4MiB --commit-every 8MiB --data-cache-path cache \
                --out out/o --json";
    let args: Vec<&str> = ["materialize", &source].into_iter().chain(args.split(' ')).collect();
    let args: Vec<&str> = args.into_iter().filter(|arg| !arg.is_empty()).collect();
    let whole = tempfile::tempdir().unwrap();
    let first = server.request_count();
    let output = feedline(&args, whole.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr_of(&output));
    let requests = server.request_count() - first;
    let out = |folder: &Path, end: &str| fs::read(folder.join(format!("out/o.{end}"))).unwrap();

    let (mut empty, mut kept) = (0, 0);
    for nth in 0..5 {
        let folder = tempfile::tempdir().unwrap();
        // The first signal arrives before there is any output.
        let moment = (requests * nth / 6).max(1);
        let output = signal_after(&server, moment, feedline(&args, folder.path()), "-INT");
        if !is_interrupted(&output) {
            continue;
        }
        let left = fs::read_dir(folder.path().join("out")).map_or(0, Iterator::count);
        if stderr_of(&output).contains("samples are kept; the same command resumes") {
            assert!(left > 0, "{}", stderr_of(&output));
            kept += 1;
        } else {
            assert_eq!(left, 0, "{}", stderr_of(&output));
            empty += 1;
        }
        let output = feedline(&args, folder.path()).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", stderr_of(&output));
        for end in ["bin", "idx"] {
            assert!(out(folder.path(), end) == out(whole.path(), end), "{end} has other bytes");
        }
        assert_eq!(files(&folder.path().join("out")).len(), 4, "something else is left");
    }
    assert!(kept > 0 && empty > 0, "{kept} signals after a commit, {empty} before one");
}

#[test]
fn interrupted_drain_is_resumed() {
    let server = bucket();
    let (source, folder) = (server.url("steps"), tempfile::tempdir().unwrap());
    let drain = ["ckpt", "drain", &source, "out"];
    let mut seen = 0;
    for requests in [2, 8, 8] {
        let output = signal_after(&server, requests, feedline(&drain, folder.path()), "-INT");
        if !is_interrupted(&output) {
            break;
        }
        seen += 1;
        let left = files(folder.path());
        assert!(
            !left.iter().any(|name| name.contains(".tmp-")),
            "{left:?}: {}",
            stderr_of(&output)
        );
    }
    assert!(seen > 0, "every signal was too late");
    let output = feedline(&drain, folder.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr_of(&output));
    let output = feedline(&["ckpt", "verify", "out"], folder.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr_of(&output));
}

/// The command waits for input that does not arrive.
#[test]
fn interrupted_clean_leaves_no_files() {
    for signal in ["-INT", "-TERM"] {
        let folder = tempfile::tempdir().unwrap();
        let args = "clean --json-in - --out o.jsonl --dropped d.jsonl --min-chars 3 --quiet";
        let args: Vec<&str> = args.split(' ').collect();
        let mut command = feedline(&args, folder.path());
        let (reader, mut writer) = std::io::pipe().unwrap();
        writer.write_all(b"{\"text\": \"one line\"}\n").unwrap();
        command.stdin(reader);
        let has_started = || !files(folder.path()).is_empty();
        let output = signal_at(command, signal, &has_started);
        assert!(is_interrupted(&output), "{}", stderr_of(&output));
        assert_eq!(files(folder.path()), [""; 0]);
        drop(writer);
    }
}

/// A second signal ends the command at once, even if the store does not respond.
#[test]
fn second_signal_ends_a_stuck_command() {
    let server = bucket();
    server.heal();
    server.inject(FaultRule::every(1, Fault::Stall).of("GET"));
    let folder = tempfile::tempdir().unwrap();
    let source = server.url("in/corpus") + "&stall=600s";
    let first = server.request_count();
    let merge = ["merge", "--input", &source, "--out", "out"];
    let mut child = feedline(&merge, folder.path()).spawn().unwrap();
    let until = Instant::now() + PATIENCE;
    while server.request_count() < first + 2 && Instant::now() < until {
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
    assert_eq!(child.wait().unwrap().code(), None);
}
