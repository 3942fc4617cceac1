//! Pins: readers that need a step for a while, and how a retention pass detects them.
//!
//! A reader creates its mark, `.pin-step-000000012000-OWNER`, and then checks for the mark of a
//! pass; a pass creates its mark and then lists those of readers. Whatever the order of their
//! operations, at least one sees the other: the pass spares the step, or the reader waits until the
//! pass is over and then checks that its step still exists.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::retain::retention::RETAIN;
use crate::retain::sweep::after_step;
use crate::steps::checkpoints::step_name;
use crate::{Checkpoints, Result, step_of};
use storage::{Key, Liveness, ProcessIdentity, Storage, write_all};

/// Prefix of the marks of readers.
pub(crate) const PIN: &str = ".pin-";

/// A pass renames a few folders and deletes them; on the slowest file systems that takes seconds.
/// One that takes longer is considered dead.
const PASS_MAX: Duration = Duration::from_secs(30);

/// Interval between checks for a pass.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Keeps retention from deleting a step; released on drop. The pin of a process that died on this
/// machine is ignored.
pub struct Pin {
    store: Arc<dyn Storage>,
    key: Key,
}

impl fmt::Debug for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pin({})", self.store.display(&self.key))
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        match self.store.delete(&self.key) {
            Ok(()) | Err(storage::Error::NotFound { .. }) => {}
            Err(error) => log::warn!("a step stays pinned until this process ends: {error}"),
        }
    }
}

impl Checkpoints {
    /// Keeps a step while the pin lives, whatever the retention policy of any process.
    ///
    /// # Errors
    /// As [`Checkpoints::open_step`], for example if it is deleted already; errors of the store,
    /// for example if it is read-only.
    pub fn pin(&self, step: u64) -> Result<Pin> {
        let key =
            self.folder.join(&format!("{PIN}{}-{}", step_name(step), ProcessIdentity::new()))?;
        // Empty, so that it fits on a full disk.
        write_all(&*self.store, &key, &[])?;
        let pin = Pin { store: Arc::clone(&self.store), key };
        self.wait_for_pass()?;
        self.open_step(step)?;
        Ok(pin)
    }

    fn wait_for_pass(&self) -> Result<()> {
        let started = Instant::now();
        loop {
            let names = self.store.list_names(&self.folder)?;
            let is_running = |owner: &str| {
                ProcessIdentity::parse(owner).is_some_and(|owner| owner.life() != Liveness::Dead)
            };
            let mut passes = names.iter().filter_map(|name| name.strip_prefix(RETAIN));
            let Some(pass) = passes.find(|owner| is_running(owner)) else { return Ok(()) };
            if started.elapsed() > PASS_MAX {
                log::warn!("{RETAIN}{pass}: still present after {PASS_MAX:?}; ignored as orphaned");
                return Ok(());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// The pinned steps, with one holder of each.
    pub(crate) fn pins(&self) -> Result<BTreeMap<u64, String>> {
        let mut pins = BTreeMap::new();
        for name in self.store.list_names(&self.folder)? {
            let Some(rest) = name.strip_prefix(PIN) else { continue };
            let Some(owner) = after_step(rest) else { continue };
            let Some(step) = step_of(&rest[..rest.len() - owner.len() - 1]) else { continue };
            let owner = ProcessIdentity::parse(owner);
            if owner.as_ref().is_some_and(|owner| owner.life() == Liveness::Dead) {
                continue;
            }
            let holder =
                owner.map_or_else(|| "an unknown process".to_owned(), |owner| owner.label());
            pins.insert(step, holder);
        }
        Ok(pins)
    }
}
