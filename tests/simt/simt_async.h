// What simt_hopper.cpp, simt_tma.cpp and simt_wgmma.cpp keep of a block: products and copies under way, named barriers.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "common/cuda/hopper/device.cuh"

namespace simt {

// Of one wgmma. Thread t of the warpgroup holds rows 16 (t / 32) + t % 32 / 4 and 8 more, two columns of every eight.
struct Accumulators {
  int n;
  std::vector<float> values;  // 64 x n
};
struct Wgmma {
  WgmmaCall call;
  Place at;
  const void* pc;
  Fiber* first;  // who called it first
  unsigned arrived = 0;
  bool opens_chain = false;  // sums that no product before had
  bool done = false;
  std::shared_ptr<Accumulators> sums;
  std::vector<float> a;           // 64 x 16, from registers
  Clock issue_clock, done_clock;  // what all 128 threads had seen; that it has read
};
struct Warpgroup {
  std::deque<std::shared_ptr<Wgmma>> wgmmas;  // all since the block began, read or not
  size_t done = 0;
  std::vector<Fiber*> waiting;
  std::vector<int> registers;  // as the first thread to end set them
  bool ended = false;
};

// A TMA load, or a TMA store or addition.
struct TmaLoad {
  Block* block;
  seqkern::TensorMap map;
  unsigned char* to;
  uint64_t* barrier;
  int at[4];
  const void* pc;
  uint64_t due;  // in steps
  bool read = false;
  std::vector<unsigned char> data;  // rows of 128 bytes
  Clock issue_clock;
};
struct BulkStore {
  Block* block;
  bool adds;
  seqkern::TensorMap map;
  int at[4];
  const unsigned char* from;
  float* global;
  size_t bytes;
  const void* pc;
  unsigned group;
  bool read = false, written = false, waited = false;
  std::vector<unsigned char> data;
  Clock issue_clock, done_clock;
};

// Of one thread.
struct ThreadAsync {
  struct Pending {
    float* d;
    int n;
    std::shared_ptr<Accumulators> sums;
    size_t last;  // product
  };
  size_t issued = 0;
  std::vector<size_t> group_ends;
  bool fenced = false;
  std::vector<Pending> pending;
  std::vector<int> registers;
  unsigned bulk_group = 0;
  std::vector<std::shared_ptr<BulkStore>> stores;
  Clock barrier_clock;
};
struct NamedBarrier {
  int threads = 0, arrived = 0;
  std::vector<bool> came;
  std::vector<Fiber*> waiting;
  Clock clock;
  Place at;
};
struct BlockAsync {
  std::vector<ThreadAsync> threads;
  std::vector<Warpgroup> warpgroups;
  NamedBarrier barriers[16];
};

BlockAsync& block_async(Block& block);
inline ThreadAsync& thread_async(const Fiber& fiber) { return block_async(*fiber.block).threads[fiber.thread_rank]; }
void run_wgmma(Block& block, size_t warpgroup);  // the next one that all threads have called
void schedule(Block* block, size_t warpgroup);   // some time
void schedule(Block* block, const std::shared_ptr<BulkStore>& store);
void schedule(const std::shared_ptr<TmaLoad>& load, uint64_t wait);  // not before so many steps
bool eager();                                                        // this schedule does not wait with it
void require_sm90(const char* what);
void exit_wgmma(Fiber& fiber);
void finish(TmaLoad& load);
void read_store(BulkStore& store);
void write_store(BulkStore& store);

// Where byte `at` of a swizzled tile lies: bits 4 ... 6 are crossed with bits 7 ... 9, of the offset in shared memory,
// which begins at a multiple of 1024 bytes.
inline size_t swizzled(size_t at) { return at ^ (at >> 7 & 7) << 4; }

}  // namespace simt
