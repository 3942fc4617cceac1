//! Splits a tensor into bands that fit into memory.

use crate::Span;

/// Boxes that cover a shape, each contiguous in row-major order, one after the other, and each of
/// at most `bytes_max` or a single element. A shape without elements has one box, which is empty.
#[derive(Clone, Debug)]
pub struct Slabs {
    shape: Vec<u64>,
    /// The axis that is cut into ranges; a band has one index of each axis before it, and all
    /// indices of those after it.
    axis: usize,
    /// Indices of a band along that axis.
    step: u64,
    /// The start of the next band along the axes up to that one; `None` after the last band.
    next: Option<Vec<u64>>,
}

/// Cuts a shape into [`Slabs`].
#[must_use]
pub fn bands(shape: &[u64], item_bytes: u64, bytes_max: u64) -> Slabs {
    let items_max = (bytes_max / item_bytes.max(1)).max(1);
    let mut axis = shape.len().saturating_sub(1);
    let mut inner: u64 = 1;
    // Inner axes are included completely while they fit.
    while axis > 0 && inner.saturating_mul(shape[axis]) <= items_max {
        inner = inner.saturating_mul(shape[axis]);
        axis -= 1;
    }
    let is_empty = shape.contains(&0);
    let step = if is_empty { u64::MAX } else { (items_max / inner).max(1) };
    let axis = if is_empty { 0 } else { axis };
    Slabs { shape: shape.to_vec(), axis, step, next: Some(vec![0; axis + 1]) }
}

impl Iterator for Slabs {
    type Item = Vec<Span>;

    fn next(&mut self) -> Option<Vec<Span>> {
        let at = self.next.take()?;
        let mut band: Vec<Span> = self.shape.iter().map(|&len| Span { start: 0, len }).collect();
        let Some(cut) = band.get_mut(self.axis) else { return Some(band) };
        let start = at[self.axis];
        *cut = Span { start, len: self.step.min(self.shape[self.axis] - start) };
        let end = start + cut.len;
        for (span, &start) in band.iter_mut().zip(&at[..self.axis]) {
            *span = Span { start, len: 1 };
        }
        self.next = self.after(at, end);
        Some(band)
    }
}

impl Slabs {
    fn after(&self, mut at: Vec<u64>, end: u64) -> Option<Vec<u64>> {
        if end < self.shape[self.axis] {
            at[self.axis] = end;
            return Some(at);
        }
        at[self.axis] = 0;
        for axis in (0..self.axis).rev() {
            at[axis] += 1;
            if at[axis] < self.shape[axis] {
                return Some(at);
            }
            at[axis] = 0;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bands have all elements once, in order, and none is larger than the limit.
    #[test]
    fn bands_tile_in_order() {
        let shapes: [&[u64]; 8] =
            [&[], &[1], &[7], &[3, 5], &[2, 3, 4], &[1, 9, 1], &[4, 1, 2, 3], &[5, 0, 2]];
        for shape in shapes {
            let count: u64 = shape.iter().product();
            for items_max in 1..=count + 1 {
                let mut next = 0;
                for band in bands(shape, 4, items_max * 4 + 3) {
                    let len: u64 = band.iter().map(|span| span.len).product();
                    let first =
                        band.iter().zip(shape).fold(0, |at, (span, &len)| at * len + span.start);
                    assert!(len <= items_max, "{shape:?} {items_max} {band:?}");
                    assert_eq!(first, if len == 0 { 0 } else { next }, "{shape:?} {items_max}");
                    next += len;
                }
                assert_eq!(next, count, "{shape:?} {items_max}");
            }
        }
    }

    #[test]
    fn bands_are_maximal() {
        assert_eq!(bands(&[2, 3, 4], 1, 24).count(), 1);
        assert_eq!(bands(&[2, 3, 4], 1, 23).count(), 2);
        assert_eq!(bands(&[2, 3, 4], 1, 8).count(), 4);
        assert_eq!(bands(&[0], 1, 8).count(), 1);
    }
}
