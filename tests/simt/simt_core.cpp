// See simt_core.h.
#include "simt_core.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <stdexcept>
#include <tuple>

#include "simt_fiber.h"

#if defined(SIMT_ASAN)
extern "C" void __asan_loadN(const void*, size_t);
extern "C" void __asan_storeN(void*, size_t);
#endif

namespace simt {

Fiber* running = nullptr;
Machine machine;

namespace {

struct Cancel {};

std::mutex one_launch;  // at a time: torch's backward passes run in threads of their own
std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<std::unique_ptr<Block>> blocks;
std::vector<std::unique_ptr<Cluster>> clusters;

constexpr size_t kGuard = 64;  // bytes behind the shared memory, looked at when its block ends
constexpr unsigned char kNaN = 0xFF, kGuardByte = 0xA5;
constexpr uint64_t kPollsEach = 20000;  // without any change, before that counts as a livelock

const char* base_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash == nullptr ? path : slash + 1;
}

std::string text(const char* format, va_list arguments) {
  char buffer[2048];
  vsnprintf(buffer, sizeof(buffer), format, arguments);
  return buffer;
}
__attribute__((format(printf, 1, 2))) std::string text(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string result = text(format, arguments);
  va_end(arguments);
  return result;
}

// To another fiber, or to the launching thread (null). Comes back when somebody goes on with this one.
void transfer(Fiber* next, bool ending = false) {
  Fiber* self = running;
  Context& from = self == nullptr ? machine.main : self->context;
  Context& to = next == nullptr ? machine.main : next->context;
  running = next;
  ++machine.switches;
  start_switch(from, to, ending);
  exchange(from, to);
  finish_switch(&from, machine.main);
  if (self != nullptr && machine.cancelling) throw Cancel();
}

Fiber* pick() {
  auto& ready = machine.ready;
  if (ready.empty()) return nullptr;
  const uint64_t draw = random_bits();
  if ((draw & machine.even) == 0) std::swap(ready[(draw >> 8) % ready.size()], ready.back());
  Fiber* next = ready.back();
  ready.pop_back();
  return next;
}

// Who waits, and where: at most a dozen groups.
std::string waiting() {
  std::map<std::tuple<std::string, std::string, int>, std::pair<unsigned, Fiber*>> groups;
  for (const auto& block : blocks) {
    for (Fiber* f : block->fibers) {
      if (f->finished || f->waits == nullptr) continue;
      auto& group = groups[{f->waits, base_name(f->at.file), f->at.line}];
      if (group.first++ == 0) group.second = f;
    }
  }
  std::string result;
  int lines = 0;
  for (const auto& [key, group] : groups) {
    if (++lines > 12) return result + "\n  ...";
    const Fiber& f = *group.second;
    result += text("\n  %u at %s (%s:%d), of them block (%u, %u, %u) thread (%u, %u, %u)", group.first,
                   std::get<0>(key).c_str(), std::get<1>(key).c_str(), std::get<2>(key), f.block->index.x,
                   f.block->index.y, f.block->index.z, f.thread.x, f.thread.y, f.thread.z);
    const Warp& warp = *f.warp;
    for (const Collective& c : warp.pending) {
      if (c.name == f.waits && c.mask == f.mask) {
        result += text(": mask %08x, lanes %08x have not come", c.mask, c.mask & ~c.arrived);
      }
    }
  }
  return result;
}

// A thread's end: nobody may still wait for it.
void leave() {
  Fiber& self = *running;
  Block& block = *self.block;
  Warp& warp = *self.warp;
  finish_copies(self);
  if (block.arrived > 0) {
    fail("divergent barrier: the thread ends while %u others of its block wait at %s (%s:%d)", block.arrived,
         block.barrier, base_name(block.at.file), block.at.line);
  }
  for (const Collective& c : warp.pending) {
    if (c.mask >> self.lane & 1) {
      fail("absent lane: lane %u ends while lanes %08x of its warp wait for it at %s, mask %08x", self.lane, c.arrived,
           c.name, c.mask);
    }
  }
  warp.lanes &= ~(1u << self.lane);
  ++block.left;
  leave_cluster(self);
  --machine.alive;
  progress();
}

void entry() {
  finish_switch(nullptr, machine.main);
  running->started = true;
  Fiber* self = running;
  try {
    (*machine.body)();
    leave();
  } catch (const Cancel&) {
  } catch (const std::exception& error) {
    if (machine.error.empty()) machine.error = error.what();
  }
  self->finished = true;
  transfer(machine.cancelling || !machine.error.empty() ? nullptr : pick(), true);
  __builtin_unreachable();
}

uint64_t mixed(uint64_t x) {
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
  block.left = block.arrived = 0;
  block.barrier = nullptr;
  block.sum = block.result = 0;
  block.mbarriers.clear();
  void* memory = nullptr;
  size_t guard = kGuard;
#if defined(SIMT_ASAN)
  guard = 0;  // it has its own
#endif
  if (posix_memalign(&memory, 128, std::max<size_t>(1, machine.shared_bytes + guard)) != 0) throw std::bad_alloc();
  block.shared = static_cast<unsigned char*>(memory);
  memset(block.shared, kNaN, machine.shared_bytes);
  memset(block.shared + machine.shared_bytes, kGuardByte, guard);
  block.fibers.clear();
  block.warps.resize((block.threads + 31) / 32);
  for (Warp& warp : block.warps) {
    warp.block = &block;
    warp.lanes = 0;
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
    f.number = n;
    f.lane = n % 32;
    f.block = &block;
    f.warp = &block.warps[n / 32];
    f.warp->lane[f.lane] = &f;
    f.warp->lanes |= 1u << f.lane;
    f.started = f.finished = f.arrived = false;
    f.waits = nullptr;
    f.payload = nullptr;
    f.copies.clear();
    f.group = f.arrived_round = 0;
    // Not all at the same place of a cache.
    prepare(f.context, entry, next_fiber % 61 * 192);
    ++next_fiber;
    block.fibers.push_back(&f);
    machine.ready.push_back(&f);
  }
  cluster.blocks.push_back(&block);
  cluster.alive += block.threads;
}

// Frees the block's shared memory; true where something was written behind it.
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

// Runs `count` clusters of the grid together, from their numbers.
void run_together(const size_t* units, size_t count, unsigned size) {
  const dim3& grid = machine.grid;
  const unsigned wide = grid.x / size;  // clusters in a row of the grid
  unsigned next_fiber = 0;
  machine.ready.clear();
  machine.stores.clear();
  machine.idle = 0;
  while (clusters.size() < count) clusters.push_back(std::make_unique<Cluster>());
  while (blocks.size() < count * size) blocks.push_back(std::make_unique<Block>());
  for (auto& block : blocks) block->fibers.clear();
  for (size_t i = 0; i < count; ++i) {
    Cluster& cluster = *clusters[i];
    cluster.blocks.clear();
    cluster.alive = cluster.arrived = cluster.round = 0;
    const size_t unit = units[i];
    for (unsigned rank = 0; rank < size; ++rank) {
      const uint3 index = {static_cast<unsigned>(unit % wide) * size + rank,
                           static_cast<unsigned>(unit / wide % grid.y), static_cast<unsigned>(unit / wide / grid.y)};
      start_block(*blocks[i * size + rank], index, cluster, rank, next_fiber);
    }
  }
  machine.alive = next_fiber;
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

bool Place::operator==(const Place& other) const {
  return line == other.line && (file == other.file || strcmp(file, other.file) == 0);
}

void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string message = text(format, arguments);
  va_end(arguments);
  std::string where;
  if (running != nullptr) {
    const uint3 &b = running->block->index, &t = running->thread;
    where = text(" block (%u, %u, %u) thread (%u, %u, %u), seed %llu:", b.x, b.y, b.z, t.x, t.y, t.z,
                 static_cast<unsigned long long>(machine.seed));
  }
  throw std::runtime_error(std::string(machine.op) + ": on the host executor," + where + " " + message);
}

void wait(const char* what, const Place& at) {
  running->waits = what;
  running->at = at;
  transfer(pick());
}
void wake(Fiber* fiber) {
  fiber->waits = nullptr;
  machine.ready.push_back(fiber);
}

void yield_now() {
  if (machine.ready.empty()) return;
  Fiber*& slot = machine.ready[random_below(machine.ready.size())];
  Fiber* next = slot;
  slot = running;
  transfer(next);
}
void maybe_yield() {
  if (random_bits() % 4 == 0) yield_now();
}

void poll(const char* what, const Place& at) {
  running->waits = what;
  running->at = at;
  if (!machine.stores.empty()) {
    if (random_bits() % 4 == 0) deliver_one();
  } else if (++machine.idle > kPollsEach * (machine.ready.size() + 1)) {
    throw std::runtime_error(text("%s: livelock on the host executor (seed %llu): threads poll, and nothing changes.",
                                  machine.op, static_cast<unsigned long long>(machine.seed)) +
                             waiting());
  }
  yield_now();
  running->waits = nullptr;
}

void collective(const char* name, unsigned mask, void (*complete)(Warp&, unsigned), void* payload, const Place& at) {
  Fiber& self = *running;
  Warp& warp = *self.warp;
  const unsigned own = 1u << self.lane;
  if ((mask & own) == 0)
    fail("%s (%s:%d): mask %08x does not name lane %u itself", name, base_name(at.file), at.line, mask, self.lane);
  if ((mask & ~warp.lanes) != 0) {
    fail("absent lane: %s (%s:%d) names lanes %08x, of which %08x are not there or have ended", name,
         base_name(at.file), at.line, mask, mask & ~warp.lanes);
  }
  self.payload = payload;
  self.mask = mask;
  size_t i = 0;
  while (i < warp.pending.size() && warp.pending[i].mask != mask) ++i;
  if (i == warp.pending.size()) warp.pending.push_back({name, mask, 0, complete});
  Collective& c = warp.pending[i];
  if (c.complete != complete || strcmp(c.name, name) != 0) {
    fail("lane %u comes to %s (%s:%d) where lanes %08x wait at %s with the same mask", self.lane, name,
         base_name(at.file), at.line, c.arrived, c.name);
  }
  c.arrived |= own;
  if (c.arrived != mask) {
    wait(name, at);
    return;
  }
  warp.pending.erase(warp.pending.begin() + static_cast<std::ptrdiff_t>(i));
  if (complete != nullptr) complete(warp, mask);
  progress();
  // The others are ready in an order that starts anywhere; this one goes on, or waits its turn.
  const unsigned start = static_cast<unsigned>(random_bits() & 31);
  for (unsigned k = 0; k < 32; ++k) {
    const unsigned lane = (start + k) & 31;
    if ((mask >> lane & 1) && lane != self.lane) wake(warp.lane[lane]);
  }
}

int block_barrier(const char* name, int value, const Place& at) {
  Fiber& self = *running;
  Block& block = *self.block;
  if (block.left > 0) {
    fail("divergent barrier: %u threads of the block ended without coming to %s (%s:%d)", block.left, name,
         base_name(at.file), at.line);
  }
  if (block.arrived == 0) {
    block.barrier = name;
    block.at = at;
    block.sum = 0;
  } else if (!(block.at == at) || strcmp(block.barrier, name) != 0) {
    fail("divergent barrier: the thread comes to %s (%s:%d) while %u others wait at %s (%s:%d)", name,
         base_name(at.file), at.line, block.arrived, block.barrier, base_name(block.at.file), block.at.line);
  }
  block.sum += value;
  if (++block.arrived < block.threads) {
    wait(name, at);
  } else {
    block.arrived = 0;
    block.result = block.sum;
    progress();
    const size_t start = random_below(block.threads);
    for (unsigned k = 0; k < block.threads; ++k) {
      Fiber* f = block.fibers[(start + k) % block.threads];
      if (f != &self) wake(f);
    }
  }
  return block.result;
}

void check_read(const void* p, size_t bytes) {
#if defined(SIMT_ASAN)
  __asan_loadN(p, bytes);
#else
  (void)p, (void)bytes;
#endif
}
void check_write(void* p, size_t bytes) {
#if defined(SIMT_ASAN)
  __asan_storeN(p, bytes);
#else
  (void)p, (void)bytes;
#endif
}

void forbid(void* p, size_t bytes) {
#if defined(SIMT_ASAN)
  __asan_poison_memory_region(p, bytes);
#else
  memset(p, kNaN, bytes);
#endif
}

void check_shared(const char* what, const Block& block, const void* p, size_t bytes, size_t alignment) {
  const auto* q = static_cast<const unsigned char*>(p);
  if (reinterpret_cast<uintptr_t>(p) % alignment != 0) {
    fail("%s: the address is not a multiple of %zu bytes (offset %td of the shared memory)", what, alignment,
         q - block.shared);
  }
  if (q < block.shared || q + bytes > block.shared + machine.shared_bytes) {
    fail("%s: %zu bytes at offset %td are not in the block's %zu bytes of shared memory", what, bytes, q - block.shared,
         machine.shared_bytes);
  }
}

Limits limits() {
  const int architecture = static_cast<int>(setting("SEQKERN_SIMT_ARCH", 90));
  const int64_t shared = architecture >= 90 && architecture < 120 ? 227 << 10
                         : architecture >= 120                    ? 99 << 10
                                                                  : 163 << 10;
  return {architecture, static_cast<int>(setting("SEQKERN_SIMT_MULTIPROCESSORS", 4)),
          static_cast<int>(setting("SEQKERN_SIMT_SHARED", shared)),
          architecture < 90 ? 1 : static_cast<int>(setting("SEQKERN_SIMT_CLUSTER", 16))};
}

int resident_blocks(dim3 block, size_t shared_bytes) {
  const size_t threads = std::max<size_t>(32, size_t{block.x} * block.y * block.z);
  const size_t room = static_cast<size_t>(limits().shared_per_block) + 1024;
  return static_cast<int>(std::min<size_t>({32, 2048 / threads, room / (shared_bytes + 1024)}));
}
int resident_clusters(dim3 block, size_t shared_bytes, int cluster) {
  const Limits l = limits();
  return cluster > l.max_cluster ? 0 : l.multiprocessors * resident_blocks(block, shared_bytes) / cluster;
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
  const size_t all = size_t{grid.x} * grid.y * grid.z;
  const size_t room = static_cast<size_t>(l.multiprocessors) * resident_blocks(block, shared_bytes);
  if (all_resident && all > room) fail("too many blocks in a cooperative launch: %zu, %zu fit the device", all, room);

  machine.grid = grid;
  machine.threads = block;
  machine.shared_bytes = shared_bytes;
  machine.architecture = l.architecture;
  machine.body = &body;
  const auto seed = static_cast<uint64_t>(setting("SEQKERN_SIMT_SEED", 0));
  static uint64_t launches = 0;  // with this seed: every one of them has a schedule of its own
  launches = seed == machine.seed ? launches + 1 : 0;
  machine.seed = seed;
  machine.state = mixed(seed + (launches << 32)) | 1;
  const uint64_t even[] = {0, 3, 63};
  machine.even = even[random_below(3)];
  machine.switches = 0;
  machine.main = Context();

  std::vector<size_t> units(all / static_cast<size_t>(cluster));
  for (size_t i = 0; i < units.size(); ++i) units[i] = i;
  for (size_t i = units.size(); i > 1; --i) std::swap(units[i - 1], units[random_below(i)]);
  const size_t together = all_resident ? units.size() : 1;
  for (size_t i = 0; i < units.size() && machine.error.empty(); i += together) {
    run_together(&units[i], together, static_cast<unsigned>(cluster));
  }
  if (!machine.error.empty()) throw std::runtime_error(machine.error);
}

uint64_t last_switches() { return machine.switches; }

}  // namespace simt
