//! Marks of verified steps, stored beside them, so that no retention pass has to read them again.
//!
//! The mark of a step is `.verified-step-000012000-` and the checksum of its manifest: another step
//! of the same name has another mark.

use std::collections::{BTreeMap, BTreeSet};

use crate::retain::sweep::after_step;
use crate::steps::checkpoints::step_name;
use crate::{Checkpoint, Checkpoints, Result, VerifyReport, step_of};
use storage::{ProcessIdentity, write_all};

/// Prefix of the marks of verified steps.
pub(crate) const VERIFIED: &str = ".verified-";

impl Checkpoints {
    /// Verifies a step, and records that it passed, unless the store is read-only.
    ///
    /// # Errors
    /// As [`Checkpoints::open_step`] and [`Checkpoint::verify`].
    pub fn verify_step(&self, step: u64) -> Result<VerifyReport> {
        let open = self.open_step(step)?;
        let report = open.verify()?;
        self.note_verified(&open);
        Ok(report)
    }

    /// Records that a step has been verified. An error is not fatal.
    pub fn note_verified(&self, open: &Checkpoint) {
        let name = mark_of(open.step(), open.manifest_crc64);
        let text = format!("{} has read every byte of it\n", ProcessIdentity::new().label());
        let key = self.folder.join(&name);
        let noted = key.and_then(|key| write_all(&*self.store, &key, text.as_bytes()));
        match noted {
            Ok(_) | Err(storage::Error::Exists { .. }) => {}
            Err(error) => {
                log::warn!("{}: verified, but its mark is not written: {error}", open.display());
            }
        }
    }

    /// Whether a step is recorded as verified.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn is_verified(&self, open: &Checkpoint) -> Result<bool> {
        Ok(self.names()?.contains(&mark_of(open.step(), open.manifest_crc64)))
    }

    /// The checksums of verified manifests, by step.
    fn verified_checksums(&self) -> Result<BTreeMap<u64, BTreeSet<u64>>> {
        let mut checksums: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
        for name in self.names()? {
            if let Some((step, sum)) = parse(&name) {
                checksums.entry(step).or_default().insert(sum);
            }
        }
        Ok(checksums)
    }

    /// The newest of some complete steps that is recorded as verified.
    pub(crate) fn newest_marked(&self, steps: &[u64]) -> Result<Option<u64>> {
        let checksums = self.verified_checksums()?;
        for step in steps.iter().rev() {
            let Some(sums) = checksums.get(step) else { continue };
            if sums.contains(&self.open_step(*step)?.manifest_crc64) {
                return Ok(Some(*step));
            }
        }
        Ok(None)
    }

    /// Removes the marks of a step that was deleted or is damaged.
    pub(crate) fn delete_verified_marks(&self, step: u64) -> Result<()> {
        for sum in self.verified_checksums()?.remove(&step).unwrap_or_default() {
            self.delete_mark(&mark_of(step, sum))?;
        }
        Ok(())
    }
}

/// The name of the mark of a step whose manifest has this checksum.
pub(crate) fn mark_of(step: u64, sum: u64) -> String {
    format!("{VERIFIED}{}-{sum:016x}", step_name(step))
}

/// The step and the checksum in the name of a mark.
pub(crate) fn parse(name: &str) -> Option<(u64, u64)> {
    let rest = name.strip_prefix(VERIFIED)?;
    let digits = after_step(rest)?;
    let sum = u64::from_str_radix(digits, 16).ok()?;
    let step = step_of(&rest[..rest.len() - digits.len() - 1])?;
    (mark_of(step, sum) == name).then_some((step, sum))
}
