// The CPU kernels of the ops as plain functions, for the fast path (node.h), which calls them past the dispatcher.
//
// Each op writes SK_DIRECT_OP beside its registration and its signature into namespace `direct`. The fast path is a
// library of its own, tied to one torch: it finds the functions here by name, and takes them by signature only.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <vector>

namespace seqkern {

class DirectOp {
 public:
  DirectOp(const char* name, const char* signature, const void* function);
  // Null where there is no op of this name and signature.
  static const void* find(const char* name, const char* signature);

 private:
  const char *name_, *signature_;
  const void* function_;
  const DirectOp* next_;
};

#define SK_DIRECT_OP(op)                                                              \
  static_assert(std::is_same_v<decltype(op), direct::op>, #op " is not as declared"); \
  const DirectOp op##_direct(#op, typeid(direct::op).name(), reinterpret_cast<const void*>(&op));

// Contiguous CPU memory without the dispatcher: sizes and a dtype's number to a handle, or null.
using DirectAllocate = AtenTensorHandle (*)(const int64_t* sizes, size_t dims, int32_t dtype);
// Null where no fast path was loaded.
DirectAllocate direct_allocate();

namespace direct {
using Tensor = torch::stable::Tensor;
using Maybe = std::optional<Tensor>;
using List = std::vector<Tensor>;
}  // namespace direct

}  // namespace seqkern
