//! Async joint saves: the writers are threads and agents, which share nothing but the store.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::common::children::{
    await_true, can_detect_dead_processes, has_ended, signal, signal_if_running,
};
use crate::common::gate::{Gate, GateState};
use crate::common::ranks::{LIMITS, PATIENCE, Ranks, check_images, same, steps_on};
use crate::common::{Folder, SERIAL, State};
use ckpt::{
    Agent, AsyncSaveOptions, AsyncSaver, Blob, Error, Finish, JointSaveOptions, SaveHandle,
    SaveReport, SaveStart,
};
use storage::Storage;
use storage::testing::fault_store::{FaultKind, FaultPlan, FaultStore};

/// Far longer than any save here takes, and short enough to notice a wait until the deadline.
const DEADLINE: Duration = Duration::from_secs(60);

fn writers_on(stores: impl IntoIterator<Item = Arc<dyn Storage>>) -> Vec<AsyncSaver> {
    let options = AsyncSaveOptions { copy_threads: 2, ..AsyncSaveOptions::default() };
    let begin = |store| AsyncSaver::new(Arc::new(steps_on(store)), options).unwrap();
    stores.into_iter().map(begin).collect()
}

fn together(token: &str, writer: usize) -> JointSaveOptions<'_> {
    JointSaveOptions { token, writer, deadline: DEADLINE }
}

/// The writers copy one after the other: no copy waits for another writer.
fn begin(writers: &[AsyncSaver], ranks: &Ranks, step: u64, token: &str) -> Vec<SaveHandle> {
    let begin = |(writer, background): (usize, &AsyncSaver)| {
        let SaveStart { save, failed } =
            ranks.begin(background, step, &together(token, writer)).unwrap();
        assert!(failed.is_none(), "{failed:?}");
        save.unwrap()
    };
    writers.iter().enumerate().map(begin).collect()
}

fn ends(handles: &[SaveHandle]) -> Vec<ckpt::Result<SaveReport>> {
    handles.iter().map(SaveHandle::wait).collect()
}

#[test]
fn copies_of_several_writers_become_one_step() {
    for count in [1, 2, 3, 7] {
        let folder = Folder::new();
        let gates: Vec<Gate> = (0..count).map(|_| Gate::new(folder.store())).collect();
        let writers = writers_on(gates.iter().map(|gate| gate.store() as _));
        let state = State::of_model(count as u64);
        let mut ranks = Ranks::new(&state, count, LIMITS);
        gates.iter().for_each(|gate| gate.set(GateState::Closed));
        let handles = begin(&writers, &ranks, 12, "first");
        // Replicated bytes are copied by one writer, and nothing else is copied.
        let pieces = |writer| ranks.plan.shards(writer).iter().flat_map(|shard| &shard.pieces);
        let all: usize = (0..count).flat_map(pieces).map(|piece| piece.bytes.len()).sum();
        let blobs: usize = state.blobs.iter().map(|(_, bytes)| bytes.len()).sum();
        let copied: u64 = handles.iter().map(|handle| handle.progress().bytes_total).sum();
        assert_eq!(copied, (all + blobs) as u64);
        assert_eq!(all, state.tensors.iter().map(|tensor| tensor.bytes.len()).sum::<usize>());
        assert!(writers.iter().all(AsyncSaver::is_busy));
        ranks.overwrite();
        gates.iter().for_each(|gate| gate.set(GateState::Open));
        let reports: Vec<SaveReport> = ends(&handles).into_iter().map(Result::unwrap).collect();
        let steps = steps_on(folder.store());
        state.check(&steps.newest().unwrap().unwrap());
        steps.newest().unwrap().unwrap().verify().unwrap();
        for (background, report) in writers.iter().zip(reports) {
            assert_eq!(background.wait().unwrap(), Some(report));
        }
        // The next save reuses the same memory.
        let next = State::of_model(50);
        for end in ends(&begin(&writers, &Ranks::new(&next, count, LIMITS), 13, "second")) {
            end.unwrap();
        }
        next.check(&steps.newest().unwrap().unwrap());
    }
}

/// It reports the cause, all others report the same, and each once; the next save works.
#[test]
fn failure_of_one_writer_is_reported_once_to_all() {
    let ranks = Ranks::new(&State::of_model(3), 3, LIMITS);
    for victim in 0..3 {
        let folder = Folder::new();
        let gates: Vec<Gate> = (0..3).map(|_| Gate::new(folder.store())).collect();
        let writers = writers_on(gates.iter().map(|gate| gate.store() as _));
        gates[victim].set(GateState::Full);
        let handles = begin(&writers, &ranks, 4, "a");
        for (writer, end) in ends(&handles).into_iter().enumerate() {
            let text = end.unwrap_err().to_string();
            assert!(text.contains("no space"), "writer {writer}: {text}");
            let expected = format!("aborted by all writers: writer {victim} of 3 (process ");
            assert!(writer == victim || text.contains(&expected), "writer {writer}: {text}");
        }
        assert!(
            writers.iter().all(|background| background.wait().is_ok()),
            "a cause is reported once"
        );
        let handles = begin(&writers, &ranks, 5, "b");
        while !handles.iter().all(|handle| handle.progress().is_done) {
            thread::yield_now();
        }
        gates[victim].set(GateState::Open);
        for (writer, background) in writers.iter().enumerate() {
            let started = ranks.begin(background, 6, &together("c", writer)).unwrap();
            assert!(matches!(started.failed, Some((5, _))), "writer {writer}");
        }
        for background in &writers {
            assert_eq!(background.wait().unwrap().unwrap().step, 6);
        }
        drop(writers);
        let steps = steps_on(folder.store());
        assert_eq!(steps.steps().unwrap(), [6]);
        assert_eq!(steps.sweep().unwrap().kept, [""; 0]);
        assert_eq!(folder.names(), ["step-000000000006"]);
    }
}

/// Without an abort, the others would wait until the deadline for a writer whose copy failed.
#[test]
fn rejected_call_aborts_joint_save() {
    let folder = Folder::new();
    let ranks = Ranks::new(&State::of_model(3), 2, LIMITS);
    let small = AsyncSaveOptions { staging_bytes_max: 1000, ..AsyncSaveOptions::default() };
    for refused in [0, 1] {
        let other = writers_on([folder.store()]).remove(0);
        let no_room = AsyncSaver::new(Arc::new(steps_on(folder.store())), small).unwrap();
        let token = format!("small-{refused}");
        let started = ranks.begin(&other, 4, &together(&token, 1 - refused)).unwrap();
        let error = ranks.begin(&no_room, 4, &together(&token, refused)).unwrap_err();
        assert!(error.to_string().contains("staging_bytes_max"), "{error}");
        let message = started.save.unwrap().wait().unwrap_err().to_string();
        assert!(
            message.contains(&format!("aborted by all writers: writer {refused} of 2")),
            "{message}"
        );
        assert!(message.contains("staging_bytes_max"), "{message}");

        let (token, meta) = (format!("odd-{refused}"), serde_json::json!(null));
        let started = ranks.begin(&other, 4, &together(&token, 1 - refused)).unwrap();
        let odd = [Blob { name: "a/b", bytes: b"" }];
        let part = together(&token, refused);
        let error = no_room.save_part(4, &ranks.plan, &[], &odd, meta, &part).unwrap_err();
        assert!(matches!(error, Error::BadInput { .. }), "{error}");
        let message = started.save.unwrap().wait().unwrap_err().to_string();
        assert!(message.contains("extra 'a/b'"), "{message}");
    }
    let other = writers_on([folder.store()]).remove(0);
    let error = ranks.begin(&other, 4, &together("t", 2)).unwrap_err().to_string();
    assert!(error.contains("step 4 as writer 2: the plan has 2 writers"), "{error}");
}

#[test]
fn cancel_by_one_writer_cancels_all() {
    let ranks = Ranks::new(&State::of_model(3), 3, LIMITS);
    for one in 0..3 {
        let folder = Folder::new();
        let gates: Vec<Gate> = (0..3).map(|_| Gate::new(folder.store())).collect();
        let writers = writers_on(gates.iter().map(|gate| gate.store() as _));
        ends(&begin(&writers, &ranks, 1, "a")).into_iter().for_each(|end| _ = end.unwrap());
        // The third writer has not joined, so nothing can be committed.
        gates[(one + 1) % 3].set(GateState::Closed);
        let handles = begin(&writers, &ranks, 2, "b");
        thread::scope(|scope| {
            let cancelled = scope.spawn(|| handles[one].cancel());
            assert_eq!(cancelled.join().unwrap().unwrap(), None, "writer {one}");
            gates[(one + 1) % 3].set(GateState::Open);
        });
        assert!(matches!(handles[one].wait(), Err(Error::Cancelled)));
        for other in (0..3).filter(|&other| other != one) {
            let text = handles[other].wait().unwrap_err().to_string();
            let expected = format!("writer {one} of 3 (process ");
            assert!(text.contains(&expected) && text.contains("cancelled"), "{text}");
        }
        let grace = Duration::from_secs(100);
        let handles = begin(&writers, &ranks, 3, "c");
        for background in &writers {
            let finish = background.finish_within(grace);
            let is_there = matches!(finish, Finish::Committed(report) if report.step == 3);
            assert!(is_there || matches!(finish, Finish::Idle), "{finish}");
        }
        assert!(ends(&handles).iter().all(Result::is_ok), "cancelled too late");
        assert_eq!(handles[one].cancel().unwrap().unwrap().step, 3);
        drop(writers);
        let steps = steps_on(folder.store());
        assert_eq!(steps.steps().unwrap(), [1, 3]);
        assert_eq!(steps.sweep().unwrap().kept, [""; 0]);
        assert_eq!(folder.names().len(), 2);
    }
}

#[test]
fn commit_hook_is_called() {
    let folder = Folder::new();
    let ranks = Ranks::new(&State::of_model(3), 2, LIMITS);
    let writers = writers_on([folder.store(), folder.store()]);
    let (sender, received) = std::sync::mpsc::channel();
    writers[0].after_commit(move |report, meta| {
        sender.send((report.step, meta["seed"].as_u64())).unwrap();
        assert!(report.step != 1, "a panic of the hook is caught");
    });
    for step in [1, 2] {
        ends(&begin(&writers, &ranks, step, &format!("t{step}")))
            .into_iter()
            .for_each(|end| _ = end.unwrap());
    }
    drop(writers);
    assert_eq!(received.iter().collect::<Vec<_>>(), [(1, Some(3)), (2, Some(3))]);
}

/// Whichever disk operation of any writer fails: all writers get the same outcome, and the next try
/// succeeds.
#[test]
fn all_writers_agree_after_any_failure() {
    let state = State::small(1);
    let ranks = Ranks::new(&state, 2, LIMITS);
    for nth in (0..).step_by(5) {
        let store = FaultStore::new(nth as u64, FaultPlan::default());
        store.fail_op(nth, FaultKind::Io);
        let writers = writers_on(same(&store, 2));
        let saved = ends(&begin(&writers, &ranks, 4, "a"));
        let context = format!("operation {nth}: {saved:?}");
        let steps = steps_on(Arc::new(store.clone()));
        let there = steps.newest().unwrap();
        assert!(saved.iter().all(|one| one.is_ok() == there.is_some()), "{context}");
        if let Some(newest) = there {
            state.check(&newest);
        } else {
            for saved in ends(&begin(&writers, &ranks, 4, "b")) {
                saved.expect(&context);
            }
        }
        drop(writers);
        if store.op_count() <= nth {
            assert!(nth > 60, "a save of {nth} operations");
            break;
        }
    }
}

/// Checks every image that a power cut may leave, at every operation of any writer.
#[test]
fn power_cut_leaves_old_or_new_step() {
    for marked in [false, true] {
        let store =
            FaultStore::new(11, FaultPlan { no_exclusive_rename: marked, ..FaultPlan::default() });
        let writers = writers_on(same(&store, 3));
        let (old, new) = (State::small(1), State::small(2));
        let save = |step, state: &State, token| {
            let mut ranks = Ranks::new(state, 3, LIMITS);
            let handles = begin(&writers, &ranks, step, token);
            ranks.overwrite();
            ends(&handles).into_iter().for_each(|end| _ = end.unwrap());
        };
        save(1, &old, "a");
        let from = store.op_count();
        save(2, &new, "b");
        check_images(&store, from, 3, (&old, &new));
    }
}

/// Environment variables with the role of a child process and the folder to save in.
const ROLE: &str = "CKPT_TEST_PARTY_ROLE";
const FOLDER: &str = "CKPT_TEST_PARTY_FOLDER";

fn child(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "background_together::roles_of_child_processes"])
        .env(ROLE, role)
        .stdout(Stdio::null());
    command
}

fn with_agent(folder: &Path) -> (AsyncSaver, u32) {
    let url = folder.to_str().unwrap();
    let agent = Agent::start(child("agent"), url, "run", SERIAL, PATIENCE).unwrap();
    let pid = agent.pid();
    let steps = Arc::new(steps_on(storage::open_url(url).unwrap()));
    (AsyncSaver::with_agent(steps, AsyncSaveOptions::default(), agent).unwrap(), pid)
}

/// The entry point of the child processes of the tests below; not a test itself.
#[test]
fn roles_of_child_processes() {
    let Ok(role) = std::env::var(ROLE) else { return };
    match role.as_str() {
        "agent" => ckpt::serve_agent().unwrap(),
        writer => copy_and_die(writer.parse().unwrap()),
    }
}

/// One of two trainers that are killed after their copies and before the first byte of the save:
/// their agents are stopped until then.
fn copy_and_die(writer: usize) {
    let folder = std::env::var(FOLDER).unwrap();
    let folder = Path::new(&folder);
    let (background, agent) = with_agent(folder);
    let ranks = |step| Ranks::new(&State::of_model(step), 2, LIMITS);
    let first = ranks(1).begin(&background, 1, &together("first", writer)).unwrap();
    first.save.unwrap().wait().unwrap();
    signal(agent, "-STOP");
    let _ = ranks(2).begin(&background, 2, &together("second", writer)).unwrap();
    let partial = folder.join(format!("agent-{writer}.partial"));
    std::fs::write(&partial, agent.to_string()).unwrap();
    std::fs::rename(&partial, folder.join(format!("agent-{writer}"))).unwrap();
    signal(std::process::id(), "-KILL");
}

#[test]
fn agents_complete_joint_save_of_dead_trainers() {
    if !can_detect_dead_processes() {
        return;
    }
    let folder = Folder::new();
    let start =
        |writer: usize| child(&writer.to_string()).env(FOLDER, folder.temp.path()).spawn().unwrap();
    for mut trainer in [0, 1].map(start) {
        assert_eq!(trainer.wait().unwrap().code(), None, "a trainer exited before it was killed");
    }
    let steps = steps_on(folder.store());
    let agents = [0, 1].map(|writer| {
        let file = folder.temp.path().join(format!("agent-{writer}"));
        std::fs::read_to_string(file).unwrap().parse::<u32>().unwrap()
    });
    // The kernel may have resumed them already, since their parents are dead.
    agents.iter().for_each(|&agent| signal_if_running(agent, "-CONT"));
    await_true("the second step", || steps.steps().unwrap() == [1, 2]);
    State::of_model(2).check(&steps.newest().unwrap().unwrap());
    await_true("the end of the agents", || agents.iter().all(|&agent| has_ended(agent)));
    assert!(steps.sweep().unwrap().kept.is_empty());
}

/// Its part does not exist: all writers get the error at once. The next save works without the
/// agent.
#[test]
fn agent_death_before_part_aborts_save() {
    if !can_detect_dead_processes() {
        return;
    }
    for victim in [0, 1] {
        let folder = Folder::new();
        let (with, agent) = with_agent(folder.temp.path());
        let without = writers_on([folder.store()]).remove(0);
        let ranks = Ranks::new(&State::of_model(3), 2, LIMITS);
        let begin = |step, token: &str| {
            [(&with, victim), (&without, 1 - victim)].map(|(background, writer)| {
                ranks.begin(background, step, &together(token, writer)).unwrap().save.unwrap()
            })
        };
        begin(1, "a").iter().for_each(|handle| _ = handle.wait().unwrap());
        signal(agent, "-STOP");
        let handles = begin(2, "b");
        signal(agent, "-KILL");
        for handle in &handles {
            let text = handle.wait().unwrap_err().to_string();
            let expected =
                [format!("writer {victim} of 2"), "the process that saved for it died".to_owned()];
            // The first writer that detects the dead process reports it.
            let is_reported = text.contains(&expected[1]) || text.contains("process is dead");
            assert!(text.contains(&expected[0]) && is_reported, "{text}");
        }
        begin(3, "c").iter().for_each(|handle| _ = handle.wait().unwrap());
        drop((with, without));
        let steps = steps_on(folder.store());
        assert_eq!(steps.steps().unwrap(), [1, 3]);
        State::of_model(3).check(&steps.newest().unwrap().unwrap());
    }
}

/// Its part exists: the step is committed, and the trainer detects that.
#[test]
fn agent_death_after_part_keeps_save() {
    if !can_detect_dead_processes() {
        return;
    }
    let folder = Folder::new();
    let (with, agent) = with_agent(folder.temp.path());
    let others = writers_on([folder.store(), folder.store()]);
    let ranks = Ranks::new(&State::of_model(3), 3, LIMITS);
    let begin = |background, writer| {
        ranks.begin(background, 2, &together("a", writer)).unwrap().save.unwrap()
    };
    let first = [begin(&others[0], 0), begin(&with, 1)];
    let part = folder.path(".save-step-000000000002-a/part/00001");
    await_true("its part", || part.exists());
    signal(agent, "-KILL");
    // Until its trainer has detected the death, and waits for the step again.
    thread::sleep(Duration::from_millis(100));
    let last = begin(&others[1], 2);
    for handle in first.iter().chain([&last]) {
        assert_eq!(handle.wait().unwrap().step, 2);
    }
    State::of_model(3).check(&steps_on(folder.store()).newest().unwrap().unwrap());
}
