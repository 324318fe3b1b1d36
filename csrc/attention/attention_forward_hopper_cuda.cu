// The forward pass of attention for compute capability 9.0, host side: which calls it serves, tensor maps, the launch.
#include <algorithm>

#include "attention_forward_hopper_cuda.cuh"
#include "hopper_launch.h"

namespace seqkern {
namespace {

using attention_hopper::Forward;
using attention_hopper::Layout;

template <class T, int kDim, bool kOptions = false>
void launch_as(const AttentionCall& call, Forward& p, int multiprocessors) {
  using L = Layout<kDim, kOptions>;
  const AttentionCuda& c = p.forward.call;
  const bool packed = c.query_starts.data != nullptr;
  const int64_t batch = packed ? 1 : c.sequences;
  // A tensor that repeats its heads or batch entries (a stride of 0) is told of as if it had one.
  const auto map = [&](const auto& t, int columns, int64_t rows, int heads, int box, bool* steps) {
    steps[0] = t.head != 0;
    steps[1] = t.batch != 0;
    const int64_t sizes[4] = {columns, rows, steps[0] ? heads : 1, steps[1] ? batch : 1};
    const int64_t strides[4] = {1, t.row, t.head, t.batch};
    return tensor_map(call.op, call.dtype, t.data, sizes, strides, {64, box, 1, 1});
  };
  bool steps[2];
  p.query = map(c.query, c.head_dim, c.query_rows, c.heads, L::kRows, p.query_steps);
  p.key = map(c.key, c.head_dim, c.key_rows, c.kv_heads, L::kKeys, p.key_steps);
  p.value = map(c.value, c.value_dim, c.key_rows, c.kv_heads, L::kKeys, p.value_steps);
  p.out = map(p.forward.out, c.value_dim, c.query_rows, c.heads, 64, steps);
  const int64_t bytes = int64_t{c.max_keys} * (c.head_dim + c.value_dim) * 2;
  p.order = attention_order(c.sequences, c.heads, c.heads / c.kv_heads, c.max_queries, L::kRows, bytes,
                            c.high != kAttentionFar, 90);
  const int64_t tiles = p.order.pairs * p.order.blocks, grid = std::min<int64_t>(tiles, multiprocessors);
  p.rounds = static_cast<int>((tiles + grid - 1) / grid);
  const LaunchShape shape{dim3(static_cast<unsigned>(grid)), dim3(L::kThreads), L::kBytes};
  launch(call.op, attention_hopper::attention_forward_hopper<T, kDim, kOptions>, shape, call.stream, p);
}

// Every instance there is: the larger of the two head dims decides, and whether scores are more than scale q.k. At 256
// there are no registers for that.
struct Instance {
  Dtype dtype;
  int dim;
  bool options;
  void (*launch)(const AttentionCall&, Forward&, int);
};
constexpr Instance kInstances[] = {
    {Dtype::bf16, 64, false, launch_as<BFloat16, 64>},   {Dtype::bf16, 64, true, launch_as<BFloat16, 64, true>},
    {Dtype::bf16, 128, false, launch_as<BFloat16, 128>}, {Dtype::bf16, 128, true, launch_as<BFloat16, 128, true>},
    {Dtype::bf16, 256, false, launch_as<BFloat16, 256>}, {Dtype::f16, 64, false, launch_as<Half, 64>},
    {Dtype::f16, 64, true, launch_as<Half, 64, true>},   {Dtype::f16, 128, false, launch_as<Half, 128>},
    {Dtype::f16, 128, true, launch_as<Half, 128, true>}, {Dtype::f16, 256, false, launch_as<Half, 256>},
};

const Instance* instance_of(Dtype dtype, const AttentionCuda& c) {
  const bool options =
      c.softcap != 0 || c.slopes != nullptr || c.mask != nullptr || c.seed != nullptr || !(c.scale > 0);
  for (const Instance& instance : kInstances) {
    if (instance.dtype == dtype && instance.options == options && instance.dim >= std::max(c.head_dim, c.value_dim)) {
      return &instance;
    }
  }
  return nullptr;
}

}  // namespace

bool hopper_serves_forward(const AttentionCall& call, const AttentionForwardCuda& forward) {
  const AttentionCuda& c = forward.call;
  const int64_t most = int64_t{1} << 31;  // TMA's coordinates
  return c.vectors && instance_of(call.dtype, c) != nullptr && c.key_rows > 0 && c.key_rows < most &&
         c.query_rows < most && hopper_serves(call.like);
}

void launch_attention_forward_hopper(const AttentionCall& call, const AttentionForwardCuda& forward) {
  const Instance* instance = instance_of(call.dtype, forward.call);
  SK_CHECK(instance != nullptr, call.op, ": the Hopper kernels have no instance for this call");
  Forward p{};
  p.forward = forward;
  p.scale = forward.call.scale * kLog2e;
  instance->launch(call, p, cuda_device(call.like).multiprocessors);
}

}  // namespace seqkern
