// Simulated GPUs, for tests on machines without one. Their memory is the host's, and the kernels of
// the CPU compute. But the device of their tensors is CUDA: a tensor of the host among them is an
// error, as it is on a GPU, and code that checks the device takes the path for GPUs, including
// backward passes on a thread for each GPU.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/library.h>

#include <array>
#include <atomic>

#include "../shim/dist.h"

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

namespace {

constexpr DeviceIndex GPUS = 8;
thread_local DeviceIndex current = 0;
std::atomic<bool> hangs{false};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(c10::kCUDA, current); }
  void setDevice(Device device) const override { current = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return getStream(stream.device()); }
  DeviceIndex deviceCount() const noexcept override { return GPUS; }
  void record(void** event, const Stream&, DeviceIndex, c10::EventFlag) const override {
    static char mark;
    *event = &mark;
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return !hangs; }
  bool queryStream(const Stream&) const override { return !hangs; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(DeviceIndex) const override {}
};

at::Generator& generator(DeviceIndex gpu) {
  static std::array<at::Generator, GPUS> all = [] {
    std::array<at::Generator, GPUS> made;
    for (at::Generator& one : made) {
      one = at::detail::createCPUGenerator();
    }
    return made;
  }();
  return all.at(gpu < 0 ? current : gpu);
}

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return GPUS; }
  int getNumGPUs() const override { return GPUS; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex gpu) const override { current = gpu; }
  DeviceIndex exchangeDevice(DeviceIndex gpu) const override { return std::exchange(current, gpu); }
  DeviceIndex maybeExchangeDevice(DeviceIndex gpu) const override { return exchangeDevice(gpu); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  const at::Generator& getDefaultGenerator(DeviceIndex gpu) const override {
    return generator(gpu);
  }
};

// The same memory, as a tensor of another device.
Tensor seen_from(const Tensor& tensor, Device device) {
  auto keep = std::make_unique<c10::Storage>(tensor.storage());
  void* const data = keep->mutable_data();
  const size_t bytes = keep->nbytes();
  const auto drop = [](void* kept) { delete static_cast<c10::Storage*>(kept); };
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(data, keep.release(), drop, device),
      c10::GetCPUAllocator(), /*resizable=*/true);
  const c10::DispatchKeySet keys(device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
  Tensor same = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, tensor.dtype());
  same.unsafeGetTensorImpl()->set_sizes_and_strides(
      tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return same;
}

// One call of an operation, by the kernel of the CPU.
class Call {
 public:
  explicit Call(const c10::OperatorHandle& op) : op_(op) {}

  void go(torch::jit::Stack& stack) {
    for (auto it = stack.end() - op_.schema().arguments().size(); it != stack.end(); ++it) {
      *it = to_host(*it);
    }
    if (op_.hasTag(at::Tag::nondeterministic_seeded)) {
      draw(stack);
    } else {
      op_.callBoxed(stack);
    }
    for (const auto& [gpu, host] : taken_) {
      if (host.sizes() != gpu.sizes()) {
        c10::TensorImpl& impl = *gpu.unsafeGetTensorImpl();
        impl.set_storage_keep_dtype(seen_from(host, gpu.device()).storage());
        impl.set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
      }
    }
    for (auto it = stack.end() - op_.schema().returns().size(); it != stack.end(); ++it) {
      *it = to_gpu(*it);
    }
  }

 private:
  // A GPU takes scalars of the host, except in lists.
  Tensor to_host(const Tensor& tensor, bool in_list) {
    if (!tensor.defined()) {
      return tensor;
    }
    const bool is_number = tensor.dim() == 0 && !in_list;
    TORCH_CHECK(
        tensor.is_cuda() || is_number, op_.schema().name(), " takes a tensor of the host to a GPU");
    if (!tensor.is_cuda()) {
      return tensor;
    }
    TORCH_CHECK(
        device_.value_or(tensor.device()) == tensor.device(), op_.schema().name(),
        " takes tensors of several GPUs");
    device_ = tensor.device();
    taken_.emplace_back(tensor, seen_from(tensor, c10::kCPU));
    return taken_.back().second;
  }

  c10::IValue to_host(const c10::IValue& value) {
    if (value.isTensor()) {
      return to_host(value.toTensor(), false);
    }
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) {
        list.push_back(to_host(tensor, true));
      }
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor> tensor : value.toOptionalTensorList()) {
        list.push_back(tensor ? std::optional<Tensor>(to_host(*tensor, true)) : std::nullopt);
      }
      return list;
    }
    if (value.isDevice()) {
      const Device device = value.toDevice();
      device_ = device.has_index() ? device : Guard().getDevice();
      return Device(c10::kCPU);
    }
    return value;
  }

  Tensor to_gpu(const Tensor& tensor) {
    for (const auto& [gpu, host] : taken_) {
      if (host.is_same(tensor)) {
        return gpu;
      }
    }
    return tensor.defined() ? seen_from(tensor, device_.value_or(Guard().getDevice())) : tensor;
  }

  c10::IValue to_gpu(const c10::IValue& value) {
    if (value.isTensor()) {
      return to_gpu(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) {
        list.push_back(to_gpu(tensor));
      }
      return list;
    }
    return value;
  }

  // With the generator of the GPU instead of the host's.
  void draw(torch::jit::Stack& stack) {
    static std::mutex one_at_a_time;
    const std::lock_guard<std::mutex> lock(one_at_a_time);
    at::Generator own = generator(device_.value_or(Guard().getDevice()).index());
    at::Generator host = at::detail::getDefaultCPUGenerator();
    host.set_state(own.get_state());
    op_.callBoxed(stack);
    own.set_state(host.get_state());
  }

  const c10::OperatorHandle& op_;
  std::optional<Device> device_;
  std::vector<std::pair<Tensor, Tensor>> taken_;
};

void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op).go(*stack);
}

// The only operation that takes tensors of both.
Tensor& copy(Tensor& self, const Tensor& from, bool) {
  const auto host = [](const Tensor& tensor) {
    return tensor.is_cuda() ? seen_from(tensor, c10::kCPU) : tensor;
  };
  host(self).copy_(host(from));
  return self;
}

// Computes 16-bit tensors in f32, for which the CPU has no kernel.
Tensor log_softmax(const Tensor& x, int64_t dim, bool to_float) {
  const Tensor host = seen_from(x, c10::kCPU);
  return seen_from(
      at::_log_softmax(to_float ? host.to(at::kFloat) : host, dim, false), x.device());
}

int64_t choose_attention(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
    std::optional<double>, bool) {
  return static_cast<int64_t>(at::SDPBackend::math);
}

// A group of simulated GPUs.
class OfGpus final : public c10d::Backend {
 public:
  OfGpus(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size)
      : Backend(rank, size), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "fake"; }
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }
  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    std::vector<Tensor> host{of(tensors.at(0))};
    return gloo_->allreduce(host, options);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override {
    Tensor host_out = of(out), host_in = of(in);
    return gloo_->_allgather_base(host_out, host_in, options);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    Tensor host_out = of(out), host_in = of(in);
    return gloo_->_reduce_scatter_base(host_out, host_in, options);
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(
      Tensor& out, Tensor& in, std::vector<int64_t>& outs, std::vector<int64_t>& ins,
      const c10d::AllToAllOptions& options) override {
    Tensor host_out = of(out), host_in = of(in);
    return gloo_->alltoall_base(host_out, host_in, outs, ins, options);
  }

 private:
  static Tensor of(const Tensor& tensor) {
    TORCH_CHECK(tensor.is_cuda() && tensor.is_contiguous(), "a GPU sends what it has, in one piece");
    return seen_from(tensor, c10::kCPU);
  }
  c10::intrusive_ptr<c10d::Backend> gloo_;
};

c10::intrusive_ptr<c10d::Backend> make(
    c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout) {
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  auto gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(std::move(store), rank, size, options);
  return c10::make_intrusive<OfGpus>(std::move(gloo), rank, size);
}

}  // namespace

// Before anything asks libtorch for GPUs; once.
FB_API int fb_fake_gpus() {
  return feedline::guarded([] {
    static const c10::impl::DeviceGuardImplRegistrar guard(c10::kCUDA, new Guard());
    at::CUDAHooksRegistry()->Register(
        "CUDAHooks", [](const at::CUDAHooksArgs&) { return std::make_unique<Hooks>(); });
    at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(choose_attention);
    const auto kind = torch::Library::IMPL;
    static torch::Library all(kind, "_", c10::DispatchKey::CUDA, __FILE__, __LINE__);
    all.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>());
    static torch::Library aten(kind, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
    aten.impl("copy_", copy);
    aten.impl("_log_softmax", log_softmax);
    // Otherwise it would be composed of smaller operations, with other bits.
    aten.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&compute>());
    feedline::make_of_gpus = make;
  });
}

// Sets whether their events never complete.
FB_API void fb_fake_gpus_hang(int hang) { hangs = hang != 0; }
