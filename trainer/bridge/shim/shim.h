// What every part of the shim shares: the version check, and exceptions turned into text.
//
// The C interface: every function that can fail returns 0, or 1 with the reason in
// `fb_last_error()`, or 2 if another rank is the reason, and then `fb_last_lost()` has the details.
// Tensors cross as `at::Tensor*`, borrowed for the call; a tensor that is returned is a new handle,
// which the caller owns. Lists are a pointer and a count.
#pragma once

#include <ATen/ATen.h>
#include <torch/headeronly/version.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#if TORCH_VERSION_MAJOR != 2 || TORCH_VERSION_MINOR != 11
#error "the bridge is written for libtorch 2.11; run scripts/setup.sh, or unset LIBTORCH"
#endif

#define FB_API extern "C" __attribute__((visibility("default")))

namespace feedline {

// An operation that did not complete, most likely because of another rank.
struct Lost : std::runtime_error {
  Lost(const char* text, uint64_t group, int op, int peer, uint64_t number, double seconds)
      : std::runtime_error(text),
        group(group),
        op(op),
        peer(peer),
        number(number),
        seconds(seconds) {}

  uint64_t group;
  int op;
  int peer;  // the other side in the group, -1 if all of it
  uint64_t number;
  double seconds;  // since the operation started
};

void remember_error(const char* text) noexcept;
void remember_lost(const Lost& lost) noexcept;

// Runs `body`. No exception leaves it: the frames above are Rust's.
template <class Body>
int guarded(Body body) noexcept {
  try {
    body();
    return 0;
  } catch (const Lost& lost) {
    remember_lost(lost);
    return 2;
  } catch (const c10::Error& error) {
    remember_error(error.what_without_backtrace());
  } catch (const std::exception& error) {
    remember_error(error.what());
  } catch (...) {
    remember_error("unknown C++ exception");
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
