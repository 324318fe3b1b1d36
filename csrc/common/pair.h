// Two registers at once, for element types that are cheaper to widen and to round in pairs.
//
// AVX2 widens 16 bfloat16 numbers by two interleavings with zero, within halves of a register: the first result holds
// the first four of each half, the second one the others. To bring them into their order takes as long again, so they
// stay where they are, what goes with them is loaded and stored in the same places (`beside`), and one packing restores
// the order when they are rounded. A vector at a time takes two and a half times the instructions.
#pragma once

#include "simd.h"

namespace seqkern {
namespace SK_TIER {
namespace {

#if defined(__AVX2__) && !defined(__AVX512F__)
template <class T>
constexpr bool kInPairs = std::is_same<T, BFloat16>::value;
#else
template <class T>
constexpr bool kInPairs = false;
#endif

struct Pair {
  vf32 a, b;
};
SK_INLINE Pair operator+(Pair x, Pair y) { return {x.a + y.a, x.b + y.b}; }
SK_INLINE Pair operator-(Pair x, Pair y) { return {x.a - y.a, x.b - y.b}; }
SK_INLINE Pair operator*(Pair x, Pair y) { return {x.a * y.a, x.b * y.b}; }
SK_INLINE Pair operator-(Pair x, float y) { return {x.a - y, x.b - y}; }
SK_INLINE Pair operator*(Pair x, float y) { return {x.a * y, x.b * y}; }
SK_INLINE Pair& operator+=(Pair& x, Pair y) { return x = x + y; }
SK_INLINE Pair rounded(Pair x) { return {rounded(x.a), rounded(x.b)}; }

// What a loop takes at a time of elements of type T.
template <class T>
using Unit = typename std::conditional<kInPairs<T>, Pair, Vec<acc_t<T>>>::type;
template <class U>
constexpr int kVectors = std::is_same<U, Pair>::value ? 2 : 1;

template <class U, class A>
SK_INLINE U broadcast_as(A x) {
  if constexpr (kVectors<U> == 2) return {broadcast<A>(x), broadcast<A>(x)};
  else return broadcast<A>(x);
}

// Elements, or accumulators beside elements, as a unit.
template <class U, class T>
SK_INLINE U load_as(const T* p) {
  if constexpr (kVectors<U> == 1) {
    return load(p);
  } else {
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (std::is_same<T, BFloat16>::value) {
      const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), zero = _mm256_setzero_si256();
      return {bit_cast<vf32>(_mm256_unpacklo_epi16(zero, x)), bit_cast<vf32>(_mm256_unpackhi_epi16(zero, x))};
    } else {
      return {bit_cast<vf32>(_mm256_loadu2_m128(p + 8, p)), bit_cast<vf32>(_mm256_loadu2_m128(p + 12, p + 4))};
    }
#endif
  }
}

template <class U, class T>
SK_INLINE void store_as(T* p, U v) {
  if constexpr (kVectors<U> == 1) {
    store(p, v);
  } else {
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (std::is_same<T, BFloat16>::value) {
      const auto round = [](vf32 x) {
        const vu32 u = bit_cast<vu32>(x);
        return (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
      };
      vu32 a = round(v.a), b = round(v.b);
      const __m256 nan = _mm256_cmp_ps(bit_cast<__m256>(v.a), bit_cast<__m256>(v.b), _CMP_UNORD_Q);
      if (__builtin_expect(!_mm256_testz_ps(nan, nan), 0)) {  // rounding could carry a NaN's bits away
        a = v.a != v.a ? a - a + 0x7fc0u : a;
        b = v.b != v.b ? b - b + 0x7fc0u : b;
      }
      const __m256i packed = _mm256_packus_epi32(bit_cast<__m256i>(a), bit_cast<__m256i>(b));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
    } else {
      _mm256_storeu2_m128(p + 8, p, bit_cast<__m256>(v.a));
      _mm256_storeu2_m128(p + 12, p + 4, bit_cast<__m256>(v.b));
    }
#endif
  }
}

// The first n elements of a vector; a pair is always whole.
template <class U, class T>
SK_INLINE U load_upto_as(const T* p, int64_t n) {
  if constexpr (kVectors<U> == 1) return load_upto(p, n);
  else return load_as<U>(p);
}
template <class U, class T>
SK_INLINE void store_upto_as(T* p, U v, int64_t n) {
  if constexpr (kVectors<U> == 1) store_upto(p, v, n);
  else store_as(p, v);
}

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
