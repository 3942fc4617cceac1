//! Pipeline schedules as data: what each rank computes, in which order.
//!
//! A schedule is a list of [`Action`]s per rank. Sends and receives follow from them: the input of
//! an action is the result of [`Action::after`], on whichever rank that runs. [`simulate`] runs the
//! lists against one another, so that a deadlock, an impossible order or too large a bubble is
//! found without starting a process.

use std::fmt;

pub use crate::config::Schedule;

/// The two directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// From the embedding to the loss.
    Forward,
    /// From the loss to the embedding.
    Backward,
}

/// One pass of one micro-batch through one stage of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Action {
    /// The direction.
    pub pass: Pass,
    /// Index among the micro-batches of this replica in the step.
    pub micro: usize,
    /// Index among the stages of the rank.
    pub chunk: usize,
}

impl Action {
    /// The action whose result is the input of this one on rank `rank`, and the pipeline rank that
    /// runs it; `None` for the forward pass of the first stage. The input of the backward pass of
    /// the last stage is the result of its own forward pass.
    #[must_use]
    pub fn after(&self, rank: usize, shape: Pipeline) -> Option<(usize, Action)> {
        let Pipeline { ranks, chunks } = shape;
        let stage = self.chunk * ranks + rank;
        let (pass, stage) = match self.pass {
            Pass::Forward => (Pass::Forward, stage.checked_sub(1)?),
            Pass::Backward if stage + 1 == ranks * chunks => (Pass::Forward, stage),
            Pass::Backward => (Pass::Backward, stage + 1),
        };
        let before = Action { pass, micro: self.micro, chunk: stage / ranks };
        Some((stage % ranks, before))
    }

    /// The action whose input is the result of this one on rank `rank`, and the pipeline rank that
    /// runs it; `None` for the backward pass of the first stage.
    #[must_use]
    pub fn before(&self, rank: usize, shape: Pipeline) -> Option<(usize, Action)> {
        let Pipeline { ranks, chunks } = shape;
        let stage = self.chunk * ranks + rank;
        let (pass, stage) = match self.pass {
            Pass::Forward if stage + 1 == ranks * chunks => (Pass::Backward, stage),
            Pass::Forward => (Pass::Forward, stage + 1),
            Pass::Backward => (Pass::Backward, stage.checked_sub(1)?),
        };
        Some((stage % ranks, Action { pass, micro: self.micro, chunk: stage / ranks }))
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Action { pass, micro, chunk } = self;
        write!(f, "{pass:?}(micro-batch {micro}, chunk {chunk})")
    }
}

/// Ranks of a pipeline and stages per rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pipeline {
    /// Pipeline ranks.
    pub ranks: usize,
    /// Stages per rank.
    pub chunks: usize,
}

impl Schedule {
    /// The actions of one rank in a step of `micro` micro-batches, in order. Every list has one
    /// forward and one backward pass of each micro-batch through each chunk. The backward passes of
    /// a chunk are in the order of the micro-batches, as a sum of gradients in a fixed order needs.
    ///
    /// # Panics
    /// If there are several chunks and the schedule is not the interleaved one, or if the number of
    /// micro-batches is not divisible by the number of ranks.
    #[must_use]
    pub fn actions(self, shape: Pipeline, rank: usize, micro: usize) -> Vec<Action> {
        let Pipeline { ranks, chunks } = shape;
        let total = micro * chunks;
        // Forward passes before the first backward pass: those that the ranks after this one need.
        let warm = match self {
            Schedule::Gpipe => total,
            Schedule::OneForwardOneBackward => ranks - rank - 1,
            Schedule::Interleaved => 2 * (ranks - rank - 1) + (chunks - 1) * ranks,
        };
        assert!(chunks == 1 || self == Schedule::Interleaved, "{self:?} has one chunk a rank");
        assert!(chunks == 1 || micro.is_multiple_of(ranks), "{micro} micro-batches, {ranks} ranks");
        let warm = warm.min(total);
        let forward = |nth| nth_action(Pass::Forward, nth, shape);
        let backward = |nth| nth_action(Pass::Backward, nth, shape);
        let mut actions: Vec<Action> = (0..warm).map(forward).collect();
        for nth in warm..total {
            actions.push(forward(nth));
            actions.push(backward(nth - warm));
        }
        actions.extend((total - warm..total).map(backward));
        actions
    }

    /// The fraction of a step in which a rank waits, if all stages take the same time and sends
    /// take none.
    #[must_use]
    pub fn bubble(self, shape: Pipeline, micro: usize) -> f64 {
        let idle = (shape.ranks - 1) as f64;
        idle / ((micro * shape.chunks) as f64 + idle)
    }
}

/// Groups of one micro-batch per rank, all through the first chunk, then all through the next: when
/// the last rank has finished the first chunk, this rank starts its second.
fn nth_action(pass: Pass, nth: usize, shape: Pipeline) -> Action {
    let Pipeline { ranks, chunks } = shape;
    if chunks == 1 {
        return Action { pass, micro: nth, chunk: 0 };
    }
    let (group, within) = (nth / (ranks * chunks), nth % (ranks * chunks));
    let chunk = within / ranks;
    let chunk = if pass == Pass::Forward { chunk } else { chunks - 1 - chunk };
    Action { pass, micro: group * ranks + within % ranks, chunk }
}

/// The duration of actions, in any unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// One forward pass of one chunk.
    pub forward: f64,
    /// One backward pass.
    pub backward: f64,
    /// From the end of an action to the arrival of its result at another rank.
    pub transfer: f64,
}

/// The result of a simulation.
#[derive(Clone, Debug, PartialEq)]
pub struct Simulated {
    /// From the first action to the end of the last.
    pub time: f64,
    /// Compute time of each rank.
    pub busy: Vec<f64>,
    /// Maximum of micro-batches in flight on a rank, counted per chunk.
    pub in_flight_max: Vec<usize>,
}

impl Simulated {
    /// The fraction of the step in which the rank with the least compute time was idle.
    #[must_use]
    pub fn bubble(&self) -> f64 {
        let least = self.busy.iter().copied().fold(f64::INFINITY, f64::min);
        1.0 - least / self.time
    }
}

/// Runs the lists of all ranks. A rank starts its next action as soon as it has finished the one
/// before and has the input. Sends do not block.
///
/// # Errors
/// A deadlock: for each rank the action that never ran, and what it waits for.
pub fn simulate(shape: Pipeline, lists: &[Vec<Action>], costs: Costs) -> Result<Simulated, String> {
    let micros = lists.iter().flatten().map(|action| action.micro + 1).max().unwrap_or(0);
    let place = |rank: usize, action: &Action| {
        let pass = 2 * rank + usize::from(action.pass == Pass::Backward);
        (pass * shape.chunks + action.chunk) * micros + action.micro
    };
    let mut done = vec![None; 2 * shape.ranks * shape.chunks * micros];
    let mut next = vec![0; lists.len()];
    let mut free_at = vec![0.0_f64; lists.len()];
    let mut busy = vec![0.0; lists.len()];
    let (mut in_flight, mut in_flight_max) = (vec![0_usize; lists.len()], vec![0; lists.len()]);
    loop {
        let mut moved = false;
        for rank in 0..lists.len() {
            while let Some(action) = lists[rank].get(next[rank]) {
                let begin = match action.after(rank, shape) {
                    None => free_at[rank],
                    Some((from, input)) => {
                        let Some(at) = done[place(from, &input)] else { break };
                        let way = if from == rank { 0.0 } else { costs.transfer };
                        free_at[rank].max(at + way)
                    }
                };
                let cost = match action.pass {
                    Pass::Forward => {
                        in_flight[rank] += 1;
                        costs.forward
                    }
                    Pass::Backward => {
                        in_flight[rank] = in_flight[rank]
                            .checked_sub(1)
                            .ok_or_else(|| format!("rank {rank}: {action} before its forward"))?;
                        costs.backward
                    }
                };
                in_flight_max[rank] = in_flight[rank].max(in_flight_max[rank]);
                free_at[rank] = begin + cost;
                busy[rank] += cost;
                done[place(rank, action)] = Some(free_at[rank]);
                next[rank] += 1;
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    let stuck = lists.iter().enumerate().filter_map(|(rank, list)| {
        let action = list.get(next[rank])?;
        let (from, input) = action.after(rank, shape)?;
        Some(format!("rank {rank}: {action} waits for {input} of rank {from}"))
    });
    let stuck: Vec<String> = stuck.collect();
    if !stuck.is_empty() {
        return Err(stuck.join("\n"));
    }
    let time = free_at.iter().copied().fold(0.0, f64::max);
    Ok(Simulated { time, busy, in_flight_max })
}
