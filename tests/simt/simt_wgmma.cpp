// wgmma: who calls it, what it reads, and when. See simt_hopper.h; and simt_product.h for what it computes.
#include <cstring>

#include "simt_async.h"
#include "simt_product.h"

namespace simt {

namespace {

constexpr uint32_t kPendingNaN = 0x7FBADA55u;  // a NaN that no arithmetic gives: sums that a product works on

const char* base_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash == nullptr ? path : slash + 1;
}

[[noreturn]] void fail_wgmma(const Wgmma& p, size_t warpgroup, const std::string& what) {
  fail("wgmma (%s:%d) of warpgroup %zu: %s", base_name(p.at.file), p.at.line, warpgroup, what.c_str());
}

bool untouched(const float* d, int n) {
  for (int i = 0; i < n / 2; ++i) {
    if (bits_to<uint32_t>(d[i]) != kPendingNaN) return false;
  }
  return true;
}

// Row and column of register i of thread t.
int row_of(unsigned t, int i) { return static_cast<int>(t / 32 * 16 + t % 32 / 4) + (i & 2 ? 8 : 0); }
int column_of(unsigned t, int i) { return i / 4 * 8 + static_cast<int>(t % 4) * 2 + (i & 1); }

// The operand of a descriptor: `size` rows (or columns) by 16 of the summed index. read(row, k, 8 elements, by k or by
// row) is called for every 16 bytes.
template <class F>
void read_operand(const Block& block, const Wgmma& p, size_t warpgroup, const char* name, uint64_t d, bool transposed,
                  int size, F read) {
  const size_t start = (d & 0x3FFF) << 4, leading = (d >> 16 & 0x3FFF) << 4, stride = (d >> 32 & 0x3FFF) << 4;
  if (d >> 62 != 1) fail_wgmma(p, warpgroup, text("%s has no 128-byte swizzle in its descriptor", name));
  if ((d >> 49 & 7) != 0) fail_wgmma(p, warpgroup, text("%s has a base offset", name));
  if (start >> 7 & 7) {
    fail_wgmma(
        p, warpgroup,
        text("%s begins at offset %zu: not in the first of eight rows of 128 bytes, tiles begin at multiples of 1024",
             name, start));
  }
  const size_t across = transposed ? (size < 64 ? static_cast<size_t>(size) * 2 : 128) : 32;
  if (start % 128 + across > 128) fail_wgmma(p, warpgroup, text("%s crosses the end of its rows of 128 bytes", name));
  const int outer = transposed ? 16 : size, chunks = transposed ? size / 8 : 2;
  for (int row = 0; row < outer; ++row) {
    for (int c = 0; c < chunks; ++c) {
      const size_t plain = start + static_cast<size_t>(row / 8) * stride + static_cast<size_t>(row % 8) * 128 +
                           static_cast<size_t>(c % 8) * 16 + static_cast<size_t>(c / 8) * leading;
      const size_t at = swizzled(plain);
      if (at + 16 > machine.shared_bytes) {
        fail_wgmma(p, warpgroup,
                   text("%s reads offset %zu of %zu bytes of shared memory", name, at, machine.shared_bytes));
      }
      check_read(block.shared + at, 16);
      race_actor_read(block.shared + at, 16, true, p.pc);
      uint16_t elements[8];
      memcpy(elements, block.shared + at, 16);
      read(row, c * 8, elements);
    }
  }
}

float value(bool half, uint16_t bits) {
  return half ? seqkern::widen(seqkern::Half{bits}) : seqkern::widen(seqkern::BFloat16{bits});
}

}  // namespace

void run_wgmma(Block& block, size_t warpgroup) {
  BlockAsync& async = block_async(block);
  Warpgroup& group = async.warpgroups[warpgroup];
  if (group.done == group.wgmmas.size() || group.wgmmas[group.done]->arrived < 128) return;
  Wgmma& p = *group.wgmmas[group.done];
  const int n = p.call.n;
  const bool half = p.call.half;
  static Operand<64, 16> a;
  static Operand<16, 256> b;
  const int least = half ? kLeastHalfExponent : kLeastExponent;
  race_actor_begin(block.first_actor + warpgroup, p.issue_clock, &p.done_clock);
  if (p.call.registers) {
    memcpy(a.value, p.a.data(), sizeof(a.value));
  } else {
    read_operand(block, p, warpgroup, "a", p.call.a, p.call.transpose_a, 64, [&](int row, int k, const uint16_t* e) {
      for (int i = 0; i < 8; ++i) (p.call.transpose_a ? a.value[k + i][row] : a.value[row][k + i]) = value(half, e[i]);
    });
  }
  read_operand(block, p, warpgroup, "b", p.call.b, p.call.transpose_b, n, [&](int row, int k, const uint16_t* e) {
    for (int i = 0; i < 8; ++i) (p.call.transpose_b ? b.value[row][k + i] : b.value[k + i][row]) = value(half, e[i]);
  });
  race_actor_end();
  float* sums = p.sums->values.data();
  if (!p.call.accumulate) memset(sums, 0, p.sums->values.size() * sizeof(float));
  a.find_powers(least);
  b.find_powers(least);
  multiply<16, 25>(a, b, n, sums);
  p.done = true;
  p.sums = nullptr;  // who has not waited yet has it too
  p.a = {};
  ++group.done;
}

void wgmma_fence() {
  require_sm90("wgmma_fence");
  thread_async(*running).fenced = true;
}

void wgmma_issue(const WgmmaCall& call, float* d, const uint32_t* registers, const Place& at) {
  const void* pc = __builtin_return_address(0);
  require_sm90("wgmma");
  Fiber& self = *running;
  Block& block = *self.block;
  BlockAsync& async = block_async(block);
  const size_t warpgroup = self.thread_rank / 128;
  if ((warpgroup + 1) * 128 > block.threads) fail("wgmma: the thread is in no whole warpgroup of 128");
  Warpgroup& group = async.warpgroups[warpgroup];
  ThreadAsync& lane = async.threads[self.thread_rank];
  const unsigned thread = self.thread_rank % 128;
  const size_t index = lane.issued++;
  const bool first = index == group.wgmmas.size();
  if (first) {
    group.wgmmas.push_back(std::make_shared<Wgmma>());
    Wgmma& p = *group.wgmmas.back();
    p.call = call;
    p.at = at;
    p.pc = pc;
    p.first = &self;
    if (call.registers) p.a.resize(64 * 16);
  }
  Wgmma& p = *group.wgmmas[index];
  if (!(p.call == call) || !(p.at == at)) {
    fail_wgmma(p, warpgroup,
               text("the thread calls another product (%s:%d), or the same with other descriptors (a %llx, b %llx, "
                    "accumulate %d) than thread (%u, %u, %u) (a %llx, b %llx, accumulate %d)",
                    base_name(at.file), at.line, static_cast<unsigned long long>(call.a),
                    static_cast<unsigned long long>(call.b), call.accumulate, p.first->thread.x, p.first->thread.y,
                    p.first->thread.z, static_cast<unsigned long long>(p.call.a),
                    static_cast<unsigned long long>(p.call.b), p.call.accumulate));
  }
  ThreadAsync::Pending* pending = nullptr;
  for (ThreadAsync::Pending& o : lane.pending) {
    if (o.d == d && o.n == call.n) {
      pending = &o;
    } else if (d < o.d + o.n / 2 && o.d < d + call.n / 2) {
      fail_wgmma(p, warpgroup, "its sums overlap those of another product under way");
    }
  }
  if ((pending == nullptr || call.registers) && !lane.fenced) {
    fail_wgmma(p, warpgroup, "no wgmma_fence since registers could be touched (the start, or the last wgmma_wait)");
  }
  const bool opens_chain = pending == nullptr;
  if (first) {
    p.opens_chain = opens_chain;
    p.sums = opens_chain ? std::make_shared<Accumulators>() : pending->sums;
    if (opens_chain) {
      p.sums->n = call.n;
      p.sums->values.resize(static_cast<size_t>(64) * call.n);
    }
  } else if (p.opens_chain != opens_chain || (!opens_chain && pending->sums != p.sums)) {
    fail_wgmma(p, warpgroup,
               "some threads of the warpgroup have waited for its sums since the product before, some have not");
  }
  if (opens_chain) {
    for (int i = 0; i < call.n / 2; ++i) {
      p.sums->values[static_cast<size_t>(row_of(thread, i) * call.n + column_of(thread, i))] = d[i];
      d[i] = bits_to<float>(kPendingNaN);
    }
    lane.pending.push_back({d, call.n, p.sums, index});
  } else {
    if (!untouched(d, call.n)) fail_wgmma(p, warpgroup, "its sums were written between a product and the wait for it");
    pending->last = index;
  }
  if (call.registers) {  // as mma_16816's operand a, of the warp's 16 rows
    for (int i = 0; i < 8; ++i) {
      const int row = static_cast<int>(thread / 32 * 16 + thread % 32 / 4) + (i & 2 ? 8 : 0);
      const int column = static_cast<int>(thread % 4) * 2 + (i & 1) + (i >= 4 ? 8 : 0);
      p.a[static_cast<size_t>(row * 16 + column)] =
          value(call.half, static_cast<uint16_t>(registers[i / 2] >> (i & 1) * 16));
    }
  }
  race_release_meet(p.issue_clock);
  progress();
  if (++p.arrived == 128) {
    for (Fiber* f : group.waiting) wake(f);
    group.waiting.clear();
    if (eager()) {
      while (group.done <= index) run_wgmma(block, warpgroup);
    } else {
      schedule(&block, warpgroup);
    }
  }
  maybe_yield();
}

void wgmma_commit() {
  require_sm90("wgmma_commit");
  ThreadAsync& lane = thread_async(*running);
  lane.group_ends.push_back(lane.issued);
}

void wgmma_wait(unsigned pending, const Place& at) {
  require_sm90("wgmma_wait");
  Fiber& self = *running;
  Block& block = *self.block;
  ThreadAsync& lane = thread_async(self);
  lane.fenced = false;
  maybe_yield();
  if (lane.group_ends.size() <= pending) return;
  const size_t end = lane.group_ends[lane.group_ends.size() - 1 - pending];
  if (end == 0) return;
  const size_t warpgroup = self.thread_rank / 128;
  Warpgroup& group = block_async(block).warpgroups[warpgroup];
  while (group.wgmmas[end - 1]->arrived < 128) {
    group.waiting.push_back(&self);
    wait("wgmma_wait", at);
  }
  while (group.done < end) run_wgmma(block, warpgroup);
  race_acquire(group.wgmmas[end - 1]->done_clock);
  size_t kept = 0;
  for (size_t i = 0; i < lane.pending.size(); ++i) {
    const ThreadAsync::Pending o = lane.pending[i];
    if (o.last >= end) {
      lane.pending[kept++] = o;
      continue;
    }
    if (!untouched(o.d, o.n)) {
      fail_wgmma(*group.wgmmas[o.last], warpgroup, "its sums were written between a product and the wait for it");
    }
    for (int k = 0; k < o.n / 2; ++k) {
      const unsigned thread = self.thread_rank % 128;
      o.d[k] = o.sums->values[static_cast<size_t>(row_of(thread, k) * o.n + column_of(thread, k))];
    }
  }
  lane.pending.resize(kept);
  progress();
}

void exit_wgmma(Fiber& fiber) {
  const ThreadAsync& lane = thread_async(fiber);
  if (!lane.pending.empty()) {
    const Wgmma& p = *block_async(*fiber.block).warpgroups[fiber.thread_rank / 128].wgmmas[lane.pending[0].last];
    fail_wgmma(p, fiber.thread_rank / 128, "the thread ends without a wgmma_wait for it");
  }
}

}  // namespace simt
