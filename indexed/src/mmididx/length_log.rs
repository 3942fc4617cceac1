//! The log from which an `.idx` is made: the length of every sequence and where documents end, as
//! one stream of small numbers. It is in memory while it is small and then in a draft beside the
//! outputs, so that the memory of a writer does not grow with its output.

use std::sync::Arc;

use storage::{Key, Object, RangeRead, ResumableUpload, Storage, SyncPoint};

use crate::{Error, Result};

/// About six million sequences of two or three bytes each.
const SPILL_BYTES: usize = 16 << 20;

/// Bytes of one read.
const CHUNK_BYTES: usize = 1 << 20;

/// One entry of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A sequence with this many tokens; true if its document ends with it.
    Sequence(u64, bool),
    /// A document ends here.
    DocumentEnd,
}

/// The stream, and its counts.
#[derive(Debug)]
pub(crate) struct LengthLog {
    /// Numbers at seven bits a byte (LEB128): 0 is [`Event::DocumentEnd`], a sequence of `n` tokens
    /// is `2 n + 1`, or `2 n + 2` with the end of its document.
    pending: Vec<u8>,
    /// The last sequence, while its document may still end with it.
    last: Option<u64>,
    side: LengthSpill,
    counts: Counts,
}

/// The counts of a log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Counts {
    pub(crate) sequences: u64,
    pub(crate) documents: u64,
    /// Sequences in ended documents.
    pub(crate) sequences_ended: u64,
    pub(crate) tokens: u64,
}

/// Where the stream is written when it is too long for memory.
#[derive(Debug)]
enum LengthSpill {
    /// Not needed so far.
    Memory(Arc<dyn Storage>, Key),
    /// The store has no drafts that can be read.
    MemoryOnly,
    Draft {
        store: Arc<dyn Storage>,
        key: Key,
        draft: Box<dyn ResumableUpload>,
        keep: bool,
    },
}

impl LengthLog {
    /// An empty log that is deleted when it is dropped. `key` names its draft, if it needs one.
    pub(crate) fn new(store: &Arc<dyn Storage>, key: Key) -> Self {
        LengthLog::on(LengthSpill::Memory(Arc::clone(store), key), Counts::default())
    }

    /// An empty log whose draft survives a drop.
    pub(crate) fn create(store: &Arc<dyn Storage>, key: Key) -> Result<Self> {
        let draft = store.create_resumable(&key)?;
        let side = LengthSpill::Draft { store: Arc::clone(store), key, draft, keep: true };
        Ok(LengthLog::on(side, Counts::default()))
    }

    /// A log that another process synced.
    pub(crate) fn resume(
        store: &Arc<dyn Storage>,
        key: Key,
        from: SyncPoint,
        counts: Counts,
    ) -> Result<Self> {
        let draft = store.resume(&key, from)?;
        let side = LengthSpill::Draft { store: Arc::clone(store), key, draft, keep: true };
        Ok(LengthLog::on(side, counts))
    }

    fn on(side: LengthSpill, counts: Counts) -> Self {
        LengthLog { pending: Vec::new(), last: None, side, counts }
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    pub(crate) fn push_sequence(&mut self, tokens: u64) -> Result<()> {
        self.flush_last();
        self.last = Some(tokens);
        self.counts.sequences += 1;
        self.counts.tokens += tokens;
        if self.pending.len() >= SPILL_BYTES { self.spill() } else { Ok(()) }
    }

    pub(crate) fn end_document(&mut self) {
        let code = self.last.take().map_or(0, |tokens| 2 * tokens + 2);
        push(&mut self.pending, code);
        self.counts.documents += 1;
        self.counts.sequences_ended = self.counts.sequences;
    }

    /// Makes everything so far durable.
    ///
    /// # Panics
    /// If its draft does not survive a drop.
    pub(crate) fn sync(&mut self) -> Result<SyncPoint> {
        self.flush_last();
        self.spill()?;
        let LengthSpill::Draft { draft, .. } = &mut self.side else {
            unreachable!("only a draft that survives a drop is synced");
        };
        Ok(draft.sync()?)
    }

    /// Returns all events from the start, after flushing them to where they can be read.
    pub(crate) fn reader(&mut self) -> Result<Reader<'_>> {
        self.flush_last();
        let (mut object, mut end) = (None, 0);
        if let LengthSpill::Draft { .. } = &self.side {
            self.spill()?;
            let LengthSpill::Draft { store, key, draft, .. } = &mut self.side else {
                unreachable!("as above");
            };
            end = draft.sync()?.bytes;
            object = Some(store.open_partial(key)?);
        }
        Ok(Reader { object, offset: 0, end, chunk: Vec::new(), pending: &self.pending, at: 0 })
    }

    fn flush_last(&mut self) {
        if let Some(tokens) = self.last.take() {
            push(&mut self.pending, 2 * tokens + 1);
        }
    }

    fn spill(&mut self) -> Result<()> {
        if let LengthSpill::Memory(store, key) = &self.side {
            let (store, key) = (Arc::clone(store), key.clone());
            if matches!(store.open_partial(&key), Err(storage::Error::Unsupported { .. })) {
                self.side = LengthSpill::MemoryOnly;
                return Ok(());
            }
            self.side = match store.create_resumable(&key) {
                Ok(draft) => LengthSpill::Draft { store, key, draft, keep: false },
                // Left by a killed writer; an active writer locks its draft.
                Err(storage::Error::Exists { .. }) => {
                    let draft = store.resume(&key, SyncPoint::default())?;
                    LengthSpill::Draft { store, key, draft, keep: false }
                }
                Err(error) => return Err(error.into()),
            };
        }
        if let LengthSpill::Draft { draft, .. } = &mut self.side {
            draft.write(&self.pending)?;
            self.pending.clear();
        }
        Ok(())
    }
}

impl Drop for LengthLog {
    fn drop(&mut self) {
        let side = std::mem::replace(&mut self.side, LengthSpill::MemoryOnly);
        let LengthSpill::Draft { store, key, draft, keep: false } = side else { return };
        drop(draft);
        if let Err(error) = store.discard(&key) {
            log::warn!("{}: resumable upload not removed: {error}", store.display(&key));
        }
    }
}

/// Iterates over the events of a log.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    object: Option<Arc<dyn Object>>,
    offset: u64,
    /// End of the valid bytes: a draft may have blocks of other data at its end.
    end: u64,
    chunk: Vec<u8>,
    pending: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    pub(crate) fn next(&mut self) -> Result<Option<Event>> {
        let (mut code, mut shift) = (0_u64, 0);
        loop {
            let Some(byte) = self.byte()? else {
                return if shift == 0 { Ok(None) } else { Err(self.corrupt()) };
            };
            if shift > 63 {
                return Err(self.corrupt());
            }
            code |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                break;
            }
            shift += 7;
        }
        Ok(Some(match code {
            0 => Event::DocumentEnd,
            code => Event::Sequence((code - 1) / 2, code % 2 == 0),
        }))
    }

    #[inline]
    fn byte(&mut self) -> Result<Option<u8>> {
        if self.at == self.chunk.len() && !self.refill()? {
            return Ok(None);
        }
        self.at += 1;
        Ok(Some(self.chunk[self.at - 1]))
    }

    /// The next chunk of the draft; after the last, the part in memory.
    fn refill(&mut self) -> Result<bool> {
        self.at = 0;
        self.chunk.clear();
        if let Some(object) = &self.object {
            let left = self.end - self.offset;
            let len = left.min(CHUNK_BYTES as u64) as usize; // fits: at most a chunk
            self.chunk.resize(len, 0);
            object.read_many(&mut [RangeRead { offset: self.offset, buf: &mut self.chunk }])?;
            self.offset += len as u64;
            if len > 0 {
                return Ok(true);
            }
            self.object = None;
        }
        self.chunk.extend_from_slice(std::mem::take(&mut self.pending));
        Ok(!self.chunk.is_empty())
    }

    /// This process wrote the draft, so only a disk that corrupts data gets here.
    fn corrupt(&self) -> Error {
        let what = self.object.as_ref().map_or_else(String::new, |object| object.display());
        let (found, expected) = ("a truncated number".to_owned(), "a length".to_owned());
        Error::Storage(storage::Error::Corrupt {
            object: what,
            offset: self.offset,
            found,
            expected,
        })
    }
}

fn push(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(log: &mut LengthLog) -> Vec<Event> {
        let mut reader = log.reader().unwrap();
        let mut events = Vec::new();
        while let Some(event) = reader.next().unwrap() {
            events.push(event);
        }
        events
    }

    #[test]
    fn events_round_trip_through_memory_and_a_draft() {
        let folder = tempfile::tempdir().unwrap();
        let store = storage::open_url(folder.path().to_str().unwrap()).unwrap();
        let key = Key::new("a.outline").unwrap();
        let fill = |log: &mut LengthLog| {
            log.end_document();
            for bit in 0..31 {
                log.push_sequence((1 << bit) - 1).unwrap();
                log.push_sequence(1 << bit).unwrap();
                log.end_document();
            }
        };
        let mut memory = LengthLog::new(&store, key.clone());
        fill(&mut memory);
        let expected = events(&mut memory);
        assert_eq!(expected.len(), 63);
        assert_eq!(
            expected[..3],
            [Event::DocumentEnd, Event::Sequence(0, false), Event::Sequence(1, true)]
        );
        assert_eq!(expected[62], Event::Sequence(1 << 30, true));

        let mut kept = LengthLog::create(&store, key.clone()).unwrap();
        fill(&mut kept);
        let (mark, counts) = (kept.sync().unwrap(), kept.counts());
        kept.push_sequence(77).unwrap();
        drop(kept);
        let mut kept = LengthLog::resume(&store, key.clone(), mark, counts).unwrap();
        assert_eq!(kept.counts(), memory.counts());
        kept.push_sequence(9).unwrap();
        // Synced between a sequence and the end of its document.
        kept.sync().unwrap();
        kept.end_document();
        let tail = [Event::Sequence(9, false), Event::DocumentEnd];
        assert_eq!(events(&mut kept), [&expected[..], &tail].concat());
        drop(kept);
        store.discard(&key).unwrap();
    }

    #[test]
    fn a_long_log_is_spilled_and_deleted_when_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let store = storage::open_url(folder.path().to_str().unwrap()).unwrap();
        let key = Key::new("a.outline").unwrap();
        let mut long = LengthLog::new(&store, key.clone());
        let count = SPILL_BYTES as u64 / 2 + 1_000_000;
        for _ in 0..count {
            long.push_sequence(100).unwrap();
            long.end_document();
        }
        assert!(long.pending.len() < SPILL_BYTES / 2, "it is in memory");
        store.open_partial(&key).unwrap();
        let events = events(&mut long);
        assert_eq!(events.len() as u64, count);
        assert!(events.iter().all(|event| *event == Event::Sequence(100, true)));
        drop(long);
        assert!(store.open_partial(&key).is_err(), "the draft is still there");
    }
}
