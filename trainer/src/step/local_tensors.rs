//! The parts of the state that a rank holds, for checkpoints.

use std::collections::BTreeMap;
use std::ops::Range;

use ckpt::layout::{Layout, LocalRegion};
use tch::Tensor;

use crate::step::Trainer;

/// Bytes of an f32.
pub(crate) const ITEM_BYTES: u64 = 4;

/// What a rank holds of a tensor of the state.
#[derive(Debug)]
pub struct LocalTensor<'a> {
    /// Which tensor and which parts of it, as [`Trainer::layout`] counts; `at` is in `tensor`.
    pub parts: Vec<LocalRegion>,
    /// f32, contiguous; padding may follow its parts.
    pub tensor: &'a Tensor,
}

/// As [`LocalTensor`], to be filled.
#[derive(Debug)]
pub struct LocalTensorMut<'a> {
    /// As [`LocalTensor::parts`].
    pub parts: Vec<LocalRegion>,
    /// As [`LocalTensor::tensor`].
    pub tensor: &'a mut Tensor,
}

impl Trainer {
    /// What all ranks hold, in the groups of a checkpoint.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.setup.layout
    }

    /// What this rank holds, without offloaded state.
    #[must_use]
    pub fn parts(&self) -> Vec<LocalTensor<'_>> {
        let mut parts = self.parts_by_place();
        let all = self.state().into_iter().flatten().enumerate();
        all.filter_map(|(at, tensor)| Some(LocalTensor { parts: parts.remove(&at)?, tensor }))
            .collect()
    }

    /// As [`Trainer::parts`], to be filled. Then call [`Trainer::loaded`].
    #[must_use]
    pub fn parts_mut(&mut self) -> Vec<LocalTensorMut<'_>> {
        let mut parts = self.parts_by_place();
        let all = self.state_mut().into_iter().flatten().enumerate();
        all.filter_map(|(at, tensor)| Some(LocalTensorMut { parts: parts.remove(&at)?, tensor }))
            .collect()
    }

    /// The rank's parts by the place of their tensor in [`Trainer::state`], end to end.
    pub(crate) fn parts_by_place(&self) -> BTreeMap<usize, Vec<LocalRegion>> {
        let mut by_place = BTreeMap::<usize, Vec<LocalRegion>>::new();
        let count = self.model.params().len();
        for part in self.setup.layout.parts(self.comm.rank as u64) {
            let place = self.setup.params.binary_search(&(part.tensor % count));
            let place = place.expect("the layout gives a rank what it has");
            let at = part.tensor / count * self.setup.params.len() + place;
            by_place.entry(at).or_default().push(part);
        }
        by_place
    }
}

/// The byte range of a part in its tensor's memory.
pub(crate) fn range(part: &LocalRegion, item_bytes: u64) -> Range<usize> {
    let elements = part.region.elements().expect("a layout's parts can be counted");
    // fits: both are within a tensor that is in memory.
    let start = (part.offset * item_bytes) as usize;
    start..start + (elements * item_bytes) as usize
}

/// The memory of some parts of a tensor, which follow one another.
pub(crate) fn cut<'a>(
    bytes: &'a mut [u8],
    parts: &[LocalRegion],
    item_bytes: u64,
) -> impl Iterator<Item = &'a mut [u8]> {
    let (mut rest, mut begin) = (bytes, 0);
    parts.iter().map(move |part| {
        let Range { start, end } = range(part, item_bytes);
        let (_, after) = std::mem::take(&mut rest).split_at_mut(start - begin);
        let (own, after) = after.split_at_mut(end - start);
        (rest, begin) = (after, end);
        own
    })
}
