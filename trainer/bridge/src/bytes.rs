use std::slice;

use tch::{Device, Kind, Tensor};

use crate::ffi::fb_is_sole_owner;
use crate::{Error, Result};

/// The elements of a contiguous CPU tensor as bytes, in the machine's order, without a copy.
///
/// # Errors
/// [`Error::NotLendable`] if the tensor is not in CPU memory, is not contiguous, or shares its
/// memory with another handle, view or graph, through which it could change while the bytes are
/// lent.
pub fn bytes(tensor: &Tensor) -> Result<&[u8]> {
    let len = lendable_bytes(tensor)?;
    if len == 0 {
        return Ok(&[]);
    }
    // SAFETY: `lendable_bytes` found `len` initialized bytes there, reachable through this handle
    // alone, which is borrowed for as long as the slice.
    Ok(unsafe { slice::from_raw_parts(tensor.data_ptr().cast::<u8>(), len) })
}

/// As [`bytes`], to be written.
///
/// # Errors
/// As [`bytes`].
pub fn bytes_mut(tensor: &mut Tensor) -> Result<&mut [u8]> {
    let len = lendable_bytes(tensor)?;
    if len == 0 {
        return Ok(&mut []);
    }
    // SAFETY: as in `bytes`, and the handle is borrowed mutably.
    Ok(unsafe { slice::from_raw_parts_mut(tensor.data_ptr().cast::<u8>(), len) })
}

/// Whether no other handle, view or graph refers to the memory of a tensor, on any device.
#[must_use]
pub fn is_alone(tensor: &Tensor) -> bool {
    // SAFETY: the handle is alive during the call, which looks whether it is defined.
    unsafe { fb_is_sole_owner(tensor.as_ptr()) != 0 }
}

fn lendable_bytes(tensor: &Tensor) -> Result<usize> {
    let refuse = |reason| Err(Error::NotLendable { reason });
    if !tensor.defined() {
        return refuse("tensor is undefined");
    }
    if tensor.device() != Device::Cpu {
        return refuse("tensor is not in CPU memory");
    }
    if tensor.kind() == Kind::Bool {
        return refuse("tensor has dtype bool");
    }
    if tensor.is_sparse() || tensor.is_mkldnn() || !tensor.is_contiguous() {
        return refuse("tensor is not contiguous");
    }
    if !is_alone(tensor) {
        return refuse("another handle, view or graph shares its memory");
    }
    Ok(tensor.numel() * tensor.kind().elt_size_in_bytes())
}
