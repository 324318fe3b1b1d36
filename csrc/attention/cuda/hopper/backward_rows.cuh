// What the backward kernels for compute capability 9.0 need around their products: arguments, which block of keys
// visits which block of queries, lse and delta, packed result rows of no sequence.
#pragma once

#include "attention/cuda/attention.cuh"
#include "attention/cuda/schedule.cuh"
#include "common/cuda/hopper/device.cuh"

namespace seqkern {
namespace attention_backward_hopper {

// The kernels' arguments: AttentionBackwardCuda without what they do not serve, and their workspaces.
struct Backward {
  AttentionCuda call;
  AttentionTensor grad_out, out;
  const float *lse, *grad_lse;
  AttentionResult grad_query, grad_key, grad_value;
  AttentionOrder order;
  // For every tile of queries: lse in base 2, then delta; the sums of dQ; how many blocks have added to them.
  float *statistics, *sums;
  uint32_t *turns, *ticket;
  int64_t slots;  // tiles of queries of a head
  bool apart;     // a head's blocks start with different queries; each visits all queries, and all are resident
};

// TMA's maps: boxes of 64 columns and a tile's rows.
struct Maps {
  TensorMap query, key, value, grad_out;
};

// ---- tiles of queries ----------------------------------------------------------------------------------------------

SK_DEVICE int blocks_of(int rows, int block) { return (rows + block - 1) / block; }

// Index of a sequence's first tile of queries in the workspaces. Packed sequences start anywhere, so each sequence gets
// one tile more than its rows need.
template <int kRows>
SK_DEVICE int64_t first_slot(const Backward& p, const AttentionPlace& at, int sequence) {
  if (p.call.query_starts.data != nullptr) return at.query_row / kRows + sequence;
  return static_cast<int64_t>(sequence) * blocks_of(p.call.max_queries, kRows);
}

// The blocks of kQueries queries that a block of kKeys keys visits.
struct Visits {
  int first, count;  // in blocks
  int full, edge;    // in rows: blocks in [full, edge) see every pair
};
template <int kQueries, int kKeys>
SK_DEVICE Visits visits_of(const AttentionPlace& at, int key0) {
  const AttentionRange r = query_range(at, key0, kKeys, kQueries);
  Visits v{r.first / kQueries, 0, r.full, key0 + kKeys > at.keys ? r.full : r.edge};
  if (at.low <= at.high && key0 - at.high < r.last) v.count = blocks_of(r.last, kQueries) - v.first;
  if (v.count < 0) v.count = 0;
  return v;
}
// The turn of the block of keys at key0: how many blocks of later keys visit the block of queries and add first.
template <int kQueries, int kKeys>
SK_DEVICE uint32_t turn_of(const AttentionPlace& at, int query0, int key0) {
  const int last = min(at.keys, min(query0 + kQueries, at.queries) + at.high);
  return static_cast<uint32_t>((last - 1) / kKeys - key0 / kKeys);
}

// Of `members` blocks of keys that start with different queries, the one with number `index`.
struct Rotation {
  int members, index;

  // The first block of queries that it visits, of `count`.
  SK_DEVICE constexpr int start(int count) const {
    return static_cast<int>(static_cast<int64_t>(index) * count / members);
  }
  // How many members add to block n of the queries before this one: those that arrive earlier. Members that started at
  // n or before it come first, the last of them ahead; then those that started after it, again the last ahead.
  SK_DEVICE constexpr int turn(int n, int count) const {
    const int64_t passed = ((n + int64_t{1}) * members - 1) / count + 1;
    const int begun = static_cast<int>(passed < members ? passed : members);
    return index < begun ? begun - 1 - index : begun + members - 1 - index;
  }
};

// Every turn belongs to one member, and a member waits only for those that arrive after fewer steps, or after as many
// and with a larger number. So blocks never wait in a circle.
constexpr bool turns_are_kept(int members, int count) {
  for (int n = 0; n < count; ++n) {
    uint64_t seen = 0;
    for (int index = 0; index < members; ++index) {
      const Rotation mine{members, index};
      const int turn = mine.turn(n, count), steps = (n - mine.start(count) + count) % count;
      if (turn < 0 || turn >= members || (seen >> turn & 1) != 0) return false;
      seen |= uint64_t{1} << turn;
      for (int other = 0; other < members; ++other) {
        const Rotation theirs{members, other};
        const int before = (n - theirs.start(count) + count) % count;
        if (theirs.turn(n, count) < turn && (before > steps || (before == steps && other < index))) return false;
      }
    }
  }
  return true;
}
static_assert(turns_are_kept(1, 3) && turns_are_kept(6, 4) && turns_are_kept(5, 9) && turns_are_kept(7, 1) &&
                  turns_are_kept(8, 8),
              "who adds when");

// ---- before and after ----------------------------------------------------------------------------------------------

constexpr int kPlainThreads = 256;

struct TileOf {
  int sequence, head, block;
};
SK_DEVICE TileOf tile_of(const Backward& p, int rows) {
  const int64_t blocks = blocks_of(p.call.max_queries, rows), pair = blockIdx.x / blocks;
  return {static_cast<int>(pair / p.call.heads), static_cast<int>(pair % p.call.heads),
          static_cast<int>(blockIdx.x % blocks)};
}

template <class T>
SK_DEVICE float dot_16(const T* a, const T* b) {
  const uint4 x = *reinterpret_cast<const uint4*>(a), y = *reinterpret_cast<const uint4*>(b);
  const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = fmaf(widen(T{static_cast<uint16_t>(xs[i])}), widen(T{static_cast<uint16_t>(ys[i])}), sum);
    sum = fmaf(widen(T{static_cast<uint16_t>(xs[i] >> 16)}), widen(T{static_cast<uint16_t>(ys[i] >> 16)}), sum);
  }
  return sum;
}

// Computes lse and delta = dO.O - dlse of a tile of queries, and resets its turn counter and sums.
template <class T, int kDim, int kRows>
__global__ __launch_bounds__(kPlainThreads) void statistics_kernel(const Backward p) {
#if SK_HOPPER
  const TileOf tile = tile_of(p, kRows);
  const int thread = static_cast<int>(threadIdx.x), query0 = tile.block * kRows;
  if (blockIdx.x == 0 && thread == 0 && p.ticket != nullptr) *p.ticket = 0;
  const AttentionPlace at = place_of(p.call, tile.sequence);
  if (query0 >= at.queries) return;
  const int64_t slot = tile.head * p.slots + first_slot<kRows>(p, at, tile.sequence) + tile.block;
  float* statistics = p.statistics + slot * 2 * kRows;

  constexpr int kLanes = kDim / 8;  // lanes of a row
  const int column = thread % kLanes * 8;
#pragma unroll 2
  for (int r = thread / kLanes; r < kRows; r += kPlainThreads / kLanes) {
    const int row = query0 + r;
    float sum = 0;
    if (row < at.queries && column < p.call.value_dim) {
      sum = dot_16(p.grad_out.at<T>(at.batch, tile.head, at.query_row + row) + column,
                   p.out.at<T>(at.batch, tile.head, at.query_row + row) + column);
    }
#pragma unroll
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    if (column == 0) {
      float lse = -INFINITY;
      if (row < at.queries) {
        const int64_t number = row_number(p.call, at, tile.head, row);
        lse = p.lse[number];
        if (p.grad_lse != nullptr) sum -= p.grad_lse[number];
      }
      statistics[r] = lse_or_infinity(lse) * kLog2e;
      statistics[kRows + r] = lse == -INFINITY ? 0.0f : sum;
    }
  }
  if (p.sums == nullptr) return;
  if (thread == 0) p.turns[slot] = 0;
  float4* sums = reinterpret_cast<float4*>(p.sums + slot * kRows * kDim);
  for (int n = thread; n < kRows * kDim / 4; n += kPlainThreads) sums[n] = {0, 0, 0, 0};
#endif
}

// Clears packed result rows of no sequence.
template <class T>
SK_DEVICE void zero_rows_outside(const AttentionResult& result, const AttentionIntegers& starts, int sequences,
                                 int64_t rows, int heads, int columns) {
  const int64_t before = clamp_row(starts[0], rows), behind = max(before, clamp_row(starts[sequences], rows));
  const int64_t words = columns / 8, gap = (before + rows - behind) * heads * words;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; n < gap; n += step) {
    const int64_t word = n % words, head = n / words % heads, r = n / words / heads;
    const int64_t row = r < before ? r : r - before + behind;
    *reinterpret_cast<uint4*>(result.at<T>(0, head, row) + word * 8) = {0, 0, 0, 0};
  }
}
template <class T>
__global__ __launch_bounds__(kPlainThreads) void gaps_kernel(const Backward p) {
#if SK_HOPPER
  const AttentionCuda& c = p.call;
  zero_rows_outside<T>(p.grad_query, c.query_starts, c.sequences, c.query_rows, c.heads, c.head_dim);
  zero_rows_outside<T>(p.grad_key, c.key_starts, c.sequences, c.key_rows, c.kv_heads, c.head_dim);
  zero_rows_outside<T>(p.grad_value, c.key_starts, c.sequences, c.key_rows, c.kv_heads, c.value_dim);
#endif
}

}  // namespace attention_backward_hopper
}  // namespace seqkern
