// Rotary position embeddings on CPU. Compiled once per instruction-set tier.
//
//   pair (a, b) of features, turned by the angle t = position * inv_freq of the pair:
//     a' = a cos t - b sin t,   b' = b cos t + a sin t               Su et al. 2021, eq. 34; theta: section 3.2.2
//   The gradient turns back: the transposed matrix, `inverse`. Features from rotary_dim on are copied.
//   A table with a number for each feature has cos and sin of a and of b apart, as models hand them over.
//
// Memory sets the time: each number is read once and written once. A thread takes kRopeTokens tokens, whose tables stay
// in L1 while it goes through the heads, in the order of memory: heads inside of tokens, or tokens inside of heads.
// Products are float32 (float64 for float64), rounded once.
//
// Tables: the angle is a float64 product, reduced by multiples of pi / 2 in three parts (exact up to 2^20 of them:
// positions up to 1.6e6 at frequency 1), then polynomials of Taylor up to r^17, r <= pi / 4: float64 to the last bits.
// In float32 an angle of 1e6 would be off by 0.03.
#include "rope/rope.h"
#include "simd.h"

namespace seqkern {
namespace SK_TIER {
namespace {

template <class A>
SK_INLINE Vec<A> evens(Vec<A> a, Vec<A> b) {
  return __builtin_shuffle(a, b, constant_lanes<IVec<A>, W<A>>([](int i) { return 2 * i; }));
}
template <class A>
SK_INLINE Vec<A> odds(Vec<A> a, Vec<A> b) {
  return __builtin_shuffle(a, b, constant_lanes<IVec<A>, W<A>>([](int i) { return 2 * i + 1; }));
}
template <class A, int Half>
SK_INLINE Vec<A> interleave(Vec<A> a, Vec<A> b) {
  return __builtin_shuffle(
      a, b, constant_lanes<IVec<A>, W<A>>([](int i) { return i / 2 + i % 2 * W<A> + Half * (W<A> / 2); }));
}

// 2 n numbers, n < = W, as the even and the odd ones.
template <class T>
SK_INLINE void load_pairs(const T* p, int64_t n, Vec<acc_t<T>>& even, Vec<acc_t<T>>& odd) {
  using A = acc_t<T>;
  const int64_t first = 2 * n < W<A> ? 2 * n : W<A>;
  const Vec<A> a = load_upto(p, first), b = first < 2 * n ? load_upto(p + W<A>, 2 * n - W<A>) : Vec<A>{};
  even = evens<A>(a, b);
  odd = odds<A>(a, b);
}
template <class T>
SK_INLINE void store_pairs(T* p, int64_t n, Vec<acc_t<T>> even, Vec<acc_t<T>> odd) {
  using A = acc_t<T>;
  const int64_t first = 2 * n < W<A> ? 2 * n : W<A>;
  store_upto(p, interleave<A, 0>(even, odd), first);
  if (first < 2 * n) store_upto(p + W<A>, interleave<A, 1>(even, odd), 2 * n - W<A>);
}

// One head of one token.
template <class T, bool Interleaved, bool Wide>
SK_INLINE void turn(const Rope& p, const T* x, T* y, const acc_t<T>* cos, const acc_t<T>* sin) {
  using A = acc_t<T>;
  const int64_t half = p.rotary_dim / 2;
  const A sign = p.inverse ? A(-1) : A(1);
  const auto some = [&](int64_t j, int64_t n) SK_INLINED {
    Vec<A> a, b, cos_a, cos_b, sin_a, sin_b;
    if constexpr (Interleaved) load_pairs(x + 2 * j, n, a, b);
    else a = load_upto(x + j, n), b = load_upto(x + half + j, n);
    if constexpr (!Wide) {
      cos_a = cos_b = load_upto(cos + j, n);
      sin_a = sin_b = load_upto(sin + j, n) * sign;
    } else {
      if constexpr (Interleaved) {
        load_pairs(cos + 2 * j, n, cos_a, cos_b);
        load_pairs(sin + 2 * j, n, sin_a, sin_b);
      } else {
        cos_a = load_upto(cos + j, n), cos_b = load_upto(cos + half + j, n);
        sin_a = load_upto(sin + j, n), sin_b = load_upto(sin + half + j, n);
      }
      if (p.inverse) {  // the sines stand in the other row of the transposed matrix
        const Vec<A> kept = -sin_a;
        sin_a = -sin_b;
        sin_b = kept;
      }
    }
    const Vec<A> first = a * cos_a - b * sin_a, second = b * cos_b + a * sin_b;
    if constexpr (Interleaved) store_pairs(y + 2 * j, n, first, second);
    else store_upto(y + j, first, n), store_upto(y + half + j, second, n);
  };
  int64_t j = 0;
  for (; j + W<A> <= half; j += W<A>) some(j, W<A>);
  if (j < half) some(j, half - j);
  if (p.rotary_dim < p.dim) __builtin_memcpy(y + p.rotary_dim, x + p.rotary_dim, (p.dim - p.rotary_dim) * sizeof(T));
}

template <class T, bool Interleaved, bool Wide>
void rotate_tokens(const Rope& p, int64_t sequence, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  for (int i = 0; i < p.side_count; ++i) {
    const RopeHeads& side = p.sides[i];
    const T* input = static_cast<const T*>(side.input) + sequence * side.batch_stride;
    T* output = static_cast<T*>(side.output) + sequence * side.out_batch_stride;
    const auto one = [&](int64_t head, int64_t token) SK_INLINED {
      const int64_t at = sequence * p.table_batch_stride + token * p.width;
      turn<T, Interleaved, Wide>(p, input + head * side.head_stride + token * side.token_stride,
                                 output + head * side.out_head_stride + token * side.out_token_stride,
                                 static_cast<const A*>(p.cos) + at, static_cast<const A*>(p.sin) + at);
    };
    if (side.out_head_stride < side.out_token_stride) {
      for (int64_t token = begin; token < end; ++token)
        for (int64_t head = 0; head < side.heads; ++head) one(head, token);
    } else {
      for (int64_t head = 0; head < side.heads; ++head)
        for (int64_t token = begin; token < end; ++token) one(head, token);
    }
  }
}

void rotate(const Rope& p, int64_t sequence, int64_t begin, int64_t end) {
  const bool wide = p.width == p.rotary_dim && p.rotary_dim > 0;
  SK_DISPATCH(p.dtype, {
    if (p.interleaved && wide) rotate_tokens<T, true, true>(p, sequence, begin, end);
    else if (p.interleaved) rotate_tokens<T, true, false>(p, sequence, begin, end);
    else if (wide) rotate_tokens<T, false, true>(p, sequence, begin, end);
    else rotate_tokens<T, false, false>(p, sequence, begin, end);
  });
}

// cos and sin of an angle in radians.
SK_INLINE void cos_sin(Vec<double> angle, Vec<double>& cos, Vec<double>& sin) {
  using V = Vec<double>;
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to a whole number, in the low bits
  const V shifted = rounded(angle * 0.63661977236758134308) + kMagic;
  const IVec<double> quarter = bit_cast<IVec<double>>(shifted);
  const V k = shifted - kMagic;
  // pi / 2 in three parts; the first two have 33 bits, so that k times them is exact.
  V r = angle - rounded(k * 1.57079632673412561417);
  r = r - rounded(k * 6.07710050630396597660e-11);
  r = r - k * 2.02226624879595063154e-21;
  const V z = r * r;
  static constexpr double kSin[] = {-1.0 / 6,
                                    1.0 / 120,
                                    -1.0 / 5040,
                                    1.0 / 362880,
                                    -1.0 / 39916800,
                                    1.0 / 6227020800.0,
                                    -1.0 / 1307674368000.0,
                                    1.0 / 355687428096000.0};
  static constexpr double kCos[] = {-1.0 / 2,       1.0 / 24,          -1.0 / 720,           1.0 / 40320,
                                    -1.0 / 3628800, 1.0 / 479001600.0, -1.0 / 87178291200.0, 1.0 / 20922789888000.0};
  V s = broadcast<double>(kSin[7]), c = broadcast<double>(kCos[7]);
  for (int i = 6; i >= 0; --i) {
    s = s * z + kSin[i];
    c = c * z + kCos[i];
  }
  s = r + r * (z * s);
  c = c * z + 1.0;
  const IVec<double> swap = (quarter & 1) != 0, minus_sin = (quarter & 2) != 0, minus_cos = ((quarter + 1) & 2) != 0;
  const V sine = swap ? c : s, cosine = swap ? s : c;
  sin = minus_sin ? -sine : sine;
  cos = minus_cos ? -cosine : cosine;
}

template <class T>
void table_rows(const RopeTables& p, int64_t row_begin, int64_t row_end) {
  constexpr int kLanes = W<double>;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const double position = static_cast<double>(p.positions[row]);
    T *to_cos = static_cast<T*>(p.cos) + row * p.columns, *to_sin = static_cast<T*>(p.sin) + row * p.columns;
    for (int64_t c = 0; c < p.columns; c += kLanes) {
      const int64_t n = p.columns - c < kLanes ? p.columns - c : kLanes;
      Vec<double> cos, sin;
      cos_sin(load_upto(p.inv_freq + c, n) * position, cos, sin);
      double lanes[2][kLanes];
      store(lanes[0], cos * p.scaling);
      store(lanes[1], sin * p.scaling);
      for (int64_t i = 0; i < n; ++i) {
        to_cos[c + i] = static_cast<T>(lanes[0][i]);
        to_sin[c + i] = static_cast<T>(lanes[1][i]);
      }
    }
  }
}

void tables(const RopeTables& p, int64_t row_begin, int64_t row_end) {
  if (p.dtype == Dtype::f64) table_rows<double>(p, row_begin, row_end);
  else table_rows<float>(p, row_begin, row_end);
}

}  // namespace

const RopeKernels rope_kernels = {rotate, tables};

}  // namespace SK_TIER
}  // namespace seqkern
