//! `feedline doctor` and `feedline stripe` as a user runs them, and what they make of machines and
//! mounts that are not at hand.

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

struct Said {
    code: i32,
    out: String,
    err: String,
}

fn feedline(args: &[&str]) -> Said {
    let output = Command::new(env!("CARGO_BIN_EXE_feedline")).args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Said {
        code: output.status.code().expect("it exits, no signal ends it"),
        out: text(output.stdout),
        err: text(output.stderr),
    }
}

/// Findings of a run by their names, without those of this machine, and how it exited.
struct Told {
    code: i32,
    findings: Vec<Value>,
}

fn doctor(args: &[&str]) -> Told {
    let mut all = vec!["doctor", "--json"];
    all.extend(args);
    let said = feedline(&all);
    let value: Value = serde_json::from_str(&said.out)
        .unwrap_or_else(|error| panic!("{error}: {} {}", said.out, said.err));
    let ours = |finding: &&Value| finding["place"] != "this machine";
    let findings: Vec<Value> =
        value["findings"].as_array().unwrap().iter().filter(ours).cloned().collect();
    Told { code: said.code, findings }
}

impl Told {
    /// The severity and the text of what was looked at.
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
fn a_folder_is_tried_and_left_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let report = doctor(&[folder.path().to_str().unwrap()]);
    let kind = MountInfo::of(folder.path()).unwrap().file_system;
    let is_known = ["ext4", "xfs", "btrfs", "f2fs", "tmpfs", "overlay"].contains(&kind.as_str());
    if !is_known {
        eprintln!("SKIPPED: whether {kind} keeps what a disk does is not known");
    }
    for what in ["new files", "new names", "locks", "direct IO", "clocks"] {
        let finding = report.of(what);
        assert!(!is_known || finding.0 == "fine", "{finding:?}");
    }
    assert!(report.of("a durable file").1.contains("ms"));
    assert!(is_empty(folder.path()), "something is left");
    // For a person the same, and in words.
    let said = feedline(&["doctor", folder.path().to_str().unwrap(), "--for", "checkpoint"]);
    assert!(said.out.contains("things looked at"), "{}", said.out);
    assert!(!is_known || said.out.contains("fine    new files"), "{}", said.out);
}

/// Data is never written to, not even for a moment.
#[test]
fn data_is_looked_at_only() {
    let folder = tempfile::tempdir().unwrap();
    let before = std::fs::metadata(folder.path()).unwrap().modified().unwrap();
    let told = doctor(&[folder.path().to_str().unwrap(), "--for", "data"]);
    assert!(told.findings.iter().all(|finding| finding["what"] != "new files"));
    assert_eq!(std::fs::metadata(folder.path()).unwrap().modified().unwrap(), before);
}

/// Files that killed runs left are counted, and the command that is named removes them.
#[test]
fn unfinished_files_are_counted() {
    let Some(dead) = dead() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let none = ("fine", "none");
    assert_eq!(doctor(&[path, "--for", "data"]).of("unfinished files"), none);

    let temporary = folder.path().join(format!(".x.bin.tmp-{dead}"));
    std::fs::write(&temporary, vec![0; 3 << 20]).unwrap();
    let told = doctor(&[path, "--for", "data"]);
    let (severity, found) = told.of("unfinished files");
    assert_eq!((told.code, severity), (0, "note"), "{found}");
    assert!(found.contains("temporary files of dead processes: 3 MiB in 1,"), "{found}");
    assert!(found.contains(temporary.to_str().unwrap()), "{found}");
    let source = format!("{}/../tests/golden/legacy/tntidx_i32", env!("CARGO_MANIFEST_DIR"));
    let out = format!("{path}/out");
    let said = feedline(&["convert", &source, &out]);
    assert_eq!(said.code, 0, "{}", said.err);
    assert!(!temporary.exists());
    assert_eq!(doctor(&[path, "--for", "data"]).of("unfinished files"), none);

    // Drafts, those in subfolders too.
    let draft = folder.path().join("below/.y.bin.draft");
    std::fs::create_dir(draft.parent().unwrap()).unwrap();
    std::fs::write(draft, vec![0; 2 << 20]).unwrap();
    let told = doctor(&[path, "--for", "data"]);
    let found = told.of("unfinished files").1;
    assert!(found.starts_with("drafts") && found.contains("2 MiB in 1,"), "{found}");

    // A killed run that lacks only its manifest.
    let record = format!(
        r#"{{"owner": "{dead}", "command": "convert", "suffixes": [".bin", ".idx", ".crc"],
            "drafts": [], "manifests": ["out.manifest.json"]}}"#
    );
    std::fs::remove_dir_all(folder.path().join("below")).unwrap();
    std::fs::remove_file(format!("{out}.manifest.json")).unwrap();
    std::fs::write(folder.path().join(".out.writing-0"), record).unwrap();
    let told = doctor(&[path, "--for", "data"]);
    let found = told.of("unfinished files").1;
    assert!(found.starts_with("outputs of killed runs without a manifest"), "{found}");
    let said = feedline(&["convert", &source, &out]);
    assert_eq!(said.code, 0, "{}", said.err);
    assert_eq!(doctor(&[path, "--for", "data"]).of("unfinished files"), none);
}

#[test]
fn a_memory_file_system_is_none_for_checkpoints() {
    let Ok(mount) = Mount::new("size=8m") else {
        return eprintln!("SKIPPED: no right to mount");
    };
    let path = mount.path().to_str().unwrap();
    let told = doctor(&[path, "--for", "checkpoint"]);
    assert_eq!((told.code, told.of("place").0), (1, "hurts"));
    assert!(is_empty(mount.path()));
    assert!(!doctor(&[path, "--for", "data"]).worst().contains(&"place"));

    mount.remount("ro").unwrap();
    let told = doctor(&[path, "--for", "checkpoint"]);
    assert_eq!((told.code, told.of("writing").0), (1, "breaks"));
    assert_eq!(doctor(&[path]).of("writing").0, "hurts");
    assert_eq!(doctor(&[path, "--for", "data"]).of("writing").0, "fine");
}

#[test]
fn a_full_file_system_is_told() {
    let Ok(mount) = Mount::new("size=1m,nr_inodes=40") else {
        return eprintln!("SKIPPED: no right to mount");
    };
    let filler = std::fs::write(mount.path().join("filler"), vec![7; 2 << 20]);
    assert!(filler.is_err(), "the file system has more room than it was given");
    let told = doctor(&[mount.path().to_str().unwrap(), "--for", "checkpoint"]);
    assert_eq!((told.code, told.of("space").0), (1, "breaks"));
    assert_eq!(told.of("inodes").0, "hurts");
    assert_eq!(std::fs::read_dir(mount.path()).unwrap().count(), 1, "something is left");
}

#[test]
fn what_is_not_there_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("mnt/lustre");
    let told = doctor(&[missing.to_str().unwrap()]);
    assert_eq!((told.code, told.of("place").0), (1, "breaks"));
    assert!(told.of("place").1.contains(folder.path().to_str().unwrap()));
    assert!(is_empty(folder.path()));
}

/// A target that does not answer is named with the step at which it hangs, when its time is up.
#[test]
fn what_hangs_is_named() {
    let frozen = match fuse::Frozen::mount() {
        Ok(frozen) => frozen,
        Err(why) => return eprintln!("SKIPPED: no FUSE file system can be mounted here: {why}"),
    };
    let path = frozen.folder.to_str().unwrap();
    // One that is under way when it goes deaf hangs at a later step.
    let is_first = |found: &Value| found.as_str().is_some_and(|it| it.contains("look where it is"));
    let hangs = |told: &Told| {
        let mut all = told.findings.iter();
        all.any(|finding| finding["what"] == "answers" && is_first(&finding["found"]))
    };
    let told = thread::scope(|scope| {
        // It may have to wait for its last request until all is healed.
        scope.spawn(|| frozen.deafen());
        let told = (0..20).map(|_| doctor(&[path, "--timeout", "1s"])).find(hangs);
        frozen.heal();
        told.expect("the server went on answering")
    });
    let (severity, found) = told.of("answers");
    assert_eq!((told.code, severity), (1, "breaks"));
    assert!(found.contains("not done after 1 s"), "{found}");

    let server = S3Server::start().unwrap();
    server.inject(FaultRule::every(1, Fault::Stall).of("GET"));
    let url = server.url("run") + "&stall=600s";
    let told = doctor(&[&url, "--timeout", "3s"]);
    let (severity, found) = told.of("answers");
    assert_eq!((told.code, severity), (1, "breaks"));
    assert!(found.contains("at: list"), "{found}");
}

#[test]
fn a_bucket_is_tried_and_left_as_it_was() {
    let server = S3Server::start().unwrap();
    let told = doctor(&[&server.url("run")]);
    for what in ["list", "put", "get", "get a range", "delete", "If-None-Match", "clocks"] {
        assert_eq!(told.of(what).0, "fine", "{:?}", told.of(what));
    }
    assert_eq!(told.worst(), [""; 0], "{:#?}", told.findings);
    assert_eq!((server.object_count(), server.upload_count()), (0, 0));

    server.keep(Conditions::OfSinglePuts);
    let told = doctor(&[&server.url("run")]);
    assert_eq!(told.of("If-None-Match of parts").0, "note");
    server.keep(Conditions::Ignored);
    let told = doctor(&[&server.url("run")]);
    assert_eq!((told.code, told.of("If-None-Match").0), (1, "breaks"));
    assert_eq!((server.object_count(), server.upload_count()), (0, 0));
}

#[test]
fn what_a_bucket_refuses_is_told() {
    let server = S3Server::start().unwrap();
    server.inject(FaultRule::every(1, Fault::Denied).of("PUT"));
    let told = doctor(&[&server.url("run")]);
    assert_eq!((told.code, told.worst()), (1, vec!["put"]));
    assert!(told.of("put").1.contains("not allowed"), "{}", told.of("put").1);
    let secret = server.secret();
    assert!(told.findings.iter().all(|finding| !finding.to_string().contains(secret)));

    server.heal();
    // To data nothing is written.
    server.inject(FaultRule::every(1, Fault::Denied).of("PUT"));
    let told = doctor(&[&server.url("run"), "--for", "data"]);
    assert_eq!((told.worst(), server.fault_count()), (vec![], 1));

    server.heal();
    server.inject(FaultRule::every(1, Fault::Denied).of("DELETE"));
    assert!(doctor(&[&server.url("run")]).worst().contains(&"delete"));
    server.heal();
    let told = doctor(&[&server.url_of("nobodys", "run")]);
    assert!(told.of("list").1.contains("no such bucket"), "{:?}", told.of("list"));
}

#[test]
fn clocks_that_differ_are_told() {
    let server = S3Server::start().unwrap();
    for (ahead_s, severity, word) in
        [(120, "note", "ahead of"), (-120, "note", "behind"), (4000, "breaks", "ahead of")]
    {
        server.heal();
        server.inject(FaultRule::every(1, Fault::Clock(ahead_s)));
        let told = doctor(&[&server.url("run")]);
        let (found, text) = told.of("clocks");
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

/// A tokenizer is good if a run opens it: a folder of its files too, and not any file of its name.
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
        let told = doctor(&[&config, "--set", &format!("data.tokenizer={spec}")]);
        assert_eq!(told.of("hf").0, severity, "{spec}: {}", told.of("hf").1);
    }
}

#[test]
fn all_that_a_config_names_is_looked_at() {
    let folder = tempfile::tempdir().unwrap();
    let corpus = folder.path().join("corpus");
    let (name, corpus) = (corpus.display().to_string(), |end| corpus.with_extension(end));
    let small = config(folder.path(), &name, 64);
    let told = doctor(&[&small]);
    assert_eq!(told.code, 1);
    assert_eq!(told.of("dataset").0, "breaks");
    assert_eq!(told.of("hf").0, "breaks");

    std::fs::write(corpus("bin"), vec![7; 1 << 20]).unwrap();
    std::fs::write(corpus("idx"), b"an index").unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), TOKENIZER).unwrap();
    let told = doctor(&[&small]);
    assert_eq!(told.of("dataset"), ("fine", "1 MiB of tokens"));
    assert_eq!(told.of("hf").0, "fine");
    // 64 x 1000 words, 64 x 16 places and the layers, 12 bytes each.
    assert_eq!(told.of("room").0, "fine", "{:?}", told.of("room"));
    assert!(told.of("room").1.contains("165120 parameters is 1.9 MiB"), "{:?}", told.of("room"));

    // A model whose checkpoints no disk of this machine holds.
    let huge = doctor(&[&config(folder.path(), &name, 131_072), "--set", "model.layers=1000"]);
    assert_eq!((huge.code, huge.of("room").0), (1, "breaks"));
    // Neither logs nor the order of the samples can be written there, by root either.
    let (ckpt, other) = (folder.path().join("ckpt"), "/sys/kernel/feedline");
    let sets = [
        format!("checkpoint.dir={}", ckpt.display()),
        format!("run.dir={other}/run"),
        format!("data.cache_dir={other}/cache"),
    ];
    let told = doctor(&[&small, "--set", &sets[0], "--set", &sets[1], "--set", &sets[2]]);
    assert_eq!((told.code, told.of("index cache").0), (1, "hurts"));
    let of_run = |finding: &&Value| finding["place"] == format!("{other}/run");
    let of_run: Vec<_> = told.findings.iter().filter(of_run).collect();
    assert!(of_run.iter().any(|f| f["severity"] == "breaks"), "{of_run:#?}");
    assert!(told.findings.iter().any(|f| f["place"] == ckpt.to_str().unwrap()));
    let told = doctor(&[&small]);
    assert_eq!(told.of("index cache").0, "fine", "{:?}", told.of("index cache"));
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
    for (kind, options, purpose, what, due) in [
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
        assert_eq!(severity(&all, what), due, "{kind} {options} {purpose:?}: {all:#?}");
        let told = |f: &Finding| f.severity < Hurts || (f.cost.is_some() && f.fix.is_some());
        assert!(all.iter().all(told), "a finding without its cost or what mends it: {all:#?}");
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
fn machines_are_judged_by_what_they_allow() {
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
fn buckets_are_judged_by_what_they_promise() {
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
fn stripes_are_recommended_and_refused_where_there_are_none() {
    let said = feedline(&[
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
    assert_eq!(said.code, 0, "{}", said.err);
    assert!(said.out.contains("8 stripes of 1 MiB"), "{}", said.out);
    assert!(said.out.contains("feedline stripe set FOLDER --count 8 --size 1MiB"), "{}", said.out);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let new = format!("{path}/new");
    for args in [
        &["stripe", "get", path] as &[&str],
        &["stripe", "set", path, "--count", "4"],
        &["stripe", "set", &new, "--count", "all", "--size", "4MiB"],
        &["stripe", "set", path, "--part", "1GiB:1:1MiB", "--part", "end:all:4MiB"],
    ] {
        let said = feedline(args);
        assert_eq!(said.code, 2, "{args:?}: {}", said.out);
        assert!(said.err.contains("only Lustre has stripes"), "{args:?}: {}", said.err);
    }
    for (args, due) in [
        (&["stripe", "set", path] as &[&str], "nothing to set"),
        (&["stripe", "set", path, "--size", "1000B"], "64 KiB"),
        (&["stripe", "set", path, "--part", "1GiB:1:1MiB"], "the last part ends"),
        (&["stripe", "set", path, "--part", "1GiB"], "END:COUNT:SIZE"),
        (&["stripe", "set", path, "--count", "some"], "or all"),
    ] {
        let said = feedline(args);
        assert_eq!(said.code, 2, "{args:?}: {}", said.out);
        assert!(said.err.contains(due), "{args:?}: {}", said.err);
    }
    assert!(is_empty(folder.path()));
}

/// A state of one rank in a folder of its own, as a run leaves it.
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
fn what_ranks_left_is_found_and_removed() {
    let lab = tempfile::tempdir().unwrap();
    let folder = lab.path().join("nvme");
    let held = state(&folder, "rank-00000", "/run/ckpt");
    for (name, owner) in [("rank-00001", "/run/ckpt"), ("rank-00002", "/other")] {
        drop(state(&folder, name, owner));
    }
    std::fs::create_dir(folder.join("mine")).unwrap();
    let place = folder.to_str().unwrap();
    let left = |more: &[&str]| -> Value {
        let said = feedline(&[&["offload", "ls", place, "--json"], more].concat());
        assert_eq!(said.code, 0, "{}", said.err);
        serde_json::from_str(&said.out).unwrap()
    };
    let names = || {
        let entries = std::fs::read_dir(&folder).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    let told = left(&[]);
    let open: Vec<bool> = told["states"]
        .as_array()
        .unwrap()
        .iter()
        .map(|state| state["is_open"].as_bool().unwrap())
        .collect();
    assert_eq!(open, [true, false, false], "{told}");
    assert_eq!(told["states"][2]["owner"], "/other");
    // Both have 60,000 bytes and more.
    assert!(told["left_bytes"].as_u64().unwrap() > 120_000, "{told}");
    assert_eq!(names(), ["mine", "rank-00000", "rank-00001", "rank-00002"]);

    let config = config(lab.path(), "corpus", 64);
    let set = format!("optim.offload=nvme:{place}");
    let told = doctor(&[&config, "--set", &set]);
    let (severity, found) = told.of("states");
    assert!(severity == "note" && found.contains("of 2 ranks that no process has"), "{found}");
    let is_room = |of: &&Value| of["what"] == "room" && of["place"] == place;
    let room = told.findings.iter().find(is_room).unwrap();
    assert_eq!(room["severity"], "fine", "{room}");

    let removed = |told: Value| told["removed"].as_array().unwrap().len();
    assert_eq!(removed(left(&["--remove", "/nobody"])), 0);
    assert_eq!(removed(left(&["--remove", "/run/ckpt"])), 1);
    assert_eq!(names(), ["mine", "rank-00000", "rank-00002"]);
    drop(held);
    let said = feedline(&["offload", "ls", place, "--remove", "/run/ckpt"]);
    assert!(said.out.contains("removed") && said.out.contains("left"), "{}", said.out);
    assert_eq!(names(), ["mine", "rank-00002"]);
}
