// See simt_core.h.
#include "simt_core.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <exception>
#include <map>
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

struct Cancel {};  // thrown in every fiber to unwind it after an error

constexpr uint64_t kPollsPerThread = 4000;  // without progress: a livelock

const char* base_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash == nullptr ? path : slash + 1;
}

std::string text_of(const char* format, va_list arguments) {
  char buffer[2048];
  vsnprintf(buffer, sizeof(buffer), format, arguments);
  return buffer;
}

}  // namespace

std::string text(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string result = text_of(format, arguments);
  va_end(arguments);
  return result;
}

void transfer(Fiber* next, bool ending) {
  Fiber* self = running;
  Context& from = self == nullptr ? machine.main : self->context;
  Context& to = next == nullptr ? machine.main : next->context;
  running = next;
  start_switch(from, to, ending);
  exchange(from, to);
  finish_switch(&from, machine.main);
  if (self == nullptr || !machine.cancelling) return;
  if (self->in_hook) abandon();
  throw Cancel();
}

void abandon() {
  running->finished = true;
  transfer(nullptr, true);
  __builtin_unreachable();
}

Fiber* pick() {
  auto& ready = machine.ready;
  if (ready.empty()) return nullptr;
  const uint64_t draw = random_bits();
  if ((draw & machine.uniform_mask) == 0) std::swap(ready[(draw >> 8) % ready.size()], ready.back());
  Fiber* next = ready.back();
  ready.pop_back();
  return next;
}

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
    result += waiting_async(f);
    for (const Mbarrier& m : f.block->mbarriers) {
      if (m.word == f.payload && strcmp(f.waits, "mbarrier_done") == 0) {
        result += text(": the one at offset %td lacks %u arrivals and %lld bytes", offset(*f.block, m.word), m.pending,
                       static_cast<long long>(m.tx_count));
      }
    }
  }
  return result;
}

namespace {

// Thread exit: no barrier or collective may still wait for this thread.
void exit_thread() {
  Fiber& self = *running;
  Block& block = *self.block;
  Warp& warp = *self.warp;
  finish_cp_async(self);
  exit_async(self);
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
  warp.live_mask &= ~(1u << self.lane);
  ++block.exited;
  exit_cluster(self);
  --machine.alive;
  progress();
}

}  // namespace

void entry() {
  finish_switch(nullptr, machine.main);
  running->started = true;
  Fiber* self = running;
  try {
    (*machine.body)();
    exit_thread();
  } catch (const Cancel&) {
  } catch (const std::exception& error) {
    if (machine.error.empty()) machine.error = error.what();
  }
  self->finished = true;
  transfer(machine.cancelling || !machine.error.empty() ? nullptr : pick(), true);
  __builtin_unreachable();
}

bool Place::operator==(const Place& other) const {
  return line == other.line && (file == other.file || strcmp(file, other.file) == 0);
}

static std::string message_of(const std::string& message) {
  std::string where;
  if (running != nullptr) {
    const uint3 &b = running->block->index, &t = running->thread;
    where = text(" block (%u, %u, %u) thread (%u, %u, %u), seed %llu:", b.x, b.y, b.z, t.x, t.y, t.z,
                 static_cast<unsigned long long>(machine.seed));
  }
  return std::string(machine.op) + ": on the host executor," + where + " " + message;
}
void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const std::string message = message_of(text_of(format, arguments));
  va_end(arguments);
  throw std::runtime_error(message);
}
void fail_in_hook(const std::string& message) {
  if (machine.error.empty()) machine.error = message_of(message);
  abandon();
}

void wait(const char* what, const Place& at) {
  step_async();
  running->waits = what;
  running->at = at;
  transfer(pick());
}
void wake(Fiber* fiber) {
  fiber->waits = nullptr;
  machine.ready.push_back(fiber);
}

// The running fiber takes the slot of the next one in the run queue.
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
  if (what != nullptr || running->waits == nullptr) {
    running->waits = what == nullptr ? "pause" : what;
    running->at = at;
  }
  const bool loads = step_async();
  if (!machine.st_asyncs.empty()) {
    if (random_bits() % 4 == 0) complete_any_st_async();
  } else if (!loads && ++machine.idle_polls > kPollsPerThread * (machine.ready.size() + 1)) {
    throw std::runtime_error(text("%s: livelock on the host executor (seed %llu): threads poll, and nothing changes.",
                                  machine.op, static_cast<unsigned long long>(machine.seed)) +
                             waiting());
  }
  yield_now();
}

void collective(const char* name, unsigned mask, void (*complete)(Warp&, unsigned), void* payload, const Place& at) {
  Fiber& self = *running;
  Warp& warp = *self.warp;
  const unsigned own = 1u << self.lane;
  if ((mask & own) == 0)
    fail("%s (%s:%d): mask %08x does not name lane %u itself", name, base_name(at.file), at.line, mask, self.lane);
  if ((mask & ~warp.live_mask) != 0) {
    fail("absent lane: %s (%s:%d) names lanes %08x, of which %08x are not there or have ended", name,
         base_name(at.file), at.line, mask, mask & ~warp.live_mask);
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
  if (complete != nullptr) {
    complete(warp, mask);
  } else {
    race_sync(warp, mask);
  }
  progress();
  // Wakes the other lanes in order from a random one; this lane goes on.
  const unsigned start = static_cast<unsigned>(random_bits() & 31);
  for (unsigned k = 0; k < 32; ++k) {
    const unsigned lane = (start + k) & 31;
    if ((mask >> lane & 1) && lane != self.lane) wake(warp.lane[lane]);
  }
}

int block_barrier(const char* name, int value, const Place& at) {
  Fiber& self = *running;
  Block& block = *self.block;
  if (block.exited > 0) {
    fail("divergent barrier: %u threads of the block ended without coming to %s (%s:%d)", block.exited, name,
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
    race_sync(block);
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

void poison(void* p, size_t bytes) {
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

}  // namespace simt
