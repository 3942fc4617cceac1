//! Parameters that are too large for one disk's share of a state, in parts.
//!
//! The rest of this folder treats a part as a parameter: it has its own arrays and blocks, which a
//! checkpoint stores as pieces of the parameter's tensors. Callers only see whole parameters.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::ops::Range;

use super::form::{ITEM_BYTES, StateLayout, StateParam, TILE_BYTES};
use super::{Update, WeightsOut};
use crate::format::safetensors::ALIGN_BYTES;
use crate::{HeldRegion, Region, TensorSpec};

/// Splits the regions of a rank into parts.
pub(super) fn cut(specs: &[TensorSpec], held: &[HeldRegion], disks: usize) -> Vec<HeldRegion> {
    let group = |holding: &HeldRegion| specs[holding.tensor].group;
    let mut all = Vec::with_capacity(held.len());
    for same in held.chunk_by(|a, b| group(a) == group(b)) {
        let elements: Vec<u64> = same.iter().map(|holding| holding.region.count()).collect();
        for (HeldRegion { tensor, region }, ranges) in same.iter().zip(cuts(&elements, disks)) {
            let part = |region| HeldRegion { tensor: *tensor, region };
            all.extend(regions(region, ranges).map(part));
        }
    }
    all
}

/// The parts of a rank's parameters, and the range of them that each parameter is split into. The
/// regions that the rank saves (`held`) are spread over the disks as in the plan; the others are
/// spread separately.
pub(super) fn parts(
    whole: &[StateParam],
    held: &[HeldRegion],
    disks: usize,
) -> (Vec<StateParam>, Vec<Range<usize>>) {
    let saved: HashSet<(usize, Region)> =
        held.iter().map(|holding| (holding.tensor, holding.region.normal())).collect();
    let is_saved = |param: &StateParam| saved.contains(&(param.tensor, param.region.normal()));
    let mut ranges: Vec<Vec<Range<u64>>> = whole.iter().map(|_| Vec::new()).collect();
    for own in [true, false] {
        let same = (0..whole.len()).filter(|at| is_saved(&whole[*at]) == own);
        let same: Vec<usize> = same.collect();
        let elements: Vec<u64> = same.iter().map(|at| whole[*at].elements as u64).collect();
        for (at, cuts) in same.into_iter().zip(cuts(&elements, disks)) {
            ranges[at] = cuts;
        }
    }
    let (mut params, mut parts) = (Vec::with_capacity(whole.len()), Vec::new());
    for (param, ranges) in whole.iter().zip(ranges) {
        let first = params.len();
        params.extend(regions(&param.region, ranges).map(|region| {
            // fits: not more than the parameter has
            let elements = region.count() as usize;
            StateParam { region, elements, ..param.clone() }
        }));
        parts.push(first..params.len());
    }
    (params, parts)
}

fn regions(whole: &Region, ranges: Vec<Range<u64>>) -> impl Iterator<Item = Region> {
    let is_one = ranges.len() == 1;
    ranges.into_iter().map(move |range| if is_one { whole.clone() } else { whole.slice(range) })
}

/// The loads of disks differ by at most this fraction of a share.
const UNITS: u64 = 16;

/// They also differ by at most one tile.
const UNIT_ELEMENTS_MAX: u64 = (TILE_BYTES / ITEM_BYTES) as u64;

/// Where arrays of these lengths are cut. The largest comes first; each is placed on the disk with
/// the most room, and what does not fit there on another. Cuts are at pages, and so at multiples of
/// the vector width of the update: otherwise its results would depend on them.
fn cuts(elements: &[u64], disks: usize) -> Vec<Vec<Range<u64>>> {
    let mut loads = vec![0; disks.max(1)];
    let share = elements.iter().sum::<u64>().div_ceil(loads.len() as u64);
    let page = ALIGN_BYTES / ITEM_BYTES as u64;
    let unit = (share / UNITS).next_multiple_of(page).clamp(page, UNIT_ELEMENTS_MAX);
    let mut order: Vec<usize> = (0..elements.len()).collect();
    order.sort_by_key(|at| Reverse(elements[*at]));
    let mut all: Vec<Vec<Range<u64>>> = elements.iter().map(|_| Vec::new()).collect();
    for at in order {
        let mut start = 0;
        // An empty array is one part as well.
        while start < elements[at] || all[at].is_empty() {
            let load = loads.iter_mut().min().expect("there is at least one");
            let (left, room) = (elements[at] - start, share.saturating_sub(*load));
            let len = if left <= room + unit { left } else { room.max(unit) / unit * unit };
            all[at].push(start..start + len);
            *load += len;
            start += len;
        }
    }
    all
}

/// Splits a caller's data for a parameter into parts. It has the length of the parameter.
impl StateLayout {
    fn elements(&self, param: usize) -> impl Iterator<Item = usize> {
        self.params[self.parts[param].clone()].iter().map(|part| part.elements)
    }

    /// The first part of a parameter; for the index after the last, the number of parts.
    pub(super) fn first_part(&self, param: usize) -> usize {
        self.parts[..param].last().map_or(0, |before| before.end)
    }

    /// Splits bytes, `item_bytes` per element.
    pub(super) fn bytes<'a>(
        &self,
        param: usize,
        mut bytes: &'a [u8],
        item_bytes: usize,
    ) -> Vec<&'a [u8]> {
        let part = |elements| {
            let (own, rest) = bytes.split_at(elements * item_bytes);
            bytes = rest;
            own
        };
        self.elements(param).map(part).collect()
    }

    /// Splits memory for weights, which may be empty.
    pub(super) fn weights<'a>(&self, param: usize, whole: WeightsOut<'a>) -> Vec<WeightsOut<'a>> {
        let WeightsOut { dtype, mut bytes } = whole;
        let item_bytes = if bytes.is_empty() { 0 } else { dtype.item_bytes() as usize };
        let part = |elements| {
            let (own, rest) = std::mem::take(&mut bytes).split_at_mut(elements * item_bytes);
            bytes = rest;
            WeightsOut { dtype, bytes: own }
        };
        self.elements(param).map(part).collect()
    }

    /// Splits an update.
    pub(super) fn updates<'a>(&self, param: usize, whole: Update<'a>) -> Vec<Update<'a>> {
        let Update { grad, grad_dtype, weight_decay, weights } = whole;
        let grads = self.bytes(param, grad, grad_dtype.item_bytes() as usize); // fits: 2 or 4
        let parts = grads.into_iter().zip(self.weights(param, weights));
        let part = |(grad, weights)| Update { grad, grad_dtype, weight_decay, weights };
        parts.map(part).collect()
    }
}
