#include "tensor.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>

#include "direct.h"
#include "pool.h"

namespace seqkern {
namespace {

// A tensor on existing memory, with a deleter: torch 2.11 and later. The library is built for 2.10, so the symbol is
// looked up at run time. From torch/csrc/stable/c/shim.h.
using FromBlob = AOTITorchError (*)(void* data, int64_t ndim, const int64_t* sizes, const int64_t* strides,
                                    int64_t storage_offset, int32_t dtype, int32_t device_type, int32_t device_index,
                                    AtenTensorHandle* result, int32_t layout, const uint8_t* opaque_metadata,
                                    int64_t opaque_metadata_size, void (*deleter)(void* data, void* context),
                                    void* context);

FromBlob from_blob() {
  static const FromBlob function = reinterpret_cast<FromBlob>(dlsym(RTLD_DEFAULT, "torch_from_blob"));
  return function;
}

size_t element_size(ScalarType type) {
  switch (type) {
    case ScalarType::Double: return 8;
    case ScalarType::Float: return 4;
    case ScalarType::BFloat16:
    case ScalarType::Half: return 2;
    case ScalarType::Byte: return 1;
    default: return 0;
  }
}

// A tensor on the pool's memory. Null if it is small, or if torch (2.10) cannot tell when the tensor dies.
AtenTensorHandle pooled(torch::headeronly::IntHeaderOnlyArrayRef sizes, const int64_t* strides, size_t bytes,
                        int32_t dtype) {
  size_t size;
  void* block = from_blob() ? pool_take(bytes, size) : nullptr;
  if (!block) return nullptr;
  const auto give = [](void* data, void* context) { pool_give(data, reinterpret_cast<uintptr_t>(context)); };
  AtenTensorHandle handle = nullptr;
  const AOTITorchError error = from_blob()(block, static_cast<int64_t>(sizes.size()), sizes.data(), strides, 0, dtype,
                                           aoti_torch_device_type_cpu(), -1, &handle, aoti_torch_layout_strided(),
                                           nullptr, 0, give, reinterpret_cast<void*>(size));
  if (error == 0) return handle;
  pool_give(block, size);
  return nullptr;
}

}  // namespace

Tensor empty(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes, ScalarType type) {
  constexpr size_t kMostDims = 8;
  size_t bytes = element_size(type);
  // torch makes all others, and reports wrong sizes.
  if (!like.is_cpu() || sizes.size() > kMostDims || bytes == 0) return torch::stable::new_empty(like, sizes, type);
  int64_t strides[kMostDims], elements = 1;
  bool none = false;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    strides[dim] = elements;
    none |= sizes[dim] == 0;
    if (sizes[dim] < 0 || __builtin_mul_overflow(elements, std::max<int64_t>(sizes[dim], 1), &elements))
      return torch::stable::new_empty(like, sizes, type);
  }
  if (__builtin_mul_overflow(bytes, static_cast<size_t>(none ? 0 : elements), &bytes))
    return torch::stable::new_empty(like, sizes, type);
  const auto dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  if (const AtenTensorHandle handle = pooled(sizes, strides, bytes, dtype)) return Tensor(handle);
  AtenTensorHandle handle = direct_allocate() ? direct_allocate()(sizes.data(), sizes.size(), dtype) : nullptr;
  SK_CHECK(handle || aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides, dtype,
                                              aoti_torch_device_type_cpu(), -1, &handle) == 0,
           "seqkern: no memory for a tensor of ", bytes, " bytes");
  Tensor result(handle);
  if (pool_poisons() && bytes > 0) std::memset(result.mutable_data_ptr(), 0xff, bytes);
  return result;
}

}  // namespace seqkern
