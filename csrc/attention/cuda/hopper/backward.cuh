// The backward pass of attention for compute capability 9.0, head dimensions up to 128: bfloat16 and float16, the
// equations of kernels/attention/attention.py without options on the scores. Larger ones:
// backward_wide.cuh.
//
// The idea (FlashAttention-3: Shah et al. 2024). A thread block owns a block of keys, each of its warpgroups 64 of them
// with dK and dV in registers. It walks the queries that see the keys, 64 at a time, of all heads that share them.
// Products are transposed, so that what becomes an operand already has an operand's register layout:
//
//     S^T = K Q^T    P^T = 2^(c S^T - lse)            c = scale log2(e), lse in base 2
//     dP^T = V dO^T  dS^T = P^T (dP^T - delta)        delta = rows' sum of dO O, less dlse
//     dV += P^T dO   dK += dS^T Q                     P^T and dS^T from registers
//     dQ = dS K                                       dS from shared memory, over the keys of all warpgroups
//
// A kernel before this one computes lse and delta of every query (lse is +inf for a row that sees nothing, so that it
// contributes 0). A producer warp loads queries and dO by TMA into a ring of two stages, another one lse and delta.
//
// dQ belongs to no block. Its float32 sums are in a workspace, one contiguous tile for 64 queries, in register order. A
// block adds its share by one bulk addition from shared memory, in a fixed order: blocks of later keys first. A counter
// for each tile says how many blocks have added; a block waits for its turn. Blocks take their keys in the same order,
// by a ticket, so a block that others wait for has started. Under a causal mask it has even passed by: later keys start
// with later queries (shortest first). Without a mask the blocks of a head would start one step after the other, the
// last of n idle for n - 1 steps. So where all blocks of a call are resident at once (a cooperative launch), they start
// with different queries and add in the order in which they pass; a call of more blocks fills the GPU without that. The
// same bits every run, whatever the schedule. A last kernel scales dQ and rounds it.
//
// Overlap: P is computed during dP^T, dS during dV; the barrier before dQ, and the staging of dQ, during dK and the
// next S^T. Two writer warps alternate: one's sums are in flight while the other waits for its turn. At D 128 the two
// warpgroups compute 64 columns of dQ each. At D 64 three warpgroups take turns, because 64 columns divided by three is
// no shape for a product.
//
// Rows after a sequence or a length may be NaN: see Producer. Keys that nobody sees get zeros.
//
//                keys x queries   warpgroups   registers    shared memory
//       D  64       192 x 64          3        160 and 32      148 672
//       D 128       128 x 64          2        240 and 24      197 824
//
// FLOP: 10 D a visible pair. NOTES.md has the limits of shared memory and L2, and what was tried.
#pragma once

#include "backward_parts.cuh"

namespace seqkern {
namespace attention_backward_hopper {

// Named barriers. kSumsFull: one for each writer warp.
constexpr int kScoresWritten = 1, kSumsFull = 2, kSumsEmpty = 4;

// Tiles and their offsets in shared memory.
template <int kDim>
struct Layout {
  // Warpgroups take turns at a whole dQ tile, where its 64 columns are too few to share.
  static constexpr bool kTurns = kDim == 64;
  static constexpr int kConsumers = kTurns ? 3 : 2;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  static constexpr int kProducerRegisters = kTurns ? 32 : 24, kConsumerRegisters = kTurns ? 160 : 240;
  static constexpr int kKeys = kConsumers * 64, kQueries = 64;
  static constexpr int kColumns = kDim / 64;
  static constexpr int kWriterThreads = kColumns * kWarpgroup + 32;
  static constexpr int kKeyTile = kKeys * kTileRow, kQueryTile = kQueries * kTileRow;  // bytes of 64 columns
  static constexpr int kKeyBytes = kColumns * kKeyTile, kQueryBytes = kColumns * kQueryTile;
  static constexpr int kScoreBytes = kKeyTile;  // rows of keys, 64 queries each
  static constexpr int kSumBytes = kQueries * kDim * 4, kSumFloats = kQueries * kDim;

  static constexpr int kKey = 0, kValue = kKeyBytes, kQuery = kValue + kKeyBytes;
  static constexpr int kGradOut = kQuery + kStages * kQueryBytes, kScores = kGradOut + kStages * kQueryBytes;
  static constexpr int kSums = kScores + 2 * kScoreBytes, kStatistics = kSums + kSumBytes;
  static constexpr int kBarriers = kStatistics + kStages * 2 * kQueries * 4, kWork = kBarriers + 8 * 8;
  static constexpr int kBytes = kWork + kWorkBytes;
};

// ---- writer warps: sums of dQ --------------------------------------------------------------------------------------

// Adds the block's share of dQ in its turn: blocks of later keys first. Two warps alternate between blocks of queries:
// while the sums of one are still on their way to memory, the other sends the next.
template <int kDim>
SK_DEVICE void write_sums(const Backward& p, const Work& w, const unsigned char* shared, int writer, int lane) {
  using L = Layout<kDim>;
  const int total = w.group * w.visits.count;
  int64_t slot = w.slot;
  int n = w.start;
#pragma unroll 1
  for (int done = 0; done < total; ++done) {
    if (done % 2 == writer) {
      uint32_t* turns = p.turns + slot + n;
      if (lane == 0) {
        const uint32_t turn = p.apart
                                  ? static_cast<uint32_t>(w.rotation.turn(n, w.visits.count))
                                  : turn_of<L::kQueries, L::kKeys>(w.at, (w.visits.first + n) * L::kQueries, w.key0);
        while (load_acquire(turns) < turn) pause();
      }
      __syncwarp();
      named_barrier_sync(kSumsFull + writer, L::kWriterThreads);
      if (lane == 0) {
        fence_async_global();
        bulk_reduce_add_f32(p.sums + (slot + n) * L::kSumFloats, shared + L::kSums, L::kSumBytes);
        bulk_commit();
        bulk_wait_read<0>();
      }
      __syncwarp();
      if (done + 1 < total) named_barrier_arrive(kSumsEmpty, L::kWriterThreads);
      if (lane == 0) {
        bulk_wait<0>();
        fence_async_global();
        add_release(turns, 1);
      }
      __syncwarp();
    }
    if (++n == w.visits.count) n = 0;
    if (n == w.start) slot += p.slots;
  }
}

// Stages a warpgroup's 64 x 64 sums of dQ for the writer, in register order, which only convert_kernel has to know.
template <class L>
SK_DEVICE void stage_sums(unsigned char* shared, const float (&dq)[32], int part, int writer, int thread) {
  float4* sums = reinterpret_cast<float4*>(shared + L::kSums) + part * 8 * kWarpgroup + thread;
#pragma unroll
  for (int i = 0; i < 8; ++i) sums[i * kWarpgroup] = {dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
  fence_async_shared();
  named_barrier_arrive(kSumsFull + writer, L::kWriterThreads);
}

// ---- products ------------------------------------------------------------------------------------------------------

// A warpgroup's 64 keys with all queries that see them.
template <class T, int kDim>
SK_DEVICE void consume(const Backward& p, const Work& w, unsigned char* shared, int group, int thread) {
  using L = Layout<kDim>;
  constexpr int kQueries = L::kQueries, kSteps = kQueries / 16;
  const Barriers barriers(shared + L::kBarriers);
  const AttentionPlace& at = w.at;
  const unsigned char *key = shared + L::kKey + group * 64 * kTileRow,
                      *value = shared + L::kValue + group * 64 * kTileRow;
  const int row = group * 64 + thread / 32 * 16 + thread % 32 / 4;
  const float scale = p.call.scale * kLog2e;

  float dk[kDim / 2], dv[kDim / 2], s[32], dp[32], dq[32];
  uint32_t probability[kSteps][4], gradient[kSteps][4];
#pragma unroll
  for (int n = 0; n < kDim / 2; ++n) dk[n] = dv[n] = 0;
  wgmma_pin(dk);
  wgmma_pin(dv);
  mbarrier_wait(barriers.keys, 0);
  const int total = w.group * w.visits.count;
  Ring ring;
  mbarrier_wait(barriers.full, 0);
  wgmma_fence();
  product_of_rows<T, kQueries, kDim / 16>(s, key, L::kKeyTile, shared + L::kQuery, L::kQueryTile);
  wgmma_commit();
  wgmma_wait<0>();
  int done = 0, n = w.start, turn = 0;
  do {
    const int query0 = (w.visits.first + n) * kQueries;
    const unsigned char *query = shared + L::kQuery + ring.stage * L::kQueryBytes,
                        *grad_out = shared + L::kGradOut + ring.stage * L::kQueryBytes;
    const float* statistics = reinterpret_cast<const float*>(shared + L::kStatistics) + ring.stage * 2 * kQueries;
    unsigned char* scores = shared + L::kScores + done % 2 * L::kScoreBytes;
    wgmma_fence();
    product_of_rows<T, kQueries, kDim / 16>(dp, value, L::kKeyTile, grad_out, L::kQueryTile);
    wgmma_commit();
    wgmma_pin(s);
    const bool masked = query0 < w.visits.full || query0 >= w.visits.edge;
    probabilities<kQueries>(s, at, statistics, scale, w.key0 + group * 64, query0, masked, thread);
    if constexpr (!L::kTurns) {
      as_operand<T, kQueries>(probability, s);
      wgmma_fence();
      add_product<T, kDim, kSteps>(dv, probability, grad_out, L::kQueryTile);
      wgmma_commit();
      wgmma_wait<1>();
    } else {  // few registers: P becomes an operand only after dS, its last other use
      wgmma_wait<0>();
    }
    wgmma_pin(dp);
    score_gradients<kQueries>(dp, s, statistics + kQueries, thread);
    as_operand<T, kQueries>(gradient, dp);
#pragma unroll
    for (int k = 0; k < 2 * kSteps; ++k) {  // eight queries: one chunk
      unsigned char* to = scores + row * kTileRow + (k ^ row % 8) * 16 + thread % 4 * 4;
      *reinterpret_cast<uint32_t*>(to) = gradient[k / 2][k % 2 * 2];
      *reinterpret_cast<uint32_t*>(to + 8 * kTileRow) = gradient[k / 2][k % 2 * 2 + 1];
    }
    fence_async_shared();
    if constexpr (L::kTurns) as_operand<T, kQueries>(probability, s);
    wgmma_fence();
    if constexpr (L::kTurns) add_product<T, kDim, kSteps>(dv, probability, grad_out, L::kQueryTile);
    add_product<T, kDim, kSteps>(dk, gradient, query, L::kQueryTile);
    wgmma_commit();
    named_barrier_sync(kScoresWritten, L::kConsumers * kWarpgroup);

    const bool last = ++done == total;
    // Issues the next scores. After the last queries it repeats theirs: a branch here would end the overlap of the
    // products.
    const auto issue_next_scores = [&] {
      if (thread % 32 == 0) mbarrier_arrive(barriers.empty + ring.stage);
      if (!last) {
        ring.next();
        mbarrier_wait(barriers.full + ring.stage, ring.phase);
      }
      wgmma_fence();
      product_of_rows<T, kQueries, kDim / 16>(s, key, L::kKeyTile, shared + L::kQuery + ring.stage * L::kQueryBytes,
                                              L::kQueryTile);
      wgmma_commit();
    };
    if (!L::kTurns || group == turn) {
      wgmma_fence();
      product_of_columns<T, 64, L::kKeys / 16>(dq, scores, shared + L::kKey + (L::kTurns ? 0 : group * L::kKeyTile),
                                               L::kKeyTile);
      wgmma_commit();
      wgmma_wait<1>();
      issue_next_scores();
      wgmma_wait<1>();
      wgmma_pin(dq);
      if (done > 1) named_barrier_sync(kSumsEmpty, L::kWriterThreads);
      stage_sums<L>(shared, dq, L::kTurns ? 0 : group, (done - 1) % 2, thread);
      wgmma_wait<0>();
    } else {
      wgmma_wait<0>();
      issue_next_scores();
      wgmma_wait<0>();
    }
    n = n + 1 == w.visits.count ? 0 : n + 1;
    turn = turn + 1 == L::kConsumers ? 0 : turn + 1;
  } while (done < total);
  wgmma_pin(dk);
  wgmma_pin(dv);
  const int row0 = w.key0 + group * 64;
  store_sums<T, kDim>(dk, p.grad_key, at.batch, w.kv_head, at.key_row, row0, at.key_rows, p.call.head_dim, p.call.scale,
                      thread);
  store_sums<T, kDim>(dv, p.grad_value, at.batch, w.kv_head, at.key_row, row0, at.key_rows, p.call.value_dim, 1.0f,
                      thread);
}

// ---- kernels -------------------------------------------------------------------------------------------------------

template <class T, int kDim>
__global__ __launch_bounds__(Layout<kDim>::kThreads, 1) void backward_kernel(const __grid_constant__ Maps maps,
                                                                             const Backward p) {
#if SK_HOPPER
  using L = Layout<kDim>;
  SK_SHARED_TILES(shared);
  const int thread = static_cast<int>(threadIdx.x), group = __shfl_sync(~0u, thread / kWarpgroup, 0);
  const Work& w = *reinterpret_cast<const Work*>(shared + L::kWork);
  if (thread == 0) set_up<L>(p, shared, p.order.at(add_release(p.ticket, 1)), L::kConsumers * 4);
  __syncthreads();
  if (nobody_sees<T, L>(p, w, thread, L::kThreads)) return;
  if (group == 0) {
    set_registers_down<L::kProducerRegisters>();
    const int warp = __shfl_sync(~0u, thread / 32, 0), lane = thread % 32;
    if (warp == 0) {
      produce<L>(p, w, shared, maps, lane);
    } else if (warp == 1) {
      produce_statistics<L>(p, w, shared, lane);
    } else {
      write_sums<kDim>(p, w, shared, warp - 2, lane);
    }
  } else {
    set_registers_up<L::kConsumerRegisters>();
    consume<T, kDim>(p, w, shared, group - 1, thread % kWarpgroup);
  }
#endif
}

// Converts the sums of dQ, in the order the warpgroups wrote, to its dtype.
template <class T, int kDim>
__global__ __launch_bounds__(kPlainThreads) void convert_kernel(const Backward p) {
#if SK_HOPPER
  using L = Layout<kDim>;
  const TileOf tile = tile_of(p, L::kQueries);
  const AttentionPlace at = place_of(p.call, tile.sequence);
  const int query0 = tile.block * L::kQueries;
  if (query0 >= at.queries) return;
  const int64_t slot = tile.head * p.slots + first_slot<L::kQueries>(p, at, tile.sequence) + tile.block;
  const float4* sums = reinterpret_cast<const float4*>(p.sums + slot * L::kSumFloats);
  // Two rows, g and g + 8 of a warp's 16, and eight columns: what four lanes hold.
  for (int n = static_cast<int>(threadIdx.x); n < L::kSumFloats / 16; n += kPlainThreads) {
    const int block = n % 8, quad = n / 8 % 32, group = n / 256;
    const int row = query0 + quad / 8 * 16 + quad % 8;
    const int column = group * 64 + block * 8;
    if (row >= at.queries || column >= p.call.head_dim) continue;
    uint4 upper, lower;
    uint32_t* words[2] = {&upper.x, &lower.x};
#pragma unroll
    for (int lane = 0; lane < 4; ++lane) {
      const float4 v = sums[(group * 8 + block) * kWarpgroup + quad * 4 + lane];
      words[0][lane] = narrow_pair<T>(v.x * p.call.scale, v.y * p.call.scale);
      words[1][lane] = narrow_pair<T>(v.z * p.call.scale, v.w * p.call.scale);
    }
    T* to = p.grad_query.at<T>(at.batch, tile.head, at.query_row + row) + column;
    *reinterpret_cast<uint4*>(to) = upper;
    if (row + 8 < at.queries) {
      *reinterpret_cast<uint4*>(p.grad_query.at<T>(at.batch, tile.head, at.query_row + row + 8) + column) = lower;
    }
  }
#endif
}

}  // namespace attention_backward_hopper
}  // namespace seqkern
