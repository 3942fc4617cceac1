//! Encodes one long text on all cores: cut where the tokenizer guarantees the same ids.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::Tokenizer;

/// Size of a part, some ten milliseconds of work. A text of twice this is worth the threads.
const PART_BYTES: usize = 1 << 20;

/// Number of free helper threads for long texts. There are as many as workers, shared by all of
/// them: a corpus of books keeps the workers busy by itself, and does not need that number squared.
#[derive(Debug)]
pub(crate) struct Helpers(AtomicUsize);

impl Helpers {
    pub(crate) fn new(workers: usize) -> Self {
        Helpers(AtomicUsize::new(if workers > 1 { workers } else { 0 }))
    }

    /// Takes up to `most`, and returns how many.
    fn take(&self, most: usize) -> usize {
        let mut taken = 0;
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free| {
            taken = free.min(most);
            Some(free - taken)
        });
        taken
    }

    fn give_back(&self, count: usize) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }
}

/// Encodes a text in parts, in parallel. False, with nothing done, if it is too short, cannot be
/// cut, or no helper is free.
pub(crate) fn encode(
    tokenizer: &dyn Tokenizer,
    text: &str,
    helpers: &Helpers,
    ids: &mut Vec<u32>,
) -> bool {
    if text.len() < 2 * PART_BYTES {
        return false;
    }
    let taken = helpers.take(text.len() / PART_BYTES);
    let done = taken > 1 && encode_parts(tokenizer, &cut(tokenizer, text), taken, ids);
    helpers.give_back(taken);
    done
}

fn encode_parts(
    tokenizer: &dyn Tokenizer,
    parts: &[TextSegment<'_>],
    threads: usize,
    ids: &mut Vec<u32>,
) -> bool {
    if parts.len() < 2 {
        return false;
    }
    let next = AtomicUsize::new(0);
    let encoded: Vec<Mutex<Vec<u32>>> = parts.iter().map(|_| Mutex::default()).collect();
    let work = || {
        let mut encoder = tokenizer.encoder();
        while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
            let mut ids = Vec::new();
            encoder.encode(part.text, &mut ids);
            let mut place = encoded[part.number].lock().unwrap_or_else(PoisonError::into_inner);
            *place = ids;
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads.min(parts.len()) {
            // If the system creates no more threads, the existing ones do all of it.
            let _ = thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
    for part in encoded {
        ids.extend(part.into_inner().unwrap_or_else(PoisonError::into_inner));
    }
    true
}

struct TextSegment<'a> {
    number: usize,
    text: &'a str,
}

fn cut<'a>(tokenizer: &dyn Tokenizer, text: &'a str) -> Vec<TextSegment<'a>> {
    let mut parts = Vec::new();
    let mut start = 0;
    while text.len() - start >= 2 * PART_BYTES {
        let aim = start + PART_BYTES;
        // A character has at most four bytes.
        let at = (aim..aim + 4).find(|&at| text.is_char_boundary(at)).unwrap_or(aim);
        let Some(end) = tokenizer.cut_after(text, at) else { break };
        parts.push(TextSegment { number: parts.len(), text: &text[start..end] });
        start = end;
    }
    parts.push(TextSegment { number: parts.len(), text: &text[start..] });
    parts
}
