use ckpt::layout::{DeviceMesh, Layout, Param};
use ckpt::{Dtype, Group, Region};

use super::{Init, ParamSpec};
use crate::rng::Stream;

impl ParamSpec {
    /// The initial values of the part of one of `tp` ranks, in its [`ParamSpec::local_shape`];
    /// padding is 0. They depend only on the seed, the name and the index in the whole tensor.
    ///
    /// # Errors
    /// If the tensor cannot be divided this way.
    pub fn first_values(&self, rank: usize, tp: usize, seed: u64) -> ckpt::Result<Vec<f32>> {
        // fits: memory.
        let count = self.local_shape(tp).iter().product::<i64>() as usize;
        let std = match self.init {
            Init::Zeros => return Ok(vec![0.0; count]),
            Init::Ones => return Ok(vec![1.0; count]),
            Init::Normal(std) => std,
        };
        let mut values = vec![0.0; count];
        let stream = Stream::new(seed, &self.name);
        let mesh = DeviceMesh { tp: tp as u64, ..DeviceMesh::default() };
        let (name, shape, split) = (self.name.clone(), self.shape_u64(), self.split.clone());
        let param = Param { name, shape: shape.clone(), split, stages: vec![0] };
        let layout = Layout::new(mesh, vec![param], &[(Group::Model, Dtype::F32)])?;
        for part in layout.parts(rank as u64) {
            let out = &mut values[part.offset as usize..]; // fits: memory
            fill(&part.region, &shape, stream, std, out);
        }
        Ok(values)
    }
}

/// Draws the elements of a region, row by row.
fn fill(region: &Region, shape: &[u64], stream: Stream, std: f64, out: &mut [f32]) {
    // Elements are contiguous along the last axis, and whole rows are if the axis is not divided.
    let (mut run, mut inner, mut axes) = (1, 1, shape.len());
    while axes > 0 && run == inner {
        axes -= 1;
        run *= region.spans[axes].len;
        inner *= shape[axes];
    }
    let first = |rest: &[u64]| {
        let mut place = 0;
        for (axis, len) in shape.iter().enumerate() {
            let at = rest.get(axis).copied().unwrap_or(0);
            place = place * len + region.spans[axis].start + at;
        }
        place
    };
    let runs: u64 = region.spans[..axes].iter().map(|span| span.len).product();
    for (number, out) in (0..runs).zip(out.chunks_mut(run.max(1) as usize)) {
        let mut rest = vec![0; axes];
        let mut left = number;
        for axis in (0..axes).rev() {
            rest[axis] = left % region.spans[axis].len;
            left /= region.spans[axis].len;
        }
        stream.fill_normal(first(&rest), std, out);
    }
}
