//! The async runtime: two threads that only process requests.

use std::sync::{Mutex, PoisonError};

use tokio::runtime::{Builder, Runtime};

use crate::base::per_process::PerProcess;
use crate::{Error, Result};

/// Two: a reader copies bodies on them, and a 100 Gbit/s link needs more than one core for that.
/// The caller's work never runs here, so nothing else delays a request.
const THREADS: usize = 2;

/// Host names are resolved on threads of their own, by a blocking call.
const LOOKUPS_MAX: usize = 4;

/// The runtime of this process, started at first use. A process that was forked has the memory of
/// its parent's runtime but none of its threads, and gets one of its own.
pub(crate) fn runtime() -> Result<&'static Runtime> {
    static RUNTIME: PerProcess<Mutex<Option<&'static Runtime>>> = PerProcess::new();
    let mut current = RUNTIME.get(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    match *current {
        Some(runtime) => Ok(runtime),
        None => {
            let built = Builder::new_multi_thread()
                .worker_threads(THREADS)
                .max_blocking_threads(LOOKUPS_MAX)
                .thread_name("s3")
                .enable_all()
                .build();
            let failed = |e| Error::from_io("start", "the threads of S3 requests", e);
            // Never dropped: a drop would wait for its threads, also at process exit.
            let runtime: &'static Runtime = Box::leak(Box::new(built.map_err(failed)?));
            *current = Some(runtime);
            Ok(runtime)
        }
    }
}
