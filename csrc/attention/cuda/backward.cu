// Launches attention's backward passes on CUDA. `with_instance` lists the instances; `plan_of` chooses a block's tiles.
#include <algorithm>
#include <tuple>

#include "grad_key.cuh"
#include "grad_mask.cuh"
#include "grad_query.cuh"

namespace seqkern {
namespace {

using namespace attention_grad;

// ---- tiles ---------------------------------------------------------------------------------------------------------

struct Plan {
  int warps = 0;
  GradTiles tiles{};
  size_t bytes = 0;
};

// `row_bytes`: bytes of a row in shared memory. `owned`: tiles that stay there. `numbers`: floats for each row of two
// chunks. Threads have up to 255 registers, so a multiprocessor holds eight warps. In order of priority: as many of
// them as shared memory allows, two ring slots, 128 rows a block, long chunks.
Plan plan_of(const CudaDevice& device, int row_bytes, int warp_rows, int step, int owned, int numbers) {
  Plan best;
  std::tuple<int, int, int, int> best_score;
  const size_t reserved = 1024, all = device.shared_per_block + reserved;
  for (int warps : {8, 4, 2, 1}) {
    for (int columns : {64, 32, 16}) {
      if (columns < step || columns > 32 * warps) continue;
      for (int places : {2, 1}) {
        const int rows = warps * warp_rows;
        const size_t bytes = kWalkBytes + static_cast<size_t>(row_bytes) * (owned * rows + 2 * places * columns) +
                             sizeof(float) * 2 * numbers * columns;
        if (bytes > static_cast<size_t>(device.shared_per_block)) continue;
        const int blocks = std::min<int>(8 / warps, static_cast<int>(all / (bytes + reserved)));
        const std::tuple<int, int, int, int> score{blocks * warps, places, -std::abs(rows - 128), columns};
        if (best.warps == 0 || score > best_score) {
          best = {warps, {columns, places}, bytes};
          best_score = score;
        }
      }
    }
  }
  return best;
}

template <class T, int kDim, bool kOptions>
Plan query_plan(const CudaDevice& device) {
  return plan_of(device, Tile<T, kDim>::kRowBytes, 16 * kQueryTiles<T, kDim, kOptions>, kQueryStep<T, kDim, kOptions>,
                 2, 0);
}
template <class T, int kDim, bool kOptions, int kWhat>
Plan key_plan(const CudaDevice& device) {
  return plan_of(device, Tile<T, kDim>::kRowBytes, 16 * kKeyTiles<T, kDim, kOptions>, kKeyStep<T, kDim, kOptions>,
                 kWhat == kValue ? 1 : 2, 2);
}

// ---- passes --------------------------------------------------------------------------------------------------------

struct Launch {
  const AttentionCall& call;
  const AttentionBackwardCuda& p;
  const CudaDevice& device;

  const AttentionCuda& c() const { return p.call; }
  int group() const { return c().heads / c().kv_heads; }
  bool later() const { return last_queries_see_most(c().low, c().high); }
  template <class T>
  int64_t row_bytes() const {
    return static_cast<int64_t>(sizeof(T)) * (c().head_dim + c().value_dim);
  }

  // gaps: the kernel also clears packed rows of no sequence, which needs a grid of at least one block.
  template <class... P>
  void walk(void (*kernel)(P...), int warps, size_t bytes, bool gaps, const AttentionOrder& order,
            P... arguments) const {
    LaunchShape shape{dim3(1), dim3(static_cast<unsigned>(32 * warps)), bytes};
    const int resident = resident_blocks(call.op, reinterpret_cast<const void*>(kernel), shape);
    SK_CHECK(resident > 0, call.op, ": the kernel needs ", bytes, " bytes of shared memory, the device has ",
             device.shared_per_block);
    shape.grid = dim3(attention_grid(order, resident, device.multiprocessors, gaps));
    launch(call.op, kernel, shape, call.stream, arguments...);
  }

  template <class T, int kDim, bool kOptions>
  void grad_query() const {
    constexpr int kRows = 16 * kQueryTiles<T, kDim, kOptions>;
    const Plan plan = query_plan<T, kDim, kOptions>(device);
    const AttentionOrder order = attention_order(c().sequences, c().heads, group(), c().max_queries, plan.warps * kRows,
                                                 c().max_keys * row_bytes<T>(), later(), device.architecture);
    walk(grad_query_kernel<T, kDim, kOptions>, plan.warps, plan.bytes, c().query_starts.data != nullptr, order, p,
         order, plan.tiles);
  }

  template <class T, int kDim, bool kOptions, int kWhat>
  void grad_key() const {
    constexpr int kRows = 16 * kKeyTiles<T, kDim, kOptions>;
    const Plan plan = key_plan<T, kDim, kOptions, kWhat>(device);
    const AttentionOrder order =
        attention_order(c().sequences, c().kv_heads, 1, c().max_keys, plan.warps * kRows,
                        c().max_queries * row_bytes<T>() * group(), !later(), device.architecture);
    walk(grad_key_kernel<T, kDim, kOptions, kWhat>, plan.warps, plan.bytes, c().key_starts.data != nullptr, order, p,
         order, plan.tiles);
  }

  template <class T>
  void grad_mask() const {
    // A mask has no heads: blocks of keys take their place in the order. So the tiles of one row of queries are
    // adjacent, and the row that sees most keys comes first.
    const int masks = p.mask_sequences * p.mask_heads, keys = (c().max_keys + kMaskRows - 1) / kMaskRows;
    const int64_t sharers = std::max<int64_t>(1, int64_t{c().sequences} * c().heads / std::max(1, masks));
    const AttentionOrder order = attention_order(
        masks, keys, keys, c().max_queries, kMaskRows,
        sharers * (int64_t{c().max_queries} + c().max_keys / group()) * row_bytes<T>(), later(), device.architecture);
    walk(grad_mask_kernel<T>, kMostThreads / 32, kWalkBytes + kMaskBytes<T>, false, order, p, order);
  }

  template <class T, int kDim, bool kOptions>
  void all(bool shared_mask) const {
    grad_query<T, kDim, kOptions>();
    if constexpr (kDim <= 128) {
      grad_key<T, kDim, kOptions, kBoth>();
    } else {
      grad_key<T, kDim, kOptions, kValue>();
      grad_key<T, kDim, kOptions, kKey>();
    }
    if constexpr (kOptions) {
      if (shared_mask) grad_mask<T>();
    }
  }
};

// Instances: head dims up to 64, 128 and 256, with and without options on the scores; float32 only with.
template <class T, class F>
void with_instance(int dim, bool options, const F& f) {
  const auto of = [&](auto d) {
    constexpr int kDim = decltype(d)::value;
    if constexpr (sizeof(T) == 2) {
      if (!options) return f.template operator()<T, kDim, false>();
    }
    f.template operator()<T, kDim, true>();
  };
  if (dim <= 64) of(std::integral_constant<int, 64>{});
  else if (dim <= 128) of(std::integral_constant<int, 128>{});
  else of(std::integral_constant<int, 256>{});
}

struct All {
  const Launch& launch;
  bool shared_mask;
  template <class T, int kDim, bool kOptions>
  void operator()() const {
    launch.all<T, kDim, kOptions>(shared_mask);
  }
};

struct Tiles {
  const CudaDevice& device;
  std::string& text;
  template <class T, int kDim, bool kOptions>
  void operator()() const {
    const Plan query = query_plan<T, kDim, kOptions>(device);
    const Plan key = key_plan<T, kDim, kOptions, kDim <= 128 ? kBoth : kKey>(device);
    const int queries = 16 * kQueryTiles<T, kDim, kOptions> * query.warps;
    const int keys = 16 * kKeyTiles<T, kDim, kOptions> * key.warps;
    text = std::to_string(queries) + " queries by " + std::to_string(query.tiles.columns) + " keys, then " +
           std::to_string(keys) + " keys by " + std::to_string(key.tiles.columns) + " queries";
  }
};

template <class F>
void with_type(const char* op, Dtype dtype, int dim, bool options, const F& f) {
  switch (dtype) {
    case Dtype::f32: return with_instance<float>(dim, options, f);
    case Dtype::bf16: return with_instance<BFloat16>(dim, options, f);
    case Dtype::f16: return with_instance<Half>(dim, options, f);
    default: SK_CHECK(false, op, ": no kernel for this dtype");
  }
}

}  // namespace

void launch_attention_backward(const AttentionCall& call, const AttentionBackwardCuda& backward) {
  const AttentionCuda& c = backward.call;
  const bool shared_mask =
      backward.grad_mask != nullptr && (backward.mask_sequences != c.sequences || backward.mask_heads != c.heads);
  const bool plain = c.plain() && backward.grad_distance == nullptr;
  Launch launch{call, backward, cuda_device(call.like)};
  const All all{launch, shared_mask};
  with_type(call.op, call.dtype, std::max(c.head_dim, c.value_dim), !plain, all);
}

std::string attention_backward_tiles(const Tensor& like, Dtype dtype, int dim) {
  std::string text;
  with_type("attention_plan", dtype, dim, false, Tiles{cuda_device(like), text});
  return text;
}

}  // namespace seqkern
