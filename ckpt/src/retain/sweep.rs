use crate::liveness::heartbeat::delete_if_exists;
use crate::read::verified_marks;
use crate::retain::pin::PIN;
use crate::retain::retention::{RETAIN, TRASH};
use crate::save::commit_target::{DAMAGED, STAGING};
use crate::steps::checkpoints::step_name;
use crate::{Checkpoints, Result};
use storage::{Liveness, ProcessIdentity};

/// What [`Checkpoints::sweep`] found. Names are those of entries directly in the checkpoint folder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SweepReport {
    /// Orphans that were removed, including those of the store itself.
    pub removed: Vec<String>,
    /// Retained leftovers that may still be used: saves of live processes of this machine, and
    /// damaged steps that a save set aside.
    pub kept: Vec<String>,
}

/// How a name in the folder is classified.
enum LeftoverKind {
    /// An orphaned folder.
    Folder,
    /// An orphaned object.
    Object,
    /// May still be in use.
    Kept,
    /// Not a leftover, or not known to this crate.
    Other,
}

impl Checkpoints {
    /// Removes orphans of crashes: partly deleted steps, partly written ones unless their process
    /// lives on this machine, and marks of readers that are dead on it.
    ///
    /// # Errors
    /// [`Error::Held`](crate::Error::Held), or errors of the store.
    pub fn sweep(&self) -> Result<SweepReport> {
        self.change(|| {
            let removed = self.store.remove_orphans(&self.folder)?;
            let mut report = SweepReport { removed, kept: Vec::new() };
            let names = self.names()?;
            for name in names.clone() {
                match self.classify(&name, &names) {
                    LeftoverKind::Folder => {
                        self.check_lease()?;
                        self.store.delete_folder(&self.folder.join(&name)?)?;
                    }
                    LeftoverKind::Object => self.delete_mark(&name)?,
                    LeftoverKind::Kept => {
                        report.kept.push(name);
                        continue;
                    }
                    LeftoverKind::Other => continue,
                }
                report.removed.push(name);
            }
            self.sweep_data(&mut report)?;
            report.removed.extend(self.clear_rendezvous("")?);
            Ok(report)
        })
    }

    /// The lease is held: unfinished work of other processes that would need it is never resumed.
    fn classify(&self, name: &str, all: &[String]) -> LeftoverKind {
        if name.starts_with(TRASH) {
            return LeftoverKind::Folder;
        }
        if let Some(rest) = name.strip_prefix(STAGING) {
            return if self.is_abandoned(after_step(rest)) {
                LeftoverKind::Folder
            } else {
                LeftoverKind::Kept
            };
        }
        if name.starts_with(DAMAGED) {
            return LeftoverKind::Kept;
        }
        let is_orphan = if let Some((step, _)) = verified_marks::parse(name) {
            !all.contains(&step_name(step))
        } else if let Some(owner) = name.strip_prefix(RETAIN) {
            self.is_abandoned(Some(owner))
        } else if let Some(rest) = name.strip_prefix(PIN) {
            // Readers hold no lease.
            life_of(after_step(rest)) == Some(Liveness::Dead)
        } else {
            false
        };
        if is_orphan { LeftoverKind::Object } else { LeftoverKind::Other }
    }

    /// Deletes a mark that another process may delete at the same time.
    pub(crate) fn delete_mark(&self, name: &str) -> Result<()> {
        delete_if_exists(&*self.store, &self.folder.join(name)?)
    }
}

/// The owner in `step-000012000-owner`.
pub(crate) fn after_step(name: &str) -> Option<&str> {
    name.get(STEP_BYTES..)?.strip_prefix('-')
}

fn life_of(owner: Option<&str>) -> Option<Liveness> {
    Some(ProcessIdentity::parse(owner?)?.life())
}

/// Bytes of `step-000012000`.
const STEP_BYTES: usize = 17;
