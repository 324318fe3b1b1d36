// The operands of the products of gemm.h.
//
// An operand is stored in words of an accumulator's size. A word is one number of the accumulation type. Where a source
// file defines SK_PAIRS, it is a pair of bfloat16 numbers, consecutive along k, and a multiply-add is a bf16 dot
// product (VDPBF16PS), which adds both products of each lane's pair. A sum over k numbers takes words(k) words; missing
// numbers are zero in both operands. Nothing else differs: words are loaded, broadcast and transposed as if they were
// accumulators.
//
// On AMX such a file uses matrix tiles (matrix_tiles.h), which take kDepthStep words at a time: rows of an operand are
// padded with zeros to whole steps, padded_words(k) words.
#pragma once

#include "simd.h"

#if defined(SK_PAIRS) && defined(__AMX_BF16__)
#define SK_TILES
#endif

namespace seqkern {
namespace SK_TIER {
namespace {

#if defined(SK_PAIRS)
constexpr int64_t kTerms = 2;
template <class A>
using Number = BFloat16;
#else
constexpr int64_t kTerms = 1;
template <class A>
using Number = A;
#endif

#if defined(SK_TILES)
constexpr int64_t kDepthStep = 16;
#else
constexpr int64_t kDepthStep = 1;
#endif

constexpr int64_t words(int64_t numbers) { return (numbers + kTerms - 1) / kTerms; }
constexpr int64_t padded_words(int64_t numbers) { return (words(numbers) + kDepthStep - 1) / kDepthStep * kDepthStep; }

template <class V>
SK_INLINE V multiply_add(V x, V y, V sum) {
#if defined(SK_PAIRS)
  return bit_cast<V>(_mm512_dpbf16_ps(bit_cast<__m512>(sum), bit_cast<__m512bh>(x), bit_cast<__m512bh>(y)));
#else
  return sum + x * y;
#endif
}

// Broadcasts a word, which need not be aligned.
template <class A>
SK_INLINE Vec<A> broadcast_word(const A* p) {
  A x;
  __builtin_memcpy(&x, p, sizeof(x));
  return broadcast<A>(x);
}

// Loads W words from the first n consecutive numbers.
template <class T>
SK_INLINE Vec<acc_t<T>> load_words(const T* p, int64_t n) {
#if defined(SK_PAIRS)
  const __mmask32 mask = n >= 32 ? ~__mmask32{0} : (__mmask32{1} << (n > 0 ? n : 0)) - 1;
  if constexpr (std::is_same<T, BFloat16>::value) {
    return bit_cast<vf32>(_mm512_maskz_loadu_epi16(mask, p));
  } else {
    const __m512 a = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), p);
    const __m512 b = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), p + 16);
    return bit_cast<vf32>(_mm512_cvtne2ps_pbh(b, a));
  }
#else
  return load_upto(p, n);
#endif
}

// Loads W words from the first n columns from `column` on, of the kTerms rows that a word joins: row(0) and, for pairs,
// row(1). A null row is zeros.
template <class T, class RowAt>
SK_INLINE Vec<acc_t<T>> load_rows(const RowAt& row, int64_t column, int64_t n) {
#if defined(SK_PAIRS)
  const T *first = row(0), *second = row(1);
  const __mmask16 mask = static_cast<__mmask16>(n >= 16 ? 0xffff : (1 << (n > 0 ? n : 0)) - 1);
  const auto bits = [&](const T* p) {
    if (!p) return _mm512_setzero_si512();
    if constexpr (std::is_same<T, BFloat16>::value)
      return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p + column));
    else return _mm512_cvtepu16_epi32(bit_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, p + column))));
  };
  return bit_cast<vf32>(_mm512_or_si512(bits(first), _mm512_slli_epi32(bits(second), 16)));
#else
  const T* p = row(0);
  return p ? load_upto(p + column, n) : Vec<acc_t<T>>{};
#endif
}

// The same for 2 W words.
template <class T, class RowAt>
SK_INLINE void load_rows_twice(const RowAt& row, int64_t column, int64_t n, Vec<acc_t<T>> (&to)[2]) {
#if defined(SK_PAIRS)
  if constexpr (std::is_same<T, BFloat16>::value) {
    alignas(64) static constexpr uint16_t kIndex[2][32] = {
        {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
         8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
        {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
         24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
    const __mmask32 mask = n >= 32 ? ~__mmask32{0} : (__mmask32{1} << (n > 0 ? n : 0)) - 1;
    const auto bits = [&](const T* p) {
      return p ? _mm512_maskz_loadu_epi16(mask, p + column) : _mm512_setzero_si512();
    };
    const __m512i first = bits(row(0)), second = bits(row(1));
    for (int i = 0; i < 2; ++i)
      to[i] = bit_cast<vf32>(_mm512_permutex2var_epi16(first, _mm512_load_si512(kIndex[i]), second));
    return;
  }
#endif
  to[0] = load_rows<T>(row, column, n);
  to[1] = load_rows<T>(row, column + W<acc_t<T>>, n - W<acc_t<T>>);
}

// Zeros after the last number of an operand's row, up to the end of its last word or step: at most kOperandEnd.
constexpr int64_t kOperandEnd = kTerms * kDepthStep;
template <class N>
SK_INLINE void end_operand(N* end) {
#if defined(SK_TILES)
  _mm512_storeu_si512(end, _mm512_setzero_si512());
#elif defined(SK_PAIRS)
  *end = N{};
#else
  (void)end;
#endif
}
// Converts a row of `depth` numbers to an operand.
template <class A, class T>
SK_INLINE void as_operand_row(const T* from, int64_t depth, A* to) {
  for (int64_t k = 0; k < padded_words(depth); k += W<A>)
    store(to + k, load_words(from + k * kTerms, depth - k * kTerms));
}

// Stores W numbers to an operand's row from number `at` on, of which n exist until the row's end. The rest is zero, up
// to the end of the last word or step.
template <class A>
SK_INLINE void store_numbers(A* row, int64_t at, Vec<A> v, int64_t n) {
#if defined(SK_PAIRS)
  BFloat16* to = reinterpret_cast<BFloat16*>(row) + at;
  store(to, n >= W<A> ? v : keep_first<A>(v, n));
  if (kDepthStep > 1 && n <= W<A> && at % kOperandEnd < kOperandEnd - W<A>) store(to + W<A>, Vec<A>{});
#else
  store(row + at, v);
#endif
}

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern

#if defined(SK_PAIRS)
// Runs a statement with `T` bound to the element type: the layer's, or its accumulation type.
#define SK_BY_TYPE(dtype, ...) \
  if (dtype == Dtype::f32) {   \
    using T = float;           \
    __VA_ARGS__;               \
  } else {                     \
    using T = BFloat16;        \
    __VA_ARGS__;               \
  }
// Evaluates an expression in the accumulation type `A`.
#define SK_BY_ACC(dtype, ...) \
  using A = float;            \
  return __VA_ARGS__
#else
#define SK_BY_TYPE SK_DISPATCH
#define SK_BY_ACC(dtype, ...) \
  if (dtype == Dtype::f64) {  \
    using A = double;         \
    return __VA_ARGS__;       \
  }                           \
  using A = float;            \
  return __VA_ARGS__
#endif
