//! Where the processes of one save meet: a hidden folder of small objects, each written once.
//!
//! ```text
//! .save-step-000012000-TOKEN/
//!   announce         by writer 0: the plan that it follows, and where files go
//!   lead/OWNER       its signs of life
//!   alive/00003-OWNER  those of writer 3
//!   part/00003       what writer 3 has written, durably
//!   decision         "commit" or why not: whoever writes it first decides for all
//!   outcome          by writer 0: whether the commit that was decided is made, durably
//! ```
//!
//! All but signs of life are sealed as manifests are, so that a torn or foreign one is refused. The
//! folder stays until the next save or sweep, so that the slowest writer finds it.

use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::format::catalog::BlobEntry;
use crate::liveness::heartbeat::forget;
use crate::retain::sweep::after_step;
use crate::save::commit_target::STAGING;
use crate::steps::checkpoints::step_name;
use crate::{Checkpoints, Chunk, Codec, Error, Result};
use storage::{FileEntry, Key, Liveness, Manifest, ProcessIdentity, Storage};

/// Hidden folders of saves that several processes make.
const MEETING: &str = ".save-";

/// By writer 0: the first object of a meeting, and the first to go.
const ANNOUNCE: &str = "announce";

/// Longer would not fit beside what else is in the name.
const TOKEN_BYTES_MAX: usize = 100;

/// Polls of the store while waiting: from a few milliseconds, a 32nd of what was waited so far,
/// to this. A thousand writers then ask two thousand times a second at most.
const POLL_MAX: Duration = Duration::from_millis(500);
const POLL_MIN: Duration = Duration::from_millis(2);

/// Writer 0 says what is going to be saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SaveAnnouncement {
    pub(crate) step: u64,
    pub(crate) writers: usize,
    /// Of the plan, which all must share. In hexadecimal digits: JSON has no 64-bit integers in
    /// the tools of some.
    #[serde(with = "crate::base::hex")]
    pub(crate) fingerprint: u64,
    pub(crate) block_bytes: u64,
    pub(crate) codec: Option<Codec>,
    /// Who says so.
    pub(crate) owner: String,
    /// Where files go, below the checkpoints' folder.
    pub(crate) data: String,
    /// What is there when the step is, below the checkpoints' folder.
    pub(crate) record: String,
    /// Whether a damaged step has that name, and may have such a record.
    pub(crate) has_damaged: bool,
}

/// What one writer has written, durably.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct WriterOutput {
    /// Its files of tensors, in the order of the plan, and the chunks of each.
    pub(crate) shards: Vec<(FileEntry, Vec<Chunk>)>,
    pub(crate) blobs: Vec<(FileEntry, BlobEntry)>,
}

impl WriterOutput {
    pub(crate) fn files(&self) -> impl Iterator<Item = &FileEntry> {
        let shards = self.shards.iter().map(|(file, _)| file);
        shards.chain(self.blobs.iter().map(|(file, _)| file))
    }
}

/// `meta` of a part; its files are those of the chunks, then those of the blobs.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PartMeta {
    /// Who announced the save that this is a part of.
    owner: String,
    chunks: Vec<Vec<Chunk>>,
    blobs: Vec<BlobEntry>,
}

/// What becomes of the save.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Decision {
    pub(crate) commit: bool,
    /// Why not.
    pub(crate) why: String,
}

/// The meeting of one save, as one writer has it.
#[derive(Debug)]
pub(crate) struct Rendezvous<'a> {
    steps: &'a Checkpoints,
    pub(crate) folder: Key,
}

impl<'a> Rendezvous<'a> {
    pub(crate) fn new(steps: &'a Checkpoints, step: u64, token: &str) -> Result<Self> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if token.is_empty() || token.len() > TOKEN_BYTES_MAX || !token.chars().all(is_plain) {
            let reason = format!("it has 1 to {TOKEN_BYTES_MAX} letters, digits, '-', '_' and '.'");
            return Err(Error::BadInput { object: format!("with the token '{token}'"), reason });
        }
        let folder = steps.folder.join(&format!("{MEETING}{}-{token}", step_name(step)))?;
        Ok(Rendezvous { steps, folder })
    }

    fn store(&self) -> &dyn Storage {
        &*self.steps.store
    }

    pub(crate) fn key(&self, name: &str) -> Result<Key> {
        Ok(self.folder.join(name)?)
    }

    /// Says what is saved. A token serves once: what another try left would be mistaken for ours.
    pub(crate) fn announce(&self, announce: &SaveAnnouncement) -> Result<()> {
        match self.write(ANNOUNCE, Vec::new(), announce) {
            Err(Error::Storage(storage::Error::Exists { object })) => {
                let reason = format!("{object} is there; every try takes a token of its own");
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

    /// Which writers have written their part.
    pub(crate) fn parts_there(&self) -> Result<Vec<usize>> {
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
            return bad(format!("a part for {of}"), owner.to_owned());
        }
        if files.len() != chunks.len() + blobs.len() {
            let expected = format!("{} with chunks, {} with blobs", chunks.len(), blobs.len());
            return bad(format!("{} files", files.len()), expected);
        }
        let extra = files.split_off(chunks.len());
        let (shards, blobs) = (files.into_iter().zip(chunks), extra.into_iter().zip(blobs));
        Ok(WriterOutput { shards: shards.collect(), blobs: blobs.collect() })
    }

    /// Decides for all, unless somebody has. Gives what is decided.
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

    /// Says what has become of a commit that was decided.
    pub(crate) fn end(&self, is_there: bool, why: &str) -> Result<()> {
        let end = Decision { commit: is_there, why: why.to_owned() };
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
            Err(error) => bad("meta", error.to_string(), "its fields and no others".to_owned()),
        }
    }
}

impl Checkpoints {
    /// Removes the meetings of earlier saves, all but the one of this name, and what slow writers
    /// wrote after writer 0 had given up. The lease is held: none of them goes on.
    pub(crate) fn clear_meetings(&self, but: &str) -> Result<Vec<String>> {
        let mut removed = Vec::new();
        for name in self.store.list_names(&self.folder)? {
            let is_ours = |owner: &ProcessIdentity| owner.life() == Liveness::Ours;
            let staged =
                name.strip_prefix(STAGING).and_then(after_step).and_then(ProcessIdentity::parse);
            if staged.is_some_and(|owner| is_ours(&owner)) {
                self.check_lease()?;
                self.store.delete_folder(&self.folder.join(&name)?)?;
            } else if name.starts_with(MEETING) && name != but {
                self.check_lease()?;
                let folder = self.folder.join(&name)?;
                // First of all: a writer that still finds it knows that the decision which it has
                // just made is the only one there was.
                forget(&*self.store, &folder.join(ANNOUNCE)?)?;
                self.store.delete_folder(&folder)?;
                removed.push(name);
            }
        }
        Ok(removed)
    }
}

/// Waits a little, longer the longer it has waited.
pub(crate) fn pause(begun: Instant) {
    std::thread::sleep((begun.elapsed() / 32).clamp(POLL_MIN, POLL_MAX));
}
