//! Gradients: backward from given ones, and through collectives.

use std::ffi::c_int;
use std::ptr;

use tch::Tensor;
use torch_sys::C_tensor;

use crate::dist::Group;
use crate::ffi::{
    RawGroup, check, fb_backward, fb_copy_in, fb_gather_rows, fb_reduce_out, fb_scatter_rows,
    fb_take_grad, pointers, take,
};
use crate::{Error, Result};

/// Backpropagates the gradients of `roots`, and adds the result to the gradient of every leaf below
/// them. Each gradient has its root's shape and dtype. The graph is freed.
///
/// # Errors
/// [`Error::Lengths`]; [`Error::Collective`] if a collective of the graph lost a rank; errors of
/// libtorch, for example if a root needs no gradient.
pub fn backward<T: AsRef<Tensor>>(roots: &[T], grads: &[T]) -> Result<()> {
    let operation = "run backward";
    if roots.len() != grads.len() {
        return Err(Error::Lengths { operation, found: vec![roots.len(), grads.len()] });
    }
    let (roots, grads) = (pointers(roots), pointers(grads));
    // SAFETY: both lists hold `roots.len()` handles that their owners keep alive during the call.
    let code = unsafe { fb_backward(roots.as_ptr(), grads.as_ptr(), roots.len()) };
    check(operation, code)
}

/// Takes the gradient from a leaf; `None` if it has none. The next backward then stores its
/// result instead of adding it to a buffer of zeros.
///
/// # Errors
/// Errors of libtorch.
pub fn take_grad(leaf: &Tensor) -> Result<Option<Tensor>> {
    let mut grad = ptr::null_mut();
    // SAFETY: the handle is alive during the call, and `grad` has room for one pointer.
    let code = unsafe { fb_take_grad(leaf.as_ptr(), &raw mut grad) };
    check("take a gradient", code)?;
    if grad.is_null() {
        return Ok(None);
    }
    // SAFETY: the shim made this handle with `new` and passed its ownership.
    Ok(Some(unsafe { Tensor::from_ptr(grad) }))
}

/// Enters a region in which every rank computes a part: returns `x`, the same on all ranks,
/// unchanged. Backward sums its gradient over the ranks.
///
/// # Errors
/// Errors of libtorch.
pub fn copy_in(group: &Group, x: &Tensor) -> Result<Tensor> {
    through("enter a parallel region", fb_copy_in, group, x)
}

/// Leaves such a region: returns the sum of `x` over the ranks. Its gradient is the same on all
/// ranks, and passes backward unchanged.
///
/// # Errors
/// [`Error::Collective`] if a rank is missing; errors of libtorch.
pub fn reduce_out(group: &Group, x: &Tensor) -> Result<Tensor> {
    through("leave a parallel region", fb_reduce_out, group, x)
}

/// The rows (the first dimension) of all ranks in their order. Backward sums the gradient of each
/// row over the ranks, on the rank that has the row.
///
/// # Errors
/// As [`reduce_out`].
pub fn gather_rows(group: &Group, x: &Tensor) -> Result<Tensor> {
    through("gather rows", fb_gather_rows, group, x)
}

/// This rank's part of the rows of the sum of `x` over the ranks. Backward gathers the gradients of
/// all rows.
///
/// # Errors
/// As [`reduce_out`], also if the ranks do not divide the rows.
pub fn scatter_rows(group: &Group, x: &Tensor) -> Result<Tensor> {
    through("scatter rows", fb_scatter_rows, group, x)
}

type Function = unsafe extern "C" fn(*mut RawGroup, *const C_tensor, *mut *mut C_tensor) -> c_int;

fn through(
    operation: &'static str,
    function: Function,
    group: &Group,
    x: &Tensor,
) -> Result<Tensor> {
    let mut out = ptr::null_mut();
    // SAFETY: one of the four functions of `shim/tensor_parallel.cpp`; group and tensor are alive
    // during the call, and `out` has room for one handle.
    let code = unsafe { function(group.raw(), x.as_ptr(), &raw mut out) };
    take(operation, code, out)
}
