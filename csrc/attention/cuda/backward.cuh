// What the kernels of attention's backward pass share: tile products by a warp, probabilities from lse, dropout bits,
// and storing results. The kernels:
//
//     grad_query.cuh   dQ, delta, the slopes' distances, the gradient of a mask that is not shared
//     grad_key.cuh     dK and dV
//     grad_mask.cuh    the gradient of a mask that sequences or heads share
//
// No two blocks add to the same memory: every kernel owns what it writes and recomputes the scores, so the bits do not
// depend on the order of blocks. The price: seven tile products instead of five (eight at head dim 256).
//
// A thread block owns rows (queries or keys) in shared memory, 16 or 32 for each warp. It walks the other side in
// chunks, through a ring of two slots (one where memory is short) that cp.async fills ahead of use. A warp takes kStep
// columns of a chunk at a time: two register tiles of scores, 16 x kStep each, become P and dS in place and are then
// the operands of the next products (a_of_sums). The launch chooses the number of warps, the chunk length and the
// number of slots (GradTiles), so one instance serves every size of shared memory.
//
// Every kernel is persistent: its blocks walk the tiles, longest first, like the forward pass
// (schedule.cuh), one after the other. No kernel has only equal tiles: delta is computed where queries
// are owned, and packed rows of no sequence are divided among the blocks at the end.
//
// kOptions false: no options on the scores, so one multiply-add and one power of two each. A warp then also classifies
// its own steps as hidden, partly visible or fully visible, and compares positions only in the second case.
#pragma once

#include "launch.h"
#include "mma.cuh"

namespace seqkern {
namespace attention_grad {

using attention_mma::A;
using attention_mma::a_of_sums;
using attention_mma::clear;
using attention_mma::multiply;
using attention_mma::Operand;
using attention_mma::Tile;

constexpr int kMostThreads = 256;

// A launch's tile shape: chunks of `columns` rows of the other side, `places` ring slots in shared memory.
struct GradTiles {
  int columns, places;
};

SK_DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }

// ---- tiles ---------------------------------------------------------------------------------------------------------

// Copies `tile_rows` rows from `from` on, of which `rows` exist. Columns from `columns` up to a multiple of 16 become
// 0; later ones are never read.
template <class T, int kDim>
SK_DEVICE void load_rows(unsigned char* tile, int tile_rows, const T* from, int64_t stride, int rows, int columns,
                         bool vectors) {
  using RowTile = Tile<T, kDim>;
  const int live = (columns + 15) / 16 * 16, threads = blockDim.x;
  const int thread = sizeof(T) == 4 ? unknown(threadIdx.x) : threadIdx.x;  // not kept in a register across loops
  if (vectors) {
#pragma unroll 2
    for (int n = thread; n < tile_rows * RowTile::kChunks; n += threads) {
      const int row = n / RowTile::kChunks, chunk = n % RowTile::kChunks;
      if (chunk * RowTile::kChunk >= live) continue;
      cp_async_16_if(tile + RowTile::offset(row, chunk), from + row * stride + chunk * RowTile::kChunk,
                     row < rows && chunk * RowTile::kChunk < columns);
    }
  } else {
    attention_mma::load_elements<T, kDim>(tile, tile_rows, from, stride, rows, columns, live, thread, threads);
  }
}

// ---- products ------------------------------------------------------------------------------------------------------

// sums += left right^T: rows [row, row + 16 M) of one tile, [column, column + 8 N) of another, over `depth` columns.
template <class T, int kDim, int M, int N>
SK_DEVICE void add_scores(float (&sums)[M][N][4], const unsigned char* left, int row, const unsigned char* right,
                          int column, int depth, bool tf32, int lane) {
  if constexpr (sizeof(T) == 4) {
    static_assert(M == 1, "float32 has registers for one");
#pragma unroll 1
    for (int from = 0; from < depth; from += 32) {  // 128-byte pieces of a row
#pragma unroll
      for (int k = 0; k < 32; k += Operand<T>::kDepth) {
        if (from + k >= depth) break;
        uint32_t r[4];
        Tile<T, kDim>::a(r, left, row, k, lane);
        const A<T> a(r);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
          uint32_t b[4];
          Tile<T, kDim>::b_rows(b, right, column + 8 * n, k, lane);
          multiply<T>(sums[0][n], sums[0][n + 1], a, b, tf32);
        }
      }
      left += 128;
      right += 128;
    }
  } else {
#pragma unroll(M == 1 ? 4 : 2)
    for (int k = 0; k < depth; k += Operand<T>::kDepth) {
      uint32_t b[N / 2][4];
#pragma unroll
      for (int n = 0; n < N / 2; ++n) Tile<T, kDim>::b_rows(b[n], right, column + 16 * n, k, lane);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        uint32_t r[4];
        Tile<T, kDim>::a(r, left, row + 16 * m, k, lane);
        const A<T> a(r);
#pragma unroll
        for (int n = 0; n < N / 2; ++n) multiply<T>(sums[m][2 * n], sums[m][2 * n + 1], a, b[n], tf32);
      }
    }
  }
}

// sums += scores tile: sums over the tile's rows [depth, depth + 8 N); its `columns` columns are those of the result.
template <class T, int kDim, int M, int N>
SK_DEVICE void add_weighted(float (&sums)[M][kDim / 8][4], const float (&scores)[M][N][4], const unsigned char* tile,
                            int depth, int columns, bool tf32, int lane) {
  constexpr int kBlocks = Operand<T>::kDepth / 8, kTerms = N / kBlocks;  // blocks of 8 columns in an operand
  A<T> a[M][kTerms];
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int t = 0; t < kTerms; ++t) {
      uint32_t packed[4];
      a_of_sums<T>(packed, scores[m][t * kBlocks], scores[m][t * kBlocks + kBlocks - 1]);
      a[m][t] = A<T>(packed);
    }
  }
#pragma unroll
  for (int c = 0; c < kDim / 16; ++c) {
    if (16 * c >= columns) break;
#pragma unroll
    for (int t = 0; t < kTerms; ++t) {
      uint32_t b[4];
      Tile<T, kDim>::b_columns(b, tile, 16 * c, depth + t * Operand<T>::kDepth, lane);
#pragma unroll
      for (int m = 0; m < M; ++m) multiply<T>(sums[m][2 * c], sums[m][2 * c + 1], a[m][t], b, tf32);
    }
  }
}

// ---- scores --------------------------------------------------------------------------------------------------------

// For queries [i, i + rows) and keys [j, j + columns): whether any pair is visible, and whether all are (ignoring
// queries beyond the sequence).
struct Seen {
  bool any, all;
};
SK_DEVICE Seen seen_of(const AttentionPlace& at, int i, int rows, int j, int columns) {
  const int i_last = i + rows - 1, j_last = j + columns - 1;
  return {i < at.queries && j < at.keys && j <= i_last + at.high && j_last >= i + at.low,
          j_last < at.keys && j_last <= i + at.high && j >= i_last + at.low};
}

// lse as `probability` takes it: in base 2 for plain scores, +inf for a row that sees nothing.
template <bool kOptions>
SK_DEVICE float exponent_lse(float lse) {
  return lse_or_infinity(kOptions ? lse : lse * kLog2e);
}

// e^(z - lse), 0 for a pair that is not visible. factor: scale log2(e).
template <bool kOptions>
SK_DEVICE float probability(const AttentionCuda& call, const AttentionHead& head, const AttentionPlace& at,
                            float product, float lse, float factor, int i, int j, bool all, float* bent) {
  *bent = 0;
  if constexpr (kOptions) {
    if (i >= at.queries || !(all || sees(at, i, j))) return 0;
    return power_of_two((biased(call, head, at, product, i, j, bent) - lse) * kLog2e);
  } else {
    const float p = power_of_two(fmaf(product, factor, -lse));
    return all || sees(at, i, j) ? p : 0;
  }
}

// ---- dropout -------------------------------------------------------------------------------------------------------

// The random words of a block of 16 x 8 scores, in the order of a lane's four scores. Rows are queries from row number
// `row` on, columns keys from `key` on. There are 32 counters: lane (g, q) computes that of row g + 8 (q % 2) and keys
// 4 (q / 2) ..., and neighbouring lanes exchange halves.
SK_DEVICE void words_of_queries(uint32_t (&words)[4], uint64_t seed, int64_t row, int key, int lane) {
  const int g = lane / 4, q = lane % 4;
  const bool odd = q % 2 != 0;
  const uint4 mine = dropout_words(seed, row + g + (odd ? 8 : 0), key + q / 2 * 4);
  const uint32_t first = __shfl_xor_sync(~0u, odd ? mine.x : mine.z, 1);
  const uint32_t second = __shfl_xor_sync(~0u, odd ? mine.y : mine.w, 1);
  words[0] = odd ? first : mine.x;
  words[1] = odd ? second : mine.y;
  words[2] = odd ? mine.z : first;
  words[3] = odd ? mine.w : second;
}

// The same where rows are keys and columns queries. A lane needs word g % 4 of four counters: queries 2q and 2q + 1,
// keys 4 (g / 4) ... and those + 8. The four lanes that share them compute one each and transpose 4 x 4 words.
SK_DEVICE void words_of_keys(uint32_t (&words)[4], uint64_t seed, int64_t row, int key, int lane) {
  const int g = lane / 4, q = lane % 4;
  const bool odd = g % 2 != 0, high = g % 4 >= 2;
  const uint4 mine = dropout_words(seed, row + 2 * q + (odd ? 1 : 0), key + g / 4 * 4 + (high ? 8 : 0));
  const uint32_t first = __shfl_xor_sync(~0u, high ? mine.x : mine.z, 8);
  const uint32_t second = __shfl_xor_sync(~0u, high ? mine.y : mine.w, 8);
  // Now words 2 `high` and 2 `high` + 1 of counters `odd` and 2 + `odd`.
  const uint32_t w[4] = {high ? first : mine.x, high ? second : mine.y, high ? mine.z : first, high ? mine.w : second};
  const uint32_t low_counter = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 4);
  const uint32_t high_counter = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 4);
  words[0] = odd ? low_counter : w[0];
  words[1] = odd ? w[1] : low_counter;
  words[2] = odd ? high_counter : w[2];
  words[3] = odd ? w[3] : high_counter;
}

// ---- results -------------------------------------------------------------------------------------------------------

template <class T>
SK_DEVICE void store_pair(T* to, float first, float second) {
  if constexpr (sizeof(T) == 2) *reinterpret_cast<uint32_t*>(to) = narrow_pair<T>(first, second);
  else *reinterpret_cast<float2*>(to) = make_float2(first, second);
}

// Stores `columns` columns of 16 M rows from `row` of a head. Rows from `rows` on do not exist; rows from `counted` on
// become 0.
template <class T, int kDim, int M>
SK_DEVICE void store_rows(const AttentionResult& result, int64_t batch, int64_t head, int64_t first, int row, int rows,
                          int counted, int columns, const float (&sums)[M][kDim / 8][4], float factor, int lane) {
#pragma unroll
  for (int m = 0; m < 2 * M; ++m) {
    const int at = row + 8 * m + lane / 4;
    if (at >= rows) continue;
    T* to = result.at<T>(batch, head, first + at) + lane % 4 * 2;
    const int left = columns - lane % 4 * 2;
#pragma unroll
    for (int c = 0; c < kDim / 8; ++c) {
      const float x = at < counted ? sums[m / 2][c][m % 2 * 2] * factor : 0;
      const float y = at < counted ? sums[m / 2][c][m % 2 * 2 + 1] * factor : 0;
      if (8 * c >= left) break;
      if (columns % 2 == 0) {
        store_pair(to + 8 * c, x, y);
      } else {
        to[8 * c] = narrow<T>(x);
        if (8 * c + 1 < left) to[8 * c + 1] = narrow<T>(y);
      }
    }
  }
}

// Clears packed result rows before the first sequence and after the last. The grid's blocks share the work.
template <class T>
SK_DEVICE void zero_gaps(const AttentionIntegers& starts, int sequences, int64_t rows, const AttentionResult& result,
                         int heads, int columns) {
  const int64_t before = clamp_row(starts[0], rows), end = clamp_row(starts[sequences], rows);
  const int64_t behind = end < before ? before : end, gap = before + rows - behind;
  for (int64_t n = blockIdx.x; n < gap * heads; n += gridDim.x) {
    const int64_t row = n / heads;
    T* to = result.at<T>(0, n % heads, row < before ? row : row + behind - before);
    for (int column = threadIdx.x; column < columns; column += blockDim.x) to[column] = T{};
  }
}

// Stores an element of the mask's gradient.
SK_DEVICE void store_mask(void* grad_mask, MaskType type, int64_t at, float x) {
  switch (type) {
    case MaskType::f32: static_cast<float*>(grad_mask)[at] = x; break;
    case MaskType::bf16: static_cast<BFloat16*>(grad_mask)[at] = narrow<BFloat16>(x); break;
    default: static_cast<Half*>(grad_mask)[at] = narrow<Half>(x);
  }
}

}  // namespace attention_grad
}  // namespace seqkern
