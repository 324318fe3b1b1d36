// Activations of vectors, with their slopes. For the kernels, which are compiled once per instruction-set tier.
//
//   silu:       a = g s(g),          a' = s + g s (1 - s),        s the sigmoid
//   gelu:       a = g P(g),          a' = P + g p,                P, p the normal distribution and density
//   gelu_tanh:  a = g s(2 v(g)),     a' = s + 2 g s (1 - s) v',   v = sqrt(2 / pi) (g + 0.044715 g^3)
//   relu:       a = max(g, 0),       a' = 1 where g > 0, else 0
//
// 0.5 (1 + tanh v) is computed as s(2 v): 1 + tanh v cancels for negative v. 1 - s is computed as exp(-x) s, and P of a
// negative g without a subtraction: both tails keep their relative accuracy. At minus infinity a is NaN, as torch's is
// (but of relu).
#pragma once

#include "activation.h"
#include "simd.h"

namespace seqkern {
namespace SK_TIER {

// s(x) and 1 - s(x); 1 - s is 0 where exp underflows, because a large x would multiply a remainder.
template <class A>
SK_INLINE Vec<A> sigmoid_both(Vec<A> x, Vec<A>& complement) {
  const Vec<A> top = broadcast<A>(ExpConstants<A>::sigmoid_top);
  Vec<A> scale;
  const Vec<A> p = expm1_reduced<A>(vmin(top, vmax(-top, -x)), scale);
  const Vec<A> s = reciprocal(scale * p + (scale + A(1)));
  complement = x > top ? Vec<A>{} : (scale * p + scale) * s;
  return x < -top ? Vec<A>{} : s;
}

// P(x) = erfc(-x / sqrt 2) / 2. For a = |x|, P(-a) = exp(-a^2 / 2) h(t) / (1 + 2 a), t = (a - 4) / (a + 4) in [-1, 1).
// h is the polynomial through its values at Chebyshev's nodes (11 terms: relative error 6e-9; 24 terms: 2e-17). Sets
// `density` to exp(-x^2 / 2) / sqrt(2 pi).
template <class A>
SK_INLINE Vec<A> normal_distribution(Vec<A> x, Vec<A>& density) {
  static constexpr float kSingle[] = {0.8496957718f,   -0.02300920656f, -0.0963800102f,   0.1289071746f,
                                      -0.0952601467f,  0.04437420405f,  -0.01051140622f,  -0.001251690447f,
                                      0.001558379144f, -7.12676687e-5f, -0.0001533766314f};
  static constexpr double kDouble[] = {
      0.84969577171772042425,     -0.023009233104596185432,   -0.096379985890412234555,   0.12890813544483779673,
      -0.09526047896251157266,    0.044364290441479232534,    -0.010512319256653415785,   -0.0012100600478007039297,
      0.0015769784732868670756,   -0.00014330561401364585158, -0.00020435467599647070543, 0.000037868553400411439901,
      0.000031557140423286416439, -6.0350748868138185401e-6,  -5.8868918989178724881e-6,  6.0328092844899258544e-7,
      1.1974337258495326745e-6,   5.5079512612590942167e-8,   -2.3060726755244455909e-7,  -5.0891187260658903182e-8,
      3.4701538900500903069e-8,   1.3941839544171093156e-8,   -2.7775957084084141185e-9,  -1.6051539890250788503e-9};
  const Vec<A> magnitude = vmin(broadcast<A>(40), vmax(x, -x));  // the density is 0 beyond
  const Vec<A> exponential = exp_nonpositive<A>(magnitude * magnitude * A(-0.5));
  const Vec<A> outer = magnitude + A(4), inner = magnitude + magnitude + A(1), inverse = A(1) / (outer * inner);
  const Vec<A> t = (magnitude - A(4)) * inner * inverse;
  Vec<A> h;
  if constexpr (sizeof(A) == 4) {
    h = broadcast<A>(kSingle[10]);
    for (int i = 9; i >= 0; --i) h = h * t + kSingle[i];
  } else {
    h = broadcast<A>(kDouble[23]);
    for (int i = 22; i >= 0; --i) h = h * t + kDouble[i];
  }
  density = exponential * A(0.398942280401432677939946);
  const Vec<A> tail = exponential * h * (outer * inverse);
  return x < A(0) ? tail : A(1) - tail;
}

// a(g), and with kSlope a'(g).
template <class A, Activation kActivation, bool kSlope>
SK_INLINE Vec<A> activate(Vec<A> g, Vec<A>& slope) {
  Vec<A> other;
  if constexpr (kActivation == Activation::relu) {
    if constexpr (kSlope) slope = g <= A(0) ? Vec<A>{} : broadcast<A>(1);
    return g < A(0) ? Vec<A>{} : g;  // of a NaN it
  } else if constexpr (kActivation == Activation::silu) {
    const Vec<A> s = sigmoid_both<A>(g, other);
    if constexpr (kSlope) slope = s + g * (s * other);
    return g * s;
  } else if constexpr (kActivation == Activation::gelu) {
    const Vec<A> p = normal_distribution<A>(g, other);
    if constexpr (kSlope) slope = p + g * other;
    return g * p;
  } else {
    // Clamped, where s is 0 or 1 anyway: the square of a large number would be infinite.
    const Vec<A> held = vmin(broadcast<A>(100), vmax(broadcast<A>(-100), g)), square = held * held;
    const Vec<A> s = sigmoid_both<A>(held * (square * A(0.07135481627260025) + A(1.5957691216057308)), other);
    if constexpr (kSlope) slope = s + g * (s * other) * (square * A(0.21406444881780075) + A(1.5957691216057308));
    return g * s;
  }
}

// Calls body(row, column, i, count) for every run of elements of [begin, end) within a row; i is the first element.
template <class Body>
SK_INLINE void for_runs(int64_t columns, int64_t begin, int64_t end, const Body& body) {
  for (int64_t i = begin; i < end;) {
    const int64_t row = i / columns, column = i % columns;
    const int64_t count = end - i < columns - column ? end - i : columns - column;
    body(row, column, i, count);
    i += count;
  }
}

#define SK_BY_ACTIVATION(function, ...)                                                 \
  switch (p.activation) {                                                               \
    case Activation::silu: return function<T, Activation::silu>(__VA_ARGS__);           \
    case Activation::gelu: return function<T, Activation::gelu>(__VA_ARGS__);           \
    case Activation::gelu_tanh: return function<T, Activation::gelu_tanh>(__VA_ARGS__); \
    case Activation::relu: return function<T, Activation::relu>(__VA_ARGS__);           \
  }

}  // namespace SK_TIER
}  // namespace seqkern
