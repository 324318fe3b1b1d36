// SIMD for one tier: a register of `W<A>` accumulators, converting loads and stores, and exp, sigmoid and tanh.
//
// Written in the compiler's vector extension, so that one source serves every tier and architecture, at the tier's
// width. Everything has internal linkage: the linker could pick an AVX-512 version of a symbol for a machine without
// AVX-512, where it is an illegal instruction.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "dtype.h"

#if !defined(SK_TIER)
#error "simd.h belongs to the tier translation units: compile with -DSK_TIER=generic|avx2|avx512"
#endif

#if defined(__AVX512F__)
#define SK_VEC_BYTES 64
#elif defined(__AVX2__)
#define SK_VEC_BYTES 32
#else
#define SK_VEC_BYTES 16
#endif
#define SK_INLINE inline __attribute__((always_inline))
#define SK_INLINED __attribute__((always_inline))  // for lambdas

namespace seqkern {
namespace SK_TIER {
namespace {

typedef float vf32 __attribute__((vector_size(SK_VEC_BYTES)));
typedef double vf64 __attribute__((vector_size(SK_VEC_BYTES)));
typedef int32_t vi32 __attribute__((vector_size(SK_VEC_BYTES)));
typedef uint32_t vu32 __attribute__((vector_size(SK_VEC_BYTES)));
typedef int64_t vi64 __attribute__((vector_size(SK_VEC_BYTES)));
typedef uint16_t vu16 __attribute__((vector_size(SK_VEC_BYTES / 2)));  // as many lanes as vf32

template <class A>
struct VecTraits;
template <>
struct VecTraits<float> {
  using vec = vf32;
  using ivec = vi32;
  using integer = int32_t;
};
template <>
struct VecTraits<double> {
  using vec = vf64;
  using ivec = vi64;
  using integer = int64_t;
};
template <class A>
using Vec = typename VecTraits<A>::vec;
template <class A>
using IVec = typename VecTraits<A>::ivec;
template <class A>
constexpr int W = SK_VEC_BYTES / static_cast<int>(sizeof(A));

template <class A>
SK_INLINE Vec<A> broadcast(A x) {
  return x - Vec<A>{};
}
template <class A>
constexpr int64_t round_up(int64_t n) {
  return (n + W<A> - 1) / W<A> * W<A>;
}

// {f(0), f(1), ...} as a constant. A loop over v[i] = f(i) would build the vector at run time, lane by lane.
template <class V, class F, int... I>
SK_INLINE V constant_lanes(const F& f, std::integer_sequence<int, I...>) {
  return V{static_cast<typename std::remove_reference<decltype(V{}[0])>::type>(f(I))...};
}
template <class V, int Lanes, class F>
SK_INLINE V constant_lanes(const F& f) {
  return constant_lanes<V>(f, std::make_integer_sequence<int, Lanes>{});
}

template <class To, class From>
SK_INLINE To bit_cast(const From& x) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast between different sizes");
  To y;
  __builtin_memcpy(&y, &x, sizeof(To));
  return y;
}

// Keeps a product from being fused with an addition: it is rounded first.
template <class V>
SK_INLINE V rounded(V v) {
#if defined(__AVX512F__)
  __asm__("" : "+v"(v));
#elif defined(__x86_64__)
  __asm__("" : "+x"(v));
#elif defined(__aarch64__)
  __asm__("" : "+w"(v));
#endif
  return v;
}

// ---- load: W elements of T, as accumulators -------------------------------------------------------------------------
SK_INLINE vf32 load(const float* p) {
  vf32 v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
SK_INLINE vf64 load(const double* p) {
  vf64 v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
SK_INLINE vf32 load(const BFloat16* p) {
  // The compiler would widen the two halves of the vector separately and join them again.
#if defined(__AVX512F__)
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return bit_cast<vf32>(_mm512_slli_epi32(wide, 16));
#elif defined(__AVX2__)
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return bit_cast<vf32>(_mm256_slli_epi32(wide, 16));
#else
  vu16 h;
  __builtin_memcpy(&h, p, sizeof(h));
  return bit_cast<vf32>(__builtin_convertvector(h, vu32) << 16);
#endif
}
SK_INLINE vf32 load(const Half* p) {
#if defined(__AVX512F__)
  return bit_cast<vf32>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__F16C__)
  return bit_cast<vf32>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  // A multiplication shifts the exponent, and also normalises subnormals; infinity and NaN keep an exponent of all
  // ones.
  vu16 h16;
  __builtin_memcpy(&h16, p, sizeof(h16));
  const vu32 h = __builtin_convertvector(h16, vu32);
  const vu32 magnitude = bit_cast<vu32>(bit_cast<vf32>((h & 0x7fffu) << 13) * 0x1p112f);
  const vu32 special = bit_cast<vu32>((h & 0x7c00u) == 0x7c00u) & 0x7f800000u;
  return bit_cast<vf32>(magnitude | special | ((h & 0x8000u) << 16));
#endif
}

// ---- store: round to nearest even ----------------------------------------------------------------------------------
SK_INLINE void store(float* p, vf32 v) { __builtin_memcpy(p, &v, sizeof(v)); }
SK_INLINE void store(double* p, vf64 v) { __builtin_memcpy(p, &v, sizeof(v)); }
SK_INLINE void store(BFloat16* p, vf32 v) {
#if defined(__AVX512F__)
  const __m512i u = bit_cast<__m512i>(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(bit_cast<__m512>(v), bit_cast<__m512>(v), _CMP_UNORD_Q);
  const __m512i h = _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), nan, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(h));
#else
  const vu32 u = bit_cast<vu32>(v);
  const vu32 nan = bit_cast<vu32>(v != v);
  const vu32 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const vu16 h = __builtin_convertvector((nan & 0x7fc0u) | (~nan & rounded), vu16);
  __builtin_memcpy(p, &h, sizeof(h));
#endif
}
SK_INLINE void store(Half* p, vf32 v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(bit_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(bit_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT));
#else
  const vu32 u = bit_cast<vu32>(v), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  const vu32 nan = bit_cast<vu32>(a > 0x7f800000u), overflow = bit_cast<vu32>(a >= 0x477ff000u);
  const vu32 small = bit_cast<vu32>(a < 0x38800000u);
  const vu32 normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
  // Adding 0.5 aligns a subnormal's last bit with the last bit of the sum: the addition itself rounds.
  const vu32 subnormal = bit_cast<vu32>(bit_cast<vf32>(a) + 0.5f) - 0x3f000000u;
  vu32 r = (small & subnormal) | (~small & normal);
  r = (overflow & 0x7c00u) | (~overflow & r);
  r = (nan & 0x7e00u) | (~nan & r);
  const vu16 h = __builtin_convertvector(r | sign, vu16);
  __builtin_memcpy(p, &h, sizeof(h));
#endif
}

// The nearest numbers of a 16-bit type, in float.
template <class T>
SK_INLINE vf32 rounded_as(vf32 v) {
  if constexpr (std::is_same<T, BFloat16>::value) {
    const vu32 u = bit_cast<vu32>(v), nan = bit_cast<vu32>(v != v);
    const vu32 nearest = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
    return bit_cast<vf32>((nan & u) | (~nan & nearest));
  } else {
    T narrow[W<float>];
    store(narrow, v);
    return load(narrow);
  }
}

// The first n < W elements; the other lanes are zero. On AVX-512 by masks, elsewhere through memory.
#if defined(__AVX512F__)
SK_INLINE uint32_t lane_mask(int64_t n) { return n > 0 ? (1u << n) - 1 : 0; }
SK_INLINE vf32 load_partial(const float* p, int64_t n) {
  return bit_cast<vf32>(_mm512_maskz_loadu_ps(static_cast<__mmask16>(lane_mask(n)), p));
}
SK_INLINE vf64 load_partial(const double* p, int64_t n) {
  return bit_cast<vf64>(_mm512_maskz_loadu_pd(static_cast<__mmask8>(lane_mask(n)), p));
}
template <class T>
SK_INLINE vf32 load_partial(const T* p, int64_t n) {
  T padded[W<float>];
  const __m256i some = _mm256_maskz_loadu_epi16(static_cast<__mmask16>(lane_mask(n)), p);
  __builtin_memcpy(padded, &some, sizeof(some));
  return load(padded);
}
SK_INLINE void store_partial(float* p, vf32 v, int64_t n) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>(lane_mask(n)), bit_cast<__m512>(v));
}
SK_INLINE void store_partial(double* p, vf64 v, int64_t n) {
  _mm512_mask_storeu_pd(p, static_cast<__mmask8>(lane_mask(n)), bit_cast<__m512d>(v));
}
template <class T>
SK_INLINE void store_partial(T* p, vf32 v, int64_t n) {
  T padded[W<float>];
  store(padded, v);
  _mm256_mask_storeu_epi16(p, static_cast<__mmask16>(lane_mask(n)),
                           _mm256_loadu_si256(reinterpret_cast<const __m256i*>(padded)));
}
#else
template <class T>
SK_INLINE Vec<acc_t<T>> load_partial(const T* p, int64_t n) {
  T padded[W<acc_t<T>>] = {};
  for (int64_t i = 0; i < n; ++i) padded[i] = p[i];
  return load(padded);
}
template <class T>
SK_INLINE void store_partial(T* p, Vec<acc_t<T>> v, int64_t n) {
  T padded[W<acc_t<T>>];
  store(padded, v);
  for (int64_t i = 0; i < n; ++i) p[i] = padded[i];
}
#endif
template <class T>
SK_INLINE Vec<acc_t<T>> load_upto(const T* p, int64_t n) {
  return n >= W<acc_t<T>> ? load(p) : load_partial(p, n);
}
template <class T>
SK_INLINE void store_upto(T* p, Vec<acc_t<T>> v, int64_t n) {
  if (n >= W<acc_t<T>>) store(p, v);
  else store_partial(p, v, n);
}
// Zeroes the lanes from n on.
template <class A>
SK_INLINE Vec<A> keep_first(Vec<A> v, int64_t n) {
#if defined(__AVX512F__)
  if (n >= W<A>) return v;
  if constexpr (sizeof(A) == 4)
    return bit_cast<Vec<A>>(_mm512_maskz_mov_ps(static_cast<__mmask16>(lane_mask(n)), bit_cast<__m512>(v)));
  else return bit_cast<Vec<A>>(_mm512_maskz_mov_pd(static_cast<__mmask8>(lane_mask(n)), bit_cast<__m512d>(v)));
#endif
  for (int i = 0; i < W<A>; ++i) v[i] = i < n ? v[i] : A(0);
  return v;
}

// ---- transposition -----------------------------------------------------------------------------------------------
// Alternating runs of `Step` lanes: every second run of lanes of a is exchanged with the run before it in b.
template <class A, int Step>
SK_INLINE void exchange(Vec<A>& a, Vec<A>& b) {
  const Vec<A> first = a, second = b;
  const IVec<A> lower = constant_lanes<IVec<A>, W<A>>([](int i) { return i & Step ? W<A> + i - Step : i; });
  const IVec<A> upper = constant_lanes<IVec<A>, W<A>>([](int i) { return i & Step ? W<A> + i : i + Step; });
  a = __builtin_shuffle(first, second, lower);
  b = __builtin_shuffle(first, second, upper);
}

// v[i][j] becomes v[j][i]: exchanges off-diagonal blocks of 1, 2, 4, ... lanes.
template <class A, int Step = 1>
SK_INLINE void transpose_square(Vec<A> (&v)[W<A>]) {
  if constexpr (Step < W<A>) {
#pragma GCC unroll 16
    for (int i = 0; i < W<A>; ++i)
      if (!(i & Step)) exchange<A, Step>(v[i], v[i + Step]);
    transpose_square<A, 2 * Step>(v);
  }
}

// ---- reductions, in a fixed order ----------------------------------------------------------------------------------
template <class A, int Step>
SK_INLINE Vec<A> rotated(Vec<A> v) {
  return __builtin_shuffle(v, constant_lanes<IVec<A>, W<A>>([](int i) { return (i + Step) % W<A>; }));
}
template <class A, int Step = W<A> / 2, class Op>
SK_INLINE A reduce_lanes(Vec<A> v, const Op& op) {
  if constexpr (Step == 0) {
    return v[0];
  } else {
    return reduce_lanes<A, Step / 2>(op(v, rotated<A, Step>(v)), op);
  }
}
template <class A>
SK_INLINE A sum_lanes(Vec<A> v) {
  return reduce_lanes<A>(v, [](Vec<A> a, Vec<A> b) { return a + b; });
}
template <class A>
SK_INLINE A max_lanes(Vec<A> v) {
  return reduce_lanes<A>(v, [](Vec<A> a, Vec<A> b) { return a > b ? a : b; });
}

// Whether any lane of a mask is set.
SK_INLINE bool any(vi32 mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(bit_cast<__m512i>(mask), bit_cast<__m512i>(mask)) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256(bit_cast<__m256i>(mask), bit_cast<__m256i>(mask));
#else
  int32_t lanes = 0;
  for (int lane = 0; lane < W<float>; ++lane) lanes |= mask[lane];
  return lanes != 0;
#endif
}

// Of NaN and a number, returns the second argument, as the instructions do.
#if defined(__AVX512F__)
#define SK_MINMAX(name, V, intrinsic512, intrinsic256, op) \
  SK_INLINE V name(V a, V b) { return bit_cast<V>(intrinsic512(a, b)); }
#elif defined(__AVX2__)
#define SK_MINMAX(name, V, intrinsic512, intrinsic256, op) \
  SK_INLINE V name(V a, V b) { return bit_cast<V>(intrinsic256(a, b)); }
#else
#define SK_MINMAX(name, V, intrinsic512, intrinsic256, op) \
  SK_INLINE V name(V a, V b) { return a op b ? a : b; }
#endif
SK_MINMAX(vmax, vf32, _mm512_max_ps, _mm256_max_ps, >)
SK_MINMAX(vmax, vf64, _mm512_max_pd, _mm256_max_pd, >)
SK_MINMAX(vmin, vf32, _mm512_min_ps, _mm256_min_ps, <)
SK_MINMAX(vmin, vf64, _mm512_min_pd, _mm256_min_pd, <)
#undef SK_MINMAX

// 1 / x and a / x, to about 1 ulp, for normal x with a normal reciprocal. On AVX-512 an estimate of 14 bits and a
// Newton step: several times faster than a division of 16 floats, which takes half as long as the rest of a sigmoid.
SK_INLINE vf32 reciprocal(vf32 x) {
#if defined(__AVX512F__)
  const vf32 estimate = bit_cast<vf32>(_mm512_rcp14_ps(x));
  return estimate + estimate * (1.0f - x * estimate);
#else
  return 1.0f / x;
#endif
}
SK_INLINE vf32 divide(vf32 a, vf32 x) {
#if defined(__AVX512F__)
  const vf32 inverse = reciprocal(x), quotient = a * inverse;
  return quotient + inverse * (a - x * quotient);
#else
  return a / x;
#endif
}
SK_INLINE vf64 reciprocal(vf64 x) { return 1.0 / x; }
SK_INLINE vf64 divide(vf64 a, vf64 x) { return a / x; }

// ---- exp, sigmoid, tanh --------------------------------------------------------------------------------------------
template <class A>
struct ExpConstants;
template <>
struct ExpConstants<float> {
  static constexpr float ln2_high = 0x1.62e4p-1f, ln2_low = 0x1.7f7d1cp-20f, shifter = 0x1.8p23f;
  static constexpr float lowest = -87.33654f, highest = 88.72283f;  // exp is normal and finite between them
  static constexpr float sigmoid_top = 87;                          // and so is 1 / (1 + exp)
  static constexpr int mantissa = 23, bias = 127;
};
template <>
struct ExpConstants<double> {
  static constexpr double ln2_high = 0x1.62e42feep-1, ln2_low = 0x1.a39ef35793c76p-33, shifter = 0x1.8p52;
  static constexpr double lowest = -708.3964185322641, highest = 709.782712893384;
  static constexpr double sigmoid_top = 708;
  static constexpr int mantissa = 52, bias = 1023;
};

// x = n ln 2 + r with |r| <= ln 2 / 2; returns exp(r) - 1 with full relative accuracy, and 2^n as `scale`. In float a
// minimax polynomial of degree 6 (relative error 2^-28), in double Taylor terms up to degree 13.
template <class A>
SK_INLINE Vec<A> expm1_reduced(Vec<A> x, Vec<A>& scale) {
  using C = ExpConstants<A>;
  const Vec<A> shifted = x * A(1.4426950408889634) + C::shifter;
  const Vec<A> n = shifted - C::shifter;
  Vec<A> r = x - n * C::ln2_high;
  r = r - n * C::ln2_low;
  // The low bits of `shifted` hold n; n may be bias + 1 at the top end, where 2^n alone would overflow: see exp().
  const IVec<A> exponent = bit_cast<IVec<A>>(shifted) + C::bias;
  scale = bit_cast<Vec<A>>(exponent << C::mantissa);
  Vec<A> p;
  if constexpr (sizeof(A) == 4) {
    p = r * A(0.00138146105581) + A(0.00836871112901);
    p = p * r + A(0.0416683874878);
    p = p * r + A(0.166665206791);
    p = p * r + A(0.49999993451);
  } else {
    p = broadcast<A>(A(1.0 / 6227020800.0));
    p = p * r + A(1.0 / 479001600.0);
    p = p * r + A(1.0 / 39916800.0);
    p = p * r + A(1.0 / 3628800.0);
    p = p * r + A(1.0 / 362880.0);
    p = p * r + A(1.0 / 40320.0);
    p = p * r + A(1.0 / 5040.0);
    p = p * r + A(1.0 / 720.0);
    p = p * r + A(1.0 / 120.0);
    p = p * r + A(1.0 / 24);
    p = p * r + A(1.0 / 6);
    p = p * r + A(0.5);
  }
  return p * (r * r) + r;
}

// exp(x) for x <= 0, all that softmax and sigmoid need: error under about 1 ulp; 0 below `lowest`, NaN for NaN.
template <class A>
SK_INLINE Vec<A> exp_nonpositive(Vec<A> x) {
  const Vec<A> lowest = broadcast<A>(ExpConstants<A>::lowest);
  Vec<A> scale;
  const Vec<A> p = expm1_reduced<A>(vmax(lowest, x), scale);
  return x < lowest ? Vec<A>{} : scale + scale * p;
}

// 1 / (1 + exp(-x)), with exp(-x) clamped to normal numbers: both tails keep their relative accuracy, down to 1e-38.
template <class A>
SK_INLINE Vec<A> sigmoid(Vec<A> x) {
  const Vec<A> top = broadcast<A>(ExpConstants<A>::sigmoid_top);
  Vec<A> scale;
  const Vec<A> p = expm1_reduced<A>(vmin(top, vmax(-top, -x)), scale);
  return reciprocal(scale * p + (scale + A(1)));
}

// For small |x| Cephes' approximations (Moshier 1989), for large |x| 1 - rest with rest = 2 / (exp(2|x|) + 1), whose
// error hardly counts in the difference from 1. Error: 1.2 ulp at most, 1 from |x| = 20 on. Sets `slope` to the
// derivative 1 - tanh^2 = (1 - tanh |x|) (1 + tanh |x|), whose first factor is the rest: subtracting tanh^2 from 1
// would cancel.
template <class A>
SK_INLINE Vec<A> tanh(Vec<A> x, Vec<A>& slope) {
  const IVec<A> sign = bit_cast<IVec<A>>(x) & bit_cast<IVec<A>>(broadcast<A>(A(-0.0)));
  const Vec<A> magnitude = vmin(broadcast<A>(20), bit_cast<Vec<A>>(bit_cast<IVec<A>>(x) ^ sign));
  Vec<A> scale;
  const Vec<A> p = expm1_reduced<A>(magnitude + magnitude, scale);
  const Vec<A> rest = divide(broadcast<A>(2), scale * p + (scale + A(1)));
  const Vec<A> square = magnitude * magnitude;
  Vec<A> cubic;
  if constexpr (sizeof(A) == 4) {
    cubic = square * A(-5.70498872745e-3) + A(2.06390887954e-2);
    cubic = cubic * square + A(-5.37397155531e-2);
    cubic = cubic * square + A(1.33314422036e-1);
    cubic = cubic * square + A(-3.33332819422e-1);
  } else {
    const Vec<A> above =
        (square * A(-9.64399179425052238628e-1) + A(-9.92877231001918586564e1)) * square + A(-1.61468768441708447952e3);
    const Vec<A> below = ((square + A(1.12811678491631932402e2)) * square + A(2.23548839060100448583e3)) * square +
                         A(4.84406305325125486048e3);
    cubic = above / below;
  }
  const Vec<A> t = magnitude > A(0.625) ? A(1) - rest : magnitude + magnitude * square * cubic;
  // Beyond the clamp the derivative underflows: it must be zero, or a large cell state would multiply a remainder of
  // it.
  slope = magnitude >= A(20) ? Vec<A>{} : rest * (A(1) + t);
  return bit_cast<Vec<A>>(bit_cast<IVec<A>>(t) | sign);
}
template <class A>
SK_INLINE Vec<A> tanh(Vec<A> x) {
  Vec<A> slope;
  return tanh<A>(x, slope);
}

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
