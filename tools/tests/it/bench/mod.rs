//! `feedline bench` as a user runs it: every pattern, and that nothing stays whatever happens.

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

/// As little of everything as there can be.
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
    let is_told = |small: &&&str| more.iter().any(|more| option(more) == option(small));
    command.arg("bench").args(targets).args(SMALL.iter().filter(|small| !is_told(small)));
    command.args(more);
    // Within a job of Slurm they would say who meets whom.
    for name in ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS"] {
        command.env_remove(name);
    }
    command.stdin(Stdio::null());
    command
}

fn bench(targets: &[&str], more: &[&str]) -> Output {
    command(targets, more).output().unwrap()
}

fn told(output: &Output) -> Value {
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{err}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// That it could not be, why, and that nothing stays in a folder.
fn refused(output: &Output, due: &str, folder: &Path) {
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{err}");
    assert!(err.contains(due), "no {due:?} in {err}");
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
fn every_pattern_is_measured_and_nothing_stays() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let pages = tempfile::tempdir().unwrap();
    let page = pages.path().join("bench.html");
    let html = format!("--html={}", page.display());
    let through = format!("file:{}?direct=off&engine=pread", name(b.path()));
    let report = told(&bench(&[name(a.path()), &through], &[&html]));
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
    // A page is not overwritten, and that is said before anything is measured.
    let again = bench(&[name(a.path())], &[&html]);
    refused(&again, "file exists", a.path());
}

/// Documents, tokenized as a user does, and the config of a run over them; gives its name.
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
fn the_order_of_a_run_is_replayed_and_its_folder_is_as_it_was() {
    let (run, target) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let from = format!("--config={}", config(run.path()));
    let there = || {
        let names = fs::read_dir(run.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    };
    let before = there();
    let report = told(&bench(&[name(target.path())], &[&from, "--patterns=replay,rate"]));
    assert_eq!(there(), before);
    nothing_in(target.path());
    assert_eq!(report["need"]["sample_bytes"], 65 * 2);
    // Two layers of 64, 50,304 words and 64 places: what the plan of the run counts.
    let parameters = report["need"]["parameters"].as_u64().unwrap();
    assert!((3_300_000..3_340_000).contains(&parameters), "{parameters}");
    let order = report["method"]["order"].as_str().unwrap();
    assert!(order.ends_with("out_text_document"), "{order}");
}

#[test]
fn a_bucket_is_a_target_and_nothing_stays() {
    let server = S3Server::start().unwrap();
    let report = told(&bench(&[&server.url("bench")], &[]));
    assert_eq!(patterns(&report["targets"][0]), PATTERNS);
    assert_eq!(report["targets"][0]["file_system"], "s3");
    let store = storage::open_url(&server.url("bench")).unwrap();
    assert_eq!(store.list(&Key::root()).unwrap(), []);
    assert_eq!(server.upload_count(), 0);
    assert!(!report.to_string().contains(server.secret()));
}

#[test]
fn what_cannot_be_measured_says_why() {
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
fn a_server_that_refuses_or_hangs_is_told_of() {
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
    // Nothing was written there or, before it was looked into, to the first.
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!said.contains("cannot remove"), "{said}");
    let both = bench(&[name(nowhere.path()), &server.url_of("other", "bench")], &[]);
    refused(&both, "no such bucket", nowhere.path());
    let output = bench(&[&server.url_of("other", "bench")], &[]);
    refused(&output, "no such bucket", nowhere.path());
    // Everything is written, and then no read is answered any more.
    server.inject(FaultRule::every(1, Fault::Stall).of("GET").to("tokens.bin"));
    let hanging = format!("{url}&stall=600s&tries=1");
    let output = bench(&[&hanging], &["--timeout=15", "--patterns=stream"]);
    refused(&output, "stream on s3://test/bench", nowhere.path());
    server.heal();
    let store = storage::open_url(&url).unwrap();
    assert_eq!(store.list(&Key::root()).unwrap(), []);
}

/// Waits until it has begun to write; whether it has ended is for the caller to see.
fn begun(folder: &Path) {
    let until = Instant::now() + Duration::from_secs(60);
    while fs::read_dir(folder).unwrap().next().is_none() && Instant::now() < until {
        thread::sleep(Duration::from_millis(10));
    }
}

fn interrupt(child: &Child, signal: &str) {
    assert!(signals::send(child, signal));
}

#[test]
fn an_interrupted_one_leaves_nothing() {
    for (signal, more) in [("-INT", "--processes=1"), ("-TERM", "--processes=2")] {
        let folder = tempfile::tempdir().unwrap();
        let temporary = tempfile::tempdir().unwrap();
        let more = ["--patterns=stream,save", "--duration=20s", more];
        let mut command = command(&[name(folder.path())], &more);
        command.env("TMPDIR", temporary.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().unwrap();
        begun(folder.path());
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
    let report = told(&command.env("TMPDIR", temporary.path()).output().unwrap());
    assert_eq!(report["method"]["processes"], 2);
    assert_eq!(patterns(&report["targets"][0]), PATTERNS);
    // Each writer of each process has written its part.
    assert_eq!(report["method"]["checkpoint_bytes"], 1 << 20);
    nothing_in(folder.path());
    nothing_in(temporary.path());
}

#[test]
fn hosts_meet_in_a_folder_and_one_tells() {
    let (folder, meet) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let at = format!("--rendezvous={}", name(meet.path()));
    let start = |member: &str| {
        let mut command = command(&[name(folder.path())], &[&at, member, "--patterns=samples"]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let (first, second) = (start("--process=0/2"), start("--process=1/2"));
    let (first, second) = (first.wait_with_output().unwrap(), second.wait_with_output().unwrap());
    assert_eq!(told(&first)["method"]["processes"], 2);
    assert_eq!(second.status.code(), Some(0), "{}", String::from_utf8_lossy(&second.stderr));
    assert!(second.stdout.is_empty());
    nothing_in(folder.path());
    nothing_in(meet.path());
    let output = bench(&[name(folder.path())], &[&at]);
    refused(&output, "expected --process I/N or srun", folder.path());
}

/// Whichever of two hosts is told to stop, both end, and nothing stays where they measured or met.
#[test]
fn an_interrupted_host_ends_all() {
    for told in [0, 1] {
        let (folder, meet) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let at = format!("--rendezvous={}", name(meet.path()));
        let hosts = [0, 1].map(|nth| {
            let member = format!("--process={nth}/2");
            let more = [&at, &member, "--patterns=stream,save", "--duration=60s"];
            let mut command = command(&[name(folder.path())], &more);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        });
        begun(folder.path());
        interrupt(&hosts[told], "-INT");
        for (nth, host) in hosts.into_iter().enumerate() {
            let output = host.wait_with_output().unwrap();
            let err = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.code() == Some(2) && err.contains("interrupted"), "{nth}: {err}");
            assert_eq!(err.contains("another process failed: "), nth != told, "{nth}: {err}");
        }
        nothing_in(folder.path());
        nothing_in(meet.path());
    }
}

/// What a killed one left where others meet is told of, and not taken for theirs.
#[test]
fn remains_where_hosts_meet_are_told() {
    let (folder, meet) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let remains = meet.path().join("feedline-bench-meet-0-0");
    fs::create_dir(&remains).unwrap();
    fs::write(remains.join("id.1"), "\"old\"").unwrap();
    let at = format!("--rendezvous={}", name(meet.path()));
    let output = bench(&[name(folder.path())], &[&at, "--process=1/2", "--patterns=samples"]);
    refused(&output, ", which a killed benchmark left", folder.path());
}

#[test]
fn a_target_that_gets_full_is_told_of() {
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
fn no_name_leads_out_of_the_folder() {
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

/// A folder in memory, where there is such a place and it has room.
pub fn memory_folder() -> Option<tempfile::TempDir> {
    let memory = Path::new("/dev/shm");
    let facts = MountInfo::of(memory).ok()?;
    let has_room = facts.free_bytes.is_some_and(|free| free >= MEMORY_FREE_MIN);
    (facts.file_system == "tmpfs" && has_room).then(|| tempfile::tempdir_in(memory).ok())?
}

/// In memory if that can be: a model cannot be quicker than what is below it.
pub fn quick_folder() -> tempfile::TempDir {
    memory_folder().unwrap_or_else(|| tempfile::tempdir().unwrap())
}

/// What five rounds say of two models of a link of so many megabytes a second.
fn two_links(first: u32, second: u32) -> Value {
    let folder = quick_folder();
    let links = [first, second].map(|link| format!("--simulate=lustre,client.mb_per_s={link}"));
    let more = [&links[0], &links[1], "--patterns=stream", "--rounds=5", "--duration=400ms"];
    let report = told(&bench(&[name(folder.path())], &more));
    nothing_in(folder.path());
    assert_eq!(report["simulated"], true);
    let target = &report["targets"][0];
    assert_eq!(target["simulated"], "simulated: lustre");
    assert!(target["name"].as_str().unwrap().contains("(simulated)"), "{target}");
    report["comparisons"][0].clone()
}

/// Models answer in real time, so what else the machine does is noise in their rates: these differ
/// by far more. What smaller and no differences come to is tested in `report`, with no clock.
#[test]
fn models_that_differ_are_told_apart() {
    let apart = two_links(10, 80);
    assert_eq!(apart["told_apart"], true, "{apart}");
    assert!(apart["better"].as_str().unwrap().contains("mb_per_s=80"), "{apart}");
}

/// A store that does 64 requests in 20 ms and is asked for ten times as many: each waits for its
/// turn too, and that counts. Timed from when it was sent, none would have taken 100 ms.
#[test]
fn requests_are_timed_from_when_they_were_due() {
    let folder = quick_folder();
    let model = "--simulate=nfs,latency_us.read=[20000, 20000]";
    let more = [model, "--patterns=rate", "--ranks=1000", "--duration=200ms"];
    let report = told(&bench(&[name(folder.path())], &more));
    let rate = &report["targets"][0]["patterns"][0];
    assert!(rate["latency_ms"]["p50"].as_f64().unwrap() > 200.0, "{rate}");
    assert!(rate["more"]["due_per_s"].as_f64().unwrap() > 30_000.0, "{rate}");
    assert!(rate["more"]["never_sent"].as_f64().unwrap() > 0.0, "{rate}");
    nothing_in(folder.path());
}

#[test]
fn a_target_that_hangs_is_told_of_and_nothing_stays() {
    let (folder, models) = (quick_folder(), tempfile::tempdir().unwrap());
    let model = models.path().join("hung.toml");
    let stall = "\n[[stall]]\nof = \"read\"\nper_million = 1000000\nms = 3600000\n";
    let text = storage::simulate::StoreModel::built_in("nfs").unwrap().to_owned() + stall;
    fs::write(&model, text).unwrap();
    let simulate = format!("--simulate={}", model.display());
    // A run has as long as a request and four times its seconds, so that of the two the request is
    // the first to be given up.
    let more = [&simulate, "--patterns=samples", "--timeout=5", "--duration=3s"];
    let output = bench(&[name(folder.path())], &more);
    refused(&output, "no completion for ", folder.path());
    let more = [&simulate, "--patterns=start", "--timeout=5"];
    let output = bench(&[name(folder.path())], &more);
    refused(&output, "not finished after 5 s", folder.path());
}
