use std::sync::Mutex;
use std::thread;

use storage::Zeros;

use crate::Result;

/// Buffer for data in flight, in large pages: a request into small pages has one entry per page,
/// and can fill the queue of a device.
#[derive(Debug, Default)]
pub(crate) struct IoBuffer(Option<Zeros>);

impl IoBuffer {
    /// At least `len` bytes, page-aligned; their contents are unspecified.
    ///
    /// # Errors
    /// If the memory cannot be allocated.
    pub(crate) fn room(&mut self, len: usize) -> Result<&mut [u8]> {
        if self.0.as_ref().is_none_or(|room| room.len() < len) {
            // The old buffer is freed first.
            self.0 = None;
            let room = Zeros::try_new(len.max(1).next_multiple_of(LARGE_PAGE_BYTES))
                .map_err(|e| storage::Error::from_io("allocate", "a read buffer", e))?;
            self.0 = Some(room);
        }
        Ok(self.0.as_deref_mut().expect("made above if there was none"))
    }
}

const LARGE_PAGE_BYTES: usize = 2 << 20;

/// Processes every item on up to `threads` threads, and returns the results in item order. The
/// first error stops all threads. Each thread reuses one scratch buffer for all its items. The
/// caller's thread is one of them; with only one thread, items are processed in order. If the
/// system creates fewer threads, this is only slower.
pub(crate) fn each<T: Send, R: Send>(
    items: Vec<T>,
    threads: usize,
    work: impl Fn(T, &mut IoBuffer) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let threads = threads.min(items.len());
    if threads <= 1 {
        let mut scratch = IoBuffer::default();
        return items.into_iter().map(|item| work(item, &mut scratch)).collect();
    }
    let queue = Mutex::new(items.into_iter().enumerate());
    let next = || queue.lock().expect("nothing panics while it holds the queue").next();
    let drain = || queue.lock().expect("nothing panics while it holds the queue").by_ref().count();
    let run = || {
        let mut scratch = IoBuffer::default();
        let mut done = Vec::new();
        while let Some((place, item)) = next() {
            let result = work(item, &mut scratch).inspect_err(|_| {
                drain();
            })?;
            done.push((place, result));
        }
        Ok(done)
    };
    let parts: Vec<Result<Vec<(usize, R)>>> = thread::scope(|scope| {
        let spawn = |_| thread::Builder::new().spawn_scoped(scope, run).ok();
        let others: Vec<_> = (1..threads).map_while(spawn).collect();
        let own = run();
        let join = |other: thread::ScopedJoinHandle<'_, _>| {
            other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        std::iter::once(own).chain(others.into_iter().map(join)).collect()
    });
    let mut all = Vec::new();
    for part in parts {
        all.extend(part?);
    }
    all.sort_by_key(|(place, _)| *place);
    Ok(all.into_iter().map(|(_, result)| result).collect())
}
