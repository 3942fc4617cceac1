// The store through which ranks find one another: c10d's TCPStore.

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "shim.h"

using c10d::Store;
using feedline::guarded;
using std::chrono::milliseconds;

static std::vector<std::string> strings(const char* const* list, size_t count) {
  return std::vector<std::string>(list, list + count);
}

// Opens the store of `host`:`port`. If `listener` is not negative, this process hosts the store: it
// is a socket that is bound to that port and listens, and is the store's from now on.
FB_API int fb_store_open(
    const char* host, uint16_t port, int listener, int64_t timeout_ms, Store** out) {
  *out = nullptr;
  return guarded([&] {
    c10d::TCPStoreOptions options;
    options.port = port;
    options.isServer = listener >= 0;
    // By default, c10d listens on all addresses of the machine.
    if (options.isServer) options.masterListenFd = listener;
    options.waitWorkers = false;
    options.timeout = milliseconds(timeout_ms);
    auto store = c10::make_intrusive<c10d::TCPStore>(host, options);
    *out = store.release();
  });
}

// Another connection to the same store: a call on one does not wait for those on the other.
FB_API int fb_store_again(Store* store, Store** out) {
  *out = nullptr;
  return guarded([&] { *out = store->clone().release(); });
}

FB_API void fb_store_free(Store* store) { c10::intrusive_ptr<Store>::reclaim(store); }

FB_API int fb_store_set(Store* store, const char* key, const uint8_t* data, size_t length) {
  return guarded([&] { store->set(key, std::vector<uint8_t>(data, data + length)); });
}

// The value of a key that is there. Valid until this thread's next call.
FB_API int fb_store_get(Store* store, const char* key, const uint8_t** data, size_t* length) {
  static thread_local std::vector<uint8_t> value;
  return guarded([&] {
    value = store->get(key);
    *data = value.data();
    *length = value.size();
  });
}

FB_API int fb_store_add(Store* store, const char* key, int64_t amount, int64_t* sum) {
  return guarded([&] { *sum = store->add(key, amount); });
}

// Whether all the keys are there.
FB_API int fb_store_has(Store* store, const char* const* keys, size_t count, int* all) {
  return guarded([&] { *all = store->check(strings(keys, count)) ? 1 : 0; });
}

// Waits for all the keys; `*came` says whether they were there in time.
FB_API int fb_store_wait(
    Store* store, const char* const* keys, size_t count, int64_t timeout_ms, int* came) {
  return guarded([&] {
    try {
      store->wait(strings(keys, count), milliseconds(timeout_ms));
      *came = 1;
    } catch (const c10::DistStoreError&) {
      *came = 0;
    }
  });
}
