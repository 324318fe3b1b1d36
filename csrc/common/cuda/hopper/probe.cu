// Tells, without a launch, whether the library contains code for exactly sm_90a. Code for any other architecture leaves
// the kernel below empty; so does PTX, which a device of 9.0 could also run.
#include "launch.h"

namespace seqkern {

#if !defined(SK_SIMT)
namespace {

constexpr int kProbeBytes = 512;

__global__ void hopper_probe(int* out) {
#if SK_HOPPER
  __shared__ int bytes[kProbeBytes / sizeof(int)];
  bytes[threadIdx.x] = out[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = bytes[threadIdx.x ^ 1];
#endif
}

}  // namespace
#endif

bool hopper_serves(const Tensor& t) {
  if (cuda_device(t).architecture != 90) return false;
#if defined(SK_SIMT)
  return true;
#else
  const OnDevice guard(t);
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, hopper_probe) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return attributes.sharedSizeBytes >= kProbeBytes;
#endif
}

}  // namespace seqkern
