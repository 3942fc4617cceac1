//! Finds line ends: `\n`, `\r\n` or `\r`, the universal newlines with which Python's `open` reads
//! text. Other programs that make token files read their inputs that way.

use memchr::{memchr_iter, memchr2, memrchr2};

/// The end of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LineEnd {
    /// The end of its text.
    pub(super) end: usize,
    /// The start of the next line.
    pub(super) next: usize,
}

impl LineEnd {
    /// The same place in a slice that begins `bytes` bytes earlier.
    pub(super) fn shifted(self, bytes: usize) -> LineEnd {
        LineEnd { end: self.end + bytes, next: self.next + bytes }
    }
}

/// The first line, and the start of the next. The `\r` of a `\r\n` stays with the line: it is white
/// space to JSON, and a copy of the line has it too.
pub(crate) fn split_line(bytes: &[u8]) -> (&[u8], usize) {
    match line_end(bytes) {
        Some(line) => (&bytes[..line.next - 1], line.next),
        None => (bytes, bytes.len()),
    }
}

/// The end of the first line. A `\r` at the end of the bytes ends a line.
pub(super) fn line_end(bytes: &[u8]) -> Option<LineEnd> {
    let end = memchr2(b'\n', b'\r', bytes)?;
    let is_pair = bytes[end] == b'\r' && bytes.get(end + 1) == Some(&b'\n');
    Some(LineEnd { end, next: end + 1 + usize::from(is_pair) })
}

/// As [`line_end`], where more bytes may follow: whether a `\r` at the end of the bytes is half of
/// a `\r\n` is not known yet.
pub(super) fn line_end_known(bytes: &[u8]) -> Option<LineEnd> {
    line_end(bytes).filter(|line| line.next < bytes.len() || bytes[line.next - 1] == b'\n')
}

/// The end of the last line that has one.
pub(super) fn last_line_end(bytes: &[u8]) -> Option<LineEnd> {
    let last = memrchr2(b'\n', b'\r', bytes)?;
    let is_pair = bytes[last] == b'\n' && last > 0 && bytes[last - 1] == b'\r';
    Some(LineEnd { end: last - usize::from(is_pair), next: last + 1 })
}

/// As [`last_line_end`], where more bytes may follow.
pub(super) fn last_line_end_known(bytes: &[u8]) -> Option<LineEnd> {
    last_line_end(bytes.strip_suffix(b"\r").unwrap_or(bytes))
}

/// The number of lines that end in `bytes[..len]`. Bytes after it are examined, not counted.
pub(super) fn count_line_ends(bytes: &[u8], len: usize) -> u64 {
    let newlines = memchr_iter(b'\n', &bytes[..len]).count();
    let returns = memchr_iter(b'\r', &bytes[..len]);
    let lone = returns.filter(|&at| bytes.get(at + 1) != Some(&b'\n')).count();
    (newlines + lone) as u64
}

/// Whether a line has nothing that could be a document.
pub(crate) fn is_blank(line: &[u8]) -> bool {
    // The first byte decides for most lines.
    line.iter().all(|byte| matches!(byte, b' ' | b'\t' | b'\r'))
}

/// A line without its end, if it has one.
pub(super) fn without_line_end(line: &[u8]) -> &[u8] {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    line.strip_suffix(b"\r").unwrap_or(line)
}
