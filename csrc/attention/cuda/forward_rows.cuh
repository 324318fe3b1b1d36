// Parts of attention's forward pass (forward.cuh): tile shapes, copies into tiles, and a warp's rows
// with their scores, sums and output.
#pragma once

#include "attention.cuh"
#include "mma.cuh"

namespace seqkern {
namespace attention_forward {

using attention_mma::clear;

// Bytes of `Work`, which precedes the tiles.
constexpr int kWorkBytes = 128;

// Tile shapes by head dimension: row blocks of 16 in a warp, warps, keys of a block.
template <class T, int kDim, bool kOptions>
struct Shape {
  static constexpr bool kWide = sizeof(T) == 4;
  static constexpr int kRowBlocks = kWide || kOptions || kDim > 128 ? 1 : 2;
  static constexpr int kWarps = !kWide && kDim > 128 ? 8 : 4;
  static constexpr int kKeys = kWide ? 4096 / kDim : kOptions || kDim > 128 ? 32 : 64;
  // Thread blocks on a multiprocessor, as registers allow.
  static constexpr int kBlocks = kWide ? 2 : kDim > 128 ? 1 : kOptions ? 3 : 2;

  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * kRowBlocks * kWarps;
  static constexpr int bytes(int stages) {
    return kWorkBytes + attention_mma::Tile<T, kDim>::bytes(kRows) +
           2 * stages * attention_mma::Tile<T, kDim>::bytes(kKeys);
  }
};

// The running maximum may lag behind by this many powers of two.
constexpr float kSlack = 8;

// Columns are multiplied in parts of this size: a head dimension in between costs as much as the next whole part.
constexpr int part_of(int dim) { return dim / 4 < 32 ? 32 : dim / 4; }

// Copies rows [0, kRows) of a matrix into a tile, except columns beyond the last whole part, which nothing reads. With
// 16-byte vectors a thread always copies the same chunk, of every kStep-th row.
template <class T, int kDim, int kRows, int kThreads>
struct Loader {
  using Tile = attention_mma::Tile<T, kDim>;
  static constexpr int kStep = kThreads / Tile::kChunks;
  static_assert(kThreads % Tile::kChunks == 0 && kRows % kStep == 0, "a thread keeps its chunk");

  // Where a thread starts, in a matrix that starts at `from`.
  static SK_DEVICE const T* begin(const T* from, int64_t stride, bool vectors, int thread) {
    return vectors ? from + thread / Tile::kChunks * stride + thread % Tile::kChunks * Tile::kChunk : from;
  }
  // at: the result of `begin`. `rows` x `columns` of the matrix exist; the rest becomes 0.
  static SK_DEVICE void load(unsigned char* tile, const T* at, int64_t stride, int rows, int columns, bool vectors,
                             int thread) {
    const int used = (columns + part_of(kDim) - 1) / part_of(kDim) * part_of(kDim);
    if (vectors) {
      const int chunk = thread % Tile::kChunks, first = thread / Tile::kChunks;
      if (chunk * Tile::kChunk >= used) return;
      const int most = chunk * Tile::kChunk < columns ? rows - first : 0;  // a chunk exists wholly or not at all
#pragma unroll 2
      for (int row = 0; row < kRows; row += kStep) {
        cp_async_16_if(tile + Tile::offset(row + first, chunk), at, row < most);
        at += kStep * stride;
      }
    } else {
      attention_mma::load_elements<T, kDim>(tile, kRows, at, stride, rows, columns, used, thread, kThreads);
    }
  }
};

// A warp's rows in registers. Row (m, h) is 16 m + 8 h + lane / 4 of the warp's; columns are the accumulators'.
template <class T, int kDim, bool kOptions>
struct WarpRows {
  using S = Shape<T, kDim, kOptions>;
  using Tile = attention_mma::Tile<T, kDim>;
  static constexpr int kM = S::kRowBlocks, kKeys = S::kKeys;
  static constexpr int kDepth = attention_mma::Operand<T>::kDepth, kSteps = kKeys / kDepth;

  static constexpr bool kWide = sizeof(T) == 4;
  static_assert(!kWide || kM == 1, "float32 has registers for one");

  float out[kM][kDim / 8][4];
  float score[kM][kKeys / 8][4];
  float largest[kM][2], sum[kM][2];

  SK_DEVICE void start(float sink) {
    clear(out);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        largest[m][h] = sink;
        sum[m][h] = sink != -INFINITY ? 0.25f : 0.0f;  // four lanes share a row
      }
    }
  }

  // score += query key^T over columns [kFrom, kTo) of the summed index.
  template <int kFrom, int kTo>
  SK_DEVICE void add_scores(const unsigned char* query, const unsigned char* key, int row, int lane, bool tf32) {
#pragma unroll
    for (int depth = kFrom; depth < kTo; depth += kDepth) {
      uint32_t a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) Tile::a(a[m], query, row + 16 * m, depth, lane);
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t b[4];
        Tile::b_rows(b, key, 16 * n, depth, lane);
#pragma unroll
        for (int m = 0; m < kM; ++m)
          attention_mma::multiply<T>(score[m][2 * n], score[m][2 * n + 1], attention_mma::A<T>(a[m]), b, tf32);
      }
    }
  }

  // score = query key^T
  SK_DEVICE void scores(const unsigned char* query, const unsigned char* key, int row, int columns, int lane,
                        bool tf32) {
    constexpr int kPart = part_of(kDim);
    clear(score);
    if (columns > 0) add_scores<0, kPart>(query, key, row, lane, tf32);
    if (columns > kPart) add_scores<kPart, 2 * kPart>(query, key, row, lane, tf32);
    if constexpr (kDim > 2 * kPart) {
      if (columns > 2 * kPart) add_scores<2 * kPart, 3 * kPart>(query, key, row, lane, tf32);
      if (columns > 3 * kPart) add_scores<3 * kPart, kDim>(query, key, row, lane, tf32);
    }
  }

  // out += weight value, for columns [kFrom, kTo).
  template <int kFrom, int kTo>
  SK_DEVICE void add_values(const attention_mma::A<T> (&weight)[kSteps][kM], const unsigned char* value, int lane,
                            bool tf32) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int n = kFrom / 16; n < kTo / 16; ++n) {
        uint32_t b[4];
        Tile::b_columns(b, value, 16 * n, k * kDepth, lane);
#pragma unroll
        for (int m = 0; m < kM; ++m)
          attention_mma::multiply<T>(out[m][2 * n], out[m][2 * n + 1], weight[k][m], b, tf32);
      }
    }
  }

  // out += score value
  SK_DEVICE void values(const unsigned char* value, int columns, int lane, bool tf32) {
    constexpr int kPart = part_of(kDim);
    attention_mma::A<T> weight[kSteps][kM];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        uint32_t a[4];
        attention_mma::a_of_sums<T>(a, score[m][k * kDepth / 8], score[m][k * kDepth / 8 + kDepth / 16]);
        weight[k][m] = attention_mma::A<T>(a);
      }
    }
    if (columns > 0) add_values<0, kPart>(weight, value, lane, tf32);
    if (columns > kPart) add_values<kPart, 2 * kPart>(weight, value, lane, tf32);
    if constexpr (kDim > 2 * kPart) {
      if (columns > 2 * kPart) add_values<2 * kPart, 3 * kPart>(weight, value, lane, tf32);
      if (columns > 3 * kPart) add_values<3 * kPart, kDim>(weight, value, lane, tf32);
    }
  }

  // Calls body(score, query, key) for every score of a block. query0: the warp's first query; key0: the block's first
  // key.
  template <class Body>
  SK_DEVICE void for_scores(int query0, int key0, int lane, const Body& body) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          body(score[m][n][e], query0 + 16 * m + e / 2 * 8 + lane / 4, key0 + 8 * n + lane % 4 * 2 + e % 2);
  }

  template <MaskType kType>
  SK_DEVICE void add_mask(const AttentionCuda& c, const AttentionHead& head, const AttentionPlace& at, int query0,
                          int key0, int lane) {
    // Pairs outside the mask are hidden or not stored: any element of it will do.
    for_scores(query0, key0, lane, [&](float& z, int i, int j) {
      z += mask_value<kType>(c, head, min(i, at.queries - 1), min(j, at.keys - 1));
    });
  }

  // `biased` for all scores, option by option: one branch an option instead of one a score.
  SK_DEVICE void bias(const AttentionCuda& c, const AttentionHead& head, const AttentionPlace& at, int query0, int key0,
                      int lane) {
    for_scores(query0, key0, lane, [&](float& z, int, int) { z *= c.scale; });
    if (c.softcap != 0) {
      for_scores(query0, key0, lane, [&](float& z, int, int) {
        float bent;
        z = softcapped(c, z, &bent);
      });
    }
    if (c.slopes != nullptr)
      for_scores(query0, key0, lane, [&](float& z, int i, int j) { z -= head.slope * distance_of(at, i, j); });
    if (c.mask != nullptr) {
      switch (c.mask_type) {
        case MaskType::boolean: add_mask<MaskType::boolean>(c, head, at, query0, key0, lane); break;
        case MaskType::f32: add_mask<MaskType::f32>(c, head, at, query0, key0, lane); break;
        case MaskType::bf16: add_mask<MaskType::bf16>(c, head, at, query0, key0, lane); break;
        default: add_mask<MaskType::f16>(c, head, at, query0, key0, lane); break;
      }
    }
  }

  // score = e^(score - largest), with the sums updated and out rescaled to the new maximum. factor turns scores into
  // exponents of two; in natural units the maximum is not multiplied by it.
  SK_DEVICE void softmax(float factor) {
    float decay[kM][2];
    bool grown = false;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float most = score[m][0][2 * h];
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) most = max(most, max(score[m][n][2 * h], score[m][n][2 * h + 1]));
        most = max(most, __shfl_xor_sync(~0u, most, 1));
        most = max(most, __shfl_xor_sync(~0u, most, 2));
        if (!kOptions) most *= factor;
        const float before = largest[m][h];
        const bool grows = most > before + (kOptions ? kSlack * kLn2 : kSlack);
        const float now = grows ? most : before;
        const float shift = now == -INFINITY ? 0.0f : now;  // no key yet: e^(-inf - 0) = 0, not NaN
        decay[m][h] = grows ? power_of_two(kOptions ? (before - shift) * kLog2e : before - shift) : 1.0f;
        grown |= grows;
        largest[m][h] = now;
        float total = 0;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int e = 2 * h; e < 2 * h + 2; ++e) {
            float& z = score[m][n][e];
            z = power_of_two(kOptions ? (z - shift) * kLog2e : fmaf(z, factor, -shift));
            total += z;
          }
        }
        sum[m][h] = fmaf(sum[m][h], decay[m][h], total);
      }
    }
    if (__any_sync(~0u, grown)) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) out[m][n][e] *= decay[m][e / 2];
    }
  }

  // Writes rows (m, h), times a factor, into a tile.
  SK_DEVICE void store(unsigned char* tile, int row, int m, int h, float factor, int lane) const {
    row += 16 * m + 8 * h + lane / 4;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const float x = out[m][n][2 * h] * factor, y = out[m][n][2 * h + 1] * factor;
      if constexpr (sizeof(T) == 2) {
        unsigned char* const to = tile + Tile::place(row, lane / 4, n, 0) + lane % 4 * 4;
        *reinterpret_cast<uint32_t*>(to) = narrow_pair<T>(x, y);
      } else {
        unsigned char* const to = tile + Tile::place(row, lane / 4, 2 * n, lane % 4 / 2) + lane % 2 * 8;
        *reinterpret_cast<float2*>(to) = make_float2(x, y);
      }
    }
  }

  // Sets scores that dropout drops to 0. row: number of the warp's first row. Lanes 2 q and 2 q + 1 need the same
  // counters, each one half of their words: the even lane computes those of rows h = 0, the odd lane those of h = 1.
  SK_DEVICE void drop(uint64_t seed, uint32_t threshold, int64_t row, int key0, int lane) {
    const bool odd = lane % 2 != 0;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        const uint4 words =
            dropout_words(seed, row + 16 * m + (odd ? 8 : 0) + lane / 4, key0 + 8 * n + lane % 4 / 2 * 4);
        const uint32_t other0 = __shfl_xor_sync(~0u, odd ? words.x : words.z, 1);
        const uint32_t other1 = __shfl_xor_sync(~0u, odd ? words.y : words.w, 1);
        const uint32_t w[4] = {odd ? other0 : words.x, odd ? other1 : words.y, odd ? words.z : other0,
                               odd ? words.w : other1};
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (w[e] < threshold) score[m][n][e] = 0;
      }
    }
  }
};

}  // namespace attention_forward
}  // namespace seqkern
