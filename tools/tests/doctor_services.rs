//! `feedline doctor`, and what `feedline bench` refuses, on a real Ceph.
//!
//! `scripts/services/ceph-test` brings it up and sets the variables; a test without its variable
//! says so and ends.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use storage::Key;

const CEPHFS: &str = "FEEDLINE_TEST_CEPHFS";
const S3: &str = "FEEDLINE_TEST_S3_URL";
/// A file with the key of a user who has no right to the bucket.
const STRANGER: &str = "FEEDLINE_TEST_S3_STRANGER";

/// What a variable says, or why the test is left out.
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

/// What a doctor found: how it exited, and the severity and text of each thing.
struct Told(i32, Vec<Value>);

impl Told {
    fn new(output: &Output) -> Self {
        let told: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&output.stderr)));
        let code = output.status.code().expect("no signal ends it");
        Told(code, told["findings"].as_array().unwrap().clone())
    }

    fn of(&self, what: &str) -> (&str, &str) {
        let found = self.1.iter().find(|f| f["what"] == what && f["place"] != "this machine");
        let found = found.unwrap_or_else(|| panic!("nothing of {what}: {:#?}", self.1));
        (found["severity"].as_str().unwrap(), found["found"].as_str().unwrap())
    }
}

fn doctor(args: &[&str]) -> Told {
    Told::new(&feedline(&[&["doctor", "--json"], args].concat()))
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
    let told = doctor(&[name, "--for", "checkpoint"]);
    let (severity, found) = told.of("file system");
    assert!(severity == "fine" && found.contains("fuse.ceph-fuse at "), "{found}");
    // It costs, and that is said with what to do about it.
    let (severity, found) = told.of("client");
    assert_eq!((told.0, severity, found), (1, "hurts", "CephFS through ceph-fuse"));
    for what in ["new files", "locks", "direct IO", "space"] {
        assert_eq!(told.of(what).0, "fine", "{:?}", told.of(what));
    }
    assert!(["fine", "note", "hurts"].contains(&told.of("a durable file").0));
    // It has no limit on files, and says so by a number below 0.
    assert!(told.1.iter().all(|finding| finding["what"] != "inodes"), "{:#?}", told.1);
    assert!(is_empty(folder.path()), "something is left");
    // Data is looked at only.
    let told = doctor(&[name, "--for", "data"]);
    assert!(told.1.iter().all(|finding| finding["what"] != "new files"));
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
    // Nobody in particular, to whom root's mount is closed, and if not the mount, its folder.
    let command = command.uid(65_534).gid(65_534).stdin(Stdio::null());
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => return eprintln!("SKIPPED: as another user: {error}"),
    };
    let told = Told::new(&output);
    let breaks = |f: &&Value| f["severity"] == "breaks";
    let said: Vec<_> = told.1.iter().filter(breaks).map(|f| f["found"].to_string()).collect();
    assert_eq!(told.0, 1);
    assert!(said.iter().any(|found| found.to_lowercase().contains("permission")), "{said:?}");
}

#[test]
fn services_doctor_on_rgw() {
    let url = match service(S3) {
        Ok(url) => url,
        Err(why) => return eprintln!("{why}"),
    };
    let told = doctor(&[&url]);
    for what in ["list", "put", "get", "get a range", "delete", "If-None-Match", "clocks"] {
        assert_eq!(told.of(what).0, "fine", "{:?}", told.of(what));
    }
    // What this server lets pass in silence.
    assert_eq!(told.of("If-None-Match of parts").0, "note");
    assert_eq!(told.of("checksums").0, "note");
    assert_eq!(told.of("life cycle").0, "note");
    assert_eq!(told.0, 0, "{:#?}", told.1);
    let store = storage::open_url(&url).unwrap();
    let names = store.names(&Key::root()).unwrap();
    assert!(names.iter().all(|name| !name.contains("doctor")), "{names:?}");
}

/// With a key that the server does not know, and with one that has no right here: each its own
/// words, from the doctor and from a benchmark, and no secret in them.
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
    for (credentials, due) in [(unknown.to_str().unwrap(), "key"), (&stranger, "not allowed")] {
        let url = format!("{url}&credentials={credentials}");
        let told = doctor(&[&url]);
        let (severity, found) = told.of("list");
        assert_eq!((told.0, severity), (1, "breaks"), "{found}");
        assert!(found.contains(due), "no {due:?} in {found}");
        let output = feedline(&["bench", &url, "--runs=1", "--bytes=16MiB", "--patterns=stream"]);
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{err}");
        assert!(err.contains(due), "no {due:?} in {err}");
        assert!(!err.contains(secret) && !told.1.iter().any(|f| f.to_string().contains(secret)));
    }
}
