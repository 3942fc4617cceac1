//! Tests which operations a bucket allows, and which guarantees of S3 it keeps, with one object
//! that is deleted afterwards.

use std::future::Future;
use std::time::{SystemTime, UNIX_EPOCH};

use aws_sdk_s3::error::SdkError;
use aws_sdk_s3::primitives::{AggregatedBytes, ByteStream};
use aws_sdk_s3::types::{CompletedMultipartUpload, CompletedPart};
use aws_smithy_types::DateTime;
use aws_smithy_types::date_time::Format;

use super::attempt_error::AttemptError;
use super::bucket::{Bucket, ProcessBucket, Tries};
use super::location::Address;
use crate::probe::{BucketInfo, ProbeDepth};
use crate::{Error, Key, Location, ProcessIdentity, RemoteErrorKind, Result};

/// The bytes written, and the range read back.
const BYTES: &[u8] = b"feedline doctor was here";

/// A wrong CRC-64/NVME of them.
const WRONG_CRC64: &str = "AAAAAAAAAAA=";

pub(crate) fn examine(
    url: &str,
    depth: ProbeDepth,
    announce: &dyn Fn(&'static str),
) -> Result<BucketInfo> {
    let Address { bucket, prefix, options } = Address::parse(&Location::new(url))?;
    let name = prefix.join(&format!(".tmp-doctor-{}", ProcessIdentity::new()))?;
    let live = Bucket::of(&bucket, &options).live()?;
    let object = format!("s3://{bucket}/{name}");
    let probe = Probe { live: &live, key: &name, object: &object, announce };
    Ok(live.runtime.block_on(probe.run(depth)))
}

struct Probe<'a> {
    live: &'a ProcessBucket,
    key: &'a Key,
    object: &'a str,
    announce: &'a dyn Fn(&'static str),
}

impl Probe<'_> {
    async fn run(&self, depth: ProbeDepth) -> BucketInfo {
        let mut facts =
            BucketInfo { endpoint: self.live.clients().endpoint.clone(), ..BucketInfo::default() };
        (self.announce)("check an absent object");
        facts.clock_ahead_s = self.clock().await;
        let listed = self.list().await;
        let is_unreachable = listed.as_ref().is_err_and(is_unreachable);
        facts.tried.push(("list", listed));
        if depth == ProbeDepth::Look || is_unreachable {
            return facts;
        }
        let put = self.put(false, None).await;
        let is_written = put.is_ok();
        facts.tried.push(("put", put));
        if is_written {
            facts.tried.push(("get", self.get(None, BYTES).await));
            facts.tried.push(("get a range", self.get(Some("bytes=3-6"), &BYTES[3..7]).await));
            facts.conditional_put = refuses(&self.put(true, None).await);
            (facts.multipart, facts.conditional_complete) = self.multipart().await;
            facts.checks_sums = refuses(&self.put(false, Some(WRONG_CRC64)).await);
            facts.tried.push(("delete", self.delete().await));
        }
        facts.aborts_parts = self.lifecycle_rule().await;
        facts
    }

    async fn attempt<T>(
        &self,
        operation: &'static str,
        request: impl Future<Output = std::result::Result<T, AttemptError>>,
    ) -> Result<T> {
        (self.announce)(operation);
        let mut tries = Tries::default();
        let outcome = self.live.once(&mut tries, self.live.response_timeout(0), request).await;
        outcome.map_err(|failed| tries.error(operation, self.object, failed))
    }

    /// Seconds that the server's clock is ahead of this machine's, by the date of a response.
    async fn clock(&self) -> Option<i64> {
        let head = self.live.clients().usual.head_object().bucket(&self.live.bucket);
        let request = head.key(self.key.as_str()).send();
        let response = tokio::time::timeout(self.live.options.stall, request).await.ok()?;
        let Err(SdkError::ServiceError(response)) = response else { return None };
        let date = response.raw().headers().get("date")?;
        let server_s = DateTime::from_str(date, Format::HttpDate).ok()?.secs();
        let local_s = SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_secs();
        Some(server_s - i64::try_from(local_s).ok()?)
    }

    async fn list(&self) -> Result<()> {
        let list = self.live.clients().usual.list_objects_v2().bucket(&self.live.bucket);
        let request = list.prefix(self.key.as_str()).max_keys(1).send();
        self.attempt("list", async { request.await.map(drop).map_err(AttemptError::of) }).await
    }

    async fn put(&self, only_new: bool, crc64: Option<&str>) -> Result<()> {
        let put = self.live.clients().usual.put_object().bucket(&self.live.bucket);
        let put = put.key(self.key.as_str()).body(ByteStream::from_static(BYTES));
        let put = put.set_if_none_match(only_new.then(|| "*".to_owned()));
        let request = put.set_checksum_crc64_nvme(crc64.map(str::to_owned)).send();
        self.attempt("write", async { request.await.map(drop).map_err(AttemptError::of) }).await
    }

    async fn get(&self, range: Option<&str>, expected: &[u8]) -> Result<()> {
        let get = self.live.clients().usual.get_object().bucket(&self.live.bucket);
        let request = get.key(self.key.as_str()).set_range(range.map(str::to_owned)).send();
        let found = self.attempt("read", async {
            let body = request.await.map_err(AttemptError::of)?.body.collect().await;
            body.map(AggregatedBytes::into_bytes).map_err(|e| AttemptError::of_body(&e))
        });
        let found = found.await?;
        if found == expected {
            return Ok(());
        }
        let (found, expected) = (
            format!("{} other bytes", found.len()),
            format!("the {} bytes written", expected.len()),
        );
        Err(Error::Corrupt { object: self.object.to_owned(), offset: 0, found, expected })
    }

    async fn delete(&self) -> Result<()> {
        let delete = self.live.clients().usual.delete_object().bucket(&self.live.bucket);
        let request = delete.key(self.key.as_str()).send();
        self.attempt("delete", async { request.await.map(drop).map_err(AttemptError::of) }).await
    }

    /// Whether multipart uploads work, and whether a taken name refuses one.
    async fn multipart(&self) -> (Option<String>, Option<bool>) {
        let create = self.live.clients().usual.create_multipart_upload().bucket(&self.live.bucket);
        let request = create.key(self.key.as_str()).send();
        let created = self.attempt("start a multipart upload of", async {
            request.await.map_err(AttemptError::of)
        });
        let id = match created.await {
            Ok(created) => created.upload_id().unwrap_or_default().to_owned(),
            Err(error) => return (Some(error.to_string()), None),
        };
        let outcome = self.upload_and_complete(&id).await;
        let refused = refuses(&outcome);
        if refused != Some(false) {
            let abort = self.live.clients().usual.abort_multipart_upload();
            let abort = abort.bucket(&self.live.bucket).key(self.key.as_str()).upload_id(&id);
            let request = abort.send();
            let aborted = self
                .attempt("abort a multipart upload of", async {
                    request.await.map(drop).map_err(AttemptError::of)
                })
                .await;
            if let Err(error) = aborted {
                return (Some(error.to_string()), refused);
            }
        }
        (outcome.err().filter(|_| refused.is_none()).map(|error| error.to_string()), refused)
    }

    /// Completes an upload at a taken name, on the condition that it is free.
    async fn upload_and_complete(&self, id: &str) -> Result<()> {
        let part = self.live.clients().usual.upload_part().bucket(&self.live.bucket);
        let part = part.key(self.key.as_str()).upload_id(id).part_number(1);
        let request = part.body(ByteStream::from_static(BYTES)).send();
        let sent = self
            .attempt("upload a part of", async { request.await.map_err(AttemptError::of) })
            .await?;
        let part = CompletedPart::builder().part_number(1);
        let part = part.set_e_tag(sent.e_tag().map(str::to_owned)).build();
        let complete = self.live.clients().usual.complete_multipart_upload();
        let complete = complete.bucket(&self.live.bucket).key(self.key.as_str()).upload_id(id);
        let complete = complete
            .if_none_match("*")
            .multipart_upload(CompletedMultipartUpload::builder().parts(part).build());
        let request = complete.send();
        self.attempt("complete a multipart upload of", async {
            request.await.map(drop).map_err(AttemptError::of)
        })
        .await
    }

    /// Whether a lifecycle rule removes orphaned parts; `None` if that may not be queried.
    async fn lifecycle_rule(&self) -> Option<bool> {
        let get = self.live.clients().usual.get_bucket_lifecycle_configuration();
        let request = get.bucket(&self.live.bucket).send();
        (self.announce)("read the lifecycle rules");
        match tokio::time::timeout(self.live.options.stall, request).await.ok()? {
            Ok(rules) => {
                let aborts = |rule: &aws_sdk_s3::types::LifecycleRule| {
                    rule.abort_incomplete_multipart_upload().is_some()
                };
                Some(rules.rules().iter().any(aborts))
            }
            Err(error) => {
                let failed = AttemptError::of(error);
                failed.response.contains("NoSuchLifecycleConfiguration").then_some(false)
            }
        }
    }
}

/// Whether the request was refused, as expected; `None` if it failed for another reason.
fn refuses(outcome: &Result<()>) -> Option<bool> {
    match outcome {
        Ok(()) => Some(false),
        Err(Error::Remote(remote)) => match remote.cause {
            RemoteErrorKind::Replaced | RemoteErrorKind::Refused => Some(true),
            _ => None,
        },
        Err(_) => None,
    }
}

/// Whether the server does not respond, so that further checks are pointless.
fn is_unreachable(error: &Error) -> bool {
    use RemoteErrorKind as C;
    let Error::Remote(remote) = error else { return false };
    let unreachable =
        [C::Unreachable, C::Dns, C::Tls, C::Stalled, C::NoBucket, C::NoCredentials, C::Expired];
    unreachable.contains(&remote.cause)
}
