//! What only several clients of one NFS meet: caches that are apart, files that are gone while they
//! are open, a server that is away in the midst of a save.
//!
//! `scripts/services/nfs-test` makes the NFS; without it a test says so and ends.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::nfs_server::Nfs;
use ckpt::{Checkpoints, Dtype, Group, TensorData};
use storage::{Error, Key, Storage, SyncPoint, open_url, read_all, write_all};

fn nfs(test: &str) -> Option<Nfs> {
    Nfs::here().inspect_err(|why| tests::skip(test, why)).ok()
}

fn open(folder: &Path) -> Arc<dyn Storage> {
    open_url(folder.to_str().unwrap()).unwrap()
}

fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

/// A client remembers for half a minute what it did not find. Whoever waits for another machine's
/// sign, as the writers of a checkpoint do, must not wait for that.
#[test]
fn services_nfs_what_another_machine_writes_is_there_at_once() {
    let Some(nfs) = nfs("services_nfs_what_another_machine_writes_is_there_at_once") else {
        return;
    };
    for mount in [nfs.hard(), nfs.three()] {
        let folder = nfs.folder_on(&mount);
        let ours = open(folder.path());
        let theirs = open(&nfs.seen_on(&nfs.other(), folder.path()));
        for name in ["a", "folder/b", "folder/deep/c"] {
            let name = key(name);
            let parent = key(name.as_str().rsplit_once('/').map_or("folder", |(parent, _)| parent));
            let absent = ours.open(&name);
            assert!(matches!(absent, Err(Error::NotFound { .. })), "{absent:?}");
            let before = ours.list_names(&parent).unwrap();
            write_all(&*theirs, &name, name.as_str().as_bytes()).unwrap();
            assert_eq!(read_all(&*ours, &name).unwrap(), name.as_str().as_bytes());
            let listed = ours.list_names(&parent).unwrap();
            assert!(name.as_str() == "a" || listed.len() > before.len(), "{before:?} {listed:?}");
            // Taken is taken, also where the name seemed free.
            let taken = write_all(&*ours, &name, b"ours").unwrap_err();
            assert!(matches!(taken, Error::Exists { .. }), "{taken}");
        }
        theirs.replace(&key("a"), b"another").unwrap();
        assert_eq!(read_all(&*ours, &key("a")).unwrap(), b"another");
        theirs.delete_folder(&key("folder")).unwrap();
        assert_eq!(ours.list_names(&Key::root()).unwrap(), ["a"]);
        let gone = ours.open(&key("folder/deep/c"));
        assert!(matches!(gone, Err(Error::NotFound { .. })), "{gone:?}");
    }
}

/// Names come without their kinds, which are asked for one by one: of a file that went meanwhile,
/// as signs of life do, the rest of the listing must not suffer.
#[test]
fn services_nfs_a_listing_beside_renames_is_whole() {
    let Some(nfs) = nfs("services_nfs_a_listing_beside_renames_is_whole") else { return };
    let folder = nfs.folder_on(&nfs.hard());
    let ours = open(folder.path());
    write_all(&*ours, &key("stays"), b"").unwrap();
    let theirs = nfs.seen_on(&nfs.other(), folder.path());
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let name = |number: u32| theirs.join(format!("sign-{number}"));
            fs::write(name(0), "").unwrap();
            let mut number = 0;
            while !is_over.load(Ordering::Relaxed) {
                fs::rename(name(number), name(number + 1)).unwrap();
                number += 1;
            }
        });
        for _ in 0..300 {
            let names = ours.list_names(&Key::root());
            let is_whole = names.as_ref().is_ok_and(|names| names.contains(&"stays".to_owned()));
            if !is_whole {
                is_over.store(true, Ordering::Relaxed);
                panic!("a listing of what is there has {names:?}");
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
}

/// What is deleted while it is open stays on this client under another name, and in the way of
/// whoever removes its folder.
#[test]
fn services_nfs_what_is_open_is_deleted_later() {
    let Some(nfs) = nfs("services_nfs_what_is_open_is_deleted_later") else { return };
    let folder = nfs.folder_on(&nfs.hard());
    let store = open(folder.path());
    let bytes = vec![7; 3_000_000];
    write_all(&*store, &key("step/a"), &bytes).unwrap();
    let reader = store.open(&key("step/a")).unwrap();
    store.delete_folder(&key("step")).unwrap();
    assert_eq!(store.list_names(&Key::root()).unwrap(), [] as [&str; 0]);
    let mut read = vec![0; bytes.len()];
    reader.read_many(&mut [storage::RangeRead { offset: 0, buf: &mut read }]).unwrap();
    assert!(read == bytes, "an open file changed");

    // As if its process were dead: its mark is of one that never was.
    let left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().path()).collect();
    let [left] = left.as_slice() else { panic!("{left:?}") };
    let name = left.file_name().unwrap().to_str().unwrap().to_owned();
    let dead = with_other_start(&name);
    fs::rename(left, left.with_file_name(&dead)).unwrap();
    assert_eq!(store.remove_orphans(&Key::root()).unwrap(), [] as [&str; 0]);
    drop(reader);
    assert_eq!(store.remove_orphans(&Key::root()).unwrap(), [dead]);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// `.NAME.tmp-host.machine.boot.namespace.pid.started.number`, of a process that started earlier.
fn with_other_start(name: &str) -> String {
    let mut parts: Vec<&str> = name.rsplitn(3, '.').collect();
    let started: u64 = parts[1].parse().unwrap();
    let earlier = (started - 1).to_string();
    parts[1] = &earlier;
    parts.reverse();
    parts.join(".")
}

#[test]
fn services_nfs_a_draft_has_one_writer_on_all_machines() {
    let Some(nfs) = nfs("services_nfs_a_draft_has_one_writer_on_all_machines") else { return };
    let folder = nfs.folder_on(&nfs.hard());
    let ours = open(folder.path());
    let theirs = open(&nfs.seen_on(&nfs.other(), folder.path()));
    let mut draft = ours.create_resumable(&key("a")).unwrap();
    draft.write(b"ours").unwrap();
    let mark = draft.sync().unwrap();
    let second = theirs.resume(&key("a"), SyncPoint::default()).unwrap_err();
    assert!(matches!(second, Error::Locked { .. }), "{second}");
    drop(draft);
    let mut draft = theirs.resume(&key("a"), mark).unwrap();
    draft.write(b" and theirs").unwrap();
    draft.finish().unwrap();
    assert_eq!(read_all(&*ours, &key("a")).unwrap(), b"ours and theirs");
    let late = ours.resume(&key("a"), mark).unwrap_err();
    assert!(matches!(late, Error::NotFound { .. }), "{late}");
}

/// The server is cut off for some seconds in the midst of a save, and starts anew in the midst of
/// another: what was not yet on its disk is sent again.
#[test]
fn services_nfs_a_save_goes_on_when_the_server_does() {
    let Some(nfs) = nfs("services_nfs_a_save_goes_on_when_the_server_does") else { return };
    const BYTES: usize = 16 << 20;
    let folder = nfs.folder_on(&nfs.other());
    let steps = Checkpoints::open(open(folder.path()), key("run"));
    for (step, harm, mend) in [(1, "hang", "answer"), (2, "stop", "start")] {
        let bytes: Vec<u8> = (0..BYTES).map(|i| (i as u64 * step % 251) as u8).collect();
        let tensor = TensorData {
            name: "w",
            group: Group::Model,
            dtype: Dtype::U8,
            shape: &[BYTES as u64],
            bytes: &bytes,
        };
        let mut server = nfs.server_soon(harm, mend);
        steps.save(step, &[tensor], &[], serde_json::json!({})).unwrap();
        assert!(server.wait().unwrap().success(), "{harm}, then {mend}");
        let newest = steps.newest().unwrap().unwrap();
        assert_eq!(newest.step(), step);
        newest.verify().unwrap();
        let mut read = vec![0; bytes.len()];
        newest.read_tensor("w", Group::Model, &mut read).unwrap();
        assert!(read == bytes, "step {step} came back changed");
    }
}
