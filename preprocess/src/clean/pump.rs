//! Threads: one reads and cuts at newlines, workers judge, and the thread that called takes what
//! they judged in the order of the input. Blocks go round between them; there are so many and no
//! more, which bounds the memory and makes whoever is ahead wait.

use std::collections::BTreeMap;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Mutex, PoisonError};
use std::thread;

use super::judged::{Judged, Work, Worker};
use crate::Result;
use crate::input::Cutter;
use crate::parcel::Parcel;

/// A worker finds its next block waiting while one is read and one is written. A block is its
/// lines, and for near duplicates their texts and 8 bytes a band: at 1 MiB about 3 MiB.
const BLOCKS_PER_WORKER: usize = 3;

/// One is being read, one is being written.
const BLOCKS_BESIDE: usize = 2;

/// Whole lines of one input, and what is known of them.
#[derive(Debug, Default)]
pub(super) struct Block {
    pub(super) parcel: Parcel,
    pub(super) judged: Judged,
}

/// What comes to the thread that called.
enum Done {
    Block(Box<Block>),
    /// A thread ended by a panic; its block will not come.
    Panicked,
}

/// Tells if its thread panics: who waits for it would wait for ever otherwise.
struct Alarm(Sender<Done>);

impl Drop for Alarm {
    fn drop(&mut self) {
        if thread::panicking() {
            let _ = self.0.send(Done::Panicked);
        }
    }
}

/// Runs the threads and hands every block to `take`, in order, until there are no more or one
/// fails.
pub(super) fn pump(
    cutter: Cutter,
    work: &Work<'_>,
    take: &mut dyn FnMut(&mut Block) -> Result<()>,
) -> Result<()> {
    let workers = work.options.workers;
    let (free, frees) = mpsc::channel();
    let (job, jobs) = mpsc::channel();
    let (done, dones) = mpsc::channel();
    for _ in 0..workers * BLOCKS_PER_WORKER + BLOCKS_BESIDE {
        free.send(Box::default()).expect("its receiver is here");
    }
    let jobs = Mutex::new(jobs);
    let alarm = Alarm(done.clone());
    // Not of the scope: it may wait for standard input, which need not ever come.
    thread::spawn(move || read(cutter, &frees, &job, &alarm));
    thread::scope(|scope| {
        for _ in 0..workers {
            let (jobs, alarm) = (&jobs, Alarm(done.clone()));
            scope.spawn(move || judge(Worker::new(work), jobs, &alarm));
        }
        drop(done);
        take_in_order(dones, free, take)
    })
}

/// The reader. It ends when there is nothing more, or when nobody waits for it.
fn read(mut cutter: Cutter, frees: &Receiver<Box<Block>>, job: &Sender<Box<Block>>, alarm: &Alarm) {
    while let Ok(mut block) = frees.recv() {
        block.parcel.reset();
        block.judged.reset();
        if !cutter.fill(&mut block.parcel) {
            return;
        }
        if block.parcel.stop.is_some() {
            let _ = alarm.0.send(Done::Block(block));
            return;
        }
        if job.send(block).is_err() {
            return;
        }
    }
}

/// A worker. It ends when the reader has, and all is judged.
fn judge(mut worker: Worker<'_>, jobs: &Mutex<Receiver<Box<Block>>>, alarm: &Alarm) {
    loop {
        // A worker that panicked holds no lock: it was at work.
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(mut block) = job else { return };
        let Block { parcel, judged } = block.as_mut();
        worker.judge(parcel, judged);
        if alarm.0.send(Done::Block(block)).is_err() {
            return;
        }
    }
}

/// Takes both channels, so that whoever is at the other ends learns when it returns.
#[expect(clippy::needless_pass_by_value, reason = "dropping them is what ends the other threads")]
fn take_in_order(
    dones: Receiver<Done>,
    free: Sender<Box<Block>>,
    take: &mut dyn FnMut(&mut Block) -> Result<()>,
) -> Result<()> {
    let mut early = BTreeMap::new();
    let mut next_seq = 0;
    for done in &dones {
        let Done::Block(block) = done else { panic!("a thread that judges lines panicked") };
        early.insert(block.parcel.seq, block);
        while let Some(mut block) = early.remove(&next_seq) {
            next_seq += 1;
            take(&mut block)?;
            // The reader has gone when it has read all.
            let _ = free.send(block);
        }
    }
    assert!(early.is_empty(), "every block up to the last has come");
    Ok(())
}
