// LibTorch's stable ABI for the host side of every op: checks, dtypes, allocation.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <vector>

#include "dtype.h"

// The message names the argument, its value and what was expected. These checks guard the pointers when an op is called
// directly; callers of the Python API meet its checks first, with ValueError and TypeError.
#define SK_CHECK(condition, ...) STD_TORCH_CHECK(condition, __VA_ARGS__)

namespace seqkern {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline Dtype dtype_of(const Tensor& t, const char* op, const char* argument) {
  switch (t.scalar_type()) {
    case ScalarType::Double: return Dtype::f64;
    case ScalarType::Float: return Dtype::f32;
    case ScalarType::BFloat16: return Dtype::bf16;
    case ScalarType::Half: return Dtype::f16;
    default: break;
  }
  SK_CHECK(false, op, ": ", argument, " must be float64, float32, bfloat16 or float16, got ScalarType ",
           static_cast<int>(t.scalar_type()));
}

inline ScalarType acc_type(Dtype dtype) { return dtype == Dtype::f64 ? ScalarType::Double : ScalarType::Float; }

// Sizes are non-negative and fit memory for one tensor, but a product of several tensors' sizes may overflow.
inline int64_t checked_product(std::initializer_list<int64_t> factors, const char* op) {
  int64_t product = 1;
  for (int64_t f : factors) SK_CHECK(!__builtin_mul_overflow(product, f, &product), op, ": size overflows int64");
  return product;
}

inline void check_dim(const Tensor& t, int64_t dim, const char* op, const char* argument) {
  SK_CHECK(t.dim() == dim, op, ": ", argument, " must have ", dim, " dimensions, got ", t.dim());
}
inline void check_size(const Tensor& t, int64_t dim, int64_t size, const char* op, const char* argument) {
  SK_CHECK(t.size(dim) == size, op, ": ", argument, " must have size ", size, " in dimension ", dim, ", got ",
           t.size(dim));
}
inline void check_type(const Tensor& t, ScalarType type, const char* op, const char* argument) {
  SK_CHECK(t.scalar_type() == type, op, ": ", argument, " must have ScalarType ", static_cast<int>(type), ", got ",
           static_cast<int>(t.scalar_type()));
}
// To the kernels a null address means "absent".
inline void check_memory(const Tensor& t, const char* op, const char* argument) {
  SK_CHECK(t.numel() == 0 || t.const_data_ptr() != nullptr, op, ": ", argument,
           " has no memory: its storage was freed");
}
inline void check_cpu(const Tensor& t, const char* op, const char* argument) {
  SK_CHECK(t.is_cpu(), op, ": ", argument, " must be a CPU tensor like the first argument");
  check_memory(t, op, argument);
}

// Checks that a tensor is on the same device as another argument.
inline void check_beside(const Tensor& t, const Tensor& other, const char* op, const char* argument,
                         const char* name = "the first argument") {
  SK_CHECK(t.device() == other.device(), op, ": ", argument, " must be on the device of ", name);
  check_memory(t, op, argument);
}

// Whether the last dimension is contiguous (or has at most one element, or the tensor is empty).
inline bool unit_last_stride(const Tensor& t) {
  return t.dim() == 0 || t.size(t.dim() - 1) <= 1 || t.stride(t.dim() - 1) == 1 || t.numel() == 0;
}
// `t` itself if its last dimension is contiguous, otherwise a contiguous copy.
inline Tensor with_unit_last_stride(const Tensor& t) { return unit_last_stride(t) ? t : torch::stable::contiguous(t); }
inline Tensor as_contiguous(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

// The address of an optional argument.
template <class T = void>
const T* data_or_null(const std::optional<Tensor>& t) {
  return t ? static_cast<const T*>(t->const_data_ptr()) : nullptr;
}

// Uninitialised memory on the device of `like`. On the CPU without the dispatcher, which takes longer than many a
// kernel, and from the pool if it is large.
Tensor empty(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes, ScalarType type);
inline Tensor empty(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType type) {
  return empty(like, torch::headeronly::IntHeaderOnlyArrayRef(sizes.begin(), sizes.size()), type);
}
inline Tensor empty(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType type) {
  return empty(like, torch::headeronly::IntHeaderOnlyArrayRef(sizes.data(), sizes.size()), type);
}

}  // namespace seqkern
