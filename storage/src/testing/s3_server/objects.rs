//! The objects, and the protocol over them.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hyper::body::Bytes;
use s3s::dto::*;
use s3s::{Body, S3, S3Request, S3Response, S3Result, s3_error};

use crate::crc64;

/// Keys in one page of a listing, the limit of S3.
const PAGE_KEYS_MAX: usize = 1000;

/// Parts in one page; S3 has a thousand, but tests upload few parts.
const PAGE_PARTS_MAX: usize = 2;

/// The smallest size of a part that is not the last, the limit of S3.
const PART_BYTES_MIN: usize = 5 << 20;

/// Buckets in memory. Clones are the same ones.
#[derive(Clone, Debug)]
pub(super) struct ObjectTable(Arc<Mutex<ServerState>>);

#[derive(Debug, Default)]
struct ServerState {
    buckets: BTreeMap<String, BTreeMap<String, StoredObject>>,
    uploads: HashMap<String, MultipartUploads>,
    uploads_started: u64,
    /// How `If-None-Match` is honoured.
    conditions: Conditions,
}

/// Which requests honour `If-None-Match`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Conditions {
    /// All, as AWS does.
    #[default]
    Kept,
    /// Those of one request; the end of a multipart upload overwrites, as with Ceph RGW 16.
    OfSinglePuts,
    /// None: everything is overwritten, as with some small servers.
    Ignored,
}

#[derive(Clone, Debug)]
struct StoredObject {
    bytes: Bytes,
    etag: String,
    metadata: Option<Metadata>,
}

#[derive(Debug)]
struct MultipartUploads {
    bucket: String,
    key: String,
    metadata: Option<Metadata>,
    parts: BTreeMap<i32, StoredObject>,
}

impl StoredObject {
    fn new(bytes: Bytes, metadata: Option<Metadata>) -> Self {
        let etag = format!("{:016x}{:016x}", crc64(&bytes), bytes.len());
        StoredObject { bytes, etag, metadata }
    }

    fn len(&self) -> i64 {
        self.bytes.len() as i64 // fits: memory
    }
}

impl ObjectTable {
    pub(super) fn new(bucket: &str) -> Self {
        let buckets = BTreeMap::from([(bucket.to_owned(), BTreeMap::new())]);
        ObjectTable(Arc::new(Mutex::new(ServerState { buckets, ..ServerState::default() })))
    }

    pub(super) fn upload_count(&self) -> usize {
        self.state().uploads.len()
    }

    pub(super) fn keep(&self, conditions: Conditions) {
        self.state().conditions = conditions;
    }

    pub(super) fn object_count(&self) -> usize {
        self.state().buckets.values().map(BTreeMap::len).sum()
    }

    fn state(&self) -> MutexGuard<'_, ServerState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, bucket: &str, key: &str, if_match: Option<&IfMatch>) -> S3Result<StoredObject> {
        let stored = self.state().bucket(bucket)?.get(key).cloned();
        let stored = stored.ok_or_else(|| s3_error!(NoSuchKey))?;
        let same =
            |expected: &IfMatch| expected.as_etag().is_none_or(|etag| etag.value() == stored.etag);
        if !if_match.is_none_or(same) {
            return Err(s3_error!(PreconditionFailed));
        }
        Ok(stored)
    }
}

impl ServerState {
    fn bucket(&mut self, name: &str) -> S3Result<&mut BTreeMap<String, StoredObject>> {
        self.buckets.get_mut(name).ok_or_else(|| s3_error!(NoSuchBucket))
    }

    /// Checks the condition and stores the object under one lock.
    fn put(
        &mut self,
        bucket: &str,
        key: &str,
        stored: StoredObject,
        if_none_match: Option<&IfNoneMatch>,
    ) -> S3Result<()> {
        let in_parts = stored.etag.contains('-');
        let is_honoured = match self.conditions {
            Conditions::Kept => true,
            Conditions::OfSinglePuts => !in_parts,
            Conditions::Ignored => false,
        };
        let objects = self.bucket(bucket)?;
        let only_new = is_honoured && if_none_match.is_some_and(ETagCondition::is_any);
        if only_new && objects.contains_key(key) {
            return Err(s3_error!(PreconditionFailed));
        }
        objects.insert(key.to_owned(), stored);
        Ok(())
    }
}

async fn all_of(body: Option<StreamingBlob>) -> S3Result<Bytes> {
    let mut body = body.map(Body::from).unwrap_or_default();
    body.store_all_limited(usize::MAX).await.map_err(|_| s3_error!(IncompleteBody))
}

#[async_trait::async_trait]
impl S3 for ObjectTable {
    async fn put_object(
        &self,
        request: S3Request<PutObjectInput>,
    ) -> S3Result<S3Response<PutObjectOutput>> {
        let input = request.input;
        let stored = StoredObject::new(all_of(input.body).await?, input.metadata);
        let e_tag = Some(ETag::Strong(stored.etag.clone()));
        self.state().put(&input.bucket, &input.key, stored, input.if_none_match.as_ref())?;
        Ok(S3Response::new(PutObjectOutput { e_tag, ..Default::default() }))
    }

    async fn get_object(
        &self,
        request: S3Request<GetObjectInput>,
    ) -> S3Result<S3Response<GetObjectOutput>> {
        let input = request.input;
        let stored = self.get(&input.bucket, &input.key, input.if_match.as_ref())?;
        let full = stored.bytes.len() as u64;
        let (body, content_range) = match input.range {
            None => (stored.bytes.clone(), None),
            Some(range) => {
                let range = range.check(full)?;
                let text = format!("bytes {}-{}/{full}", range.start, range.end - 1);
                let range = range.start as usize..range.end as usize; // fits: within the bytes
                (stored.bytes.slice(range), Some(text))
            }
        };
        let output = GetObjectOutput {
            content_length: Some(body.len() as i64), // fits: memory
            content_range,
            e_tag: Some(ETag::Strong(stored.etag)),
            metadata: stored.metadata,
            body: Some(StreamingBlob::from(Body::from(body))),
            ..Default::default()
        };
        let partial = output.content_range.is_some();
        let mut response = S3Response::new(output);
        response.status = partial.then_some(hyper::StatusCode::PARTIAL_CONTENT);
        Ok(response)
    }

    async fn head_object(
        &self,
        request: S3Request<HeadObjectInput>,
    ) -> S3Result<S3Response<HeadObjectOutput>> {
        let input = request.input;
        let stored = self.get(&input.bucket, &input.key, input.if_match.as_ref())?;
        Ok(S3Response::new(HeadObjectOutput {
            content_length: Some(stored.len()),
            e_tag: Some(ETag::Strong(stored.etag)),
            metadata: stored.metadata,
            ..Default::default()
        }))
    }

    async fn delete_object(
        &self,
        request: S3Request<DeleteObjectInput>,
    ) -> S3Result<S3Response<DeleteObjectOutput>> {
        let input = request.input;
        self.state().bucket(&input.bucket)?.remove(&input.key);
        Ok(S3Response::new(DeleteObjectOutput::default()))
    }

    async fn delete_objects(
        &self,
        request: S3Request<DeleteObjectsInput>,
    ) -> S3Result<S3Response<DeleteObjectsOutput>> {
        let input = request.input;
        let mut state = self.state();
        let objects = state.bucket(&input.bucket)?;
        for object in &input.delete.objects {
            objects.remove(&object.key);
        }
        Ok(S3Response::new(DeleteObjectsOutput::default()))
    }

    async fn list_objects_v2(
        &self,
        request: S3Request<ListObjectsV2Input>,
    ) -> S3Result<S3Response<ListObjectsV2Output>> {
        let input = request.input;
        let prefix = input.prefix.clone().unwrap_or_default();
        let delimiter = input.delimiter.clone().unwrap_or_default();
        let after = input.continuation_token.clone().or(input.start_after).unwrap_or_default();
        let requested = input.max_keys.and_then(|max| usize::try_from(max).ok());
        let page_max = requested.unwrap_or(PAGE_KEYS_MAX).min(PAGE_KEYS_MAX);
        let (mut contents, mut folders) = (Vec::new(), Vec::<String>::new());
        let mut next = None;
        let mut state = self.state();
        let first = Bound::Excluded(after.clone());
        for (key, stored) in state.bucket(&input.bucket)?.range((first, Bound::Unbounded)) {
            let Some(rest) = key.strip_prefix(&prefix) else { continue };
            let cut = if delimiter.is_empty() { None } else { rest.find(&delimiter) };
            let folder = cut.map(|at| format!("{prefix}{}", &rest[..at + delimiter.len()]));
            // A folder of an earlier page is not listed again.
            let is_listed =
                |folder: &String| folders.last() == Some(folder) || after.starts_with(folder);
            if folder.as_ref().is_some_and(is_listed) {
                continue;
            }
            if contents.len() + folders.len() == page_max {
                next = Some(last_of(&contents, &folders));
                break;
            }
            match folder {
                Some(folder) => folders.push(folder),
                None => contents.push(Object {
                    key: Some(key.clone()),
                    size: Some(stored.len()),
                    e_tag: Some(ETag::Strong(stored.etag.clone())),
                    ..Default::default()
                }),
            }
        }
        let as_prefix = |folder| CommonPrefix { prefix: Some(folder) };
        Ok(S3Response::new(ListObjectsV2Output {
            name: Some(input.bucket),
            is_truncated: Some(next.is_some()),
            next_continuation_token: next,
            contents: Some(contents),
            common_prefixes: Some(folders.into_iter().map(as_prefix).collect()),
            ..Default::default()
        }))
    }

    async fn create_multipart_upload(
        &self,
        request: S3Request<CreateMultipartUploadInput>,
    ) -> S3Result<S3Response<CreateMultipartUploadOutput>> {
        let CreateMultipartUploadInput { bucket, key, metadata, .. } = request.input;
        let mut state = self.state();
        state.bucket(&bucket)?;
        state.uploads_started += 1;
        let id = format!("upload-{}", state.uploads_started);
        let parts = MultipartUploads { bucket, key, metadata, parts: BTreeMap::new() };
        state.uploads.insert(id.clone(), parts);
        let output = CreateMultipartUploadOutput { upload_id: Some(id), ..Default::default() };
        Ok(S3Response::new(output))
    }

    async fn upload_part(
        &self,
        request: S3Request<UploadPartInput>,
    ) -> S3Result<S3Response<UploadPartOutput>> {
        let input = request.input;
        let stored = StoredObject::new(all_of(input.body).await?, None);
        let e_tag = Some(ETag::Strong(stored.etag.clone()));
        let mut state = self.state();
        let upload = state.uploads.get_mut(&input.upload_id);
        let upload = upload.filter(|u| u.bucket == input.bucket && u.key == input.key);
        let upload = upload.ok_or_else(|| s3_error!(NoSuchUpload))?;
        upload.parts.insert(input.part_number, stored);
        Ok(S3Response::new(UploadPartOutput { e_tag, ..Default::default() }))
    }

    async fn complete_multipart_upload(
        &self,
        request: S3Request<CompleteMultipartUploadInput>,
    ) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
        let input = request.input;
        let named = input.multipart_upload.and_then(|upload| upload.parts).unwrap_or_default();
        let mut state = self.state();
        let upload = state.uploads.get(&input.upload_id);
        let upload = upload.ok_or_else(|| s3_error!(NoSuchUpload))?;
        let mut bytes = Vec::new();
        for (i, part) in named.iter().enumerate() {
            let stored = part.part_number.and_then(|number| upload.parts.get(&number));
            let expected = part.e_tag.as_ref().map(|etag| etag.value().to_owned());
            let stored =
                stored.filter(|stored| expected.is_none_or(|expected| expected == stored.etag));
            let stored = stored.ok_or_else(|| s3_error!(InvalidPart))?;
            if i + 1 < named.len() && stored.bytes.len() < PART_BYTES_MIN {
                return Err(s3_error!(EntityTooSmall));
            }
            bytes.extend_from_slice(&stored.bytes);
        }
        let mut stored = StoredObject::new(bytes.into(), upload.metadata.clone());
        stored.etag = format!("{}-{}", stored.etag, named.len());
        let e_tag = Some(ETag::Strong(stored.etag.clone()));
        state.put(&input.bucket, &input.key, stored, input.if_none_match.as_ref())?;
        state.uploads.remove(&input.upload_id);
        Ok(S3Response::new(CompleteMultipartUploadOutput { e_tag, ..Default::default() }))
    }

    async fn list_parts(
        &self,
        request: S3Request<ListPartsInput>,
    ) -> S3Result<S3Response<ListPartsOutput>> {
        let input = request.input;
        let state = self.state();
        let upload = state.uploads.get(&input.upload_id);
        let upload = upload.filter(|u| u.bucket == input.bucket && u.key == input.key);
        let upload = upload.ok_or_else(|| s3_error!(NoSuchUpload))?;
        let after = Bound::Excluded(input.part_number_marker.unwrap_or(0));
        let mut remaining = upload.parts.range((after, Bound::Unbounded));
        let part = |(&number, stored): (&i32, &StoredObject)| Part {
            part_number: Some(number),
            e_tag: Some(ETag::Strong(stored.etag.clone())),
            size: Some(stored.len()),
            ..Default::default()
        };
        let parts: Vec<Part> = remaining.by_ref().take(PAGE_PARTS_MAX).map(part).collect();
        Ok(S3Response::new(ListPartsOutput {
            is_truncated: Some(remaining.next().is_some()),
            next_part_number_marker: parts.last().and_then(|part| part.part_number),
            parts: Some(parts),
            ..Default::default()
        }))
    }

    async fn list_multipart_uploads(
        &self,
        request: S3Request<ListMultipartUploadsInput>,
    ) -> S3Result<S3Response<ListMultipartUploadsOutput>> {
        let input = request.input;
        let prefix = input.prefix.unwrap_or_default();
        let state = self.state();
        let is_below = |parts: &MultipartUploads| {
            parts.bucket == input.bucket && parts.key.starts_with(&prefix)
        };
        let found = state.uploads.iter().filter(|(_, parts)| is_below(parts));
        let upload = |(id, parts): (&String, &MultipartUploads)| MultipartUpload {
            key: Some(parts.key.clone()),
            upload_id: Some(id.clone()),
            ..Default::default()
        };
        Ok(S3Response::new(ListMultipartUploadsOutput {
            is_truncated: Some(false),
            uploads: Some(found.map(upload).collect()),
            ..Default::default()
        }))
    }

    async fn abort_multipart_upload(
        &self,
        request: S3Request<AbortMultipartUploadInput>,
    ) -> S3Result<S3Response<AbortMultipartUploadOutput>> {
        let removed = self.state().uploads.remove(&request.input.upload_id);
        removed.ok_or_else(|| s3_error!(NoSuchUpload))?;
        Ok(S3Response::new(AbortMultipartUploadOutput::default()))
    }
}

/// Where the next page starts: after the last object or folder of this one.
fn last_of(contents: &[Object], folders: &[String]) -> String {
    let key = contents.last().and_then(|object| object.key.clone()).unwrap_or_default();
    key.max(folders.last().cloned().unwrap_or_default())
}
