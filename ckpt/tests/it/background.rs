//! Async saves: what they save, who waits, and how failures are reported.

use std::sync::Arc;
use std::time::Duration;

use crate::common::gate::{Gate, GateState};
use crate::common::{Folder, SERIAL, State, Tensor};
use ckpt::{
    AsyncSaveOptions, AsyncSaver, Blob, Checkpoints, Error, Finish, SaveHandle, SaveStart, WhenBusy,
};
use storage::Key;

/// The gate's checkpoints.
fn steps_of(gate: &Gate) -> Arc<Checkpoints> {
    let steps = Checkpoints::open(gate.store(), Key::new("run").unwrap());
    Arc::new(steps.with_options(SERIAL))
}

fn background_of(gate: &Gate, when_busy: WhenBusy) -> AsyncSaver {
    let options = AsyncSaveOptions { when_busy, ..AsyncSaveOptions::default() };
    AsyncSaver::new(steps_of(gate), options).unwrap()
}

fn save(state: &State, background: &AsyncSaver, step: u64) -> ckpt::Result<SaveStart> {
    let tensors: Vec<_> = state.tensors.iter().map(Tensor::data).collect();
    let blobs: Vec<_> = state.blobs.iter().map(|(name, bytes)| Blob { name, bytes }).collect();
    background.save(step, &tensors, &blobs, state.meta.clone())
}

fn begin(state: &State, background: &AsyncSaver, step: u64) -> SaveHandle {
    let SaveStart { save, failed } = save(state, background, step).unwrap();
    assert!(failed.is_none(), "{failed:?}");
    save.unwrap()
}

/// An async save without a copy would write tensors that later optimizer steps have changed
/// (pytorch/pytorch#144657).
#[test]
fn later_updates_do_not_change_copy() {
    let folder = Folder::new();
    let gate = Gate::new(folder.store());
    let background = background_of(&gate, WhenBusy::Wait);
    let before = State::of_model(1);
    let mut state = before.clone();
    gate.set(GateState::Closed);
    let handle = begin(&state, &background, 1);
    let progress = handle.progress();
    assert!(!progress.is_done && progress.bytes == 0 && progress.bytes_total > 5000);
    for tensor in &mut state.tensors {
        tensor.bytes.fill(0);
    }
    state.blobs.iter_mut().for_each(|(_, bytes)| bytes.fill(0));
    drop(state);
    gate.set(GateState::Open);
    let report = handle.wait().unwrap();
    assert!(handle.progress().is_done);
    before.check(&steps_of(&gate).newest().unwrap().unwrap());
    assert_eq!(background.wait().unwrap(), Some(report));
    assert_eq!(handle.wait().unwrap(), report, "the outcome can be read again");
}

#[test]
fn one_copy_at_a_time() {
    let folder = Folder::new();
    let gate = Gate::new(folder.store());
    let skips = background_of(&gate, WhenBusy::Skip);
    gate.set(GateState::Closed);
    let first = begin(&State::of_model(1), &skips, 1);
    assert!(save(&State::of_model(2), &skips, 2).unwrap().save.is_none());
    gate.set(GateState::Open);
    first.wait().unwrap();
    skips.wait().unwrap();
    begin(&State::of_model(3), &skips, 3);
    drop(skips);

    let waits = background_of(&gate, WhenBusy::Wait);
    gate.set(GateState::Closed);
    begin(&State::of_model(4), &waits, 4);
    std::thread::scope(|scope| {
        let second = scope.spawn(|| begin(&State::of_model(5), &waits, 5));
        gate.set(GateState::Open);
        second.join().unwrap().wait().unwrap();
    });
    drop(waits);
    assert_eq!(steps_of(&gate).steps().unwrap(), [1, 3, 4, 5]);
    for step in [1, 3, 4, 5] {
        State::of_model(step).check(&steps_of(&gate).open_step(step).unwrap());
    }
}

/// The first caller gets the error, and no other gets it again.
#[test]
fn failures_are_reported_once() {
    let folder = Folder::new();
    let gate = Gate::new(folder.store());
    let background = background_of(&gate, WhenBusy::Wait);
    let is_device_error = |error: &Error| error.to_string().contains("device failed");
    let good = begin(&State::of_model(1), &background, 1).wait().unwrap();

    gate.set(GateState::Broken);
    let handle = begin(&State::of_model(2), &background, 2);
    assert!(is_device_error(&handle.wait().unwrap_err()));
    assert!(matches!(handle.wait(), Err(Error::Reported { step: 2, first })
            if first.contains("device failed")));
    assert_eq!(background.wait().unwrap(), Some(good), "the last committed save");

    let handle = begin(&State::of_model(3), &background, 3);
    assert!(is_device_error(&background.wait().unwrap_err()));
    assert!(background.wait().is_ok());
    assert!(matches!(handle.wait(), Err(Error::Reported { .. })));

    // The run continues: the next save works, and reports the failure of the one before.
    let handle = begin(&State::of_model(4), &background, 4);
    while !handle.progress().is_done {
        std::thread::yield_now();
    }
    gate.set(GateState::Open);
    let SaveStart { save: handle, failed } = save(&State::of_model(5), &background, 5).unwrap();
    assert!(matches!(failed, Some((4, error)) if is_device_error(&error)));
    handle.unwrap().wait().unwrap();
    drop(background);
    assert_eq!(steps_of(&gate).steps().unwrap(), [1, 5]);
    assert_eq!(folder.names(), ["step-000000000001", "step-000000000005"]);
}

#[test]
fn cancelled_save_leaves_nothing() {
    let folder = Folder::new();
    let gate = Gate::new(folder.store());
    let background = background_of(&gate, WhenBusy::Wait);
    begin(&State::of_model(1), &background, 1).wait().unwrap();
    gate.set(GateState::Closed);
    let handle = begin(&State::of_model(2), &background, 2);
    std::thread::scope(|scope| {
        let cancelled = scope.spawn(|| handle.cancel());
        while !handle.progress().is_cancelled {
            std::thread::yield_now();
        }
        gate.set(GateState::Open);
        assert_eq!(cancelled.join().unwrap().unwrap(), None);
    });
    assert!(matches!(handle.wait(), Err(Error::Cancelled)));
    assert_eq!(folder.names(), ["step-000000000001"]);
    assert!(background.wait().is_ok(), "a cancelled save is not a failure");
    // A committed save cannot be cancelled.
    let handle = begin(&State::of_model(2), &background, 2);
    let report = handle.wait().unwrap();
    assert_eq!(handle.cancel().unwrap(), Some(report));
}

#[test]
fn finish_within_completes_or_cancels() {
    let folder = Folder::new();
    let gate = Gate::new(folder.store());
    let background = background_of(&gate, WhenBusy::Wait);
    let nothing_to_do = |grace| matches!(background.finish_within(grace), Finish::Idle);
    let none = Duration::ZERO;
    assert!(nothing_to_do(none));
    begin(&State::of_model(1), &background, 1).wait().unwrap();
    background.wait().unwrap();
    assert!(nothing_to_do(none));

    begin(&State::of_model(2), &background, 2);
    let finish = background.finish_within(Duration::from_secs(100));
    assert!(matches!(finish, Finish::Committed(report) if report.step == 2), "{finish}");

    gate.set(GateState::Closed);
    let handle = begin(&State::of_model(3), &background, 3);
    // A hung store does not block it.
    let finish = background.finish_within(Duration::ZERO);
    assert!(matches!(finish, Finish::Stuck { step: 3, .. }), "{finish}");
    gate.set(GateState::Open);
    assert!(matches!(handle.wait(), Err(Error::Cancelled)));
    let _ = background.wait();

    gate.set(GateState::Closed);
    let handle = begin(&State::of_model(4), &background, 4);
    std::thread::scope(|scope| {
        let finish = scope.spawn(|| background.finish_within(Duration::from_secs(10)));
        while !handle.progress().is_cancelled {
            std::thread::sleep(Duration::from_millis(5));
        }
        gate.set(GateState::Open);
        let finish = finish.join().unwrap();
        assert!(matches!(finish, Finish::Cancelled { step: 4, .. }), "{finish}");
    });
    begin(&State::of_model(5), &background, 5);
    let finish = background.finish_within(Duration::MAX);
    assert!(matches!(finish, Finish::Committed(report) if report.step == 5), "{finish}");
    assert_eq!(steps_of(&gate).steps().unwrap(), [1, 2, 5]);
    assert_eq!(folder.names().len(), 3);
}

/// Without this, a run whose save thread panicked would wait forever.
#[test]
fn saver_survives_panic() {
    let folder = Folder::new();
    let gate = Gate::new(folder.store());
    let background = background_of(&gate, WhenBusy::Wait);
    gate.set(GateState::Panics);
    let handle = begin(&State::of_model(1), &background, 1);
    let message = handle.wait().unwrap_err().to_string();
    assert!(message.contains("panicked"), "{message}");
    gate.set(GateState::Open);
    begin(&State::of_model(2), &background, 2).wait().unwrap();
    assert_eq!(steps_of(&gate).steps().unwrap(), [2]);
}

#[test]
fn invalid_input_is_rejected_immediately() {
    let folder = Folder::new();
    let gate = Gate::new(folder.store());
    let options = AsyncSaveOptions { staging_bytes_max: 1000, ..AsyncSaveOptions::default() };
    let background = AsyncSaver::new(steps_of(&gate), options).unwrap();
    let refused = save(&State::of_model(1), &background, 1).unwrap_err();
    assert!(refused.to_string().contains("staging_bytes_max"), "{refused}");
    assert!(background.reserve(1001).is_err());
    background.reserve(1000).unwrap();
    let mut state = State::of_model(1);
    state.tensors.truncate(0);
    state.blobs.truncate(1);
    begin(&state, &background, 1).wait().unwrap();
    state.blobs.push(state.blobs[0].clone());
    let refused = save(&state, &background, 2).unwrap_err();
    assert!(matches!(refused, Error::BadInput { .. }), "{refused}");
    assert_eq!(*steps_of(&gate).newest().unwrap().unwrap().meta(), state.meta);
}
