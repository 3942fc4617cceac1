//! An output that is not finished, and what is certain of it: how many samples it has, and where
//! its builder was synced. That stands in a small object beside it, so that a run that was killed
//! is gone on with by the next one of the same settings.

use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use indexed::{Builder, BuilderMark, Built, Dtype};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use storage::{Key, Storage};

const SUFFIX: &str = ".unfinished.json";

#[derive(Debug)]
pub(super) struct Unfinished {
    store: Arc<dyn Storage>,
    prefix: Key,
    record: Record,
    builder: Builder,
    /// Whether the store keeps drafts; object stores keep none, and a run there begins anew.
    keeps: bool,
    synced_tokens: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Record {
    /// What decides the bytes of the output.
    run: Value,
    samples: u64,
    /// None before the first sync.
    builder: Option<BuilderMark>,
}

impl Unfinished {
    /// Begins an output, or goes on with it.
    pub(super) fn begin(
        store: &Arc<dyn Storage>,
        prefix: &Key,
        dtype: Dtype,
        run: Value,
    ) -> Result<Self> {
        // Of writers that were killed: the little files, for the large ones are drafts.
        store.sweep(&prefix.parent())?;
        let bin = prefix.with_suffix(".bin")?;
        let keeps = !matches!(store.open_draft(&bin), Err(storage::Error::Unsupported { .. }));
        let key = prefix.with_suffix(SUFFIX)?;
        let left = if keeps { read(store.as_ref(), &key)? } else { None };
        let anew = |run| Record { run, samples: 0, builder: None };
        let (record, builder) = match left {
            _ if !keeps => (anew(run), Builder::create(store, prefix, dtype)?),
            Some(record) => {
                let name = store.display(&key);
                same_run(&name, &record.run, &run)?;
                let builder = match &record.builder {
                    Some(mark) => Builder::resume(store, prefix, dtype, mark)
                        .with_context(|| format!("go on with {name} (--restart begins anew)"))?,
                    None => {
                        Builder::discard_drafts(store.as_ref(), prefix)?;
                        Builder::create_draft(store, prefix, dtype)?
                    }
                };
                (record, builder)
            }
            None => {
                let record = anew(run);
                // First of all: drafts that no record speaks of are another program's.
                record.write(store.as_ref(), &key)?;
                let builder = Builder::create_draft(store, prefix, dtype).inspect_err(|_| {
                    let _ = store.delete(&key); // what is in the way is the error to tell
                })?;
                (record, builder)
            }
        };
        let (store, prefix) = (Arc::clone(store), prefix.clone());
        let synced_tokens = builder.token_count();
        Ok(Unfinished { store, prefix, record, builder, keeps, synced_tokens })
    }

    /// Removes what an interrupted run has left, unless it is at work.
    pub(super) fn discard(store: &dyn Storage, prefix: &Key) -> Result<()> {
        let key = prefix.with_suffix(SUFFIX)?;
        match store.open(&key) {
            Err(storage::Error::NotFound { .. }) => return Ok(()),
            found => found?,
        };
        Builder::discard_drafts(store, prefix)?;
        Ok(store.delete(&key)?)
    }

    /// Samples that are certain.
    pub(super) fn samples(&self) -> u64 {
        self.record.samples
    }

    pub(super) fn builder(&mut self) -> &mut Builder {
        &mut self.builder
    }

    /// So many samples are in the builder: they become certain if they are worth a sync.
    pub(super) fn reached(&mut self, samples: u64, commit_bytes: u64) -> Result<()> {
        let tokens = self.builder.token_count() - self.synced_tokens;
        if tokens * self.builder.dtype().item_bytes() >= commit_bytes {
            self.commit(samples)?;
        }
        Ok(())
    }

    /// Makes so many samples certain.
    pub(super) fn commit(&mut self, samples: u64) -> Result<()> {
        if !self.keeps {
            return Ok(());
        }
        let builder = Some(self.builder.sync()?);
        let record = Record { run: self.record.run.clone(), samples, builder };
        record.write(self.store.as_ref(), &self.prefix.with_suffix(SUFFIX)?)?;
        self.record = record;
        self.synced_tokens = self.builder.token_count();
        Ok(())
    }

    /// Makes both files visible, when all is certain. What is needed to go on stays until
    /// [`Unfinished::discard`].
    pub(super) fn finish(self) -> Result<Built> {
        Ok(self.builder.finish()?)
    }

    /// Ends without success. What is certain stays, and is told.
    pub(super) fn fail(self, error: anyhow::Error) -> anyhow::Error {
        let Unfinished { store, prefix, record, builder, keeps, .. } = self;
        drop(builder);
        if !keeps {
            return error;
        }
        if record.samples > 0 {
            let samples = record.samples;
            return error.context(format!("{samples} samples stay for the same command to go on"));
        }
        match Unfinished::discard(store.as_ref(), &prefix) {
            Ok(()) => error,
            Err(left) => error.context(format!("something of it is left ({left})")),
        }
    }
}

impl Record {
    /// After a crash it may be the one before: then more is made again.
    fn write(&self, store: &dyn Storage, key: &Key) -> Result<()> {
        Ok(store.replace(key, &serde_json::to_vec(self)?)?)
    }
}

fn read(store: &dyn Storage, key: &Key) -> Result<Option<Record>> {
    let bytes = match storage::read_all(store, key) {
        Err(storage::Error::NotFound { .. }) => return Ok(None),
        bytes => bytes?,
    };
    let name = store.display(key);
    let record = serde_json::from_slice(&bytes);
    Ok(Some(record.with_context(|| format!("read {name}; hint: --restart begins anew"))?))
}

/// Going on with other settings would make files that no single run makes.
fn same_run(name: &str, there: &Value, here: &Value) -> Result<()> {
    let mut keys = here.as_object().into_iter().flat_map(|run| run.keys());
    let Some(key) = keys.find(|key| there[key.as_str()] != here[key.as_str()]) else {
        return Ok(());
    };
    let (got, due) = (&there[key.as_str()], &here[key.as_str()]);
    bail!(
        "go on with {name}: {key} was {got}, is {due}; hint: --restart throws away what an \
         interrupted run has left"
    );
}
