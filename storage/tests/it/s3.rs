//! S3 keeps the contract of every store, on the server in this process and on a real one.
//!
//! With `FEEDLINE_TEST_S3_URL`, such as `s3://bucket/folder?endpoint=http://127.0.0.1:8080`, the
//! same suite runs there too, with the credentials of the environment; what it writes below that
//! folder it deletes.

#![cfg(feature = "server")]
use std::cell::Cell;
use std::sync::Arc;

use storage::s3_server::{Fault, FaultRule, S3Server};
use storage::testing::conformance;
use storage::{
    Error, Key, RemoteErrorKind, Storage, SyncPoint, crc64, open_url, read_all, write_all,
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
fn the_contract_on_the_server_in_this_process() {
    let server = S3Server::start().unwrap();
    conformance::run_objects(&folders(&|folder| server.url(folder)));
    assert_eq!(server.upload_count(), 0, "an upload was neither completed nor aborted");
}

#[test]
fn readers_on_the_server_in_this_process() {
    let server = S3Server::start().unwrap();
    storage::testing::reader_conformance::run(&folders(&|folder| server.url(folder)));
}

/// Whatever passes is tried again, and nobody sees it.
#[test]
fn the_contract_while_requests_fail() {
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

/// What is too large for the memory of every rank lies in a file that no folder knows.
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
    assert!(map[..] == bytes[..], "the map changed when it was deleted");
}

/// The oracle for our own server is Ceph's.
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
    drafts_go_on(&*open_url(&url("drafts")).unwrap());
    let store = open_url(&format!("{}?{options}", place.trim_end_matches('/'))).unwrap();
    store.delete_folder(&key(&std::process::id().to_string())).unwrap();
}

/// What a read of an object fails with when all answers to GET fail so. Only what stalls is given
/// up soon, and not so soon that a busy machine could be taken for it.
fn read_with(server: &S3Server, name: &str, fault: Fault) -> Error {
    let stall = if matches!(fault, Fault::Stall | Fault::Drip(..)) { "3s" } else { "60s" };
    let options = format!("&tries=2&stall={stall}&hedge=off");
    let store = open_url(&(server.url("errors") + &options)).unwrap();
    write_all(&*store, &key(name), &[7; 100_000]).unwrap();
    let object = store.open(&key(name)).unwrap();
    server.inject(FaultRule::every(1, fault).of("GET"));
    let mut buf = [0; 50_000];
    let read = object.read_many(&mut [storage::RangeRead { offset: 9, buf: &mut buf }]);
    server.heal();
    read.unwrap_err()
}

#[test]
fn each_failure_has_an_error_of_its_own() {
    use std::time::Duration;
    let server = S3Server::start().unwrap();
    let slow = Duration::from_millis(250);
    for (fault, due, tries) in [
        (Fault::SlowDown, RemoteErrorKind::SlowDown, 2),
        (Fault::InternalError, RemoteErrorKind::Server, 2),
        (Fault::Expired, RemoteErrorKind::Expired, 1),
        (Fault::Denied, RemoteErrorKind::Denied, 1),
        (Fault::ClockSkew, RemoteErrorKind::ClockSkew, 1),
        (Fault::Stall, RemoteErrorKind::Stalled, 2),
        (Fault::Drip(100, slow), RemoteErrorKind::Drip, 2),
        (Fault::WrongRange, RemoteErrorKind::WrongLength, 2),
        (Fault::Reset, RemoteErrorKind::Reset, 2),
        (Fault::Truncate, RemoteErrorKind::Truncated, 2),
    ] {
        let error = read_with(&server, &format!("{due:?}"), fault);
        let Error::Remote(remote) = &error else { panic!("{fault:?}: {error}") };
        assert_eq!((remote.cause, remote.tries), (due, tries), "{fault:?}: {error}");
        let text = error.to_string();
        assert!(
            text.starts_with("cannot read 50000 bytes at byte 9 of s3://test/errors/"),
            "{text}"
        );
        let answered = fault != Fault::Stall;
        assert_eq!(text.contains("(request id request-"), answered, "{text}");
        assert!(!text.contains(server.secret()), "{text}");
    }
}

/// Half of every answer arrives: each try goes on where the one before broke off.
#[test]
fn a_body_goes_on_where_it_broke_off() {
    let server = S3Server::start().unwrap();
    let store = open_url(&(server.url("resume") + "&stall=3s&hedge=off")).unwrap();
    for (name, fault) in [("t", Fault::Truncate), ("r", Fault::Reset), ("s", Fault::StallInBody)] {
        let bytes: Vec<u8> = (0..3_000_000_u32).map(|i| (i * 7 % 251) as u8).collect();
        write_all(&*store, &key(name), &bytes).unwrap();
        let object = store.open(&key(name)).unwrap();
        server.inject(FaultRule::nth(1, fault).of("GET"));
        server.inject(FaultRule::nth(2, fault).of("GET"));
        let mut buf = vec![0; bytes.len()];
        object.read_many(&mut [storage::RangeRead { offset: 0, buf: &mut buf }]).unwrap();
        server.heal();
        assert!(buf == bytes, "{fault:?}: it came back changed");
    }
    let metrics = store.metrics();
    let of = |name: &str| metrics.iter().find(|(n, _)| n == name).map_or(0, |(_, value)| *value);
    assert_eq!(of("delivered_bytes"), 9_000_000);
    assert!(of("moved_bytes") < 9_100_000, "bytes came twice: {metrics:?}");
    assert_eq!(of("retries_stalled"), 2, "{metrics:?}");
    assert!(of("retries_truncated") + of("retries_reset") == 4, "{metrics:?}");
}

#[test]
fn an_object_that_was_replaced_is_not_read_on() {
    let server = S3Server::start().unwrap();
    let store = open_url(&server.url("replaced")).unwrap();
    write_all(&*store, &key("a"), &[1; 1000]).unwrap();
    let object = store.open(&key("a")).unwrap();
    store.delete(&key("a")).unwrap();
    let mut buf = [0; 10];
    let gone = object.read_many(&mut [storage::RangeRead { offset: 0, buf: &mut buf }]);
    assert!(matches!(gone, Err(Error::NotFound { .. })), "{gone:?}");
    write_all(&*store, &key("a"), &[2; 1000]).unwrap();
    let read = object.read_many(&mut [storage::RangeRead { offset: 0, buf: &mut buf }]);
    let Err(Error::Remote(remote)) = read else { panic!("{read:?}") };
    assert_eq!(remote.cause, RemoteErrorKind::Replaced, "{remote}");
}

#[test]
fn what_is_not_there_is_told_apart() {
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

/// Errors of the way there, without any server.
#[test]
fn no_connection_no_name_no_encryption() {
    let server = S3Server::start().unwrap();
    let https = server.endpoint().replace("http:", "https:");
    // Nobody gets the server's port on another address of loopback while it has it.
    let closed = server.endpoint().replace("127.0.0.1", "127.0.0.2");
    // No name server is asked for a label of more than 63 letters.
    let nameless = format!("http://{}.invalid", "a".repeat(64));
    for (endpoint, due) in [
        (&*nameless, RemoteErrorKind::Dns),
        (&*closed, RemoteErrorKind::Unreachable),
        (&*https, RemoteErrorKind::Tls),
    ] {
        let proxies = ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"];
        if due == RemoteErrorKind::Dns
            && proxies.iter().any(|name| std::env::var_os(name).is_some())
        {
            eprintln!("SKIPPED: a name without an address: a proxy would look it up");
            continue;
        }
        let credentials = server.url("").split_once("&credentials=").unwrap().1.to_owned();
        let url = format!("s3://b?endpoint={endpoint}&tries=2&credentials={credentials}");
        let error = open_url(&url).unwrap().open(&key("a")).unwrap_err();
        let Error::Remote(remote) = &error else { panic!("{error}") };
        assert_eq!(remote.cause, due, "{error}");
        assert!(error.to_string().contains("hint: "), "{error}");
    }
}

#[test]
fn credentials_that_are_absent_or_wrong() {
    let server = S3Server::start().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("credentials");
    for (text, due) in [
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
        let depth = if due == RemoteErrorKind::Denied { 2 } else { 3 }; // another client for each
        let store = open_url(&format!("{url}{depth}")).unwrap();
        let error = store.open(&key("a")).unwrap_err();
        let Error::Remote(remote) = &error else { panic!("{error}") };
        assert_eq!(remote.cause, due, "{error}");
        assert!(!error.to_string().contains("guessed"), "{error}");
        assert!(!format!("{store:?}").contains("guessed"), "{store:?}");
    }
}

/// An upload may take longer than an answer: it is given the time that its bytes take. Once its
/// length was asked for after the bytes had been moved away.
#[test]
fn a_slow_upload_is_not_taken_for_a_stalled_one() {
    let server = S3Server::start().unwrap();
    let store = open_url(&(server.url("slow") + "&stall=3s&tries=1")).unwrap();
    server.inject(FaultRule::nth(1, Fault::Delay(std::time::Duration::from_secs(4))).of("PUT"));
    write_all(&*store, &key("a"), &vec![3; 8 << 20]).unwrap();
}

/// The answer to the request that made it visible is lost; the next one says that the name is
/// taken, by ourselves.
#[test]
fn an_upload_whose_answer_is_lost_is_still_ours() {
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
    // A stranger's object is not taken for ours, whatever was lost.
    let mut upload = store.create(&key("contested"), 0).unwrap();
    upload.write(&[5]).unwrap();
    write_all(&*store, &key("contested"), &[6]).unwrap();
    server.heal();
    server.inject(FaultRule::nth(1, Fault::InternalError).of("PUT"));
    let taken = upload.finish();
    assert!(matches!(taken, Err(Error::Exists { .. })), "{taken:?}");
}

/// A draft outlives its writer up to its last whole part, and whole when it is settled.
fn drafts_go_on(store: &dyn Storage) {
    let all: Vec<u8> =
        (0..37_000_001_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let name = key("deep/draft");
    let absent = store.resume(&name, SyncPoint::default());
    assert!(matches!(absent, Err(Error::NotFound { .. })), "{absent:?}");
    let mut draft = store.create_resumable(&name).unwrap();
    assert_eq!(draft.sync().unwrap(), SyncPoint::default());
    draft.write(&all[..20_000_000]).unwrap();
    let mark = draft.sync().unwrap();
    let due = 16 << 20;
    assert_eq!(mark, SyncPoint { bytes: due, crc64: crc64(&all[..due as usize]) });
    // What is after the mark is cut off again, sent or not.
    draft.write(&vec![7; 20_000_000]).unwrap();
    draft.sync().unwrap();
    drop(draft);
    assert_eq!(store.list_names(&Key::new("deep").unwrap()).unwrap(), Vec::<String>::new());
    assert_eq!(store.list(&Key::root()).unwrap(), []);
    let second = store.create_resumable(&name);
    assert!(matches!(second, Err(Error::Exists { .. })), "{second:?}");
    for wrong in [
        SyncPoint { bytes: due + 1, ..mark },
        SyncPoint { bytes: 9 << 20, ..mark },
        SyncPoint { crc64: 1, ..mark },
    ] {
        let refused = store.resume(&name, wrong);
        assert!(matches!(refused, Err(Error::Corrupt { .. })), "{wrong:?}: {refused:?}");
    }
    let mut draft = store.resume(&name, mark).unwrap();
    assert_eq!(draft.len_bytes(), due);
    draft.write(&all[due as usize..]).unwrap();
    draft.flush().unwrap();
    let whole = draft.sync().unwrap();
    assert_eq!(whole, SyncPoint { bytes: all.len() as u64, crc64: crc64(&all) });
    drop(draft);
    let entry = store.resume(&name, whole).unwrap().finish().unwrap();
    assert_eq!((entry.bytes, entry.crc64), (whole.bytes, whole.crc64));
    assert!(read_all(store, &name).unwrap() == all, "it came back changed");
    store.discard(&name).unwrap();
    assert_eq!(store.list(&Key::root()).unwrap().len(), 1);
}

#[test]
fn drafts_go_on_by_whole_parts() {
    let server = S3Server::start().unwrap();
    drafts_go_on(&*open_url(&server.url("drafts")).unwrap());
    assert_eq!(server.upload_count(), 0);
    for (seed, fault) in (1..).zip([Fault::SlowDown, Fault::LoseAnswer, Fault::InternalError]) {
        server.inject(FaultRule::per_mille(100, seed, fault));
    }
    drafts_go_on(&*open_url(&(server.url("faulty") + "&hedge=off")).unwrap());
    assert!(server.fault_count() > 3, "only {} faults", server.fault_count());
}

/// A draft of some bytes, whose writer is gone.
fn begin_draft(store: &dyn Storage, name: &Key, bytes: &[u8]) -> SyncPoint {
    let mut draft = store.create_resumable(name).unwrap();
    draft.write(bytes).unwrap();
    draft.sync().unwrap()
}

/// The bytes of a state that is stored are those of the versions before, which may be resumed.
#[test]
fn the_state_of_a_draft_keeps_its_form() {
    let server = S3Server::start().unwrap();
    let store = open_url(&server.url("form")).unwrap();
    let (name, state_key) = (key("a"), key(".a.draft"));
    let bytes = vec![5; 17 << 20];
    let mark = begin_draft(&*store, &name, &bytes);
    let text = String::from_utf8(read_all(&*store, &state_key).unwrap()).unwrap();
    let state: serde_json::Value = serde_json::from_str(&text).unwrap();
    // What the server chose, and what is drawn.
    let (upload, etag, mark_text) = (&state["upload"], &state["parts"][0]["etag"], &state["mark"]);
    let released = format!(
        "{{\"upload\":{upload},\"mark\":{mark_text},\"parts\":[{{\"number\":1,\"etag\":{etag},\
         \"bytes\":16777216,\"crc64\":18027542440088723222}}]}}"
    );
    assert_eq!(text, released);
    store.replace(&state_key, released.as_bytes()).unwrap();
    let mut draft = store.resume(&name, mark).unwrap();
    draft.write(&bytes[draft.len_bytes() as usize..]).unwrap();
    draft.finish().unwrap();
    assert!(read_all(&*store, &name).unwrap() == bytes);
}

/// A state is believed only as far as the server has what it says.
#[test]
fn parts_that_are_not_there_are_missed() {
    let server = S3Server::start().unwrap();
    let store = open_url(&server.url("gone")).unwrap();
    let (name, state_key) = (key("a"), key(".a.draft"));
    let bytes = vec![5; 17 << 20];
    let begin = || begin_draft(&*store, &name, &bytes);
    let mark = begin();
    let state = read_all(&*store, &state_key).unwrap();
    let other =
        String::from_utf8(state.clone()).unwrap().replace("\"etag\":\"\\\"", "\"etag\":\"\\\"0");
    store.replace(&state_key, other.as_bytes()).unwrap();
    let told = store.resume(&name, mark).unwrap_err().to_string();
    assert!(told.contains("part 1 of 16777216 bytes with ETag"), "{told}");
    store.replace(&state_key, b"{}").unwrap();
    let told = store.resume(&name, mark).unwrap_err().to_string();
    let expected = "/gone/.a.draft: expected the state of a resumable upload, found missing field";
    assert!(told.contains(expected), "{told}");
    // Whoever discards it gives its parts up; a life cycle rule does so too.
    store.replace(&state_key, &state).unwrap();
    store.discard(&name).unwrap();
    assert_eq!(server.upload_count(), 0);
    store.replace(&state_key, &state).unwrap();
    let told = store.resume(&name, mark).unwrap_err().to_string();
    assert!(told.contains("no multipart upload") && told.contains("lifecycle"), "{told}");
    let mut anew = store.resume(&name, SyncPoint::default()).unwrap();
    anew.write(&bytes).unwrap();
    // The name is taken meanwhile: what was to be the draft's stays.
    write_all(&*store, &name, b"taken").unwrap();
    let late = anew.finish();
    assert!(matches!(late, Err(Error::Exists { .. })), "{late:?}");
    assert_eq!(read_all(&*store, &name).unwrap(), b"taken");
    store.discard(&name).unwrap();
    assert_eq!(server.upload_count(), 0);
    // Finished by a process that died before it could say so.
    store.delete(&name).unwrap();
    begin();
    let state = read_all(&*store, &state_key).unwrap();
    store.resume(&name, mark).unwrap().finish().unwrap();
    store.replace(&state_key, &state).unwrap();
    let done = store.resume(&name, mark);
    assert!(matches!(done, Err(Error::NotFound { .. })), "{done:?}");
}

/// A late answer is asked for again elsewhere, and the first one that comes counts.
#[test]
fn late_requests_are_made_again_within_the_budget() {
    use std::time::Duration;
    let server = S3Server::start().unwrap();
    let store = open_url(&server.url("late")).unwrap();
    write_all(&*store, &key("a"), &[9; 8192]).unwrap();
    let object = store.open(&key("a")).unwrap();
    let mut buf = [0; 8192];
    // As many as one hedge costs: however slow the machine is, none of these has one.
    for _ in 0..20 {
        object.read_many(&mut [storage::RangeRead { offset: 0, buf: &mut buf }]).unwrap();
    }
    server.inject(FaultRule::nth(1, Fault::Delay(Duration::from_secs(20))).of("GET"));
    object.read_many(&mut [storage::RangeRead { offset: 0, buf: &mut buf }]).unwrap();
    let metrics = store.metrics();
    let of = |name: &str| metrics.iter().find(|(n, _)| n == name).map_or(0, |(_, value)| *value);
    assert_eq!((of("hedges_sent"), of("hedges_won")), (1, 1), "{metrics:?}");
    assert_eq!(of("delivered_bytes"), 21 * 8192);
}

/// What cannot be seen in a range is seen by the sums of a manifest.
#[test]
fn a_wrong_byte_is_found_by_its_sum() {
    let server = S3Server::start().unwrap();
    let store = open_url(&server.url("wrong")).unwrap();
    let entry = write_all(&*store, &key("a"), &[1; 5000]).unwrap();
    entry.verify(&*store, &Key::root()).unwrap();
    server.inject(FaultRule::every(1, Fault::WrongByte).of("GET"));
    let wrong = entry.verify(&*store, &Key::root());
    assert!(matches!(wrong, Err(Error::Corrupt { .. })), "{wrong:?}");
}

/// All that is logged in this process.
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
fn nothing_that_is_said_holds_a_secret() {
    static HEARD: Heard = Heard(std::sync::Mutex::new(String::new()));
    log::set_logger(&HEARD).unwrap();
    log::set_max_level(log::LevelFilter::Trace);
    let server = S3Server::start().unwrap();
    let store = open_url(&(server.url("secret") + "&tries=2")).unwrap();
    let mut said = format!("{store:?} {:?}", store.metrics());
    write_all(&*store, &key("a"), &[1]).unwrap();
    let object = store.open(&key("a")).unwrap();
    let upload = store.create(&key("b"), 0).unwrap();
    said += &format!("{object:?} {upload:?} {}", store.profile());
    server.inject(FaultRule::every(1, Fault::Denied));
    said += &store.open(&key("a")).unwrap_err().to_string();
    server.heal();
    server.inject(FaultRule::every(1, Fault::Truncate).of("GET"));
    said += &format!("{:?}", read_all(&*store, &key("a")).unwrap_err());
    said += &HEARD.0.lock().unwrap();
    assert!(said.contains("s3://test: endpoint http://127.0.0.1"), "the log was not heard");
    assert!(!said.contains(server.secret()), "a secret was said");
}
