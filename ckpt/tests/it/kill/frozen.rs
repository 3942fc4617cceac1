//! A writer that was frozen for longer than the heartbeat timeout: when it wakes, it commits
//! nothing, deletes nothing, and reports which process took over.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use crate::common::children::{await_true, signal};
use crate::common::{Folder, SERIAL, State};
use ckpt::{Checkpoints, Error, LivenessTimeouts};
use storage::s3_server::S3Server;
use storage::testing::fault_store::{FaultPlan, FaultStore, HookLayer};
use storage::{Key, Storage};

fn run() -> Key {
    Key::new("run").unwrap()
}

/// A store whose n-th call after it is armed hangs until it is released: before or after it takes
/// effect.
struct HungStore {
    calls: AtomicUsize,
    is_armed: AtomicBool,
    nth: usize,
    is_after: bool,
    /// Whether the call hangs, and whether it was released.
    state: Mutex<(bool, bool)>,
    changed: Condvar,
}

impl HungStore {
    fn new(nth: usize, is_after: bool) -> Arc<Self> {
        let (calls, is_armed) = (AtomicUsize::new(0), AtomicBool::new(false));
        let (state, changed) = (Mutex::default(), Condvar::new());
        Arc::new(HungStore { calls, is_armed, nth, is_after, state, changed })
    }

    fn over(self: &Arc<Self>, inner: Arc<dyn Storage>) -> Arc<dyn Storage> {
        let [before, after] = [(); 2].map(|()| Arc::clone(self));
        HookLayer::around(
            inner,
            move |_, _, _| {
                if before.is_armed.load(Ordering::SeqCst) {
                    let number = before.calls.fetch_add(1, Ordering::SeqCst);
                    before.hang(number == before.nth && !before.is_after);
                }
                Ok(())
            },
            move |_, _, _| {
                let count = after.calls.load(Ordering::SeqCst);
                after.hang(count == after.nth + 1 && after.is_after);
                Ok(())
            },
        )
    }

    fn hang(&self, is_it: bool) {
        let mut state = self.state.lock().unwrap();
        if is_it && !state.1 {
            state.0 = true;
            self.changed.notify_all();
            drop(self.changed.wait_while(state, |state| !state.1).unwrap());
        }
    }

    /// Waits until the call hangs, or `is_over`.
    fn await_hang(&self, is_over: impl Fn() -> bool) -> bool {
        await_true("a call that hangs", || self.state.lock().unwrap().0 || is_over());
        self.state.lock().unwrap().0
    }

    fn release(&self) {
        self.state.lock().unwrap().1 = true;
        self.changed.notify_all();
    }
}

/// Releases the call on drop, also after a failed assertion.
struct Releases(Arc<HungStore>);

impl Drop for Releases {
    fn drop(&mut self) {
        self.0.release();
    }
}

/// The complete steps, each with a value that identifies its state.
fn contents(steps: &Checkpoints) -> BTreeMap<u64, String> {
    let all = steps.steps().unwrap();
    let open = |step| steps.open_step(step).unwrap();
    all.into_iter().map(|step| (step, open(step).meta().to_string())).collect()
}

const FOREVER: LivenessTimeouts =
    LivenessTimeouts { beat: Duration::from_secs(1000), silence_max: Duration::from_secs(9000) };

/// A store with the leftovers of step 4 by a process of another machine.
fn new_store(has_rename: bool) -> Arc<dyn Storage> {
    let plan = FaultPlan { no_exclusive_rename: !has_rename, ..FaultPlan::default() };
    let store = FaultStore::new(3, plan);
    let left = if has_rename { ".tmp-step-000000000004-" } else { "step-000000000004/data-" };
    let left = Key::new(format!("run/{left}elsewhere.0.0.1.1.1.1/a")).unwrap();
    storage::write_all(&store, &left, b"a").unwrap();
    Arc::new(store)
}

/// Hangs the n-th call of a sweep, a save and a retention pass, lets a successor take over
/// meanwhile, and wakes the call. Returns whether there was such a call.
fn check_hang(has_rename: bool, nth: usize, is_after: bool, saves: bool) -> bool {
    let context = format!("rename {has_rename}, call {nth}, after {is_after}, saves {saves}");
    let store = new_store(has_rename);
    let open = |store: &Arc<dyn Storage>| {
        Checkpoints::open(Arc::clone(store), run()).with_options(SERIAL).with_patience(FOREVER)
    };
    let successor = open(&store);
    for step in 1..4 {
        State::small(step).save(&successor, step).unwrap();
    }
    let hung = HungStore::new(nth, is_after);
    let frozen = open(&hung.over(Arc::clone(&store)));
    let lease = frozen.lock().unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let released = Releases(Arc::clone(&hung));
        hung.is_armed.store(true, Ordering::SeqCst);
        let work = scope.spawn(|| {
            let swept = frozen.sweep().map(drop);
            let saved = State::small(104).save(&frozen, 4).map(drop);
            let retained = frozen.retain(2).map(drop);
            is_over.store(true, Ordering::SeqCst);
            (swept, saved, retained)
        });
        if !hung.await_hang(|| is_over.load(Ordering::SeqCst)) {
            let (swept, saved, retained) = work.join().unwrap();
            swept.expect(&context);
            saved.expect(&context);
            retained.expect(&context);
            // A call that fails cannot hang after its effect.
            return hung.calls.load(Ordering::SeqCst) > nth;
        }
        // Simulates the timeout of its heartbeats: this process itself does not time out.
        for name in store.list_names(&run()).unwrap() {
            if name.starts_with(".lease-") {
                store.delete(&run().join(&name).unwrap()).unwrap();
            }
        }
        let new_lease = successor.lock().unwrap();
        successor.sweep().expect(&context);
        let was_committed = successor.steps().unwrap().contains(&4);
        if saves {
            let step = if was_committed { 5 } else { 4 };
            State::small(200 + step).save(&successor, step).expect(&context);
        }
        let expected = contents(&successor);

        drop(released);
        let (_, saved, retained) = work.join().unwrap();
        assert!(saved.is_err() || was_committed, "{context}: committed");
        // The last calls of a pass that has deleted everything may hang as well.
        let is_done = expected.len() <= 2 + usize::from(saves);
        assert!(retained.is_err() || is_done, "{context}: deleted");
        assert_eq!(contents(&successor), expected, "{context}: {saved:?}, {retained:?}");
        for step in expected.keys() {
            successor.open_step(*step).unwrap().verify().expect(&context);
        }
        for entry in store.list(&run()).unwrap() {
            let path = entry.key.as_str();
            let listed = expected.keys().any(|step| path.contains(&format!("/step-{step:012}/")));
            assert!(listed || !path.ends_with("/COMMIT"), "{context}: {path} of no step");
        }
        let refused = State::small(9).save(&frozen, 9);
        let text = format!("process {} on", std::process::id());
        match refused {
            Err(Error::LeaseLost { holder, .. }) => assert!(holder.contains(&text), "{holder}"),
            refused => panic!("{context}: {refused:?}"),
        }
        drop((lease, new_lease));
        assert_eq!(contents(&successor), expected, "{context}");
        true
    })
}

#[test]
fn hung_call_changes_nothing_after_takeover() {
    for has_rename in [true, false] {
        for is_after in [false, true] {
            for saves in [true, false] {
                let calls = (0..).take_while(|&nth| check_hang(has_rename, nth, is_after, saves));
                let count = calls.count();
                assert!(count > 40, "a save and a pass of {count} calls");
            }
        }
    }
}

/// Environment variable: how often a writer is frozen. Default: 5.
const ROUNDS: &str = "CKPT_TEST_FROZEN_ROUNDS";

/// Environment variable: the folder that the child process saves in.
const URL: &str = "CKPT_TEST_FROZEN_URL";

/// Environment variable: the folder that the child process saves in, and hangs.
const HANGING_URL: &str = "CKPT_TEST_HANGING_URL";

/// The folder of the files for synchronization with the test.
const SIGNS: &str = "CKPT_TEST_HANGING_SIGNS";

const STEP_2: &str = "step-000000000002";

const PATIENCE: LivenessTimeouts =
    LivenessTimeouts { beat: Duration::from_millis(50), silence_max: Duration::from_millis(500) };

/// The entry point of the child processes of the tests below, which act as a trainer; not a test
/// itself.
#[test]
fn child_saves_until_it_loses_its_lease() {
    let Ok(url) = std::env::var(URL) else { return };
    let steps = Checkpoints::open(storage::open_url(&url).unwrap(), run());
    let steps = steps.with_options(SERIAL).with_patience(PATIENCE);
    let lease = steps.lock().unwrap();
    steps.sweep().unwrap();
    let first = steps.newest().unwrap().map_or(0, |newest| newest.step() + 1);
    for step in first.. {
        let done = lease.check().and_then(|()| {
            State::small(step).save(&steps, step)?;
            steps.retain(2)
        });
        if let Err(error) = done {
            panic!("stopped: {error}");
        }
    }
}

/// A child in a separate PID namespace, as in a container: other processes cannot distinguish it
/// from one of another machine.
struct Contained {
    outer: Child,
    pid: u32,
}

impl Contained {
    /// `None` if this process lacks the permission.
    fn start(url: &str) -> Option<Self> {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child"]).arg(std::env::current_exe().unwrap());
        command.args([
            "--exact",
            "kill::frozen::child_saves_until_it_loses_its_lease",
            "--nocapture",
        ]);
        command.env(URL, url).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let outer = command.spawn().ok()?;
        let id = outer.id();
        let children = format!("/proc/{id}/task/{id}/children");
        let mut inner = None;
        await_true("a process in a namespace", || {
            let text = std::fs::read_to_string(&children).unwrap_or_default();
            inner = text.split_whitespace().next().and_then(|pid| pid.parse().ok());
            inner.is_some() || crate::common::children::has_ended(id)
        });
        Some(Contained { outer, pid: inner? })
    }

    fn end(mut self) -> (bool, String) {
        let mut text = String::new();
        self.outer.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        (self.outer.wait().unwrap().success(), text)
    }
}

/// Stops a process, and waits until all its threads are stopped: a thread on another core runs for
/// a moment after the signal.
fn freeze(pid: u32) {
    signal(pid, "-STOP");
    let is_stopped = |stat: String| stat.rsplit(") ").next().is_some_and(|it| it.starts_with('T'));
    await_true("a stopped process", || {
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        let mut stats = threads.map(|it| std::fs::read_to_string(it.unwrap().path().join("stat")));
        stats.all(|stat| stat.is_ok_and(is_stopped))
    });
}

/// Freezes one writer after the other.
#[expect(clippy::print_stderr, reason = "a skipped test must be seen")]
fn check_frozen(url: &str) {
    let rounds = std::env::var(ROUNDS).map_or(5, |rounds| rounds.parse().unwrap());
    let steps = Checkpoints::open(storage::open_url(url).unwrap(), run());
    let newest = || steps.newest().unwrap().map_or(0, |newest| newest.step());
    let await_steps = |count: u64| {
        let from = newest();
        await_true("a step", || newest() >= from + count);
    };
    let Some(mut running) = Contained::start(url) else {
        return eprintln!("SKIPPED: this process may not make a PID namespace");
    };
    for round in 0..rounds {
        await_steps(3);
        std::thread::sleep(Duration::from_millis(7 * round as u64 % 40));
        freeze(running.pid);
        let successor = Contained::start(url).expect("the first start succeeded");
        await_steps(3);
        // The successor is stopped, so that only the other writer could change anything.
        freeze(successor.pid);
        let expected = contents(&steps);
        signal(running.pid, "-CONT");
        let (is_success, text) = running.end();
        assert!(!is_success, "round {round}: {text}");
        assert!(text.contains("stopped: cannot write to"), "round {round}: {text}");
        assert!(text.contains("was taken over by"), "round {round}: {text}");
        assert_eq!(contents(&steps), expected, "round {round}: {text}");
        signal(successor.pid, "-CONT");
        running = successor;
    }
    running.outer.kill().unwrap();
    running.end();
}

#[test]
fn stopped_writer_loses_lease_on_disk() {
    let folder = Folder::new();
    check_frozen(path(folder.temp.path()));
}

#[test]
fn stopped_writer_loses_lease_on_s3() {
    let server = S3Server::start().unwrap();
    check_frozen(&server.url("runs"));
}

/// The entry point of the child process of the test below; not a test itself. The call that commits
/// step 2, after the last check of the lease, hangs until a file exists.
#[test]
fn child_hangs_in_commit() {
    let Ok(url) = std::env::var(HANGING_URL) else { return };
    let signs = std::env::var(SIGNS).unwrap();
    let hanging = HookLayer::new(storage::open_url(&url).unwrap(), move |_, call, key| {
        let is_commit = (call == "publish" && key.name() == STEP_2)
            || (call == "create" && key.as_str().ends_with(&format!("{STEP_2}/COMMIT")));
        if is_commit {
            std::fs::write(format!("{signs}/hangs"), "").unwrap();
            await_true("a sign", || Path::new(&format!("{signs}/go-on")).exists());
        }
        Ok(())
    });
    let steps = Checkpoints::open(hanging, run()).with_options(SERIAL).with_patience(FOREVER);
    State::small(2).save(&steps, 2).unwrap();
}

/// A check before the commit cannot prevent it if the process is frozen in between: the successor
/// must delete its files. This includes a live process of this machine whose lease was deleted by
/// hand.
fn check_commit_that_hangs(url: &str) {
    let steps = Checkpoints::open(storage::open_url(url).unwrap(), run()).with_options(SERIAL);
    State::small(1).save(&steps, 1).unwrap();
    let signs = Folder::new();
    let sign = |name: &str| signs.temp.path().join(name);
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "kill::frozen::child_hangs_in_commit", "--nocapture"])
        .envs([(HANGING_URL, url), (SIGNS, path(signs.temp.path()))])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    await_true("a commit that hangs", || sign("hangs").exists());
    let store = storage::open_url(url).unwrap();
    for name in store.list_names(&run()).unwrap() {
        if name.starts_with(".lease-") {
            store.delete(&run().join(&name).unwrap()).unwrap();
        }
    }
    let lease = steps.lock().unwrap();
    std::fs::write(sign("go-on"), "").unwrap();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("LeaseLost"), "{url}: {text}");
    assert_eq!(steps.steps().unwrap(), [1], "{url}: {text}");
    State::small(7).save(&steps, 2).unwrap();
    steps.open_step(2).unwrap().verify().unwrap();
    drop(lease);
}

#[test]
fn hung_commit_is_discarded_after_takeover() {
    let folder = Folder::new();
    check_commit_that_hangs(path(folder.temp.path()));
    let server = S3Server::start().unwrap();
    check_commit_that_hangs(&server.url("runs"));
}

fn path(folder: &Path) -> &str {
    folder.to_str().unwrap()
}
