use ckpt::layout::{Layout, Mesh, Param};
use ckpt::{Dtype, Group, Region};
use tch::{Device, Kind, Tensor};

use super::{Init, ParamSpec};
use crate::Result;
use crate::rng::Stream;

/// The first values of what one of `tp` ranks has of a parameter: f32, contiguous, on the CPU;
/// padding is 0. They are a function of the seed, the name and the place in the whole tensor, and
/// of nothing else.
///
/// # Errors
/// [`crate::Error::Torch`] if the memory does not suffice, [`crate::Error::Ckpt`] if the parameter
/// cannot be cut so.
pub fn initialize(spec: &ParamSpec, rank: usize, tp: usize, seed: u64) -> Result<Tensor> {
    let options = (Kind::Float, Device::Cpu);
    let shape = spec.local_shape(tp);
    match spec.init {
        Init::Zeros => Ok(Tensor::f_zeros(&shape, options)?),
        Init::Ones => Ok(Tensor::f_ones(&shape, options)?),
        Init::Normal(std) => {
            // fits: memory.
            let mut values = vec![0.0; shape.iter().product::<i64>() as usize];
            let stream = Stream::new(seed, &spec.name);
            let mesh = Mesh { tp: tp as u64, ..Mesh::default() };
            let (name, shape_whole) = (spec.name.clone(), spec.shape_u64());
            let split = spec.split.clone();
            let param = Param { name, shape: shape_whole, split, stages: vec![0] };
            let layout = Layout::new(mesh, vec![param], &[(Group::Model, Dtype::F32)])?;
            for part in layout.parts(rank as u64) {
                let out = &mut values[part.at as usize..]; // fits: memory
                fill(&part.region, &spec.shape_u64(), stream, std, out);
            }
            // Copied, because a view would keep a second hand on the memory.
            let mut tensor = Tensor::f_empty(&shape, options)?;
            tensor.f_copy_(&Tensor::f_from_slice(&values)?.f_view(shape.as_slice())?)?;
            Ok(tensor)
        }
    }
}

/// Draws the elements of a box, row after row.
fn fill(region: &Region, shape: &[u64], stream: Stream, std: f64, out: &mut [f32]) {
    // Along the last axis elements lie side by side; so do whole rows of what is not cut.
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
