//! Runs `feedline ckpt` as a user does, and checks its output and exit codes.

use std::path::Path;
use std::process::Command;

use crate::killed::dead;
use ckpt::{Blob, Checkpoints, Dtype, Group, TensorData};
use serde_json::{Value, json};
use storage::Key;
use storage::s3_server::{Fault, FaultRule, S3Server};

struct CommandOutput {
    code: i32,
    out: String,
    err: String,
}

impl CommandOutput {
    fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {}", self.err))
    }
}

fn feedline(args: &[&str]) -> CommandOutput {
    let mut command = Command::new(env!("CARGO_BIN_EXE_feedline"));
    let output = command.arg("ckpt").args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    CommandOutput {
        code: output.status.code().expect("it exits, no signal ends it"),
        out: text(output.stdout),
        err: text(output.stderr),
    }
}

/// Steps of two tensors and a blob; `change` is added to the last value of each.
fn save(folder: &str, step: u64, change: f32) {
    let steps = Checkpoints::open(storage::open_url(folder).unwrap(), Key::root());
    let mut values = [1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0];
    values[5] += change;
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let tensor = |group| TensorData {
        name: "wte.weight",
        group,
        dtype: Dtype::F32,
        shape: &[2, 3],
        bytes: &bytes,
    };
    let blobs = [Blob { name: "config.toml", bytes: b"[model]\nheads = 1\nvocab = 2\n" }];
    let tensors = [tensor(Group::Model), tensor(Group::ExpAvg)];
    steps.save(step, &tensors, &blobs, json!({ "samples_consumed": step * 8 })).unwrap();
}

fn folder_of(folder: &Path, name: &str) -> String {
    folder.join(name).to_str().unwrap().to_owned()
}

#[test]
fn steps_are_listed_inspected_and_verified() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder_of(folder.path(), "steps");
    save(&root, 10, 0.0);
    save(&root, 20, 0.0);
    let trash = folder.path().join("steps/.trash-step-000000000005-who");
    std::fs::create_dir(&trash).unwrap();
    // An unfinished upload takes space too.
    let upload = format!(".model.tmp-{}", storage::ProcessIdentity::new());
    std::fs::write(trash.join(upload), [0; 77]).unwrap();
    let listed = feedline(&["ls", &root, "--json"]).json();
    assert_eq!((&listed["newest"], &listed["steps"][0]["step"]), (&json!(20), &json!(10)));
    assert_eq!(listed["steps"][1]["samples_consumed"], 160);
    assert_eq!(listed["leftovers"][0]["kind"], "deletion");
    assert_eq!(listed["leftovers"][0]["bytes"], 77);
    let output = feedline(&["ls", &root]);
    assert!(output.out.contains("complete") && output.out.contains(".trash-"), "{}", output.out);

    let report = feedline(&["inspect", &root, "--json"]).json();
    assert_eq!((&report["step"], &report["tensors"][0]["shape"]), (&json!(20), &json!([2, 3])));
    let output = feedline(&["inspect", &root, "--name-has", "wte"]);
    assert!(output.out.contains("[2, 3]"), "{}", output.out);

    for verb in [&["verify", &root][..], &["verify", &root, "--quick"], &["scrub", &root]] {
        let output = feedline(verb);
        assert_eq!((output.code, output.out.matches("complete").count()), (0, 2), "{}", output.err);
    }
    let shard = format!("{root}/step-000000000020/model-00001-of-00001.safetensors");
    let mut bytes = std::fs::read(&shard).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&shard, bytes).unwrap();
    let output = feedline(&["verify", &root, "--json"]);
    assert_eq!(output.code, 1, "{}", output.err);
    assert_eq!(output.json()["steps"][1]["ok"], false);
    assert_eq!(feedline(&["scrub", &root, "--rate", "1GiB"]).code, 1);
    assert_eq!(feedline(&["verify", &root, "--quick"]).code, 0, "lengths are as they were");
    assert_eq!(feedline(&["verify", &folder_of(folder.path(), "none")]).code, 2);
}

#[test]
fn differences_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|name| folder_of(folder.path(), name));
    save(&a, 10, 0.0);
    save(&b, 10, 0.0);
    save(&b, 20, 0.25);
    let step = |step: u64| format!("{b}/step-{step:012}");
    let output = feedline(&["diff", &a, &step(10)]);
    assert_eq!((output.code, output.out.contains("same")), (0, true), "{}", output.err);
    assert_eq!(feedline(&["diff", &a, &step(10), "--read"]).code, 0);
    let output = feedline(&["diff", &a, &step(20), "--json"]);
    assert_eq!(output.code, 1, "{}", output.err);
    let diff = output.json();
    let first = &diff["tensors"][0];
    assert_eq!((&first["difference"], &first["max_abs"]), (&json!("values"), &json!(0.25)));
    assert_eq!((&first["first_index"], &first["elements_differ"]), (&json!([1, 2]), &json!(1)));
    assert_eq!(diff["blobs_equal"], 1);
    assert_eq!(feedline(&["diff", &a, "/nonexistent"]).code, 2);
}

#[test]
fn retain_deletes_old_steps_but_never_the_newest() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder_of(folder.path(), "steps");
    for step in [1, 2, 3] {
        save(&root, step, 0.0);
    }
    let dry = feedline(&["retain", &root, "--keep-last", "1", "--dry-run", "--json"]).json();
    assert_eq!((&dry["deleted"], &dry["kept"][0]["step"]), (&json!([1, 2]), &json!(3)));
    let dry = ["--keep-last", "1", "--keep-every", "2", "--verify", "--dry-run", "--json"];
    let dry = feedline(&[&["retain", root.as_str()], &dry[..]].concat()).json();
    assert_eq!((&dry["deleted"], &dry["kept"][0]["step"]), (&json!([1]), &json!(2)));
    let output = feedline(&["retain", &root, "--keep-last", "2", "--json"]);
    assert_eq!(output.json()["deleted"], json!([1]), "{}", output.err);
    let listed = feedline(&["ls", &root, "--json"]).json();
    assert_eq!(listed["steps"][1]["verified"], true, "it was read before any was deleted");
    assert_eq!(feedline(&["retain", &root, "--quick", "--verify"]).code, 2);
    assert_eq!(feedline(&["retain", &root, "--quick"]).code, 0);
    assert_eq!(feedline(&["retain", &root, "--keep-last", "0"]).code, 2);
    assert_eq!(feedline(&["ls", &root, "--json"]).json()["steps"][0]["step"], 2);
}

#[test]
fn steps_are_copied_to_another_store() {
    let folder = tempfile::tempdir().unwrap();
    let [near, far] = ["near", "far"].map(|name| folder_of(folder.path(), name));
    save(&near, 1, 0.0);
    save(&near, 2, 0.5);
    let dry = feedline(&["drain", &near, &far, "--dry-run", "--json"]).json();
    assert_eq!(dry["pending"], json!([2, 1]));
    let output = feedline(&["drain", &near, &far, "--json"]);
    assert_eq!((output.code, &output.json()["pending"]), (0, &json!([])), "{}", output.err);
    assert_eq!(feedline(&["diff", &near, &far, "--read"]).code, 0);
    assert_eq!(feedline(&["drain", &near, &far, "--rate", "0B"]).code, 2);
}

/// A drain that cannot copy fails: each of these was "nothing is pending", exit 0.
#[test]
fn drain_that_copies_nothing_fails_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let [near, far, empty] = ["near", "far", "empty"].map(|name| folder_of(folder.path(), name));
    std::fs::create_dir(&empty).unwrap();
    save(&near, 1, 0.0);
    save(&near, 2, 0.5);
    std::os::unix::fs::symlink(&near, folder.path().join("link")).unwrap();
    let refused = [
        (folder_of(folder.path(), "absent"), far.clone(), "found nothing there"),
        (empty, far.clone(), "found none in it"),
        (format!("{near}/step-000000000002"), far.clone(), "found a step (hint"),
        (near.clone(), near.clone(), "expected two folders, found one"),
        (near.clone(), folder_of(folder.path(), "link"), "expected two folders, found one"),
        (near.clone(), format!("{near}/step-000000000002"), "found a step (hint"),
    ];
    for (from, to, piece) in refused {
        for dry_run in [&[][..], &["--dry-run"]] {
            let output = feedline(&[&["drain", from.as_str(), to.as_str()], dry_run].concat());
            assert_eq!(output.code, 2, "{from} {to}: {}", output.out);
            assert!(output.err.contains(piece), "{from} {to}: {}", output.err);
        }
    }
    assert!(!folder.path().join("far").exists());

    // The newest is damaged: the older one is copied, and the newest is named.
    let shard = format!("{near}/step-000000000002/model-00001-of-00001.safetensors");
    let whole = std::fs::read(&shard).unwrap();
    std::fs::write(&shard, &whole[..whole.len() - 1]).unwrap();
    let output = feedline(&["drain", &near, &far]);
    assert_eq!(output.code, 1, "{}", output.err);
    assert!(
        output.out.contains("FAILED  step 2") && output.out.contains("step 1:"),
        "{}",
        output.out
    );
    assert!(!output.out.contains("nothing is pending"), "{}", output.out);
    let output = feedline(&["drain", &near, &far, "--dry-run", "--json"]);
    assert_eq!(
        (output.code, &output.json()["failed"][0]["step"]),
        (1, &json!(2)),
        "{}",
        output.err
    );
    // A step that the other folder has is not missing there, even if the source is damaged.
    std::fs::write(&shard, whole).unwrap();
    assert_eq!(feedline(&["drain", &near, &far]).code, 0);
    std::fs::write(&shard, b"").unwrap();
    assert_eq!(feedline(&["drain", &near, &far]).code, 0);
}

/// A lease and a pin are files, not folders: every listing during a run failed on them.
#[test]
fn leases_and_pins_are_listed() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder_of(folder.path(), "steps");
    save(&root, 10, 0.0);
    let steps = Checkpoints::open(storage::open_url(&root).unwrap(), Key::root());
    let (lease, pin) = (steps.lock().unwrap(), steps.pin(10).unwrap());
    let kinds = |verb: &str| {
        let output = feedline(&[verb, &root, "--json"]);
        assert_eq!(output.code, 0, "{verb}: {}{}", output.out, output.err);
        let report = output.json();
        let left = report["leftovers"].as_array().unwrap().iter();
        let kind = |left: &Value| {
            let text = |key: &str| left[key].as_str().unwrap().to_owned();
            (text("kind"), text("owner_is"), left["bytes"].as_u64().unwrap() > 0)
        };
        left.map(kind).collect::<Vec<_>>()
    };
    let held = |kind: &str, has_text| (kind.to_owned(), "alive".to_owned(), has_text);
    for verb in ["ls", "doctor"] {
        assert_eq!(kinds(verb), [held("lease", true), held("pin", false)], "{verb}");
        assert_eq!(feedline(&[verb, &root]).code, 0);
    }
    drop((lease, pin));
    // After a kill they stay.
    let Some(dead) = dead() else { return };
    std::fs::write(format!("{root}/.lease-{dead}"), "a process writes here\n").unwrap();
    std::fs::write(format!("{root}/.pin-step-000000000010-{dead}"), "").unwrap();
    let left = |kind: &str, has_text| (kind.to_owned(), "dead".to_owned(), has_text);
    for verb in ["ls", "doctor"] {
        assert_eq!(kinds(verb), [left("lease", true), left("pin", false)], "{verb}");
    }
}

/// Every command that writes steps compresses and decompresses them, and all others read them.
#[test]
fn steps_are_compressed() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder_of(folder.path(), name);
    let [near, far, packed, plain] = ["near", "far", "packed", "plain"].map(path);
    save(&near, 1, 0.0);
    save(&near, 2, 0.5);
    for command in [
        &["drain", near.as_str(), &far, "--compress"][..],
        &["reshard", &near, &packed, "--compress"],
        &["reshard", &far, &plain],
    ] {
        let output = feedline(command);
        assert_eq!(output.code, 0, "{command:?}: {}", output.err);
    }
    for other in [&far, &packed, &plain] {
        for read in [&[][..], &["--read"]] {
            let output = feedline(&[&["diff", &near, other], read].concat());
            assert_eq!(output.code, 0, "{}{}", output.out, output.err);
        }
        for verb in ["verify", "scrub"] {
            let output = feedline(&[verb, other]);
            assert_eq!(output.code, 0, "{}", output.err);
        }
    }
    let files = |root: &str, suffix: &str| {
        let step = std::fs::read_dir(format!("{root}/step-000000000002")).unwrap();
        let names = step.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.ends_with(suffix)).count()
    };
    assert_eq!([files(&far, ".planes"), files(&far, ".safetensors")], [2, 0]);
    assert_eq!([files(&packed, ".planes"), files(&plain, ".planes")], [2, 0]);
    let output = feedline(&["export", &packed, &path("hf")]);
    assert_eq!(output.code, 0, "{}", output.err);
    let output = feedline(&["import", &path("hf"), &path("in"), "--from", "hf", "--compress"]);
    assert_eq!(output.code, 0, "{}", output.err);
    let listed = feedline(&["ls", &far, "--json"]).json();
    assert_eq!(listed["steps"][1]["verified"], true, "verify records it");
    assert_eq!(listed["leftovers"], json!([]));
    let report = feedline(&["inspect", &packed, "--json"]).json();
    assert!(report["tensors"][0]["stored_bytes"].as_u64().unwrap() > 0, "{report}");
}

/// Steps are exported to safetensors and imported again, and rewritten: the tensors stay the same,
/// whatever the files.
#[test]
fn steps_are_converted() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder_of(folder.path(), name);
    save(&path("steps"), 10, 0.5);
    let output = feedline(&["export", &path("steps"), &path("hf"), "--json"]);
    assert_eq!((output.code, &output.json()["tensors"]), (0, &json!(1)), "{}", output.err);
    assert_eq!(feedline(&["export", &path("steps"), &path("hf")]).code, 2, "it exists");
    let back = path("back");
    let output = feedline(&["import", &path("hf"), &back, "--from", "hf", "--step", "10"]);
    assert_eq!(output.code, 0, "{}", output.err);
    let rewritten = path("rewritten");
    let output = feedline(&["reshard", &path("steps"), &rewritten, "--without-optimizer"]);
    assert_eq!(output.code, 0, "{}", output.err);
    let output = feedline(&["diff", &back, &rewritten, "--read", "--json"]).json();
    assert_eq!((&output["tensors"], &output["tensors_equal"]), (&json!([]), &json!(1)));

    let missing =
        [(&path("steps"), &rewritten, "only_in_a"), (&rewritten, &path("steps"), "only_in_b")];
    for (a, b, expected) in missing {
        let output = feedline(&["diff", a, b, "--json"]);
        let report = &output.json()["tensors"][0];
        assert_eq!((output.code, &report["difference"]), (1, &json!(expected)), "{}", output.err);
        assert_eq!((&report["group"], &report["name"]), (&json!("exp_avg"), &json!("wte.weight")));
    }

    let output = feedline(&["export", &path("steps"), &path("bf16"), "--dtype", "bf16"]);
    assert_eq!(output.code, 0, "{}", output.err);
    let bytes = std::fs::read(folder.path().join("bf16/model.safetensors")).unwrap();
    assert_eq!(bytes[bytes.len() - 2..], [0xd0, 0x40], "6.5");

    // In an unknown model it is not known which tensors have a row for each token.
    let output = feedline(&["export", &path("steps"), &path("words"), "--vocab-size", "2"]);
    assert_eq!(output.code, 2, "{}", output.out);
    assert!(output.err.contains("cannot use --vocab-size with "), "{}", output.err);
    assert!(!folder.path().join("words").exists());
}

/// A bucket has no atomic folder rename, which is not a fault. If it does not respond, that is not
/// damage of a step.
#[test]
fn a_bucket_is_examined_and_verified() {
    let server = S3Server::start().unwrap();
    let url = server.url("steps");
    save(&url, 10, 0.0);
    let output = feedline(&["doctor", &url, "--json"]);
    assert_eq!(output.code, 0, "{}{}", output.out, output.err);
    let report = output.json()["probes"][0].clone();
    let finding = report["finding"].as_str().unwrap();
    assert!(report["ok"] == true && finding.contains("its commit object"), "{report}");

    let url = url + "&tries=2&hedge=off";
    assert_eq!(feedline(&["verify", &url]).code, 0);
    let faults = [(Fault::Denied, 2, "access denied"), (Fault::WrongByte, 1, "DAMAGED")];
    for (fault, code, expected) in faults {
        server.inject(FaultRule::every(1, fault).of("GET").to("model-00001"));
        for verb in ["verify", "scrub"] {
            let output = feedline(&[verb, &url]);
            let report = format!("{}{}", output.out, output.err);
            assert_eq!(output.code, code, "{verb}: {report}");
            assert!(
                report.contains(expected) && report.contains("model-00001"),
                "{verb}: {report}"
            );
        }
        server.heal();
    }
}

#[test]
fn a_folder_is_examined() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder_of(folder.path(), "steps");
    save(&root, 10, 0.0);
    let output = feedline(&["doctor", &root, "--json"]);
    assert_eq!(output.code, 0, "{}{}", output.out, output.err);
    let report = output.json();
    assert!(
        report["probes"].as_array().unwrap().iter().all(|probe| probe["ok"] == true),
        "{report}"
    );
    assert_eq!(report["steps"], 1);
    for entry in std::fs::read_dir(folder.path().join("steps")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(!name.contains("doctor"), "{name} is left");
    }
}
