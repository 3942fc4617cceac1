//! Flipped bits in the files of a run: each ends the run with an error that names the file.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use crate::common::Lab;
use feed::{Data, Error, open_corpus};
use recipe::config::Config;
use recipe::mesh::{DeviceMesh, MeshRank};
use storage::{FileEntry, Key, Manifest};

fn load(lab: &Lab, keys: &[(&str, &str)]) -> Config {
    let path = lab.config("run", keys);
    Config::load(path.to_str().expect("UTF-8"), &[]).expect("a good config")
}

/// Reads `steps` steps, and waits for the check of the orders.
fn train(config: &Config, steps: u64) -> Result<(), Error> {
    let data = Data::new(open_corpus(config)?, config)?;
    data.start_order_check();
    data.fingerprint()?;
    let mesh_rank = MeshRank { mesh: DeviceMesh::ALONE, rank: 0 };
    let mut batches = data.train_batches(config, mesh_rank, 0)?;
    let mut step = Vec::new();
    for _ in 0..steps {
        batches.fill(config.batch.global / config.batch.micro, &mut step)?;
    }
    data.finish_order_check(&AtomicBool::new(false))
}

/// Flips a bit and keeps the modification time; returns the original bytes.
fn flip(path: &Path, at: usize, bit: u64) -> Vec<u8> {
    let good = std::fs::read(path).expect("a file");
    let mut bad = good.clone();
    bad[at] ^= 1 << bit;
    put(path, &bad);
    good
}

/// Replaces the file, because a check of the run before may still have it mapped.
fn put(path: &Path, bytes: &[u8]) {
    let modified = std::fs::metadata(path).and_then(|it| it.modified()).expect("a time");
    let replacement = path.with_extension("new");
    std::fs::write(&replacement, bytes).expect("room");
    let file = File::options().write(true).open(&replacement).expect("a file");
    file.set_modified(modified).expect("a time");
    std::fs::rename(&replacement, path).expect("a name");
}

struct Dice(u64);

impl Dice {
    fn below(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % below
    }
}

#[test]
fn flipped_bit_of_the_corpus_is_named() {
    let lab = Lab::new();
    let config = load(&lab, &[]);
    train(&config, 48).expect("no damage");
    let mut dice = Dice(3);
    for round in 0..100 {
        let name = if round % 2 == 0 { "corpus.bin" } else { "corpus.idx" };
        let path = lab.path(name);
        let len = std::fs::metadata(&path).expect("a file").len() as usize;
        // The last documents are for validation.
        let at = dice.below(if round % 2 == 0 { len * 3 / 4 } else { len });
        let good = flip(&path, at, dice.below(8) as u64);
        let error = train(&config, 48).expect_err("damaged").to_string();
        assert!(error.contains("corpus."), "round {round}: {error}");
        let block = format!(" at byte {}", at / 512 * 512);
        let is_named = error.contains(&format!("{name}: expected")) && error.ends_with(&block);
        assert!(round % 2 == 1 || is_named, "round {round}, byte {at}: {error}");
        put(&path, &good);
    }
    // No verification if the config disables it.
    let off = load(&lab, &[("data.verify", "false")]);
    let good = flip(&lab.path("corpus.bin"), 0, 0);
    train(&off, 48).expect("not verified");
    put(&lab.path("corpus.bin"), &good);
    train(&config, 48).expect("no damage after the repair");
}

/// Seals cover parts of large files: the check in the background finds flipped bits elsewhere.
#[test]
fn flipped_bit_of_a_cached_order_is_found() {
    let lab = Lab::new();
    let config = load(&lab, &[("run.budget", "{ steps = 20000 }")]);
    train(&config, 1).expect("no damage");
    let folder = PathBuf::from(config.cache_dir());
    let arrays = || -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&folder).expect("a folder");
        let paths = entries.map(|entry| entry.expect("a name").path());
        let mut arrays: Vec<_> = paths
            .filter(|path| path.extension().is_some_and(|it| it == "npy"))
            .filter(|path| path.metadata().expect("a file").len() > 1 << 17)
            .collect();
        arrays.sort();
        arrays
    };
    assert_eq!(arrays().len(), 3, "{:?}", arrays());
    let (mut dice, mut found) = (Dice(4), 0);
    for round in 0..30 {
        let path = &arrays()[round % 3];
        let len = std::fs::metadata(path).expect("a file").len() as usize;
        let good = flip(path, 128 + dice.below(len - 128), dice.below(8) as u64);
        match train(&config, 1) {
            // The seal covered it, and the order was built again.
            Ok(()) => assert!(std::fs::read(path).expect("a file") == good, "round {round}"),
            Err(error) => {
                let error = error.to_string();
                let name = path.file_name().and_then(|name| name.to_str()).expect("UTF-8");
                let array = name.rsplit('-').next().and_then(|it| it.strip_suffix(".npy"));
                let named = error.contains(array.expect("an array")) && error.contains("delete it");
                assert!(named, "round {round}, {name}: {error}");
                found += 1;
                put(path, &good);
            }
        }
    }
    assert!(found >= 20, "the background check found {found}");
    train(&config, 1).expect("no damage after the repair");
}

/// An unreadable manifest, or one of another file, is not treated as missing.
#[test]
fn invalid_manifest_is_an_error() {
    let lab = Lab::new();
    let config = load(&lab, &[]);
    let path = lab.path("corpus.manifest.json");
    std::fs::write(&path, "{").expect("room");
    let error = train(&config, 1).expect_err("no JSON").to_string();
    assert!(error.contains("corpus.manifest.json"), "{error}");
    std::fs::remove_file(&path).expect("it is there");
    let store = storage::open_url(lab.path("").to_str().expect("UTF-8")).expect("a store");
    let manifest = Manifest {
        format: "feedline-tokens".to_owned(),
        version: 1,
        files: vec![FileEntry { path: "corpus.bin".to_owned(), bytes: 7, crc64: 0 }],
        meta: serde_json::Value::Null,
    };
    let key = Key::new("corpus.manifest.json").expect("a key");
    manifest.write(&*store, &key).expect("room");
    let error = train(&config, 1).expect_err("another file").to_string();
    assert!(error.contains("expected a .bin of 7 bytes as listed in its manifest"), "{error}");
}
