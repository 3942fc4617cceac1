//! A complete object: looked up once, read in exact ranges.

use std::sync::Arc;

use aws_sdk_s3::operation::head_object::HeadObjectOutput;
use futures_util::StreamExt as _;
use futures_util::stream;

use super::attempt_error::AttemptError;
use super::bucket::{Bucket, ProcessBucket};
use super::get::{self, Opened, PIECE_BYTES};
use crate::base::pending_call::PendingCall;
use crate::s3::local_copy::map_copy;
use crate::{Error, Map, Object, RangeRead, RemoteErrorKind, Result};

/// Queries an object; `None` if it or its bucket does not exist.
pub(crate) fn head(
    live: &ProcessBucket,
    path: &str,
    name: &str,
) -> Result<Option<HeadObjectOutput>> {
    let attempt = || async {
        let request = live.clients().usual.head_object().bucket(&live.bucket).key(path);
        match request.send().await.map_err(AttemptError::of) {
            Ok(head) => Ok(Some(head)),
            Err(failed) if failed.is_absent() => Ok(None),
            // A HEAD response has no body and so no error code: the same query as a GET has both.
            Err(failed) if (300..500).contains(&failed.status) => {
                Err(get_error(live, path).await.unwrap_or(failed))
            }
            Err(failed) => Err(failed),
        }
    };
    live.runtime.block_on(live.with_retries("check", name, attempt))
}

/// The error of a GET, where HEAD has no error code.
async fn get_error(live: &ProcessBucket, path: &str) -> Option<AttemptError> {
    let get = live.clients().usual.get_object().bucket(&live.bucket).key(path).range("bytes=0-0");
    get.send().await.err().map(AttemptError::of)
}

/// Opens an object, with a precise error.
pub(crate) fn open(live: &ProcessBucket, path: String, name: String) -> Result<Opened> {
    let Some(head) = head(live, &path, &name)? else {
        // Otherwise a missing bucket would be reported as a missing object.
        let attempt = || async { get_error(live, &path).await.map_or(Ok(()), Err) };
        live.runtime.block_on(live.with_retries("open", &name, attempt))?;
        return Err(Error::NotFound { object: name });
    };
    let len_bytes = head.content_length().and_then(|len| u64::try_from(len).ok());
    let (Some(len_bytes), Some(etag)) = (len_bytes, head.e_tag()) else {
        let expected = "a length and an ETag".to_owned();
        let found = format!("length {:?} and ETag {:?}", head.content_length(), head.e_tag());
        return Err(Error::Corrupt { object: name, offset: 0, found, expected });
    };
    Ok(Opened { path, name, len_bytes, etag: etag.to_owned() })
}

/// An open object.
#[derive(Debug)]
pub(crate) struct S3Object {
    bucket: Arc<Bucket>,
    pub(crate) opened: Arc<Opened>,
}

impl S3Object {
    pub(crate) fn new(bucket: &Arc<Bucket>, opened: Opened) -> Self {
        S3Object { bucket: Arc::clone(bucket), opened: Arc::new(opened) }
    }

    pub(crate) fn live(&self) -> Result<Arc<ProcessBucket>> {
        self.bucket.live()
    }
}

impl Opened {
    /// Refuses a read past the end.
    pub(crate) fn check(&self, offset: u64, len: usize) -> Result<()> {
        let expected = len as u64;
        let found = self.len_bytes.saturating_sub(offset).min(expected);
        if found == expected {
            return Ok(());
        }
        let (object, len_bytes) = (self.name.clone(), self.len_bytes);
        Err(Error::ShortRead { object, offset, found, expected, len_bytes })
    }
}

impl Object for S3Object {
    fn len_bytes(&self) -> u64 {
        self.opened.len_bytes
    }

    fn read_many(&self, reads: &mut [RangeRead<'_>]) -> Result<()> {
        let opened = &*self.opened;
        for read in &*reads {
            opened.check(read.offset, read.buf.len())?;
        }
        let live = self.bucket.live()?;
        let live = &*live;
        let _call = PendingCall::start("read", &*opened.name);
        let fills = reads.iter_mut().flat_map(|read| {
            let first = read.offset;
            let pieces = read.buf.chunks_mut(PIECE_BYTES).enumerate();
            pieces.map(move |(i, piece)| {
                get::fill(live, opened, first + (i * PIECE_BYTES) as u64, piece, None)
            })
        });
        // As many as may be in flight: more would take kilobytes of memory for each range of a long
        // read.
        let mut fills = stream::iter(fills).buffer_unordered(live.options.depth);
        live.runtime.block_on(async {
            while let Some((_, outcome)) = fills.next().await {
                outcome?;
            }
            Ok(())
        })
    }

    fn map(&self) -> Result<Map> {
        map_copy(self)
    }

    fn display(&self) -> String {
        self.opened.name.clone()
    }

    fn version(&self) -> Option<String> {
        Some(format!("ETag {}", self.opened.etag))
    }

    fn as_any(&self) -> Option<&dyn std::any::Any> {
        Some(self)
    }
}

/// Whether an error means that another upload took the name first.
pub(crate) fn is_taken(failed: &AttemptError) -> bool {
    failed.is_unmet() && failed.cause == RemoteErrorKind::Replaced
}
