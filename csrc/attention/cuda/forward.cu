// The forward pass of attention with mma.sync, host side: which kernel, how many stages, how many thread blocks.
#include <algorithm>

#include "forward.cuh"

namespace seqkern {
namespace {

using attention_forward::Arguments;
using attention_forward::Shape;

// Chooses the most stages among those with the most resident blocks (as registers allow): another block hides more
// latency than another stage.
template <class T, int kDim, bool kOptions>
void run(const AttentionCall& call, const AttentionForwardCuda& forward) {
  using S = Shape<T, kDim, kOptions>;
  const AttentionCuda& c = forward.call;
  const CudaDevice& device = cuda_device(call.like);
  const auto kernel = attention_forward::attention_forward_kernel<T, kDim, kOptions>;
  LaunchShape shape{dim3(1), dim3(S::kThreads)};
  int stages = 0, resident = 0;
  for (int n = 1; n <= 2 && S::bytes(n) <= device.shared_per_block; ++n) {
    shape.shared_bytes = S::bytes(n);
    const int blocks = std::min(S::kBlocks, resident_blocks(call.op, reinterpret_cast<const void*>(kernel), shape));
    if (blocks >= resident) {
      stages = n;
      resident = blocks;
    }
  }
  SK_CHECK(resident > 0, call.op, ": the kernel needs ", S::bytes(1), " bytes of shared memory, the device has ",
           device.shared_per_block);
  shape.shared_bytes = S::bytes(stages);
  const int64_t bytes = int64_t{c.max_keys} * (c.head_dim + c.value_dim) * static_cast<int64_t>(sizeof(T));
  const Arguments arguments{forward,
                            attention_order(c.sequences, c.heads, c.heads / c.kv_heads, c.max_queries, S::kRows, bytes,
                                            last_queries_see_most(c.low, c.high), device.architecture),
                            stages};
  // Packed rows of no sequence are cleared by any grid of at least one block.
  const bool gaps = c.query_starts.data != nullptr;
  shape.grid = dim3(attention_grid(arguments.order, resident, device.multiprocessors, gaps));
  launch(call.op, kernel, shape, call.stream, arguments);
}

template <class T, int kDim, bool kOptions>
std::string tiles() {
  using S = Shape<T, kDim, kOptions>;
  return std::to_string(S::kRows) + " queries by " + std::to_string(S::kKeys) + " keys";
}

// ---- every instance ------------------------------------------------------------------------------------------------

struct Instance {
  Dtype dtype;
  int dim;       // largest head dimension it serves
  bool options;  // kernels without options are separate: options take most of a score's time
  void (*run)(const AttentionCall&, const AttentionForwardCuda&);
  std::string (*tiles)();
};
template <class T, int kDim, bool kOptions>
constexpr Instance instance(Dtype dtype) {
  return {dtype, kDim, kOptions, run<T, kDim, kOptions>, tiles<T, kDim, kOptions>};
}
constexpr Instance kInstances[] = {
    instance<BFloat16, 64, false>(Dtype::bf16),  instance<BFloat16, 64, true>(Dtype::bf16),
    instance<BFloat16, 128, false>(Dtype::bf16), instance<BFloat16, 128, true>(Dtype::bf16),
    instance<BFloat16, 256, false>(Dtype::bf16), instance<BFloat16, 256, true>(Dtype::bf16),
    instance<Half, 64, false>(Dtype::f16),       instance<Half, 64, true>(Dtype::f16),
    instance<Half, 128, false>(Dtype::f16),      instance<Half, 128, true>(Dtype::f16),
    instance<Half, 256, false>(Dtype::f16),      instance<Half, 256, true>(Dtype::f16),
    instance<float, 64, true>(Dtype::f32),       instance<float, 128, true>(Dtype::f32),
    instance<float, 256, true>(Dtype::f32),
};

const Instance& instance_of(const char* op, Dtype dtype, int dim, bool plain) {
  for (const Instance& instance : kInstances) {
    if (instance.dtype == dtype && dim <= instance.dim && instance.options == (dtype == Dtype::f32 || !plain))
      return instance;
  }
  SK_CHECK(false, op, ": no kernel for this dtype and a head dimension of ", dim);
}

}  // namespace

void launch_attention_forward(const AttentionCall& call, const AttentionForwardCuda& forward) {
  const AttentionCuda& c = forward.call;
  instance_of(call.op, call.dtype, std::max(c.head_dim, c.value_dim), c.plain()).run(call, forward);
}

std::string attention_forward_tiles(Dtype dtype, int dim) {
  return instance_of("attention_plan", dtype, dim, true).tiles();
}

}  // namespace seqkern
