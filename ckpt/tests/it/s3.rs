//! Checkpoints on an object store without renames, with lost responses: the server is in this
//! process.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::common::ranks::{LIMITS, Ranks};
use crate::common::{Folder, SMALL, State};
use ckpt::{
    CheckpointOptions, Checkpoints, Codec, Drain, DrainOptions, Durability, Error,
    JointSaveOptions, Retention,
};
use storage::Key;
use storage::s3_server::{Fault, FaultRule, S3Server};

fn steps_on(server: &S3Server, options: &str) -> Checkpoints {
    let store = storage::open_url(&(server.url("runs") + options)).unwrap();
    Checkpoints::open(store, Key::new("run").unwrap()).with_options(SMALL)
}

fn names(server: &S3Server, folder: &str) -> Vec<String> {
    let store = storage::open_url(&server.url("runs")).unwrap();
    let names = store.list_names(&Key::new(folder).unwrap()).unwrap();
    names.into_iter().filter(|name| !name.starts_with(".epoch-")).collect()
}

#[test]
fn steps_are_saved_read_verified_and_deleted() {
    let server = S3Server::start().unwrap();
    let steps = steps_on(&server, "");
    let states: Vec<State> = (0..3).map(State::of_model).collect();
    for (step, state) in (1..).zip(&states) {
        state.save(&steps, step).unwrap();
    }
    let again = states[0].save(&steps, 3);
    assert!(matches!(again, Err(Error::StepExists { .. })), "{again:?}");
    assert_eq!(steps.steps().unwrap(), [1, 2, 3]);
    let newest = steps.newest().unwrap().unwrap();
    newest.verify().unwrap();
    states[2].check(&newest);
    assert_eq!(steps.retain(1).unwrap(), [1, 2]);
    assert_eq!(names(&server, "run"), ["latest", "step-000000000003"]);
    assert_eq!(names(&server, "run/step-000000000003")[0], "COMMIT");
    assert_eq!(server.upload_count(), 0, "an upload was neither completed nor aborted");
}

/// A bucket has one writer at a time, like a folder.
#[test]
fn second_writer_is_rejected() {
    let server = S3Server::start().unwrap();
    let (mine, yours) = (steps_on(&server, ""), steps_on(&server, "&tries=3"));
    State::of_model(1).save(&mine, 1).unwrap();
    let lease = mine.lock().unwrap();
    for refused in [
        State::of_model(2).save(&yours, 2).map(drop),
        yours.retain(1).map(drop),
        yours.sweep().map(drop),
    ] {
        let text = refused.unwrap_err().to_string();
        let expected = format!("process {} on", std::process::id());
        assert!(text.contains("s3://test/runs/run") && text.contains(&expected), "{text}");
    }
    drop(lease);
    // Concurrent saves of the same step: it exists once, and is complete.
    let saved = thread::scope(|scope| {
        let save = |steps| scope.spawn(move || State::of_model(2).save(steps, 2).is_ok());
        [save(&mine), save(&yours)].map(|thread| thread.join().unwrap())
    });
    let newest = mine.newest().unwrap().unwrap();
    assert_ne!(saved, [false, false], "both writers failed");
    State::of_model(2).check(&newest);
    newest.verify().unwrap();
}

/// The response to the commit request is lost: the step exists, and the save succeeds.
#[test]
fn commit_with_lost_response_succeeds() {
    let server = S3Server::start().unwrap();
    for (step, fault) in [(1, Fault::LoseAnswer), (2, Fault::InternalError), (3, Fault::SlowDown)] {
        server.inject(FaultRule::nth(1, fault).of("PUT").to("COMMIT"));
        State::of_model(step).save(&steps_on(&server, ""), step).unwrap();
        assert_eq!(server.fault_count(), step, "the fault did not apply to the commit");
        server.heal();
        State::of_model(step).check(&steps_on(&server, "").newest().unwrap().unwrap());
    }
}

/// A commit that fails permanently leaves the previous step, and the next try succeeds.
#[test]
fn failed_commit_keeps_previous_step() {
    let server = S3Server::start().unwrap();
    State::of_model(1).save(&steps_on(&server, ""), 1).unwrap();
    // Longer than any request except the stalled one takes, however busy this machine is.
    let steps = steps_on(&server, "&tries=2&stall=5s");
    for fault in [Fault::Denied, Fault::SlowDown, Fault::Stall] {
        server.inject(FaultRule::every(1, fault).of("PUT").to("COMMIT"));
        let text = State::of_model(2).save(&steps, 2).unwrap_err().to_string();
        assert!(text.contains("step-000000000002/COMMIT"), "{fault:?}: {text}");
        server.heal();
        State::of_model(1).check(&steps.newest().unwrap().unwrap());
    }
    State::of_model(2).save(&steps, 2).unwrap();
    State::of_model(2).check(&steps.newest().unwrap().unwrap());
    let swept = steps.sweep().unwrap();
    assert_eq!((swept.removed.len(), swept.kept.len()), (3, 0), "{swept:?}");
    assert_eq!(names(&server, "run/step-000000000002").len(), 2);
    steps.newest().unwrap().unwrap().verify().unwrap();
}

/// Requests that fail occasionally are retried, and no writer gets an error.
#[test]
fn several_writers_save_while_requests_fail() {
    let server = S3Server::start().unwrap();
    for (share, fault) in [
        (20, Fault::SlowDown),
        (20, Fault::InternalError),
        (20, Fault::LoseAnswer),
        (10, Fault::Truncate),
        (10, Fault::Reset),
    ] {
        server.inject(FaultRule::per_mille(share, 17, fault));
    }
    for step in 1..=3 {
        let state = State::of_model(step);
        let ranks = Ranks::new(&state, 3, LIMITS);
        let token = format!("try-{step}");
        thread::scope(|scope| {
            for writer in 0..3 {
                let (ranks, server, token) = (&ranks, &server, token.as_str());
                scope.spawn(move || {
                    let deadline = Duration::from_secs(60);
                    let together = JointSaveOptions { token, writer, deadline };
                    ranks.save(&steps_on(server, ""), step, &together).unwrap();
                });
            }
        });
        let newest = steps_on(&server, "").newest().unwrap().unwrap();
        newest.verify().unwrap();
        state.check(&newest);
    }
    assert!(server.fault_count() > 10, "only {} faults", server.fault_count());
    steps_on(&server, "").retain(1).unwrap();
    steps_on(&server, "").sweep().unwrap();
    assert_eq!(names(&server, "run"), ["latest", "step-000000000003"]);
}

/// A drain to a bucket with lost responses: steps are complete, verified and retained there, packed
/// or not.
#[test]
fn steps_are_drained_while_requests_fail() {
    for codec in [None, Some(Codec::Planes)] {
        let server = S3Server::start().unwrap();
        let near = Folder::new();
        for step in 1..=3 {
            State::of_model(step).save(&near.steps(SMALL), step).unwrap();
        }
        for (share, fault) in [
            (30, Fault::SlowDown),
            (30, Fault::InternalError),
            (30, Fault::LoseAnswer),
            (20, Fault::Truncate),
        ] {
            server.inject(FaultRule::per_mille(share, 5, fault));
        }
        let far = steps_on(&server, "").with_options(CheckpointOptions { codec, ..SMALL });
        let far = Arc::new(far);
        let retention = Retention { keep_last: 2, ..Retention::default() };
        let options = DrainOptions { retention, pause: Duration::ZERO, ..DrainOptions::default() };
        let drain = Drain::new(Arc::new(near.steps(SMALL)), Arc::clone(&far), options);
        let pass = drain.run().unwrap();
        assert!(pass.failed.is_empty(), "{:?}", pass.failed);
        assert_eq!(pass.drained.iter().map(|report| report.step).collect::<Vec<_>>(), [3, 2]);
        State::of_model(4).save(&near.steps(SMALL), 4).unwrap();
        let pass = drain.run().unwrap();
        assert_eq!((pass.drained.len(), &pass.deleted), (1, &vec![2]), "{pass:?}");
        assert!(server.fault_count() > 10, "only {} faults", server.fault_count());
        server.heal();
        for step in [3, 4] {
            let open = far.open_step(step).unwrap();
            open.verify().unwrap();
            State::of_model(step).check(&open);
        }
        let levels = drain.levels().unwrap();
        let remote = levels.iter().filter(|(_, level)| *level == Durability::Remote);
        assert_eq!(remote.map(|(step, _)| *step).collect::<Vec<_>>(), [3, 4]);
        assert_eq!(server.upload_count(), 0, "an upload was neither completed nor aborted");
    }
}

/// A store without an atomic publish cannot receive an export, which is reported before writing.
#[test]
fn export_to_bucket_is_rejected_before_writing() {
    let server = S3Server::start().unwrap();
    let near = Folder::new();
    State::of_model(1).save(&near.steps(SMALL), 1).unwrap();
    let step = near.steps(SMALL).open_step(1).unwrap();
    let mut import = ckpt::convert::Import::of_step(step).unwrap();
    import.without_optimizer();
    let store = storage::open_url(&server.url("runs")).unwrap();
    let (key, bounds) = (Key::new("hf").unwrap(), ckpt::convert::ConvertLimits::default());
    let outcome = ckpt::convert::export(&import, &[], &store, &key, bounds, &|_| ());
    let is_refused = matches!(outcome, Err(Error::Storage(storage::Error::Unsupported { .. })));
    assert!(is_refused, "{outcome:?}");
    assert!(store.list(&Key::root()).unwrap().is_empty());
}
