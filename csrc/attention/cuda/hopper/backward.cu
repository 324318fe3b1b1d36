// The backward pass of attention on Hopper, host side: what it serves, workspaces, tensor maps, launches.
#include <algorithm>

#include "attention/cuda/launch.h"
#include "backward.cuh"
#include "backward_wide.cuh"
#include "common/cuda/hopper/launch.h"

namespace seqkern {
namespace {

using namespace attention_backward_hopper;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A float32 or 32-bit integer workspace, allocated by torch.
Tensor workspace(const Tensor& like, int64_t numbers) {
  return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(&numbers, 1), ScalarType::Float);
}

struct Sizes {
  int64_t dims[4], strides[4];
};
Sizes sizes_of(const AttentionTensor& t, int64_t columns, int64_t rows, int64_t heads, const AttentionCuda& c) {
  const int64_t batch = c.query_starts.data != nullptr ? 1 : c.sequences;
  return {{columns, rows, heads, batch}, {1, t.row, t.head, t.batch}};
}
Sizes queries(const AttentionTensor& t, int columns, const AttentionCuda& c) {
  return sizes_of(t, columns, c.query_rows, c.heads, c);
}
Sizes keys(const AttentionTensor& t, int columns, const AttentionCuda& c) {
  return sizes_of(t, columns, c.key_rows, c.kv_heads, c);
}
TensorMap map_of(const AttentionCall& call, const AttentionTensor& t, const Sizes& sizes, int rows) {
  return tensor_map(call.op, call.dtype, t.data, sizes.dims, sizes.strides, {64, rows, 1, 1});
}

Maps maps_of(const AttentionCall& call, const AttentionBackwardCuda& b, int query_rows, int key_rows) {
  const AttentionCuda& c = b.call;
  return {map_of(call, c.query, queries(c.query, c.head_dim, c), query_rows),
          map_of(call, c.key, keys(c.key, c.head_dim, c), key_rows),
          map_of(call, c.value, keys(c.value, c.value_dim, c), key_rows),
          map_of(call, b.grad_out, queries(b.grad_out, c.value_dim, c), query_rows)};
}

Backward arguments(const AttentionBackwardCuda& b, int rows) {
  Backward p{};
  p.call = b.call;
  p.grad_out = b.grad_out;
  p.out = b.out;
  p.lse = b.lse;
  p.grad_lse = b.grad_lse;
  p.grad_query = b.grad_query;
  p.grad_key = b.grad_key;
  p.grad_value = b.grad_value;
  const AttentionCuda& c = b.call;
  p.slots = c.query_starts.data != nullptr ? c.query_rows / rows + c.sequences
                                           : int64_t{c.sequences} * ceil_div(c.max_queries, rows);
  return p;
}
// The grid over tiles of queries of all heads and sequences.
LaunchShape plain_shape(const AttentionCuda& c, int rows) {
  const int64_t tiles = ceil_div(c.max_queries, rows) * c.heads * c.sequences;
  return {dim3(static_cast<unsigned>(tiles)), dim3(kPlainThreads)};
}
template <class T>
void fill_gaps(const AttentionCall& call, const Backward& p) {
  if (p.call.query_starts.data == nullptr) return;
  const LaunchShape shape{dim3(static_cast<unsigned>(2 * cuda_device(call.like).multiprocessors)), dim3(kPlainThreads)};
  launch(call.op, gaps_kernel<T>, shape, call.stream, p);
}

template <class T, int kDim>
struct Launcher {
  static void run(const AttentionCall& call, const AttentionBackwardCuda& b) {
    using L = Layout<kDim>;
    const AttentionCuda& c = b.call;
    Backward p = arguments(b, L::kQueries);
    const int64_t tiles = p.slots * c.heads;
    Tensor statistics = workspace(call.like, tiles * 2 * L::kQueries);
    Tensor sums = workspace(call.like, tiles * L::kSumFloats), turns = workspace(call.like, tiles + 1);
    p.statistics = static_cast<float*>(statistics.mutable_data_ptr());
    p.sums = static_cast<float*>(sums.mutable_data_ptr());
    p.turns = static_cast<uint32_t*>(turns.mutable_data_ptr());
    p.ticket = p.turns + tiles;
    const int group = c.heads / c.kv_heads;
    const int64_t bytes = int64_t{c.max_queries} * group * (2 * (c.head_dim + c.value_dim) + 4 * kDim);
    p.order = attention_order(c.sequences, c.kv_heads, 1, c.max_keys, L::kKeys, bytes, true, 90);
    const int64_t blocks = p.order.pairs * p.order.blocks;
    LaunchShape shape{dim3(static_cast<unsigned>(blocks)), dim3(L::kThreads), static_cast<size_t>(L::kBytes)};
    p.apart = c.low == -kAttentionFar && c.high == kAttentionFar && p.order.blocks > 1 &&
              blocks <= cuda_device(call.like).multiprocessors;
    shape.all_resident = p.apart;  // blocks wait for each other
    launch(call.op, statistics_kernel<T, kDim, L::kQueries>, plain_shape(c, L::kQueries), call.stream, p);
    launch(call.op, backward_kernel<T, kDim>, shape, call.stream, maps_of(call, b, L::kQueries, L::kKeys), p);
    launch(call.op, convert_kernel<T, kDim>, plain_shape(c, L::kQueries), call.stream, p);
    fill_gaps<T>(call, p);
  }
};

// Head dimensions above 128: two kernels, each of which owns what it writes.
template <class T>
struct Launcher<T, 256> {
  static void run(const AttentionCall& call, const AttentionBackwardCuda& b) {
    constexpr int kRows = WideKeys::kQueries;
    const AttentionCuda& c = b.call;
    Backward p = arguments(b, kRows);
    Tensor statistics = workspace(call.like, p.slots * c.heads * 2 * kRows);
    p.statistics = static_cast<float*>(statistics.mutable_data_ptr());
    const int group = c.heads / c.kv_heads, columns = c.head_dim + c.value_dim;
    const Maps maps = maps_of(call, b, 64, 64);

    launch(call.op, statistics_kernel<T, 256, kRows>, plain_shape(c, kRows), call.stream, p);
    const auto shape = [&](int bytes) {
      return LaunchShape{dim3(static_cast<unsigned>(p.order.pairs * p.order.blocks)), dim3(kWideThreads),
                         static_cast<size_t>(bytes)};
    };
    // Under a causal mask the first keys and the last queries are the longest tiles.
    p.order = attention_order(c.sequences, c.kv_heads, 1, c.max_keys, WideKeys::kKeys,
                              int64_t{2} * c.max_queries * group * columns, false, 90);
    launch(call.op, wide_keys_kernel<T>, shape(WideKeys::kBytes), call.stream, maps, p);
    p.order = attention_order(c.sequences, c.heads, group, c.max_queries, WideQueries::kQueries,
                              int64_t{2} * c.max_keys * columns, true, 90);
    launch(call.op, wide_queries_kernel<T>, shape(WideQueries::kBytes), call.stream, maps, p);
    fill_gaps<T>(call, p);
  }
};

// Every instance.
using Run = void (*)(const AttentionCall&, const AttentionBackwardCuda&);
struct Instance {
  Dtype dtype;
  int dim;
  Run run;
};
constexpr Instance kInstances[] = {
    {Dtype::bf16, 64, Launcher<BFloat16, 64>::run},   {Dtype::f16, 64, Launcher<Half, 64>::run},
    {Dtype::bf16, 128, Launcher<BFloat16, 128>::run}, {Dtype::f16, 128, Launcher<Half, 128>::run},
    {Dtype::bf16, 256, Launcher<BFloat16, 256>::run}, {Dtype::f16, 256, Launcher<Half, 256>::run},
};
const Instance* instance_of(const AttentionCall& call, const AttentionCuda& c) {
  for (const Instance& instance : kInstances) {
    if (instance.dtype == call.dtype && std::max(c.head_dim, c.value_dim) <= instance.dim) return &instance;
  }
  return nullptr;
}

constexpr int64_t kMostRows = int64_t{1} << 30, kMostBlocks = int64_t{1} << 30;

}  // namespace

bool hopper_serves_backward(const AttentionCall& call, const AttentionBackwardCuda& b) {
  const AttentionCuda& c = b.call;
  if (!c.plain() || b.grad_mask != nullptr || b.grad_distance != nullptr || !c.vectors) return false;
  if (instance_of(call, c) == nullptr || !hopper_serves(call.like)) return false;
  if (c.query_rows > kMostRows || c.key_rows > kMostRows) return false;
  const int64_t pairs = int64_t{c.sequences} * c.heads;
  if (pairs * ceil_div(std::max(c.max_queries, c.max_keys), 64) > kMostBlocks) return false;
  const auto mapped = [&](const AttentionTensor& t, const Sizes& sizes) {
    return tensor_map_refusal(call.dtype, t.data, sizes.dims, sizes.strides, {64, 64, 1, 1}) == nullptr;
  };
  return mapped(c.query, queries(c.query, c.head_dim, c)) && mapped(c.key, keys(c.key, c.head_dim, c)) &&
         mapped(c.value, keys(c.value, c.value_dim, c)) && mapped(b.grad_out, queries(b.grad_out, c.value_dim, c));
}

void launch_attention_backward_hopper(const AttentionCall& call, const AttentionBackwardCuda& b) {
  const Instance* instance = instance_of(call, b.call);
  SK_CHECK(instance != nullptr, call.op, ": no Hopper kernel for these head dimensions");
  instance->run(call, b);
}

}  // namespace seqkern
