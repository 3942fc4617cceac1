//! The device of a rank: the CPU, or one GPU.

use recipe::Incompatible;
use tch::{Cuda, Device, Tensor};

use crate::config::{ComputeOn, Config};
use crate::{Error, Result};

/// The device of a rank, by its number on its machine.
///
/// # Errors
/// [`Error::Mismatch`] if the config wants a GPU and there is none for it.
pub fn choose(config: &Config, local_rank: usize) -> Result<Device> {
    let gpus = usize::try_from(Cuda::device_count()).unwrap_or(0);
    let wanted = config.run.device;
    if wanted == ComputeOn::Cpu || (wanted == ComputeOn::Auto && gpus == 0) {
        return Ok(Device::Cpu);
    }
    // A single visible GPU may be another one for each rank, as with `srun --gpus-per-task=1`.
    let gpu = if gpus == 1 { 0 } else { local_rank };
    if gpu >= gpus {
        let (built, hint) = if cfg!(feature = "cuda") {
            ("with", "check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or set run.device = \"cpu\"")
        } else {
            ("without", "build it with --features cuda, or set run.device = \"cpu\"")
        };
        return Err(Error::Mismatch(Incompatible::new(
            format!("cannot find a GPU for rank {local_rank} of this node"),
            format!("libtorch finds {gpus} GPUs in a trainer built {built} the feature cuda"),
            hint,
        )));
    }
    bridge::runtime::use_gpu(gpu)?;
    Ok(Device::Cuda(gpu))
}

/// A tensor in the memory of the host. Waits for a GPU, but not forever if the GPU waits for other
/// ranks.
///
/// # Errors
/// [`Error::Bridge`] with the missing rank, [`Error::Torch`].
pub(crate) fn to_host(tensor: &Tensor) -> Result<Tensor> {
    if tensor.device().is_cuda() {
        bridge::dist::settle()?;
    }
    Ok(tensor.f_to_device(Device::Cpu)?)
}

/// The numbers of some tensors of f64 on one device, one after the other.
///
/// # Errors
/// As [`to_host`].
pub(crate) fn numbers(tensors: &[Tensor]) -> Result<Vec<f64>> {
    if tensors.is_empty() {
        return Ok(Vec::new());
    }
    let flat = tensors.iter().map(|tensor| Ok(tensor.f_reshape([-1])?));
    let all = Tensor::f_cat(&flat.collect::<Result<Vec<Tensor>>>()?, 0)?;
    Ok(Vec::<f64>::try_from(to_host(&all)?)?)
}

/// A copy in host memory that no other tensor shares: page-locked for a tensor of a GPU, which then
/// copies asynchronously.
///
/// # Errors
/// [`Error::Torch`] if the memory does not suffice.
pub(crate) fn host_copy(of: &Tensor) -> Result<Tensor> {
    let mut memory = Tensor::f_empty(of.size(), (of.kind(), Device::Cpu))?;
    if of.device().is_cuda() {
        memory = memory.f_internal_pin_memory(of.device())?;
    }
    memory.f_copy_(of)?;
    Ok(memory)
}
