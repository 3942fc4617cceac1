//! Optimizer state in host memory or on a disk: runs are bit-identical to those without offload,
//! killed and resumed wherever the state was before.

use std::time::Duration;

use super::threads::{NOT_FUSED, is_fused};
use crate::common::{Lab, assert_success, text, train, trainer};
use crate::corpora::SPANS;
use crate::kills::{kill_after, run};

/// Eight micro-batches a step, which four replicas divide.
const BATCH: [(&str, &str); 4] = [
    ("batch.global", "16"),
    ("batch.micro", "2"),
    ("eval.every", "0"),
    ("checkpoint.every.steps", "3"),
];

/// `optim.offload`, on a disk in a new folder of the lab.
fn on_disk(lab: &Lab, folder: &str) -> String {
    create_folders(lab, &[folder]);
    format!("'nvme:{}'", lab.path(folder).display())
}

fn create_folders(lab: &Lab, folders: &[&str]) {
    folders.iter().for_each(|folder| std::fs::create_dir(lab.path(folder)).unwrap());
}

#[test]
fn offloaded_state_changes_no_bit() {
    if !is_fused() {
        return println!("{NOT_FUSED}");
    }
    let lab = Lab::new();
    for dtype in ["'fp32'", "'bf16'", "'fp16'"] {
        let number = dtype.trim_matches('\'');
        let keys = |offload| {
            let own = [("precision.dtype", dtype), ("optim.offload", offload)];
            [&BATCH[..], &own].concat()
        };
        let whole = format!("{number}-none");
        assert_success(&train(&lab.config(&whole, &keys("'none'"))));
        let disk = on_disk(&lab, &format!("{number}-state"));
        for (place, offload) in [("cpu", "'cpu'"), ("disk", &*disk)] {
            let name = format!("{number}-{place}");
            assert_success(&train(&lab.config(&name, &keys(offload))));
            lab.assert_same(&name, &whole);
        }
    }
}

/// Replicas with slices, then stages of a pipeline, then both, then one process: in memory, on a
/// disk, on the same disk in another layout, without offload.
#[test]
fn a_run_resumes_with_its_state_in_another_place() {
    if !is_fused() {
        return println!("{NOT_FUSED}");
    }
    let lab = Lab::new();
    assert_success(&train(&lab.config("whole", &BATCH)));
    let (folder, disk) = (lab.path("run"), on_disk(&lab, "state"));
    for (number, (ranks, parallel, offload)) in [
        (4, "{ zero = 1 }", "'cpu'"),
        (2, "{ pp = 2 }", &*disk),
        (4, "{ pp = 2, zero = 1 }", &*disk),
        (2, "{}", &*disk),
    ]
    .into_iter()
    .enumerate()
    {
        let keys = [&BATCH[..], &[("parallel", parallel), ("optim.offload", offload)]].concat();
        let pause = Duration::from_millis(3 * number as u64);
        kill_after(ranks, &lab.config("run", &keys), &folder, 5 + 10 * number, pause);
    }
    assert_eq!(
        names(&lab, "state"),
        ["rank-00000", "rank-00001"],
        "the folders of four ranks are removed"
    );
    let output = run(1, &lab.config("run", &BATCH));
    assert_success(&output);
    assert!(text(&output.stderr).contains("resuming from"), "{}", text(&output.stderr));
    lab.assert_same("run", "whole");
}

fn names(lab: &Lab, folder: &str) -> Vec<String> {
    let all = std::fs::read_dir(lab.path(folder)).unwrap();
    let mut all: Vec<String> =
        all.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    all.sort();
    all
}

/// State over two disks, one of them private to each rank: the same bits. Another run's folder on
/// them stays, and the folder of a rank that the run no longer has is removed.
#[test]
fn a_run_over_several_disks_ends_in_the_same_bits() {
    if !is_fused() {
        return println!("{NOT_FUSED}");
    }
    let lab = Lab::new();
    assert_success(&train(&lab.config("whole", &BATCH)));
    create_folders(&lab, &["shared", "own-0", "own-1"]);
    let (shared, own) = (lab.path("shared"), lab.path("own-{local_rank}"));
    let disks = format!("'nvme:{},{}'", shared.display(), own.display());
    let keys = [("parallel", "{ zero = 1 }"), ("optim.offload", &*disks)];
    let config = lab.config("run", &[&BATCH[..], &keys].concat());
    assert_success(&run(2, &config));
    lab.assert_same("run", "whole");
    std::fs::create_dir(lab.path("own-1/rank-00007")).unwrap();
    assert_eq!(names(&lab, "shared"), ["rank-00000", "rank-00001"]);
    assert_eq!(names(&lab, "own-0"), ["rank-00000"]);
    assert_eq!(names(&lab, "own-1"), ["rank-00001", "rank-00007"]);
    assert_success(&run(1, &config));
    assert_eq!(names(&lab, "shared"), ["rank-00000"]);
    assert_eq!(names(&lab, "own-1"), ["rank-00007"]);
}

/// Tensor parallel ranks, with rows of padding that no state has: the same bits as without offload,
/// also if the run resumes with other replicas or stages. With another number of tensor parallel
/// ranks it resumes too, with other bits.
#[test]
fn tensor_parallel_ranks_end_in_the_same_bits() {
    if !is_fused() {
        return println!("{NOT_FUSED}");
    }
    let lab = Lab::new();
    let whole = [&BATCH[..], &[("parallel", "{ tp = 2 }")]].concat();
    assert_success(&run(2, &lab.config("whole", &whole)));
    let (folder, disk) = (lab.path("run"), on_disk(&lab, "state"));
    for (number, (ranks, parallel, offload)) in [
        (2, "{ tp = 2 }", "'cpu'"),
        (4, "{ tp = 2, zero = 1 }", &*disk),
        (4, "{ tp = 2, pp = 2 }", &*disk),
    ]
    .into_iter()
    .enumerate()
    {
        let keys = [&BATCH[..], &[("parallel", parallel), ("optim.offload", offload)]].concat();
        let pause = Duration::from_millis(3 * number as u64);
        kill_after(ranks, &lab.config("run", &keys), &folder, 8 + 12 * number, pause);
    }
    let keys = [&BATCH[..], &[("parallel", "{ tp = 2 }"), ("optim.offload", &*disk)]].concat();
    assert_success(&run(2, &lab.config("run", &keys)));
    lab.assert_same("run", "whole");

    // First two tensor parallel ranks, then one: other sums, and so other bits.
    let (folder, disk) = (lab.path("other"), on_disk(&lab, "other-state"));
    let cut = [&BATCH[..], &[("parallel", "{ tp = 2 }"), ("optim.offload", &*disk)]].concat();
    kill_after(2, &lab.config("other", &cut), &folder, 8, Duration::ZERO);
    let keys = [&BATCH[..], &[("optim.offload", &*disk)]].concat();
    let output = run(1, &lab.config("other", &keys));
    assert_success(&output);
    let stderr = text(&output.stderr);
    assert!(stderr.contains("resuming from") && stderr.contains("not bit-identical"), "{stderr}");
    assert_eq!(names(&lab, "other-state"), ["rank-00000"]);
}

/// An encoder and a decoder, whose table of stderr three stages use.
#[test]
fn t5_ends_in_the_same_bits() {
    if !is_fused() {
        return println!("{NOT_FUSED}");
    }
    let lab = Lab::new();
    let common = [("eval.every", "0"), ("precision.dtype", "'bf16'")];
    assert_success(&train(&SPANS.config(&lab, "whole", &common)));
    let disk = on_disk(&lab, "state");
    for (name, ranks, parallel, offload) in
        [("sliced", 2, "{ zero = 1 }", "'cpu'"), ("cut", 2, "{ pp = 2 }", &*disk)]
    {
        let own = [("parallel", parallel), ("optim.offload", offload)];
        let keys = [&common[..], &own].concat();
        assert_success(&run(ranks, &SPANS.config(&lab, name, &keys)));
        lab.assert_same(name, "whole");
    }
}

/// Inputs of twelve layers are spilled until their backward pass: the run is killed, resumes with
/// another disk, and has the bits of a run with the inputs in memory. No file is left.
#[test]
fn layer_inputs_are_spilled_to_disk() {
    if !is_fused() {
        return println!("{NOT_FUSED}");
    }
    let lab = Lab::new();
    let size = [("model.layers", "12"), ("model.hidden", "32"), ("run.budget", "{ steps = 16 }")];
    let common = [&BATCH[..], &size].concat();
    assert_success(&train(&lab.config("whole", &common)));
    let spill = |place: &str, more: &str| {
        let disk = lab.path(place);
        let disk = disk.display();
        format!("{{ recompute.mode = 'full', activation_offload = 'nvme:{disk}', {more} }}")
    };
    create_folders(&lab, &["0", "1"]);
    let own = spill("{local_rank}", "schedule = 'gpipe'");
    let config = lab.config("run", &[&common[..], &[("parallel", &*own)]].concat());
    kill_after(2, &config, &lab.path("run"), 6, Duration::ZERO);
    let (shared, disk) = (spill("0", "pp = 2, schedule = 'gpipe'"), on_disk(&lab, "state"));
    let keys = [("parallel", &*shared), ("optim.offload", &*disk)];
    let output = run(2, &lab.config("run", &[&common[..], &keys].concat()));
    assert_success(&output);
    let stderr = text(&output.stderr);
    assert!(stderr.contains("offload: layer inputs are stored in nvme:"), "{stderr}");
    assert!(stderr.contains("resuming from"), "{stderr}");
    lab.assert_same("run", "whole");
    assert_eq!((names(&lab, "0"), names(&lab, "1")), (vec![], vec![]));

    let mut plan = trainer("plan", &config);
    let output = plan.args(["--ranks", "2", "--disk-per-s", "1GB"]).output().unwrap();
    assert_success(&output);
    let stdout = text(&output.stdout);
    assert!(stdout.contains("input I/O per step") && stdout.contains("s of disk time"), "{stdout}");
    let host = [("parallel", "{ recompute.mode = 'full', activation_offload = 'cpu' }")];
    let output = train(&lab.config("host", &host));
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    let stderr = text(&output.stderr);
    assert!(stderr.contains("computes on the CPU already has them there"), "{stderr}");
}

/// A missing folder is probably a disk that is not mounted: it is refused, and not created.
#[test]
fn an_unusable_offload_folder_is_reported() {
    let lab = Lab::new();
    std::fs::write(lab.path("file"), "no folder").unwrap();
    let spill = "{ recompute.mode = 'full', activation_offload = 'nvme:PLACE' }";
    for (key, value) in [("optim.offload", "'nvme:PLACE'"), ("parallel", spill)] {
        for (place, expected) in [
            ("absent", "absent: expected a folder, found none (hint: mount the disk"),
            ("absent/state", "absent/state: expected a folder, found none (hint: mount the disk"),
            ("file", "file: expected a folder, found a file"),
            ("file/below", "file/below"),
        ] {
            let value = value.replace("PLACE", lab.path(place).to_str().unwrap());
            let output = train(&lab.config("run", &[(key, &*value)]));
            let stderr = text(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{key}, {place}: {stderr}");
            assert!(stderr.contains(expected), "{key}, {place}: {stderr}");
        }
    }
    assert!(!lab.path("absent").exists());
}

#[test]
fn a_plan_reports_disk_traffic() {
    let lab = Lab::new();
    let mut plan = trainer("plan", &lab.config("run", &[("optim.offload", "'nvme:/scratch'")]));
    let output = plan.args(["--tokens-per-s", "1000", "--disk-per-s", "1GB"]).output().unwrap();
    assert_success(&output);
    assert!(text(&output.stdout).contains("read and written in nvme:/scratch"));
}
