#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace seqkern {
namespace {

constexpr size_t kPage = size_t{1} << 12, kHugePage = size_t{1} << 21;
constexpr size_t kLeast = size_t{1} << 20;
constexpr size_t kHugeFrom = 2 * kHugePage;  // rounding smaller blocks up would waste too much

// Free blocks of one size, the most recently used last: it is the likeliest to be in cache.
struct Bin {
  std::vector<void*> blocks;
  uint64_t last_use = 0;
};

struct Block {
  void* address;
  size_t size;
};

struct Pool {
  std::mutex mutex;
  std::map<size_t, Bin> bins;
  uint64_t uses = 0;
  size_t bytes = 0, limit = size_t{512} << 20;
  std::atomic<bool> poison{false};
};

// Rounds up to one of eight sizes per doubling, to whole pages, and to whole huge pages where those are used.
size_t rounded_size(size_t bytes) {
  const size_t step = std::max(size_t{1} << (60 - __builtin_clzll(bytes)), bytes >= kHugeFrom ? kHugePage : kPage);
  return (bytes + step - 1) / step * step;
}

Pool& pool() {
  // Never destroyed: tensors may outlive static objects. Locked during a fork, so that no child finds it locked.
  static Pool* const instance = [] {
    pthread_atfork([] { pool().mutex.lock(); }, [] { pool().mutex.unlock(); }, [] { pool().mutex.unlock(); });
    return new Pool;
  }();
  return *instance;
}

#if defined(__linux__)
void* map(size_t size) {
  const size_t alignment = size >= kHugeFrom ? kHugePage : kPage, extra = alignment - kPage;
  void* mapped = mmap(nullptr, size + extra, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(mapped);
  const uintptr_t first = (begin + alignment - 1) / alignment * alignment;
  if (first > begin) munmap(mapped, first - begin);
  if (begin + extra > first) munmap(reinterpret_cast<void*>(first + size), begin + extra - first);
  void* block = reinterpret_cast<void*>(first);
#if defined(MADV_HUGEPAGE)
  if (size >= kHugeFrom) madvise(block, size, MADV_HUGEPAGE);
#endif
  return block;
}
void unmap(const Block& block) { munmap(block.address, block.size); }
#else
void* map(size_t) { return nullptr; }
void unmap(const Block&) {}
#endif

// Removes the least recently used sizes until `limit` bytes are left. The caller holds the lock, and unmaps the blocks
// after releasing it.
std::vector<Block> shrink(Pool& p, size_t limit) {
  std::vector<Block> dropped;
  while (p.bytes > limit) {
    auto oldest = p.bins.end();
    for (auto bin = p.bins.begin(); bin != p.bins.end(); ++bin) {
      if (!bin->second.blocks.empty() && (oldest == p.bins.end() || bin->second.last_use < oldest->second.last_use))
        oldest = bin;
    }
    dropped.push_back({oldest->second.blocks.front(), oldest->first});
    oldest->second.blocks.erase(oldest->second.blocks.begin());
    p.bytes -= oldest->first;
  }
  return dropped;
}

}  // namespace

void* pool_take(size_t bytes, size_t& size) {
  if (bytes < kLeast || bytes > SIZE_MAX / 4) return nullptr;
  Pool& p = pool();
  size = rounded_size(bytes);
  void* block = nullptr;
  bool poison;
  {
    const std::lock_guard<std::mutex> lock(p.mutex);
    if (p.limit == 0) return nullptr;
    poison = p.poison;
    Bin& bin = p.bins[size];
    bin.last_use = ++p.uses;
    if (!bin.blocks.empty()) {
      block = bin.blocks.back();
      bin.blocks.pop_back();
      p.bytes -= size;
    }
  }
  if (!block) { block = map(size); }
  if (block && poison) std::memset(block, 0xff, size);
  return block;
}

void pool_give(void* block, size_t size) {
  Pool& p = pool();
  std::vector<Block> dropped;
  {
    const std::lock_guard<std::mutex> lock(p.mutex);
    Bin& bin = p.bins[size];
    bin.last_use = ++p.uses;
    bin.blocks.push_back(block);
    p.bytes += size;
    dropped = shrink(p, p.limit);
  }
  for (const Block& b : dropped) unmap(b);
}

void pool_release() {
  Pool& p = pool();
  std::vector<Block> dropped;
  {
    const std::lock_guard<std::mutex> lock(p.mutex);
    dropped = shrink(p, 0);
  }
  for (const Block& b : dropped) unmap(b);
}

void pool_set_limit(size_t limit) {
  Pool& p = pool();
  {
    const std::lock_guard<std::mutex> lock(p.mutex);
    p.limit = limit;
  }
  pool_release();
}

size_t pool_waiting() {
  Pool& p = pool();
  const std::lock_guard<std::mutex> lock(p.mutex);
  return p.bytes;
}

void pool_set_poison(bool poison) {
  Pool& p = pool();
  const std::lock_guard<std::mutex> lock(p.mutex);
  p.poison = poison;
}

bool pool_poisons() { return pool().poison; }

}  // namespace seqkern
