//! State shared by the save thread and its callers.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::SaveReport;
use crate::agent::Agent;
use crate::background::save_handle::SaveStatus;
use crate::plan::SavePlan;
use crate::save::snapshot::Snapshot;
use storage::ipc::Arena;

/// Resources of a save; there is one set.
#[derive(Debug, Default)]
pub(super) struct SaveResources {
    pub(super) arena: Option<Arena>,
    pub(super) agent: Option<Agent>,
}

/// A copied state that is to be written.
#[derive(Debug)]
pub(super) struct PendingSave {
    pub(super) resources: SaveResources,
    pub(super) plan: Arc<SavePlan>,
    pub(super) snapshot: Snapshot,
    pub(super) status: Arc<SaveStatus>,
}

/// The save resources while a caller owns them. Drop returns them, also on a panic: without them no
/// later save could start, and the run would wait forever.
pub(super) struct ResourceGuard<'a> {
    pub(super) shared: &'a SaverShared,
    /// `None` once they are handed to the save thread.
    pub(super) resources: Option<SaveResources>,
}

impl ResourceGuard<'_> {
    pub(super) fn resources(&mut self) -> &mut SaveResources {
        self.resources.as_mut().expect("taken only by `pass_on`, which consumes the guard")
    }

    pub(super) fn pass_on(mut self) -> SaveResources {
        self.resources.take().expect("only this method takes it, and consumes the guard")
    }
}

impl Drop for ResourceGuard<'_> {
    fn drop(&mut self) {
        if let Some(resources) = self.resources.take() {
            self.shared.lock().resources = Some(resources);
            self.shared.changed.notify_all();
        }
    }
}

#[derive(Debug)]
pub(super) struct SaverShared {
    pub(super) state: Mutex<SaverState>,
    pub(super) changed: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct SaverState {
    /// `None` while a state is copied or written.
    pub(super) resources: Option<SaveResources>,
    pub(super) job: Option<PendingSave>,
    /// The latest save.
    pub(super) latest: Option<Arc<SaveStatus>>,
    /// The latest committed save.
    pub(super) last: Option<SaveReport>,
    pub(super) hook: CommitHook,
    pub(super) end: bool,
}

/// The callback that runs after each committed save.
#[derive(Clone, Default)]
pub(super) struct CommitHook(pub(super) Option<Arc<AfterCommit>>);

pub(super) type AfterCommit = dyn Fn(&SaveReport, &serde_json::Value) + Send + Sync;

impl fmt::Debug for CommitHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Hook" } else { "no hook" })
    }
}

impl SaverShared {
    pub(super) fn lock(&self) -> MutexGuard<'_, SaverState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps while `condition` holds, at most until `until`.
    pub(super) fn wait_while(
        &self,
        until: Option<Instant>,
        condition: impl Fn(&SaverState) -> bool,
    ) -> MutexGuard<'_, SaverState> {
        let mut state = self.lock();
        while condition(&state) {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            state = match left {
                Some(left) if left.is_zero() => break,
                Some(left) => {
                    let waited = self.changed.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
        state
    }
}
