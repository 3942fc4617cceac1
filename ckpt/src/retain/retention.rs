//! Retention: which steps may be deleted, and how.
//!
//! The decision is a pure function of the complete steps, the policy, and the users of each step;
//! [`Checkpoints::plan_retention`] shows it, [`Checkpoints::retain_by`] applies it. A step is
//! renamed before it is deleted, so that a crash never shows half of one.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::num::NonZeroU64;

use crate::{Checkpoint, Checkpoints, Result};
use storage::{ProcessIdentity, write_all};

/// Prefix of hidden folders that are being deleted.
pub(crate) const TRASH: &str = ".trash-";

/// Prefix of the mark of a pass: see [`crate::retain::pin`].
pub(crate) const RETAIN: &str = ".retain-";

/// Policy: which steps are retained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// How many of the newest steps, by number and not by time. Default: 3. Minimum: 1; 0 counts as
    /// 1.
    pub keep_last: usize,
    /// Every multiple of this is retained forever. Default: none.
    pub keep_every: Option<NonZeroU64>,
    /// Whether bytes are verified before a step is deleted. Default: [`Check::NewestBytes`].
    pub check: Check,
}

/// When a step counts as verified.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Check {
    /// Its manifest is intact, and all its files have the listed lengths. That reads almost
    /// nothing, but trusts the disk: after a power loss, a disk that falsely acknowledged a sync
    /// may have the lengths without the bytes. The newest step recorded as verified is retained
    /// too.
    Lengths,
    /// One of the newest retained steps has passed all its checksums. If none of them is recorded
    /// as verified, the newest step is read, then older ones until one passes; those that fail are
    /// treated as damaged. So of the passes that delete a step, one in [`Retention::keep_last`]
    /// reads.
    #[default]
    NewestBytes,
    /// The same, but earlier verifications are ignored: each pass that deletes a step reads.
    NewestBytesAlways,
}

impl Default for Retention {
    fn default() -> Self {
        Retention { keep_last: 3, keep_every: None, check: Check::default() }
    }
}

/// Why a step is retained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Keep {
    /// It is one of the newest.
    Last,
    /// It is a multiple of [`Retention::keep_every`].
    Every(NonZeroU64),
    /// It is the newest step that passed all checksums.
    Verified,
    /// No step at all passes its checksums, so none is known to be dispensable.
    NoneVerified,
    /// A reader has pinned it.
    Pinned {
        /// The reader.
        holder: String,
    },
    /// It has not been copied to the second store yet.
    Undrained,
}

impl fmt::Display for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Keep::Last => f.write_str("one of the newest"),
            Keep::Every(every) => write!(f, "a multiple of {every}"),
            Keep::Verified => f.write_str("the newest that is verified"),
            Keep::NoneVerified => f.write_str("no step passes its checksums"),
            Keep::Pinned { holder } => write!(f, "read by {holder}"),
            Keep::Undrained => f.write_str("not yet in the second store"),
        }
    }
}

/// The decision of a policy about the existing steps. Damaged ones are in neither list: they are
/// not counted and not touched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RetentionPlan {
    /// Retained steps, oldest first, with the first reason that applies.
    pub keep: Vec<(u64, Keep)>,
    /// Steps to delete, oldest first.
    pub delete: Vec<u64>,
}

/// A plan, and the steps that were verified for it.
struct Planned {
    plan: RetentionPlan,
    /// The step that was read and passed.
    read: Option<Checkpoint>,
    /// Steps that were read and failed.
    bad: BTreeSet<u64>,
}

/// The inputs of a plan. Steps are in ascending order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RetentionInputs<'a> {
    pub(crate) steps: &'a [u64],
    pub(crate) verified: Option<u64>,
    pub(crate) pinned: &'a BTreeMap<u64, String>,
    pub(crate) undrained: &'a [u64],
}

impl RetentionPlan {
    /// Pure: equal inputs yield equal plans. The newest step is never deleted.
    pub(crate) fn new(policy: &Retention, facts: RetentionInputs<'_>) -> Self {
        let RetentionInputs { steps, verified, pinned, undrained } = facts;
        let last = steps.len().saturating_sub(policy.keep_last.max(1));
        let mut plan = RetentionPlan::default();
        for (place, &step) in steps.iter().enumerate() {
            let every = policy.keep_every.filter(|every| step % *every == 0);
            let why = if place >= last {
                Keep::Last
            } else if let Some(every) = every {
                Keep::Every(every)
            } else if verified == Some(step) {
                Keep::Verified
            } else if let Some(holder) = pinned.get(&step) {
                Keep::Pinned { holder: holder.clone() }
            } else if undrained.contains(&step) {
                Keep::Undrained
            } else {
                plan.delete.push(step);
                continue;
            };
            plan.keep.push((step, why));
        }
        plan
    }
}

impl Checkpoints {
    /// Deletes the oldest steps, so that the `keep_last` newest complete ones remain, and never the
    /// newest of all. Returns the deleted steps, oldest first. Damaged and pinned steps are not
    /// touched, and damaged ones not counted. A step counts as complete by [`Check::Lengths`], so
    /// that nothing is read while a run waits; the newest step recorded as verified is retained
    /// too. [`Checkpoints::retain_by`] can verify bytes.
    ///
    /// # Errors
    /// As [`Checkpoints::retain_by`].
    pub fn retain(&self, keep_last: usize) -> Result<Vec<u64>> {
        let policy = Retention { keep_last, keep_every: None, check: Check::Lengths };
        Ok(self.retain_by(&policy, &[])?.delete)
    }

    /// What [`Checkpoints::retain_by`] would do now. Nothing is changed.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn plan_retention(&self, policy: &Retention, undrained: &[u64]) -> Result<RetentionPlan> {
        Ok(self.list_and_plan(policy, undrained)?.plan)
    }

    fn list_and_plan(&self, policy: &Retention, undrained: &[u64]) -> Result<Planned> {
        let mut steps = self.steps()?;
        let pinned = self.pins()?;
        let plan = |steps: &[u64], verified| {
            RetentionPlan::new(
                policy,
                RetentionInputs { steps, verified, pinned: &pinned, undrained },
            )
        };
        let marked = self.newest_marked(&steps)?;
        let first = plan(&steps, marked);
        let is_enough = match policy.check {
            Check::Lengths => true,
            Check::NewestBytes => {
                first.keep.iter().any(|(step, why)| Some(*step) == marked && *why == Keep::Last)
            }
            Check::NewestBytesAlways => false,
        };
        if first.delete.is_empty() || is_enough {
            return Ok(Planned { plan: first, read: None, bad: BTreeSet::new() });
        }
        let (read, bad) = self.newest_verified(&steps)?;
        if read.is_none() {
            let keep = steps.into_iter().map(|step| (step, Keep::NoneVerified)).collect();
            let plan = RetentionPlan { keep, delete: Vec::new() };
            return Ok(Planned { plan, read, bad });
        }
        steps.retain(|step| !bad.contains(step));
        let plan = plan(&steps, read.as_ref().map(Checkpoint::step));
        Ok(Planned { plan, read, bad })
    }

    /// Deletes the steps that the policy does not retain, and returns the plan with the reasons.
    /// Pinned steps are never deleted, nor those in `undrained`, from
    /// [`Drain::pending`](crate::Drain::pending). Each step disappears atomically.
    ///
    /// # Errors
    /// [`Error::Held`](crate::Error::Held), or errors of the store; each step is then complete or
    /// hidden.
    pub fn retain_by(&self, policy: &Retention, undrained: &[u64]) -> Result<RetentionPlan> {
        self.change(|| {
            let Planned { plan, read, bad } = self.list_and_plan(policy, undrained)?;
            if let Some(read) = read {
                self.note_verified(&read);
            }
            for step in bad {
                self.delete_verified_marks(step)?;
            }
            if plan.delete.is_empty() {
                return Ok(plan);
            }
            let mark = self.begin_pass()?;
            let deleted = self.delete_unless_pinned(plan);
            if let Some(mark) = mark {
                self.delete_mark(&mark).unwrap_or_else(|error| {
                    log::warn!("the mark of a retention pass is not deleted yet: {error}");
                });
            }
            deleted
        })
    }

    /// Creates the mark that shows readers that steps are being deleted. On a full disk that may
    /// fail; the pass still runs, since it frees space, and spares all readers that it can see.
    fn begin_pass(&self) -> Result<Option<String>> {
        let name = format!("{RETAIN}{}", ProcessIdentity::new());
        match write_all(&*self.store, &self.folder.join(&name)?, &[]) {
            Ok(_) => Ok(Some(name)),
            Err(error @ storage::Error::NoSpace { .. }) => {
                log::warn!("retention pass runs without its mark: {error}");
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn delete_unless_pinned(&self, mut plan: RetentionPlan) -> Result<RetentionPlan> {
        for step in std::mem::take(&mut plan.delete) {
            // Checked again for each step: a reader may have pinned it before the mark existed, or
            // may consider a pass of this duration dead.
            match self.pins()?.remove(&step) {
                Some(holder) => plan.keep.push((step, Keep::Pinned { holder })),
                None => {
                    // During a slow pass, another process may have taken over the lease.
                    self.check_lease()?;
                    self.withdraw(step)?;
                    plan.delete.push(step);
                }
            }
        }
        plan.keep.sort_by_key(|(step, _)| *step);
        Ok(plan)
    }

    /// The newest step that passes all its checksums, and the newer ones that fail.
    fn newest_verified(&self, steps: &[u64]) -> Result<(Option<Checkpoint>, BTreeSet<u64>)> {
        let mut bad = BTreeSet::new();
        for &step in steps.iter().rev() {
            match self.open_step(step).and_then(|open| open.verify().map(|_| open)) {
                Ok(open) => return Ok((Some(open), bad)),
                Err(error) if error.is_damage() => {
                    log::warn!("step {step} is damaged; not counted: {error}");
                    bad.insert(step);
                }
                Err(error) => return Err(error),
            }
        }
        Ok((None, bad))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `expected` has one letter per step: the reason why it is retained, or `-`.
    fn check(keep_last: usize, every: u64, facts: &[(u64, char)], expected: &str) {
        let of_kind = |kind| facts.iter().filter(move |fact| fact.1 == kind).map(|fact| fact.0);
        let steps: Vec<u64> = facts.iter().map(|fact| fact.0).collect();
        let pinned = of_kind('p').map(|step| (step, "a reader".to_owned())).collect();
        let undrained: Vec<u64> = of_kind('u').collect();
        let verified = of_kind('v').next();
        let keep_every = NonZeroU64::new(every);
        let policy = Retention { keep_last, keep_every, check: Check::Lengths };
        let facts =
            RetentionInputs { steps: &steps, verified, pinned: &pinned, undrained: &undrained };
        let plan = RetentionPlan::new(&policy, facts);
        let letter = |step: &u64| match plan.keep.iter().find(|(kept, _)| kept == step) {
            Some((_, Keep::Last)) => 'l',
            Some((_, Keep::Every(_))) => 'e',
            Some((_, Keep::Verified)) => 'v',
            Some((_, Keep::Pinned { .. })) => 'p',
            Some((_, Keep::Undrained)) => 'u',
            Some((_, Keep::NoneVerified)) => panic!("a plan never sets this reason"),
            None => '-',
        };
        assert_eq!(steps.iter().map(letter).collect::<String>(), expected, "{facts:?}");
        assert_eq!(plan.keep.len() + plan.delete.len(), steps.len(), "each step once");
        assert!(plan.delete.iter().all(|step| letter(step) == '-'));
    }

    #[test]
    fn each_reason_retains_a_step() {
        let plain = |steps: &[u64]| steps.iter().map(|&step| (step, ' ')).collect::<Vec<_>>();
        check(3, 0, &[], "");
        check(0, 0, &plain(&[7]), "l");
        check(2, 0, &plain(&[1, 2, 3, 4]), "--ll");
        check(9, 0, &plain(&[1, 2, 3, 4]), "llll");
        check(1, 10, &plain(&[5, 10, 15, 20, 25]), "-e-el");
        // Zero is a multiple of everything: the state before the first step.
        check(1, 10, &plain(&[0, 1, 2]), "e-l");
        check(1, 0, &[(1, 'p'), (2, ' '), (3, 'u'), (4, 'v'), (5, ' ')], "p-uvl");
        check(1, 3, &[(3, 'p'), (4, 'u'), (5, 'p')], "eul");
    }
}
