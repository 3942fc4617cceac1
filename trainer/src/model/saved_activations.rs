//! Stores the inputs of recomputed units until their backward pass.

use std::sync::Arc;

use ckpt::offload::{Folder, Spill, SpillHandle, SpillOptions};
use recipe::Incompatible;
use storage::Key;
use tch::{Device, Kind, Tensor};

use crate::config::{Config, Offload};
use crate::device::host_copy;
use crate::launch::comm::Comm;
use crate::{Error, Result};

/// Where the inputs are stored.
#[derive(Clone, Debug, Default)]
pub enum ActivationStore {
    /// In the memory where they are.
    #[default]
    Here,
    /// In the host's memory, page-locked, for a GPU.
    Host,
    /// In files.
    Disk(Arc<Spill>),
}

/// One stored input.
#[derive(Debug)]
pub(super) enum SavedActivation {
    Here(Tensor),
    Host(Tensor, Device),
    Disk { handle: SpillHandle, shape: Vec<i64>, kind: Kind, device: Device },
}

impl ActivationStore {
    /// As the config selects it, for one rank.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if the rank computes in the host's memory already; [`Error::Ckpt`] if a
    /// folder is missing or cannot be used.
    pub fn new(config: &Config, comm: &Comm) -> Result<Self> {
        let place = &config.parallel.activation_offload;
        match place {
            Offload::None => Ok(ActivationStore::Here),
            Offload::Cpu if comm.device.is_cuda() => Ok(ActivationStore::Host),
            Offload::Cpu => Err(Error::Mismatch(Incompatible::new(
                "cannot offload layer inputs to host memory",
                "a rank that computes on the CPU already has them there",
                "parallel.activation_offload = \"nvme:PATH\" moves them to a disk",
            ))),
            Offload::Nvme(_) => {
                let folder = |url: &String| Folder::open(url, &Key::root());
                let folders = place.folders(comm.local_rank);
                let folders = folders.iter().map(folder).collect::<ckpt::Result<Vec<_>>>()?;
                log::info!("offload: layer inputs are stored in {place}");
                Ok(ActivationStore::Disk(Arc::new(Spill::open(folders, SpillOptions::default())?)))
            }
        }
    }

    /// Stores a leaf that is not needed before its backward pass. A leaf that shares its memory
    /// stays where it is: moving it would free nothing.
    pub(super) fn put(&self, input: Tensor) -> Result<SavedActivation> {
        let device = input.device();
        if matches!(self, ActivationStore::Here)
            || !input.is_contiguous()
            || !bridge::is_alone(&input)
        {
            return Ok(SavedActivation::Here(input));
        }
        let host = if device.is_cuda() { host_copy(&input.f_detach()?)? } else { input };
        let ActivationStore::Disk(spill) = self else {
            return Ok(SavedActivation::Host(host, device));
        };
        let handle = spill.put(bridge::bytes(&host)?)?;
        Ok(SavedActivation::Disk { handle, shape: host.size(), kind: host.kind(), device })
    }
}

impl SavedActivation {
    /// Announces that it is needed soon, after all that were announced before.
    pub(super) fn prefetch(&self) {
        if let SavedActivation::Disk { handle, .. } = self {
            handle.expect();
        }
    }

    /// The leaf.
    pub(super) fn take(self) -> Result<Tensor> {
        let (host, device) = match self {
            SavedActivation::Here(input) => return Ok(input),
            SavedActivation::Host(host, device) => (host, device),
            SavedActivation::Disk { handle, shape, kind, device } => {
                let mut host = Tensor::f_empty(shape, (kind, Device::Cpu))?;
                handle.take(bridge::bytes_mut(&mut host)?)?;
                (host, device)
            }
        };
        Ok(host.f_to_device(device)?.f_set_requires_grad(true)?)
    }
}
