//! The file `latest`, which names the newest step for people and other tools. This crate never
//! reads it to find a step.

use crate::{Checkpoints, Result};
use storage::{Key, Storage};

/// The name that many tools read.
const LATEST: &str = "latest";

/// The file has a name and a line feed.
const NOTE_BYTES_MAX: u64 = 512;

impl Checkpoints {
    /// Writes the file after a commit, unless a newer step exists, or the file belongs to another
    /// program. An error does not fail the committed save.
    pub(crate) fn note_latest(&self, step: u64, data: &Key) {
        if let Err(error) = self.try_note(step, data) {
            log::warn!("the object `latest` is not updated: {error}");
        }
    }

    fn try_note(&self, step: u64, data: &Key) -> Result<()> {
        if self.named_steps()?.last() != Some(&step) {
            return Ok(());
        }
        self.write_note(data)?;
        // A process that was frozen before it wrote has replaced the note of its successor.
        match self.named_steps()?.last() {
            Some(&newer) if newer > step => {
                self.write_note(&self.data_folder(newer, &self.listing()?)?)
            }
            _ => Ok(()),
        }
    }

    fn write_note(&self, data: &Key) -> Result<()> {
        let below = data.as_str().strip_prefix(self.folder.as_str()).unwrap_or(data.as_str());
        let text = format!("{}\n", below.trim_start_matches('/'));
        let key = self.folder.join(LATEST)?;
        if !is_ours(&*self.store, &key) {
            return Ok(());
        }
        match self.store.replace(&key, text.as_bytes()) {
            Err(storage::Error::Unsupported { .. }) => Ok(()),
            outcome => Ok(outcome?),
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
