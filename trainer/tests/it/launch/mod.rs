//! The session of ranks, the launcher and the watchdog.

mod runs;
mod torchrun;

use std::io::Write;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::ports::free_port;
use bridge::dist::{Group, Reduce};
use tch::Tensor;
use trainer::launch::local::{Launch, WAITING, launch};
use trainer::launch::{Session, StartupStage, StoreHost, Watchdog, World};
use trainer::{Error, Result};

/// Far more than anything takes, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Many times the duration of a rendezvous, also there.
const SHORT: Duration = Duration::from_secs(5);

fn world(port: u16, rank: usize, size: usize) -> World {
    World {
        rank,
        size,
        local_rank: rank,
        host: "127.0.0.1".to_owned(),
        port,
        keeper: StoreHost::FirstRank,
        restart: 0,
        source: "a test",
    }
}

/// Sessions of ranks with these (rank, size), each on its thread.
fn sessions<T: Send>(
    given: &[(usize, usize)],
    timeout: Duration,
    body: impl Fn(Result<Session>) -> T + Sync,
) -> Vec<T> {
    let port = free_port();
    thread::scope(|scope| {
        let spawn = |(rank, size): &(usize, usize)| {
            let (world, body) = (world(port, *rank, *size), &body);
            scope.spawn(move || body(Session::begin(world, timeout)))
        };
        let ranks: Vec<_> = given.iter().map(spawn).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn ranks_pass_all_stages_and_finish() {
    let sums = sessions(&[(0, 3), (1, 3), (2, 3)], PATIENCE, |session| {
        let session = session.unwrap();
        let rank = session.world().rank;
        let connect = || -> Result<Group> {
            let options = session.options();
            Ok(Group::gloo(session.store(), "world", rank, &[0, 1, 2], &options)?)
        };
        let group = session.stage(StartupStage::Groups, connect).unwrap();
        let mut sum = Tensor::from_slice(&[rank as i64]);
        session
            .stage(StartupStage::FirstCollective, || Ok(group.all_reduce(&mut sum, Reduce::Sum)?))
            .unwrap();
        drop(group);
        session.finish().unwrap();
        sum.int64_value(&[0])
    });
    assert_eq!(sums, [3, 3, 3]);
}

#[test]
fn a_rank_that_fails_in_a_stage_ends_it_for_all() {
    let outcomes = sessions(&[(0, 3), (1, 3), (2, 3)], PATIENCE, |session| {
        let session = session.unwrap();
        let rank = session.world().rank;
        let error = session
            .stage(StartupStage::Data, || {
                let operation = "open the corpus".to_owned();
                let source = std::io::ErrorKind::NotFound.into();
                if rank == 1 { Err(Error::Run { operation, source }) } else { Ok(()) }
            })
            .unwrap_err();
        (error.is_peer_lost(), error.to_string(), session.abort(&error))
    });
    assert_eq!(outcomes[1].1, "cannot open the corpus: entity not found");
    assert!(!outcomes[1].0);
    for rank in [0, 2] {
        assert!(outcomes[rank].0);
        let expected =
            "cannot pass barrier stage/data: rank 1: cannot open the corpus: entity not found";
        assert_eq!(outcomes[rank].1, expected);
    }
    let first: Vec<_> = outcomes.iter().filter(|outcome| outcome.2.is_none()).collect();
    assert_eq!(first.len(), 1, "one was the first to fail: {outcomes:?}");
}

#[test]
fn missing_ranks_are_named_in_every_stage() {
    for text in sessions(&[(0, 4), (2, 4)], SHORT, |session| session.unwrap_err().to_string()) {
        assert_eq!(text, "cannot pass barrier stage/store: ranks 1,3 missing after 5.0 s");
    }
    let texts = sessions(&[(0, 2), (1, 2)], SHORT, |session| {
        let session = session.unwrap();
        if session.world().rank == 1 {
            // It is connected, and does not enter the stage.
            assert!(session.store().wait(&["failed"], PATIENCE).unwrap());
            return String::new();
        }
        let error = session.stage(StartupStage::FirstCollective, || Ok(())).unwrap_err();
        session.store().set("failed", b"").unwrap();
        error.to_string()
    });
    let expected = "cannot pass barrier stage/first collective: rank 1 missing after 5.0 s";
    assert_eq!(texts[0], expected);
    let text = sessions(&[(1, 2)], SHORT, |session| session.unwrap_err()).remove(0);
    assert!(text.is_peer_lost());
    assert!(text.to_string().contains("cannot connect to the store on 127.0.0.1:"), "{text}");
}

#[test]
fn a_wrong_number_of_ranks_ends_all_at_once() {
    let texts =
        sessions(&[(0, 3), (1, 2), (2, 3)], PATIENCE, |session| session.unwrap_err().to_string());
    assert!(texts[1].contains("expected 3 ranks, found 2 on rank 1"), "{}", texts[1]);
    for rank in [0, 2] {
        let expected = "cannot pass barrier stage/store: rank 1: cannot find the other ranks";
        assert!(texts[rank].contains(expected), "{texts:?}");
    }
    let texts =
        sessions(&[(0, 3), (1, 3), (1, 3)], PATIENCE, |session| session.unwrap_err().to_string());
    assert!(texts.iter().any(|text| text.contains("two processes have rank 1")), "{texts:?}");
}

#[test]
fn a_rank_with_a_smaller_world_size_leaves_the_store_open() {
    let port = free_port();
    let begin = |rank, size| Session::begin(world(port, rank, size), PATIENCE).unwrap_err();
    let expected = "cannot pass barrier stage/store: rank 1: cannot find the other ranks: \
                    expected 3 ranks, found 2 on rank 1";
    thread::scope(|scope| {
        let keeper = scope.spawn(|| begin(0, 3).to_string());
        scope.spawn(|| begin(1, 2)).join().unwrap();
        let late = begin(2, 3).to_string();
        assert!(late.starts_with(expected), "{late}");
        assert!(keeper.join().unwrap().starts_with(expected));
    });
}

#[test]
fn a_port_in_use_is_reported() {
    // Without IPv6 the store has an address of IPv4.
    let taken = TcpListener::bind("[::]:0").or_else(|_| TcpListener::bind("0.0.0.0:0")).unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = Session::begin(world(port, 0, 2), SHORT).unwrap_err();
    assert!(!error.is_peer_lost(), "{error}");
    let text = error.to_string();
    assert!(text.contains(&format!("cannot serve a store on 127.0.0.1:{port}")), "{text}");
    assert!(text.contains("hint: another run"), "{text}");
}

/// Collects the output of a launcher's ranks.
#[derive(Clone, Default)]
struct Words(Arc<Mutex<Vec<u8>>>);

impl Words {
    fn lines(&self) -> Vec<String> {
        let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    }
}

impl Write for Words {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

struct Launched {
    code: u8,
    out: Vec<String>,
    err: Vec<String>,
}

/// Ranks that run a shell script. `meanwhile` gets their output, and may ask them to stop.
fn shell(
    ranks: usize,
    script: &str,
    meanwhile: impl FnOnce(&Words, &AtomicBool) + Send,
) -> Launched {
    let (out, err, stop) = (Words::default(), Words::default(), AtomicBool::new(false));
    let code = thread::scope(|scope| {
        scope.spawn(|| meanwhile(&out, &stop));
        launch(Launch {
            program: PathBuf::from("/bin/sh"),
            arguments: vec!["-c".into(), script.into()],
            ranks,
            stop: &stop,
            out: Box::new(out.clone()),
            err: Box::new(err.clone()),
        })
        .unwrap()
    });
    Launched { code, out: out.lines(), err: err.lines() }
}

#[test]
fn output_lines_are_prefixed_with_the_rank() {
    let done = shell(3, "echo rank $RANK of $WORLD_SIZE; printf 'no end' >&2", |_, _| {});
    assert_eq!(done.code, 0);
    assert_eq!(done.out, ["[0] rank 0 of 3", "[1] rank 1 of 3", "[2] rank 2 of 3"]);
    assert_eq!(done.err, ["[0] no end", "[1] no end", "[2] no end"]);
}

#[test]
fn threads_of_ranks_that_share_cores_sleep_when_they_wait() {
    if WAITING.iter().any(|name| std::env::var_os(name).is_some()) {
        println!("SKIPPED: the environment sets how threads wait, by one of {WAITING:?}");
        return;
    }
    let script = "echo ${OMP_WAIT_POLICY:-none}";
    let out = |ranks| shell(ranks, script, |_, _| {}).out;
    assert_eq!(out(1), ["[0] none"], "a single rank spins, which is quicker");
    assert_eq!(out(2), ["[0] passive", "[1] passive"]);
}

#[test]
fn the_launcher_exits_with_the_worst_code() {
    for (script, expected) in [
        ("exit 0", 0),
        ("[ $RANK = 1 ] && exit 75; exit 0", 75),
        // The cause, and not its consequences.
        ("[ $RANK = 1 ] && exit 2; exit 3", 2),
        ("[ $RANK = 1 ] && exit 3; exit 75", 3),
        ("[ $RANK = 1 ] && kill -9 $$; exit 0", 3),
        ("[ $RANK = 1 ] && kill -9 $$; exit 2", 2),
    ] {
        assert_eq!(shell(3, script, |_, _| {}).code, expected, "{script}");
    }
}

fn wait_for_lines(output: &Words, count: usize) {
    while output.lines().len() < count {
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_stop_request_is_forwarded_and_a_second_one_kills() {
    let script = "trap 'echo asked; exit 75' TERM; echo ready; while :; do sleep 0.02; done";
    let done = shell(2, script, |out, stop| {
        wait_for_lines(out, 2);
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!((done.code, done.out.len()), (75, 4), "{:?}", done.out);

    let script = "trap 'echo asked' TERM; echo ready; while :; do sleep 0.02; done";
    let done = shell(2, script, |out, stop| {
        for lines in [2, 4] {
            wait_for_lines(out, lines);
            stop.store(true, Ordering::Relaxed);
        }
    });
    assert_eq!(done.code, 3, "{:?}", done.out);
}

#[test]
fn ranks_do_not_outlive_one_that_fails() {
    let done = shell(3, "echo $$; [ $RANK = 2 ] && exit 2; exec sleep 1000", |_, _| {});
    assert_eq!(done.code, 2);
    for line in done.out {
        let process = line.split(' ').nth(1).unwrap().parse().unwrap();
        assert!(!bridge::runtime::signal(process, 0), "process {process} is still there");
    }
}

/// Collects the log of the library: there is one logger a process.
struct Log(Mutex<Vec<String>>);

static LOG: Log = Log(Mutex::new(Vec::new()));

impl Log {
    /// Whether one message contains all of these.
    fn has(&self, expected: &[&str]) -> bool {
        let messages = self.0.lock().unwrap();
        messages.iter().any(|message| expected.iter().all(|expected| message.contains(expected)))
    }
}

impl log::Log for Log {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        self.0.lock().unwrap().push(record.args().to_string());
    }

    fn flush(&self) {}
}

/// What one report must contain; otherwise the waiting rank times out.
const EXPECTED: [&str; 5] = [
    "watch: rank 0 has waited too long; activity of each rank:\n",
    "\n  rank 0: Backward(micro-batch 3), waiting for rank 1 (recv on pp[0], ",
    "\n  rank 1: Forward(micro-batch 4), not waiting\n",
    "\n  rank 2: no heartbeat; last: starting, not waiting\n",
    "\n  no heartbeat: ranks 2",
];

#[test]
fn a_long_wait_logs_the_activity_of_all_ranks() {
    log::set_logger(&LOG).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
    sessions(&[(0, 3), (1, 3), (2, 3)], PATIENCE, |session| {
        let session = session.unwrap();
        let rank = session.world().rank;
        let options = session.options();
        let group = Group::gloo(session.store(), "pp[0]", rank, &[0, 1, 2], &options).unwrap();
        let doing = move || ["Backward(micro-batch 3)", "Forward(micro-batch 4)", ""][rank].into();
        let limit = Duration::from_millis(1500);
        // The watchdog of the last rank ends at once, as if its process were stopped.
        let watch = Watchdog::start(session.store(), (rank, 3), limit, doing);
        let watch = (rank < 2).then(|| watch.unwrap());
        let mut tensor = Tensor::from_slice(&[1.0_f32]);
        match rank {
            0 => group.recv(&mut tensor, 1, 0).unwrap().wait().unwrap(),
            1 => {
                while !LOG.has(&EXPECTED) {
                    thread::sleep(Duration::from_millis(20));
                }
                group.send(&tensor, 0, 0).unwrap().wait().unwrap();
            }
            _ => {}
        }
        drop(watch);
        session.finish().unwrap();
    });
}
