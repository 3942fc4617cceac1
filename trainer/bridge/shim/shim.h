// What every part of the shim shares: the version check, and exceptions turned into text.
//
// The C interface: every function that can fail returns 0, or 1 with the reason in
// `fb_last_error()`. Tensors cross as `at::Tensor*`, borrowed for the call; a tensor that is
// returned is a new handle, which the caller owns. Lists are a pointer and a count.
#pragma once

#include <ATen/ATen.h>
#include <torch/headeronly/version.h>

#include <cstddef>
#include <exception>
#include <string>
#include <vector>

#if TORCH_VERSION_MAJOR != 2 || TORCH_VERSION_MINOR != 11
#error "the bridge is written for libtorch 2.11; run scripts/setup.sh, or unset LIBTORCH"
#endif

#define FB_API extern "C" __attribute__((visibility("default")))

namespace feedline {

void remember_error(const char* text) noexcept;

// Runs `body`. No exception leaves it: the frames above are Rust's.
template <class Body>
int guarded(Body body) noexcept {
  try {
    body();
    return 0;
  } catch (const c10::Error& error) {
    remember_error(error.what_without_backtrace());
  } catch (const std::exception& error) {
    remember_error(error.what());
  } catch (...) {
    remember_error("an exception that is no std::exception");
  }
  return 1;
}

inline std::vector<at::Tensor> tensors(const at::Tensor* const* list, size_t count) {
  std::vector<at::Tensor> out;
  out.reserve(count);
  for (size_t i = 0; i < count; i++) {
    out.push_back(*list[i]);
  }
  return out;
}

}  // namespace feedline
