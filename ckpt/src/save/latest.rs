//! The file `latest`, which names the newest step for people and other tools. This crate never
//! reads it to find a step.

use crate::Checkpoints;
use storage::{Key, Storage};

/// The name that many tools read.
const LATEST: &str = "latest";

/// The file has a name and a line feed.
const NOTE_BYTES_MAX: u64 = 512;

impl Checkpoints {
    /// Writes the file after a commit, unless a newer step exists, or the file belongs to another
    /// program. An error does not fail the committed save.
    pub(crate) fn note_latest(&self, step: u64, data: &Key) {
        match self.named_steps() {
            Ok(steps) if steps.last() == Some(&step) => {}
            Ok(_) => return,
            Err(error) => return log::warn!("the note of the newest step is not written: {error}"),
        }
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

/// Whether the file does not exist or is ours: DeepSpeed writes one of the same name.
fn is_ours(store: &dyn Storage, key: &Key) -> bool {
    match store.open(key) {
        Ok(object) if object.len_bytes() <= NOTE_BYTES_MAX => {
            storage::read_all(store, key).is_ok_and(|text| text.starts_with(b"step-"))
        }
        Ok(_) => false,
        Err(error) => matches!(error, storage::Error::NotFound { .. }),
    }
}
