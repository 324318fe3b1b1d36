// Tiles in shared memory, and their products by a warp with mma.sync: bfloat16, float16 and float32.
//
// A tile's rows hold kDim elements in chunks of 16 bytes, chunk c of row r at position c ^ (r % 8): the eight rows that
// one ldmatrix reads lie in different banks. ldmatrix knows 16-bit elements only, but a row of four float32 is to it a
// row of eight halves: lane l receives element l % 4 of row l / 4, as a tf32 product needs. Transposed loads have no
// such equivalent; there float32 is read element by element.
//
// float32 on tensor cores (3xTF32: Ootomo & Yokota 2022): x = hi + lo with both in tf32, and a b = a_hi b_lo + a_lo
// b_hi + a_hi b_hi, small terms first. a_lo b_lo is left out, some 2^-22 of the product. Tensor cores truncate what
// does not fit their accumulators (Fasi et al. 2021), always towards zero, which would show in a long sum. So every
// product starts at zero, with its three parts in sequence, and is added to the sum by ordinary additions. Scores
// become operands without a shuffle: the order of the summed index is free, so lane q's accumulator columns 2q and 2q +
// 1 take positions q and q + 4, and the other operand's rows follow.
//
// A float32 number that no finite tf32 number represents (infinity, or above 3.402e38) has no lo part: its products
// become NaN, where the equations may give infinity.
#pragma once

#include "common/cuda/device.cuh"

namespace seqkern {
namespace attention_mma {

template <class T>
struct Operand {                     // 16 bits
  static constexpr int kDepth = 16;  // depth of one product
};
template <>
struct Operand<float> {
  static constexpr int kDepth = 8;
};

template <class T, int kDim>
struct Tile {
  static constexpr int kChunk = 16 / sizeof(T);  // in elements
  static constexpr int kChunks = kDim / kChunk;
  static constexpr int kRowBytes = kDim * static_cast<int>(sizeof(T));
  static_assert(kChunks % 8 == 0, "rows of 128 bytes at least");

  static constexpr int bytes(int rows) { return rows * kRowBytes; }
  static SK_DEVICE int offset(int row, int chunk) { return row * kRowBytes + (chunk ^ (row & 7)) * 16; }
  static SK_DEVICE T* element(unsigned char* tile, int row, int column) {
    return reinterpret_cast<T*>(tile + offset(row, column / kChunk)) + column % kChunk;
  }

  // ---- operands ----------------------------------------------------------------------------------------------------

  // `depth` is the position in the summed index, a multiple of Operand<T>::kDepth. Rows and columns start at multiples
  // of 8.

  // Offset of chunk `chunk` + `odd` of a row, for an even chunk, odd 0 or 1, and low = row % 8. With compile-time
  // chunks it is an exclusive or with a lane's value, shared by all rows, plus the load's immediate offset.
  static SK_DEVICE int place(int row, int low, int chunk, int odd) {
    return row * kRowBytes + chunk / 8 * 128 + ((low ^ odd) ^ (chunk % 8)) * 16;
  }

  // A: rows [row, row + 16), with the summed index along the tile's rows.
  static SK_DEVICE void a(uint32_t (&r)[4], const unsigned char* tile, int row, int depth, int lane) {
    ldmatrix_x4(r, tile + place(row + lane % 16, lane % 8, depth / kChunk, lane / 16));
  }
  // B: columns [column, column + 16), each a row of the tile. r[0], r[1] hold the first eight, r[2], r[3] the others.
  static SK_DEVICE void b_rows(uint32_t (&r)[4], const unsigned char* tile, int column, int depth, int lane) {
    ldmatrix_x4(r, tile + place(column + lane % 8 + lane / 16 * 8, lane % 8, depth / kChunk, lane / 8 % 2));
  }
  // B: columns [column, column + 16) of the tile; the summed index runs down its rows from `depth`. For float32 in the
  // order that `a_of_sums` gives the other operand.
  static SK_DEVICE void b_columns(uint32_t (&r)[4], const unsigned char* tile, int column, int depth, int lane) {
    if constexpr (sizeof(T) == 2) {
      ldmatrix_x4_trans(r, tile + place(depth + lane % 16, lane % 8, column / kChunk, lane / 16));
    } else {
      const int low = lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int at = place(depth + low + n % 2, low ^ n % 2, column / kChunk + n / 2 * 2, lane / 16);
        r[n] = *reinterpret_cast<const uint32_t*>(tile + at + lane / 4 % 4 * 4);
      }
    }
  }
};

// Copies a matrix that has no 16-byte alignment into a tile of `tile_rows` rows. `rows` x `columns` of it exist; the
// rest becomes 0 up to column `used`; later columns are not written.
template <class T, int kDim>
SK_DEVICE void load_elements(unsigned char* tile, int tile_rows, const T* from, int64_t stride, int rows, int columns,
                             int used, int thread, int threads) {
#pragma unroll 1
  for (int n = thread; n < tile_rows * kDim; n += threads) {
    const int row = n / kDim, column = n % kDim;
    if (column >= used) continue;
    T x{};
    if (row < rows && column < columns) x = from[row * stride + column];
    *Tile<T, kDim>::element(tile, row, column) = x;
  }
}

template <int M, int N>
SK_DEVICE void clear(float (&sums)[M][N][4]) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[m][n][e] = 0;
    }
  }
}

// Operand A of 16 rows and kDepth columns, made from accumulators: for 16 bits from two blocks of 16 x 8, for float32
// from one (`right` is ignored).
template <class T>
SK_DEVICE void a_of_sums(uint32_t (&r)[4], const float (&left)[4], const float (&right)[4]) {
  if constexpr (sizeof(T) == 2) {
    r[0] = narrow_pair<T>(left[0], left[1]);
    r[1] = narrow_pair<T>(left[2], left[3]);
    r[2] = narrow_pair<T>(right[0], right[1]);
    r[3] = narrow_pair<T>(right[2], right[3]);
  } else {
    r[0] = device_bits<uint32_t>(left[0]);
    r[1] = device_bits<uint32_t>(left[2]);
    r[2] = device_bits<uint32_t>(left[1]);
    r[3] = device_bits<uint32_t>(left[3]);
  }
}

SK_DEVICE uint32_t tf32_rest(uint32_t x, uint32_t high) {
  return to_tf32(device_bits<float>(x) - device_bits<float>(high));
}

// An operand A; float32 is split into hi and lo once.
template <class T>
struct A {
  uint32_t all[4];
  A() = default;
  SK_DEVICE explicit A(const uint32_t (&r)[4]) : all{r[0], r[1], r[2], r[3]} {}
};
template <>
struct A<float> {
  uint32_t high[4], low[4];
  A() = default;
  SK_DEVICE explicit A(const uint32_t (&r)[4]) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      high[n] = to_tf32(device_bits<float>(r[n]));
      low[n] = tf32_rest(r[n], high[n]);
    }
  }
};

// left (16 x 8), right (16 x 8) += a b, with b of 16 columns as Tile returns it. tf32 matters for float32 only.
template <class T>
SK_DEVICE void multiply(float (&left)[4], float (&right)[4], const A<T>& a, const uint32_t (&b)[4], bool tf32) {
  if constexpr (sizeof(T) == 2) {
    const uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
    mma_16816<T>(left, a.all, b0);
    mma_16816<T>(right, a.all, b1);
  } else {
    float part0[4] = {}, part1[4] = {};
    uint32_t high[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) high[n] = to_tf32(device_bits<float>(b[n]));
    const uint32_t h0[2] = {high[0], high[1]}, h1[2] = {high[2], high[3]};
    if (!tf32) {
      const uint32_t l0[2] = {tf32_rest(b[0], high[0]), tf32_rest(b[1], high[1])};
      const uint32_t l1[2] = {tf32_rest(b[2], high[2]), tf32_rest(b[3], high[3])};
      mma_1688_tf32(part0, a.high, l0);
      mma_1688_tf32(part1, a.high, l1);
      mma_1688_tf32(part0, a.low, h0);
      mma_1688_tf32(part1, a.low, h1);
    }
    mma_1688_tf32(part0, a.high, h0);
    mma_1688_tf32(part1, a.high, h1);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      left[e] += part0[e];
      right[e] += part1[e];
    }
  }
}

}  // namespace attention_mma
}  // namespace seqkern
