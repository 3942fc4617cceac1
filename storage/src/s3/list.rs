//! Lists and deletes keys.

use aws_sdk_s3::operation::list_objects_v2::ListObjectsV2Output;
use aws_sdk_s3::types::{Delete, ObjectIdentifier};

use super::attempt_error::AttemptError;
use super::bucket::ProcessBucket;
use crate::{Error, Result};

/// Objects in one delete request, the limit of S3.
const DELETES_MAX: usize = 1000;

/// Keys and lengths of all objects with this key prefix.
pub(crate) fn all(live: &ProcessBucket, below: &str, name: &str) -> Result<Vec<(String, u64)>> {
    let mut found = Vec::new();
    pages(live, below, None, name, |page| {
        for object in page.contents() {
            let bytes = object.size().and_then(|size| u64::try_from(size).ok()).unwrap_or(0);
            found.extend(object.key().map(|key| (key.to_owned(), bytes)));
        }
    })?;
    Ok(found)
}

/// The components after the prefix, each once, sorted.
pub(crate) fn names(live: &ProcessBucket, below: &str, name: &str) -> Result<Vec<String>> {
    let mut found = Vec::new();
    pages(live, below, Some("/"), name, |page| {
        let objects = page.contents().iter().filter_map(|object| object.key());
        let folders = page.common_prefixes().iter().filter_map(|folder| folder.prefix());
        for path in objects.chain(folders.map(|folder| folder.trim_end_matches('/'))) {
            let rest = path.get(below.len()..).unwrap_or("");
            found.extend(Some(rest.to_owned()).filter(|rest| !rest.is_empty()));
        }
    })?;
    found.sort();
    found.dedup();
    Ok(found)
}

fn pages(
    live: &ProcessBucket,
    below: &str,
    delimiter: Option<&str>,
    name: &str,
    mut take: impl FnMut(&ListObjectsV2Output),
) -> Result<()> {
    let mut next: Option<String> = None;
    loop {
        let token = &next;
        let attempt = || async move {
            let list = live.clients().usual.list_objects_v2().bucket(&live.bucket).prefix(below);
            let list = list.set_delimiter(delimiter.map(str::to_owned));
            list.set_continuation_token(token.clone()).send().await.map_err(AttemptError::of)
        };
        let page = live.runtime.block_on(live.with_retries("list", name, attempt))?;
        take(&page);
        let following = page.next_continuation_token().map(str::to_owned);
        if page.is_truncated() != Some(true) || following.is_none() || following == next {
            return Ok(());
        }
        next = following;
    }
}

/// Deletes objects, a thousand at a time.
pub(crate) fn delete(live: &ProcessBucket, paths: &[String], name: &str) -> Result<()> {
    if let [path] = paths {
        let attempt = || async {
            let request = live.clients().usual.delete_object().bucket(&live.bucket).key(path);
            request.send().await.map_err(AttemptError::of)
        };
        return live.runtime.block_on(live.with_retries("delete", name, attempt)).map(drop);
    }
    for chunk in paths.chunks(DELETES_MAX) {
        let identifiers =
            chunk.iter().filter_map(|path| ObjectIdentifier::builder().key(path).build().ok());
        let delete = Delete::builder().set_objects(Some(identifiers.collect())).quiet(true).build();
        let delete =
            delete.map_err(|e| Error::from_io("delete", name, std::io::Error::other(e)))?;
        let attempt = || async {
            let request = live.clients().usual.delete_objects().bucket(&live.bucket);
            let request = request.delete(delete.clone());
            request.send().await.map_err(AttemptError::of)
        };
        let done = live.runtime.block_on(live.with_retries("delete", name, attempt))?;
        if let Some(failed) = done.errors().first() {
            let (key, code) =
                (failed.key().unwrap_or(""), failed.code().unwrap_or("no error code"));
            let why = std::io::Error::other(format!("{key}: {code}"));
            return Err(Error::from_io("delete", name, why));
        }
    }
    Ok(())
}
