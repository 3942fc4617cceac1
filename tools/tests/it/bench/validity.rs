//! `feedline bench` flags numbers of a cache and of memory, compares itself with fio, and reports
//! how saves progress.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use storage::probe::{HostInfo, MountInfo, ProbeFolder};

fn bench(targets: &[&str], more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_feedline"));
    command.arg("bench").args(targets);
    command.args(["--duration=200ms", "--bytes=16MiB", "--writers=2", "--ranks=4"]);
    let has_rounds = more.iter().any(|argument| argument.starts_with("--rounds"));
    command.args((!has_rounds).then_some("--rounds=1"));
    command.args(more).stdin(Stdio::null());
    let output = command.output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{err}");
    output
}

fn json(targets: &[&str], more: &[&str]) -> Value {
    let more: Vec<&str> = more.iter().copied().chain(["--json"]).collect();
    serde_json::from_slice(&bench(targets, &more).stdout).unwrap()
}

fn pattern<'a>(target: &'a Value, name: &str) -> &'a Value {
    let patterns = target["patterns"].as_array().unwrap();
    patterns.iter().find(|of| of["pattern"] == name).unwrap()
}

fn notes(target: &Value) -> String {
    target["notes"].to_string()
}

fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).unwrap().next().is_none()
}

/// Why the folder is not on a disk whose page cache direct I/O bypasses, if it is not.
fn other_than_disk(folder: &Path) -> Option<String> {
    let kind = MountInfo::of(folder).unwrap().file_system;
    if !["ext4", "xfs", "btrfs", "f2fs"].contains(&kind.as_str()) {
        return Some(format!("the folder is on {kind}: no disk with a cache above"));
    }
    let scratch = ProbeFolder::new(folder).unwrap();
    let direct = scratch.direct();
    scratch.remove().unwrap();
    direct.err().map(|error| format!("the folder has no direct IO: {error}"))
}

/// The same file, with direct I/O and from the page cache: only the second is flagged, in every
/// output.
#[test]
fn page_cache_results_are_flagged_in_every_output() {
    let folder = tempfile::tempdir().unwrap();
    if let Some(why) = other_than_disk(folder.path()) {
        return eprintln!("SKIPPED: {why}");
    }
    let (a, b) = (folder.path().join("a"), folder.path().join("b"));
    fs::create_dir(&a).unwrap();
    fs::create_dir(&b).unwrap();
    let around = format!("file:{}?direct=on", a.display());
    let through = format!("file:{}?direct=off", b.display());
    let page = folder.path().join("page.html");
    let html = format!("--html={}", page.display());
    let more = ["--patterns=stream,samples,restore", "--checkpoint=8MiB", "--no-fio", &html];
    let report = json(&[&around, &through], &more);
    let (around, through) = (&report["targets"][0], &report["targets"][1]);
    if around["witness"] != "kernel" {
        return eprintln!("SKIPPED: this kernel does not count what a process moves");
    }
    for name in ["stream", "samples", "restore"] {
        let (honest, cached) = (pattern(around, name), pattern(through, name));
        assert_ne!(honest["flag"], "cached", "{honest}");
        assert!(honest["moved_per_delivered"].as_f64().unwrap() >= 0.9, "{honest}");
        assert_eq!(cached["flag"], "cached", "{cached}");
    }
    // The written file has not been read from a device since.
    let cached = pattern(through, "stream");
    assert!(cached["more"]["page_cache_share_before"].as_f64().unwrap() > 0.9, "{cached}");
    assert!(notes(through).contains("stream is CACHED: "), "{}", notes(through));
    assert!(notes(through).contains("% of the file was in the page cache before"));
    assert!(!notes(around).contains("CACHED"), "{}", notes(around));
    let summary = |nth: usize| &report["verdict"]["targets"][nth];
    assert_eq!((&summary(0)["cached"], &summary(1)["cached"]), (&false.into(), &true.into()));
    let page = fs::read_to_string(&page).unwrap();
    assert!(page.contains("<b class=\"warn\">CACHED</b>") && page.contains("measure again with"));

    let through = format!("file:{}?direct=off", b.display());
    let text = bench(&[&through], &["--patterns=stream", "--no-fio"]).stdout;
    let text = String::from_utf8(text).unwrap();
    assert!(text.contains("; CACHED: a cache was measured, not the device"), "{text}");
    assert!(text.contains("measure again with ?direct=on"), "{text}");
    let row = text.lines().find(|line| line.trim_start().starts_with("stream")).unwrap();
    assert!(row.contains(" CACHED"), "{row}");
    assert!(is_empty(&a) && is_empty(&b));
}

#[test]
fn tmpfs_results_are_flagged_as_memory() {
    let Some(folder) = crate::bench::memory_folder() else {
        return eprintln!("SKIPPED: there is no memory file system with room at /dev/shm");
    };
    let name = folder.path().to_str().unwrap();
    let more = ["--patterns=stream,save", "--checkpoint=2MiB", "--no-fio"];
    let report = json(&[name], &more);
    let target = &report["targets"][0];
    assert_eq!(target["witness"], "memory");
    for name in ["stream", "save"] {
        assert_eq!(pattern(target, name)["flag"], "memory");
    }
    assert!(notes(target).contains("no device was measured"));
    let text = String::from_utf8(bench(&[name], &more).stdout).unwrap();
    assert!(text.contains("; MEMORY: no device was measured"), "{text}");
    assert!(text.contains("- MEMORY"), "{text}");
    assert!(is_empty(folder.path()));
}

/// The model has a link of 60 MB/s and a client with one megabyte in flight: a save is as slow as
/// the link from its first megabyte on, however fast the machine is.
#[test]
fn saves_and_restores_have_a_timeline() {
    let folder = crate::bench::quick_folder();
    let pages = tempfile::tempdir().unwrap();
    let page = pages.path().join("page.html");
    let html = format!("--html={}", page.display());
    let simulate =
        "--simulate=lustre,client.mb_per_s=60,client.in_flight_mib=1,servers.request_kib=512";
    let more = [simulate, "--patterns=save,save-one,restore", "--checkpoint=16MiB", &html];
    let report = json(&[folder.path().to_str().unwrap()], &more);
    for name in ["save", "save-one", "restore"] {
        let of = pattern(&report["targets"][0], name);
        let points = of["timeline"].as_array().unwrap();
        assert!(points.len() >= 5, "{of}");
        let at = |point: &Value, nth: usize| point[nth].as_f64().unwrap();
        let width_s = at(&points[1], 0) - at(&points[0], 0);
        let megabytes: f64 = points.iter().map(|point| at(point, 1) * width_s).sum();
        // The last point may be shorter than the others, or missing.
        assert!((12.0..21.0).contains(&megabytes), "{megabytes} of 16.8: {of}");
    }
    let page = fs::read_to_string(&page).unwrap();
    let timelines = page.split("Throughput over time, last round").nth(1).unwrap();
    assert_eq!(timelines.matches("<figure>").count(), 3, "{timelines}");
    assert!(is_empty(folder.path()));
}

#[test]
fn fio_comparison_has_an_interval() {
    if !tools::bench::fio::is_there() {
        return eprintln!("SKIPPED: there is no fio");
    }
    if let Some(why) = HostInfo::here().ring_refused {
        return eprintln!("SKIPPED: fio needs io_uring, which does not work here: {why}");
    }
    let folder = tempfile::tempdir().unwrap();
    let more = ["--patterns=stream,samples,save,save-one", "--checkpoint=32MiB", "--rounds=2"];
    let report = json(&[folder.path().to_str().unwrap()], &more);
    let peers = report["targets"][0]["peers"].as_array().unwrap();
    assert_eq!(peers.len(), 4, "{peers:?}");
    for peer in peers {
        let of = |name: &str| peer[name].as_f64().unwrap();
        assert!(of("ours_mb_per_s") > 0.0 && of("fio_mb_per_s") > 0.0, "{peer}");
        // In so short a run, CPU time may be below the resolution of its clock.
        assert!(of("ours_core_s_per_gb") >= 0.0 && of("fio_core_s_per_gb") >= 0.0, "{peer}");
        assert!(of("low") <= of("ours_by_fio") && of("ours_by_fio") <= of("high"), "{peer}");
        assert!(["yes", "no", "open"].contains(&peer["agreement"].as_str().unwrap()), "{peer}");
    }
    for (peer, expected) in peers[2..].iter().zip(["one file per writer", "one shared file"]) {
        let expected = format!("writes, {expected}, 8 MiB, 2 writers, fsync");
        assert_eq!(peer["what"], *expected);
    }
    assert!(is_empty(folder.path()));
}

/// Runs the benchmark with a script in place of fio that executes `answer`; returns the report, and
/// the arguments of each call.
fn beside(answer: &str) -> (Value, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    // Where programs may be started from: a folder for temporary files may be mounted noexec.
    let programs = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (fio, calls) = (programs.path().join("fio"), programs.path().join("asked"));
    let lines = format!(
        "#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho \"$@\" >>'{}'\n{answer}\n",
        calls.display()
    );
    fs::write(&fio, lines).unwrap();
    fs::set_permissions(&fio, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", programs.path().display(), std::env::var("PATH").unwrap());
    let mut command = Command::new(env!("CARGO_BIN_EXE_feedline"));
    command.args(["bench", folder.path().to_str().unwrap(), "--json", "--rounds=2"]);
    command.args(["--duration=50ms", "--bytes=16MiB", "--checkpoint=16MiB", "--writers=2"]);
    command.args(["--patterns=stream,samples,save,save-one"]).env("PATH", path);
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(is_empty(folder.path()));
    let calls = fs::read_to_string(calls).unwrap();
    let calls = calls.lines().map(|line| format!("{line} ")).collect();
    (serde_json::from_slice(&output.stdout).unwrap(), calls)
}

/// fio gets the sizes, the depth, the files and the cache mode of the requests of feedline.
#[test]
fn fio_makes_the_same_requests() {
    let (read, write) = ("\"read\":{\"bw_bytes\":5e8}", "\"write\":{\"bw_bytes\":4e8}");
    let cores = "\"usr_cpu\":10,\"sys_cpu\":15";
    let (report, calls) = beside(&format!("echo '{{\"jobs\":[{{{read},{write},{cores}}}]}}'"));
    let target = &report["targets"][0];
    let rates = target["peers"].as_array().unwrap().iter().map(|peer| &peer["fio_mb_per_s"]);
    assert_eq!(rates.collect::<Vec<_>>(), [500.0, 500.0, 400.0, 400.0]);
    // A quarter of a core for half a gigabyte a second, and two writers of as much for 0.4.
    let cores = target["peers"].as_array().unwrap().iter().map(|peer| &peer["fio_core_s_per_gb"]);
    assert_eq!(cores.collect::<Vec<_>>(), [0.5, 0.5, 1.25, 1.25]);
    let direct = format!("--direct={} ", u8::from(target["direct"].as_bool().unwrap()));
    let expected_arguments = [
        &["--rw=read ", "--bs=1048576 ", "--iodepth=32 ", "/tokens.bin ", "--runtime=50ms "][..],
        &["--rw=randread ", "--bs=8192 ", "--iodepth=64 ", "/tokens.bin ", "--time_based "],
        &["--rw=write ", "--bs=8388608 ", "--numjobs=2 ", "--size=8388608 ", "/apart.$jobnum "],
        &["--rw=write ", "--bs=8388608 ", "--offset_increment=8388608 ", "/one.bin "],
    ];
    assert_eq!(calls.len(), 2 * expected_arguments.len(), "two rounds: {calls:?}");
    let waits = target["engine"] != "ring";
    for (line, expected) in calls.iter().zip(expected_arguments.iter().chain(&expected_arguments)) {
        assert_eq!(line.contains("--force_async=1 "), waits && line.contains("read "), "{line}");
        for expected in expected.iter().copied().chain([&*direct, "--invalidate=0 "]) {
            assert!(line.contains(expected), "no {expected} in {line}");
        }
        assert_eq!(line.contains("--rw=write"), line.contains("--end_fsync=1 "), "{line}");
    }
}

#[test]
fn failing_fio_is_omitted() {
    let (report, calls) = beside("echo 'io_uring: Operation not permitted' >&2; exit 1");
    let target = &report["targets"][0];
    assert_eq!(target["peers"].as_array().unwrap().len(), 0);
    assert!(notes(target).contains("no comparison with fio: "), "{}", notes(target));
    assert!(notes(target).contains("Operation not permitted"), "{}", notes(target));
    assert_eq!(calls.len(), 1, "{calls:?}");
}

/// Another program with the name fio, and a version whose report has other keys.
#[test]
fn answers_of_another_fio_are_not_believed() {
    for (answer, expected) in [
        ("echo done", "expected JSON"),
        ("echo '{\"jobs\":[{\"read\":{\"bw_mib\":5}}]}'", "no bw_bytes for read"),
    ] {
        let (report, calls) = beside(answer);
        let target = &report["targets"][0];
        assert_eq!(target["peers"].as_array().unwrap().len(), 0);
        assert!(notes(target).contains(expected), "{}", notes(target));
        assert_eq!(calls.len(), 1, "{calls:?}");
    }
}
