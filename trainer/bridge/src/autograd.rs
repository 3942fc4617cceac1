use std::ptr;

use tch::Tensor;

use crate::ffi::{check, fb_backward, fb_take_grad, pointers};
use crate::{Error, Result};

/// Adds to the gradient of every leaf below `roots` what follows from the gradients of `roots`.
/// Each gradient has its root's shape and dtype. The graph is freed.
///
/// # Errors
/// [`Error::Lengths`], or what libtorch says, such as that a root needs no gradient.
pub fn backward<T: AsRef<Tensor>>(roots: &[T], grads: &[T]) -> Result<()> {
    let doing = "go backward";
    if roots.len() != grads.len() {
        return Err(Error::Lengths { doing, got: vec![roots.len(), grads.len()] });
    }
    let (roots, grads) = (pointers(roots), pointers(grads));
    // SAFETY: both lists hold `roots.len()` handles that their owners keep alive during the call.
    let code = unsafe { fb_backward(roots.as_ptr(), grads.as_ptr(), roots.len()) };
    check(doing, code)
}

/// Takes the gradient from a leaf; `None` if it has none. The next backward then hands its result
/// over instead of adding it to a buffer of zeros.
///
/// # Errors
/// What libtorch says.
pub fn take_grad(leaf: &Tensor) -> Result<Option<Tensor>> {
    let mut grad = ptr::null_mut();
    // SAFETY: the handle is alive during the call, and `grad` has room for one pointer.
    let code = unsafe { fb_take_grad(leaf.as_ptr(), &raw mut grad) };
    check("take a gradient", code)?;
    if grad.is_null() {
        return Ok(None);
    }
    // SAFETY: the shim made this handle with `new` and gave it up to us.
    Ok(Some(unsafe { Tensor::from_ptr(grad) }))
}
