// The host side of csrc/common/cuda/launch.h and csrc/common/cuda/hopper/launch.h. CPU tensors stand for global memory.
#include "common/cuda/hopper/launch.h"
#include "common/cuda/launch.h"

namespace seqkern {

const CudaDevice& cuda_device(const Tensor& t) {
  // Read from the environment at every call: tests change the device's limits.
  static thread_local CudaDevice device;
  const simt::Limits limits = simt::limits();
  device = {t.get_device_index(), limits.architecture, limits.multiprocessors, limits.shared_per_block,
            limits.max_cluster};
  return device;
}
void* current_stream(const Tensor&) { return nullptr; }

OnDevice::OnDevice(const Tensor&) : changed_(false), previous_(nullptr) {}
OnDevice::~OnDevice() {}

int resident_blocks(const char* op, const void*, const LaunchShape& shape) {
  SK_CHECK(shape.shared_bytes <= static_cast<size_t>(simt::limits().shared_per_block), op, ": ", shape.shared_bytes,
           " bytes of shared memory asked for, a block may have ", simt::limits().shared_per_block);
  return simt::resident_blocks(shape.block, shape.shared_bytes);
}
int resident_clusters(const char* op, const void* kernel, const LaunchShape& shape) {
  resident_blocks(op, kernel, shape);
  return simt::resident_clusters(shape.block, shape.shared_bytes, shape.cluster);
}

TensorMap tensor_map(const char* op, Dtype dtype, const void* data, const int64_t (&sizes)[4],
                     const int64_t (&strides)[4], const int (&box)[4]) {
  const char* refusal = tensor_map_refusal(dtype, data, sizes, strides, box);
  SK_CHECK(refusal == nullptr, op, ": no tensor map: ", refusal);
  TensorMap map;
  map.data = static_cast<const unsigned char*>(data);
  for (int i = 0; i < 4; ++i) {
    map.sizes[i] = sizes[i];
    map.strides[i] = strides[i];
    map.box[i] = box[i];
  }
  map.magic = simt::kMapMagic;
  return map;
}

// One allocation for each tensor, so that AddressSanitizer knows its bounds.
Tensor empty(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes, ScalarType type) {
  return torch::stable::new_empty(like, sizes, type);
}

}  // namespace seqkern
