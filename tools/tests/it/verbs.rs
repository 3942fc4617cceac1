//! Every command on inputs that are absent, empty, of another kind, damaged, read-only or full:
//! none reports something as done that was not.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use ckpt::{Blob, Checkpoints, Dtype, Group, TensorData};
use serde_json::json;
use storage::Key;

/// The arguments, the exit code, and a piece of the output on either stream.
type Row = (&'static str, i32, &'static str);

/// A folder with intact and damaged datasets and checkpoints, an empty folder and a file.
fn lab() -> tempfile::TempDir {
    let lab = tempfile::tempdir().unwrap();
    let path = |name: &str| lab.path().join(name);
    fs::create_dir(path("empty")).unwrap();
    fs::write(path("file"), "a file\n").unwrap();
    let line = |n: usize| json!({ "text": "a few words ".repeat(1 + n % 5) }).to_string() + "\n";
    fs::write(path("in.jsonl"), (0..20).map(line).collect::<String>()).unwrap();
    let text = |name: &str| path(name).to_str().unwrap().to_owned();
    let options = preprocess::PreprocessOptions::new(vec![text("in.jsonl")], text("tok"));
    preprocess::run(&options, &mut |_| {}).unwrap();
    for suffix in ["bin", "idx"] {
        let file = |name: &str| path(&format!("{name}.{suffix}"));
        fs::copy(file("tok_text_document"), file("plain")).unwrap();
        let bytes = fs::read(file("plain")).unwrap();
        fs::write(file("cut"), &bytes[..bytes.len() - 2]).unwrap();
    }
    fs::copy(path("plain.idx"), path("half.idx")).unwrap();
    steps(&path("run/ckpt"), &[10, 20]);
    steps(&path("damaged"), &[10, 20]);
    steps(&path("broken"), &[10]);
    for shard in ["damaged/step-000000000020", "broken/step-000000000010"] {
        fs::write(path(shard).join("model-00001-of-00001.safetensors"), b"short").unwrap();
    }
    lab
}

fn steps(folder: &Path, all: &[u64]) {
    let store = storage::open_url(folder.to_str().unwrap()).unwrap();
    let checkpoints = Checkpoints::open(store, Key::root());
    let bytes = [7; 24];
    for &step in all {
        let (dtype, group) = (Dtype::F32, Group::Model);
        let name = "wte.weight";
        let tensor = TensorData { name, group, dtype, shape: &[2, 3], bytes: &bytes };
        let blobs = [Blob { name: "config.toml", bytes: b"[model]\nheads = 1\nvocab = 2\n" }];
        checkpoints.save(step, &[tensor], &blobs, json!({ "samples_consumed": step })).unwrap();
    }
}

fn printed(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}

fn check(lab: &Path, command: impl Fn() -> Command, rows: &[Row]) {
    let mut wrong = Vec::new();
    for &(args, code, piece) in rows {
        let output = command().current_dir(lab).args(args.split_whitespace()).output().unwrap();
        let printed = printed(&output);
        if output.status.code() != Some(code) || !printed.contains(piece) {
            let status = output.status;
            wrong.push(format!("{args}: {status}, expected {code} and {piece:?}: {printed}"));
        }
        let left = names_of_output(lab);
        if !left.is_empty() {
            wrong.push(format!("{args}: left {left:?}"));
            break;
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The outputs of commands, and their drafts.
fn names_of_output(lab: &Path) -> Vec<String> {
    let names = fs::read_dir(lab).unwrap().map(|entry| entry.unwrap().file_name());
    let names = names.map(|name| name.into_string().unwrap());
    let is_output = |name: &String| name == "absent" || name.trim_matches('.').starts_with("out");
    names.filter(is_output).collect()
}

fn feedline() -> Command {
    Command::new(env!("CARGO_BIN_EXE_feedline"))
}

/// Writes to files fail from the first byte on, as on a full disk: output to a pipe does not.
fn without_space() -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' XFSZ; ulimit -f 0; exec \"$0\" \"$@\""]);
    command.arg(env!("CARGO_BIN_EXE_feedline"));
    command
}

const ABSENT: &[Row] = &[
    ("inspect absent", 2, "absent"),
    ("check absent", 2, "absent"),
    ("convert absent out", 2, "absent"),
    ("merge --input absent --out out", 2, "cannot merge absent"),
    ("split absent --split 8,1,1 --out out", 2, "absent.idx"),
    ("repair absent --out out", 2, "absent.idx"),
    ("index build absent --seq-length 8", 2, "absent.idx"),
    ("materialize absent --seq-length 8 --out out", 2, "absent.idx"),
    ("samples absent --seq-length 8", 2, "absent.idx"),
    ("samples absent.toml --show", 2, "absent.toml"),
    ("clean --json-in absent --out out", 2, "absent"),
    ("doctor absent.toml", 2, "absent.toml"),
    ("bench absent/deep", 2, "absent"),
    ("ckpt bench absent", 2, "absent: no such folder"),
    ("offload bench absent", 2, "absent: no such folder"),
    ("stripe get absent", 2, "absent"),
    ("offload ls absent", 2, "cannot list absent"),
    ("ckpt ls absent", 2, "cannot list absent: expected a folder with steps"),
    ("ckpt inspect absent", 2, "absent"),
    ("ckpt verify absent", 2, "absent"),
    ("ckpt scrub absent", 2, "absent"),
    ("ckpt diff absent run/ckpt", 2, "absent"),
    ("ckpt diff run/ckpt absent", 2, "absent"),
    ("ckpt export absent out", 2, "absent"),
    ("ckpt import absent out --from hf", 2, "absent"),
    ("ckpt reshard absent out", 2, "absent"),
    ("ckpt retain absent", 2, "found nothing there"),
    ("ckpt drain absent out", 2, "cannot drain absent"),
];

const EMPTY: &[Row] = &[
    ("inspect empty", 2, "empty"),
    ("check empty", 2, "empty"),
    ("convert empty out", 2, "empty"),
    ("merge --input empty --out out", 2, "cannot merge empty"),
    ("index build empty --seq-length 8", 2, "empty.idx"),
    ("samples empty --seq-length 8", 2, "empty.idx"),
    ("ckpt ls empty", 0, "no step"),
    ("ckpt inspect empty", 2, "empty"),
    ("ckpt verify empty", 2, "empty"),
    ("ckpt scrub empty", 2, "empty"),
    ("ckpt diff empty run/ckpt", 2, "empty"),
    ("ckpt export empty out", 2, "empty"),
    ("ckpt import empty out --from hf", 2, "empty"),
    ("ckpt reshard empty out", 2, "empty"),
    ("ckpt retain empty", 2, "found none in it"),
    ("ckpt drain empty out", 2, "found none in it"),
    ("offload ls empty", 0, "no offloaded state"),
];

const OTHER_KIND: &[Row] = &[
    ("inspect file", 2, "file"),
    ("check file", 2, "file"),
    ("convert file out", 2, "file"),
    ("merge --input file --out out", 2, "file"),
    ("merge --input run/ckpt --out out", 2, "found none"),
    ("index build run/ckpt --seq-length 8", 2, "ckpt.idx"),
    ("samples run/ckpt --seq-length 8", 2, "ckpt.idx"),
    ("clean --json-in run --out out", 2, "run"),
    ("bench file", 2, "expected a folder"),
    ("ckpt bench file", 2, "expected a folder"),
    ("offload bench file", 2, "expected a folder"),
    ("offload ls file", 2, "found none"),
    ("ckpt ls file", 2, "found a file"),
    ("ckpt ls run/ckpt/step-000000000010", 2, "found a step (hint"),
    ("ckpt ls run", 2, "run/ckpt)"),
    ("ckpt ls plain", 2, "found nothing there"),
    ("ckpt inspect file", 2, "file"),
    ("ckpt inspect plain", 2, "token files"),
    ("ckpt inspect run", 2, "run/ckpt)"),
    ("ckpt verify plain", 2, "token files"),
    ("ckpt verify run", 2, "run/ckpt)"),
    ("ckpt scrub plain", 2, "token files"),
    ("ckpt diff plain run/ckpt", 2, "token files"),
    ("ckpt export plain out", 2, "token files"),
    ("ckpt import run/ckpt out --from hf", 2, "ckpt"),
    ("ckpt reshard plain out", 2, "token files"),
    ("ckpt reshard run/ckpt run/ckpt/step-000000000010", 2, "found a step (hint"),
    ("ckpt retain file", 2, "found a file"),
    ("ckpt retain run", 2, "run/ckpt)"),
    ("ckpt retain run/ckpt/step-000000000010", 2, "found a step (hint"),
    ("ckpt drain run/ckpt run/ckpt", 2, "found one"),
    ("ckpt drain run/ckpt run/../run/ckpt/", 2, "found one"),
    ("ckpt drain run/ckpt/step-000000000010 out", 2, "found a step (hint"),
    ("ckpt drain run out", 2, "run/ckpt)"),
    ("ckpt drain run/ckpt file", 2, "found a file"),
    ("ckpt doctor file", 2, "found a file"),
    ("ckpt doctor run/ckpt/step-000000000010", 2, "found a step (hint"),
];

const DAMAGED: &[Row] = &[
    ("inspect cut", 2, "cut"),
    ("check cut", 1, "DAMAGED"),
    ("check half", 1, "half.bin"),
    ("convert cut out", 2, "cut"),
    ("convert half out", 2, "half"),
    ("merge --input cut plain --out out", 2, "cut"),
    ("split cut --split 8,1,1 --out out", 2, "cut"),
    ("index build cut --seq-length 8", 2, "cut"),
    ("index build half --seq-length 8", 2, "the .idx alone"),
    ("materialize cut --seq-length 8 --out out", 2, "cut"),
    ("samples cut --seq-length 8", 2, "cut"),
    ("check damaged", 1, "DAMAGED"),
    ("ckpt ls damaged", 0, "5 bytes"),
    ("ckpt verify damaged", 1, "DAMAGED"),
    ("ckpt verify damaged --quick", 1, "DAMAGED"),
    ("ckpt scrub damaged", 1, "DAMAGED"),
    ("ckpt verify damaged/step-000000000020", 1, "DAMAGED"),
    ("ckpt inspect damaged/step-000000000020", 2, "5 bytes"),
    ("ckpt export damaged/step-000000000020 out", 2, "5 bytes"),
    ("ckpt reshard damaged/step-000000000020 out", 2, "5 bytes"),
    ("ckpt diff damaged/step-000000000020 run/ckpt", 2, "5 bytes"),
    ("ckpt drain damaged out --dry-run", 1, "FAILED  step 20"),
    ("ckpt drain broken run/other", 1, "FAILED  step 10"),
    ("ckpt retain damaged --dry-run", 0, "not touched: 20"),
    ("ckpt retain broken", 2, "expected a complete step"),
    ("ckpt inspect broken", 2, "expected a complete step, found none"),
    ("ckpt export broken out", 2, "expected a complete step, found none"),
];

/// No user can create files in `/proc`, not even root.
const READ_ONLY: &[Row] = &[
    ("convert plain /proc/out --to paddle", 2, "/proc/.out"),
    ("merge --input plain --out /proc/out", 2, "/proc/.out"),
    ("split plain --split 8,1,1 --out /proc/out", 2, "/proc/.out"),
    ("repair plain --out /proc/out", 2, "/proc"),
    ("index build plain --seq-length 8 --data-cache-path /proc/out", 2, "cannot save the sample"),
    ("index build plain plain --seq-length 8 --data-cache-path /proc/out", 2, "cannot save"),
    (
        "index build 1 plain --samples 9 --seq-length 8 --data-cache-path /proc/out",
        2,
        "cannot save",
    ),
    ("materialize plain --seq-length 8 --out /proc/out", 2, "/proc/out"),
    (
        "materialize plain --seq-length 8 --out out --data-cache-path /proc/out",
        2,
        "cannot save the sample order",
    ),
    ("samples plain --seq-length 8 --data-cache-path /proc/out", 2, "cannot save the sample order"),
    ("clean --json-in in.jsonl --out /proc/out", 2, "/proc/out"),
    ("check /proc/plain", 2, "/proc/plain"),
    ("ckpt export run/ckpt /proc/out", 2, "/proc"),
    ("ckpt reshard run/ckpt /proc/out", 2, "/proc/out"),
    ("ckpt drain run/ckpt /proc/out", 2, "/proc/out"),
    ("ckpt doctor /proc/out", 1, "/proc/out"),
    ("bench /proc", 2, "/proc"),
    ("ckpt bench /proc --bytes 1MB --rounds 1", 2, "/proc/.bench-ckpt"),
    ("offload bench /proc --parameters 1000 --rounds 1", 2, "/proc"),
    ("stripe set /proc/out --count 4", 2, "/proc"),
];

const FULL: &[Row] = &[
    ("convert plain out --to paddle", 2, "File too large"),
    ("merge --input plain tok_text_document --out out", 2, "File too large"),
    ("split plain --split 8,1,1 --out out", 2, "File too large"),
    ("repair half --out out", 2, "File too large"),
    ("index build plain --seq-length 8", 2, "cannot save the sample order"),
    ("index build plain plain --seq-length 8 --data-cache-path out", 2, "cannot save"),
    ("materialize plain --seq-length 8 --out out", 2, "File too large"),
    ("samples plain --seq-length 8 --data-cache-path out", 2, "cannot save the sample order"),
    ("clean --json-in in.jsonl --out out", 2, "File too large"),
    ("check plain --add-checksums", 2, "File too large"),
    ("ckpt export run/ckpt out", 2, "File too large"),
    ("ckpt reshard run/ckpt out", 2, "File too large"),
    ("ckpt drain run/ckpt out", 2, "File too large"),
    ("ckpt doctor run/ckpt", 1, "File too large"),
];

#[test]
fn absent() {
    check(lab().path(), feedline, ABSENT);
}

#[test]
fn empty() {
    check(lab().path(), feedline, EMPTY);
}

#[test]
fn of_another_kind() {
    check(lab().path(), feedline, OTHER_KIND);
}

#[test]
fn damaged() {
    check(lab().path(), feedline, DAMAGED);
}

#[test]
fn read_only() {
    check(lab().path(), feedline, READ_ONLY);
}

#[test]
fn full() {
    check(lab().path(), without_space, FULL);
}

/// A report that cannot be written is an error.
#[test]
fn unwritable_output_is_an_error() {
    let lab = lab();
    for args in [
        "inspect plain",
        "inspect plain --json",
        "check plain",
        "ckpt ls run/ckpt",
        "ckpt verify run/ckpt --json",
        "samples plain --seq-length 8",
        "completions bash",
    ] {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let mut command = feedline();
        command.current_dir(lab.path()).args(args.split_whitespace()).stdout(full);
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args}: {}", printed(&output));
        assert!(
            printed(&output).contains("No space left on device"),
            "{args}: {}",
            printed(&output)
        );
    }
}

/// Names that are nearly right: the message has the right one.
#[test]
fn the_right_name_is_in_the_hint() {
    let lab = lab();
    let rows: &[Row] = &[
        ("samples tok --seq-length 8", 2, "(hint: there is ./tok_text_document)"),
        ("index build tok --seq-length 8", 2, "(hint: there is ./tok_text_document)"),
        ("materialize tok --seq-length 8 --out out", 2, "there is ./tok_text_document"),
        ("split tok --split 8,1,1 --out out", 2, "there is ./tok_text_document"),
        ("inspect tok", 2, "there is ./tok_text_document"),
        ("check tok", 2, "there is ./tok_text_document"),
        ("convert tok out", 2, "there is ./tok_text_document"),
        ("merge --input tok --out out", 2, "there is ./tok_text_document"),
        ("samples plain.bin --seq-length 8", 2, "(hint: there is ./plain)"),
        ("index build plain.idx --seq-length 8", 2, "(hint: there is ./plain)"),
        ("inspect plain.bin", 0, "documents"),
        ("check plain.idx", 0, "complete"),
        ("samples run/../plain --seq-length 8 --samples 2", 0, "samples"),
        // A value of --samples is one argument, and what follows is a prefix.
        ("index build --seq-length 8 --split 80,10,10 --samples 3,1,1 plain", 0, "train"),
        ("index build plain --seq-length 8 --samples 1,1,1,1", 2, "one to three numbers"),
    ];
    check(lab.path(), feedline, rows);
}

/// Cleaned lines are retained if the report cannot be written: they may be hours of work.
#[test]
fn cleaned_lines_stay_without_their_report() {
    let lab = lab();
    let mut command = feedline();
    let args = "clean --json-in in.jsonl --out out --report /proc/report";
    command.current_dir(lab.path()).args(args.split_whitespace());
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", printed(&output));
    assert!(printed(&output).contains("/proc/report"), "{}", printed(&output));
    assert_eq!(names_of_output(lab.path()), ["out.jsonl"]);
}

/// Megatron's merge tool accepts the current folder.
#[test]
fn folders_named_by_dots_are_accepted() {
    let lab = lab();
    let folder = lab.path().join("shards");
    fs::create_dir(&folder).unwrap();
    for suffix in ["bin", "idx"] {
        for name in ["a", "b"] {
            let copy = folder.join(format!("{name}.{suffix}"));
            fs::copy(lab.path().join(format!("plain.{suffix}")), copy).unwrap();
        }
    }
    for (nth, input) in [".", "./", "../shards/.", "../shards/../shards"].iter().enumerate() {
        let out = format!("../merged-{nth}");
        let mut command = feedline();
        command.current_dir(&folder).args(["merge", "--input", input, "--out", &out]);
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{input}: {}", printed(&output));
        let bytes = |name: &str| fs::metadata(folder.join(name)).unwrap().len();
        assert_eq!(bytes(&format!("{out}.bin")), 2 * bytes("a.bin"), "{input}");
    }
    let mut command = feedline();
    command.current_dir(lab.path().join("run/ckpt")).args(["ckpt", "verify", "."]);
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", printed(&output));
}
