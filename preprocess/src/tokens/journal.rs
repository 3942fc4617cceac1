//! The journal of an unfinished run: commit records in a resumable upload beside the outputs, so
//! that a killed run resumes from the last of them. Each line is the CRC-64 of the rest of the line
//! and a JSON object; the first describes the run. A truncated line was being written when the
//! process ended, and is ignored.

use std::sync::Arc;

use indexed::BuilderMark;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use storage::{Key, ResumableUpload, Storage, SyncPoint, crc64};

use crate::batch::encoded::LineCounts;
use crate::{Error, InputReport, Result};

/// A commit record: everything up to this position in the inputs is in the outputs, durably.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) input_idx: usize,
    /// Offset of the next batch in that input.
    pub(crate) offset: u64,
    pub(crate) builders: Vec<BuilderMark>,
    pub(crate) tally: LineCounts,
    /// Wall-clock time of all processes so far.
    pub(crate) elapsed_s: f64,
    /// Inputs read since the previous record.
    pub(crate) inputs: Vec<(usize, InputReport)>,
}

/// The journal of a run, being written.
#[derive(Debug)]
pub(crate) struct Journal {
    store: Arc<dyn Storage>,
    key: Key,
    draft: Box<dyn ResumableUpload>,
    /// Whether the run can be resumed.
    pub(crate) has_record: bool,
}

/// The state of an interrupted run.
#[derive(Debug)]
pub(crate) struct ResumeState {
    pub(crate) journal: Journal,
    /// The last record, with the inputs of all. `None` if the run was interrupted before the first.
    pub(crate) record: Option<Record>,
    /// The builders of all records, oldest first.
    pub(crate) marks: Vec<Vec<BuilderMark>>,
}

impl Journal {
    /// Creates the journal of a run, with its description.
    pub(crate) fn create(store: &Arc<dyn Storage>, key: Key, run: &Value) -> Result<Self> {
        let draft = store.create_resumable(&key)?;
        let mut journal = Journal { store: Arc::clone(store), key, draft, has_record: false };
        if let Err(error) = journal.append(run) {
            if let Err(error) = journal.discard() {
                log::warn!("a failed run was not rolled back: {error}");
            }
            return Err(error);
        }
        Ok(journal)
    }

    /// Opens an existing journal, if there is one.
    pub(crate) fn resume(
        store: &Arc<dyn Storage>,
        key: &Key,
        run: &Value,
    ) -> Result<Option<ResumeState>> {
        let mut found = JournalContents::default();
        let draft = store.resume_with(key, &mut |object| {
            let mut bytes = vec![0; object.len_bytes() as usize]; // fits: of our own records
            object.read_many(&mut [storage::RangeRead { offset: 0, buf: &mut bytes }])?;
            found = JournalContents::in_bytes(&bytes);
            // The journal of another run is not changed.
            let other = found.run.as_ref().is_some_and(|there| same_run("", there, run).is_err());
            let end = if other { bytes.len() } else { found.end };
            Ok(SyncPoint { bytes: end as u64, crc64: crc64(&bytes[..end]) })
        });
        let draft = match draft {
            Err(storage::Error::NotFound { .. }) => return Ok(None),
            draft => draft?,
        };
        let JournalContents { run: Some(there), record, marks, .. } = found else {
            // Killed before its first line was complete: there is nothing to resume.
            store.discard(key)?;
            return Ok(None);
        };
        same_run(&store.display(key), &there, run)?;
        let has_record = record.is_some();
        let journal = Journal { store: Arc::clone(store), key: key.clone(), draft, has_record };
        Ok(Some(ResumeState { journal, record, marks }))
    }

    /// Checks that a record has no more outputs and inputs than the run.
    pub(crate) fn check(&self, record: &Record, outputs: usize, inputs: usize) -> Result<()> {
        let count_to = |(idx, _): &(usize, InputReport)| idx.saturating_add(1);
        let input_count = record.inputs.iter().map(count_to).max().unwrap_or(0);
        let recorded = (record.builders.len(), input_count.max(record.input_idx));
        if recorded.0 == outputs && recorded.1 <= inputs {
            return Ok(());
        }
        let words = |(outputs, inputs)| format!("{outputs} and {inputs}");
        let journal = self.store.display(&self.key);
        Err(other_run(&journal, "outputs and inputs", words(recorded), words((outputs, inputs))))
    }

    /// Adds a record. On return it is durable, and a resumed run starts from it.
    pub(crate) fn commit(&mut self, record: &Record) -> Result<()> {
        self.append(record)?;
        self.has_record = true;
        Ok(())
    }

    /// Removes the journal: the run is finished, or not worth resuming.
    pub(crate) fn discard(&mut self) -> Result<()> {
        Ok(self.store.discard(&self.key)?)
    }

    fn append(&mut self, line: &impl Serialize) -> Result<()> {
        let json = serde_json::to_string(line).expect("our own types, whose keys are text");
        self.draft.write(format!("{:016x} {json}\n", crc64(json.as_bytes())).as_bytes())?;
        self.draft.sync()?;
        Ok(())
    }
}

/// The contents of the complete lines.
#[derive(Debug, Default)]
struct JournalContents {
    run: Option<Value>,
    /// The last, with the inputs of all.
    record: Option<Record>,
    /// The builders of all.
    marks: Vec<Vec<BuilderMark>>,
    end: usize,
}

impl JournalContents {
    fn in_bytes(bytes: &[u8]) -> Self {
        let mut lines = Lines { bytes, at: 0 };
        let run = lines.next().and_then(|json| serde_json::from_str(json).ok());
        let end = if run.is_some() { lines.at } else { 0 };
        let mut found = JournalContents { run, end, ..JournalContents::default() };
        while found.run.is_some()
            && let Some(mut next) =
                lines.next().and_then(|json| serde_json::from_str::<Record>(json).ok())
        {
            found.marks.push(next.builders.clone());
            if let Some(before) = found.record.take() {
                fold(&mut next, before);
            }
            found.record = Some(next);
            found.end = lines.at;
        }
        found
    }
}

/// Inputs that the newer record lacks are taken from the older.
fn fold(newer: &mut Record, older: Record) {
    let known: Vec<usize> = newer.inputs.iter().map(|(idx, _)| *idx).collect();
    newer.inputs.extend(older.inputs.into_iter().filter(|(idx, _)| !known.contains(idx)));
}

/// Complete lines, from the start.
struct Lines<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Lines<'a> {
    fn next(&mut self) -> Option<&'a str> {
        let rest = &self.bytes[self.at..];
        let len = memchr::memchr(b'\n', rest)?;
        let line = std::str::from_utf8(&rest[..len]).ok()?;
        let (sum, json) = line.split_once(' ')?;
        if sum != format!("{:016x}", crc64(json.as_bytes())) {
            return None;
        }
        self.at += len + 1;
        Some(json)
    }
}

/// Resuming with other settings would make files that no single run makes.
fn same_run(journal: &str, there: &Value, here: &Value) -> Result<()> {
    let (Value::Object(there), Value::Object(here)) = (there, here) else {
        return Err(other_run(
            journal,
            "settings",
            "an object".to_owned(),
            "another value".to_owned(),
        ));
    };
    // A setting with the meaning that it had before it existed is in neither.
    for key in here.keys().chain(there.keys()) {
        let [found, expected] = [there, here].map(|run| run.get(key).unwrap_or(&Value::Null));
        if found != expected {
            return Err(other_run(journal, key, found.to_string(), expected.to_string()));
        }
    }
    Ok(())
}

fn other_run(journal: &str, key: &str, there: String, here: String) -> Error {
    Error::OtherRun { journal: journal.to_owned(), key: key.to_owned(), there, here }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use storage::testing::fault_store::{FaultPlan, FaultStore};

    fn record(input_idx: usize, offset: u64, lines: u64) -> Record {
        let input = InputReport { lines, ..InputReport::default() };
        Record {
            input_idx,
            offset,
            builders: Vec::new(),
            tally: LineCounts::default(),
            elapsed_s: 1.5,
            inputs: vec![(input_idx, input)],
        }
    }

    #[test]
    fn the_last_whole_record_counts() {
        let sim = FaultStore::new(1, FaultPlan::default());
        let store: Arc<dyn Storage> = Arc::new(sim.clone());
        let (key, run) = (Key::new("a.journal").unwrap(), json!({ "keys": ["text"] }));
        assert!(Journal::resume(&store, &key, &run).unwrap().is_none());
        let mut journal = Journal::create(&store, key.clone(), &run).unwrap();
        let mut certain = vec![(sim.op_count(), None)];
        for (idx, offset) in [(0, 10), (0, 20), (1, 5)] {
            journal.commit(&record(idx, offset, offset)).unwrap();
            certain.push((sim.op_count(), Some((idx, offset))));
        }
        for ops in certain[0].0..=sim.op_count() {
            for seed in 0..20 {
                let after: Arc<dyn Storage> = Arc::new(sim.crash_at(ops, seed));
                let state = Journal::resume(&after, &key, &run).unwrap().unwrap();
                let (_, expected) = certain.iter().rfind(|(at, _)| *at <= ops).unwrap();
                let found = state.record.as_ref().map(|record| (record.input_idx, record.offset));
                // A record that was being written may have become durable.
                assert!(
                    found >= *expected,
                    "{ops} operations, seed {seed}: {found:?} after {expected:?}"
                );
                assert_eq!(state.journal.has_record, found.is_some());
            }
        }
        drop(journal);
        let state = Journal::resume(&store, &key, &run).unwrap().unwrap();
        let mut inputs = state.record.unwrap().inputs;
        inputs.sort_by_key(|(idx, _)| *idx);
        let lines: Vec<_> = inputs.iter().map(|(idx, input)| (*idx, input.lines)).collect();
        assert_eq!(lines, [(0, 20), (1, 5)]);
        let mut journal = state.journal;
        journal.discard().unwrap();
        assert!(Journal::resume(&store, &key, &run).unwrap().is_none());
    }

    #[test]
    fn records_beyond_the_inputs_are_refused() {
        let store: Arc<dyn Storage> = Arc::new(FaultStore::new(1, FaultPlan::default()));
        let key = Key::new("a.journal").unwrap();
        let journal = Journal::create(&store, key, &json!({})).unwrap();
        assert!(journal.check(&record(1, 5, 5), 0, 2).is_ok());
        assert!(journal.check(&record(usize::MAX - 1, 5, 5), 0, 2).is_err());
        assert!(journal.check(&record(1, 5, 5), 1, 2).is_err());
    }

    #[test]
    fn another_run_is_refused() {
        let store: Arc<dyn Storage> = Arc::new(FaultStore::new(1, FaultPlan::default()));
        let key = Key::new("a.journal").unwrap();
        drop(Journal::create(&store, key.clone(), &json!({ "keys": ["text"] })).unwrap());
        let error = Journal::resume(&store, &key, &json!({ "keys": ["body"] })).unwrap_err();
        let words = error.to_string();
        assert!(words.contains("keys") && words.contains("text"), "{words}");
        assert!(words.contains("body"), "{words}");
    }
}
