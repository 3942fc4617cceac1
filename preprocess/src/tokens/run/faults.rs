//! Whole runs on faulty disks: a fault at each operation that changes the outputs, and at each read
//! of the inputs.

use std::io::Write as _;
use std::time::Duration;

use storage::testing::fault_store::{FaultKind, FaultPlan, FaultStore, ReadFaultLayer, ReadFaults};
use storage::{Key, Storage, one_line, read_all, write_all};

use super::*;
use crate::{ResumePolicy, TokenizerSpec};

const NAMES: [&str; 3] = ["a.jsonl", "b.jsonl.gz", "c.jsonl.zst"];

/// A run of six outputs, in several commits, from three inputs.
struct Fixture {
    _folder: tempfile::TempDir,
    options: PreprocessOptions,
    inputs: Arc<dyn Storage>,
    expected: Vec<(String, Vec<u8>)>,
}

impl Fixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let inputs: Arc<dyn Storage> = Arc::new(FaultStore::new(1, FaultPlan::default()));
        for (name, first) in NAMES.into_iter().zip([0, 30, 60]) {
            let line = |at| format!("{{\"text\":\"{at} 1 2 3 4 5 6\",\"title\":\"{at}\"}}\n");
            let text: String = (first..first + 30).map(line).collect();
            let bytes = match name {
                "b.jsonl.gz" => {
                    let mut gz = flate2::write::GzEncoder::new(Vec::new(), Default::default());
                    gz.write_all(text.as_bytes()).unwrap();
                    gz.finish().unwrap()
                }
                "c.jsonl.zst" => zstd::encode_all(text.as_bytes(), 1).unwrap(),
                _ => text.into_bytes(),
            };
            std::fs::write(folder.path().join(name), &bytes).unwrap();
            write_all(&*inputs, &Key::new(name).unwrap(), &bytes).unwrap();
        }
        let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let mut options = PreprocessOptions::new(NAMES.map(at).to_vec(), at("out"));
        // The null tokenizer needs no vocabulary, which would be built hundreds of times.
        options.tokenizer =
            TokenizerSpec { kind: "null".into(), vocab_size: Some(1000), ..Default::default() };
        options.keys = ["text", "title"].map(str::to_owned).to_vec();
        options.workers = 2;
        options.block_bytes = Some(700);
        options.commit_every = Duration::ZERO;
        let mut fixture = Fixture { _folder: folder, options, inputs, expected: Vec::new() };
        let store = FaultStore::new(2, FaultPlan::default());
        fixture.run(&store, ResumePolicy::Refuse).unwrap();
        fixture.expected = visible(&store);
        assert_eq!(fixture.expected.len(), 8);
        fixture
    }

    fn run(&self, outputs: &FaultStore, interrupted: ResumePolicy) -> Result<Report> {
        self.run_on(&[&self.inputs; NAMES.len()], outputs, interrupted)
    }

    /// With each input on a disk of its own.
    fn run_on(
        &self,
        disks: &[&Arc<dyn Storage>],
        outputs: &FaultStore,
        interrupted: ResumePolicy,
    ) -> Result<Report> {
        let options = PreprocessOptions { interrupted, ..self.options.clone() };
        let mut prepared = prepare(&options)?;
        prepared.outputs.store = Arc::new(outputs.clone());
        let inputs = prepared.inputs.into_iter().zip(disks);
        prepared.inputs = inputs.map(|(input, disk)| input.on(disk)).collect();
        let never = AtomicBool::new(false);
        run_prepared(&options, prepared, Instant::now(), &never, &mut |_| {})
    }

    /// Files under a final name are complete, and a manifest exists only where its files do.
    fn check_visible(&self, store: &FaultStore, case: &str) {
        let visible = visible(store);
        for (name, bytes) in &visible {
            let expected = self.expected.iter().find(|(file, _)| file == name);
            let (_, expected) =
                expected.unwrap_or_else(|| panic!("{case}: unexpected file {name}"));
            // A manifest records that the run was resumed.
            if let Some(prefix) = name.strip_suffix(".manifest.json") {
                let is_there =
                    |end: &&str| visible.iter().any(|(name, _)| *name == format!("{prefix}{end}"));
                let is_complete = [".bin", ".idx", ".crc"].iter().all(is_there);
                assert!(is_complete, "{case}: {name} is visible before its files");
            } else {
                assert!(bytes == expected, "{case}: {name} is visible but incomplete");
            }
        }
    }

    /// Resumes the run; its outputs are those of an uninterrupted one.
    fn resume(&self, store: &FaultStore, case: &str) {
        match self.run(store, ResumePolicy::Resume) {
            Ok(_) | Err(Error::Complete { .. }) => {}
            Err(error) => panic!("{case}: resumed with: {error}"),
        }
        self.check_visible(store, case);
        assert_eq!(visible(store).len(), self.expected.len(), "{case}");
        let draft = store.raw_paths().into_iter().find(|path| path.ends_with(".draft"));
        assert_eq!(draft, None, "{case}: leftover");
    }
}

fn visible(store: &FaultStore) -> Vec<(String, Vec<u8>)> {
    let list = store.list(&Key::root()).unwrap().into_iter();
    list.map(|entry| (entry.key.as_str().to_owned(), read_all(store, &entry.key).unwrap()))
        .collect()
}

#[test]
fn failed_writes_leave_no_partial_outputs() {
    let fixture = Fixture::new();
    for (how, words) in
        [(FaultKind::Io, "Input/output error"), (FaultKind::NoSpace, "no space left")]
    {
        let (mut op, mut failures) = (0, 0);
        loop {
            let store = FaultStore::new(3, FaultPlan::default());
            store.fail_op(op, how);
            let outcome = fixture.run(&store, ResumePolicy::Refuse);
            if store.op_count() <= op {
                outcome.unwrap();
                break;
            }
            let case = format!("{how:?} at operation {op}");
            fixture.check_visible(&store, &case);
            if let Err(error) = outcome {
                let message = one_line(&error);
                assert!(message.contains(words) && message.contains("sim:/"), "{case}: {message}");
                let can_resume = message.contains("--resume continues from it");
                assert!(
                    can_resume || store.raw_paths().is_empty(),
                    "{case}: {:?}",
                    store.raw_paths()
                );
                failures += 1;
            }
            // Some have a power cut before they are resumed.
            fixture.resume(&if op % 3 == 0 { store.crash(op as u64) } else { store }, &case);
            op += 1;
        }
        assert!(op > 60 && failures > op / 2, "{failures} of {op} operations failed a run");
    }
}

/// For each byte that a disk cannot read, and each way an input is stored.
#[test]
fn failed_reads_are_reported_and_the_run_resumes() {
    let fixture = Fixture::new();
    for (input_idx, name) in NAMES.into_iter().enumerate() {
        let len = fixture.inputs.open(&Key::new(name).unwrap()).unwrap().len_bytes();
        for at in (0..len).step_by(100) {
            let faults = ReadFaults { broken: at..at + 1, ..ReadFaults::default() };
            let faulty: Arc<dyn Storage> =
                Arc::new(ReadFaultLayer::new(Arc::clone(&fixture.inputs), 1, faults));
            let store = FaultStore::new(4, FaultPlan::default());
            let case = format!("{name} broken at {at}");
            // The other inputs are read from a disk without faults.
            let disks: Vec<_> = (0..NAMES.len())
                .map(|idx| if idx == input_idx { &faulty } else { &fixture.inputs })
                .collect();
            let outcome = fixture.run_on(&disks, &store, ResumePolicy::Refuse);
            let message = one_line(&outcome.unwrap_err());
            assert!(message.contains(&format!("of sim:/{name}: Input/output error")), "{message}");
            assert!(message.starts_with("cannot read "), "{message}");
            assert_eq!(visible(&store), [], "{case}");
            if !message.contains("--resume continues from it") {
                assert_eq!(store.raw_paths(), Vec::<String>::new(), "{case}: leftover");
            }
            fixture.resume(&store, &case);
        }
    }
}
