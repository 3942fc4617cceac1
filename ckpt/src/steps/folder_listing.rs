//! One listing of a checkpoint folder, from which all its steps are opened.
//!
//! [`Checkpoints::open_step`] lists the whole folder, so opening every step that way takes time
//! quadratic in their number.

use std::collections::HashSet;

use crate::read::checkpoint::{Checkpoint, Listing};
use crate::read::verified_marks::{mark_of, parse};
use crate::steps::checkpoints::{step_name, step_of};
use crate::{Checkpoints, Error, Result};

/// What is in a checkpoint folder at one moment. Steps that are saved or deleted later are not
/// reflected.
#[derive(Debug)]
pub struct FolderListing {
    steps: Vec<u64>,
    /// Names of the marks of verified steps.
    verified: HashSet<String>,
    there: Listing,
}

impl FolderListing {
    /// The steps that have a folder, complete or not, oldest first.
    #[must_use]
    pub fn steps(&self) -> &[u64] {
        &self.steps
    }

    /// Whether a step is recorded as verified.
    #[must_use]
    pub fn is_verified(&self, open: &Checkpoint) -> bool {
        self.verified.contains(&mark_of(open.step(), open.manifest_crc64))
    }
}

impl Checkpoints {
    /// Lists the folder and all steps in it.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn list_folder(&self) -> Result<FolderListing> {
        // Names first: a step that is in them and not in the listing was deleted in between, and a
        // step that appears in between is in neither.
        let names = self.names()?;
        let steps = names.iter().filter_map(|name| step_of(name)).collect();
        let there = self.listing()?;
        let verified = names.into_iter().filter(|name| parse(name).is_some()).collect();
        Ok(FolderListing { steps, verified, there })
    }

    /// Opens a step as the listing shows it: reads its manifest alone.
    ///
    /// # Errors
    /// As [`Checkpoints::open_step`]. A step that was deleted after the listing looks damaged:
    /// [`Checkpoints::still_there`] distinguishes the two.
    pub fn open_listed(&self, listing: &FolderListing, step: u64) -> Result<Checkpoint> {
        self.open_named(step, &listing.there)
    }

    /// Of steps that looked damaged, those that are there and committed now. The others were
    /// deleted meanwhile, or are being deleted or written, which is no damage.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn still_there(&self, steps: &[u64]) -> Result<Vec<u64>> {
        let named: HashSet<u64> = self.named_steps()?.into_iter().collect();
        let mut there = Vec::new();
        for &step in steps.iter().filter(|step| named.contains(step)) {
            let target = self.folder.join(&step_name(step))?;
            let files = match self.listing_of(&target) {
                Ok(files) => files,
                // A file with the name of a step's folder.
                Err(_) if self.store.open(&target).is_ok() => {
                    there.push(step);
                    continue;
                }
                Err(error) => return Err(error),
            };
            match self.data_folder(step, &files) {
                Err(Error::Uncommitted { .. })
                | Err(Error::Storage(storage::Error::NotFound { .. })) => {}
                Err(error) if !error.is_damage() => return Err(error),
                Ok(_) | Err(_) => there.push(step),
            }
        }
        Ok(there)
    }

    /// The steps of the listing whose manifest agrees with their files, oldest first. A warning is
    /// logged for each other step.
    pub(crate) fn complete_in(&self, listing: &FolderListing) -> Result<Vec<u64>> {
        let mut complete = Vec::new();
        for &step in listing.steps() {
            if self.open_if_complete(step, &listing.there)?.is_some() {
                complete.push(step);
            }
        }
        Ok(complete)
    }
}
