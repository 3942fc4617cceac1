// Groups of ranks: c10d's process groups, one interface for Gloo and NCCL.

#include "dist.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#ifdef USE_C10D_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include <atomic>
#include <cstdlib>
#include <set>
#include <thread>

using at::Tensor;
using feedline::Call;
using feedline::Group;
using feedline::GroupPtr;
using feedline::guarded;
using feedline::Op;
using feedline::Ticket;
using feedline::Work;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

// c10d notes every operation in one flight recorder for the process, which adds groups to a map
// without a lock (libtorch 2.11): ranks that are threads corrupted it in one run of twenty. It is
// off unless its own variables enable it; `missing_ranks.rs` finds the missing ranks. This runs
// before `main`, while there is one thread, as a change of the environment must.
__attribute__((constructor)) static void without_flight_recorder() {
  if (getenv("TORCH_NCCL_TRACE_BUFFER_SIZE") == nullptr) setenv("TORCH_FR_BUFFER_SIZE", "0", 0);
  // CleanUpOnly: NCCL's watchdog aborts the communicators after a failure, so that no thread of
  // this process waits for a lost rank forever, and `settle` reports the failure. By default it
  // ends the process by a signal. Overwritten, because torchrun sets it to 1 for every process.
  setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2", 1);
  setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0", 0);
  // It sleeps four times this before that, so that others can dump their flight recorders.
  setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "0", 0);
}

namespace feedline {

const char* name_of(Op op) {
  static const char* const names[] = {
      "all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all",
      "gather",     "scatter",   "send",   "recv",       "barrier"};
  return names[static_cast<int>(op)];
}

static c10d::ReduceOp::RedOpType reduction(int32_t reduce) {
  static const c10d::ReduceOp::RedOpType kinds[] = {
      c10d::ReduceOp::SUM, c10d::ReduceOp::MAX, c10d::ReduceOp::MIN};
  return kinds[reduce];
}

static Lost lost(const Group& group, const Ticket& ticket, const char* text) {
  const std::chrono::duration<double> age = steady_clock::now() - ticket.started;
  return Lost(text, group.id, static_cast<int>(ticket.op), ticket.peer, ticket.number, age.count());
}

// A list of one: c10d's operations take one tensor a device.
static std::vector<Tensor> one(const Tensor& tensor) { return {tensor}; }

static c10::intrusive_ptr<c10d::Work> start_on(
    c10d::Backend& backend, const Call& call, Tensor out, Tensor in) {
  std::vector<Tensor> outs = one(out);
  std::vector<Tensor> ins = one(in);
  const bool is_root = call.peer == backend.getRank();
  switch (static_cast<Op>(call.op)) {
    case Op::all_reduce: {
      c10d::AllreduceOptions options;
      options.reduceOp = reduction(call.reduce);
      return backend.allreduce(outs, options);
    }
    case Op::broadcast: {
      c10d::BroadcastOptions options;
      options.rootRank = call.peer;
      return backend.broadcast(outs, options);
    }
    case Op::reduce: {
      c10d::ReduceOptions options;
      options.reduceOp = reduction(call.reduce);
      options.rootRank = call.peer;
      return backend.reduce(outs, options);
    }
    case Op::all_gather:
      return backend._allgather_base(out, in);
    case Op::reduce_scatter: {
      c10d::ReduceScatterOptions options;
      options.reduceOp = reduction(call.reduce);
      return backend._reduce_scatter_base(out, in, options);
    }
    case Op::all_to_all: {
      std::vector<int64_t> even;
      return backend.alltoall_base(out, in, even, even);
    }
    case Op::gather: {
      c10d::GatherOptions options;
      options.rootRank = call.peer;
      std::vector<std::vector<Tensor>> parts;
      if (is_root) {
        parts.push_back(out.chunk(backend.getSize(), 0));
      }
      return backend.gather(parts, ins, options);
    }
    case Op::scatter: {
      c10d::ScatterOptions options;
      options.rootRank = call.peer;
      std::vector<std::vector<Tensor>> parts;
      if (is_root) {
        parts.push_back(in.chunk(backend.getSize(), 0));
      }
      return backend.scatter(outs, parts, options);
    }
    case Op::send:
      return backend.send(ins, call.peer, call.tag);
    case Op::recv:
      return backend.recv(outs, call.peer, call.tag);
    case Op::barrier:
      return backend.barrier();
  }
  TORCH_CHECK(false, "unknown operation ", call.op);
}

Work start(const GroupPtr& group, const Call& call, const Tensor& out, const Tensor& in) {
  const c10::NoGradGuard no_grad;
  const std::lock_guard<std::mutex> lock(group->starting);
  Ticket ticket;
  ticket.op = static_cast<Op>(call.op);
  const bool between_two = ticket.op == Op::send || ticket.op == Op::recv;
  ticket.peer = between_two ? call.peer : -1;
  ticket.number = between_two ? group->collectives : ++group->collectives;
  ticket.started = steady_clock::now();
  try {
    return Work{group, ticket, start_on(*group->backend, call, out, in), out, in};
  } catch (const c10::DistError& error) {
    throw lost(*group, ticket, error.what_without_backtrace());
  } catch (const c10::Error&) {
    throw;  // caused by the arguments, not by another rank
  } catch (const std::exception& error) {
    throw lost(*group, ticket, error.what());
  }
}

// Between two checks of the groups while waiting for a GPU.
constexpr milliseconds POLL(100);

// The total time that threads of this process have waited for operations.
static std::atomic<int64_t> waited_ns{0};

// Publishes what this thread waits for, until it is destroyed.
class Waiting {
 public:
  Waiting(Group& group, const Ticket& ticket) : group_(group), started_(steady_clock::now()) {
    const std::lock_guard<std::mutex> lock(group_.looking);
    group_.waited = ticket;
    group_.waits = true;
  }
  ~Waiting() {
    const std::chrono::nanoseconds waited = steady_clock::now() - started_;
    waited_ns += waited.count();
    const std::lock_guard<std::mutex> lock(group_.looking);
    group_.waits = false;
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  Group& group_;
  const steady_clock::time_point started_;
};

// The groups of GPUs of this process.
static std::mutex of_gpus_lock;
static std::set<Group*> of_gpus;

Group::~Group() {
  const std::lock_guard<std::mutex> lock(of_gpus_lock);
  of_gpus.erase(this);
}

// An event behind all work that this thread has given to its GPU so far.
static c10::Event mark() {
  const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
  c10::Event event(c10::kCUDA);
  event.record(guard.getStream(guard.getDevice()));
  return event;
}

// The oldest operation that the GPU has not completed, null if there is none. Under `looking`.
static const Ticket* oldest(Group& group) {
  while (!group.ahead.empty() && group.ahead.front().second.query()) {
    group.ahead.pop_front();
  }
  return group.ahead.empty() ? nullptr : &group.ahead.front().first;
}

static const char* text_of(c10d::ErrorType error) {
  switch (error) {
    case c10d::ErrorType::TIMEOUT:
      return "NCCL: operation timed out";
    case c10d::ErrorType::REMOTE_ERROR:
      return "NCCL: connection to another rank failed";
    default:
      return "NCCL: operation failed (hint: NCCL_DEBUG=WARN logs the cause)";
  }
}

// Throws `Lost` if a group of this GPU has failed, or an operation of it takes too long.
static void check_for_lost(c10::DeviceIndex gpu) {
  const std::lock_guard<std::mutex> lock(of_gpus_lock);
  for (Group* group : of_gpus) {
    if (group->gpu != gpu) {
      continue;
    }
    const std::lock_guard<std::mutex> looking(group->looking);
    const Ticket* ticket = oldest(*group);
    const c10d::ErrorType error = group->backend->getError();
    if (error != c10d::ErrorType::SUCCESS) {
      // An aborted communicator ends its operations: then the last one is the best that is known.
      throw lost(*group, ticket != nullptr ? *ticket : group->waited, text_of(error));
    }
    if (ticket != nullptr && steady_clock::now() - ticket->started > group->patience) {
      throw lost(*group, *ticket, "the GPU is still waiting for it");
    }
  }
}

void finish(Work& work) {
  const Waiting waiting(*work.group, work.ticket);
  try {
    if (!work.work->wait()) {
      throw lost(*work.group, work.ticket, "aborted");
    }
    if (work.group->gpu >= 0) {
      c10::Event event = mark();
      const std::lock_guard<std::mutex> lock(work.group->looking);
      oldest(*work.group);
      work.group->ahead.emplace_back(work.ticket, std::move(event));
    }
  } catch (const Lost&) {
    throw;
  } catch (const c10::Error& error) {
    throw lost(*work.group, work.ticket, error.what_without_backtrace());
  } catch (const std::exception& error) {
    throw lost(*work.group, work.ticket, error.what());
  }
}

}  // namespace feedline

static Group* made(c10::intrusive_ptr<c10d::Backend> backend, uint64_t id) {
  auto group = c10::make_intrusive<Group>();
  group->backend = std::move(backend);
  group->id = id;
  return group.release();
}

static GroupPtr shared(Group* group) {
  return GroupPtr::reclaim_copy(group);
}

// A group over TCP. Its members listen where `interface` or, if that is null, `address` says.
// Their keys in the store start with `prefix`.
FB_API int fb_group_gloo(
    c10d::Store* store, const char* prefix, int rank, int size, int64_t timeout_ms,
    const char* interface, const char* address, uint64_t id, Group** out) {
  *out = nullptr;
  return guarded([&] {
    auto base = c10::intrusive_ptr<c10d::Store>::reclaim_copy(store);
    auto own = c10::make_intrusive<c10d::PrefixStore>(prefix, std::move(base));
    auto options = c10d::ProcessGroupGloo::Options::create(milliseconds(timeout_ms));
    options->devices.push_back(
        interface != nullptr ? c10d::ProcessGroupGloo::createDeviceForInterface(interface)
                             : c10d::ProcessGroupGloo::createDeviceForHostname(address));
    *out = made(
        c10::make_intrusive<c10d::ProcessGroupGloo>(std::move(own), rank, size, options), id);
  });
}

#ifdef USE_C10D_NCCL
static c10::intrusive_ptr<c10d::Backend> of_nccl(
    c10::intrusive_ptr<c10d::Store> store, int rank, int size, milliseconds timeout) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(std::move(store), rank, size, options);
}
feedline::MakeOfGpus feedline::make_of_gpus = of_nccl;
#else
feedline::MakeOfGpus feedline::make_of_gpus = nullptr;
#endif

// A group of GPUs, one a rank: this rank's is the current device.
FB_API int fb_group_nccl(
    c10d::Store* store, const char* prefix, int rank, int size, int64_t timeout_ms, uint64_t id,
    Group** out) {
  *out = nullptr;
  return guarded([&] {
    TORCH_CHECK(feedline::make_of_gpus != nullptr, "built without the feature cuda");
    const milliseconds timeout(timeout_ms);
    auto base = c10::intrusive_ptr<c10d::Store>::reclaim_copy(store);
    auto own = c10::make_intrusive<c10d::PrefixStore>(prefix, std::move(base));
    Group* group = made(feedline::make_of_gpus(std::move(own), rank, size, timeout), id);
    group->gpu = c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice().index();
    group->patience = timeout;
    const std::lock_guard<std::mutex> lock(feedline::of_gpus_lock);
    feedline::of_gpus.insert(*out = group);
  });
}

// Waits until the current GPU has completed the work of this thread.
FB_API int fb_settle() {
  return guarded([] {
    {
      const std::lock_guard<std::mutex> lock(feedline::of_gpus_lock);
      if (feedline::of_gpus.empty()) {
        return;  // no group of GPUs: the read itself waits
      }
    }
    const c10::Event done = feedline::mark();
    auto checked = steady_clock::now();
    while (!done.query()) {
      std::this_thread::yield();
      if (steady_clock::now() - checked > feedline::POLL) {
        feedline::check_for_lost(done.device_index());
        checked = steady_clock::now();
      }
    }
    feedline::check_for_lost(done.device_index());
  });
}

FB_API void fb_group_free(Group* group) { GroupPtr::reclaim(group); }

// Starts an operation. `out` and `in` may be null where it has none; both live until `fb_work_free`.
FB_API int fb_start(
    Group* group, const Call* call, const Tensor* out, const Tensor* in, Work** work) {
  *work = nullptr;
  return guarded([&] {
    const Tensor none;
    *work = new Work(feedline::start(
        shared(group), *call, out != nullptr ? *out : none, in != nullptr ? *in : none));
  });
}

FB_API int fb_work_wait(Work* work) {
  return guarded([&] { feedline::finish(*work); });
}

// 1 if the operation is complete or has failed.
FB_API int fb_work_done(Work* work) {
  try {
    return work->work->isCompleted();
  } catch (...) {
    return 1;  // waiting for it returns the error
  }
}

FB_API void fb_work_free(Work* work) { delete work; }

FB_API int64_t fb_waited_ns() { return feedline::waited_ns; }

// What a thread waits for on this group: 1 and `*out` filled, else 0.
struct Wait {
  const char* op;
  int32_t peer;
  uint64_t number;
  double seconds;
};
FB_API int fb_group_waits(Group* group, Wait* out) {
  try {
    const std::lock_guard<std::mutex> lock(group->looking);
    // This is not the thread that computes: without the guard its events would be queried on GPU 0,
    // where that creates a context of half a gigabyte.
    c10::OptionalDeviceGuard guard;
    if (group->gpu >= 0) {
      guard.reset_device(c10::Device(c10::kCUDA, group->gpu));
    }
    const Ticket* ticket = group->waits ? &group->waited : feedline::oldest(*group);
    if (ticket == nullptr) {
      return 0;
    }
    const std::chrono::duration<double> age = steady_clock::now() - ticket->started;
    *out = {feedline::name_of(ticket->op), ticket->peer, ticket->number, age.count()};
    return 1;
  } catch (...) {
    return 0;  // the GPU cannot be queried any more: the thread that computes gets the error
  }
}
