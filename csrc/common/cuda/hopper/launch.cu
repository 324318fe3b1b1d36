// See launch.h. The driver's function is found by name: loading the library does not need libcuda.
#include <cuda.h>

#include "launch.h"

namespace seqkern {

namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  if (error != cudaSuccess) cudaGetLastError();
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
}

}  // namespace

TensorMap tensor_map(const char* op, Dtype dtype, const void* data, const int64_t (&sizes)[4],
                     const int64_t (&strides)[4], const int (&box)[4]) {
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap) && alignof(TensorMap) >= alignof(CUtensorMap), "the driver's");
  const char* refusal = tensor_map_refusal(dtype, data, sizes, strides, box);
  SK_CHECK(refusal == nullptr, op, ": no tensor map: ", refusal);
  static const Encode encode = find_encode();
  SK_CHECK(encode != nullptr, op, ": this driver has no cuTensorMapEncodeTiled");
  cuuint64_t dims[4], bytes[3];
  cuuint32_t boxes[4], steps[4];
  for (int i = 0; i < 4; ++i) {
    dims[i] = static_cast<cuuint64_t>(sizes[i]);
    boxes[i] = static_cast<cuuint32_t>(box[i]);
    steps[i] = 1;
    // TMA never uses the stride of a dimension of size 1: any valid value will do.
    if (i > 0) bytes[i - 1] = sizes[i] == 1 ? 16 : static_cast<cuuint64_t>(strides[i]) * 2;
  }
  TensorMap map;
  const CUresult result =
      encode(reinterpret_cast<CUtensorMap*>(&map),
             dtype == Dtype::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
             const_cast<void*>(data), dims, bytes, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  SK_CHECK(result == CUDA_SUCCESS, op, ": cuTensorMapEncodeTiled: error ", static_cast<int>(result));
  return map;
}

}  // namespace seqkern
