//! A run with a remote corpus: after a restart it reads the samples since its last checkpoint from
//! the node's own disk.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::{Lab, VOCAB, assert_success, train};
use indexed::{Builder, Dtype};
use storage::Key;
use storage::s3_server::{Fault, FaultRule, S3Server};
use trainer::config::Config;
use trainer::mesh::MeshRank;
use trainer::model::input::AnyBatch;
use trainer::{Batches, Data, open_corpus};

const GLOBAL: u64 = 64;
const MICRO: u64 = 16;
/// Steps to the checkpoint, and to the kill.
const SAVED: u64 = 10;
const KILLED: u64 = 30;
/// Of a sixteenth of a MiB: 130 bytes of a sample, and 32 in the table.
const FILE_SAMPLES: u64 = 405;
const PATIENCE: Duration = Duration::from_secs(60);

/// A corpus that is larger than the cache, on a server with fault injection.
fn remote() -> (S3Server, String) {
    let server = S3Server::start().expect("a server");
    let store = storage::open_url(&server.url("far")).expect("a bucket");
    let mut corpus =
        Builder::create(&store, &Key::new("corpus").expect("a key"), Dtype::U16).expect("new");
    for document in 0..6000_u32 {
        let tokens: Vec<u32> = (0..100).map(|i| (document * 7 + i * 13) % VOCAB).collect();
        corpus.add_sequence(&tokens).expect("room");
        corpus.end_document().expect("room");
    }
    corpus.finish().expect("room");
    let url = server.url("far/corpus") + "&tries=1&hedge=off";
    (server, url)
}

fn config(lab: &Lab, run: &str, url: &str, more: &[(&str, &str)]) -> std::path::PathBuf {
    let (url, orders) = (format!("'{url}'"), format!("'{}'", lab.path("orders").display()));
    let (global, micro) = (GLOBAL.to_string(), MICRO.to_string());
    let keys = [
        ("data.train", url.as_str()),
        ("data.cache_dir", &orders),
        ("run.budget", "{ steps = 60 }"),
        ("model.seq_len", "64"),
        ("batch.global", &global),
        ("batch.micro", &micro),
        ("eval.every", "0"),
    ];
    lab.config(run, &[&keys[..], more].concat())
}

fn local_cache(lab: &Lab, run: &str) -> String {
    format!("{{ dir = '{}', limit = '1MiB' }}", lab.path(&format!("{run}-cache")).display())
}

fn load(path: &Path) -> Config {
    Config::load(path.to_str().expect("UTF-8"), &[]).expect("a good config")
}

fn begin(config: &Config, step: u64) -> (Data, Batches) {
    let data = Data::new(open_corpus(config).expect("it is there"), config).expect("an order");
    let batches = data.train_batches(config, MeshRank::ALONE, step * GLOBAL).expect("enough");
    (data, batches)
}

fn next(batches: &mut Batches) -> trainer::Result<Vec<AnyBatch>> {
    let mut step = Vec::new();
    batches.fill(GLOBAL / MICRO, &mut step)?;
    Ok(step)
}

/// The first and last sample of each file of a log.
fn runs(folder: &Path) -> Vec<(u64, u64)> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let below = entries.flatten().filter_map(|entry| fs::read_dir(entry.path()).ok());
    let names = below.flatten().flatten().filter_map(|file| file.file_name().into_string().ok());
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    let ends = |name: String| {
        let mut parts = name.split('-').map(number);
        Some((parts.next()??, parts.next()??))
    };
    names.filter_map(ends).collect()
}

#[test]
fn after_a_kill_samples_are_read_from_the_local_cache() {
    let ((server, url), lab) = (remote(), Lab::new());
    let path = config(&lab, "run", &url, &[("data.local_cache", &local_cache(&lab, "run"))]);
    let near = load(&path);
    let (data, mut batches) = begin(&near, 0);
    let mut expected = Vec::new();
    let (folder, started) = (lab.path("run-cache"), Instant::now());
    for step in 1..=KILLED {
        expected.push(next(&mut batches).expect("the server answers"));
        if step == SAVED {
            data.local_cache().expect("the run has one").checkpointed(SAVED * GLOBAL);
        }
        // As slow as a disk: the cache drops what it cannot write in time.
        while runs(&folder).iter().all(|(_, last)| last + FILE_SAMPLES < step * GLOBAL) {
            if step * GLOBAL < FILE_SAMPLES {
                break;
            }
            if started.elapsed() > PATIENCE {
                panic!("waited for {PATIENCE:?}: {:?}", runs(&folder));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    assert!(runs(&folder).iter().all(|(_, last)| *last >= SAVED * GLOBAL), "{:?}", runs(&folder));
    // As after a kill: what is in memory is not written.
    std::mem::forget((batches, data));

    server.inject(FaultRule::every(1, Fault::InternalError).of("GET").to("corpus.bin"));
    let far = load(&config(&lab, "far", &url, &[]));
    next(&mut begin(&far, SAVED).1).expect_err("without a cache it reads the remote store");
    let (_data, mut batches) = begin(&near, SAVED);
    for step in SAVED..KILLED - 8 {
        let found = next(&mut batches).unwrap_or_else(|error| panic!("step {step}: {error}"));
        assert!(found == expected[step as usize], "step {step} has other samples");
    }
}

/// The real program reports checkpoints to its cache, which drops the samples before them.
#[test]
fn checkpoints_free_cached_samples() {
    let ((_server, url), lab) = (remote(), Lab::new());
    let kept = |run: &str, every: &str, end: &str| {
        let cache = local_cache(&lab, run);
        let keys = [
            ("data.local_cache", cache.as_str()),
            ("checkpoint.every.steps", every),
            ("checkpoint.every.end", end),
        ];
        assert_success(&train(&config(&lab, run, &url, &keys)));
        runs(&lab.path(&format!("{run}-cache"))).len()
    };
    let without = kept("unsaved", "0", "false");
    let with = kept("saved", "10", "true");
    assert!(with <= 2 && without >= 6, "{with} files with checkpoints, {without} without");
}
