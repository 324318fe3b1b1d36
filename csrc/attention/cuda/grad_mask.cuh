// The gradient of an additive mask that sequences or heads share: the sum of dz over the sharers. A block owns a tile
// of the mask and walks the sharers in order, recomputing two products each. No two blocks add to the same memory.
//
// Eight warps have kMaskRows x kMaskRows scores, 16 x 32 each. The products go through a ring of two slots in slices of
// 64 columns of the head dim, so one instance serves every head dim: S in the slices of D, dP in those of Dv. 48
// registers of accumulators (S, dP and the mask's gradient).
//
// A tile costs the same for every sharer that sees it, and only zeros if none does. Under a causal mask the last
// queries have most visible tiles: rows of tiles start from there, and the tiles of a row, which share queries, are
// adjacent. NOTES.md has the balance.
#pragma once

#include "backward.cuh"
#include "schedule.cuh"

namespace seqkern {
namespace attention_grad {

constexpr int kMaskRows = 64, kMaskSlice = 64;
template <class T>
constexpr int kMaskBytes = 2 * 2 * Tile<T, kMaskSlice>::bytes(kMaskRows);

// tile.sequence: index of the mask, over its sequences and heads; tile.head: block of keys; tile.block: block of
// queries.
template <class T>
SK_DEVICE void grad_mask_tile(const AttentionBackwardCuda& p, const AttentionTile& tile, unsigned char* memory) {
  constexpr int N = 4, kTile = Tile<T, kMaskSlice>::bytes(kMaskRows);
  const AttentionCuda& call = p.call;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int64_t owner = tile.sequence;
  const int query0 = tile.block * kMaskRows, key0 = tile.head * kMaskRows;
  const int sequences = p.mask_sequences == 1 ? call.sequences : 1, heads = p.mask_heads == 1 ? call.heads : 1;
  const int s0 = static_cast<int>(owner / p.mask_heads), h0 = static_cast<int>(owner % p.mask_heads);
  const int row = warp % 4 * 16, column = warp / 4 * 32;
  const int D = call.head_dim, DV = call.value_dim, slices = ceil_div(D, kMaskSlice);
  const int all_slices = slices + ceil_div(DV, kMaskSlice);
  const uint64_t seed = call.seed != nullptr ? static_cast<uint64_t>(*call.seed) : 0;
  float sums[N][4] = {};

#pragma unroll 1
  for (int sharer = 0; sharer < sequences * heads; ++sharer) {
    const int s = s0 + sharer / heads, h = h0 + sharer % heads, hk = h / (call.heads / call.kv_heads);
    const AttentionPlace at = place_of(call, s);
    const Seen seen = seen_of(at, query0, min(kMaskRows, at.queries - query0), key0, kMaskRows);
    if (!seen.any) continue;
    const int64_t row0 = at.query_row + query0, key_row0 = at.key_row + key0;
    const auto load = [&](int slice, int place) {
      unsigned char* to = memory + place * 2 * kTile;
      const bool of_scores = slice < slices;
      const int from = (of_scores ? slice : slice - slices) * kMaskSlice;
      const AttentionTensor &left = of_scores ? call.query : p.grad_out, &right = of_scores ? call.key : call.value;
      const int width = min(kMaskSlice, (of_scores ? D : DV) - from);
      load_rows<T, kMaskSlice>(to, kMaskRows, left.at<T>(at.batch, h, row0) + from, left.row, at.queries - query0,
                               width, call.vectors);
      load_rows<T, kMaskSlice>(to + kTile, kMaskRows, right.at<T>(at.batch, hk, key_row0) + from, right.row,
                               at.keys - key0, width, call.vectors);
      cp_async_commit();
    };
    __syncthreads();  // the previous sharer's tiles have been read
    load(0, 0);
    float score[1][N][4], grad[1][N][4];
    clear(score);
    clear(grad);
#pragma unroll 1
    for (int slice = 0; slice < all_slices; ++slice) {
      cp_async_wait<0>();
      __syncthreads();
      if (slice + 1 < all_slices) load(slice + 1, (slice + 1) % 2);
      const unsigned char *left = memory + slice % 2 * 2 * kTile, *right = left + kTile;
      if (slice < slices) {
        add_scores<T, kMaskSlice>(score, left, row, right, column, min(kMaskSlice, D - slice * kMaskSlice), call.tf32,
                                  lane);
      } else {
        add_scores<T, kMaskSlice>(grad, left, row, right, column, min(kMaskSlice, DV - (slice - slices) * kMaskSlice),
                                  call.tf32, lane);
      }
    }
    const AttentionHead head = head_of(call, s, h);
    const int64_t number0 = row_number(call, at, h, query0);
    float lse[2], delta[2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int r = row + 8 * m + g;
      const bool there = query0 + r < at.queries;
      lse[m] = exponent_lse<true>(there ? p.lse[number0 + r] : -INFINITY);
      delta[m] = there ? p.delta[number0 + r] : 0;
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      uint32_t words[4];
      if (call.seed != nullptr) words_of_queries(words, seed, number0 + row, key0 + column + 8 * n, lane);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = query0 + row + e / 2 * 8 + g, j = key0 + column + 8 * n + 2 * q + e % 2;
        float bent, grad_p = grad[0][n][e];
        const float probable = probability<true>(call, head, at, score[0][n][e], lse[e / 2], 0, i, j, seen.all, &bent);
        if (call.seed != nullptr) grad_p = words[e] >= call.threshold ? grad_p * call.keep_scale : 0;
        sums[n][e] += probable * (grad_p - delta[e / 2]);
      }
    }
  }

#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = query0 + row + e / 2 * 8 + g, j = key0 + column + 8 * n + 2 * q + e % 2;
      if (i < call.max_queries && j < call.max_keys)
        store_mask(p.grad_mask, call.mask_type, (owner * call.max_queries + i) * call.max_keys + j, sums[n][e]);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kMostThreads, 1)
    grad_mask_kernel(const AttentionBackwardCuda p, const AttentionOrder order) {
  SK_SHARED(memory);
  walk_tiles(order, memory, [&](const AttentionTile& tile) { grad_mask_tile<T>(p, tile, memory + kWalkBytes); });
}

}  // namespace attention_grad
}  // namespace seqkern
