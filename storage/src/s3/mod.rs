//! [`Storage`] on S3: AWS, Ceph RGW, and compatible servers.
//!
//! A store is a folder of a bucket. S3 itself has the atomicity for which file systems need
//! renames: an object appears complete when its upload is finished, and not before. It cannot
//! publish a folder in one step; so a writer of a set of objects writes the commit record last.
//!
//! `location` parses the URL, `client` builds the SDK's client, and `bucket` has what all stores in
//! a bucket share: retries, the limit of requests in flight (`limiter`) and their latencies
//! (`latency`). `get` is a ranged read that survives network faults; `object` and `reader` use it.
//! `put` uploads, `resumable` has uploads that outlive their writer, `probe` tests what a bucket
//! supports, `list` lists keys, and `attempt_error` classifies failures. `local_copy` maps an
//! object that was copied to a file. `runtime` runs the futures: callers of this module block.

mod attempt_error;
mod bucket;
mod client;
mod get;
mod latency;
mod limiter;
mod list;
mod local_copy;
mod location;
mod object;
mod probe;
mod put;
mod reader;
mod resumable;
mod runtime;

use std::sync::Arc;

use bucket::{Bucket, ProcessBucket};
use location::Address;

pub(crate) use probe::examine;

use crate::base::temp_names;
use crate::{
    Error, IoEngine, Key, Location, Object, ObjectMeta, Profile, Reader, ReaderOptions, Result,
    ResumableUpload, Storage, SyncPoint, Upload,
};

pub(crate) fn open(location: &Location) -> Result<Arc<dyn Storage>> {
    Ok(Arc::new(S3::new(Address::parse(location)?)))
}

pub(crate) fn locate(location: &Location) -> Result<(Arc<dyn Storage>, Key)> {
    let Address { bucket, prefix, options } = Address::parse(location)?;
    if prefix == Key::root() {
        let reason = "expected a key after the bucket".to_owned();
        return Err(Error::BadUrl { url: location.to_string(), reason });
    }
    let (prefix, key) = (prefix.parent(), Key::new(prefix.name())?);
    Ok((Arc::new(S3::new(Address { bucket, prefix, options })), key))
}

/// A folder of a bucket as a store.
#[derive(Clone, Debug)]
struct S3 {
    bucket: Arc<Bucket>,
    prefix: Key,
    profile: Arc<Profile>,
}

impl S3 {
    fn new(address: Address) -> Self {
        let Address { bucket, prefix, options } = address;
        let profile = Profile {
            file_system: "s3".to_owned(),
            engine: IoEngine::Pread,
            engine_why: "requests go over HTTP".to_owned(),
            direct: false,
            align_bytes: 1,
            mount_point: String::new(),
        };
        S3 { bucket: Bucket::of(&bucket, &options), prefix, profile: Arc::new(profile) }
    }

    /// The bucket's key for a key of this store.
    fn path(&self, key: &Key) -> String {
        match (self.prefix.as_str(), key.as_str()) {
            ("", path) | (path, "") => path.to_owned(),
            (prefix, key) => format!("{prefix}/{key}"),
        }
    }

    /// The key prefix of all objects in a folder.
    fn below(&self, folder: &Key) -> String {
        let path = self.path(folder);
        if path.is_empty() { path } else { path + "/" }
    }

    fn live(&self) -> Result<Arc<ProcessBucket>> {
        self.bucket.live()
    }

    fn target(&self, key: &Key) -> put::UploadTarget {
        let (path, name) = (self.path(key), self.display(key));
        put::UploadTarget { path, name, file_name: key.name().to_owned() }
    }

    /// The state object of a resumable upload.
    fn draft_key(key: &Key) -> Result<Key> {
        key.parent().join(&temp_names::draft_name(key.name()))
    }
}

impl Storage for S3 {
    fn open(&self, key: &Key) -> Result<Arc<dyn Object>> {
        let live = self.live()?;
        let opened = object::open(&live, self.path(key), self.display(key))?;
        Ok(Arc::new(object::S3Object::new(&self.bucket, opened)))
    }

    fn create(&self, key: &Key, len_bytes_max: u64) -> Result<Box<dyn Upload>> {
        let (live, target) = (self.live()?, self.target(key));
        if object::head(&live, &target.path, &target.name)?.is_some() {
            return Err(Error::Exists { object: target.name });
        }
        Ok(Box::new(put::S3Upload::new(live, target, len_bytes_max)))
    }

    fn list(&self, folder: &Key) -> Result<Vec<ObjectMeta>> {
        let below = self.below(folder);
        let root = self.below(&Key::root()).len();
        let live = self.live()?;
        let listed = list::all(&live, &below, &self.display(folder))?;
        let entries = listed.into_iter().filter_map(|(path, bytes)| {
            let key = path.get(root..).and_then(|name| Key::new(name).ok());
            if key.is_none() && !path.ends_with('/') {
                log::warn!(
                    "s3://{}/{path}: not listed; it is not a valid object name",
                    self.bucket.name
                );
            }
            let key = key.filter(|key| !temp_names::is_hidden(key.name()))?;
            Some(ObjectMeta { key, bytes })
        });
        let mut entries: Vec<_> = entries.collect();
        entries.sort_by(|a, b| a.key.cmp(&b.key));
        Ok(entries)
    }

    fn list_names(&self, folder: &Key) -> Result<Vec<String>> {
        let live = self.live()?;
        let mut names = list::names(&live, &self.below(folder), &self.display(folder))?;
        names.retain(|name| !temp_names::is_hidden(name));
        Ok(names)
    }

    fn delete(&self, key: &Key) -> Result<()> {
        let (live, path, name) = (self.live()?, self.path(key), self.display(key));
        // Deleting an absent object succeeds, so its existence is checked first.
        if object::head(&live, &path, &name)?.is_none() {
            return Err(Error::NotFound { object: name });
        }
        list::delete(&live, &[path], &name)
    }

    fn publish(&self, staged: &Key, target: &Key) -> Result<()> {
        // Copies would not appear all at once. Write the objects under their final names, and last
        // the one that marks them as complete.
        let object = format!("{} to {}", self.display(staged), self.display(target));
        Err(Error::Unsupported { operation: "rename", object })
    }

    fn has_atomic_publish(&self, _folder: &Key) -> Result<bool> {
        Ok(false)
    }

    fn replace(&self, key: &Key, bytes: &[u8]) -> Result<()> {
        put::replace(&*self.live()?, &self.path(key), &self.display(key), bytes)
    }

    fn delete_folder(&self, folder: &Key) -> Result<()> {
        let reason = "the root folder of a store is never deleted";
        if *folder == Key::root() {
            return Err(Error::BadKey { key: String::new(), reason });
        }
        let (live, name) = (self.live()?, self.display(folder));
        let listed = list::all(&live, &self.below(folder), &name)?;
        let paths: Vec<_> = listed.into_iter().map(|(path, _)| path).collect();
        list::delete(&live, &paths, &name)
    }

    fn free_bytes(&self) -> Result<Option<u64>> {
        Ok(None)
    }

    fn display(&self, key: &Key) -> String {
        format!("s3://{}/{}", self.bucket.name, self.path(key))
    }

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn create_resumable(&self, key: &Key) -> Result<Box<dyn ResumableUpload>> {
        let (live, target, state) = (self.live()?, self.target(key), Self::draft_key(key)?);
        if object::head(&live, &target.path, &target.name)?.is_some() {
            return Err(Error::Exists { object: target.name });
        }
        let draft = resumable::start(self, live, target, &state, self.target(&state))?;
        Ok(Box::new(draft))
    }

    fn resume(&self, key: &Key, from: SyncPoint) -> Result<Box<dyn ResumableUpload>> {
        let (target, state) = (self.target(key), Self::draft_key(key)?);
        let state_target = self.target(&state);
        Ok(Box::new(resumable::resume(self, self.live()?, target, &state, state_target, from)?))
    }

    fn discard(&self, key: &Key) -> Result<()> {
        resumable::discard(self, &*self.live()?, &self.target(key), &Self::draft_key(key)?)
    }

    fn reader(&self, options: &ReaderOptions) -> Result<Box<dyn Reader>> {
        Ok(Box::new(reader::reader(self.live()?, options)))
    }

    fn reader_group(&self) -> Option<String> {
        // A bucket lives as long as the process, so its address is unique.
        Some(format!("s3 bucket {:p}", Arc::as_ptr(&self.bucket)))
    }

    fn metrics(&self) -> Vec<(String, u64)> {
        let mut named = self.bucket.metrics.named();
        if let Ok(live) = self.live() {
            named.push(("requests_at_once_max".to_owned(), live.limiter.limit() as u64));
        }
        named
    }
}
