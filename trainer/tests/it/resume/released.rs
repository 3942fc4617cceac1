//! Checkpoints of version 0.1 can still be read.

use std::fs;
use std::path::Path;

use crate::common::{Lab, assert_success, text, train};
use ckpt::Checkpoints;
use storage::Key;

/// Eight steps of a model that is small enough for a checkpoint in the repository.
const SMALL: [(&str, &str); 7] = [
    ("run.budget", "{ steps = 8 }"),
    ("run.seed", "11"),
    ("model.layers", "1"),
    ("model.hidden", "8"),
    ("checkpoint.every.steps", "4"),
    ("optim.lr.style", "'constant'"),
    ("eval.every", "4"),
];

/// Losses of the steps after the fourth, by the run that wrote it. Another processor rounds them
/// differently.
const LOSSES: [f64; 4] = [6.185_925_7, 6.180_105_8, 6.171_485_6, 6.172_323_7];
const LOSS_ERROR_MAX: f64 = 1e-4;

#[test]
fn a_checkpoint_of_version_0_1_is_resumed() {
    let released = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/released");
    let lab = Lab::new();
    let config = lab.config("run", &SMALL);
    let checkpoints = lab.path("run/ckpt");
    copy(&released, &checkpoints);
    let store = storage::open_url(checkpoints.to_str().expect("UTF-8")).expect("a store");
    let newest = Checkpoints::open(store, Key::root()).newest().expect("readable");
    newest.expect("a checkpoint").verify().expect("whole");

    let output = train(&config);
    assert_success(&output);
    let lines = lab.log_lines("run");
    let losses: Vec<(u64, f64)> = lines
        .iter()
        .filter_map(|line| Some((line["step"].as_u64()?, line["loss"].as_f64()?)))
        .collect();
    assert_eq!(losses.len(), LOSSES.len(), "{}", text(&output.stderr));
    for ((found, expected), step) in losses.iter().zip(LOSSES).zip(5..) {
        assert_eq!(found.0, step);
        assert!((found.1 - expected).abs() <= LOSS_ERROR_MAX, "{losses:?}");
    }
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
