//! Finds the missing ranks. An operation on a group fails on its ranks one after the other, each
//! with the view of its own sockets: an address, a port, a time. So each rank notes in the store
//! which collective of the group it has reached, and checks which ranks have not reached it.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::group::Inner;
use super::{LostPeer, NOTES_WAIT, Store, Wait, ranks_text};
use crate::ffi::{self, RawWait};
use crate::{Error, Result};

/// The groups of this process, by the numbers under which the shim knows them.
static GROUPS: Mutex<BTreeMap<u64, Weak<Inner>>> = Mutex::new(BTreeMap::new());

fn groups() -> MutexGuard<'static, BTreeMap<u64, Weak<Inner>>> {
    GROUPS.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn register(id: u64, group: &Arc<Inner>) {
    let mut groups = groups();
    groups.retain(|_, group| group.strong_count() > 0);
    groups.insert(id, Arc::downgrade(group));
}

/// The error of an operation that failed because of another rank.
pub(crate) fn explain(lost: &LostPeer, text: &str) -> Error {
    let text = one_line(text);
    let group = groups().get(&lost.group).and_then(Weak::upgrade);
    let Some(group) = group else {
        // Only an autograd graph still holds the group.
        return Error::Collective { op: lost.op(), group: "a group".into(), ranks: vec![], text };
    };
    let after = seconds(lost.seconds);
    let text = match group.who_is_missing(lost) {
        Ok((missing, elsewhere)) if missing.is_empty() && elsewhere.is_empty() => {
            format!("failed after {after}: {text}")
        }
        Ok((missing, elsewhere)) => {
            let noun = if missing.len() == 1 { "rank" } else { "ranks" };
            let missing = (!missing.is_empty())
                .then(|| format!("{noun} {} missing after {after}", ranks_text(&missing)));
            let parts: Vec<String> = missing.into_iter().chain(elsewhere).collect();
            format!("{} ({text})", parts.join(", "))
        }
        Err(error) => format!("failed after {after}: {text}; missing ranks unknown: {error}"),
    };
    Error::Collective {
        op: lost.op(),
        group: group.name.clone(),
        ranks: group.members.clone(),
        text,
    }
}

impl Inner {
    /// The ranks that did not reach this operation, and a text about each that started another one
    /// instead.
    fn who_is_missing(&self, lost: &LostPeer) -> Result<(Vec<usize>, Vec<String>)> {
        self.publish(&self.store, lost.number, lost.op())?;
        if let Some(peer) = lost.peer() {
            return Ok((self.members.get(peer).copied().into_iter().collect(), Vec::new()));
        }
        let others = self.members.iter().copied().filter(|rank| *rank != self.own());
        let mut missing: Vec<usize> = others.collect();
        let mut elsewhere = Vec::new();
        let deadline = Instant::now() + NOTES_WAIT;
        loop {
            let mut still = Vec::new();
            for rank in missing {
                match self.note(rank)? {
                    Some((number, op)) if number == lost.number && op != lost.op() => {
                        elsewhere.push(format!("rank {rank} is in {op} instead"));
                    }
                    Some((number, _)) if number >= lost.number => {}
                    _ => still.push(rank),
                }
            }
            missing = still;
            if missing.is_empty() || Instant::now() >= deadline {
                return Ok((missing, elsewhere));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// This rank, in the world.
    fn own(&self) -> usize {
        self.members[self.rank]
    }

    /// Notes in the store which collective this rank has reached.
    fn publish(&self, through: &Store, number: u64, op: &str) -> Result<()> {
        through.set(&format!("at/{}", self.own()), format!("{number} {op}").as_bytes())
    }

    /// Which collective a rank has reached, by its note.
    fn note(&self, rank: usize) -> Result<Option<(u64, String)>> {
        let Some(note) = self.store.look(&format!("at/{rank}"))? else { return Ok(None) };
        let note = String::from_utf8_lossy(&note).into_owned();
        let parsed = note.split_once(' ').and_then(|(number, op)| Some((number.parse().ok()?, op)));
        Ok(parsed.map(|(number, op)| (number, op.to_owned())))
    }

    /// What a thread of this process waits for on this group.
    fn waits(&self) -> Option<Wait> {
        let mut wait = RawWait { op: std::ptr::null(), peer: -1, number: 0, seconds: 0.0 };
        // SAFETY: the group is alive, and `wait` has room.
        if unsafe { ffi::fb_group_waits(self.raw.as_ptr(), &raw mut wait) } == 0 {
            return None;
        }
        // SAFETY: the name of an operation is a constant of the shim, ended by NUL.
        let op = unsafe { CStr::from_ptr(wait.op) };
        let peer = usize::try_from(wait.peer).ok();
        Some(Wait {
            op: op.to_str().unwrap_or("an operation"),
            group: self.name.clone(),
            peer: peer.and_then(|peer| self.members.get(peer).copied()),
            members: self.members.clone(),
            number: wait.number,
            age: Duration::from_secs_f64(wait.seconds),
        })
    }
}

impl Store {
    /// What the rank that owns this store waits for on its groups, the longest first.
    #[must_use]
    pub fn waits(&self) -> Vec<Wait> {
        let mut waits: Vec<Wait> = self.groups().iter().filter_map(|group| group.waits()).collect();
        waits.sort_by_key(|wait| std::cmp::Reverse(wait.age));
        waits
    }

    /// Notifies the others of a group that this rank has waited for them longer than `age`, so that
    /// the rank that times out first does not report this one as missing. Uses this connection,
    /// because another may be blocked in a wait.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub fn tell_waits(&self, age: Duration) -> Result<()> {
        for group in self.groups() {
            let Some(wait) = group.waits() else { continue };
            let collective = wait.peer.is_none() && wait.age >= age;
            if collective && group.announced.fetch_max(wait.number, Ordering::Relaxed) < wait.number
            {
                group.publish(&self.at(&group.store), wait.number, wait.op)?;
            }
        }
        Ok(())
    }

    /// The groups of the rank that owns this store.
    fn groups(&self) -> Vec<Arc<Inner>> {
        let own = |group: &Arc<Inner>| Arc::ptr_eq(&group.store.owner, &self.owner);
        groups().values().filter_map(Weak::upgrade).filter(own).collect()
    }
}

/// `12 s`, `0.3 s`.
pub(crate) fn seconds(seconds: f64) -> String {
    if seconds >= 10.0 { format!("{seconds:.0} s") } else { format!("{seconds:.1} s") }
}

/// The first line of an error of libtorch, without the place in its sources.
pub(crate) fn one_line(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default().trim();
    let located = line.strip_prefix('[').and_then(|rest| rest.split_once("] "));
    let located = located.filter(|(place, _)| place.contains(".cc:") || place.contains(".cpp:"));
    located.map_or(line, |(_, text)| text).trim_end_matches('.').to_owned()
}
