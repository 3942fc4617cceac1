//! Resumable uploads: multipart uploads whose state is in a small hidden object beside them,
//! `.NAME.draft`, so that another process can continue with the parts already uploaded.
//!
//! Parts cannot be read, and a part that is not full must be the last one. So a resumable upload
//! cannot be opened here, and is durable up to its last full part, or completely once it is
//! flushed. There is no lock either: two processes that resume one upload and write the same bytes
//! make one object of them; if the bytes differ, the parts of the loser are refused by their ETags.

use std::collections::HashMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::attempt_error::AttemptError;
use super::bucket::ProcessBucket;
use super::object::head;
use super::put::{self, MARK, S3Upload, UploadTarget};
use crate::{
    Error, Key, Result, ResumableUpload, Storage, SyncPoint, crc64_join, read_small, write_all,
};

/// A record has at most 10,000 parts of about a hundred bytes.
const STATE_BYTES_MAX: u64 = 8 << 20;

/// What another process needs to resume.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct UploadRecord {
    /// The id of the multipart upload; none before the first part is sent.
    pub(crate) upload: Option<String>,
    /// The mark in the metadata of the finished object.
    pub(crate) mark: String,
    pub(crate) parts: Vec<UploadedPart>,
}

/// A part that the server has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct UploadedPart {
    pub(crate) number: i32,
    pub(crate) etag: Option<String>,
    pub(crate) bytes: u64,
    pub(crate) crc64: u64,
}

/// Starts a resumable upload by creating its state object.
pub(crate) fn start(
    store: &dyn Storage,
    live: Arc<ProcessBucket>,
    target: UploadTarget,
    key: &Key,
    state: UploadTarget,
) -> Result<S3Upload> {
    log_other_uploads(&live, &target, None);
    let mut upload = S3Upload::new(live, target, 0);
    let first = UploadRecord { mark: upload.mark().to_owned(), ..UploadRecord::default() };
    write_all(store, key, &to_bytes(&state.name, &first)?)?;
    upload.make_resumable(state);
    Ok(upload)
}

/// Continues after the parts before a sync point.
pub(crate) fn resume(
    store: &dyn Storage,
    live: Arc<ProcessBucket>,
    target: UploadTarget,
    key: &Key,
    state_target: UploadTarget,
    from: SyncPoint,
) -> Result<S3Upload> {
    let mut state = read(store, key)?;
    keep_synced_parts(&mut state.parts, &state_target.name, from)?;
    let server_parts = match &state.upload {
        Some(id) => parts_of(&live, &target, id)?,
        None => None,
    };
    log_other_uploads(&live, &target, state.upload.as_deref());
    match &server_parts {
        Some(server_parts) => compare(&state, server_parts, &target)?,
        // Completed, or aborted.
        None if state.upload.is_some() => match head(&live, &target.path, &target.name)? {
            Some(head) if head.metadata().and_then(|m| m.get(MARK)) == Some(&state.mark) => {
                return Err(Error::NotFound { object: state_target.name });
            }
            Some(_) => return Err(Error::Exists { object: target.name }),
            None if from.bytes > 0 => return Err(missing_upload(&state, &target)),
            None => state.upload = None,
        },
        None => {}
    }
    let mut upload = S3Upload::new(live, target, 0);
    upload.make_resumable(state_target);
    upload.resume_after(state, from);
    Ok(upload)
}

/// Aborts the multipart upload, then deletes the state object.
pub(crate) fn discard(
    store: &dyn Storage,
    live: &ProcessBucket,
    target: &UploadTarget,
    key: &Key,
) -> Result<()> {
    let state = match read(store, key) {
        Err(Error::NotFound { .. }) => return Ok(()),
        // An unreadable record names no upload; a lifecycle rule aborts it.
        Err(Error::Corrupt { .. }) => UploadRecord::default(),
        state => state?,
    };
    if let Some(id) = &state.upload {
        match live.runtime.block_on(put::abort(live, target, id)) {
            Ok(()) | Err(Error::NotFound { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    store.delete(key)
}

/// Overwrites the state object.
pub(crate) fn write(
    live: &ProcessBucket,
    target: &UploadTarget,
    state: &UploadRecord,
) -> Result<()> {
    put::replace(live, &target.path, &target.name, &to_bytes(&target.name, state)?)
}

fn to_bytes(name: &str, state: &UploadRecord) -> Result<Vec<u8>> {
    serde_json::to_vec(state).map_err(|e| Error::from_io("write", name, e.into()))
}

fn read(store: &dyn Storage, key: &Key) -> Result<UploadRecord> {
    let bytes = read_small(store, key, STATE_BYTES_MAX)?;
    serde_json::from_slice(&bytes).map_err(|e| {
        let (object, expected) = (store.display(key), "the state of a resumable upload".to_owned());
        Error::Corrupt { object, offset: 0, found: e.to_string(), expected }
    })
}

/// Keeps the parts before a sync point, which must be at the end of a part and match their
/// checksum.
fn keep_synced_parts(parts: &mut Vec<UploadedPart>, name: &str, from: SyncPoint) -> Result<()> {
    let (mut found_point, mut count) = (SyncPoint::default(), 0);
    for (nth, part) in (1..).zip(parts.iter()) {
        if found_point.bytes >= from.bytes || part.number != nth {
            break;
        }
        found_point.crc64 = crc64_join(found_point.crc64, part.crc64, part.bytes);
        found_point.bytes = found_point.bytes.saturating_add(part.bytes);
        count += 1;
    }
    if found_point != from {
        let describe =
            |point: SyncPoint| format!("{} bytes with CRC-64 {:016x}", point.bytes, point.crc64);
        let (object, offset) = (name.to_owned(), found_point.bytes.min(from.bytes));
        let (found, expected) = (
            format!("parts with {}", describe(found_point)),
            format!("the synced {}", describe(from)),
        );
        return Err(Error::Corrupt { object, offset, found, expected });
    }
    parts.truncate(count);
    Ok(())
}

/// The parts that the server has; `None` if it does not know the upload.
fn parts_of(
    live: &ProcessBucket,
    target: &UploadTarget,
    id: &str,
) -> Result<Option<HashMap<i32, (String, u64)>>> {
    let mut parts = HashMap::new();
    let mut next: Option<String> = None;
    loop {
        let after = &next;
        let attempt = || async move {
            let list = live.clients().usual.list_parts().bucket(&live.bucket).key(&target.path);
            let list = list.upload_id(id).set_part_number_marker(after.clone());
            list.send().await.map_err(AttemptError::of)
        };
        let page = match live.runtime.block_on(live.with_retries(
            "list the parts of",
            &target.name,
            attempt,
        )) {
            Err(Error::NotFound { .. }) => return Ok(None),
            page => page?,
        };
        for part in page.parts() {
            let bytes = part.size().and_then(|size| u64::try_from(size).ok()).unwrap_or(0);
            let etag = unquoted(part.e_tag()).to_owned();
            if let Some(number) = part.part_number() {
                parts.insert(number, (etag, bytes));
            }
        }
        let following = page.next_part_number_marker().map(str::to_owned);
        if page.is_truncated() != Some(true) || following.is_none() || following == next {
            return Ok(Some(parts));
        }
        next = following;
    }
}

fn compare(
    state: &UploadRecord,
    server_parts: &HashMap<i32, (String, u64)>,
    target: &UploadTarget,
) -> Result<()> {
    let mut offset = 0;
    for part in &state.parts {
        let expected = (unquoted(part.etag.as_deref()), part.bytes);
        let found = server_parts.get(&part.number).map(|(etag, bytes)| (etag.as_str(), *bytes));
        if found != Some(expected) {
            let describe = |(etag, bytes): (&str, u64)| {
                format!("part {} of {bytes} bytes with ETag {etag}", part.number)
            };
            return Err(Error::Corrupt {
                object: target.name.clone(),
                offset,
                found: found.map_or_else(|| format!("no part {}", part.number), describe),
                expected: describe(expected),
            });
        }
        offset += part.bytes;
    }
    Ok(())
}

fn missing_upload(state: &UploadRecord, target: &UploadTarget) -> Error {
    let id = state.upload.as_deref().unwrap_or("");
    Error::Corrupt {
        object: target.name.clone(),
        offset: 0,
        found: format!("no multipart upload {id} (a lifecycle rule may have aborted it)"),
        expected: format!("{} parts of an unfinished upload", state.parts.len()),
    }
}

/// Logs other unfinished uploads of this object: they cost space, and whether their writers are
/// still running is unknown.
fn log_other_uploads(live: &ProcessBucket, target: &UploadTarget, own_id: Option<&str>) {
    let attempt = || async {
        let list = live.clients().usual.list_multipart_uploads().bucket(&live.bucket);
        list.prefix(&target.path).send().await.map_err(AttemptError::of)
    };
    match live.runtime.block_on(live.with_retries(
        "list the multipart uploads of",
        &target.name,
        attempt,
    )) {
        Err(error) => log::info!("unfinished uploads not reported: {error}"),
        Ok(page) => {
            let same = |key: Option<&str>| key == Some(target.path.as_str());
            for other in page.uploads().iter().filter(|upload| same(upload.key())) {
                if other.upload_id() != own_id {
                    log::warn!(
                        "{}: multipart upload {} is unfinished; its parts use space until it is \
                         completed or aborted",
                        target.name,
                        other.upload_id().unwrap_or("without id")
                    );
                }
            }
        }
    }
}

/// Some servers quote the ETag in some responses only.
fn unquoted(etag: Option<&str>) -> &str {
    etag.unwrap_or("").trim_matches('"')
}

impl ResumableUpload for S3Upload {
    fn sync(&mut self) -> Result<SyncPoint> {
        self.sync_parts()
    }
}
