//! Real file systems under failure: full, read-only, with truncated files, and with orphans.

#![expect(clippy::print_stderr, reason = "a skipped test is reported")]

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use storage::testing::fault_store::Mount;
use storage::{
    Error, IoEngine, Key, ProcessIdentity, RangeRead, Storage, SyncPoint, locate, open_url,
    read_all, write_all,
};

fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

fn open(folder: &Path) -> Arc<dyn Storage> {
    open_url(folder.to_str().unwrap()).unwrap()
}

/// All names in a folder, hidden ones too.
fn raw_names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A tmpfs for one test; `None`, with a message, where mounting is not permitted.
fn mount(options: &str) -> Option<Mount> {
    let mount = Mount::new(options);
    if let Err(e) = &mount {
        eprintln!("SKIPPED: mounting a small tmpfs needs root: {e}");
    }
    mount.ok()
}

#[test]
fn create_fails_on_a_full_disk() {
    let Some(disk) = mount("size=1m") else { return };
    let store = open(disk.path());
    let free = store.free_bytes().unwrap().unwrap();
    assert!((900_000..=1 << 20).contains(&free), "{free} bytes free of 1 MiB");
    let Err(e) = store.create(&key("a/b"), 2_000_000) else { panic!("expected NoSpace") };
    let expected = format!(
        "cannot write {}/a/b: no space left on device (need 2000000 bytes, {free} free)",
        disk.path().display()
    );
    assert_eq!(e.to_string(), expected);
    assert!(raw_names(disk.path()).is_empty(), "{:?}", raw_names(disk.path()));
}

/// An anonymous file can be written and read, and its space is reserved until it is dropped.
#[test]
fn an_anonymous_file_is_freed_when_dropped() {
    let Some(disk) = mount("size=4m") else { return };
    let store = open(disk.path());
    let file = store.create_anonymous(&key("a/b"), 3 << 20).unwrap();
    assert!(raw_names(&disk.path().join("a/b")).is_empty());
    assert_eq!((file.len_bytes(), file.names().unwrap()), (3 << 20, 0));
    file.write_at(8192, &[7; 5000]).unwrap();
    let mut buf = [0; 5001];
    file.read_many(&mut [RangeRead { offset: 8192, buf: &mut buf }]).unwrap();
    assert!(buf[..5000] == [7; 5000] && buf[5000] == 0);
    let error = file.write_at((3 << 20) - 1, &[1, 2]).unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    let Err(error) = store.create_anonymous(&key("a/b"), 2 << 20) else {
        panic!("expected NoSpace")
    };
    let expected =
        format!("cannot write an unnamed file in {}/a/b: no space", disk.path().display());
    assert!(error.to_string().starts_with(&expected), "{error}");
    assert!(error.to_string().contains("(need 2097152 bytes, 1048576 free)"), "{error}");
    assert!(raw_names(&disk.path().join("a/b")).is_empty());
    drop(file);
    store.create_anonymous(&key("a/b"), 4 << 20).unwrap();
}

#[test]
fn an_upload_that_fills_the_disk_leaves_no_file() {
    let Some(disk) = mount("size=1m") else { return };
    let store = open(disk.path());
    let mut upload = store.create(&key("a"), 0).unwrap();
    let block = vec![7; 200_000];
    let outcome = (0..200).try_for_each(|_| upload.write(&block)).and_then(|()| upload.finish());
    let Err(Error::NoSpace { need_bytes, free_bytes, .. }) = outcome else {
        panic!("an upload of 40 MB fitted into 1 MiB: {outcome:?}")
    };
    assert!(need_bytes > 1 << 20, "only {need_bytes} bytes needed");
    assert!(free_bytes.is_some());
    assert!(raw_names(disk.path()).is_empty(), "{:?}", raw_names(disk.path()));
    // The disk is usable as before.
    write_all(&*store, &key("a"), &block).unwrap();
    assert_eq!(read_all(&*store, &key("a")).unwrap(), block);
}

#[test]
fn running_out_of_inodes_is_no_space() {
    let Some(disk) = mount("size=1m,nr_inodes=4") else { return };
    let store = open(disk.path());
    for name in ["a", "b", "c"] {
        write_all(&*store, &key(name), &[1]).unwrap();
    }
    let full = write_all(&*store, &key("d"), &[1]);
    assert!(matches!(full, Err(Error::NoSpace { .. })), "{full:?}");
    assert_eq!(raw_names(disk.path()), ["a", "b", "c"]);
}

#[test]
fn a_read_only_folder_can_be_read_but_not_written() {
    let Some(disk) = mount("size=1m") else { return };
    write_all(&*open(disk.path()), &key("old/a"), b"bytes").unwrap();
    disk.remount("ro").unwrap();
    let store = open(disk.path());
    assert_eq!(read_all(&*store, &key("old/a")).unwrap(), b"bytes");
    assert_eq!(store.list(&Key::root()).unwrap().len(), 1);
    let refused = [
        write_all(&*store, &key("old/b"), b"").map(drop),
        write_all(&*store, &key("new/b"), b"").map(drop),
        store.delete(&key("old/a")),
        store.delete_folder(&key("old")),
        store.publish(&key("old"), &key("new")),
    ];
    for outcome in refused {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("Read-only file system"), "{error}");
        assert!(error.contains(disk.path().to_str().unwrap()), "{error}");
    }
    assert_eq!(raw_names(disk.path()), ["old"]);
}

#[test]
fn only_regular_files_are_objects() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path());
    write_all(&*store, &key("folder/a"), b"a").unwrap();
    let open_error = |name| store.open(&key(name)).unwrap_err().to_string();
    assert!(
        open_error("folder").ends_with("folder: Is a directory (os error 21)"),
        "{}",
        open_error("folder")
    );
    assert!(open_error("folder/a/b").contains("Not a directory"), "{}", open_error("folder/a/b"));

    // Opening a pipe must not wait for a writer.
    let pipe = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    assert!(open_error("pipe").contains("expected a regular file"), "{}", open_error("pipe"));
    std::os::unix::fs::symlink("nowhere", folder.path().join("dangling")).unwrap();
    std::os::unix::fs::symlink(folder.path(), folder.path().join("loop")).unwrap();
    std::os::unix::fs::symlink("folder/a", folder.path().join("link")).unwrap();
    let listed = store.list(&Key::root()).unwrap();
    let names: Vec<_> = listed.iter().map(|entry| entry.key.as_str()).collect();
    assert_eq!(names, ["folder/a", "link"]);
    assert_eq!(read_all(&*store, &key("link")).unwrap(), b"a");
    // Deleting follows no link out of the folder.
    std::os::unix::fs::symlink("..", folder.path().join("folder/up")).unwrap();
    store.delete_folder(&key("folder")).unwrap();
    assert_eq!(raw_names(folder.path()), ["dangling", "link", "loop", "pipe"]);
}

#[test]
fn reading_a_truncated_file_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    for options in ["engine=auto", "engine=pread", "engine=pread&direct=on", "direct=off"] {
        let store = open_url(&format!("file:{}?{options}", folder.path().display())).unwrap();
        let (name, path) = (key("a"), folder.path().join("a"));
        write_all(&*store, &name, &vec![1; 5_000_000]).unwrap();
        let object = store.open(&name).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(4_000_000).unwrap();
        let mut bufs = vec![vec![0; 1_000_000]; 5];
        let mut reads: Vec<_> = bufs
            .iter_mut()
            .enumerate()
            .map(|(i, buf)| RangeRead { offset: i as u64 * 1_000_000, buf })
            .collect();
        let outcome = object.read_many(&mut reads);
        let is_reported = matches!(outcome, Err(Error::ShortRead { len_bytes: 5_000_000, .. }));
        assert!(is_reported, "{options}: {outcome:?}");
        let mapped = object.map().map(drop).unwrap_err().to_string();
        assert!(mapped.contains("expected 5000000 bytes, found 4000000 bytes"), "{mapped}");
        store.delete(&name).unwrap();
    }
}

/// A process that dies during an upload leaves a temporary file, which a sweep by the next one
/// removes.
#[test]
fn orphans_of_dead_processes_are_removed() {
    const FOLDER: &str = "STORAGE_TEST_DIE_IN";
    if let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) {
        let mut upload = open(&folder).create(&key("dead"), 3_000_000).unwrap();
        upload.write(&vec![1; 2_000_000]).unwrap();
        std::process::abort();
    }
    if fs::read_to_string("/proc/1/stat").is_err() {
        eprintln!("SKIPPED: /proc hides processes (hidepid), so that none is known to be dead");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path());
    let mut upload = store.create(&key("live"), 0).unwrap();
    upload.write(b"live").unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "posix::orphans_of_dead_processes_are_removed"])
        .env(FOLDER, folder.path())
        .output()
        .unwrap();
    assert!(!child.status.success(), "{child:?}");
    // Names that only look like temporary names, or belong to another machine, are not removed.
    let others = [".notes.tmp-3", ".x.tmp-another.host.0.0.1.1.1.1", "x.tmp-old"];
    for name in others {
        fs::write(folder.path().join(name), "").unwrap();
    }

    assert_eq!(raw_names(folder.path()).len(), 5);
    assert_eq!(store.list_names(&Key::root()).unwrap(), [".notes.tmp-3", "x.tmp-old"]);
    let swept = store.remove_orphans(&Key::root()).unwrap();
    assert_eq!(swept.len(), 1);
    assert!(swept[0].starts_with(".dead.tmp-"), "{swept:?}");
    assert!(store.remove_orphans(&Key::root()).unwrap().is_empty());
    upload.finish().unwrap();
    let expected = [".notes.tmp-3", ".x.tmp-another.host.0.0.1.1.1.1", "live", "x.tmp-old"];
    assert_eq!(raw_names(folder.path()), expected);

    // Files of another machine are removed by naming their process.
    for (writer, count) in [("another.host.0.0.1.1.2.1", 0), ("another.host.0.0.1.1.1.7", 1)] {
        let writer = ProcessIdentity::parse(writer).unwrap();
        let removed = store.remove_orphans_of(&Key::root(), &writer).unwrap();
        assert_eq!(removed.len(), count, "{removed:?}");
    }
    assert_eq!(raw_names(folder.path()), [".notes.tmp-3", "live", "x.tmp-old"]);
}

#[test]
fn a_large_upload_does_not_fill_the_page_cache() {
    // In the working directory, because temporary folders are often in memory.
    let folder = tempfile::tempdir_in(".").unwrap();
    let store = open(folder.path());
    let profile = store.profile();
    if !profile.direct {
        eprintln!("SKIPPED: {profile}");
        return;
    }
    let resident = |name: &str| -> Option<u64> {
        let mut fincore = Command::new("fincore");
        let output = fincore.args(["-nbo", "RES"]).arg(folder.path().join(name)).output().ok()?;
        String::from_utf8(output.stdout).ok()?.trim().parse().ok()
    };
    // Some file systems accept O_DIRECT but write through the page cache.
    let mut dd = Command::new("dd");
    dd.args(["if=/dev/zero", "bs=1M", "count=8", "oflag=direct"]);
    dd.arg(format!("of={}", folder.path().join("dd").display()));
    let written = dd.output().is_ok_and(|output| output.status.success());
    if !written || resident("dd").is_none_or(|bytes| bytes >= 1 << 20) {
        eprintln!("SKIPPED: no fincore, or dd does not bypass the page cache: {profile}");
        return;
    }
    write_all(&*store, &key("a"), &vec![1; 64 << 20]).unwrap();
    let resident = resident("a").unwrap();
    assert!(resident < 1 << 20, "{resident} of {} bytes are in the page cache", 64 << 20);
}

#[test]
fn urls_choose_the_engine() {
    let folder = tempfile::tempdir().unwrap();
    let base = folder.path().display();
    let store = open_url(&format!("file:{base}?engine=pread")).unwrap();
    assert_eq!(store.profile().engine, IoEngine::Pread);
    let (store, name) = locate(&format!("file://{base}/a?engine=pread&direct=off")).unwrap();
    assert_eq!((store.profile().engine, name.as_str()), (IoEngine::Pread, "a"));
    assert!(!store.profile().direct);
    // A plain path is taken literally.
    let (store, name) = locate(&format!("{base}/a?engine=none")).unwrap();
    write_all(&*store, &name, b"x").unwrap();
    assert_eq!(raw_names(folder.path()), ["a?engine=none"]);
    let error = open_url(&format!("file:{base}?engine=none")).unwrap_err().to_string();
    assert!(error.contains("found option 'engine=none'"), "{error}");
}

/// The lock is held by the kernel, which releases it when the process ends, however that happens.
#[test]
fn a_resumable_upload_has_one_writer() {
    let folder = tempfile::tempdir().unwrap();
    let store = open_url(folder.path().to_str().unwrap()).unwrap();
    let upload = store.create_resumable(&key("a")).unwrap();
    let second = store.resume(&key("a"), SyncPoint::default()).unwrap_err();
    assert!(matches!(second, Error::Locked { .. }), "{second}");
    drop(upload);
    // The process that calls `find` already holds the lock.
    let mut find = |object: &dyn storage::Object| {
        assert_eq!(object.len_bytes(), 0);
        let second = store.resume(&key("a"), SyncPoint::default()).unwrap_err();
        assert!(matches!(second, Error::Locked { .. }), "{second}");
        Ok(SyncPoint::default())
    };
    drop(store.resume_with(&key("a"), &mut find).unwrap());
    drop(store.resume(&key("a"), SyncPoint::default()).unwrap());
}
