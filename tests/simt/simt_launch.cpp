// Kernel launch: checks of its configuration, blocks and their shared memory, and which blocks are co-resident.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>

#include "simt_core.h"
#include "simt_fiber.h"

namespace simt {

std::vector<std::unique_ptr<Block>> blocks;

namespace {

std::mutex one_launch;  // at a time: torch runs backward passes on its own threads
std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<std::unique_ptr<Cluster>> clusters;

constexpr size_t kGuard = 64;  // bytes behind the shared memory, checked when the block exits
constexpr unsigned char kGuardByte = 0xA5;

// The finaliser of splitmix64.
uint64_t splitmix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

int64_t setting(const char* name, int64_t otherwise) {
  const char* value = getenv(name);
  return value == nullptr || *value == 0 ? otherwise : strtoll(value, nullptr, 10);
}

void start_block(Block& block, uint3 index, Cluster& cluster, unsigned rank, unsigned& next_fiber) {
  block.index = index;
  block.rank = rank;
  block.cluster = &cluster;
  block.threads = machine.threads.x * machine.threads.y * machine.threads.z;
  block.exited = block.arrived = 0;
  block.barrier = nullptr;
  block.sum = block.result = 0;
  block.mbarriers.clear();
  block.async = nullptr;
  void* memory = nullptr;
  size_t guard = kGuard;
#if defined(SIMT_ASAN)
  guard = 0;  // AddressSanitizer has its own red zones
#endif
  if (posix_memalign(&memory, 1024, std::max<size_t>(1, machine.shared_bytes + guard)) != 0) throw std::bad_alloc();
  block.shared = static_cast<unsigned char*>(memory);
  memset(block.shared, kNaN, machine.shared_bytes);
  memset(block.shared + machine.shared_bytes, kGuardByte, guard);
  block.fibers.clear();
  block.warps.resize((block.threads + 31) / 32);
  for (Warp& warp : block.warps) {
    warp.block = &block;
    warp.live_mask = 0;
    warp.pending.clear();
  }
  for (unsigned n = 0; n < block.threads; ++n) {
    if (next_fiber == fibers.size()) {
      fibers.push_back(std::make_unique<Fiber>());
      fibers.back()->context.stack = new_stack();
      fibers.back()->context.stack_bytes = kStackBytes;
    }
    Fiber& f = *fibers[next_fiber];
    f.thread = {n % machine.threads.x, n / machine.threads.x % machine.threads.y,
                n / (machine.threads.x * machine.threads.y)};
    f.thread_rank = n;
    f.resident_rank = next_fiber;
    f.lane = n % 32;
    f.block = &block;
    f.warp = &block.warps[n / 32];
    f.warp->lane[f.lane] = &f;
    f.warp->live_mask |= 1u << f.lane;
    f.started = f.finished = f.in_hook = f.arrived = false;
    f.waits = nullptr;
    f.payload = nullptr;
    f.copies.clear();
    f.commit_group = f.arrived_phase = 0;
    // Staggered, so that the stacks do not compete for the same cache sets.
    prepare(f.context, entry, next_fiber % 61 * 192);
    ++next_fiber;
    block.fibers.push_back(&f);
    machine.ready.push_back(&f);
  }
  cluster.blocks.push_back(&block);
  cluster.alive += block.threads;
}

// Frees the block's shared memory; true if the guard bytes behind it were overwritten.
bool end_block(Block& block) {
  bool overrun = false;
#if defined(SIMT_ASAN)
  __asan_unpoison_memory_region(block.shared, machine.shared_bytes);
#else
  for (size_t i = 0; i < kGuard; ++i) overrun |= block.shared[machine.shared_bytes + i] != kGuardByte;
#endif
  free(block.shared);
  block.shared = nullptr;
  return overrun;
}

// Runs one wave: the `count` clusters of these ids, co-resident, of `size` blocks each.
void run_resident(const size_t* cluster_ids, size_t count, unsigned size) {
  const dim3& grid = machine.grid;
  const unsigned wide = grid.x / size;  // clusters along x
  unsigned next_fiber = 0;
  machine.ready.clear();
  machine.st_asyncs.clear();
  start_async();
  machine.idle_polls = 0;
  while (clusters.size() < count) clusters.push_back(std::make_unique<Cluster>());
  while (blocks.size() < count * size) blocks.push_back(std::make_unique<Block>());
  for (auto& block : blocks) block->fibers.clear();
  for (size_t i = 0; i < count; ++i) {
    Cluster& cluster = *clusters[i];
    cluster.blocks.clear();
    cluster.alive = cluster.arrived = cluster.phase = 0;
    cluster.clock = cluster.last_clock = nullptr;
    const size_t id = cluster_ids[i];
    for (unsigned rank = 0; rank < size; ++rank) {
      const uint3 index = {static_cast<unsigned>(id % wide) * size + rank, static_cast<unsigned>(id / wide % grid.y),
                           static_cast<unsigned>(id / wide / grid.y)};
      start_block(*blocks[i * size + rank], index, cluster, rank, next_fiber);
    }
  }
  machine.alive = next_fiber;
  const size_t actors = blocks[0]->threads / 128 + 2;
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i]->first_actor = next_fiber + i * actors;
  race_start(next_fiber, actors);
  for (size_t i = machine.ready.size(); i > 1; --i) std::swap(machine.ready[i - 1], machine.ready[random_below(i)]);
  transfer(pick());
  if (machine.error.empty() && machine.alive > 0) {
    machine.error = text("%s: deadlock on the host executor (seed %llu): no thread can go on.", machine.op,
                         static_cast<unsigned long long>(machine.seed)) +
                    waiting();
  }
  if (!machine.error.empty()) {
    machine.cancelling = true;
    for (unsigned i = 0; i < next_fiber; ++i) {
      if (fibers[i]->started && !fibers[i]->finished) transfer(fibers[i].get());
#if defined(SIMT_ASAN)
      __asan_unpoison_memory_region(fibers[i]->context.stack, kStackBytes);
#endif
    }
    machine.cancelling = false;
  }
  for (size_t i = 0; i < count * size; ++i) {
    const uint3 index = blocks[i]->index;
    if (end_block(*blocks[i]) && machine.error.empty()) {
      machine.error = text("%s: block (%u, %u, %u) wrote behind its %zu bytes of shared memory", machine.op, index.x,
                           index.y, index.z, machine.shared_bytes);
    }
  }
}

}  // namespace

Limits limits() {
  const int architecture = static_cast<int>(setting("SEQKERN_SIMT_ARCH", 90));
  const int64_t shared = architecture >= 90 && architecture < 120 ? 227 << 10
                         : architecture >= 120                    ? 99 << 10
                                                                  : 163 << 10;
  return {architecture, static_cast<int>(setting("SEQKERN_SIMT_MULTIPROCESSORS", 4)),
          static_cast<int>(setting("SEQKERN_SIMT_SHARED", shared)),
          architecture < 90 ? 1 : static_cast<int>(setting("SEQKERN_SIMT_CLUSTER", 16)),
          static_cast<int>(setting("SEQKERN_SIMT_GPC", 16))};
}

int resident_blocks(dim3 block, size_t shared_bytes) {
  const size_t threads = std::max<size_t>(32, size_t{block.x} * block.y * block.z);
  const size_t room = static_cast<size_t>(limits().shared_per_block) + 1024;
  return static_cast<int>(std::min<size_t>({32, 2048 / threads, room / (shared_bytes + 1024)}));
}
int resident_clusters(dim3 block, size_t shared_bytes, int cluster) {
  const Limits l = limits();
  if (cluster > l.max_cluster) return 0;
  const int each = resident_blocks(block, shared_bytes);
  return l.multiprocessors / l.gpc * (l.gpc * each / cluster) + l.multiprocessors % l.gpc * each / cluster;
}

void launch(const char* op, dim3 grid, dim3 block, size_t shared_bytes, int cluster, bool all_resident,
            const std::function<void()>& body) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  std::lock_guard<std::mutex> lock(one_launch);
  const Limits l = limits();
  machine.op = op;
  machine.error.clear();
  const size_t threads = size_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > 1024) fail("invalid configuration: %zu threads a block", threads);
  if (grid.x > 0x7FFFFFFFu || grid.y > 65535 || grid.z > 65535) {
    fail("invalid configuration: a grid of %u x %u x %u blocks", grid.x, grid.y, grid.z);
  }
  if (shared_bytes > static_cast<size_t>(l.shared_per_block)) {
    fail("%zu bytes of shared memory asked for, a block may have %d", shared_bytes, l.shared_per_block);
  }
  if (cluster < 1 || cluster > l.max_cluster) fail("a cluster of %d blocks, %d at most", cluster, l.max_cluster);
  if (grid.x % static_cast<unsigned>(cluster) != 0) fail("%u blocks are no whole clusters of %d", grid.x, cluster);
  if (cluster > 1 && resident_clusters(block, shared_bytes, cluster) == 0) {
    const int gpc = std::min(l.gpc, l.multiprocessors);
    fail("a cluster of %d blocks: a GPC of %d multiprocessors holds %d", cluster, gpc,
         gpc * resident_blocks(block, shared_bytes));
  }
  const size_t all = size_t{grid.x} * grid.y * grid.z;
  const size_t room = static_cast<size_t>(l.multiprocessors) * resident_blocks(block, shared_bytes);
  if (all_resident && all > room) fail("too many blocks in a cooperative launch: %zu, %zu fit the device", all, room);

  machine.grid = grid;
  machine.threads = block;
  machine.shared_bytes = shared_bytes;
  machine.architecture = l.architecture;
  machine.body = &body;
  const auto seed = static_cast<uint64_t>(setting("SEQKERN_SIMT_SEED", 0));
  static uint64_t launches = 0;  // so far with this seed: each launch gets its own schedule
  launches = seed == machine.seed ? launches + 1 : 0;
  machine.seed = seed;
  machine.rng = splitmix64(seed + (launches << 32)) | 1;
  const uint64_t even[] = {0, 3, 63};
  machine.uniform_mask = even[random_below(3)];
  machine.main.stack = nullptr;

  std::vector<size_t> cluster_ids(all / static_cast<size_t>(cluster));
  for (size_t i = 0; i < cluster_ids.size(); ++i) cluster_ids[i] = i;
  for (size_t i = cluster_ids.size(); i > 1; --i) std::swap(cluster_ids[i - 1], cluster_ids[random_below(i)]);
  // Clusters in a wave: all of a cooperative launch, otherwise one, or a few of those that fit the device.
  const size_t few = std::max<size_t>(1, std::min<size_t>(room, 8) / static_cast<size_t>(cluster));
  const size_t wave = all_resident ? cluster_ids.size() : random_bits() & 1 ? 1 : 1 + random_below(few);
  for (size_t i = 0; i < cluster_ids.size() && machine.error.empty(); i += wave) {
    run_resident(&cluster_ids[i], std::min(wave, cluster_ids.size() - i), static_cast<unsigned>(cluster));
  }
  if (!machine.error.empty()) throw std::runtime_error(machine.error);
}

}  // namespace simt
