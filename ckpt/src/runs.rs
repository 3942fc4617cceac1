//! Runs of elements that are copied from a stored chunk into a requested region of its tensor.

use crate::region::{Region, Span};

/// Elements that are contiguous both in a chunk and in the requested region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopyRun {
    /// First element, counted in the chunk.
    pub(crate) from: u64,
    /// First element, counted in the requested region.
    pub(crate) to: u64,
    /// The number of elements.
    pub(crate) len: u64,
}

/// Calls `visit` with every run that the chunk and the requested region share, in order.
pub(crate) fn each_run<E>(
    chunk: &Region,
    wanted: &Region,
    mut visit: impl FnMut(CopyRun) -> Result<(), E>,
) -> Result<(), E> {
    let range = |region: &Region| region.flat.clone().unwrap_or(0..u64::MAX);
    let (from, to) = (range(chunk), range(wanted));
    each_run_of_boxes(&chunk.spans, &wanted.spans, |run| {
        let begin = from.start.saturating_sub(run.from).max(to.start.saturating_sub(run.to));
        let end = from.end.saturating_sub(run.from).min(to.end.saturating_sub(run.to)).min(run.len);
        if begin >= end {
            return Ok(());
        }
        let (from, to) = (run.from + begin - from.start, run.to + begin - to.start);
        visit(CopyRun { from, to, len: end - begin })
    })
}

/// The same for boxes without a flat range.
pub(crate) fn each_run_of_boxes<E>(
    chunk: &[Span],
    wanted: &[Span],
    mut visit: impl FnMut(CopyRun) -> Result<(), E>,
) -> Result<(), E> {
    let Some(shared) = intersect(chunk, wanted) else { return Ok(()) };
    // Trailing axes that are complete in all three boxes are contiguous.
    let is_joined = |&axis: &usize| shared[axis] == chunk[axis] && shared[axis] == wanted[axis];
    let joined = (0..shared.len()).rev().take_while(is_joined).count();
    let outer = (shared.len() - joined).saturating_sub(1);
    let len = shared[outer..].iter().map(|span| span.len).product();
    let (from_strides, to_strides) = (strides(chunk), strides(wanted));
    let mut place: Vec<u64> = shared.iter().map(|span| span.start).collect();
    loop {
        let from = offset(&place, chunk, &from_strides);
        visit(CopyRun { from, to: offset(&place, wanted, &to_strides), len })?;
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

/// The intersection of two boxes; `None` if it is empty.
pub(crate) fn intersect(a: &[Span], b: &[Span]) -> Option<Vec<Span>> {
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

    fn region(pairs: &[[u64; 2]]) -> Region {
        Region::of_box(pairs.iter().map(|&pair| Span::from(pair)).collect())
    }

    /// Every box of a small tensor is read from every other box, and compared element by element.
    #[test]
    fn runs_cover_every_element_once() {
        let shape = [3_u64, 4, 2];
        let index = |place: [u64; 3], spans: &[Span]| {
            place.iter().zip(spans).fold(0, |sum, (at, span)| sum * span.len + (at - span.start))
        };
        let boxes = all_boxes(&shape);
        for chunk in &boxes {
            for wanted in &boxes {
                let mut expected = Vec::new();
                for place in places(wanted).filter(|place| holds(chunk, place)) {
                    expected.push((index(place, chunk), index(place, wanted)));
                }
                let mut found = Vec::new();
                let visit = |run: CopyRun| -> Result<(), ()> {
                    found.extend((0..run.len).map(|i| (run.from + i, run.to + i)));
                    Ok(())
                };
                each_run(&Region::of_box(chunk.clone()), &Region::of_box(wanted.clone()), visit)
                    .unwrap();
                assert_eq!(found, expected, "{chunk:?} into {wanted:?}");
            }
        }
    }

    /// Ranges of boxes of a small tensor are read from other ranges of other boxes.
    #[test]
    fn runs_of_flat_ranges_cover_every_element_once() {
        let boxes = all_boxes(&[2, 3, 2]);
        let flats: Vec<Region> = boxes
            .iter()
            .flat_map(|spans| {
                let all = Region::of_box(spans.clone());
                let count = all.count();
                let cut =
                    move |start: u64| (start + 1..=count).step_by(3).map(move |end| start..end);
                let ranges = (0..count).step_by(2).flat_map(cut);
                ranges
                    .map(|flat| Region { spans: spans.clone(), flat: Some(flat) })
                    .collect::<Vec<_>>()
            })
            .collect();
        let elements = |region: &Region| -> Vec<[u64; 3]> {
            let range = region.flat.clone().unwrap();
            places(&region.spans)
                .skip(range.start as usize)
                .take((range.end - range.start) as usize)
                .collect()
        };
        for chunk in &flats {
            let there = elements(chunk);
            for wanted in flats.iter().step_by(3) {
                let mut expected = Vec::new();
                for (to, place) in elements(wanted).iter().enumerate() {
                    if let Some(from) = there.iter().position(|other| other == place) {
                        expected.push((from as u64, to as u64));
                    }
                }
                for (chunk, wanted) in [(chunk, wanted), (&chunk.normal(), &wanted.normal())] {
                    let mut found = Vec::new();
                    let visit = |run: CopyRun| -> Result<(), ()> {
                        found.extend((0..run.len).map(|i| (run.from + i, run.to + i)));
                        Ok(())
                    };
                    each_run(chunk, wanted, visit).unwrap();
                    assert_eq!(found, expected, "{chunk:?} into {wanted:?}");
                }
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
    fn runs_are_maximal() {
        let mut runs = Vec::new();
        let visit = |run: CopyRun| -> Result<(), ()> {
            runs.push(run);
            Ok(())
        };
        each_run(&region(&[[2, 4], [0, 5]]), &region(&[[3, 9], [0, 5]]), visit).unwrap();
        assert_eq!(runs, [CopyRun { from: 5, to: 0, len: 15 }]);
        let mut count = 0;
        let visit = |run: CopyRun| -> Result<(), ()> {
            assert_eq!(run, CopyRun { from: 0, to: 0, len: 1 });
            count += 1;
            Ok(())
        };
        each_run(&region(&[]), &region(&[]), visit).unwrap();
        assert_eq!(count, 1);
    }
}
