//! The files that one generation is in.

use std::sync::Arc;

use super::folders::{Folder, retry_while_locked};
use super::form::StateLayout;
use crate::base::parallel_io::{self, IoBuffer};
use crate::{Error, Result};
use storage::InPlaceFile;

/// Prefix of the folder of a generation's files, on every disk that has some.
const SLOT: &str = "slot-";

/// Files that are made durable at the same time.
const SYNCS_MAX: usize = 16;

/// Five seconds in total: requests in flight have ended long before.
const TRIES_MAX: usize = 200;

/// All files of a generation, open and locked.
#[derive(Clone, Debug)]
pub(super) struct GenerationFiles {
    pub(super) number: u64,
    /// In the order of [`StateLayout::files`].
    pub(super) files: Vec<Arc<dyn InPlaceFile>>,
}

/// The name of a slot's folder.
pub(super) fn slot_name(number: u64) -> String {
    format!("{SLOT}{number}")
}

/// The number in the name of a slot's folder; `None` for any other name.
pub(super) fn slot_of(name: &str) -> Option<u64> {
    name.strip_prefix(SLOT)?.parse().ok()
}

impl GenerationFiles {
    /// Creates the files, with all their space and their headers.
    pub(super) fn create(folders: &[Folder], form: &StateLayout, number: u64) -> Result<Self> {
        let own = slot_name(number);
        let make = || {
            let mut files = Vec::with_capacity(form.files.len());
            for file in &form.files {
                let Folder { store, key } = &folders[file.disk];
                let work = store.create_in_place(&key.join(&own)?.join(&file.name)?, file.bytes)?;
                work.write_at(0, &file.header)?;
                files.push(work);
            }
            Ok(GenerationFiles { number, files })
        };
        make().inspect_err(|_| remove(folders, number))
    }

    pub(super) fn open(folders: &[Folder], form: &StateLayout, number: u64) -> Result<Self> {
        let own = slot_name(number);
        let mut files = Vec::with_capacity(form.files.len());
        for file in &form.files {
            let Folder { store, key } = &folders[file.disk];
            let key = key.join(&own)?.join(&file.name)?;
            // This process has locked the folder: if a file is locked, the kernel still completes
            // reads of a killed process.
            let work = retry_while_locked(TRIES_MAX, || store.open_in_place(&key))?;
            files.push(work);
        }
        Ok(GenerationFiles { number, files })
    }

    /// Makes all files durable.
    pub(super) fn sync(&self) -> Result<()> {
        let sync = |file: &Arc<dyn InPlaceFile>, _: &mut IoBuffer| Ok(file.sync()?);
        parallel_io::each(self.files.iter().collect(), SYNCS_MAX, sync).map(drop)
    }

    /// Rejects files that were removed: data written to them would be lost with this process.
    pub(super) fn check_there(&self) -> Result<()> {
        for file in &self.files {
            if file.names()? == 0 {
                return Err(Error::Corrupt {
                    object: file.display(),
                    offset: 0,
                    found: "one that was removed while it was in use".to_owned(),
                    expected: "a file that no other process changes".to_owned(),
                });
            }
        }
        Ok(())
    }

    /// Whether all files may be written: none is part of a checkpoint, and none was removed.
    pub(super) fn is_free(&self) -> Result<bool> {
        for file in &self.files {
            if file.names()? != 1 {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Removes the names of a slot's files on all disks. Files that are part of a checkpoint stay in
/// it.
pub(super) fn remove(folders: &[Folder], number: u64) {
    for Folder { store, key } in folders {
        let removed = key.join(&slot_name(number)).and_then(|own| store.delete_folder(&own));
        if let Err(error) = removed {
            log::warn!("unused files of the optimizer state are not removed: {error}");
        }
    }
}
