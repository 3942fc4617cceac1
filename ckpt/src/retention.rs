use crate::commit::{DAMAGED, STAGING};
use crate::{Checkpoints, Result};
use storage::{Life, Owner};

/// Hidden folders that are being deleted.
pub(crate) const TRASH: &str = ".trash-";

/// What [`Checkpoints::sweep`] found. Names are those of folders directly below the checkpoints'.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SweepReport {
    /// Left-overs that are gone now, those of the store's own work among them.
    pub removed: Vec<String>,
    /// Left-overs that stay, for they may be somebody's work: saves of processes that live, or of
    /// which this machine can tell nothing, and damaged steps that a save set aside.
    pub kept: Vec<String>,
}

impl Checkpoints {
    /// Deletes the oldest steps, so that the `keep_last` newest complete ones remain, and never the
    /// newest of all. Gives the steps that were deleted, the oldest first. Damaged steps are not
    /// counted and not touched.
    ///
    /// # Errors
    /// [`Error::Held`](crate::Error::Held), or what the store says; each step is then whole or
    /// hidden.
    pub fn retain(&self, keep_last: usize) -> Result<Vec<u64>> {
        let _alone = self.begin_change()?;
        let mut steps = self.steps()?;
        steps.truncate(steps.len().saturating_sub(keep_last.max(1)));
        for &step in &steps {
            self.withdraw(step)?;
        }
        Ok(steps)
    }

    /// Removes what crashes have left behind: half-deleted steps, and half-written ones whose
    /// process is dead on this machine.
    ///
    /// # Errors
    /// [`Error::Held`](crate::Error::Held), or what the store says.
    pub fn sweep(&self) -> Result<SweepReport> {
        let _alone = self.begin_change()?;
        let removed = self.store.sweep(&self.folder)?;
        let mut report = SweepReport { removed, kept: Vec::new() };
        for name in self.store.names(&self.folder)? {
            let is_dead = if name.starts_with(TRASH) {
                true
            } else if let Some(rest) = name.strip_prefix(STAGING) {
                is_left_behind(rest)
            } else if name.starts_with(DAMAGED) {
                false
            } else {
                continue;
            };
            if is_dead {
                self.store.delete_folder(&self.folder.join(&name)?)?;
                report.removed.push(name);
            } else {
                report.kept.push(name);
            }
        }
        self.sweep_data(&mut report)?;
        report.removed.extend(self.clear_meetings("")?);
        Ok(report)
    }
}

/// Whether nobody can be at work on `step-000012000-owner`.
fn is_left_behind(name: &str) -> bool {
    let owner = name.get(STEP_BYTES..).and_then(|rest| Owner::parse(rest.strip_prefix('-')?));
    // Ours are of saves that failed and could not clean up: we hold the lease and save nothing now.
    owner.is_some_and(|owner| matches!(owner.life(), Life::Dead | Life::Ours))
}

/// Bytes of `step-000012000`.
const STEP_BYTES: usize = 17;
