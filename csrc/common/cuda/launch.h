// How the host side of an op reaches its CUDA kernels: the device's limits, the stream, and one way to launch.
//
// Nothing here needs libtorch_cuda to be there when the library is loaded: CUDA's runtime is linked in, and torch's
// current stream is asked for by name (launch.cu). Under SK_SIMT the same calls run on the host (tests/simt).
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstddef>
#include <cstdint>

#include "device.cuh"
#include "tensor.h"

// The key under which an op's kernels are registered: CPU tensors stand for the GPU's memory in the host executor.
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
  int shared_per_block;  // bytes that one block may ask for
  int max_cluster;       // blocks: 1 without clusters, 8, or 16 where that is allowed on request
};

// Of the device that `t` lies on, which is current until the guard of the same tensor ends. Read once per device.
const CudaDevice& cuda_device(const Tensor& t);
// torch's current stream there.
void* current_stream(const Tensor& t);

// Makes the device of `t` the current one. Afterwards the thread's context is what it was, none where it was none: to
// name the device before would make a context there, hundreds of megabytes of a GPU that nobody uses.
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
  int cluster = 1;            // blocks along x; more than 8 is asked for explicitly
  bool all_resident = false;  // a cooperative launch: fails rather than leave a block waiting for room
};

// The untyped half of `launch`: raises with the op's name where CUDA reports an error.
void launch_kernel(const char* op, const void* kernel, const LaunchShape& shape, void* stream, void** arguments);
// How many blocks of that shape fit a multiprocessor at once, and how many clusters of that shape the device.
int resident_blocks(const char* op, const void* kernel, const LaunchShape& shape);
int resident_clusters(const char* op, const void* kernel, const LaunchShape& shape);

#if defined(SK_SIMT)
// The kernel is called on the host, once a thread: a function that does so stands for its address.
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
