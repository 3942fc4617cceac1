use tch::{Device, Kind, Tensor};

use super::{Init, ParamSpec};
use crate::Result;
use crate::rng::Stream;

/// The first values of a parameter: f32, contiguous, on the CPU. They are a function of the seed,
/// the name and the place in the tensor, and of nothing else.
///
/// # Errors
/// [`crate::Error::Torch`] if the memory does not suffice.
pub fn initialize(spec: &ParamSpec, seed: u64) -> Result<Tensor> {
    let options = (Kind::Float, Device::Cpu);
    match spec.init {
        Init::Zeros => Ok(Tensor::f_zeros(&spec.shape, options)?),
        Init::Ones => Ok(Tensor::f_ones(&spec.shape, options)?),
        Init::Normal(std) => {
            let mut values = vec![0.0; spec.numel()];
            Stream::new(seed, &spec.name).fill_normal(0, std, &mut values);
            // Copied, because a view would keep a second hand on the memory.
            let mut tensor = Tensor::f_empty(&spec.shape, options)?;
            tensor.f_copy_(&Tensor::f_from_slice(&values)?.f_view(spec.shape.as_slice())?)?;
            Ok(tensor)
        }
    }
}
