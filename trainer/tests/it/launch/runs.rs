//! Whole runs of several processes: they are bit-identical to a run of one, and end as documented
//! when one of them fails.

#![expect(clippy::print_stdout, reason = "a skipped test prints the reason")]

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use crate::common::{Lab, assert_success, text, train, trainer};
use crate::ports::free_port;
use bridge::runtime::signal;

const SIGTERM: i32 = 15;
const SIGSTOP: i32 = 19;

/// `trainer launch -n RANKS -- train CONFIG`
fn launcher(ranks: usize, config: &Path) -> Command {
    let mut command = trainer("launch", Path::new("-n"));
    command.arg(ranks.to_string()).args(["--", "train"]).arg(config);
    command
}

fn launch(ranks: usize, config: &Path) -> Output {
    launcher(ranks, config).output().expect("the binary starts")
}

/// A config with 4 micro-batches a step and this division.
fn config(lab: &Lab, run: &str, division: &[(&str, &str)]) -> std::path::PathBuf {
    let mut keys = vec![("batch.global", "8"), ("batch.micro", "2"), ("run.budget", STEPS)];
    keys.extend(division);
    lab.config(run, &keys)
}

const STEPS: &str = "{ steps = 16 }";

/// Many more steps than a test has time for.
const ENDLESS: &str = "{ steps = 100000 }";

fn check_ends(output: &Output, code: i32, expected: &[&str]) {
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    for expected in expected {
        assert!(stderr.contains(expected), "{expected:?} is not in: {stderr}");
    }
}

/// From each line of a run's log: the time that its ranks waited for one another.
fn comm_waits_ms(lab: &Lab, run: &str) -> Vec<f64> {
    let text = fs::read_to_string(lab.path(run).join("log.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    lines.filter_map(|line| line["perf"]["comm_wait_ms"].as_f64()).collect()
}

#[test]
fn any_division_ends_in_the_bits_of_one_process() {
    let lab = Lab::new();
    assert_success(&train(&config(&lab, "alone", &[])));
    assert_eq!(comm_waits_ms(&lab, "alone"), [0.0; 16]);
    let divisions: [(usize, &[(&str, &str)]); 4] = [
        (2, &[]),
        (2, &[("parallel.pp", "2")]),
        (4, &[("parallel.zero", "1")]),
        (4, &[("parallel.pp", "2"), ("parallel.zero", "1")]),
    ];
    for (at, (ranks, division)) in divisions.into_iter().enumerate() {
        let run = format!("run-{at}");
        let output = launch(ranks, &config(&lab, &run, division));
        assert_success(&output);
        lab.assert_same(&run, "alone");
        let stderr = text(&output.stderr);
        assert!(stderr.contains("[0] launch: "), "{stderr}");
        let start = stderr.lines().find(|line| line.contains("[0] start: ready after "));
        let start = start.unwrap_or_else(|| panic!("no start in: {stderr}"));
        for stage in ["store", "groups", "index", "data", "checkpoint", "first collective"] {
            assert!(start.contains(&format!(" {stage} ")), "{stage}: {start}");
        }
        assert!(comm_waits_ms(&lab, &run).iter().all(|ms| *ms > 0.0));
        assert!(!stderr.lines().any(|line| line.starts_with("[1] plan")), "{stderr}");
    }
}

#[test]
fn a_run_resumes_with_another_division() {
    let lab = Lab::new();
    let long = ("run.budget", "{ steps = 400 }");
    assert_success(&train(&config(&lab, "alone", &[long])));
    let divisions: [(usize, &[(&str, &str)]); 4] = [
        (4, &[("parallel.pp", "2")]),
        (2, &[("parallel.zero", "1")]),
        (1, &[]),
        (2, &[("parallel.pp", "2")]),
    ];
    for (at, (ranks, division)) in divisions.into_iter().enumerate() {
        let config = config(&lab, "run", &[division, &[long]].concat());
        let is_last = at == 3;
        let mut child = started(&mut launcher(ranks, &config));
        if !is_last {
            wait_until_saved(&lab, "run", &mut child);
            assert!(signal(child.id(), SIGTERM));
        }
        let output = child.wait_with_output().unwrap();
        check_ends(&output, if is_last { 0 } else { 75 }, &[]);
    }
    lab.assert_same("run", "alone");
}

/// Waits until a launcher's run has saved another step, and returns the processes of its ranks.
fn wait_until_saved(lab: &Lab, run: &str, launcher: &mut Child) -> Vec<u32> {
    let folder = lab.path(run).join("ckpt");
    let newest = || {
        let names = fs::read_dir(&folder).into_iter().flatten().flatten();
        let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.filter(|name| name.starts_with("step-")).max()
    };
    let before = newest();
    while newest() == before {
        assert!(launcher.try_wait().unwrap().is_none(), "the run ended before it saved");
        thread::sleep(Duration::from_millis(10));
    }
    let pid = launcher.id();
    // In the order in which they were started, which is that of their ranks.
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    children.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

fn started(command: &mut Command) -> Child {
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the binary starts")
}

/// The output of a run in which `harm` hits one of its ranks after its first save.
fn harmed(
    lab: &Lab,
    ranks: usize,
    division: &[(&str, &str)],
    harm: impl FnOnce(&Child, &[u32]),
) -> Output {
    // On a busy machine, ranks start as far apart as it takes to load libtorch; a wait is reported
    // within a part of this timeout.
    let division = [&[("run.budget", ENDLESS), ("parallel.timeout", "'10s'")], division].concat();
    let mut child = started(&mut launcher(ranks, &config(lab, "run", &division)));
    let processes = wait_until_saved(lab, "run", &mut child);
    assert_eq!(processes.len(), ranks);
    harm(&child, &processes);
    child.wait_with_output().unwrap()
}

/// The saved step is complete, and one process resumes from it.
fn assert_resumes(lab: &Lab) {
    let before = lab.final_tensors("run");
    let step = before[0].0.split(':').next().unwrap();
    let keys = [("run.budget", ENDLESS), ("run.max_wall", "'1s'")];
    let output = train(&config(lab, "run", &keys));
    check_ends(&output, 75, &["resuming from", &format!("step-{step:0>12}")]);
}

#[test]
fn a_killed_rank_ends_all_and_checkpoints_survive() {
    let lab = Lab::new();
    let output = harmed(&lab, 4, &[("parallel.pp", "2")], |_, ranks| {
        assert!(signal(ranks[3], 9));
    });
    check_ends(&output, 3, &["launch: rank 3 was killed by signal 9", "rank 3 missing after"]);
    assert_resumes(&lab);
}

#[test]
fn a_rank_that_is_stopped_ends_all_within_the_time_out() {
    let lab = Lab::new();
    let output = harmed(&lab, 2, &[], |_, ranks| assert!(signal(ranks[1], SIGSTOP)));
    let expected = [
        "watch: rank 0 has waited too long",
        "rank 1: no heartbeat",
        "rank 1 missing after",
        "launch: rank 1 runs after another failed: killing it",
    ];
    check_ends(&output, 3, &expected);
    assert_resumes(&lab);
}

#[test]
fn a_request_to_stop_saves_on_all_ranks_at_one_step() {
    let lab = Lab::new();
    let output = harmed(&lab, 2, &[("parallel.pp", "2")], |launcher, _| {
        assert!(signal(launcher.id(), SIGTERM));
    });
    check_ends(&output, 75, &["stopped, saved at step"]);
    assert_resumes(&lab);
}

#[test]
fn a_number_of_ranks_that_does_not_divide_is_refused() {
    let lab = Lab::new();
    let output = launch(3, &config(&lab, "run", &[]));
    check_ends(
        &output,
        2,
        &["cannot divide the run among 3 ranks", "batch.global: expected a multiple of"],
    );
    let output = launch(3, &config(&lab, "run", &[("parallel.pp", "2")]));
    check_ends(&output, 2, &["expected a multiple of tp 1 x pp 2 = 2 ranks, found 3"]);
    assert!(!lab.path("run").exists(), "nothing was made");
}

#[test]
fn a_failure_of_all_ranks_is_reported() {
    let lab = Lab::new();
    let output = launch(2, &config(&lab, "run", &[("data.train", "'no/such_text_document'")]));
    check_ends(&output, 2, &["no/such_text_document.idx"]);
}

/// One rank of a run, started by hand.
fn rank(rank: usize, size: usize, address: &str, port: u16, config: &Path) -> Command {
    let mut command = trainer("train", config);
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", size.to_string());
    command.env("MASTER_ADDR", address).env("MASTER_PORT", port.to_string());
    command
}

#[test]
fn missing_ranks_are_named() {
    let lab = Lab::new();
    let config = config(&lab, "run", &[("parallel.timeout", "'4s'")]);
    let output = rank(0, 4, "127.0.0.1", free_port(), &config).output().unwrap();
    check_ends(
        &output,
        3,
        &["error: rank 0: cannot pass barrier stage/store: ranks 1-3 missing after 4.0 s"],
    );
    let output = rank(1, 2, "127.0.0.1", free_port(), &config).output().unwrap();
    check_ends(&output, 3, &["error: rank 1: cannot connect to the store on 127.0.0.1:"]);
    let output = rank(2, 2, "127.0.0.1", free_port(), &config).output().unwrap();
    check_ends(&output, 2, &["found rank 2 of 2, from RANK and WORLD_SIZE"]);
}

/// Two connected network namespaces: for sockets, two nodes.
struct Nodes {
    names: [String; 2],
    addresses: [String; 2],
}

impl Nodes {
    /// `None` without root, or without `ip`.
    fn new() -> Option<Self> {
        let id = std::process::id();
        let names = ["a", "b"].map(|end| format!("feedline-{id}{end}"));
        // Of a range for documentation, and in namespaces of their own.
        let addresses = ["198.51.100.1", "198.51.100.2"].map(str::to_owned);
        let ip = |arguments: &str| {
            let done = Command::new("ip").args(arguments.split(' ')).output();
            done.is_ok_and(|output| output.status.success())
        };
        let nodes = Nodes { names, addresses };
        let [a, b] = &nodes.names;
        let made = ip(&format!("netns add {a}"))
            && ip(&format!("netns add {b}"))
            && ip(&format!("-n {a} link add eth0 type veth peer name eth0 netns {b}"))
            && nodes.names.iter().zip(&nodes.addresses).all(|(name, address)| {
                ip(&format!("-n {name} addr add {address}/24 dev eth0"))
                    && ip(&format!("-n {name} link set eth0 up"))
                    && ip(&format!("-n {name} link set lo up"))
            });
        if !made {
            skip("two network namespaces cannot be made, which takes root and iproute2");
        }
        made.then_some(nodes)
    }

    /// A command, on one of them.
    fn on(&self, node: usize, command: &Command) -> Command {
        let mut within = Command::new("ip");
        within.args(["netns", "exec", &self.names[node]]);
        within.arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            if let Some(value) = value {
                within.env(name, value);
            }
        }
        within.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        within
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = Command::new("ip").args(["netns", "del", name]).output();
        }
    }
}

/// Reports that a test was skipped, also to the script that counts skipped tests.
fn skip(reason: &str) {
    use std::io::Write as _;
    println!("SKIPPED: {reason}");
    if let Some(list) = std::env::var_os("FEEDLINE_SKIPPED") {
        let mut list = fs::OpenOptions::new().append(true).create(true).open(list).unwrap();
        writeln!(list, "trainer: {reason}").unwrap();
    }
}

#[test]
fn two_nodes_are_one_run_and_a_cut_cable_ends_it() {
    let Some(nodes) = Nodes::new() else { return };
    let lab = Lab::new();
    assert_success(&train(&config(&lab, "alone", &[])));
    // The first two ranks are on one node, and reach their store without the network.
    let start = |config: &Path| -> Vec<Child> {
        let start = |at: usize| {
            let command = rank(at, 4, &nodes.addresses[0], 29500, config);
            nodes.on(at / 2, &command).spawn().expect("ip starts")
        };
        (0..4).map(start).collect()
    };
    let division = [("parallel.pp", "2"), ("parallel.timeout", "'15s'")];
    for child in start(&config(&lab, "run", &division)) {
        assert_success(&child.wait_with_output().unwrap());
    }
    lab.assert_same("run", "alone");

    let division = [&division[..], &[("run.budget", ENDLESS)]].concat();
    let mut ranks = start(&config(&lab, "cut", &division));
    wait_until_saved(&lab, "cut", &mut ranks[0]);
    let cut = ["-n", &nodes.names[1], "link", "set", "eth0", "down"];
    assert!(Command::new("ip").args(cut).status().unwrap().success());
    for child in ranks {
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
    }
    assert!(!lab.final_tensors("cut").is_empty());
}
