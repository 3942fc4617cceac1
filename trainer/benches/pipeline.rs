//! A pipeline of four against its simulation: every schedule, ranks as threads over loopback.
//!
//! `cargo bench -p trainer --bench pipeline`. Computing is sleeping here, so that four ranks need
//! no four cores: what is measured is whether the order of passes, and messages that are on their
//! way while others compute, give the bubble that [`simulate`] computes. The simulation gets the
//! time of a message without other load. Times are medians of steps.

#![expect(clippy::print_stdout, reason = "it is what a benchmark is for")]

use std::time::{Duration, Instant};

use bridge::dist::{Group, GroupOptions, Store, Work};
use recipe::schedule::{Action, Costs, Pass, Pipeline, Schedule, simulate};
use tch::{Device, Kind, Tensor};
use trainer::launch::comm::RankActivity;
use trainer::parallel::pipe::Pipe;

const RANKS: usize = 4;
const MICRO: usize = 8;
const STEPS: usize = 5;
const HOPS: usize = 20;
/// Of one micro-batch through all units of a rank.
const FORWARD: Duration = Duration::from_millis(64);
const BACKWARD: Duration = Duration::from_millis(128);
/// Two megabytes, as 4 x 256 tokens of width 512 in f32.
const SHAPE: [i64; 2] = [1024, 512];
const PATIENCE: Duration = Duration::from_secs(60);

fn main() {
    let transfer = on_ranks(hop)[0];
    println!("a message of 2 MB from rank to rank: {transfer:.2} ms\n");
    println!("| schedule | chunks | step ms | simulated ms | bubble | simulated |");
    println!("|---|---|---|---|---|---|");
    for (schedule, chunks) in [
        (Schedule::Gpipe, 1),
        (Schedule::OneForwardOneBackward, 1),
        (Schedule::Interleaved, 2),
        (Schedule::Interleaved, 4),
    ] {
        let shape = Pipeline { ranks: RANKS, chunks };
        let lists: Vec<Vec<Action>> =
            (0..RANKS).map(|rank| schedule.actions(shape, rank, MICRO)).collect();
        let each = |time: Duration| time.as_secs_f64() * 1e3 / chunks as f64;
        let costs = Costs { forward: each(FORWARD), backward: each(BACKWARD), transfer };
        let simulated = simulate(shape, &lists, costs).expect("it ends");
        let measured = measure(shape, &lists, costs);
        let work = MICRO as f64 * (FORWARD + BACKWARD).as_secs_f64() * 1e3;
        println!(
            "| {schedule:?} | {chunks} | {measured:.1} | {:.1} | {:.3} | {:.3} |",
            simulated.time,
            1.0 - work / measured,
            simulated.bubble()
        );
    }
}

/// The median time of a step, in milliseconds, of the slowest rank.
fn measure(shape: Pipeline, lists: &[Vec<Action>], costs: Costs) -> f64 {
    let times = on_ranks(|group| {
        (0..=STEPS).map(|_| step(group, shape, lists, costs)).collect::<Vec<f64>>()
    });
    let slowest = |step: usize| times.iter().map(|of| of[step]).fold(0.0, f64::max);
    // The first step connects.
    median((1..=STEPS).map(slowest).collect())
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// What a message takes one way, in milliseconds: the first two ranks send one to and fro.
fn hop(group: &Group) -> f64 {
    let mut message = Tensor::zeros(SHAPE, (Kind::Float, Device::Cpu));
    let own = group.rank();
    let mut round = || {
        let started = Instant::now();
        for turn in 0..2 {
            let done = if turn == own {
                group.send(&message, 1 - own, 0)
            } else {
                group.recv(&mut message, 1 - own, 0)
            };
            done.and_then(Work::wait).expect("both are there");
        }
        started.elapsed().as_secs_f64() * 1e3 / 2.0
    };
    let times = if own < 2 { (0..=HOPS).map(|_| round()).collect() } else { vec![0.0] };
    median(times)
}

/// Runs the same on each rank, and returns the results.
fn on_ranks<T: Send>(does: impl Fn(&Group) -> T + Sync) -> Vec<T> {
    let does = &does;
    let server = Store::serve("127.0.0.1", 0, PATIENCE).expect("a free port");
    let port = server.port();
    std::thread::scope(|scope| {
        let start = |rank: usize| {
            scope.spawn(move || {
                let store = Store::connect("127.0.0.1", port, PATIENCE).expect("it is there");
                let members: Vec<usize> = (0..RANKS).collect();
                let options = GroupOptions::local(PATIENCE);
                let group = Group::gloo(&store, "pp", rank, &members, &options);
                does(&group.expect("all come"))
            })
        };
        let ranks: Vec<_> = (0..RANKS).map(start).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}

fn step(group: &Group, shape: Pipeline, lists: &[Vec<Action>], costs: Costs) -> f64 {
    let own = group.rank();
    let doing = RankActivity::default();
    group.barrier().expect("all come");
    let started = Instant::now();
    let mut pipe = Pipe::new(group, shape, lists, (Kind::Float, Device::Cpu), &doing);
    for (at, action) in lists[own].iter().enumerate() {
        pipe.post_recvs(&lists[own][at..], |_| vec![SHAPE.to_vec()]).expect("all are there");
        pipe.take(action).expect("all are there");
        let cost = if action.pass == Pass::Forward { costs.forward } else { costs.backward };
        std::thread::sleep(Duration::from_secs_f64(cost / 1e3));
        let result = Tensor::zeros(SHAPE, (Kind::Float, Device::Cpu));
        pipe.send(action, &[result]).expect("all are there");
    }
    pipe.finish().expect("all are there");
    started.elapsed().as_secs_f64() * 1e3
}
