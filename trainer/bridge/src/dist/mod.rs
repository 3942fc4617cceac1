//! Groups of ranks and their operations: libtorch's c10d.
//!
//! Ranks find one another through a [`Store`]; a [`Group`] is some connected ranks with a name; an
//! operation on a group is a [`Work`] to wait for, or a blocking call. Ranks may be processes, or
//! threads with a `Store` each.
//!
//! Every wait has a timeout, and errors name the missing ranks: a rank with an error notes in the
//! store which operation it has reached, and checks which ranks have not. A group that has failed
//! once stays failed.

mod group;
mod missing_ranks;
mod op;
mod store;
mod work;

pub use group::{Group, GroupOptions, Listen};
pub(crate) use missing_ranks::{explain, seconds};
pub(crate) use op::{LostPeer, Op};
pub use op::{Reduce, Wait};
pub use store::Store;
pub use work::{Work, settle, waited};

/// How long a failed rank waits for the notes of others. They fail at about the same time, or call
/// [`Store::tell_waits`] every second.
const NOTES_WAIT: std::time::Duration = std::time::Duration::from_secs(2);

/// Ranks in a message: `3`, `0-7`, `12,28`; of many the first only.
#[must_use]
pub fn ranks_text(ranks: &[usize]) -> String {
    const RUNS_MAX: usize = 16;
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for rank in ranks {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == *rank => *last = *rank,
            _ => runs.push((*rank, *rank)),
        }
    }
    let text = |(first, last): &(usize, usize)| match last - first {
        0 => first.to_string(),
        1 => format!("{first},{last}"),
        _ => format!("{first}-{last}"),
    };
    let shown: Vec<String> = runs.iter().take(RUNS_MAX).map(text).collect();
    let more = if runs.len() > RUNS_MAX { ",..." } else { "" };
    format!("{}{more}", shown.join(","))
}
