// The forward pass of attention for compute capability 9.0: bfloat16 and float16, the equations of
// kernels/attention/attention.py. What happens to scores: scores.cuh.
//
// The idea (FlashAttention-3: Shah et al. 2024). A thread block has one producer warp that only issues TMA loads, and
// two or three consumer warpgroups that only compute. Each consumer owns 64 queries and walks the keys with an online
// softmax:
//
//     S = Q K(n)^T                     wgmma, both operands in shared memory
//     m' = max(m, rows' max of S)      P = 2^(c (S - m')), c = scale log2(e), in one multiply-add a score
//     l = a l + rows' sum of P         a = 2^(c (m - m'))
//     O = a O + P V(n)                 wgmma, P from registers: S has the layout of the operand
//
// Tensor cores never wait for the exponentials, in two ways. Within a warpgroup, S of the next block is issued before P
// V of this one: `wgmma_wait<1>` delivers the scores, and their softmax runs during P V. Between warpgroups there are
// turns: a named barrier lets a warpgroup issue its two products only after the one before has issued its own, so one's
// softmax overlaps the other's products.
//
// Keys go from right to left. Only a tile's blocks at the edges of the band compare positions (`sees`). Every warpgroup
// has its own edges; in blocks that only the others see it takes part in the barriers alone. K and V have a ring of two
// stages each, with mbarriers `full` (TMA's bytes) and `empty` (one arrival a warp).
//
// Rows after a sequence may be NaN. TMA fills in zeros only past the end of a tensor. Scores of such keys are replaced,
// and such rows of V are cleared in shared memory, because 0 NaN is NaN: once a tile, at its first block.
//
// Results go through the queries' shared memory and out by TMA if all 64 rows belong to the sequence (or end with the
// tensor), else by 16-byte stores. The order of tiles is that of schedule.cuh.
//
// Tiles, registers and shared memory (Q, two K, two V; TMA fills missing columns with zeros):
//
//     head dim           queries x keys   registers, consumer and producer   shared memory
//     64                 192 x 128        160  32                             88 KB
//     128                128 x 128        240  24                            160 KB
//     256                128 x 80         240  24                            224 KB
//     64, options        128 x 64         240  24                             48 KB
//     128, options       128 x 64         240  24                             96 KB
//
// Constraints of ptxas on the loop: the wait for the next V stands between `wgmma_wait<1>` and `wgmma_wait<0>`,
// descriptors advance by additions, and there is no branch between products. NOTES.md lists what was tried.
//
// FLOP: 4 D a visible pair. Bytes: Q and O once; K and V once for every tile of queries, from L2.
#pragma once

#include "attention/cuda/attention.cuh"
#include "attention/cuda/launch.h"
#include "attention/cuda/schedule.cuh"
#include "common/cuda/hopper/device.cuh"
#include "scores.cuh"

namespace seqkern {
namespace attention_hopper {

// kGroups consumer warpgroups of 64 queries each, blocks of kKeys keys, registers of a consumer and of a producer
// thread.
template <int kDim, bool kOptions>
struct Shape;
template <>
struct Shape<64, false> {
  static constexpr int kGroups = 3, kKeys = 128, kRegisters = 160, kLoadRegisters = 32;
  static constexpr bool kTurns = true;
};
template <>
struct Shape<64, true> {
  static constexpr int kGroups = 2, kKeys = 64, kRegisters = 240, kLoadRegisters = 24;
  static constexpr bool kTurns = true;
};
template <bool kOptions>
struct Shape<128, kOptions> {
  static constexpr int kGroups = 2, kKeys = kOptions ? 64 : 128, kRegisters = 240, kLoadRegisters = 24;
  static constexpr bool kTurns = true;
};
template <>
struct Shape<256, false> {
  static constexpr int kGroups = 2, kKeys = 80, kRegisters = 240, kLoadRegisters = 24;
  static constexpr bool kTurns = false;  // its products are long enough
};

// A call and its tensor maps: boxes of 64 columns and a tile's rows (out: 64 rows).
struct Forward {
  TensorMap query, key, value, out;
  AttentionForwardCuda forward;
  AttentionOrder order;
  int rounds;                                         // of the walk over tiles
  float scale;                                        // from scores to exponents of two
  bool query_steps[2], key_steps[2], value_steps[2];  // whether heads, batch entries have rows of their own
};

constexpr int kStages = 2;

template <int kDim, bool kOptions>
struct Layout : Shape<kDim, kOptions> {
  using S = Shape<kDim, kOptions>;
  static constexpr int kRows = 64 * S::kGroups, kPanels = kDim / 64, kThreads = 128 * (S::kGroups + 1);
  // Bytes from one tile of 64 columns to the next, and of all of them.
  static constexpr int kQueryTile = kRows * 128, kKeyTile = S::kKeys * 128;
  static constexpr int kQueryBytes = kPanels * kQueryTile, kKeyBytes = kPanels * kKeyTile;
  static constexpr int kKeysAt = kQueryBytes, kValuesAt = kKeysAt + kStages * kKeyBytes;
  static constexpr int kBarriersAt = kValuesAt + kStages * kKeyBytes;
  static constexpr int kBytes = kBarriersAt + 8 * (2 + 4 * kStages);
};

struct Barriers {
  uint64_t query_full, query_empty, key_full[kStages], key_empty[kStages], value_full[kStages], value_empty[kStages];
};

// Named barriers.
constexpr int kTurn = 1, kGroup = 4, kConsumers = 7;

// The key blocks [first, last) that a tile of queries visits; blocks in [full, edge) need no band check.
struct KeyBlocks {
  int first, last, full, edge;
  SK_DEVICE bool whole(int n) const { return n >= full && n < edge; }
};
template <int kKeys>
SK_DEVICE KeyBlocks key_blocks(const AttentionPlace& at, int query0, int rows) {
  const AttentionRange r = key_range(at, query0, rows, kKeys);
  const int first = r.first / kKeys;
  return {first, max(first, (r.last + kKeys - 1) / kKeys), r.full / kKeys, r.edge / kKeys};
}

// The ring's stage, and the parity of its phase, for block number `block`.
struct Slot {
  int stage;
  unsigned parity;
};
SK_DEVICE Slot slot_of(unsigned block) { return {static_cast<int>(block % kStages), block / kStages % 2}; }

// Calls f(tile, place, first query) for every tile of this thread block that has queries.
template <int kRows, class F>
SK_DEVICE void for_tiles(const Forward& p, const F& f) {
  for (int round = 0; round < p.rounds; ++round) {
    const int64_t index = tile_of_round(round);
    if (index >= p.order.tiles()) continue;
    const AttentionTile tile = p.order.walked(index);
    const AttentionPlace at = place_of(p.forward.call, tile.sequence);
    if (tile.block * kRows < at.queries) f(tile, at, tile.block * kRows);
  }
}

// ---- the producer warp ---------------------------------------------------------------------------------------------

// Run by one thread. K of a block is loaded before V of the block on its right: the order of use.
template <class L>
SK_DEVICE void load_tiles(const Forward& p, unsigned char* shared, Barriers* barriers) {
  const AttentionCuda& call = p.forward.call;
  unsigned tiles = 0, blocks = 0;
  for_tiles<L::kRows>(p, [&](const AttentionTile& tile, const AttentionPlace& at, int query0) {
    const KeyBlocks range = key_blocks<L::kKeys>(at, query0, L::kRows);
    const int batch = static_cast<int>(at.batch), kv_head = tile.head / (call.heads / call.kv_heads);
    const int key_row = static_cast<int>(at.key_row);
    const auto load = [&](const TensorMap& map, int stages_at, uint64_t* full, uint64_t* empty, unsigned number,
                          int row, const bool (&steps)[2]) {
      const Slot slot = slot_of(number);
      mbarrier_wait(empty + slot.stage, slot.parity ^ 1);
      mbarrier_arrive_expect(full + slot.stage, L::kKeyBytes);
      unsigned char* to = shared + stages_at + slot.stage * L::kKeyBytes;
#pragma unroll
      for (int panel = 0; panel < L::kPanels; ++panel) {
        tma_load_4d(to + panel * L::kKeyTile, map, full + slot.stage, 64 * panel, row, steps[0] ? kv_head : 0,
                    steps[1] ? batch : 0);
      }
    };
    const auto load_key = [&](int n) {
      load(p.key, L::kKeysAt, barriers->key_full, barriers->key_empty, blocks + range.last - 1 - n,
           key_row + n * L::kKeys, p.key_steps);
    };
    const auto load_value = [&](int n) {
      load(p.value, L::kValuesAt, barriers->value_full, barriers->value_empty, blocks + range.last - 1 - n,
           key_row + n * L::kKeys, p.value_steps);
    };
    // The first K has a free stage as soon as the previous tile has read its last but one, long before that tile's
    // results have left the queries' memory.
    if (range.first < range.last) load_key(range.last - 1);
    mbarrier_wait(&barriers->query_empty, tiles % 2 ^ 1);
    mbarrier_arrive_expect(&barriers->query_full, L::kQueryBytes);
#pragma unroll
    for (int panel = 0; panel < L::kPanels; ++panel) {
      tma_load_4d(shared + panel * L::kQueryTile, p.query, &barriers->query_full, 64 * panel,
                  static_cast<int>(at.query_row) + query0, p.query_steps[0] ? tile.head : 0,
                  p.query_steps[1] ? batch : 0);
    }
    for (int n = range.last - 2; n >= range.first; --n) {
      load_key(n);
      load_value(n + 1);
    }
    if (range.first < range.last) {
      load_value(range.first);
      blocks += range.last - range.first;
    }
    ++tiles;
  });
}

// ---- the consumer warpgroups ---------------------------------------------------------------------------------------

template <class T, int kDim, bool kOptions>
struct Consumer : Layout<kDim, kOptions> {
  using L = Layout<kDim, kOptions>;
  using L::kGroups, L::kKeys, L::kRows;

  const Forward& p;
  unsigned char* shared;
  Barriers* barriers;
  int group, thread, lane;  // thread: within the warpgroup

  SK_DEVICE unsigned char* queries() const { return shared + group * 64 * 128; }
  SK_DEVICE unsigned char* keys(int stage) const { return shared + L::kKeysAt + stage * L::kKeyBytes; }
  SK_DEVICE unsigned char* values(int stage) const { return shared + L::kValuesAt + stage * L::kKeyBytes; }

  // ---- turns, rings

  SK_DEVICE void wait_turn() const {
    if constexpr (L::kTurns) named_barrier_sync(kTurn + group, 256);
  }
  SK_DEVICE void give_turn() const {
    if constexpr (L::kTurns) named_barrier_arrive(kTurn + (group + 1) % kGroups, 256);
  }
  SK_DEVICE void release(uint64_t* empty) const {
    if (lane == 0) mbarrier_arrive(empty);
  }

  // Clears V from row `row` of the block on; all consumer warpgroups take part.
  SK_DEVICE void clear_values(unsigned block, int row) const {
    const Slot slot = slot_of(block);
    mbarrier_wait(&barriers->value_full[slot.stage], slot.parity);
    const int chunks = (kKeys - row) * 8;
    for (int n = group * 128 + thread; n < chunks * L::kPanels; n += kGroups * 128) {
      *reinterpret_cast<uint4*>(values(slot.stage) + n / chunks * L::kKeyTile + row * 128 + n % chunks * 16) =
          uint4{0, 0, 0, 0};
    }
    fence_async_shared();
    named_barrier_sync(kConsumers, kGroups * 128);
  }

  // Skips a block that only other warpgroups see.
  SK_DEVICE void skip(unsigned block, bool clears, int clear_row) const {
    const Slot slot = slot_of(block);
    wait_turn();
    give_turn();
    mbarrier_wait(&barriers->key_full[slot.stage], slot.parity);
    if (clears) clear_values(block, clear_row);
    mbarrier_wait(&barriers->value_full[slot.stage], slot.parity);
    __syncwarp();  // all lanes have finished waiting before the release
    release(&barriers->key_empty[slot.stage]);
    release(&barriers->value_empty[slot.stage]);
  }

  // ---- products: issued, not awaited

  // Advances a descriptor by an addition: fewer instructions between two products than a new descriptor.
  static SK_DEVICE uint64_t advance(uint64_t descriptor, int bytes) {
    return (descriptor >> 32 << 32) | (static_cast<uint32_t>(descriptor) + static_cast<uint32_t>(bytes >> 4));
  }
  SK_DEVICE void scores(float (&s)[kKeys / 2], int stage) const {
    const uint64_t a = k_major_descriptor(queries(), 0, L::kQueryTile),
                   b = k_major_descriptor(keys(stage), 0, L::kKeyTile);
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      const int columns = step % 4 * 32;
      wgmma_ss<T, kKeys, 0, 0>(s, advance(a, step / 4 * L::kQueryTile + columns),
                               advance(b, step / 4 * L::kKeyTile + columns), step > 0);
    }
    wgmma_commit();
  }
  SK_DEVICE void add_values(float (&o)[kDim / 2], const uint32_t (&weights)[kKeys / 16][4], int stage) const {
    const uint64_t b = mn_major_descriptor(values(stage), 0, L::kKeyTile);
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      wgmma_rs<T, kDim, 1>(o, weights[step], advance(b, step * 2048), true);
    }
    wgmma_commit();
  }
  static SK_DEVICE void pack(uint32_t (&weights)[kKeys / 16][4], const float (&s)[kKeys / 2]) {
#pragma unroll
    for (int n = 0; n < kKeys / 4; ++n) weights[n / 4][n % 4] = narrow_pair<T>(s[2 * n], s[2 * n + 1]);
  }

  // Scores become P.
  SK_DEVICE void weigh(float (&s)[kKeys / 2], float (&top)[2], float (&sum)[2], float (&factor)[2],
                       const AttentionTile& tile, const AttentionPlace& at, int query0, int key0, bool whole) const {
    const AttentionCuda& call = p.forward.call;
    if constexpr (kOptions) bias<kKeys>(s, call, tile, at, query0, key0);
    if (!whole) hide<kKeys>(s, at, query0, key0);
    softmax<kKeys, kOptions>(s, top, sum, factor, p.scale);
    if constexpr (kOptions) {
      if (call.seed != nullptr) drop<kKeys>(s, call, row_number(call, at, tile.head, query0), key0);
    }
  }

  // ---- a tile

  // blocks: number of blocks that the rings have seen before this tile.
  SK_DEVICE void tile(const AttentionTile& tile, const AttentionPlace& at, int query0, unsigned tiles,
                      unsigned& blocks) const {
    const KeyBlocks all = key_blocks<kKeys>(at, query0, kRows);
    KeyBlocks own = key_blocks<kKeys>(at, query0 + 64 * group, 64);
    own.first = max(own.first, all.first);
    own.last = min(own.last, all.last);
    if (own.first >= own.last) own.first = own.last = all.first;
    const bool clears =
        all.first < all.last && all.last * kKeys > at.keys && at.key_row + at.keys < p.forward.call.key_rows;
    const int clear_row = at.keys - (all.last - 1) * kKeys;
    const unsigned begin = blocks + all.last - 1;  // block n is number begin - n of the rings

    float o[kDim / 2], s[kKeys / 2], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0}, factor[2];
    uint32_t weights[kKeys / 16][4];
#pragma unroll
    for (int n = 0; n < kDim / 2; ++n) o[n] = 0;

    mbarrier_wait(&barriers->query_full, tiles % 2);
    int n = all.last - 1;
    for (; n >= own.last; --n) skip(begin - n, clears && n == all.last - 1, clear_row);
    if (n >= own.first) {
      const Slot first = slot_of(begin - n);
      mbarrier_wait(&barriers->key_full[first.stage], first.parity);
      wait_turn();
      wgmma_fence();
      scores(s, first.stage);
      give_turn();
      if (clears && n == all.last - 1) clear_values(begin - n, clear_row);
      wgmma_wait<0>();
      wgmma_pin(s);
      release(&barriers->key_empty[first.stage]);
      weigh(s, top, sum, factor, tile, at, query0 + 64 * group, n * kKeys, own.whole(n));
      pack(weights, s);
      mbarrier_wait(&barriers->value_full[first.stage], first.parity);
      for (--n; n >= own.first; --n) {
        const Slot slot = slot_of(begin - n - 1), next = slot_of(begin - n);
        mbarrier_wait(&barriers->key_full[next.stage], next.parity);
        wait_turn();
        wgmma_fence();
        scores(s, next.stage);
        add_values(o, weights, slot.stage);
        give_turn();
        wgmma_wait<1>();
        wgmma_pin(s);
        release(&barriers->key_empty[next.stage]);
        weigh(s, top, sum, factor, tile, at, query0 + 64 * group, n * kKeys, own.whole(n));
        // This wait is a branch between the exponentials and `wgmma_wait<0>`, which ptxas would otherwise move up
        // before them.
        wgmma_pin(s);
        mbarrier_wait(&barriers->value_full[next.stage], next.parity);
        wgmma_wait<0>();
        wgmma_pin(o);
        release(&barriers->value_empty[slot.stage]);
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) o[i] *= factor[i / 2 % 2];
        pack(weights, s);
      }
      const Slot slot = slot_of(begin - own.first);
      wgmma_fence();
      add_values(o, weights, slot.stage);
      wgmma_wait<0>();
      wgmma_pin(o);
      release(&barriers->value_empty[slot.stage]);
    }
    for (; n >= all.first; --n) skip(begin - n, false, 0);
    blocks = begin - all.first + 1;
    finish(tile, query0 + 64 * group, o, top, sum);
  }

  // Adds the sink, divides, stores lse, and stores the rows through the queries' memory.
  SK_DEVICE void finish(const AttentionTile& tile, int query0, float (&o)[kDim / 2], const float (&top)[2],
                        float (&sum)[2]) const {
    const AttentionCuda& call = p.forward.call;
    const AttentionPlace at = place_of(call, unknown(tile.sequence));  // recomputed: no registers across the loop
    const int thread = unknown(static_cast<int>(threadIdx.x)) % 128, warp = thread / 32, lane = thread % 32;
    unsigned char* const rows_at = shared + group * 64 * 128;
    constexpr float kToBase2 = kOptions ? kLog2e : 1.0f;  // from `most` to base 2
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
      float most = kOptions || top[r] == -INFINITY ? top[r] : top[r] * p.scale;
      factor[r] = 1;
      if (call.sinks != nullptr) {
        const float sink = call.sinks[tile.head] * (kOptions ? 1.0f : kLog2e), both = fmaxf(most, sink);
        if (both != -INFINITY) {
          factor[r] = exp2f((most - both) * kToBase2);
          sum[r] = fmaf(sum[r], factor[r], exp2f((sink - both) * kToBase2));
          most = both;
        }
      }
      const int query = query0 + 16 * warp + lane / 4 + 8 * r;
      if (sum[r] == 0) sum[r] = 1;  // a row that sees no key: out 0, lse -inf
      if (lane % 4 == 0 && query < at.queries) {
        p.forward.lse[row_number(call, at, tile.head, query)] =
            kOptions ? fmaf(log2f(sum[r]), kLn2, most) : (most + log2f(sum[r])) * kLn2;
      }
      factor[r] *= reciprocal(sum[r]);
      if (kOptions && call.seed != nullptr) factor[r] *= call.keep_scale;
    }
    named_barrier_sync(kGroup + group, 128);  // all have read the queries
    const int row = 16 * warp + lane / 4;
#pragma unroll
    for (int n = 0; n < kDim / 4; ++n) {
      const int chunk = n / 2 % 8, at_row = row + n % 2 * 8;
      *reinterpret_cast<uint32_t*>(rows_at + n / 16 * L::kQueryTile + at_row * 128 + (chunk ^ at_row % 8) * 16 +
                                   lane % 4 * 4) =
          narrow_pair<T>(o[2 * n] * factor[n % 2], o[2 * n + 1] * factor[n % 2]);
    }
    fence_async_shared();
    named_barrier_sync(kGroup + group, 128);
    const int columns = call.value_dim, rows = min(64, at.queries - query0);
    if (rows == 64 || call.query_starts.data == nullptr) {
      if (thread == 0) {
        if (rows > 0) {
          for (int panel = 0; panel * 64 < columns; ++panel) {
            tma_store_4d(p.out, rows_at + panel * L::kQueryTile, 64 * panel, static_cast<int>(at.query_row) + query0,
                         tile.head, static_cast<int>(at.batch));
          }
          bulk_commit();
          bulk_wait_read<0>();
        }
        mbarrier_arrive(&barriers->query_empty);
      }
    } else {
      const int chunks = columns / 8;
      T* out = p.forward.out.template at<T>(at.batch, tile.head, at.query_row + query0);
      for (int n = thread; n < rows * chunks; n += 128) {
        const int r = n / chunks, c = n % chunks;
        *reinterpret_cast<uint4*>(out + r * p.forward.out.row + c * 8) =
            *reinterpret_cast<const uint4*>(rows_at + c / 8 * L::kQueryTile + r * 128 + (c % 8 ^ r % 8) * 16);
      }
      fence_async_shared();
      named_barrier_sync(kGroup + group, 128);
      if (thread == 0) mbarrier_arrive(&barriers->query_empty);
    }
  }
};

// Packed rows of no sequence: out 0, lse -inf.
template <class T>
SK_DEVICE void fill_gaps(const Forward& p, int thread, int threads) {
  const AttentionCuda& call = p.forward.call;
  if (call.query_starts.data == nullptr) return;
  const int64_t first = clamp_row(call.query_starts[0], call.query_rows);
  const int64_t last = clamp_row(call.query_starts[call.sequences], call.query_rows);
  const int64_t rows = first + (call.query_rows - last), chunks = call.value_dim / 8, pieces = call.heads * chunks;
  const int64_t step = int64_t{gridDim.x} * threads;
  for (int64_t n = int64_t{blockIdx.x} * threads + thread; n < rows * pieces; n += step) {
    const int64_t gap = n / pieces, row = gap < first ? gap : last + (gap - first);
    const int64_t head = n % pieces / chunks, chunk = n % chunks;
    *reinterpret_cast<uint4*>(p.forward.out.at<T>(0, head, row) + chunk * 8) = uint4{0, 0, 0, 0};
    if (chunk == 0) p.forward.lse[head * call.query_rows + row] = -INFINITY;
  }
}

template <class T, int kDim, bool kOptions>
__global__ void __launch_bounds__(Layout<kDim, kOptions>::kThreads, 1)
    attention_forward_hopper(const __grid_constant__ Forward p) {
#if SK_HOPPER
  using L = Layout<kDim, kOptions>;
  SK_SHARED_TILES(shared);
  Barriers* barriers = reinterpret_cast<Barriers*>(shared + L::kBarriersAt);
  if (threadIdx.x == 0) {
    mbarrier_init(&barriers->query_full, 1);
    mbarrier_init(&barriers->query_empty, L::kGroups);
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(&barriers->key_full[stage], 1);
      mbarrier_init(&barriers->key_empty[stage], 4 * L::kGroups);
      mbarrier_init(&barriers->value_full[stage], 1);
      mbarrier_init(&barriers->value_empty[stage], 4 * L::kGroups);
    }
    mbarrier_fence_init();
  }
  __syncthreads();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  if (group == 0) {
    set_registers_down<L::kLoadRegisters>();
    if (threadIdx.x == 0) load_tiles<L>(p, shared, barriers);
  } else {
    set_registers_up<L::kRegisters>();
    const int thread = static_cast<int>(threadIdx.x) % 128;
    const Consumer<T, kDim, kOptions> consumer{{}, p, shared, barriers, group - 1, thread, thread % 32};
    unsigned tiles = 0, blocks = 0;
    if (group == L::kGroups) consumer.give_turn();  // the first turn is the first warpgroup's
    for_tiles<L::kRows>(p, [&](const AttentionTile& tile, const AttentionPlace& at, int query0) {
      consumer.tile(tile, at, query0, tiles++, blocks);
    });
    if (group == 1) consumer.wait_turn();
    fill_gaps<T>(p, thread + 128 * (group - 1), 128 * L::kGroups);
  }
#endif
}

}  // namespace attention_hopper
}  // namespace seqkern
