//! The threads of a run: one reads and splits the inputs, workers process the batches, and the
//! calling thread takes the results in input order. [`PipelineItem`]s circulate between them; their
//! number is fixed, which bounds memory and applies backpressure.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::batch::document_batch::DocumentBatch;
use crate::input::InputChunker;
use crate::{Error, Result};

/// Items per worker, so that its next one is ready while one is read and one is written. A batch to
/// tokenize holds a block and its tokens, at worst two bytes per byte (four with 32-bit ids): with
/// 64 workers 194 batches of at most 768 KiB, so 150 MiB; on plain text, at four bytes a token,
/// half. A batch to clean holds its lines, and for near duplicates their texts and 8 bytes per
/// band: at 1 MiB about 3 MiB.
const ITEMS_PER_WORKER: usize = 3;

/// Additional items: one being read and one being written.
const ITEMS_EXTRA: usize = 2;

/// Interval between checks of `stop`: an input may send nothing for hours.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// The unit that circulates: a batch and its results.
pub(crate) trait PipelineItem: Default + Send + 'static {
    fn document_batch(&mut self) -> &mut DocumentBatch;

    /// Clears it for reuse.
    fn reset(&mut self);
}

impl PipelineItem for DocumentBatch {
    fn document_batch(&mut self) -> &mut DocumentBatch {
        self
    }

    fn reset(&mut self) {
        DocumentBatch::reset(self);
    }
}

/// Message to a worker.
enum WorkerMessage<L> {
    Item(Box<L>),
    /// There are no more items.
    End,
}

/// Message to the calling thread.
enum ResultMessage<L> {
    Item(Box<L>),
    /// All inputs have been read; the number of items.
    Read(u64),
    /// A thread panicked; its item will not arrive.
    Panicked,
}

/// Reports a panic of its thread, for whose item the caller would otherwise wait forever.
struct PanicNotifier<L>(Sender<ResultMessage<L>>);

impl<L> Drop for PanicNotifier<L> {
    fn drop(&mut self) {
        if thread::panicking() {
            let _ = self.0.send(ResultMessage::Panicked);
        }
    }
}

/// Ends the workers, however the calling thread returns. The reader may hold the other end of their
/// channel forever: it may wait for an input that never arrives.
struct WorkerShutdown<'a, L> {
    job: Sender<WorkerMessage<L>>,
    workers: usize,
    closed: &'a AtomicBool,
}

impl<L> Drop for WorkerShutdown<'_, L> {
    fn drop(&mut self) {
        self.closed.store(true, Ordering::Relaxed);
        for _ in 0..self.workers {
            // Workers that panicked need no message.
            let _ = self.job.send(WorkerMessage::End);
        }
    }
}

/// Runs the threads and passes every item to `take`, in order, until there are no more, one fails,
/// or `stop` is true while none arrives. `worker` is called on each worker's own thread, so that
/// its memory is near its core.
///
/// # Errors
/// The error of `take`; [`Error::Stopped`]; [`Error::Storage`] if the system starts no thread.
pub(crate) fn pump<L: PipelineItem, W: FnMut(&mut L)>(
    chunker: InputChunker,
    workers: usize,
    stop: &AtomicBool,
    worker: impl Fn() -> W + Sync,
    take: &mut dyn FnMut(&mut L) -> Result<()>,
) -> Result<()> {
    let (free, free_items) = mpsc::channel();
    let (job, jobs) = mpsc::channel();
    let (done, dones) = mpsc::channel();
    for _ in 0..workers * ITEMS_PER_WORKER + ITEMS_EXTRA {
        free.send(Box::default()).expect("its receiver is here");
    }
    let jobs = Mutex::new(jobs);
    let closed = AtomicBool::new(false);
    let (to_workers, results) = (job.clone(), PanicNotifier(done.clone()));
    // Not scoped: it may wait forever for an input.
    let reader = thread::Builder::new().name("read".to_owned());
    let reader = reader.spawn(move || read(chunker, &free_items, &to_workers, &results));
    reader.map_err(Error::no_thread)?;
    thread::scope(|scope| {
        let _closing = WorkerShutdown { job, workers, closed: &closed };
        for nth in 0..workers {
            let (jobs, closed, worker, results) =
                (&jobs, &closed, &worker, PanicNotifier(done.clone()));
            let thread = thread::Builder::new().name(format!("worker-{nth}"));
            let spawned =
                thread.spawn_scoped(scope, move || work(worker(), jobs, closed, &results));
            match spawned {
                Ok(_) => {}
                Err(error) if nth == 0 => return Err(Error::no_thread(error)),
                Err(error) => {
                    log::warn!("{nth} of {workers} workers started; cannot start more: {error}");
                    break;
                }
            }
        }
        take_in_order(&dones, &free, stop, take)
    })
}

/// The reader. It ends at the end of the inputs, or when the caller has returned.
fn read<L: PipelineItem>(
    mut chunker: InputChunker,
    free_items: &Receiver<Box<L>>,
    job: &Sender<WorkerMessage<L>>,
    results: &PanicNotifier<L>,
) {
    let mut count = 0;
    while let Ok(mut item) = free_items.recv() {
        item.reset();
        if !chunker.fill(item.document_batch()) {
            break;
        }
        count += 1;
        if item.document_batch().stop.is_some() {
            let _ = results.0.send(ResultMessage::Item(item));
            break;
        }
        if job.send(WorkerMessage::Item(item)).is_err() {
            return;
        }
    }
    let _ = results.0.send(ResultMessage::Read(count));
}

/// A worker. It ends on [`WorkerMessage::End`], or when the caller has returned.
fn work<L: PipelineItem>(
    mut worker: impl FnMut(&mut L),
    jobs: &Mutex<Receiver<WorkerMessage<L>>>,
    closed: &AtomicBool,
    results: &PanicNotifier<L>,
) {
    loop {
        // A worker that panicked held no lock: it was processing an item.
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(WorkerMessage::Item(mut item)) = job else { return };
        if closed.load(Ordering::Relaxed) {
            return;
        }
        worker(&mut item);
        if results.0.send(ResultMessage::Item(item)).is_err() {
            return;
        }
    }
}

fn take_in_order<L: PipelineItem>(
    dones: &Receiver<ResultMessage<L>>,
    free: &Sender<Box<L>>,
    stop: &AtomicBool,
    take: &mut dyn FnMut(&mut L) -> Result<()>,
) -> Result<()> {
    let mut early = BTreeMap::new();
    let (mut next_seq, mut all) = (0, None);
    while all != Some(next_seq) {
        match dones.recv_timeout(STOP_CHECK_INTERVAL) {
            Ok(ResultMessage::Item(mut item)) => {
                early.insert(item.document_batch().seq, item);
            }
            Ok(ResultMessage::Read(count)) => all = Some(count),
            Err(RecvTimeoutError::Timeout) if stop.load(Ordering::Relaxed) => {
                return Err(Error::Stopped);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Ok(ResultMessage::Panicked) | Err(RecvTimeoutError::Disconnected) => {
                panic!("a thread of the pipeline panicked")
            }
        }
        while let Some(mut item) = early.remove(&next_seq) {
            next_seq += 1;
            take(&mut item)?;
            // Fails if the reader has ended: it has read everything.
            let _ = free.send(item);
        }
    }
    Ok(())
}
