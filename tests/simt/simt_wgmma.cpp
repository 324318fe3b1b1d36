// wgmma: who calls it, what it reads, and when. See simt_hopper.h; and simt_product.h for what it computes.
#include <cstring>

#include "simt_async.h"
#include "simt_product.h"

namespace simt {

namespace {

constexpr uint32_t kUnderWay = 0x7FBADA55u;  // a NaN that no arithmetic gives: sums that a product works on

const char* base_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash == nullptr ? path : slash + 1;
}

[[noreturn]] void refuse(const Product& p, size_t warpgroup, const std::string& what) {
  fail("wgmma (%s:%d) of warpgroup %zu: %s", base_name(p.at.file), p.at.line, warpgroup, what.c_str());
}

bool untouched(const float* d, int n) {
  for (int i = 0; i < n / 2; ++i) {
    if (bits_to<uint32_t>(d[i]) != kUnderWay) return false;
  }
  return true;
}

// Row and column of register i of thread t.
int row_of(unsigned t, int i) { return static_cast<int>(t / 32 * 16 + t % 32 / 4) + (i & 2 ? 8 : 0); }
int column_of(unsigned t, int i) { return i / 4 * 8 + static_cast<int>(t % 4) * 2 + (i & 1); }

// The operand of a descriptor: `size` rows (or columns) by 16 of the summed index. read(row, k, 8 elements, by k or by
// row) is called for every 16 bytes.
template <class F>
void read_operand(const Block& block, const Product& p, size_t warpgroup, const char* name, uint64_t d, bool transposed,
                  int size, F read) {
  const size_t start = (d & 0x3FFF) << 4, leading = (d >> 16 & 0x3FFF) << 4, stride = (d >> 32 & 0x3FFF) << 4;
  if (d >> 62 != 1) refuse(p, warpgroup, text("%s has no 128-byte swizzle in its descriptor", name));
  if ((d >> 49 & 7) != 0) refuse(p, warpgroup, text("%s has a base offset", name));
  if (start >> 7 & 7) {
    refuse(
        p, warpgroup,
        text("%s begins at offset %zu: not in the first of eight rows of 128 bytes, tiles begin at multiples of 1024",
             name, start));
  }
  const size_t across = transposed ? (size < 64 ? static_cast<size_t>(size) * 2 : 128) : 32;
  if (start % 128 + across > 128) refuse(p, warpgroup, text("%s crosses the end of its rows of 128 bytes", name));
  const int outer = transposed ? 16 : size, chunks = transposed ? size / 8 : 2;
  for (int row = 0; row < outer; ++row) {
    for (int c = 0; c < chunks; ++c) {
      const size_t plain = start + static_cast<size_t>(row / 8) * stride + static_cast<size_t>(row % 8) * 128 +
                           static_cast<size_t>(c % 8) * 16 + static_cast<size_t>(c / 8) * leading;
      const size_t at = swizzled(plain);
      if (at + 16 > machine.shared_bytes) {
        refuse(p, warpgroup, text("%s reads offset %zu of %zu bytes of shared memory", name, at, machine.shared_bytes));
      }
      check_read(block.shared + at, 16);
      race_actor_read(block.shared + at, 16, true, p.code);
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

void run_product(Block& block, size_t number) {
  Async& async = async_of(block);
  Warpgroup& group = async.warpgroups[number];
  if (group.done == group.products.size() || group.products[group.done]->arrived < 128) return;
  Product& p = *group.products[group.done];
  const int n = p.kind.n;
  const bool half = p.kind.half;
  static Operand<64, 16> a;
  static Operand<16, 256> b;
  const int least = half ? kLeastHalfExponent : kLeastExponent;
  race_actor(block.first_actor + number, p.past, &p.clock);
  if (p.kind.registers) {
    memcpy(a.value, p.a.data(), sizeof(a.value));
  } else {
    read_operand(block, p, number, "a", p.kind.a, p.kind.transpose_a, 64, [&](int row, int k, const uint16_t* e) {
      for (int i = 0; i < 8; ++i) (p.kind.transpose_a ? a.value[k + i][row] : a.value[row][k + i]) = value(half, e[i]);
    });
  }
  read_operand(block, p, number, "b", p.kind.b, p.kind.transpose_b, n, [&](int row, int k, const uint16_t* e) {
    for (int i = 0; i < 8; ++i) (p.kind.transpose_b ? b.value[row][k + i] : b.value[k + i][row]) = value(half, e[i]);
  });
  race_actor_end();
  float* sums = p.sums->values.data();
  if (!p.kind.accumulate) memset(sums, 0, p.sums->values.size() * sizeof(float));
  a.find_powers(least);
  b.find_powers(least);
  multiply<16, 25>(a, b, n, sums);
  p.done = true;
  p.sums = nullptr;  // who has not waited yet has it too
  p.a = {};
  ++group.done;
}

void product_fence() {
  need_hopper("wgmma_fence");
  lane_of(*running).fenced = true;
}

void product_issue(const ProductKind& kind, float* d, const uint32_t* registers, const Place& at) {
  const void* code = __builtin_return_address(0);
  need_hopper("wgmma");
  Fiber& self = *running;
  Block& block = *self.block;
  Async& async = async_of(block);
  const size_t number = self.number / 128;
  if ((number + 1) * 128 > block.threads) fail("wgmma: the thread is in no whole warpgroup of 128");
  Warpgroup& group = async.warpgroups[number];
  Lane& lane = async.lanes[self.number];
  const unsigned thread = self.number % 128;
  const size_t index = lane.issued++;
  const bool first = index == group.products.size();
  if (first) {
    group.products.push_back(std::make_shared<Product>());
    Product& p = *group.products.back();
    p.kind = kind;
    p.at = at;
    p.code = code;
    p.first = &self;
    if (kind.registers) p.a.resize(64 * 16);
  }
  Product& p = *group.products[index];
  if (!(p.kind == kind) || !(p.at == at)) {
    refuse(p, number,
           text("the thread calls another product (%s:%d), or the same with other descriptors (a %llx, b %llx, "
                "accumulate %d) than thread (%u, %u, %u) (a %llx, b %llx, accumulate %d)",
                base_name(at.file), at.line, static_cast<unsigned long long>(kind.a),
                static_cast<unsigned long long>(kind.b), kind.accumulate, p.first->thread.x, p.first->thread.y,
                p.first->thread.z, static_cast<unsigned long long>(p.kind.a), static_cast<unsigned long long>(p.kind.b),
                p.kind.accumulate));
  }
  Lane::Open* open = nullptr;
  for (Lane::Open& o : lane.open) {
    if (o.d == d && o.n == kind.n) {
      open = &o;
    } else if (d < o.d + o.n / 2 && o.d < d + kind.n / 2) {
      refuse(p, number, "its sums overlap those of another product under way");
    }
  }
  if ((open == nullptr || kind.registers) && !lane.fenced) {
    refuse(p, number, "no wgmma_fence since registers could be touched (the start, or the last wgmma_wait)");
  }
  const bool starts = open == nullptr;
  if (first) {
    p.starts = starts;
    p.sums = starts ? std::make_shared<Sums>() : open->sums;
    if (starts) {
      p.sums->n = kind.n;
      p.sums->values.resize(static_cast<size_t>(64) * kind.n);
    }
  } else if (p.starts != starts || (!starts && open->sums != p.sums)) {
    refuse(p, number, "some threads of the warpgroup have waited for its sums since the product before, some have not");
  }
  if (starts) {
    for (int i = 0; i < kind.n / 2; ++i) {
      p.sums->values[static_cast<size_t>(row_of(thread, i) * kind.n + column_of(thread, i))] = d[i];
      d[i] = bits_to<float>(kUnderWay);
    }
    lane.open.push_back({d, kind.n, p.sums, index});
  } else {
    if (!untouched(d, kind.n)) refuse(p, number, "its sums were written between a product and the wait for it");
    open->last = index;
  }
  if (kind.registers) {  // as mma_16816's operand a, of the warp's 16 rows
    for (int i = 0; i < 8; ++i) {
      const int row = static_cast<int>(thread / 32 * 16 + thread % 32 / 4) + (i & 2 ? 8 : 0);
      const int column = static_cast<int>(thread % 4) * 2 + (i & 1) + (i >= 4 ? 8 : 0);
      p.a[static_cast<size_t>(row * 16 + column)] =
          value(kind.half, static_cast<uint16_t>(registers[i / 2] >> (i & 1) * 16));
    }
  }
  race_release_least(p.past);
  progress();
  if (++p.arrived == 128) {
    for (Fiber* f : group.waiting) wake(f);
    group.waiting.clear();
    if (at_once()) {
      while (group.done <= index) run_product(block, number);
    } else {
      later(&block, number);
    }
  }
  maybe_yield();
}

void product_commit() {
  need_hopper("wgmma_commit");
  Lane& lane = lane_of(*running);
  lane.group_ends.push_back(lane.issued);
}

void product_wait(unsigned open, const Place& at) {
  need_hopper("wgmma_wait");
  Fiber& self = *running;
  Block& block = *self.block;
  Lane& lane = lane_of(self);
  lane.fenced = false;
  maybe_yield();
  if (lane.group_ends.size() <= open) return;
  const size_t end = lane.group_ends[lane.group_ends.size() - 1 - open];
  if (end == 0) return;
  const size_t number = self.number / 128;
  Warpgroup& group = async_of(block).warpgroups[number];
  while (group.products[end - 1]->arrived < 128) {
    group.waiting.push_back(&self);
    wait("wgmma_wait", at);
  }
  while (group.done < end) run_product(block, number);
  race_acquire(group.products[end - 1]->clock);
  size_t kept = 0;
  for (size_t i = 0; i < lane.open.size(); ++i) {
    const Lane::Open o = lane.open[i];
    if (o.last >= end) {
      lane.open[kept++] = o;
      continue;
    }
    if (!untouched(o.d, o.n)) {
      refuse(*group.products[o.last], number, "its sums were written between a product and the wait for it");
    }
    for (int k = 0; k < o.n / 2; ++k) {
      const unsigned thread = self.number % 128;
      o.d[k] = o.sums->values[static_cast<size_t>(row_of(thread, k) * o.n + column_of(thread, k))];
    }
  }
  lane.open.resize(kept);
  progress();
}

void leave_products(Fiber& fiber) {
  const Lane& lane = lane_of(fiber);
  if (!lane.open.empty()) {
    const Product& p = *async_of(*fiber.block).warpgroups[fiber.number / 128].products[lane.open[0].last];
    refuse(p, fiber.number / 128, "the thread ends without a wgmma_wait for it");
  }
}

}  // namespace simt
