//! S3 passes the conformance suite, on the server in this process and on a real one.
//!
//! With `FEEDLINE_TEST_S3_URL`, such as `s3://bucket/folder?endpoint=http://127.0.0.1:8080`, the
//! same suite runs there too, with the credentials of the environment; it deletes what it writes
//! below that folder.

#![cfg(feature = "server")]
use std::cell::Cell;
use std::sync::Arc;

use storage::s3_server::{Fault, FaultRule, S3Server};
use storage::testing::conformance;
use storage::{
    Error, Key, RangeRead, RemoteErrorKind, Storage, SyncPoint, crc64, open_url, read_all,
    write_all,
};

/// A fresh folder of a bucket for each check.
fn folders<'a>(url: &'a dyn Fn(&str) -> String) -> impl Fn() -> Arc<dyn Storage> + 'a {
    let count = Cell::new(0);
    move || {
        count.set(count.get() + 1);
        open_url(&url(&format!("checks/{}", count.get()))).unwrap()
    }
}

fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

#[test]
fn conformance_on_the_server_in_this_process() {
    let server = S3Server::start().unwrap();
    conformance::run_objects(&folders(&|folder| server.url(folder)));
    assert_eq!(server.upload_count(), 0, "an upload was neither completed nor aborted");
}

#[test]
fn reader_conformance_on_the_server_in_this_process() {
    let server = S3Server::start().unwrap();
    storage::testing::reader_conformance::run(&folders(&|folder| server.url(folder)));
}

/// Transient errors are retried, and callers do not see them.
#[test]
fn conformance_while_requests_fail() {
    let server = S3Server::start().unwrap();
    let seed = 11;
    for (share, fault) in [
        (20, Fault::SlowDown),
        (20, Fault::InternalError),
        (20, Fault::LoseAnswer),
        (10, Fault::Truncate),
        (10, Fault::Reset),
        (10, Fault::WrongRange),
    ] {
        server.inject(FaultRule::per_mille(share, seed, fault));
    }
    conformance::run_objects(&folders(&|folder| server.url(folder) + "&hedge=off"));
    storage::testing::reader_conformance::run(&folders(&|folder| {
        server.url(&format!("r/{folder}"))
    }));
    assert!(server.fault_count() > 50, "only {} faults", server.fault_count());
}

/// A large object is mapped from an unnamed file, because the memory of every rank would be too
/// much.
#[test]
fn a_large_object_is_mapped_from_the_disk() {
    let server = S3Server::start().unwrap();
    let store = open_url(&server.url("maps")).unwrap();
    let bytes: Vec<u8> = (0..(68_u32 << 20) + 7).map(|at| ((at * 31) >> 9) as u8).collect();
    write_all(&*store, &key("large"), &bytes).unwrap();
    let map = store.open(&key("large")).unwrap().map().unwrap();
    assert!(map[..] == bytes[..], "the map differs");
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let start = format!("{:x}-", map.as_ptr() as usize);
    let line = maps.lines().find(|line| line.starts_with(&start)).expect("a mapping of its own");
    assert!(line.ends_with("(deleted)"), "{line}");
    server.inject(FaultRule::every(1, Fault::Denied).of("GET"));
    let denied = store.open(&key("large")).unwrap().map().unwrap_err().to_string();
    assert!(denied.contains("large"), "{denied}");
    store.delete(&key("large")).unwrap();
    assert!(map[..] == bytes[..], "the map changed when the object was deleted");
}

/// The reference for the test server is Ceph RGW.
#[test]
fn services_rgw_keeps_the_contract() {
    let Ok(base) = std::env::var("FEEDLINE_TEST_S3_URL") else {
        eprintln!("SKIPPED: FEEDLINE_TEST_S3_URL is not set");
        return;
    };
    let (place, options) = base.split_once('?').unwrap_or((&base, ""));
    let run = format!("{}/{}", place.trim_end_matches('/'), std::process::id());
    let url = |folder: &str| format!("{run}/{folder}?{options}");
    conformance::run_objects(&folders(&|folder| url(folder)));
    storage::testing::reader_conformance::run(&folders(&|folder| url(&format!("r/{folder}"))));
    resumes_uploads(&*open_url(&url("drafts")).unwrap());
    let store = open_url(&format!("{}?{options}", place.trim_end_matches('/'))).unwrap();
    store.delete_folder(&key(&std::process::id().to_string())).unwrap();
}

/// The error of a read when every response to GET has this fault. The timeout is short only for
/// faults that stall, and long enough for a busy machine.
fn read_with(server: &S3Server, name: &str, fault: Fault) -> Error {
    let stall = if matches!(fault, Fault::Stall | Fault::Drip(..)) { "3s" } else { "60s" };
    let options = format!("&tries=2&stall={stall}&hedge=off");
    let store = open_url(&(server.url("errors") + &options)).unwrap();
    write_all(&*store, &key(name), &[7; 100_000]).unwrap();
    let object = store.open(&key(name)).unwrap();
    server.inject(FaultRule::every(1, fault).of("GET"));
    let mut buf = [0; 50_000];
    let read = object.read_many(&mut [RangeRead { offset: 9, buf: &mut buf }]);
    server.heal();
    read.unwrap_err()
}

#[test]
fn each_fault_has_its_error_kind() {
    use std::time::Duration;
    let server = S3Server::start().unwrap();
    let slow = Duration::from_millis(250);
    for (fault, expected, tries) in [
        (Fault::SlowDown, RemoteErrorKind::SlowDown, 2),
        (Fault::InternalError, RemoteErrorKind::Server, 2),
        // The second attempt has the keys of the file, read again.
        (Fault::Expired, RemoteErrorKind::Expired, 2),
        (Fault::Denied, RemoteErrorKind::Denied, 1),
        (Fault::ClockSkew, RemoteErrorKind::ClockSkew, 1),
        (Fault::Stall, RemoteErrorKind::Stalled, 2),
        (Fault::Drip(100, slow), RemoteErrorKind::Drip, 2),
        (Fault::WrongRange, RemoteErrorKind::WrongLength, 2),
        (Fault::Reset, RemoteErrorKind::Reset, 2),
        (Fault::Truncate, RemoteErrorKind::Truncated, 2),
    ] {
        let error = read_with(&server, &format!("{expected:?}"), fault);
        let Error::Remote(remote) = &error else { panic!("{fault:?}: {error}") };
        assert_eq!((remote.cause, remote.tries), (expected, tries), "{fault:?}: {error}");
        let text = error.to_string();
        assert!(
            text.starts_with("cannot read 50000 bytes at byte 9 of s3://test/errors/"),
            "{text}"
        );
        let has_response = fault != Fault::Stall;
        assert_eq!(text.contains("(request id request-"), has_response, "{text}");
        assert!(!text.contains(server.secret()), "{text}");
    }
}

/// Half of every response arrives: each attempt resumes where the one before ended.
#[test]
fn a_broken_body_is_resumed_at_its_end() {
    let server = S3Server::start().unwrap();
    let store = open_url(&(server.url("resume") + "&stall=3s&hedge=off")).unwrap();
    for (name, fault) in [("t", Fault::Truncate), ("r", Fault::Reset), ("s", Fault::StallInBody)] {
        let bytes: Vec<u8> = (0..3_000_000_u32).map(|i| (i * 7 % 251) as u8).collect();
        write_all(&*store, &key(name), &bytes).unwrap();
        let object = store.open(&key(name)).unwrap();
        server.inject(FaultRule::nth(1, fault).of("GET"));
        server.inject(FaultRule::nth(2, fault).of("GET"));
        let mut buf = vec![0; bytes.len()];
        object.read_many(&mut [RangeRead { offset: 0, buf: &mut buf }]).unwrap();
        server.heal();
        assert!(buf == bytes, "{fault:?}: other bytes were read");
    }
    let metrics = store.metrics();
    let of = |name: &str| metrics.iter().find(|(n, _)| n == name).map_or(0, |(_, value)| *value);
    assert_eq!(of("delivered_bytes"), 9_000_000);
    assert!(of("moved_bytes") < 9_100_000, "bytes were received twice: {metrics:?}");
    assert_eq!(of("retries_stalled"), 2, "{metrics:?}");
    assert!(of("retries_truncated") + of("retries_reset") == 4, "{metrics:?}");
}

#[test]
fn a_replaced_object_is_not_read() {
    let server = S3Server::start().unwrap();
    let store = open_url(&server.url("replaced")).unwrap();
    write_all(&*store, &key("a"), &[1; 1000]).unwrap();
    let object = store.open(&key("a")).unwrap();
    store.delete(&key("a")).unwrap();
    let mut buf = [0; 10];
    let absent = object.read_many(&mut [RangeRead { offset: 0, buf: &mut buf }]);
    assert!(matches!(absent, Err(Error::NotFound { .. })), "{absent:?}");
    write_all(&*store, &key("a"), &[2; 1000]).unwrap();
    let read = object.read_many(&mut [RangeRead { offset: 0, buf: &mut buf }]);
    let Err(Error::Remote(remote)) = read else { panic!("{read:?}") };
    assert_eq!(remote.cause, RemoteErrorKind::Replaced, "{remote}");
}

#[test]
fn a_missing_object_and_a_missing_bucket_are_distinguished() {
    let server = S3Server::start().unwrap();
    let store = open_url(&server.url("")).unwrap();
    let absent = store.open(&key("a")).unwrap_err();
    assert!(matches!(absent, Error::NotFound { .. }), "{absent}");
    let other = open_url(&server.url_of("other", "")).unwrap();
    for error in [
        other.open(&key("a")).unwrap_err(),
        other.list(&Key::root()).unwrap_err(),
        write_all(&*other, &key("a"), &[1]).unwrap_err(),
    ] {
        let Error::Remote(remote) = &error else { panic!("{error}") };
        assert_eq!(remote.cause, RemoteErrorKind::NoBucket, "{error}");
    }
}

/// Errors before any server responds.
#[test]
fn errors_of_name_connection_and_tls() {
    let server = S3Server::start().unwrap();
    let https = server.endpoint().replace("http:", "https:");
    // No process listens on the server's port at another loopback address while the server has it.
    let closed = server.endpoint().replace("127.0.0.1", "127.0.0.2");
    // No name server is queried for a label of more than 63 letters.
    let nameless = format!("http://{}.invalid", "a".repeat(64));
    for (endpoint, expected) in [
        (&*nameless, RemoteErrorKind::Dns),
        (&*closed, RemoteErrorKind::Unreachable),
        (&*https, RemoteErrorKind::Tls),
    ] {
        let proxies = ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"];
        if expected == RemoteErrorKind::Dns
            && proxies.iter().any(|name| std::env::var_os(name).is_some())
        {
            eprintln!("SKIPPED: a name without an address: a proxy would look it up");
            continue;
        }
        let credentials = server.url("").split_once("&credentials=").unwrap().1.to_owned();
        let url = format!("s3://b?endpoint={endpoint}&tries=2&credentials={credentials}");
        let error = open_url(&url).unwrap().open(&key("a")).unwrap_err();
        let Error::Remote(remote) = &error else { panic!("{error}") };
        assert_eq!(remote.cause, expected, "{error}");
        assert!(error.to_string().contains("hint: "), "{error}");
    }
}

#[test]
fn missing_and_wrong_credentials() {
    let server = S3Server::start().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("credentials");
    for (text, expected) in [
        ("[default]\n", RemoteErrorKind::NoCredentials),
        (
            "[default]\naws_access_key_id = accesskeyoftests\naws_secret_access_key = guessed\n",
            RemoteErrorKind::Denied,
        ),
    ] {
        std::fs::write(&file, text).unwrap();
        let (endpoint, file) = (server.endpoint(), file.display());
        let options = format!("tries=2&credentials={file}&profile=default");
        let url = format!("s3://test?endpoint={endpoint}&{options}&depth=");
        // Another depth for each, so that each has its own client.
        let depth = if expected == RemoteErrorKind::Denied { 2 } else { 3 };
        let store = open_url(&format!("{url}{depth}")).unwrap();
        let error = store.open(&key("a")).unwrap_err();
        let Error::Remote(remote) = &error else { panic!("{error}") };
        assert_eq!(remote.cause, expected, "{error}");
        assert!(!error.to_string().contains("guessed"), "{error}");
        assert!(!format!("{store:?}").contains("guessed"), "{store:?}");
    }
}

/// The timeout of an upload includes the time for its bytes. It was once computed from the length
/// after the bytes had been moved away.
#[test]
fn a_slow_upload_does_not_time_out() {
    let server = S3Server::start().unwrap();
    let store = open_url(&(server.url("slow") + "&stall=3s&tries=1")).unwrap();
    server.inject(FaultRule::nth(1, Fault::Delay(std::time::Duration::from_secs(4))).of("PUT"));
    write_all(&*store, &key("a"), &vec![3; 8 << 20]).unwrap();
}

/// The response to the request that made the object visible is lost; the retry finds the name taken
/// by this upload.
#[test]
fn a_lost_response_does_not_fail_an_upload() {
    let server = S3Server::start().unwrap();
    let store = open_url(&server.url("lost")).unwrap();
    server.inject(FaultRule::nth(1, Fault::LoseAnswer).of("PUT"));
    let small = vec![3; 1000];
    write_all(&*store, &key("small"), &small).unwrap();
    assert_eq!(read_all(&*store, &key("small")).unwrap(), small);
    server.heal();
    server.inject(FaultRule::nth(1, Fault::LoseAnswer).of("POST").to("uploadId"));
    server.inject(FaultRule::nth(2, Fault::LoseAnswer).of("PUT"));
    let large = vec![4; 40_000_000];
    write_all(&*store, &key("large"), &large).unwrap();
    assert!(read_all(&*store, &key("large")).unwrap() == large);
    assert_eq!(server.fault_count(), 3);
    assert_eq!(server.upload_count(), 0);
    // Another writer's object is not mistaken for this upload, whatever response was lost.
    let mut upload = store.create(&key("contested"), 0).unwrap();
    upload.write(&[5]).unwrap();
    write_all(&*store, &key("contested"), &[6]).unwrap();
    server.heal();
    server.inject(FaultRule::nth(1, Fault::InternalError).of("PUT"));
    let taken = upload.finish();
    assert!(matches!(taken, Err(Error::Exists { .. })), "{taken:?}");
}

/// A resumable upload outlives its writer: up to its last complete part, and completely after a
/// flush.
fn resumes_uploads(store: &dyn Storage) {
    let all: Vec<u8> =
        (0..37_000_001_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let name = key("deep/draft");
    let absent = store.resume(&name, SyncPoint::default());
    assert!(matches!(absent, Err(Error::NotFound { .. })), "{absent:?}");
    let mut draft = store.create_resumable(&name).unwrap();
    assert_eq!(draft.sync().unwrap(), SyncPoint::default());
    draft.write(&all[..20_000_000]).unwrap();
    let point = draft.sync().unwrap();
    let part_end = 16 << 20;
    assert_eq!(point, SyncPoint { bytes: part_end, crc64: crc64(&all[..part_end as usize]) });
    // Bytes after the sync point are cut off, sent or not.
    draft.write(&vec![7; 20_000_000]).unwrap();
    draft.sync().unwrap();
    drop(draft);
    assert_eq!(store.list_names(&Key::new("deep").unwrap()).unwrap(), Vec::<String>::new());
    assert_eq!(store.list(&Key::root()).unwrap(), []);
    let second = store.create_resumable(&name);
    assert!(matches!(second, Err(Error::Exists { .. })), "{second:?}");
    for wrong in [
        SyncPoint { bytes: part_end + 1, ..point },
        SyncPoint { bytes: 9 << 20, ..point },
        SyncPoint { crc64: 1, ..point },
    ] {
        let refused = store.resume(&name, wrong);
        assert!(matches!(refused, Err(Error::Corrupt { .. })), "{wrong:?}: {refused:?}");
    }
    let mut draft = store.resume(&name, point).unwrap();
    assert_eq!(draft.len_bytes(), part_end);
    draft.write(&all[part_end as usize..]).unwrap();
    draft.flush().unwrap();
    let complete_point = draft.sync().unwrap();
    assert_eq!(complete_point, SyncPoint { bytes: all.len() as u64, crc64: crc64(&all) });
    drop(draft);
    let entry = store.resume(&name, complete_point).unwrap().finish().unwrap();
    assert_eq!((entry.bytes, entry.crc64), (complete_point.bytes, complete_point.crc64));
    assert!(read_all(store, &name).unwrap() == all, "other bytes were read");
    store.discard(&name).unwrap();
    assert_eq!(store.list(&Key::root()).unwrap().len(), 1);
}

#[test]
fn uploads_resume_after_complete_parts() {
    let server = S3Server::start().unwrap();
    resumes_uploads(&*open_url(&server.url("drafts")).unwrap());
    assert_eq!(server.upload_count(), 0);
    for (seed, fault) in (1..).zip([Fault::SlowDown, Fault::LoseAnswer, Fault::InternalError]) {
        server.inject(FaultRule::per_mille(100, seed, fault));
    }
    resumes_uploads(&*open_url(&(server.url("faulty") + "&hedge=off")).unwrap());
    assert!(server.fault_count() > 3, "only {} faults", server.fault_count());
}

/// Starts a resumable upload and drops its writer.
fn start_upload(store: &dyn Storage, name: &Key, bytes: &[u8]) -> SyncPoint {
    let mut draft = store.create_resumable(name).unwrap();
    draft.write(bytes).unwrap();
    draft.sync().unwrap()
}

/// The stored state has the format of earlier versions, whose uploads may be resumed.
#[test]
fn the_state_object_keeps_its_format() {
    let server = S3Server::start().unwrap();
    let store = open_url(&server.url("form")).unwrap();
    let (name, state_key) = (key("a"), key(".a.draft"));
    let bytes = vec![5; 17 << 20];
    let point = start_upload(&*store, &name, &bytes);
    let text = String::from_utf8(read_all(&*store, &state_key).unwrap()).unwrap();
    let state: serde_json::Value = serde_json::from_str(&text).unwrap();
    // The values chosen by the server, and the random mark.
    let (upload, etag, mark) = (&state["upload"], &state["parts"][0]["etag"], &state["mark"]);
    let released = format!(
        "{{\"upload\":{upload},\"mark\":{mark},\"parts\":[{{\"number\":1,\"etag\":{etag},\
         \"bytes\":16777216,\"crc64\":18027542440088723222}}]}}"
    );
    assert_eq!(text, released);
    store.replace(&state_key, released.as_bytes()).unwrap();
    let mut draft = store.resume(&name, point).unwrap();
    draft.write(&bytes[draft.len_bytes() as usize..]).unwrap();
    draft.finish().unwrap();
    assert!(read_all(&*store, &name).unwrap() == bytes);
}

/// A state is used only if the server has its parts.
#[test]
fn missing_parts_are_reported() {
    let server = S3Server::start().unwrap();
    let store = open_url(&server.url("gone")).unwrap();
    let (name, state_key) = (key("a"), key(".a.draft"));
    let bytes = vec![5; 17 << 20];
    let start = || start_upload(&*store, &name, &bytes);
    let point = start();
    let state = read_all(&*store, &state_key).unwrap();
    let other =
        String::from_utf8(state.clone()).unwrap().replace("\"etag\":\"\\\"", "\"etag\":\"\\\"0");
    store.replace(&state_key, other.as_bytes()).unwrap();
    let error = store.resume(&name, point).unwrap_err().to_string();
    assert!(error.contains("part 1 of 16777216 bytes with ETag"), "{error}");
    store.replace(&state_key, b"{}").unwrap();
    let error = store.resume(&name, point).unwrap_err().to_string();
    let expected = "/gone/.a.draft: expected the state of a resumable upload, found missing field";
    assert!(error.contains(expected), "{error}");
    // A discard aborts the multipart upload; so does a lifecycle rule.
    store.replace(&state_key, &state).unwrap();
    store.discard(&name).unwrap();
    assert_eq!(server.upload_count(), 0);
    store.replace(&state_key, &state).unwrap();
    let error = store.resume(&name, point).unwrap_err().to_string();
    assert!(error.contains("no multipart upload") && error.contains("lifecycle"), "{error}");
    let mut restarted = store.resume(&name, SyncPoint::default()).unwrap();
    restarted.write(&bytes).unwrap();
    // Another writer takes the name meanwhile: its object stays.
    write_all(&*store, &name, b"taken").unwrap();
    let late = restarted.finish();
    assert!(matches!(late, Err(Error::Exists { .. })), "{late:?}");
    assert_eq!(read_all(&*store, &name).unwrap(), b"taken");
    store.discard(&name).unwrap();
    assert_eq!(server.upload_count(), 0);
    // The upload was finished by a process that died before it deleted the state.
    store.delete(&name).unwrap();
    start();
    let state = read_all(&*store, &state_key).unwrap();
    store.resume(&name, point).unwrap().finish().unwrap();
    store.replace(&state_key, &state).unwrap();
    let done = store.resume(&name, point);
    assert!(matches!(done, Err(Error::NotFound { .. })), "{done:?}");
}

/// A late request is hedged on another connection, and the first response is used.
#[test]
fn late_requests_are_hedged_within_the_budget() {
    use std::time::Duration;
    let server = S3Server::start().unwrap();
    let store = open_url(&server.url("late")).unwrap();
    write_all(&*store, &key("a"), &[9; 8192]).unwrap();
    let object = store.open(&key("a")).unwrap();
    let mut buf = [0; 8192];
    // As many requests as one hedge costs: none of these is hedged, however slow the machine is.
    for _ in 0..20 {
        object.read_many(&mut [RangeRead { offset: 0, buf: &mut buf }]).unwrap();
    }
    server.inject(FaultRule::nth(1, Fault::Delay(Duration::from_secs(20))).of("GET"));
    object.read_many(&mut [RangeRead { offset: 0, buf: &mut buf }]).unwrap();
    let metrics = store.metrics();
    let of = |name: &str| metrics.iter().find(|(n, _)| n == name).map_or(0, |(_, value)| *value);
    assert_eq!((of("hedges_sent"), of("hedges_won")), (1, 1), "{metrics:?}");
    assert_eq!(of("delivered_bytes"), 21 * 8192);
}

/// Corruption that a range cannot show is found by the checksums of a manifest.
#[test]
fn a_wrong_byte_is_found_by_its_checksum() {
    let server = S3Server::start().unwrap();
    let store = open_url(&server.url("wrong")).unwrap();
    let entry = write_all(&*store, &key("a"), &[1; 5000]).unwrap();
    entry.verify(&*store, &Key::root()).unwrap();
    server.inject(FaultRule::every(1, Fault::WrongByte).of("GET"));
    let wrong = entry.verify(&*store, &Key::root());
    assert!(matches!(wrong, Err(Error::Corrupt { .. })), "{wrong:?}");
}

/// Collects the log of this process.
#[derive(Debug)]
struct Heard(std::sync::Mutex<String>);

impl log::Log for Heard {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let line = format!("{} {}\n", record.target(), record.args());
        self.0.lock().unwrap().push_str(&line);
    }

    fn flush(&self) {}
}

#[test]
fn no_text_contains_a_secret() {
    static LOG: Heard = Heard(std::sync::Mutex::new(String::new()));
    log::set_logger(&LOG).unwrap();
    log::set_max_level(log::LevelFilter::Trace);
    let server = S3Server::start().unwrap();
    let store = open_url(&(server.url("secret") + "&tries=2")).unwrap();
    let mut text = format!("{store:?} {:?}", store.metrics());
    write_all(&*store, &key("a"), &[1]).unwrap();
    let object = store.open(&key("a")).unwrap();
    let upload = store.create(&key("b"), 0).unwrap();
    text += &format!("{object:?} {upload:?} {}", store.profile());
    server.inject(FaultRule::every(1, Fault::Denied));
    text += &store.open(&key("a")).unwrap_err().to_string();
    server.heal();
    server.inject(FaultRule::every(1, Fault::Truncate).of("GET"));
    text += &format!("{:?}", read_all(&*store, &key("a")).unwrap_err());
    text += &LOG.0.lock().unwrap();
    assert!(text.contains("s3://test: endpoint http://127.0.0.1"), "the log was not captured");
    assert!(!text.contains(server.secret()), "the text has a secret");
}

#[test]
fn renewed_keys_are_read_in_the_middle_of_a_run() {
    let server = S3Server::start().unwrap();
    let store = open_url(&server.url("renewed")).unwrap();
    write_all(&*store, &key("a"), &[7; 5000]).unwrap();
    let object = store.open(&key("a")).unwrap();
    server.renew_keys().unwrap();
    // Requests of all kinds, the first of each thread with the keys before.
    std::thread::scope(|scope| {
        for i in 0..8 {
            let (store, object) = (&store, &object);
            scope.spawn(move || {
                let mut bytes = [0; 5000];
                object.read_many(&mut [RangeRead { offset: 0, buf: &mut bytes }]).unwrap();
                assert_eq!(bytes, [7; 5000]);
                write_all(&**store, &key(&format!("b{i}")), &[1]).unwrap();
            });
        }
    });
    assert_eq!(store.list(&Key::root()).unwrap().len(), 9);
    store.delete(&key("a")).unwrap();
}

#[test]
fn a_bucket_with_expired_keys_works_again_once_they_are_renewed() {
    let server = S3Server::start().unwrap();
    let store = open_url(&server.url("again")).unwrap();
    write_all(&*store, &key("a"), &[7; 50]).unwrap();
    server.expire_keys();
    let before = server.request_count();
    let error = read_all(&*store, &key("a")).unwrap_err();
    assert!(matches!(&error, Error::Remote(e) if e.cause == RemoteErrorKind::Expired), "{error}");
    // The keys were read again once, and were the same.
    assert!(server.request_count() - before <= 4, "{}", server.request_count() - before);
    server.renew_keys().unwrap();
    assert_eq!(read_all(&*store, &key("a")).unwrap(), [7; 50]);
    // Another store of the process in the same bucket has them too.
    let other = open_url(&server.url("again")).unwrap();
    assert_eq!(read_all(&*other, &key("a")).unwrap(), [7; 50]);
}

/// A profile as it is used, and its keys from a program.
#[test]
fn keys_of_a_program_are_used_and_asked_for_again() {
    let server = S3Server::start().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (answer, profiles) = (folder.path().join("answer"), folder.path().join("profiles"));
    let program = format!("cat {}", answer.display());
    std::fs::write(&profiles, format!("[team]\ncredential_process = {program}\n")).unwrap();
    let url = format!(
        "s3://test/program?endpoint={}&credentials={}&profile=team",
        server.endpoint(),
        profiles.display()
    );
    let store = open_url(&url).unwrap();
    // The program fails: there are no keys, and the error says why.
    let error = write_all(&*store, &key("a"), &[7; 50]).unwrap_err();
    let Error::Remote(remote) = &error else { panic!("{error}") };
    assert_eq!(remote.cause, RemoteErrorKind::NoCredentials, "{error}");
    let keys = |key: &str, expires: &str| {
        format!(
            "{{\"Version\": 1, \"AccessKeyId\": \"{key}\", \"SecretAccessKey\": \"{}\"{expires}}}",
            server.secret()
        )
    };
    std::fs::write(&answer, keys("accesskeyoftests", "")).unwrap();
    write_all(&*store, &key("a"), &[7; 50]).unwrap();
    server.expire_keys();
    let later = ", \"Expiration\": \"2099-01-01T00:00:00Z\"";
    std::fs::write(&answer, keys("renewedkeyoftests", later)).unwrap();
    assert_eq!(read_all(&*store, &key("a")).unwrap(), [7; 50]);
}
