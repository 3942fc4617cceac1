//! A state on several disks: balanced bytes, bitwise equal results, and swapped, stale or orphaned
//! disks.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::common::beside::{GROUPS, Rank, SMALL, contents, layout, meshes};
use ckpt::layout::{DeviceMesh, Layout, Param, TensorSplit};
use ckpt::offload::{self, Folder, PublishMethod};
use ckpt::{Checkpoints, Dtype, Error, Group, Result};
use serde_json::Value;
use storage::{Key, Storage};
use tempfile::TempDir;

fn store(path: &Path) -> Arc<dyn Storage> {
    storage::open_url(path.to_str().unwrap()).unwrap()
}

fn folder(disk: &TempDir, rank: u64) -> Folder {
    Folder { store: store(disk.path()), key: Key::new(format!("rank-{rank}")).unwrap() }
}

fn disks<const N: usize>() -> [TempDir; N] {
    std::array::from_fn(|_| tempfile::tempdir().unwrap())
}

/// A single rank on these disks.
fn open(disks: &[&TempDir]) -> Result<Rank> {
    let folders = disks.iter().map(|disk| folder(disk, 0)).collect();
    Rank::on_disks(folders, "test", meshes()[0], 0, SMALL)
}

/// The same, after its first step.
fn stepped(disks: &[&TempDir]) -> Rank {
    let mut rank = open(disks).unwrap();
    rank.fill().unwrap();
    rank.step(1).unwrap();
    rank
}

fn steps(folder: &TempDir) -> Checkpoints {
    let options = ckpt::CheckpointOptions {
        block_bytes: SMALL.block_bytes,
        ..ckpt::CheckpointOptions::default()
    };
    Checkpoints::open(store(folder.path()), Key::new("run").unwrap()).with_options(options)
}

/// Every rank of every layout gets the same weights, and its disks have equal parts of the state.
#[test]
fn several_disks_and_memory_give_same_results() {
    for mesh in meshes() {
        let disks = disks::<3>();
        for rank in 0..mesh.ranks() {
            let mut expected = Rank::in_memory(mesh, rank, SMALL);
            expected.fill().unwrap();
            let folders = || disks.iter().map(|disk| folder(disk, rank)).collect();
            let open = || Rank::on_disks(folders(), "test", mesh, rank, SMALL).unwrap();
            let mut found = open();
            found.fill().unwrap();
            for step in 1..=4 {
                expected.step(step).unwrap();
                found.step(step).unwrap();
                assert!(found.weights == expected.weights, "{mesh:?}, rank {rank}, step {step}");
                if step == 2 {
                    drop(found);
                    found = open();
                }
            }
            assert!(found.state_weights().unwrap() == expected.weights);
            drop(found);
            let own = format!("rank-{rank}");
            let bytes = disks.each_ref().map(|disk| bytes_of(&disk.path().join(&own)));
            let (least, largest) = (bytes.iter().min().unwrap(), bytes.iter().max().unwrap());
            // A disk may have one more page per role, since cuts are at pages, and one of padding;
            // and two headers.
            assert!(largest - least <= 32 << 10, "{mesh:?}, rank {rank}: {bytes:?}");
        }
    }
}

/// A killed process disappears before its last requests complete; until then its files are locked.
#[test]
fn open_waits_for_requests_of_dead_process() {
    let [disk] = disks::<1>();
    let mut rank = open(&[&disk]).unwrap();
    rank.fill().unwrap();
    let expected = rank.state_weights().unwrap();
    drop(rank);
    let folder = disk.path().join("rank-0");
    let slot = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let slot = slot.filter(|path| path.is_dir()).max().unwrap();
    let file = fs::read_dir(slot).unwrap().next().unwrap().unwrap().path();
    let locked = fs::File::open(file).unwrap();
    locked.try_lock().unwrap();
    let dying = thread::spawn(move || {
        thread::sleep(Duration::from_millis(300));
        drop(locked);
    });
    assert!(open(&[&disk]).unwrap().state_weights().unwrap() == expected);
    dying.join().unwrap();
}

/// The bytes of the last slot; a disk without any of a few parameters has no slot.
fn bytes_of(folder: &Path) -> u64 {
    let slot = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let Some(slot) = slot.filter(|path| path.is_dir()).max() else { return 0 };
    fs::read_dir(slot).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum()
}

/// Parameters are placed on the disk with the least bytes, largest first, and split where it is
/// full.
#[test]
fn plan_balances_bytes_over_disks() {
    let even = offload::bench::layout(300 << 20).unwrap();
    let param = |(name, elements): (&str, u64)| Param {
        name: name.to_owned(),
        shape: vec![elements / 1024, 1024],
        split: TensorSplit::Replicate,
        stages: vec![0],
    };
    let groups = [Group::Master, Group::ExpAvg, Group::ExpAvgSq].map(|group| (group, Dtype::F32));
    let params = [("embed", 200 << 20), ("up", 30 << 20), ("down", 30 << 20), ("norm", 1024)];
    let params = params.map(param).to_vec();
    let embedding = Layout::new(DeviceMesh::default(), params, &groups).unwrap();
    for (layout, params) in [(even, 19), (embedding, 4)] {
        for disks in 1..=5 {
            let plan = offload::plan_over(&layout, disks).unwrap();
            let mut bytes = vec![0; disks];
            plan.shards(0).iter().for_each(|shard| bytes[shard.folder] += shard.bytes());
            let (least, most) = (bytes.iter().min().unwrap(), bytes.iter().max().unwrap());
            // 4 MiB of each array, and headers.
            assert!(most - least <= 13 << 20, "{disks} disks: {bytes:?}");
            assert_eq!(plan.shards(0).len(), disks);
            let cuts = plan.chunks() - 3 * params;
            assert!(cuts <= 3 * 2 * (disks - 1), "{disks} disks: {cuts} cuts");
        }
    }
}

/// Splitting a parameter is invisible outside: its checkpoint equals that of a single disk,
/// verifies, and loads into any layout and number of disks, which give the same results.
#[test]
fn split_parameter_is_one_tensor_in_checkpoint() {
    for mesh in [meshes()[0], meshes()[2]] {
        let spread = disks::<5>();
        let folders = || spread.iter().map(|disk| folder(disk, 0)).collect();
        let plan = offload::plan_over(&layout(mesh), 5).unwrap();
        assert!((0..3).any(|tensor| plan.pieces(tensor) > 1), "nothing is cut");
        let save = |rank: &mut Rank, steps: &Checkpoints| {
            rank.fill().unwrap();
            for step in 1..=3 {
                rank.step(step).unwrap();
            }
            // The only rank that saves anything.
            steps.save_offloaded(3, &mut rank.state, &[], Value::Null, None).unwrap();
            steps.open_step(3).unwrap()
        };
        let one = tempfile::tempdir().unwrap();
        let alone = meshes()[0];
        let mut expected = Rank::on_disk(store(one.path()), alone, 0, SMALL).unwrap();
        let expected_step = save(&mut expected, &steps(&one));
        if mesh != alone {
            // A replica that saves nothing still stores its whole state, in parts as well.
            let folders = spread.iter().map(|disk| folder(disk, 1)).collect();
            let mut found = Rank::on_disks(folders, "test", mesh, 1, SMALL).unwrap();
            found.state.load(&expected_step, &GROUPS, Value::Null).unwrap();
            assert!(found.state_weights().unwrap() == expected.weights);
            found.step(4).unwrap();
            expected.step(4).unwrap();
            assert!(found.weights == expected.weights);
            continue;
        }
        let mut found = Rank::on_disks(folders(), "test", mesh, 0, SMALL).unwrap();
        let step = save(&mut found, &steps(&spread[0]));
        step.verify().unwrap();
        assert!(contents(&step) == contents(&expected_step));
        drop(found);
        let two = disks::<2>();
        let mut again = open(&[&two[0], &two[1]]).unwrap();
        let mut memory = Rank::in_memory(alone, 0, SMALL);
        let mut back = Rank::on_disks(folders(), "test", mesh, 0, SMALL).unwrap();
        expected.step(4).unwrap();
        for rank in [&mut again, &mut memory, &mut back] {
            rank.state.load(&step, &GROUPS, Value::Null).unwrap();
            rank.half_step(4).unwrap();
            rank.state.finish(Value::Null).unwrap();
            assert!(rank.weights == expected.weights);
        }
    }
}

/// Checkpoints are on the second of three disks: its files are linked, and those of the others are
/// copied. They do not change while the state continues.
#[test]
fn each_file_uses_its_cheapest_publish_method() {
    let away = tempfile::tempdir_in("/dev/shm").ok();
    let [one, two] = disks();
    let device = |disk: &TempDir| fs::metadata(disk.path()).unwrap().dev();
    let Some(away) = away.filter(|away| device(away) != device(&one)) else {
        println!("SKIPPED: /dev/shm is no other file system");
        return;
    };
    let mut rank = open(&[&away, &one, &two]).unwrap();
    rank.fill().unwrap();
    let steps = steps(&two);
    let mut saved = Vec::new();
    for step in 1..=5 {
        rank.step(step).unwrap();
        if step % 2 == 0 {
            let state = &mut rank.state;
            let (_, way) = steps.save_offloaded(step, state, &[], Value::Null, None).unwrap();
            assert_eq!(way, PublishMethod::Copy, "the most expensive method used");
            saved.push(contents(&steps.open_step(step).unwrap()));
            let names = fs::read_dir(two.path().join(format!("run/step-{step:012}"))).unwrap();
            let names = names.map(|entry| entry.unwrap());
            let names =
                names.filter(|it| it.path().extension().is_some_and(|e| e == "safetensors"));
            let links: Vec<u64> = names.map(|it| it.metadata().unwrap().nlink()).collect();
            let linked = links.iter().filter(|links| **links == 2).count();
            assert_eq!((links.len(), linked), (6, 4), "two files of each disk: {links:?}");
        }
    }
    for (number, expected) in saved.iter().enumerate() {
        let step = steps.open_step(2 * number as u64 + 2).unwrap();
        step.verify().unwrap();
        assert!(contents(&step) == *expected);
    }
}

/// Disks in another order, another number of them, or those of another run are rejected unchanged;
/// the right ones resume.
#[test]
fn swapped_disks_are_rejected() {
    let [one, two, other] = disks();
    drop(stepped(&[&one, &two]));
    let refused = |opened: Result<Rank>, words: &[&str]| {
        let error = opened.map(|_| ()).unwrap_err();
        let text = error.to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{text}, expected {words:?}");
        assert!(matches!(error, Error::BadManifest { .. } | Error::BadInput { .. }), "{error:?}");
    };
    refused(open(&[&two, &one]), &["disk 1 of 2 of rank 0", "disk 0 of 2 of rank 0"]);
    refused(open(&[&one]), &["disk 0 of 2", "disk 0 of 1"]);
    refused(open(&[&two, &other]), &["disk 1 of 2", "disk 0 of 2"]);
    let folders = || vec![folder(&one, 0), folder(&two, 0)];
    let mesh = meshes()[0];
    refused(
        Rank::on_disks(folders(), "another", mesh, 0, SMALL),
        &["disk 0 of 2 of rank 0 of 'test'", "of 'another'"],
    );
    let plan = offload::plan_over(&layout(mesh), 3).unwrap();
    let three = offload::Offload::on_disks(folders(), "test", plan, &layout(mesh), 0, SMALL);
    assert!(three.unwrap_err().to_string().contains("expected 3 folders as in the plan, found 2"));
    let mut rank = open(&[&one, &two]).unwrap();
    rank.step(2).unwrap();
    let again = open(&[&other, &two]).map(|_| ()).unwrap_err();
    assert!(matches!(again, Error::Storage(storage::Error::Locked { .. })), "{again}");
}

/// A state with another plan, for example of another version, is rejected unchanged with that
/// reason, so that the run restarts from its checkpoint.
#[test]
fn state_of_another_plan_is_rejected() {
    let [one, two] = disks();
    let mut rank = stepped(&[&one, &two]);
    let expected = rank.state_weights().unwrap();
    drop(rank);
    let whole = Param {
        name: "embed.weight".to_owned(),
        shape: vec![50, 61],
        split: TensorSplit::Replicate,
        stages: vec![0],
    };
    let groups = GROUPS.map(|group| (group, Dtype::F32));
    let other = Layout::new(meshes()[0], vec![whole], &groups).unwrap();
    let plan = offload::plan_over(&other, 2).unwrap();
    let fingerprint = format!("plan {:016x}", plan.fingerprint());
    let folders = vec![folder(&one, 0), folder(&two, 0)];
    let opened = offload::Offload::on_disks(folders, "test", plan, &other, 0, SMALL);
    let error = opened.map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::BadManifest { .. }), "{error:?}");
    assert!(error.to_string().contains(&fingerprint), "{error}");
    let mut rank = open(&[&one, &two]).unwrap();
    assert_eq!(rank.state.generation().unwrap().step, 1);
    assert!(rank.state_weights().unwrap() == expected);
}

/// A disk that was restored from a backup has files with the right names and other bytes.
#[test]
fn stale_disk_is_rejected() {
    let [one, two] = disks();
    let mut rank = stepped(&[&one, &two]);
    rank.state.settle().unwrap();
    let slots = two.path().join("rank-0");
    let copy = tempfile::tempdir().unwrap();
    let copied = |from: &Path, to: &Path| {
        for slot in fs::read_dir(from).unwrap().map(|entry| entry.unwrap()) {
            if slot.path().is_dir() {
                fs::create_dir_all(to.join(slot.file_name())).unwrap();
                for file in fs::read_dir(slot.path()).unwrap().map(|entry| entry.unwrap()) {
                    let target = to.join(slot.file_name()).join(file.file_name());
                    fs::copy(file.path(), target).unwrap();
                }
            }
        }
    };
    copied(&slots, copy.path());
    // Restores the files of step 1, then of step 2.
    rank.step(2).unwrap();
    rank.step(3).unwrap();
    drop(rank);
    copied(copy.path(), &slots);
    let mut rank = open(&[&one, &two]).unwrap();
    assert_eq!(rank.state.generation().unwrap().step, 3);
    let error = rank.state_weights().unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    assert!(error.to_string().contains(two.path().to_str().unwrap()), "{error}");
    drop(rank);
    fs::remove_dir_all(&slots).unwrap();
    let error = open(&[&one, &two]).map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::Storage(storage::Error::NotFound { .. })), "{error}");
}

/// Only folders marked with ranks beyond those of this run, and not open, are removed.
#[test]
fn orphaned_rank_folders_are_removed() {
    let disk = tempfile::tempdir().unwrap();
    let mesh = meshes()[3];
    let open = |rank, owner| {
        let folder = folder(&disk, if owner == "test" { rank } else { rank + 10 });
        let mut rank = Rank::on_disks(vec![folder], owner, mesh, rank, SMALL).unwrap();
        rank.fill().unwrap();
        rank
    };
    for rank in 0..4 {
        open(rank, "test");
    }
    let held = open(4, "test");
    open(5, "another");
    let strange = disk.path().join("rank-00009");
    fs::create_dir(&strange).unwrap();
    fs::write(strange.join("owner"), "mine").unwrap();
    fs::write(disk.path().join("notes"), "mine too").unwrap();
    let names = || {
        let all = fs::read_dir(disk.path()).unwrap();
        let mut all: Vec<_> =
            all.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        all.sort();
        all
    };
    let sweep = |owner| offload::sweep(&store(disk.path()), owner, 2).unwrap().len();
    assert_eq!(sweep("nobody"), 0);
    assert_eq!(sweep("test"), 2);
    assert_eq!(names(), ["notes", "rank-0", "rank-00009", "rank-1", "rank-15", "rank-4"]);
    drop(held);
    assert_eq!(sweep("test"), 1);
    assert_eq!(names(), ["notes", "rank-0", "rank-00009", "rank-1", "rank-15"]);
    let nowhere = store(&disk.path().join("nowhere"));
    assert_eq!(offload::sweep(&nowhere, "test", 0).unwrap(), Vec::<String>::new());
}
