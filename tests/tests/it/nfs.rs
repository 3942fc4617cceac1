//! Behaviour with several clients of an NFS server: separate caches, files that are deleted while
//! they are open, and a server that is unreachable during a save.
//!
//! `scripts/services/nfs-test` sets up the NFS; without it the tests are skipped.

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

/// A client caches for half a minute that a file does not exist. The writers of a checkpoint wait
/// for files of other machines, and must see them sooner.
#[test]
fn services_nfs_writes_of_another_machine_are_visible_at_once() {
    let Some(nfs) = nfs("services_nfs_writes_of_another_machine_are_visible_at_once") else {
        return;
    };
    for mount in [nfs.hard(), nfs.three()] {
        let folder = nfs.folder_on(&mount);
        let local = open(folder.path());
        let remote = open(&nfs.seen_on(&nfs.other(), folder.path()));
        for name in ["a", "folder/b", "folder/deep/c"] {
            let name = key(name);
            let parent = key(name.as_str().rsplit_once('/').map_or("folder", |(parent, _)| parent));
            let missing = local.open(&name);
            assert!(matches!(missing, Err(Error::NotFound { .. })), "{missing:?}");
            let before = local.list_names(&parent).unwrap();
            write_all(&*remote, &name, name.as_str().as_bytes()).unwrap();
            assert_eq!(read_all(&*local, &name).unwrap(), name.as_str().as_bytes());
            let listed = local.list_names(&parent).unwrap();
            assert!(name.as_str() == "a" || listed.len() > before.len(), "{before:?} {listed:?}");
            // An existing name is refused even if the cache has it as missing.
            let taken = write_all(&*local, &name, b"local").unwrap_err();
            assert!(matches!(taken, Error::Exists { .. }), "{taken}");
        }
        remote.replace(&key("a"), b"another").unwrap();
        assert_eq!(read_all(&*local, &key("a")).unwrap(), b"another");
        remote.delete_folder(&key("folder")).unwrap();
        assert_eq!(local.list_names(&Key::root()).unwrap(), ["a"]);
        let deleted = local.open(&key("folder/deep/c"));
        assert!(matches!(deleted, Err(Error::NotFound { .. })), "{deleted:?}");
    }
}

/// Listed names have no file type, so each needs a query. A file that is deleted in between, such
/// as a heartbeat, must not affect the rest of the listing.
#[test]
fn services_nfs_a_listing_during_renames_is_complete() {
    let Some(nfs) = nfs("services_nfs_a_listing_during_renames_is_complete") else { return };
    let folder = nfs.folder_on(&nfs.hard());
    let local = open(folder.path());
    write_all(&*local, &key("stays"), b"").unwrap();
    let remote = nfs.seen_on(&nfs.other(), folder.path());
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let name = |number: u32| remote.join(format!("sign-{number}"));
            fs::write(name(0), "").unwrap();
            let mut number = 0;
            while !is_over.load(Ordering::Relaxed) {
                fs::rename(name(number), name(number + 1)).unwrap();
                number += 1;
            }
        });
        for _ in 0..300 {
            let names = local.list_names(&Key::root());
            let is_complete = names.as_ref().is_ok_and(|names| names.contains(&"stays".to_owned()));
            if !is_complete {
                is_over.store(true, Ordering::Relaxed);
                panic!("a listing without the existing file: {names:?}");
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
}

/// A file that is deleted while it is open remains on this client under another name, and prevents
/// the removal of its folder.
#[test]
fn services_nfs_open_files_are_deleted_later() {
    let Some(nfs) = nfs("services_nfs_open_files_are_deleted_later") else { return };
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

    // As if its process were dead: its name has a process that never existed.
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
    let local = open(folder.path());
    let remote = open(&nfs.seen_on(&nfs.other(), folder.path()));
    let mut draft = local.create_resumable(&key("a")).unwrap();
    draft.write(b"local").unwrap();
    let mark = draft.sync().unwrap();
    let second = remote.resume(&key("a"), SyncPoint::default()).unwrap_err();
    assert!(matches!(second, Error::Locked { .. }), "{second}");
    drop(draft);
    let mut draft = remote.resume(&key("a"), mark).unwrap();
    draft.write(b" and remote").unwrap();
    draft.finish().unwrap();
    assert_eq!(read_all(&*local, &key("a")).unwrap(), b"local and remote");
    let late = local.resume(&key("a"), mark).unwrap_err();
    assert!(matches!(late, Error::NotFound { .. }), "{late}");
}

/// The server is unreachable for some seconds during a save, and restarts during another: the
/// client sends data again that was not on the disk of the server.
#[test]
fn services_nfs_a_save_survives_an_interruption_of_the_server() {
    let Some(nfs) = nfs("services_nfs_a_save_survives_an_interruption_of_the_server") else {
        return;
    };
    const BYTES: usize = 16 << 20;
    let folder = nfs.folder_on(&nfs.other());
    let steps = Checkpoints::open(open(folder.path()), key("run"));
    for (step, interrupt, restore) in [(1, "hang", "answer"), (2, "stop", "start")] {
        let bytes: Vec<u8> = (0..BYTES).map(|i| (i as u64 * step % 251) as u8).collect();
        let tensor = TensorData {
            name: "w",
            group: Group::Model,
            dtype: Dtype::U8,
            shape: &[BYTES as u64],
            bytes: &bytes,
        };
        let mut server = nfs.server_soon(interrupt, restore);
        steps.save(step, &[tensor], &[], serde_json::json!({})).unwrap();
        assert!(server.wait().unwrap().success(), "{interrupt}, then {restore}");
        let newest = steps.newest().unwrap().unwrap();
        assert_eq!(newest.step(), step);
        newest.verify().unwrap();
        let mut read = vec![0; bytes.len()];
        newest.read_tensor("w", Group::Model, &mut read).unwrap();
        assert!(read == bytes, "step {step} was read with other bytes");
    }
}
