// The register-blocked product under attention and the recurrences: C[m, n] (+)= sum_k A(m, k) B[k, n], in words
// (operand.h).
//
// A is read element by element, with any two strides, so a transposed A costs nothing. B and C are read by rows, in
// whole vectors: their rows must be padded to a multiple of the vector width. A row of C depends only on its own row of
// A, in ascending k: other rows do not change the result.
//
// A long sum is taken in slices of 32 or 64 terms, each summed alone and then added to C, for less error than one chain
// over 128 terms.
//
// Register tile: the sums of MR x NR vectors of C stay in registers over a slice.
//   AVX-512   6 x 2 where B is packed, with as many registers again for the sums of all slices: C is read and written
//             once. 6 x 4 and slices of 32 where B is not: more rows of B in a cache line, and fewer visits to C
//   NEON      6 x 4, slices of 32 terms: 24 sums hide the latency of the addition to C
//   AVX2      6 x 2, slices of 64 terms, for speed. The first two terms of a slice are taken row by row, and need no
//             zeros to add to: that shortens the stall after the burst of twelve stores
// Matrix tiles (AMX) read panels four vectors wide. Measurements: NOTES.md; `python -m benchmarks loops` counts what
// the compiler makes of the inner loops.
#pragma once

#include "operand.h"

namespace seqkern {
namespace SK_TIER {
namespace {

// kGemmVecs: vectors of a register tile; of one whose B is packed, kPanelVecs.
constexpr int kGemmRows = 6;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kGemmVecs = 4;
#else
constexpr int kGemmVecs = 2;
#endif
#if defined(__AVX512F__) && !defined(SK_TILES)
constexpr int kPanelVecs = 2;
template <int MR, int NR>
constexpr bool kSumsInRegisters = 2 * MR * NR + NR + 1 <= 32;
#else
constexpr int kPanelVecs = kGemmVecs;
template <int MR, int NR>
constexpr bool kSumsInRegisters = false;
#endif
// What a tile prefetches:
//   panel  the next packed panel, to L2, a line with each term
//   sums   its part of C, for sums that come from L3: the loads at a slice's end would wait for them
enum class Prefetch { none, panel, sums };
constexpr bool kAhead = kPanelVecs < kGemmVecs;  // AVX2 is slower with panels ahead
constexpr Prefetch kPanelPrefetch = kAhead ? Prefetch::panel : Prefetch::none;
constexpr int64_t kGemmSlice = kGemmVecs == 4 ? 32 : 64;

// Which of A's strides is known to be 1: the addresses of a tile's elements then take one register, or six.
enum class UnitStride { none, k, row };
template <UnitStride U>
struct Unit {
  static constexpr UnitStride value = U;
};

// ahead: the next panel, with Prefetch::panel.
template <class A, int MR, int NR, UnitStride U = UnitStride::none, int64_t Slice = kGemmSlice,
          Prefetch P = Prefetch::none>
SK_INLINE void gemm_tile(int64_t K, const A* a, int64_t row_stride, int64_t k_stride, const A* b, int64_t ldb, A* c,
                         int64_t ldc, bool accumulate, const A* ahead = nullptr) {
  if (U == UnitStride::k) k_stride = 1;
  if (U == UnitStride::row) row_stride = 1;
  const auto element = [&](int i, int64_t k) { return broadcast_word(a + i * row_stride + k * k_stride); };
  const auto load_row = [&](int64_t k, Vec<A>(&row)[NR]) {
    for (int j = 0; j < NR; ++j) row[j] = load(b + k * ldb + j * W<A>);
  };
  const auto add_terms = [&](int64_t k, int64_t end, Vec<A>(&acc)[MR][NR]) {
    for (; k < end; ++k) {
      Vec<A> row[NR];
      load_row(k, row);
      if (P == Prefetch::panel) __builtin_prefetch(reinterpret_cast<const char*>(ahead) + k * 64, 0, 2);
      for (int i = 0; i < MR; ++i) {
        const Vec<A> x = element(i, k);
        for (int j = 0; j < NR; ++j) acc[i][j] = multiply_add(x, row[j], acc[i][j]);
      }
    }
  };
  int64_t k = 0;
  if constexpr (kSumsInRegisters<MR, NR>) {
    Vec<A> sums[MR][NR];
    for (int i = 0; i < MR; ++i)
      for (int j = 0; j < NR; ++j) sums[i][j] = accumulate ? load(c + i * ldc + j * W<A>) : broadcast<A>(-A(0));
    do {
      const int64_t end = K - k < Slice ? K : k + Slice;
      Vec<A> acc[MR][NR] = {};
      add_terms(k, end, acc);
      for (int i = 0; i < MR; ++i)
        for (int j = 0; j < NR; ++j) sums[i][j] += acc[i][j];
      k = end;
    } while (k < K);
    for (int i = 0; i < MR; ++i)
      for (int j = 0; j < NR; ++j) store(c + i * ldc + j * W<A>, sums[i][j]);
    return;
  }
  if (P == Prefetch::sums && accumulate) {
    for (int i = 0; i < MR; ++i)
      for (int j = 0; j < NR; ++j) __builtin_prefetch(c + i * ldc + j * W<A>, 1);
  }
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
    add_terms(k, end, acc);
    k = end;
    for (int i = 0; i < MR; ++i)
      for (int j = 0; j < NR; ++j) {
        A* out = c + i * ldc + j * W<A>;
        store(out, accumulate ? load(out) + acc[i][j] : acc[i][j]);
      }
    accumulate = true;
  } while (k < K);
}

// The tile of `rows` rows, at most MR. Inlined, gcc would spill operands of every tile of the caller.
template <class A, int MR, int NR, UnitStride U, int64_t Slice, Prefetch P>
__attribute__((noinline)) void gemm_tail(int64_t rows, int64_t K, const A* a, int64_t row_stride, int64_t k_stride,
                                         const A* b, int64_t ldb, A* c, int64_t ldc, bool accumulate, const A* ahead) {
  if (rows == MR) gemm_tile<A, MR, NR, U, Slice, P>(K, a, row_stride, k_stride, b, ldb, c, ldc, accumulate, ahead);
  else if constexpr (MR > 1)
    gemm_tail<A, MR - 1, NR, U, Slice, P>(rows, K, a, row_stride, k_stride, b, ldb, c, ldc, accumulate, ahead);
}

template <class A, int NR, UnitStride U = UnitStride::none, int64_t Slice = kGemmSlice, Prefetch P = Prefetch::none>
void gemm_columns(int64_t M, int64_t K, const A* a, int64_t row_stride, int64_t k_stride, const A* b, int64_t ldb, A* c,
                  int64_t ldc, bool accumulate, const A* ahead = nullptr) {
  int64_t m = 0;
  for (; m + kGemmRows <= M; m += kGemmRows)
    gemm_tile<A, kGemmRows, NR, U, Slice, P>(K, a + m * row_stride, row_stride, k_stride, b, ldb, c + m * ldc, ldc,
                                             accumulate, ahead);
  if (m < M)
    gemm_tail<A, kGemmRows - 1, NR, U, Slice, P>(M - m, K, a + m * row_stride, row_stride, k_stride, b, ldb,
                                                 c + m * ldc, ldc, accumulate, ahead);
}

template <class A, UnitStride U, Prefetch P>
void gemm_unit(int64_t M, int64_t N, int64_t K, const A* a, int64_t row_stride, int64_t k_stride, const A* b,
               int64_t ldb, A* c, int64_t ldc, bool accumulate) {
  int64_t n = 0;
  for (; n + kGemmVecs * W<A> <= N; n += kGemmVecs * W<A>)
    gemm_columns<A, kGemmVecs, U, kGemmSlice, P>(M, K, a, row_stride, k_stride, b + n, ldb, c + n, ldc, accumulate);
  for (; n < N; n += W<A>)
    gemm_columns<A, 1, U, kGemmSlice, P>(M, K, a, row_stride, k_stride, b + n, ldb, c + n, ldc, accumulate);
}

// N is a multiple of W<A>. Element (m, k) of A is a[m * row_stride + k * k_stride].
template <class A, Prefetch P = Prefetch::none>
SK_INLINE void gemm(int64_t M, int64_t N, int64_t K, const A* a, int64_t row_stride, int64_t k_stride, const A* b,
                    int64_t ldb, A* c, int64_t ldc, bool accumulate) {
  const auto with = [&](auto unit) SK_INLINED {
    gemm_unit<A, unit.value, P>(M, N, K, a, row_stride, k_stride, b, ldb, c, ldc, accumulate);
  };
  if (k_stride == 1) with(Unit<UnitStride::k>{});
  else if (row_stride == 1) with(Unit<UnitStride::row>{});
  else with(Unit<UnitStride::none>{});
}

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
