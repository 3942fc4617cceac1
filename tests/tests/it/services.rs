//! Real services: the conformance suite, the stream of batches, and joint saves, on CephFS, S3, XFS
//! and NFS.
//!
//! `scripts/services/ceph-test` starts a Ceph, `scripts/services/xfs-test` mounts an XFS and
//! `scripts/services/nfs-test` sets up an NFS, and they run these tests. To use other services, set
//! `FEEDLINE_TEST_CEPHFS` and `FEEDLINE_TEST_XFS` to folders on mounts and `FEEDLINE_TEST_S3_URL`
//! to a URL in a bucket; a test without its variable is skipped.

use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;

use ckpt::offload::{self, AdamW, Offload, PublishMethod, Update, WeightsOut};
use ckpt::{
    Blob, Checkpoints, Group, HeldRegion, JointSaveOptions, PlanLimits, Region, SavePlan,
    TensorSpec,
};
use indexed::{
    Builder, DocumentRange, Dtype, GptIndex, GptIndexConfig, IndexedDataset, Split, splice,
};
use loader::{GptBatches, GptLoaderOptions};
use sha2::{Digest, Sha256};
use storage::testing::conformance;
use storage::{Key, Storage, open_url};

use crate::nfs_server::Nfs;

const CEPHFS: &str = "FEEDLINE_TEST_CEPHFS";
const S3: &str = "FEEDLINE_TEST_S3_URL";
const XFS: &str = "FEEDLINE_TEST_XFS";

/// The value of a variable; without it the test is skipped with a message.
fn service(test: &str, variable: &str) -> Option<String> {
    let value = std::env::var(variable).ok().filter(|value| !value.is_empty());
    if value.is_none() {
        let script = if variable == XFS { "xfs-test" } else { "ceph-test" };
        tests::skip(test, &format!("{variable} is not set; `scripts/services/{script}` sets it"));
    }
    value
}

fn nfs(test: &str) -> Option<Nfs> {
    Nfs::here().inspect_err(|why| tests::skip(test, why)).ok()
}

fn run_conformance(url_of: &dyn Fn(u32) -> String) {
    let count = Cell::new(0);
    conformance::run(&|| -> Arc<dyn Storage> {
        count.set(count.get() + 1);
        open_url(&url_of(count.get())).unwrap()
    });
}

#[test]
fn services_cephfs_conformance() {
    let Some(mount) = service("services_cephfs_conformance", CEPHFS) else { return };
    run_conformance_in(mount.as_ref());
}

#[test]
fn services_xfs_conformance() {
    let Some(mount) = service("services_xfs_conformance", XFS) else { return };
    run_conformance_in(mount.as_ref());
}

fn run_conformance_in(mount: &Path) {
    for options in ["engine=auto", "engine=pread&direct=on", "engine=pread&direct=off"] {
        let folder = tempfile::tempdir_in(mount).unwrap();
        let root = folder.path().display();
        run_conformance(&|nth| format!("file:{root}/{nth}?{options}"));
    }
}

/// The first source shares its blocks with the output of `feedline merge`, and so does another that
/// starts at a block boundary.
#[test]
fn services_xfs_merge_shares_blocks() {
    let Some(mount) = service("services_xfs_merge_shares_blocks", XFS) else { return };
    let folder = tempfile::tempdir_in(&mount).unwrap();
    let store = open_url(folder.path().to_str().unwrap()).unwrap();
    let write = |name: &str, tokens: u32| -> DocumentRange {
        let mut builder = Builder::create(&store, &key(name), Dtype::I32).unwrap();
        builder.add_sequence(&(0..tokens).collect::<Vec<u32>>()).unwrap();
        builder.end_document().unwrap();
        let bin_crc64 = Some(builder.finish().unwrap().bin.crc64);
        DocumentRange { store: store.clone(), prefix: key(name), documents: None, bin_crc64 }
    };
    // 64 MiB each, whole blocks of 4096 bytes; then a short one that starts at a block boundary and
    // ends within a block.
    let parts = [write("a", 1 << 24), write("b", 1 << 24), write("c", 1001), write("d", 7)];
    let free = || store.free_bytes().unwrap().unwrap();
    let before = free();
    let merged = splice(&store, &key("all"), &parts).unwrap();
    let taken = before.saturating_sub(free());
    assert!(taken < 8 << 20, "took {taken} bytes: nothing is shared");

    let read = |name: &str| storage::read_all(&*store, &key(name)).unwrap();
    let expected = [read("a.bin"), read("b.bin"), read("c.bin"), read("d.bin")].concat();
    assert!(read("all.bin") == expected, "the tokens differ");
    assert_eq!(merged.bin.crc64, storage::crc64(&expected));
}

#[test]
fn services_cephfs_stream() {
    let Some(mount) = service("services_cephfs_stream", CEPHFS) else { return };
    check_stream_on(mount.as_ref());
}

#[test]
fn services_nfs_stream() {
    let Some(nfs) = nfs("services_nfs_stream") else { return };
    check_stream_on(&nfs.hard());
}

fn check_stream_on(mount: &Path) {
    let corpus = Corpus::new();
    for options in ["engine=auto", "engine=pread&direct=on", "engine=pread&direct=off"] {
        let folder = tempfile::tempdir_in(mount).unwrap();
        corpus.check_stream_from(&format!("file:{}?{options}", folder.path().display()));
    }
}

/// `storage/tests/it/s3.rs` checks objects of RGW, in comparison with the test server.
#[test]
fn services_s3_stream() {
    let Some(url) = service("services_s3_stream", S3) else { return };
    let (place, options) = url.split_once('?').unwrap_or((&url, ""));
    // A failed run may have left objects.
    let run = format!("{}/stream-{}", place.trim_end_matches('/'), std::process::id());
    let corpus = Corpus::new();
    for depth in [1, 16] {
        corpus.check_stream_from(&format!("{run}-{depth}?{options}&depth={depth}"));
    }
}

#[test]
fn services_cephfs_checkpoint() {
    let Some(mount) = service("services_cephfs_checkpoint", CEPHFS) else { return };
    let folder = tempfile::tempdir_in(&mount).unwrap();
    // FUSE has no rename that refuses an existing name.
    save_jointly(&[folder.path().to_str().unwrap()], false);
}

/// Writers on two machines with separate caches.
#[test]
fn services_nfs_checkpoint() {
    let Some(nfs) = nfs("services_nfs_checkpoint") else { return };
    let folder = nfs.folder_on(&nfs.hard());
    let other = nfs.seen_on(&nfs.other(), folder.path());
    save_jointly(&[folder.path().to_str().unwrap(), other.to_str().unwrap()], false);
}

#[test]
fn services_s3_checkpoint() {
    let Some(url) = service("services_s3_checkpoint", S3) else { return };
    let (place, options) = url.split_once('?').unwrap_or((&url, ""));
    let run = format!("{}/ckpt-{}", place.trim_end_matches('/'), std::process::id());
    save_jointly(&[&format!("{run}?{options}")], false);
}

#[test]
fn services_xfs_checkpoint() {
    let Some(mount) = service("services_xfs_checkpoint", XFS) else { return };
    let folder = tempfile::tempdir_in(&mount).unwrap();
    save_jointly(&[folder.path().to_str().unwrap()], true);
}

/// A step gets the files of an offloaded state as reflinks and as hard links: neither takes space,
/// and further updates of the state do not change the step.
#[test]
fn services_xfs_offload() {
    let Some(mount) = service("services_xfs_offload", XFS) else { return };
    let layout = offload::bench::layout(4 << 20).unwrap();
    let plan = offload::plan(&layout).unwrap();
    let weights = vec![0x3d; 16 << 20];
    for prefer in [PublishMethod::Clone, PublishMethod::Link] {
        let folder = tempfile::tempdir_in(&mount).unwrap();
        let store = open_url(folder.path().to_str().unwrap()).unwrap();
        let (own, plan) = (Arc::clone(&store), Arc::clone(&plan));
        let options = offload::OffloadOptions { prefer, ..offload::OffloadOptions::default() };
        let mut state = Offload::on_disk(own, key("state"), plan, &layout, 0, options).unwrap();
        state.fill(&[&weights], 0, ().into()).unwrap();
        let step = |number: u64, state: &mut Offload| {
            let adamw = AdamW {
                step: number,
                lr: 0.1,
                beta1: 0.9,
                beta2: 0.9,
                eps: 1e-8,
                grad_divisor: 1.0,
            };
            let nowhere = WeightsOut { dtype: ckpt::Dtype::F32, bytes: &mut [] };
            let (grad, grad_dtype) = (&weights[..], ckpt::Dtype::F32);
            let update = Update { grad, grad_dtype, weight_decay: 0.0, weights: nowhere };
            state.step(&adamw, vec![update], ().into()).unwrap();
            state.settle().unwrap();
        };
        step(1, &mut state);
        let free = || store.free_bytes().unwrap().unwrap();
        let before = free();
        let steps = Checkpoints::open(Arc::clone(&store), key("run"));
        let (_, way) = steps.save_offloaded(1, &mut state, &[], ().into(), None).unwrap();
        let taken = before.saturating_sub(free());
        assert_eq!(way, prefer);
        assert!(taken < 8 << 20, "took {taken} bytes by {way}: nothing is shared");
        (2..=4).for_each(|number| step(number, &mut state));
        steps.open_step(1).unwrap().verify().unwrap();
    }
}

/// Three writers, each with its own store, save two steps jointly, and one step is deleted. `urls`
/// are assigned to them in turn.
fn save_jointly(urls: &[&str], can_publish: bool) {
    const WRITERS: usize = 3;
    const ROWS: usize = 3000;
    let spec = |name: &str, group| TensorSpec {
        name: name.to_owned(),
        group,
        dtype: ckpt::Dtype::U8,
        shape: vec![ROWS as u64, 1000],
    };
    let specs = [spec("w", Group::Model), spec("w", Group::ExpAvg)];
    let holding = |tensor, writer| {
        let mut region = Region::whole(&specs[0].shape);
        region.spans[0] = [(ROWS / WRITERS * writer) as u64, (ROWS / WRITERS) as u64].into();
        HeldRegion { tensor, region }
    };
    let held: Vec<Vec<HeldRegion>> =
        (0..WRITERS).map(|writer| (0..2).map(|tensor| holding(tensor, writer)).collect()).collect();
    let plan = SavePlan::new(&specs, &held, PlanLimits::default()).unwrap();
    let tensor = |step: u64| -> Vec<u8> {
        (0..ROWS * 1000).map(|i| (i as u64 * step % 251) as u8).collect()
    };
    let by = |url: &str| Checkpoints::open(open_url(url).unwrap(), key("run"));
    let steps = || by(urls[0]);
    for step in [1, 2] {
        let bytes = tensor(step);
        std::thread::scope(|scope| {
            for (writer, part) in bytes.chunks(bytes.len() / WRITERS).enumerate() {
                let (plan, token) = (&plan, format!("first-{step}"));
                scope.spawn(move || {
                    let deadline = std::time::Duration::from_secs(120);
                    let together = JointSaveOptions { token: &token, writer, deadline };
                    let name = format!("rng-{writer}");
                    let blobs = [Blob { name: &name, bytes: &[writer as u8] }];
                    let meta = serde_json::json!({ "step": step });
                    let held = [part, part];
                    let steps = by(urls[writer % urls.len()]);
                    steps.save_together(step, plan, &held, &blobs, meta, &together).unwrap();
                });
            }
        });
        let newest = by(urls[urls.len() - 1]).newest().unwrap().unwrap();
        assert_eq!(newest.step(), step);
        newest.verify().unwrap();
        let mut read = vec![0; bytes.len()];
        newest.read_tensor("w", Group::ExpAvg, &mut read).unwrap();
        assert!(read == bytes, "step {step} was read with other bytes");
        assert_eq!(newest.blob("rng-2").unwrap(), [2]);
    }
    let store = open_url(urls[0]).unwrap();
    assert_eq!(store.has_atomic_publish(&key("run")).unwrap(), can_publish);
    let has_record = store.list_names(&key("run/step-000000000002")).unwrap()[0] == "COMMIT";
    assert_eq!(has_record, !can_publish);
    assert_eq!(steps().retain(1).unwrap(), [1]);
    steps().sweep().unwrap();
    assert_eq!(steps().steps().unwrap(), [2]);
    store.delete_folder(&key("run")).unwrap();
}

/// A corpus on a local disk, with the order of its samples and the hash of their batches.
struct Corpus {
    _folder: tempfile::TempDir,
    local: Arc<dyn Storage>,
    index: Arc<GptIndex>,
    expected: String,
}

const SEQ_LEN: usize = 64;
const DOCUMENTS: u32 = 400;

impl Corpus {
    /// Documents of 0 to 400 tokens, in which any two tokens differ.
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let local = open_url(folder.path().to_str().unwrap()).unwrap();
        let mut builder = Builder::create(&local, &key("corpus"), Dtype::I32).unwrap();
        let mut next = 0;
        for document in 0..DOCUMENTS {
            let len = document.wrapping_mul(2_654_435_761) >> 23;
            let tokens: Vec<u32> = (next..next + len.min(400)).collect();
            next += tokens.len() as u32;
            builder.add_sequence(&tokens).unwrap();
            builder.end_document().unwrap();
        }
        builder.finish().unwrap();
        let dataset = Arc::new(IndexedDataset::open(&local, &key("corpus")).unwrap());
        let config = GptIndexConfig {
            dataset_path: "corpus".to_owned(),
            split: Some("100,0,0".to_owned()),
            seq_len: SEQ_LEN as u64,
            seed: 1234,
            num_samples: None,
            add_extra_token: true,
            drop_last_partial_valid: true,
            tokenizer: serde_json::json!({}),
        };
        let index = Arc::new(GptIndex::build(&dataset, Split::Train, &config).unwrap());
        let expected = stream(dataset.clone(), index.clone(), 0);
        assert_ne!(
            stream(dataset, index.clone(), 1),
            expected,
            "another start gives another stream"
        );
        Corpus { _folder: folder, local, index, expected }
    }

    fn check_stream_from(&self, url: &str) {
        let store = open_url(url).unwrap();
        for name in ["corpus.bin", "corpus.idx"] {
            let bytes = storage::read_all(&*self.local, &key(name)).unwrap();
            storage::write_all(&*store, &key(name), &bytes).unwrap();
        }
        let dataset = Arc::new(IndexedDataset::open(&store, &key("corpus")).unwrap());
        assert_eq!(stream(dataset, self.index.clone(), 0), self.expected, "from {url}");
    }
}

/// The hash of all batches from a sample on.
fn stream(dataset: Arc<IndexedDataset>, index: Arc<GptIndex>, samples_consumed: u64) -> String {
    let samples_end = index.sample_count();
    let options = GptLoaderOptions {
        seq_len: SEQ_LEN,
        micro_batch: 8,
        samples_consumed,
        samples_end,
        window_batches: 4,
    };
    let mut batches = GptBatches::start(dataset, index, options).unwrap();
    let mut sum = Sha256::new();
    while let Some(batch) = batches.next_batch().unwrap() {
        sum.update(batch.first_sample.to_le_bytes());
        for (token, label) in batch.tokens.iter().zip(&batch.labels) {
            sum.update(token.to_le_bytes());
            sum.update(label.to_le_bytes());
        }
        batches.recycle(batch);
    }
    sum.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}
