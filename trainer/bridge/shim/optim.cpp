// The fused AdamW kernel of libtorch, which reads every parameter once, and norms of many tensors.

#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/_fused_adamw.h>
#include <c10/core/GradMode.h>

#include "shim.h"

using at::Tensor;

struct AdamW {
  double step;        // counted from 1: the number of this update
  double lr;
  double beta1;
  double beta2;
  double weight_decay;
  double eps;
  double grad_divisor;  // every gradient is divided by it first, in place
};

// Updates `params` and both moments in place. All four lists have `count` tensors of one dtype.
FB_API int fb_fused_adamw(
    const Tensor* const* params,
    const Tensor* const* grads,
    const Tensor* const* exp_avgs,
    const Tensor* const* exp_avg_sqs,
    size_t count,
    const AdamW* options) {
  return feedline::guarded([&] {
    if (count == 0) {
      return;
    }
    const c10::NoGradGuard no_grad;
    const auto scalars = at::TensorOptions().dtype(at::kFloat).device(params[0]->device());
    // The kernel wants a step a parameter; it only reads them, so they can be one tensor.
    const std::vector<Tensor> steps(count, at::full({}, options->step, scalars));
    std::optional<Tensor> divisor;
    if (options->grad_divisor != 1.0) {
      divisor = at::full({}, options->grad_divisor, scalars);
    }
    at::_fused_adamw_(
        feedline::tensors(params, count), feedline::tensors(grads, count),
        feedline::tensors(exp_avgs, count), feedline::tensors(exp_avg_sqs, count),
        /*max_exp_avg_sqs=*/{}, steps, options->lr, options->beta1, options->beta2,
        options->weight_decay, options->eps, /*amsgrad=*/false, /*maximize=*/false, divisor,
        /*found_inf=*/{});
  });
}

// The Euclidean norm of each tensor, summed in f64, as one tensor.
FB_API int fb_norms(const Tensor* const* list, size_t count, Tensor** out) {
  *out = nullptr;
  return feedline::guarded([&] {
    const c10::NoGradGuard no_grad;
    *out = new Tensor(at::stack(at::_foreach_norm(feedline::tensors(list, count), 2, at::kDouble)));
  });
}
