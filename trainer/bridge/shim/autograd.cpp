// Backward with given gradients, and gradients that can be moved out.

#include <torch/csrc/autograd/autograd.h>

#include "shim.h"

using at::Tensor;
using feedline::guarded;

// Adds to every leaf's gradient the product of the Jacobian of `roots` with `grads`.
FB_API int fb_backward(const Tensor* const* roots, const Tensor* const* grads, size_t count) {
  return guarded([&] {
    torch::autograd::backward(
        feedline::tensors(roots, count), feedline::tensors(grads, count));
  });
}

// Moves the gradient of `leaf` to `*out`, null if it has none. Afterwards it has none, so that the
// next backward stores its result instead of adding to a buffer.
FB_API int fb_take_grad(const Tensor* leaf, Tensor** out) {
  *out = nullptr;
  return guarded([&] {
    Tensor& grad = leaf->mutable_grad();
    if (grad.defined()) {
      *out = new Tensor(std::move(grad));
      grad = Tensor();
    }
  });
}

// 1 if no other handle, view or graph refers to this tensor or its storage, else 0.
FB_API int fb_is_sole_owner(const Tensor* tensor) {
  return tensor->defined() && tensor->use_count() == 1 && tensor->has_storage() &&
      tensor->storage().use_count() == 1;
}
