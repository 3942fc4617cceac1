//! A note for people and other tools: which step is the newest. Nothing of ours ever reads it to
//! find one.

use crate::Checkpoints;
use storage::{Key, Storage};

/// Where many tools look.
const LATEST: &str = "latest";

/// A note is a name and a line feed.
const NOTE_BYTES_MAX: u64 = 512;

impl Checkpoints {
    /// Writes the note, unless the file is somebody else's. A save that is committed does not fail
    /// because of it.
    pub(crate) fn note_latest(&self, data: &Key) {
        let below = data.as_str().strip_prefix(self.folder.as_str()).unwrap_or(data.as_str());
        let text = format!("{}\n", below.trim_start_matches('/'));
        let noted = self.folder.join(LATEST).and_then(|key| match is_ours(&*self.store, &key) {
            true => self.store.replace(&key, text.as_bytes()),
            false => Ok(()),
        });
        match noted {
            Err(storage::Error::Unsupported { .. }) | Ok(()) => {}
            Err(error) => log::warn!("the note of the newest step is not written: {error}"),
        }
    }
}

/// Whether there is no such file, or one of ours: DeepSpeed keeps one of the same name.
fn is_ours(store: &dyn Storage, key: &Key) -> bool {
    match store.open(key) {
        Ok(object) if object.len_bytes() <= NOTE_BYTES_MAX => {
            storage::read_all(store, key).is_ok_and(|text| text.starts_with(b"step-"))
        }
        Ok(_) => false,
        Err(error) => matches!(error, storage::Error::NotFound { .. }),
    }
}
