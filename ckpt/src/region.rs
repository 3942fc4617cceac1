//! Parts of a global tensor, independent of the number of processes that hold them.
//!
//! A box is one [`Span`] per axis. A [`Region`] is a box or, in row-major order, a range of its
//! elements: a slice of a box when optimizer state is split evenly, within rows.

use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Indices `start .. start + len` along one axis, `[start, len]` in JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "[u64; 2]", into = "[u64; 2]")]
pub struct Span {
    /// The first index.
    pub start: u64,
    /// The number of indices.
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

/// A box of a tensor, or a range of the box's elements.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Region {
    /// The box: one span per axis.
    pub spans: Vec<Span>,
    /// The range of the box's elements in row-major order; all of them if absent.
    pub flat: Option<Range<u64>>,
}

impl Region {
    /// All of a tensor.
    #[must_use]
    pub fn whole(shape: &[u64]) -> Self {
        Region { spans: whole(shape), flat: None }
    }

    /// A box.
    #[must_use]
    pub fn of_box(spans: Vec<Span>) -> Self {
        Region { spans, flat: None }
    }

    /// The number of elements; `None` if the box has too many to count.
    #[must_use]
    pub fn elements(&self) -> Option<u64> {
        let all = box_elements(&self.spans)?;
        Some(self.flat.as_ref().map_or(all, |flat| flat.end.saturating_sub(flat.start)))
    }

    /// Whether it is a part of a tensor of that shape.
    #[must_use]
    pub fn is_within(&self, shape: &[u64]) -> bool {
        let all = box_elements(&self.spans);
        is_within(shape, &self.spans)
            && self
                .flat
                .as_ref()
                .is_none_or(|flat| flat.start <= flat.end && all.is_some_and(|all| flat.end <= all))
    }

    /// Elements of a region that is within a tensor whose bytes can be counted.
    pub(crate) fn count(&self) -> u64 {
        self.elements().expect("checked to be within a tensor, whose elements can be counted")
    }

    /// A range of its elements, in the normal form: the smallest box around them, and no flat range
    /// if they are all of it. The same elements always have the same normal form.
    pub(crate) fn slice(&self, range: Range<u64>) -> Self {
        let base = self.flat.as_ref().map_or(0, |flat| flat.start);
        let (mut start, mut end) = (base + range.start, base + range.end);
        let mut spans = self.spans.clone();
        if start >= end {
            let is_empty = spans.iter().any(|span| span.len == 0);
            if let (false, Some(rows)) = (is_empty, spans.first_mut()) {
                rows.len = 0;
            }
            return Region { spans, flat: None };
        }
        for axis in 0..spans.len() {
            let row: u64 = spans[axis + 1..].iter().map(|span| span.len).product();
            let (first, last) = (start / row, (end - 1) / row);
            spans[axis] = Span { start: spans[axis].start + first, len: last - first + 1 };
            (start, end) = (start - first * row, end - first * row);
            // A range within one row can be narrowed along the next axis; one across rows cannot.
            if first != last {
                break;
            }
        }
        let all: u64 = spans.iter().map(|span| span.len).product();
        let flat = ((start, end) != (0, all)).then_some(start..end);
        Region { spans, flat }
    }

    /// The same elements in the normal form.
    pub(crate) fn normal(&self) -> Self {
        self.slice(0..self.count())
    }

    /// An order of normal forms, by their first elements.
    pub(crate) fn key(&self) -> impl Ord + '_ {
        (self.spans.as_slice(), self.flat.as_ref().map(|flat| (flat.start, flat.end)))
    }

    /// The range as in a manifest and in messages.
    pub(crate) fn flat_span(&self) -> Option<Span> {
        self.flat.as_ref().map(|flat| Span { start: flat.start, len: flat.end - flat.start })
    }
}

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

/// Whether a box has the rank of the shape and is within it.
pub(crate) fn is_within(shape: &[u64], spans: &[Span]) -> bool {
    shape.len() == spans.len()
        && shape
            .iter()
            .zip(spans)
            .all(|(&len, span)| span.start.checked_add(span.len).is_some_and(|end| end <= len))
}

pub(crate) fn is_whole(shape: &[u64], spans: &[Span]) -> bool {
    spans.iter().zip(shape).all(|(span, &len)| span.start == 0 && span.len == len)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(spans: &[[u64; 2]], flat: Option<Range<u64>>) -> Region {
        Region { spans: spans.iter().map(|&pair| pair.into()).collect(), flat }
    }

    #[test]
    fn slices_have_one_normal_form() {
        let whole = Region::whole(&[4, 6]);
        assert_eq!(whole.slice(0..24), whole);
        assert_eq!(whole.slice(6..18), region(&[[1, 2], [0, 6]], None));
        assert_eq!(whole.slice(7..9), region(&[[1, 1], [1, 2]], None));
        assert_eq!(whole.slice(7..13), region(&[[1, 2], [0, 6]], Some(1..7)));
        let flat = region(&[[0, 4], [0, 6]], Some(7..13));
        assert_eq!(flat.normal(), whole.slice(7..13));
        assert_eq!(flat.slice(5..6), region(&[[2, 1], [0, 1]], None));
        assert_eq!(whole.slice(5..5).count(), 0);
        assert_eq!(Region::whole(&[]).slice(0..1), Region::whole(&[]));
        assert_eq!(Region::whole(&[3, 0]).normal(), Region::whole(&[3, 0]));
    }

    #[test]
    fn is_within_checks_spans_and_range() {
        assert!(region(&[[1, 2], [0, 6]], Some(0..12)).is_within(&[3, 6]));
        assert!(!region(&[[1, 2], [0, 6]], Some(0..13)).is_within(&[3, 6]));
        let backwards = Range { start: 5, end: 4 };
        assert!(!region(&[[1, 2], [0, 6]], Some(backwards)).is_within(&[3, 6]));
        assert!(!region(&[[2, 2], [0, 6]], None).is_within(&[3, 6]));
        assert!(!region(&[[0, 3]], None).is_within(&[3, 6]));
        let huge = u64::MAX;
        assert!(!region(&[[0, huge], [0, huge]], Some(0..1)).is_within(&[huge, huge]));
    }
}
