//! Runs `feedline bench` as a user does: every pattern is measured, and no file stays, whatever
//! happens.

mod interrupted;
mod replay;
mod report;
mod validity;

use crate::signals;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use storage::Key;
use storage::probe::MountInfo;
use storage::s3_server::{Fault, FaultRule, S3Server};
use storage::testing::fault_store::Mount;
use tools::bench::target::TargetFolder;

/// The smallest size of everything.
const SMALL: [&str; 9] = [
    "--rounds=1",
    "--duration=50ms",
    "--bytes=16MiB",
    "--checkpoint=1MiB",
    "--writers=2",
    "--files=8",
    "--ranks=4",
    "--no-fio",
    "--json",
];

fn command(targets: &[&str], more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_feedline"));
    let option = |argument: &str| argument.split('=').next().unwrap().to_owned();
    let is_given = |small: &&&str| more.iter().any(|more| option(more) == option(small));
    command.arg("bench").args(targets).args(SMALL.iter().filter(|small| !is_given(small)));
    command.args(more);
    // In a job of Slurm these would select the rendezvous.
    for name in ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS"] {
        command.env_remove(name);
    }
    command.stdin(Stdio::null());
    command
}

fn bench(targets: &[&str], more: &[&str]) -> Output {
    command(targets, more).output().unwrap()
}

fn report_of(output: &Output) -> Value {
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{err}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Checks that a run failed with this message, and that no file stays in the folder.
fn refused(output: &Output, expected: &str, folder: &Path) {
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{err}");
    assert!(err.contains(expected), "no {expected:?} in {err}");
    assert!(output.stdout.is_empty());
    nothing_in(folder);
}

fn nothing_in(folder: &Path) {
    let left: Vec<_> = fs::read_dir(folder).into_iter().flatten().flatten().collect();
    assert!(left.is_empty(), "{left:?}");
}

fn name(folder: &Path) -> &str {
    folder.to_str().unwrap()
}

const PATTERNS: [&str; 10] =
    ["stream", "samples", "rate", "replay", "save", "save-one", "restore", "names", "start", "mix"];

fn patterns(target: &Value) -> Vec<&str> {
    let patterns = target["patterns"].as_array().unwrap();
    patterns.iter().map(|of| of["pattern"].as_str().unwrap()).collect()
}

#[test]
fn every_pattern_is_measured_and_files_are_removed() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let pages = tempfile::tempdir().unwrap();
    let page = pages.path().join("bench.html");
    let html = format!("--html={}", page.display());
    let through = format!("file:{}?direct=off&engine=pread", name(b.path()));
    let report = report_of(&bench(&[name(a.path()), &through], &[&html]));
    nothing_in(a.path());
    nothing_in(b.path());
    assert_eq!(report["schema"], 1);
    for target in report["targets"].as_array().unwrap() {
        assert_eq!(patterns(target), PATTERNS);
        for of in target["patterns"].as_array().unwrap() {
            let median = of["estimate"]["median"].as_f64().unwrap();
            assert!(median > 0.0, "{of}");
        }
        let names = &target["patterns"][7];
        for step in ["create", "stat", "open", "read", "list", "delete"] {
            assert!(names["more"][format!("{step}_per_s")].as_f64().unwrap() > 0.0, "{names}");
        }
    }
    assert_eq!(report["targets"][1]["direct"], false);
    assert_eq!(report["comparisons"].as_array().unwrap().len(), PATTERNS.len());
    let written = fs::read_to_string(&page).unwrap();
    assert!(written.ends_with("</html>\n") && written.contains("Store comparison"));
    // A page is not overwritten: the run is refused before any measurement.
    let again = bench(&[name(a.path())], &[&html]);
    refused(&again, "file exists", a.path());
}

/// Writes tokenized documents, and the config of a run over them; returns the name of the config.
fn config(folder: &Path) -> String {
    let text: String = (0..200).map(|n| format!("{{\"text\":\"line {n} of a page\"}}\n")).collect();
    fs::write(folder.join("in.jsonl"), text).unwrap();
    let (input, out) = (folder.join("in.jsonl"), folder.join("out"));
    let options = preprocess::PreprocessOptions::new(vec![name(&input).to_owned()], name(&out));
    preprocess::run(&options, &mut |_| {}).unwrap();
    let config = folder.join("run.toml");
    let text = format!(
        "run = {{ dir = 'elsewhere', budget = {{ steps = 100 }} }}
         model = {{ layers = 2, hidden = 64, heads = 2, vocab = 50257, seq_len = 64 }}
         data = {{ train = '{}_text_document' }}
         batch = {{ global = 16, micro = 4 }}
         optim = {{ lr = {{ peak = 0.001 }} }}",
        name(&out)
    );
    fs::write(&config, text).unwrap();
    name(&config).to_owned()
}

#[test]
fn sample_order_of_a_run_is_replayed_without_changing_its_folder() {
    let (run, target) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let from = format!("--config={}", config(run.path()));
    let there = || {
        let names = fs::read_dir(run.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    };
    let before = there();
    let report = report_of(&bench(&[name(target.path())], &[&from, "--patterns=replay,rate"]));
    assert_eq!(there(), before);
    nothing_in(target.path());
    assert_eq!(report["need"]["sample_bytes"], 65 * 2);
    // Two layers of 64, 50,304 words and 64 positions, as the plan of the run counts them.
    let parameters = report["need"]["parameters"].as_u64().unwrap();
    assert!((3_300_000..3_340_000).contains(&parameters), "{parameters}");
    let order = report["method"]["order"].as_str().unwrap();
    assert!(order.ends_with("out_text_document"), "{order}");
}

#[test]
fn bucket_is_measured_and_files_are_removed() {
    let server = S3Server::start().unwrap();
    let report = report_of(&bench(&[&server.url("bench")], &[]));
    assert_eq!(patterns(&report["targets"][0]), PATTERNS);
    assert_eq!(report["targets"][0]["file_system"], "s3");
    let store = storage::open_url(&server.url("bench")).unwrap();
    assert_eq!(store.list(&Key::root()).unwrap(), []);
    assert_eq!(server.upload_count(), 0);
    assert!(!report.to_string().contains(server.secret()));
}

#[test]
fn invalid_targets_and_arguments_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let missing = at.join("no/such");
    refused(&bench(&[name(&missing)], &[]), "no such folder (hint: mount it", at);
    refused(&bench(&[name(at)], &["--bytes=8000000TiB"]), "(hint: lower --bytes", at);
    // Root may not make folders there either; in a container it is read-only.
    refused(&bench(&["/sys/kernel"], &[]), "(hint: use a folder of it that you may write", at);
    refused(
        &bench(&[name(at)], &["--parameters=huge"]),
        "cannot use --parameters huge: expected a number \
                                                     with m",
        at,
    );
    refused(&bench(&[name(at)], &["--rounds=0"]), "cannot use --rounds 0: expected 1", at);
    refused(&bench(&[name(at), ""], &[]), "found an empty name (hint: set the shell variable", at);
    refused(&bench(&[name(at)], &["--bytes=1MiB"]), "cannot use --bytes 1 MiB", at);
    refused(&bench(&[name(at)], &["--config=/no/such.toml"]), "/no/such.toml", at);
    refused(&bench(&["ftp://x/y"], &[]), "found scheme 'ftp'", at);
    let file = at.join("file");
    fs::write(&file, "x").unwrap();
    let output = bench(&[name(&file)], &[]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("expected a folder, found a file"));
}

#[test]
fn refusing_and_hung_servers_are_reported() {
    let nowhere = tempfile::tempdir().unwrap();
    let server = S3Server::start().unwrap();
    let url = server.url("bench");
    let bad = nowhere.path().join("credentials");
    fs::write(&bad, "[default]\naws_access_key_id = a\naws_secret_access_key = b\n").unwrap();
    let (endpoint, bad_name) = (server.endpoint(), name(&bad));
    let with_bad =
        format!("s3://test/bench?endpoint={endpoint}&profile=default&credentials={bad_name}");
    let output = bench(&[&with_bad], &[]);
    fs::remove_file(&bad).unwrap();
    refused(&output, "hint: check the access key", nowhere.path());
    // Nothing was written to that target, nor to the first of two before the second was checked.
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!stderr.contains("cannot remove"), "{stderr}");
    let both = bench(&[name(nowhere.path()), &server.url_of("other", "bench")], &[]);
    refused(&both, "no such bucket", nowhere.path());
    let output = bench(&[&server.url_of("other", "bench")], &[]);
    refused(&output, "no such bucket", nowhere.path());
    // All files are written, and then no read is answered.
    server.inject(FaultRule::every(1, Fault::Stall).of("GET").to("tokens.bin"));
    let hanging = format!("{url}&stall=600s&tries=1");
    let output = bench(&[&hanging], &["--timeout=15", "--patterns=stream"]);
    refused(&output, "stream on s3://test/bench", nowhere.path());
    server.heal();
    let store = storage::open_url(&url).unwrap();
    assert_eq!(store.list(&Key::root()).unwrap(), []);
}

/// Waits until the benchmark has started to write; the caller checks whether it has ended.
fn wait_until_started(folder: &Path) {
    let until = Instant::now() + Duration::from_secs(60);
    while fs::read_dir(folder).unwrap().next().is_none() && Instant::now() < until {
        thread::sleep(Duration::from_millis(10));
    }
}

fn interrupt(child: &Child, signal: &str) {
    assert!(signals::send(child, signal));
}

#[test]
fn interrupted_benchmark_removes_its_files() {
    for (signal, more) in [("-INT", "--processes=1"), ("-TERM", "--processes=2")] {
        let folder = tempfile::tempdir().unwrap();
        let temporary = tempfile::tempdir().unwrap();
        let more = ["--patterns=stream,save", "--duration=20s", more];
        let mut command = command(&[name(folder.path())], &more);
        command.env("TMPDIR", temporary.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().unwrap();
        wait_until_started(folder.path());
        interrupt(&child, signal);
        let output = child.wait_with_output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && err.contains("interrupted"), "{err}");
        nothing_in(folder.path());
        nothing_in(temporary.path());
    }
}

#[test]
fn several_processes_measure_together() {
    let (folder, temporary) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut command = command(&[name(folder.path())], &["--processes=2"]);
    let report = report_of(&command.env("TMPDIR", temporary.path()).output().unwrap());
    assert_eq!(report["method"]["processes"], 2);
    assert_eq!(patterns(&report["targets"][0]), PATTERNS);
    // Each writer of each process has written its part.
    assert_eq!(report["method"]["checkpoint_bytes"], 1 << 20);
    nothing_in(folder.path());
    nothing_in(temporary.path());
}

#[test]
fn hosts_rendezvous_in_a_folder_and_the_first_reports() {
    let (folder, meet) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let at = format!("--rendezvous={}", name(meet.path()));
    let start = |member: &str| {
        let mut command = command(&[name(folder.path())], &[&at, member, "--patterns=samples"]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let (first, second) = (start("--process=0/2"), start("--process=1/2"));
    let (first, second) = (first.wait_with_output().unwrap(), second.wait_with_output().unwrap());
    assert_eq!(report_of(&first)["method"]["processes"], 2);
    assert_eq!(second.status.code(), Some(0), "{}", String::from_utf8_lossy(&second.stderr));
    assert!(second.stdout.is_empty());
    nothing_in(folder.path());
    nothing_in(meet.path());
    let output = bench(&[name(folder.path())], &[&at]);
    refused(&output, "expected --process I/N or srun", folder.path());
}

#[test]
fn numbers_of_slurm_are_checked() {
    let (folder, meet) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let at = format!("--rendezvous={}", name(meet.path()));
    for (variables, expected) in [
        ([("SLURM_PROCID", "2"), ("SLURM_NTASKS", "2")], "2/2: expected I below N"),
        ([("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2(x3)")], "expected --process I/N or srun"),
        ([("SLURM_PROCID", "-1"), ("SLURM_NTASKS", "2")], "expected --process I/N or srun"),
    ] {
        let output = command(&[name(folder.path())], &[&at]).envs(variables).output().unwrap();
        refused(&output, expected, folder.path());
    }
    for variable in ["SLURM_JOB_ID", "SLURM_STEP_ID"] {
        let mut command = command(&[name(folder.path())], &[&at, "--process=0/2"]);
        let output = command.env(variable, "../../7").output().unwrap();
        refused(&output, "../../7", folder.path());
    }
    nothing_in(meet.path());
}

/// If one of two hosts is interrupted, both end, and no file stays in the target or the rendezvous.
#[test]
fn interrupted_host_stops_all_hosts() {
    for interrupted in [0, 1] {
        let (folder, meet) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let at = format!("--rendezvous={}", name(meet.path()));
        let hosts = [0, 1].map(|nth| {
            let member = format!("--process={nth}/2");
            let more = [&at, &member, "--patterns=stream,save", "--duration=60s"];
            let mut command = command(&[name(folder.path())], &more);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        });
        wait_until_started(folder.path());
        interrupt(&hosts[interrupted], "-INT");
        for (nth, host) in hosts.into_iter().enumerate() {
            let output = host.wait_with_output().unwrap();
            let err = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.code() == Some(2) && err.contains("interrupted"), "{nth}: {err}");
            assert_eq!(
                err.contains("another process failed: "),
                nth != interrupted,
                "{nth}: {err}"
            );
        }
        nothing_in(folder.path());
        nothing_in(meet.path());
    }
}

/// Files that a killed benchmark left in the rendezvous are reported, and not used.
#[test]
fn leftover_rendezvous_is_reported() {
    let (folder, meet) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let remains = meet.path().join("feedline-bench-meet-0-0");
    fs::create_dir(&remains).unwrap();
    fs::write(remains.join("id.1"), "\"old\"").unwrap();
    let at = format!("--rendezvous={}", name(meet.path()));
    let output = bench(&[name(folder.path())], &[&at, "--process=1/2", "--patterns=samples"]);
    refused(&output, ", which a killed benchmark left", folder.path());
}

#[test]
fn full_target_is_reported() {
    let Ok(mount) = Mount::new("size=64m,nr_inodes=40") else {
        return eprintln!("SKIPPED: no right to mount");
    };
    let at = mount.path();
    let output = bench(&[name(at)], &["--patterns=names", "--files=100"]);
    refused(&output, "(hint: lower --bytes, --checkpoint or --files)", at);
    let output = bench(&[name(at)], &["--bytes=64MiB"]);
    refused(&output, "of free space, found ", at);
    fs::write(at.join("filler"), vec![7; 65 << 20]).unwrap_err();
    let output = bench(&[name(at)], &[]);
    fs::remove_file(at.join("filler")).unwrap();
    refused(&output, "(hint: lower --bytes, --checkpoint", at);
}

#[test]
fn names_cannot_leave_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let place = TargetFolder::open("a", name(folder.path()), None, "id").unwrap();
    for out in ["..", "../x", "x/../../y", "/etc/x", "", "x//y"] {
        assert!(place.key(out).is_err() && place.path(out).is_none(), "{out:?} was accepted");
    }
    assert_eq!(place.path("x").unwrap(), folder.path().join("feedline-bench-id/x"));
    nothing_in(folder.path());
}

/// Far more than all tests together have in memory; a container may have no more than 64 MB.
const MEMORY_FREE_MIN: u64 = 512 << 20;

/// A folder in memory, if there is one with enough free space.
pub fn memory_folder() -> Option<tempfile::TempDir> {
    let memory = Path::new("/dev/shm");
    let facts = MountInfo::of(memory).ok()?;
    let has_room = facts.free_bytes.is_some_and(|free| free >= MEMORY_FREE_MIN);
    (facts.file_system == "tmpfs" && has_room).then(|| tempfile::tempdir_in(memory).ok())?
}

/// A folder in memory if possible: a model cannot be faster than the store below it.
pub fn quick_folder() -> tempfile::TempDir {
    memory_folder().unwrap_or_else(|| tempfile::tempdir().unwrap())
}

/// Compares models with links of `first` and `second` MB/s in five rounds.
fn two_links(first: u32, second: u32) -> Value {
    let folder = quick_folder();
    let links = [first, second].map(|link| format!("--simulate=lustre,client.mb_per_s={link}"));
    let more = [&links[0], &links[1], "--patterns=stream", "--rounds=5", "--duration=400ms"];
    let report = report_of(&bench(&[name(folder.path())], &more));
    nothing_in(folder.path());
    assert_eq!(report["simulated"], true);
    let target = &report["targets"][0];
    assert_eq!(target["simulated"], "simulated: lustre");
    assert!(target["name"].as_str().unwrap().contains("(simulated)"), "{target}");
    report["comparisons"][0].clone()
}

/// Models respond in real time, so that other load of the machine is noise in their rates: these
/// differ by far more. Smaller differences and none are tested in `report`, without a clock.
#[test]
fn different_models_differ_significantly() {
    let apart = two_links(10, 80);
    assert_eq!(apart["significant"], true, "{apart}");
    assert!(apart["better"].as_str().unwrap().contains("mb_per_s=80"), "{apart}");
}

/// A store that completes 64 requests in 20 ms gets ten times as many: latency includes the time
/// that a request waits in the queue. Counted from the submission, none would take 100 ms.
#[test]
fn latency_counts_from_the_due_time() {
    let folder = quick_folder();
    let model = "--simulate=nfs,latency_us.read=[20000, 20000]";
    let more = [model, "--patterns=rate", "--ranks=1000", "--duration=200ms"];
    let report = report_of(&bench(&[name(folder.path())], &more));
    let rate = &report["targets"][0]["patterns"][0];
    assert!(rate["latency_ms"]["p50"].as_f64().unwrap() > 200.0, "{rate}");
    assert!(rate["more"]["scheduled_per_s"].as_f64().unwrap() > 30_000.0, "{rate}");
    assert!(rate["more"]["never_sent"].as_f64().unwrap() > 0.0, "{rate}");
    nothing_in(folder.path());
}

#[test]
fn hung_target_is_reported_and_files_are_removed() {
    let (folder, models) = (quick_folder(), tempfile::tempdir().unwrap());
    let model = models.path().join("hung.toml");
    let stall = "\n[[stall]]\nof = \"read\"\nper_million = 1000000\nms = 3600000\n";
    let text = storage::simulate::StoreModel::built_in("nfs").unwrap().to_owned() + stall;
    fs::write(&model, text).unwrap();
    let simulate = format!("--simulate={}", model.display());
    // A run may take the timeout of a request and four times its duration, so that the request
    // times out first.
    let more = [&simulate, "--patterns=samples", "--timeout=5", "--duration=3s"];
    let output = bench(&[name(folder.path())], &more);
    refused(&output, "no completion for ", folder.path());
    let more = [&simulate, "--patterns=start", "--timeout=5"];
    let output = bench(&[name(folder.path())], &more);
    refused(&output, "not finished after 5 s", folder.path());
}
