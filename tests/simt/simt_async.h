// What simt_hopper.cpp, simt_tma.cpp and simt_wgmma.cpp keep of a block: products and copies under way, named barriers.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "common/cuda/hopper/device.cuh"

namespace simt {

// Of one wgmma. Thread t of the warpgroup holds rows 16 (t / 32) + t % 32 / 4 and 8 more, two columns of every eight.
struct Sums {
  int n;
  std::vector<float> values;  // 64 x n
};
struct Product {
  ProductKind kind;
  Place at;
  const void* code;
  Fiber* first;  // who called it first
  unsigned arrived = 0;
  bool starts = false;  // sums that no product before had
  bool done = false;
  std::shared_ptr<Sums> sums;
  std::vector<float> a;  // 64 x 16, from registers
  Clock past, clock;     // what all 128 threads had seen; that it has read
};
struct Warpgroup {
  std::deque<std::shared_ptr<Product>> products;  // all since the block began, read or not
  size_t done = 0;
  std::vector<Fiber*> waiting;
  std::vector<int> registers;  // as the first thread to end set them
  bool ended = false;
};

// A TMA load, or a TMA store or addition.
struct Load {
  Block* block;
  seqkern::TensorMap map;
  unsigned char* to;
  uint64_t* barrier;
  int at[4];
  const void* code;
  uint64_t due;  // in steps
  bool read = false;
  std::vector<unsigned char> data;  // rows of 128 bytes
  Clock past;
};
struct BulkStore {
  Block* block;
  bool adds;
  seqkern::TensorMap map;
  int at[4];
  const unsigned char* from;
  float* global;
  size_t bytes;
  const void* code;
  unsigned group;
  bool read = false, written = false, covered = false;
  std::vector<unsigned char> data;
  Clock past, clock;
};

// Of one thread.
struct Lane {
  struct Open {
    float* d;
    int n;
    std::shared_ptr<Sums> sums;
    size_t last;  // product
  };
  size_t issued = 0;
  std::vector<size_t> group_ends;
  bool fenced = false;
  std::vector<Open> open;
  std::vector<int> registers;
  unsigned bulk_group = 0;
  std::vector<std::shared_ptr<BulkStore>> stores;
  Clock barrier_past;
};
struct NamedBarrier {
  int threads = 0, arrived = 0;
  std::vector<bool> came;
  std::vector<Fiber*> waiting;
  Clock past;
  Place at;
};
struct Async {
  std::vector<Lane> lanes;
  std::vector<Warpgroup> warpgroups;
  NamedBarrier barriers[16];
};

Async& async_of(Block& block);
inline Lane& lane_of(const Fiber& fiber) { return async_of(*fiber.block).lanes[fiber.number]; }
void run_product(Block& block, size_t warpgroup);  // the next one that all threads have called
void later(Block* block, size_t warpgroup);        // some time
void later(Block* block, const std::shared_ptr<BulkStore>& store);
void later(const std::shared_ptr<Load>& load, uint64_t wait);  // not before so many steps
bool at_once();                                                // this schedule does not wait with it
void need_hopper(const char* what);
void leave_products(Fiber& fiber);
void finish(Load& load);
void read_store(BulkStore& store);
void write_store(BulkStore& store);

// Where byte `at` of a swizzled tile lies: bits 4 ... 6 are crossed with bits 7 ... 9, of the offset in shared memory,
// which begins at a multiple of 1024 bytes.
inline size_t swizzled(size_t at) { return at ^ (at >> 7 & 7) << 4; }

}  // namespace simt
