//! A small run of the real binary on a small corpus, and how two runs are compared.

#[path = "../../../../feed/tests/it/common/mod.rs"]
mod lab;

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use ckpt::convert::{ConvertLimits, Format, Import};
use ckpt::{Checkpoints, Group};
use storage::Key;
use tempfile::TempDir;

pub use lab::{Lab, VOCAB};

impl Lab {
    /// The lines of a run's log, without measured times.
    pub fn log_lines(&self, run: &str) -> Vec<serde_json::Value> {
        let text = fs::read_to_string(self.path(run).join("log.jsonl")).unwrap_or_default();
        let parse = |line: &str| -> serde_json::Value {
            let mut line: serde_json::Value = serde_json::from_str(line).expect("a whole line");
            line.as_object_mut().expect("an object").remove("perf");
            line
        };
        text.lines().map(parse).collect()
    }

    /// Every tensor of a run's newest checkpoint, by group and name.
    pub fn final_tensors(&self, run: &str) -> Vec<(String, Vec<u8>)> {
        let folder = self.path(run).join("ckpt");
        let store = storage::open_url(folder.to_str().expect("UTF-8")).expect("a store");
        let steps = Checkpoints::open(store, Key::root());
        let newest = steps.newest().expect("readable").expect("a checkpoint");
        let count = newest.tensors().len();
        assert!(count >= 3 * 28 && count.is_multiple_of(3), "weights and both moments");
        let read = |group: Group, name: &str, bytes: u64| {
            let mut into = vec![0; bytes as usize];
            newest.read_tensor(name, group, &mut into).expect("whole");
            (format!("{}: {group:?} {name}", newest.step()), into)
        };
        newest.tensors().iter().map(|t| read(t.group, &t.name, t.bytes())).collect()
    }

    /// Asserts that both runs ended in the same bits and wrote the same lines.
    pub fn assert_same(&self, run: &str, expected: &str) {
        for (found, expected) in self.final_tensors(run).iter().zip(&self.final_tensors(expected)) {
            assert_eq!(found.0, expected.0);
            assert!(found.1 == expected.1, "{} of {run} has other bits", found.0);
        }
        let (found, expected) = (self.log_lines(run), self.log_lines(expected));
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(found, expected, "a line of {run}");
        }
        assert_eq!(found.len(), expected.len(), "lines of {run}");
    }
}

/// Variables that would make a program a rank, or change its address. Tests may run as a job.
const RANK_VARIABLES: [&str; 4] =
    ["RANK", "WORLD_SIZE", "SLURM_STEP_NODELIST", "GLOO_SOCKET_IFNAME"];

/// Removes the variables of ranks from a command, and limits it to one thread.
pub fn alone(command: &mut Command) -> &mut Command {
    for name in RANK_VARIABLES {
        command.env_remove(name);
    }
    command.env("OMP_NUM_THREADS", "1")
}

/// The real binary, on one thread, with this verb and file.
pub fn trainer(verb: &str, config: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_trainer"));
    alone(command.arg(verb).arg(config));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Starts a run, and discards its output.
pub fn spawn_train(config: &Path) -> Child {
    let mut command = trainer("train", config);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().expect("the binary starts")
}

/// Runs a training to its end.
pub fn train(config: &Path) -> Output {
    trainer("train", config).output().expect("the binary starts")
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub fn assert_success(output: &Output) {
    assert!(output.status.success(), "{}: {}", output.status, text(&output.stderr));
}

/// A folder with a model of Hugging Face, imported as a checkpoint in `ckpt`, and the config
/// `model.toml` of this model and tokenizer.
pub fn imported(from: &Path, model: &str, tokenizer: &str) -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let source = from.to_str().expect("UTF-8");
    let mut import = Import::open(source, Format::HuggingFace).expect("a model");
    import.normalize().expect("a model of a known family");
    let store = storage::open_url(&path("ckpt")).expect("a store");
    let meta = serde_json::json!({ "step": 0 });
    Checkpoints::open(store, Key::root())
        .save_made(0, &import, &[], meta, ConvertLimits::default(), &|_| ())
        .expect("room");
    let text = format!(
        "run = {{ dir = 'unused', budget = {{ steps = 1 }} }}
         model = {{ {} }}
         data = {{ train = 'unused', tokenizer = '{tokenizer}' }}
         batch = {{ global = 1, micro = 1 }}
         optim = {{ lr = {{ peak = 0.001 }} }}",
        model.split_whitespace().collect::<Vec<_>>().join(" ")
    );
    fs::write(path("model.toml"), text).expect("room");
    folder
}
