// Dynamic scheduling on torch's thread pool: every worker takes the next item until none is left.
//
// Items of unequal cost (the rows of a causal matrix) balance when the longest come first. An item's result must not
// depend on its worker; then the number of threads changes only the time.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "scratch.h"

namespace seqkern {

// Multiply-adds, or elements read, below which a second thread costs more than it saves.
constexpr double kGrainWork = 1 << 18;
// Elements of a range of rows.
constexpr int64_t kRangeElements = 4096;

class WorkQueue {
 public:
  explicit WorkQueue(int64_t count) : count_(count) {}
  // False when no item is left.
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

// Calls worker(queue, index) for index in [0, worker_count(items)): in parallel where torch grants the threads,
// otherwise one after the other (inside another parallel region). So a worker may wait only for items taken from the
// queue before its own: those are finished, or on a running thread.
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

// Calls body(item, scratch) for every item on `workers` threads; each has scratch_bytes of its own.
template <class Body>
void for_items_on(int64_t workers, int64_t items, int64_t scratch_bytes, const Body& body) {
  const Scratch scratch(scratch_bytes, workers);
  if (workers == 1) {
    for (int64_t item = 0; item < items; ++item) body(item, scratch.data());
    return;
  }
  parallel_workers(items, [&](WorkQueue& queue, int64_t worker) {
    for (int64_t item; queue.take(item);) body(item, scratch.piece(worker));
  });
}

// Calls body(item, scratch) for every item, on as many threads as an item's work is worth.
template <class Body>
void for_items(int64_t items, double work, int64_t scratch_bytes, const Body& body) {
  if (items <= 0) return;
  const bool one = work / static_cast<double>(items) * worker_count(items) < kGrainWork;
  for_items_on(one ? 1 : worker_count(items), items, scratch_bytes, body);
}

// The same where an item prefetches what the next one reads: every worker takes the items of a run of its own, in
// order, and then those that are left of the others' runs.
template <class Body>
void for_runs(int64_t items, double work, int64_t scratch_bytes, const Body& body) {
  if (items <= 0) return;
  const int64_t workers = worker_count(items);
  if (workers == 1 || work / static_cast<double>(items) * static_cast<double>(workers) < kGrainWork)
    return for_items_on(1, items, scratch_bytes, body);
  struct alignas(64) Run {
    std::atomic<int64_t> next;
  };
  const Scratch scratch(scratch_bytes, workers);
  const std::unique_ptr<Run[]> runs(new Run[static_cast<size_t>(workers)]);
  const auto begin = [&](int64_t run) { return run * items / workers; };
  for (int64_t run = 0; run < workers; ++run) runs[static_cast<size_t>(run)].next = begin(run);
  parallel_workers(workers, [&](WorkQueue& queue, int64_t worker) {
    for (int64_t own; queue.take(own);)
      for (int64_t other = 0; other < workers; ++other) {
        const int64_t run = (own + other) % workers;
        std::atomic<int64_t>& next = runs[static_cast<size_t>(run)].next;
        for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < begin(run + 1);)
          body(item, scratch.piece(worker));
      }
  });
}

// for_items() for many small items: as many threads as all of the work is worth.
template <class Body>
void for_small_items(int64_t items, double work, int64_t scratch_bytes, const Body& body) {
  if (items > 0) for_items_on(work < 2 * kGrainWork ? 1 : worker_count(items), items, scratch_bytes, body);
}

// Calls body(begin, end, scratch) for ranges of `rows` rows of `columns` columns.
template <class Body>
void for_ranges(int64_t rows, int64_t columns, int64_t scratch_bytes, const Body& body) {
  const int64_t range = std::max<int64_t>(1, kRangeElements / std::max<int64_t>(1, columns));
  for_items((rows + range - 1) / range, 32.0 * static_cast<double>(rows) * static_cast<double>(columns), scratch_bytes,
            [&](int64_t item, void* scratch) { body(item * range, std::min(rows, (item + 1) * range), scratch); });
}

}  // namespace seqkern
