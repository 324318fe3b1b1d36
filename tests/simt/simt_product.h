// What a tensor core makes of a row by a matrix: sums that are cut, not rounded.
//
// No manual says it; it was found out by experiment, bit for bit: Fasi, Higham, Mikaitis & Pranesh, "Numerical behavior
// of NVIDIA tensor cores" (2021); Xie et al., "MMA-Sim: bit-accurate reference model of tensor cores and matrix cores"
// (arXiv 2511.10909, 2025); Khattak & Mikaitis, "Accurate models of NVIDIA tensor cores" (arXiv 2512.07004, 2025). With
// e(x) the exponent of x, and products a_k b_k exact, of the exponent e(a_k) + e(b_k), whatever that of the product is:
//
//    e = max(e(d), max_k e(a_k) + e(b_k))      u = 2^(e - bits)
//    d' = cut(u (cut(d / u) + sum_k cut(a_k b_k / u)))
//
// over the k of a block; cut goes to the next number towards zero, of u's multiples and at the end of float32's.
//
//                        block of 16-bit numbers    of tf32    bits
//    8.0, 8.6, 8.9       8                          4          24
//    9.0, and wgmma      16                         8          25
//
// mma.sync is computed as on 8.0 and wgmma as on 9.0: a longer sum is cut less often, so who passes here is right on
// both. Infinities and NaN come out as from a sum in float64; what is too large for float32 becomes an infinity.
//
// Numbers in units of u are below 2^(bits + 2), and u is a power of two: so all of it is float32's and int32's exact
// arithmetic, four columns at a time, as long as no exponent is extreme. Rounding is toward zero meanwhile.
#pragma once

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace simt {

constexpr int kLeastExponent = -126, kLeastHalfExponent = -14;  // of float32, tf32 and bfloat16; of float16

namespace product {

using Floats = float __attribute__((vector_size(16)));
using Integers = int32_t __attribute__((vector_size(16)));
using Halves = int64_t __attribute__((vector_size(16)));

template <class To>
inline To read(const void* from) {
  To to;
  memcpy(&to, from, sizeof(to));
  return to;
}
template <class To, class From>
inline To bits_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  return read<To>(&from);
}
inline bool any(const Integers& x) { return (bits_of<Halves>(x)[0] | bits_of<Halves>(x)[1]) != 0; }

constexpr int32_t kExponentBits = 0x7F800000;

// One sum, of any numbers. a_power, b_power: 2^e(x).
template <int kBlock, int kBits>
inline float add_any(const float* a, const float* a_power, const float* b, const float* b_power, size_t stride,
                     float d) {
  double top = bits_of<float>(std::max(bits_of<int32_t>(d) & kExponentBits, 1 << 23)), exact = d;
  for (int k = 0; k < kBlock; ++k) {
    top = std::max(top, static_cast<double>(a_power[k]) * b_power[k * stride]);
    exact += static_cast<double>(a[k]) * b[k * stride];
  }
  if (!std::isfinite(exact)) return static_cast<float>(exact);
  const double unit = std::ldexp(top, -kBits);
  double sum = std::trunc(d / unit);
  for (int k = 0; k < kBlock; ++k) sum += std::trunc(static_cast<double>(a[k]) * b[k * stride] / unit);
  sum *= unit;
  return std::fabs(sum) >= 0x1p128 ? std::copysign(INFINITY, static_cast<float>(sum)) : static_cast<float>(sum);
}

// d += a b of one row and four columns, over one block.
template <int kBlock, int kBits>
inline void add_block(const float* a, const float* a_power, const float* b, const float* b_power, size_t stride,
                      float* d) {
  const Floats start = read<Floats>(d);
  Floats top = bits_of<Floats>(bits_of<Integers>(start) & kExponentBits);
#pragma GCC unroll 16
  for (int k = 0; k < kBlock; ++k) {
    const Floats power = a_power[k] * read<Floats>(b_power + k * stride);
    top = power > top ? power : top;
  }
  bool extreme = any(!(top < 0x1p90f) | !(top > 0x1p-90f));
  if (!extreme) {
    constexpr uint32_t kTwice = static_cast<uint32_t>(254 + kBits) << 23;
    const Floats units = bits_of<Floats>(static_cast<int32_t>(kTwice) - bits_of<Integers>(top));  // 2^kBits / top
    const auto cut = [&](const Floats& x) { return __builtin_convertvector(x * units, Integers); };
    Integers sum = cut(start), more = {};
#pragma GCC unroll 16
    for (int k = 0; k < kBlock; ++k) (k < 8 ? sum : more) += cut(a[k] * read<Floats>(b + k * stride));
    if constexpr (kBlock > 8) {  // 2^31 is not far
      extreme = any(((sum ^ sum >> 31) | (more ^ more >> 31)) >> 29);
      sum += more;
    }
    const Floats result = __builtin_convertvector(sum, Floats) * (top * (1.0f / (1 << kBits)));
    if (!extreme) memcpy(d, &result, sizeof(result));
  }
  if (extreme) {
    Integers there = top >= 0x1p90f;  // zeros are many, and change nothing
    for (int k = 0; k < kBlock; ++k) there |= (a[k] * Floats{1, 1, 1, 1} != 0) & (read<Floats>(b + k * stride) != 0);
    for (int n = 0; n < 4 && any(there); ++n)
      d[n] = add_any<kBlock, kBits>(a, a_power, b + n, b_power + n, stride, d[n]);
  }
}

// Not inlined: nothing may move out of where rounding is toward zero.
template <int kBlock, int kBits>
__attribute__((noinline)) void add_rows(const float* a, const float* a_power, int rows, const float* b,
                                        const float* b_power, size_t stride, int depth, int columns, float* d) {
  for (int m = 0; m < rows; ++m) {
    for (int n = 0; n < columns; n += 4) {
      for (int k = 0; k < depth; k += kBlock) {
        add_block<kBlock, kBits>(a + k, a_power + k, b + k * stride + n, b_power + k * stride + n, stride, d + n);
      }
    }
    a += depth;
    a_power += depth;
    d += columns;
  }
}

}  // namespace product

// A matrix, and 2^e(x) of what lies in it.
template <int kRows, int kColumns>
struct Operand {
  float value[kRows][kColumns], power[kRows][kColumns];

  // Once the values are there. Numbers below the least normal one of their type have that one's
  // exponent, 0 has float32's; that of infinities and NaN is an infinity.
  void find_powers(int least_exponent) {
    using namespace product;
    const int32_t least = (127 + least_exponent) << 23;
    for (int i = 0; i < kRows * kColumns; i += 4) {
      const Integers bits = read<Integers>(value[0] + i) & INT32_MAX;
      Integers found = bits & kExponentBits;
      found = found > least ? found : (bits == 0 ? Integers{} + (1 << 23) : Integers{} + least);
      memcpy(power[0] + i, &found, sizeof(found));
    }
  }
};

// d += a b, of `rows` x kDepth by kDepth x `columns`, which is a multiple of 4; d's rows follow each other.
template <int kBlock, int kBits, int kRows, int kDepth, int kColumns>
void multiply(const Operand<kRows, kDepth>& a, const Operand<kDepth, kColumns>& b, int columns, float* d) {
  const int rounding = std::fegetround();
  std::fesetround(FE_TOWARDZERO);
  product::add_rows<kBlock, kBits>(a.value[0], a.power[0], kRows, b.value[0], b.power[0], kColumns, kDepth, columns, d);
  std::fesetround(rounding);
}

}  // namespace simt
