// Collectives with a gradient. Rows are the first dimension.

#include <torch/csrc/autograd/custom_function.h>

#include "dist.h"

using at::Tensor;
using feedline::Call;
using feedline::Group;
using feedline::GroupPtr;
using feedline::guarded;
using feedline::Op;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

static Call call(Op op) { return {static_cast<int32_t>(op), /*reduce=*/0, /*peer=*/-1, 0}; }

// A sum over the ranks, in memory of its own: other tensors may share that of `x`.
static Tensor summed(const GroupPtr& group, const Tensor& x) {
  Tensor sum = x.clone(at::MemoryFormat::Contiguous);
  feedline::run(group, call(Op::all_reduce), sum, Tensor());
  return sum;
}

static Tensor gathered(const GroupPtr& group, const Tensor& x) {
  auto shape = x.sizes().vec();
  shape[0] *= group->backend->getSize();
  Tensor all = at::empty(shape, x.options());
  feedline::run(group, call(Op::all_gather), all, x.contiguous());
  return all;
}

static Tensor scattered(const GroupPtr& group, const Tensor& x) {
  auto shape = x.sizes().vec();
  const int64_t ranks = group->backend->getSize();
  TORCH_CHECK(
      shape[0] % ranks == 0, "expected a multiple of ", ranks, " rows, found ", shape[0]);
  shape[0] /= ranks;
  Tensor own = at::empty(shape, x.options());
  feedline::run(group, call(Op::reduce_scatter), own, x.contiguous());
  return own;
}

static Tensor same(const GroupPtr&, const Tensor& x) { return x.view_as(x); }

using Way = Tensor (*)(const GroupPtr&, const Tensor&);

// Applies `Forth` to tensors, and `Back` to their gradients.
template <Way Forth, Way Back>
struct Through : torch::autograd::Function<Through<Forth, Back>> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const GroupPtr& group) {
    context->saved_data["group"] = c10::IValue::make_capsule(group);
    return Forth(group, x);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto capsule = context->saved_data["group"].toCapsule();
    const auto group = c10::static_intrusive_pointer_cast<Group>(capsule);
    return {Back(group, grads[0]), Tensor()};
  }
};

template <Way Forth, Way Back>
static int run_through(Group* group, const Tensor* x, Tensor** out) {
  *out = nullptr;
  return guarded([&] {
    const GroupPtr shared = GroupPtr::reclaim_copy(group);
    *out = new Tensor(Through<Forth, Back>::apply(*x, shared));
  });
}

// The same on every rank, whose gradients are summed.
FB_API int fb_copy_in(Group* group, const Tensor* x, Tensor** out) {
  return run_through<same, summed>(group, x, out);
}

// The sum over the ranks, whose gradient is the same on every rank.
FB_API int fb_reduce_out(Group* group, const Tensor* x, Tensor** out) {
  return run_through<summed, same>(group, x, out);
}

// The rows of all ranks, in their order; every rank's gradient of a row is summed at its owner.
FB_API int fb_gather_rows(Group* group, const Tensor* x, Tensor** out) {
  return run_through<gathered, scattered>(group, x, out);
}

// The own rows of the sum over the ranks.
FB_API int fb_scatter_rows(Group* group, const Tensor* x, Tensor** out) {
  return run_through<scattered, gathered>(group, x, out);
}
