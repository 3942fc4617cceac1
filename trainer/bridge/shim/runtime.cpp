// Switches of the process: repeatability, precision, memory.

#include <ATen/Context.h>
#include <ATen/cpu/Utils.h>
#include <malloc.h>

#include <climits>

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
    return 0;  // a CPU that cannot be asked gets the plain kernels
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

// glibc gives big blocks back to the system when they are freed and zeroes them when they come
// again; a training step asks for the same blocks every time. 1 if glibc took both settings.
FB_API int fb_keep_freed_memory() {
  return mallopt(M_MMAP_MAX, 0) == 1 && mallopt(M_TRIM_THRESHOLD, INT_MAX) == 1;
}
