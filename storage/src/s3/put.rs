//! Uploads. An object that fits into one part is one request, sent by `finish`; a larger one is a
//! multipart upload, with a few parts in flight while the next one fills.
//!
//! Nothing is overwritten: the last request carries `If-None-Match: *`. AWS honours that for both
//! kinds. Ceph RGW honours it for single requests and ignores it for multipart uploads, so the name
//! is also checked before and after; if two writers finish the same large object within the same
//! milliseconds, neither notices, and the later one wins.
//!
//! A resumable upload is the same, but survives a drop: see `resumable`.
//!
//! A response may be lost although the request succeeded. So every object carries a mark of its
//! upload, by which a writer that finds the name taken recognises its own object.

use std::sync::Arc;
use std::time::Duration;

use aws_sdk_s3::operation::create_multipart_upload::CreateMultipartUploadOutput;
use aws_sdk_s3::primitives::{ByteStream, SdkBody};
use aws_sdk_s3::types::{CompletedMultipartUpload, CompletedPart};
use tokio::task::JoinSet;

use super::attempt_error::AttemptError;
use super::bucket::{ProcessBucket, Tries};
use super::list;
use super::object::{head, is_taken};
use super::resumable::{self, UploadRecord, UploadedPart};
use crate::base::pending_call::PendingCall;
use crate::base::rng::Rng;
use crate::{Crc64, Error, FileEntry, Result, SyncPoint, Upload, crc64_join};

/// Smaller parts cost requests, larger ones memory.
const PART_BYTES_MIN: u64 = 16 << 20;

/// The limit of S3.
const PARTS_MAX: u64 = 10_000;

/// Parts in flight have at most this many bytes together, unless it is only one. With the part
/// being filled, an upload takes 80 MiB.
const IN_FLIGHT_BYTES_MAX: u64 = 64 << 20;

/// In an upload of unknown length, the part size doubles after this many parts: 10,000 parts then
/// make 5 TB, which is the largest object that S3 has.
const PARTS_PER_DOUBLING: u64 = 1250;

/// Metadata key of the mark of an object's upload.
pub(crate) const MARK: &str = "feedline-upload";

/// The longest that a dropped upload waits for its abort.
const ABORT_MAX: Duration = Duration::from_secs(10);

/// The object being written.
#[derive(Clone, Debug)]
pub(crate) struct UploadTarget {
    pub(crate) path: String,
    pub(crate) name: String,
    pub(crate) file_name: String,
}

/// An upload.
#[derive(Debug)]
pub(crate) struct S3Upload {
    live: Arc<ProcessBucket>,
    target: UploadTarget,
    mark: String,
    len_bytes_max: u64,
    len_bytes: u64,
    /// Sync point up to which bytes were sent in parts.
    sent: SyncPoint,
    /// The part being filled, and its checksum.
    part: Vec<u8>,
    part_sum: Crc64,
    multipart: Option<Multipart>,
    /// The state object of a resumable upload.
    draft: Option<UploadTarget>,
    first_failure: Option<String>,
}

#[derive(Debug)]
struct Multipart {
    id: String,
    started: u64,
    in_flight: JoinSet<Result<UploadedPart>>,
    parts: Vec<UploadedPart>,
}

/// Overwrites a small object.
pub(crate) fn replace(live: &ProcessBucket, path: &str, name: &str, bytes: &[u8]) -> Result<()> {
    let attempt = || async {
        let body = ByteStream::from(bytes.to_vec());
        let put = live.clients().usual.put_object().bucket(&live.bucket).key(path).body(body);
        put.send().await.map(drop).map_err(AttemptError::of)
    };
    live.runtime.block_on(live.with_retries("replace", name, attempt))
}

/// The size of the part with this number, counted from 0.
fn part_bytes(len_bytes_max: u64, number: u64) -> u64 {
    if len_bytes_max == 0 {
        return PART_BYTES_MIN << (number / PARTS_PER_DOUBLING).min(7);
    }
    let least = len_bytes_max.div_ceil(PARTS_MAX).next_multiple_of(1 << 20);
    least.max(PART_BYTES_MIN)
}

impl S3Upload {
    pub(crate) fn new(live: Arc<ProcessBucket>, target: UploadTarget, len_bytes_max: u64) -> Self {
        S3Upload {
            live,
            target,
            mark: format!("{:016x}", Rng::from_entropy().next()),
            len_bytes_max,
            len_bytes: 0,
            sent: SyncPoint::default(),
            part: Vec::new(),
            part_sum: Crc64::new(),
            multipart: None,
            draft: None,
            first_failure: None,
        }
    }

    pub(crate) fn mark(&self) -> &str {
        &self.mark
    }

    /// Makes it resumable: it is not aborted when dropped.
    pub(crate) fn make_resumable(&mut self, state: UploadTarget) {
        self.draft = Some(state);
    }

    /// Continues after the parts of another process.
    pub(crate) fn resume_after(&mut self, state: UploadRecord, from: SyncPoint) {
        let UploadRecord { upload, mark, parts } = state;
        (self.mark, self.sent, self.len_bytes) = (mark, from, from.bytes);
        let started = parts.len() as u64;
        self.multipart =
            upload.map(|id| Multipart { id, started, in_flight: JoinSet::new(), parts });
    }

    /// Checksum of all bytes so far.
    fn crc64(&self) -> u64 {
        let SyncPoint { bytes, crc64 } = self.sent;
        crc64_join(crc64, self.part_sum.value(), self.len_bytes - bytes)
    }

    /// Waits for the parts sent, and records them in the state object.
    pub(crate) fn sync_parts(&mut self) -> Result<SyncPoint> {
        self.write(&[])?;
        let synced = self.wait_for_parts().and_then(|()| self.write_state());
        self.record_failure(synced)?;
        Ok(self.sent)
    }

    fn write_state(&mut self) -> Result<()> {
        let (Some(target), Some(multipart)) = (&self.draft, &mut self.multipart) else {
            return Ok(());
        };
        multipart.parts.sort_by_key(|part| part.number);
        let (upload, parts) = (Some(multipart.id.clone()), multipart.parts.clone());
        resumable::write(
            &self.live,
            target,
            &UploadRecord { upload, mark: self.mark.clone(), parts },
        )
    }

    fn wait_for_parts(&mut self) -> Result<()> {
        while let Some(multipart) = &mut self.multipart
            && !multipart.in_flight.is_empty()
        {
            multipart.wait_for_one(&self.live, &self.target.name)?;
        }
        Ok(())
    }

    /// Records a failure, after which every later call fails.
    fn record_failure<T>(&mut self, outcome: Result<T>) -> Result<T> {
        outcome.inspect_err(|e| self.first_failure = Some(e.to_string()))
    }

    fn append(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let started = self.multipart.as_ref().map_or(0, |multipart| multipart.started);
            let room = part_bytes(self.len_bytes_max, started) - self.part.len() as u64;
            if room == 0 {
                self.send_part()?;
                continue;
            }
            let (now, later) = bytes.split_at(bytes.len().min(room as usize)); // fits: 2 GiB
            self.part.extend_from_slice(now);
            self.part_sum.update(now);
            self.len_bytes += now.len() as u64;
            bytes = later;
        }
        Ok(())
    }

    /// Sends the part, after waiting until another may be in flight.
    fn send_part(&mut self) -> Result<()> {
        if self.multipart.is_none() {
            self.multipart = Some(start_multipart(&self.live, &self.target, &self.mark)?);
            let recorded = self.write_state();
            if recorded.is_err() {
                self.draft = None; // it cannot be resumed, so it is aborted
            }
            recorded?;
        }
        let (live, target) = (&self.live, &self.target);
        let multipart = self.multipart.as_mut().expect("started above");
        if multipart.started == PARTS_MAX {
            let why = format!("all {PARTS_MAX} parts are full; no length was given at creation");
            let source = std::io::Error::other(why);
            return Err(Error::Io {
                operation: "write".into(),
                object: target.name.clone(),
                source,
            });
        }
        let in_flight_max = (IN_FLIGHT_BYTES_MAX / self.part.len() as u64).max(1);
        while multipart.in_flight.len() as u64 >= in_flight_max {
            multipart.wait_for_one(live, &target.name)?;
        }
        multipart.started += 1;
        let number = multipart.started as i32; // fits: at most PARTS_MAX
        // The next part is as large, except where the size doubles.
        let next = Vec::with_capacity(self.part.len());
        let bytes = self.part.len() as u64;
        let body = SdkBody::from(std::mem::replace(&mut self.part, next));
        let crc64 = std::mem::take(&mut self.part_sum).value();
        let SyncPoint { bytes: before, crc64: crc_before } = self.sent;
        self.sent =
            SyncPoint { bytes: before + bytes, crc64: crc64_join(crc_before, crc64, bytes) };
        let part = UploadedPart { number, etag: None, bytes, crc64 };
        let sent = send(Arc::clone(live), target.clone(), multipart.id.clone(), part, body);
        multipart.in_flight.spawn_on(sent, live.runtime.handle());
        Ok(())
    }

    /// Makes the object visible, unless its name is taken. Returns whether the object is this
    /// upload.
    fn make_visible(&mut self) -> Result<bool> {
        let Some(mut multipart) = self.multipart.take() else {
            let body = SdkBody::from(std::mem::take(&mut self.part));
            return self.live.runtime.block_on(self.put(body));
        };
        let completed = self.finish_parts(&mut multipart);
        if !matches!(completed, Ok(true)) {
            self.multipart = Some(multipart); // to be aborted
        }
        completed
    }

    fn finish_parts(&self, multipart: &mut Multipart) -> Result<bool> {
        while !multipart.in_flight.is_empty() {
            multipart.wait_for_one(&self.live, &self.target.name)?;
        }
        if head(&self.live, &self.target.path, &self.target.name)?.is_some() {
            return Ok(false);
        }
        multipart.parts.sort_by_key(|part| part.number);
        let completed = multipart.parts.iter().map(|part| {
            let completed = CompletedPart::builder().part_number(part.number);
            completed.set_e_tag(part.etag.clone()).build()
        });
        let parts =
            CompletedMultipartUpload::builder().set_parts(Some(completed.collect())).build();
        self.live.runtime.block_on(self.complete(&multipart.id, parts))
    }

    async fn put(&self, body: SdkBody) -> Result<bool> {
        let max = self.live.response_timeout(body.bytes().map_or(0, <[u8]>::len));
        let attempt = || async {
            let body = ByteStream::new(body.try_clone().expect("bytes in memory"));
            let put = self.live.clients().usual.put_object().bucket(&self.live.bucket);
            let put = put.key(&self.target.path).metadata(MARK, &self.mark).body(body);
            put.if_none_match("*").send().await.map(drop).map_err(AttemptError::of)
        };
        self.commit(max, attempt).await
    }

    async fn complete(&self, id: &str, parts: CompletedMultipartUpload) -> Result<bool> {
        // Servers join the parts during this request: AWS says that it may take minutes.
        let max = self.live.response_timeout(0) + Duration::from_secs(120);
        let attempt = || async {
            let complete = self.live.clients().usual.complete_multipart_upload();
            let complete = complete.bucket(&self.live.bucket).key(&self.target.path).upload_id(id);
            let complete = complete.multipart_upload(parts.clone()).if_none_match("*");
            complete.send().await.map(drop).map_err(AttemptError::of)
        };
        self.commit(max, attempt).await
    }

    /// Sends the request that makes the object visible, until its outcome is known.
    async fn commit<Attempt>(
        &self,
        max: Duration,
        mut attempt: impl FnMut() -> Attempt,
    ) -> Result<bool>
    where
        Attempt: Future<Output = std::result::Result<(), AttemptError>>,
    {
        let _call = PendingCall::start("write", &*self.target.name);
        let (mut tries, mut unsure) = (Tries::default(), false);
        loop {
            let failed = match self.live.once(&mut tries, max, attempt()).await {
                Ok(()) => return Ok(true),
                Err(failed) => failed,
            };
            unsure |= failed.is_ambiguous();
            // The name is taken, or the upload no longer exists because it was completed.
            if is_taken(&failed) || failed.is_absent() {
                let is_this = if unsure { self.is_this_upload().await? } else { None };
                return match is_this {
                    Some(is_this) => Ok(is_this),
                    None if is_taken(&failed) => Ok(false),
                    None => Err(tries.error("write", &self.target.name, failed)),
                };
            }
            if let Err(failed) = tries.wait_for_retry(&self.live, failed).await {
                let is_this = if unsure { self.is_this_upload().await } else { Ok(None) };
                let failed = || tries.error("write", &self.target.name, failed);
                return is_this.ok().flatten().ok_or_else(failed);
            }
        }
    }

    /// Whether the object at this name is this upload; `None` if there is none.
    async fn is_this_upload(&self) -> Result<Option<bool>> {
        let attempt = || async {
            let head = self.live.clients().usual.head_object().bucket(&self.live.bucket);
            match head.key(&self.target.path).send().await.map_err(AttemptError::of) {
                Ok(head) => {
                    let mark = head.metadata().and_then(|metadata| metadata.get(MARK));
                    let len = head.content_length().and_then(|len| u64::try_from(len).ok());
                    Ok(Some(mark == Some(&self.mark) && len == Some(self.len_bytes)))
                }
                Err(failed) if failed.is_absent() => Ok(None),
                Err(failed) => Err(failed),
            }
        };
        self.live.with_retries("check", &self.target.name, attempt).await
    }

    /// Finishes; after a failure there are parts to abort.
    fn finish_inner(&mut self) -> Result<FileEntry> {
        if self.multipart.is_some() && !self.part.is_empty() {
            self.send_part()?;
        }
        let in_parts = self.multipart.is_some();
        let taken = Error::Exists { object: self.target.name.clone() };
        if !self.make_visible()? {
            return Err(taken);
        }
        // A server that ignored the condition may have let another writer's object replace this
        // one.
        if in_parts && self.live.runtime.block_on(self.is_this_upload())? != Some(true) {
            return Err(taken);
        }
        let (path, bytes) = (self.target.file_name.clone(), self.len_bytes);
        Ok(FileEntry { path, bytes, crc64: self.crc64() })
    }
}

impl Upload for S3Upload {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        if let Some(first) = &self.first_failure {
            let (object, first) = (self.target.name.clone(), first.clone());
            return Err(Error::Poisoned { object, first });
        }
        let written = self.append(bytes);
        self.record_failure(written)
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn flush(&mut self) -> Result<()> {
        self.write(&[])?;
        let in_parts = self.multipart.is_some() || self.draft.is_some();
        let sent = if in_parts && !self.part.is_empty() { self.send_part() } else { Ok(()) };
        let flushed = sent.and_then(|()| self.wait_for_parts());
        self.record_failure(flushed)
    }

    fn finish(mut self: Box<Self>) -> Result<FileEntry> {
        self.write(&[])?;
        let entry = self.finish_inner()?;
        if let Some(state) = self.draft.take()
            && let Err(error) = list::delete(&self.live, &[state.path], &state.name)
        {
            log::warn!("state of a finished upload not deleted: {error}");
        }
        Ok(entry)
    }
}

impl Drop for S3Upload {
    fn drop(&mut self) {
        let Some(mut multipart) = self.multipart.take() else { return };
        // A resumable upload is kept; in a forked child, the upload belongs to the parent.
        if self.draft.is_some() || !self.live.is_in_this_process() {
            return;
        }
        let aborted = self.live.runtime.block_on(async {
            // A part that arrives after the abort would stay.
            multipart.in_flight.shutdown().await;
            let abort = abort(&self.live, &self.target, &multipart.id);
            tokio::time::timeout(ABORT_MAX, abort).await
        });
        let why = match aborted {
            Ok(Ok(()) | Err(Error::NotFound { .. })) => return,
            Ok(Err(e)) => e.to_string(),
            Err(_) => format!("no response within {ABORT_MAX:?}"),
        };
        log::warn!(
            "{}: parts of an unfinished upload not deleted; they use space: {why} (hint: set a \
             lifecycle rule AbortIncompleteMultipartUpload)",
            self.target.name
        );
    }
}

impl Multipart {
    fn wait_for_one(&mut self, live: &ProcessBucket, name: &str) -> Result<()> {
        let _call = PendingCall::start("write", name);
        match live.runtime.block_on(self.in_flight.join_next()) {
            None => Ok(()),
            Some(Ok(part)) => part.map(|part| self.parts.push(part)),
            Some(Err(e)) => Err(Error::from_io("write", name, std::io::Error::other(e))),
        }
    }
}

fn start_multipart(
    live: &Arc<ProcessBucket>,
    target: &UploadTarget,
    mark: &str,
) -> Result<Multipart> {
    let attempt = || async {
        let create = live.clients().usual.create_multipart_upload().bucket(&live.bucket);
        create.key(&target.path).metadata(MARK, mark).send().await.map_err(AttemptError::of)
    };
    let output = live.runtime.block_on(live.with_retries(
        "start a multipart upload of",
        &target.name,
        attempt,
    ))?;
    let id = CreateMultipartUploadOutput::upload_id(&output).ok_or_else(|| Error::Corrupt {
        object: target.name.clone(),
        offset: 0,
        found: "a response without an upload id".to_owned(),
        expected: "an upload id".to_owned(),
    })?;
    let (id, parts) = (id.to_owned(), Vec::new());
    Ok(Multipart { id, started: 0, in_flight: JoinSet::new(), parts })
}

/// Aborts a multipart upload.
pub(crate) async fn abort(live: &ProcessBucket, target: &UploadTarget, id: &str) -> Result<()> {
    let attempt = || async {
        let abort = live.clients().usual.abort_multipart_upload().bucket(&live.bucket);
        let abort = abort.key(&target.path).upload_id(id);
        abort.send().await.map(drop).map_err(AttemptError::of)
    };
    live.with_retries("abort a multipart upload of", &target.name, attempt).await
}

/// Sends one part, with retries. A part sent twice is the same part.
async fn send(
    live: Arc<ProcessBucket>,
    target: UploadTarget,
    id: String,
    part: UploadedPart,
    body: SdkBody,
) -> Result<UploadedPart> {
    let max = live.response_timeout(body.bytes().map_or(0, <[u8]>::len));
    let mut tries = Tries::default();
    loop {
        let bytes = ByteStream::new(body.try_clone().expect("bytes in memory"));
        let upload = live.clients().usual.upload_part().bucket(&live.bucket).key(&target.path);
        let sent = upload.upload_id(&id).part_number(part.number).body(bytes).send();
        match live.once(&mut tries, max, async { sent.await.map_err(AttemptError::of) }).await {
            Ok(sent) => {
                let etag = sent.e_tag().map(str::to_owned);
                return Ok(UploadedPart { etag, ..part });
            }
            Err(failed) => {
                let retry = tries.wait_for_retry(&live, failed).await;
                retry.map_err(|failed| tries.error("upload a part of", &target.name, failed))?;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn part_sizes_are_within_the_limits_of_s3() {
        const GIB: u64 = 1 << 30;
        for len in [1, 16 << 20, 17 << 20, 100 * GIB, 5000 * GIB] {
            let part = part_bytes(len, 0);
            assert!((PART_BYTES_MIN..=5 * GIB).contains(&part));
            assert!(part * PARTS_MAX >= len, "{len} bytes in parts of {part}");
        }
        assert_eq!(part_bytes(1000 * GIB, 0), 103 << 20);
        let all: u64 = (0..PARTS_MAX).map(|number| part_bytes(0, number)).sum();
        assert!(all >= 4900 * GIB && part_bytes(0, PARTS_MAX - 1) <= 5 * GIB);
    }
}
