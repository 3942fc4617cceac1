//! Encodes many texts on several threads.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use crate::{Error, Result, Tokenizer};

/// Texts that a thread takes at a time: enough that taking them costs nothing, few enough that all
/// threads end together.
const RUN_BYTES: usize = 256 << 10;

/// Below this many bytes, allocating an encoder's caches (0.2 ms) costs more than they save.
const ENCODER_BYTES_MIN: usize = 4 << 10;

/// The ids of many texts, back to back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenBatch {
    /// The ids of all texts.
    pub ids: Vec<u32>,
    /// Where each text starts in `ids`, and where the last one ends: one more than there are texts.
    pub offsets: Vec<i64>,
}

/// The ids of one run of texts.
#[derive(Debug, Default)]
struct EncodedRun {
    ids: Vec<u32>,
    lens: Vec<usize>,
}

/// Encodes texts on up to `threads` threads. The result does not depend on their number.
///
/// # Errors
/// [`Error::BadText`] for a text that the tokenizer refuses; [`Error::Stopped`] once `stop` is set.
pub fn encode_batch(
    tokenizer: &dyn Tokenizer,
    texts: &[&str],
    threads: usize,
    stop: &AtomicBool,
) -> Result<TokenBatch> {
    let runs = runs(texts);
    let next = AtomicUsize::new(0);
    let is_short = texts.iter().map(|text| text.len()).sum::<usize>() < ENCODER_BYTES_MIN;
    let work = || {
        let mut encoder = (!is_short).then(|| tokenizer.encoder());
        let mut done = Vec::new();
        loop {
            let nth = next.fetch_add(1, Ordering::Relaxed);
            let Some(run) = runs.get(nth) else { return Ok(done) };
            let mut encoded = EncodedRun::default();
            for (index, text) in run.clone().zip(&texts[run.clone()]) {
                if stop.load(Ordering::Relaxed) {
                    return Err(Error::Stopped);
                }
                if let Some(refused) = tokenizer.refused(text) {
                    return Err(Error::BadText { text: index, refused: Box::new(refused) });
                }
                let before = encoded.ids.len();
                match &mut encoder {
                    Some(encoder) => encoder.encode(text, &mut encoded.ids),
                    None => tokenizer.encode(text, &mut encoded.ids),
                }
                encoded.lens.push(encoded.ids.len() - before);
            }
            done.push((nth, encoded));
        }
    };
    let threads = threads.clamp(1, runs.len().max(1));
    let each = thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut each = vec![work()];
        each.extend(others.into_iter().map(|thread| thread.join().expect("an encoder panicked")));
        each
    });
    let mut encoded = Vec::with_capacity(runs.len());
    for done in each {
        encoded.append(&mut done?);
    }
    encoded.sort_unstable_by_key(|(nth, _)| *nth);
    Ok(joined(encoded.into_iter().map(|(_, run)| run).collect(), texts.len(), threads))
}

/// Cuts texts into runs of about [`RUN_BYTES`].
fn runs(texts: &[&str]) -> Vec<Range<usize>> {
    let (mut runs, mut first, mut bytes) = (Vec::new(), 0, 0);
    for (index, text) in texts.iter().enumerate() {
        bytes += text.len();
        if bytes >= RUN_BYTES || index + 1 == texts.len() {
            runs.push(first..index + 1);
            (first, bytes) = (index + 1, 0);
        }
    }
    runs
}

/// Puts the runs together. Writing to fresh memory is most of this work, so that threads share it.
fn joined(mut runs: Vec<EncodedRun>, texts: usize, threads: usize) -> TokenBatch {
    let mut offsets = Vec::with_capacity(texts + 1);
    let mut end = 0;
    offsets.push(0);
    for len in runs.iter().flat_map(|run| &run.lens) {
        end += *len as i64; // fits: they are in memory
        offsets.push(end);
    }
    if let [only] = &mut runs[..] {
        return TokenBatch { ids: std::mem::take(&mut only.ids), offsets };
    }
    let mut ids = vec![0; end as usize]; // fits: as above
    let mut parts = Vec::with_capacity(runs.len());
    let mut rest = &mut ids[..];
    for run in &runs {
        let (part, after) = rest.split_at_mut(run.ids.len());
        parts.push((part, &run.ids));
        rest = after;
    }
    let share = parts.len().div_ceil(threads).max(1);
    thread::scope(|scope| {
        for parts in parts.chunks_mut(share) {
            scope.spawn(|| parts.iter_mut().for_each(|(part, ids)| part.copy_from_slice(ids)));
        }
    });
    TokenBatch { ids, offsets }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{TokenizerSpec, open_tokenizer};

    fn open(kind: &str) -> std::sync::Arc<dyn Tokenizer> {
        let vocab_size = (kind == "null").then_some(100);
        let kind = kind.to_owned();
        let spec = TokenizerSpec { kind, vocab_size, ..TokenizerSpec::default() };
        open_tokenizer(&spec).expect("built in")
    }

    #[test]
    fn ids_do_not_depend_on_the_threads() {
        let tokenizer = open("gpt2");
        let long = "a long text ".repeat(40_000);
        let mut texts = vec!["", "one", "two words", &long, "ü 世界"];
        for _ in 0..6 {
            texts = texts.repeat(2);
        }
        let never = AtomicBool::new(false);
        let encode = |threads| encode_batch(&*tokenizer, &texts, threads, &never).expect("texts");
        let one = encode(1);
        assert_eq!(one.offsets.len(), texts.len() + 1);
        for (text, ends) in texts.iter().zip(one.offsets.windows(2)) {
            let mut expected = Vec::new();
            tokenizer.encode(text, &mut expected);
            assert_eq!(one.ids[ends[0] as usize..ends[1] as usize], expected);
        }
        for threads in [2, 3, 16] {
            assert_eq!(encode(threads), one);
        }
        let none = encode_batch(&*tokenizer, &[], 4, &never).expect("nothing");
        assert_eq!((none.ids.len(), none.offsets), (0, vec![0]));
    }

    #[test]
    fn refused_text_is_reported_and_stop_is_obeyed() {
        let tokenizer = open("null");
        let stop = AtomicBool::new(false);
        let error = encode_batch(&*tokenizer, &["1", "2 3", "four"], 2, &stop).expect_err("a word");
        let text = error.to_string();
        assert!(text.starts_with("cannot encode text 2: expected "), "{text}");
        stop.store(true, Ordering::Relaxed);
        let stopped = encode_batch(&*tokenizer, &["1"], 1, &stop);
        assert!(matches!(stopped, Err(Error::Stopped)));
    }
}
