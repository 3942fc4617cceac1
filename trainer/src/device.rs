//! What computes: the CPU, or a GPU a rank.

use recipe::Mismatch;
use tch::{Cuda, Device, Tensor};

use crate::config::{ComputeOn, Config};
use crate::{Error, Result};

/// What a rank computes on, by its number on its machine.
///
/// # Errors
/// [`Error::Mismatch`] if the config wants a GPU and there is none for it.
pub fn choose(config: &Config, local_rank: usize) -> Result<Device> {
    let gpus = if cfg!(feature = "cuda") { Cuda::device_count().max(0) as usize } else { 0 };
    let wanted = config.run.device;
    if wanted == ComputeOn::Cpu || (wanted == ComputeOn::Auto && gpus == 0) {
        return Ok(Device::Cpu);
    }
    // One that is seen may be another for each rank, as `srun --gpus-per-task=1` has it.
    let gpu = if gpus == 1 { 0 } else { local_rank };
    if gpu >= gpus {
        let built = if cfg!(feature = "cuda") { "with" } else { "without" };
        return Err(Error::Mismatch(Mismatch::new(
            format!("find a GPU for rank {local_rank} of this machine"),
            format!("libtorch sees {gpus}, in a trainer built {built} the feature cuda"),
            "see `nvidia-smi`, CUDA_VISIBLE_DEVICES and README's \"On GPUs\", or set run.device = \
             \"cpu\"",
        )));
    }
    bridge::runtime::use_gpu(gpu)?;
    Ok(Device::Cuda(gpu))
}

/// Memory of the host for what a device has of this kind and size: page-locked for a GPU, which
/// then copies by itself.
///
/// # Errors
/// [`Error::Torch`] if the memory does not suffice.
pub(crate) fn host_memory(like: &Tensor) -> Result<Tensor> {
    let memory = Tensor::f_empty(like.size(), (like.kind(), Device::Cpu))?;
    Ok(if like.device().is_cuda() { memory.f_pin_memory(like.device())? } else { memory })
}
