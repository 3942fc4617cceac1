//! Protocol of trainer and agent: a message is a kind, two numbers, and text for some kinds.

use std::io;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{ANSWER_MAX, POLL_INTERVAL, failed};
use crate::{CheckpointOptions, Result, SaveReport};
use storage::ipc::Peer;

/// A kind and two numbers.
const HEAD_BYTES: usize = 17;

/// Limit of the text; an error with its causes, or a URL, is shorter.
const TEXT_BYTES_MAX: u64 = 1 << 20;

/// The trainer's first message.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Hello {
    pub(super) url: String,
    pub(super) folder: String,
    pub(super) options: CheckpointOptions,
    /// The trainer's timeouts, so that all processes agree on who is dead.
    pub(super) beat: Duration,
    pub(super) silence_max: Duration,
    pub(super) trainer: String,
}

/// Messages of the trainer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AgentCommand {
    /// A descriptor follows: the memory for copies, of this length.
    Arena { len: u64 },
    /// Unmap the memory.
    Forget,
    /// Save; its orders are in the memory, at this offset and of this length.
    Save { start: u64, len: u64 },
    /// Cancel the current save.
    Cancel,
}

/// Messages of the agent.
#[derive(Debug, PartialEq)]
pub(super) enum Answer {
    /// It has opened the store; this is its name.
    Ready(String),
    /// It has unmapped its memory.
    Forgotten,
    /// Bytes written to the store so far.
    Wrote(u64),
    Saved(SaveReport),
    Cancelled,
    Failed(String),
}

pub(super) fn send_hello(peer: &Peer, hello: &Hello) -> io::Result<()> {
    send(peer, b'H', [0, 0], &serde_json::to_vec(hello)?)
}

pub(super) fn receive_hello(peer: &Peer) -> Result<Hello> {
    let (kind, _, payload) = message(peer, ANSWER_MAX).map_err(connection_error)?;
    let hello = if kind == b'H' { serde_json::from_slice(&payload).ok() } else { None };
    hello.ok_or_else(|| failed("cannot decode handshake: not a trainer of this version"))
}

pub(super) fn send_command(peer: &Peer, command: AgentCommand) -> io::Result<()> {
    match command {
        AgentCommand::Arena { len } => send(peer, b'A', [len, 0], &[]),
        AgentCommand::Forget => send(peer, b'G', [0, 0], &[]),
        AgentCommand::Save { start, len } => send(peer, b'S', [start, len], &[]),
        AgentCommand::Cancel => send(peer, b'C', [0, 0], &[]),
    }
}

/// The next command; `None` if the trainer has exited.
pub(super) fn receive_command(peer: &Peer) -> Result<Option<AgentCommand>> {
    let (kind, [first, second], _) = match message(peer, ANSWER_MAX) {
        Ok(message) => message,
        Err(e) if is_end(&e) => return Ok(None),
        Err(e) => return Err(connection_error(e)),
    };
    match kind {
        b'A' => Ok(Some(AgentCommand::Arena { len: first })),
        b'G' => Ok(Some(AgentCommand::Forget)),
        b'S' => Ok(Some(AgentCommand::Save { start: first, len: second })),
        b'C' => Ok(Some(AgentCommand::Cancel)),
        _ => Err(failed(format!("unknown command kind {kind}"))),
    }
}

pub(super) fn send_answer(peer: &Peer, answer: &Answer) -> io::Result<()> {
    match answer {
        Answer::Ready(owner) => send(peer, b'R', [0, 0], owner.as_bytes()),
        Answer::Forgotten => send(peer, b'G', [0, 0], &[]),
        Answer::Wrote(bytes) => {
            // Not worth waiting for: a newer one follows.
            peer.send(&packed(b'W', [*bytes, 0], &[]), POLL_INTERVAL)
        }
        Answer::Saved(report) => send(peer, b'D', [0, 0], &serde_json::to_vec(report)?),
        Answer::Cancelled => send(peer, b'X', [0, 0], &[]),
        Answer::Failed(why) => send(peer, b'F', [0, 0], why.as_bytes()),
    }
}

pub(super) fn receive(peer: &Peer, limit: Duration) -> Result<Answer> {
    let (kind, [first, _], payload) = message(peer, limit).map_err(connection_error)?;
    let text = || String::from_utf8_lossy(&payload).into_owned();
    match kind {
        b'R' => Ok(Answer::Ready(text())),
        b'G' => Ok(Answer::Forgotten),
        b'W' => Ok(Answer::Wrote(first)),
        b'D' => {
            let report = serde_json::from_slice(&payload);
            report.map(Answer::Saved).map_err(|e| failed(format!("cannot decode the report: {e}")))
        }
        b'X' => Ok(Answer::Cancelled),
        b'F' => Ok(Answer::Failed(text())),
        _ => Err(failed(format!("unknown reply kind {kind}"))),
    }
}

fn send(peer: &Peer, kind: u8, numbers: [u64; 2], payload: &[u8]) -> io::Result<()> {
    peer.send(&packed(kind, numbers, payload), ANSWER_MAX)
}

fn packed(kind: u8, numbers: [u64; 2], payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEAD_BYTES + 8 + payload.len());
    bytes.push(kind);
    for number in numbers {
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend((payload.len() as u64).to_le_bytes());
    bytes.extend(payload);
    bytes
}

fn message(peer: &Peer, limit: Duration) -> io::Result<(u8, [u64; 2], Vec<u8>)> {
    let mut head = [0; HEAD_BYTES + 8];
    peer.receive(&mut head, limit)?;
    let number = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("eight bytes"));
    let len = number(HEAD_BYTES);
    if len > TEXT_BYTES_MAX {
        let reason = format!("expected at most {TEXT_BYTES_MAX} bytes, found {len}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    }
    let mut payload = vec![0; len as usize]; // fits: 1 MiB at most
    peer.receive(&mut payload, limit)?;
    Ok((head[0], [number(1), number(9)], payload))
}

fn is_end(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset)
}

#[expect(clippy::needless_pass_by_value, reason = "`map_err` passes it by value")]
fn connection_error(error: io::Error) -> crate::Error {
    if is_end(&error) {
        return failed("the connection is closed");
    }
    failed(format!("cannot receive a message: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn messages_round_trip() {
        let (a, b) = Peer::pair().unwrap();
        for command in [
            AgentCommand::Arena { len: u64::MAX },
            AgentCommand::Save { start: 1, len: 2 },
            AgentCommand::Cancel,
        ] {
            send_command(&a, command).unwrap();
            assert_eq!(receive_command(&b).unwrap(), Some(command));
        }
        let (plan, write, commit) = (Duration::ZERO, Duration::from_nanos(17), Duration::MAX);
        let (sync, peak_bytes_per_s) = (Duration::from_secs(3), Some(7));
        let report =
            SaveReport { step: 3, bytes: 4, files: 5, plan, write, sync, commit, peak_bytes_per_s };
        for answer in [
            Answer::Ready("host.1".to_owned()),
            Answer::Forgotten,
            Answer::Wrote(9),
            Answer::Saved(report),
            Answer::Cancelled,
            Answer::Failed("the disk is full".to_owned()),
        ] {
            send_answer(&b, &answer).unwrap();
            assert_eq!(receive(&a, ANSWER_MAX).unwrap(), answer);
        }
        let options = CheckpointOptions::default();
        let [url, folder, trainer] = ["/data", "run", "host.2"].map(str::to_owned);
        let (beat, silence_max) = (Duration::from_millis(9), Duration::from_secs(7));
        let hello = Hello { url, folder, options, beat, silence_max, trainer };
        send_hello(&a, &hello).unwrap();
        let received = receive_hello(&b).unwrap();
        assert_eq!((received.url.as_str(), received.beat), ("/data", beat));
    }

    #[test]
    fn malformed_messages_are_rejected() {
        for bytes in [[b'?'; HEAD_BYTES + 8], [0xff; HEAD_BYTES + 8], [0; HEAD_BYTES + 8]] {
            let (a, b) = Peer::pair().unwrap();
            a.send(&bytes, ANSWER_MAX).unwrap();
            assert!(receive_command(&b).is_err());
            b.send(&bytes, ANSWER_MAX).unwrap();
            assert!(receive(&a, ANSWER_MAX).is_err());
        }
        let (a, b) = Peer::pair().unwrap();
        a.send(&[b'S', 0, 0], ANSWER_MAX).unwrap();
        drop(a);
        assert_eq!(receive_command(&b).unwrap(), None, "a truncated command ends the connection");
    }
}
