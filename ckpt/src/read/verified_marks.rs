//! Steps that were read whole and found good, remembered beside them, so that no retention pass has
//! to read them again.
//!
//! The mark of a step is `.verified-step-000012000-` and the sum of its manifest: another step of
//! the same name has another one.

use std::collections::{BTreeMap, BTreeSet};

use crate::retain::sweep::after_step;
use crate::steps::checkpoints::step_name;
use crate::{Checkpoint, Checkpoints, Result, VerifyReport, step_of};
use storage::{ProcessIdentity, write_all};

/// Marks of steps that were verified.
pub(crate) const VERIFIED: &str = ".verified-";

impl Checkpoints {
    /// Verifies a step, and remembers that it is good, unless the store takes no mark.
    ///
    /// # Errors
    /// As [`Checkpoints::open_step`] and [`Checkpoint::verify`].
    pub fn verify_step(&self, step: u64) -> Result<VerifyReport> {
        let open = self.open_step(step)?;
        let report = open.verify()?;
        self.note_verified(&open);
        Ok(report)
    }

    /// Remembers that a step has been verified. It is a help, and nothing fails for want of it.
    pub fn note_verified(&self, open: &Checkpoint) {
        let name = mark_of(open.step(), open.manifest_crc64);
        let text = format!("{} has read every byte of it\n", ProcessIdentity::new().label());
        let key = self.folder.join(&name);
        let noted = key.and_then(|key| write_all(&*self.store, &key, text.as_bytes()));
        match noted {
            Ok(_) | Err(storage::Error::Exists { .. }) => {}
            Err(error) => log::warn!("{} is good, which is not noted: {error}", open.display()),
        }
    }

    /// Whether it is remembered that a step was verified.
    ///
    /// # Errors
    /// What the store says.
    pub fn is_verified(&self, open: &Checkpoint) -> Result<bool> {
        Ok(self.names()?.contains(&mark_of(open.step(), open.manifest_crc64)))
    }

    /// The sums of the manifests that were verified, by step.
    fn notes(&self) -> Result<BTreeMap<u64, BTreeSet<u64>>> {
        let mut notes: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
        for name in self.names()? {
            if let Some((step, sum)) = parse(&name) {
                notes.entry(step).or_default().insert(sum);
            }
        }
        Ok(notes)
    }

    /// The newest of some complete steps that is remembered as good.
    pub(crate) fn newest_noted(&self, steps: &[u64]) -> Result<Option<u64>> {
        let notes = self.notes()?;
        for step in steps.iter().rev() {
            let Some(sums) = notes.get(step) else { continue };
            if sums.contains(&self.open_step(*step)?.manifest_crc64) {
                return Ok(Some(*step));
            }
        }
        Ok(None)
    }

    /// Forgets what was remembered of a step that is gone, or is good no more.
    pub(crate) fn forget_notes(&self, step: u64) -> Result<()> {
        for sum in self.notes()?.remove(&step).unwrap_or_default() {
            self.forget(&mark_of(step, sum))?;
        }
        Ok(())
    }
}

fn mark_of(step: u64, sum: u64) -> String {
    format!("{VERIFIED}{}-{sum:016x}", step_name(step))
}

/// The step and the sum that a mark is of.
pub(crate) fn parse(name: &str) -> Option<(u64, u64)> {
    let rest = name.strip_prefix(VERIFIED)?;
    let digits = after_step(rest)?;
    let sum = u64::from_str_radix(digits, 16).ok()?;
    let step = step_of(&rest[..rest.len() - digits.len() - 1])?;
    (mark_of(step, sum) == name).then_some((step, sum))
}
