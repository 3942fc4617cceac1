//! An optimizer whose state lies in the host's memory or on a disk: runs end in the bits of those
//! that keep it beside their weights, killed and resumed wherever the state lay before.

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

/// `optim.offload`, on a disk in a folder of the lab.
fn on_disk(lab: &Lab, folder: &str) -> String {
    format!("'nvme:{}'", lab.path(folder).display())
}

#[test]
fn a_run_ends_in_the_same_bits_wherever_its_state_lies() {
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
/// disk, on the same disk in another layout, beside the weights.
#[test]
fn a_run_goes_on_wherever_its_state_lay() {
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
    assert_eq!(names(&lab, "state"), ["rank-00000", "rank-00001"], "those of four ranks are gone");
    let output = run(1, &lab.config("run", &BATCH));
    assert_success(&output);
    assert!(text(&output.stderr).contains("going on from"), "{}", text(&output.stderr));
    lab.assert_same("run", "whole");
}

fn names(lab: &Lab, folder: &str) -> Vec<String> {
    let all = std::fs::read_dir(lab.path(folder)).unwrap();
    let mut all: Vec<String> =
        all.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    all.sort();
    all
}

/// Over two disks, of which each rank has one for itself: the same bits. Another run's folder on
/// them is nobody's business, and what a rank leaves goes when it does.
#[test]
fn a_run_over_several_disks_ends_in_the_same_bits() {
    if !is_fused() {
        return println!("{NOT_FUSED}");
    }
    let lab = Lab::new();
    assert_success(&train(&lab.config("whole", &BATCH)));
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

/// Matrices cut among ranks, with rows of padding that no state has: the same bits as without, also
/// where the run goes on cut otherwise besides. With another number of ranks to a matrix the bits
/// are others, and it goes on all the same.
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

    // Cut among two ranks, then whole: other sums, and so other bits.
    let (folder, disk) = (lab.path("other"), on_disk(&lab, "other-state"));
    let cut = [&BATCH[..], &[("parallel", "{ tp = 2 }"), ("optim.offload", &*disk)]].concat();
    kill_after(2, &lab.config("other", &cut), &folder, 8, Duration::ZERO);
    let keys = [&BATCH[..], &[("optim.offload", &*disk)]].concat();
    let output = run(1, &lab.config("other", &keys));
    assert_success(&output);
    let words = text(&output.stderr);
    assert!(words.contains("going on from") && words.contains("not bit for bit"), "{words}");
    assert_eq!(names(&lab, "other-state"), ["rank-00000"]);
}

/// An encoder and a decoder, whose table of words three stages use.
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

/// Inputs of layers on the way to their way back, of twelve layers: killed, gone on with elsewhere,
/// and in the bits of a run that has them in memory. No name is left.
#[test]
fn inputs_of_layers_wait_on_a_disk() {
    if !is_fused() {
        return println!("{NOT_FUSED}");
    }
    let lab = Lab::new();
    let size = [("model.layers", "12"), ("model.hidden", "32"), ("run.budget", "{ steps = 16 }")];
    let common = [&BATCH[..], &size].concat();
    assert_success(&train(&lab.config("whole", &common)));
    let away = |place: &str, more: &str| {
        let disk = lab.path(place);
        let disk = disk.display();
        format!("{{ recompute.mode = 'full', activation_offload = 'nvme:{disk}', {more} }}")
    };
    let own = away("{local_rank}", "schedule = 'gpipe'");
    let config = lab.config("run", &[&common[..], &[("parallel", &*own)]].concat());
    kill_after(2, &config, &lab.path("run"), 6, Duration::ZERO);
    let (shared, disk) = (away("0", "pp = 2, schedule = 'gpipe'"), on_disk(&lab, "state"));
    let keys = [("parallel", &*shared), ("optim.offload", &*disk)];
    let output = run(2, &lab.config("run", &[&common[..], &keys].concat()));
    assert_success(&output);
    let words = text(&output.stderr);
    assert!(words.contains("inputs of layers wait in nvme:"), "{words}");
    assert!(words.contains("going on from"), "{words}");
    lab.assert_same("run", "whole");
    assert_eq!((names(&lab, "0"), names(&lab, "1")), (vec![], vec![]));

    let mut plan = trainer("plan", &config);
    let output = plan.args(["--ranks", "2", "--disk-per-s", "1GB"]).output().unwrap();
    assert_success(&output);
    let told = text(&output.stdout);
    assert!(told.contains("a step moves inputs") && told.contains("s of the disk"), "{told}");
    let host = [("parallel", "{ recompute.mode = 'full', activation_offload = 'cpu' }")];
    let output = train(&lab.config("host", &host));
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    let told = text(&output.stderr);
    assert!(told.contains("computes on the CPU has them there already"), "{told}");
}

/// A state that another run holds is not touched, and one whose folder cannot be is told.
#[test]
fn a_state_that_cannot_be_kept_is_told() {
    let lab = Lab::new();
    let file = lab.path("file");
    std::fs::write(&file, "no folder").unwrap();
    let offload = format!("'nvme:{}/below'", file.display());
    let output = train(&lab.config("run", &[("optim.offload", &offload)]));
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("file/below"), "{}", text(&output.stderr));
}

#[test]
fn a_plan_tells_what_the_disk_has_to_do() {
    let lab = Lab::new();
    let mut plan = trainer("plan", &lab.config("run", &[("optim.offload", "'nvme:/scratch'")]));
    let output = plan.args(["--tokens-per-s", "1000", "--disk-per-s", "1GB"]).output().unwrap();
    assert_success(&output);
    assert!(text(&output.stdout).contains("read and written of nvme:/scratch"));
}
