//! `feedline samples` with failing system calls: a sandbox without io_uring, a failing disk, a
//! server that lost the file. A filter of system calls simulates them; it needs no root.

#![expect(clippy::print_stderr, reason = "a skipped test must be seen")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use indexed::{Builder, Dtype};
use serde_json::Value;
use storage::{Key, Storage};

/// Runs a command below a filter: `io_uring_setup` (425 everywhere) fails with the first number, if
/// it is not 0, and `pread64` from an offset on with the second. Exits with 77 if there can be no
/// filter.
const FILTER: &str = r#"
import ctypes, os, platform, struct, sys
ring, read, offset = map(int, sys.argv[1:4])
number = {"x86_64": 17, "aarch64": 67}.get(platform.machine())
libc = ctypes.CDLL(None, use_errno=True)
LOAD, EQUAL, AT_LEAST, RETURN, ALLOW, ERRNO = 0x20, 0x15, 0x35, 0x06, 0x7FFF0000, 0x50000
program = [
    (LOAD, 0, 0, 0),
    (EQUAL, 0, 1, 425), (RETURN, 0, 0, ERRNO | ring if ring else ALLOW),
    (EQUAL, 0, 3, number or 0), (LOAD, 0, 0, 16 + 8 * 3), (AT_LEAST, 0, 1, offset),
    (RETURN, 0, 0, ERRNO | read if read else ALLOW),
    (RETURN, 0, 0, ALLOW),
]
code = b"".join(struct.pack("HBBI", *line) for line in program)
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("lines", ctypes.c_char_p)]
filter = Program(len(program), code)
if not number or libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(filter), 0, 0):
    print("no filter of system calls:", os.strerror(ctypes.get_errno()))
    sys.exit(77)
os.execvp(sys.argv[4], sys.argv[4:])
"#;

/// The errors that the filter returns.
#[derive(Clone, Copy)]
struct Refuse {
    ring: i32,
    read: i32,
    from: u64,
}

const NOTHING: Refuse = Refuse { ring: 0, read: 0, from: 0 };
const EPERM: i32 = 1;
const EIO: i32 = 5;
const ENOSYS: i32 = 38;
const ESTALE: i32 = 116;

/// `None` where there is no such filter.
fn samples(refuse: Refuse, engine: &str, prefix: &Path, args: &[&str]) -> Option<Output> {
    let numbers = [refuse.ring.to_string(), refuse.read.to_string(), refuse.from.to_string()];
    let mut command = Command::new("python3");
    command.args(["-c", FILTER]).args(numbers).arg(env!("CARGO_BIN_EXE_feedline"));
    command.arg("samples").arg(prefix).args(["--seq-length", "64"]).args(args);
    let output = command.env("FEEDLINE_ENGINE", engine).output();
    match output {
        Ok(output) if output.status.code() != Some(77) => Some(output),
        Ok(output) => {
            eprintln!("SKIPPED: {}", String::from_utf8_lossy(&output.stdout));
            None
        }
        Err(error) => {
            eprintln!("SKIPPED: python3: {error}");
            None
        }
    }
}

/// A dataset of some megabytes: its index is read below the offsets that fail.
fn corpus() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let store: Arc<dyn Storage> = storage::open_url(folder.path().to_str().unwrap()).unwrap();
    let mut builder = Builder::create(&store, &Key::new("corpus").unwrap(), Dtype::U16).unwrap();
    let tokens: Vec<u32> = (0..3000_u32).map(|at| at * 7919 % 50_000).collect();
    for document in 0..1500 {
        builder.add_sequence(&tokens[document..document + 1000]).unwrap();
        builder.end_document().unwrap();
    }
    builder.finish().unwrap();
    let prefix = folder.path().join("corpus");
    (folder, prefix)
}

fn stream(output: &Output) -> Value {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    let read: Value = serde_json::from_slice(&output.stdout).unwrap();
    read["sha256"].clone()
}

#[test]
fn without_io_uring_the_samples_are_the_same() {
    let (_folder, prefix) = corpus();
    let args = ["--hash", "--json"];
    let Some(expected) = samples(NOTHING, "auto", &prefix, &args) else { return };
    for ring in [EPERM, ENOSYS] {
        let refuse = Refuse { ring, ..NOTHING };
        let found = samples(refuse, "auto", &prefix, &args).unwrap();
        assert_eq!(stream(&found), stream(&expected), "errno {ring}");
        // An explicit request for the ring is refused with the reason, which shows that the filter
        // works.
        let explicit = samples(refuse, "ring", &prefix, &args).unwrap();
        let stderr = String::from_utf8_lossy(&explicit.stderr);
        assert_eq!(explicit.status.code(), Some(2), "{stderr}");
        assert!(
            stderr.contains("engine ring is not available") && stderr.contains("io_uring"),
            "{stderr}"
        );
    }
}

#[test]
fn failing_disk_ends_the_run_with_its_error() {
    let (_folder, prefix) = corpus();
    let from = 1 << 20;
    for (read, expected) in [(EIO, "Input/output error"), (ESTALE, "stale file handle")] {
        let refuse = Refuse { read, from, ..NOTHING };
        // The second pause before a retry, of 8 s, exceeds the timeout: the run ends after one
        // retry.
        let Some(output) = samples(refuse, "pread", &prefix, &["--timeout", "8"]) else { return };
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        let bin = format!("{}.bin", prefix.display());
        for expected in [expected, bin.as_str(), " bytes at "] {
            assert!(stderr.contains(expected), "{expected} is not in: {stderr}");
        }
    }
}
