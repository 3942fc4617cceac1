//! `feedline doctor`, and what `feedline bench` refuses, on a real Ceph and a real NFS.
//!
//! `scripts/services/ceph-test` and `nfs-test` start them and set the variables; a test without its
//! variable is skipped with a message.

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::nfs_server::Nfs;
use serde_json::Value;
use storage::Key;

const CEPHFS: &str = "FEEDLINE_TEST_CEPHFS";
const S3: &str = "FEEDLINE_TEST_S3_URL";
/// A file with the key of a user who has no right to the bucket.
const STRANGER: &str = "FEEDLINE_TEST_S3_STRANGER";

/// Value of a variable, or why the test is skipped.
fn service(variable: &str) -> Result<String, String> {
    let place = std::env::var(variable).ok().filter(|place| !place.is_empty());
    place.ok_or_else(|| {
        format!("SKIPPED: {variable} is not set; `scripts/services/ceph-test` sets it")
    })
}

fn feedline(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_feedline"));
    command.args(args).stdin(Stdio::null()).output().unwrap()
}

/// Exit code and findings of a doctor run.
struct Report(i32, Vec<Value>);

impl Report {
    fn new(output: &Output) -> Self {
        let report: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&output.stderr)));
        let code = output.status.code().expect("no signal ends it");
        Report(code, report["findings"].as_array().unwrap().clone())
    }

    fn of(&self, what: &str) -> (&str, &str) {
        let found = self.finding(what);
        (found["severity"].as_str().unwrap(), found["found"].as_str().unwrap())
    }

    fn finding(&self, what: &str) -> &Value {
        let found = self.1.iter().find(|f| f["what"] == what && f["place"] != "this machine");
        found.unwrap_or_else(|| panic!("nothing of {what}: {:#?}", self.1))
    }
}

fn doctor(args: &[&str]) -> Report {
    Report::new(&feedline(&[&["doctor", "--json"], args].concat()))
}

fn is_empty(folder: &Path) -> bool {
    std::fs::read_dir(folder).unwrap().next().is_none()
}

#[test]
fn services_doctor_on_cephfs() {
    let mount = match service(CEPHFS) {
        Ok(mount) => mount,
        Err(why) => return eprintln!("{why}"),
    };
    let folder = tempfile::tempdir_in(&mount).unwrap();
    let name = folder.path().to_str().unwrap();
    let report = doctor(&[name, "--for", "checkpoint"]);
    let (severity, found) = report.of("file system");
    assert!(severity == "fine" && found.contains("fuse.ceph-fuse at "), "{found}");
    // The finding has its cost and its fix.
    let (severity, found) = report.of("client");
    assert_eq!((report.0, severity, found), (1, "hurts", "CephFS through ceph-fuse"));
    for what in ["new files", "locks", "direct IO", "space"] {
        assert_eq!(report.of(what).0, "fine", "{:?}", report.of(what));
    }
    assert!(["fine", "note", "hurts"].contains(&report.of("a durable file").0));
    // It has no limit on files, and reports that as a number below 0.
    assert!(report.1.iter().all(|finding| finding["what"] != "inodes"), "{:#?}", report.1);
    assert!(is_empty(folder.path()), "something is left");
    // A folder for data is not written to.
    let report = doctor(&[name, "--for", "data"]);
    assert!(report.1.iter().all(|finding| finding["what"] != "new files"));
}

#[test]
fn services_doctor_without_permission_on_cephfs() {
    let mount = match service(CEPHFS) {
        Ok(mount) => mount,
        Err(why) => return eprintln!("{why}"),
    };
    let folder = tempfile::tempdir_in(&mount).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_feedline"));
    command.args(["doctor", "--json", folder.path().to_str().unwrap(), "--for", "checkpoint"]);
    // An unprivileged user, who has no access to root's mount, or at least not to its folder.
    let command = command.uid(65_534).gid(65_534).stdin(Stdio::null());
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => return eprintln!("SKIPPED: as another user: {error}"),
    };
    let report = Report::new(&output);
    let breaks = |f: &&Value| f["severity"] == "breaks";
    let texts: Vec<_> = report.1.iter().filter(breaks).map(|f| f["found"].to_string()).collect();
    assert_eq!(report.0, 1);
    assert!(texts.iter().any(|found| found.to_lowercase().contains("permission")), "{texts:?}");
}

#[test]
fn services_doctor_on_rgw() {
    let url = match service(S3) {
        Ok(url) => url,
        Err(why) => return eprintln!("{why}"),
    };
    let report = doctor(&[&url]);
    for what in ["list", "put", "get", "get a range", "delete", "If-None-Match", "clocks"] {
        assert_eq!(report.of(what).0, "fine", "{:?}", report.of(what));
    }
    // Findings of what this server ignores without an error.
    assert_eq!(report.of("If-None-Match of parts").0, "note");
    assert_eq!(report.of("checksums").0, "note");
    assert_eq!(report.of("life cycle").0, "note");
    assert_eq!(report.0, 0, "{:#?}", report.1);
    let store = storage::open_url(&url).unwrap();
    let names = store.list_names(&Key::root()).unwrap();
    assert!(names.iter().all(|name| !name.contains("doctor")), "{names:?}");
}

/// An unknown key, and a key without permission: doctor and benchmark report each of them in other
/// words, without a secret.
#[test]
fn services_bad_credentials_on_rgw() {
    let (url, stranger) = match (service(S3), service(STRANGER)) {
        (Ok(url), Ok(stranger)) => (url, stranger),
        (Err(why), _) | (_, Err(why)) => return eprintln!("{why}"),
    };
    let folder = tempfile::tempdir().unwrap();
    let unknown = folder.path().join("credentials");
    let secret = "notthesecretofanybody";
    let text = format!("[default]\naws_access_key_id = nobody\naws_secret_access_key = {secret}\n");
    std::fs::write(&unknown, text).unwrap();
    for (credentials, expected) in
        [(unknown.to_str().unwrap(), "key"), (&stranger, "access denied")]
    {
        let url = format!("{url}&credentials={credentials}");
        let report = doctor(&[&url]);
        let (severity, found) = report.of("list");
        assert_eq!((report.0, severity), (1, "breaks"), "{found}");
        assert!(found.contains(expected), "no {expected:?} in {found}");
        let output = feedline(&["bench", &url, "--rounds=1", "--bytes=16MiB", "--patterns=stream"]);
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{err}");
        assert!(err.contains(expected), "no {expected:?} in {err}");
        assert!(!err.contains(secret) && !report.1.iter().any(|f| f.to_string().contains(secret)));
    }
}

/// Each of its mounts, with the findings of its options.
#[test]
fn services_nfs_doctor() {
    let nfs = match Nfs::here() {
        Ok(nfs) => nfs,
        Err(why) => return eprintln!("SKIPPED: {why}"),
    };
    for mount in [nfs.hard(), nfs.three(), nfs.soft()] {
        let folder = nfs.folder_on(&mount);
        let report = doctor(&[folder.path().to_str().unwrap(), "--for", "checkpoint"]);
        let (severity, found) = report.of("file system");
        let expected = format!("nfs at {}, from ", mount.display());
        assert!(severity == "fine" && found.starts_with(&expected), "{found}");
        let is = |what: &str, severity: &str, part: &str| {
            let (actual, found) = report.of(what);
            assert!(actual == severity && found.contains(part), "{what}: {actual} {found}");
        };
        is("connections", "hurts", "one TCP connection");
        assert_eq!(report.finding("connections")["fix"], "mount -o vers=4.2,nconnect=8");
        is("new files", "fine", "");
        is("new names", "fine", "by hard links");
        is("direct IO", "fine", "alignment of offsets 512 bytes, of memory not reported");
        for what in ["a durable file", "clocks", "space", "inodes", "request size"] {
            assert!(
                ["fine", "note", "hurts"].contains(&report.of(what).0),
                "{:?}",
                report.of(what)
            );
        }
        if mount == nfs.hard() {
            is("locks", "fine", "a second lock is refused");
        } else {
            is("version", "note", "NFS 3");
            is("locks", "hurts", "local_lock=all: locks hold on this node only");
        }
        let is_soft = mount == nfs.soft();
        assert_eq!(report.1.iter().any(|finding| finding["what"] == "errors"), is_soft);
        if is_soft {
            is("errors", "hurts", "mounted soft");
            assert!(report.finding("errors")["fix"].as_str().unwrap().contains("-o hard"));
        }
        assert_eq!(report.0, 1);
        assert!(is_empty(folder.path()), "something is left on {}", mount.display());
    }
}

/// While the server is cut off, doctor and benchmark report that in time; when it is back, the
/// folder is fine.
#[test]
fn services_nfs_that_hangs() {
    let nfs = match Nfs::here() {
        Ok(nfs) => nfs,
        Err(why) => return eprintln!("SKIPPED: {why}"),
    };
    let mount = nfs.other();
    let folder = nfs.folder_on(&mount);
    let name = folder.path().to_str().unwrap();
    nfs.server("hang");
    let report = doctor(&[name, "--for", "checkpoint", "--timeout", "2s"]);
    let output =
        feedline(&["bench", name, "--timeout=2", "--bytes=16MiB", "--rounds=1", "--no-fio"]);
    nfs.server("answer");
    let (severity, found) = report.of("answers");
    assert_eq!((report.0, severity), (1, "breaks"), "{found}");
    assert!(found.contains("not done after 2 s"), "{found}");
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{err}");
    assert!(err.contains(": not finished after 2 s"), "{err}");
    let report = doctor(&[name, "--for", "checkpoint", "--timeout", "60s"]);
    assert_eq!(report.of("new files").0, "fine");
    assert!(is_empty(folder.path()), "something is left");
}

#[test]
fn services_nfs_bench() {
    let nfs = match Nfs::here() {
        Ok(nfs) => nfs,
        Err(why) => return eprintln!("SKIPPED: {why}"),
    };
    let folder = nfs.folder_on(&nfs.hard());
    let name = folder.path().to_str().unwrap();
    let small = [
        "bench",
        name,
        "--rounds=1",
        "--duration=300ms",
        "--bytes=16MiB",
        "--checkpoint=4MiB",
        "--writers=2",
        "--files=8",
        "--ranks=4",
        "--no-fio",
    ];
    let output = feedline(&[&small[..], &["--json"]].concat());
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{err}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let target = &report["targets"][0];
    let mount = nfs.hard();
    assert_eq!((&target["file_system"], &target["direct"]), (&"nfs".into(), &true.into()));
    assert_eq!(target["mount_point"], mount.to_str().unwrap());
    assert_eq!(target["witness"], "kernel");
    for of in target["patterns"].as_array().unwrap() {
        assert!(of["estimate"]["median"].as_f64().unwrap() > 0.0, "{of}");
        // With direct I/O, bytes are moved once.
        if of["pattern"] == "stream" || of["pattern"] == "save" {
            let moved = of["moved_per_delivered"].as_f64().unwrap();
            assert!((0.95..1.2).contains(&moved) && of["flag"].is_null(), "{of}");
        }
    }
    assert!(is_empty(folder.path()), "something is left");
    let output = feedline(&[&small[..], &["--patterns=save"]].concat());
    let table = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && table.contains("nfs"), "{table}");
    assert!(is_empty(folder.path()), "something is left");
}
