// See simt_race.h. Empty without SIMT_RACE.
#if defined(SIMT_RACE)

#include "simt_race.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <unordered_map>

#include "simt_core.h"

namespace simt {

namespace {

constexpr int kReaders = 4;  // that a byte remembers; of more, one is forgotten by chance
constexpr uintptr_t kPage = 1024;

struct Access {
  uint32_t thread, clock;  // 0: none
  const void* at;          // in the code
};
struct Cell {
  Access writer;
  Access readers[kReaders];
};
struct Page {
  Cell cells[kPage];
};

// Of the thread of that number: what it has seen of others, and its own time.
struct Time {
  Clock seen;
  uint32_t now;
  Clock fenced;
  Clock read;  // what relaxed reads have to tell, once there is a fence behind them
};

std::vector<Time> times;
std::vector<Fiber*> who;
size_t actors_each = 0;
uint32_t actor = 0;                         // who looks: 0 for the running thread
std::vector<std::vector<uint32_t>> fences;  // of each thread, for asynchronous readers: when
std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
std::unordered_map<const void*, Clock> words;
Page* last_page = nullptr;
uintptr_t last_number = 0;

Page& page_of(uintptr_t number) {
  if (last_page != nullptr && last_number == number) return *last_page;
  auto& page = pages[number];
  if (page == nullptr) page.reset(new Page());
  last_number = number;
  return *(last_page = page.get());
}

bool seen(const Time& time, uint32_t self, const Access& access) {
  // An actor does many things, in no order among themselves.
  if (access.clock == 0 || (access.thread == self && actor == 0)) return true;
  return (*time.seen)[access.thread] >= access.clock;
}
// Whether that thread has fenced what it wrote, as far as `time` has seen.
bool fenced(const Time& time, const Access& writer) {
  const auto& own = fences[writer.thread];
  const auto found = std::lower_bound(own.begin(), own.end(), writer.clock);
  return found != own.end() && *found <= (*time.seen)[writer.thread];
}

void join(std::vector<uint32_t>& into, const std::vector<uint32_t>& other) {
  for (size_t i = 0; i < into.size(); ++i) {
    if (other[i] > into[i]) into[i] = other[i];
  }
}

// All of `threads` have seen each other's past.
template <class F>
void sync(size_t count, F thread) {
  auto all = std::make_shared<std::vector<uint32_t>>(times.size(), 0);
  const void* last = nullptr;
  for (size_t i = 0; i < count; ++i) {
    const Time& time = times[thread(i)];
    if (time.seen.get() != last) join(*all, *time.seen);  // neighbours mostly share it
    last = time.seen.get();
  }
  for (size_t i = 0; i < count; ++i) {
    Time& time = times[thread(i)];
    uint32_t& own = (*all)[thread(i)];
    if (time.now > own) own = time.now;
  }
  const Clock shared = all;
  for (size_t i = 0; i < count; ++i) {
    times[thread(i)].seen = shared;
    ++times[thread(i)].now;
  }
}

Clock past(uint32_t self, const Clock& more) {
  auto result = std::make_shared<std::vector<uint32_t>>(*times[self].seen);
  (*result)[self] = times[self].now;
  if (more != nullptr) join(*result, *more);
  return result;
}

// "file:line" by addr2line, where there is one: of the kernel, not of what it calls of the executor.
std::string place(const void* at) {
  Dl_info info;
  if (dladdr(at, &info) == 0) return "?";
  const auto offset = static_cast<const char*>(at) - static_cast<const char*>(info.dli_fbase) - 1;
  std::string result = text("offset 0x%tx", offset);
  FILE* pipe = popen(text("addr2line -i -e '%s' 0x%tx", info.dli_fname, offset).c_str(), "r");
  char line[512];
  while (pipe != nullptr && fgets(line, sizeof(line), pipe) != nullptr) {
    line[strcspn(line, " \n")] = 0;
    const char* slash = strrchr(line, '/');
    if (slash == nullptr) continue;
    result = slash + 1;
    if (result.rfind("simt", 0) != 0 && result.rfind("cuda_device", 0) != 0) break;
  }
  if (pipe != nullptr) pclose(pipe);
  return result;
}

// In the order of simt_async.h.
std::string actor_name(size_t n) {
  if (n + 2 < actors_each) return text("a wgmma of warpgroup %zu", n);
  return n + 2 == actors_each ? "a TMA load" : "a TMA store or bulk addition";
}

[[noreturn]] void report(const unsigned char* p, const char* verb, const void* at, const char* other_verb,
                         const Access& other, bool unfenced = false) {
  const uint32_t threads = static_cast<uint32_t>(who.size());
  const bool thread = other.thread < threads;
  const Block& b = thread ? *who[other.thread]->block : *blocks[(other.thread - threads) / actors_each];
  const std::string name = thread ? text("thread (%u, %u, %u)", who[other.thread]->thread.x,
                                         who[other.thread]->thread.y, who[other.thread]->thread.z)
                                  : actor_name((other.thread - threads) % actors_each);
  std::string memory = "global memory";
  for (const auto& block : blocks) {
    if (!block->fibers.empty() && p >= block->shared && p < block->shared + machine.shared_bytes) {
      memory = text("shared memory of block (%u, %u, %u), offset %td", block->index.x, block->index.y, block->index.z,
                    offset(*block, p));
    }
  }
  const std::string here = place(at), there = place(other.at);
  const std::string it = actor == 0 ? "it" : actor_name((actor - threads) % actors_each);
  fail_in_hook(text("race: %s %s (%s) %s what block (%u, %u, %u) %s %s (%s), and %s", it.c_str(), verb, here.c_str(),
                    memory.c_str(), b.index.x, b.index.y, b.index.z, name.c_str(), other_verb, there.c_str(),
                    unfenced ? "no fence_async_shared there comes in between" : "nothing orders the two"));
}

// Of the thread alone, or of the executor.
bool own(const void* p) {
  const char* stack = running->context.stack;
  return (p >= stack && p < stack + running->context.stack_bytes) || (p >= &machine && p < &machine + 1);
}

void look(const void* p, size_t bytes, bool writes, const void* at, bool proxy = false) {
  const uint32_t self = actor == 0 ? running->resident_rank : actor;
  const Time& time = times[self];
  for (size_t i = 0; i < bytes; ++i) {
    const auto address = reinterpret_cast<uintptr_t>(p) + i;
    Cell& cell = page_of(address / kPage).cells[address % kPage];
    const auto* byte = static_cast<const unsigned char*>(p) + i;
    if (!seen(time, self, cell.writer)) report(byte, writes ? "writes" : "reads", at, "wrote", cell.writer);
    if (proxy && cell.writer.clock != 0 && cell.writer.thread < who.size() && !fenced(time, cell.writer)) {
      report(byte, writes ? "writes" : "reads", at, "wrote", cell.writer, true);
    }
    if (writes) {
      for (Access& reader : cell.readers) {
        if (!seen(time, self, reader)) report(byte, "writes", at, "read", reader);
        reader.clock = 0;
      }
      cell.writer = {self, time.now, at};
    } else {
      // In the place of a read that this one makes superfluous, of none, or of any.
      int slot = -1;
      for (int r = 0; r < kReaders && slot < 0; ++r) {
        if (cell.readers[r].thread == self || seen(time, self, cell.readers[r])) slot = r;
      }
      if (slot < 0) slot = static_cast<int>(random_below(kReaders));
      cell.readers[slot] = {self, time.now, at};
    }
  }
}

void hook(const void* p, size_t bytes, bool writes, const void* at) {
  if (running == nullptr || machine.cancelling || own(p)) return;
  running->in_hook = true;
  if (random_bits() % 32 == 0) yield_now();
  look(p, bytes, writes, at);
  running->in_hook = false;
}

}  // namespace

void race_start(size_t threads, size_t actors) {
  actor = 0;
  actors_each = actors;
  fences.assign(threads, {});
  const size_t all = threads + actors * blocks.size();
  pages.clear();
  words.clear();
  last_page = nullptr;
  const Clock none = std::make_shared<std::vector<uint32_t>>(all, 0);
  times.assign(all, {none, 1, nullptr, nullptr});
  who.clear();
  for (const auto& block : blocks) who.insert(who.end(), block->fibers.begin(), block->fibers.end());
}

void race_sync(Block& block) {
  sync(block.fibers.size(), [&](size_t i) { return block.fibers[i]->resident_rank; });
}
void race_sync(Warp& warp, unsigned mask) {
  uint32_t lanes[32];
  size_t count = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1) lanes[count++] = warp.lane[lane]->resident_rank;
  }
  sync(count, [&](size_t i) { return lanes[i]; });
}

void race_release(Clock& at) {
  at = past(running->resident_rank, at);
  ++times[running->resident_rank].now;
}
void race_acquire(const Clock& at) {
  if (at == nullptr) return;
  auto joined = std::make_shared<std::vector<uint32_t>>(*times[running->resident_rank].seen);
  join(*joined, *at);
  times[running->resident_rank].seen = joined;
}
void race_merge(Clock& at, const Clock& other) {
  if (at == nullptr || other == nullptr) {
    if (at == nullptr) at = other;
    return;
  }
  auto joined = std::make_shared<std::vector<uint32_t>>(*at);
  join(*joined, *other);
  at = joined;
}
void race_store_release(const void* word, bool add) {
  Clock& at = words[word];
  if (!add) at = nullptr;
  race_release(at);
}
void race_store_relaxed(const void* word, bool add) {
  Clock& at = words[word];
  if (!add) at = nullptr;
  race_merge(at, times[running->resident_rank].fenced);
}
void race_load_acquire(const void* word) {
  const auto found = words.find(word);
  if (found != words.end()) race_acquire(found->second);
}
void race_load_relaxed(const void* word) {
  const auto found = words.find(word);
  if (found != words.end()) race_merge(times[running->resident_rank].read, found->second);
}
void race_threadfence() {
  race_acquire(times[running->resident_rank].read);
  times[running->resident_rank].read = nullptr;
  Clock past = nullptr;
  race_release(past);
  times[running->resident_rank].fenced = past;
}
void race_release_meet(Clock& at) {
  const Clock own = past(running->resident_rank, nullptr);
  ++times[running->resident_rank].now;
  if (at == nullptr) {
    at = own;
    return;
  }
  auto least = std::make_shared<std::vector<uint32_t>>(*at);
  for (size_t i = 0; i < least->size(); ++i) (*least)[i] = std::min((*least)[i], (*own)[i]);
  at = least;
}
void race_actor_begin(size_t number, const Clock& past, Clock* clock) {
  actor = static_cast<uint32_t>(number);
  Time& time = times[number];
  time.seen = past;
  auto own = std::make_shared<std::vector<uint32_t>>(times.size(), 0);
  (*own)[number] = ++time.now;
  *clock = own;
}
void race_actor_end() { actor = 0; }
void race_actor_read(const void* p, size_t bytes, bool shared, const void* at) { look(p, bytes, false, at, shared); }
void race_actor_write(const void* p, size_t bytes, bool shared, const void* at) { look(p, bytes, true, at, shared); }
void race_proxy_fence() { fences[running->resident_rank].push_back(times[running->resident_rank].now++); }
void race_read(const void* p, size_t bytes, const void* at) { look(p, bytes, false, at); }
void race_write(const void* p, size_t bytes, const void* at) { look(p, bytes, true, at); }

}  // namespace simt

// What the compiler calls.
extern "C" {
#define SIMT_HOOKS(bytes)                                                                                  \
  void __tsan_read##bytes(void* p) { simt::hook(p, bytes, false, __builtin_return_address(0)); }           \
  void __tsan_write##bytes(void* p) { simt::hook(p, bytes, true, __builtin_return_address(0)); }           \
  void __tsan_unaligned_read##bytes(void* p) { simt::hook(p, bytes, false, __builtin_return_address(0)); } \
  void __tsan_unaligned_write##bytes(void* p) { simt::hook(p, bytes, true, __builtin_return_address(0)); } \
  void __tsan_volatile_read##bytes(void* p) { simt::hook(p, bytes, false, __builtin_return_address(0)); }  \
  void __tsan_volatile_write##bytes(void* p) { simt::hook(p, bytes, true, __builtin_return_address(0)); }
SIMT_HOOKS(1)
SIMT_HOOKS(2)
SIMT_HOOKS(4)
SIMT_HOOKS(8)
SIMT_HOOKS(16)
void __tsan_read_range(void* p, size_t bytes) { simt::hook(p, bytes, false, __builtin_return_address(0)); }
void __tsan_write_range(void* p, size_t bytes) { simt::hook(p, bytes, true, __builtin_return_address(0)); }
// In host code: reference counts.
#define SIMT_ATOMICS(bits)                                                                                           \
  int##bits##_t __tsan_atomic##bits##_load(const volatile int##bits##_t* p, int) {                                   \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                                     \
  }                                                                                                                  \
  void __tsan_atomic##bits##_store(volatile int##bits##_t* p, int##bits##_t v, int) {                                \
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                                        \
  }                                                                                                                  \
  int##bits##_t __tsan_atomic##bits##_exchange(volatile int##bits##_t* p, int##bits##_t v, int) {                    \
    return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                                                              \
  }                                                                                                                  \
  int##bits##_t __tsan_atomic##bits##_fetch_add(volatile int##bits##_t* p, int##bits##_t v, int) {                   \
    return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);                                                               \
  }                                                                                                                  \
  int##bits##_t __tsan_atomic##bits##_fetch_sub(volatile int##bits##_t* p, int##bits##_t v, int) {                   \
    return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST);                                                               \
  }                                                                                                                  \
  bool __tsan_atomic##bits##_compare_exchange_strong(volatile int##bits##_t* p, int##bits##_t* old, int##bits##_t v, \
                                                     int, int) {                                                     \
    return __atomic_compare_exchange_n(p, old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                        \
  }                                                                                                                  \
  bool __tsan_atomic##bits##_compare_exchange_weak(volatile int##bits##_t* p, int##bits##_t* old, int##bits##_t v,   \
                                                   int, int) {                                                       \
    return __atomic_compare_exchange_n(p, old, v, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                         \
  }
SIMT_ATOMICS(8)
SIMT_ATOMICS(32)
SIMT_ATOMICS(64)
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}

#endif
