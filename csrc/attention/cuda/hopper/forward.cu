// The forward pass of attention for compute capability 9.0, host side: what it serves, tensor maps, the launch.
#include <algorithm>

#include "common/cuda/hopper/launch.h"
#include "forward.cuh"

namespace seqkern {
namespace {

using attention_hopper::Forward;
using attention_hopper::Layout;

// A tensor as TMA maps it. One whose heads or batch entries repeat (stride 0) is mapped with a single one, and the
// kernel does not step along that dimension.
struct Mapped {
  const void* data;
  int64_t sizes[4], strides[4];
  bool steps[2];  // along heads, along batch entries
};
template <class Tensor4>
Mapped mapped(const AttentionCuda& c, const Tensor4& t, int columns, int64_t rows, int heads) {
  const int64_t batch = c.query_starts.data != nullptr ? 1 : c.sequences;
  const bool head = t.head != 0, entry = t.batch != 0;
  return {t.data, {columns, rows, head ? heads : 1, entry ? batch : 1}, {1, t.row, t.head, t.batch}, {head, entry}};
}
struct Tensors {
  Mapped query, key, value, out;
};
Tensors tensors_of(const AttentionForwardCuda& forward) {
  const AttentionCuda& c = forward.call;
  return {mapped(c, c.query, c.head_dim, c.query_rows, c.heads), mapped(c, c.key, c.head_dim, c.key_rows, c.kv_heads),
          mapped(c, c.value, c.value_dim, c.key_rows, c.kv_heads),
          mapped(c, forward.out, c.value_dim, c.query_rows, c.heads)};
}

template <class T, int kDim, bool kOptions = false>
void launch_as(const AttentionCall& call, Forward& p, int multiprocessors) {
  using L = Layout<kDim, kOptions>;
  const AttentionCuda& c = p.forward.call;
  const Tensors tensors = tensors_of(p.forward);
  const auto map = [&](const Mapped& t, int box) {
    return tensor_map(call.op, call.dtype, t.data, t.sizes, t.strides, {64, box, 1, 1});
  };
  p.query = map(tensors.query, L::kRows);
  p.key = map(tensors.key, L::kKeys);
  p.value = map(tensors.value, L::kKeys);
  p.out = map(tensors.out, 64);
  std::copy_n(tensors.query.steps, 2, p.query_steps);
  std::copy_n(tensors.key.steps, 2, p.key_steps);
  std::copy_n(tensors.value.steps, 2, p.value_steps);
  const int64_t bytes = int64_t{c.max_keys} * (c.head_dim + c.value_dim) * 2;
  p.order = attention_order(c.sequences, c.heads, c.heads / c.kv_heads, c.max_queries, L::kRows, bytes,
                            c.high != kAttentionFar, 90);
  const int64_t tiles = p.order.pairs * p.order.blocks, grid = std::min<int64_t>(tiles, multiprocessors);
  p.rounds = static_cast<int>((tiles + grid - 1) / grid);
  const LaunchShape shape{dim3(static_cast<unsigned>(grid)), dim3(L::kThreads), L::kBytes};
  launch(call.op, attention_hopper::attention_forward_hopper<T, kDim, kOptions>, shape, call.stream, p);
}

// Every instance, chosen by the larger of the two head dims and by whether there are options on the scores. At 256
// there are no registers for options.
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
  const int dim = std::max(c.head_dim, c.value_dim);
  for (const Instance& instance : kInstances) {
    if (instance.dtype == dtype && instance.options == !c.plain() && instance.dim >= dim) return &instance;
  }
  return nullptr;
}

}  // namespace

bool hopper_serves_forward(const AttentionCall& call, const AttentionForwardCuda& forward) {
  const AttentionCuda& c = forward.call;
  const int64_t most = int64_t{1} << 31;  // limit of TMA's coordinates
  if (!c.vectors || instance_of(call.dtype, c) == nullptr || !hopper_serves(call.like)) return false;
  if (c.key_rows >= most || c.query_rows >= most) return false;
  const Tensors tensors = tensors_of(forward);
  const auto taken = [&](const Mapped& t) {
    return tensor_map_refusal(call.dtype, t.data, t.sizes, t.strides, {64, 64, 1, 1}) == nullptr;
  };
  return taken(tensors.query) && taken(tensors.key) && taken(tensors.value) && taken(tensors.out);
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
