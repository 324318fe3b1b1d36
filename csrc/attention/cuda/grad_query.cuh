// dQ, and everything else that is a sum over a row of scores: the kernel that owns queries.
//
//     delta_i = do_i.o_i - dlse_i (0 where lse is -inf; stored for the other kernels)
//     dp_ij = r_ij do_i.v_j    dz_ij = p_ij (dp_ij - delta_i)    dq_i = scale sum_j dz_ij (1 - bent_ij^2) k_j
//     ddistance_i = sum_j dz_ij |i + diag - j|                   dmask_ij = dz_ij, of a mask that is not shared
//
// Q and dO of the block's queries stay in shared memory; K and V come through the ring. Three products of rows x keys x
// head dim; 2 (2 D + Dv) FLOP a visible pair.
//
// Registers: dQ takes kDim / 2 a thread for each 16 rows of a warp, S and dP kStep / 2 each. Two tiles of 16 rows a
// warp halve the reads of K and V per product, and shared memory is what limits mma.sync here; so plain calls up to
// head dim 128 have two. At 256 dQ alone takes 128 registers, and options (masks have 64-bit strides) leave no room for
// a second tile either. A tile is 128 queries (64 or 32 where memory is short); one or two thread blocks fit a
// multiprocessor. NOTES.md has what was tried, and the number of rounds.
#pragma once

#include "backward.cuh"
#include "schedule.cuh"

namespace seqkern {
namespace attention_grad {

template <class T, int kDim, bool kOptions>
constexpr int kQueryTiles = sizeof(T) == 2 && !kOptions && kDim <= 128 ? 2 : 1;
// Keys that a warp takes in a step: 32 where registers allow it.
template <class T, int kDim, bool kOptions>
constexpr int kQueryStep = sizeof(T) == 4 || (kOptions ? kDim > 128 : kDim == 128) ? 16 : 32;

// rowsum(dO * O) of one row, computed by the four lanes that share it.
template <class T>
SK_DEVICE float row_product(const T* a, const T* b, int columns, bool vectors, int q) {
  constexpr int kChunk = 16 / sizeof(T);
  float sum = 0;
  int done = 0;
  if (vectors) {
    done = columns / kChunk * kChunk;
#pragma unroll 2
    for (int c = q * kChunk; c < done; c += 4 * kChunk) {
      const uint4 x = *reinterpret_cast<const uint4*>(a + c), y = *reinterpret_cast<const uint4*>(b + c);
      T u[kChunk], v[kChunk];
      __builtin_memcpy(u, &x, 16);
      __builtin_memcpy(v, &y, 16);
#pragma unroll
      for (int n = 0; n < kChunk; ++n) sum = fmaf(widen(u[n]), widen(v[n]), sum);
    }
  }
#pragma unroll 1
  for (int c = done + q; c < columns; c += 4) sum = fmaf(widen(a[c]), widen(b[c]), sum);
  sum += __shfl_xor_sync(~0u, sum, 1);
  return sum + __shfl_xor_sync(~0u, sum, 2);
}

template <class T, int kDim, bool kOptions>
SK_DEVICE void grad_query_tile(const AttentionBackwardCuda& p, const AttentionTile& tile, const GradTiles& tiles,
                               unsigned char* memory) {
  constexpr int M = kQueryTiles<T, kDim, kOptions>, kStep = kQueryStep<T, kDim, kOptions>, N = kStep / 8,
                kRow = Tile<T, kDim>::kRowBytes;
  constexpr bool kTight = sizeof(T) == 4 && kDim > 128;
  const AttentionCuda& call = p.call;
  const int threads = blockDim.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int block_rows = threads / 32 * 16 * M, columns = tiles.columns;
  const int s = tile.sequence, h = tile.head, hk = h / (call.heads / call.kv_heads), query0 = tile.block * block_rows;
  const AttentionPlace at = place_of(call, s);
  const int D = call.head_dim, DV = call.value_dim;
  const auto range_of = [&](const AttentionPlace& place) {
    const AttentionRange all = key_range(place, query0, block_rows, columns);
    if constexpr (!kOptions) return all;
    return narrowed(all, call.query_limits, s, h, 1, query0, block_rows, place.queries, columns);
  };
  const AttentionRange range = range_of(at);

  unsigned char *query = memory, *grad_out = query + block_rows * kRow, *ring = grad_out + block_rows * kRow;
  const auto load = [&](int key0, int slot) {
    unsigned char* to = ring + slot * 2 * columns * kRow;
    const AttentionPlace from = kOptions && kDim > 128 ? place_of(call, s) : at;  // recomputed: saves registers
    const int left = at.keys - key0;
    load_rows<T, kDim>(to, columns, call.key.at<T>(from.batch, hk, from.key_row + key0), call.key.row, left, D,
                       call.vectors);
    load_rows<T, kDim>(to + columns * kRow, columns, call.value.at<T>(from.batch, hk, from.key_row + key0),
                       call.value.row, left, DV, call.vectors);
    cp_async_commit();
  };
  const int64_t row0 = at.query_row + query0;
  if (range.first < range.last) {
    load_rows<T, kDim>(query, block_rows, call.query.at<T>(at.batch, h, row0), call.query.row, at.queries - query0, D,
                       call.vectors);
    load_rows<T, kDim>(grad_out, block_rows, p.grad_out.at<T>(at.batch, h, row0), p.grad_out.row, at.queries - query0,
                       DV, call.vectors);
    load(range.first, 0);
  }

  const int warp_row = warp * 16 * M;
  const int64_t number0 = row_number(call, at, h, query0);
  float lse[2 * M], delta[2 * M], distance[2 * M];
#pragma unroll
  for (int m = 0; m < 2 * M; ++m) {
    const int row = warp_row + 8 * m + g;
    const bool there = query0 + row < at.queries;
    const int from = there ? row : 0;  // every lane must reach the shuffles
    float sum = 0;
    if (query0 < at.queries) {
      sum = row_product(p.grad_out.at<T>(at.batch, h, row0 + from), p.out.at<T>(at.batch, h, row0 + from), DV,
                        call.vectors, q);
    }
    lse[m] = there ? p.lse[number0 + row] : -INFINITY;
    if (there && p.grad_lse != nullptr) sum -= p.grad_lse[number0 + row];
    delta[m] = lse[m] == -INFINITY ? 0 : sum;  // the gradient of an lse of -inf has no effect
    if (there && q == 0) p.delta[number0 + row] = delta[m];
    lse[m] = exponent_lse<kOptions>(lse[m]);
    distance[m] = 0;
  }

  const float factor = call.scale * kLog2e;
  const AttentionHead head = kOptions ? head_of(call, s, h) : AttentionHead{nullptr, 0};
  const bool own_mask = p.grad_mask != nullptr && p.mask_sequences == call.sequences && p.mask_heads == call.heads;
  const auto mask_row = [&](int i) {
    return ((static_cast<int64_t>(s) * call.heads + h) * call.max_queries + i) * call.max_keys;
  };
  float sums[M][kDim / 8][4];
  clear(sums);

  int place = 0;
#pragma unroll 1
  for (int key0 = range.first; key0 < range.last; key0 += columns) {
    if (tiles.places == 1 && key0 != range.first) {
      __syncthreads();
      load(key0, 0);
    }
    cp_async_wait<0>();
    __syncthreads();
    const unsigned char *key = ring + place * 2 * columns * kRow, *value = key + columns * kRow;
    if (tiles.places > 1) {
      place ^= 1;
      if (key0 + columns < range.last) load(key0 + columns, place);
    }
#pragma unroll 1
    for (int c = 0; c < columns; c += kStep) {
      const int i0 = kTight ? unknown(query0 + warp_row) : query0 + warp_row, j0 = key0 + c;
      const Seen seen = seen_of(at, i0, 16 * M, j0, kStep);
      const bool writes = kOptions && own_mask;
      if (!seen.any && !writes) continue;
      float score[M][N][4], grad[M][N][4];
      clear(score);
      clear(grad);
      add_scores<T, kDim>(score, query, warp_row, key, c, D, call.tf32, lane);
      add_scores<T, kDim>(grad, grad_out, warp_row, value, c, DV, call.tf32, lane);
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          if constexpr (kOptions && kDim > 128) __syncwarp();  // separates n's iterations: masks take registers
          uint32_t words[4];
          if constexpr (kOptions) {
            if (call.seed != nullptr)
              words_of_queries(words, *call.seed, row_number(call, kDim > 128 ? place_of(call, s) : at, h, i0 + 16 * m),
                               j0 + 8 * n, lane);
          }
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int i = i0 + 16 * m + e / 2 * 8 + g, j = j0 + 8 * n + 2 * q + e % 2, r = 2 * m + e / 2;
            float bent, grad_p = grad[m][n][e];
            const float probable =
                probability<kOptions>(call, head, at, score[m][n][e], lse[r], factor, i, j, seen.all, &bent);
            if constexpr (kOptions) {
              if (call.seed != nullptr) grad_p = words[e] >= call.threshold ? grad_p * call.keep_scale : 0;
            }
            float dz = probable * (grad_p - delta[r]);
            if constexpr (kOptions) {
              if (p.grad_distance != nullptr) distance[r] += dz * static_cast<float>(abs(i + at.diagonal - j));
              // + 0: hidden pairs get 0 and not -0, whether their chunk was visited or not.
              if (writes && i < call.max_queries && j < call.max_keys)
                store_mask(p.grad_mask, call.mask_type, mask_row(i) + j, dz + 0.0f);
              dz *= 1 - bent * bent;
            }
            score[m][n][e] = dz;
          }
        }
      }
      add_weighted<T, kDim>(sums, score, key, c, D, call.tf32, lane);
    }
  }

  const AttentionPlace to = place_of(call, s);  // recomputed: saves registers
  store_rows<T, kDim, M>(p.grad_query, to.batch, h, to.query_row, query0 + warp_row, to.queries, to.queries, D, sums,
                         call.scale, lane);
  if constexpr (kOptions) {
    if (p.grad_distance != nullptr) {
#pragma unroll
      for (int m = 0; m < 2 * M; ++m) {
        distance[m] += __shfl_xor_sync(~0u, distance[m], 1);
        distance[m] += __shfl_xor_sync(~0u, distance[m], 2);
        const int row = warp_row + 8 * m + g;
        if (q == 0 && query0 + row < to.queries) p.grad_distance[row_number(call, to, h, query0 + row)] = distance[m];
      }
    }
    if (own_mask) {  // columns that no chunk reached
      const AttentionRange seen = range_of(to);
      const int begin = seen.first, end = begin < seen.last ? ceil_div(seen.last, columns) * columns : begin;
      const int hidden = begin + max(0, call.max_keys - end), rows = min(block_rows, call.max_queries - query0);
      for (int row = warp; row < rows; row += threads / 32) {
        const int64_t first = mask_row(query0 + row);
        for (int n = lane; n < hidden; n += 32)
          store_mask(p.grad_mask, call.mask_type, first + (n < begin ? n : n - begin + end), 0);
      }
    }
  }
}

template <class T, int kDim, bool kOptions>
__global__ void __launch_bounds__(kMostThreads, 1)
    grad_query_kernel(const AttentionBackwardCuda p, const AttentionOrder order, const GradTiles tiles) {
  SK_SHARED(memory);
  walk_tiles(order, memory, [&](const AttentionTile& tile) {
    grad_query_tile<T, kDim, kOptions>(p, tile, tiles, memory + kWalkBytes);
  });
  const AttentionCuda& call = p.call;
  if (call.query_starts.data != nullptr) {
    zero_gaps<T>(call.query_starts, call.sequences, call.query_rows, p.grad_query, call.heads, call.head_dim);
    if (p.grad_distance != nullptr) {
      const AttentionResult result{p.grad_distance, 0, call.query_rows, 1};
      zero_gaps<float>(call.query_starts, call.sequences, call.query_rows, result, call.heads, 1);
    }
  }
}

}  // namespace attention_grad
}  // namespace seqkern
