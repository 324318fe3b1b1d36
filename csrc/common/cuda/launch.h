// What an op's host code needs to launch CUDA kernels: the device's limits, torch's current stream, `launch`.
//
// Loading the library does not need libtorch_cuda: CUDA's runtime is linked in, and torch's current stream is found by
// name (launch.cu). Under SK_SIMT the same calls run on the host (tests/simt).
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstddef>
#include <cstdint>

#include "device.cuh"
#include "tensor.h"

// The dispatch key of an op's CUDA kernels. In the host executor CPU tensors stand in for the GPU's memory.
#if defined(SK_SIMT)
#define SK_CUDA_KEY CPU
#else
#define SK_CUDA_KEY CUDA
#endif

namespace seqkern {

struct CudaDevice {
  int index;
  int architecture;  // 80, 90, 100, 120
  int multiprocessors;
  int shared_per_block;  // bytes a block may ask for
  int max_cluster;       // in blocks: 1 without clusters, 8, or 16 where larger clusters are allowed on request
};

// The device of `t`. Its limits are read once a device. Makes no device current: OnDevice does.
const CudaDevice& cuda_device(const Tensor& t);
// torch's current stream on that device.
void* current_stream(const Tensor& t);

// Makes the device of `t` current, and restores the thread's context at the end, also where there was none. Restoring
// by device number instead would create a context on that device: hundreds of megabytes on a GPU that nobody uses.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& t);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  bool changed_;
  void* previous_;  // a context, or null
};

struct LaunchShape {
  dim3 grid, block;
  size_t shared_bytes = 0;
  int cluster = 1;            // blocks along x; launch asks for more than 8 explicitly
  bool all_resident = false;  // cooperative launch: fails if the blocks cannot all be resident at once
};

// The untyped half of `launch`: raises with the op's name when CUDA reports an error.
void launch_kernel(const char* op, const void* kernel, const LaunchShape& shape, void* stream, void** arguments);
// How many blocks of that shape a multiprocessor holds at once, and how many clusters of that shape the device holds.
int resident_blocks(const char* op, const void* kernel, const LaunchShape& shape);
int resident_clusters(const char* op, const void* kernel, const LaunchShape& shape);

#if defined(SK_SIMT)
// Calls the kernel on the host, once a thread: a function that calls it stands in for the kernel's address.
template <class... P>
void launch(const char* op, void (*kernel)(P...), const LaunchShape& shape, void*, P... arguments) {
  simt::launch(op, shape.grid, shape.block, shape.shared_bytes, shape.cluster, shape.all_resident,
               [=] { kernel(arguments...); });
}
#else
template <class... P>
void launch(const char* op, void (*kernel)(P...), const LaunchShape& shape, void* stream, P... arguments) {
  void* addresses[] = {static_cast<void*>(&arguments)..., nullptr};
  launch_kernel(op, reinterpret_cast<const void*>(kernel), shape, stream, addresses);
}
#endif

}  // namespace seqkern
