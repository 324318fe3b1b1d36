#include "pool.h"

#include <cstdint>
#include <cstring>
#include <mutex>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace seqkern {
namespace {

constexpr size_t kHugePage = size_t{1} << 21;
constexpr size_t kLeast = 2 * kHugePage;

struct Block {
  void* address;
  size_t size;
};

struct Pool {
  std::mutex mutex;
  std::vector<Block> waiting;  // oldest first
  size_t bytes = 0, limit = size_t{512} << 20;
  bool poison = false;
};

Pool& pool() {
  static Pool* const instance = new Pool;  // never destroyed: tensors may outlive static objects
  return *instance;
}

#if defined(__linux__) && defined(MADV_HUGEPAGE)
void* map(size_t size) {
  // Two huge pages more than needed would be simplest; one, trimmed at both ends, gives the same alignment.
  void* mapped = mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(mapped);
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  if (first > begin) munmap(mapped, first - begin);
  munmap(reinterpret_cast<void*>(first + size), begin + kHugePage - first);
  void* block = reinterpret_cast<void*>(first);
  madvise(block, size, MADV_HUGEPAGE);
  return block;
}
void unmap(const Block& block) { munmap(block.address, block.size); }
#else
void* map(size_t) { return nullptr; }
void unmap(const Block&) {}
#endif

// Drops the oldest until `limit` bytes are left. The caller holds the lock, and unmaps what it gets after it let go.
std::vector<Block> shrink(Pool& p, size_t limit) {
  std::vector<Block> dropped;
  while (p.bytes > limit) {
    dropped.push_back(p.waiting.front());
    p.bytes -= p.waiting.front().size;
    p.waiting.erase(p.waiting.begin());
  }
  return dropped;
}

}  // namespace

void* pool_take(size_t bytes, size_t& size) {
  if (bytes < kLeast || bytes > SIZE_MAX - 2 * kHugePage) return nullptr;
  Pool& p = pool();
  const size_t needed = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* block = nullptr;
  bool poison;
  {
    const std::lock_guard<std::mutex> lock(p.mutex);
    if (p.limit == 0) return nullptr;
    poison = p.poison;
    // The newest that fits without wasting a quarter: it is the likeliest to be in cache.
    for (size_t i = p.waiting.size(); i-- > 0;) {
      const Block candidate = p.waiting[i];
      if (candidate.size < needed || candidate.size > needed + needed / 4) continue;
      p.waiting.erase(p.waiting.begin() + static_cast<std::ptrdiff_t>(i));
      p.bytes -= candidate.size;
      block = candidate.address;
      size = candidate.size;
      break;
    }
  }
  if (!block) {
    block = map(needed);
    size = needed;
  }
  if (block && poison) std::memset(block, 0xff, size);
  return block;
}

void pool_give(void* block, size_t size) {
  Pool& p = pool();
  std::vector<Block> dropped;
  {
    const std::lock_guard<std::mutex> lock(p.mutex);
    p.waiting.push_back({block, size});
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

}  // namespace seqkern
