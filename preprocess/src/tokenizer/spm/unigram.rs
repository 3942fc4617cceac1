//! The unigram model: of all ways to cut a text into pieces, the one whose scores have the greatest
//! sum.
//!
//! The library adds 32-bit floats from the first byte of a text to its last, so what has been added
//! before a word decides how the sums of the word are rounded, and now and then which of two nearly
//! equal ways wins. Since its release 0.2.2 it also resets sums: where the best sum before a
//! character is further from 0 than [`Sum::MAX`] that sum is subtracted, there and from the sums
//! that are already known after it. (Releases before that did not reset, and compared sums
//! unrounded with rounded ones; they cut some words of long texts differently.) We add and subtract
//! the same numbers in the same order. Two things make that fast:
//!
//! A text is cut where no piece reaches across ([`super::joins`]). Every way passes there, so the
//! best way to the cut is the beginning of the best way to anywhere after it, and its sum is all
//! that the rest has to know.
//!
//! The pieces of a part can be cached if no rounding could have changed them. At each place
//! on the best way let `gap` be how much the best sum is ahead of the second best. A sum that
//! passes through `n` characters has at most `n` roundings, each by at most half a unit in the last
//! place of the largest sum, `m`: a unit is at most `m * 2^-23`. Two computed sums thus differ from
//! the true difference by at most `n * m * 2^-23`. If the gap is more than that now and more than
//! that again at another starting sum, then the same way wins there. That bounds the starting sum
//! ([`BestPath::start_max`]) up to which the part may be taken from the cache; its scores are then
//! added one by one as if it had been computed. No sum may be reset in between, neither now nor
//! then: the starting sum is also at least `n` scores and `n` roundings short of [`Sum::MAX`].
//!
//! Hugging Face's `Unigram` adds 64-bit floats and never resets sums, and its unknown character
//! costs 10 less than the least of all scores, those of control pieces among them.

use std::ops::Range;

use super::joins::char_at;
use super::trie::Trie;

/// How far the score of an unknown character is below the least score.
const UNKNOWN_PENALTY: f64 = 10.0;

/// The floats that are added.
pub(crate) trait Sum: Copy + std::fmt::Debug + Default + Send + Sync + 'static {
    /// A unit in the last place is at most this part of a number.
    const UNIT: f64;
    /// A best sum that is further from 0 is reset.
    const MAX: f64;
    /// Rounds.
    fn round(value: f64) -> Self;
    fn wide(self) -> f64;
}

impl Sum for f32 {
    const UNIT: f64 = 1.0 / (1_u64 << 23) as f64;
    const MAX: f64 = 100_000.0;

    fn round(value: f64) -> Self {
        value as f32
    }

    fn wide(self) -> f64 {
        f64::from(self)
    }
}

impl Sum for f64 {
    const UNIT: f64 = 1.0 / (1_u64 << 52) as f64;
    const MAX: f64 = f64::INFINITY;

    fn round(value: f64) -> Self {
        value
    }

    fn wide(self) -> f64 {
        self
    }
}

/// A vocabulary with scores.
#[derive(Debug)]
pub(crate) struct Unigram<S> {
    trie: Trie,
    piece_bytes_max: usize,
    /// By id; the library computes the scores of user-defined pieces from their lengths.
    scores: Vec<f64>,
    unk: u32,
    unk_score: f64,
    /// No score is further from 0.
    score_abs_max: f64,
    sums: std::marker::PhantomData<S>,
}

/// The best way to a place: the sum there, where its last piece begins, and which that is.
#[derive(Clone, Copy, Debug, Default)]
struct PathNode<S> {
    sum: S,
    /// How much less the second best is.
    gap: f32,
    start: u32,
    id: u32,
}

/// Parts longer than this are cut with a window of this many nodes of 16 bytes.
const WINDOW_BYTES: usize = 1 << 20;

/// Of UTF-8.
const CHAR_BYTES_MAX: usize = 4;

/// No way to this place is known yet.
const NONE: u32 = u32::MAX;

/// The buffers of [`Unigram::best_path`], and its result.
#[derive(Debug, Default)]
pub(crate) struct BestPath<S> {
    nodes: Vec<PathNode<S>>,
    /// The pieces, first to last: ids, and the bytes of the part that they take.
    pub(crate) pieces: Vec<(u32, Range<u32>)>,
    /// The sum at the end.
    pub(crate) sum: S,
    /// The same part is cut in the same way after any sum that is not further from 0; negative if
    /// that cannot be guaranteed for any.
    pub(crate) start_max: f32,
}

impl<S: Sum> Unigram<S> {
    /// `pieces` are the strings that a text is matched with, and their ids; `scores` are by id.
    ///
    /// # Panics
    /// If a piece comes twice or there are more than 2^24 - 2.
    pub(crate) fn new(
        pieces: Vec<(&[u8], u32)>,
        scores: Vec<f64>,
        unk: u32,
        score_min: f64,
    ) -> Self {
        let unk_score = S::round(score_min - UNKNOWN_PENALTY).wide();
        let score_abs_max = scores.iter().fold(unk_score.abs(), |max, score| max.max(score.abs()));
        let piece_bytes_max = pieces.iter().map(|(piece, _)| piece.len()).max().unwrap_or(1);
        let trie = Trie::new(pieces);
        let sums = std::marker::PhantomData;
        Unigram { trie, piece_bytes_max, scores, unk, unk_score, score_abs_max, sums }
    }

    /// The id of an unknown character.
    pub(super) fn unk(&self) -> u32 {
        self.unk
    }

    /// The id of a piece.
    pub(crate) fn id_of(&self, piece: &[u8]) -> Option<u32> {
        self.trie.exact(piece)
    }

    /// The sum after one more piece, if it is not reset.
    #[inline]
    pub(super) fn add(&self, sum: S, id: u32) -> S {
        S::round(sum.wide() + self.scores[id as usize])
    }

    /// Finds the best way to cut a part of a text, after the text before it made `sum`. An id in it
    /// may be the unknown's. Parts are whole characters, and no piece reaches across their ends.
    ///
    /// # Panics
    /// If the part is 4 GiB or longer.
    pub(super) fn best_path(&self, part: &[u8], sum: S, best: &mut BestPath<S>) {
        assert!(part.len() < NONE as usize, "a place fits its number");
        if part.len() > WINDOW_BYTES && u16::try_from(self.piece_bytes_max).is_ok() {
            return self.best_path_in_windows(part, sum, best, WINDOW_BYTES);
        }
        let nodes = &mut best.nodes;
        nodes.clear();
        let unknown = PathNode { start: NONE, ..PathNode::default() };
        nodes.resize(part.len() + 1, unknown);
        nodes[0] = PathNode { sum, gap: f32::INFINITY, start: 0, id: NONE };
        let (mut start, mut char_count) = (0, 0);
        while start < part.len() {
            char_count += 1;
            start = self.extend(part, start, &mut nodes[start..]);
        }
        let gap = trace_back(nodes, &mut best.pieces);
        best.sum = nodes[part.len()].sum;
        let roundings = f64::from(char_count + 1_u32) * S::UNIT;
        let spread = f64::from(char_count) * self.score_abs_max;
        let same_way_max = f64::from(gap) / roundings - sum.wide().abs() - 2.0 * spread;
        let no_reset_max = S::MAX * (1.0 - roundings) - spread;
        let no_reset = sum.wide().abs() <= no_reset_max;
        let start_max = if no_reset { same_way_max.min(no_reset_max) } else { -1.0 };
        // Both conversions of a gap and this one are together less than the one rounding too many.
        best.start_max = start_max as f32;
    }

    /// The same for a long part, of which only a window of nodes is kept. Of the places before it
    /// two bytes are: the length of the last piece on the best path to there, from which its id
    /// follows. Best paths to different places need not meet, in a run of one character they never
    /// do, so no piece is known before the end. Never promises anything of other sums.
    fn best_path_in_windows(
        &self,
        part: &[u8],
        sum: S,
        best: &mut BestPath<S>,
        window_bytes: usize,
    ) {
        let nodes = &mut best.nodes;
        nodes.clear();
        nodes.push(PathNode { sum, gap: f32::INFINITY, start: 0, id: NONE });
        let unknown = PathNode { start: NONE, ..PathNode::default() };
        let ahead = window_bytes + self.piece_bytes_max.max(CHAR_BYTES_MAX);
        let mut lengths: Vec<u16> = Vec::with_capacity(part.len() + 1);
        let mut start = 0;
        while start < part.len() {
            let base = start;
            nodes.resize(ahead.min(part.len() - base) + 1, unknown);
            while start < part.len() && start - base < window_bytes {
                start = self.extend(part, start, &mut nodes[start - base..]);
            }
            let settled = (base..).zip(nodes.drain(..start - base));
            lengths.extend(settled.map(|(end, node)| node.len_at(end)));
        }
        best.sum = nodes[0].sum;
        lengths.push(nodes[0].len_at(part.len()));
        best.start_max = -1.0;
        best.pieces.clear();
        let mut end = part.len();
        while end > 0 {
            let start = end - usize::from(lengths[end]);
            let id = self.trie.exact(&part[start..end]).unwrap_or(self.unk);
            best.pieces.push((id, start as u32..end as u32)); // fits: asserted
            end = start;
        }
        best.pieces.reverse();
    }

    /// Tries all pieces that begin at a place, whose node is the first, and returns the next place.
    #[inline]
    fn extend(&self, part: &[u8], start: usize, nodes: &mut [PathNode<S>]) -> usize {
        let (_, next) = char_at(part, start);
        if nodes[0].sum.wide().abs() > S::MAX {
            self.reset_sums(nodes);
        }
        let here = nodes[0].sum.wide();
        let mut char_is_known = false;
        let mut state = self.trie.root();
        for (len, &byte) in (1..).zip(&part[start..]) {
            let Some(after) = self.trie.step(state, byte) else { break };
            state = after;
            if let Some(id) = state.value() {
                char_is_known |= start + len == next;
                nodes[len].offer(here + self.scores[id as usize], start, id);
            }
        }
        if !char_is_known {
            nodes[next - start].offer(here + self.unk_score, start, self.unk);
        }
        next
    }

    /// Subtracts the sum at the first place, there and wherever a piece from before it ends.
    #[cold]
    fn reset_sums(&self, nodes: &mut [PathNode<S>]) {
        let sum = nodes[0].sum.wide();
        let ends = nodes.iter_mut().take(self.piece_bytes_max);
        for node in ends.filter(|node| node.start != NONE) {
            node.sum = S::round(node.sum.wide() - sum);
        }
    }
}

impl<S: Sum> PathNode<S> {
    /// The bytes of the last piece on the best path to here, of a piece of at most 65,535 bytes. Of
    /// a place within a character, to which no path leads, it is any number.
    fn len_at(&self, end: usize) -> u16 {
        (end as u32).wrapping_sub(self.start) as u16
    }

    /// Considers another way to here. The first of equals stays. Two floats of 24 bits, added in 64
    /// bits and then rounded, equal their sum in 32 bits.
    #[inline]
    fn offer(&mut self, sum: f64, start: usize, id: u32) {
        let sum = S::round(sum);
        let ahead = sum.wide() - self.sum.wide();
        if self.start == NONE || ahead > 0.0 {
            // The previous second best is further behind than the one that is second now.
            let gap = if self.start == NONE { f32::INFINITY } else { ahead as f32 };
            *self = PathNode { sum, gap, start: start as u32, id }; // fits: asserted
        } else {
            self.gap = self.gap.min(-ahead as f32);
        }
    }
}

/// Writes the pieces of the best way, and returns the least gap on it.
fn trace_back<S>(nodes: &[PathNode<S>], pieces: &mut Vec<(u32, Range<u32>)>) -> f32 {
    pieces.clear();
    let mut gap = f32::INFINITY;
    let mut end = nodes.len() - 1;
    while end > 0 {
        let node = &nodes[end];
        gap = gap.min(node.gap);
        pieces.push((node.id, node.start..end as u32)); // fits: asserted
        end = node.start as usize;
    }
    pieces.reverse();
    gap
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Random(u64);

    impl Random {
        fn below(&mut self, limit: usize) -> usize {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (self.0 >> 33) as usize % limit
        }

        fn text(&mut self, chars: usize) -> String {
            (0..chars).map(|_| ['a', 'b', 'a', 'é', '中', 'x'][self.below(6)]).collect()
        }
    }

    /// Pieces with few different scores, so that sums tie; `x` is in few of them.
    fn model<S: Sum>(random: &mut Random) -> Unigram<S> {
        let mut pieces: Vec<String> = Vec::new();
        for _ in 0..2 + random.below(30) {
            let chars = 1 + random.below(5);
            let piece = random.text(chars);
            if !pieces.contains(&piece) {
                pieces.push(piece);
            }
        }
        let scores = std::iter::once(0.0)
            .chain(pieces.iter().map(|_| -(random.below(9) as f64) / 3.0))
            .collect();
        let with_ids = pieces.iter().zip(1..).map(|(piece, id)| (piece.as_bytes(), id));
        Unigram::new(with_ids.collect(), scores, 0, -3.0)
    }

    #[track_caller]
    fn check<S: Sum>(model: &Unigram<S>, text: &str, sum: f64) {
        let (mut whole, mut windowed) = (BestPath::default(), BestPath::default());
        model.best_path(text.as_bytes(), S::round(sum), &mut whole);
        for window_bytes in [1, 2, 3, 7, 64, 1000] {
            let part = text.as_bytes();
            model.best_path_in_windows(part, S::round(sum), &mut windowed, window_bytes);
            assert_eq!(windowed.pieces, whole.pieces, "{window_bytes}: {text:.100}");
            assert_eq!(windowed.sum.wide().to_bits(), whole.sum.wide().to_bits());
        }
    }

    /// Also with sums that are reset on the way.
    #[test]
    fn windows_change_no_piece_and_no_sum() {
        let mut random = Random(7);
        for _ in 0..300 {
            let (narrow, wide) = (model::<f32>(&mut random), model::<f64>(&mut random));
            for chars in [1, 2, 9, 40, 300] {
                let text = random.text(chars);
                for text in [&*text, &"a".repeat(chars), &"ab".repeat(chars), &"中".repeat(chars)]
                {
                    for sum in [0.0, -17.25, -99_990.0, -99_999.5] {
                        check(&narrow, text, sum);
                        check(&wide, text, sum);
                    }
                }
            }
        }
    }
}
