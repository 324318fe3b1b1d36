// dK and dV: the kernel that owns keys. It walks the queries of every head of their group.
//
//     dv_j = sum_i r_ij p_ij do_i        dk_j = scale sum_i p_ij (r_ij do_i.v_j - delta_i) (1 - bent_ij^2) q_i
//
// K and V of the block's keys stay in shared memory; Q and dO come through the ring with lse and delta. Scores are
// transposed, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T pass from the accumulators of one product to the left
// operands of the next without shared memory. Four products of rows x keys x head dim; 2 (2 D + 2 Dv) FLOP a visible
// pair.
//
// Registers: dK and dV take kDim / 2 a thread each for 16 keys of a warp: 128 at head dim 128. At 256 there is no room
// for both. There dV and dK are separate launches that both compute S^T: five products instead of four, but no barrier
// and no exchange between warps. Splitting the head dim over two warps would need both in every step: each warp would
// have half of the sums of a score, or P and dS would go through shared memory. Half of the columns in each of two
// passes would take six products. At head dim 64 a warp of a plain call owns 32 keys and takes 16 queries a step.
//
// A tile is 128 keys (64 or 32 where memory is short) with the whole group of heads. Under a causal mask the first keys
// are the longest tiles, with a window on the left alone the last.
#pragma once

#include "backward.cuh"
#include "schedule.cuh"

namespace seqkern {
namespace attention_grad {

enum Gradients : int { kBoth, kKey, kValue };

template <class T, int kDim, bool kOptions>
constexpr int kKeyTiles = sizeof(T) == 2 && !kOptions && kDim <= 64 ? 2 : 1;
// Queries that a warp takes in a step: 32 where registers allow it.
template <class T, int kDim, bool kOptions>
constexpr int kKeyStep = sizeof(T) == 4 || kKeyTiles<T, kDim, kOptions> == 2 || (kOptions && kDim > 64) ? 16 : 32;

template <class T, int kDim, bool kOptions, int kWhat>
SK_DEVICE void grad_key_tile(const AttentionBackwardCuda& p, const AttentionTile& tile, const GradTiles& tiles,
                             unsigned char* memory) {
  constexpr bool kKeys = kWhat != kValue, kValues = kWhat != kKey;
  constexpr int M = kKeyTiles<T, kDim, kOptions>, kStep = kKeyStep<T, kDim, kOptions>, N = kStep / 8,
                kRow = Tile<T, kDim>::kRowBytes;
  const AttentionCuda& call = p.call;
  const int threads = blockDim.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int block_rows = threads / 32 * 16 * M, columns = tiles.columns;
  const int s = tile.sequence, hk = tile.head, key0 = tile.block * block_rows;
  const AttentionPlace at = place_of(call, s);
  const int D = call.head_dim, DV = call.value_dim, group = call.heads / call.kv_heads;
  AttentionRange range = query_range(at, key0, block_rows, columns);
  if constexpr (kOptions) {
    range = narrowed(range, call.key_limits, s, hk * group, group, key0, block_rows, at.keys, columns);
  }

  // K; V, if dK is wanted; the ring; lse and delta of two chunks.
  unsigned char *key = memory, *value = key + block_rows * kRow, *ring = value + (kKeys ? block_rows * kRow : 0);
  float* rows_of_chunk = reinterpret_cast<float*>(ring + tiles.places * 2 * columns * kRow);
  const auto load = [&](int h, int query0, int place) {
    unsigned char* to = ring + place * 2 * columns * kRow;
    const AttentionPlace from = kOptions && sizeof(T) == 4 ? place_of(call, s) : at;  // recomputed: saves registers
    const int left = at.queries - query0;
    const int64_t row = from.query_row + query0;
    load_rows<T, kDim>(to, columns, call.query.at<T>(from.batch, h, row), call.query.row, left, D, call.vectors);
    load_rows<T, kDim>(to + columns * kRow, columns, p.grad_out.at<T>(from.batch, h, row), p.grad_out.row, left, DV,
                       call.vectors);
    cp_async_commit();
  };
  // lse and delta are prefetched through a register while the tiles are loading.
  float next_lse = 0, next_delta = 0;
  const auto fetch = [&](int h, int query0) {
    const int row = threadIdx.x;
    if (row >= columns) return;
    const bool there = query0 + row < at.queries;
    const int64_t number = row_number(call, kOptions && sizeof(T) == 4 ? place_of(call, s) : at, h, query0) + row;
    next_lse = there ? p.lse[number] : -INFINITY;
    next_delta = there && kKeys ? p.delta[number] : 0;
  };
  const auto keep = [&](int slot) {
    const int row = threadIdx.x;
    if (row >= columns) return;
    rows_of_chunk[slot * 2 * columns + row] = exponent_lse<kOptions>(next_lse);
    rows_of_chunk[slot * 2 * columns + columns + row] = next_delta;
  };

  const int first_head = hk * group,
            chunks = range.first < range.last ? ceil_div(range.last - range.first, columns) : 0;
  if (chunks > 0) {
    const int left = at.keys - key0;
    const int64_t row = at.key_row + key0;
    load_rows<T, kDim>(key, block_rows, call.key.at<T>(at.batch, hk, row), call.key.row, left, D, call.vectors);
    if constexpr (kKeys) {
      load_rows<T, kDim>(value, block_rows, call.value.at<T>(at.batch, hk, row), call.value.row, left, DV,
                         call.vectors);
    }
    load(first_head, range.first, 0);
    fetch(first_head, range.first);
    keep(0);
  }

  const int warp_row = warp * 16 * M, j0 = key0 + warp_row;
  const float factor = call.scale * kLog2e;
  float key_sums[kKeys ? M : 1][kDim / 8][4], value_sums[kValues ? M : 1][kDim / 8][4];
  clear(key_sums);
  clear(value_sums);

  int h = first_head, query0 = range.first;
#pragma unroll 1
  for (int step = 0; step < group * chunks; ++step) {
    if (tiles.places == 1 && step > 0) {
      __syncthreads();
      load(h, query0, 0);
    }
    cp_async_wait<0>();
    __syncthreads();
    const bool last_chunk = query0 + columns >= range.last, more = step + 1 < group * chunks;
    const int next_h = last_chunk ? h + 1 : h, next_query0 = last_chunk ? range.first : query0 + columns;
    const int slot = step % 2, place = tiles.places > 1 ? slot : 0;
    const unsigned char *query = ring + place * 2 * columns * kRow, *grad_out = query + columns * kRow;
    const float *lse = rows_of_chunk + slot * 2 * columns, *delta = lse + columns;
    if (more) {
      if (tiles.places > 1) load(next_h, next_query0, place ^ 1);
      fetch(next_h, next_query0);
      if constexpr (sizeof(T) == 4) keep(slot ^ 1);  // at once: no registers left
    }
    const AttentionHead head = kOptions ? head_of(call, s, h) : AttentionHead{nullptr, 0};
#pragma unroll 1
    for (int c = 0; c < columns; c += kStep) {
      const int i0 = query0 + c;
      const Seen seen = seen_of(at, i0, kStep, j0, 16 * M);
      if (!seen.any) continue;
      float score[M][N][4], grad[M][N][4];
      clear(score);
      clear(grad);
      add_scores<T, kDim>(score, key, warp_row, query, c, D, call.tf32, lane);
      if constexpr (kKeys) add_scores<T, kDim>(grad, value, warp_row, grad_out, c, DV, call.tf32, lane);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if constexpr (kOptions && sizeof(T) == 4) __syncwarp();  // separates n's iterations: masks take registers
        const float2 row_lse = *reinterpret_cast<const float2*>(lse + c + 8 * n + 2 * q);
        const float2 row_delta = *reinterpret_cast<const float2*>(delta + c + 8 * n + 2 * q);
#pragma unroll
        for (int m = 0; m < M; ++m) {
          uint32_t words[4];
          if constexpr (kOptions) {
            if (call.seed != nullptr)
              words_of_keys(words, *call.seed, row_number(call, sizeof(T) == 4 ? place_of(call, s) : at, h, i0 + 8 * n),
                            j0 + 16 * m, lane);
          }
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int i = i0 + 8 * n + 2 * q + e % 2, j = j0 + 16 * m + e / 2 * 8 + g;
            float bent, kept_scale = 1;
            const float probable = probability<kOptions>(call, head, at, score[m][n][e], e % 2 ? row_lse.y : row_lse.x,
                                                         factor, i, j, seen.all, &bent);
            bool dropped = false;
            if constexpr (kOptions) {
              if (call.seed != nullptr) {
                dropped = words[e] < call.threshold;
                kept_scale = call.keep_scale;
              }
            }
            if constexpr (kKeys) {
              const float grad_p = dropped ? 0 : grad[m][n][e] * kept_scale;
              grad[m][n][e] = probable * (grad_p - (e % 2 ? row_delta.y : row_delta.x));
              if constexpr (kOptions) grad[m][n][e] *= 1 - bent * bent;
            }
            score[m][n][e] = dropped ? 0 : probable;
          }
        }
      }
      if constexpr (kValues) add_weighted<T, kDim>(value_sums, score, grad_out, c, DV, call.tf32, lane);
      if constexpr (kKeys) add_weighted<T, kDim>(key_sums, grad, query, c, D, call.tf32, lane);
    }
    if (sizeof(T) == 2 && step + 1 < group * chunks) keep(1 - step % 2);
    query0 += columns;
    if (query0 >= range.last) {
      query0 = range.first;
      ++h;
    }
  }

  // Keys that the lengths hide get 0, whatever their sums are.
  const AttentionPlace to = place_of(call, s);  // recomputed: saves registers
  if constexpr (kKeys) {
    store_rows<T, kDim, M>(p.grad_key, to.batch, hk, to.key_row, j0, to.key_rows, to.keys, D, key_sums, call.scale,
                           lane);
  }
  if constexpr (kValues) {
    const float scale = kOptions && call.seed != nullptr ? call.keep_scale : 1;
    store_rows<T, kDim, M>(p.grad_value, to.batch, hk, to.key_row, j0, to.key_rows, to.keys, DV, value_sums, scale,
                           lane);
  }
}

template <class T, int kDim, bool kOptions, int kWhat>
__global__ void __launch_bounds__(kMostThreads, 1)
    grad_key_kernel(const AttentionBackwardCuda p, const AttentionOrder order, const GradTiles tiles) {
  SK_SHARED(memory);
  walk_tiles(order, memory, [&](const AttentionTile& tile) {
    grad_key_tile<T, kDim, kOptions, kWhat>(p, tile, tiles, memory + kWalkBytes);
  });
  const AttentionCuda& call = p.call;
  if (call.key_starts.data != nullptr) {
    if constexpr (kWhat != kValue)
      zero_gaps<T>(call.key_starts, call.sequences, call.key_rows, p.grad_key, call.kv_heads, call.head_dim);
    if constexpr (kWhat != kKey)
      zero_gaps<T>(call.key_starts, call.sequences, call.key_rows, p.grad_value, call.kv_heads, call.value_dim);
  }
}

}  // namespace attention_grad
}  // namespace seqkern
