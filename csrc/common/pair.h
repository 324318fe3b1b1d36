// Two registers at once, for element types that are cheaper to widen and to round in pairs.
//
// AVX2 widens 16 bfloat16 numbers by interleaving them with zeros within each half of the register: the first result
// holds the first four numbers of each half, the second one the others. Restoring their order would take as long again.
// So they stay in that order, accumulators that go with them are loaded and stored in the same order, and the packing
// that rounds them restores it. Working with single vectors takes two and a half times the instructions.
#pragma once

#include "simd.h"

namespace seqkern {
namespace SK_TIER {
namespace {

#if defined(__AVX2__)
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
template <class T>
SK_INLINE Pair rounded_as(Pair x) {
  return {rounded_as<T>(x.a), rounded_as<T>(x.b)};
}

// What a loop over elements of type T takes at a time: a pair, or one vector.
template <class T>
using Packet = typename std::conditional<kInPairs<T>, Pair, Vec<acc_t<T>>>::type;
template <class U>
constexpr int kVectors = std::is_same<U, Pair>::value ? 2 : 1;

template <class U, class A>
SK_INLINE U broadcast_as(A x) {
  if constexpr (kVectors<U> == 2) return {broadcast<A>(x), broadcast<A>(x)};
  else return broadcast<A>(x);
}

#if defined(__AVX512F__)
// Lanes first, first + 2, ... of a and b; below, the inverse: one half of the original sequence.
SK_INLINE vf32 every_second(vf32 a, vf32 b, int first) {
  const vi32 even = constant_lanes<vi32, 16>([](int i) { return 2 * i; });
  return __builtin_shuffle(a, b, even + first);
}
SK_INLINE vf32 interleaved(vf32 a, vf32 b, int half) {
  const vi32 lower = constant_lanes<vi32, 16>([](int i) { return i / 2 + i % 2 * 16; });
  return __builtin_shuffle(a, b, lower + 8 * half);
}
#endif

// Loads elements, or accumulators that go with elements, as a packet.
template <class U, class T>
SK_INLINE U load_as(const T* p) {
  if constexpr (kVectors<U> == 1) {
    return load(p);
  } else {
#if defined(__AVX512F__)
    if constexpr (std::is_same<T, BFloat16>::value) {
      const vu32 x = bit_cast<vu32>(_mm512_loadu_si512(p));
      return {bit_cast<vf32>(x << 16), bit_cast<vf32>(x & 0xffff0000u)};
    } else {
      const vf32 first = load(p), second = load(p + 16);
      return {every_second(first, second, 0), every_second(first, second, 1)};
    }
#elif defined(__AVX2__)
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
#if defined(__AVX512F__)
    if constexpr (std::is_same<T, BFloat16>::value) {
      const auto round = [](vf32 x) {  // a NaN keeps its bits: rounding could turn it into a number
        const __m512i u = bit_cast<__m512i>(x);
        const __m512i half = _mm512_add_epi32(_mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1)),
                                              _mm512_set1_epi32(0x7fff));
        return _mm512_mask_add_epi32(u, _mm512_cmp_ps_mask(bit_cast<__m512>(x), bit_cast<__m512>(x), _CMP_ORD_Q), u,
                                     half);
      };
      const __m512i low = _mm512_srli_epi32(round(v.a), 16);
      _mm512_storeu_si512(
          p, _mm512_ternarylogic_epi32(low, round(v.b), _mm512_set1_epi32(static_cast<int>(0xffff0000u)), 0xf8 & 0xff));
    } else {
      store(p, interleaved(v.a, v.b, 0));
      store(p + 16, interleaved(v.a, v.b, 1));
    }
#elif defined(__AVX2__)
    if constexpr (std::is_same<T, BFloat16>::value) {
      const auto round = [](vf32 x) {
        const vu32 u = bit_cast<vu32>(x);
        return (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
      };
      vu32 a = round(v.a), b = round(v.b);
      const __m256 nan = _mm256_cmp_ps(bit_cast<__m256>(v.a), bit_cast<__m256>(v.b), _CMP_UNORD_Q);
      if (__builtin_expect(!_mm256_testz_ps(nan, nan), 0)) {  // rounding could turn a NaN into a number
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

// Accumulators stored in the packets' own order, which need no shuffle.
template <class U, class A>
SK_INLINE U load_ordered(const A* p) {
  if constexpr (kVectors<U> == 2) return {load(p), load(p + W<A>)};
  else return load(p);
}
template <class U, class A>
SK_INLINE void store_ordered(A* p, U v) {
  if constexpr (kVectors<U> == 2) {
    store(p, v.a);
    store(p + W<A>, v.b);
  } else {
    store(p, v);
  }
}
// Brings `count` accumulators that go with elements of type T into that order, as far as there are whole packets.
template <class T, class A>
SK_INLINE void order(int64_t count, const A* from, A* to) {
  int64_t c = 0;
  if constexpr (kInPairs<T>)
    for (; c + 2 * W<A> <= count; c += 2 * W<A>) store_ordered(to + c, load_as<Pair>(from + c));
  for (; c < count; ++c) to[c] = from[c];
}

// A pair's numbers in sequence.
SK_INLINE void in_sequence(Pair v, vf32 (&sequence)[2]) {
#if defined(__AVX512F__)
  sequence[0] = interleaved(v.a, v.b, 0);
  sequence[1] = interleaved(v.a, v.b, 1);
#elif defined(__AVX2__)
  sequence[0] = bit_cast<vf32>(_mm256_permute2f128_ps(bit_cast<__m256>(v.a), bit_cast<__m256>(v.b), 0x20));
  sequence[1] = bit_cast<vf32>(_mm256_permute2f128_ps(bit_cast<__m256>(v.a), bit_cast<__m256>(v.b), 0x31));
#endif
}

// The first n elements of a vector; a pair is always whole.
template <class U, class A>
SK_INLINE U load_ordered_upto(const A* p, int64_t n) {
  if constexpr (kVectors<U> == 1) return load_upto(p, n);
  else return load_ordered<U>(p);
}
template <class U, class A>
SK_INLINE void store_ordered_upto(A* p, U v, int64_t n) {
  if constexpr (kVectors<U> == 1) store_upto(p, v, n);
  else store_ordered(p, v);
}
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
