// Element types of the kernels. Torch-free: the tier translation units see only this.
#pragma once

#include <cstdint>

namespace seqkern {

enum class Dtype : int { f64 = 0, f32 = 1, bf16 = 2, f16 = 3 };

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

// The type of statistics, softmax, cell state and accumulators.
template <class T>
struct AccOf {
  using type = float;
};
template <>
struct AccOf<double> {
  using type = double;
};
template <class T>
using acc_t = typename AccOf<T>::type;

// Internal linkage: the functions must not leave their tier's translation unit.
namespace {
[[maybe_unused]] constexpr int64_t size_of(Dtype dtype) {
  return dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2;
}
}  // namespace

}  // namespace seqkern

// Runs a statement with `T` bound to the element type of `dtype`.
#define SK_DISPATCH(dtype, ...)        \
  do {                                 \
    switch (dtype) {                   \
      case ::seqkern::Dtype::f64: {    \
        using T = double;              \
        __VA_ARGS__;                   \
      } break;                         \
      case ::seqkern::Dtype::f32: {    \
        using T = float;               \
        __VA_ARGS__;                   \
      } break;                         \
      case ::seqkern::Dtype::bf16: {   \
        using T = ::seqkern::BFloat16; \
        __VA_ARGS__;                   \
      } break;                         \
      case ::seqkern::Dtype::f16: {    \
        using T = ::seqkern::Half;     \
        __VA_ARGS__;                   \
      } break;                         \
    }                                  \
  } while (0)
