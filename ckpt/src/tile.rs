//! Checks that regions are disjoint and cover a tensor.
//!
//! The mixed derivative of a box's indicator function is one signed unit at each of its corners,
//! and a function of bounded support is determined by it. So boxes tile a shape if and only if
//! their signed corners sum to those of the shape: `[0,2)` and `[2,5)` have `+0 -2` and `+2 -5`,
//! which leaves the `+0 -5` of `[0,5)`; an overlap or a gap leaves more. This takes one sort;
//! comparing all pairs would take hours for a hostile manifest. A flat range is a few boxes: the
//! rest of its first row, complete rows, and the start of its last.

use crate::region::{Span, box_elements, is_whole};

/// Tensor, pipeline, data and expert parallelism cut one axis each; a flat range also cuts the
/// outermost.
const CUT_AXES_MAX: usize = 4;

/// A box, and the range of its elements.
pub(crate) type TileBox<'a> = (&'a [Span], Option<Span>);

/// Whether the parts are disjoint and cover the shape exactly; all must lie within it.
pub(crate) fn tile(shape: &[u64], parts: &[TileBox<'_>]) -> bool {
    if shape.contains(&0) {
        // An empty tensor is covered by exactly one chunk.
        return matches!(parts, [(spans, None)] if is_whole(shape, spans));
    }
    let is_empty = |(spans, flat): &TileBox<'_>| {
        spans.iter().any(|span| span.len == 0) || flat.is_some_and(|flat| flat.len == 0)
    };
    if parts.iter().any(is_empty) {
        return false;
    }
    let axes = join_axes(shape, parts);
    if axes.is_empty() {
        return parts.len() == 1;
    }
    if axes.len() > CUT_AXES_MAX {
        return false;
    }
    let mut corners = Vec::with_capacity((parts.len() + 1) << axes.len());
    let whole = shape.iter().map(|&len| Span { start: 0, len }).collect::<Vec<_>>();
    push_corners(&mut corners, axes.len(), &joined(&axes, &whole), -1);
    for (spans, flat) in parts {
        let spans = joined(&axes, spans);
        match flat {
            None => push_corners(&mut corners, axes.len(), &spans, 1),
            Some(Span { start, len }) => {
                let push = &mut |spans: &Spans| push_corners(&mut corners, axes.len(), spans, 1);
                each_box(&spans, axes.len(), *start, start + len, push);
            }
        }
    }
    corners.sort_unstable();
    let same_place = |a: &Corner, b: &Corner| a.0 == b.0;
    corners.chunk_by(same_place).all(|same| same.iter().map(|corner| corner.1).sum::<i64>() == 0)
}

/// An axis, and the number of elements of one step along it.
struct Axis {
    axis: usize,
    step: u64,
}

/// The axes that are cut. An axis that is complete in every part is merged into the one before it,
/// whose step grows accordingly; so a tensor that is only cut between rows has a single axis.
fn join_axes(shape: &[u64], parts: &[TileBox<'_>]) -> Vec<Axis> {
    let is_cut = |axis: usize| parts.iter().any(|(spans, _)| spans[axis].len != shape[axis]);
    let mut axes: Vec<Axis> = Vec::new();
    for (axis, &len) in shape.iter().enumerate() {
        match axes.last_mut() {
            Some(before) if !is_cut(axis) => before.step *= len,
            _ => axes.push(Axis { axis, step: 1 }),
        }
    }
    let has_flat = parts.iter().any(|(_, flat)| flat.is_some());
    if axes.first().is_some_and(|first| !has_flat && !is_cut(first.axis)) {
        axes.remove(0);
    }
    axes
}

/// The spans along the joined axes, in elements.
type Spans = [Span; CUT_AXES_MAX];

fn joined(axes: &[Axis], spans: &[Span]) -> Spans {
    let mut joined = [Span { start: 0, len: 1 }; CUT_AXES_MAX];
    for (to, Axis { axis, step }) in joined.iter_mut().zip(axes) {
        let from = spans[*axis];
        *to = Span { start: from.start * step, len: from.len * step };
    }
    joined
}

/// The boxes that consist of elements `start..end` of a box; the range is not empty.
fn each_box(spans: &Spans, rank: usize, start: u64, end: u64, visit: &mut dyn FnMut(&Spans)) {
    each_box_below(*spans, 0, rank, start..end, visit);
}

fn each_box_below(
    mut spans: Spans,
    axis: usize,
    rank: usize,
    range: std::ops::Range<u64>,
    visit: &mut dyn FnMut(&Spans),
) {
    let row = box_elements(&spans[axis + 1..rank]).expect("it is a part of a countable tensor");
    let first = spans[axis].start;
    let rows = |from: u64, to: u64| {
        let mut body = spans;
        body[axis] = Span { start: first + from, len: to - from };
        body
    };
    let (head, tail) = (range.start.next_multiple_of(row), range.end / row * row);
    if head <= tail {
        if range.start < head {
            let body = rows(head / row - 1, head / row);
            each_box_below(body, axis + 1, rank, row - (head - range.start)..row, visit);
        }
        if head < tail {
            visit(&rows(head / row, tail / row));
        }
        if tail < range.end {
            let body = rows(tail / row, tail / row + 1);
            each_box_below(body, axis + 1, rank, 0..range.end - tail, visit);
        }
    } else {
        // Within one row.
        spans[axis] = Span { start: first + range.start / row, len: 1 };
        each_box_below(spans, axis + 1, rank, range.start - tail..range.end - tail, visit);
    }
}

/// A place along the cut axes, and the sign of the corner there.
type Corner = ([u64; CUT_AXES_MAX], i64);

fn push_corners(corners: &mut Vec<Corner>, rank: usize, spans: &Spans, sign: i64) {
    for ends in 0_u32..1 << rank {
        let mut place = [0; CUT_AXES_MAX];
        for (bit, Span { start, len }) in spans[..rank].iter().enumerate() {
            place[bit] = if ends >> bit & 1 == 1 { start + len } else { *start };
        }
        corners.push((place, if ends.count_ones() % 2 == 0 { sign } else { -sign }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Given<'a> = (&'a [[u64; 2]], Option<[u64; 2]>);

    fn check_tile(shape: &[u64], boxes: &[&[[u64; 2]]], expected: bool) {
        let boxes: Vec<Given<'_>> = boxes.iter().map(|spans| (*spans, None)).collect();
        check_flats(shape, &boxes, expected);
    }

    fn check_flats(shape: &[u64], parts: &[Given<'_>], expected: bool) {
        let parts: Vec<(Vec<Span>, Option<Span>)> = parts
            .iter()
            .map(|(spans, flat)| (spans.iter().map(|&s| s.into()).collect(), flat.map(Span::from)))
            .collect();
        let parts: Vec<TileBox<'_>> = parts.iter().map(|(spans, flat)| (&**spans, *flat)).collect();
        assert_eq!(tile(shape, &parts), expected, "{shape:?} by {parts:?}");
    }

    #[test]
    fn only_exact_covers_tile() {
        check_tile(&[], &[&[]], true);
        check_tile(&[], &[&[], &[]], false);
        check_tile(&[], &[], false);
        check_tile(&[5], &[&[[0, 5]]], true);
        check_tile(&[5], &[&[[0, 2]], &[[2, 3]]], true);
        check_tile(&[5], &[&[[2, 3]], &[[0, 2]]], true);
        check_tile(&[5], &[&[[0, 2]], &[[3, 2]]], false);
        check_tile(&[5], &[&[[0, 3]], &[[2, 3]]], false);
        check_tile(&[5], &[&[[0, 5]], &[[0, 5]]], false);
        check_tile(&[5], &[&[[0, 3]], &[[0, 2]]], false);
        check_tile(&[4, 3], &[&[[0, 4], [0, 1]], &[[0, 4], [1, 2]]], true);
        // A pinwheel: no cut divides the whole shape.
        let wheel: [&[[u64; 2]]; 5] = [
            &[[0, 1], [0, 2]],
            &[[0, 2], [2, 1]],
            &[[2, 1], [1, 2]],
            &[[1, 2], [0, 1]],
            &[[1, 1], [1, 1]],
        ];
        check_tile(&[3, 3], &wheel, true);
        check_tile(&[3, 3], &wheel[..4], false);
        // The right volume, but one overlap and one gap.
        check_tile(&[2, 2], &[&[[0, 1], [0, 2]], &[[0, 1], [1, 1]], &[[1, 1], [0, 1]]], false);
        check_tile(&[0, 7], &[&[[0, 0], [0, 7]]], true);
        check_tile(&[0, 7], &[], false);
        check_tile(&[0, 7], &[&[[0, 0], [0, 7]], &[[0, 0], [0, 7]]], false);
        check_tile(&[5], &[&[[0, 5]], &[[5, 0]]], false);
    }

    #[test]
    fn flat_ranges_tile() {
        let all = [[0, 4], [0, 6]];
        check_flats(&[4, 6], &[(&all, Some([0, 7])), (&all, Some([7, 17]))], true);
        check_flats(&[4, 6], &[(&all, Some([0, 7])), (&all, Some([8, 16]))], false);
        check_flats(&[4, 6], &[(&all, Some([0, 8])), (&all, Some([7, 17]))], false);
        check_flats(&[4, 6], &[(&all, Some([0, 24])), (&all, Some([3, 0]))], false);
        check_flats(&[], &[(&[], Some([0, 1]))], true);
        check_flats(&[0], &[(&[[0, 0]], Some([0, 0]))], false);
        // Two halves of the columns, one of them cut through rows, and a box among the ranges.
        let (left, right) = ([[0, 4], [0, 3]], [[0, 4], [3, 3]]);
        let cut: [Given<'_>; 4] = [
            (&left, Some([0, 5])),
            (&left, Some([5, 4])),
            (&[[3, 1], [0, 3]], None),
            (&right, None),
        ];
        check_flats(&[4, 6], &cut, true);
        check_flats(&[4, 6], &[cut[0], cut[1], cut[2], (&left, None)], false);
    }

    /// All ways to cut a box of three axes into three ranges, and the same with one cut moved.
    #[test]
    fn every_cut_of_three_axes_tiles() {
        let (shape, all) = ([2, 3, 2], [[0, 2], [0, 3], [0, 2]]);
        for a in 1..11 {
            for b in a + 1..12 {
                let parts = |c: u64, d: u64| {
                    [
                        (&all[..], Some([0, a])),
                        (&all[..], Some([c, d - c])),
                        (&all[..], Some([b, 12 - b])),
                    ]
                };
                check_flats(&shape, &parts(a, b), true);
                check_flats(&shape, &parts(a - 1, b), false);
                check_flats(&shape, &parts(a, b + 1), false);
            }
        }
    }
}
