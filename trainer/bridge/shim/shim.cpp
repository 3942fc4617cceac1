#include "shim.h"

namespace feedline {

// One a thread: a failure on one thread is no error of another.
static thread_local std::string last_error;

void remember_error(const char* text) noexcept {
  try {
    last_error = text;
  } catch (...) {
    last_error.clear();  // out of memory for the message: an empty one is still an error
  }
}

// `struct LostPeer` of `src/dist/op.rs`.
struct LastLost {
  uint64_t group;
  int32_t op;
  int32_t peer;
  uint64_t number;
  double seconds;
};
static thread_local LastLost last_lost;

void remember_lost(const Lost& lost) noexcept {
  remember_error(lost.what());
  last_lost = {lost.group, lost.op, lost.peer, lost.number, lost.seconds};
}

}  // namespace feedline

// The reason of this thread's last failure, valid until its next.
FB_API const char* fb_last_error() { return feedline::last_error.c_str(); }

// The lost operation, if this thread's last failure had the code 2.
FB_API const feedline::LastLost* fb_last_lost() { return &feedline::last_lost; }
