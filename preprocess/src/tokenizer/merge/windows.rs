//! Merging of very long pieces, window by window, so that the memory for it does not grow with the
//! piece.
//!
//! Two tokens may be adjacent if their bytes, merged as a text, are these two again. A sequence of
//! tokens is the result of merging its bytes if every two neighbours may be adjacent, and each
//! token is the result of merging its own bytes ([`super::super::by_char`] has the proof). So the
//! tokens of a window up to the end of one of them, and those of a window that starts there, are
//! the tokens of both, if the two that meet may be adjacent. If they may not, the piece is merged
//! again from an earlier end, in windows of twice the size.
//!
//! The first tokens of a sequence are the result of merging their bytes. So the last tokens of a
//! window, which depend on the bytes after it, are left out without a further check.

use std::ops::Range;

/// Longer pieces are merged in windows. A window of bytes takes 8 MiB, of characters 12 MiB.
pub(in super::super) const WINDOW_BYTES: usize = 256 << 10;

/// The tokens in the last eighth of a window are left to the next one: the bytes after a window
/// nearly always change them.
const EDGE_PART: usize = 8;

/// A token and the bytes of the piece that it takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct RowToken {
    pub(in super::super) id: u32,
    pub(in super::super) bytes: Range<usize>,
}

/// A way of merging, and where its tokens go.
pub(in super::super) trait WindowedMerge {
    /// How much has been written.
    type Mark: Copy;

    /// The longest symbol that merging starts from, in bytes. A window may end within one.
    fn symbol_bytes_max(&self) -> usize;

    /// Replaces `row` by the tokens that some bytes of the piece are merged into.
    fn merge(&mut self, bytes: Range<usize>, row: &mut Vec<RowToken>);

    fn mark(&self) -> Self::Mark;

    /// Removes the tokens written after a mark.
    fn rewind(&mut self, mark: Self::Mark);

    /// Writes a token.
    fn push(&mut self, token: &RowToken);
}

/// An end of a token, up to which all has been written.
#[derive(Clone, Debug)]
struct Border<M> {
    /// The token that ends there. None at the start of the piece.
    before: Option<RowToken>,
    mark: M,
}

impl<M> Border<M> {
    fn at(&self) -> usize {
        self.before.as_ref().map_or(0, |token| token.bytes.end)
    }
}

/// Merges a piece of `len` bytes.
pub(in super::super) fn merge_in_windows<W: WindowedMerge>(
    len: usize,
    mut window_bytes: usize,
    merging: &mut W,
) {
    let (mut row, mut pair) = (Vec::new(), Vec::new());
    let mut borders = vec![Border { before: None, mark: merging.mark() }];
    while let Some(border) = borders.last() {
        let start = border.at();
        if start == len {
            return;
        }
        let end = len.min(start.saturating_add(window_bytes));
        merging.merge(start..end, &mut row);
        let meets = border.before.as_ref().is_none_or(|before| {
            merging.merge(before.bytes.start..row[0].bytes.end, &mut pair);
            pair.len() == 2 && pair[0] == *before && pair[1] == row[0]
        });
        if !meets {
            borders.pop();
            if let Some(earlier) = borders.last() {
                merging.rewind(earlier.mark);
            }
            window_bytes = window_bytes.saturating_mul(2);
            continue;
        }
        let edge_bytes = (window_bytes / EDGE_PART).max(merging.symbol_bytes_max());
        let kept_end = if end == len { len } else { end.saturating_sub(edge_bytes) };
        let count = row.partition_point(|token| token.bytes.end <= kept_end);
        let Some(last) = row[..count].last() else {
            // One token takes all of the window but its edge.
            window_bytes = window_bytes.saturating_mul(2);
            continue;
        };
        row[..count].iter().for_each(|token| merging.push(token));
        borders.push(Border { before: Some(last.clone()), mark: merging.mark() });
    }
}
