// See launch.h. CUDA's runtime is linked statically, so its symbols are not torch's. Streams and memory are shared
// with torch's runtime: both use the device's primary context.
#include <cuda.h>
#include <dlfcn.h>

#include <mutex>
#include <set>
#include <tuple>
#include <vector>

#include "launch.h"

namespace seqkern {

namespace {

// torch's own macro needs a symbol of libtorch_cuda, which a CPU build of torch lacks.
void check(cudaError_t error, const char* op) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // already reported: clear it for the next call
  SK_CHECK(false, op, ": ", cudaGetErrorName(error), ": ", cudaGetErrorString(error));
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "seqkern");
  return value;
}

// A kernel's limits are shared by all threads of the process: set once to what the device has, never lowered to what
// one launch needs.
void raise_limits(const char* op, const void* kernel, const LaunchShape& shape) {
  static std::mutex mutex;
  static std::set<std::tuple<const void*, int, bool>> raised;
  const bool wide = shape.shared_bytes > 48 << 10, many = shape.cluster > 8;
  if (!wide && !many) return;
  int device = 0;
  check(cudaGetDevice(&device), op);
  std::lock_guard<std::mutex> lock(mutex);
  if (wide && raised.count({kernel, device, false}) == 0) {
    const int most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most), op);
    raised.emplace(kernel, device, false);
  }
  if (many && raised.count({kernel, device, true}) == 0) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), op);
    raised.emplace(kernel, device, true);
  }
}

cudaLaunchConfig_t config_of(const char* op, const void* kernel, const LaunchShape& shape, void* stream,
                             cudaLaunchAttribute (&attributes)[2]) {
  raise_limits(op, kernel, shape);
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

namespace {

// The driver's functions for a thread's context, found by name: loading the library does not need libcuda.
struct Contexts {
  CUresult (*get)(CUcontext*) = nullptr;
  CUresult (*set)(CUcontext) = nullptr;
};
const Contexts& contexts() {
  static const Contexts found = [] {
    const auto find = [](const char* name) {
      void* function = nullptr;
      cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
      check(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result), "seqkern");
      SK_CHECK(result == cudaDriverEntryPointSuccess, "seqkern: this driver has no ", name);
      return function;
    };
    return Contexts{reinterpret_cast<CUresult (*)(CUcontext*)>(find("cuCtxGetCurrent")),
                    reinterpret_cast<CUresult (*)(CUcontext)>(find("cuCtxSetCurrent"))};
  }();
  return found;
}

}  // namespace

OnDevice::OnDevice(const Tensor& t) : changed_(false), previous_(nullptr) {
  int current = 0;
  check(cudaGetDevice(&current), "seqkern");
  if (current == t.get_device_index()) return;
  CUcontext before = nullptr;  // stays null if the driver is not initialised yet
  if (contexts().get(&before) == CUDA_SUCCESS) previous_ = before;
  check(cudaSetDevice(t.get_device_index()), "seqkern");
  changed_ = true;
}
OnDevice::~OnDevice() {
  if (changed_) contexts().set(static_cast<CUcontext>(previous_));
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
  cudaLaunchConfig_t config = config_of(op, kernel, shape, nullptr, attributes);
  config.gridDim = dim3(static_cast<unsigned>(shape.cluster));  // whole clusters
  int clusters = 0;
  const cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
  if (error == cudaErrorInvalidClusterSize) {  // the device has no clusters of that size
    cudaGetLastError();
    return 0;
  }
  check(error, op);
  return clusters;
}

}  // namespace seqkern
