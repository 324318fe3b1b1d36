// Checks of the layer norm ops' arguments that are the same on either device, host side.
#pragma once

#include <optional>

#include "dropout.h"
#include "tensor.h"

namespace seqkern {

// A vector as long as the input's rows, of any supported dtype.
inline void check_parameter(const Tensor& t, const Tensor& input, const char* op, const char* argument) {
  check_beside(t, input, op, argument);
  check_dim(t, 1, op, argument);
  check_size(t, 0, input.size(1), op, argument);
  dtype_of(t, op, argument);
}

// A matrix of the input's shape, dtype and device, with any row stride.
inline std::optional<Tensor> matrix_beside(const std::optional<Tensor>& t, const Tensor& input, const char* op,
                                           const char* argument) {
  if (!t) return std::nullopt;
  check_beside(*t, input, op, argument);
  check_dim(*t, 2, op, argument);
  check_type(*t, input.scalar_type(), op, argument);
  for (int64_t dim : {0, 1}) check_size(*t, dim, input.size(dim), op, argument);
  return with_unit_last_stride(*t);
}

// One number per row, contiguous, in the accumulation type.
inline Tensor statistic(const Tensor& t, const Tensor& input, Dtype dtype, const char* op, const char* argument) {
  check_beside(t, input, op, argument);
  check_dim(t, 1, op, argument);
  check_size(t, 0, input.size(0), op, argument);
  check_type(t, acc_type(dtype), op, argument);
  return as_contiguous(t);
}

inline void check_dropout(const std::optional<Tensor>& seed, double p, const Tensor& input, const char* op) {
  SK_CHECK(p >= 0 && p <= 1, op, ": dropout_p must be a probability, between 0 and 1, got ", p);
  SK_CHECK(seed || p == 0, op, ": dropout_p = ", p, " needs a seed");
  if (!seed) return;
  check_beside(*seed, input, op, "seed");
  check_type(*seed, ScalarType::Long, op, "seed");
  SK_CHECK(seed->numel() == 1, op, ": seed must have one element, got ", seed->numel());
}

}  // namespace seqkern
