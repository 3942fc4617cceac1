//! Where the files of a step are written, and how the step is committed.
//!
//! Where a folder can be renamed without replacing an existing one, a step is written into a hidden
//! folder and renamed. Elsewhere, on object stores, FUSE and NFS, it is written at its final place,
//! `step-000012000/data-OWNER`, and committed by `step-000012000/COMMIT`, which names that folder:
//! one small object, which every store creates exclusively.

use serde::{Deserialize, Serialize};

use crate::liveness::heartbeat::delete_if_exists;
use crate::read::checkpoint::{Listing, MANIFEST};
use crate::retain::retention::TRASH;
use crate::retain::sweep::after_step;
use crate::save::check_space;
use crate::steps::checkpoints::{step_name, step_of};
use crate::{Checkpoints, Error, Result, SweepReport};
use storage::{FileEntry, Key, Liveness, Manifest, ProcessIdentity};

/// Prefix of hidden folders that are being written.
pub(crate) const STAGING: &str = ".tmp-";

/// Prefix of hidden folders of steps that were found damaged when they were saved again.
pub(crate) const DAMAGED: &str = ".damaged-";

/// Prefix of data folders in a step that is committed by a record.
const DATA: &str = "data-";

/// Prefix of marker objects beside them: that data folder belongs to a damaged step, and is
/// retained for inspection.
const DAMAGED_DATA: &str = "damaged-";

/// The commit record, which names the data folder of the step.
const COMMIT: &str = "COMMIT";

/// `format` of the record.
const COMMIT_FORMAT: &str = "feedline-ckpt-commit";

/// `meta` of the record.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Committed {
    step: u64,
}

/// How a step is committed: by a rename or by a commit record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CommitMode {
    Renamed,
    Marked,
}

/// Where a step is written.
#[derive(Debug)]
pub(crate) struct CommitTarget {
    step: u64,
    /// The step's folder.
    pub(crate) target: Key,
    /// Where its files are written.
    pub(crate) data: Key,
    /// The object whose existence means that the step is committed.
    pub(crate) record: Key,
    mode: CommitMode,
    /// Whether a damaged step has the target's name.
    pub(crate) has_damaged: bool,
}

impl CommitTarget {
    /// Where the files are after the commit.
    pub(crate) fn files(&self) -> &Key {
        match self.mode {
            CommitMode::Renamed => &self.target,
            CommitMode::Marked => &self.data,
        }
    }
}

impl Checkpoints {
    /// Fails if a step exists already, or if the store has no room for tensors of this many bytes
    /// and chunks. Call it before preparing them; the save itself checks both again. As a save
    /// does, it first deletes the unfinished steps of dead processes, whose space is needed.
    ///
    /// # Errors
    /// [`Error::StepExists`]; [`storage::Error::NoSpace`] within [`Error::Storage`];
    /// [`Error::Held`] if another process writes into the folder; errors of the store.
    pub fn check_room(&self, step: u64, bytes: u64, chunks: u64) -> Result<()> {
        self.check_options(step)?;
        self.change(|| {
            let place = self.find_place(step)?;
            check_space(&*self.store, &place.target, bytes, chunks)
        })
    }

    /// Where to write the step. A damaged step of that name must be set aside.
    pub(crate) fn find_place(&self, step: u64) -> Result<CommitTarget> {
        self.find_place_for(step, STAGING, &ProcessIdentity::new().to_string())
    }

    /// The same, with a folder named by a hidden prefix and a mark of the writer or the contents.
    pub(crate) fn find_place_for(
        &self,
        step: u64,
        hidden: &str,
        mark: &str,
    ) -> Result<CommitTarget> {
        let name = step_name(step);
        let target = self.folder.join(&name)?;
        let is_taken = self.store.list_names(&self.folder)?.contains(&name);
        let there = if is_taken { self.listing()? } else { Listing::new() };
        if is_taken && self.open_if_complete(step, &there)?.is_some() {
            return Err(Error::StepExists { object: self.store.display(&target) });
        }
        let (mode, data, record, has_damaged) = if self.store.has_atomic_publish(&self.folder)? {
            let data = self.folder.join(&format!("{hidden}{name}-{mark}"))?;
            (CommitMode::Renamed, data, target.join(MANIFEST)?, is_taken)
        } else {
            let data = target.join(&format!("{DATA}{mark}"))?;
            let record = target.join(COMMIT)?;
            let has_damaged = there.contains_key(&record) || has_manifest(&target, &there)?;
            (CommitMode::Marked, data, record, has_damaged)
        };
        Ok(CommitTarget { step, target, data, record, mode, has_damaged })
    }

    /// Moves a damaged step of the same name out of the way.
    pub(crate) fn set_aside(&self, place: &CommitTarget) -> Result<()> {
        if !place.has_damaged {
            return Ok(());
        }
        let what = self.store.display(&place.target);
        if place.mode == CommitMode::Renamed {
            let name = format!("{DAMAGED}{}-{}", place.target.name(), ProcessIdentity::new());
            let aside = self.folder.join(&name)?;
            log::warn!("{what}: damaged; moved to {}", self.store.display(&aside));
            return self.move_away(&place.target, &aside);
        }
        log::warn!("{what}: damaged; its files are retained but no longer used");
        // Listed before the check, so that the list has nothing of a successor.
        let names = self.store.list_names(&place.target)?;
        self.check_lease()?;
        for owner in names.iter().filter_map(|name| name.strip_prefix(DATA)) {
            let mark = place.target.join(&format!("{DAMAGED_DATA}{owner}"))?;
            match storage::write_all(&*self.store, &mark, b"") {
                Ok(_) | Err(storage::Error::Exists { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.withdraw_records(&place.target)
    }

    /// Commits the step. All its files are durable.
    pub(crate) fn publish(&self, place: &CommitTarget, manifest: &FileEntry) -> Result<()> {
        if place.mode == CommitMode::Renamed {
            let published = self.store.publish(&place.data, &place.target);
            return Ok(published.inspect_err(|_| self.abandon(&place.data))?);
        }
        // If this fails although the record is created, its files must exist too, so
        // they are kept until the next sweep.
        let path = format!("{}/{MANIFEST}", place.data.name());
        let files = vec![FileEntry { path, ..manifest.clone() }];
        let meta = serde_json::json!(Committed { step: place.step });
        let record = Manifest { format: COMMIT_FORMAT.to_owned(), version: 1, files, meta };
        record.write(&*self.store, &place.record)?;
        // If a successor has removed the files, this is not a step.
        if let Err(lost @ Error::LeaseLost { .. }) = self.check_lease()
            && !self.is_there(&place.data.join(MANIFEST)?)?
        {
            self.delete_record_of(&place.target, &place.data)?;
            return Err(lost);
        }
        Ok(())
    }

    /// Removes the files of a failed save.
    pub(crate) fn abandon(&self, data: &Key) {
        if let Err(error) = self.store.delete_folder(data) {
            log::warn!("folder of a failed save is not removed; the next sweep retries: {error}");
        }
    }

    /// Deletes a step: first makes it invisible, then deletes its files. The lease is held.
    pub(crate) fn withdraw(&self, step: u64) -> Result<()> {
        let name = step_name(step);
        let target = self.folder.join(&name)?;
        if self.store.has_atomic_publish(&self.folder)? {
            self.check_lease()?;
            self.delete_verified_marks(step)?;
            // Hidden by one rename, so that a crash never shows half a checkpoint.
            let trash = self.folder.join(&format!("{TRASH}{name}-{}", ProcessIdentity::new()))?;
            self.move_away(&target, &trash)?;
            return Ok(self.store.delete_folder(&trash)?);
        }
        // Listed before the check, so that the list has nothing of a successor.
        let names = self.store.list_names(&target)?;
        let objects = self.listing_of(&target)?;
        self.check_lease()?;
        self.delete_verified_marks(step)?;
        self.withdraw_records(&target)?;
        for name in names.iter().filter(|name| *name != COMMIT && *name != MANIFEST) {
            let key = target.join(name)?;
            if objects.contains_key(&key) {
                delete_if_exists(&*self.store, &key)?;
            } else {
                self.store.delete_folder(&key)?;
            }
        }
        Ok(self.store.delete_empty_folder(&target)?)
    }

    /// Deletes the records of a step, and puts back the one that it has now if it turns out that
    /// the lease was lost before, and its files are still there.
    fn withdraw_records(&self, target: &Key) -> Result<()> {
        let record = target.join(COMMIT)?;
        let committed = match storage::read_all(&*self.store, &record) {
            Ok(text) => Some(text),
            Err(storage::Error::NotFound { .. }) => None,
            Err(error) => return Err(error.into()),
        };
        self.check_lease()?;
        self.delete_records(target)?;
        let Err(lost) = self.check_lease() else { return Ok(()) };
        let Some(text) = committed else { return Err(lost) };
        let put_back = || -> Result<()> {
            for data in self.store.list_names(target)? {
                let manifest = format!("{data}/{MANIFEST}");
                let is_named = String::from_utf8_lossy(&text).contains(&format!("\"{manifest}\""));
                if is_named && self.is_there(&target.join(&manifest)?)? {
                    storage::write_all(&*self.store, &record, &text)?;
                }
            }
            Ok(())
        };
        match put_back() {
            Ok(()) | Err(Error::Storage(storage::Error::Exists { .. })) => {}
            Err(error) => {
                log::error!("cannot restore {}: {error}", self.store.display(&record));
            }
        }
        Err(lost)
    }

    /// Deletes the record of a step if it names this folder, whose files are deleted.
    fn delete_record_of(&self, target: &Key, data: &Key) -> Result<()> {
        let record = target.join(COMMIT)?;
        let named = format!("\"{}/{MANIFEST}\"", data.name());
        match storage::read_all(&*self.store, &record) {
            Ok(text) if String::from_utf8_lossy(&text).contains(&named) => {
                delete_if_exists(&*self.store, &record)
            }
            Ok(_) | Err(storage::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn is_there(&self, key: &Key) -> Result<bool> {
        match self.store.open(key) {
            Ok(_) => Ok(true),
            Err(storage::Error::NotFound { .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Renames a folder away, and back if it turns out that the lease was lost before: the folder
    /// may then be the successor's.
    fn move_away(&self, from: &Key, to: &Key) -> Result<()> {
        self.store.publish(from, to)?;
        self.check_lease().inspect_err(|_| {
            if let Err(error) = self.store.publish(to, from) {
                let [from, to] = [from, to].map(|key| self.store.display(key));
                log::error!("cannot move {to} back to {from}: {error}");
            }
        })
    }

    /// Removes what earlier holders of the lease have not committed, so that they cannot commit it
    /// if they wake: a process may be frozen between its last check of the lease and its
    /// commit. The lease is held.
    pub(crate) fn evict_predecessors(&self) -> Result<()> {
        if !self.lease.has_predecessor() {
            return Ok(());
        }
        let is_theirs = |mark: Option<&str>| {
            let owner = mark.and_then(ProcessIdentity::parse);
            owner.is_some_and(|owner| !self.lease.admits(&owner))
        };
        if self.store.has_atomic_publish(&self.folder)? {
            for name in self.names()? {
                if !is_theirs(name.strip_prefix(STAGING).and_then(after_step)) {
                    continue;
                }
                match self.store.delete_folder(&self.folder.join(&name)?) {
                    // Committed or removed since the listing.
                    Ok(()) | Err(storage::Error::NotFound { .. }) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        } else {
            let there = self.listing()?;
            for step in self.named_steps()? {
                let committed = match self.data_folder(step, &there) {
                    Ok(data) => Some(data),
                    Err(Error::Uncommitted { .. }) => None,
                    Err(error) if error.is_damage() => continue, // retained for inspection
                    Err(error) => return Err(error),
                };
                let target = self.folder.join(&step_name(step))?;
                for name in self.store.list_names(&target)? {
                    let data = target.join(&name)?;
                    if is_theirs(name.strip_prefix(DATA)) && committed.as_ref() != Some(&data) {
                        self.store.delete_folder(&data)?;
                        // It may have been committed after the listing.
                        self.delete_record_of(&target, &data)?;
                    }
                }
            }
        }
        self.lease.clear_predecessor();
        Ok(())
    }

    fn delete_records(&self, target: &Key) -> Result<()> {
        delete_if_exists(&*self.store, &target.join(COMMIT)?)?;
        delete_if_exists(&*self.store, &target.join(MANIFEST)?)
    }

    /// The folder of a step's files.
    pub(crate) fn data_folder(&self, step: u64, there: &Listing) -> Result<Key> {
        let target = self.folder.join(&step_name(step))?;
        let record = target.join(COMMIT)?;
        if has_manifest(&target, there)? {
            return Ok(target);
        }
        if !there.contains_key(&record) {
            let object = self.store.display(&target);
            // Keys are sorted, so the data folders' objects follow this key.
            let data = target.join(DATA)?;
            let next = there.range(&data..).next();
            let has_data = next.is_some_and(|(key, _)| key.as_str().starts_with(data.as_str()));
            return if has_data { Err(Error::Uncommitted { object }) } else { Ok(target) };
        }
        self.read_record(step, &target, &record, there)
    }

    fn read_record(&self, step: u64, target: &Key, record: &Key, there: &Listing) -> Result<Key> {
        let object = self.store.display(record);
        let bad = |place: &str, found: String, expected: String| {
            Err(Error::BadManifest {
                object: object.clone(),
                place: place.to_owned(),
                found,
                expected,
            })
        };
        let Manifest { format, version, files, meta } = Manifest::read(&*self.store, record)?;
        if (format.as_str(), version) != (COMMIT_FORMAT, 1) {
            let expected = format!("{COMMIT_FORMAT} 1");
            return bad("format and version", format!("{format} {version}"), expected);
        }
        let expected = Committed { step };
        match serde_json::from_value::<Committed>(meta) {
            Ok(meta) if meta.step == step => {}
            Ok(meta) => return bad("meta", format!("{meta:?}"), format!("{expected:?}")),
            Err(error) => return bad("meta", error.to_string(), format!("{expected:?}")),
        }
        let [manifest] = files.as_slice() else {
            return bad("files", format!("{} files", files.len()), "one manifest".to_owned());
        };
        let folder = manifest.path.strip_suffix(&format!("/{MANIFEST}"));
        let Some(folder) = folder.filter(|f| f.starts_with(DATA) && !f.contains('/')) else {
            let expected = format!("{DATA}OWNER/{MANIFEST}");
            return bad("files", format!("'{}'", manifest.path), expected);
        };
        let data = target.join(folder)?;
        match there.get(&data.join(MANIFEST)?) {
            Some(&bytes) if bytes == manifest.bytes => Ok(data),
            found => bad(
                &manifest.path,
                found.map_or("none".to_owned(), |bytes| format!("{bytes} bytes")),
                format!("{} bytes as committed", manifest.bytes),
            ),
        }
    }

    /// Unfinished folders that [`Checkpoints::find_place_for`] has named with this hidden prefix
    /// and a mark that is not a [`ProcessIdentity`]: the step, the mark, and the folder of each.
    pub(crate) fn unfinished(&self, hidden: &str) -> Result<Vec<(u64, String, Key)>> {
        let mut found = Vec::new();
        let mut add = |name: &str, folder: Key| {
            let Some((step, mark)) = name.split_at_checked(step_name(0).len()) else { return };
            let mark = mark.strip_prefix('-').filter(|mark| ProcessIdentity::parse(mark).is_none());
            if let Some((step, mark)) = step_of(step).zip(mark) {
                found.push((step, mark.to_owned(), folder));
            }
        };
        for name in self.store.list_names(&self.folder)? {
            if let Some(rest) = name.strip_prefix(hidden) {
                add(rest, self.folder.join(&name)?);
            }
        }
        if self.store.has_atomic_publish(&self.folder)? {
            return Ok(found);
        }
        let there = self.listing()?;
        for step in self.named_steps()? {
            let target = self.folder.join(&step_name(step))?;
            let committed = match self.data_folder(step, &there) {
                Ok(data) => Some(data),
                Err(Error::Uncommitted { .. }) => None,
                // The folder that the record names may hold the only files of the step.
                Err(error) if error.is_damage() => {
                    log::warn!("step {step}: unfinished files are not removed: {error}");
                    continue;
                }
                Err(error) => return Err(error),
            };
            for name in self.store.list_names(&target)? {
                let folder = target.join(&name)?;
                let mark = name.strip_prefix(DATA).filter(|_| committed.as_ref() != Some(&folder));
                if let Some(mark) = mark {
                    add(&format!("{}-{mark}", step_name(step)), folder);
                }
            }
        }
        Ok(found)
    }

    /// Whether the files of this owner are orphaned, provided that the lease is held. Files
    /// of a live process of this machine are not.
    pub(crate) fn is_abandoned(&self, owner: Option<&str>) -> bool {
        let owner = owner.and_then(ProcessIdentity::parse);
        owner.is_some_and(|owner| {
            owner.life() != Liveness::Alive && !self.lease.fence().is_of_family(&owner)
        })
    }

    /// Removes files of steps that were never committed or are partly deleted, where steps are
    /// committed by a record. The lease is held, so their writers have stopped.
    pub(crate) fn sweep_data(&self, report: &mut SweepReport) -> Result<()> {
        if self.store.has_atomic_publish(&self.folder)? {
            return Ok(());
        }
        let there = self.listing()?;
        for name in self.store.list_names(&self.folder)? {
            let Some(step) = step_of(&name) else { continue };
            let target = self.folder.join(&name)?;
            let committed = match self.data_folder(step, &there) {
                Ok(data) => Some(data),
                Err(Error::Uncommitted { .. }) => None,
                Err(_) => continue, // damaged: retained for inspection
            };
            let names = self.store.list_names(&target)?;
            let mut remaining = names.len();
            for inner in &names {
                let Some(owner) = inner.strip_prefix(DATA) else { continue };
                let data = target.join(inner)?;
                if committed.as_ref() == Some(&data) {
                    continue;
                }
                let is_damaged = names.contains(&format!("{DAMAGED_DATA}{owner}"));
                let path = format!("{name}/{inner}");
                if is_damaged || !self.is_abandoned(Some(owner)) {
                    report.kept.push(path);
                    continue;
                }
                self.check_lease()?;
                self.store.delete_folder(&data)?;
                report.removed.push(path);
                remaining -= 1;
            }
            if remaining == 0 {
                // Orphans of data whose deletion was interrupted.
                let orphans = self.store.remove_orphans(&target)?;
                report.removed.extend(orphans.iter().map(|orphan| format!("{name}/{orphan}")));
                self.store.delete_empty_folder(&target)?;
            }
        }
        Ok(())
    }
}

fn has_manifest(target: &Key, there: &Listing) -> Result<bool> {
    Ok(there.contains_key(&target.join(MANIFEST)?))
}
