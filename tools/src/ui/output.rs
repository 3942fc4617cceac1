//! Outputs of the commands, and their manifests.

use std::sync::Arc;

use ::ckpt::Checkpoints;
use indexed::{BlockChecksums, Dtype, Format};
use serde::Serialize;
use serde_json::Value;
use storage::{FileEntry, Key, Manifest, Result, Storage};

use crate::ui::job::{CancellableJob, CountedBytes};

/// Name of the writer in manifests.
pub(crate) const TOOL: &str = concat!("feedline ", env!("CARGO_PKG_VERSION"));

/// Format name in the manifest of a token dataset; `preprocess` has the same.
const FORMAT: &str = "feedline-tokens";
const FORMAT_VERSION: u32 = 1;

/// Properties of token files that the command line gives, because files may not record them.
#[derive(Clone, Copy, Debug, Default)]
pub struct FormatHints {
    /// The size of the vocabulary. Default: from the manifest.
    pub vocab_size: Option<u64>,
    /// The token that ends documents. Default: from the manifest.
    pub eod: Option<u32>,
    /// The type of tokens, if the files do not record it.
    pub dtype: Option<Dtype>,
}

/// A file that was written.
#[derive(Clone, Debug, Serialize)]
pub struct Output {
    /// Its full name.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// CRC-64/NVME of all its bytes, in 16 hexadecimal digits.
    pub crc64: String,
}

impl Output {
    pub(crate) fn new(name: String, entry: &FileEntry) -> Self {
        Output { name, bytes: entry.bytes, crc64: format!("{:016x}", entry.crc64) }
    }
}

/// Refuses an existing output before any work.
pub(crate) fn no_manifest_yet(store: &dyn Storage, prefix: &Key) -> Result<()> {
    let key = prefix.with_suffix(".manifest.json")?;
    match store.open(&key) {
        Err(storage::Error::NotFound { .. }) => Ok(()),
        Err(error) => Err(error),
        Ok(_) => Err(storage::Error::Exists { object: store.display(&key) }),
    }
}

/// Writes the manifest that makes the files a dataset. If that fails, removes the files, which are
/// not a dataset without it.
pub(crate) fn write_manifest(
    store: &dyn Storage,
    prefix: &Key,
    files: &[FileEntry],
    meta: Value,
) -> Result<Vec<Output>> {
    let folder = prefix.parent();
    let outcome = write_manifest_only(store, prefix, files, meta);
    if outcome.is_err() {
        for file in files.iter().rev() {
            // The first error is returned.
            if let Err(error) = folder.join(&file.path).and_then(|key| store.delete(&key)) {
                log::warn!("{}: has no manifest and cannot be deleted: {error}", file.path);
            }
        }
    }
    outcome
}

/// Writes the manifest that makes the files a dataset.
pub(crate) fn write_manifest_only(
    store: &dyn Storage,
    prefix: &Key,
    files: &[FileEntry],
    meta: Value,
) -> Result<Vec<Output>> {
    let manifest = Manifest {
        format: FORMAT.to_owned(),
        version: FORMAT_VERSION,
        files: files.to_vec(),
        meta,
    };
    let written = manifest.write(store, &prefix.with_suffix(".manifest.json")?)?;
    let folder = prefix.parent();
    let output =
        |entry: &FileEntry| Ok(Output::new(store.display(&folder.join(&entry.path)?), entry));
    files.iter().chain([&written]).map(output).collect()
}

/// The bytes of a pair of token files.
pub(crate) fn pair_bytes(store: &dyn Storage, prefix: &Key) -> anyhow::Result<u64> {
    let len = |suffix| Ok(store.open(&prefix.with_suffix(suffix)?)?.len_bytes());
    let [bin, idx]: [Result<u64>; 2] = [".bin", ".idx"].map(len);
    Ok(bin?.saturating_add(idx?))
}

/// The manifest beside a pair of token files; `None` if the tool that wrote them writes none.
pub(crate) fn token_manifest(store: &dyn Storage, prefix: &Key) -> Result<Option<Manifest>> {
    let key = prefix.with_suffix(".manifest.json")?;
    match Manifest::read(store, &key) {
        Err(storage::Error::NotFound { .. }) => Ok(None),
        other => other.map(Some),
    }
}

/// The manifest of a source, if it has one, after its files are verified: copies of damaged files
/// would get new checksums that match the damage. If the source is a pair with block checksums,
/// each read is verified with them; otherwise all files are read here and compared with the
/// manifest.
pub(crate) fn verified_manifest(
    store: &dyn Storage,
    prefix: &Key,
    format: Format,
    work: &CancellableJob,
) -> anyhow::Result<Option<Manifest>> {
    let Some(manifest) = token_manifest(store, prefix)? else { return Ok(None) };
    if format == Format::Mmididx && BlockChecksums::open(store, prefix)?.is_some() {
        verify_checksums(store, prefix, &manifest.files)?;
        return Ok(Some(manifest));
    }
    let bytes = manifest.files.iter().map(|file| file.bytes).fold(0, u64::saturating_add);
    work.begin("verify", CountedBytes::Read, Some(bytes));
    manifest.verify(store, &prefix.parent())?;
    Ok(Some(manifest))
}

/// Compares the `.crc` of a pair with its entry in the manifest, if it has one.
pub(crate) fn verify_checksums(
    store: &dyn Storage,
    prefix: &Key,
    files: &[FileEntry],
) -> Result<()> {
    let name = format!("{}.crc", prefix.name());
    let entry = files.iter().find(|file| file.path == name);
    entry.map_or(Ok(()), |entry| entry.verify(store, &prefix.parent()))
}

/// The checkpoints in a folder that has `step-*` folders directly below its root.
pub(crate) fn checkpoints(store: &Arc<dyn Storage>) -> Checkpoints {
    Checkpoints::open(Arc::clone(store), Key::root())
}

/// The steps that have a folder below the root, complete or not, the oldest first.
pub(crate) fn steps_named(store: &dyn Storage) -> Result<Vec<u64>> {
    let mut steps: Vec<u64> =
        store.list_names(&Key::root())?.iter().filter_map(|name| ::ckpt::step_of(name)).collect();
    steps.sort_unstable();
    Ok(steps)
}
