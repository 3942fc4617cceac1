//! Ranks that torchrun starts: its agent hosts the store, and restarts all when one dies.
//!
//! The agent here is this test, with the variables that torch 2.11's sets. With
//! `FEEDLINE_TORCHRUN=/path/to/torchrun` the real one starts the same ranks as well.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{Lab, assert_success, text, train, trainer};
use bridge::dist::Store;

/// Longer than ranks take to find one another on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn config(lab: &Lab, run: &str) -> std::path::PathBuf {
    let keys = [("batch.global", "8"), ("batch.micro", "2"), ("run.budget", "{ steps = 24 }")];
    lab.config(run, &[&keys[..], &[("checkpoint.every.steps", "2")]].concat())
}

/// One of two ranks on one node, as `torchrun --nproc-per-node 2 --max-restarts 3` starts it.
fn rank(config: &Path, rank: usize, port: u16, restart: usize) -> Child {
    let mut command = trainer("train", config);
    let (rank, port, restart) = (rank.to_string(), port.to_string(), restart.to_string());
    for (name, value) in [
        ("RANK", &*rank),
        ("LOCAL_RANK", &rank),
        ("ROLE_RANK", &rank),
        ("ROLE_NAME", "default"),
        ("GROUP_RANK", "0"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("WORLD_SIZE", "2"),
        ("ROLE_WORLD_SIZE", "2"),
        ("GROUP_WORLD_SIZE", "1"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", &port),
        ("TORCHELASTIC_RESTART_COUNT", &restart),
        ("TORCHELASTIC_MAX_RESTARTS", "3"),
        ("TORCHELASTIC_RUN_ID", "feedline"),
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ("OMP_NUM_THREADS", "1"),
    ] {
        command.env(name, value);
    }
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the binary starts")
}

/// The agent's store outlives the ranks: those of the second start do not see the keys of the first
/// ones, and resume from what these had saved.
#[test]
fn restarted_ranks_resume() {
    let lab = Lab::new();
    assert_success(&train(&config(&lab, "alone")));
    let config = config(&lab, "run");
    let store = Store::serve("127.0.0.1", 0, PATIENCE).unwrap();
    // torch's stores have keys of their own there.
    store.set("torch.rendezvous.feedline.0", b"1").unwrap();

    let mut ranks = [0, 1].map(|at| rank(&config, at, store.port(), 0));
    let started = Instant::now();
    while lab.log_lines("run").len() < 8 {
        if started.elapsed() > PATIENCE {
            panic!("no eighth line within {PATIENCE:?}");
        }
        assert!(ranks[0].try_wait().unwrap().is_none(), "the run ended before the kill");
        thread::sleep(Duration::from_millis(2));
    }
    ranks[1].kill().unwrap();
    let [first, second] = ranks.map(|rank| rank.wait_with_output().unwrap());
    assert_eq!((first.status.code(), second.status.code()), (Some(3), None));

    let ranks = [0, 1].map(|at| rank(&config, at, store.port(), 1));
    let ends = ranks.map(|rank| rank.wait_with_output().unwrap());
    ends.iter().for_each(assert_success);
    let stderr = text(&ends[0].stderr);
    assert!(stderr.contains("2 ranks") && stderr.contains("resuming from"), "{stderr}");
    lab.assert_same("run", "alone");
}

/// torchrun itself, if the machine has it.
#[test]
fn torchrun_starts_ranks() {
    let Some(torchrun) = std::env::var_os("FEEDLINE_TORCHRUN") else {
        println!("SKIPPED: FEEDLINE_TORCHRUN names no torchrun; its variables were tested");
        return;
    };
    let lab = Lab::new();
    assert_success(&train(&config(&lab, "alone")));
    for (run, more) in [("static", &[][..]), ("standalone", &["--standalone"])] {
        let config = config(&lab, run);
        let mut command = Command::new(&torchrun);
        command.args(more).args(["--nproc-per-node", "2", "--no-python"]);
        command.arg(env!("CARGO_BIN_EXE_trainer")).arg("train").arg(&config);
        let output = command.env("OMP_NUM_THREADS", "1").output().expect("torchrun starts");
        assert_success(&output);
        lab.assert_same(run, "alone");
    }
}
