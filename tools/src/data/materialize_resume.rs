//! An unfinished output, and its durable part: the tokens of its builder up to the last sync. A
//! small object next to the output records this part, and the next run with the same settings
//! resumes from it. The sequences follow from the order.

use std::sync::Arc;

use anyhow::{Result, anyhow, bail, ensure};
use indexed::{Builder, Built, Dtype};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use storage::{Key, Storage, SyncPoint};

const SUFFIX: &str = ".unfinished.json";

/// A record holds the files of the source, and settings.
const RECORD_BYTES_MAX: u64 = 16 << 20;

#[derive(Debug)]
pub(super) struct MaterializeResume {
    store: Arc<dyn Storage>,
    prefix: Key,
    record: Record,
    builder: Builder,
    /// Bytes of each sample, except perhaps the last.
    sample_bytes: u64,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    /// The settings that determine the bytes of the output.
    run: Value,
    /// Samples that are durable.
    samples: u64,
    /// `None` before the first sync.
    bin: Option<SyncPoint>,
}

impl MaterializeResume {
    /// Starts an output, or resumes it.
    pub(super) fn begin(
        store: &Arc<dyn Storage>,
        prefix: &Key,
        dtype: Dtype,
        run: Value,
        seq_len: u64,
    ) -> Result<Self> {
        // Removes the small files of killed writers; their large ones are resumable uploads.
        store.remove_orphans(&prefix.parent())?;
        let key = prefix.with_suffix(SUFFIX)?;
        let (record, builder) = match read(store.as_ref(), &key)? {
            Some(record) => {
                let name = store.display(&key);
                same_run(&name, &record.run, &run)?;
                let mark = record.bin.unwrap_or_default();
                let builder = match Builder::resume_tokens(store, prefix, dtype, mark) {
                    // The run was killed before it created the builder.
                    Err(indexed::Error::Storage(storage::Error::NotFound { .. }))
                        if record.bin.is_none() =>
                    {
                        Builder::create_tokens(store, prefix, dtype)?
                    }
                    resumed => resumed.map_err(|error| {
                        let error = storage::one_line(&error);
                        anyhow!(
                            "cannot resume {name}: {error} (hint: --restart starts from scratch)"
                        )
                    })?,
                };
                (record, builder)
            }
            None => {
                let record = Record { run, samples: 0, bin: None };
                // The record is written first: resumable uploads without a record belong to another
                // program.
                record.write(store.as_ref(), &key)?;
                let builder = Builder::create_tokens(store, prefix, dtype).inspect_err(|_| {
                    let _ = store.delete(&key); // the error of the builder is reported
                })?;
                (record, builder)
            }
        };
        let (store, prefix) = (Arc::clone(store), prefix.clone());
        let sample_bytes = (seq_len + 1) * dtype.item_bytes();
        Ok(MaterializeResume { store, prefix, record, builder, sample_bytes })
    }

    /// Adds the samples that are present to the builder. The next one may be present in part.
    pub(super) fn add_present_samples(
        &mut self,
        samples: u64,
        tokens_of: impl Fn(u64) -> Result<u64>,
    ) -> Result<()> {
        let mut present = 0;
        while present < samples && self.builder.present_bytes() > 0 {
            let tokens = tokens_of(present)?;
            if tokens * self.builder.dtype().item_bytes() > self.builder.present_bytes() {
                break;
            }
            self.builder.add_present(tokens)?;
            self.builder.end_document()?;
            present += 1;
        }
        let left = self.builder.present_bytes();
        let is_consistent = if present < samples { !self.builder.is_finished() } else { left == 0 };
        ensure!(
            is_consistent,
            "cannot resume {}.bin: expected {samples} samples, found {present} and {left} bytes \
             (hint: --restart starts from scratch)",
            self.store.display(&self.prefix)
        );
        self.record.samples = present;
        Ok(())
    }

    /// Removes the files of an interrupted run, unless it still runs.
    pub(super) fn discard(store: &dyn Storage, prefix: &Key) -> Result<()> {
        let key = prefix.with_suffix(SUFFIX)?;
        match store.open(&key) {
            Err(storage::Error::NotFound { .. }) => return Ok(()),
            found => found?,
        };
        Builder::discard_drafts(store, prefix)?;
        Ok(store.delete(&key)?)
    }

    /// The same for a complete output; an error is only logged.
    pub(super) fn discard_or_warn(store: &dyn Storage, prefix: &Key) {
        if let Err(error) = MaterializeResume::discard(store, prefix) {
            log::warn!("{}: unfinished files cannot be removed: {error}", store.display(prefix));
        }
    }

    /// Samples that are durable.
    pub(super) fn samples(&self) -> u64 {
        self.record.samples
    }

    pub(super) fn builder(&mut self) -> &mut Builder {
        &mut self.builder
    }

    /// Commits the samples in the builder if at least `commit_bytes` of them are not durable yet.
    pub(super) fn commit_if_large(&mut self, commit_bytes: u64) -> Result<()> {
        let bytes = self.builder.token_count() * self.builder.dtype().item_bytes();
        if bytes - self.record.bin.map_or(0, |mark| mark.bytes.min(bytes)) < commit_bytes {
            return Ok(());
        }
        let mark = self.builder.sync_tokens()?;
        self.keep(mark.bytes / self.sample_bytes, mark)
    }

    /// Commits all samples; the builder has all of them.
    pub(super) fn commit_all(&mut self, samples: u64) -> Result<()> {
        let mark = self.builder.sync_all_tokens()?;
        self.keep(samples, mark)
    }

    fn keep(&mut self, samples: u64, mark: SyncPoint) -> Result<()> {
        let record = Record { run: self.record.run.clone(), samples, bin: Some(mark) };
        record.write(self.store.as_ref(), &self.prefix.with_suffix(SUFFIX)?)?;
        self.record = record;
        Ok(())
    }

    /// Publishes both files, when all samples are durable. The record stays until
    /// [`MaterializeResume::discard`], so that the run can be resumed.
    pub(super) fn finish(self) -> Result<Built> {
        Ok(self.builder.finish()?)
    }

    /// Ends after an error. Durable samples are retained, and the error says so.
    pub(super) fn fail(self, error: anyhow::Error) -> anyhow::Error {
        let MaterializeResume { store, prefix, record, builder, .. } = self;
        drop(builder);
        if record.samples > 0 {
            return error.context(kept_text(&store.display(&prefix), record.samples));
        }
        match MaterializeResume::discard(store.as_ref(), &prefix) {
            Ok(()) => error,
            Err(left) => error.context(format!("cannot remove the unfinished files ({left})")),
        }
    }
}

/// The context of an error after which the same command resumes.
pub(super) fn kept_text(output: &str, samples: u64) -> String {
    format!("cannot complete {output} ({samples} samples are kept; the same command resumes)")
}

impl Record {
    /// After a crash the previous record may remain. The next run then writes more samples again.
    fn write(&self, store: &dyn Storage, key: &Key) -> Result<()> {
        Ok(store.replace(key, &serde_json::to_vec(self)?)?)
    }
}

fn read(store: &dyn Storage, key: &Key) -> Result<Option<Record>> {
    let bytes = match storage::read_small(store, key, RECORD_BYTES_MAX) {
        Err(storage::Error::NotFound { .. }) => return Ok(None),
        bytes => bytes?,
    };
    let name = store.display(key);
    let record = serde_json::from_slice(&bytes).map_err(|error| {
        anyhow!("cannot read {name}: {error} (hint: --restart starts from scratch)")
    })?;
    Ok(Some(record))
}

/// Refuses other settings: resuming with them would write files that no single run writes.
fn same_run(name: &str, there: &Value, here: &Value) -> Result<()> {
    let mut keys = here.as_object().into_iter().flat_map(|run| run.keys());
    let Some(key) = keys.find(|key| there[key.as_str()] != here[key.as_str()]) else {
        return Ok(());
    };
    let (there, here) = (&there[key.as_str()], &here[key.as_str()]);
    bail!(
        "cannot resume {name}: expected {key} = {there}, found {here} (hint: --restart starts from \
         scratch)"
    );
}
