//! Failures of a store during a run: the loader recovers from those that pass, and each of the
//! others ends the run with a specific error, which names the file and the position.

#![expect(clippy::print_stderr, reason = "skipped tests are reported")]

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use loader::{
    DataFile, Error, Loader, LoaderOptions, PieceRef, RawAssemble, RawBatch, Result, SampleOrder,
};
use storage::s3_server::{Fault, FaultRule, S3Server};
use storage::testing::fault_store::{FaultPlan, FaultStore, ReadFaultLayer, ReadFaults};
use storage::{Key, RemoteErrorKind, Storage, StuckReads, open_url, write_all};

use crate::nfs_server::Nfs;

const SAMPLE_BYTES: u64 = 512;
const SAMPLES: u64 = 16_384;
const FILE_BYTES: u64 = SAMPLES * SAMPLE_BYTES;

/// Samples from the front and from the end in turns, so that the whole file is needed at any time.
#[derive(Debug)]
struct InTurns([DataFile; 1]);

impl SampleOrder for InTurns {
    fn sources(&self) -> &[DataFile] {
        &self.0
    }

    fn sample_count(&self) -> u64 {
        SAMPLES
    }

    fn pieces(&self, sample: u64, into: &mut Vec<PieceRef>) -> Result<()> {
        let (offset_bytes, len_bytes) = (place_of(sample) * SAMPLE_BYTES, SAMPLE_BYTES);
        into.push(PieceRef { file: 0, offset_bytes, len_bytes });
        Ok(())
    }

    fn name(&self) -> String {
        "in turns".to_owned()
    }
}

fn place_of(sample: u64) -> u64 {
    if sample.is_multiple_of(2) { sample / 2 } else { SAMPLES - 1 - sample / 2 }
}

fn contents() -> Vec<u8> {
    (0..FILE_BYTES).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

fn key() -> Key {
    Key::new("deep/samples.bin").unwrap()
}

/// A loader with short retries and a small window.
fn start(store: Arc<dyn Storage>) -> Loader<RawAssemble> {
    let pauses = [1, 2, 3].map(Duration::from_millis);
    start_with(store, Duration::from_secs(60), pauses)
}

fn start_with(
    store: Arc<dyn Storage>,
    timeout: Duration,
    retry_pauses: [Duration; 3],
) -> Loader<RawAssemble> {
    let source = DataFile::new(store, key(), FILE_BYTES);
    let mut options = LoaderOptions::new(16, 0..SAMPLES);
    (options.timeout, options.retry_pauses) = (timeout, retry_pauses);
    options.window_bytes = 64 << 10;
    Loader::start(Arc::new(InTurns([source])), RawAssemble, options).unwrap()
}

/// Reads and checks all samples from `from` on, or returns the first error.
fn read_on(loader: &mut Loader<RawAssemble>, from: u64) -> Result<()> {
    let bytes = contents();
    let mut next = from;
    while let Some(batch) = loader.next_batch()? {
        let mut expected = RawBatch::default();
        expected.begin(next);
        for sample in next..next + 16 {
            let at = (place_of(sample) * SAMPLE_BYTES) as usize;
            expected.push(&bytes[at..at + SAMPLE_BYTES as usize]);
        }
        assert_eq!(batch, expected, "the batch of sample {next}");
        next += 16;
    }
    assert_eq!(next, SAMPLES);
    Ok(())
}

/// Reads one batch, breaks the store, and returns the error that follows.
fn broken_by(store: Arc<dyn Storage>, harm: impl FnOnce()) -> Error {
    let mut loader = start(store);
    loader.next_batch().unwrap().unwrap();
    harm();
    let error = read_on(&mut loader, 16).unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("cannot load batch: ") && text.contains("deep/samples.bin"), "{text}");
    let again = loader.next_batch().unwrap_err();
    assert!(matches!(again, Error::Ended { .. }) && again.to_string().contains(&text), "{again}");
    error
}

fn on_disk(folder: &Path) -> Arc<dyn Storage> {
    let store = open_url(folder.to_str().unwrap()).unwrap();
    write_all(&*store, &key(), &contents()).unwrap();
    store
}

#[test]
fn short_and_interrupted_reads_are_completed() {
    let faults =
        FaultPlan { short_per_mille: 300, interrupted_per_mille: 100, ..FaultPlan::default() };
    let store = Arc::new(FaultStore::new(3, faults));
    write_all(&*store, &key(), &contents()).unwrap();
    read_on(&mut start(store), 0).unwrap();
}

/// Devices and servers that fail permanently, or now and then.
#[test]
fn failing_device_is_named() {
    let store = |faults| {
        let inner = Arc::new(FaultStore::new(3, FaultPlan::default()));
        write_all(&*inner, &key(), &contents()).unwrap();
        Arc::new(ReadFaultLayer::new(inner, 5, faults))
    };
    // Four failures in a row would end a read, and which reads fail depends on the threads.
    let passing = ReadFaults { io_per_mille: 10, stale_per_mille: 10, ..ReadFaults::default() };
    read_on(&mut start(store(passing)), 0).unwrap();
    let middle = FILE_BYTES / 2;
    let broken = ReadFaults { broken: middle..middle + 1, ..ReadFaults::default() };
    let text = broken_by(store(broken), || ()).to_string();
    assert!(text.contains("Input/output error") && text.contains(" bytes at "), "{text}");
    let stale = ReadFaults { stale_per_mille: 1000, ..ReadFaults::default() };
    let mut loader = start(store(stale));
    let error = read_on(&mut loader, 0).unwrap_err();
    assert!(matches!(error, Error::Storage(storage::Error::Stale { .. })), "{error}");
    assert!(error.to_string().contains("deep/samples.bin: stale file handle"), "{error}");
}

#[test]
fn truncated_replaced_or_deleted_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deep/samples.bin");
    // Cut off while it is open.
    let cut = || fs::File::options().write(true).open(&path).unwrap().set_len(100_000).unwrap();
    let error = broken_by(on_disk(folder.path()), cut);
    let text = error.to_string();
    assert!(
        text.contains("file changed while open: expected 8388608 bytes, found 100000 bytes"),
        "{text}"
    );
    // Truncated before it was opened.
    let store = open_url(folder.path().to_str().unwrap()).unwrap();
    let error = read_on(&mut start(Arc::clone(&store)), 0).unwrap_err();
    let expected =
        Error::FileLength { object: String::new(), found: 100_000, expected: FILE_BYTES };
    assert_eq!(std::mem::discriminant(&error), std::mem::discriminant(&expected), "{error}");
    assert!(
        error.to_string().contains("expected 8388608 bytes as in its index, found 100000 bytes"),
        "{error}"
    );
    // Replaced under its name: the open file stays the old one, to the last byte.
    fs::remove_file(&path).unwrap();
    let mut loader = start(on_disk(folder.path()));
    loader.next_batch().unwrap().unwrap();
    fs::write(path.with_extension("new"), vec![7; FILE_BYTES as usize]).unwrap();
    fs::rename(path.with_extension("new"), &path).unwrap();
    read_on(&mut loader, 16).unwrap();
    // Deleted before it was opened.
    fs::remove_file(&path).unwrap();
    let error = read_on(&mut start(store), 0).unwrap_err();
    assert!(matches!(error, Error::Storage(storage::Error::NotFound { .. })), "{error}");
}

#[test]
fn bucket_failures_have_distinct_errors() {
    let slow = Duration::from_millis(250);
    for (fault, expected) in [
        (Fault::Expired, RemoteErrorKind::Expired),
        (Fault::Denied, RemoteErrorKind::Denied),
        (Fault::ClockSkew, RemoteErrorKind::ClockSkew),
        (Fault::SlowDown, RemoteErrorKind::SlowDown),
        (Fault::InternalError, RemoteErrorKind::Server),
        (Fault::Stall, RemoteErrorKind::Stalled),
        (Fault::Drip(10, slow), RemoteErrorKind::Drip),
        (Fault::Reset, RemoteErrorKind::Reset),
        (Fault::Truncate, RemoteErrorKind::Truncated),
        (Fault::WrongRange, RemoteErrorKind::WrongLength),
    ] {
        let server = S3Server::start().unwrap();
        // Only stalls have a short timeout, and one that a busy machine does not exceed.
        let stall = if matches!(fault, Fault::Stall | Fault::Drip(..)) { "3s" } else { "60s" };
        let url = server.url("run") + &format!("&tries=2&stall={stall}&hedge=off");
        let store = open_url(&url).unwrap();
        write_all(&*store, &key(), &contents()).unwrap();
        let error = broken_by(store, || server.inject(FaultRule::every(1, fault).of("GET")));
        let Error::Storage(storage::Error::Remote(remote)) = &error else { panic!("{error}") };
        assert_eq!(remote.cause, expected, "{fault:?}: {error}");
        let text = error.to_string();
        assert!(
            text.contains(" of s3://test/run/deep/samples.bin") && !text.contains('?'),
            "{text}"
        );
        assert!(text.contains(" bytes at ") && !text.contains(server.secret()), "{text}");
    }
}

#[test]
fn deleted_or_replaced_object() {
    let server = S3Server::start().unwrap();
    for (place, is_replaced) in [("deleted", false), ("replaced", true)] {
        let store = open_url(&(server.url(place) + "&tries=2")).unwrap();
        write_all(&*store, &key(), &contents()).unwrap();
        let other = Arc::clone(&store);
        let error = broken_by(store, move || match is_replaced {
            true => other.replace(&key(), &vec![7; FILE_BYTES as usize]).unwrap(),
            false => other.delete(&key()).unwrap(),
        });
        let is_expected = match &error {
            Error::Storage(storage::Error::NotFound { .. }) => !is_replaced,
            Error::Storage(storage::Error::Remote(remote)) => {
                is_replaced && remote.cause == RemoteErrorKind::Replaced
            }
            _ => false,
        };
        assert!(is_expected, "{place}: {error}");
    }
}

/// Failed connections: no server, no name, no encryption, no bucket.
#[test]
fn connection_failures_have_distinct_errors() {
    let server = S3Server::start().unwrap();
    let url = server.url("run");
    let endpoint = server.endpoint();
    // No other process gets the server's port on another loopback address while the server has it.
    let closed = endpoint.replace("127.0.0.1", "127.0.0.2");
    // A resolver rejects a label of more than 63 letters without a query.
    let nameless = format!("http://{}.invalid", "a".repeat(64));
    for (from, to, expected) in [
        (&*endpoint, &*nameless, RemoteErrorKind::Dns),
        (&*endpoint, &*closed, RemoteErrorKind::Unreachable),
        (&*endpoint, &*endpoint.replace("http:", "https:"), RemoteErrorKind::Tls),
        ("s3://test/", "s3://absent/", RemoteErrorKind::NoBucket),
    ] {
        let proxies = ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"];
        if expected == RemoteErrorKind::Dns
            && proxies.iter().any(|name| std::env::var_os(name).is_some())
        {
            eprintln!("SKIPPED: a name without an address: a proxy would resolve it");
            continue;
        }
        let store = open_url(&(url.replace(from, to) + "&tries=2")).unwrap();
        let error = read_on(&mut start(store), 0).unwrap_err();
        let Error::Storage(storage::Error::Remote(remote)) = &error else { panic!("{error}") };
        assert_eq!(remote.cause, expected, "{error}");
        assert!(error.to_string().contains("hint: "), "{error}");
    }
}

fn nfs() -> Option<Nfs> {
    Nfs::here().inspect_err(|why| eprintln!("SKIPPED: {why}")).ok()
}

/// Files deleted or replaced on the server while it restarts and loses its open files.
#[test]
fn services_nfs_files_gone_from_the_server_under_a_run() {
    let Some(nfs) = nfs() else { return };
    for (mount, is_replaced) in [(nfs.three(), false), (nfs.three(), true), (nfs.hard(), true)] {
        let folder = nfs.folder_on(&mount);
        let there = nfs.on_disk(folder.path()).join(key().as_str());
        let error = broken_by(on_disk(folder.path()), || {
            fs::write(there.with_extension("new"), vec![7; FILE_BYTES as usize]).unwrap();
            fs::remove_file(&there).unwrap();
            if is_replaced {
                fs::rename(there.with_extension("new"), &there).unwrap();
            }
            nfs.server("restart");
        });
        let is_expected = match &error {
            Error::Storage(storage::Error::NotFound { .. }) => !is_replaced,
            Error::Storage(storage::Error::Changed { .. }) => is_replaced,
            _ => false,
        };
        assert!(is_expected, "{}: {error}", mount.display());
    }
}

/// Handles that are stale until the server exports them again, as when its disk is mounted late.
#[test]
fn services_nfs_handles_that_are_stale_for_a_moment() {
    let Some(nfs) = nfs() else { return };
    for mount in [nfs.three(), nfs.hard()] {
        let folder = nfs.folder_on(&mount);
        let pauses = [1, 5, 20].map(Duration::from_secs);
        let store = on_disk(folder.path());
        let mut loader = start_with(store, Duration::from_secs(60), pauses);
        loader.next_batch().unwrap().unwrap();
        nfs.server("lose");
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(500));
                nfs.server("know");
            });
            read_on(&mut loader, 16).unwrap();
        });
        let metrics = loader.metrics();
        assert!(metrics.retries_by.get("ESTALE").is_some_and(|&count| count > 0), "{metrics:?}");
    }
}

/// Environment variable with the folder for the child of the next test.
const FOLDER: &str = "LOADER_TEST_NFS_FOLDER";

/// An unreachable server: the error names the stuck read, the wait ends at its timeout, and the
/// process can end. Once the server is back, reads return the right bytes.
#[test]
fn services_nfs_a_server_that_hangs_is_named() {
    let Some(nfs) = nfs() else { return };
    if let Ok(folder) = std::env::var(FOLDER) {
        let store = open_url(&folder).unwrap();
        let mut loader = start_with(store, Duration::from_secs(4), PAUSES);
        loader.next_batch().unwrap().unwrap();
        nfs.server("hang");
        let error = read_on(&mut loader, 16).unwrap_err();
        panic!("error: {error}, watched: {:?}", StuckReads::describe());
    }
    let folder = nfs.folder_on(&nfs.other());
    let store = on_disk(folder.path());
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "failures::services_nfs_a_server_that_hangs_is_named", "--nocapture"])
        .env(FOLDER, folder.path())
        .output();
    nfs.server("answer");
    let child = child.unwrap();
    let err = String::from_utf8_lossy(&child.stderr);
    assert_eq!(child.status.code(), Some(101), "{err}");
    let (message, watched) = err.split_once(", watched: ").expect("the child panics by itself");
    for expected in ["error: cannot load ", "deep/samples.bin", "no completion for 4 s"] {
        assert!(message.contains(expected), "no {expected:?} in {message}");
    }
    assert!(watched.contains("deep/samples.bin: no completion for"), "{watched}");
    read_on(&mut start_with(store, Duration::from_secs(60), PAUSES), 0).unwrap();
}

/// On a soft mount the read fails instead, and is retried until the server is back.
#[test]
fn services_nfs_a_soft_mount_is_read_through_an_outage() {
    let Some(nfs) = nfs() else { return };
    let mount = nfs.soft();
    let folder = nfs.folder_on(&mount);
    let mut loader = start_with(on_disk(folder.path()), Duration::from_secs(120), PAUSES);
    loader.next_batch().unwrap().unwrap();
    nfs.server("hang");
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_secs(6));
            nfs.server("answer");
        });
        read_on(&mut loader, 16).unwrap();
    });
    let metrics = loader.metrics();
    assert!(metrics.retries > 0, "nothing failed, so the test covers nothing: {metrics:?}");
}

/// In total longer than a soft mount waits before it fails a read.
const PAUSES: [Duration; 3] =
    [Duration::from_secs(1), Duration::from_secs(4), Duration::from_secs(16)];
