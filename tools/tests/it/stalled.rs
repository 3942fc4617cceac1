//! Each command on a store that accepts connections and never answers says what it waits for.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use storage::s3_server::S3Server;

/// Commands that read from or write to a store; `$` is a URL, `@` a local folder.
const COMMANDS: [&str; 25] = [
    "inspect $a",
    "check $a",
    "convert $a.bin @out",
    "merge --input $a $b --out @out",
    "split $a --split 9,1,0 --out @out",
    "repair $a --out @out",
    "index build $a --seq-length 8",
    "materialize $a --seq-length 8 --out @out",
    "samples $a --seq-length 8",
    "ckpt ls $a",
    "ckpt inspect $a",
    "ckpt verify $a",
    "ckpt diff $a $b",
    "ckpt export $a @out",
    "ckpt import --from hf $a @out",
    "ckpt reshard $a @out",
    "ckpt retain $a",
    "ckpt drain $a @out",
    "ckpt doctor $a",
    "ckpt scrub $a --rate 1MiB",
    "bench $a",
    "doctor $a",
    "clean --json-in $a.jsonl --out @out",
    "clean --json-in @texts.jsonl --out $a",
    "tokenizer train --type byte-bpe --vocab-size 300 --out @out $a.jsonl",
];

/// Commands of a local disk, or of none.
const LOCAL: [&str; 7] = [
    "ckpt bench",
    "completions",
    "offload bench",
    "offload ls",
    "stripe get",
    "stripe recommend",
    "stripe set",
];

/// Far longer than the first report takes on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

#[test]
fn a_store_that_does_not_answer_is_named() {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = server.local_addr().unwrap();
    // Connections stay open until the end of the test.
    thread::spawn(move || server.incoming().collect::<Vec<_>>());
    let folder = tempfile::tempdir().unwrap();
    let outputs = |number: usize| folder.path().join(number.to_string());
    for number in 0..COMMANDS.len() {
        fs::create_dir(outputs(number)).unwrap();
        fs::write(outputs(number).join("texts.jsonl"), "{\"text\": \"a\"}\n").unwrap();
    }
    let url = |name: &str| format!("s3://bucket/{name}?endpoint=http://{address}&region=us-east-1");
    // All at once: each waits for most of its time.
    let started: Vec<_> = COMMANDS
        .iter()
        .enumerate()
        .map(|(number, line)| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_feedline"));
            command.env("AWS_ACCESS_KEY_ID", "key").env("AWS_SECRET_ACCESS_KEY", "secret");
            command.args(line.split(' ').map(|word| {
                match (word.strip_prefix('$'), word.strip_prefix('@')) {
                    (Some(name), _) => url(name),
                    (_, Some(name)) => outputs(number).join(name).display().to_string(),
                    _ => word.to_owned(),
                }
            }));
            (line, first_report(command))
        })
        .collect();
    let until = Instant::now() + LIMIT;
    let silent: Vec<_> = started
        .into_iter()
        .filter_map(|(line, (mut child, reported))| {
            let report = reported.recv_timeout(until.saturating_duration_since(Instant::now()));
            child.kill().unwrap();
            child.wait().unwrap();
            let report = report.unwrap_or_default();
            let is_named = match line.starts_with("doctor ") {
                // It has a limit of its own for each step.
                true => report.contains("warning: probe the bucket: not done after "),
                false => {
                    report.starts_with("warning: ")
                        && report.contains(" s3://bucket/")
                        && report.contains(": no completion for ")
                }
            };
            (!is_named).then(|| format!("{line}: {report}"))
        })
        .collect();
    assert!(silent.is_empty(), "{silent:#?}");
}

/// Starts a command. Receives its first report, or all that it printed if it ends without one.
fn first_report(mut command: Command) -> (Child, std::sync::mpsc::Receiver<String>) {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let stderr = BufReader::new(child.stderr.take().unwrap());
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let mut other = String::new();
        for line in stderr.lines().map_while(Result::ok) {
            if line.contains("no completion for") {
                _ = sender.send(line);
                return;
            }
            other += &line;
        }
        _ = sender.send(other);
    });
    (child, receiver)
}

#[test]
fn every_command_is_tried() {
    let page = include_str!("../../../docs/reference/feedline.md");
    let usages = page.split("```text\n").skip(1).filter_map(|block| block.lines().next());
    let callable = usages.filter(|line| !line.ends_with("<COMMAND>"));
    let words = |line: &str| {
        let is_verb = |word: &&str| word.bytes().all(|byte| byte.is_ascii_lowercase());
        line.split(' ').take_while(is_verb).take(2).collect::<Vec<_>>().join(" ")
    };
    let known: BTreeSet<_> = callable.map(|line| words(&line["feedline ".len()..])).collect();
    let tried: BTreeSet<_> =
        COMMANDS.iter().map(|line| words(line)).chain(LOCAL.map(str::to_owned)).collect();
    assert_eq!(known, tried);
}

#[test]
fn the_level_of_the_log_is_an_option() {
    let server = S3Server::start().unwrap();
    let run = |level: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_feedline"));
        command.args(["inspect", &server.url("absent"), "--log", level]).output().unwrap()
    };
    let refused = run("loud");
    let text = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(2), "{text}");
    assert!(text.contains("expected off, error, warn, info, debug, found 'loud'"), "{text}");
    let logs_endpoint = |level| {
        let text = String::from_utf8(run(level).stderr).unwrap();
        assert!(text.contains("error: cannot "), "{text}");
        text.contains(&format!("s3://test: endpoint {}", server.endpoint()))
    };
    assert!(logs_endpoint("info"));
    assert!(!logs_endpoint("warn"));
}
