// See cuda_launch.h. CUDA's runtime is linked statically, so its symbols are not torch's; streams and memory are: both
// runtimes use the device's primary context.
#include <dlfcn.h>

#include <mutex>
#include <vector>

#include "cuda_launch.h"

namespace seqkern {

namespace {

// torch's own macro needs a symbol of libtorch_cuda, which a CPU build of torch lacks.
void check(cudaError_t error, const char* op) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // it has been reported: the next call starts clean
  SK_CHECK(false, op, ": ", cudaGetErrorName(error), ": ", cudaGetErrorString(error));
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "seqkern");
  return value;
}

cudaLaunchConfig_t config_of(const char* op, const void* kernel, const LaunchShape& shape, void* stream,
                             cudaLaunchAttribute (&attributes)[2]) {
  if (shape.shared_bytes > 48 << 10) {
    check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared_bytes)),
        op);
  }
  if (shape.cluster > 8) check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), op);
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  if (shape.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
    ++config.numAttrs;
  }
  if (shape.all_resident) {
    attributes[config.numAttrs].id = cudaLaunchAttributeCooperative;
    attributes[config.numAttrs].val.cooperative = 1;
    ++config.numAttrs;
  }
  return config;
}

}  // namespace

const CudaDevice& cuda_device(const Tensor& t) {
  static std::mutex mutex;
  static std::vector<CudaDevice*> known;  // kept for the life of the process
  const int index = t.get_device_index();
  std::lock_guard<std::mutex> lock(mutex);
  if (known.size() <= static_cast<size_t>(index)) known.resize(index + 1);
  if (known[index] == nullptr) {
    const int architecture =
        10 * attribute(cudaDevAttrComputeCapabilityMajor, index) + attribute(cudaDevAttrComputeCapabilityMinor, index);
    known[index] = new CudaDevice{index, architecture, attribute(cudaDevAttrMultiProcessorCount, index),
                                  attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index),
                                  architecture < 90    ? 1
                                  : architecture < 120 ? 16
                                                       : 8};
  }
  return *known[index];
}

void* current_stream(const Tensor& t) {
  using Getter = int (*)(int, void**);
  static const Getter getter = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    return library == nullptr ? nullptr
                              : reinterpret_cast<Getter>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  SK_CHECK(getter != nullptr, "seqkern: this torch has no CUDA streams (libtorch_cuda.so is not loaded)");
  void* stream = nullptr;
  SK_CHECK(getter(t.get_device_index(), &stream) == 0, "seqkern: torch did not tell its current CUDA stream");
  return stream;
}

OnDevice::OnDevice(const Tensor& t) : previous_(-1) {
  int current = 0;
  check(cudaGetDevice(&current), "seqkern");
  if (current != t.get_device_index()) {
    check(cudaSetDevice(t.get_device_index()), "seqkern");
    previous_ = current;
  }
}
OnDevice::~OnDevice() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

void launch_kernel(const char* op, const void* kernel, const LaunchShape& shape, void* stream, void** arguments) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  cudaLaunchAttribute attributes[2];
  const cudaLaunchConfig_t config = config_of(op, kernel, shape, stream, attributes);
  check(cudaLaunchKernelExC(&config, kernel, arguments), op);
}

int resident_blocks(const char* op, const void* kernel, const LaunchShape& shape) {
  cudaLaunchAttribute attributes[2];
  config_of(op, kernel, shape, nullptr, attributes);
  int blocks = 0;
  const int threads = static_cast<int>(shape.block.x * shape.block.y * shape.block.z);
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shape.shared_bytes), op);
  return blocks;
}

int resident_clusters(const char* op, const void* kernel, const LaunchShape& shape) {
  cudaLaunchAttribute attributes[2];
  const cudaLaunchConfig_t config = config_of(op, kernel, shape, nullptr, attributes);
  int clusters = 0;
  check(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), op);
  return clusters;
}

}  // namespace seqkern
