//! A disk that fills up during a run, and is then enlarged: the error is reported, the last
//! checkpoint stays intact, and the run resumes from it, bit-identical to an uninterrupted one.
//!
//! The disk is a small file system in memory, in a mount namespace of the test, without root.

#![expect(clippy::print_stdout, reason = "a skipped test prints the reason")]

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

/// Runs a config on a disk of `mib` MiB, which it fills; then once more with a larger disk.
/// `run/ckpt` has the final checkpoints, and `run/before` those of the first run, on this disk or
/// elsewhere. Returns the outcomes of both; `None` if the system has no such namespaces.
fn run_twice(lab: &Lab, disk: &Path, config: &Path, mib: u32) -> Option<[Output; 2]> {
    fs::create_dir(disk).unwrap();
    let probe = alone().args(["mount", "-t", "tmpfs", "tmpfs"]).arg(disk).output();
    if !probe.as_ref().is_ok_and(|probe| probe.status.success()) {
        println!("SKIPPED: no file system can be mounted here, not even by oneself: {probe:?}");
        return None;
    }
    let script = r#"
        mount -t tmpfs -o size="$1"m tmpfs "$2"
        mkdir "$2/state" "$2/away"
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

/// The complete steps, the newest last.
fn steps(folder: &Path) -> Vec<u64> {
    let store = storage::open_url(folder.to_str().unwrap()).unwrap();
    let steps = ckpt::Checkpoints::open(store, storage::Key::root());
    let all = steps.steps().unwrap();
    all.iter().for_each(|step| _ = steps.open_step(*step).unwrap().verify().unwrap());
    all
}

/// `offload` has `DISK` for the folder of the disk.
fn check(mib: u32, offload: &str, expected: &[&str], newest: u64) {
    let lab = Lab::new();
    let disk = lab.path("disk");
    let place = format!("'{}/ckpt'", disk.display());
    let offload = offload.replace("DISK", disk.to_str().unwrap());
    let own = [("checkpoint.dir", &*place), ("optim.offload", &*offload)];
    let config = lab.config("run", &[&SIZE[..], &own].concat());
    let Some([first, second]) = run_twice(&lab, &disk, &config, mib) else { return };
    let stderr = text(&first.stderr);
    assert_eq!(first.status.code(), Some(2), "{stderr}");
    assert!(expected.iter().all(|part| stderr.contains(part)), "expected {expected:?}: {stderr}");
    assert_eq!(steps(&lab.path("run/before")).last(), Some(&newest), "{stderr}");
    assert_success(&second);
    let stderr = text(&second.stderr);
    let from = format!("resuming from {}/ckpt/step-{newest:012}", disk.display());
    assert!(stderr.contains(&from), "expected {from}: {stderr}");
    assert_success(&train(&lab.config("whole", &SIZE)));
    lab.assert_same("run", "whole");
}

/// The disk has room for two generations of the state, and two checkpoints of it. The step after
/// the third one has no files to write to, and ends the run.
#[test]
fn no_room_for_state_ends_the_run() {
    let expected = ["disk/state/rank-00000/slot-", "no space left on device (need ", " bytes, "];
    check(24, "'nvme:DISK/state'", &expected, 12);
}

/// Inputs of layers find no room on a disk of their own: the run ends within its step, with the
/// earlier checkpoints unchanged, and resumes from the newest when there is room.
#[test]
fn no_room_for_layer_inputs_ends_the_run() {
    let lab = Lab::new();
    // 32 KiB a layer and micro-batch: 64 fit on the disk, 16 are in memory and 90 are spilled.
    let size = [
        ("model.layers", "16"),
        ("model.hidden", "128"),
        ("batch.global", "24"),
        ("run.budget", "{ steps = 12 }"),
        ("checkpoint.async", "false"),
    ];
    let (disk, folder) = (lab.path("disk"), lab.path("run"));
    let spill = format!(
        "{{ recompute.mode = 'full', schedule = 'gpipe', activation_offload = 'nvme:{}/away' }}",
        disk.display()
    );
    kill_after(1, &lab.config("run", &size), &folder, 5, Duration::ZERO);
    let config = lab.config("run", &[&size[..], &[("parallel", &*spill)]].concat());
    let before = steps(&folder.join("ckpt"));
    let Some([first, second]) = run_twice(&lab, &disk, &config, 2) else { return };
    let stderr = text(&first.stderr);
    assert_eq!(first.status.code(), Some(2), "{stderr}");
    let message = format!("an unnamed file in {}/away: no space left", disk.display());
    assert!(stderr.contains(&message) && stderr.contains("(need 32768 bytes, "), "{stderr}");
    assert_eq!(steps(&lab.path("run/before")), before, "{stderr}");
    assert_success(&second);
    let stderr = text(&second.stderr);
    let from = format!("ckpt/step-{:012}", before.last().unwrap());
    assert!(
        stderr.contains("resuming from") && stderr.contains(&from),
        "expected {from}: {stderr}"
    );
    assert_success(&train(&lab.config("whole", &size)));
    lab.assert_same("run", "whole");
}

/// A checkpoint finds no room, and neither do the next ones: the run continues, and fails at the
/// end because it is not saved.
#[test]
fn no_room_for_a_checkpoint_does_not_stop_training() {
    let expected =
        ["step 12 was not saved: ", "no space left on device (need ", " bytes, ", "step 48/48"];
    check(12, "'none'", &expected, 8);
}
