//! What version 0.1 wrote is still read.

use std::fs;
use std::path::Path;

use crate::common::{Lab, assert_success, text, train};
use ckpt::Checkpoints;
use storage::Key;

/// Eight steps of so small a model that a checkpoint of it fits into the repository.
const SMALL: [(&str, &str); 7] = [
    ("run.budget", "{ steps = 8 }"),
    ("run.seed", "11"),
    ("model.layers", "1"),
    ("model.hidden", "8"),
    ("checkpoint.every.steps", "4"),
    ("optim.lr.style", "'constant'"),
    ("eval.every", "4"),
];

/// The fourth of its steps. `FEEDLINE_BLESS=1` makes it anew, which is for a new form of
/// checkpoints to do, beside this one.
#[test]
fn a_checkpoint_of_a_version_before_is_resumed() {
    let released = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/released");
    let step = "step-000000000004";
    let lab = Lab::new();
    let config = lab.config("run", &SMALL);
    let checkpoints = lab.path("run/ckpt");
    if std::env::var_os("FEEDLINE_BLESS").is_some() {
        assert_success(&train(&config));
        copy(&checkpoints.join(step), &released.join(step));
        fs::remove_dir_all(lab.path("run")).expect("it is there");
    }
    copy(&released, &checkpoints);
    let store = storage::open_url(checkpoints.to_str().expect("UTF-8")).expect("a store");
    let newest = Checkpoints::open(store, Key::root()).newest().expect("readable");
    newest.expect("a checkpoint").verify().expect("whole");

    let output = train(&config);
    assert_success(&output);
    let steps: Vec<u64> =
        lab.log_lines("run").iter().filter_map(|line| line["step"].as_u64()).collect();
    assert_eq!(steps.first(), Some(&5), "{}", text(&output.stderr));
    assert_eq!(steps.last(), Some(&8));
}

/// Copies a folder of folders of files.
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("room");
    for entry in fs::read_dir(from).expect("a folder").flatten() {
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if source.is_dir() {
            copy(&source, &target);
        } else {
            fs::copy(source, target).expect("room");
        }
    }
}
