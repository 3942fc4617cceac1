//! The thread that reports calls and reads that do not complete. A call on a server that does not
//! answer blocks its thread, perhaps inside the kernel, so another thread reports it. That thread
//! reads tables and touches neither files nor connections.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use crate::base::per_process::PerProcess;

/// The ages at which a call or a read is reported.
pub(crate) const WARN_AFTER: [Duration; 3] =
    [Duration::from_secs(10), Duration::from_secs(30), Duration::from_secs(60)];

/// The longest pause between two scans: a warning is at most this late.
const SCAN_PAUSE_MAX: Duration = Duration::from_secs(1);

/// The shortest, for tests with short limits.
const SCAN_PAUSE_MIN: Duration = Duration::from_millis(5);

/// Warns of what is overdue in some tables. Returns the least age of a warning; `None` if there is
/// no table.
pub(crate) type Scan = fn() -> Option<Duration>;

/// The scans of the watchdog of this process. It is started with the first one.
static SCANS: PerProcess<Mutex<Vec<Scan>>> = PerProcess::new();

/// Adds a scan. To be called once in a process for each.
pub(crate) fn watch(scan: Scan) {
    let mut all = scans();
    all.push(scan);
    if all.len() > 1 {
        return;
    }
    let watch = || {
        loop {
            let all = scans().clone();
            let soonest = all.into_iter().filter_map(|scan| scan()).min();
            let pause = soonest.map_or(SCAN_PAUSE_MAX, |soonest| soonest / 8);
            thread::sleep(pause.clamp(SCAN_PAUSE_MIN, SCAN_PAUSE_MAX));
        }
    };
    let builder = thread::Builder::new().name("watchdog".to_owned()).stack_size(256 << 10);
    if let Err(e) = builder.spawn(watch) {
        all.clear();
        log::warn!("watchdog not started; stuck calls are not reported: {e}");
    }
}

fn scans() -> MutexGuard<'static, Vec<Scan>> {
    SCANS.get(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}
