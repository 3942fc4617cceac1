//! Rendezvous of the processes of one joint save: a hidden folder of small objects, each written
//! once.
//!
//! ```text
//! .save-step-000012000-TOKEN/
//!   announce         by writer 0: the plan to follow and where files go
//!   lead/OWNER       heartbeat of writer 0
//!   alive/00003-OWNER  heartbeat of writer 3
//!   part/00003       what writer 3 has written, durably
//!   decision         "commit" or why not; the first writer to create it decides for all
//!   outcome          by writer 0: whether the decided commit has been made, durably
//! ```
//!
//! All objects except heartbeats are sealed like manifests, so a truncated or foreign one is
//! rejected. The folder is kept until the next save or sweep, so that the slowest writer still
//! finds it.

use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::format::catalog::BlobEntry;
use crate::liveness::heartbeat::delete_if_exists;
use crate::retain::sweep::after_step;
use crate::save::commit_target::STAGING;
use crate::steps::checkpoints::step_name;
use crate::{Checkpoints, Chunk, Codec, Error, Result};
use storage::{FileEntry, Key, Liveness, Manifest, ProcessIdentity, Storage};

/// Prefix of the hidden folders of joint saves.
const RENDEZVOUS: &str = ".save-";

/// Written by writer 0: the first object of a rendezvous, and the first to be deleted.
const ANNOUNCE: &str = "announce";

/// Limit set by the rest of the folder's name.
const TOKEN_BYTES_MAX: usize = 100;

/// Interval between polls of the store: a 32nd of the time waited so far, within these bounds. A
/// thousand writers then send at most two thousand requests a second.
const POLL_MAX: Duration = Duration::from_millis(500);
const POLL_MIN: Duration = Duration::from_millis(2);

/// Writer 0's description of the save.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SaveAnnouncement {
    pub(crate) step: u64,
    pub(crate) writers: usize,
    /// Fingerprint of the plan, which must be the same for all writers. In hexadecimal digits,
    /// since some JSON tools have no 64-bit integers.
    #[serde(with = "crate::base::hex")]
    pub(crate) fingerprint: u64,
    pub(crate) block_bytes: u64,
    pub(crate) codec: Option<Codec>,
    /// Identity of writer 0.
    pub(crate) owner: String,
    /// Folder of the data files, relative to the checkpoint folder.
    pub(crate) data: String,
    /// Object whose existence commits the step, relative to the checkpoint folder.
    pub(crate) record: String,
    /// Whether a damaged step has that name. It may have such a record too.
    pub(crate) has_damaged: bool,
}

/// What one writer has written, durably.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct WriterOutput {
    /// Its tensor files in plan order, with the chunks of each.
    pub(crate) shards: Vec<(FileEntry, Vec<Chunk>)>,
    pub(crate) blobs: Vec<(FileEntry, BlobEntry)>,
}

impl WriterOutput {
    pub(crate) fn files(&self) -> impl Iterator<Item = &FileEntry> {
        let shards = self.shards.iter().map(|(file, _)| file);
        shards.chain(self.blobs.iter().map(|(file, _)| file))
    }
}

/// `meta` of a part. Its files are those of the chunks, then those of the blobs.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PartMeta {
    /// Writer 0 of the save that this part belongs to.
    owner: String,
    chunks: Vec<Vec<Chunk>>,
    blobs: Vec<BlobEntry>,
}

/// The common decision: commit or abort.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Decision {
    pub(crate) commit: bool,
    /// The reason for not committing.
    pub(crate) why: String,
}

/// One writer's view of the rendezvous.
#[derive(Debug)]
pub(crate) struct Rendezvous<'a> {
    steps: &'a Checkpoints,
    pub(crate) folder: Key,
}

impl<'a> Rendezvous<'a> {
    pub(crate) fn new(steps: &'a Checkpoints, step: u64, token: &str) -> Result<Self> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if token.is_empty() || token.len() > TOKEN_BYTES_MAX || !token.chars().all(is_plain) {
            let reason =
                format!("expected 1 to {TOKEN_BYTES_MAX} letters, digits, '-', '_' or '.'");
            return Err(Error::BadInput { object: format!("with the token '{token}'"), reason });
        }
        let folder = steps.folder.join(&format!("{RENDEZVOUS}{}-{token}", step_name(step)))?;
        Ok(Rendezvous { steps, folder })
    }

    fn store(&self) -> &dyn Storage {
        &*self.steps.store
    }

    pub(crate) fn key(&self, name: &str) -> Result<Key> {
        Ok(self.folder.join(name)?)
    }

    /// Announces the save. A token can be used once: objects of an earlier try would be mistaken
    /// for ours.
    pub(crate) fn announce(&self, announce: &SaveAnnouncement) -> Result<()> {
        match self.write(ANNOUNCE, Vec::new(), announce) {
            Err(Error::Storage(storage::Error::Exists { object })) => {
                let reason = format!("{object} already exists (hint: use a new token)");
                Err(Error::BadInput { object: self.steps.store.display(&self.folder), reason })
            }
            outcome => outcome,
        }
    }

    pub(crate) fn announced(&self) -> Result<Option<SaveAnnouncement>> {
        Ok(self.read(ANNOUNCE)?.map(|(_, announce)| announce))
    }

    pub(crate) fn put_part(&self, writer: usize, owner: &str, part: &WriterOutput) -> Result<()> {
        let files = part.files().cloned().collect();
        let chunks = part.shards.iter().map(|(_, chunks)| chunks.clone()).collect();
        let blobs = part.blobs.iter().map(|(_, blob)| blob.clone()).collect();
        let meta = PartMeta { owner: owner.to_owned(), chunks, blobs };
        self.write(&format!("part/{writer:05}"), files, &meta)
    }

    /// The writers that have written their part.
    pub(crate) fn list_parts(&self) -> Result<Vec<usize>> {
        let names = self.store().list_names(&self.key("part")?)?;
        Ok(names.iter().filter_map(|name| name.parse().ok()).collect())
    }

    pub(crate) fn part(&self, writer: usize, owner: &str) -> Result<WriterOutput> {
        let name = format!("part/{writer:05}");
        let what = || self.steps.store.display(&self.folder);
        let (mut files, PartMeta { owner: of, chunks, blobs }) =
            self.read(&name)?.ok_or_else(|| storage::Error::NotFound { object: what() })?;
        let bad = |found: String, expected: String| {
            Err(Error::BadManifest { object: what(), place: name.clone(), found, expected })
        };
        if of != owner {
            return bad(format!("a part for {of}"), format!("a part for {owner}"));
        }
        if files.len() != chunks.len() + blobs.len() {
            let expected = format!("{} files of chunks and {} of blobs", chunks.len(), blobs.len());
            return bad(format!("{} files", files.len()), expected);
        }
        let extra = files.split_off(chunks.len());
        let (shards, blobs) = (files.into_iter().zip(chunks), extra.into_iter().zip(blobs));
        Ok(WriterOutput { shards: shards.collect(), blobs: blobs.collect() })
    }

    /// Decides for all writers, unless another writer already has. Returns the decision in force.
    pub(crate) fn decide(&self, decision: Decision) -> Result<Decision> {
        match self.write("decision", Vec::new(), &decision) {
            Ok(()) => Ok(decision),
            Err(Error::Storage(storage::Error::Exists { .. })) => {
                let what = || self.steps.store.display(&self.folder);
                let decided = self.decided()?;
                Ok(decided.ok_or_else(|| storage::Error::NotFound { object: what() })?)
            }
            Err(error) => Err(error),
        }
    }

    pub(crate) fn decided(&self) -> Result<Option<Decision>> {
        Ok(self.read("decision")?.map(|(_, decision)| decision))
    }

    /// Reports whether a decided commit has been made.
    pub(crate) fn end(&self, is_committed: bool, why: &str) -> Result<()> {
        let end = Decision { commit: is_committed, why: why.to_owned() };
        self.write("outcome", Vec::new(), &end)
    }

    pub(crate) fn ended(&self) -> Result<Option<Decision>> {
        Ok(self.read("outcome")?.map(|(_, end)| end))
    }

    fn write(&self, name: &str, files: Vec<FileEntry>, meta: &impl Serialize) -> Result<()> {
        let meta = serde_json::to_value(meta).expect("structures of strings and numbers");
        let (kind, _) = name.split_once('/').unwrap_or((name, ""));
        let format = format!("feedline-ckpt-{kind}");
        Manifest { format, version: 1, files, meta }.write(self.store(), &self.key(name)?)?;
        Ok(())
    }

    fn read<T: DeserializeOwned>(&self, name: &str) -> Result<Option<(Vec<FileEntry>, T)>> {
        let key = self.key(name)?;
        let Manifest { format, version, files, meta } = match Manifest::read(self.store(), &key) {
            Err(storage::Error::NotFound { .. }) => return Ok(None),
            read => read?,
        };
        let object = self.store().display(&key);
        let bad = |place: &str, found, expected| {
            Err(Error::BadManifest {
                object: object.clone(),
                place: place.to_owned(),
                found,
                expected,
            })
        };
        let (kind, _) = name.split_once('/').unwrap_or((name, ""));
        let expected = format!("feedline-ckpt-{kind}");
        if (&format, version) != (&expected, 1) {
            return bad(
                "format and version",
                format!("{format} {version}"),
                format!("{expected} 1"),
            );
        }
        match serde_json::from_value(meta) {
            Ok(meta) => Ok(Some((files, meta))),
            Err(error) => bad(
                "meta",
                error.to_string(),
                "the fields of this version and no others".to_owned(),
            ),
        }
    }
}

impl Checkpoints {
    /// Removes the rendezvous folders of earlier saves, all except `but`, and staging folders of
    /// this process: slow writers may have written there after it aborted the save. The lease is
    /// held, so none of those saves can still commit.
    pub(crate) fn clear_rendezvous(&self, but: &str) -> Result<Vec<String>> {
        let mut removed = Vec::new();
        for name in self.store.list_names(&self.folder)? {
            let is_ours = |owner: &ProcessIdentity| owner.life() == Liveness::Ours;
            let staged =
                name.strip_prefix(STAGING).and_then(after_step).and_then(ProcessIdentity::parse);
            if staged.is_some_and(|owner| is_ours(&owner)) {
                self.check_lease()?;
                self.store.delete_folder(&self.folder.join(&name)?)?;
            } else if name.starts_with(RENDEZVOUS) && name != but {
                self.check_lease()?;
                let folder = self.folder.join(&name)?;
                // Deleted first: a writer that still finds it after deciding knows that its
                // decision is the only one.
                delete_if_exists(&*self.store, &folder.join(ANNOUNCE)?)?;
                self.store.delete_folder(&folder)?;
                removed.push(name);
            }
        }
        Ok(removed)
    }
}

/// Sleeps between polls, longer the longer it has waited.
pub(crate) fn pause(waiting_since: Instant) {
    std::thread::sleep((waiting_since.elapsed() / 32).clamp(POLL_MIN, POLL_MAX));
}
