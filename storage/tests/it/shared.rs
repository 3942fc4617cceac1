//! Memory and sockets between processes, here between threads and two mappings of one process.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use storage::ipc::{Geometry, LocalListener, Peer, RingEnd, RingReceiver, RingSender, ready};

const GEOMETRY: Geometry = Geometry { slots: 4, slot_bytes: 5000 };
const LONG: Duration = Duration::from_secs(20);
const NOW: Duration = Duration::ZERO;

fn ring(geometry: Geometry) -> (RingSender, RingReceiver) {
    let sender = RingSender::create(geometry).unwrap();
    let receiver = RingReceiver::open(copy(&sender), geometry).unwrap();
    (sender, receiver)
}

fn copy(sender: &RingSender) -> OwnedFd {
    sender.fd().try_clone_to_owned().unwrap()
}

fn send(sender: &mut RingSender, message: &[u8]) -> bool {
    let Some(slot) = sender.slot().unwrap() else { return false };
    slot[..message.len()].copy_from_slice(message);
    sender.send(message.len());
    true
}

/// A name that no other test and no other run has.
fn name(of: &str) -> String {
    format!("feedline-test-{of}-{}", std::process::id())
}

#[test]
fn messages_arrive_in_order_and_slots_are_reused() {
    let (mut sender, mut receiver) = ring(GEOMETRY);
    assert_eq!(receiver.message().unwrap(), None);
    for round in 0..50_u32 {
        for nth in 0..4 {
            assert!(send(&mut sender, &[nth; 7]), "round {round}");
        }
        assert!(!send(&mut sender, b"no room"));
        for nth in 0..4 {
            assert_eq!(receiver.message().unwrap(), Some(&[nth; 7][..]));
            assert_eq!(
                receiver.message().unwrap(),
                Some(&[nth; 7][..]),
                "a message stays until it is released"
            );
            receiver.release();
            receiver.release();
        }
        assert_eq!(receiver.message().unwrap(), None);
    }
    assert!(send(&mut sender, &[]));
    assert!(send(&mut sender, &[9; 5000]), "as large as a slot");
    assert_eq!(receiver.message().unwrap(), Some(&[][..]));
    receiver.release();
    assert_eq!(receiver.message().unwrap(), Some(&[9; 5000][..]));
}

#[test]
fn a_waiting_receiver_is_woken() {
    let (mut sender, mut receiver) = ring(GEOMETRY);
    let receiving = std::thread::spawn(move || {
        let mut sum = 0_u64;
        loop {
            if let Some(message) = receiver.message().unwrap() {
                sum += u64::from(u32::from_le_bytes(message.try_into().unwrap()));
                receiver.release();
            } else if receiver.tail().unwrap() == RingEnd::End
                && receiver.message().unwrap().is_none()
            {
                return sum;
            } else {
                receiver.wait(LONG).unwrap();
            }
        }
    });
    for number in 0..20_000_u32 {
        while !send(&mut sender, &number.to_le_bytes()) {
            std::thread::yield_now();
        }
    }
    sender.close(&RingEnd::End);
    assert_eq!(receiving.join().unwrap(), 19_999 * 20_000 / 2);
}

#[test]
fn the_end_follows_the_messages_and_has_the_reason() {
    let (mut sender, mut receiver) = ring(GEOMETRY);
    assert!(send(&mut sender, b"last"));
    assert_eq!(receiver.tail().unwrap(), RingEnd::Open);
    let expected = format!("the disk has failed{}", "ü".repeat(4000));
    sender.close(&RingEnd::Failed(expected.clone()));
    sender.close(&RingEnd::End);
    assert!(!send(&mut sender, b"more"), "closed");
    assert_eq!(receiver.message().unwrap(), Some(&b"last"[..]));
    receiver.release();
    assert_eq!(receiver.message().unwrap(), None);
    let RingEnd::Failed(reason) = receiver.tail().unwrap() else { panic!("no failure") };
    assert!(expected.starts_with(&reason) && reason.len() > 3000, "{} bytes", reason.len());
    receiver.wait(LONG).unwrap();
}

#[test]
fn invalid_geometries_are_refused() {
    for (slots, slot_bytes) in [(0, 1), (3, 1), (2048, 1), (1, 0), (1, (1 << 30) + 1)] {
        RingSender::create(Geometry { slots, slot_bytes }).unwrap_err();
    }
    let sender = RingSender::create(GEOMETRY).unwrap();
    for other in [
        Geometry { slots: 8, ..GEOMETRY },
        Geometry { slot_bytes: 4999, ..GEOMETRY },
        Geometry { slot_bytes: 50_000, ..GEOMETRY },
    ] {
        RingReceiver::open(copy(&sender), other).unwrap_err();
    }
    // A file could be truncated under the mapping, which would raise a signal.
    let file = tempfile::tempfile().unwrap();
    file.set_len(6 * 8192).unwrap();
    let error = RingReceiver::open(file.into(), GEOMETRY).unwrap_err().to_string();
    assert!(error.contains("shared memory"), "{error}");
    // A sealed memfd cannot be truncated.
    File::from(copy(&sender)).set_len(0).unwrap_err();
}

/// An invalid counter of the receiver is an error of the sender, not an invalid slice.
#[test]
fn broken_counters_are_errors() {
    use std::os::unix::fs::FileExt as _;
    let (mut sender, mut receiver) = ring(GEOMETRY);
    let file = File::from(copy(&sender));
    file.write_all_at(&77_u32.to_le_bytes(), 128).unwrap();
    assert!(sender.slot().unwrap_err().to_string().contains("77 taken"));
    file.write_all_at(&5_u32.to_le_bytes(), 68).unwrap();
    assert!(receiver.message().unwrap_err().to_string().contains("5 messages sent"));
    file.write_all_at(&1_u32.to_le_bytes(), 68).unwrap();
    file.write_all_at(&5001_u32.to_le_bytes(), 4096).unwrap();
    assert!(receiver.message().unwrap_err().to_string().contains("found 5001 bytes"));
    file.write_all_at(&7_u32.to_le_bytes(), 72).unwrap();
    assert!(receiver.tail().unwrap_err().to_string().contains("state 7"));
}

#[test]
fn a_listener_has_one_owner_and_ends_with_it() {
    let name = name("listener");
    assert!(Peer::knock(&name).unwrap().is_none());
    let listener = LocalListener::open(&name).unwrap().unwrap();
    assert!(LocalListener::open(&name).unwrap().is_none());
    assert!(listener.accept().unwrap().is_none());
    let guest = Peer::knock(&name).unwrap().unwrap();
    assert_eq!(ready(&[listener.as_fd()], Some(LONG)).unwrap(), [true]);
    let host = listener.accept().unwrap().unwrap();
    assert_eq!((guest.pid(), host.pid()), (std::process::id(), std::process::id()));
    drop(listener);
    assert!(Peer::knock(&name).unwrap().is_none());
    assert!(guest.drain(), "the connection outlives the listener");
    drop(host);
    assert!(!guest.drain());
    drop(LocalListener::open(&name).unwrap().unwrap());
}

#[test]
fn descriptors_and_bytes_go_over_a_connection() {
    let (a, b) = Peer::pair().unwrap();
    let mut sender = RingSender::create(GEOMETRY).unwrap();
    a.send_fd(7, sender.fd(), LONG).unwrap();
    a.send(b"hello", LONG).unwrap();
    let (byte, fd) = b.receive_fd(LONG).unwrap();
    let mut receiver = RingReceiver::open(fd.unwrap(), GEOMETRY).unwrap();
    assert!(send(&mut sender, b"over there"));
    assert_eq!((byte, receiver.message().unwrap()), (7, Some(&b"over there"[..])));
    let mut bytes = [0; 5];
    b.receive(&mut bytes, LONG).unwrap();
    assert_eq!(&bytes, b"hello");
    assert_eq!(ready(&[a.as_fd(), b.as_fd()], Some(NOW)).unwrap(), [false, false]);
    for _ in 0..100_000 {
        b.nudge();
    }
    assert_eq!(ready(&[a.as_fd(), b.as_fd()], None).unwrap(), [true, false]);
    assert!(a.drain());
    assert_eq!(ready(&[a.as_fd()], Some(NOW)).unwrap(), [false]);
    // A byte without a descriptor, then the end.
    a.send(&[3], LONG).unwrap();
    assert!(matches!(b.receive_fd(LONG), Ok((3, None))));
    drop(a);
    assert!(b.receive_fd(LONG).is_err());
    assert_eq!(ready(&[b.as_fd()], None).unwrap(), [true]);
    b.nudge();
}

/// A peer of another user is refused, and so is a listener of another user.
#[test]
fn peers_of_other_users_are_refused() {
    use std::os::linux::net::SocketAddrExt as _;
    use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
    use std::os::unix::process::CommandExt as _;
    if let Ok(name) = std::env::var("FEEDLINE_TEST_STRANGER") {
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let _outside = UnixStream::connect_addr(&address).unwrap();
        let squat = SocketAddr::from_abstract_name(format!("{name}-squat")).unwrap();
        let _squatter = UnixListener::bind_addr(&squat).unwrap();
        println!("here");
        // Waits until the parent has checked, and closes its end.
        std::io::stdin().read_line(&mut String::new()).unwrap();
        return;
    }
    let name = name("stranger");
    let listener = LocalListener::open(&name).unwrap().unwrap();
    // Only root can become another user; the file must be executable by that user.
    let folder = tempfile::tempdir().unwrap();
    let binary = folder.path().join("stranger");
    std::fs::copy(std::env::current_exe().unwrap(), &binary).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(folder.path(), mode).unwrap();
    let uid = std::fs::metadata(folder.path()).map(|m| std::os::unix::fs::MetadataExt::uid(&m));
    let child = std::process::Command::new(binary)
        .args(["--exact", "shared::peers_of_other_users_are_refused", "--nocapture"])
        .env("FEEDLINE_TEST_STRANGER", format!("feedline-{}-{name}", uid.unwrap()))
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .uid(65534)
        .spawn();
    let Ok(mut child) = child else {
        eprintln!("SKIPPED: running as another user needs root");
        return;
    };
    let out = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut lines = std::io::BufRead::lines(out).map_while(Result::ok);
    // With one test thread the name of the test precedes it in the line.
    assert!(lines.any(|line| line.ends_with("here")));
    let error = listener.accept().unwrap_err().to_string();
    assert!(error.contains("user 65534"), "{error}");
    let error = Peer::knock(&format!("{name}-squat")).unwrap_err().to_string();
    assert!(error.contains("user 65534"), "{error}");
    drop(child.stdin.take());
    lines.for_each(drop);
    child.wait().unwrap();
}
