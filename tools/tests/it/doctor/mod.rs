//! Runs `feedline doctor` and `feedline stripe` as a user does, and checks the findings for given
//! machines, mounts and buckets.

mod interrupted;
mod services;

use crate::fuse;
use crate::killed::dead;
use std::path::Path;
use std::process::Command;
use std::thread;

use ckpt::offload::{self, Folder, Offload, OffloadOptions};
use serde_json::Value;
use storage::Key;
use storage::probe::{BucketInfo, HostInfo, MountInfo};
use storage::s3_server::{Conditions, Fault, FaultRule, S3Server};
use storage::testing::fault_store::Mount;
use tools::doctor::{Finding, Purpose, Severity, of_bucket, of_machine, of_mount};

struct CommandOutput {
    code: i32,
    out: String,
    err: String,
}

fn feedline(args: &[&str]) -> CommandOutput {
    let output = Command::new(env!("CARGO_BIN_EXE_feedline")).args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    CommandOutput {
        code: output.status.code().expect("it exits, no signal ends it"),
        out: text(output.stdout),
        err: text(output.stderr),
    }
}

/// Exit code and findings of a run, without those of this machine.
struct Report {
    code: i32,
    findings: Vec<Value>,
}

fn doctor(args: &[&str]) -> Report {
    let mut all = vec!["doctor", "--json"];
    all.extend(args);
    let output = feedline(&all);
    let value: Value = serde_json::from_str(&output.out)
        .unwrap_or_else(|error| panic!("{error}: {} {}", output.out, output.err));
    let ours = |finding: &&Value| finding["place"] != "this machine";
    let findings: Vec<Value> =
        value["findings"].as_array().unwrap().iter().filter(ours).cloned().collect();
    Report { code: output.code, findings }
}

impl Report {
    /// Severity and text of a check.
    fn of(&self, what: &str) -> (&str, &str) {
        let is_it = |finding: &&Value| finding["what"] == what;
        let found = self.findings.iter().find(is_it);
        let found = found.unwrap_or_else(|| panic!("nothing of {what}: {:#?}", self.findings));
        (found["severity"].as_str().unwrap(), found["found"].as_str().unwrap())
    }

    fn worst(&self) -> Vec<&str> {
        let bad =
            |finding: &&Value| finding["severity"] == "hurts" || finding["severity"] == "breaks";
        self.findings.iter().filter(bad).map(|finding| finding["what"].as_str().unwrap()).collect()
    }
}

fn is_empty(folder: &Path) -> bool {
    std::fs::read_dir(folder).unwrap().next().is_none()
}

#[test]
fn folder_is_checked_and_left_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let report = doctor(&[folder.path().to_str().unwrap()]);
    let kind = MountInfo::of(folder.path()).unwrap().file_system;
    let is_known = ["ext4", "xfs", "btrfs", "f2fs", "tmpfs", "overlay"].contains(&kind.as_str());
    if !is_known {
        eprintln!("SKIPPED: whether {kind} behaves like a disk is not known");
    }
    for what in ["new files", "new names", "locks", "direct IO", "clocks"] {
        let finding = report.of(what);
        assert!(!is_known || finding.0 == "fine", "{finding:?}");
    }
    assert!(report.of("a durable file").1.contains("ms"));
    assert!(is_empty(folder.path()), "something is left");
    // The text has the same findings.
    let output = feedline(&["doctor", folder.path().to_str().unwrap(), "--for", "checkpoint"]);
    assert!(output.out.contains(" checks: "), "{}", output.out);
    assert!(!is_known || output.out.contains("fine    exclusive create"), "{}", output.out);
}

/// Data is never written to, not even for a moment.
#[test]
fn data_folder_is_not_written_to() {
    let folder = tempfile::tempdir().unwrap();
    let before = std::fs::metadata(folder.path()).unwrap().modified().unwrap();
    let report = doctor(&[folder.path().to_str().unwrap(), "--for", "data"]);
    assert!(report.findings.iter().all(|finding| finding["what"] != "new files"));
    assert_eq!(std::fs::metadata(folder.path()).unwrap().modified().unwrap(), before);
}

/// Unfinished files of killed runs are counted, and the command in the fix removes them.
#[test]
fn unfinished_files_are_counted() {
    let Some(dead) = dead() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let none = ("fine", "none");
    assert_eq!(doctor(&[path, "--for", "data"]).of("unfinished files"), none);

    let temporary = folder.path().join(format!(".x.bin.tmp-{dead}"));
    std::fs::write(&temporary, vec![0; 3 << 20]).unwrap();
    let report = doctor(&[path, "--for", "data"]);
    let (severity, found) = report.of("unfinished files");
    assert_eq!((report.code, severity), (0, "note"), "{found}");
    assert!(found.contains("temporary files of dead processes: 1, 3 MiB in total,"), "{found}");
    assert!(found.contains(temporary.to_str().unwrap()), "{found}");
    let source = format!("{}/../tests/golden/legacy/tntidx_i32", env!("CARGO_MANIFEST_DIR"));
    let out = format!("{path}/out");
    let output = feedline(&["convert", &source, &out]);
    assert_eq!(output.code, 0, "{}", output.err);
    assert!(!temporary.exists());
    assert_eq!(doctor(&[path, "--for", "data"]).of("unfinished files"), none);

    // Drafts, those in subfolders too.
    let draft = folder.path().join("below/.y.bin.draft");
    std::fs::create_dir(draft.parent().unwrap()).unwrap();
    std::fs::write(draft, vec![0; 2 << 20]).unwrap();
    let report = doctor(&[path, "--for", "data"]);
    let found = report.of("unfinished files").1;
    assert!(found.starts_with("drafts") && found.contains(": 1, 2 MiB in total,"), "{found}");

    // A killed run that lacks only its manifest.
    let record = format!(
        r#"{{"owner": "{dead}", "command": "convert", "suffixes": [".bin", ".idx", ".crc"],
            "drafts": [], "manifests": ["out.manifest.json"]}}"#
    );
    std::fs::remove_dir_all(folder.path().join("below")).unwrap();
    std::fs::remove_file(format!("{out}.manifest.json")).unwrap();
    std::fs::write(folder.path().join(".out.writing-0"), record).unwrap();
    let report = doctor(&[path, "--for", "data"]);
    let found = report.of("unfinished files").1;
    assert!(found.starts_with("outputs of killed runs without a manifest"), "{found}");
    let output = feedline(&["convert", &source, &out]);
    assert_eq!(output.code, 0, "{}", output.err);
    assert_eq!(doctor(&[path, "--for", "data"]).of("unfinished files"), none);
}

#[test]
fn tmpfs_is_not_for_checkpoints() {
    let Ok(mount) = Mount::new("size=8m") else {
        return eprintln!("SKIPPED: no right to mount");
    };
    let path = mount.path().to_str().unwrap();
    let report = doctor(&[path, "--for", "checkpoint"]);
    assert_eq!((report.code, report.of("place").0), (1, "hurts"));
    assert!(is_empty(mount.path()));
    assert!(!doctor(&[path, "--for", "data"]).worst().contains(&"place"));

    mount.remount("ro").unwrap();
    let report = doctor(&[path, "--for", "checkpoint"]);
    assert_eq!((report.code, report.of("writing").0), (1, "breaks"));
    assert_eq!(doctor(&[path]).of("writing").0, "hurts");
    assert_eq!(doctor(&[path, "--for", "data"]).of("writing").0, "fine");
}

#[test]
fn full_file_system_is_reported() {
    let Ok(mount) = Mount::new("size=1m,nr_inodes=40") else {
        return eprintln!("SKIPPED: no right to mount");
    };
    let filler = std::fs::write(mount.path().join("filler"), vec![7; 2 << 20]);
    assert!(filler.is_err(), "the file system has more room than it was given");
    let report = doctor(&[mount.path().to_str().unwrap(), "--for", "checkpoint"]);
    assert_eq!((report.code, report.of("space").0), (1, "breaks"));
    assert_eq!(report.of("inodes").0, "hurts");
    assert_eq!(std::fs::read_dir(mount.path()).unwrap().count(), 1, "something is left");
}

#[test]
fn missing_folder_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("mnt/lustre");
    let report = doctor(&[missing.to_str().unwrap()]);
    assert_eq!((report.code, report.of("place").0), (1, "breaks"));
    assert!(report.of("place").1.contains(folder.path().to_str().unwrap()));
    assert!(is_empty(folder.path()));
}

/// A target that does not respond is reported with the step that is stuck, after the timeout.
#[test]
fn stuck_step_is_named() {
    let frozen = match fuse::Frozen::mount() {
        Ok(frozen) => frozen,
        Err(why) => return eprintln!("SKIPPED: no FUSE file system can be mounted here: {why}"),
    };
    let path = frozen.folder.to_str().unwrap();
    // A check that runs when the server stops responding is stuck at a later step.
    let is_first = |found: &Value| found.as_str().is_some_and(|it| it.contains("find the mount"));
    let hangs = |report: &Report| {
        let mut all = report.findings.iter();
        all.any(|finding| finding["what"] == "answers" && is_first(&finding["found"]))
    };
    let report = thread::scope(|scope| {
        // This may wait for its last request until the server is healed.
        scope.spawn(|| frozen.deafen());
        let report = (0..20).map(|_| doctor(&[path, "--timeout", "1s"])).find(hangs);
        frozen.heal();
        report.expect("the server still answered")
    });
    let (severity, found) = report.of("answers");
    assert_eq!((report.code, severity), (1, "breaks"));
    assert!(found.contains("not done after 1 s"), "{found}");

    let server = S3Server::start().unwrap();
    server.inject(FaultRule::every(1, Fault::Stall).of("GET"));
    let url = server.url("run") + "&stall=600s";
    let report = doctor(&[&url, "--timeout", "3s"]);
    let (severity, found) = report.of("answers");
    assert_eq!((report.code, severity), (1, "breaks"));
    assert!(found.contains("stuck at: list"), "{found}");
}

#[test]
fn bucket_is_checked_and_left_unchanged() {
    let server = S3Server::start().unwrap();
    let report = doctor(&[&server.url("run")]);
    for what in ["list", "put", "get", "get a range", "delete", "If-None-Match", "clocks"] {
        assert_eq!(report.of(what).0, "fine", "{:?}", report.of(what));
    }
    assert_eq!(report.worst(), [""; 0], "{:#?}", report.findings);
    assert_eq!((server.object_count(), server.upload_count()), (0, 0));

    server.keep(Conditions::OfSinglePuts);
    let report = doctor(&[&server.url("run")]);
    assert_eq!(report.of("If-None-Match of parts").0, "note");
    server.keep(Conditions::Ignored);
    let report = doctor(&[&server.url("run")]);
    assert_eq!((report.code, report.of("If-None-Match").0), (1, "breaks"));
    assert_eq!((server.object_count(), server.upload_count()), (0, 0));
}

#[test]
fn missing_permissions_of_a_bucket_are_reported() {
    let server = S3Server::start().unwrap();
    server.inject(FaultRule::every(1, Fault::Denied).of("PUT"));
    let report = doctor(&[&server.url("run")]);
    assert_eq!((report.code, report.worst()), (1, vec!["put"]));
    assert!(report.of("put").1.contains("access denied"), "{}", report.of("put").1);
    let secret = server.secret();
    assert!(report.findings.iter().all(|finding| !finding.to_string().contains(secret)));

    server.heal();
    // A bucket for data is not written to.
    server.inject(FaultRule::every(1, Fault::Denied).of("PUT"));
    let report = doctor(&[&server.url("run"), "--for", "data"]);
    assert_eq!((report.worst(), server.fault_count()), (vec![], 1));

    server.heal();
    server.inject(FaultRule::every(1, Fault::Denied).of("DELETE"));
    assert!(doctor(&[&server.url("run")]).worst().contains(&"delete"));
    server.heal();
    let report = doctor(&[&server.url_of("nobodys", "run")]);
    assert!(report.of("list").1.contains("no such bucket"), "{:?}", report.of("list"));
}

#[test]
fn clock_differences_are_reported() {
    let server = S3Server::start().unwrap();
    for (ahead_s, severity, word) in
        [(120, "note", "ahead of"), (-120, "note", "behind"), (4000, "breaks", "ahead of")]
    {
        server.heal();
        server.inject(FaultRule::every(1, Fault::Clock(ahead_s)));
        let report = doctor(&[&server.url("run")]);
        let (found, text) = report.of("clocks");
        assert!(found == severity && text.contains(word), "{ahead_s}: {found}: {text}");
    }
}

fn config(folder: &Path, corpus: &str, hidden: u32) -> String {
    let path = folder.join("run.toml");
    let text = format!(
        "run = {{ dir = '{dir}/run', budget = {{ steps = 10 }} }}\n\
         model = {{ layers = 2, hidden = {hidden}, heads = 2, vocab = 1000, seq_len = 16 }}\n\
         data = {{ train = '{corpus}', tokenizer = 'hf:{dir}/tokenizer.json' }}\n\
         batch = {{ global = 2, micro = 1 }}\noptim = {{ lr = {{ peak = 1e-3 }} }}\n",
        dir = folder.display()
    );
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Three tokens, of which one ends documents.
const TOKENIZER: &str = r#"{
    "version": "1.0",
    "added_tokens": [{
        "id": 3, "content": "<|endoftext|>", "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": true
    }],
    "normalizer": null,
    "pre_tokenizer": {
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true
    },
    "post_processor": null,
    "decoder": {
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true
    },
    "model": {
        "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
        "vocab": { "a": 0, "b": 1, "ab": 2 }, "merges": ["a b"]
    }
}"#;

/// A tokenizer is valid if a run opens it: also a folder of its files, but not every file of its
/// name.
#[test]
fn a_tokenizer_is_opened_as_a_run_opens_it() {
    let lab = tempfile::tempdir().unwrap();
    let [vocab, other, words] = ["vocab", "other", "words"].map(|name| lab.path().join(name));
    for folder in [&vocab, &other, &words] {
        std::fs::create_dir(folder).unwrap();
    }
    std::fs::write(vocab.join("tokenizer.json"), TOKENIZER).unwrap();
    std::fs::write(other.join("tokenizer.json"), b"{}").unwrap();
    let config = config(lab.path(), "corpus", 64);
    for (folder, severity) in [(&vocab, "fine"), (&other, "breaks"), (&words, "breaks")] {
        let spec = format!("hf:{}", folder.display());
        let opens = feed::open_tokenizer(&spec).is_ok();
        assert_eq!(opens, severity == "fine", "{spec}");
        let report = doctor(&[&config, "--set", &format!("data.tokenizer={spec}")]);
        assert_eq!(report.of("hf").0, severity, "{spec}: {}", report.of("hf").1);
    }
}

#[test]
fn everything_in_a_config_is_checked() {
    let folder = tempfile::tempdir().unwrap();
    let corpus = folder.path().join("corpus");
    let (name, corpus) = (corpus.display().to_string(), |end| corpus.with_extension(end));
    let small = config(folder.path(), &name, 64);
    let report = doctor(&[&small]);
    assert_eq!(report.code, 1);
    assert_eq!(report.of("dataset").0, "breaks");
    assert_eq!(report.of("hf").0, "breaks");

    std::fs::write(corpus("bin"), vec![7; 1 << 20]).unwrap();
    std::fs::write(corpus("idx"), b"an index").unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), TOKENIZER).unwrap();
    let report = doctor(&[&small]);
    assert_eq!(report.of("dataset"), ("fine", "1 MiB of tokens"));
    assert_eq!(report.of("hf").0, "fine");
    // 64 x 1000 words, 64 x 16 positions and the layers, 12 bytes each.
    assert_eq!(report.of("room").0, "fine", "{:?}", report.of("room"));
    assert!(
        report.of("room").1.contains("165120 parameters takes 1.9 MiB"),
        "{:?}",
        report.of("room")
    );

    // A model whose checkpoints no disk of this machine holds.
    let huge = doctor(&[&config(folder.path(), &name, 131_072), "--set", "model.layers=1000"]);
    assert_eq!((huge.code, huge.of("room").0), (1, "breaks"));
    // Neither logs nor the sample order can be written there, not even by root.
    let (ckpt, other) = (folder.path().join("ckpt"), "/sys/kernel/feedline");
    let sets = [
        format!("checkpoint.dir={}", ckpt.display()),
        format!("run.dir={other}/run"),
        format!("data.cache_dir={other}/cache"),
    ];
    let report = doctor(&[&small, "--set", &sets[0], "--set", &sets[1], "--set", &sets[2]]);
    assert_eq!((report.code, report.of("index cache").0), (1, "hurts"));
    let of_run = |finding: &&Value| finding["place"] == format!("{other}/run");
    let of_run: Vec<_> = report.findings.iter().filter(of_run).collect();
    assert!(of_run.iter().any(|f| f["severity"] == "breaks"), "{of_run:#?}");
    assert!(report.findings.iter().any(|f| f["place"] == ckpt.to_str().unwrap()));
    let report = doctor(&[&small]);
    assert_eq!(report.of("index cache").0, "fine", "{:?}", report.of("index cache"));
    let mut left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    left.retain(|entry| entry.as_ref().unwrap().file_name().to_str().unwrap().starts_with('.'));
    assert!(left.is_empty(), "{left:?}");

    let bad = feedline(&["doctor", &small, "--set", "model.layer=1"]);
    assert_eq!(bad.code, 2);
    assert!(bad.err.contains("layer"), "{}", bad.err);
}

fn severity(all: &[Finding], what: &str) -> Option<Severity> {
    all.iter().find(|finding| finding.what == what).map(|finding| finding.severity)
}

/// Mounts that cannot be made here, by the lines of their mount tables.
#[test]
fn mounts_are_judged_by_kind_and_options() {
    use Purpose::{Both, Checkpoint, Data};
    use Severity::{Breaks, Fine, Hurts, Note};
    for (kind, options, purpose, what, expected) in [
        ("lustre", "rw,flock", Both, "locks", None),
        ("lustre", "rw,localflock", Both, "locks", Some(Hurts)),
        ("lustre", "rw,noflock", Both, "locks", Some(Note)),
        ("nfs", "rw,vers=4.2,nconnect=8,hard", Both, "connections", Some(Fine)),
        ("nfs", "rw,vers=4.2,hard", Both, "connections", Some(Hurts)),
        ("nfs", "rw,vers=3,hard", Both, "version", Some(Note)),
        ("nfs", "rw,soft,nconnect=8", Checkpoint, "errors", Some(Hurts)),
        ("nfs", "rw,soft,nconnect=8", Data, "errors", None),
        ("nfs", "rw,hard,nconnect=8", Data, "errors", Some(Note)),
        ("nfs", "rw,vers=4.2,local_lock=none", Both, "locks", None),
        ("nfs", "rw,vers=3,nolock,local_lock=all", Both, "locks", Some(Hurts)),
        ("nfs", "rw,nocto", Checkpoint, "consistency", Some(Hurts)),
        ("nfs", "rw,nocto", Data, "consistency", None),
        ("nfs", "rw,vers=3,proto=udp", Data, "transport", Some(Breaks)),
        ("nfs", "rw,proto=tcp", Data, "transport", None),
        ("nfs", "rw,noac", Both, "attributes", Some(Hurts)),
        ("nfs", "rw,acregmin=0,acregmax=0", Both, "attributes", Some(Hurts)),
        ("nfs", "rw,acregmin=3,acregmax=60", Both, "attributes", None),
        ("nfs", "rw,rsize=1048576,wsize=1048576", Both, "request size", Some(Fine)),
        ("nfs", "rw,rsize=1048576,wsize=32768", Both, "request size", Some(Note)),
        ("ceph", "rw,recover_session=clean", Both, "recovery", None),
        ("ceph", "rw", Both, "recovery", Some(Note)),
        ("ceph", "rw", Data, "capabilities", Some(Note)),
        ("ceph", "ro", Data, "capabilities", None),
        ("ceph", "ro", Data, "writing", Some(Fine)),
        ("ceph", "ro", Checkpoint, "writing", Some(Breaks)),
        ("fuse.ceph-fuse", "rw", Both, "client", Some(Hurts)),
        ("fuse.s3fs", "rw", Both, "client", Some(Note)),
        ("overlay", "rw", Both, "place", Some(Hurts)),
        ("ext4", "rw,nobarrier", Both, "durability", Some(Breaks)),
        ("ext4", "rw,barrier=0", Both, "durability", Some(Breaks)),
        ("ext4", "rw,barrier=1", Both, "durability", None),
        ("ext4", "rw,sync", Checkpoint, "writes", Some(Hurts)),
        ("ext4", "rw,sync", Data, "writes", None),
        ("xfs", "rw,strictatime", Both, "access times", Some(Note)),
    ] {
        let facts = MountInfo {
            file_system: kind.to_owned(),
            options: options.split(',').map(str::to_owned).collect(),
            ..MountInfo::default()
        };
        let all = of_mount("/a", &facts, purpose);
        assert_eq!(severity(&all, what), expected, "{kind} {options} {purpose:?}: {all:#?}");
        let is_explained =
            |f: &Finding| f.severity < Hurts || (f.cost.is_some() && f.fix.is_some());
        assert!(all.iter().all(is_explained), "a finding without its cost or its fix: {all:#?}");
    }
    let facts = |free: u64, files: u64, kib| MountInfo {
        total_bytes: Some(1000),
        free_bytes: Some(free),
        total_files: Some(1_000_000),
        free_files: Some(files),
        read_ahead_kib: Some(kib),
        ..MountInfo::default()
    };
    let of =
        |free, files, kib, what| severity(&of_mount("/a", &facts(free, files, kib), Both), what);
    assert_eq!(of(500, 500_000, 128, "space"), Some(Fine));
    assert_eq!(of(50, 500_000, 128, "space"), Some(Hurts));
    assert_eq!(of(0, 500_000, 128, "space"), Some(Breaks));
    assert_eq!(of(500, 9, 128, "inodes"), Some(Hurts));
    assert_eq!(of(500, 9, 128, "read-ahead"), Some(Fine));
    assert_eq!(of(500, 9, 8192, "read-ahead"), Some(Note));
}

#[test]
fn machines_are_judged_by_their_limits() {
    let good = HostInfo {
        clock_is_kept: Some(true),
        memlock_bytes: Some(64 << 20),
        open_files: Some(1 << 20),
        ..HostInfo::default()
    };
    assert!(of_machine(&good).iter().all(|finding| finding.severity == Severity::Fine));
    let why = Some("EPERM".to_owned());
    let bad = HostInfo {
        ring_refused: why.clone(),
        ring_disabled: Some(2),
        memlock_bytes: Some(65536),
        open_files: Some(1024),
        clock_is_kept: Some(false),
    };
    let all = of_machine(&bad);
    assert_eq!(severity(&all, "io_uring"), Some(Severity::Hurts));
    assert!(all[0].fix.as_ref().unwrap().contains("kernel.io_uring_disabled=0"));
    assert_eq!(severity(&all, "locked memory"), Some(Severity::Note));
    assert_eq!(severity(&all, "open files"), Some(Severity::Hurts));
    assert_eq!(severity(&all, "clock"), Some(Severity::Note));
    let boxed = of_machine(&HostInfo { ring_refused: why, ..good });
    assert!(boxed[0].fix.as_ref().unwrap().contains("seccomp"));
}

#[test]
fn buckets_are_judged_by_their_guarantees() {
    let facts = BucketInfo {
        conditional_put: Some(true),
        conditional_complete: Some(false),
        multipart: Some("refused".to_owned()),
        checks_sums: Some(false),
        aborts_parts: Some(false),
        ..BucketInfo::default()
    };
    let all = of_bucket("s3://a", &facts);
    assert_eq!(severity(&all, "If-None-Match"), Some(Severity::Fine));
    assert_eq!(severity(&all, "If-None-Match of parts"), Some(Severity::Note));
    assert_eq!(severity(&all, "parts"), Some(Severity::Breaks));
    assert_eq!(severity(&all, "checksums"), Some(Severity::Note));
    let rule = all.iter().find(|finding| finding.what == "life cycle").unwrap();
    let json = rule.fix.as_ref().unwrap().split('\'').nth(1).unwrap();
    assert!(serde_json::from_str::<Value>(json).is_ok(), "{json}");
}

#[test]
fn stripes_are_recommended_and_refused_without_lustre() {
    let output = feedline(&[
        "stripe",
        "recommend",
        "--bytes",
        "40GiB",
        "--for",
        "data",
        "--nodes",
        "64",
        "--targets",
        "32",
    ]);
    assert_eq!(output.code, 0, "{}", output.err);
    assert!(output.out.contains("8 stripes of 1 MiB"), "{}", output.out);
    assert!(
        output.out.contains("feedline stripe set FOLDER --count 8 --size 1MiB"),
        "{}",
        output.out
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let new = format!("{path}/new");
    for args in [
        &["stripe", "get", path] as &[&str],
        &["stripe", "set", path, "--count", "4"],
        &["stripe", "set", &new, "--count", "all", "--size", "4MiB"],
        &["stripe", "set", path, "--part", "1GiB:1:1MiB", "--part", "end:all:4MiB"],
    ] {
        let output = feedline(args);
        assert_eq!(output.code, 2, "{args:?}: {}", output.out);
        assert!(output.err.contains("only Lustre has stripes"), "{args:?}: {}", output.err);
    }
    for (args, expected) in [
        (&["stripe", "set", path] as &[&str], "expected --count, --size, --pool or --part"),
        (&["stripe", "set", path, "--size", "1000B"], "64 KiB"),
        (
            &["stripe", "set", path, "--part", "1GiB:1:1MiB"],
            "a last component to the end of the file",
        ),
        (&["stripe", "set", path, "--part", "1GiB"], "END:COUNT:SIZE"),
        (&["stripe", "set", path, "--count", "some"], "or all"),
    ] {
        let output = feedline(args);
        assert_eq!(output.code, 2, "{args:?}: {}", output.out);
        assert!(output.err.contains(expected), "{args:?}: {}", output.err);
    }
    assert!(is_empty(folder.path()));
}

/// The state of one rank in a separate folder, as a run leaves it.
fn state(folder: &Path, name: &str, owner: &str) -> Offload {
    let layout = offload::bench::layout(5000).unwrap();
    let store = storage::open_url(folder.to_str().unwrap()).unwrap();
    let folders = vec![Folder { store, key: Key::new(name).unwrap() }];
    let plan = offload::plan(&layout).unwrap();
    let options = OffloadOptions::default();
    let mut state = Offload::on_disks(folders, owner, plan, &layout, 0, options).unwrap();
    state.fill(&[&[0; 4 * 5000]], 0, Value::Null).unwrap();
    state
}

#[test]
fn orphaned_state_is_listed_and_removed() {
    let lab = tempfile::tempdir().unwrap();
    let folder = lab.path().join("nvme");
    let held = state(&folder, "rank-00000", "/run/ckpt");
    for (name, owner) in [("rank-00001", "/run/ckpt"), ("rank-00002", "/other")] {
        drop(state(&folder, name, owner));
    }
    std::fs::create_dir(folder.join("mine")).unwrap();
    let place = folder.to_str().unwrap();
    let left = |more: &[&str]| -> Value {
        let output = feedline(&[&["offload", "ls", place, "--json"], more].concat());
        assert_eq!(output.code, 0, "{}", output.err);
        serde_json::from_str(&output.out).unwrap()
    };
    let names = || {
        let entries = std::fs::read_dir(&folder).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    let report = left(&[]);
    let open: Vec<bool> = report["states"]
        .as_array()
        .unwrap()
        .iter()
        .map(|state| state["is_open"].as_bool().unwrap())
        .collect();
    assert_eq!(open, [true, false, false], "{report}");
    assert_eq!(report["states"][2]["owner"], "/other");
    // Both have 60,000 bytes and more.
    assert!(report["left_bytes"].as_u64().unwrap() > 120_000, "{report}");
    assert_eq!(names(), ["mine", "rank-00000", "rank-00001", "rank-00002"]);

    let config = config(lab.path(), "corpus", 64);
    let set = format!("optim.offload=nvme:{place}");
    let report = doctor(&[&config, "--set", &set]);
    let (severity, found) = report.of("states");
    assert!(severity == "note" && found.contains("orphaned optimizer state of 2 ranks"), "{found}");
    let is_room = |of: &&Value| of["what"] == "room" && of["place"] == place;
    let room = report.findings.iter().find(is_room).unwrap();
    assert_eq!(room["severity"], "fine", "{room}");
    // The run does not create the folder: a disk may not be mounted.
    let absent = format!("{place}/absent");
    let report = doctor(&[&config, "--set", &format!("optim.offload=nvme:{absent}")]);
    let is_place = |of: &&Value| of["what"] == "place" && of["place"] == absent;
    let found = report.findings.iter().find(is_place).unwrap();
    assert_eq!(found["severity"], "breaks", "{found}");

    let removed = |report: Value| report["removed"].as_array().unwrap().len();
    assert_eq!(removed(left(&["--remove", "/nobody"])), 0);
    assert_eq!(removed(left(&["--remove", "/run/ckpt"])), 1);
    assert_eq!(names(), ["mine", "rank-00000", "rank-00002"]);
    drop(held);
    let output = feedline(&["offload", "ls", place, "--remove", "/run/ckpt"]);
    assert!(output.out.contains("removed") && output.out.contains("orphaned"), "{}", output.out);
    assert_eq!(names(), ["mine", "rank-00002"]);
}
