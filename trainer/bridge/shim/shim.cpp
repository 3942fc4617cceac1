#include "shim.h"

namespace feedline {

// One a thread: a failure on one thread says nothing to another.
static thread_local std::string last_error;

void remember_error(const char* text) noexcept {
  try {
    last_error = text;
  } catch (...) {
    last_error.clear();  // out of memory for the message: an empty one is still an error
  }
}

}  // namespace feedline

// The reason of this thread's last failure, valid until its next.
FB_API const char* fb_last_error() { return feedline::last_error.c_str(); }
