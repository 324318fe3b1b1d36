#include "tensor.h"

#include <dlfcn.h>

#include <algorithm>

#include "pool.h"

namespace seqkern {
namespace {

// torch 2.11 and later: a tensor on given memory with a function that is called when it dies. The library is built for
// 2.10, so the symbol is looked up when it runs. From torch/csrc/stable/c/shim.h.
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
    default: return 0;
  }
}

}  // namespace

std::optional<Tensor> pooled_tensor(torch::headeronly::IntHeaderOnlyArrayRef sizes, ScalarType type) {
  std::vector<int64_t> strides(sizes.size(), 1);
  int64_t elements = 1;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    strides[dim] = elements;
    if (__builtin_mul_overflow(elements, std::max<int64_t>(sizes[dim], 1), &elements)) return std::nullopt;
  }
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return std::nullopt;
  size_t bytes, size;
  if (__builtin_mul_overflow(static_cast<size_t>(elements), element_size(type), &bytes) || !from_blob())
    return std::nullopt;
  void* block = pool_take(bytes, size);
  if (!block) return std::nullopt;
  const auto dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  const auto give = [](void* data, void* context) { pool_give(data, reinterpret_cast<uintptr_t>(context)); };
  AtenTensorHandle handle = nullptr;
  const AOTITorchError error = from_blob()(
      block, static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), 0, dtype, aoti_torch_device_type_cpu(),
      -1, &handle, aoti_torch_layout_strided(), nullptr, 0, give, reinterpret_cast<void*>(size));
  if (error != 0) {
    pool_give(block, size);
    return std::nullopt;
  }
  return Tensor(handle);
}

}  // namespace seqkern
