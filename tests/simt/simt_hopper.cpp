// Named barriers, registers that go from warpgroup to warpgroup, and when what was asked for happens. See
// simt_hopper.h.
#include <algorithm>
#include <cstring>

#include "simt_async.h"

namespace simt {

namespace {

// What may happen at any time now.
struct Event {
  Block* block;
  size_t warpgroup;
  std::shared_ptr<BulkStore> store;  // or a product of that warpgroup
};
std::vector<std::shared_ptr<TmaLoad>> loads;
std::vector<Event> events;
uint64_t steps = 0;  // that threads waited
unsigned mode = 0;   // what has no need to happen now does so 0: late, 1: at some time, 2: at once

template <class T>
T take(std::vector<T>& all, size_t i) {
  T one = all[i];
  all[i] = all.back();
  all.pop_back();
  return one;
}

void run_event(size_t i) {
  const Event event = take(events, i);
  if (event.store == nullptr) {
    run_wgmma(*event.block, event.warpgroup);
  } else if (!event.store->read) {
    read_store(*event.store);
    events.push_back(event);
  } else {
    write_store(*event.store);
  }
}

}  // namespace

// ---- when ----------------------------------------------------------------------------------------------------------

void start_async() {
  loads.clear();
  events.clear();
  mode = static_cast<unsigned>((machine.rng >> 20) % 3);
}
bool eager() { return mode == 2 || (mode == 1 && random_bits() % 8 == 0); }
void schedule(Block* block, size_t warpgroup) { events.push_back({block, warpgroup, nullptr}); }
void schedule(Block* block, const std::shared_ptr<BulkStore>& store) { events.push_back({block, 0, store}); }
void schedule(const std::shared_ptr<TmaLoad>& load, uint64_t wait) {
  load->due = steps + wait;
  loads.push_back(load);
}

bool step_async() {
  if (!loads.empty()) {
    ++steps;
    const size_t i = random_below(loads.size());
    if (loads[i]->due <= steps) finish(*take(loads, i));
  }
  if (mode == 1 && !events.empty() && random_bits() % 4 == 0) run_event(random_below(events.size()));
  return !loads.empty();
}

BlockAsync& block_async(Block& block) {
  if (block.async == nullptr) {
    block.async = std::make_shared<BlockAsync>();
    block.async->threads.resize(block.threads);
    block.async->warpgroups.resize(block.threads / 128);
  }
  return *block.async;
}

void require_sm90(const char* what) {
  if (machine.architecture != 90)
    fail("%s: an instruction of 9.0 alone, this device is %d", what, machine.architecture);
}

// ---- warps ---------------------------------------------------------------------------------------------------------

void named_barrier(int id, int threads, bool waits, const Place& at) {
  const char* name = waits ? "named_barrier_sync" : "named_barrier_arrive";
  require_sm90(name);
  maybe_yield();
  Fiber& self = *running;
  Block& block = *self.block;
  if (id < 1 || id > 15) fail("%s: barrier %d, there are 1 ... 15 (0 is that of __syncthreads)", name, id);
  if (threads < 32 || threads % 32 != 0 || threads > static_cast<int>(block.threads)) {
    fail("%s: barrier %d of %d threads: whole warps of the block are expected", name, id, threads);
  }
  NamedBarrier& b = block_async(block).barriers[id];
  if (b.arrived == 0) {
    b.threads = threads;
    b.came.assign(block.threads, false);
    b.clock = nullptr;
  } else if (b.threads != threads) {
    fail("%s: barrier %d of %d threads, of which others say %d", name, id, threads, b.threads);
  }
  if (b.came[self.thread_rank]) fail("%s: the thread comes to barrier %d twice before all are there", name, id);
  b.came[self.thread_rank] = true;
  race_release(b.clock);
  progress();
  if (++b.arrived < b.threads) {
    if (!waits) {
      maybe_yield();
      return;
    }
    b.waiting.push_back(&self);
    self.payload = &b;
    wait(name, at);
    race_acquire(thread_async(self).barrier_clock);
    return;
  }
  b.arrived = 0;
  const Clock clock = b.clock;
  std::vector<Fiber*> woken;
  woken.swap(b.waiting);
  for (size_t i = woken.size(); i > 1; --i) std::swap(woken[i - 1], woken[random_below(i)]);
  for (Fiber* f : woken) {
    thread_async(*f).barrier_clock = clock;
    wake(f);
  }
  if (waits) race_acquire(clock);
  maybe_yield();
}

void set_registers(int count, bool up) {
  require_sm90("set_registers");
  Fiber& self = *running;
  ThreadAsync& lane = thread_async(self);
  const int before = lane.registers.empty() ? 0 : lane.registers.back();
  if (before != 0 && (up ? count < before : count > before)) {
    fail("set_registers_%s: %d, the thread has %d", up ? "up" : "down", count, before);
  }
  lane.registers.push_back(count);
  maybe_yield();
}

static void elect_all(Warp& warp, unsigned) {
  const auto chosen = static_cast<unsigned>((machine.seed * 11 + 5) % 32);
  for (unsigned lane = 0; lane < 32; ++lane) *static_cast<unsigned*>(warp.lane[lane]->payload) = lane == chosen;
}
bool elect(const Place& at) {
  require_sm90("elect_one");
  unsigned payload = 0;
  collective("elect_one", ~0u, elect_all, &payload, at);
  return payload != 0;
}

// ---- ends ----------------------------------------------------------------------------------------------------------

namespace {

void exit_registers(Fiber& fiber) {
  BlockAsync& async = block_async(*fiber.block);
  const size_t warpgroup = fiber.thread_rank / 128;
  const ThreadAsync& lane = async.threads[fiber.thread_rank];
  if (warpgroup >= async.warpgroups.size()) {
    if (!lane.registers.empty()) fail("set_registers: the thread is in no whole warpgroup of 128");
    return;
  }
  Warpgroup& group = async.warpgroups[warpgroup];
  if (!group.ended) {
    group.ended = true;
    group.registers = lane.registers;
  } else if (group.registers != lane.registers) {
    fail("set_registers: not all threads of warpgroup %zu have called the same", warpgroup);
  }
}

void check_pool(Block& block) {
  const BlockAsync& async = *block.async;
  // What ptxas gives a thread of a kernel that has a multiprocessor to itself, and what the block therefore has: no
  // thread gets what the division leaves (tests/cuda/test_cuda_build.py looks at ptxas's reports).
  const int start = static_cast<int>(std::min(256u, 65536 / block.threads / 8 * 8));
  const int pool = start * static_cast<int>(block.threads);
  int sum = 0;
  bool set = false;
  for (const Warpgroup& group : async.warpgroups) {
    set |= !group.registers.empty();
    sum += 128 * (group.registers.empty() ? start : group.registers.back());
  }
  if (set && sum > pool) fail("set_registers: the warpgroups want %d registers, the block has %d", sum, pool);
}

}  // namespace

void exit_async(Fiber& fiber) {
  Block& block = *fiber.block;
  if (block.async == nullptr) return;
  exit_wgmma(fiber);
  ThreadAsync& lane = thread_async(fiber);
  for (const auto& store : lane.stores) {
    if (!store->waited) {
      fail("the thread ends while its %s may still read shared memory: no bulk_wait_read for it",
           store->adds ? "bulk_reduce_add_f32" : "tma_store_4d");
    }
    write_store(*store);
  }
  exit_registers(fiber);
  if (block.exited + 1 < block.threads) return;
  check_pool(block);
  for (const auto& load : loads) {
    if (load->block == &block) fail("the block ends while a tma_load_4d into it is on its way");
  }
  for (size_t i = 0; i < events.size();) {
    if (events[i].block == &block) {
      take(events, i);
    } else {
      ++i;
    }
  }
}

std::string waiting_async(const Fiber& fiber) {
  if (fiber.block->async == nullptr) return "";
  const NamedBarrier* barriers = fiber.block->async->barriers;
  for (int id = 1; id < 16; ++id) {
    const NamedBarrier& b = barriers[id];
    if (std::find(b.waiting.begin(), b.waiting.end(), &fiber) != b.waiting.end()) {
      return text(": at barrier %d are %d of %d threads", id, b.arrived, b.threads);
    }
  }
  for (const Warpgroup& group : fiber.block->async->warpgroups) {
    if (std::find(group.waiting.begin(), group.waiting.end(), &fiber) == group.waiting.end()) continue;
    for (const auto& wgmma : group.wgmmas) {
      if (wgmma->arrived < 128) return text(": to a wgmma of it %u of 128 threads have come", wgmma->arrived);
    }
  }
  return "";
}

}  // namespace simt
