// Loops over the vectors of a row, for the kernels, which are compiled once per instruction-set tier.
#pragma once

#include "simd.h"

namespace seqkern {
namespace SK_TIER {
namespace {

// Calls body(c, n) for the vectors of the numbers [begin, end): n numbers from c on.
template <class A, class Body>
SK_INLINE void for_vectors(int64_t begin, int64_t end, const Body& body) {
  int64_t c = begin;
  for (; c + W<A> <= end; c += W<A>) body(c, int64_t{W<A>});
  if (c < end) body(c, end - c);
}
template <class A, class Body>
SK_INLINE void for_vectors(int64_t columns, const Body& body) {
  for_vectors<A>(0, columns, body);
}

// The first n int32 numbers at p, in lanes as wide as the last argument's.
[[maybe_unused]] SK_INLINE vi32 load_index(const int32_t* p, int64_t n, float) {
  vi32 v{};
  if (n >= W<float>) __builtin_memcpy(&v, p, sizeof(v));
  else
    for (int64_t i = 0; i < n; ++i) v[i] = p[i];
  return v;
}
[[maybe_unused]] SK_INLINE vi64 load_index(const int32_t* p, int64_t n, double) {
  vi64 v{};
  for (int64_t i = 0; i < n; ++i) v[i] = p[i];
  return v;
}

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
