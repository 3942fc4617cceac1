// A group of ranks, and how an operation on it is started and waited for.
#pragma once

#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <deque>
#include <mutex>
#include <utility>

#include "shim.h"

namespace feedline {

// In the order of `Op` in `src/dist/op.rs`.
enum class Op {
  all_reduce,
  broadcast,
  reduce,
  all_gather,
  reduce_scatter,
  all_to_all,
  gather,
  scatter,
  send,
  recv,
  barrier,
};

const char* name_of(Op op);

// What an operation needs besides its tensors.
struct Call {
  int32_t op;
  int32_t reduce;  // 0 sum, 1 max, 2 min
  int32_t peer;    // root, source or destination in the group; -1 where there is none
  int32_t tag;
};

// Which operation of a group it is.
struct Ticket {
  Op op = Op::barrier;
  int32_t peer = -1;
  uint64_t number = 0;  // counts the collectives of a group, equal on all its ranks; p2p: the last
  std::chrono::steady_clock::time_point started = std::chrono::steady_clock::now();
};

struct Group : torch::CustomClassHolder {
  c10::intrusive_ptr<c10d::Backend> backend;
  uint64_t id = 0;  // by which Rust knows it

  // c10d counts its operations without a lock, and they must start in one order on all ranks.
  std::mutex starting;
  uint64_t collectives = 0;

  // What a thread of this process waits for, for other threads to read.
  std::mutex looking;
  bool waits = false;
  Ticket waited;

  // For GPUs: the device of this rank, -1 for CPUs, and the timeout of a wait for another rank.
  c10::DeviceIndex gpu = -1;
  std::chrono::milliseconds patience{0};
  // Operations whose wait has returned, but for which the GPU still waits, each with the event
  // behind it.
  std::deque<std::pair<Ticket, c10::Event>> ahead;

  ~Group() override;
};

using GroupPtr = c10::intrusive_ptr<Group>;

// Makes a group of GPUs; null where that is not compiled in.
using MakeOfGpus = c10::intrusive_ptr<c10d::Backend> (*)(
    c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout);
extern MakeOfGpus make_of_gpus;

// An operation in flight. Its tensors live as long.
struct Work {
  GroupPtr group;
  Ticket ticket;
  c10::intrusive_ptr<c10d::Work> work;
  at::Tensor out;
  at::Tensor in;
};

Work start(const GroupPtr& group, const Call& call, const at::Tensor& out, const at::Tensor& in);

// Throws `Lost` if the operation failed.
void finish(Work& work);

inline void run(
    const GroupPtr& group, const Call& call, const at::Tensor& out, const at::Tensor& in) {
  Work work = start(group, call, out, in);
  finish(work);
}

}  // namespace feedline
