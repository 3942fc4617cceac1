//! Boxes of a global tensor: whether they tile it, and how bytes run from one box into another.
//!
//! A box is one [`Span`] per axis. Nothing here knows how many processes wrote it.

use serde::{Deserialize, Serialize};

/// Indices `start .. start + len` along one axis, `[start, len]` in JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "[u64; 2]", into = "[u64; 2]")]
pub struct Span {
    /// The first index.
    pub start: u64,
    /// How many indices.
    pub len: u64,
}

impl From<[u64; 2]> for Span {
    fn from([start, len]: [u64; 2]) -> Self {
        Span { start, len }
    }
}

impl From<Span> for [u64; 2] {
    fn from(span: Span) -> Self {
        [span.start, span.len]
    }
}

/// More axes than any tensor has.
pub(crate) const RANK_MAX: usize = 32;

/// A chunk may be cut along so many axes of its tensor: tensor, pipeline, data and expert
/// parallelism cut one each.
const CUT_AXES_MAX: usize = 4;

/// The box that is the whole tensor.
pub(crate) fn whole(shape: &[u64]) -> Vec<Span> {
    shape.iter().map(|&len| Span { start: 0, len }).collect()
}

/// Elements of a shape; `None` if their number overflows.
pub(crate) fn elements(shape: impl IntoIterator<Item = u64>) -> Option<u64> {
    shape.into_iter().try_fold(1_u64, u64::checked_mul)
}

/// Elements of a box; `None` if their number overflows.
pub(crate) fn box_elements(spans: &[Span]) -> Option<u64> {
    elements(spans.iter().map(|span| span.len))
}

/// Whether a box has the rank of the shape and lies within it.
pub(crate) fn is_within(shape: &[u64], spans: &[Span]) -> bool {
    shape.len() == spans.len()
        && shape
            .iter()
            .zip(spans)
            .all(|(&len, span)| span.start.checked_add(span.len).is_some_and(|end| end <= len))
}

/// Whether the boxes are disjoint and cover the shape exactly; all must lie within it.
///
/// The mixed derivative of a box's indicator function is one signed unit at each of its corners,
/// and a function of bounded support is known by it. So the boxes tile the shape if and only if
/// their signed corners sum to those of the shape: `[0,2)` and `[2,5)` have `+0 -2` and `+2 -5`,
/// which leaves the `+0 -5` of `[0,5)`; an overlap or a gap leaves more. That takes one sort,
/// where comparing all pairs would let a hostile manifest stop us for hours.
pub(crate) fn tile(shape: &[u64], boxes: &[&[Span]]) -> bool {
    if shape.contains(&0) {
        // Nothing is to be covered, and one chunk says so.
        return boxes.len() == 1 && is_whole(shape, boxes[0]);
    }
    if boxes.iter().any(|spans| spans.iter().any(|span| span.len == 0)) {
        return false;
    }
    let is_cut = |&axis: &usize| boxes.iter().any(|spans| spans[axis].len != shape[axis]);
    let axes: Vec<usize> = (0..shape.len()).filter(is_cut).collect();
    if axes.is_empty() {
        return boxes.len() == 1;
    }
    if axes.len() > CUT_AXES_MAX {
        return false;
    }
    let mut corners = Vec::with_capacity((boxes.len() + 1) << axes.len());
    for spans in boxes {
        push_corners(&mut corners, &axes, spans, 1);
    }
    push_corners(&mut corners, &axes, &whole(shape), -1);
    corners.sort_unstable();
    let same_place = |a: &Corner, b: &Corner| a.0 == b.0;
    corners.chunk_by(same_place).all(|same| same.iter().map(|corner| corner.1).sum::<i64>() == 0)
}

pub(crate) fn is_whole(shape: &[u64], spans: &[Span]) -> bool {
    spans.iter().zip(shape).all(|(span, &len)| span.start == 0 && span.len == len)
}

/// A place along the cut axes, and the sign of the corner there.
type Corner = ([u64; CUT_AXES_MAX], i64);

fn push_corners(corners: &mut Vec<Corner>, axes: &[usize], spans: &[Span], sign: i64) {
    for ends in 0_u32..1 << axes.len() {
        let mut place = [0; CUT_AXES_MAX];
        for (bit, &axis) in axes.iter().enumerate() {
            let Span { start, len } = spans[axis];
            place[bit] = if ends >> bit & 1 == 1 { start + len } else { start };
        }
        corners.push((place, if ends.count_ones() % 2 == 0 { sign } else { -sign }));
    }
}

/// Elements that lie side by side both in a chunk and in the box that is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// First element, counted in the chunk.
    pub(crate) from: u64,
    /// First element, counted in the wanted box.
    pub(crate) to: u64,
    /// How many elements.
    pub(crate) len: u64,
}

/// Calls `visit` with every run that the chunk has of the wanted box, in the order of both. All
/// boxes are row-major.
pub(crate) fn each_run<E>(
    chunk: &[Span],
    wanted: &[Span],
    mut visit: impl FnMut(Run) -> Result<(), E>,
) -> Result<(), E> {
    let Some(shared) = intersect(chunk, wanted) else { return Ok(()) };
    // Axes that are whole in all three run into each other.
    let is_joined = |&axis: &usize| shared[axis] == chunk[axis] && shared[axis] == wanted[axis];
    let joined = (0..shared.len()).rev().take_while(is_joined).count();
    let outer = (shared.len() - joined).saturating_sub(1);
    let len = shared[outer..].iter().map(|span| span.len).product();
    let (from_strides, to_strides) = (strides(chunk), strides(wanted));
    let mut place: Vec<u64> = shared.iter().map(|span| span.start).collect();
    loop {
        let from = offset(&place, chunk, &from_strides);
        visit(Run { from, to: offset(&place, wanted, &to_strides), len })?;
        let mut axis = outer;
        loop {
            if axis == 0 {
                return Ok(());
            }
            axis -= 1;
            place[axis] += 1;
            if place[axis] < shared[axis].start + shared[axis].len {
                break;
            }
            place[axis] = shared[axis].start;
        }
    }
}

/// What two boxes share; `None` if that is nothing.
fn intersect(a: &[Span], b: &[Span]) -> Option<Vec<Span>> {
    let both = |(a, b): (&Span, &Span)| {
        let start = a.start.max(b.start);
        let end = (a.start + a.len).min(b.start + b.len);
        (start < end).then(|| Span { start, len: end - start })
    };
    a.iter().zip(b).map(both).collect()
}

fn strides(spans: &[Span]) -> Vec<u64> {
    let mut strides = vec![1; spans.len()];
    for axis in (1..spans.len()).rev() {
        strides[axis - 1] = strides[axis] * spans[axis].len;
    }
    strides
}

fn offset(place: &[u64], spans: &[Span], strides: &[u64]) -> u64 {
    place.iter().zip(spans).zip(strides).map(|((at, span), by)| (at - span.start) * by).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spans(pairs: &[[u64; 2]]) -> Vec<Span> {
        pairs.iter().map(|&pair| Span::from(pair)).collect()
    }

    fn check_tile(shape: &[u64], boxes: &[&[[u64; 2]]], due: bool) {
        let boxes: Vec<Vec<Span>> = boxes.iter().map(|pairs| spans(pairs)).collect();
        let boxes: Vec<&[Span]> = boxes.iter().map(Vec::as_slice).collect();
        assert_eq!(tile(shape, &boxes), due, "{shape:?} by {boxes:?}");
    }

    #[test]
    fn tiles_and_what_does_not() {
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
        // A pinwheel: no cut goes all the way through.
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

    /// Every box of a small tensor, read out of every two-way cut of it, element by element.
    #[test]
    fn runs_carry_every_element_once() {
        let shape = [3_u64, 4, 2];
        let index = |place: [u64; 3], spans: &[Span]| {
            place.iter().zip(spans).fold(0, |sum, (at, span)| sum * span.len + (at - span.start))
        };
        let boxes = all_boxes(&shape);
        for chunk in &boxes {
            for wanted in &boxes {
                let mut due = Vec::new();
                for place in places(wanted).filter(|place| holds(chunk, place)) {
                    due.push((index(place, chunk), index(place, wanted)));
                }
                let mut got = Vec::new();
                let visit = |run: Run| -> Result<(), ()> {
                    got.extend((0..run.len).map(|i| (run.from + i, run.to + i)));
                    Ok(())
                };
                each_run(chunk, wanted, visit).unwrap();
                assert_eq!(got, due, "{chunk:?} into {wanted:?}");
            }
        }
    }

    fn all_boxes(shape: &[u64; 3]) -> Vec<Vec<Span>> {
        let axis = |len: u64| {
            (0..len).flat_map(move |start| (1..=len - start).map(move |len| Span { start, len }))
        };
        let mut boxes = Vec::new();
        for a in axis(shape[0]) {
            for b in axis(shape[1]) {
                boxes.extend(axis(shape[2]).map(|c| vec![a, b, c]));
            }
        }
        boxes
    }

    fn places(spans: &[Span]) -> impl Iterator<Item = [u64; 3]> + use<> {
        let [a, b, c] = [spans[0], spans[1], spans[2]];
        let range = |span: Span| span.start..span.start + span.len;
        range(a).flat_map(move |x| range(b).flat_map(move |y| range(c).map(move |z| [x, y, z])))
    }

    fn holds(spans: &[Span], place: &[u64; 3]) -> bool {
        spans.iter().zip(place).all(|(span, &at)| at >= span.start && at < span.start + span.len)
    }

    #[test]
    fn runs_are_as_long_as_they_can_be() {
        let mut runs = Vec::new();
        let visit = |run: Run| -> Result<(), ()> {
            runs.push(run);
            Ok(())
        };
        each_run(&spans(&[[2, 4], [0, 5]]), &spans(&[[3, 9], [0, 5]]), visit).unwrap();
        assert_eq!(runs, [Run { from: 5, to: 0, len: 15 }]);
        let mut count = 0;
        let visit = |run: Run| -> Result<(), ()> {
            assert_eq!(run, Run { from: 0, to: 0, len: 1 });
            count += 1;
            Ok(())
        };
        each_run(&[], &[], visit).unwrap();
        assert_eq!(count, 1);
    }
}
