//! Crashes at every operation of a save and of a retention pass.
//!
//! The store models exactly the contract of [`storage::Storage`]: the effect of an operation that
//! returned is durable; an interrupted operation has happened or not, and an interrupted deletion
//! of a folder has deleted any part of it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use crate::common::{Random, SERIAL, State};
use ckpt::{Checkpoints, Error};
use storage::{FileEntry, Key, Map, Object, ObjectMeta, RangeRead, Result, Storage, Upload, crc64};

/// Images of a half-deleted folder that are checked.
const PARTIAL_IMAGES: usize = 12;

/// All objects at one moment.
type Image = BTreeMap<String, Arc<Vec<u8>>>;

/// Objects in memory, and every image that a crash could have left so far.
#[derive(Clone)]
struct Model(Arc<Mutex<Inner>>);

struct Inner {
    now: Image,
    /// The operation that was just done, or half done, and the image.
    crashes: Vec<(String, Image)>,
    random: Random,
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Model")
    }
}

impl Model {
    fn new(now: Image, seed: u64) -> Self {
        let crashes = vec![("nothing".to_owned(), now.clone())];
        Model(Arc::new(Mutex::new(Inner { now, crashes, random: Random(seed) })))
    }

    fn steps(&self) -> Checkpoints {
        Checkpoints::open(Arc::new(self.clone()), Key::new("run").unwrap()).with_options(SERIAL)
    }

    fn image(&self) -> Image {
        self.0.lock().unwrap().now.clone()
    }

    fn change<T>(&self, what: String, change: impl FnOnce(&mut Image) -> Result<T>) -> Result<T> {
        let mut inner = self.0.lock().unwrap();
        let done = change(&mut inner.now)?;
        let now = inner.now.clone();
        inner.crashes.push((what, now));
        Ok(done)
    }
}

fn below<'a>(folder: &Key, key: &'a str) -> Option<&'a str> {
    key.strip_prefix(folder.as_str())?.strip_prefix('/')
}

fn exists(object: &Key) -> storage::Error {
    storage::Error::Exists { object: object.to_string() }
}

fn not_found(object: &Key) -> storage::Error {
    storage::Error::NotFound { object: object.to_string() }
}

impl Storage for Model {
    fn open(&self, key: &Key) -> Result<Arc<dyn Object>> {
        let bytes = self.image().get(key.as_str()).cloned().ok_or_else(|| not_found(key))?;
        Ok(Arc::new(ModelObject(bytes)))
    }

    fn create(&self, key: &Key, _len_bytes_max: u64) -> Result<Box<dyn Upload>> {
        if self.image().contains_key(key.as_str()) {
            return Err(exists(key));
        }
        Ok(Box::new(ModelUpload { model: self.clone(), key: key.clone(), bytes: Vec::new() }))
    }

    fn list(&self, folder: &Key) -> Result<Vec<ObjectMeta>> {
        let image = self.image();
        let mut entries = Vec::new();
        for (key, bytes) in image.iter().filter(|(key, _)| below(folder, key).is_some()) {
            entries.push(ObjectMeta { key: Key::new(key.as_str())?, bytes: bytes.len() as u64 });
        }
        Ok(entries)
    }

    fn list_names(&self, folder: &Key) -> Result<Vec<String>> {
        let image = self.image();
        let below = image.keys().filter_map(|key| below(folder, key)?.split('/').next());
        let mut names: Vec<String> = below.map(str::to_owned).collect();
        names.dedup();
        Ok(names)
    }

    fn delete(&self, key: &Key) -> Result<()> {
        let remove = |image: &mut Image| image.remove(key.as_str()).ok_or_else(|| not_found(key));
        self.change(format!("delete {key}"), remove).map(drop)
    }

    fn publish(&self, staged: &Key, target: &Key) -> Result<()> {
        let rename = |image: &mut Image| {
            if image.keys().any(|key| below(target, key).is_some() || key == target.as_str()) {
                return Err(exists(target));
            }
            let is_staged = |key: &String| below(staged, key).is_some();
            let keys: Vec<String> = image.keys().filter(|key| is_staged(key)).cloned().collect();
            if keys.is_empty() {
                return Err(not_found(staged));
            }
            for key in keys {
                let bytes = image.remove(&key).unwrap();
                image.insert(format!("{target}{}", &key[staged.as_str().len()..]), bytes);
            }
            Ok(())
        };
        self.change(format!("publish {staged} as {target}"), rename)
    }

    fn delete_folder(&self, folder: &Key) -> Result<()> {
        let mut inner = self.0.lock().unwrap();
        for _ in 0..PARTIAL_IMAGES {
            let mut part = inner.now.clone();
            part.retain(|key, _| below(folder, key).is_none() || inner.random.below(2) == 0);
            inner.crashes.push((format!("half delete {folder}"), part));
        }
        drop(inner);
        let remove = |image: &mut Image| {
            image.retain(|key, _| below(folder, key).is_none());
            Ok(())
        };
        self.change(format!("delete {folder}"), remove)
    }

    fn free_bytes(&self) -> Result<Option<u64>> {
        Ok(None)
    }

    fn display(&self, key: &Key) -> String {
        key.to_string()
    }
}

#[derive(Debug)]
struct ModelObject(Arc<Vec<u8>>);

impl Object for ModelObject {
    fn len_bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_many(&self, reads: &mut [RangeRead<'_>]) -> Result<()> {
        for read in reads {
            let begin = read.offset as usize;
            read.buf.copy_from_slice(&self.0[begin..begin + read.buf.len()]);
        }
        Ok(())
    }

    fn map(&self) -> Result<Map> {
        Ok(Map::owned(self.0.to_vec()))
    }

    fn display(&self) -> String {
        "an object of the model".to_owned()
    }
}

#[derive(Debug)]
struct ModelUpload {
    model: Model,
    key: Key,
    bytes: Vec<u8>,
}

impl Upload for ModelUpload {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.bytes.extend(bytes);
        Ok(())
    }

    fn len_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn finish(self: Box<Self>) -> Result<FileEntry> {
        let ModelUpload { model, key, bytes } = *self;
        let path = key.name().to_owned();
        let entry = FileEntry { path, bytes: bytes.len() as u64, crc64: crc64(&bytes) };
        let insert = |image: &mut Image| {
            let taken = image.insert(key.to_string(), Arc::new(bytes));
            if taken.is_some() { Err(exists(&key)) } else { Ok(()) }
        };
        model.change(format!("finish {key}"), insert)?;
        Ok(entry)
    }
}

/// Runs `work` on a store with the contents `before`, and `check` on the image of every possible
/// crash. Returns the last image, and the number of images.
fn crash_everywhere(
    before: &Image,
    seed: u64,
    work: impl Fn(&Checkpoints),
    check: impl Fn(&Checkpoints, &str),
) -> (Image, usize) {
    let model = Model::new(before.clone(), seed);
    work(&model.steps());
    let crashes = std::mem::take(&mut model.0.lock().unwrap().crashes);
    let count = crashes.len();
    for (number, (what, mut image)) in crashes.into_iter().enumerate() {
        // This process acts as its own successor, which would know that its predecessor is dead.
        image.retain(|key, _| !key.starts_with("run/.lease-"));
        let context = format!("seed {seed}: after operation {number}, {what}");
        let steps = Model::new(image, seed).steps();
        for step in steps.steps().unwrap() {
            steps.open_step(step).unwrap().verify().expect(&context);
        }
        check(&steps, &context);
    }
    (model.image(), count)
}

fn newest_is(steps: &Checkpoints, allowed: &[(u64, &State)], context: &str) -> u64 {
    let newest = steps.newest().unwrap().expect(context);
    let expected = allowed.iter().find(|(step, _)| *step == newest.step());
    let (step, state) = expected.unwrap_or_else(|| panic!("{context}: step {}", newest.step()));
    assert_eq!(state.differs_from(&newest).unwrap(), None, "{context}");
    *step
}

#[test]
fn crash_leaves_old_or_new_step() {
    for seed in 0..8 {
        let state = |step: u64| State::of_model(100 * seed + step);
        let (old, new, newest) = (state(1), state(2), state(3));
        let save = |step: u64, state: &State| {
            let state = state.clone();
            move |steps: &Checkpoints| assert_eq!(state.save(steps, step).unwrap().step, step)
        };
        let first = |steps: &Checkpoints, context: &str| {
            if let Some(newest) = steps.newest().unwrap() {
                old.check(&newest);
            }
            resume(steps, 1, &old, context);
        };
        let (image, count) = crash_everywhere(&Image::new(), seed, save(1, &old), first);
        assert!(count > 15, "a save of {count} operations");

        let second = |steps: &Checkpoints, context: &str| {
            newest_is(steps, &[(1, &old), (2, &new)], context);
            resume(steps, 2, &new, context);
        };
        let (image, _) = crash_everywhere(&image, seed, save(2, &new), second);
        let (image, _) = crash_everywhere(&image, seed, save(3, &newest), |steps, context| {
            newest_is(steps, &[(2, &new), (3, &newest)], context);
        });

        let retained = |steps: &Checkpoints, context: &str| {
            newest_is(steps, &[(3, &newest)], context);
            steps.sweep().unwrap();
            steps.retain(1).unwrap();
            assert_eq!(steps.steps().unwrap(), [3], "{context}");
        };
        let retain = |steps: &Checkpoints| assert_eq!(steps.retain(1).unwrap(), [1, 2]);
        let (image, count) = crash_everywhere(&image, seed, retain, retained);
        assert!(count > 2 * PARTIAL_IMAGES, "a retention pass of {count} operations");
        let is_due = |key: &str| {
            key.starts_with("run/step-000000000003/") || key == "run/.epoch-000000000004"
        };
        assert!(image.keys().all(|key| is_due(key)), "{:?}", image.keys());
    }
}

/// A damaged step is moved away before its replacement: in between, only the previous step exists.
#[test]
fn crash_while_damaged_step_is_replaced() {
    let (old, bad, new) = (State::of_model(1), State::of_model(2), State::of_model(3));
    let model = Model::new(Image::new(), 0);
    old.save(&model.steps(), 1).unwrap();
    bad.save(&model.steps(), 2).unwrap();
    let mut image = model.image();
    image.remove("run/step-000000000002/extra/rng.bin").unwrap();
    let save = |steps: &Checkpoints| assert_eq!(new.save(steps, 2).unwrap().step, 2);
    crash_everywhere(&image, 0, save, |steps, context| {
        newest_is(steps, &[(1, &old), (2, &new)], context);
        resume(steps, 2, &new, context);
    });
}

/// The next process sweeps, and saves the step if it does not exist.
fn resume(steps: &Checkpoints, step: u64, state: &State, context: &str) {
    let swept = steps.sweep().unwrap();
    assert!(swept.kept.iter().all(|name| name.starts_with(".damaged-")), "{context}: {swept:?}");
    match state.save(steps, step) {
        Ok(_) | Err(Error::StepExists { .. }) => {}
        Err(error) => panic!("{context}: {error}"),
    }
    newest_is(steps, &[(step, state)], context);
}
