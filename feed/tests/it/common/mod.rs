//! A small corpus, and configs of runs that read it.

#![allow(dead_code, reason = "each test binary uses its own part of this")]

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use indexed::{Builder, Dtype};
use storage::Key;
use tempfile::TempDir;

/// Tokens of the test vocabulary.
pub const VOCAB: u32 = 500;

/// A folder with a corpus and the folders of runs.
pub struct Lab {
    folder: TempDir,
}

impl Lab {
    pub fn new() -> Self {
        let lab = Lab { folder: tempfile::tempdir().expect("a folder") };
        lab.corpus("corpus", 0);
        lab
    }

    /// Adds a corpus. With a salt it has only the last twenty tokens of the vocabulary.
    pub fn corpus(&self, name: &str, salt: u32) {
        let store = storage::open_url(self.path("").to_str().expect("UTF-8")).expect("a store");
        let mut corpus = Builder::create(&store, &Key::new(name).expect("a key"), Dtype::U16)
            .expect("a new corpus");
        // Documents of a few repeated words, so that a model can learn them.
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

    /// Writes the config of a run with its own folder, and returns the config's path.
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
}

fn quoted(path: &Path) -> String {
    format!("'{}'", path.display())
}
