//! A disk that fills up under a run, and has room again: what is missing is told, the last
//! checkpoint is as good as before, and the run goes on from it to the bits of one that never
//! stopped.
//!
//! The disk is a small file system in memory, in a namespace of the test's own, for which nobody
//! has to be root.

#![expect(clippy::print_stdout, reason = "a test that is left out says why")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use crate::common::{self, Lab, assert_success, text, train};
use crate::kills::kill_after;

/// 5 MiB a checkpoint, and as much a generation of the optimizer's state.
const SIZE: [(&str, &str); 2] = [("model.hidden", "128"), ("checkpoint.keep.last", "3")];

/// A command as root of a namespace of its own.
fn alone() -> Command {
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount"]);
    command
}

/// Runs a config on a disk of so many MiB, which it is to fill; then once more when the disk has
/// become larger. `run/ckpt` has what was saved in the end, and `run/before` what the first run
/// left, on this disk or beside it. Gives the outcomes of both; `None` where there are no such
/// namespaces.
fn run_twice(lab: &Lab, disk: &Path, config: &Path, mib: u32) -> Option<[Output; 2]> {
    fs::create_dir(disk).unwrap();
    let probe = alone().args(["mount", "-t", "tmpfs", "tmpfs"]).arg(disk).output();
    if !probe.as_ref().is_ok_and(|probe| probe.status.success()) {
        println!("SKIPPED: no file system can be mounted here, not even by oneself: {probe:?}");
        return None;
    }
    let script = r#"
        mount -t tmpfs -o size="$1"m tmpfs "$2"
        code=0
        "$3" train "$4" >"$5/first.out" 2>"$5/first.err" || code=$?
        echo $code >"$5/first"
        mkdir -p "$5/run"
        from="$2/ckpt"
        [ -d "$from" ] || from="$5/run/ckpt"
        cp -r "$from" "$5/run/before"
        mount -o remount,size=256m "$2"
        "$3" train "$4"
        [ "$from" = "$5/run/ckpt" ] || cp -r "$from" "$5/run/ckpt"
    "#;
    let mut command = alone();
    command.args(["sh", "-euc", script, "sh"]).arg(mib.to_string()).arg(disk);
    command.arg(env!("CARGO_BIN_EXE_trainer")).arg(config).arg(lab.path(""));
    let second = common::alone(&mut command).output().unwrap();
    let first = Output {
        status: status(fs::read_to_string(lab.path("first")).unwrap().trim().parse().unwrap()),
        stdout: fs::read(lab.path("first.out")).unwrap(),
        stderr: fs::read(lab.path("first.err")).unwrap(),
    };
    Some([first, second])
}

fn status(code: i32) -> std::process::ExitStatus {
    std::os::unix::process::ExitStatusExt::from_raw(code << 8)
}

/// The steps that are whole, the newest last.
fn steps(folder: &Path) -> Vec<u64> {
    let store = storage::open_url(folder.to_str().unwrap()).unwrap();
    let steps = ckpt::Checkpoints::open(store, storage::Key::root());
    let all = steps.steps().unwrap();
    all.iter().for_each(|step| _ = steps.open_step(*step).unwrap().verify().unwrap());
    all
}

/// `offload` has `DISK` for the folder of the disk.
fn check(mib: u32, offload: &str, words: &[&str], newest: u64) {
    let lab = Lab::new();
    let disk = lab.path("disk");
    let place = format!("'{}/ckpt'", disk.display());
    let offload = offload.replace("DISK", disk.to_str().unwrap());
    let own = [("checkpoint.dir", &*place), ("optim.offload", &*offload)];
    let config = lab.config("run", &[&SIZE[..], &own].concat());
    let Some([first, second]) = run_twice(&lab, &disk, &config, mib) else { return };
    let told = text(&first.stderr);
    assert_eq!(first.status.code(), Some(2), "{told}");
    assert!(words.iter().all(|word| told.contains(word)), "due {words:?}: {told}");
    assert_eq!(steps(&lab.path("run/before")).last(), Some(&newest), "{told}");
    assert_success(&second);
    let told = text(&second.stderr);
    let from = format!("resuming from {}/ckpt/step-{newest:012}", disk.display());
    assert!(told.contains(&from), "due {from}: {told}");
    assert_success(&train(&lab.config("whole", &SIZE)));
    lab.assert_same("run", "whole");
}

/// Two generations of the state have room, and two checkpoints of it. The step after the third one
/// has no files to write into, and ends the run.
#[test]
fn a_state_that_finds_no_room_ends_the_run() {
    let words = ["disk/state/rank-00000/slot-", "no space left on device (need ", " bytes, "];
    check(24, "'nvme:DISK/state'", &words, 12);
}

/// Inputs of layers find no room on a disk of their own: the run ends within its step, with the
/// checkpoints of before as they were, and goes on from the newest when there is room.
#[test]
fn inputs_that_find_no_room_end_the_run() {
    let lab = Lab::new();
    // 32 KiB a layer and micro-batch, of which 64 have room, 16 are in memory and 90 are away.
    let size = [
        ("model.layers", "16"),
        ("model.hidden", "128"),
        ("batch.global", "24"),
        ("run.budget", "{ steps = 12 }"),
        ("checkpoint.async", "false"),
    ];
    let (disk, folder) = (lab.path("disk"), lab.path("run"));
    let away = format!(
        "{{ recompute.mode = 'full', schedule = 'gpipe', activation_offload = 'nvme:{}/away' }}",
        disk.display()
    );
    kill_after(1, &lab.config("run", &size), &folder, 5, Duration::ZERO);
    let config = lab.config("run", &[&size[..], &[("parallel", &*away)]].concat());
    let before = steps(&folder.join("ckpt"));
    let Some([first, second]) = run_twice(&lab, &disk, &config, 2) else { return };
    let told = text(&first.stderr);
    assert_eq!(first.status.code(), Some(2), "{told}");
    let words = format!("an unnamed file in {}/away: no space left", disk.display());
    assert!(told.contains(&words) && told.contains("(need 32768 bytes, "), "{told}");
    assert_eq!(steps(&lab.path("run/before")), before, "{told}");
    assert_success(&second);
    let told = text(&second.stderr);
    let from = format!("ckpt/step-{:012}", before.last().unwrap());
    assert!(told.contains("resuming from") && told.contains(&from), "due {from}: {told}");
    assert_success(&train(&lab.config("whole", &size)));
    lab.assert_same("run", "whole");
}

/// A checkpoint finds no room, and the next ones neither: the run computes on, and says in the end
/// that it is not saved.
#[test]
fn a_checkpoint_that_finds_no_room_is_missed() {
    let words =
        ["step 12 was not saved: ", "no space left on device (need ", " bytes, ", "step 48/48"];
    check(12, "'none'", &words, 8);
}
