//! One long text on all cores: cut where the tokenizer says that nothing changes by it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::Tokenizer;

/// Twice this is worth the threads: a part takes some ten milliseconds.
const PART_BYTES: usize = 1 << 20;

/// Encodes a text in parts, side by side. False: it is too short, or has no place to be cut at, and
/// nothing was done.
pub(crate) fn encode(
    tokenizer: &dyn Tokenizer,
    text: &str,
    threads: usize,
    ids: &mut Vec<u32>,
) -> bool {
    if threads < 2 || text.len() < 2 * PART_BYTES {
        return false;
    }
    let parts = cut(tokenizer, text);
    if parts.len() < 2 {
        return false;
    }
    let next = AtomicUsize::new(0);
    let encoded: Vec<Mutex<Vec<u32>>> = parts.iter().map(|_| Mutex::default()).collect();
    thread::scope(|scope| {
        for _ in 0..threads.min(parts.len()) {
            scope.spawn(|| {
                let mut encoder = tokenizer.encoder();
                while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let mut ids = Vec::new();
                    encoder.encode(part.text, &mut ids);
                    let mut place =
                        encoded[part.number].lock().unwrap_or_else(PoisonError::into_inner);
                    *place = ids;
                }
            });
        }
    });
    for part in encoded {
        ids.extend(part.into_inner().unwrap_or_else(PoisonError::into_inner));
    }
    true
}

struct Part<'a> {
    number: usize,
    text: &'a str,
}

fn cut<'a>(tokenizer: &dyn Tokenizer, text: &'a str) -> Vec<Part<'a>> {
    let mut parts = Vec::new();
    let mut start = 0;
    while text.len() - start >= 2 * PART_BYTES {
        let aim = start + PART_BYTES;
        // A character has at most four bytes.
        let at = (aim..aim + 4).find(|&at| text.is_char_boundary(at)).unwrap_or(aim);
        let Some(end) = tokenizer.cut_after(text, at) else { break };
        parts.push(Part { number: parts.len(), text: &text[start..end] });
        start = end;
    }
    parts.push(Part { number: parts.len(), text: &text[start..] });
    parts
}
