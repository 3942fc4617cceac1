//! Markers of outputs that are being written, by which the next run distinguishes debris from data.
//!
//! A dataset is several objects; its manifest, written last, makes them one. A process that is
//! killed before that leaves objects that no run may overwrite, because their owner is unknown. So
//! a command takes an [`OutputClaim`], which creates markers beside the outputs,
//! `.PREFIX.writing-N`, each with the process and the outputs that it may have made visible:
//!
//! - the first before anything is read or written, after a check that no output exists; it names
//!   none;
//! - the second before the first output becomes visible, after the same check; it names all.
//!
//! Both are deleted after the manifest is visible. If the process is dead and the manifest is
//! missing, the outputs that its markers name are debris, and the next claim deletes them. Files
//! that another program wrote after the kill are refused, unless the process was killed when all
//! bytes were written and the outputs were becoming visible.
//!
//! At most one process has a claim. Two processes cannot create the same number. Each process lists
//! the markers again after it created its own, so the later of two processes with different numbers
//! fails.

use std::iter;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};
use indexed::Format;
use serde::{Deserialize, Serialize};
use storage::{Key, Liveness, ProcessIdentity, Storage};

use crate::ui::job::CancellableJob;

/// Separator of prefix and number in the name of a marker.
const MARK: &str = ".writing-";

const MANIFEST: &str = ".manifest.json";

/// A record is a few hundred bytes: a dozen suffixes and three names of at most 255 bytes.
const RECORD_BYTES_MAX: u64 = 64 << 10;

/// Maximum number of attempts to take a claim while other processes take and release theirs.
const CLAIMS_MAX: usize = 16;

/// Which unfinished outputs a claim takes over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Takeover {
    /// Those of dead processes of this machine.
    #[default]
    Dead,
    /// Also those of processes that cannot be checked: on other machines and in other containers.
    DeadOrUnknown,
}

/// The content of a marker.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ClaimRecord {
    /// A [`ProcessIdentity`].
    owner: String,
    /// The command, and the other settings that determine the outputs of a group.
    command: String,
    /// Suffixes of the objects that the process may have made visible, without the manifest.
    suffixes: Vec<String>,
    /// Suffixes of the resumable uploads that the process may create.
    drafts: Vec<String>,
    /// The manifests of its group: the run is complete when all of them are visible.
    manifests: Vec<String>,
}

/// The right to write some datasets of one folder, released on drop.
#[derive(Debug)]
pub(crate) struct OutputClaim {
    work: Arc<CancellableJob>,
    _markers: Vec<OwnMarker>,
}

/// A marker of this process, deleted on drop.
#[derive(Debug)]
struct OwnMarker {
    store: Arc<dyn Storage>,
    key: Key,
}

/// The second marker of a claim, to be created before the first output becomes visible.
#[derive(Debug)]
pub(crate) struct CommitMarker {
    store: Arc<dyn Storage>,
    key: Key,
    record: Vec<u8>,
    /// The outputs, none of which may exist yet.
    outputs: Vec<Key>,
}

/// A prefix to be claimed.
struct ClaimTarget<'a> {
    store: &'a Arc<dyn Storage>,
    prefix: &'a Key,
    format: Format,
    takeover: Takeover,
}

/// The names in the folder of a target, and the markers of its prefix.
struct ClaimState {
    names: Vec<String>,
    markers: Vec<DeadMarker>,
}

/// A marker of another process, which is dead or taken over.
struct DeadMarker {
    key: Key,
    number: u64,
    record: ClaimRecord,
}

impl OutputClaim {
    /// Claims prefixes, and removes their unfinished outputs of killed runs. Prefixes with a
    /// visible manifest are refused, unless the manifest is part of an unfinished group of the same
    /// `command`.
    ///
    /// # Errors
    /// [`storage::Error::Exists`] if an output exists that no dead process was writing; if another
    /// process has the claim, or may have it; errors of the store.
    pub(crate) fn take(
        work: &Arc<CancellableJob>,
        command: &str,
        format: Format,
        targets: &[(&Arc<dyn Storage>, &Key)],
        takeover: Takeover,
    ) -> Result<Self> {
        let manifests = targets.iter().map(|(_, prefix)| format!("{}{MANIFEST}", prefix.name()));
        let record = ClaimRecord {
            owner: ProcessIdentity::new().to_string(),
            command: command.to_owned(),
            suffixes: Vec::new(),
            drafts: Vec::new(),
            manifests: manifests.collect(),
        };
        let target = |&(store, prefix)| ClaimTarget { store, prefix, format, takeover };
        let targets: Vec<_> = targets.iter().map(target).collect();
        // All targets are cleaned before the first can be refused.
        targets.iter().try_for_each(ClaimTarget::tidy)?;
        let (mut markers, mut commits) = (Vec::new(), Vec::new());
        for target in &targets {
            let (own, commit) = target.claim(&record)?;
            markers.push(own);
            markers.push(OwnMarker { store: Arc::clone(&commit.store), key: commit.key.clone() });
            commits.push(commit);
        }
        work.before_outputs(commits);
        Ok(OutputClaim { work: Arc::clone(work), _markers: markers })
    }
}

impl CommitMarker {
    /// Whether it names this output.
    pub(crate) fn is_of(&self, output: &Key) -> bool {
        self.outputs.contains(output)
    }

    /// Creates the marker.
    ///
    /// # Errors
    /// [`storage::Error::Exists`] if another program has written an output; errors of the store.
    pub(crate) fn create(self) -> storage::Result<()> {
        let CommitMarker { store, key, record, outputs } = self;
        let names = store.list_names(&key.parent())?;
        let is_there = |output: &&Key| names.iter().any(|name| name == output.name());
        if let Some(output) = outputs.iter().find(is_there) {
            return Err(storage::Error::Exists { object: store.display(output) });
        }
        storage::write_all(store.as_ref(), &key, &record).map(drop)
    }
}

impl ClaimTarget<'_> {
    /// Removes the temporary files of dead processes, and markers of runs that were killed when
    /// they were complete.
    fn tidy(&self) -> Result<()> {
        self.store.remove_orphans(&self.prefix.parent())?;
        let state = self.state(None)?;
        for marker in state.markers.iter().filter(|marker| state.is_complete(&marker.record)) {
            self.delete(&marker.key)?;
        }
        Ok(())
    }

    /// Creates the first marker, removes debris, and prepares the second marker.
    fn claim(&self, record: &ClaimRecord) -> Result<(OwnMarker, CommitMarker)> {
        for _ in 0..CLAIMS_MAX {
            let state = self.state(None)?;
            self.refuse_existing(&state, record)?;
            let record = ClaimRecord { drafts: self.new_drafts(&state)?, ..record.clone() };
            let last = state.markers.iter().map(|marker| marker.number).max();
            let number = last.map_or(0, |number| number.saturating_add(1));
            let key = self.key(&format!("{MARK}{number}"), ".")?;
            match storage::write_all(self.store.as_ref(), &key, &serde_json::to_vec(&record)?) {
                Err(storage::Error::Exists { .. }) => continue,
                written => written?,
            };
            let own = OwnMarker { store: Arc::clone(self.store), key };
            let state = self.state(Some(&own.key))?;
            self.refuse_existing(&state, &record)?;
            self.clear(&state)?;
            let commit = self.commit_marker(record, number.saturating_add(1))?;
            return Ok((own, commit));
        }
        bail!(
            "cannot write {}: expected one writer, found another at each of {CLAIMS_MAX} attempts",
            self.store.display(self.prefix)
        );
    }

    fn commit_marker(&self, record: ClaimRecord, number: u64) -> Result<CommitMarker> {
        let suffixes = self.format.written_suffixes();
        let key_of = |suffix: &&str| self.key(suffix, "");
        let outputs = iter::once(&MANIFEST).chain(suffixes).map(key_of).collect::<Result<_>>()?;
        let suffixes = suffixes.iter().map(|suffix| (*suffix).to_owned()).collect();
        let record = serde_json::to_vec(&ClaimRecord { suffixes, ..record })?;
        let key = self.key(&format!("{MARK}{number}"), ".")?;
        Ok(CommitMarker { store: Arc::clone(self.store), key, record, outputs })
    }

    /// Lists the folder. Fails if a process other than that of the marker `own` may be writing.
    fn state(&self, own: Option<&Key>) -> Result<ClaimState> {
        let folder = self.prefix.parent();
        let names = self.store.list_names(&folder)?;
        let mut markers = Vec::new();
        for name in &names {
            let Some((prefix, number)) = parse_marker(name) else { continue };
            let key = folder.join(name)?;
            if prefix != self.prefix.name() || own == Some(&key) {
                continue;
            }
            let bytes = match storage::read_small(self.store.as_ref(), &key, RECORD_BYTES_MAX) {
                // The process of the marker has deleted it.
                Err(storage::Error::NotFound { .. }) => continue,
                bytes => bytes?,
            };
            let record = ClaimRecord::parse(&bytes)
                .with_context(|| format!("cannot read marker {}", self.store.display(&key)))?;
            self.refuse_live(&key, &record)?;
            markers.push(DeadMarker { key, number, record });
        }
        Ok(ClaimState { names, markers })
    }

    fn refuse_live(&self, marker: &Key, record: &ClaimRecord) -> Result<()> {
        let output = self.store.display(self.prefix);
        let marker = self.store.display(marker);
        let owner = ProcessIdentity::parse(&record.owner);
        let label = owner.map_or_else(|| record.owner.clone(), |owner| owner.label());
        match record.owner_life() {
            Liveness::Dead => Ok(()),
            Liveness::Unknown if self.takeover == Takeover::DeadOrUnknown => Ok(()),
            Liveness::Unknown => bail!(
                "cannot write {output}: expected no unfinished run, found one of {label}, whose \
                 process cannot be checked from here (hint: if it has ended, --restart removes its \
                 files; its marker is {marker})"
            ),
            Liveness::Ours | Liveness::Alive => bail!(
                "cannot write {output}: expected one writer, found {label} at work (hint: wait for \
                 it, or write another output; its marker is {marker})"
            ),
        }
    }

    /// Fails if an output exists that is not debris of a dead process.
    fn refuse_existing(&self, state: &ClaimState, own: &ClaimRecord) -> Result<()> {
        // The manifest is of a group in which other manifests are missing.
        let manifest_is_debris = |record: &ClaimRecord| {
            let is_committing = !record.suffixes.is_empty();
            is_committing && record.command == own.command && !state.is_complete(record)
        };
        let is_debris = |suffix: &str| {
            state.markers.iter().any(|marker| match suffix {
                MANIFEST => manifest_is_debris(&marker.record),
                _ => marker.record.suffixes.iter().any(|of| of == suffix),
            })
        };
        for suffix in iter::once(&MANIFEST).chain(self.format.written_suffixes().iter().rev()) {
            if state.has(&format!("{}{suffix}", self.prefix.name())) && !is_debris(suffix) {
                let object = self.store.display(&self.key(suffix, "")?);
                return Err(storage::Error::Exists { object }.into());
            }
        }
        Ok(())
    }

    /// Deletes the debris of dead processes, then their markers. The manifest is deleted first.
    fn clear(&self, state: &ClaimState) -> Result<()> {
        for DeadMarker { key, record, .. } in &state.markers {
            let suffixes = record.suffixes.iter().rev().map(String::as_str);
            for suffix in iter::once(MANIFEST).chain(suffixes) {
                if state.has(&format!("{}{suffix}", self.prefix.name())) {
                    self.delete(&self.key(suffix, "")?)?;
                }
            }
            if let Some(owner) = ProcessIdentity::parse(&record.owner) {
                self.store.remove_orphans_of(&self.prefix.parent(), &owner)?;
            }
            for suffix in &record.drafts {
                self.store.discard(&self.key(suffix, "")?)?;
            }
            log::info!(
                "{}: removed the unfinished outputs of its dead process",
                self.store.display(key)
            );
            self.delete(key)?;
        }
        Ok(())
    }

    /// The drafts that this run may create, without those of another program.
    fn new_drafts(&self, state: &ClaimState) -> Result<Vec<String>> {
        let mut new = Vec::new();
        for suffix in self.format.draft_suffixes() {
            let is_debris =
                |marker: &DeadMarker| marker.record.drafts.iter().any(|of| of == suffix);
            let is_new = match self.store.open_partial(&self.key(suffix, "")?) {
                Err(storage::Error::NotFound { .. }) => true,
                // The store cannot create a draft either.
                Err(storage::Error::Unsupported { .. }) => false,
                found => found.map(|_| state.markers.iter().any(is_debris))?,
            };
            new.extend(is_new.then(|| (*suffix).to_owned()));
        }
        Ok(new)
    }

    fn delete(&self, key: &Key) -> Result<()> {
        match self.store.delete(key) {
            Err(storage::Error::NotFound { .. }) => Ok(()),
            deleted => Ok(deleted?),
        }
    }

    /// The key of a name in the folder: `before`, the prefix, `suffix`.
    fn key(&self, suffix: &str, before: &str) -> Result<Key> {
        let name = format!("{before}{}{suffix}", self.prefix.name());
        Ok(self.prefix.parent().join(&name)?)
    }
}

impl ClaimState {
    fn has(&self, name: &str) -> bool {
        self.names.binary_search_by(|other| other.as_str().cmp(name)).is_ok()
    }

    fn is_complete(&self, record: &ClaimRecord) -> bool {
        record.manifests.iter().all(|name| self.has(name))
    }
}

impl ClaimRecord {
    /// Reads a marker. Only suffixes of token files are accepted: they are deleted by name.
    ///
    /// # Errors
    /// If it is not a marker of this version.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self> {
        let record: ClaimRecord = serde_json::from_slice(bytes)?;
        let is_known = |of: fn(Format) -> &'static [&'static str], suffix: &str| {
            Format::ALL.into_iter().any(|format| of(format).contains(&suffix))
        };
        for suffix in &record.suffixes {
            ensure!(
                is_known(Format::written_suffixes, suffix),
                "expected an output of token files, found {suffix}"
            );
        }
        for suffix in &record.drafts {
            ensure!(
                is_known(Format::draft_suffixes, suffix),
                "expected a draft of token files, found {suffix}"
            );
        }
        ensure!(!record.manifests.is_empty(), "expected a manifest, found none");
        Ok(record)
    }

    /// Whether the process of the marker is alive.
    pub(crate) fn owner_life(&self) -> Liveness {
        ProcessIdentity::parse(&self.owner).map_or(Liveness::Unknown, |owner| owner.life())
    }

    /// The suffixes of the objects that the process may have made visible, without the manifest.
    pub(crate) fn suffixes(&self) -> &[String] {
        &self.suffixes
    }

    /// The names of the manifests that make its run complete.
    pub(crate) fn manifests(&self) -> &[String] {
        &self.manifests
    }
}

/// The prefix and the number of a marker's name.
pub(crate) fn parse_marker(name: &str) -> Option<(&str, u64)> {
    let (prefix, digits) = name.strip_prefix('.')?.rsplit_once(MARK)?;
    let number: u64 = digits.parse().ok()?;
    (number.to_string() == digits).then_some((prefix, number))
}

impl Drop for OutputClaim {
    fn drop(&mut self) {
        self.work.before_outputs(Vec::new());
    }
}

impl Drop for OwnMarker {
    fn drop(&mut self) {
        // After a panic the outputs may be incomplete, and the next run detects this by the marker.
        if std::thread::panicking() {
            return;
        }
        match self.store.delete(&self.key) {
            // A run that fails early has not created the second marker.
            Ok(()) | Err(storage::Error::NotFound { .. }) => {}
            Err(error) => {
                log::warn!("{}: cannot be deleted: {error}", self.store.display(&self.key));
            }
        }
    }
}
