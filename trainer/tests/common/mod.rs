//! A small corpus, a small run of the real binary, and how two runs are compared.

#![allow(dead_code, reason = "each test binary uses its own part of this")]

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use ckpt::convert::{Bounds, Format, Import};
use ckpt::{Checkpoints, Group};
use indexed::{Builder, Dtype};
use storage::Key;
use tempfile::TempDir;

/// Tokens of the test vocabulary.
pub const VOCAB: u32 = 500;

/// A folder with a corpus, in which runs live side by side.
pub struct Lab {
    folder: TempDir,
}

impl Lab {
    pub fn new() -> Self {
        let lab = Lab { folder: tempfile::tempdir().expect("a folder") };
        lab.corpus("corpus", 0);
        lab
    }

    /// Another corpus beside the first. With a salt it has the last twenty tokens alone.
    pub fn corpus(&self, name: &str, salt: u32) {
        let store = storage::open_url(self.path("").to_str().expect("UTF-8")).expect("a store");
        let mut corpus = Builder::create(&store, &Key::new(name).expect("a key"), Dtype::U16)
            .expect("a new corpus");
        // Documents of a few words that repeat: there is something to learn.
        for document in 0..300_u32 {
            let token = |i: u32| (document % 7 * 61 + i * (1 + document % 3) * 13 + salt) % VOCAB;
            let upper = |token: u32| if salt > 0 { VOCAB - 20 + token % 20 } else { token };
            let tokens: Vec<u32> = (0..20 + document % 37).map(|i| upper(token(i))).collect();
            corpus.add_sequence(&tokens).expect("room");
            corpus.end_document().expect("room");
        }
        corpus.finish().expect("room");
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes the config of a run in its own folder and gives the config's path.
    pub fn config(&self, run: &str, overrides: &[(&str, &str)]) -> PathBuf {
        let mut keys = vec![
            ("run.budget", "{ steps = 48 }".to_owned()),
            ("run.threads", "1".to_owned()),
            ("model.layers", "2".to_owned()),
            ("model.hidden", "64".to_owned()),
            ("model.heads", "2".to_owned()),
            ("model.vocab", VOCAB.to_string()),
            ("model.seq_len", "16".to_owned()),
            ("data.split", "'90,10,0'".to_owned()),
            ("batch.global", "12".to_owned()),
            ("batch.micro", "4".to_owned()),
            ("optim.lr.peak", "0.003".to_owned()),
            ("checkpoint.every.steps", "4".to_owned()),
            ("checkpoint.keep.last", "2".to_owned()),
            ("eval.every", "8".to_owned()),
            ("eval.iters", "1".to_owned()),
            ("log.every", "1".to_owned()),
            ("run.dir", quoted(&self.path(run))),
            ("data.train", quoted(&self.path("corpus"))),
        ];
        for (key, value) in overrides {
            keys.retain(|(name, _)| name != key);
            keys.push((key, (*value).to_owned()));
        }
        let mut text = String::new();
        for (key, value) in keys {
            writeln!(text, "{key} = {value}").expect("memory");
        }
        let path = self.path(&format!("{run}.toml"));
        fs::write(&path, text).expect("room");
        path
    }

    /// The lines of a run's log, without what the clock said.
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

    /// Both runs ended in the same bits and wrote the same lines.
    pub fn assert_same(&self, run: &str, due: &str) {
        for (got, due) in self.final_tensors(run).iter().zip(&self.final_tensors(due)) {
            assert_eq!(got.0, due.0);
            assert!(got.1 == due.1, "{} of {run} has other bits", got.0);
        }
        let (got, due) = (self.log_lines(run), self.log_lines(due));
        for (got, due) in got.iter().zip(&due) {
            assert_eq!(got, due, "a line of {run}");
        }
        assert_eq!(got.len(), due.len(), "lines of {run}");
    }
}

fn quoted(path: &Path) -> String {
    format!("'{}'", path.display())
}

/// The real binary, on one thread, with this verb and file.
pub fn trainer(verb: &str, config: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_trainer"));
    command.arg(verb).arg(config).env("OMP_NUM_THREADS", "1");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Starts a run whose words nobody reads.
pub fn spawn_train(config: &Path) -> Child {
    let mut command = trainer("train", config);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().expect("the binary starts")
}

/// A run to its end.
pub fn train(config: &Path) -> Output {
    trainer("train", config).output().expect("the binary starts")
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub fn assert_success(output: &Output) {
    assert!(output.status.success(), "{}: {}", output.status, text(&output.stderr));
}

/// A folder with a model of Hugging Face as a checkpoint of ours in `ckpt`, and the config
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
        .save_made(0, &import, &[], meta, Bounds::default(), &|_| ())
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
