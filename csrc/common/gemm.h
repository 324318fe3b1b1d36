// The register-blocked product under attention and the recurrences: C[m, n] (+)= sum_k A(m, k) B[k, n], in words
// (operand.h).
//
// A is read element by element, with any two strides, so a transposed A costs nothing. B and C are read by rows, in
// whole vectors: their rows must be padded to a multiple of the vector width. A row of C depends only on its own row of
// A, in ascending k: other rows do not change the result.
//
// A long sum is taken in slices, each summed alone and then added to C, for less error than one chain over 128 terms. A
// slice has 32 terms where 24 accumulators hide the latency of that addition. It has 64 where there are only 12, for
// speed.
//
// Register tile: MR x NR vectors of accumulators stay in registers over the whole k loop. 32 registers (AVX-512, NEON)
// hold 6 x 4 of them, 16 registers 6 x 2. 8 x 3 and 14 x 2 do the same work per load, but leave a remainder at the
// usual widths (64, 128).
//
// With 12 accumulators the first two terms of a slice are taken row by row, and need no zeros to add to: that shortens
// the stall after the burst of twelve stores. Measurements: NOTES.md.
#pragma once

#include "operand.h"

namespace seqkern {
namespace SK_TIER {
namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kGemmRows = 6, kGemmVecs = 4;
#else
constexpr int kGemmRows = 6, kGemmVecs = 2;
#endif
constexpr int64_t kGemmSlice = kGemmVecs == 4 ? 32 : 64;

// Which of A's strides is known to be 1: the addresses of a tile's elements then take one register, or six.
enum class UnitStride { none, k, row };

template <class A, int MR, int NR, UnitStride U = UnitStride::none, int64_t Slice = kGemmSlice>
SK_INLINE void gemm_tile(int64_t K, const A* a, int64_t row_stride, int64_t k_stride, const A* b, int64_t ldb, A* c,
                         int64_t ldc, bool accumulate) {
  if (U == UnitStride::k) k_stride = 1;
  if (U == UnitStride::row) row_stride = 1;
  const auto element = [&](int i, int64_t k) { return broadcast_word(a + i * row_stride + k * k_stride); };
  const auto load_row = [&](int64_t k, Vec<A>(&row)[NR]) {
    for (int j = 0; j < NR; ++j) row[j] = load(b + k * ldb + j * W<A>);
  };
  int64_t k = 0;
  do {
    const int64_t end = K - k < Slice ? K : k + Slice;
    Vec<A> acc[MR][NR];
    if (kGemmVecs == 2 && end - k >= 2) {
      Vec<A> first[NR], second[NR];
      load_row(k, first);
      load_row(k + 1, second);
      for (int i = 0; i < MR; ++i) {
        const Vec<A> x = element(i, k), y = element(i, k + 1);
        for (int j = 0; j < NR; ++j) acc[i][j] = rounded(x * first[j]) + y * second[j];
      }
      k += 2;
    } else {
      for (int i = 0; i < MR; ++i)
        for (int j = 0; j < NR; ++j) acc[i][j] = Vec<A>{};
    }
    for (; k < end; ++k) {
      Vec<A> row[NR];
      load_row(k, row);
      for (int i = 0; i < MR; ++i) {
        const Vec<A> x = element(i, k);
        for (int j = 0; j < NR; ++j) acc[i][j] = multiply_add(x, row[j], acc[i][j]);
      }
    }
    for (int i = 0; i < MR; ++i)
      for (int j = 0; j < NR; ++j) {
        A* out = c + i * ldc + j * W<A>;
        store(out, accumulate ? load(out) + acc[i][j] : acc[i][j]);
      }
    accumulate = true;
  } while (k < K);
}

template <class A, int NR, UnitStride U = UnitStride::none, int64_t Slice = kGemmSlice>
void gemm_columns(int64_t M, int64_t K, const A* a, int64_t row_stride, int64_t k_stride, const A* b, int64_t ldb, A* c,
                  int64_t ldc, bool accumulate) {
  int64_t m = 0;
  for (; m + kGemmRows <= M; m += kGemmRows)
    gemm_tile<A, kGemmRows, NR, U, Slice>(K, a + m * row_stride, row_stride, k_stride, b, ldb, c + m * ldc, ldc,
                                          accumulate);
  const A* tail_a = a + m * row_stride;
  A* tail_c = c + m * ldc;
  switch (M - m) {
    case 5: gemm_tile<A, 5, NR, U, Slice>(K, tail_a, row_stride, k_stride, b, ldb, tail_c, ldc, accumulate); break;
    case 4: gemm_tile<A, 4, NR, U, Slice>(K, tail_a, row_stride, k_stride, b, ldb, tail_c, ldc, accumulate); break;
    case 3: gemm_tile<A, 3, NR, U, Slice>(K, tail_a, row_stride, k_stride, b, ldb, tail_c, ldc, accumulate); break;
    case 2: gemm_tile<A, 2, NR, U, Slice>(K, tail_a, row_stride, k_stride, b, ldb, tail_c, ldc, accumulate); break;
    case 1: gemm_tile<A, 1, NR, U, Slice>(K, tail_a, row_stride, k_stride, b, ldb, tail_c, ldc, accumulate); break;
    default: break;
  }
}

template <class A, UnitStride U>
void gemm_unit(int64_t M, int64_t N, int64_t K, const A* a, int64_t row_stride, int64_t k_stride, const A* b,
               int64_t ldb, A* c, int64_t ldc, bool accumulate) {
  int64_t n = 0;
  for (; n + kGemmVecs * W<A> <= N; n += kGemmVecs * W<A>)
    gemm_columns<A, kGemmVecs, U>(M, K, a, row_stride, k_stride, b + n, ldb, c + n, ldc, accumulate);
  for (; n < N; n += W<A>) gemm_columns<A, 1, U>(M, K, a, row_stride, k_stride, b + n, ldb, c + n, ldc, accumulate);
}

// N is a multiple of W<A>. Element (m, k) of A is a[m * row_stride + k * k_stride].
template <class A>
SK_INLINE void gemm(int64_t M, int64_t N, int64_t K, const A* a, int64_t row_stride, int64_t k_stride, const A* b,
                    int64_t ldb, A* c, int64_t ldc, bool accumulate) {
  if (k_stride == 1) gemm_unit<A, UnitStride::k>(M, N, K, a, row_stride, k_stride, b, ldb, c, ldc, accumulate);
  else if (row_stride == 1) gemm_unit<A, UnitStride::row>(M, N, K, a, row_stride, k_stride, b, ldb, c, ldc, accumulate);
  else gemm_unit<A, UnitStride::none>(M, N, K, a, row_stride, k_stride, b, ldb, c, ldc, accumulate);
}

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
