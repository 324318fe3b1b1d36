// Host side of csrc/common/cuda/hopper/device.cuh: the tensor maps that TMA needs.
#pragma once

#include "common/cuda/launch.h"
#include "device.cuh"

namespace seqkern {

// Whether the device of `t` runs sm_90a kernels and this library contains them.
bool hopper_serves(const Tensor& t);

// The map of a tensor of four dimensions of 16-bit elements, innermost dimension first. Sizes and strides are in
// elements; strides[0] is 1. A load or store moves a box of box[0] x ... x box[3] elements, box[0] = 64. Its rows of
// 128 bytes are consecutive in shared memory, swizzled. Elements outside the tensor are loaded as 0.
//
// `data` and the other strides are multiples of 16 bytes and not 0 (the stride of a dimension of size 1 does not
// matter). The tensor is not empty. Otherwise raises with the op's name.
TensorMap tensor_map(const char* op, Dtype dtype, const void* data, const int64_t (&sizes)[4],
                     const int64_t (&strides)[4], const int (&box)[4]);

// Why TMA cannot map this tensor, or null if it can.
inline const char* tensor_map_refusal(Dtype dtype, const void* data, const int64_t (&sizes)[4],
                                      const int64_t (&strides)[4], const int (&box)[4]) {
  if (dtype != Dtype::bf16 && dtype != Dtype::f16) return "elements of 16 bits are expected";
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0) return "the memory does not begin at a multiple of 16 bytes";
  if (strides[0] != 1 && sizes[0] != 1) return "the first stride is not 1";
  if (box[0] != 64) return "a box's rows have 64 elements";
  for (int i = 0; i < 4; ++i) {
    if (sizes[i] < 1 || sizes[i] > int64_t{1} << 32) return "a size is not in 1 ... 2^32";
    if (box[i] < 1 || box[i] > 256) return "a box's size is not in 1 ... 256";
    if (i == 0 || sizes[i] == 1) continue;
    if (strides[i] == 0) return "a stride is 0: the same elements again and again";
    if (strides[i] < 0 || strides[i] >= int64_t{1} << 39) return "a stride is not in 0 ... 2^40 bytes";
    if (strides[i] % 8 != 0) return "a stride is not a multiple of 16 bytes";
  }
  return nullptr;
}

}  // namespace seqkern
