//! The conformance suite of stores: [`run`] creates a store for each of a list of small checks. A
//! failed check panics with its name, and its seed if it has one.

use std::error::Error as StdError;
use std::sync::Arc;
use std::thread;

use crate::base::rng::Rng;
use crate::{
    Error, FileEntry, Key, Manifest, RangeRead, Storage, SyncPoint, crc64, read_all, write_all,
};

pub(super) type Outcome = Result<(), Box<dyn StdError>>;

/// Fails a check with a message.
macro_rules! ensure {
    ($holds:expr, $($why:tt)+) => {
        if !$holds {
            return Err(format!($($why)+).into());
        }
    };
}
pub(crate) use ensure;

type Check = fn(&Arc<dyn Storage>) -> Outcome;

/// Checks that object stores pass too.
const OBJECTS: [(&str, Check); 16] = [
    ("objects of every size are read as they were written", round_trips),
    ("an upload reports the bytes that it wrote", reports_written_bytes),
    ("ranges of objects are appended and checksummed", copies_ranges),
    ("an empty object can be written and read", empty_object),
    ("an upload is invisible until it is finished", invisible_until_finished),
    ("a dropped upload leaves nothing", dropped),
    ("an existing name is refused and keeps its object", taken_name),
    ("exactly one of several concurrent uploads of a name succeeds", one_winner),
    ("an absent object is not found", absent),
    ("a read past the end returns an error with byte counts", past_the_end),
    ("random batches equal the bytes in memory", random_batches),
    ("many threads read one object", many_readers),
    ("a map has the bytes of the object", maps),
    ("listings are complete, sorted and recursive", listings),
    ("a delete removes that object and no other", deletes),
    ("a sweep removes nothing of a live process", sweeps),
];

/// Checks that need real folders, not only key prefixes.
const FOLDERS: [(&str, Check); 4] = [
    ("a folder is refused as an object", folder_is_no_object),
    ("a folder is published in one step and replaces nothing", publishes),
    ("a resumable upload continues from its sync point", resumes_uploads),
    (
        "a resumable upload is invisible, unique for its name and can be discarded",
        partial_uploads_are_hidden,
    ),
];

/// Runs every check on a store of its own. `make` returns an empty store.
///
/// # Panics
/// With the name of the first check that fails, and the reason.
pub fn run(make: &dyn Fn() -> Arc<dyn Storage>) {
    run_objects(make);
    run_all(&FOLDERS, make);
}

/// Runs the checks of [`run`] that a store without folders can pass.
///
/// # Panics
/// As [`run`].
pub fn run_objects(make: &dyn Fn() -> Arc<dyn Storage>) {
    run_all(&OBJECTS, make);
}

fn run_all(checks: &[(&str, Check)], make: &dyn Fn() -> Arc<dyn Storage>) {
    for (name, check) in checks {
        if let Err(e) = check(&make()) {
            panic!("store violates '{name}': {e}");
        }
    }
}

/// Sizes around every threshold: blocks, small and large uploads, transfers, buffers.
const SIZES: [usize; 16] = [
    1, 511, 512, 513, 4095, 4096, 4097, 65_537, 262_144, 262_145, 524_288, 1_048_577, 8_388_607,
    8_388_608, 8_388_609, 17_000_001,
];

/// Bytes without a period, so that a misplaced piece is detected.
pub(super) fn bytes_of(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Rng::new(seed).fill(&mut bytes);
    bytes
}

pub(super) fn key(name: &str) -> Result<Key, Error> {
    Key::new(name)
}

fn round_trips(store: &Arc<dyn Storage>) -> Outcome {
    for (i, size) in SIZES.into_iter().enumerate() {
        let bytes = bytes_of(size, i as u64);
        let known = key(&format!("known/{size}"))?;
        write_all(&**store, &known, &bytes)?;
        ensure!(
            read_all(&**store, &known)? == bytes,
            "expected {size} bytes as written, found other bytes"
        );

        // The same without a known length, and in uneven steps.
        let unknown = key(&format!("unknown/{size}"))?;
        let mut upload = store.create(&unknown, 0)?;
        let mut rest = &bytes[..];
        let mut step = 1;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(step));
            upload.write(now)?;
            (rest, step) = (later, step * 3 % 1_000_003);
        }
        upload.finish()?;
        ensure!(
            read_all(&**store, &unknown)? == bytes,
            "expected {size} bytes as written in steps, found other bytes"
        );
    }
    Ok(())
}

fn reports_written_bytes(store: &Arc<dyn Storage>) -> Outcome {
    for size in [0, 5, 300_000, 9_000_000] {
        let bytes = bytes_of(size, 1);
        let mut upload = store.create(&key(&format!("deep/er/{size}"))?, 10_000_000)?;
        upload.write(&bytes)?;
        ensure!(
            upload.len_bytes() == size as u64,
            "expected {size} bytes, found len_bytes {}",
            upload.len_bytes()
        );
        let entry = upload.finish()?;
        ensure!(entry.path == size.to_string(), "expected path {size}, found {}", entry.path);
        ensure!(entry.bytes == size as u64, "expected length {size}, found {}", entry.bytes);
        ensure!(
            entry.crc64 == crc64(&bytes),
            "expected the checksum of the bytes, found {:016x}",
            entry.crc64
        );
        entry.verify(&**store, &key("deep/er")?)?;
    }
    Ok(())
}

/// Writes bytes between ranges that are copied by checksum and ranges that are read.
fn copies_ranges(store: &Arc<dyn Storage>) -> Outcome {
    let bytes = bytes_of(1_300_001, 3);
    write_all(&**store, &key("from")?, &bytes)?;
    let from = store.open(&key("from")?)?;
    for first in [0, 7, 4096, 300_000] {
        let mut upload = store.create(&key(&format!("to/{first}"))?, 0)?;
        let mut expected = bytes_of(first, 4);
        upload.write(&expected)?;
        for range in [0..bytes.len(), 5..1_000_000, 9..9, 1..700, 4096..1_052_672] {
            let part = &bytes[range.clone()];
            for crc64 in [Some(crc64(part)), None] {
                upload.write_from(&*from, range.start as u64..range.end as u64, crc64)?;
                expected.extend_from_slice(part);
                ensure!(
                    upload.len_bytes() == expected.len() as u64,
                    "expected {} bytes, found {}",
                    expected.len(),
                    upload.len_bytes()
                );
            }
            upload.write(&bytes[..range.start.min(100)])?;
            expected.extend_from_slice(&bytes[..range.start.min(100)]);
        }
        let entry = upload.finish()?;
        let wrote = FileEntry {
            path: first.to_string(),
            bytes: expected.len() as u64,
            crc64: crc64(&expected),
        };
        ensure!(entry == wrote, "expected {wrote:?}, found {entry:?}");
        let found = read_all(&**store, &key(&format!("to/{first}"))?)?;
        ensure!(found == expected, "expected the copied bytes after {first} bytes, found others");
    }
    let mut upload = store.create(&key("short")?, 0)?;
    let past = upload.write_from(&*from, 1_000_000..1_300_002, None);
    ensure!(matches!(past, Err(Error::ShortRead { .. })), "expected ShortRead, found {past:?}");
    let mut upload = store.create(&key("wrong")?, 0)?;
    let wrong = upload.write_from(&*from, 0..10, Some(1));
    ensure!(
        matches!(wrong, Err(Error::Corrupt { .. })),
        "expected Corrupt for a wrong checksum, found {wrong:?}"
    );
    Ok(())
}

fn empty_object(store: &Arc<dyn Storage>) -> Outcome {
    let name = key("nothing")?;
    write_all(&**store, &name, &[])?;
    let object = store.open(&name)?;
    ensure!(object.len_bytes() == 0, "expected length 0, found {}", object.len_bytes());
    ensure!(object.map()?.is_empty(), "expected an empty map");
    object.read_many(&mut [RangeRead { offset: 0, buf: &mut [] }])?;
    object.read_many(&mut [])?;
    ensure!(store.list_names(&Key::root())? == ["nothing"], "expected the object in the listing");
    Ok(())
}

fn invisible_until_finished(store: &Arc<dyn Storage>) -> Outcome {
    for size in [10, 1_000_000, 20_000_000] {
        let (folder, name) = (key(&format!("f{size}"))?, key(&format!("f{size}/a"))?);
        write_all(&**store, &folder.join("other")?, &[1])?;
        let mut upload = store.create(&name, 0)?;
        upload.write(&bytes_of(size, 2))?;
        ensure!(
            matches!(store.open(&name), Err(Error::NotFound { .. })),
            "expected NotFound of open"
        );
        ensure!(
            store.list_names(&folder)? == ["other"],
            "expected no unfinished object in list_names, found {:?}",
            store.list_names(&folder)?
        );
        ensure!(
            store.list(&folder)?.len() == 1,
            "expected no unfinished object in list, found {:?}",
            store.list(&folder)?
        );
        upload.finish()?;
        ensure!(
            store.list_names(&folder)? == ["a", "other"],
            "expected the finished object in the listing"
        );
    }
    Ok(())
}

fn dropped(store: &Arc<dyn Storage>) -> Outcome {
    for size in [0, 10, 1_000_000, 20_000_000] {
        let mut upload = store.create(&key("new/folder/a")?, size as u64)?;
        upload.write(&bytes_of(size, 3))?;
        drop(upload);
        let names = store.list_names(&Key::root())?;
        ensure!(names.is_empty(), "expected nothing after dropping {size} bytes, found {names:?}");
        ensure!(store.remove_orphans(&Key::root())?.is_empty(), "expected nothing to sweep");
    }
    write_all(&**store, &key("new/folder/a")?, &[1, 2])?;
    ensure!(
        read_all(&**store, &key("new/folder/a")?)? == [1, 2],
        "expected the new bytes at the name"
    );
    Ok(())
}

fn taken_name(store: &Arc<dyn Storage>) -> Outcome {
    let name = key("a")?;
    write_all(&**store, &name, b"first")?;
    let again = write_all(&**store, &name, b"second");
    ensure!(
        matches!(again, Err(Error::Exists { .. })),
        "expected Exists for the second write, found {again:?}"
    );
    ensure!(read_all(&**store, &name)? == b"first", "expected the bytes of the first write");
    Ok(())
}

fn one_winner(store: &Arc<dyn Storage>) -> Outcome {
    for round in 0..8 {
        let name = key(&format!("race/{round}"))?;
        let uploads: Vec<_> = (0..4_u8)
            .map(|i| {
                let mut upload = store.create(&name, 0)?;
                upload.write(&vec![i; 300_000])?;
                Ok(upload)
            })
            .collect::<Result<_, Error>>()?;
        let outcomes: Vec<_> = thread::scope(|scope| {
            let racers: Vec<_> = uploads.into_iter().map(|u| scope.spawn(|| u.finish())).collect();
            racers.into_iter().map(|racer| racer.join().expect("does not panic")).collect()
        });
        let winners: Vec<_> = (0..4_u8).filter(|&i| outcomes[usize::from(i)].is_ok()).collect();
        ensure!(winners.len() == 1, "expected one winner in round {round}, found {winners:?}");
        let losers_get_exists =
            outcomes.iter().all(|o| matches!(o, Ok(_) | Err(Error::Exists { .. })));
        ensure!(
            losers_get_exists,
            "expected Exists for the losers in round {round}, found {outcomes:?}"
        );
        let bytes = read_all(&**store, &name)?;
        ensure!(bytes == vec![winners[0]; 300_000], "expected the bytes of the winner");
    }
    ensure!(store.list_names(&key("race")?)?.len() == 8, "expected 8 objects and no leftovers");
    Ok(())
}

fn absent(store: &Arc<dyn Storage>) -> Outcome {
    let name = key("no/where")?;
    let opened = store.open(&name);
    ensure!(
        matches!(opened, Err(Error::NotFound { .. })),
        "expected NotFound of open, found {opened:?}"
    );
    let deleted = store.delete(&name);
    ensure!(
        matches!(deleted, Err(Error::NotFound { .. })),
        "expected NotFound of delete, found {deleted:?}"
    );
    store.delete_folder(&name)?;
    ensure!(store.list(&name)?.is_empty(), "expected an empty list");
    ensure!(store.list_names(&name)?.is_empty(), "expected an empty list_names");
    ensure!(store.remove_orphans(&name)?.is_empty(), "expected nothing to sweep");
    Ok(())
}

fn folder_is_no_object(store: &Arc<dyn Storage>) -> Outcome {
    write_all(&**store, &key("folder/a")?, &[1])?;
    let Err(e) = store.open(&key("folder")?) else {
        return Err("expected an error of open".into());
    };
    ensure!(
        e.to_string().contains("folder"),
        "expected an error that names the folder, found: {e}"
    );
    ensure!(store.delete(&key("folder")?).is_err(), "expected an error of delete");
    ensure!(
        store.create(&key("folder")?, 0).is_err(),
        "expected an error of create at the name of a folder"
    );
    ensure!(
        store.create(&key("folder/a/b")?, 0).is_err(),
        "expected an error of create below an object"
    );
    ensure!(store.list(&Key::root())?.len() == 1, "expected one object as before");
    Ok(())
}

fn past_the_end(store: &Arc<dyn Storage>) -> Outcome {
    let len = 600_000;
    write_all(&**store, &key("a")?, &bytes_of(len, 4))?;
    let object = store.open(&key("a")?)?;
    let mut buf = vec![0; len + 1];
    for (offset, requested, available) in [(0, len + 1, len), (len as u64, 1, 0), (u64::MAX, 10, 0)]
    {
        let read = object.read_many(&mut [RangeRead { offset, buf: &mut buf[..requested] }]);
        let Err(Error::ShortRead { found, expected, len_bytes, .. }) = read else {
            return Err(format!(
                "expected ShortRead for {requested} bytes at {offset}, found {read:?}"
            )
            .into());
        };
        let matches =
            (found, expected, len_bytes) == (available as u64, requested as u64, len as u64);
        ensure!(
            matches,
            "expected {available} of {requested} bytes, found {found} of {expected} in {len_bytes}"
        );
    }
    object.read_many(&mut [RangeRead { offset: len as u64, buf: &mut [] }])?;
    Ok(())
}

fn random_batches(store: &Arc<dyn Storage>) -> Outcome {
    let model = bytes_of(3_000_017, 5);
    write_all(&**store, &key("a")?, &model)?;
    let object = store.open(&key("a")?)?;
    for seed in 0..60 {
        let mut rng = Rng::new(seed);
        let count_max = [1, 2, 20, 200][rng.below(4) as usize];
        let count = rng.below(count_max) as usize + 1;
        let len_max = if count > 20 { 20_000 } else { 1_500_000 };
        let mut spans = Vec::new();
        let mut bufs = Vec::new();
        for _ in 0..count {
            let offset = rng.below(model.len() as u64) as usize;
            let len = (rng.below(len_max) as usize).min(model.len() - offset);
            // Half of them aligned, as for direct I/O.
            let align = if rng.below(2) == 0 { 4096 } else { 1 };
            spans.push((offset / align * align, len));
            bufs.push(vec![0xaa; len]);
        }
        let offsets = spans.iter().map(|&(offset, _)| offset as u64);
        let mut reads: Vec<_> =
            bufs.iter_mut().zip(offsets).map(|(buf, offset)| RangeRead { offset, buf }).collect();
        object.read_many(&mut reads)?;
        for ((offset, len), buf) in spans.iter().zip(&bufs) {
            let expected = &model[*offset..offset + len];
            ensure!(
                buf == expected,
                "expected the bytes in memory for {len} bytes at {offset}, seed {seed}"
            );
        }
    }
    Ok(())
}

fn many_readers(store: &Arc<dyn Storage>) -> Outcome {
    let model = bytes_of(2_000_000, 6);
    write_all(&**store, &key("a")?, &model)?;
    let object = store.open(&key("a")?)?;
    let read_some = |seed| -> Result<bool, Error> {
        let mut rng = Rng::new(seed);
        for _ in 0..20 {
            let spans: Vec<_> = (0..16).map(|_| rng.below(1_900_000) as usize).collect();
            let mut bufs = vec![vec![0; 10_000]; 16];
            let mut reads: Vec<_> = (bufs.iter_mut().zip(&spans))
                .map(|(buf, &offset)| RangeRead { offset: offset as u64, buf })
                .collect();
            object.read_many(&mut reads)?;
            if bufs.iter().zip(&spans).any(|(buf, &at)| buf[..] != model[at..at + 10_000]) {
                return Ok(false);
            }
        }
        Ok(true)
    };
    // More threads than rings, so that some threads have to use the other engine.
    let outcomes: Vec<_> = thread::scope(|scope| {
        let readers: Vec<_> = (0..24).map(|seed| scope.spawn(move || read_some(seed))).collect();
        readers.into_iter().map(|reader| reader.join().expect("does not panic")).collect()
    });
    for (seed, outcome) in outcomes.into_iter().enumerate() {
        ensure!(outcome?, "expected the requested bytes, found others with seed {seed}");
    }
    Ok(())
}

fn maps(store: &Arc<dyn Storage>) -> Outcome {
    for size in [1, 4096, 1_000_001] {
        let bytes = bytes_of(size, 7);
        let name = key(&size.to_string())?;
        write_all(&**store, &name, &bytes)?;
        let map = store.open(&name)?.map()?;
        ensure!(map[..] == bytes[..], "expected a map with the {size} bytes written");
        store.delete(&name)?;
        ensure!(map[..] == bytes[..], "expected an unchanged map of {size} bytes after a delete");
    }
    Ok(())
}

fn listings(store: &Arc<dyn Storage>) -> Outcome {
    let names = ["b", "a/z", "a/b/c", "a-1", "表/詩 詞.bin", ".hidden", ".tmp-step-3/x", "a.b"];
    for (i, name) in names.iter().enumerate() {
        write_all(&**store, &key(name)?, &vec![0; i])?;
    }
    let listed = store.list(&Key::root())?;
    let mut expected: Vec<_> =
        names.iter().enumerate().map(|(i, name)| (*name, i as u64)).collect();
    expected.sort_by_key(|(name, _)| *name);
    let found: Vec<_> = listed.iter().map(|entry| (entry.key.as_str(), entry.bytes)).collect();
    ensure!(found == expected, "expected {expected:?} of list, found {found:?}");
    let below: Vec<_> = store.list(&key("a")?)?.into_iter().map(|e| e.key.to_string()).collect();
    ensure!(below == ["a/b/c", "a/z"], "expected a/b/c and a/z, found {below:?}");
    let top = store.list_names(&Key::root())?;
    ensure!(
        top == [".hidden", ".tmp-step-3", "a", "a-1", "a.b", "b", "表"],
        "expected the top-level names, found {top:?}"
    );
    ensure!(store.list_names(&key("a")?)? == ["b", "z"], "expected b and z below a");
    Ok(())
}

fn deletes(store: &Arc<dyn Storage>) -> Outcome {
    for name in ["a/b", "a/c", "a/d/e", "ab"] {
        write_all(&**store, &key(name)?, &[1])?;
    }
    let open = store.open(&key("a/b")?)?;
    store.delete(&key("a/b")?)?;
    ensure!(store.open(&key("a/b")?).is_err(), "expected an error of open after delete");
    ensure!(store.list_names(&key("a")?)? == ["c", "d"], "expected c and d after delete");
    let mut byte = [0];
    // Reads of an open object may succeed or fail after its deletion, but must not return other
    // bytes.
    if open.read_many(&mut [RangeRead { offset: 0, buf: &mut byte }]).is_ok() {
        ensure!(byte == [1], "expected the bytes of the deleted object");
    }
    store.delete_folder(&key("a")?)?;
    ensure!(
        store.list_names(&Key::root())? == ["ab"],
        "expected only ab, found {:?}",
        store.list_names(&Key::root())?
    );
    write_all(&**store, &key("a/b")?, &[2])?;
    ensure!(read_all(&**store, &key("a/b")?)? == [2], "expected the new bytes at the name");
    ensure!(
        store.delete_folder(&Key::root()).is_err(),
        "expected an error for a delete of the root"
    );
    ensure!(store.list(&Key::root())?.len() == 2, "expected two objects in the root");
    Ok(())
}

fn publishes(store: &Arc<dyn Storage>) -> Outcome {
    let absent = store.publish(&key("no/where")?, &key("there")?);
    ensure!(matches!(absent, Err(Error::NotFound { .. })), "expected NotFound, found {absent:?}");
    let (staged, target) = (key("staging/x")?, key("deep/step-1")?);
    let mut files = Vec::new();
    for (name, len) in [("a", 5), ("b", 300_000), ("c", 0)] {
        files.push(write_all(&**store, &staged.join(name)?, &bytes_of(len, 8))?);
    }
    let manifest =
        Manifest { format: "test".to_owned(), version: 1, files, meta: serde_json::Value::Null };
    manifest.write(&**store, &staged.join("manifest.json")?)?;
    store.publish(&staged, &target)?;
    ensure!(
        store.list_names(&target)?.len() == 4,
        "expected 4 names, found {:?}",
        store.list_names(&target)?
    );
    ensure!(store.list(&key("staging")?)?.is_empty(), "expected no staged folder");
    let read = Manifest::read(&**store, &target.join("manifest.json")?)?;
    ensure!(read == manifest, "expected the manifest as written, found {read:?}");
    ensure!(read.verify(&**store, &target)?.files == 3, "expected 3 verified files");

    write_all(&**store, &key("other/a")?, &[9])?;
    let again = store.publish(&key("other")?, &target);
    ensure!(
        matches!(again, Err(Error::Exists { .. })),
        "expected Exists of the second publish, found {again:?}"
    );
    ensure!(
        read_all(&**store, &key("other/a")?)? == [9],
        "expected the files of the second folder"
    );
    read.verify(&**store, &target)?;
    let taken = store.create(&target, 0);
    ensure!(taken.is_err(), "expected an error of create at the name of a folder");
    Ok(())
}

fn resumes_uploads(store: &Arc<dyn Storage>) -> Outcome {
    let all = bytes_of(17_000_001, 10);
    for ends in [vec![], vec![0], vec![5], vec![4096, 8_388_608], vec![1, 4097, 9_000_000]] {
        let name = key(&format!("deep/{ends:?}"))?;
        let mut draft = store.create_resumable(&name)?;
        let mut from = SyncPoint::default();
        for end in ends {
            draft.write(&all[from.bytes as usize..end])?; // fits: an index of `all`
            from = draft.sync()?;
            ensure!(
                from == SyncPoint { bytes: end as u64, crc64: crc64(&all[..end]) },
                "found {from:?}"
            );
            // Bytes after the sync point are cut off again.
            draft.write(&bytes_of(100_000, 11))?;
            drop(draft);
            draft = store.resume(&name, from)?;
            ensure!(
                draft.len_bytes() == from.bytes,
                "expected {} bytes, found {}",
                from.bytes,
                draft.len_bytes()
            );
        }
        draft.write(&all[from.bytes as usize..])?;
        let entry = draft.finish()?;
        ensure!(
            entry.crc64 == crc64(&all),
            "expected the checksum of the bytes, found {:016x}",
            entry.crc64
        );
        ensure!(
            read_all(&**store, &name)? == all,
            "expected the bytes as written, resumed from {from:?}"
        );
        entry.verify(&**store, &key("deep")?)?;
    }
    Ok(())
}

fn partial_uploads_are_hidden(store: &Arc<dyn Storage>) -> Outcome {
    let name = key("d")?;
    let absent = store.resume(&name, SyncPoint::default());
    ensure!(matches!(absent, Err(Error::NotFound { .. })), "expected NotFound, found {absent:?}");
    let mut draft = store.create_resumable(&name)?;
    draft.write(b"seen")?;
    draft.sync()?;
    ensure!(
        store.list_names(&Key::root())?.is_empty(),
        "expected no unfinished upload in the listing"
    );
    ensure!(matches!(store.open(&name), Err(Error::NotFound { .. })), "expected NotFound of open");
    let second = store.create_resumable(&name);
    ensure!(
        matches!(second, Err(Error::Exists { .. })),
        "expected Exists of a second upload, found {second:?}"
    );
    let mut bytes = [0; 4];
    store.open_partial(&name)?.read_many(&mut [RangeRead { offset: 0, buf: &mut bytes }])?;
    ensure!(&bytes == b"seen", "expected the synced bytes, found {bytes:?}");
    drop(draft);
    let far = store.resume(&name, SyncPoint { bytes: 10_000, crc64: 0 });
    ensure!(
        matches!(far, Err(Error::Corrupt { .. })),
        "expected Corrupt beyond its end, found {far:?}"
    );
    ensure!(store.remove_orphans(&Key::root())?.is_empty(), "expected nothing to sweep");
    store.discard(&name)?;
    store.discard(&name)?;
    drop(store.create_resumable(&name)?);
    write_all(&**store, &name, b"taken")?;
    let late = store.resume(&name, SyncPoint::default())?.finish();
    ensure!(
        matches!(late, Err(Error::Exists { .. })),
        "expected Exists at an existing name, found {late:?}"
    );
    ensure!(read_all(&**store, &name)? == b"taken", "expected the bytes of the existing object");
    Ok(())
}

fn sweeps(store: &Arc<dyn Storage>) -> Outcome {
    write_all(&**store, &key("f/a")?, &[1])?;
    let mut upload = store.create(&key("f/b")?, 0)?;
    upload.write(&bytes_of(1_000_000, 9))?;
    let swept = store.remove_orphans(&key("f")?)?;
    ensure!(swept.is_empty(), "expected nothing to sweep, found {swept:?}");
    upload.finish()?;
    ensure!(store.list_names(&key("f")?)? == ["a", "b"], "expected a and b");
    Ok(())
}
