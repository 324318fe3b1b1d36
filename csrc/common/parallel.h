// Dynamic work distribution over torch's thread pool: every thread takes the next item until none is left.
//
// Items of unequal cost (the rows of a causal matrix) balance themselves when the longest come first. The result of an
// item must not depend on who computes it; then the number of threads changes nothing but the time.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace seqkern {

class WorkQueue {
 public:
  explicit WorkQueue(int64_t count) : count_(count) {}
  // False when nothing is left.
  bool take(int64_t& item) {
    item = next_.fetch_add(1, std::memory_order_relaxed);
    return item < count_;
  }

 private:
  std::atomic<int64_t> next_{0};
  const int64_t count_;
};

inline int64_t worker_count(int64_t items) {
  return std::max<int64_t>(1, std::min<int64_t>(items, torch::stable::get_num_threads()));
}

// Calls worker(queue, index) for index in [0, worker_count(items)): in parallel where torch grants the threads, one
// after the other where it does not (inside another parallel region). So a worker may wait only for an item taken from
// the queue before its own: that one is finished, or is being worked on by a thread that runs.
template <class Worker>
void parallel_workers(int64_t items, const Worker& worker) {
  if (items <= 0) return;
  WorkQueue queue(items);
  const int64_t workers = worker_count(items);
  if (workers == 1) {
    worker(queue, int64_t{0});
    return;
  }
  torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) worker(queue, index);
  });
}

}  // namespace seqkern
