//! Merging of very long pieces, window by window, so that the memory for it does not grow with the
//! piece.
//!
//! Two tokens may stand side by side if their bytes, merged as a text, are these two again. A row
//! of tokens is what its bytes are merged into if every two neighbours may, and each is what its
//! own bytes are merged into ([`super::super::by_char`] has the proof). So the tokens of a window
//! up to one of its ends, and those of a window that begins there, are a row of both, if the two
//! that meet may. If they may not, an earlier end is taken and the windows grow.

use std::ops::Range;

/// Longer pieces are merged in windows. A window of bytes takes 8 MiB, of characters 12 MiB.
pub(in super::super) const WINDOW_BYTES: usize = 256 << 10;

/// The last part of a window, whose tokens the bytes behind it may change: they are left to the
/// next window.
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

    /// Replaces `row` by the tokens that some bytes of the piece are merged into.
    fn merge(&mut self, bytes: Range<usize>, row: &mut Vec<RowToken>);

    fn mark(&self) -> Self::Mark;

    /// Takes back what was written after a mark.
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

/// Merges a piece of so many bytes.
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
        let kept_end = if end == len { len } else { end - window_bytes / EDGE_PART };
        let count = row.partition_point(|token| token.bytes.end <= kept_end);
        let Some(last) = row[..count].last() else {
            // One token takes all of the window.
            window_bytes = window_bytes.saturating_mul(2);
            continue;
        };
        row[..count].iter().for_each(|token| merging.push(token));
        borders.push(Border { before: Some(last.clone()), mark: merging.mark() });
    }
}
