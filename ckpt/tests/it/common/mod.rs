//! A small training state, and folders to save it in.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

pub mod beside;
pub mod children;
pub mod gate;
pub mod ranks;

use std::path::PathBuf;
use std::sync::Arc;

use ckpt::{
    Blob, Checkpoint, CheckpointOptions, Checkpoints, Dtype, Group, Result, SaveReport, TensorData,
};
use serde_json::{Value, json};
use storage::{Key, Storage};

/// SplitMix64: a random sequence from a seed.
#[derive(Clone)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }
}

/// A tensor that owns its bytes.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: String,
    pub group: Group,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    pub bytes: Vec<u8>,
}

impl Tensor {
    pub fn new(name: &str, group: Group, dtype: Dtype, shape: &[u64], random: &mut Random) -> Self {
        let bytes = random.bytes((shape.iter().product::<u64>() * dtype.item_bytes()) as usize);
        Tensor { name: name.to_owned(), group, dtype, shape: shape.to_vec(), bytes }
    }

    pub fn data(&self) -> TensorData<'_> {
        let Tensor { name, group, dtype, shape, bytes } = self;
        TensorData { name, group: *group, dtype: *dtype, shape, bytes }
    }
}

/// The contents of a checkpoint.
#[derive(Clone, Debug)]
pub struct State {
    pub tensors: Vec<Tensor>,
    pub blobs: Vec<(String, Vec<u8>)>,
    pub meta: Value,
}

impl State {
    /// Two layers of a model with its optimizer state, different for every seed.
    pub fn of_model(seed: u64) -> Self {
        let mut random = Random(seed);
        let mut tensors = Vec::new();
        for (name, shape) in [
            ("embed.weight", &[50, 16][..]),
            ("layers.0.mlp.weight", &[16, 64]),
            ("layers.0.mlp.bias", &[64]),
            ("norm.weight", &[16]),
        ] {
            tensors.push(Tensor::new(name, Group::Model, Dtype::BF16, shape, &mut random));
            for group in [Group::Master, Group::ExpAvg, Group::ExpAvgSq] {
                tensors.push(Tensor::new(name, group, Dtype::F32, shape, &mut random));
            }
        }
        let blobs = vec![
            ("loader.json".to_owned(), format!("{{\"samples\": {seed}}}").into_bytes()),
            ("rng.bin".to_owned(), random.bytes(5000)),
            ("empty".to_owned(), Vec::new()),
        ];
        State { tensors, blobs, meta: json!({ "seed": seed, "loss": 0.1 + 0.2 }) }
    }

    /// The blobs and a few of the tensors, for tests that save hundreds of times.
    pub fn small(seed: u64) -> Self {
        let mut state = Self::of_model(seed);
        state.tensors.drain(..12);
        state
    }

    pub fn save(&self, steps: &Checkpoints, step: u64) -> Result<SaveReport> {
        let tensors: Vec<_> = self.tensors.iter().map(Tensor::data).collect();
        let blobs: Vec<_> = self.blobs.iter().map(|(name, bytes)| Blob { name, bytes }).collect();
        steps.save(step, &tensors, &blobs, self.meta.clone())
    }

    /// Reads everything, and reports the first difference from what was saved.
    pub fn differs_from(&self, checkpoint: &Checkpoint) -> Result<Option<String>> {
        if *checkpoint.meta() != self.meta {
            return Ok(Some(format!("meta {}", checkpoint.meta())));
        }
        if checkpoint.tensors().len() != self.tensors.len() {
            return Ok(Some(format!("{} tensors", checkpoint.tensors().len())));
        }
        for tensor in &self.tensors {
            let entry = checkpoint.tensor(&tensor.name, tensor.group)?;
            if (entry.dtype, &entry.shape) != (tensor.dtype, &tensor.shape) {
                return Ok(Some(format!("{entry:?}")));
            }
            let mut bytes = vec![0xaa; tensor.bytes.len()];
            checkpoint.read_tensor(&tensor.name, tensor.group, &mut bytes)?;
            if bytes != tensor.bytes {
                return Ok(Some(format!("bytes of {} {}", tensor.group, tensor.name)));
            }
        }
        for (name, bytes) in &self.blobs {
            if checkpoint.blob(name)? != *bytes {
                return Ok(Some(format!("blob {name}")));
            }
        }
        Ok(None)
    }

    pub fn check(&self, checkpoint: &Checkpoint) {
        assert_eq!(self.differs_from(checkpoint).unwrap(), None);
    }
}

/// Options with small files and blocks, so that a small state has many of both.
pub const SMALL: CheckpointOptions = CheckpointOptions {
    shard_bytes_max: 3000,
    block_bytes: 4096,
    threads: 2,
    staging_bytes_max: 1 << 20,
    codec: None,
};

/// The same on one thread, so that the n-th call of a store is always the same.
pub const SERIAL: CheckpointOptions = CheckpointOptions { threads: 1, ..SMALL };

/// A folder that is removed on drop.
pub struct Folder {
    pub temp: tempfile::TempDir,
}

impl Folder {
    pub fn new() -> Self {
        Folder { temp: tempfile::tempdir().unwrap() }
    }

    /// A folder in memory if the system has one with enough space (some containers have 64 MB), for
    /// tests that make hundreds of saves.
    pub fn in_memory() -> Self {
        const FREE_MIN: u64 = 512 << 20;
        let free = storage::open_url("/dev/shm").and_then(|memory| memory.free_bytes());
        let temp = match free {
            Ok(Some(FREE_MIN..)) => tempfile::tempdir_in("/dev/shm"),
            _ => tempfile::tempdir(),
        };
        Folder { temp: temp.or_else(|_| tempfile::tempdir()).unwrap() }
    }

    pub fn store(&self) -> Arc<dyn Storage> {
        storage::open_url(self.temp.path().to_str().unwrap()).unwrap()
    }

    /// The checkpoints in it, below `run`.
    pub fn steps(&self, options: CheckpointOptions) -> Checkpoints {
        Checkpoints::open(self.store(), Key::new("run").unwrap()).with_options(options)
    }

    /// Saves each step with the state of that seed.
    pub fn save(&self, steps: &[u64]) {
        for &step in steps {
            State::of_model(step).save(&self.steps(SMALL), step).unwrap();
        }
    }

    /// The newest step, checked to be complete and the state of that seed.
    pub fn newest(&self) -> Option<u64> {
        let newest = self.steps(SERIAL).newest().unwrap()?;
        State::of_model(newest.step()).check(&newest);
        Some(newest.step())
    }

    /// After a sweep without live processes, only complete steps exist.
    pub fn check_swept(&self) {
        let steps = self.steps(SERIAL);
        assert_eq!(steps.sweep().unwrap().kept, [""; 0]);
        assert!(self.names().iter().all(|name| name.starts_with("step-")), "{:?}", self.names());
        for step in steps.steps().unwrap() {
            State::of_model(step).check(&steps.open_step(step).unwrap());
        }
    }

    pub fn path(&self, below: &str) -> PathBuf {
        self.temp.path().join("run").join(below)
    }

    /// Every file of a step, with its path below the step's folder.
    pub fn files(&self, step: u64) -> Vec<(String, Vec<u8>)> {
        let root = Key::new(format!("run/step-{step:012}")).unwrap();
        let store = self.store();
        let name = |key: &Key| key.as_str()[root.as_str().len() + 1..].to_owned();
        let entries = store.list(&root).unwrap();
        let read = |key: &Key| storage::read_all(&*store, key).unwrap();
        entries.iter().map(|entry| (name(&entry.key), read(&entry.key))).collect()
    }

    /// Names in `run`, including hidden ones, except `latest` and the epoch of the last lease.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(self.path(""))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name != "latest" && !name.starts_with(".epoch-"))
            .collect();
        names.sort();
        names
    }
}
