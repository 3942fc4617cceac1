//! Ranks that die, hang, or never start: errors name them, and no rank waits forever. The timeouts
//! are tested, so they are short; no assertion is on how long anything took.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use crate::common::{PATIENCE, free_port, pulse, stores};
use bridge::dist::{Group, GroupOptions, Reduce, Store};
use bridge::{Error, Result, autograd, backward};
use tch::{Device, Kind, Tensor};

/// Many times the duration of a connection and a sum, also on a busy machine.
const SHORT: Duration = Duration::from_secs(5);
const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

/// A group whose timeout starts when the last of its ranks is ready.
fn group(store: &Store, name: &str, rank: usize, members: &[usize]) -> Group {
    store.meet("start", members[rank], members, PATIENCE).unwrap();
    Group::gloo(store, name, rank, members, &GroupOptions::local(SHORT)).unwrap()
}

fn sum(group: &Group) -> Result<()> {
    group.all_reduce(&mut Tensor::ones([1000], F32), Reduce::Sum)
}

/// The error of a collective, which must name these ranks and no others.
fn assert_names(error: &Error, begin: &str, missing: &str) {
    let text = error.to_string();
    assert!(error.is_peer_lost(), "{text}");
    assert!(text.starts_with(&format!("{begin}: {missing} missing after ")), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
}

/// Ranks `members` of the world: all but the last one run `body`.
fn without_the_last(
    members: &[usize],
    hold: bool,
    body: impl Fn(&Group) -> Result<()> + Sync,
) -> Vec<Error> {
    let all_failed = Barrier::new(members.len());
    let last = members.len() - 1;
    let results = stores(members.len(), |rank, store| {
        let group = group(&store, "dp[3]", rank, members);
        sum(&group).unwrap();
        if rank < last {
            let error = body(&group).unwrap_err();
            assert!(sum(&group).is_err(), "a group that failed stays failed");
            all_failed.wait();
            return Some(error);
        }
        if !hold {
            drop(group);
        }
        all_failed.wait();
        None
    });
    results.into_iter().flatten().collect()
}

#[test]
fn a_rank_that_hangs_is_named() {
    let errors = without_the_last(&[12, 28], true, sum);
    assert_names(&errors[0], "cannot complete all_reduce on dp[3] (ranks 12,28)", "rank 28");
    let errors = without_the_last(&[0, 1, 2, 3], true, sum);
    assert_eq!(errors.len(), 3);
    for error in errors {
        assert_names(&error, "cannot complete all_reduce on dp[3] (ranks 0-3)", "rank 3");
    }
}

#[test]
fn a_rank_that_leaves_is_named() {
    for error in without_the_last(&[4, 5, 9], false, sum) {
        assert_names(&error, "cannot complete all_reduce on dp[3] (ranks 4,5,9)", "rank 9");
    }
}

#[test]
fn the_other_side_of_a_message_is_named() {
    let receive = |group: &Group| group.recv(&mut Tensor::ones([3], F32), 1, 4)?.wait();
    for hold in [true, false] {
        let errors = without_the_last(&[5, 6], hold, receive);
        assert_names(&errors[0], "cannot complete recv on dp[3] (ranks 5,6)", "rank 6");
    }
}

#[test]
fn a_backward_pass_names_the_lost_rank() {
    let errors = without_the_last(&[0, 7], false, |group| {
        let x = Tensor::ones([3], F32).set_requires_grad(true);
        backward(&[autograd::copy_in(group, &x)?], &[Tensor::ones([3], F32)])
    });
    assert_names(&errors[0], "cannot complete all_reduce on dp[3] (ranks 0,7)", "rank 7");
}

#[test]
fn mismatched_collectives_are_reported() {
    let texts = stores(2, |rank, store| {
        let group = group(&store, "tp[0]", rank, &[0, 1]);
        let mut tensor = Tensor::ones([1000], F32);
        let done = if rank == 0 { sum(&group) } else { group.broadcast(&mut tensor, 0) };
        done.unwrap_err().to_string()
    });
    assert!(texts[0].contains("rank 1 is in broadcast instead"), "{}", texts[0]);
    assert!(texts[1].contains("rank 0 is in all_reduce instead"), "{}", texts[1]);
}

/// Of three ranks one never joins and one joins late: the first, which times out before the second,
/// does not report the second as missing.
#[test]
fn a_rank_that_waits_too_is_not_missing() {
    let texts = stores(3, |rank, store| {
        let group = group(&store, "dp[0]", rank, &[0, 1, 2]);
        let pulse = store.again().unwrap();
        thread::scope(|scope| {
            if rank == 2 {
                assert!(store.wait(&["failed"], PATIENCE).unwrap());
                return String::new();
            }
            if rank == 1 {
                thread::sleep(SHORT * 6 / 10);
            }
            let wait = scope.spawn(|| {
                let text = sum(&group).unwrap_err().to_string();
                if rank == 0 {
                    store.set("failed", b"").unwrap();
                }
                text
            });
            while !wait.is_finished() {
                pulse.tell_waits(Duration::from_millis(100)).unwrap();
                if let Some(wait) = pulse.waits().first() {
                    assert_eq!(
                        (wait.op, &wait.group[..], wait.peer),
                        ("all_reduce", "dp[0]", None)
                    );
                }
                thread::sleep(Duration::from_millis(50));
            }
            wait.join().unwrap()
        })
    });
    assert!(texts[0].contains(": rank 2 missing after"), "{}", texts[0]);
}

#[test]
fn ranks_missing_at_a_barrier_are_named() {
    let errors = stores(5, |rank, store| {
        // The group has three more ranks.
        let members: Vec<usize> = (0..8).collect();
        store.meet("start", rank, &members[..5], PATIENCE).unwrap();
        Group::gloo(&store, "world", rank, &members, &GroupOptions::local(SHORT)).unwrap_err()
    });
    for error in errors {
        assert_eq!(
            error.to_string(),
            "cannot pass barrier group/world: ranks 5-7 missing after 5.0 s"
        );
    }
    let errors = stores(2, |rank, store| {
        store.meet("start", rank, &[0, 1], PATIENCE).unwrap();
        store.meet("stage/data", 3 * rank, &[0, 1, 3], SHORT / 2).unwrap_err()
    });
    for error in errors {
        assert_eq!(error.to_string(), "cannot pass barrier stage/data: rank 1 missing after 2.5 s");
    }
}

#[test]
fn a_failure_before_a_barrier_is_reported_to_all() {
    let errors = stores(3, |rank, store| {
        if rank == 1 {
            store.fail("stage/data", rank, "no such file").unwrap();
            return None;
        }
        Some(store.meet("stage/data", rank, &[0, 1, 2], PATIENCE).unwrap_err())
    });
    for error in errors.into_iter().flatten() {
        assert_eq!(error.to_string(), "cannot pass barrier stage/data: rank 1: no such file");
    }
}

#[test]
fn a_port_in_use_and_an_absent_store_are_errors() {
    let store = Store::serve("127.0.0.1", 0, PATIENCE).unwrap();
    let error = Store::serve("127.0.0.1", store.port(), PATIENCE).unwrap_err();
    let text = error.to_string();
    assert!(!error.is_peer_lost(), "{text}");
    assert!(
        text.starts_with(&format!("cannot serve a store on 127.0.0.1:{}: ", store.port())),
        "{text}"
    );
    assert!(text.contains("hint: another run"), "{text}");

    let port = free_port();
    let error = Store::connect("127.0.0.1", port, Duration::from_secs(1)).unwrap_err();
    assert!(error.is_peer_lost(), "{error}");
    let expected = format!("cannot connect to the store on 127.0.0.1:{port}: ");
    assert!(error.to_string().starts_with(&expected), "{error}");
}

/// Not a test by itself: a rank of the tests below, in a process of its own. It completes one sum,
/// prints that it is ready, and then sums until an error, which it prints.
#[test]
fn a_rank_in_its_own_process() {
    let Ok(rank) = std::env::var("LOST_RANK") else { return };
    let rank: usize = rank.parse().unwrap();
    let port = std::env::var("LOST_PORT").unwrap().parse().unwrap();
    let store = Store::connect("127.0.0.1", port, PATIENCE).unwrap();
    let _pulse = pulse(&store);
    let group = group(&store, "dp[0]", rank, &[0, 1, 2]);
    sum(&group).unwrap();
    println!("\nready");
    loop {
        if let Err(error) = sum(&group) {
            println!("\nlost: {error}");
            return;
        }
    }
}

struct Ranks(Vec<(Child, BufReader<std::process::ChildStdout>)>);

impl Ranks {
    fn start(port: u16) -> Self {
        let start = |rank: usize| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "lost::a_rank_in_its_own_process", "--nocapture"]);
            command.env("LOST_RANK", rank.to_string()).env("LOST_PORT", port.to_string());
            let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
            let out = BufReader::new(child.stdout.take().unwrap());
            (child, out)
        };
        Ranks((0..3).map(start).collect())
    }

    /// Reads the output of a rank up to a line that starts with `begin`.
    fn wait_for(&mut self, rank: usize, begin: &str) -> String {
        let lines = (&mut self.0[rank].1).lines().map(|line| line.expect("a rank writes UTF-8"));
        let mut all = Vec::new();
        for line in lines {
            if line.starts_with(begin) {
                return line;
            }
            all.push(line);
        }
        panic!("rank {rank} ended without '{begin}': {all:?}");
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for (child, _) in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

const SIGSTOP: i32 = 19;

#[test]
fn processes_that_die_or_stop_are_named() {
    for stop in [false, true] {
        let store = Store::serve("127.0.0.1", 0, PATIENCE).unwrap();
        let mut ranks = Ranks::start(store.port());
        for rank in 0..3 {
            ranks.wait_for(rank, "ready");
        }
        if stop {
            assert!(bridge::runtime::signal(ranks.0[1].0.id(), SIGSTOP));
        } else {
            ranks.0[1].0.kill().unwrap();
        }
        for rank in [0, 2] {
            let text = ranks.wait_for(rank, "lost: ");
            let expected =
                "lost: cannot complete all_reduce on dp[0] (ranks 0-2): rank 1 missing after ";
            assert!(text.starts_with(expected), "{text}");
        }
    }
}
