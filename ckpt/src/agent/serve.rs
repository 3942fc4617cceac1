use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::wire::{self, AgentCommand, Answer, Hello};
use super::{ANSWER_MAX, POLL_INTERVAL, SOCKET_ENV, failed, reply_text};
use crate::base::save_control::SaveControl;
use crate::save::snapshot::Snapshot;
use crate::{Checkpoints, Error, LivenessTimeouts, Result, SaveReport};
use storage::ipc::{Arena, Peer, ready};
use storage::{Key, ProcessIdentity};

/// Interval between progress replies.
const REPORT_INTERVAL: Duration = Duration::from_millis(200);

/// Main loop of an agent: executes the saves of the trainer that started this process, until that
/// exits. This process ignores SIGTERM, SIGINT and SIGHUP from now on.
///
/// # Errors
/// [`Error::Agent`] if no trainer started it, or its messages cannot be decoded.
pub fn serve() -> Result<()> {
    let name = std::env::var(SOCKET_ENV).map_err(|_| {
        failed(format!("{SOCKET_ENV} is not set (hint: only a trainer starts this process)"))
    })?;
    let peer = Peer::knock(&name)?.ok_or_else(|| failed("the trainer has exited"))?;
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        let flag = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(signal, flag)
            .map_err(|e| failed(format!("cannot ignore signal {signal}: {e}")))?;
    }
    let steps = match open(&wire::receive_hello(&peer)?) {
        Ok(steps) => steps,
        Err(error) => {
            // If the trainer has exited too, this process still returns the error.
            let _ = answer(&peer, &Answer::Failed(reply_text(&error)));
            return Err(error);
        }
    };
    if !answer(&peer, &Answer::Ready(ProcessIdentity::new().to_string())) {
        return Ok(());
    }
    let mut arena: Option<Arena> = None;
    while let Some(command) = next_command(&peer)? {
        match command {
            AgentCommand::Arena { len } => {
                drop(arena.take());
                arena = Some(receive_arena(&peer, len)?);
            }
            AgentCommand::Forget => {
                arena = None;
                if !answer(&peer, &Answer::Forgotten) {
                    return Ok(());
                }
            }
            AgentCommand::Save { start, len } => {
                let bytes = arena.as_deref().unwrap_or_default();
                if !save(&peer, &steps, bytes, start, len) {
                    return Ok(());
                }
            }
            // Its save has ended already.
            AgentCommand::Cancel => {}
        }
    }
    Ok(())
}

/// Waits for a command while the trainer lives.
fn next_command(peer: &Peer) -> Result<Option<AgentCommand>> {
    while !ready(&[peer.as_fd()], None)?[0] {}
    wire::receive_command(peer)
}

fn open(hello: &Hello) -> Result<Checkpoints> {
    let folder = match &*hello.folder {
        "" => Key::root(),
        folder => Key::new(folder)?,
    };
    let steps = Checkpoints::open(storage::open_url(&hello.url)?, folder);
    let trainer = ProcessIdentity::parse(&hello.trainer).ok_or_else(|| {
        failed(format!("unknown process identity of a trainer: '{}'", hello.trainer))
    })?;
    let Hello { beat, silence_max, .. } = *hello;
    if beat.checked_mul(2).is_none_or(|two| two > silence_max) {
        let (least, found) = (beat.saturating_mul(2), silence_max);
        return Err(failed(format!("expected a timeout of at least {least:?}, found {found:?}")));
    }
    let steps =
        steps.with_options(hello.options).with_patience(LivenessTimeouts { beat, silence_max });
    steps.admit(trainer);
    // It saves the state of the trainer, whose lease may be lost before the first save.
    steps.lease.fence().join_family()?;
    Ok(steps)
}

fn receive_arena(peer: &Peer, len: u64) -> Result<Arena> {
    let received = peer.receive_fd(ANSWER_MAX);
    let (_, fd) = received.map_err(|e| failed(format!("cannot receive the shared memory: {e}")))?;
    let fd = fd.ok_or_else(|| failed("expected a descriptor of shared memory, found none"))?;
    let len = usize::try_from(len)
        .map_err(|_| failed(format!("cannot map {len} bytes of shared memory")))?;
    Ok(Arena::open(fd, len)?)
}

/// Executes a save. Returns whether the trainer is alive and received the outcome.
fn save(peer: &Peer, steps: &Checkpoints, arena: &[u8], start: u64, len: u64) -> bool {
    let control = SaveControl::default();
    let mut is_trainer_alive = true;
    let outcome = std::thread::scope(|scope| {
        let work = || carry_out(steps, arena, start, len, &control);
        let worker = std::thread::Builder::new().spawn_scoped(scope, work);
        let worker = worker.map_err(|e| failed(format!("cannot start a thread: {e}")))?;
        let mut reported_at = Instant::now();
        while !worker.is_finished() {
            if !is_trainer_alive {
                // The trainer has exited; only the save is completed.
                break;
            }
            match ready(&[peer.as_fd()], Some(POLL_INTERVAL)) {
                Ok(fds) if fds[0] => match wire::receive_command(peer) {
                    Ok(Some(AgentCommand::Cancel)) => control.cancel(),
                    Ok(Some(_)) | Ok(None) | Err(_) => is_trainer_alive = false,
                },
                Ok(_) => {}
                Err(_) => is_trainer_alive = false,
            }
            if reported_at.elapsed() >= REPORT_INTERVAL {
                // A trainer that does not read now may read the last reply.
                let _ = answer(peer, &Answer::Wrote(control.bytes()));
                reported_at = Instant::now();
            }
        }
        worker.join().unwrap_or_else(|_| Err(failed("the save panicked")))
    });
    let last = match outcome {
        Ok(report) => {
            log::info!("{report}");
            Answer::Saved(report)
        }
        Err(Error::Cancelled) => Answer::Cancelled,
        Err(error) => {
            log::error!("{error}");
            Answer::Failed(reply_text(&error))
        }
    };
    // A lost reply would make the trainer wait forever; closing the connection makes it check the
    // step itself.
    answer(peer, &last) && is_trainer_alive
}

fn carry_out(
    steps: &Checkpoints,
    arena: &[u8],
    start: u64,
    len: u64,
    control: &SaveControl,
) -> Result<SaveReport> {
    let range = || {
        let end = usize::try_from(start.checked_add(len)?).ok()?;
        arena.get(usize::try_from(start).ok()?..end)
    };
    let orders = range().ok_or_else(|| {
        let end = arena.len();
        failed(format!("expected orders within {end} bytes, found them at byte {start}"))
    })?;
    let (inputs, snapshot) = Snapshot::of_orders(orders)
        .map_err(|e| failed(format!("cannot decode the orders: {e}")))?;
    // The plan is cached, as in the trainer.
    let plan = steps.plans.plan_of(&inputs)?;
    snapshot.check(&plan)?;
    snapshot.save(steps, &plan, arena, control)
}

/// Returns whether it could be sent.
#[must_use]
fn answer(peer: &Peer, answer: &Answer) -> bool {
    let sent = wire::send_answer(peer, answer);
    sent.inspect_err(|e| log::debug!("cannot reply to the trainer: {e}")).is_ok()
}
