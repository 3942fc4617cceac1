//! Schedules of all small pipelines: they terminate, their order is possible, they hold no more
//! activations than specified, and their bubble equals the formula.

use std::collections::HashSet;

use recipe::schedule::{Action, Costs, Pass, Pipeline, Schedule, Simulated, simulate};

const COSTS: [Costs; 2] = [
    Costs { forward: 1.0, backward: 1.0, transfer: 0.0 },
    Costs { forward: 1.0, backward: 2.0, transfer: 0.0 },
];

fn lists(schedule: Schedule, shape: Pipeline, micro: usize) -> Vec<Vec<Action>> {
    (0..shape.ranks).map(|rank| schedule.actions(shape, rank, micro)).collect()
}

/// Checks the properties of every schedule, and returns the simulation for others.
fn check(schedule: Schedule, shape: Pipeline, micro: usize, costs: Costs) -> Simulated {
    let what = format!("{schedule:?} of {shape:?}, {micro} micro-batches");
    let lists = lists(schedule, shape, micro);
    for (rank, list) in lists.iter().enumerate() {
        let distinct: HashSet<Action> = list.iter().copied().collect();
        assert_eq!(distinct.len(), list.len(), "{what}: rank {rank} does something twice");
        assert_eq!(list.len(), 2 * micro * shape.chunks, "{what}: rank {rank}");
        for chunk in 0..shape.chunks {
            for pass in [Pass::Forward, Pass::Backward] {
                let of = |action: &&Action| action.pass == pass && action.chunk == chunk;
                let order: Vec<usize> = list.iter().filter(of).map(|a| a.micro).collect();
                assert!(order.is_sorted(), "{what}: rank {rank} has {pass:?} as {order:?}");
            }
        }
    }
    let simulated =
        simulate(shape, &lists, costs).unwrap_or_else(|stuck| panic!("{what}:\n{stuck}"));
    let work = (costs.forward + costs.backward) * (micro * shape.chunks) as f64;
    assert!(simulated.busy.iter().all(|busy| (busy - work).abs() < 1e-9), "{what}");
    simulated
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-9
}

#[test]
fn gpipe_and_one_forward_one_backward() {
    for ranks in 1..=16 {
        for micro in 1..=64 {
            let shape = Pipeline { ranks, chunks: 1 };
            for costs in COSTS {
                for schedule in [Schedule::Gpipe, Schedule::OneForwardOneBackward] {
                    let simulated = check(schedule, shape, micro, costs);
                    let expected = schedule.bubble(shape, micro);
                    assert!(close(simulated.bubble(), expected), "{schedule:?} {ranks} {micro}");
                    let kept = |rank: usize| match schedule {
                        Schedule::Gpipe => micro,
                        _ => micro.min(ranks - rank),
                    };
                    let expected: Vec<usize> = (0..ranks).map(kept).collect();
                    assert_eq!(simulated.in_flight_max, expected, "{schedule:?} {ranks} {micro}");
                }
            }
        }
    }
}

#[test]
fn interleaved_schedules() {
    for ranks in 2..=16 {
        for micro in (ranks..=64).step_by(ranks) {
            for chunks in 1..=4 {
                let shape = Pipeline { ranks, chunks };
                for costs in COSTS {
                    let simulated = check(Schedule::Interleaved, shape, micro, costs);
                    let expected = Schedule::Interleaved.bubble(shape, micro);
                    let found = simulated.bubble();
                    assert!(
                        close(found, expected),
                        "{shape:?} {micro}: {found}, expected {expected}"
                    );
                    for (rank, kept) in simulated.in_flight_max.iter().enumerate() {
                        let warm = 2 * (ranks - rank - 1) + (chunks - 1) * ranks;
                        assert!(*kept <= (warm + 1).min(micro * chunks), "{shape:?} rank {rank}");
                    }
                }
            }
        }
    }
}

/// The simulator must find an impossible order.
#[test]
fn a_deadlock_is_found_and_described() {
    let shape = Pipeline { ranks: 2, chunks: 1 };
    let mut lists = lists(Schedule::OneForwardOneBackward, shape, 2);
    // The first rank waits for its first gradient before it sends the input of the second.
    lists[0].swap(1, 2);
    lists[0].swap(0, 1);
    let stuck = simulate(shape, &lists, COSTS[0]).unwrap_err();
    let expected = "rank 0: Backward(micro-batch 0, chunk 0) waits for Backward(micro-batch 0, \
                    chunk 0) of rank 1\nrank 1: Forward(micro-batch 0, chunk 0) waits for \
                    Forward(micro-batch 0, chunk 0) of rank 0";
    assert_eq!(stuck, expected);
}

#[test]
fn sends_match_receives() {
    for (ranks, chunks) in [(1, 1), (2, 1), (3, 1), (2, 3), (4, 2)] {
        let shape = Pipeline { ranks, chunks };
        let kind = if chunks == 1 { Schedule::Gpipe } else { Schedule::Interleaved };
        for rank in 0..ranks {
            for action in kind.actions(shape, rank, ranks) {
                if let Some((from, input)) = action.after(rank, shape) {
                    assert_eq!(input.before(from, shape), Some((rank, action)), "{action}");
                }
            }
        }
    }
}
