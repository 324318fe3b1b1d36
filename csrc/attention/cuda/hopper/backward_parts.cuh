// Parts of both backward kernels for compute capability 9.0: tiles in shared memory and the producer warps that load
// them, products, scores, results.
//
// A tile has rows of 64 elements, as TMA writes and wgmma reads them (device.cuh); a matrix with more columns is
// several tiles side by side. The summed index runs along the rows or down them: the same tile of Q is an operand of
// S^T and of dK.
#pragma once

#include "backward_rows.cuh"

namespace seqkern {
namespace attention_backward_hopper {

constexpr int kWarpgroup = 128;
constexpr int kTileRow = 128;  // bytes
constexpr int kStages = 2;

// Loads kRows rows of a head from `row` on, as tiles of 64 columns.
template <int kRows, int kColumns>
SK_DEVICE void load_rows(unsigned char* tile, const TensorMap& map, uint64_t* barrier, int64_t row, int64_t head,
                         int64_t batch) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    tma_load_4d(tile + c * kRows * kTileRow, map, barrier, c * 64, static_cast<int>(row), static_cast<int>(head),
                static_cast<int>(batch));
  }
}

// Loads a matrix into shared memory, with one arrival at `full`; called by the producer warp. Rows from `rows` on
// belong to other sequences or lie after a length. They may hold NaN, and 0 NaN is NaN, so they become 0. TMA fills in
// zeros only past the end of the tensor; otherwise the warp waits for TMA (at `own`) and writes the zeros.
struct Producer {
  uint64_t* own;
  int lane;
  unsigned phase = 0;

  template <int kRows, int kColumns>
  SK_DEVICE void load(unsigned char* tile, const TensorMap& map, uint64_t* full, int64_t row, int rows,
                      int64_t tensor_rows, int64_t head, int64_t batch) {
    const bool cut = rows < kRows && row + rows < tensor_rows;
    uint64_t* barrier = cut ? own : full;
    if (lane == 0) {
      mbarrier_arrive_expect(barrier, kRows * kColumns * kTileRow);
      load_rows<kRows, kColumns>(tile, map, barrier, row, head, batch);
    }
    if (!cut) return;
    __syncwarp();
    mbarrier_wait(own, phase);
    phase ^= 1;
    tile += rows * kTileRow + lane * 16;
#pragma unroll 1
    for (int column = 0; column < kColumns; ++column, tile += kRows * kTileRow) {
#pragma unroll 1
      for (int n = lane; n < (kRows - rows) * 8; n += 32) {
        *reinterpret_cast<uint4*>(tile + (n - lane) * 16) = {0, 0, 0, 0};
      }
    }
    fence_async_shared();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(full);
  }
};

// A product's descriptors differ by a constant from step to step, in multiples of 16 bytes: the address is the lowest
// field.
SK_DEVICE uint64_t row_step(int step, int tile_bytes) { return (step / 4 * tile_bytes + step % 4 * 32) / 16; }
SK_DEVICE uint64_t column_step(int step) { return step * 2048 / 16; }

// s = a b^T, summed along the tiles' rows: 64 rows of a, N of b.
template <class T, int N, int kSteps>
SK_DEVICE void product_of_rows(float (&s)[N / 2], const unsigned char* a, int a_tile, const unsigned char* b,
                               int b_tile) {
  const uint64_t a0 = k_major_descriptor(a, 0, a_tile), b0 = k_major_descriptor(b, 0, b_tile);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) wgmma_ss<T, N, 0, 0>(s, a0 + row_step(k, a_tile), b0 + row_step(k, b_tile), k > 0);
}
// s = a^T b, summed down the tiles' rows: 64 columns of a, N of b.
template <class T, int N, int kSteps>
SK_DEVICE void product_of_columns(float (&s)[N / 2], const unsigned char* a, const unsigned char* b, int b_tile) {
  const uint64_t a0 = mn_major_descriptor(a, 0, 0), b0 = mn_major_descriptor(b, 0, b_tile);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) wgmma_ss<T, N, 1, 1>(s, a0 + column_step(k), b0 + column_step(k), k > 0);
}
// sums += a b: a in registers, 16 columns in every four words; the summed index runs down b's rows.
template <class T, int N, int kSteps>
SK_DEVICE void add_product(float (&sums)[N / 2], const uint32_t (&a)[kSteps][4], const unsigned char* b, int b_tile) {
  const uint64_t b0 = mn_major_descriptor(b, 0, b_tile);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) wgmma_rs<T, N, 1>(sums, a[k], b0 + column_step(k), true);
}

// The queries that see key j, or the keys that query i sees: `sees` for all pairs at once.
struct Seen {
  int first, last;
  SK_DEVICE bool holds(int n) const { return (n >= first) & (n <= last); }
};
SK_DEVICE Seen seen_of_key(const AttentionPlace& at, int j) {
  return {j - at.high, j < at.keys ? j - at.low : -kAttentionFar};
}
SK_DEVICE Seen seen_of_query(const AttentionPlace& at, int i) { return {i + at.low, min(i + at.high, at.keys - 1)}; }

// Turns scores of keys (rows: the warpgroup's 64) and queries (columns) into probabilities. Hidden pairs become 0 even
// if lse is so small that their scores would overflow.
template <int kQueries>
SK_DEVICE void probabilities(float (&s)[kQueries / 2], const AttentionPlace& at, const float* lse, float scale,
                             int key0, int query0, bool masked, int thread) {
  const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
  if (masked) {
    const Seen seen[2] = {seen_of_key(at, key0 + row), seen_of_key(at, key0 + row + 8)};
#pragma unroll
    for (int n = 0; n < kQueries / 2; ++n) {
      s[n] = seen[n % 4 / 2].holds(query0 + n / 4 * 8 + column + n % 2) ? s[n] : -INFINITY;
    }
  }
#pragma unroll
  for (int n = 0; n < kQueries / 8; ++n) {
    const float2 l = *reinterpret_cast<const float2*>(lse + n * 8 + column);
    s[4 * n] = power_of_two(fmaf(s[4 * n], scale, -l.x));
    s[4 * n + 1] = power_of_two(fmaf(s[4 * n + 1], scale, -l.y));
    s[4 * n + 2] = power_of_two(fmaf(s[4 * n + 2], scale, -l.x));
    s[4 * n + 3] = power_of_two(fmaf(s[4 * n + 3], scale, -l.y));
  }
}
// dS / scale = P (dP - delta), in place of dP.
template <int kQueries>
SK_DEVICE void score_gradients(float (&dp)[kQueries / 2], const float (&p)[kQueries / 2], const float* delta,
                               int thread) {
#pragma unroll
  for (int n = 0; n < kQueries / 8; ++n) {
    const float2 d = *reinterpret_cast<const float2*>(delta + n * 8 + thread % 4 * 2);
    dp[4 * n] = p[4 * n] * (dp[4 * n] - d.x);
    dp[4 * n + 1] = p[4 * n + 1] * (dp[4 * n + 1] - d.y);
    dp[4 * n + 2] = p[4 * n + 2] * (dp[4 * n + 2] - d.x);
    dp[4 * n + 3] = p[4 * n + 3] * (dp[4 * n + 3] - d.y);
  }
}
// Rounds sums into the operand of the next product.
template <class T, int N>
SK_DEVICE void as_operand(uint32_t (&a)[N / 16][4], const float (&s)[N / 2]) {
#pragma unroll
  for (int n = 0; n < N / 4; ++n) a[n / 4][n % 4] = narrow_pair<T>(s[2 * n], s[2 * n + 1]);
}

// Word n of lane q of a quad becomes word q of lane n.
SK_DEVICE void transpose_quad(uint32_t (&word)[4], int lane) {
#pragma unroll
  for (int lanes = 1; lanes <= 2; lanes *= 2) {
    const bool upper = (lane & lanes) != 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if ((n & lanes) != 0) continue;
      const uint32_t got = __shfl_xor_sync(~0u, upper ? word[n] : word[n + lanes], lanes);
      word[n] = upper ? got : word[n];
      word[n + lanes] = upper ? word[n + lanes] : got;
    }
  }
}

// Stores a warpgroup's 64 rows of sums, times `scale`, as rows `row0` ... of a result; only rows below `rows`.
template <class T, int N>
SK_DEVICE void store_sums(const float (&sums)[N / 2], const AttentionResult& result, int64_t batch, int64_t head,
                          int64_t first_row, int row0, int rows, int columns, float scale, int thread) {
  const int lane = thread % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row0 + thread / 32 * 16 + thread % 32 / 4 + half * 8;
    T* to = result.at<T>(batch, head, first_row + (row < rows ? row : row0)) + lane * 8;
#pragma unroll
    for (int n = 0; n < N / 8; n += 4) {  // eight columns for each lane of the quad
      uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* two = sums + 4 * (n + i) + 2 * half;
        word[i] = narrow_pair<T>(two[0] * scale, two[1] * scale);
      }
      transpose_quad(word, lane);
      if (row < rows && n * 8 + lane * 8 < columns) {
        *reinterpret_cast<uint4*>(to + n * 8) = {word[0], word[1], word[2], word[3]};
      }
    }
  }
}
// Stores zeros instead, for keys that nobody sees.
template <class T>
SK_DEVICE void store_zeros(const AttentionResult& result, int64_t batch, int64_t head, int64_t first_row, int rows,
                           int columns, int thread, int threads) {
  for (int n = thread; n < rows * (columns / 8); n += threads) {
    const int row = n / (columns / 8), column = n % (columns / 8) * 8;
    *reinterpret_cast<uint4*>(result.at<T>(batch, head, first_row + row) + column) = {0, 0, 0, 0};
  }
}

// A stage of the ring and the parity of its phase.
struct Ring {
  int stage = 0;
  unsigned phase = 0;
  SK_DEVICE void next() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// ---- keys, values, queries ----------------------------------------------------------------------------------------

struct Barriers {
  uint64_t *keys, *own, *full, *empty;  // full, empty: kStages each
  SK_DEVICE explicit Barriers(unsigned char* at) {
    keys = reinterpret_cast<uint64_t*>(at);
    own = keys + 1;
    full = keys + 2;
    empty = full + kStages;
  }
};

// A block's work, in shared memory: little of it is worth a register for long.
struct Work {
  AttentionPlace at;
  Visits visits;
  Rotation rotation;
  int kv_head, group, key0, start;  // start: first visited block of queries
  int64_t slot;                     // of the first query that the block visits, in the first head
};

constexpr int kWorkBytes = 128;
static_assert(sizeof(Work) <= kWorkBytes, "room for it");

template <class L>
SK_DEVICE void produce(const Backward& p, const Work& w, unsigned char* shared, const Maps& maps, int lane) {
  const Barriers barriers(shared + L::kBarriers);
  const AttentionPlace& at = w.at;
  Producer producer{barriers.own, lane};
  const int64_t row = at.key_row + w.key0;
  const int rows = at.keys - w.key0;
  producer.load<L::kKeys, L::kColumns>(shared + L::kKey, maps.key, barriers.keys, row, rows, p.call.key_rows, w.kv_head,
                                       at.batch);
  producer.load<L::kKeys, L::kColumns>(shared + L::kValue, maps.value, barriers.keys, row, rows, p.call.key_rows,
                                       w.kv_head, at.batch);
  Ring ring;
#pragma unroll 1
  for (int head = w.kv_head * w.group; head < (w.kv_head + 1) * w.group; ++head) {
#pragma unroll 1
    for (int n = w.start, left = w.visits.count; left > 0; --left) {
      const int query0 = (w.visits.first + n) * L::kQueries;
      n = n + 1 == w.visits.count ? 0 : n + 1;
      mbarrier_wait(barriers.empty + ring.stage, ring.phase ^ 1);
      uint64_t* full = barriers.full + ring.stage;
      producer.load<L::kQueries, L::kColumns>(shared + L::kQuery + ring.stage * L::kQueryBytes, maps.query, full,
                                              at.query_row + query0, at.queries - query0, p.call.query_rows, head,
                                              at.batch);
      producer.load<L::kQueries, L::kColumns>(shared + L::kGradOut + ring.stage * L::kQueryBytes, maps.grad_out, full,
                                              at.query_row + query0, at.queries - query0, p.call.query_rows, head,
                                              at.batch);
      ring.next();
    }
  }
}
template <class L>
SK_DEVICE void produce_statistics(const Backward& p, const Work& w, unsigned char* shared, int lane) {
  const Barriers barriers(shared + L::kBarriers);
  Ring ring;
  int64_t slot = w.slot;
#pragma unroll 1
  for (int head = 0; head < w.group; ++head, slot += p.slots) {
    const float4* from = reinterpret_cast<const float4*>(p.statistics + slot * 2 * L::kQueries) + lane;
#pragma unroll 1
    for (int n = w.start, left = w.visits.count; left > 0; --left) {
      const float4 statistics = from[n * (L::kQueries / 2)];
      n = n + 1 == w.visits.count ? 0 : n + 1;
      mbarrier_wait(barriers.empty + ring.stage, ring.phase ^ 1);
      reinterpret_cast<float4*>(shared + L::kStatistics + ring.stage * 2 * L::kQueries * 4)[lane] = statistics;
      __syncwarp();
      if (lane == 0) mbarrier_arrive(barriers.full + ring.stage);
      ring.next();
    }
  }
}

// Sets up the block's work and barriers; called by one thread. `releases`: warps that release a stage.
template <class L>
SK_DEVICE void set_up(const Backward& p, unsigned char* shared, const AttentionTile& tile, int releases) {
  Work& w = *reinterpret_cast<Work*>(shared + L::kWork);
  w.at = place_of(p.call, tile.sequence);
  w.key0 = tile.block * L::kKeys;
  w.visits = visits_of<L::kQueries, L::kKeys>(w.at, w.key0);
  w.kv_head = tile.head;
  w.group = p.call.heads / p.call.kv_heads;
  w.slot = static_cast<int64_t>(tile.head) * w.group * p.slots + first_slot<L::kQueries>(p, w.at, tile.sequence) +
           w.visits.first;
  w.rotation = {1, 0};
  if (p.apart && w.visits.count > 0) w.rotation = {blocks_of(w.at.keys, L::kKeys), tile.block};
  w.start = w.rotation.start(w.visits.count);
  const Barriers barriers(shared + L::kBarriers);
  mbarrier_init(barriers.keys, 2);
  mbarrier_init(barriers.own, 1);
  for (int i = 0; i < kStages; ++i) {
    mbarrier_init(barriers.full + i, 3);
    mbarrier_init(barriers.empty + i, releases);
  }
  mbarrier_fence_init();
}
// Stores zeros for keys that nobody sees. Returns whether nothing is left to do.
template <class T, class L>
SK_DEVICE bool nobody_sees(const Backward& p, const Work& w, int thread, int threads) {
  if (w.visits.count > 0) return false;
  const int rows = min(L::kKeys, w.at.key_rows - w.key0);
  const int64_t row = w.at.key_row + w.key0;
  store_zeros<T>(p.grad_key, w.at.batch, w.kv_head, row, rows, p.call.head_dim, thread, threads);
  store_zeros<T>(p.grad_value, w.at.batch, w.kv_head, row, rows, p.call.value_dim, thread, threads);
  return true;
}

}  // namespace attention_backward_hopper
}  // namespace seqkern
