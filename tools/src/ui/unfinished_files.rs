//! Unfinished files of runs in a folder and its subfolders, which listings do not show: temporary
//! files, drafts and outputs without a manifest.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::path::Path;

use storage::Liveness;
use storage::probe::UnfinishedUpload;

use crate::ui::output_claim::{ClaimRecord, parse_marker};

/// Maximum number of names that are checked, breadth first. At 0.2 ms a name, as on a busy network
/// file system, that is 4 s: below the 20 s after which `doctor` reports a hang.
const NAMES_MAX: usize = 20_000;

/// Files of one kind.
#[derive(Debug, Default)]
pub(crate) struct FileTotal {
    pub(crate) files: u64,
    pub(crate) bytes: u64,
    /// The path of one of them.
    pub(crate) example: String,
}

/// Unfinished files by kind.
#[derive(Debug, Default)]
pub(crate) struct UnfinishedFiles {
    /// Temporary files of dead processes.
    pub(crate) orphans: FileTotal,
    /// Those of live processes of this machine.
    pub(crate) live: FileTotal,
    /// Those of processes that cannot be checked: on other machines and in other containers.
    pub(crate) unknown: FileTotal,
    /// Resumable uploads.
    pub(crate) drafts: FileTotal,
    /// Complete files of runs that were killed before they wrote the manifest.
    pub(crate) debris: FileTotal,
    /// Whether there are more names than were checked.
    pub(crate) is_partial: bool,
}

impl UnfinishedFiles {
    /// Searches a folder and its subfolders. Links are not followed.
    ///
    /// # Errors
    /// If the folder cannot be listed. A subfolder that cannot be listed is skipped.
    pub(crate) fn find(folder: &Path) -> io::Result<Self> {
        drop(fs::read_dir(folder)?);
        let mut found = UnfinishedFiles::default();
        let mut names = 0;
        // All files in a temporary folder are of the kind of that folder.
        let mut folders = VecDeque::from([(folder.to_owned(), None)]);
        while let Some((path, inherited)) = folders.pop_front() {
            let Ok(entries) = fs::read_dir(path) else { continue };
            for entry in entries.flatten() {
                if names == NAMES_MAX {
                    found.is_partial = true;
                    return Ok(found);
                }
                names += 1;
                let (Ok(kind), Ok(name)) = (entry.file_type(), entry.file_name().into_string())
                else {
                    continue;
                };
                let upload = UnfinishedUpload::of_name(&name).or_else(|| inherited.clone());
                if kind.is_dir() {
                    folders.push_back((entry.path(), upload));
                } else if let Some(upload) = upload {
                    found.total_of(&upload).add(&entry.path());
                } else if let Some((prefix, _)) = parse_marker(&name) {
                    found.add_outputs(&entry.path(), prefix);
                }
            }
        }
        Ok(found)
    }

    /// Bytes of all of them.
    pub(crate) fn bytes(&self) -> u64 {
        self.all().map(|total| total.bytes).iter().sum()
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.all().iter().all(|total| total.files == 0)
    }

    fn all(&self) -> [&FileTotal; 5] {
        [&self.orphans, &self.live, &self.unknown, &self.drafts, &self.debris]
    }

    fn total_of(&mut self, upload: &UnfinishedUpload) -> &mut FileTotal {
        match upload {
            UnfinishedUpload::Draft => &mut self.drafts,
            UnfinishedUpload::Temporary(owner) => match owner.life() {
                Liveness::Dead => &mut self.orphans,
                Liveness::Ours | Liveness::Alive => &mut self.live,
                Liveness::Unknown => &mut self.unknown,
            },
        }
    }

    /// Adds the outputs that a marker names, unless they are complete or being written.
    fn add_outputs(&mut self, marker: &Path, prefix: &str) {
        let record = fs::read(marker).ok().and_then(|bytes| ClaimRecord::parse(&bytes).ok());
        let (Some(record), Some(folder)) = (record, marker.parent()) else { return };
        let is_complete = record.manifests().iter().all(|name| folder.join(name).exists());
        if record.owner_life() == Liveness::Dead && !is_complete {
            self.debris.add(marker);
            for suffix in record.suffixes() {
                self.debris.add(&folder.join(format!("{prefix}{suffix}")));
            }
        }
    }
}

impl FileTotal {
    /// Adds a file, unless it no longer exists.
    fn add(&mut self, path: &Path) {
        let Ok(facts) = path.symlink_metadata() else { return };
        self.files += 1;
        self.bytes += facts.len();
        if self.example.is_empty() {
            self.example = path.display().to_string();
        }
    }
}
