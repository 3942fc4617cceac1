// Switches of the process: repeatability, random numbers, memory, signals.

#include <ATen/Context.h>
#include <ATen/cpu/Utils.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <malloc.h>
#include <signal.h>
#include <sys/prctl.h>

#include <climits>
#include <cstdlib>

#include "shim.h"

using feedline::guarded;

// The version that this was compiled against, which `shim.h` holds to 2.11.
FB_API const char* fb_torch_version() { return TORCH_VERSION; }

// 1 if the CPU multiplies bfloat16 in tiles (AMX) and the system lets us, else 0.
FB_API int fb_has_amx() {
  try {
    const auto found = at::cpu::get_cpu_capabilities();
    const auto amx = found.find("amx_bf16");
    return amx != found.end() && amx->second.isBool() && amx->second.toBool() &&
        at::cpu::init_amx();
  } catch (...) {
    return 0;  // a CPU that cannot be queried gets the plain kernels
  }
}

// Operations without a repeatable kernel become errors.
FB_API int fb_set_deterministic() {
  return guarded([] {
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
    // Otherwise every uninitialized tensor is first filled with NaN, to show reads of it.
    at::globalContext().setDeterministicFillUninitializedMemory(false);
  });
}

FB_API int fb_is_deterministic() { return at::globalContext().deterministicAlgorithms(); }

#ifdef USE_C10D_NCCL
// cuBLAS is deterministic only with a workspace of a fixed size, which is set before it starts.
__attribute__((constructor)) static void with_fixed_workspace() {
  setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", 0);
}
#endif

FB_API int fb_use_gpu(int index) {
  return guarded([&] {
    const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
    guard.setDevice(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index)));
  });
}

// glibc gives big blocks back to the system when they are freed and zeroes them when they are
// allocated again; a training step allocates the same blocks every time. 1 if glibc accepted both
// settings.
FB_API int fb_keep_freed_memory() {
  return mallopt(M_MMAP_MAX, 0) == 1 && mallopt(M_TRIM_THRESHOLD, INT_MAX) == 1;
}

static at::Generator generator(int cuda) {
  const auto device = cuda < 0 ? c10::Device(c10::kCPU) : c10::Device(c10::kCUDA, cuda);
  return at::globalContext().defaultGenerator(device);
}

// The state of the generator of the CPU (`cuda` -1) or of a GPU, as a tensor of bytes.
FB_API int fb_rng_get(int cuda, at::Tensor** out) {
  *out = nullptr;
  return guarded([&] {
    auto gen = generator(cuda);
    const std::lock_guard<std::mutex> lock(gen.mutex());
    *out = new at::Tensor(gen.get_state());
  });
}

FB_API int fb_rng_set(int cuda, const at::Tensor* state) {
  return guarded([&] {
    auto gen = generator(cuda);
    const std::lock_guard<std::mutex> lock(gen.mutex());
    gen.set_state(*state);
  });
}

// Stops libtorch from logging long traces of exceptions that it also throws to standard error.
FB_API void fb_quiet() { FLAGS_caffe2_log_level = 3; }

// Sends a signal to a process; 0 if that could be done.
FB_API int fb_signal(int pid, int signal) { return kill(pid, signal); }

// Asks for SIGTERM when the thread that started this process ends.
FB_API int fb_end_with_parent() { return prctl(PR_SET_PDEATHSIG, SIGTERM, 0, 0, 0); }
