use tch::{Device, Kind, Tensor};

use super::ParamSpec;
use crate::Result;

/// [`ParamSpec::first_values`] as a tensor on the CPU.
///
/// # Errors
/// [`crate::Error::Torch`] if the memory does not suffice, [`crate::Error::Ckpt`] if the parameter
/// cannot be divided in this way.
pub fn initialize(spec: &ParamSpec, rank: usize, tp: usize, seed: u64) -> Result<Tensor> {
    let (values, shape) = (spec.first_values(rank, tp, seed)?, spec.local_shape(tp));
    // Copied, because a view would be a second reference to the memory.
    let mut tensor = Tensor::f_empty(&shape, (Kind::Float, Device::Cpu))?;
    tensor.f_copy_(&Tensor::f_from_slice(&values)?.f_view(shape.as_slice())?)?;
    Ok(tensor)
}
