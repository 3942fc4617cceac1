//! Whether the inputs and drafts of a resumed run still hold what an earlier process has read and
//! written: otherwise the outputs would be those of no single run.

use std::cmp::Ordering;
use std::sync::atomic::{self, AtomicBool};

use indexed::BuilderMark;
use storage::{ByteSize, Crc64, Key, Object, RangeRead, Storage, SyncPoint, crc64_join};

use crate::batch::document_batch::{BatchEnd, DocumentBatch};
use crate::batch::report::InputReport;
use crate::checksum::Checksum;
use crate::input::{Input, InputChunker};
use crate::tokens::journal::Record;
use crate::tokens::run::LINE_BYTES_MAX;
use crate::{Error, Result};

/// Inputs are read again in batches of this size, drafts in pieces of it.
const READ_BYTES: usize = 1 << 20;

/// The end of a draft that is read again, if sync points allow: half a second at 500 MB/s. A crash
/// of the machine damages the bytes that were written last.
const DRAFT_BYTES_MAX: u64 = 256 << 20;

/// Compares the inputs with their records in the journal, and returns the number of those that
/// cannot be compared. A finished input must be the same; of the one in progress, only the part
/// that was read, so that a bad line after it may be repaired. An input is read again only if the
/// store cannot show that it is unchanged.
pub(crate) fn check_inputs(
    record: &Record,
    inputs: &[Input],
    workers: usize,
    stop: &AtomicBool,
) -> Result<usize> {
    let mut unknown = 0;
    for (idx, before) in &record.inputs {
        let check = InputCheck { input: &inputs[*idx], before, workers, stop };
        let is_comparable = match idx.cmp(&record.input_idx) {
            Ordering::Less => check.finished()?,
            Ordering::Equal => check.in_progress()?,
            Ordering::Greater => true,
        };
        unknown += usize::from(!is_comparable);
    }
    if unknown > 0 {
        // The report has it, too.
        log::info!(
            "{unknown} of {} inputs: identity not recorded (a stream, or a journal of an earlier \
             version); not compared with what was read",
            inputs.len()
        );
    }
    Ok(unknown)
}

struct InputCheck<'a> {
    input: &'a Input,
    before: &'a InputReport,
    workers: usize,
    stop: &'a AtomicBool,
}

impl InputCheck<'_> {
    /// False: there is nothing to compare it with.
    fn finished(&self) -> Result<bool> {
        let Some(was) = &self.before.identity else { return Ok(false) };
        let Some(is) = &self.input.identity else {
            return Err(self.changed(bytes(was.bytes), "a stream".to_owned()));
        };
        if was.bytes != is.bytes {
            return Err(self.changed(bytes(was.bytes), bytes(is.bytes)));
        }
        if was.ends_crc64 != is.ends_crc64 {
            let words = |crc64| format!("CRC-64 {crc64} of its first and last 64 KiB");
            return Err(self.changed(words(was.ends_crc64), words(is.ends_crc64)));
        }
        if !is.is_unchanged_since(was) {
            self.compare_content(u64::MAX)?;
        }
        Ok(true)
    }

    /// As for a finished one.
    fn in_progress(&self) -> Result<bool> {
        let InputReport { json_bytes, json_crc64, .. } = *self.before;
        if json_bytes == 0 {
            return Ok(true);
        }
        let Some(is) = &self.input.identity else {
            // A stream is compared when its first bytes are skipped.
            return Ok(json_crc64.is_some());
        };
        let Some(was) = &self.before.identity else { return Ok(false) };
        if !is.is_unchanged_since(was) {
            self.compare_content(json_bytes)?;
        }
        Ok(true)
    }

    /// Reads the input up to a byte of its content, and compares it with the earlier read.
    fn compare_content(&self, end: u64) -> Result<()> {
        let InputReport { json_bytes, json_crc64, .. } = *self.before;
        let Some(crc64) = json_crc64 else {
            let was = "the version read before, whose checksum is unknown".to_owned();
            return Err(self.changed(was, "another".to_owned()));
        };
        log::info!(
            "{}: modified since it was read; comparing {} of content",
            self.input.name,
            ByteSize(json_bytes)
        );
        let found = self.content(end)?;
        if found == (json_bytes, crc64) {
            return Ok(());
        }
        let words = |(len, crc64)| format!("{} of content with CRC-64 {crc64}", bytes(len));
        Err(self.changed(words((json_bytes, crc64)), words(found)))
    }

    /// Length and checksum of the content up to `end`, or up to where it can be read no further.
    fn content(&self, end: u64) -> Result<(u64, Checksum)> {
        let (mut len, mut crc64) = (0, Crc64::new());
        let line_bytes_max = LINE_BYTES_MAX as usize; // fits: 1 GiB
        let mut chunker = InputChunker::new(vec![self.input.clone()], READ_BYTES, line_bytes_max)
            .ahead(self.workers);
        let mut batch = DocumentBatch::default();
        while len < end && chunker.fill(&mut batch) {
            if self.stop.load(atomic::Ordering::Relaxed) {
                return Err(Error::Stopped);
            }
            let wanted = (end - len).min(batch.bytes.len() as u64);
            crc64.update(&batch.bytes[..wanted as usize]); // fits: at most the batch
            len += wanted;
            match batch.stop.take() {
                Some(BatchEnd::Input(error)) if len < end => return Err(error),
                Some(_) => break,
                None => batch.reset(),
            }
        }
        Ok((len, Checksum(crc64.value())))
    }

    fn changed(&self, expected: String, found: String) -> Error {
        Error::Changed { object: self.input.name.clone(), expected, found }
    }
}

fn bytes(count: u64) -> String {
    format!("{count} bytes")
}

/// Reads the end of the drafts of an output and compares it with their sync points. `marks` are
/// those of all records, the last one last.
pub(crate) fn check_drafts(
    store: &dyn Storage,
    prefix: &Key,
    marks: &[&BuilderMark],
) -> Result<()> {
    let Some((last, earlier)) = marks.split_last() else { return Ok(()) };
    for (file, (suffix, to)) in last.sync_points().into_iter().enumerate() {
        let earlier = earlier.iter().map(|mark| mark.sync_points()[file].1);
        let Some(from) = check_from(earlier, to) else { continue };
        let key = prefix.with_suffix(suffix)?;
        let draft = match store.open_partial(&key) {
            Err(storage::Error::Unsupported { .. }) => {
                log::debug!("{}: not readable in this store; not checked", store.display(&key));
                continue;
            }
            // Finished already, by a process that ended before its run did.
            Err(storage::Error::NotFound { .. }) => store.open(&key)?,
            draft => draft?,
        };
        check_draft(draft.as_ref(), from, to)?;
    }
    Ok(())
}

/// The earliest sync point that is near enough to the last one, or else the one before it.
fn check_from(earlier: impl Iterator<Item = SyncPoint>, to: SyncPoint) -> Option<SyncPoint> {
    if to.bytes <= DRAFT_BYTES_MAX {
        return Some(SyncPoint::default());
    }
    let (mut near, mut before) = (None, None);
    for point in earlier.filter(|point| point.bytes < to.bytes) {
        if to.bytes - point.bytes <= DRAFT_BYTES_MAX {
            near = near.or(Some(point));
        }
        before = Some(point);
    }
    near.or(before)
}

fn check_draft(draft: &dyn Object, from: SyncPoint, to: SyncPoint) -> Result<()> {
    let (mut at, mut crc64) = (from.bytes, Crc64::new());
    let mut piece = vec![0; READ_BYTES];
    while at < to.bytes {
        let len = (to.bytes - at).min(READ_BYTES as u64) as usize; // fits: at most a piece
        draft.read_many(&mut [RangeRead { offset: at, buf: &mut piece[..len] }])?;
        crc64.update(&piece[..len]);
        at += len as u64;
    }
    let found = crc64_join(from.crc64, crc64.value(), to.bytes - from.bytes);
    if found == to.crc64 {
        return Ok(());
    }
    let words = |crc64| format!("CRC-64 {} up to byte {}", Checksum(crc64), to.bytes);
    Err(Error::Changed {
        object: format!("bytes {}..{} of {}", from.bytes, to.bytes, draft.display()),
        expected: words(to.crc64),
        found: words(found),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A long draft is read from the earliest sync point that limits the bytes read.
    #[test]
    fn the_last_sync_points_limit_the_bytes_read() {
        let point = |mib: u64| SyncPoint { bytes: mib << 20, crc64: mib };
        let from = |earlier: &[u64], to| {
            let found = check_from(earlier.iter().copied().map(point), point(to));
            found.map(|found| found.bytes >> 20)
        };
        assert_eq!(from(&[], 256), Some(0));
        assert_eq!(from(&[10], 256), Some(0));
        assert_eq!(from(&[], 257), None, "only one record, and the draft is long");
        assert_eq!(from(&[1, 2, 43, 44, 299, 300], 300), Some(44));
        assert_eq!(from(&[10, 20], 1000), Some(20), "the last commit, however long");
    }
}
