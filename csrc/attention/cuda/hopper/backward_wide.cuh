// The backward pass of attention for compute capability 9.0, head dimensions above 128, up to 256: two kernels, each of
// which owns what it writes. Equations: backward.cuh.
//
// Why two kernels. dK and dV of 64 keys are 32768 float32, half of a multiprocessor's registers, so a block cannot have
// more keys. One kernel would be bound by L2: five products, 2560 tensor core cycles for 64 keys and 64 queries, in
// which it would read 64 KiB of Q and dO and add 64 KiB of dQ in float32. That is 25 bytes a cycle and multiprocessor
// each way, where L2 gives some 25 in all (an estimate: 5.5 TB/s at 1.7 GHz), and the additions would have to take
// turns. Two kernels compute seven products (S and dP twice), with no sums in memory and no turns:
//
//     dK, dV: 64 keys x 64 queries    2048 cycles, 64 KiB read (32 bytes a cycle), shared memory 2176 cycles
//     dQ:     128 queries x 64 keys   3072 cycles, 64 KiB read (21 bytes a cycle), shared memory 3072 cycles
//
// Together 7168 cycles for 128 queries and 64 keys, against 5120 that L2 would stretch to 10240.
//
// dK, dV. Two warpgroups divide the products, not the rows: one computes S^T, P^T and dV, the other dP^T, dS^T and dK.
// Each has two products and 128 registers of sums. P^T passes from the first to the second through shared memory in
// float32, in register order, in two buffers. Both issue their next scores before they wait for their sums.
//
// dQ. Two warpgroups of 64 queries each. Q and dO stay in shared memory; K and V stream through three slots of 64 rows.
//
// Shared memory: 230 592 and 229 440 bytes. Registers: 240 for consumer threads, 24 for the others. NOTES.md lists what
// was tried.
#pragma once

#include "backward_parts.cuh"

namespace seqkern {
namespace attention_backward_hopper {

constexpr int kWideThreads = 3 * kWarpgroup;
constexpr int kWideProducerRegisters = 24, kWideConsumerRegisters = 240;

// ---- dK and dV -----------------------------------------------------------------------------------------------------

// Named barriers; one of each kind for each of the two buffers of probabilities.
constexpr int kProbabilitiesFull = 1, kProbabilitiesEmpty = 3;

struct WideKeys {
  static constexpr int kKeys = 64, kQueries = 64, kColumns = 4;
  static constexpr int kTile = 64 * kTileRow, kMatrix = kColumns * kTile;  // bytes
  static constexpr int kQueryBytes = kMatrix;

  static constexpr int kKey = 0, kValue = kMatrix, kQuery = 2 * kMatrix, kGradOut = kQuery + kStages * kMatrix;
  static constexpr int kProbabilities = kGradOut + kStages * kMatrix, kProbabilityBytes = kKeys * kQueries * 4;
  static constexpr int kStatistics = kProbabilities + 2 * kProbabilityBytes;
  static constexpr int kBarriers = kStatistics + kStages * 2 * kQueries * 4, kWork = kBarriers + 8 * 8;
  static constexpr int kBytes = kWork + kWorkBytes;
};

// One warpgroup computes S^T, P^T and dV; the other dP^T, dS^T (with the first one's P^T) and dK. The scores of the
// next queries are issued before waiting for the sums.
template <class T, bool kValues>
SK_DEVICE void consume_wide(const Backward& p, const Work& w, unsigned char* shared, int thread) {
  using L = WideKeys;
  constexpr int kSteps = L::kQueries / 16;
  const Barriers barriers(shared + L::kBarriers);
  const unsigned char* stationary = shared + (kValues ? L::kKey : L::kValue);
  const auto streamed = [&](int stage) { return shared + (kValues ? L::kQuery : L::kGradOut) + stage * L::kMatrix; };
  const auto summed = [&](int stage) { return shared + (kValues ? L::kGradOut : L::kQuery) + stage * L::kMatrix; };
  const float scale = p.call.scale * kLog2e;
  const int total = w.group * w.visits.count;

  float sums[128], s[32];
  uint32_t operand[kSteps][4];
#pragma unroll
  for (int n = 0; n < 128; ++n) sums[n] = 0;
  wgmma_pin(sums);
  mbarrier_wait(barriers.keys, 0);
  mbarrier_wait(barriers.full, 0);
  wgmma_fence();
  product_of_rows<T, 64, 16>(s, stationary, L::kTile, streamed(0), L::kTile);
  wgmma_commit();
  wgmma_wait<0>();
  Ring ring;
  int done = 0, n = 0;
  while (true) {
    wgmma_pin(s);
    const float* statistics = reinterpret_cast<const float*>(shared + L::kStatistics) + ring.stage * 2 * L::kQueries;
    float4* exchange =
        reinterpret_cast<float4*>(shared + L::kProbabilities + ring.stage * L::kProbabilityBytes) + thread;
    if constexpr (kValues) {
      const int query0 = (w.visits.first + n) * L::kQueries;
      const bool masked = query0 < w.visits.full || query0 >= w.visits.edge;
      probabilities<L::kQueries>(s, w.at, statistics, scale, w.key0, query0, masked, thread);
      if (done >= 2) named_barrier_sync(kProbabilitiesEmpty + ring.stage, 2 * kWarpgroup);
#pragma unroll
      for (int i = 0; i < 8; ++i) exchange[i * kWarpgroup] = {s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]};
      named_barrier_arrive(kProbabilitiesFull + ring.stage, 2 * kWarpgroup);
    } else {
      named_barrier_sync(kProbabilitiesFull + ring.stage, 2 * kWarpgroup);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 v = exchange[i * kWarpgroup];
        const float2 d = *reinterpret_cast<const float2*>(statistics + L::kQueries + i * 8 + thread % 4 * 2);
        s[4 * i] = v.x * (s[4 * i] - d.x);
        s[4 * i + 1] = v.y * (s[4 * i + 1] - d.y);
        s[4 * i + 2] = v.z * (s[4 * i + 2] - d.x);
        s[4 * i + 3] = v.w * (s[4 * i + 3] - d.y);
      }
      if (done + 2 < total) named_barrier_arrive(kProbabilitiesEmpty + ring.stage, 2 * kWarpgroup);
    }
    wgmma_wait<0>();  // the previous queries' sums
    if (done > 0 && thread % 32 == 0) mbarrier_arrive(barriers.empty + (ring.stage ^ 1));
    as_operand<T, L::kQueries>(operand, s);
    const unsigned char* right = summed(ring.stage);
    if (++done == total) {
      wgmma_fence();
      add_product<T, 256, kSteps>(sums, operand, right, L::kTile);
      wgmma_commit();
      break;
    }
    ring.next();
    n = n + 1 == w.visits.count ? 0 : n + 1;
    mbarrier_wait(barriers.full + ring.stage, ring.phase);
    wgmma_fence();
    product_of_rows<T, 64, 16>(s, stationary, L::kTile, streamed(ring.stage), L::kTile);
    wgmma_commit();
    add_product<T, 256, kSteps>(sums, operand, right, L::kTile);
    wgmma_commit();
    wgmma_wait<1>();
  }
  wgmma_wait<0>();
  wgmma_pin(sums);
  store_sums<T, 256>(sums, kValues ? p.grad_value : p.grad_key, w.at.batch, w.kv_head, w.at.key_row, w.key0,
                     w.at.key_rows, kValues ? p.call.value_dim : p.call.head_dim, kValues ? 1.0f : p.call.scale,
                     thread);
}

template <class T>
__global__ __launch_bounds__(kWideThreads, 1) void wide_keys_kernel(const __grid_constant__ Maps maps,
                                                                    const Backward p) {
#if SK_HOPPER
  using L = WideKeys;
  SK_SHARED_TILES(shared);
  const int thread = static_cast<int>(threadIdx.x), group = __shfl_sync(~0u, thread / kWarpgroup, 0);
  const Work& w = *reinterpret_cast<const Work*>(shared + L::kWork);
  if (thread == 0) set_up<L>(p, shared, p.order.at(blockIdx.x), 8);
  __syncthreads();
  if (nobody_sees<T, L>(p, w, thread, kWideThreads)) return;
  if (group == 0) {
    set_registers_down<kWideProducerRegisters>();
    if (thread < 32) {
      produce<L>(p, w, shared, maps, thread);
    } else if (thread < 64) {
      produce_statistics<L>(p, w, shared, thread - 32);
    }
  } else {
    set_registers_up<kWideConsumerRegisters>();
    if (group == 1) {
      consume_wide<T, true>(p, w, shared, thread % kWarpgroup);
    } else {
      consume_wide<T, false>(p, w, shared, thread % kWarpgroup);
    }
  }
#endif
}

// ---- dQ ------------------------------------------------------------------------------------------------------------

struct WideQueries {
  static constexpr int kKeys = 64, kQueries = 128, kColumns = 4, kSlots = 3;
  static constexpr int kKeyTile = kKeys * kTileRow, kQueryTile = kQueries * kTileRow;  // bytes
  static constexpr int kKeyBytes = kColumns * kKeyTile, kQueryBytes = kColumns * kQueryTile;

  static constexpr int kQuery = 0, kGradOut = kQueryBytes, kRing = 2 * kQueryBytes;
  static constexpr int kBarriers = kRing + kSlots * kKeyBytes, kBytes = kBarriers + 8 * 8;
};

// What all threads of a block of queries know.
struct WideQueryWork {
  AttentionPlace at;
  AttentionRange range;
  int sequence, head, query0, blocks;
};

// Three slots in rotation, used by a block of values, then its keys, and so on. Values are released before their keys,
// which are also a factor of dQ.
struct Slots {
  int slot = 0;
  unsigned phase = 0;
  SK_DEVICE void next() {
    if (++slot == WideQueries::kSlots) slot = 0, phase ^= 1;
  }
};

SK_DEVICE void produce_wide(const Backward& p, const WideQueryWork& w, unsigned char* shared, const Maps& maps,
                            int lane) {
  using L = WideQueries;
  uint64_t* barriers = reinterpret_cast<uint64_t*>(shared + L::kBarriers);
  uint64_t *full = barriers + 2, *empty = full + L::kSlots;
  if (lane == 0) {  // other sequences' rows only affect rows of dQ that are not stored
    mbarrier_arrive_expect(barriers, 2 * L::kQueryBytes);
#pragma unroll 1
    for (int n = 0; n < 2 * L::kColumns; ++n) {
      const int column = n / 2, half = n % 2;
      const int row = static_cast<int>(w.at.query_row) + w.query0 + half * 64;
      const int at = column * L::kQueryTile + half * 64 * kTileRow, batch = static_cast<int>(w.at.batch);
      tma_load_4d(shared + L::kQuery + at, maps.query, barriers, column * 64, row, w.head, batch);
      tma_load_4d(shared + L::kGradOut + at, maps.grad_out, barriers, column * 64, row, w.head, batch);
    }
  }
  __syncwarp();
  Producer producer{barriers + 1, lane};
  Slots ring;
  const int kv_head = w.head / (p.call.heads / p.call.kv_heads);
#pragma unroll 1
  for (int n = 0; n < 2 * w.blocks; ++n) {
    const int key0 = w.range.first + n / 2 * L::kKeys;
    mbarrier_wait(empty + ring.slot, ring.phase ^ 1);
    producer.load<L::kKeys, L::kColumns>(shared + L::kRing + ring.slot * L::kKeyBytes,
                                         n % 2 == 0 ? maps.value : maps.key, full + ring.slot, w.at.key_row + key0,
                                         w.at.keys - key0, p.call.key_rows, kv_head, w.at.batch);
    ring.next();
  }
}

template <class T>
SK_DEVICE void consume_wide_queries(const Backward& p, const WideQueryWork& w, unsigned char* shared, int group,
                                    int thread) {
  using L = WideQueries;
  uint64_t* barriers = reinterpret_cast<uint64_t*>(shared + L::kBarriers);
  uint64_t *full = barriers + 2, *empty = full + L::kSlots;
  const unsigned char *query = shared + L::kQuery + group * 64 * kTileRow,
                      *grad_out = shared + L::kGradOut + group * 64 * kTileRow;
  const float scale = p.call.scale * kLog2e;
  const int query0 = w.query0 + group * 64, row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
  float lse[2] = {INFINITY, INFINITY}, delta[2] = {0, 0};
  if (query0 < w.at.queries) {  // the tile of 64 exists
    const int64_t slot = w.head * p.slots + first_slot<64>(p, w.at, w.sequence) + query0 / 64;
    const float* statistics = p.statistics + slot * 128 + row;
    lse[0] = statistics[0], lse[1] = statistics[8], delta[0] = statistics[64], delta[1] = statistics[72];
  }

  float dq[128], s[32], dp[32];
  uint32_t operand[4][4];
#pragma unroll
  for (int n = 0; n < 128; ++n) dq[n] = 0;
  wgmma_pin(dq);
  mbarrier_wait(barriers, 0);
  Slots ring;
  for (int done = 0, key0 = w.range.first; done < w.blocks; ++done, key0 += L::kKeys) {
    const Slots value = ring;
    ring.next();
    const Slots key = ring;
    ring.next();
    const unsigned char *values = shared + L::kRing + value.slot * L::kKeyBytes,
                        *keys = shared + L::kRing + key.slot * L::kKeyBytes;
    mbarrier_wait(full + key.slot, key.phase);
    wgmma_fence();
    product_of_rows<T, 64, 16>(s, query, L::kQueryTile, keys, L::kKeyTile);
    wgmma_commit();
    mbarrier_wait(full + value.slot, value.phase);
    wgmma_fence();
    product_of_rows<T, 64, 16>(dp, grad_out, L::kQueryTile, values, L::kKeyTile);
    wgmma_commit();
    wgmma_wait<1>();  // also completes the previous keys' dQ
    wgmma_pin(s);
    if (done > 0 && thread % 32 == 0) mbarrier_arrive(empty + (value.slot == 0 ? L::kSlots : value.slot) - 1);
    if (key0 < w.range.full || key0 >= w.range.edge) {
      const Seen seen[2] = {seen_of_query(w.at, query0 + row), seen_of_query(w.at, query0 + row + 8)};
#pragma unroll
      for (int n = 0; n < 32; ++n) s[n] = seen[n % 4 / 2].holds(key0 + n / 4 * 8 + column + n % 2) ? s[n] : -INFINITY;
    }
#pragma unroll
    for (int n = 0; n < 32; ++n) s[n] = power_of_two(fmaf(s[n], scale, -lse[n % 4 / 2]));
    wgmma_wait<0>();
    wgmma_pin(dp);
    if (thread % 32 == 0) mbarrier_arrive(empty + value.slot);
#pragma unroll
    for (int n = 0; n < 32; ++n) dp[n] = s[n] * (dp[n] - delta[n % 4 / 2]);
    as_operand<T, 64>(operand, dp);
    wgmma_fence();
    add_product<T, 256, 4>(dq, operand, keys, L::kKeyTile);
    wgmma_commit();
  }
  wgmma_wait<0>();
  wgmma_pin(dq);
  store_sums<T, 256>(dq, p.grad_query, w.at.batch, w.head, w.at.query_row, query0, w.at.queries, p.call.head_dim,
                     p.call.scale, thread);
}

template <class T>
__global__ __launch_bounds__(kWideThreads, 1) void wide_queries_kernel(const __grid_constant__ Maps maps,
                                                                       const Backward p) {
#if SK_HOPPER
  using L = WideQueries;
  SK_SHARED_TILES(shared);
  const int thread = static_cast<int>(threadIdx.x), group = __shfl_sync(~0u, thread / kWarpgroup, 0);
  const AttentionTile tile = p.order.at(blockIdx.x);
  WideQueryWork w{place_of(p.call, tile.sequence), {}, tile.sequence, tile.head, tile.block * L::kQueries, 0};
  if (w.query0 >= w.at.queries) return;
  w.range = key_range(w.at, w.query0, L::kQueries, L::kKeys);
  if (w.range.last > w.range.first) w.blocks = blocks_of(w.range.last - w.range.first, L::kKeys);
  if (w.blocks == 0) {
    store_zeros<T>(p.grad_query, w.at.batch, w.head, w.at.query_row + w.query0,
                   min(L::kQueries, w.at.queries - w.query0), p.call.head_dim, thread, kWideThreads);
    return;
  }
  if (thread == 0) {
    uint64_t* barriers = reinterpret_cast<uint64_t*>(shared + L::kBarriers);
    mbarrier_init(barriers, 1);
    mbarrier_init(barriers + 1, 1);
    for (int i = 0; i < L::kSlots; ++i) {
      mbarrier_init(barriers + 2 + i, 1);
      mbarrier_init(barriers + 2 + L::kSlots + i, 8);
    }
    mbarrier_fence_init();
  }
  __syncthreads();
  if (group == 0) {
    set_registers_down<kWideProducerRegisters>();
    if (thread < 32) produce_wide(p, w, shared, maps, thread);
  } else {
    set_registers_up<kWideConsumerRegisters>();
    consume_wide_queries<T>(p, w, shared, group - 1, thread % kWarpgroup);
  }
#endif
}

}  // namespace attention_backward_hopper
}  // namespace seqkern
